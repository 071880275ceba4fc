"""Commands that the package prints to be copied: a name in them may be anybody's, and stands in quotes."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import typer
import yaml
from msgspec import structs

import aviso_workers
from aviso_workers import cli
from aviso_workers.ops.doctor.checks import CHECKS
from aviso_workers.ops.doctor.judgements import Finding, judge

PACKAGE = Path(aviso_workers.__file__).parent
RULES = PACKAGE.parent / "config" / "prometheus-rules.yml"
COMMAND = re.compile(r"(?:aviso-workers|nats) [a-z][^`;]*|^\s+--[a-z].*")
"""A command until its closing backtick or the next part of a sentence; or options that are added to one."""
HOSTILE = "x$(touch${IFS}RUN)"


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the f-strings of a module, each with its line; `{}` stands for a name without quotes, `NAME` for others."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, _text(node)


def _text(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    if isinstance(part, ast.JoinedStr):
        return "".join(map(_text, part.values))
    assert isinstance(part, ast.FormattedValue)
    source = ast.unparse(part.value)
    return "NAME" if source.isupper() or "quoted" in source else "{}"


def test_no_name_is_in_a_command_without_quotes() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {command}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, text in texts(path)
        for command in COMMAND.findall(text)
        if "{}" in command
    ]
    assert found == []


def test_cures_of_the_doctor_quote_names() -> None:
    finding = Finding(found="anything", stream=HOSTILE, consumer=f"{HOSTILE}__{HOSTILE}", place=HOSTILE)
    config = SimpleNamespace(doctor=SimpleNamespace(accepted=()))
    facts = cast(Any, SimpleNamespace(event_streams=(), unknown={}, config=config))
    always = [structs.replace(check, judge=lambda _: iter((finding,)), each=None, production=False) for check in CHECKS]
    cures = [result.findings[0].cure for result in judge(always, facts)]
    named = [command for cure in cures for command in COMMAND.findall(cure) if HOSTILE in command]
    assert named
    assert [command for command in named if HOSTILE in re.sub("'[^']*'", "", command)] == []


def cures() -> Iterator[tuple[str, str]]:
    """Yield the commands in cures of the doctor, and of the judgement of agents, each with its module."""
    for path in (*sorted((PACKAGE / "ops" / "doctor" / "checks").glob("*.py")), PACKAGE / "ops" / "health.py"):
        tree = ast.parse(path.read_text())
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            text = _text(node) if isinstance(node, ast.JoinedStr) else getattr(node, "value", None)
            if isinstance(text, str) and id(node) not in prose:
                yield from ((path.name, command) for command in re.findall("`aviso-workers ([^`]*)`", text))


def test_each_command_of_a_cure_parses() -> None:
    found = [*cures()]
    assert len(found) > 40
    assert [f"{name}: {command}: {why}" for name, command in found if (why := mistake(command))] == []


def mistake(text: str) -> str:
    """Why the command line does not take a command; empty where it does."""
    command, words = typer.main.get_command(cli.command), shlex.split(re.sub(r"\{+\w*\}+", "NAME", text))
    settings = command.context_settings  # a command keeps the help option with which it is parsed first
    while commands := getattr(command, "commands", {}):
        if not words or words[0] not in commands:
            return "there is no such command"
        command = commands[words.pop(0)]
    try:
        given, others, _ = command.make_parser(command.context_class(command, **settings)).parse_args(words)
    except Exception as error:  # whatever the parser says
        return str(error)
    missing = [
        parameter.name for parameter in command.params if parameter.required and not given.get(parameter.name or "")
    ]
    needs_app = given.get("role") == "worker" and not given.get("app")
    return f"it lacks {missing}" if missing else f"it has {others}" if others else "it lacks --app" * needs_app


def test_commands_of_alerts_have_no_labels() -> None:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    commands = [
        code for rule in rules for text in rule["annotations"].values() for code in re.findall("`([^`]*)`", text)
    ]
    assert commands
    assert [command for command in commands if "{{" in command] == []
