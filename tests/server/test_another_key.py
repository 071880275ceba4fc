"""The way of docs/server.md to another key for a production cluster: one server at a time, with an empty store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

import anyio
import nats
import pytest
from nats.errors import Error
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, StreamConfig

from _demo.children import is_ready
from aviso_workers.server import NatsServer
from aviso_workers.server.processes import free_ports
from tests.waits import PATIENCE_SECONDS

MARKER = b"a-payload-that-nobody-may-read"
COUNT, FETCHED = 200, 60
ACKED = (*range(40), *range(45, 50))
STREAMS = {"DATA": 3, "ALONE": 1, "EMPTY": 3}
"""With their replicas."""

pytestmark = pytest.mark.anyio


class Cluster:
    """Three servers, each of which can be given an empty store and another key."""

    def __init__(self, directory: Path, held: tuple[int, ...], stack: ExitStack) -> None:
        self._directory = directory
        self.clients, self._routes, self._monitoring = held[:3], held[3:6], held[6:]
        self._stack = stack
        self._servers = [self._start(i, "a") for i in range(3)]

    async def replace(self, i: int) -> None:
        await anyio.to_thread.run_sync(self._servers[i].stop)
        self._servers[i] = self._start(i, "b")

    def _start(self, i: int, key: str) -> NatsServer:
        store = self._directory / f"{key}-{i}"
        routes = ", ".join(f"nats-route://127.0.0.1:{port}" for port in self._routes)
        config = (
            f"http: 127.0.0.1:{self._monitoring[i]}\n"
            f"cluster {{ name: c, listen: 127.0.0.1:{self._routes[i]}, routes: [{routes}] }}\n"
            f'jetstream {{ store_dir: "{store}", cipher: chacha, key: {key} }}\n'
        )
        server = NatsServer.start(store_dir=store, port=self.clients[i], name=f"n-{i}", config=config)
        self._stack.callback(server.stop)
        return server

    async def is_healthy(self) -> bool:
        urls = [f"http://127.0.0.1:{port}/healthz" for port in self._monitoring]
        return all([await anyio.to_thread.run_sync(is_ready, url) for url in urls])


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    with anyio.fail_after(PATIENCE_SECONDS):
        while True:
            if await condition():
                return
            await anyio.sleep(0.1)


async def held(context: JetStreamContext) -> dict[str, tuple[int, ...]]:
    found = {}
    for name in STREAMS:
        state, consumer = (await context.stream_info(name)).state, await context.consumer_info(name, "reader")
        assert consumer.ack_floor is not None
        place = consumer.ack_floor.stream_seq, consumer.num_ack_pending, consumer.num_pending
        found[name] = (state.messages, state.last_seq, *map(int, place))
    return found


async def are_current(context: JetStreamContext) -> bool:
    """Whether every stream and consumer has a leader and two replicas that have all of it."""
    try:
        groups = [(await context.stream_info(name)).cluster for name in STREAMS]
        groups += [(await context.consumer_info(name, "reader")).cluster for name in STREAMS]
    except (Error, TimeoutError):
        return False
    return all(
        group is not None
        and group.leader
        and len(group.replicas or ()) == 2
        and all(replica.current and not replica.offline and not replica.lag for replica in group.replicas or ())
        for group in groups
    )


def readable(directory: Path, stores: str) -> int:
    """How often the payload is in the files of these stores, of which there are some."""
    found = [path.read_bytes() for path in directory.glob(f"{stores}/**/*") if path.is_file()]
    assert found
    return sum(content.count(MARKER) for content in found)


@pytest.mark.slow
async def test_a_cluster_gets_another_key_one_server_at_a_time_and_loses_nothing(tmp_path: Path) -> None:
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, tuple(free_ports(9)), stack)
        await eventually(cluster.is_healthy)
        urls = [f"nats://127.0.0.1:{port}" for port in cluster.clients]
        client = await nats.connect(urls, max_reconnect_attempts=-1, reconnect_time_wait=0.1)
        context = client.jetstream()
        for name, replicas in STREAMS.items():
            await context.add_stream(StreamConfig(name=name, subjects=[f"{name}.>"], num_replicas=replicas))
            await context.add_consumer(name, ConsumerConfig(durable_name="reader", ack_policy=AckPolicy.EXPLICIT))
            for i in range(0 if name == "EMPTY" else COUNT):
                await context.publish(f"{name}.{i}", MARKER)
        messages = await (await context.pull_subscribe_bind("reader", "DATA")).fetch(FETCHED)
        for i in ACKED:
            await messages[i].ack_sync()
        before = await held(context)
        assert before["DATA"] == (COUNT, COUNT, 40, FETCHED - len(ACKED), COUNT - FETCHED)

        await context.update_stream(StreamConfig(name="ALONE", subjects=["ALONE.>"], num_replicas=3))
        await eventually(lambda: are_current(context))
        for i in range(3):
            await cluster.replace(i)
            await eventually(cluster.is_healthy)
            await eventually(lambda: are_current(context))
        assert await held(context) == before
        await client.close()
    assert readable(tmp_path, "a-*") == 0 == readable(tmp_path, "b-*")
