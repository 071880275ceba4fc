from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from aviso_workers.server import NatsServer
from tests.commands import Command

pytest_plugins = ["pytester"]

# A machine that has more to do is no mistake of the code.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")


@pytest.fixture
def anyio_backend() -> Any:
    return "asyncio"


@pytest.fixture
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server of the test's own: it starts within 50 ms."""
    with NatsServer.start(store_dir=tmp_path_factory.mktemp("jetstream")) as server:
        yield server


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def write_mars_config(path: Path, nats_url: str, **jetstream: Any) -> Path:
    """A file with the event type `mars` (class and step), on that server."""
    identifier = {"class": {"type": "StringHandler"}, "step": {"type": "IntHandler", "range": [0, 1000]}}
    mars = {
        "topic": {"base": "mars", "key_order": ["class", "step"]},
        "identifier": {field: {**rule, "required": True} for field, rule in identifier.items()},
        "storage_policy": {"allow_duplicates": True},
    }
    backend = {"nats_url": nats_url, "reconnect_delay_ms": 100, "max_reconnect_attempts": 0, **jetstream}
    document = {
        "notification_backend": {"kind": "jetstream", "jetstream": backend},
        "notification_schema": {"mars": mars},
        "workers": {"status": {"port": 0}, "logging": {"format": "json"}},
    }
    path.write_text(json.dumps(document))  # JSON is YAML
    return path


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., Path]:
    """`write_config(url, retry_attempts=1)`: see `write_mars_config`."""

    def write_config(nats_url: str, *, name: str = "config.yaml", **jetstream: Any) -> Path:
        return write_mars_config(tmp_path / name, nats_url, **jetstream)

    return write_config


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """`start("worker", "agents:app")`: the command in a directory of the test's own, ended with the test."""
    commands: list[Command] = []

    def start(*arguments: str | Path) -> Command:
        commands.append(Command(*arguments, directory=tmp_path))
        return commands[-1]

    yield start
    for command in commands:
        command.close()
