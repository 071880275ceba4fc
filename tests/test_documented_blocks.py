"""Every code block of README.md and docs/: commands are parsed by the command line, YAML is read as a configuration,
Python is compiled, and what declares something is run. Other tests run the rest, as `RUN_BY` says. `NOT_RUN` has what
no test runs, and why; a block that is in neither is a failure.
"""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from aviso_workers import cli, config
from tests.documented import PAGES, PROJECT, Block, blocks, prose

ELSEWHERE = {"cycles"}
"""The first keys of YAML that is not a configuration: the schedules of `spark report`."""
READ_HERE = "yaml"
COMMANDS = "tests/test_documented_commands.py"
EXAMPLES = "tests/test_documented_examples.py"
PLUGIN = "tests/test_pytest_plugin.py"
FRAMEWORKS = ("tests/test_coming_from.py", "tests/interop/test_coming_from.py")
ON_SPARK = "tests/spark/test_documentation.py"
RUN_BY: dict[tuple[str, str], tuple[int, tuple[str, ...]]] = {
    ("README.md", "python"): (1, (EXAMPLES,)),
    ("docs/agents/around.md", "python"): (1, (EXAMPLES,)),
    ("docs/agents/event-types.md", "bash"): (1, (COMMANDS,)),
    ("docs/agents/event-types.md", "python"): (1, (EXAMPLES,)),
    ("docs/agents/publishing.md", "python"): (2, (EXAMPLES,)),
    ("docs/agents/resources.md", "python"): (1, (EXAMPLES,)),
    ("docs/agents/settings.md", "python"): (1, (EXAMPLES,)),
    ("docs/aviso.md", "bash"): (1, (COMMANDS,)),
    ("docs/backup.md", "bash"): (2, (COMMANDS,)),
    ("docs/backup/encryption.md", "bash"): (1, (COMMANDS,)),
    ("docs/backup/forgetting.md", "bash"): (1, (COMMANDS,)),
    ("docs/backup/increments.md", "bash"): (1, (COMMANDS,)),
    ("docs/backup/moving.md", "bash"): (2, (COMMANDS,)),
    ("docs/backup/python.md", "python"): (1, (EXAMPLES,)),
    ("docs/backup/schedule.md", "bash"): (1, (COMMANDS,)),
    ("docs/coming-from/celery.md", "python"): (2, FRAMEWORKS),
    ("docs/coming-from/dramatiq.md", "python"): (2, FRAMEWORKS),
    ("docs/coming-from/faststream.md", "python"): (2, FRAMEWORKS),
    ("docs/coming-from/faust.md", "python"): (2, FRAMEWORKS),
    ("docs/coming-from/pyaviso.md", "python"): (
        2,
        ("tests/test_coming_from.py", "tests/interop/test_aviso_server_streaming.py"),
    ),
    ("docs/embedding.md", "python"): (8, ("tests/test_embedding.py",)),
    ("docs/erasing.md", "bash"): (1, (COMMANDS,)),
    ("docs/examples/completeness.md", "bash"): (2, (COMMANDS,)),
    ("docs/examples/dead-letter-review.md", "bash"): (1, (COMMANDS,)),
    ("docs/examples/field-index.md", "bash"): (2, (COMMANDS,)),
    ("docs/examples/inbox-outbox.md", "bash"): (2, (COMMANDS,)),
    ("docs/examples/webhook-relay.md", "bash"): (1, (COMMANDS,)),
    ("docs/failover.md", "bash"): (6, (COMMANDS,)),
    ("docs/fleets.md", "bash"): (3, (COMMANDS,)),
    ("docs/fleets.md", "promql"): (1, ("tests/test_monitoring.py",)),
    ("docs/joins.md", "python"): (1, ("tests/stories/test_joins.py",)),
    ("docs/metrics.md", "bash"): (1, ("tests/test_monitoring.py",)),
    ("docs/operations/begin-anew.md", "bash"): (1, (COMMANDS,)),
    ("docs/operations/doctor.md", "bash"): (2, (COMMANDS,)),
    ("docs/operations/lag.md", "bash"): (1, (COMMANDS,)),
    ("docs/quickstart.md", "bash"): (4, ("tests/test_quickstart.py",)),
    ("docs/quickstart.md", "python"): (1, ("tests/test_quickstart.py",)),
    ("docs/security.md", "bash"): (1, (COMMANDS,)),
    ("docs/security/apps.md", "bash"): (1, (COMMANDS,)),
    ("docs/server.md", "bash"): (5, (COMMANDS,)),
    ("docs/spark.md", "python"): (2, (ON_SPARK,)),
    ("docs/spark/job-events.md", "python"): (1, (ON_SPARK,)),
    ("docs/spark/pipelines.md", "bash"): (4, (ON_SPARK,)),
    ("docs/spark/pipelines.md", "python"): (2, (ON_SPARK,)),
    ("docs/spark/writing.md", "python"): (2, (ON_SPARK,)),
    ("docs/streams.md", "bash"): (1, (COMMANDS,)),
    ("docs/streams.md", "python"): (1, (EXAMPLES,)),
    ("docs/tables.md", "python"): (2, (EXAMPLES,)),
    ("docs/testing.md", "bash"): (1, (PLUGIN,)),
    ("docs/testing.md", "python"): (9, (PLUGIN,)),
    ("docs/timers.md", "python"): (1, (EXAMPLES,)),
    ("docs/tutorial.md", "bash"): (6, (COMMANDS,)),
    ("docs/tutorial.md", "python"): (2, (PLUGIN,)),
    ("docs/windows.md", "python"): (4, (PLUGIN,)),
}
"""How many blocks of a page and a language are run elsewhere, and by which tests. YAML is read here."""
SHOWN = "shows what there is, or what is printed, and nothing to run"
NOT_RUN = {
    ("README.md", "pip install "): "needs a package registry; scripts/newcomer installs the wheel",
    ("README.md", "./scripts/demo "): "is the demo, which tests/stories/test_demo.py runs, and the whole test run",
    ("docs/architecture.md", "  TOOLS "): SHOWN,
    ("docs/architecture.md", "  backends/jetstream/wire.py "): SHOWN,
    ("docs/architecture.md", "  engine/handlers.py "): SHOWN,
    ("docs/aviso.md", "scripts/init_nats.sh"): "tests/stories/test_installation.py runs it where it finds its server",
    ("docs/concepts.md", "identifier "): SHOWN,
    ("docs/embedding.md", "WARNING "): SHOWN,
    ("docs/examples/dead-letter-review.md", "retry  12 "): SHOWN,
    ("docs/examples/spark-archive.md", "aviso-workers notify "): (
        "starts a Spark of its own: tests/spark/test_archive_example.py runs the program in one that is there"
    ),
    ("docs/examples/spark-archive.md", "pip install "): (
        "Spark loads Delta Lake from Maven: tests/interop/test_delta_lake.py, where scripts/interop has installed it"
    ),
    ("docs/installation.md", "pip install "): "needs a package registry; scripts/newcomer installs the wheel",
    ("docs/operations/console.md", "pip install "): (
        "needs a package registry; tests/console/test_command.py runs the command"
    ),
    ("docs/operations/doctor.md", "nats-server n1 "): SHOWN,
    ("docs/operations/nats-cli.md", "nats context add "): "needs the nats CLI: tests/interop/test_contexts.py",
    ("docs/operations/traces.md", "pip install "): "needs a package registry, and a collector of traces",
    ("docs/performance.md", "scripts/bench all "): "takes minutes: tests/test_bench.py measures a hundredth of it",
    ("docs/performance.md", "scripts/cost "): "takes minutes under valgrind: tests/test_cost.py counts a small process",
    ("docs/quickstart.md", "python3 -m venv "): "needs a package registry; scripts/newcomer installs the wheel",
    ("docs/spark.md", "spark=$(python "): "starts a cluster of Spark's: tests/spark/test_cluster.py has one of its own",
    ("docs/spark/pipelines.md", "spark-submit --master yarn "): "needs a cluster of Hadoop's",
    ("docs/spark/job-events.md", "$ aviso-workers spark reconcile "): SHOWN,
    ("docs/support.md", "AVISO_WORKERS_NATS_SERVER="): "needs an older nats-server, which scripts/interop builds",
}
"""Blocks that no test runs, by their page and how they begin. The commands in them are parsed all the same."""
LINES_NOT_RUN = {
    ("docs/backup/encryption.md", "pip install "): "needs a package registry",
    (
        "docs/backup/encryption.md",
        "age-keygen ",
    ): "needs age, which no package brings: the test has a key of its own",
    ("docs/server.md", "aviso-workers server rotate-key "): "is run by itself, on servers that were stopped",
    ("docs/spark/pipelines.md", "aviso-workers spark archive mars --to /data/archive/mars --every "): (
        "ends the session of Spark in which the tests are"
    ),
    ("docs/spark/pipelines.md", "duckdb.sql("): "needs DuckDB",
}
"""Lines that the tests of the other lines of their block leave out."""


