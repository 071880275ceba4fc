"""What was published is held against what Spark says."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from aviso_workers import App
from aviso_workers.cli import main
from aviso_workers.errors import SparkRestError
from aviso_workers.ops import spark_reconciliation
from aviso_workers.ops.spark_reconciliation import (
    Comparison,
    Incomparable,
    PublishedStates,
    StateDifference,
    compare,
    published,
    reconcile,
)
from aviso_workers.server import NatsServer
from aviso_workers.spark import rest
from aviso_workers.spark.job_events import JobEvent, SparkApplication
from aviso_workers.spark.rest import SparkRest, States
from tests.waits import PATIENCE_SECONDS

APPLICATION = SparkApplication(id="local-1")
APPLICATIONS = b'[{"id": "bad", "attempts": [{"completed": true}]}, {"id": "app-1", "attempts": [{"completed": true}]}]'


def compare_jobs(spark: States, published: States, *, times: dict[str, int] | None = None) -> Comparison:
    comparisons = compare(APPLICATION, spark, PublishedStates(published, Counter(times or {})))
    return next(each for each in comparisons if each.kind == "job")


@pytest.mark.parametrize("state", ["running", "succeeded", "failed"])
def test_what_is_the_same_agrees(state: str) -> None:
    found = compare_jobs({("job", "1"): state}, {("job", "1"): state})
    assert (found.agrees, found.spark, found.published) == (True, 1, 1)


@pytest.mark.parametrize(
    ("spark", "published"), [("succeeded", "failed"), ("failed", "succeeded"), ("failed", "running")]
)
def test_what_is_not_the_same_differs(spark: str, published: str) -> None:
    found = compare_jobs({("job", "1"): spark}, {("job", "1"): published})
    assert not found.agrees
    assert found.differences == [StateDifference(id="1", spark=spark, published=published)]


@pytest.mark.parametrize("state", ["running", "succeeded"])
def test_what_is_not_published_differs(state: str) -> None:
    found = compare_jobs({("job", "1"): state, ("stage", "1.0"): state}, {("stage", "1.0"): state})
    assert found.differences == [StateDifference(id="1", spark=state, published="not published")]


def test_spark_may_lag_behind() -> None:
    assert compare_jobs({("job", "1"): "running"}, {("job", "1"): "failed"}).agrees


def test_spark_may_have_forgotten() -> None:
    found = compare_jobs({("job", "2"): "failed"}, {("job", "1"): "failed", ("job", "2"): "failed"})
    assert (found.agrees, found.only_published) == (True, 1)


def test_a_lost_application_runs_by_sparks_word() -> None:
    of_application = next(
        iter(
            compare(
                APPLICATION,
                {("application", "local-1"): "running"},
                PublishedStates({("application", "local-1"): "lost"}, Counter()),
            )
        )
    )
    assert of_application.agrees


def test_what_is_stored_twice_is_told_with_its_kind() -> None:
    times = {"spark:local:local-1:0:job.end:1": 2, "spark:local:local-1:0:job.start:1": 1}
    found = compare_jobs({("job", "1"): "failed"}, {("job", "1"): "failed"}, times=times)
    assert not found.agrees
    assert found.twice == ["spark:local:local-1:0:job.end:1"]


@pytest.mark.anyio
async def test_what_is_lost_runs_again_where_its_application_goes_on(tmp_path: Path) -> None:
    app = App("reconciled", config=write_config(tmp_path))
    events = [("job", "start", "1"), ("job", "lost", "1"), ("application", "lost", "local-1")]
    async with app:
        for kind, event, of in [*events, ("application", "resumed", "local-1")]:
            told = JobEvent(application=APPLICATION, kind=kind, event=event, id=of, occurrence=of, payload={})
            await app.notify("spark_job", told.identifier("local"), told.payload, message_id=told.message_id("local"))
        found = await published(app.replay, app.config, APPLICATION)
    assert found.states == {("job", "1"): "running", ("application", "local-1"): "running"}


@pytest.mark.anyio
async def test_one_application_that_cannot_be_read_hides_no_other(
    tmp_path: Path, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_reconciliation, "published", nothing_published)
    answers.text, answers.special = APPLICATIONS, {"/app-1": b"[]", "/bad": b""}
    async with App("reconciled", config=write_config(tmp_path)) as app:
        found = [each async for each in reconcile(app.replay, app.config, SparkRest(answers.url))]
    bad, *rest = found
    assert isinstance(bad, Incomparable)
    assert (bad.application, bad.attempt) == ("bad", "0")
    assert re.fullmatch(r"http\S+/api/v1/applications/bad/jobs: 404 Not Found", bad.problem)
    assert [(each.application, getattr(each, "kind", "")) for each in rest] == [
        ("app-1", kind) for kind in ("application", "job", "stage", "sql")
    ]


def test_the_command_tells_of_all_others_and_ends_with_2(
    tmp_path: Path,
    answers: Answers,
    nats_server: NatsServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers.text, answers.special = APPLICATIONS, {"/app-1": b"[]", "/bad": b""}
    config = write_config(tmp_path, kind="jetstream", jetstream={"nats_url": nats_server.url})
    command = ["aviso-workers", "spark", "reconcile", answers.url, "--config", str(config)]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(spark_reconciliation, "published", nothing_published)
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert ended.value.code == 3
    assert "DIFFERS" in told.out, "nothing is published of app-1"
    assert told.err.startswith("bad: not compared: http://127.0.0.1")


async def nothing_published(replay: Any, config: Any, application: SparkApplication) -> PublishedStates:
    return PublishedStates({}, Counter())


def write_config(directory: Path, **backend: Any) -> Path:
    keys = ("cluster", "application", "kind", "event", "id")
    event = {
        "topic": {"base": "spark", "key_order": list(keys)},
        "identifier": {key: {"type": "StringHandler", "required": True} for key in keys},
    }
    document = {"notification_backend": {"kind": "in_memory", **backend}, "notification_schema": {"spark_job": event}}
    file = directory / "config.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


# Spark's REST API


class Answers(ThreadingHTTPServer):
    """Answers with `text` as if it were Spark, and keeps what it was asked."""

    def __init__(self) -> None:
        answers = self
        self.text, self.asked = b"[]", list[str]()
        self.redirect = ""
        self.special: dict[str, bytes] = {}
        """By a part of the path, another text; empty where nothing is found."""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answers.asked.append(self.path)
                special = (text for part, text in answers.special.items() if f"{part}/" in self.path)
                text = next(special, answers.text)
                if answers.redirect and self.path != answers.redirect:
                    self.send_response(302)
                    self.send_header("Location", answers.redirect)
                else:
                    self.send_response(200 if text else 404)
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def answers() -> Iterator[Answers]:
    with Answers() as answers:
        threading.Thread(target=answers.serve_forever, daemon=True).start()
        yield answers
        answers.shutdown()


def test_applications_are_asked_for_by_their_begin(answers: Answers) -> None:
    answers.text = b'[{"id": "app-1", "attempts": [{"attemptId": "2", "completed": true}, {"completed": false}]}]'
    found = SparkRest(f"{answers.url}/").applications(since=datetime(2026, 11, 20, 6, tzinfo=UTC))
    assert found == [("app-1", "2", True), ("app-1", None, False)]
    assert answers.asked == ["/api/v1/applications?minDate=2026-11-20T06:00:00.000GMT"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b'[{"id": "\xff"}]', "not an answer of Spark's REST API"),
        (b"", "404"),
        (b"<html>", "not an answer of Spark's REST API"),
        (b'{"a": 1}', "not an answer of Spark's"),
        (b'[{"x": ' + b"[" * 100_000, "not an answer of Spark's"),
    ],
)
def test_another_answer_than_sparks_is_told(answers: Answers, text: bytes, problem: str) -> None:
    answers.text = text
    with pytest.raises(SparkRestError, match=problem):
        SparkRest(answers.url).applications()


@pytest.mark.parametrize("answer", [b"INFO {}\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n[]"])
def test_an_answer_that_is_not_http_or_breaks_off_is_told(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=_answer_once, args=(listening, answer))
        thread.start()
        with pytest.raises(SparkRestError, match="no whole answer of HTTP"):
            SparkRest(f"http://127.0.0.1:{listening.getsockname()[1]}").applications()
        thread.join()


def _answer_once(listening: socket.socket, answer: bytes) -> None:
    connection, _ = listening.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(answer)


@pytest.mark.parametrize(
    "beginning",
    [b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n", b"HTTP/1.1 200 OK\r\nX-Slow: "],
    ids=["body", "header"],
)
def test_an_answer_that_comes_byte_by_byte_is_not_awaited(beginning: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest, "ANSWER_SECONDS", 0.5)
    ended = threading.Event()

    def trickle() -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            connection.sendall(beginning)
            while not ended.wait(0.05):
                connection.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=trickle)
        thread.start()
        started = time.monotonic()
        try:
            with pytest.raises(SparkRestError, match=r"no answer: it is not complete after 0\.5 s: see whether"):
                SparkRest(f"http://127.0.0.1:{listening.getsockname()[1]}").applications()
            assert time.monotonic() - started < PATIENCE_SECONDS
        finally:
            ended.set()
            thread.join()


def test_an_answer_that_is_too_large_is_told(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest, "MAX_BYTES", 1 << 20)
    answers.text = b"[" + b" " * (2 << 20) + b"]"
    with pytest.raises(SparkRestError, match="it is larger than 1 MiB: lower what Spark retains"):
        SparkRest(answers.url).applications()


@pytest.mark.parametrize(
    "place", ["file:///etc/passwd", "ftp://127.0.0.1/x", "http://127.0.0.1:1/", "https://{server}/"]
)
def test_no_redirect_leads_to_another_server(answers: Answers, place: str) -> None:
    answers.redirect = place.format(server=answers.url.removeprefix("http://"))
    with pytest.raises(SparkRestError, match=r"redirects to '.*': give the URL of that server|not allowed"):
        SparkRest(answers.url).applications()
    assert len(answers.asked) == 1


def test_a_redirect_to_the_same_server_is_followed(answers: Answers) -> None:
    answers.redirect = "/elsewhere"
    assert SparkRest(answers.url).applications() == []


@pytest.mark.anyio
@pytest.mark.parametrize("impossible", ["", " ", "\u0000", "x" * 5000])
async def test_an_application_with_an_impossible_id_hides_no_other(
    tmp_path: Path, answers: Answers, impossible: str
) -> None:
    answers.text = json.dumps([{"id": of, "attempts": [{"completed": True}]} for of in (impossible, "app-1")]).encode()
    answers.special = {"/applications": b"[]"}
    told = JobEvent(application=APPLICATION, kind="job", event="end", id="1", occurrence="1", payload={})
    async with App("reconciled", config=write_config(tmp_path)) as app:
        await app.notify("spark_job", told.identifier("local"), told.payload)
        found = [each async for each in reconcile(app.replay, app.config, SparkRest(answers.url))]
    assert "app-1" in {each.application for each in found if isinstance(each, Comparison)}


@pytest.mark.anyio
async def test_no_further_application_is_compared_when_time_is_up(
    tmp_path: Path, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_reconciliation, "MAX_SECONDS", -1)
    answers.text = APPLICATIONS
    async with App("reconciled", config=write_config(tmp_path)) as app:
        found = [each async for each in reconcile(app.replay, app.config, SparkRest(answers.url))]
    assert [each.application for each in found if isinstance(each, Incomparable)] == ["bad", "app-1"]
    assert len(answers.asked) == 1


def test_nobody_there_is_told(free_port: int) -> None:
    with pytest.raises(SparkRestError, match="no answer"):
        SparkRest(f"http://127.0.0.1:{free_port}").applications()


@pytest.mark.parametrize("url", ["history:18080", "http://[", "http://history:port"])
def test_what_is_no_url_is_told(url: str) -> None:
    with pytest.raises(SparkRestError, match="is not a URL of a history server"):
        SparkRest(url)
