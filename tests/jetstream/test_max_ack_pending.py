"""How many unsettled messages a consumer may have, where less is allowed than is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aviso_workers import config
from aviso_workers.backends.jetstream import JetStreamBackend
from aviso_workers.jetstream.specs import ConsumerSpec, StreamSpec
from aviso_workers.server import NatsServer

pytestmark = pytest.mark.anyio

LIMITED = """
accounts { A { users: [{user: a, password: a}], jetstream: {max_ack_pending: 500} } }
no_auth_user: a
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer.start(store_dir=tmp_path, config=LIMITED) as server:
        yield server


def spec(max_ack_pending: int) -> ConsumerSpec:
    return ConsumerSpec(durable_name="agent", filter_subjects=(), ack_wait=10**9, max_ack_pending=max_ack_pending)


async def test_a_consumer_has_as_many_as_the_account_allows(server: NatsServer) -> None:
    async with JetStreamBackend(config.JetStream(nats_url=config.ServerUrls(server.url))) as backend:
        await backend.create_stream(StreamSpec(name="MARS", subjects=("mars.>",)))

        created = await backend.ensure_consumer("MARS", spec(100_000))
        smaller = await backend.ensure_consumer("MARS", spec(100))
        updated = await backend.ensure_consumer("MARS", spec(100_000))

    assert [info.config["max_ack_pending"] for info in (created, smaller, updated)] == [500, 100, 500]
