from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from aviso_workers.testing import harness
from tests.examples.conftest import Load

pytestmark = pytest.mark.anyio

COUNT = 40
FAILURES = (503, 429, 0)
"""What the server answers now and then. 0: it takes the request and hangs up without an answer."""


class Receiver(ThreadingHTTPServer):
    """A web server that takes what has a new key, ignores what it has taken, and fails now and then."""

    def __init__(self, *, fails: float = 0, answers: int = 204) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.fails = fails
        self.answers = answers
        self.taken: dict[str, Any] = {}
        self.requests = Counter[str]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/fields"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of connections that were ended on purpose."""


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = self.headers["Idempotency-Key"]
        self.server.requests[key] += 1
        dice = random.Random(f"{key} {self.server.requests[key]}")  # in whatever order requests come
        failure = dice.choice(FAILURES) if dice.random() < self.server.fails else None
        if failure in (None, 0) and self.server.answers < 300:
            self.server.taken.setdefault(key, body)
        if failure == 0:
            self.close_connection = True
            return
        self.send_response(failure or self.server.answers)
        if failure == 429:
            self.send_header("Retry-After", "7")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def receiving(receiver: Receiver) -> Iterator[Receiver]:
    with receiver:
        thread = threading.Thread(target=receiver.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield receiver
        finally:
            receiver.shutdown()
            thread.join()


async def test_server_that_fails_now_and_then_takes_each_notification_once(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = load("webhook-relay")
    with receiving(Receiver(fails=0.4)) as receiver:
        monkeypatch.setenv("AVISO_WORKERS_WORKERS__AGENTS__WEBHOOK__URL", receiver.url)
        async with harness(example.app) as t:
            for step in range(COUNT):
                await t.notify("field", {"class": "od", "step": step}, {"size": step})
            await t.settle()
            retried = [each for each in t.settled("post") if each.outcome == "retried"]
            assert t.dead_letters == []

    sent = [{"identifier": {"class": "od", "step": f"{step}"}, "payload": {"size": step}} for step in range(COUNT)]
    assert sorted(receiver.taken.values(), key=lambda body: int(body["identifier"]["step"])) == sent
    assert receiver.requests.total() > COUNT, "the server was to fail now and then"
    assert {type(each.error).__name__ for each in retried} >= {"HTTPStatusError", "RemoteProtocolError"}


async def test_notification_that_the_server_refuses_is_a_dead_letter_at_once(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = load("webhook-relay")
    with receiving(Receiver(answers=422)) as receiver:
        monkeypatch.setenv("AVISO_WORKERS_WORKERS__AGENTS__WEBHOOK__URL", receiver.url)
        async with harness(example.app) as t:
            await t.notify("field", {"class": "od", "step": 0}, {"size": 3})
            await t.settle()
            assert t.outcomes("post") == ["dead_lettered"]
            assert "the server answered 422" in t.dead_letters[0].error
