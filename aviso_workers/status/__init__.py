"""The status port: `/livez`, `/readyz` and `/metrics`.

It answers from a thread of its own, so that a stuck event loop is seen and not hidden.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Protocol

import anyio

from aviso_workers.errors import ConfigError

__all__ = ["Health", "Probed", "StatusServer"]

STUCK_SECONDS = 10.0
"""An event loop that has not turned for so long is not alive."""
TURN_SECONDS = 1.0
STOP_SECONDS = 0.1
"""The longest that ending the port may hold up the end of the worker."""


class Probed(Protocol):
    """What probes ask: a process about itself, or a fleet about all of its processes."""

    @property
    def unready(self) -> list[str]:
        """Why `/readyz` says no; empty where it says yes."""

    def stuck(self) -> list[str]:
        """Why `/livez` says no; empty where it says yes."""


class Health:
    """What the event loop last said of itself. Written by the loop, read by the port's threads."""

    def __init__(self) -> None:
        self.unready: list[str] = ["starting"]
        """Why the worker is not ready; empty when it is."""
        self._last_turn = time.monotonic()
        self._next_turn = math.inf
        self._late = 0.0

    def turned(self, *, next_in_seconds: float) -> None:
        """Say that the loop has come round, and when it will again."""
        self._last_turn = time.monotonic()
        self._late = max(0.0, self._last_turn - self._next_turn)
        self._next_turn = self._last_turn + next_in_seconds

    def late_seconds(self) -> float:
        """How late the loop came round the last time, or is now if that is more."""
        return max(self._late, time.monotonic() - self._next_turn)

    def stuck(self) -> list[str]:
        """What is to be said of a loop that does not turn any more."""
        seconds = time.monotonic() - self._last_turn
        return [f"the event loop has not turned for {seconds:.0f} s"] if seconds > STUCK_SECONDS else []

    async def keep_turning(self) -> None:
        """Say, on the loop and without end, that it turns."""
        while True:
            self.turned(next_in_seconds=TURN_SECONDS)
            await anyio.sleep(TURN_SECONDS)


class StatusServer:
    """Serves while its `with` block runs. Raises `ConfigError` where the port is taken."""

    def __init__(self, *, host: str, port: int, health: Probed, metrics: Callable[[], bytes]) -> None:
        try:
            self._server = ThreadingHTTPServer((host, port), _handler(health, metrics))
        except OSError as error:
            raise ConfigError(
                [
                    f"workers.status.port: cannot listen on {host}:{port} ({error.strerror}); "
                    "choose another, or 0 for any free one"
                ]
            ) from error
        self._server.daemon_threads = True
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


def _handler(health: Probed, metrics: Callable[[], bytes]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            match self.path.partition("?")[0]:
                case "/livez":
                    self._answer(health.stuck())
                case "/readyz":
                    self._answer(health.unready)
                case "/metrics":
                    self._send(200, metrics(), "text/plain; version=0.0.4; charset=utf-8")
                case _:
                    self._send(404, b"/livez /readyz /metrics\n")

        def _answer(self, problems: list[str]) -> None:
            body = "".join(f"{problem}\n" for problem in problems) or "ok\n"
            self._send(503 if problems else 200, body.encode())

        def _send(self, status: int, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Scrapes are not worth a line."""

    return Handler
