"""What `--help` says, kept in tests/data/help.txt, which `python -m tests.cli.command_line` prints anew."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from aviso_workers.cli import COMMANDS
from tests.cli import command_line

KEPT = Path(__file__).parents[1] / "data" / "help.txt"


def test_the_help_of_every_command_is_the_one_that_was_read_and_kept() -> None:
    assert command_line.helps().splitlines() == KEPT.read_text().splitlines()


def test_no_line_of_it_is_wider_than_a_terminal() -> None:
    assert [line for line in command_line.helps().splitlines() if len(line) > command_line.WIDTH] == []


def test_every_value_has_a_name_and_every_argument_a_sentence() -> None:
    lines = command_line.helps().splitlines()
    assert [line for line in lines if "<str>" in line or "<path>" in line] == []
    assert [line for line in lines if re.fullmatch(r"  [A-Z|@:=.]+( +\[required\])?", line)] == []


def test_every_command_is_in_one_section_with_a_summary_that_is_whole() -> None:
    first, *_ = command_line.helps().split("\n\nUsage: ")
    listed = [line.split()[0] for line in first.splitlines() if line.startswith("  ") and line[2] not in " -W"]
    assert sorted(listed) == sorted(COMMANDS)
    assert "..." not in first.partition("Options:")[2]


@pytest.mark.parametrize(
    "context",
    [each for each in command_line.contexts() if not hasattr(each.command, "commands")],
    ids=lambda context: context.command_path,
)
def test_every_command_has_an_example_that_it_takes(context: Any) -> None:
    *_, example = inspect.cleandoc(context.command.help).split("\n\n")
    mark, _, line = " ".join(example.split()).partition(": ")
    assert mark == "Example", context.command.help
    path = context.command_path.split()
    words = shlex.split(line, comments=False)
    assert words[: len(path)] == path
    arguments = words[len(path) :]
    context.command.parse_args(context, arguments[: arguments.index(">")] if ">" in arguments else arguments)


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_no_option_takes_what_is_no_finite_number(number: str) -> None:
    refused = []
    for context in command_line.contexts():
        for option in context.command.params:
            if option.type.name.startswith("float"):
                with pytest.raises(typer.BadParameter, match="finite"):
                    option.process_value(context, number)
                refused.append(f"{context.command_path} {option.opts[0]}")
    assert {"aviso-workers doctor --seconds", "aviso-workers mirror promote --patience"} < set(refused)
