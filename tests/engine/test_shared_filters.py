"""When a version of an agent counts as gone, and what is done with what no version wants, in virtual time."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from msgspec import structs

from aviso_workers.backends import Backend, ConsumerInfo, Message
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.engine import acknowledging
from aviso_workers.engine.consumer_records import ConsumerRecorder
from aviso_workers.engine.provisioning import Provisioner
from aviso_workers.engine.shared_filters import CHECK_AGAIN_SECONDS, CHECK_SECONDS, GONE_SECONDS, SharedFilter
from aviso_workers.errors import UnavailableError
from aviso_workers.events import Events, FiltersDiffer
from aviso_workers.jetstream.metadata import RESETS, VERSIONS, Version, shared
from aviso_workers.jetstream.specs import ConsumerSpec, StreamSpec
from tests.deliveries import UnsettledDelivery

pytestmark = pytest.mark.anyio

NARROW = ("mars.od.>",)
WIDE = ("mars.od.>", "mars.rd.>")


def spec(filters: tuple[str, ...]) -> ConsumerSpec:
    return ConsumerSpec(durable_name="app__agent", filter_subjects=filters, ack_wait=10**9, max_ack_pending=10)


def recorder(backend: Backend, stream: str, events: Events) -> ConsumerRecorder:
    provisioner = Provisioner(backend, management="reconcile", events=events)
    return ConsumerRecorder(
        backend, provisioner, app="app", agent="agent", stream=stream, longest_seconds=300.0, events=events
    )


def worker(backend: Backend, filters: tuple[str, ...], stated: list[FiltersDiffer]) -> SharedFilter:
    events = Events()
    events.listen(stated.append, FiltersDiffer)
    return SharedFilter(
        spec(filters),
        agent="agent",
        stream="MARS",
        backend=backend,
        recorder=recorder(backend, "MARS", events),
        retries=recorder(backend, "RETRIES", events),
        events=events,
        on_ack_wait=lambda seconds: None,
    )


@asynccontextmanager
async def keeping(filters: SharedFilter) -> AsyncIterator[None]:
    """Its worker runs meanwhile."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(filters.keep)
        yield
        tasks.cancel_scope.cancel()


async def filters_of(backend: Backend) -> tuple[str, ...]:
    return tuple((await backend.consumer_info("MARS", "app__agent")).config["filter_subjects"])


@pytest.fixture(autouse=True)
async def mars(backend: InMemoryBackend) -> None:
    await backend.create_stream(StreamSpec(name="MARS", subjects=("mars.>",)))


async def test_one_that_nobody_runs_is_gone_and_one_that_somebody_runs_is_not(backend: InMemoryBackend) -> None:
    stated: list[FiltersDiffer] = []
    wide, narrow = worker(backend, WIDE, []), worker(backend, NARROW, stated)
    async with anyio.create_task_group() as tasks:
        with anyio.CancelScope() as wide_runs:
            await wide.ensure()
            await narrow.ensure()
            tasks.start_soon(narrow.keep)
            async with anyio.create_task_group() as other:
                other.start_soon(wide.keep)
                await backend.clock.sleep(10 * GONE_SECONDS)
                assert await filters_of(backend) == WIDE
                wide_runs.cancel()

        await backend.clock.sleep(2 * GONE_SECONDS)
        assert await filters_of(backend) == NARROW
        assert [(event.others, event.gone) for event in stated] == [((WIDE,), ()), ((), (WIDE,))]
        tasks.cancel_scope.cancel()


async def test_one_that_was_cut_off_together_with_who_looks_is_not_gone(backend: InMemoryBackend) -> None:
    stated: list[FiltersDiffer] = []
    async with backend.peer() as peer, anyio.create_task_group() as tasks:
        wide, narrow = worker(peer, WIDE, stated), worker(backend, NARROW, stated)
        await wide.ensure()
        await narrow.ensure()
        tasks.start_soon(narrow.keep)
        tasks.start_soon(wide.keep)
        await backend.clock.sleep(GONE_SECONDS)
        backend.disconnect()
        peer.disconnect()
        await backend.clock.sleep(3 * GONE_SECONDS)
        backend.reconnect()
        await backend.clock.sleep(2 * CHECK_SECONDS)
        peer.reconnect()
        await backend.clock.sleep(3 * GONE_SECONDS)
        tasks.cancel_scope.cancel()

    assert await filters_of(backend) == WIDE
    assert [event.gone for event in stated if event.gone] == []


async def test_the_only_version_changes_nothing_again_and_again(backend: InMemoryBackend) -> None:
    narrow = worker(backend, NARROW, [])
    opened = await narrow.ensure()
    async with keeping(narrow):
        await backend.clock.sleep(10 * CHECK_SECONDS)
        assert (await backend.consumer_info("MARS", "app__agent")).config == opened.config


async def test_a_filter_that_lacks_what_a_version_wants_is_mended(backend: InMemoryBackend) -> None:
    wide = worker(backend, WIDE, [])
    await wide.ensure()
    async with keeping(wide):
        await backend.ensure_consumer(
            "MARS", structs.replace(shared(spec(WIDE), {Version(WIDE, 10**9): 0}), filter_subjects=NARROW)
        )
        await backend.clock.sleep(2 * CHECK_SECONDS)
        assert await filters_of(backend) == WIDE


