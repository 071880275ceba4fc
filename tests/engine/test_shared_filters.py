"""When a version of an agent counts as gone, and what is done with what no version wants, in virtual time."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from msgspec import structs

from aviso_workers import config
from aviso_workers.backends import Backend, Delivery, KeyValue, Message
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.backends.provisioning import Provisioner
from aviso_workers.engine.consumer_recorder import ConsumerRecorder
from aviso_workers.engine.shared_filters import CHECK_SECONDS, GONE_SECONDS, SharedFilter
from aviso_workers.errors import NotFoundError, RefusedError, UnavailableError
from aviso_workers.events import ConsumerNotRecorded, Events, FilterHides, FiltersDiffer
from aviso_workers.jetstream import metadata
from aviso_workers.jetstream.metadata import RESETS, VERSIONS
from aviso_workers.jetstream.specs import ConsumerSpec, StreamSpec
from aviso_workers.state.consumer_records import bucket_of, versions_key
from aviso_workers.state.versions import Versions, including
from tests import forgeries
from tests.deliveries import UnsettledDelivery
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

NARROW = ("mars.od.>",)
WIDE = ("mars.od.>", "mars.rd.>")
EVERYTHING = ("mars.>",)


def spec(filters: tuple[str, ...]) -> ConsumerSpec:
    return ConsumerSpec(durable_name="app__agent", filter_subjects=filters, ack_wait=10**9, max_ack_pending=10)


def recorder(backend: Backend, stream: str, events: Events) -> ConsumerRecorder:
    provisioner = Provisioner(backend, management="reconcile", events=events)
    return ConsumerRecorder(
        backend, provisioner, app="app", agent="agent", stream=stream, longest_seconds=300.0, events=events
    )


def worker(backend: Backend, filters: tuple[str, ...], stated: list[Any]) -> SharedFilter:
    events = Events()
    for fact in (FiltersDiffer, FilterHides, ConsumerNotRecorded):
        events.listen(stated.append, fact)
    return SharedFilter(
        spec(filters),
        everything=EVERYTHING,
        registry=Versions(backend, app="app", agent="agent", stream="MARS"),
        recorder=recorder(backend, "MARS", events),
        retries=recorder(backend, "RETRIES", events),
        on_ack_wait=lambda seconds: None,
    )


@asynccontextmanager
async def keeping(filters: SharedFilter) -> AsyncIterator[None]:
    """Its worker runs meanwhile."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(filters.keep_in_line)
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
            tasks.start_soon(narrow.keep_in_line)
            async with anyio.create_task_group() as other:
                other.start_soon(wide.keep_in_line)
                await backend.clock.sleep(10 * GONE_SECONDS)
                assert await filters_of(backend) == EVERYTHING
                wide_runs.cancel()

        await backend.clock.sleep(2 * GONE_SECONDS)
        assert await filters_of(backend) == NARROW
        assert [(event.others, event.gone) for event in stated] == [((WIDE,), ()), ((), (WIDE,))]
        tasks.cancel_scope.cancel()


async def test_one_that_comes_back_is_not_taken_for_gone_again(backend: InMemoryBackend) -> None:
    wide, narrow, other = worker(backend, WIDE, []), worker(backend, NARROW, []), worker(backend, NARROW, [])
    await wide.ensure()
    await narrow.ensure()
    async with keeping(narrow):
        await backend.clock.sleep(CHECK_SECONDS / 2)
        async with keeping(other):  # the two look in turns
            while await filters_of(backend) == EVERYTHING:
                await backend.clock.sleep(0.1)
            again = worker(backend, WIDE, [])
            await again.ensure()
            for _ in range(30):
                assert await filters_of(backend) == EVERYTHING
                await backend.clock.sleep(CHECK_SECONDS / 10)


async def test_one_that_was_cut_off_together_with_who_looks_is_not_gone(backend: InMemoryBackend) -> None:
    stated: list[FiltersDiffer] = []
    async with backend.peer() as peer, anyio.create_task_group() as tasks:
        wide, narrow = worker(peer, WIDE, stated), worker(backend, NARROW, stated)
        await wide.ensure()
        await narrow.ensure()
        tasks.start_soon(narrow.keep_in_line)
        tasks.start_soon(wide.keep_in_line)
        await backend.clock.sleep(GONE_SECONDS)
        backend.disconnect()
        peer.disconnect()
        await backend.clock.sleep(3 * GONE_SECONDS)
        backend.reconnect()
        await backend.clock.sleep(2 * CHECK_SECONDS)
        peer.reconnect()
        await backend.clock.sleep(3 * GONE_SECONDS)
        tasks.cancel_scope.cancel()

    assert await filters_of(backend) == EVERYTHING
    assert [event.gone for event in stated if event.gone] == []


async def test_the_only_version_changes_nothing_again_and_again(backend: InMemoryBackend) -> None:
    narrow = worker(backend, NARROW, [])
    opened = await narrow.ensure()
    async with keeping(narrow):
        await backend.clock.sleep(10 * CHECK_SECONDS)
        assert (await backend.consumer_info("MARS", "app__agent")).config == opened.config


