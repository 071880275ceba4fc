"""The status port: `/livez`, `/readyz` and `/metrics`, and what others answer.

It answers from threads of its own, so that a stuck event loop is seen and not hidden. Whoever reaches the port may open
connections and say nothing: a few are kept, each for a few seconds, and the newest one is always served, so that a
probe is answered. A connection whose first request is for another path is handed over, where somebody takes it: the
request is left unread, and the connection is no longer ours.

Failed logins are logged and slowed, so that no token can be guessed (`FailedLogins`). The console asks there too. How
they wait is theirs: the port has threads, the console an event loop.
"""

from __future__ import annotations

import hmac
import math
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Protocol

import anyio
import structlog

from aviso_workers.config import Secret, settings
from aviso_workers.errors import ConfigError

STUCK_SECONDS = 10.0
"""An event loop that has not turned for so long is not alive."""
TURN_SECONDS = 1.0
STOP_SECONDS = 0.1
"""The longest that ending the port may hold up the end of the worker."""
READ_SECONDS = 5.0
"""A connection that sends nothing for so long, or takes nothing, is closed."""
MAX_CONNECTIONS = 32
"""Where more are open, the oldest is closed: Prometheus and the probes of an orchestrator need a few."""
PATHS = (b"/livez", b"/readyz", b"/metrics")
REQUEST_LINE = re.compile(rb"\S* ([^ ?\r\n]*)[ ?\r\n]")
"""The begin of a request up to the end of its path (RFC 9112)."""
MAX_LOOKED_AT = 256
"""Bytes of a request that are looked at; ours are shorter."""
UNAVAILABLE = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n{}\n"

FAILED_SECONDS = 1.0
"""How long an address waits for the answer to a failed login, for each of its failed ones that wait."""
MAX_FAILED = 10
"""Failed logins of an address that may wait; then it is asked for nobody's token until one of them is answered."""

log = structlog.get_logger("aviso_workers.failed_logins")

HandOver = Callable[[socket.socket], str]
"""Hands a connection to another process, without waiting; returns why that is not possible, or an empty text."""

Shown = Callable[[str], tuple[bytes, str]]
"""Returns the body and the Content-Type of `/metrics` for a header Accept."""


class Probed(Protocol):
    """What probes ask: a process about itself, or a fleet about all of its processes."""

    def readiness(self) -> tuple[list[str], list[str]]:
        """Why `/readyz` says no, empty where it says yes; and what it says besides."""

    def stuck(self) -> list[str]:
        """Why `/livez` says no; empty where it says yes."""


class Health:
    """What the event loop last said of itself. Written by the loop, read by the port's threads."""

    def __init__(self) -> None:
        self.unready: list[str] = ["starting"]
        """Why the worker is not ready; empty when it is."""
        self.notes: list[str] = []
        """What is said besides, such as the outage that an agent waits for."""
        self._last_turn = time.monotonic()
        self._next_turn = math.inf
        self._late = 0.0

    def readiness(self) -> tuple[list[str], list[str]]:
        return self.unready, self.notes

    def turned(self, *, next_in_seconds: float) -> None:
        """Say that the loop has come round, and when it will again."""
        self._last_turn = time.monotonic()
        self._late = max(0.0, self._last_turn - self._next_turn)
        self._next_turn = self._last_turn + next_in_seconds

    def late_seconds(self) -> float:
        """Return how late the loop came round the last time, or is now if that is more."""
        return max(self._late, time.monotonic() - self._next_turn)

    def blocked_seconds(self) -> float:
        """Return for how long the loop should have come round by now."""
        return max(0.0, time.monotonic() - self._next_turn)

    def stuck(self) -> list[str]:
        """Return what is to be said of a loop that does not turn any more."""
        seconds = time.monotonic() - self._last_turn
        return [f"the event loop has not turned for {seconds:.0f} s"] if seconds > STUCK_SECONDS else []

    async def keep_turning(self) -> None:
        """Say, on the loop and without end, that it turns."""
        while True:
            self.turned(next_in_seconds=TURN_SECONDS)
            await anyio.sleep(TURN_SECONDS)


class FailedLogins:
    """The failed logins that wait for their answer. They are logged as `event`."""

    def __init__(self, event: str) -> None:
        self._event = event
        self._waiting = Counter[str]()
        """By address."""
        self._lock = threading.Lock()

    def refusal(self, address: str) -> str:
        """Return why an address is asked for no token now; empty where it is asked."""
        if self._waiting[address] < MAX_FAILED:
            return ""
        return f"Too many failed logins from {address}: ask again in some seconds.\n"

    @contextmanager
    def slowed(self, address: str) -> Iterator[float]:
        """Note a failed login of an address, which is to wait in the block for so many seconds."""
        log.warning(self._event, address=address)
        with self._lock:
            self._waiting[address] += 1
            seconds = FAILED_SECONDS * self._waiting[address]
        try:
            yield seconds
        finally:
            with self._lock:
                self._waiting[address] -= 1
                if not self._waiting[address]:
                    del self._waiting[address]


