"""Examples of the documentation run as they stand."""

from __future__ import annotations

import ast
import importlib
import json
import logging
import os
import re
import sqlite3
import sys
from collections.abc import Awaitable, Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import pytest

from aviso_workers import App, Notification
from aviso_workers.events import Acked, Failed
from aviso_workers.server import NatsServer
from aviso_workers.testing import harness
from tests.conftest import write_mars_config
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

DOCS = Path(__file__).parents[1] / "docs"


def written(page: str, *, section: str = "") -> str:
    """The first example of a page, or of a section of it."""
    text = (DOCS / page).read_text()
    return text[text.index(section) :].split("```python\n")[1].split("```")[0]


def example(page: str, *, section: str = "") -> dict[str, Any]:
    """The names that it defines."""
    return executed(written(page, section=section))


def executed(source: str) -> dict[str, Any]:
    found: dict[str, Any] = {"__name__": "example"}
    exec(compile(source, "example", "exec"), found)
    return found


def in_memory(app: App, directory: Path) -> App:
    """The app of an example, without a server."""
    file = write_mars_config(directory / "config.yaml", "nats://127.0.0.1:1")
    document = json.loads(file.read_text())
    document["notification_backend"] = {"kind": "in_memory"}
    del document["notification_schema"]["mars"]["storage_policy"]
    file.write_text(json.dumps(document))
    app.configure(file)
    return app


async def test_the_example_of_tables(tmp_path: Path) -> None:
    found = example("tables.md")
    async with harness(in_memory(found["app"], tmp_path)) as at_work:
        for step in (0, 6):
            await at_work.notify("mars", {"class": "od", "step": step}, {"location": f"/{step}", "size": 21})
        await at_work.settle()
        assert await found["newest"].get("od") == "/6"
        assert await found["fields"].get("od") == 2
        assert await found["volume"].get("od") == 42


async def test_the_example_of_a_bucket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = written("tables.md", section="## A bucket that other programs use") + "    break\n"
    app = in_memory(App("example"), tmp_path)
    async with harness(app):
        await eval(compile(source, "tables.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), {"app": app})
    value, revision = capsys.readouterr().out.split()[:2]
    assert (value, revision) == ("b'478'", "1")


async def test_the_example_of_event_types_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    app: App = example("agents/event-types.md", section="## Event types in Python")["app"]
    assert app.mistakes() == []
    async with harness(app) as at_work:
        await at_work.notify("ride", {"vendor": "green", "n": 7})
        await at_work.settle()
    assert capsys.readouterr().out == "green 7\n"


async def test_the_example_of_a_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(sqlite3.connect("fields.db")) as database:
        database.execute("create table fields (step text primary key, location text)")
        database.execute("create table locations (step text primary key, location text check (location != '/taken'))")
        found = example("agents/resources.md", section="## Share a database session per notification")
        async with harness(in_memory(found["app"], tmp_path)) as at_work:
            for step, location in ((0, "/0"), (6, "/taken")):
                await at_work.notify("mars", {"class": "od", "step": step}, {"location": location})
            await at_work.settle()
            assert [dead_letter.error for dead_letter in at_work.dead_letters] == [
                "IntegrityError: CHECK constraint failed: location != '/taken'"
            ]
        assert database.execute("select * from fields").fetchall() == [("0", "/0")]


async def test_the_example_of_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AVISO_WORKERS_WORKERS__AGENTS__FIELD_INDEX__DAYS", "7")
    async with harness(in_memory(example("agents/settings.md")["app"], tmp_path)) as at_work:
        await at_work.notify("mars", {"class": "od", "step": 6}, {})
        await at_work.settle()
    assert capsys.readouterr().out == "https://index.example.org 7\n"


async def test_the_example_of_what_runs_around_each_notification(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="fields")
    found = example("agents/around.md", section="## Measure or log around each notification")
    async with harness(in_memory(found["app"], tmp_path)) as at_work:
        at_work.fail("index", ConnectionError("no database"))
        await at_work.notify("mars", {"class": "od", "step": 6}, {})
        await at_work.settle()
        assert at_work.outcomes("index") == ["retried", "acked"]
    failed, done = caplog.messages
    assert failed == "step 6 failed: ConnectionError('no database')"
    assert re.fullmatch(r"step 6 took \d\.\d{3} s", done)


async def test_the_example_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    async with harness(example("../README.md")["app"]) as at_work:
        for stream in ("oper", "scda"):
            identifier = {"class": "od", "stream": stream, "step": 12}
            await at_work.notify("mars", identifier, {"location": f"/data/{stream}"})
        await at_work.settle()
    assert capsys.readouterr().out == "12 /data/oper\n"


async def test_the_example_of_timers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = datetime(2026, 11, 20, 4, 55, tzinfo=UTC)
    async with harness(in_memory(example("timers.md")["app"], tmp_path), start=start) as at_work:
        await at_work.advance("10m")
        assert [tick.error for tick in at_work.ticks("refresh")] == [None] * 2
        assert [tick.error for tick in at_work.ticks("report")] == [None]
    assert capsys.readouterr().out == "report of 2026-11-20\n"


async def test_the_timers_that_decide_on_a_dependency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app = in_memory(App("example"), tmp_path)
    taken_for_granted = {"__name__": "example", "app": app, "Field": dict}
    for section in ("", "## Read it and decide on it"):
        exec(compile(written("agents/outages.md", section=section), "outages.md", "exec"), taken_for_granted)
    async with harness(app, start=datetime(2026, 11, 22, 11, 54, tzinfo=UTC)) as at_work:
        await at_work.advance("2m")
        assert [tick.error for timer in ("announce_maintenance", "look") for tick in at_work.ticks(timer)] == [None] * 5
    first, *_ = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"away since 2026-11-22 11:55:00.*: maintenance on Sundays", first)


COMPUTED = """
import asyncio, os, signal, time
from collections.abc import Iterator
from pathlib import Path
import msgspec
from aviso_workers import App, Notification

app = App("computed")

class Field(msgspec.Struct):
    location: str

def compress(location: str) -> None:
    file = Path(location)
    if file.exists():  # the second attempt
        return
    file.write_text(str(os.getpid()))
    if file.name == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if file.name == "hangs":
        time.sleep(3600)
"""
HELD_POOL = """
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

class Pools:
    def __init__(self) -> None:
        self.held = ProcessPoolExecutor(1)

@app.resource
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.held.shutdown()

@app.resource(scope="call")
def pool(pools: Pools) -> Iterator[ProcessPoolExecutor]:
    used = pools.held
    try:
        yield used
    except BrokenProcessPool:
        if pools.held is used:  # not replaced by another call
            pools.held = ProcessPoolExecutor(1)
        raise

@app.agent("mars")
async def pack(notification: Notification[Field], pool: ProcessPoolExecutor) -> None:
    await asyncio.get_running_loop().run_in_executor(pool, compress, notification.payload.location)
"""
"""What docs/agents/resources.md says of a resource that broke."""


@pytest.fixture
def computing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Awaitable[list[str]]]:
    """Return a function that handles a notification by a module's app, and returns the reasons of failed attempts."""

    async def handle(source: str, name: str) -> list[str]:
        (tmp_path / "computed.py").write_text(COMPUTED + source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "computed", raising=False)
        app = in_memory(importlib.import_module("computed").app, tmp_path)
        failed, acked = list[str](), anyio.Event()
        app.events.listen(lambda event: failed.append(event.reason) if isinstance(event, Failed) else None)
        app.events.listen(lambda event: acked.set() if isinstance(event, Acked) else None)
        async with app.running():
            await app.notify("mars", {"class": "od", "step": 6}, {"location": str(tmp_path / name)})
            with anyio.fail_after(PATIENCE_SECONDS):
                await acked.wait()
        return failed

    return handle


