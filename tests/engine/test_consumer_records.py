"""What workers record of an agent's consumer, in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import Any

import anyio
import pytest
from msgspec import structs

from aviso_workers import config
from aviso_workers.backends import ConsumerInfo, Delivery, Message, StreamInfo
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.backends.provisioning import Provisioner
from aviso_workers.clocks import VirtualClock
from aviso_workers.declare.agents import Policy
from aviso_workers.declare.limits import Rate
from aviso_workers.declare.retry import RetryPolicy
from aviso_workers.engine import consumer_recorder
from aviso_workers.engine.consumer_recorder import ConsumerRecorder, longest_seconds
from aviso_workers.errors import NotFoundError, RefusedError, UnavailableError
from aviso_workers.events import ConsumerNotRecorded, ConsumerResumed, ConsumerTakenBack, Events
from aviso_workers.jetstream.specs import ConsumerSpec, StreamSpec
from aviso_workers.ops import maintenance
from aviso_workers.state import consumer_records
from aviso_workers.state.consumer_records import ConsumerRecord

pytestmark = pytest.mark.anyio


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
async def backend(clock: VirtualClock) -> AsyncIterator[InMemoryBackend]:
    async with InMemoryBackend(config.InMemory(), clock=clock) as backend:
        yield backend


class Slow(InMemoryBackend):
    """Notes how many buckets are read at the same time."""

    reading = most = 0

    async def key_value(self, bucket: str, **wanted: Any) -> Any:
        self.reading += 1
        self.most = max(self.most, self.reading)
        await anyio.sleep(0.001)
        self.reading -= 1
        return await super().key_value(bucket, **wanted)


async def test_the_records_of_many_apps_are_read_together_and_come_in_order() -> None:
    apps = [f"app{number:02}" for number in range(20)]
    async with Slow(config.InMemory()) as backend:
        for app in reversed(apps):
            await (await consumer_records.bucket(backend, app)).put(f"{app}/agents", b"[]")
        await (await consumer_records.bucket(backend, "other")).put("app00/agents", b"[]")
        assert [entry.key for entry in await consumer_records.entries(backend)] == [f"{app}/agents" for app in apps]
        assert backend.most == consumer_records.AT_ONCE


SPEC = ConsumerSpec(durable_name="field__index", filter_subjects=("mars.>",), ack_wait=10**9, max_ack_pending=10)


class Place:
    """The stream MARS with the agent `index` of the app `field`, and one worker's recorder."""

    def __init__(self, backend: InMemoryBackend) -> None:
        self.backend = backend
        self.facts: list[ConsumerNotRecorded | ConsumerResumed | ConsumerTakenBack] = []
        self.recorder = self.worker()

    def worker(self) -> ConsumerRecorder:
        events = Events()
        events.listen(self.facts.append, ConsumerNotRecorded)
        events.listen(self.facts.append, ConsumerResumed)
        events.listen(self.facts.append, ConsumerTakenBack)
        return ConsumerRecorder(
            self.backend,
            Provisioner(self.backend, management="reconcile", events=events),
            app="field",
            agent="index",
            stream="MARS",
            longest_seconds=300.0,
            events=events,
        )

    async def publish(self, number: int) -> None:
        message = Message(subject=f"mars.{number}", data=b"")
        await self.backend.publish(message, message_id=str(number), stream="MARS", timeout_seconds=1)

    async def info(self) -> ConsumerInfo:
        return await self.backend.consumer_info("MARS", "field__index")

    async def move(self, ack_floor: int) -> None:
        """Record another position, as `agents reset` does."""
        await consumer_records.move(
            self.backend,
            app="field",
            agent="index",
            stream="MARS",
            ack_floor=ack_floor,
            filter_subjects=SPEC.filter_subjects,
        )

    async def record(self) -> ConsumerRecord:
        await self.recorder.record(await self.info())
        return (await consumer_records.stored(self.backend))["field", "index", "MARS"]


@pytest.fixture
async def place(backend: InMemoryBackend) -> Place:
    await backend.create_stream(StreamSpec(name="MARS", subjects=("mars.>",)))
    await backend.ensure_consumer("MARS", SPEC)
    return Place(backend)


def ack(deliveries: Sequence[Delivery]) -> None:
    for delivery in deliveries:
        delivery.ack()


async def test_since_when_the_oldest_is_unfinished_is_kept_while_the_floor_stands(
    place: Place, clock: VirtualClock
) -> None:
    assert (await place.record()).unfinished_since is None, "there is nothing to do"
    await place.publish(1)
    began = (await place.record()).unfinished_since
    assert began is not None
    await clock.advance(100)
    assert (await place.record()).unfinished_since == began

    place.recorder = place.worker()
    await clock.advance(100)
    assert (await place.record()).unfinished_since == began, "also where a worker was started again meanwhile"


