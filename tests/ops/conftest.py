"""Operators' commands, against real servers."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import anyio
import pytest

from aviso_workers import config as configuration
from aviso_workers.backends import Administration
from aviso_workers.backends.jetstream import JetStreamBackend
from aviso_workers.server import NatsServer, processes
from aviso_workers.server.processes import Node
from tests.cli.conftest import Ran, run
from tests.server.conftest import load_server

__all__ = ["Administer", "Api", "Declare", "Ran", "Run", "run"]

T = TypeVar("T")

Run = Callable[..., Ran]
Api = Callable[..., dict[str, Any]]
Declare = Callable[..., Path]
Administer = Callable[[Callable[[Administration], Awaitable[Any]]], Any]


def administered(url: str, ask: Callable[[Administration], Awaitable[T]]) -> T:
    """What `ask` returns of a server."""

    async def connect() -> T:
        settings = configuration.JetStream(nats_url=configuration.ServerUrls(url))
        async with JetStreamBackend(settings) as backend:
            return await ask(backend.administration())

    return anyio.run(connect)


@pytest.fixture
def url(nats_server: NatsServer) -> str:
    return nats_server.url


@pytest.fixture
def administer(url: str) -> Administer:
    """`administer(function)`: what the function returns of the server."""
    return lambda ask: administered(url, ask)


@pytest.fixture
def api(administer: Administer) -> Api:
    """`api("STREAM.INFO.ORDERS", {...})`: what JetStream answers, for what a test sets up and looks at."""
    return lambda subject, request=None: administer(lambda administration: administration.api(subject, request))


@pytest.fixture
def publish(administer: Administer) -> Callable[..., dict[str, Any]]:
    """`publish("orders.new", b"1", "orders.new")`: stored messages by subject, each with this payload."""

    def publish(*subjects: str, data: bytes = b"here") -> dict[str, Any]:
        async def store(administration: Administration) -> dict[str, Any]:
            answer = b"{}"
            for subject in subjects:
                answer = (await administration.request(subject, data)).data
            found: dict[str, Any] = json.loads(answer)
            return found

        answer: dict[str, Any] = administer(store)
        return answer

    return publish


@pytest.fixture
def declare(url: str, write_config: Callable[..., Path]) -> Declare:
    """`declare({"ORDERS": {...}})`: a configuration file with this section `streams`, beside the event type mars."""

    def declare(streams: dict[str, Any], **jetstream: Any) -> Path:
        path = write_config(url, **jetstream)
        path.write_text(json.dumps({**json.loads(path.read_text()), "streams": streams}))
        return path

    return declare


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, ...]]:
    """Three servers, n-1 to n-3, with the tags az:1 to az:3."""
    directory = tmp_path_factory.mktemp("cluster")
    server = "server_name: n\nserver_tags: [az]\nport: 0\nmonitoring: {port: 0}\njetstream: {unique_tag: az}"
    loaded = load_server(directory / "dev.yaml", server, replicas=3)
    yield processes.start(loaded, directory=directory, nodes=3, detached=False)
    processes.stop(directory)
