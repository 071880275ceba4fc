"""A notebook: cells that are run again and again, in a real IPython shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import write_mars_config
from tests.waits import PATIENCE_SECONDS

SHELL = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
for source in json.load(sys.stdin):
    shell.run_cell(source).raise_error()
"""

BEGIN = """
from collections.abc import AsyncIterator
from typing import Any

import anyio
from aviso_workers import App, Notification, Reject, Retry, Router

app = App("notebook", config="config.yaml")
seen = []
"""

AGENT = """
@app.agent("mars")
async def index(notification: Notification[Any]) -> None:
    seen.append("%s")
"""

RUN = f"""
with anyio.fail_after({PATIENCE_SECONDS}):
    async with app.running():
        count = len(seen)
        await app.notify("mars", dict([("class", "od"), ("step", 1)]))
        while len(seen) == count:
            await anyio.sleep(0.01)
"""

ALL_KINDS = """
class Database:
    pass

@app.resource
def database() -> Database:
    return Database()

@app.around
async def measure(notification: Notification[Any]) -> AsyncIterator[None]:
    yield

@app.every("1h", singleton=True)
async def tidy(database: Database) -> None: ...

@app.task
async def tail(app: App) -> None: ...

rows = app.table("rows", int)
volume = app.counter("volume")
app.event_type("ride", key=["vendor", "n"][:%s])

@app.agent("mars")
async def index(notification: Notification[Any], database: Database) -> None: ...

@index.on_error(OSError)
def judge(error: Exception) -> Retry:
    return Retry()
"""

DECLARED = """
assert [one.function for one in app.agents] == [index.function], app.agents
assert [one.function for one in app.timers] == [tidy.function], app.timers
assert [one.function for one in app.tasks] == [tail], app.tasks
assert [one.gives for one in app.resources] == [Database], app.resources
assert [one.function for one in app._arounds] == [measure], app._arounds
assert app.tables == {"rows": rows, "volume": volume}, app.tables
assert index.classifiers == [(OSError, judge)], index.classifiers
assert app.mistakes() == [], app.mistakes()
assert app.config.notification_schema["ride"].topic.key_order == ("vendor", "n")
"""

ROUTER = """
router = Router("mine")
kept = router.table("kept", int)
router.event_type("mine", key=["a"])

@router.agent("mars")
async def look(notification: Notification[Any]) -> None: ...
"""

INCLUDE = """
import installed
app.include(router, prefix="my", config={})
app.include(installed.router)
assert [one.name for one in app.agents] == ["my_look", "archive"], app.agents
assert app.agents[0].function is look.function
assert app.tables == {"my_kept": kept, "stored": installed.stored}
assert [one.name for one in app.resources] == ["store"]
"""

INSTALLED = """
from typing import Any
from aviso_workers import Notification, Router

router = Router("installed")
stored = router.table("stored", int)

class Store: ...

@router.resource
def store() -> Store:
    return Store()

@router.agent("mars")
async def archive(notification: Notification[Any]) -> None: ...
"""

Cells = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_cells(tmp_path: Path) -> Cells:
    """`run_cells(BEGIN, AGENT)`: one after the other, in a shell of their own."""
    document = json.loads(write_mars_config(tmp_path / "config.yaml", "nats://127.0.0.1:1").read_text())
    document["notification_backend"] = {"kind": "in_memory"}
    del document["notification_schema"]["mars"]["storage_policy"]
    (tmp_path / "config.yaml").write_text(json.dumps(document))
    (tmp_path / "installed.py").write_text(INSTALLED)

    def run_cells(*cells: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", SHELL],
            input=json.dumps(cells),
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "IPYTHONDIR": str(tmp_path / "ipython"), "PYTHONPATH": str(tmp_path)},
        )

    return run_cells


@pytest.mark.slow
def test_a_cell_that_is_run_again_declares_its_agent_anew(run_cells: Cells) -> None:
    ran = run_cells(
        BEGIN, AGENT % "first", RUN, "del index", AGENT % "second", RUN, "assert seen == ['first', 'second'], seen"
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.slow
def test_what_runs_goes_on_until_the_app_is_opened_again(run_cells: Cells) -> None:
    declares_meanwhile = RUN.replace("count = len(seen)", "count = len(seen); declare()")
    declare = "def declare():\n" + "\n".join("    " + line for line in (AGENT % "second").splitlines())
    ran = run_cells(
        BEGIN, AGENT % "first", declare, declares_meanwhile, RUN, "assert seen == ['first', 'second'], seen"
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.slow
def test_every_kind_of_declaration_takes_the_place_of_the_former_one(run_cells: Cells) -> None:
    ran = run_cells(BEGIN, ALL_KINDS % 1, ALL_KINDS % 2, DECLARED, ALL_KINDS % 1, ALL_KINDS % 2, DECLARED)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.slow
def test_routers_are_included_again_those_of_a_package_as_well(run_cells: Cells) -> None:
    ran = run_cells(BEGIN, ROUTER, INCLUDE, INCLUDE, ROUTER, INCLUDE)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.slow
def test_a_class_that_was_made_anew_without_what_needs_it_is_a_mistake_that_says_so(run_cells: Cells) -> None:
    again = "class Database: pass\n\n@app.resource\ndef database() -> Database:\n    return Database()"
    ran = run_cells(BEGIN, ALL_KINDS % 2, again, "print('\\n'.join(app.mistakes()))")
    assert ran.stdout.splitlines() == [
        f"{kind}: no resource gives its argument database: Database; there are: Database "
        f"(but another Database: run again what declares the {kind.split()[0]})"
        for kind in ("agent 'index'", "timer 'tidy'")
    ]


TWO_ROUTERS = """
import installed, other
app.include(installed.router)
app.include(other.router)
"""
TWO_DECORATORS = """
@app.agent("mars")
@app.agent("mars")
async def index(notification: Notification[Any]) -> None: ...
"""


@pytest.mark.slow
@pytest.mark.parametrize("twice", [TWO_ROUTERS, TWO_DECORATORS])
def test_what_is_declared_twice_in_one_run_is_a_mistake_here_too(run_cells: Cells, twice: str, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(INSTALLED.replace('Router("installed")', 'Router("other")'))
    ran = run_cells(BEGIN, twice)
    assert ran.returncode == 1
    assert "is declared twice in 'notebook': give one another name" in ran.stdout + ran.stderr


def test_two_of_one_name_in_a_program_are_a_mistake(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(BEGIN + AGENT % "first" + AGENT % "second")
    for command in ([str(program)], ["-c", program.read_text()]):
        ran = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        assert "DeclarationError: agent 'index' is declared twice in 'notebook'" in ran.stderr