async def test_it_begins_anew_when_the_floor_rises(place: Place, clock: VirtualClock) -> None:
    await place.publish(1)
    await place.publish(2)
    before = await place.record()
    await clock.advance(100)
    delivered: list[Delivery] = []
    async with place.backend.consume("MARS", "field__index", deliver=delivered.extend, capacity=lambda: 1):
        await clock.advance(1)
        delivered[0].ack()
        await clock.advance(1)
        after = await place.record()
    assert before.unfinished_since is not None
    assert after.unfinished_since is not None
    assert (before.ack_floor, after.ack_floor) == (0, 1)
    assert after.unfinished_since - before.unfinished_since >= timedelta(seconds=101)


async def test_what_is_handled_again_after_a_reset_is_recorded_again(place: Place, clock: VirtualClock) -> None:
    """Else the record would stay at the place to which the consumer was taken."""
    await place.publish(1)
    async with place.backend.consume("MARS", "field__index", deliver=ack, capacity=lambda: 1):
        await clock.advance(1)
        assert (await place.record()).ack_floor == 1
        await place.backend.reset_consumer("MARS", "field__index", sequence=1)
        await place.move(0)
        await clock.advance(1)
        assert (await place.info()).ack_floor == 1, "it was handled again"
        assert (await place.record()).ack_floor == 1


async def test_a_record_goes_back_only_where_an_operator_resets_the_agent(place: Place, clock: VirtualClock) -> None:
    """Not where somebody has made a consumer by hand that begins with the whole stream."""
    for number in range(3):
        await place.publish(number)
    async with place.backend.consume("MARS", "field__index", deliver=ack, capacity=lambda: 3):
        await clock.advance(1)
        assert (await place.record()).ack_floor == 3
    await place.backend.delete_consumer("MARS", "field__index")
    await place.backend.ensure_consumer("MARS", SPEC)
    assert (await place.info()).settled == 0
    assert (await place.record()).ack_floor == 3
    place.recorder = place.worker()
    assert (await place.record()).ack_floor == 3, "also where a worker was started again meanwhile"
    await place.move(1)
    assert (await place.record()).ack_floor == 1


async def test_a_worker_that_finds_the_consumer_of_a_new_stream_records_it_as_such(place: Place) -> None:
    await place.record()
    await place.backend.delete_stream("MARS")
    await place.backend.create_stream(StreamSpec(name="MARS", subjects=("mars.>",)))
    await place.backend.ensure_consumer("MARS", SPEC)  # another worker was faster
    assert (await place.record()).stream_created == (await place.backend.stream_info("MARS")).created


async def test_a_worker_that_begins_beside_another_one_does_not_say_that_the_consumer_was_deleted(
    backend: InMemoryBackend,
) -> None:
    """Both find no consumer; the other one creates and records it before this one reads the record."""
    await backend.create_stream(StreamSpec(name="MARS", subjects=("mars.>",)))
    place = Place(backend)
    other = place.worker()
    found = await place.recorder.found()
    await other.record(await other.ensure(SPEC, await other.found()))
    await place.recorder.ensure(SPEC, found)
    assert found is None
    assert place.facts == []


