"""Writes the reference of the doctor's checks in docs/operations/checks.md, from what the checks declare.

`PYTHONPATH=scripts .venv/bin/python -m _docs.checks` writes it. It is a page of docs/, and is not
made with the site as the other references are, because reports and errors name its headings. It leaves out why a check
matters and its cure, which the doctor prints with each finding.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

from aviso_workers.ops.doctor.checks import CHECKS
from aviso_workers.ops.doctor.facts import Need
from aviso_workers.ops.doctor.judgements import Check

PAGE = Path(__file__).parents[2] / "docs" / "operations" / "checks.md"
BEGIN = "\n## JS001\n"
OPTIONS: dict[Need, str] = {"agents": "--app", "backups": "--backups", "monitoring": "--monitor"}
"""The options that give a check what it needs."""


def reference() -> str:
    """Return a section for each check, in the order of their codes."""
    return "\n\n".join(paragraph for check in CHECKS for paragraph in _section(check))


def with_reference(page: str) -> str:
    """Return a page with the reference as the checks declare it."""
    return f"{page[: page.index(BEGIN)]}\n{reference()}\n"


def _section(check: Check) -> Iterator[str]:
    yield f"## {check.code}"
    first, *others = inspect.cleandoc(check.judge.__doc__ or "").split("\n\n")
    yield " ".join(filter(None, (f"**{check.title}.**", _when(check), _line(first))))
    yield from map(_line, others)


def _when(check: Check) -> str:
    options = ["--production"] if check.production else []
    options += [OPTIONS[need] for need in check.needs if need in OPTIONS]
    needed = f", with {' and '.join(f'`{option}`' for option in options)}" if options else ""
    return f"{check.severity.name}{needed}."


def _line(paragraph: str) -> str:
    """Return a paragraph as one line; the rows of a table and the items of a list have one each."""
    lines: list[str] = []
    for line in paragraph.split("\n"):
        if lines and not line.startswith(("|", "- ")):
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(with_reference(PAGE.read_text()))
