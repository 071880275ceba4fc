"""The connection of Spark's tasks outlives its server, however it is configured."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aviso_workers import Notify
from aviso_workers.backends.provisioning import Provisioner
from aviso_workers.config import Config, streams
from aviso_workers.engine.publisher import Publisher
from aviso_workers.events import Events
from aviso_workers.server import NatsServer
from aviso_workers.spark import writers
from aviso_workers.spark.connections import BlockingConnection, connected, load_config
from tests.waits import PATIENCE_SECONDS

DEFAULT_ATTEMPTS, DEFAULT_ATTEMPTS_AT_START = 5, 3


@pytest.fixture
def server(tmp_path: Path) -> NatsServer:
    return NatsServer.start(store_dir=tmp_path / "jetstream")


@pytest.fixture
def config(server: NatsServer, tmp_path: Path) -> str:
    jetstream = {"nats_url": server.url, "reconnect_delay_ms": 20, "publish_deadline_seconds": 5}
    document = {
        "notification_backend": {"kind": "jetstream", "jetstream": jetstream},
        "notification_schema": {
            "mars": {
                "topic": {"base": "mars", "key_order": ["step"]},
                "identifier": {"step": {"type": "IntHandler", "required": True}},
            }
        },
    }
    path = tmp_path / "aviso.yaml"
    path.write_text(json.dumps(document))
    return str(path)


def publisher_of(connection: BlockingConnection, settings: Config) -> Publisher:
    """What a task that writes publishes with, once it has made the stream."""
    provisioner = Provisioner(connection.backend, management="reconcile", events=Events())
    connection.call(provisioner.ensure, streams.event_stream("mars", settings.notification_schema["mars"], settings))
    return writers._publisher(connection.backend, settings)


def test_a_task_writes_on_when_its_server_was_away_for_more_than_the_default_attempts(
    server: NatsServer, config: str
) -> None:
    settings = load_config(config)
    with connected(settings) as connection:
        publisher = publisher_of(connection, settings)
        assert connection.call(publisher.notify, Notify("mars", {"step": 1})).sequence == 1

        server.kill()
        refuse(server.port, 2 * DEFAULT_ATTEMPTS)
        with NatsServer.start(store_dir=server.store_dir, port=server.port):
            assert connection.call(publisher.notify, Notify("mars", {"step": 2})).sequence == 2


def test_a_task_that_begins_while_its_server_is_away_waits_for_it(server: NatsServer, config: str) -> None:
    def write() -> int:
        settings = load_config(config)
        with connected(settings, patience_seconds=PATIENCE_SECONDS) as connection:
            publisher = publisher_of(connection, settings)
            return connection.call(publisher.notify, Notify("mars", {"step": 1})).sequence

    server.kill()
    with ThreadPoolExecutor(1) as task:
        sequence = task.submit(write)
        refuse(server.port, DEFAULT_ATTEMPTS_AT_START + 1)
        with NatsServer.start(store_dir=server.store_dir, port=server.port):
            assert sequence.result(PATIENCE_SECONDS) == 1


def refuse(port: int, times: int) -> None:
    """Hang up on those who connect."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        listener.settimeout(PATIENCE_SECONDS)
        for _ in range(times):
            listener.accept()[0].close()
