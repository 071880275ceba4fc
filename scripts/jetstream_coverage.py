#!/usr/bin/env python3
"""Print what the documents on JetStream ask for, where it is here, and which tests run it, as Markdown.

The items are in tests/data/jetstream-coverage.yaml, the tests are found by their markers `@pytest.mark.covers(...)`
without running them.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
ITEMS = ROOT / "tests" / "data" / "jetstream-coverage.yaml"

HEAD = (
    "# What is covered of JetStream\n\n"
    "Each line of the documents that this project follows, in short: what it asks for, where that is here, and the "
    "tests that run it.\n"
)


def items() -> dict[str, dict[str, str]]:
    """Return what each number, such as 002-52, says, and where it is here."""
    documents: dict[str, Any] = yaml.safe_load(ITEMS.read_text())
    return {
        f"{document}-{number}": item
        for document, inside in documents.items()
        for number, item in inside["items"].items()
    }


@cache
def tests() -> dict[str, list[str]]:
    """Return the tests that cover each number, as `tests/ops/test_inventory.py::test_gaps_are_shown_as_runs`."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name, number in _covered(ast.parse(path.read_text())):
            found[number].append(f"{path.relative_to(ROOT)}::{name}")
    return found


def _covered(tree: ast.Module | ast.ClassDef, within: str = "") -> Iterator[tuple[str, str]]:
    """Yield each marked test or class of tests, once for each of its numbers."""
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        name = f"{within}{node.name}"
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.covers":
                yield from ((name, ast.literal_eval(number)) for number in decorator.args)
        if isinstance(node, ast.ClassDef):
            yield from _covered(node, f"{name}::")


def page() -> str:
    """Return what is printed."""
    documents: dict[str, Any] = yaml.safe_load(ITEMS.read_text())
    covered = tests()
    lines = [HEAD]
    for document, inside in documents.items():
        lines += [f"## {document}: {inside['title']}", "", "| | what | where | tests |", "|---|---|---|---|"]
        for number, item in inside["items"].items():
            named = "<br>".join(_linked(test) for test in covered[f"{document}-{number}"])
            lines.append(f"| {document}-{number} | {item['says']} | {item['in']} | {named} |")
        lines.append("")
    return "\n".join(lines)


def _linked(test: str) -> str:
    path, _, name = test.partition("::")
    return f"[`{name}`]({path})"


if __name__ == "__main__":
    print(page())
