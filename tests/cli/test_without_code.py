"""Commands about agents where the code is not, and event types are declared in Python."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from aviso_workers.backends import open_backend
from aviso_workers.config import load
from aviso_workers.state import consumer_records, declarations
from tests.cli.conftest import Ran
from tests.conftest import Start

Run = Callable[..., Ran]

APP = """
from aviso_workers import App, Notification

app = App("field", config="{config}")
app.event_type("fields", key=["class", "step"])


@app.agent("fields")
async def index(notification: Notification) -> None: ...
"""


@pytest.fixture
def operators(config: Path) -> Path:
    """A configuration that has the server, and no event type."""
    path = config.with_name("operators.yaml")
    path.write_text(json.dumps({**json.loads(config.read_text()), "notification_schema": {}}))
    return path


@pytest.fixture
def worked(run: Run, operators: Path, tmp_path: Path, start: Start) -> str:
    """MODULE:APP, whose worker has run and stopped."""
    name = f"without_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(APP.format(config=operators))
    worker = start("worker", f"{name}:app")
    worker.until("agent.started")
    while not [
        each for each in run("agents", "ls", "--seconds", "0.1", "--config", operators).lines if "index" in each
    ]:
        pass
    assert worker.end(signal.SIGTERM) == 0
    return f"{name}:app"


@pytest.mark.slow
def test_agents_are_listed_with_where_their_event_type_is_from(run: Run, operators: Path, worked: str) -> None:
    ran = run("agents", "ls", "--seconds", "0.1", "--json", "--config", operators)
    assert ran.code == 0
    assert ran.err.startswith("event type fields is not in the configuration; it is that of app field (without_")
    (row,) = map(json.loads, ran.lines)
    assert (row["app"], row["agent"], row["stream"], row["state"]) == ("field", "index", "FIELDS", "at rest")
    assert run("agents", "ls", worked, "--seconds", "0.1").err == "", "the code has it"


@pytest.mark.slow
def test_they_are_controlled(run: Run, operators: Path, worked: str) -> None:
    assert run("agents", "pause", "field/index", "--config", operators).code == 0
    assert "paused: by " in run("agents", "ls", "--seconds", "0.1", "--config", operators).out
    assert run("agents", "resume", "field/index", "--config", operators).code == 0
    assert run("agents", "reset", "field/index", "--to", "new", "--yes", "--config", operators).code == 0


@pytest.mark.slow
def test_their_policy_is_shown(run: Run, operators: Path, worked: str) -> None:
    ran = run("agents", "show", "field", "--json", "--config", operators)
    assert ran.code == 0
    shown = json.loads(ran.out)
    assert (shown["agent"], shown["event type"], shown["concurrency"]) == ("index", "fields", "1")
    assert shown["retry"].startswith("6 attempts"), shown
    assert "recorded position" in shown
    of_code = json.loads(run("agents", "show", worked, "--json").out)
    assert shown == of_code
    ran = run("agents", "show", "fild", "--config", operators)
    assert ran.code == 1
    assert ran.err.endswith("no agent of app fild is known; there are apps: field\n")


@pytest.mark.slow
def test_the_doctor_knows_their_streams(run: Run, operators: Path, worked: str) -> None:
    ran = run("doctor", "--seconds", "0.1", "--format", "json", "--config", operators)
    states = {check["code"]: check["state"] for check in json.loads(ran.out)["checks"]}
    assert "FAIL" not in states.values()


@pytest.mark.slow
def test_an_event_type_that_cannot_be_read_is_left_out_and_told(run: Run, operators: Path, worked: str) -> None:
    async def spoil() -> None:
        async with open_backend(load(operators)) as backend:
            bucket = await consumer_records.bucket(backend, "field")
            entry = await bucket.get("field/declared")
            assert entry is not None
            record = json.loads(entry.value)
            strange = {"identifier": {"class": {"type": "FutureHandler"}}, "topic": {"base": "strange\x1b[2J"}}
            record["event_types"] |= {"strange\x1b[31m": strange}
            await bucket.put("field/declared", json.dumps(record).encode())

    anyio.run(spoil)
    ran = run("agents", "ls", "--seconds", "0.1", "--json", "--config", operators)
    assert (ran.code, [json.loads(line)["agent"] for line in ran.lines]) == (0, ["index"])
    assert "left out: " in ran.err
    assert "identifier.class.type" in ran.err
    assert "\x1b" not in ran.err


def test_what_another_app_records_hides_no_agent_and_stops_no_server(run: Run, operators: Path, worked: str) -> None:
    async def steal() -> None:
        async with open_backend(load(operators)) as backend:
            entry = await (await consumer_records.bucket(backend, "field")).get("field/declared")
            assert entry is not None
            record = json.loads(entry.value)
            record["event_types"]["fields"]["topic"]["base"] = "stolen"
            record |= {"time": "2099-01-01T00:00:00Z", "agents": {}}
            bucket = await consumer_records.bucket(backend, "other")
            await bucket.put("other/declared", json.dumps(record).encode())

    anyio.run(steal)
    ran = run("agents", "ls", "--seconds", "0.1", "--json", "--config", operators)
    assert [json.loads(line)["agent"] for line in ran.lines] == ["index"], ran.err
    assert "another event type fields is that of app other" in ran.err
    assert run("agents", "pause", "field/index", "--config", operators).code == 0
    ran = run("doctor", "--seconds", "0.1", "--format", "json", "--config", operators)
    (missing,) = [check for check in json.loads(ran.out)["checks"] if check["code"] == "JS042"]
    assert (missing["state"], missing["findings"]) == ("PASS", []), "nobody has read the stream that is only recorded"


@pytest.mark.slow
def test_agents_whose_event_types_are_not_known_are_listed_by_what_is_stored(
    run: Run, operators: Path, worked: str
) -> None:
    async def forget() -> None:
        async with open_backend(load(operators)) as backend:
            await declarations.remove(backend, app="field")

    anyio.run(forget)
    ran = run("agents", "ls", "--seconds", "0.1", "--config", operators)
    assert (ran.code, "at rest" in ran.out, ran.err) == (0, True, "")


@pytest.mark.slow
def test_agents_of_which_nothing_is_recorded_are_told_by_their_consumers(
    run: Run, operators: Path, worked: str
) -> None:
    """Somebody has deleted the bucket."""

    async def delete() -> None:
        async with open_backend(load(operators)) as backend:
            await backend.delete_stream("KV_field__state")

    anyio.run(delete)
    ran = run("agents", "ls", "--seconds", "0.1", "--config", operators)
    assert ran.code == 1
    said = (
        "unknown: it seems at rest; not known, since its workers have not recorded how far it has come, or the records"
    )
    assert said in ran.out


@pytest.mark.slow
def test_agents_beside_those_that_are_listed_are_told(run: Run, config: Path, operators: Path, worked: str) -> None:
    """The record of one app cannot be read, as of an older version, and that of another can."""

    async def spoil() -> None:
        async with open_backend(load(operators)) as backend:
            bucket = await consumer_records.bucket(backend, "field")
            entry, position = await bucket.get("field/declared"), await bucket.get("field/index/FIELDS")
            assert entry is not None
            assert position is not None
            older = await consumer_records.bucket(backend, "older")
            await older.put("older/one/OLDER", position.value)
            await older.put("older/declared", b"garbage")

    anyio.run(spoil)
    ran = run("agents", "ls", "--seconds", "0.1", "--json", "--config", operators)
    assert (ran.code, [json.loads(line)["agent"] for line in ran.lines]) == (1, ["index", "one"])
    assert json.loads(ran.lines[1])["state"] == "stream gone"
