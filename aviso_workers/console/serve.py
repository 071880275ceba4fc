"""Serves the console: a connection to the server, a socket, and uvicorn on it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio
import uvicorn

from aviso_workers.backends import Admin
from aviso_workers.config import Config
from aviso_workers.console.access import Access
from aviso_workers.console.actions import Actions
from aviso_workers.console.overview import Watcher
from aviso_workers.console.web import application
from aviso_workers.errors import ServerProcessError

__all__ = ["serve"]

ENDS_SECONDS = 3
MAX_REQUESTS = 500
"""Requests at the same time, of which up to 200 are pages that are kept up to date."""


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # whoever calls `serve` hears them


async def serve(admin: Admin, config: Config, *, on_listening: Callable[[str], None]) -> None:
    """Serve the console until it is cancelled; `on_listening` is told its address.

    Raises `ConfigError` where it must not be served, `ServerProcessError` where the port is taken.
    """
    access, settings = Access(config), config.workers.console
    listening = _listen(settings.host, settings.port)
    watcher = Watcher(admin, config)
    async with anyio.create_task_group() as tasks:
        app = application(watcher, Actions(admin, config, tasks), access)
        server = _Server(
            uvicorn.Config(
                app,
                lifespan="off",
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
                await server.serve(sockets=[listening])
            ended.set()

        tasks.start_soon(watcher.run)
        tasks.start_soon(run)
        host, port = listening.getsockname()[:2]
        on_listening(f"http://{f'[{host}]' if ':' in host else host}:{port}/")
        try:
            await ended.wait()
        finally:
            server.should_exit = True
            tasks.cancel_scope.cancel()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ServerProcessError(
            f"the console cannot listen on {host}:{port}: {error.strerror}; choose another workers.console.port, or "
            "say --port"
        ) from error
