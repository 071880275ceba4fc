"""Every code block of README.md and docs/: commands are parsed by the command line, YAML is read as a configuration,
Python is compiled, and what declares something is run. Tests of single pages run more of them, as whole programs.
"""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from msgspec import Struct

from aviso_workers import cli, config

PROJECT = Path(__file__).parents[1]
PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ELSEWHERE = {"cycles"}
"""The first keys of YAML that is no configuration: the schedules of `spark report`."""


class Block(Struct, frozen=True):
    """One block of a page."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(language: str) -> list[Block]:
    return [
        Block(str(page.relative_to(PROJECT)), text.count("\n", 0, found.start()) + 1, found[2])
        for page in PAGES
        for text in [page.read_text()]
        for found in BLOCK.finditer(text)
        if found[1] == language
    ]


def commands() -> Iterator[Any]:
    """Yield the words of each `aviso-workers ...` of a block, with where it stands."""
    for block in blocks("bash"):
        for line in block.text.replace("\\\n", " ").splitlines():
            if "aviso-workers" not in line:
                continue
            lexer = shlex.shlex(re.sub(r"\$\(.*?\)", "VALUE", line), posix=True, punctuation_chars=";|<>&")
            lexer.whitespace_split = True
            words = list(lexer)
            if "aviso-workers" not in words:
                continue
            words = words[words.index("aviso-workers") + 1 :]
            end = next((number for number, word in enumerate(words) if set(word) <= set(";|<>&")), None)
            yield pytest.param(words[:end], id=f"{block}: {line.strip()}")


@pytest.mark.parametrize("words", [*commands()])
def test_every_command_is_one_that_there_is(words: list[str]) -> None:
    parser: Any = typer.main.get_command(cli.command)
    context = parser.make_context("aviso-workers", words)
    while hasattr(parser, "commands"):
        assert context._protected_args, f"{context.command_path} is a group of commands"
        name, parser, words = parser.resolve_command(context, [*context._protected_args, *context.args])
        try:
            context = parser.make_context(name, words, parent=context)
        except typer.BadParameter as error:
            if "does not exist" not in str(error):  # as a file of the reader's
                raise
            return


def merged(below: Any, above: Any) -> Any:
    """Return two documents as one: mappings key by key, of everything else the one above."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return {**below, **{key: merged(below.get(key), value) for key, value in above.items()}}


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_every_configuration_can_be_read(block: Block, tmp_path: Path) -> None:
    document = yaml.safe_load(block.text)
    if ELSEWHERE & document.keys():
        return
    whole = merged(yaml.safe_load((PROJECT / "config" / "example.yaml").read_text()), document)
    (tmp_path / "config.yaml").write_text(json.dumps(whole))
    examined = config.examine(tmp_path / "config.yaml", environ={})
    assert examined.mistakes == ()


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_every_python_block_compiles_and_imports_what_there_is(block: Block) -> None:
    tree = compile(block.text, str(block), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("aviso_workers"):
            module = importlib.import_module(node.module)
            modules = {found.name for found in pkgutil.iter_modules(getattr(module, "__path__", ()))}
            assert [each.name for each in node.names if each.name not in {*dir(module), *modules}] == []


def mentioned() -> Iterator[Any]:
    """Yield each `aviso-workers ...` in the prose of a page, without what stands for more of the same kind."""
    for page in PAGES:
        prose = BLOCK.sub("", page.read_text()).replace("\\|", "|")
        for text in sorted(set(re.findall(r"`aviso-workers ([a-z][^`]*)`", prose))):
            yield pytest.param(text.split(), id=f"{page.relative_to(PROJECT)}: {text}")


@pytest.mark.parametrize("words", [*mentioned()])
def test_every_command_that_is_mentioned_is_one_that_there_is(words: list[str]) -> None:
    parsers: list[Any] = [typer.main.get_command(cli.command)]
    for word in words:
        if not any(hasattr(parser, "commands") for parser in parsers):
            break
        parsers = [parser.commands[name] for parser in parsers for name in word.split("|")]
    options = {name for parser in parsers for each in parser.params for name in [*each.opts, *each.secondary_opts]}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options | {"--help"}


def declaring() -> list[Block]:
    """Return the blocks that declare something for an app that the page takes for granted."""
    whole = re.compile(r"\bApp\(|^(import|from) (celery|dramatiq|faust|fields|pytest)", re.MULTILINE)
    return [
        each
        for each in blocks("python")
        if re.search(r"^@(app|router|index)\.", each.text, re.MULTILINE) and not whole.search(each.text)
    ]


AROUND = """
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, date, datetime
from typing import Any
import shutil, anyio, msgspec
from aviso_workers import *

app = router = App("blocks")
for name in ("mars", "diss", "rides", "rides_by_vendor", "derived", "reminder", "spark_job", "cycle_late"):
    app.event_type(name, key=["class", "date", "step", "kind", "event"], storage_policy={"allow_duplicates": True})

class Field(msgspec.Struct): size: int
class Settings(msgspec.Struct): url: str
class Database: ...
class AsyncEngine: ...
class AsyncSession: ...
class ride_pb2:
    class Ride:
        vendor = ""
        FromString = staticmethod(lambda body: ride_pb2.Ride())

def add(total: int, notification: Notification[Any]) -> int: return total + 1
async def parts_of(payload: Field) -> list[Field]: return []
@App("other").agent("mars")
async def index(notification: Notification) -> None: ...
@app.resource
def settings() -> Settings: return Settings("")
@app.resource
def engine() -> AsyncEngine: return AsyncEngine()
"""
"""What the blocks take for granted."""


@pytest.mark.parametrize("block", declaring(), ids=str)
def test_every_declaration_is_one_that_works(block: Block) -> None:
    names: dict[str, Any] = {"__name__": "block"}
    for text in (AROUND, block.text):
        exec(compile(text, str(block), "exec", dont_inherit=True), names)
    assert names["app"].mistakes() == []
