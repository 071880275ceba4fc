"""What an aviso-server streams: replays read to their end, and watches that go on beside a test."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from tests.interop.aviso_server import AvisoServer
from tests.waits import PATIENCE_SECONDS


class Events:
    """The server-sent events of one replay or watch of an aviso-server, read in a thread until they end."""

    def __init__(self, server: AvisoServer, path: str, body: Mapping[str, Any]) -> None:
        address = urlsplit(server.url)
        assert address.hostname is not None
        self.received: list[tuple[str, Any]] = []
        """Each event with its name and its data."""
        self._changed = threading.Condition()
        self._ended = False
        self._connection = http.client.HTTPConnection(address.hostname, address.port, timeout=PATIENCE_SECONDS)
        self._connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        self._answer = self._connection.getresponse()
        self.status = self._answer.status
        self.refusal = "" if self.status == 200 else self._answer.read().decode()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def notifications(self) -> list[dict[str, Any]]:
        """The CloudEvents so far."""
        return [data for _, data in self.received if "specversion" in (data or ())]

    @property
    def ids(self) -> list[str]:
        return [event["id"] for event in self.notifications]

    def until(self, reached: Callable[[Events], bool]) -> None:
        """Wait until this is true of what was received. Fails where the events end before it is."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        with self._changed:
            while not reached(self):
                assert not self._ended, f"ended before: {self.received} {self.refusal}"
                assert self._changed.wait(deadline - time.monotonic()), f"did not come: {self.received}"

    def until_count(self, count: int) -> list[dict[str, Any]]:
        """Wait for so many CloudEvents, and return them."""
        self.until(lambda events: len(events.notifications) >= count)
        return self.notifications

    def until_end(self) -> list[dict[str, Any]]:
        """Wait until the server has closed the stream, and return the CloudEvents."""
        self._thread.join(PATIENCE_SECONDS)
        assert self._ended, f"did not end: {self.received}"
        return self.notifications

    def close(self) -> None:
        if self._connection.sock is not None:
            with suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE_SECONDS)
        self._answer.close()
        self._connection.close()

    def __enter__(self) -> Events:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> None:
        try:
            with suppress(OSError, http.client.HTTPException, ValueError, AttributeError):
                for event in _events(self._answer):
                    with self._changed:
                        self.received.append(event)
                        self._changed.notify_all()
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()


def watch(server: AvisoServer, event_type: str, identifier: Mapping[str, Any], **position: str) -> Events:
    """Begin a watch, and return when the server has begun it."""
    body = {"event_type": event_type, "identifier": dict(identifier), **position}
    events = Events(server, "/api/v1/watch", body)
    events.until(lambda events: bool(events.received))
    return events


def replay(
    server: AvisoServer, event_type: str, identifier: Mapping[str, Any], **position: str
) -> list[dict[str, Any]]:
    """Return the CloudEvents of a whole replay. Fails where the server refuses it or tells of an error."""
    body = {"event_type": event_type, "identifier": dict(identifier), **position}
    with Events(server, "/api/v1/replay", body) as events:
        found = events.until_end()
        assert events.status == 200, events.refusal
        assert not [data for name, data in events.received if name == "error"]
        assert any(data.get("type") == "replay_completed" for name, data in events.received if name == "replay-control")
        return found


def _events(lines: Iterator[bytes] | http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    name, data = "", ""
    for raw in lines:
        line = raw.decode().rstrip("\r\n")
        key, _, value = line.partition(":")
        if key == "event":
            name = value.strip()
        elif key == "data":
            data += value.strip()
        elif not line and name:
            yield name, json.loads(data) if data else None
            name, data = "", ""