FORGED = {
    "no JSON": "x",
    "no versions": "[1]",
    "no number": '{"mars.>": "1"}',
    "a negative number": '{"mars.>": -1}',
    "a long number": f'{{"mars.>": {10**30}}}',
    "no ack_wait": '{"ack_wait=x mars.>": 0}',
    "a negative ack_wait": '{"ack_wait=-1 mars.>": 0}',
    "a long ack_wait": f'{{"ack_wait={"9" * 5000} mars.>": 0}}',
    "no filter subject": '{"ack_wait=1 mars..>": 0}',
    "many filter subjects": json.dumps({f"ack_wait=1 mars.{number}.>": 0 for number in range(2000)}),
}


@pytest.mark.parametrize("noted", FORGED.values(), ids=FORGED)
async def test_versions_that_somebody_else_has_noted_count_as_none(backend: InMemoryBackend, noted: str) -> None:
    narrow = worker(backend, NARROW, [])
    opened = await narrow.ensure()
    forged = structs.replace(spec(WIDE), metadata={VERSIONS: noted, RESETS: "9" * 5000})
    async with keeping(narrow):
        await backend.ensure_consumer("MARS", forged)
        await backend.clock.sleep(2 * CHECK_SECONDS)
        assert await filters_of(backend) == WIDE, "as for an older version without notes, until that is gone"
        await backend.clock.sleep(2 * GONE_SECONDS)
    assert (await backend.consumer_info("MARS", "app__agent")).config["filter_subjects"] == list(NARROW)
    await backend.ensure_consumer("MARS", forged)
    assert (await narrow.ensure()).name == opened.name


async def test_of_two_that_open_it_at_once_the_one_that_was_overwritten_soon_mends_it(backend: InMemoryBackend) -> None:
    narrow, wide = worker(backend, NARROW, []), worker(backend, WIDE, [])
    await narrow.ensure()
    await wide.ensure()
    await backend.ensure_consumer("MARS", shared(spec(NARROW), {Version(NARROW, 10**9): 0}))
    async with keeping(wide):
        await backend.clock.sleep(2 * CHECK_AGAIN_SECONDS)
        assert await filters_of(backend) == WIDE


class Delivered(UnsettledDelivery):
    """A delivery that notes how it was settled."""

    def __init__(self, subject: str, *, sequence: int) -> None:
        self.message = Message(subject=subject, data=b"", sequence=sequence, timestamp_ns=sequence)
        self.settled = ""

    def ack(self) -> None:
        self.settled = "acked"

    def nak(self, *, delay_seconds: float = 0.0) -> None:
        self.settled = "given back"


class TestWhatNoVersionIsKnownToWant:
    """It is acked only after a look that began when it was stored."""

    def leave(self, filters: SharedFilter, sequence: int) -> str:
        delivery = Delivered("mars.rd", sequence=sequence)
        settlement = filters.leaves(delivery)
        assert settlement is not None
        acknowledging.settle(delivery, settlement)
        return delivery.settled

    async def test_is_given_back_before_that_look(
        self, backend: InMemoryBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        narrow = worker(backend, NARROW, [])
        await narrow.ensure()
        consumer_info = backend.consumer_info
        arrived: list[str] = []

        async def one_arrives_meanwhile(stream: str, consumer: str) -> ConsumerInfo:
            found = await consumer_info(stream, consumer)
            if not arrived:
                arrived.append(self.leave(narrow, 2))
            return found

        monkeypatch.setattr(backend, "consumer_info", one_arrives_meanwhile)
        assert self.leave(narrow, 1) == "given back"
        async with keeping(narrow):
            await backend.clock.sleep(1.5 * CHECK_AGAIN_SECONDS)
            assert arrived == ["given back"]
            assert [self.leave(narrow, sequence) for sequence in (1, 2)] == ["acked", "given back"]
            await backend.clock.sleep(CHECK_AGAIN_SECONDS)
            assert self.leave(narrow, 2) == "acked"

    async def test_is_given_back_where_the_look_fails(
        self, backend: InMemoryBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The consumer was read, and could not be updated."""
        narrow = worker(backend, NARROW, [])
        await narrow.ensure()
        await backend.ensure_consumer("MARS", shared(spec(WIDE), {}))

        async def refuse(stream: str, spec: ConsumerSpec) -> ConsumerInfo:
            raise UnavailableError("no answer")

        monkeypatch.setattr(backend, "ensure_consumer", refuse)
        async with keeping(narrow):
            for _ in range(3):
                assert self.leave(narrow, 1) == "given back"
                await backend.clock.sleep(2 * CHECK_AGAIN_SECONDS)

    async def test_is_given_back_in_a_stream_that_was_made_anew(self, backend: InMemoryBackend) -> None:
        narrow = worker(backend, NARROW, [])
        await narrow.ensure()
        assert self.leave(narrow, 5) == "given back"
        async with keeping(narrow):
            await backend.clock.sleep(2 * CHECK_AGAIN_SECONDS)
        assert self.leave(narrow, 5) == "acked"

        await backend.delete_stream("MARS")
        await backend.create_stream(StreamSpec(name="MARS", subjects=("mars.>",)))
        await narrow.ensure()
        assert self.leave(narrow, 1) == "given back"
