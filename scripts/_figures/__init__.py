"""Figures of the package's size and shape, as docs/architecture.md has them: `scripts/figures` prints them, and
`tests/test_budgets.py` holds them.

What cannot be read from the files, such as the minutes of the tests, is not here.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from _figures import code_lines, public_tests

__all__ = ["FEATURES", "PROJECT", "figures", "figures_of_tests", "reading_list"]

PROJECT = Path(__file__).parents[2]
PACKAGE = PROJECT / "aviso_workers"
TOOLS = ("cli", "console", "ops", "projects", "server", "spark")
"""The parts that are no core: nothing of the core imports them."""
FEATURES = {
    "tables": ("declare.tables", "features.tables", "state.table_records"),
    "windows": ("declare.windows", "features.windows", "state.window_records"),
    "timers": ("declare.timers", "features.timers", "state.timer_records"),
    "limits": ("declare.limits", "features.limits"),
    "delayed delivery": ("features.delayed_delivery", "state.delayed_messages"),
    "singletons": ("engine.singletons",),
    "dead letters": ("engine.dead_letter_store", "ops.dead_letters", "state.dead_letter_records"),
    "order": ("engine.key_orders",),
}
"""The modules of each feature."""
PLAIN_WORKER = "import aviso_workers.worker.process, aviso_workers.app, aviso_workers.backends.jetstream"
"""Imports what a worker of one plain agent loads."""


def figures() -> dict[str, int]:
    """Return the figures of the package and the pages, by name."""
    sources = _sources()
    code = {path: code_lines.count(source) for path, source in sources.items()}
    loaded = _loaded(PLAIN_WORKER)
    reading = reading_list()
    parts = Counter[str]()
    for path, count in code.items():
        parts[_part(path)] += count
    found = {f"code of {part}": count for part, count in sorted(parts.items())}
    found |= {
        "modules": len(sources),
        "modules that a plain worker loads": len(loaded),
        "code that a plain worker loads": sum(code[path] for path in loaded),
        "modules of the reading list": len(reading),
        "code of the reading list": sum(code[path] for path in reading),
    }
    found |= {f"files that use {feature}": len(_using(modules)) for feature, modules in FEATURES.items()}
    found["class names that stand twice"] = len(_class_names_twice())
    found["functions above a complexity of 10"] = _complex()
    found["words of README and docs"] = sum(len(page.read_text().split()) for page in _pages())
    return found


def _part(path: Path) -> str:
    """Return the part that a module belongs to: one that a user can leave out, or the core."""
    if path.parts[0] != "aviso_workers":
        return path.parts[0]
    return path.parts[1] if path.parts[1] in TOOLS else "the core"


def figures_of_tests() -> dict[str, int]:
    """Return how many tests there are, and how many of them touch public names only, which takes ten seconds."""
    touched = public_tests.touched_by_test()
    return {
        "tests": len(touched),
        "tests that touch public names only": sum(not names for names in touched.values()),
    }


def reading_list() -> list[Path]:
    """Return the modules of docs/architecture.md's reading list, in its order."""
    page = (PROJECT / "docs" / "architecture.md").read_text()
    part = page.partition("## Reading list\n")[2].partition("\n## ")[0]
    return [Path("aviso_workers") / name for name in re.findall(r"^\d+\. `([\w/]+\.py)`", part, re.MULTILINE)]


@cache
def _sources() -> dict[Path, str]:
    found = [*PACKAGE.rglob("*.py"), *(PROJECT / "agents").rglob("*.py")]
    return {path.relative_to(PROJECT): path.read_text() for path in sorted(found) if "template" not in path.parts}


@cache
def _trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(source) for path, source in _sources().items()}


def _loaded(statement: str) -> list[Path]:
    """Return the modules of the package that a process has after a statement."""
    names = "m.__file__ for n, m in sys.modules.items() if n.startswith('aviso_workers')"
    code = f"import sys\n{statement}\nprint(*[{names}])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PROJECT)
    return [path for each in ran.stdout.split() if (path := Path(each).relative_to(PROJECT)) in _sources()]


def _using(modules: tuple[str, ...]) -> list[Path]:
    """Return the files that import one of these modules, and are none of them."""
    wanted = {f"aviso_workers.{module}" for module in modules}
    own = {Path(f"{name.replace('.', '/')}.py") for name in wanted}
    return [path for path, names in _imports().items() if path not in own and wanted & names]


@cache
def _imports() -> dict[Path, set[str]]:
    """Return the names that each module imports."""
    return {path: {*_imported(tree)} for path, tree in _trees().items()}


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)


def _class_names_twice() -> list[str]:
    names = Counter(
        node.name for tree in _trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )
    return [name for name, count in names.items() if count > 1]


def _complex() -> int:
    rules = [
        "--select",
        "C901",
        "--config",
        "lint.mccabe.max-complexity=10",
        "--output-format",
        "concise",
        "--exit-zero",
    ]
    command = ["ruff", "check", "--isolated", *rules, "aviso_workers", "agents"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PROJECT)
    return ran.stdout.count(" C901 ")


def _pages() -> list[Path]:
    return [PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md"))]
