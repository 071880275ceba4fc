"""One server or a cluster of them, and an app that is connected to it: for the scripts that compare the two."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import anyio

from aviso_workers import App
from aviso_workers.backends import Administration
from aviso_workers.errors import BackendError
from aviso_workers.server import NatsServer
from aviso_workers.server.running import free_ports
from main_job.children import ShortfallError

__all__ = ["connected", "started"]

READY_SECONDS = 60.0
SHORT_SECONDS = 0.05


@contextmanager
def started(directory: str, servers: int) -> Iterator[list[NatsServer]]:
    """Run that many servers, which form one JetStream; leaving the block ends them."""
    routing = free_ports(servers)
    routes = ", ".join(f"nats-route://127.0.0.1:{port}" for port in routing)
    with ExitStack() as running:
        nodes: list[NatsServer] = []
        for port in routing:
            joined = f'cluster {{ name: endurance, listen: "127.0.0.1:{port}", routes: [{routes}] }}\n'
            store_dir = Path(directory) / f"node-{port}"
            nodes.append(NatsServer.start(store_dir=store_dir, config=joined if servers > 1 else ""))
            running.enter_context(nodes[-1])
        yield nodes
        for node in nodes:
            node.kill()  # one that is about to shut down takes its time


@asynccontextmanager
async def connected(app: App) -> AsyncIterator[Administration]:
    """The app, connected to servers that have elected their leader."""
    deadline = time.monotonic() + READY_SECONDS
    async with app:
        administration = app.session.backend.administration()
        while True:
            try:
                await administration.api("STREAM.NAMES")
                break
            except BackendError as error:
                if time.monotonic() > deadline:
                    raise ShortfallError(f"JetStream is not ready: {error}") from error
                await anyio.sleep(SHORT_SECONDS)
        yield administration
