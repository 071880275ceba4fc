"""Writes the reference of the command line, from the commands themselves."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer

from aviso_workers import cli
from aviso_workers.cli import PANELS

HEAD = """# Command-line reference

Every command with its arguments and options, written from the code. `aviso-workers COMMAND --help` prints the same.

Every command ends with 0 when it is done, with 1 when it failed, with 2 when it refused to begin (usage, configuration,
bad input), and with 3 when it is done and not proven to be whole. With `--json`, where a command has it, it prints one
document for programs.
"""


def page() -> str:
    """Return the page: one section for each panel of the help, and in it one for each command."""
    root = typer.main.get_command(cli.command)
    context = root.context_class(root, info_name="aviso-workers", **root.context_settings)
    written = [HEAD]
    for title, names in PANELS.items():
        written.append(f"## {title}\n")
        for name in names:
            written += _command(root.commands[name], name, context)  # type: ignore[attr-defined]
    return "\n".join(written)


def _command(command: Any, name: str, above: Any) -> Iterator[str]:
    if command.hidden:
        return
    context = command.context_class(command, info_name=name, parent=above, **command.context_settings)
    yield f"### {context.command_path}\n"
    yield from _paragraphs(command.help or "")
    below = getattr(command, "commands", {})
    if not below:
        yield f"```text\n{context.command_path} {' '.join(command.collect_usage_pieces(context))}\n```\n"
        yield from _table(command, context)
    for each in below:
        yield from _command(below[each], each, context)


def _paragraphs(help_: str) -> Iterator[str]:
    """Yield the paragraphs of a help text, the example as code."""
    for paragraph in inspect.cleandoc(help_).split("\n\n"):
        text = " ".join(paragraph.split())
        if example := re.fullmatch(r"Example: (.+)", text):
            yield f"```bash\n{example[1]}\n```\n"
        else:
            yield f"{_plain(text)}\n"


def _table(command: Any, context: Any) -> Iterator[str]:
    parameters = [each for each in command.get_params(context) if each.name != "help"]
    rows = [record for each in parameters if (record := each.get_help_record(context))]
    if rows:
        yield "| argument or option | meaning |\n|---|---|"
        yield from (f"| `{name.replace('|', chr(92) + '|')}` | {_plain(meaning)} |" for name, meaning in rows)
        yield ""


def _plain(text: str) -> str:
    """Return a text of a terminal as Markdown that shows the same."""
    return re.sub(r"([*<|\[\]])", r"\\\1", text)
