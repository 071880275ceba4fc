"""Run events of OpenLineage by HTTP, and what is configured of them; tests/contract/test_lineage.py has the rest."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import anyio
import pytest

from aviso_workers import App, Notification, config
from aviso_workers.config import display
from aviso_workers.errors import ConfigError
from aviso_workers.events import LineageTold
from aviso_workers.ops import permissions
from aviso_workers.telemetry import lineage
from tests.waits import PATIENCE_SECONDS, PROMPT_SECONDS

pytestmark = pytest.mark.anyio

FILE = """
notification_backend: {{kind: {kind}}}
notification_schema:
  mars: {{identifier: {{step: {{type: IntHandler, required: true}}}}}}
workers:
  lineage: {lineage}
"""


class Received:
    """What an OpenLineage server was sent."""

    def __init__(self) -> None:
        self.status = 201
        self.paths: list[str] = []
        self.authorizations: list[str | None] = []
        self.events: list[dict[str, Any]] = []


@pytest.fixture
def received() -> Received:
    return Received()


@pytest.fixture
def url(received: Received) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.paths.append(self.path)
            received.authorizations.append(self.headers["Authorization"])
            received.events.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(received.status)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def write(path: Path, lineage: str, *, kind: str = "in_memory") -> Path:
    file = path / "aviso.yaml"
    file.write_text(FILE.format(lineage=lineage, kind=kind))
    return file


def app_of(file: Path) -> App:
    app = App("fields", config=file)

    @app.agent("mars")
    async def index(notification: Notification) -> None: ...

    return app


async def test_it_is_posted_with_the_key(tmp_path: Path, url: str, received: Received) -> None:
    app = app_of(write(tmp_path, f"{{url: '{url}', api_key: a-key}}"))
    async with app.running():
        pass
    assert {*received.paths} == {"/api/v1/lineage"}
    assert {*received.authorizations} == {"Bearer a-key"}
    told = [(event["job"]["name"], event["eventType"]) for event in received.events]
    assert told == [
        ("fields", "START"),
        ("fields.index", "START"),
        ("fields.index", "COMPLETE"),
        ("fields", "COMPLETE"),
    ]


async def test_a_server_that_refuses_is_told_once(
    tmp_path: Path, url: str, received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lineage, "WAITS", ())
    received.status = 503
    app = app_of(write(tmp_path, f"{{url: '{url}', api_key: a-key}}"))
    told: list[LineageTold] = []
    app.events.listen(told.append, LineageTold)
    async with app.running():
        pass
    (line,) = [line for event in told for line in event.lines()]
    assert (line.level, line.event, len(told)) == ("warning", "lineage.not_sent", 4)
    assert "503" in str(line.fields["error"])
    assert "a-key" not in str(line.fields)


@pytest.fixture
def given_up() -> Iterator[None]:
    """Wait behind the test for the threads that it leaves, whose sockets only the collection of garbage closes."""
    before = {*threading.enumerate()}
    yield
    for thread in {*threading.enumerate()} - before:
        thread.join(PROMPT_SECONDS)
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()


@pytest.mark.usefixtures("given_up")
async def test_a_worker_ends_although_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes connections and says nothing."""
    monkeypatch.setattr(lineage, "LAST_SECONDS", 0.1)
    monkeypatch.setattr(lineage, "TIMEOUT_SECONDS", 1.0)
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        app = app_of(write(tmp_path, f"{{url: 'http://127.0.0.1:{port}'}}"))
        told: list[LineageTold] = []
        app.events.listen(told.append, LineageTold)
        with anyio.fail_after(PATIENCE_SECONDS):
            async with app.running():
                pass
    assert [str(event.error) for event in told] == ["the worker has ended"] * 4


@pytest.mark.parametrize(
    ("head", "error"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", None),
        (b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /elsewhere\r\n\r\n", OSError),
        (b"HTTP/1.1 200 OK\r\nX: ", TimeoutError),
    ],
    ids=["body", "redirect", "head"],
)
@pytest.mark.usefixtures("given_up")
async def test_an_answer_that_never_ends_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: bytes, error: type[Exception] | None
) -> None:
    monkeypatch.setattr(lineage, "WAITS", ())
    monkeypatch.setattr(lineage, "TIMEOUT_SECONDS", 0.3)

    async def answer(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                await stream.receive()
                await stream.send(head)
                while not ended.is_set():
                    await stream.send(b"x")
                    await anyio.sleep(0.02)

    ended = anyio.Event()
    told: list[LineageTold] = []
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, answer)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        app = app_of(write(tmp_path, f"{{url: 'http://127.0.0.1:{port}'}}"))
        app.events.listen(told.append, LineageTold)
        with anyio.fail_after(PATIENCE_SECONDS):
            async with app.running():
                pass
        ended.set()
        tasks.cancel_scope.cancel()
    assert len(told) == 4
    assert [type(each.error) for each in told] == [error or type(None)] * 4
    assert "the worker has ended" not in [str(each.error) for each in told]


