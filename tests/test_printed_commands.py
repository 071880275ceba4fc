"""Commands that the package prints to be copied: a name in them may be anybody's, and stands in quotes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import yaml
from msgspec import structs

import aviso_workers
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
            yield node.lineno, "".join(map(_text, node.values))


def _text(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
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
    always = [structs.replace(check, judge=lambda _: iter((finding,)), production=False) for check in CHECKS]
    cures = [result.findings[0].cure for result in judge(always, facts)]
    named = [command for cure in cures for command in COMMAND.findall(cure) if HOSTILE in command]
    assert named
    assert [command for command in named if HOSTILE in re.sub("'[^']*'", "", command)] == []


def test_commands_of_alerts_have_no_labels() -> None:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    commands = [
        code for rule in rules for text in rule["annotations"].values() for code in re.findall("`([^`]*)`", text)
    ]
    assert commands
    assert [command for command in commands if "{{" in command] == []
