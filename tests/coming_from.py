"""The applications of docs/coming-from, and what each of them makes of the same three fields."""

from __future__ import annotations

from pathlib import Path

__all__ = ["CATALOGUE", "FAILED", "FIELDS", "INDEXED", "PAGES", "PYAVISO", "applications"]

DIRECTORY = Path(__file__).parents[1] / "docs" / "coming-from"
PYAVISO = DIRECTORY / "pyaviso.md"
"""Its application is another one, because it is given what an aviso-server stores."""
PAGES = sorted({*DIRECTORY.glob("*.md")} - {PYAVISO})
FIELDS = {"6": 3, "12": 4, "18": 0}
"""The size of each step's field; it lies at `/data/<step>`."""
CATALOGUE = {"6": "/data/6", "12": "/data/12"}
INDEXED = ["/data/6", "/data/12"]
FAILED = "step 18 is still being written"


def applications(page: Path) -> tuple[str, str]:
    """Return the source of the application with the framework of the page, and of ours."""
    theirs, ours = (block.split("```")[0] for block in page.read_text().split("```python\n")[1:3])
    return theirs, ours