async def edit(backend: Backend, *filters: str) -> None:
    """Edit the filter of the consumer as another program does."""
    await backend.ensure_consumer("MARS", spec(filters))


async def registered(backend: Backend) -> KeyValue:
    return await backend.key_value(bucket_of("app"))


async def test_what_a_foreign_edit_of_the_filter_has_hidden_is_delivered_all_the_same(backend: InMemoryBackend) -> None:
    stated: list[Any] = []
    wide = worker(backend, WIDE, stated)
    await wide.ensure()
    async with keeping(wide):
        await publish(backend, "mars.rd.1")
        await backend.clock.sleep(2 * CHECK_SECONDS)
        assert await handled(backend) == ["mars.rd.1"]
        await backend.clock.sleep(2 * CHECK_SECONDS)
        await edit(backend, *NARROW)
        await publish(backend, "mars.rd.2", "mars.od.2")
        assert await handled(backend) == ["mars.od.2"]
        await backend.clock.sleep(2 * CHECK_SECONDS)
        with pytest.raises(NotFoundError):
            await backend.consumer_info("MARS", "app__agent")
        await wide.ensure()
        assert await handled(backend) == ["mars.rd.2", "mars.od.2"]
    assert [(fact.found, fact.wanted) for fact in stated] == [(NARROW, WIDE)]


async def test_what_an_edit_has_hidden_while_no_worker_ran_is_delivered_when_one_starts(
    backend: InMemoryBackend,
) -> None:
    await worker(backend, WIDE, []).ensure()
    await edit(backend, *NARROW)
    await publish(backend, "mars.rd.1", "mars.od.1")
    assert await handled(backend) == ["mars.od.1"]
    await worker(backend, WIDE, []).ensure()
    assert await handled(backend) == ["mars.rd.1", "mars.od.1"]


async def test_a_wider_filter_than_wanted_hides_nothing_and_is_narrowed(backend: InMemoryBackend) -> None:
    stated: list[Any] = []
    narrow = worker(backend, NARROW, stated)
    created = (await narrow.ensure()).created
    await edit(backend, *EVERYTHING)
    async with keeping(narrow):
        await backend.clock.sleep(2 * CHECK_SECONDS)
    assert await filters_of(backend) == NARROW
    assert (await backend.consumer_info("MARS", "app__agent")).created == created
    assert stated == []


@pytest.mark.parametrize("filters", [(), (">",), ("mars.*.>",)])
async def test_a_consumer_that_somebody_has_created_is_not_recreated(
    backend: InMemoryBackend, filters: tuple[str, ...]
) -> None:
    stated: list[Any] = []
    await edit(backend, *filters)
    created = (await backend.consumer_info("MARS", "app__agent")).created
    narrow = worker(backend, NARROW, stated)
    with anyio.fail_after(PATIENCE_SECONDS):
        await narrow.ensure()
    assert (await backend.consumer_info("MARS", "app__agent")).created == created
    async with keeping(narrow):
        await backend.clock.sleep(2 * GONE_SECONDS)
    assert await filters_of(backend) == NARROW
    assert [fact for fact in stated if isinstance(fact, FilterHides)] == []


