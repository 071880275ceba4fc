"""Writes docs/modules.md, what each module is for, from the first sentences of the modules.

`PYTHONPATH=scripts .venv/bin/python -m _docs.modules` writes it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

PROJECT = Path(__file__).parents[2]
PAGE = PROJECT / "docs" / "modules.md"
BEGINNING = """# Modules

What each module of `aviso_workers` is for, in its own first words. [Architecture](architecture.md) says how the \
packages stand to each other, and which modules to read in which order.
"""


def page() -> str:
    """Return the text of the page."""
    parts = [BEGINNING]
    for package, modules in groupby(_modules(), key=lambda path: path.parent):
        rows = [f"| `{path.stem}` | {_first_words(path)} |" for path in modules if path.name != "__init__.py"]
        if rows:
            name = package.relative_to(PROJECT)
            about = _first_words(package / "__init__.py")
            parts.append("\n".join([f"## {name}", "", about, "", "| module | contents |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def _modules() -> Iterator[Path]:
    found = (path for path in (PROJECT / "aviso_workers").rglob("*.py") if "template" not in path.parts)
    return iter(sorted(found, key=lambda path: (path.parent, path.name)))


def _first_words(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
