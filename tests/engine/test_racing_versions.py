"""Workers of several versions of an agent start, stop and restart at any time, on slow ways to the server: whatever a
version wants that reads is handled.

Each request takes its time on the way there and back, now and then so long that others have gone on meanwhile. So
updates of the consumer arrive in any order.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any, TypeVar

import anyio
import pytest
from msgspec import Struct

from aviso_workers import config
from aviso_workers.backends import ConsumerInfo, Delivery, Message, PubAck
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.backends.provisioning import Provisioner
from aviso_workers.engine.consumer_recorder import ConsumerRecorder
from aviso_workers.engine.shared_filters import GONE_SECONDS, SharedFilter
from aviso_workers.errors import BackendError, UnavailableError
from aviso_workers.events import Events, FilterHides
from aviso_workers.jetstream.specs import ConsumerSpec, StreamSpec
from aviso_workers.state import consumer_records, versions
from aviso_workers.state.versions import Versions
from tests.engine.conftest import A_LONG_TIME

pytestmark = pytest.mark.anyio

T = TypeVar("T")

VERSIONS = {"od": ("mars.od.>",), "rd": ("mars.rd.>",), "both": ("mars.od.>", "mars.rd.>")}
DURABLE = "app__agent"
SOON_SECONDS = 100.0


class SlowBackend(InMemoryBackend):
    """A client of the same streams whose requests take their time, there and back."""

    def __init__(self, other: InMemoryBackend, way: Callable[[], Awaitable[None]]) -> None:
        super().__init__(config.InMemory(), clock=other.clock)
        self._account, self._dispatchers = other._account, other._dispatchers
        self._way = way

    async def _on_its_way(self, request: Callable[[], Awaitable[T]]) -> T:
        await self._way()
        answer = await request()
        await self._way()
        return answer

    async def consumer_info(self, *args: Any, **options: Any) -> ConsumerInfo:
        return await self._on_its_way(lambda: super(SlowBackend, self).consumer_info(*args, **options))

    async def ensure_consumer(self, *args: Any, **options: Any) -> ConsumerInfo:
        return await self._on_its_way(lambda: super(SlowBackend, self).ensure_consumer(*args, **options))

    async def delete_consumer(self, *args: Any, **options: Any) -> None:
        await self._on_its_way(lambda: super(SlowBackend, self).delete_consumer(*args, **options))

    async def publish(self, *args: Any, **options: Any) -> PubAck:
        return await self._on_its_way(lambda: super(SlowBackend, self).publish(*args, **options))

    async def message(self, *args: Any, **options: Any) -> Message | None:
        return await self._on_its_way(lambda: super(SlowBackend, self).message(*args, **options))


async def at_once() -> None: ...


class Reading(Struct):
    """From when to when a worker of a version read."""

    version: str
    since: float
    until: float = float("inf")


class Deployment:
    def __init__(self, backend: InMemoryBackend) -> None:
        self.backend = backend
        self.readings: list[Reading] = []
        self.stored: list[tuple[float, str]] = []
        """When each message was stored, and its class."""
        self.handled: set[int] = set()
        """Sequences."""
        self.left_at: dict[int, float] = {}
        """When each was given to a worker that does not want it, for the last time, by sequence."""
        self.hidden: list[FilterHides] = []

    def filters(self, version: str, backend: InMemoryBackend) -> SharedFilter:
        events = Events()
        events.listen(self.hidden.append, FilterHides)
        recorders = [
            ConsumerRecorder(
                backend,
                Provisioner(backend, management="reconcile", events=events),
                app="app",
                agent="agent",
                stream=stream,
                longest_seconds=300.0,
                events=events,
            )
            for stream in ("MARS", "RETRIES")
        ]
        return SharedFilter(
            ConsumerSpec(
                durable_name=DURABLE, filter_subjects=VERSIONS[version], ack_wait=20 * 10**9, max_ack_pending=1000
            ),
            everything=("mars.>",),
            registry=Versions(backend, app="app", agent="agent", stream="MARS"),
            recorder=recorders[0],
            retries=recorders[1],
            on_ack_wait=lambda seconds: None,
        )

    async def worker(self, version: str, backend: InMemoryBackend) -> None:
        """Run a worker until it is cancelled."""
        if isinstance(backend, SlowBackend):
            async with backend:
                await self._work(version, backend)
        await self._work(version, backend)

    async def _work(self, version: str, backend: InMemoryBackend) -> None:
        filters = self.filters(version, backend)

        def deliver(deliveries: Sequence[Delivery]) -> None:
            for delivery in deliveries:
                if filters.leaves(delivery):
                    self.left_at[delivery.message.sequence] = backend.clock.monotonic()
                else:
                    self.handled.add(delivery.message.sequence)
                    delivery.ack()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(filters.keep_in_line)
            while True:
                try:
                    await filters.ensure()
                    async with backend.consume("MARS", DURABLE, deliver=deliver, capacity=lambda: 100) as consumer:
                        reading = Reading(version, backend.clock.monotonic())
                        self.readings.append(reading)
                        try:
                            await consumer.lost()
                        finally:
                            reading.until = backend.clock.monotonic()
                except BackendError:
                    await backend.clock.sleep(0.1)

    async def publish(self, name: str) -> None:
        message = Message(subject=f"mars.{name}.{len(self.stored)}", data=b"")
        await self.backend.publish(message, message_id=message.subject, stream="MARS", timeout_seconds=1)
        self.stored.append((self.backend.clock.monotonic(), name))

    def missed(self) -> list[tuple[int, float, str]]:
        """Return what was not handled although a worker read that wants it: sequence, time and class.

        A worker that stops soon after may not have been given it, and its version may be gone after that. Nor may one
        that stops while the server still offers it to all in turn: of four workers, three may be given it thirty times.
        """
        return [
            (sequence, time, name)
            for sequence, (time, name) in enumerate(self.stored, start=1)
            if sequence not in self.handled
            and any(
                name in VERSIONS[reading.version][0] + VERSIONS[reading.version][-1]
                and reading.since < time < reading.until - SOON_SECONDS
                and self.left_at.get(sequence, 0.0) < reading.until
                for reading in self.readings
            )
        ]


@pytest.fixture
async def deployment(backend: InMemoryBackend) -> Deployment:
    await backend.create_stream(StreamSpec(name="MARS", subjects=("mars.>",)))
    return Deployment(backend)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 12))])
async def test_nothing_is_missed_that_a_reading_version_wants(deployment: Deployment, seed: int) -> None:
    random = Random(seed)
    clock = deployment.backend.clock
    busy_until = 1500.0 + clock.monotonic()

    async def run_workers() -> None:
        """One after another, each of any version, on ways that are slow now and then."""
        frozen_at = float("-inf")

        async def way() -> None:
            nonlocal frozen_at
            freezes = random.random() < 0.05 and clock.monotonic() > frozen_at + GONE_SECONDS
            if freezes:
                frozen_at = clock.monotonic()
            await clock.sleep(random.uniform(1, 100) if freezes else random.choice([0, 0.001, 0.01, 0.1]))

        while clock.monotonic() < busy_until:
            await clock.sleep(random.choice([0, 0, random.uniform(0, 60)]))
            with anyio.move_on_after(random.choice([5, 60, 400, 900])):
                await deployment.worker(random.choice(list(VERSIONS)), SlowBackend(deployment.backend, way))

    async def publish() -> None:
        while clock.monotonic() < busy_until:
            await deployment.publish(random.choice(["od", "rd"]))
            await clock.sleep(random.choice([0.01, 0.1, 1, 3]))

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(run_workers)
        tasks.start_soon(publish)
    with anyio.move_on_after(3 * GONE_SECONDS):
        async with anyio.create_task_group() as tasks:
            for version in VERSIONS:
                tasks.start_soon(deployment.worker, version, deployment.backend)

    assert deployment.missed() == []
    assert len([reading for reading in deployment.readings if reading.since < busy_until]) > 5


async def test_an_update_that_narrows_hours_late_hides_nothing(deployment: Deployment) -> None:
    """The worker that makes it was frozen, and another version was deployed meanwhile."""
    backend, frozen = deployment.backend, anyio.Event()
    narrowing = anyio.Event()

    class FrozenBackend(SlowBackend):
        async def ensure_consumer(self, stream: str, spec: ConsumerSpec) -> ConsumerInfo:
            found = await self.consumer_info(stream, spec.durable_name)
            if tuple(found.config.filters) == ("mars.>",) and spec.filter_subjects == VERSIONS["od"]:
                narrowing.set()
                await frozen.wait()
            return await super().ensure_consumer(stream, spec)

    async with anyio.create_task_group() as tasks:
        tasks.cancel_scope.deadline = anyio.current_time() + A_LONG_TIME
        with anyio.move_on_after(60):
            tasks.start_soon(deployment.worker, "od", FrozenBackend(backend, at_once))
            await deployment.worker("both", backend)
        await narrowing.wait()
        await backend.clock.sleep(4 * 3600)
        tasks.start_soon(deployment.worker, "rd", backend)
        await backend.clock.sleep(10)
        frozen.set()
        for _ in range(100):
            await deployment.publish("rd")
            await backend.clock.sleep(0.01)
        await backend.clock.sleep(GONE_SECONDS)
        tasks.cancel_scope.cancel()

    assert deployment.hidden, "the late update has narrowed the filter"
    assert deployment.missed() == []


class HeldBackend(SlowBackend):
    """A client whose first update to this filter waits on the way there until it may `go`, and on the way `back`."""

    def __init__(self, other: InMemoryBackend, filters: tuple[str, ...]) -> None:
        super().__init__(other, at_once)
        self._filters = filters
        self.waits, self.go, self.done, self.back = (anyio.Event() for _ in range(4))

    async def ensure_consumer(self, stream: str, spec: ConsumerSpec) -> ConsumerInfo:
        if stream != "MARS" or spec.filter_subjects != self._filters or self.waits.is_set():
            return await super().ensure_consumer(stream, spec)
        self.waits.set()
        await self.go.wait()
        answer = await super().ensure_consumer(stream, spec)
        self.done.set()
        await self.back.wait()
        return answer


async def test_what_a_late_update_hides_is_delivered_though_another_one_widens_the_filter_again(
    deployment: Deployment,
) -> None:
    backend = deployment.backend
    narrowing, widening = HeldBackend(backend, VERSIONS["od"]), HeldBackend(backend, ("mars.>",))
    async with anyio.create_task_group() as tasks:
        tasks.cancel_scope.deadline = anyio.current_time() + A_LONG_TIME
        with anyio.move_on_after(60):
            tasks.start_soon(deployment.worker, "od", backend)
            tasks.start_soon(deployment.worker, "od", narrowing)
            await deployment.worker("both", backend)
        await narrowing.waits.wait()
        await backend.clock.sleep(60)
        tasks.start_soon(deployment.worker, "both", widening)
        with anyio.move_on_after(60):
            await widening.waits.wait()
        tasks.start_soon(deployment.worker, "rd", backend)
        await backend.clock.sleep(5)
        narrowing.go.set()
        await narrowing.done.wait()
        for name in (
            "rd",
            "od",
        ) * 5:  # how far a consumer has come passes what it hides with the next one that it takes
            await deployment.publish(name)
            await backend.clock.sleep(0.001)
        widening.go.set()
        widening.back.set()
        await backend.clock.sleep(50)
        narrowing.back.set()
        await backend.clock.sleep(GONE_SECONDS)
        tasks.cancel_scope.cancel()

    assert deployment.hidden, "the late update has narrowed the filter"
    assert deployment.handled == set(range(1, 11))


@pytest.mark.slow
@pytest.mark.parametrize("other", [None, "rd"])
async def test_what_a_worker_has_announced_that_died_is_ended_by_another_one(
    deployment: Deployment, other: str | None
) -> None:
    backend = deployment.backend
    narrowing = HeldBackend(backend, VERSIONS["od"])
    async with anyio.create_task_group() as tasks:
        tasks.cancel_scope.deadline = anyio.current_time() + A_LONG_TIME
        with anyio.move_on_after(60):
            tasks.start_soon(deployment.worker, "od", backend)
            await deployment.worker("both", backend)
        with anyio.CancelScope() as life:
            tasks.start_soon(deployment.worker, "od", backend)
            tasks.start_soon(cancel_when, narrowing.waits, life)
            await deployment.worker("od", narrowing)
        if other:
            tasks.start_soon(deployment.worker, other, backend)
        await backend.clock.sleep(2 * GONE_SECONDS)
        (registered,) = versions.parsed(await consumer_records.entries(backend)).values()
        assert [each.narrowing for each in registered] == [0] * len(registered)
        assert {*(await backend.consumer_info("MARS", DURABLE)).config.filters} == {"mars.>" if other else "mars.od.>"}
        assert bool(deployment.hidden) == bool(other), "nobody lacks anything that is alone"
        tasks.cancel_scope.cancel()


async def cancel_when(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


async def test_a_worker_that_cannot_register_reads_nothing_through_the_filter_of_others(deployment: Deployment) -> None:
    await deployment.filters("od", deployment.backend).ensure()
    deployment.backend.disconnect()
    with pytest.raises(UnavailableError):
        await deployment.filters("rd", deployment.backend).ensure()