FORGED = {
    "no JSON": b"x",
    "no versions": b"{}",
    "no number": b'[{"version": {"filter_subjects": [], "ack_wait": 1}, "heard": "1"}]',
    "a negative number": b'[{"version": {"filter_subjects": [], "ack_wait": 1}, "heard": -1}]',
    "a long number": b'[{"version": {"filter_subjects": [], "ack_wait": 1}, "heard": 1%s}]' % (b"0" * 5000),
    "no ack_wait": b'[{"version": {"filter_subjects": []}}]',
    "a negative ack_wait": b'[{"version": {"filter_subjects": [], "ack_wait": -1}}]',
    "a long ack_wait": b'[{"version": {"filter_subjects": [], "ack_wait": 1%s}}]' % (b"0" * 20),
    "no filter subject": b'[{"version": {"filter_subjects": ["mars..>"], "ack_wait": 1}}]',
    "many filter subjects": json.dumps(
        [{"version": {"filter_subjects": [f"mars.{number}.>"], "ack_wait": 1}} for number in range(2000)]
    ).encode(),
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
async def test_versions_that_somebody_else_has_registered_count_as_none(
    backend: InMemoryBackend, forged: bytes
) -> None:
    await (await registered(backend)).put(versions_key("app", "agent", "MARS"), forged)
    narrow = worker(backend, NARROW, [])
    await narrow.ensure()
    assert await filters_of(backend) == NARROW


@pytest.mark.parametrize("noted", ["x", "[1]", '[{"filter_subjects": [], "ack_wait": -1}]', '{"mars.>": 0}'])
async def test_metadata_that_nobody_of_ours_has_written_counts_as_none(backend: InMemoryBackend, noted: str) -> None:
    forged = structs.replace(spec(WIDE), metadata={VERSIONS: noted, RESETS: "9" * 5000})
    await backend.ensure_consumer("MARS", forged)
    narrow = worker(backend, NARROW, [])
    await narrow.ensure()
    assert await filters_of(backend) == EVERYTHING, "as for a version with its filter, until that is gone"
    async with keeping(narrow):
        await backend.clock.sleep(2 * GONE_SECONDS)
    assert await filters_of(backend) == NARROW


class TestWithoutTheRightToRegister:
    @pytest.fixture(autouse=True)
    def denied(self, backend: InMemoryBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        async def refuse(*args: object, **options: object) -> KeyValue:
            raise RefusedError("permission denied")

        monkeypatch.setattr(backend, "key_value", refuse)

    async def test_a_consumer_with_its_filter_can_be_read(self, backend: InMemoryBackend) -> None:
        stated: list[Any] = []
        await edit(backend, *NARROW)
        await worker(backend, NARROW, stated).ensure()
        assert {type(fact) for fact in stated} == {ConsumerNotRecorded}

    async def test_one_with_another_filter_cannot(self, backend: InMemoryBackend) -> None:
        await edit(backend, *WIDE)
        with pytest.raises(UnavailableError, match=r"cannot be registered.*permission denied"):
            await worker(backend, NARROW, []).ensure()
        assert await filters_of(backend) == WIDE


class Delivered(UnsettledDelivery):
    """A delivery that notes how it was settled."""

    def __init__(self, subject: str, *, sequence: int = 1) -> None:
        self.message = Message(subject=subject, data=b"", sequence=sequence, timestamp_ns=sequence)
        self.settled = ""

    def ack(self) -> None:
        self.settled = "acked"

    def nak(self, *, delay_seconds: float = 0.0) -> None:
        self.settled = "given back" if delay_seconds <= 0.15 else "given back for long"


class TestWhatThisVersionDoesNotWant:
    async def leave(self, filters: SharedFilter, subject: str) -> str:
        delivery = Delivered(subject)
        assert filters.leaves(delivery)
        assert delivery.settled == "", "before it is known which versions there are"
        async with keeping(filters):
            await anyio.wait_all_tasks_blocked()
        return delivery.settled

    async def test_is_acked_where_no_version_wants_it(self, backend: InMemoryBackend) -> None:
        narrow = worker(backend, NARROW, [])
        await narrow.ensure()
        assert await self.leave(narrow, "mars.rd.1") == "acked"

    async def test_is_given_back_where_another_version_wants_it_that_came_later(self, backend: InMemoryBackend) -> None:
        narrow = worker(backend, NARROW, [])
        await narrow.ensure()
        await worker(backend, WIDE, []).ensure()
        assert await self.leave(narrow, "mars.rd.1") == "given back"
        assert await self.leave(narrow, "mars.xx.1") == "acked"

    async def test_is_given_back_where_the_versions_cannot_be_read(self, backend: InMemoryBackend) -> None:
        narrow = worker(backend, NARROW, [])
        await narrow.ensure()
        backend.disconnect()
        assert await self.leave(narrow, "mars.rd.1") == "given back"

    async def test_is_nothing_that_it_wants(self, backend: InMemoryBackend) -> None:
        assert not worker(backend, NARROW, []).leaves(Delivered("mars.od.1"))


async def publish(backend: Backend, *subjects: str) -> None:
    for subject in subjects:
        message = Message(subject=subject, data=b"")
        await backend.publish(message, message_id=subject, stream="MARS", timeout_seconds=1)


async def handled(backend: InMemoryBackend) -> list[str]:
    """Read the consumer for a moment, ack what comes, and return its subjects."""
    deliveries: list[Delivery] = []

    def deliver(several: Sequence[Delivery]) -> None:
        deliveries.extend(several)
        for delivery in several:
            delivery.ack()

    async with backend.consume("MARS", "app__agent", deliver=deliver, capacity=lambda: 10):
        await backend.clock.sleep(0.1)
    return [delivery.message.subject for delivery in deliveries]


async def test_a_version_is_not_taken_for_gone_where_the_versions_are_forged() -> None:
    backend = InMemoryBackend(config.InMemory())
    async with backend:
        registry = Versions(backend, app="app", agent="agent", stream="MARS")
        own, other = (metadata.version_of(spec(filters), "") for filters in (NARROW, WIDE))
        _, registered = await registry.change(lambda _: including(including((), own), other))
        assert len(registered) == 2
        forgeries.store(
            backend, f"KV_{bucket_of('app')}", f"$KV.{bucket_of('app')}.{versions_key('app', 'agent', 'MARS')}"
        )

        assert await registry.read() == registered
        assert await registry.change(lambda known: known) == (registered, registered)
        assert await Versions(backend, app="app", agent="agent", stream="MARS").read() == registered