class StatusServer:
    """Serves while its `with` block runs.

    With a `token`, `/metrics` is only for who sends it as a bearer token (RFC 6750); the probes are for everybody.
    Connections for other paths are given to `hand_over`. Raises `ConfigError` where the port is taken, or where others
    than this machine reach it and could guess the token.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        health: Probed,
        metrics: Shown,
        token: Secret | None = None,
        hand_over: HandOver | None = None,
    ) -> None:
        if token is not None and (refusals := settings.weakness({"workers.status.token": token}, host)):
            raise ConfigError(refusals)
        try:
            self._server = _ThreadedServer((host, port), health, metrics, token)
        except OSError as error:
            raise ConfigError(
                [
                    f"workers.status.port: cannot listen on {host}:{port} ({error.strerror}); "
                    "choose another, or 0 for any free one"
                ]
            ) from error
        self._server.hand_over = hand_over
        serve = partial(self._server.serve_forever, poll_interval=STOP_SECONDS)
        self._thread = threading.Thread(target=serve, name="status", daemon=True)

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def __enter__(self) -> StatusServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _ThreadedServer(ThreadingHTTPServer):
    """A thread for each connection, of which the newest few are open."""

    daemon_threads = True
    request_queue_size = 128
    hand_over: HandOver | None = None

    def __init__(self, address: tuple[str, int], health: Probed, metrics: Shown, token: Secret | None) -> None:
        self.health, self.metrics, self.token = health, metrics, token
        self.failed = FailedLogins("status.login_failed")
        self._open: dict[socket.socket, None] = {}
        """The connections, oldest first."""
        self._lock = threading.Lock()
        super().__init__(address, _Request)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread finds the end of the stream, and closes it
            self._open[request] = None
        super().process_request(request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self.hand_over is None or not (path := _path(request)) or path in PATHS:
            super().finish_request(request, client_address)
            return
        with self._lock:  # while it is among the open ones, it may be shut down
            if not (refusal := self.hand_over(request)):
                self._open.pop(request, None)
                request.close()  # our copy only
                return
        request.recv(65_536)  # what is unread when it is closed could cost the client the answer
        request.sendall(UNAVAILABLE.format(refusal).encode())

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # who asks may leave before the answer
            super().handle_error(request, client_address)


def _path(connection: socket.socket) -> bytes:
    """Return the path of a connection's first request, and leave the request unread; the begin of the request where
    that is no path. Raises `TimeoutError`."""
    connection.settimeout(READ_SECONDS)
    seen = b""
    while (found := REQUEST_LINE.match(seen)) is None and len(seen) < MAX_LOOKED_AT:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, len(seen) + 1)  # wakes us when there is more
        now = connection.recv(MAX_LOOKED_AT, socket.MSG_PEEK)
        if len(now) <= len(seen):
            break
        seen = now
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    return found[1] if found else seen


class _Request(BaseHTTPRequestHandler):
    server: _ThreadedServer
    timeout = READ_SECONDS

    def do_GET(self) -> None:
        match self.path.partition("?")[0]:
            case "/livez":
                self._answer(self.server.health.stuck())
            case "/readyz":
                self._answer(*self.server.health.readiness())
            case "/metrics" if self.server.token and (refusal := self.server.failed.refusal(self.client_address[0])):
                self._send(429, refusal.encode())
            case "/metrics" if not self._is_allowed():
                if self.headers.get("Authorization"):
                    with self.server.failed.slowed(self.client_address[0]) as seconds:
                        time.sleep(seconds)
                self._send(401, b"send the token of workers.status.token: Authorization: Bearer ...\n")
            case "/metrics":
                self._send(200, *self.server.metrics(self.headers.get("Accept", "")))
            case _:
                self._send(404, b"/livez /readyz /metrics\n")

    def do_HEAD(self) -> None:
        self.do_GET()  # `_send` leaves the body out

    def _is_allowed(self) -> bool:
        if (token := self.server.token) is None:
            return True
        sent = self.headers.get("Authorization", "").encode()
        return hmac.compare_digest(sent, f"Bearer {token.reveal()}".encode())

    def _answer(self, problems: list[str], notes: Sequence[str] = ()) -> None:
        body = "".join(f"{line}\n" for line in [*(problems or ["ok"]), *notes])
        self._send(503 if problems else 200, body.encode())

    def _send(self, status: int, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not worth a line."""