@pytest.mark.slow
async def test_the_computation_that_ends_at_its_timeout(
    tmp_path: Path, computing: Callable[..., Awaitable[list[str]]]
) -> None:
    block = written("agents/not-ending.md", section="A computation ends")
    assert await computing(block, "dies") == ["BrokenWorkerProcess"]
    assert await computing(block.replace('"10m"', '"10s"'), "hangs") == ["TimeoutError"]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "hangs").read_text()), 0)


async def test_the_resource_that_is_replaced_when_it_broke(computing: Callable[..., Awaitable[list[str]]]) -> None:
    assert await computing(HELD_POOL, "dies") == ["BrokenProcessPool"]


async def test_the_example_of_backups_in_python(tmp_path: Path, nats_server: NatsServer) -> None:
    source = written("backup/python.md").replace("/backups", str(tmp_path / "backups"))
    found = executed(source)
    app: App = found["app"]
    app.configure(write_mars_config(tmp_path / "config.yaml", nats_server.url))
    async with app:
        await app.notify("mars", {"class": "od", "step": 6})
        await found["back_up"]()
    (backup,) = found["backups"].find(tmp_path / "backups")
    assert (backup.stream, backup.state.messages) == ("MARS", 1)


async def test_the_example_of_requests_to_jetstream(tmp_path: Path, nats_server: NatsServer) -> None:
    app = App("example", config=write_mars_config(tmp_path / "config.yaml", nats_server.url))
    async with app:
        await app.notify("mars", {"class": "od", "step": 6})
    found: dict[str, Any] = {"app": app}
    source = written("streams.md", section="## From Python").replace("ORDERS", "MARS")
    await eval(compile(source, "streams.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), found)
    assert found["info"]["state"]["messages"] == 1


async def test_the_example_of_a_request(tmp_path: Path) -> None:
    found = example("agents/publishing.md", section="## Requests and replies")
    async with harness(in_memory(found["app"], tmp_path)):
        assert await found["ask"]("t") == "/grib/t"


async def test_the_example_of_what_is_delivered_later(tmp_path: Path) -> None:
    section = written("agents/publishing.md", section="## Delayed notifications")
    body = section.replace("return ", "reminder = ").replace("2026,", "2200,")
    source = "from datetime import UTC, datetime\nfrom aviso_workers import Notify\n" + body
    app = in_memory(App("example"), tmp_path)
    async with harness(app):
        identifier = {"class": "od", "step": "6"}
        notification = Notification(event_type="mars", identifier=identifier, payload=None)
        found: dict[str, Any] = {"app": app, "identifier": identifier, "notification": notification}
        await eval(compile(source, "publishing.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), found)
