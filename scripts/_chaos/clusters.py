"""One server or a cluster of them, and an app that is connected to it: for the scripts that compare the two."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio

from _demo.children import ShortfallError
from aviso_workers import App
from aviso_workers.backends import Admin
from aviso_workers.errors import BackendError
from aviso_workers.server import NatsServer
from aviso_workers.server.processes import free_ports

READY_SECONDS = 60.0
SHORT_SECONDS = 0.05


class Node:
    """One server of them, which can be stopped or killed, and started again where it was."""

    def __init__(self, store_dir: Path, *, port: int, config: str, binary: str = "") -> None:
        self._store_dir = store_dir
        self._port = port
        self._config = config
        self.binary = binary
        """The nats-server that is started next; empty for the one that is found."""
        self.start()

    @property
    def url(self) -> str:
        return self.server.url

    def start(self) -> None:
        # In the caller's thread: the kernel ends the server with the thread that has started it.
        self.server = NatsServer.start(
            store_dir=self._store_dir,
            port=self._port,
            config=self._config,
            name=self._store_dir.name,
            binary=self.binary,
        )

    def stop(self, *, killed: bool = False) -> None:
        if killed:
            self.server.kill()
        self.server.stop()  # which also clears up after one that was killed


def start_nodes(
    directory: Path, servers: int, *, binaries: Sequence[str] = (), extra: Sequence[str] = ()
) -> list[Node]:
    """Start that many servers, which form one JetStream, each of its binary and with its `extra` configuration. Who
    calls stops them.
    """
    ports = free_ports(2 * servers)
    routing = ports[servers:]
    routes = ", ".join(f"nats-route://127.0.0.1:{port}" for port in routing)
    nodes: list[Node] = []
    try:
        for number, (port, route) in enumerate(zip(ports, routing, strict=False)):
            joined = f'cluster {{ name: endurance, listen: "127.0.0.1:{route}", routes: [{routes}] }}\n'
            config, binary = joined if servers > 1 else "", binaries[number] if binaries else ""
            config += extra[number] if extra else ""
            nodes.append(Node(directory / f"node-{route}", port=port, config=config, binary=binary))
    except BaseException:
        stop_nodes(nodes)
        raise
    return nodes


def stop_nodes(nodes: Iterable[Node]) -> None:
    for node in nodes:
        node.stop(killed=True)  # one that is about to shut down takes its time


@contextmanager
def started(directory: str, servers: int) -> Iterator[list[NatsServer]]:
    """Run that many servers, which form one JetStream; leaving the block ends them."""
    nodes = start_nodes(Path(directory), servers)
    try:
        yield [node.server for node in nodes]
    finally:
        stop_nodes(nodes)


@asynccontextmanager
async def connected(app: App) -> AsyncIterator[Admin]:
    """The app, connected to servers that have elected their leader."""
    deadline = time.monotonic() + READY_SECONDS
    async with app:
        while True:
            try:
                await app.session.admin.stream_names()
                break
            except BackendError as error:
                if time.monotonic() > deadline:
                    raise ShortfallError(f"JetStream is not ready: {error}") from error
                await anyio.sleep(SHORT_SECONDS)
        yield app.session.admin
