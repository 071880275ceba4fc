"""Serves the console: a connection to the server, and uvicorn on a socket of its own or on what a fleet hands over."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import ClassVar

import anyio
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from aviso_workers.backends import Admin
from aviso_workers.config import Config
from aviso_workers.console.access import Access
from aviso_workers.console.actions import Actions
from aviso_workers.console.overview import Watcher
from aviso_workers.console.web import HANDED_OVER, application
from aviso_workers.errors import ServerProcessError
from aviso_workers.telemetry.status import TURN_SECONDS

ENDS_SECONDS = 3
HEAD_SECONDS = 10.0
"""How long somebody may take to send the head of a request."""
MAX_WAITING = 100
"""Connections that have not sent a head: the oldest one goes for a new one, and the others are left to requests."""
MAX_REQUESTS = 500
"""Requests at the same time, of which up to 200 are pages that are kept up to date."""


class _Connection(H11Protocol):
    """A connection that is closed where the head of a request does not come in time: it counts among all requests."""

    _late: asyncio.TimerHandle | None = None
    _waiting: ClassVar[dict[_Connection, None]] = {}
    """Those of the process that have not sent a head, the oldest first."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._wait_for_head()
        else:
            self._wait_no_more()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._wait_no_more()

    def _wait_for_head(self) -> None:
        if self._late is not None:
            return
        self._late = self.loop.call_later(HEAD_SECONDS, self.transport.close)
        self._waiting[self] = None
        if len(self._waiting) > MAX_WAITING:
            oldest = next(iter(self._waiting))
            oldest._wait_no_more()
            oldest.transport.close()

    def _wait_no_more(self) -> None:
        self._waiting.pop(self, None)
        if self._late is not None:
            self._late.cancel()
            self._late = None


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # whoever calls `serve` hears them


async def serve(
    admin: Admin, config: Config, *, on_listening: Callable[[str], None], line: socket.socket | None = None
) -> None:
    """Serve the console until it is cancelled; `on_listening` is told its address.

    With a `line` to a fleet it listens nowhere: it takes the connections that come by it, until the fleet is gone.

    Raises `ConfigError` where it must not be served, `ServerProcessError` where the port is taken.
    """
    access, settings = Access(config), config.workers.console
    listening = [_listen(settings.host, settings.port)] if line is None else []
    watcher = Watcher(admin, config)
    async with anyio.create_task_group() as tasks:
        app = application(watcher, Actions(admin, config, tasks), access)
        server = _Server(
            uvicorn.Config(
                app,
                lifespan="off",
                http=_Connection,
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=MAX_REQUESTS,
                timeout_graceful_shutdown=ENDS_SECONDS,
            )
        )
        ended = anyio.Event()

        async def run() -> None:
            with anyio.CancelScope(shield=True):
                await server.serve(sockets=listening)
            ended.set()

        tasks.start_soon(watcher.run)
        tasks.start_soon(run)
        try:
            if line is None:
                host, port = listening[0].getsockname()[:2]
                on_listening(f"http://{f'[{host}]' if ':' in host else host}:{port}/")
                await ended.wait()
            else:
                await _take(line, server)
        finally:
            watcher.close()
            server.should_exit = True
            tasks.cancel_scope.cancel()


async def _take(line: socket.socket, server: _Server) -> None:
    """Take the connections that the fleet hands over, until it is gone."""
    loop = asyncio.get_running_loop()
    connection = partial(_Connection, server.config, server.server_state, {HANDED_OVER: True})
    line.setblocking(False)
    with line:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_tell_turns, line)
            said = b"+"
            with suppress(ConnectionError):
                while said:
                    await anyio.wait_readable(line)
                    said, handed, _, _ = socket.recv_fds(line, 1, 1)
                    for descriptor in handed:
                        with suppress(OSError):  # it may have been reset meanwhile
                            await loop.connect_accepted_socket(connection, socket.socket(fileno=descriptor))
            tasks.cancel_scope.cancel()


async def _tell_turns(line: socket.socket) -> None:
    """Tell the fleet again and again that the event loop turns; the first time, that connections are taken."""
    while True:
        with suppress(OSError):  # the fleet is gone, or reads nothing now
            line.send(b"\n")
        await anyio.sleep(TURN_SECONDS)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ServerProcessError(
            f"the console cannot listen on {host}:{port}: {error.strerror}; choose another workers.console.port, or "
            "say --port"
        ) from error
