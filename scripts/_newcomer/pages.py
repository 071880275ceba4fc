"""What a page tells its reader to type, and what comes of it: docs/tutorial.md, and the README that `new` writes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from msgspec import Struct

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
HANDLED = re.compile(r"The (?:agent prints|worker logs) `([^`]+)`")
FILES = {"aviso.yaml": "notification_backend:", "fields.py": "@app.agent(", "test_fields.py": "def test_"}
"""The files of the tutorial, each with what its block of code has."""


class Page(Struct, frozen=True, kw_only=True):
    """The commands of a page, in the order in which its reader needs them."""

    install: list[str] | None
    """How the project's own packages are installed, where the page has such a command."""
    check: list[str]
    dev: list[str]
    notify: list[str]
    handled: str
    """What the agent prints of the notification."""


def read(text: str) -> Page:
    """Read a page. Raises `ValueError` where it lacks a command."""
    lines = [line for kind, block in BLOCK.findall(text) if kind == "bash" for line in block.splitlines()]
    handled = HANDLED.search(text)
    if handled is None:
        raise ValueError("the page does not say what the agent prints")
    return Page(
        install=_command("pip install --editable", lines),
        check=_needed("aviso-workers check", lines),
        dev=_needed("aviso-workers dev", lines),
        notify=_needed("aviso-workers notify", lines),
        handled=handled[1],
    )


def write_files(text: str, directory: Path) -> None:
    """Write the files that the tutorial has its reader write. Raises `ValueError` where it lacks one."""
    blocks = [block for _, block in BLOCK.findall(text)]
    for name, mark in FILES.items():
        block = next((block for block in blocks if mark in block), None)
        if block is None:
            raise ValueError(f"the page has no block with {mark!r}, which {name} is made of")
        directory.joinpath(name).write_text(block)


def _command(beginning: str, lines: list[str]) -> list[str] | None:
    return next((shlex.split(line, comments=True) for line in lines if line.startswith(beginning)), None)


def _needed(beginning: str, lines: list[str]) -> list[str]:
    command = _command(beginning, lines)
    if command is None:
        raise ValueError(f"the page has no command that begins with {beginning!r}")
    return command