async def test_a_record_beyond_the_end_of_its_stream_passes_nothing_over(
    place: Place, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a server lost the end of the stream with its power, and the consumer with it."""
    for number in range(5):
        await place.publish(number)
    async with place.backend.consume("MARS", "field__index", deliver=ack, capacity=lambda: 5):
        await clock.advance(1)
        assert (await place.record()).ack_floor == 5
    await place.backend.delete_consumer("MARS", "field__index")
    stream_info = place.backend.stream_info

    async def without_its_end(stream: str) -> StreamInfo:
        info = await stream_info(stream)
        return structs.replace(info, last_sequence=min(info.last_sequence, 3))

    monkeypatch.setattr(place.backend, "stream_info", without_its_end)
    info = await place.worker().ensure(SPEC, None)
    assert info.config["opt_start_seq"] == 4


async def test_a_consumer_whose_record_is_gone_as_well_goes_on_after_what_its_worker_has_last_seen(
    place: Place, clock: VirtualClock
) -> None:
    """`agents rm` was called while the worker was frozen."""
    await place.publish(1)
    async with place.backend.consume("MARS", "field__index", deliver=ack, capacity=lambda: 1):
        await clock.advance(1)
        await place.record()
    await place.backend.delete_consumer("MARS", "field__index")
    await consumer_records.remove(place.backend, app="field", agent="index", stream="MARS")
    info = await place.recorder.ensure(SPEC, None)
    assert info.config["opt_start_seq"] == 2
    resumed = ConsumerResumed(agent="index", stream="MARS", consumer="field__index", sequence=2, recorded=False)
    assert place.facts == [resumed]


@pytest.mark.parametrize("by", ["an operator's command", "somebody else"])
async def test_a_reset_that_is_not_recorded_is_told_once(place: Place, clock: VirtualClock, by: str) -> None:
    for number in range(3):
        await place.publish(number)
    async with place.backend.consume("MARS", "field__index", deliver=ack, capacity=lambda: 3):
        await clock.advance(1)
    await place.record()
    await place.backend.reset_consumer("MARS", "field__index", sequence=1)
    await place.recorder.refresh()
    assert place.facts == []
    if by == "an operator's command":
        await place.move(0)
    for _ in range(3):
        await place.recorder.refresh()
    taken_back = ConsumerTakenBack(agent="index", stream="MARS", consumer="field__index", recorded=3, settled=0)
    assert place.facts == ([] if by == "an operator's command" else [taken_back])


async def test_a_record_that_is_gone_is_written_again_although_nothing_is_new(
    place: Place, clock: VirtualClock
) -> None:
    """Somebody has deleted the bucket."""
    record = await place.record()
    await place.backend.delete_stream("KV_field__state")
    await place.recorder.refresh()
    assert await consumer_records.stored(place.backend) == {}
    await clock.advance(consumer_recorder.RENEW_SECONDS)
    assert (await place.record()).ack_floor == record.ack_floor


async def test_one_that_an_operator_removed_on_purpose_begins_at_its_start_also_with_a_worker_that_has_seen_it(
    place: Place, clock: VirtualClock
) -> None:
    await place.record()
    await maintenance.remove_consumer(place.backend, "MARS", "field__index")
    info = await place.recorder.ensure(SPEC, None)
    assert (info.config["deliver_policy"], place.facts) == ("all", [])


async def test_a_bucket_that_cannot_be_written_is_told_of_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    await place.record()

    async def refuse(bucket: str, **stated: object) -> None:
        raise UnavailableError("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(place.backend, "key_value", refuse)
        for number in range(3):
            await place.publish(number)
            await place.recorder.record(await place.info())
    [fact] = place.facts
    assert isinstance(fact, ConsumerNotRecorded)
    assert (fact.agent, fact.bucket) == ("index", "field__state")


async def test_a_record_of_another_stream_of_that_name_says_nothing(place: Place) -> None:
    await place.publish(1)
    before = await place.record()
    await place.backend.delete_stream("MARS")
    await place.backend.create_stream(StreamSpec(name="MARS", subjects=("mars.>",)))
    info = await place.worker().ensure(SPEC, None)
    await place.recorder.record(info)
    after = (await consumer_records.stored(place.backend))["field", "index", "MARS"]
    assert after.stream_created > before.stream_created
    assert (await place.info()).config["deliver_policy"] == "all"


async def test_who_may_not_make_the_bucket_begins_where_nobody_has_made_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(bucket: str, **stated: object) -> None:
        raise RefusedError("permission denied")

    monkeypatch.setattr(place.backend, "key_value", refuse)
    await place.backend.delete_consumer("MARS", "field__index")
    info = await place.recorder.ensure(SPEC, None)
    await place.recorder.record(info)
    assert info.config["deliver_policy"] == "all"
    assert len(place.facts) == 1


def test_a_policy_says_how_long_a_notification_may_be_unfinished() -> None:
    never_again = RetryPolicy(attempts=1)
    assert longest_seconds(Policy(retry=never_again)) == 300
    assert longest_seconds(Policy(retry=never_again, ack_wait=400)) == 800
    assert longest_seconds(Policy(retry=never_again, timeout=3600)) == 3900
    thrice = RetryPolicy(first=10, factor=2, attempts=3, jitter=0)
    assert longest_seconds(Policy(retry=thrice, timeout=60)) == 300 + 10 + 20 + 3 * 60
    assert longest_seconds(Policy(retry=never_again, limits=(Rate(1, per=10), Rate(1, per=100, by=["class"])))) == 400


async def test_a_stream_that_is_gone_is_told_as_such(place: Place) -> None:
    """It is recreated then, which another error would not lead to."""
    await place.backend.delete_stream("MARS")
    with pytest.raises(NotFoundError, match="MARS"):
        await place.recorder.ensure(SPEC, await place.recorder.found())