def test_every_block_is_run_or_is_listed_as_one_that_is_not() -> None:
    declared = {str(block) for block in declaring()}
    left = [block for block in blocks() if block.language != READ_HERE and str(block) not in declared]
    found = Counter((block.page, block.language) for block in left if not is_listed(block))
    wanted = {place: count for place, (count, _) in RUN_BY.items()}
    assert dict(found) == wanted, "let a test run the new block, and count it in RUN_BY; or say in NOT_RUN why none can"


def is_listed(block: Block) -> bool:
    """Return whether a block is one of those that are not run."""
    return any(page == block.page and block.text.startswith(begin) for page, begin in NOT_RUN)


def test_what_is_listed_as_not_run_is_there() -> None:
    for page, begin in NOT_RUN:
        assert [block for block in blocks() if block.page == page and block.text.startswith(begin)], (page, begin)
    for page, begin in LINES_NOT_RUN:
        lines = [line for block in blocks() if block.page == page for line in block.text.splitlines()]
        assert [line for line in lines if line.startswith(begin)], (page, begin)


@pytest.mark.parametrize(("page", "language"), [*RUN_BY])
def test_the_tests_that_run_a_page_name_it(page: str, language: str) -> None:
    name = "coming_from" if page.startswith("docs/coming-from/") else re.escape(Path(page).stem)
    _, files = RUN_BY[page, language]
    assert [file for file in files if not re.search(name, (PROJECT / file).read_text())] == []


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
        text_of_page = prose(page).replace("\\|", "|")
        for text in sorted(set(re.findall(r"`aviso-workers ([a-z][^`]*)`", text_of_page))):
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


def whole_programs() -> list[Block]:
    """Return the programs of the pages, but for docs/testing.md: its blocks are one module, which PLUGIN runs."""
    return [each for each in blocks("python") if "App(" in each.text and each.page != "docs/testing.md"]


@pytest.mark.parametrize("block", whole_programs(), ids=str)
def test_every_program_has_all_names_that_it_uses(block: Block) -> None:
    """Also in functions that no test calls."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F821", "--output-format=concise", "-"]
    checked = subprocess.run(command, input=block.text, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


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
class Settings(msgspec.Struct): url: str = ""; days: int = 0
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
