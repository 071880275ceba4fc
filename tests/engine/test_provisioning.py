"""Streams as configured: looked at once, created or updated where that is needed and allowed."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import anyio
import pytest
from msgspec import structs

from aviso_workers import config
from aviso_workers.backends import StreamInfo
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.backends.provisioning import Provisioner
from aviso_workers.errors import NotFoundError, RefusedError, UnavailableError
from aviso_workers.events import StreamProvisioned
from aviso_workers.jetstream.specs import StreamSpec
from tests.engine.conftest import Facts

pytestmark = pytest.mark.anyio

SPEC = StreamSpec(name="MARS", subjects=("mars.>",), storage="file", max_msgs=10)
DRIFTED = structs.replace(SPEC, max_msgs=5)


class ObservedBackend(InMemoryBackend):
    """Counts what it is asked for, and may have somebody else create the stream first, or refuse updates."""

    def __init__(self) -> None:
        super().__init__(config.InMemory())
        self.asked = Counter[str]()
        self.created_by_a_peer: StreamSpec | None = None
        self.refusal = ""

    async def stream_info(self, stream: str, **stated: Any) -> StreamInfo:
        self.asked["info"] += 1
        return await super().stream_info(stream, **stated)

    async def create_stream(self, spec: StreamSpec) -> StreamInfo:
        self.asked["create"] += 1
        if self.created_by_a_peer is not None:
            await super().create_stream(self.created_by_a_peer)
        return await super().create_stream(spec)

    async def update_stream(self, config: Mapping[str, Any]) -> StreamInfo:
        self.asked["update"] += 1
        if self.refusal:
            raise RefusedError(self.refusal, code=10052)
        return await super().update_stream(config)


@pytest.fixture
async def backend() -> AsyncGenerator[ObservedBackend, None]:
    async with ObservedBackend() as backend:
        yield backend


@pytest.fixture
def provisioner(backend: ObservedBackend, facts: Facts) -> Provisioner:
    return managed(backend, facts)


def managed(backend: ObservedBackend, facts: Facts, management: str = "reconcile") -> Provisioner:
    return Provisioner(backend, management=management, events=facts.events)


async def max_msgs(backend: ObservedBackend) -> int:
    found: int = (await InMemoryBackend.stream_info(backend, "MARS")).config["max_msgs"]
    return found


async def test_a_missing_stream_is_created(provisioner: Provisioner, backend: ObservedBackend, facts: Facts) -> None:
    await provisioner.ensure(SPEC)
    assert await max_msgs(backend) == 10
    assert facts.of(StreamProvisioned) == [StreamProvisioned(stream="MARS", action="created")]


async def test_a_stream_that_was_looked_at_is_not_asked_for_again(
    provisioner: Provisioner, backend: ObservedBackend
) -> None:
    await provisioner.ensure(SPEC)
    asked = Counter(backend.asked)
    await provisioner.ensure(SPEC)
    assert backend.asked == asked
    provisioner.forget("MARS")
    await provisioner.ensure(SPEC)
    assert backend.asked - asked == {"info": 1}


async def test_two_that_need_it_at_once_look_once(provisioner: Provisioner, backend: ObservedBackend) -> None:
    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(provisioner.ensure, SPEC)
    assert backend.asked == {"info": 2, "create": 1}


async def test_a_stream_that_is_as_configured_is_not_updated(
    provisioner: Provisioner, backend: ObservedBackend, facts: Facts
) -> None:
    await InMemoryBackend.create_stream(backend, SPEC)
    await provisioner.ensure(SPEC)
    assert (backend.asked, facts.of(StreamProvisioned)) == ({"info": 1}, [])


async def test_a_stream_that_has_drifted_is_updated(
    provisioner: Provisioner, backend: ObservedBackend, facts: Facts
) -> None:
    await InMemoryBackend.create_stream(backend, DRIFTED)
    await provisioner.ensure(SPEC)
    assert await max_msgs(backend) == 10
    assert facts.of(StreamProvisioned) == [
        StreamProvisioned(stream="MARS", action="updated", differences=("max_msgs: 5 -> 10",))
    ]


async def test_what_the_server_refuses_to_update_is_used_as_it_is_and_told(
    provisioner: Provisioner, backend: ObservedBackend, facts: Facts
) -> None:
    await InMemoryBackend.create_stream(backend, DRIFTED)
    backend.refusal = "duplicates window can not be larger then max age"
    await provisioner.ensure(SPEC)
    await provisioner.ensure(SPEC)
    assert await max_msgs(backend) == 5
    assert facts.of(StreamProvisioned) == [
        StreamProvisioned(stream="MARS", action="kept", differences=("max_msgs: 5 -> 10",), refused=backend.refusal)
    ]


async def test_what_no_server_changes_is_told_with_its_cure_and_the_rest_applied(
    provisioner: Provisioner, backend: ObservedBackend, facts: Facts
) -> None:
    await InMemoryBackend.create_stream(backend, structs.replace(DRIFTED, further={"deny_purge": True}))
    await provisioner.ensure(structs.replace(SPEC, further={"deny_purge": False}))
    assert await max_msgs(backend) == 10
    kept, updated = facts.of(StreamProvisioned)
    assert (kept.action, kept.refused) == ("kept", "what is on stays on: leave deny_purge out, or delete the stream")
    assert (updated.action, updated.differences) == ("updated", ("max_msgs: 5 -> 10",))


async def test_a_stream_that_no_server_creates_is_an_error(provisioner: Provisioner, backend: ObservedBackend) -> None:
    with pytest.raises(RefusedError, match=r"stream MARS cannot be created: .* no stream is created sealed"):
        await provisioner.ensure(structs.replace(SPEC, further={"sealed": True}))
    assert await backend.stream_names() == []


@pytest.mark.parametrize("management", ["create", "observe"])
async def test_drift_is_left_alone_where_only_reconciling_may_change_it(
    backend: ObservedBackend, facts: Facts, management: str
) -> None:
    await InMemoryBackend.create_stream(backend, DRIFTED)
    await managed(backend, facts, management).ensure(SPEC)
    assert await max_msgs(backend) == 5


async def test_an_observer_creates_nothing_and_says_so(backend: ObservedBackend, facts: Facts) -> None:
    with pytest.raises(NotFoundError, match="stream MARS does not exist, and stream_management: observe creates none"):
        await managed(backend, facts, "observe").ensure(SPEC)
    assert await backend.stream_names() == []


@pytest.mark.parametrize("management", ["reconcile", "create", "observe"])
async def test_another_storage_is_an_error_and_nothing_else_is_applied(
    backend: ObservedBackend, facts: Facts, management: str
) -> None:
    await InMemoryBackend.create_stream(backend, structs.replace(DRIFTED, storage="memory"))
    provisioner = managed(backend, facts, management)
    complaint = "stream MARS storage mismatch: it has memory, the configuration says file; storage cannot be changed"
    for _ in range(2):
        with pytest.raises(RefusedError, match=complaint):
            await provisioner.ensure(SPEC)
    assert await max_msgs(backend) == 5


async def test_a_lost_race_to_create_looks_again(
    provisioner: Provisioner, backend: ObservedBackend, facts: Facts
) -> None:
    backend.created_by_a_peer = DRIFTED
    await provisioner.ensure(SPEC)
    assert backend.asked == {"info": 2, "create": 1, "update": 1}
    assert await max_msgs(backend) == 10
    assert [event.action for event in facts.of(StreamProvisioned)] == ["updated"]


async def test_a_race_that_both_won_changes_nothing(provisioner: Provisioner, backend: ObservedBackend) -> None:
    backend.created_by_a_peer = SPEC
    await provisioner.ensure(SPEC)
    assert backend.asked["update"] == 0


async def test_a_stream_that_cannot_be_created_is_an_error(provisioner: Provisioner, backend: ObservedBackend) -> None:
    await InMemoryBackend.create_stream(backend, StreamSpec(name="OTHER", subjects=("mars.od.>",)))
    with pytest.raises(RefusedError, match="overlaps with stream OTHER"):
        await provisioner.ensure(SPEC)


async def test_a_stream_that_could_not_be_looked_at_is_looked_at_next_time(
    provisioner: Provisioner, backend: ObservedBackend
) -> None:
    backend.disconnect()
    with pytest.raises(UnavailableError):
        await provisioner.ensure(SPEC)
    backend.reconnect()
    await provisioner.ensure(SPEC)
    assert await backend.stream_names() == ["MARS"]


OWN = StreamSpec(name="aviso_workers_counters", subjects=("aviso_workers.counters.>",), num_replicas=1)


@pytest.mark.parametrize(
    ("found", "wanted", "after"),
    [
        pytest.param(1, 3, 3, id="fewer are raised"),
        pytest.param(3, 3, 3, id="as many are left"),
        pytest.param(5, 3, 5, id="more are left, as another app may want them"),
    ],
)
async def test_a_stream_of_our_own_gets_replicas_and_loses_none(
    provisioner: Provisioner, backend: ObservedBackend, found: int, wanted: int, after: int
) -> None:
    await InMemoryBackend.create_stream(backend, structs.replace(OWN, num_replicas=found))
    await provisioner.raise_replicas(OWN.name, wanted)
    assert (await InMemoryBackend.stream_info(backend, OWN.name)).config["num_replicas"] == after
    assert backend.asked["update"] == (found != after)


async def test_a_stream_of_our_own_loses_no_replicas_to_a_configuration_that_asks_for_fewer(
    backend: ObservedBackend, facts: Facts
) -> None:
    own_streams = Provisioner(backend, management="reconcile", events=facts.events, removes_replicas=False)
    await InMemoryBackend.create_stream(backend, structs.replace(OWN, num_replicas=3))
    await own_streams.ensure(structs.replace(OWN, max_msgs=5))
    found = (await InMemoryBackend.stream_info(backend, OWN.name)).config
    assert (found["num_replicas"], found["max_msgs"]) == (3, 5)


async def test_replicas_that_are_refused_are_told_and_the_stream_is_used_as_it_is(
    provisioner: Provisioner, backend: ObservedBackend, facts: Facts
) -> None:
    await InMemoryBackend.create_stream(backend, OWN)
    backend.refusal = "permissions violation"
    await provisioner.raise_replicas(OWN.name, 3)
    assert facts.of(StreamProvisioned) == [
        StreamProvisioned(
            stream=OWN.name, action="kept", differences=("num_replicas: 1 -> 3",), refused=backend.refusal
        )
    ]


async def test_no_stream_is_created_for_its_replicas(provisioner: Provisioner, backend: ObservedBackend) -> None:
    await provisioner.raise_replicas(OWN.name, 3)
    assert await backend.stream_names() == []


MONITORED = structs.replace(SPEC, monitored=True)
ENABLED = "io.nats.monitor.enabled"


async def test_a_stream_is_created_with_what_nats_server_check_reads(
    backend: ObservedBackend, provisioner: Provisioner
) -> None:
    await provisioner.ensure(MONITORED)
    assert (await backend.stream_info("MARS")).config.metadata[ENABLED] == "true"


async def test_an_existing_stream_gets_it_with_its_next_update(
    backend: ObservedBackend, provisioner: Provisioner
) -> None:
    """For it alone nothing is updated: the stream may be an aviso-server's."""
    await backend.create_stream(SPEC)
    await provisioner.ensure(MONITORED)
    assert backend.asked["update"] == 0
    provisioner.forget("MARS")
    await provisioner.ensure(structs.replace(MONITORED, max_msgs=20))
    assert (await backend.stream_info("MARS")).config.metadata[ENABLED] == "true"
