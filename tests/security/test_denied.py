"""What the server denies is told once for each kind of subject, however many there are, and takes no more room."""

from __future__ import annotations

from pathlib import Path

import pytest

from aviso_workers import config
from aviso_workers.backends.jetstream.connection import MOST_DENIALS, Connection
from aviso_workers.server import NatsServer

pytestmark = pytest.mark.anyio

MANY = 2 * MOST_DENIALS


async def test_what_is_denied_is_told_once_for_each_kind_of_subject(tmp_path: Path) -> None:
    told: list[str] = []

    def listen(*, connected: bool, reason: str, denied: str = "") -> None:
        if denied:
            told.append(denied)

    users = "authorization { users: [{user: worker, password: right, permissions: {publish: [allowed]}}] }\n"
    with NatsServer.start(store_dir=tmp_path, config=users) as server:
        settings = config.JetStream(
            nats_url=config.ServerUrls(server.url), user="worker", password=config.Secret("right")
        )
        connection = Connection(settings, on_connection=listen)
        await connection.open()
        for number in range(MANY):
            for subject in (
                f"$JS.ACK.MARS.field__index.1.{number}.1.1.0",
                f"$JS.ACK.MARS.field__other.1.{number}.1.1.0",
                f"$KV.field_failures.{number}",
                f"$JS.API.CONSUMER.MSG.NEXT.MARS.{number}",
                f"mars.od.{number}",
            ):
                connection.wire.send(subject.encode(), b"")
        assert await connection.answers()
        remembered = len(connection._denials)
        await connection.close()

    assert sorted(told) == [
        "publish to $js.ack.mars.field__index.>",
        "publish to $js.ack.mars.field__other.>",
        "publish to $js.api.consumer.msg.next.>",
        "publish to $kv.field_failures.>",
        "publish to mars.>",
    ]
    assert remembered <= MOST_DENIALS
