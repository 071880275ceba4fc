"""The marks of consumers on a server: who writes them, and who may not."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from aviso_workers import config
from aviso_workers.backends.jetstream import JetStreamBackend
from aviso_workers.errors import RefusedError
from aviso_workers.jetstream.identities import MARK
from aviso_workers.jetstream.specs import ConsumerSpec, StreamSpec
from aviso_workers.server import NatsServer

pytestmark = pytest.mark.anyio

SPEC = ConsumerSpec(
    durable_name="field__index", filter_subjects=("mars.>",), ack_wait=10**9, max_ack_pending=10, metadata={"of": "us"}
)
USERS = """
authorization { users: [
  { user: operator, password: x }
  { user: worker, password: x, permissions: { publish: { deny: "$JS.API.CONSUMER.CREATE.>" } } }
] }
"""


@asynccontextmanager
async def connected(server: NatsServer, user: str = "") -> AsyncGenerator[JetStreamBackend, None]:
    url = server.url.replace("//", f"//{user}:x@") if user else server.url
    async with JetStreamBackend(config.JetStream(nats_url=config.ServerUrls(url))) as backend:
        yield backend


async def add_without_mark(backend: JetStreamBackend) -> None:
    """Add the consumer as a version that knows no marks did."""
    await backend.create_stream(StreamSpec(name="MARS", subjects=("mars.>",)))
    await backend.put_consumer("MARS", SPEC.durable_name, msgspec.to_builtins(SPEC), action="create")


async def test_one_that_has_none_gets_the_same_from_each_worker_and_keeps_it(nats_server: NatsServer) -> None:
    async with connected(nats_server) as backend:
        await add_without_mark(backend)
        first = await backend.ensure_consumer("MARS", SPEC)
        assert first.config.metadata[MARK] == str(first.created)
        wider = await backend.ensure_consumer("MARS", structs.replace(SPEC, ack_wait=2 * 10**9))
        assert wider.config.metadata[MARK] == first.config.metadata[MARK]
        assert wider.config.metadata["of"] == "us"


async def test_who_may_not_update_a_consumer_uses_it_without(tmp_path: Path) -> None:
    with NatsServer.start(store_dir=tmp_path, config=USERS) as server:
        async with connected(server, "operator") as operator:
            await add_without_mark(operator)
        async with connected(server, "worker") as worker:
            for _ in range(2):
                found = await worker.ensure_consumer("MARS", SPEC)
                assert MARK not in found.config.metadata
            with pytest.raises(RefusedError, match="permissions violation"):
                await worker.ensure_consumer("MARS", structs.replace(SPEC, ack_wait=2 * 10**9))


async def test_one_that_takes_the_place_of_another_one_has_another(nats_server: NatsServer) -> None:
    """Also where a reset of it has to create it anew."""
    async with connected(nats_server) as backend:
        await backend.create_stream(StreamSpec(name="MARS", subjects=("mars.>",)))
        late = structs.replace(SPEC, deliver_policy="by_start_sequence", opt_start_seq=3)
        marks = [(await backend.ensure_consumer("MARS", late)).config.metadata[MARK]]
        for sequence in (3, 1):
            reset = await backend.reset_consumer("MARS", SPEC.durable_name, sequence=sequence)
            marks.append(reset.config.metadata[MARK])
        await backend.delete_consumer("MARS", SPEC.durable_name)
        marks.append((await backend.ensure_consumer("MARS", SPEC)).config.metadata[MARK])
    assert marks[0] == marks[1], "it was reset, and is the one that it was"
    assert len({*marks}) == 3, marks