def told_by(file: Path, *, fails: bool = False) -> None:
    """Run a pipeline that publishes two notifications, or fails."""
    loaded = config.load(file, environ={})
    assert loaded.workers.lineage is not None
    reads, writes = lineage.place("s3a://fred:pw@bucket/archive/mars/"), lineage.dataset(loaded, "mars")
    with lineage.pipeline(loaded, loaded.workers.lineage, "backfill", reads=reads, writes=writes) as run:
        if fails:
            raise RuntimeError("the disk is full")
        run.written = 2


def test_a_pipeline_tells_where_it_reads_and_what_it_has_written(tmp_path: Path, url: str, received: Received) -> None:
    told_by(write(tmp_path, f"{{url: '{url}'}}"))
    began, ended = received.events
    assert [began["eventType"], ended["eventType"]] == ["START", "COMPLETE"]
    assert began["run"]["runId"] == ended["run"]["runId"]
    assert [(each["namespace"], each["name"]) for each in ended["inputs"]] == [("s3a://bucket", "archive/mars")]
    (output,) = ended["outputs"]
    assert (output["namespace"], output["name"]) == ("memory", "mars")
    assert output["facets"]["schema"]["fields"] == [{"name": "step", "type": "Int", "fields": []}]
    assert output["outputFacets"]["outputStatistics"]["rowCount"] == 2
    assert lineage.place("/data/archive") == {"namespace": "file", "name": "/data/archive"}


def test_a_pipeline_that_fails_says_so(tmp_path: Path, url: str, received: Received) -> None:
    with pytest.raises(RuntimeError, match="the disk is full"):
        told_by(write(tmp_path, f"{{url: '{url}'}}"), fails=True)
    assert [event["eventType"] for event in received.events] == ["START", "FAIL"]
    assert received.events[1]["run"]["facets"]["errorMessage"]["message"] == "the disk is full"


def test_a_pipeline_goes_on_without_an_endpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """There is no stream in memory."""
    told_by(write(tmp_path, "{subject: runs.of.ours}"))
    assert ["a run event of lineage is lost" in each.message for each in caplog.records] == [True, True]


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("{}", "workers.lineage must have either a subject or a url"),
        ("{url: 'http://host', subject: a}", "workers.lineage must have either a subject or a url"),
        ("{url: 'http://fred:pw@host'}", "workers.lineage.url must be a URL such as https://host, without a user"),
        ("{url: 'http://host:none'}", "workers.lineage.url must be a URL such as https://host"),
        ("{url: 'https://host?token=pw'}", "workers.lineage.url must be a URL such as https://host"),
        ("{url: host}", "workers.lineage.url must be a URL such as https://host"),
        ("{subject: 'a.>'}", "workers.lineage.subject must be one subject"),
        ("{subject: a, api_key: k}", "workers.lineage.api_key is for a url"),
    ],
)
def test_a_mistake_is_told(tmp_path: Path, text: str, mistake: str) -> None:
    with pytest.raises(ConfigError) as told:
        config.load(write(tmp_path, text), environ={})
    assert mistake in str(told.value)
    assert "pw" not in str(told.value)


def test_the_key_is_masked_where_the_configuration_is_shown(tmp_path: Path) -> None:
    shown = display.effective(config.load(write(tmp_path, "{url: 'http://host', api_key: a-key}"), environ={}))
    values = {path: value for path, value, _ in shown}
    assert (values["workers.lineage.api_key"], values["workers.lineage.url"]) == ("***", "http://host")


def test_workers_and_spark_may_publish_to_the_subject(tmp_path: Path) -> None:
    app = app_of(write(tmp_path, "{subject: runs.of.ours}", kind="jetstream"))
    for granted in (permissions.of_worker(app, app.config), permissions.of_spark(app.config)):
        assert "runs.of.ours" in granted.publish.allow


LOADED = """
import sys
from aviso_workers import App
from aviso_workers.telemetry.listeners import listening
import anyio

async def run(app):
    async with app.running():
        pass

sys.modules.update(dict.fromkeys(sys.argv[2:]))
app = App("fields", config=sys.argv[1])
try:
    anyio.run(run, app)
except Exception as error:
    print(error)
print(sorted(name for name in sys.modules if name.startswith(("openlineage", "requests"))))
"""


def ran(file: Path, *hidden: str) -> list[str]:
    """What a process prints that runs an app with this configuration, without these modules."""
    done = subprocess.run([sys.executable, "-c", LOADED, file, *hidden], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.slow
def test_nothing_is_loaded_where_it_is_off(tmp_path: Path) -> None:
    assert ran(write(tmp_path, "null")) == ["[]"]


def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    told, *_ = ran(write(tmp_path, "{url: 'http://127.0.0.1:1'}"), "openlineage", "openlineage.client")
    assert told.startswith("workers.lineage needs the package openlineage-python: pip install 'aviso-workers[lineage]'")
