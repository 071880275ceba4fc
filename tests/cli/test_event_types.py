"""Event types that an app declares in Python, in the commands that take a configuration."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from aviso_workers import config as configuration
from aviso_workers.config import Config
from aviso_workers.server import NatsServer
from tests.cli.conftest import Ran
from tests.conftest import Start

Run = Callable[..., Ran]

APP = """
from aviso_workers import App, Notification

app = App("rides")
app.event_type(
    "ride",
    key=["vendor", "n", "code"],
    identifier={
        "n": {"type": "IntHandler", "range": [0, 10], "required": True},
        "code": {"type": "EnumHandler", "values": ["1e3", "on", "0o7", "2026-01-01"], "required": True},
        "polygon": {"type": "PolygonHandler", "required": False, "description": "Where: it was"},
    },
    payload={"required": True},
    storage_policy={"allow_duplicates": True, "retention_time": "30d", "max_size": "2Gi"},
)


@app.agent("ride")
async def count(notification: Notification) -> None:
    print("counted", notification.identifier["n"], flush=True)
"""
PLACE = "rides.py:5"
RIDE = ("ride", "vendor=green", "n=07", "code=on", "polygon=(1,1,1,2,2,2,1,1)", "--payload", "{}")


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """MODULE:APP of an app without a configuration file."""
    (tmp_path / "rides.py").write_text(APP)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delitem(sys.modules, "rides", raising=False)
    return "rides:app"


@pytest.fixture
def url(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__NATS_URL", nats_server.url)
    return nats_server.url


def test_they_are_shown_with_the_line_that_declares_them(run: Run, app: str, tmp_path: Path) -> None:
    shown = run("config", "show", "--app", app)
    lines = [line.split() for line in shown.lines if line.startswith("notification_schema.ride.topic.base")]
    assert lines == [["notification_schema.ride.topic.base", '"ride"', "App", "'rides',", f"{tmp_path}/{PLACE}"]]


def test_they_are_printed_as_the_file_of_an_aviso_server_has_them(run: Run, app: str, tmp_path: Path) -> None:
    printed = run("config", "event-types", "--app", app)
    assert printed.code == 0, printed.err
    file = tmp_path / "aviso.yaml"
    file.write_text(f"notification_backend: {{kind: jetstream}}\n{printed.out}")
    loaded = configuration.load(file, environ={})
    assert loaded.notification_schema["ride"] == declared(app).notification_schema["ride"]
    assert loaded.warnings == ()
    assert run("check", app, "--config", file).code == 0


@pytest.mark.parametrize("options", [(), ("--yaml",)])
def test_they_are_printed_as_asyncapi_with_the_agents_that_read_them(
    run: Run, app: str, options: tuple[str, ...]
) -> None:
    printed = run("config", "asyncapi", app, "--app-version", "1.0", *options)
    assert printed.code == 0, printed.err
    made = yaml.safe_load(printed.out)  # which reads JSON too
    assert (made["asyncapi"], made["info"]) == ("3.0.0", {"title": "rides", "version": "1.0"})
    assert made["channels"]["ride"]["address"] == "ride.{vendor}.{n}.{code}"
    assert made["channels"]["ride"]["parameters"]["code"]["enum"] == ["1e3", "on", "0o7", "2026-01-01"]
    assert [*made["operations"]] == ["receive-count"]


def test_an_app_with_a_mistake_is_not_printed(run: Run, app: str, tmp_path: Path) -> None:
    (tmp_path / "rides.py").write_text(APP.replace('@app.agent("ride")', '@app.agent("rides")'))
    refused = run("config", "asyncapi", app)
    assert (refused.code, refused.out) == (2, "")
    assert "rides" in refused.err


def declared(app: str) -> Config:
    return sys.modules[app.partition(":")[0]].app.config  # type: ignore[no-any-return]


def test_they_are_checked(run: Run, app: str, tmp_path: Path) -> None:
    assert run("check", app).out == "rides: 1 agent, no mistakes\n"
    file = tmp_path / "aviso.yaml"
    ride = "notification_schema: {ride: {identifier: {n: {type: IntHandler, required: true}}}}"
    file.write_text(f"notification_backend: {{kind: in_memory}}\n{ride}\n")
    refused = run("streams", "ls", "--app", app, "--config", file)
    assert refused.code == 2
    assert (
        f"{file}:2: notification_schema.ride is declared another way at App 'rides', {tmp_path}/{PLACE}" in refused.err
    )


@pytest.mark.usefixtures("url")
def test_who_publishes_reads_and_operates_knows_them(run: Run, app: str) -> None:
    unknown = run("notify", *RIDE)
    assert (unknown.code, "event types: none, as no configuration file" in unknown.err) == (2, True)
    assert run("notify", *RIDE, "--app", app) == Ran(code=0, out="ride@1 stored in RIDE\n", err="")
    (line,) = run("replay", "ride", "n=7", "--app", app).lines
    assert json.loads(line)["data"]["identifier"]["n"] == "7"
    assert run("streams", "plan", "--app", app).code == 0
    assert "RIDE" in run("streams", "ls", "--app", app).out
    assert run("dead-letters", "ls", "--app", app) == Ran(code=0, out="no dead letters\n", err="")
    assert '"ride.' in run("server", "render", "--role", "publisher", "--app", app).out
    examined = run("doctor", "--app", app, "--seconds", "0.1")
    assert "RIDE" in examined.out, examined


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--processes", "1")])
def test_a_worker_runs_agents_of_them(
    start: Start, run: Run, app: str, nats_server: NatsServer, tmp_path: Path, options: tuple[str, ...]
) -> None:
    file = tmp_path / "aviso.yaml"
    backend = f"notification_backend: {{kind: jetstream, jetstream: {{nats_url: '{nats_server.url}'}}}}"
    file.write_text(f"{backend}\nworkers: {{logging: {{format: json}}}}\n")
    worker = start("worker", app, "--config", file, "--status-port", "0", *options)
    worker.until("agent.started")
    assert run("notify", *RIDE, "--app", app, "--config", file).code == 0
    assert worker.lines(1) == ["counted 7\n"]
    assert worker.end(signal.SIGTERM) == 0
