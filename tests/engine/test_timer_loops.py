"""Timers at work: which ticks are run, by whom, and what becomes of missed ones. Time is virtual."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import anyio
import msgspec
import pytest

from aviso_workers import Router, Tick, config
from aviso_workers.backends import Message, PubAck
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.clocks import VirtualClock
from aviso_workers.declare import timers
from aviso_workers.engine.key_value import RetryingKeyValue
from aviso_workers.engine.leases import CHECK_SECONDS, RENEW_SECONDS, Lease, Outage
from aviso_workers.errors import ConflictError, OutcomeUnknownError, UnavailableError
from aviso_workers.events import Event, Events, LeadershipChanged, LeadershipHindered, LeadershipUnhindered, Ticked
from aviso_workers.features.timers import Claims, run_timers
from aviso_workers.state.lease_records import LEADER, LEASE_SECONDS
from aviso_workers.state.timer_records import Claim
from tests import forgeries

pytestmark = pytest.mark.anyio

DRAIN_SECONDS = 30.0
BEGINNING = datetime(2026, 1, 1, tzinfo=UTC)
TAKEOVER_SECONDS = LEASE_SECONDS + 2 * CHECK_SECONDS


class WallClock(VirtualClock):
    """Virtual time whose time of day can be set."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead_seconds = 0.0

    def time_ns(self) -> int:
        return super().time_ns() + round(self.ahead_seconds * 1e9)


class Fleet:
    """Workers of one app, which share a backend and its time."""

    def __init__(self, router: Router, tasks: anyio.abc.TaskGroup, running: AsyncExitStack) -> None:
        self.router = router
        self.clock = WallClock()
        self.facts: list[Event] = []
        self.backends: list[InMemoryBackend] = []
        self.stops: list[anyio.Event] = []
        self.lives: list[anyio.CancelScope] = []
        self._tasks = tasks
        self._running = running
        self.streams = InMemoryBackend(config.InMemory(), clock=self.clock)

    async def start(self) -> int:
        """Start another worker; returns its number."""
        backend = await self._running.enter_async_context(self.streams.peer())
        events, stop, life = Events(), anyio.Event(), anyio.CancelScope()
        events.listen(self.facts.append)
        self.backends.append(backend)
        self.stops.append(stop)
        self.lives.append(life)

        async def work() -> None:
            with life:
                await run_timers(
                    self.router.timers,
                    backend=backend,
                    app="app",
                    events=events,
                    stop=stop,
                    drain_timeout_seconds=DRAIN_SECONDS,
                )

        self._tasks.start_soon(work)
        await self.clock.advance(0)
        return len(self.backends) - 1

    def kill(self, worker: int) -> None:
        self.backends[worker].disconnect()
        self.lives[worker].cancel()

    async def after(self, seconds: float) -> None:
        await self.clock.advance(seconds)

    @property
    def ticks(self) -> list[float]:
        """When what was run was due, in seconds since the beginning."""
        return [seconds_of(fact.time) for fact in self.facts if isinstance(fact, Ticked)]

    @property
    def leaders(self) -> list[bool]:
        return [fact.leads for fact in self.facts if isinstance(fact, LeadershipChanged)]


def claims_of(timer: str, backend: InMemoryBackend, lease: Lease) -> Claims:
    bucket = RetryingKeyValue(backend, "app__timers", patience_seconds=1)
    outage = Outage("app__timers", clock=backend.clock, events=Events())
    return Claims(timer, bucket, lease, outage, schedule=timers.every("60s"), in_doubt={}, events=Events())


def seconds_of(time: datetime) -> float:
    return (time - BEGINNING).total_seconds()


@pytest.fixture
def router() -> Router:
    return Router("timers")


@pytest.fixture
async def fleet(router: Router) -> AsyncGenerator[Fleet, None]:
    async with AsyncExitStack() as running, anyio.create_task_group() as tasks:
        yield Fleet(router, tasks, running)
        tasks.cancel_scope.cancel()


async def test_every_worker_runs_its_own(router: Router, fleet: Fleet) -> None:
    seen: list[Tick] = []

    @router.every("10s", singleton=False)
    async def look(tick: Tick) -> None:
        seen.append(tick)

    await fleet.start()
    await fleet.start()
    await fleet.after(25)
    assert fleet.ticks == [10, 10, 20, 20]
    assert {(tick.timer, tick.token) for tick in seen} == {("look", None)}


@pytest.mark.parametrize(
    "garbage", [b"\xff\xfe", b'{"x":' + b"[" * 100_000, b"", b"{}", b'{"time":"0001-01-01T00:00:00+23:00"}']
)
async def test_a_claim_that_no_worker_has_written_counts_from_when_it_was_stored(fleet: Fleet, garbage: bytes) -> None:
    backend = fleet.streams.peer()
    backend.reconnect()
    await (await backend.key_value("app__timers")).put("lead", garbage)
    claims = claims_of("lead", backend, Lease(backend, "app", events=Events()))

    assert seconds_of(await claims.last(BEGINNING + timedelta(hours=1))) == 0


@pytest.fixture
def tokens(router: Router) -> list[int | None]:
    """Of the ticks of a timer that the leader runs every ten seconds."""
    tokens: list[int | None] = []

    @router.every("10s", singleton=True)
    async def lead(tick: Tick) -> None:
        tokens.append(tick.token)

    return tokens


async def test_one_worker_runs_what_the_leader_runs(fleet: Fleet, tokens: list[int]) -> None:
    for _ in range(4):
        await fleet.start()
    await fleet.after(65)
    assert fleet.ticks == [10, 20, 30, 40, 50, 60]
    assert len(set(tokens)) == 1
    assert fleet.leaders == [True]


async def test_a_leader_that_dies_is_followed_within_its_lease(fleet: Fleet, tokens: list[int]) -> None:
    await fleet.start()
    await fleet.start()
    await fleet.after(15)
    fleet.kill(0)
    await fleet.after(TAKEOVER_SECONDS)
    assert fleet.leaders == [True, True]
    await fleet.after(30)
    assert fleet.ticks == [10, 20, 30, 40, 50]
    assert tokens == sorted(tokens)
    assert len(set(tokens)) == 2


async def test_a_leader_that_stops_is_followed_at_once(fleet: Fleet, tokens: list[int]) -> None:
    await fleet.start()
    await fleet.start()
    fleet.stops[0].set()
    await fleet.after(2 * CHECK_SECONDS)
    assert fleet.leaders == [True, False, True]
    await fleet.after(20)
    assert fleet.ticks == [10, 20]


async def test_a_leader_that_stops_while_its_lease_is_renewed_is_followed_at_once(
    fleet: Fleet, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the server answers late. Each of the workers leads and stops in turn."""

    def stop_when_renewed(worker: int) -> None:
        backend = fleet.backends[worker]
        publish = backend.publish

        async def publish_and_answer_late(message: Message, **stated: Any) -> PubAck:
            ack = await publish(message, **stated)
            if message.subject == f"$KV.app__leases.{LEADER}" and message.data:
                fleet.stops[worker].set()
                await fleet.clock.sleep(1)
            return ack

        monkeypatch.setattr(backend, "publish", publish_and_answer_late)

    await fleet.start()
    for worker in range(3):
        await fleet.start()
        await fleet.after(CHECK_SECONDS)
        stop_when_renewed(worker)
        await fleet.after(RENEW_SECONDS)
    await fleet.after(2 * CHECK_SECONDS)
    assert fleet.leaders == [True, False, True, False, True, False, True]


async def test_a_leader_that_lost_its_connection_ceases_before_another_begins(fleet: Fleet, tokens: list[int]) -> None:
    await fleet.start()
    await fleet.start()
    await fleet.after(5)
    fleet.backends[0].disconnect()
    await fleet.after(TAKEOVER_SECONDS)
    assert fleet.leaders == [True, False, True]
    fleet.backends[0].reconnect()
    await fleet.after(30)
    assert fleet.ticks == [10, 20, 30, 40]
    assert fleet.leaders == [True, False, True]


async def test_a_short_interruption_changes_nothing(fleet: Fleet, tokens: list[int]) -> None:
    await fleet.start()
    await fleet.after(15)
    fleet.backends[0].disconnect()
    await fleet.after(5)
    fleet.backends[0].reconnect()
    await fleet.after(20)
    assert (fleet.ticks, fleet.leaders) == ([10, 20, 30, 40], [True])


async def test_what_a_leader_runs_is_cancelled_with_its_lease(router: Router, fleet: Fleet) -> None:
    ended: list[str] = []

    @router.every("10s", singleton=True)
    async def long() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("cancelled")

    await fleet.start()
    await fleet.after(12)
    fleet.backends[0].disconnect()
    await fleet.after(LEASE_SECONDS)
    assert ended == ["cancelled"]


async def test_of_two_that_believe_to_lead_one_may_run_a_tick(fleet: Fleet) -> None:
    start, tick = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, 6, tzinfo=UTC)
    claims = []
    for _ in range(2):
        backend = fleet.streams.peer()
        backend.reconnect()
        lease = Lease(backend, "app", events=Events())
        await lease.take(anyio.Event())
        claims.append(claims_of("daily", backend, lease))
        await lease.give_back()
        lease._until = math.inf
        assert await claims[-1].last(start) == start

    await fleet.after(6 * 3600)
    assert await claims[0].claim(tick)
    with pytest.raises(ConflictError):
        await claims[1].claim(tick)
    assert claims[1].in_doubt == {}, "a claim that was refused is never stored"
    assert claims[0].token < claims[1].token
    assert await claims[1].last(start) == tick


async def test_without_its_lease_nobody_claims_a_tick(fleet: Fleet) -> None:
    tick = BEGINNING + timedelta(hours=6)
    backend = fleet.streams.peer()
    backend.reconnect()
    lease = Lease(backend, "app", events=Events())
    await lease.take(anyio.Event())
    claims = claims_of("daily", backend, lease)
    await claims.last(BEGINNING)
    await fleet.after(LEASE_SECONDS)
    assert not await claims.claim(tick)
    assert await claims.last(BEGINNING) == BEGINNING


async def test_a_leader_that_was_overtaken_at_one_tick_goes_on_with_the_next(fleet: Fleet, tokens: list[int]) -> None:
    worker = await fleet.start()
    backend = fleet.streams.peer()
    backend.reconnect()
    paused = Lease(backend, "app", events=Events())
    paused._until = math.inf
    claims = claims_of("lead", backend, paused)
    await fleet.after(5)
    await claims.last(BEGINNING)
    assert await claims.claim(BEGINNING + timedelta(seconds=10))
    await fleet.after(30)
    assert fleet.ticks == [20, 30]
    assert fleet.leaders == [True], f"worker {worker} has led all the time"


@pytest.mark.parametrize("stored", [True, False])
async def test_a_tick_whose_claim_may_not_have_been_stored_is_run_once(
    router: Router, fleet: Fleet, monkeypatch: pytest.MonkeyPatch, *, stored: bool
) -> None:
    """As when the bucket changes its leader while it is claimed."""

    @router.every("10s", singleton=True, catch_up=True)
    async def lead() -> None: ...

    await fleet.start()
    await fleet.after(15)
    backend, clock = fleet.backends[0], fleet.clock
    publish, away_until = backend.publish, clock.monotonic() + 10

    async def publish_while_the_leader_changes(message: Message, **stated: Any) -> PubAck:
        if "app__timers" not in message.subject or clock.monotonic() >= away_until:
            return await publish(message, **stated)
        if stored:
            with suppress(ConflictError):
                await publish(message, **stated)
        raise OutcomeUnknownError("no answer")

    monkeypatch.setattr(backend, "publish", publish_while_the_leader_changes)

    await fleet.after(30)

    assert fleet.ticks == [10, 20, 30, 40]


async def test_a_tick_whose_claim_is_stored_late_is_run_once(
    router: Router, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim is under way for longer than it is waited for, and arrives just before the next one."""

    @router.every("10s", singleton=True, catch_up=True)
    async def lead() -> None: ...

    await fleet.start()
    await fleet.after(15)
    backend, clock = fleet.backends[0], fleet.clock
    publish, away_until = backend.publish, clock.monotonic() + 10
    under_way: list[tuple[Message, dict[str, Any]]] = []

    async def publish_late(message: Message, **stated: Any) -> PubAck:
        if "app__timers" not in message.subject:
            return await publish(message, **stated)
        if clock.monotonic() < away_until:
            under_way[:] = [(message, stated)]
            raise OutcomeUnknownError("no answer")
        while under_way:
            late, stated_late = under_way.pop()
            await publish(late, **stated_late)
        return await publish(message, **stated)

    monkeypatch.setattr(backend, "publish", publish_late)

    await fleet.after(30)

    assert fleet.ticks == [10, 20, 30, 40]


async def test_a_tick_whose_claim_was_in_doubt_when_the_lease_was_over_is_run_by_the_same_worker_later(
    router: Router, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    @router.every("10s", singleton=True, catch_up=True)
    async def lead() -> None: ...

    await fleet.start()
    await fleet.after(15)
    backend, clock = fleet.backends[0], fleet.clock
    publish, away_until = backend.publish, clock.monotonic() + 2 * LEASE_SECONDS

    async def publish_unanswered(message: Message, **stated: Any) -> PubAck:
        if clock.monotonic() >= away_until:
            return await publish(message, **stated)
        if "app__leases" in message.subject:
            raise UnavailableError("no leader")
        with suppress(ConflictError):
            await publish(message, **stated)
        raise OutcomeUnknownError("no answer")

    monkeypatch.setattr(backend, "publish", publish_unanswered)

    await fleet.after(50)

    assert fleet.leaders == [True, False, True]
    assert fleet.ticks == [10, 20, 30, 40, 50, 60]


async def test_a_lease_whose_renewal_was_stored_without_an_answer_is_still_ours(
    router: Router, fleet: Fleet, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.start()
    await fleet.after(15)
    backend, clock = fleet.backends[0], fleet.clock
    publish, away_until = backend.publish, clock.monotonic() + LEASE_SECONDS / 2

    async def publish_unanswered(message: Message, **stated: Any) -> PubAck:
        if "app__leases" not in message.subject or clock.monotonic() >= away_until:
            return await publish(message, **stated)
        with suppress(ConflictError):
            await publish(message, **stated)
        raise OutcomeUnknownError("no answer")

    monkeypatch.setattr(backend, "publish", publish_unanswered)

    await fleet.after(30)

    assert fleet.leaders == [True]
    assert fleet.ticks == [10, 20, 30, 40]


async def test_a_lease_that_another_worker_took_while_ours_was_in_doubt_is_not_ours(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = fleet.streams.peer()
    backend.reconnect()
    lease = Lease(backend, "app", events=Events())
    assert await lease.take(anyio.Event())
    publish = backend.publish

    async def publish_in_vain(message: Message, **stated: Any) -> PubAck:
        raise OutcomeUnknownError("no answer")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lease.hold, term := anyio.CancelScope())
        monkeypatch.setattr(backend, "publish", publish_in_vain)
        await fleet.after(2 * RENEW_SECONDS)
        monkeypatch.setattr(backend, "publish", publish)
        await (await backend.key_value("app__leases")).put(LEADER, b"another")
        await fleet.after(RENEW_SECONDS)
        assert (lease.held, term.cancel_called) == (False, True)


async def test_no_tick_is_missed_where_the_bucket_of_claims_is_deleted(router: Router, fleet: Fleet) -> None:
    @router.every("10s", singleton=True, catch_up=True)
    async def lead() -> None: ...

    await fleet.start()
    await fleet.start()
    for _ in range(3):
        await fleet.after(19.5)
        await fleet.backends[0].delete_stream("KV_app__timers")
    await fleet.after(20)

    assert fleet.ticks == [10, 20, 30, 40, 50, 60, 70]


async def test_no_tick_is_missed_and_no_leader_changes_where_lease_and_claim_are_forged(
    router: Router, fleet: Fleet
) -> None:
    @router.every("10s", singleton=True, catch_up=True)
    async def lead() -> None: ...

    await fleet.start()
    await fleet.start()
    for _ in range(60):
        await fleet.after(1)
        forgeries.store(fleet.streams.peer(), "KV_app__leases", f"$KV.app__leases.{LEADER}")
        forgeries.store(fleet.streams.peer(), "KV_app__timers", "$KV.app__timers.lead")

    await fleet.after(2)
    assert fleet.ticks == [10, 20, 30, 40, 50, 60]
    assert fleet.leaders == [True]


async def test_a_leader_that_dies_is_followed_when_its_lease_is_not_forged_any_more(
    router: Router, fleet: Fleet
) -> None:
    @router.every("10s", singleton=True, catch_up=True)
    async def lead() -> None: ...

    await fleet.start()
    await fleet.start()
    await fleet.after(15)
    fleet.kill(0)
    for _ in range(math.ceil(TAKEOVER_SECONDS) + 3):
        forgeries.store(fleet.streams.peer(), "KV_app__leases", f"$KV.app__leases.{LEADER}")
        await fleet.after(1)
    assert fleet.leaders == [True]  # each forged value may hide that the leader is at work

    await fleet.after(math.ceil(TAKEOVER_SECONDS) + 3)
    assert fleet.leaders == [True, True]
    assert fleet.ticks == list(range(10, int(fleet.ticks[-1]) + 1, 10))


async def test_there_is_one_leader_however_long_its_lease_is_forged(router: Router, fleet: Fleet) -> None:
    @router.every("10s", singleton=True)
    async def lead() -> None: ...

    await fleet.start()
    await fleet.after(0.55)  # so that the second one does not look in the moment of a renewal
    await fleet.start()
    await fleet.after(5)
    for _ in range(40 * math.ceil(TAKEOVER_SECONDS)):
        forgeries.store(fleet.streams.peer(), "KV_app__leases", f"$KV.app__leases.{LEADER}")
        await fleet.after(0.1)
    assert fleet.leaders == [True]


@pytest.mark.parametrize("bucket", ["app__leases", "app__timers"])
async def test_a_bucket_that_may_not_be_written_is_told_once(
    fleet: Fleet, tokens: list[int], monkeypatch: pytest.MonkeyPatch, bucket: str
) -> None:
    await fleet.start()
    backend = fleet.backends[0]
    publish = backend.publish

    async def publish_elsewhere(message: Message, **stated: Any) -> PubAck:
        if bucket in message.subject:
            raise UnavailableError("permissions violation")
        return await publish(message, **stated)

    def told() -> list[str]:
        return [fact.bucket for fact in fleet.facts if isinstance(fact, LeadershipHindered)]

    def ended() -> list[str]:
        return [fact.bucket for fact in fleet.facts if isinstance(fact, LeadershipUnhindered)]

    with monkeypatch.context() as denying:
        denying.setattr(backend, "publish", publish_elsewhere)
        await fleet.after(100)
    assert told() == [bucket]
    assert ended() == []

    ran = len(tokens)
    await fleet.after(30)
    assert len(tokens) >= ran + 2
    assert told() == [bucket]
    assert ended() == [bucket]


async def test_a_short_interruption_of_a_bucket_is_not_told(fleet: Fleet, tokens: list[int]) -> None:
    await fleet.start()
    for _ in range(4):
        fleet.backends[0].disconnect()
        await fleet.after(7)
        fleet.backends[0].reconnect()
        await fleet.after(13)

    assert not [fact for fact in fleet.facts if isinstance(fact, LeadershipHindered)]


async def test_who_has_lost_the_lease_without_noticing_gives_back_nobody_elses(fleet: Fleet) -> None:
    leases = []
    for _ in range(3):
        backend = fleet.streams.peer()
        backend.reconnect()
        leases.append(Lease(backend, "app", events=Events()))
    paused, leader, candidate = leases
    await paused.take(anyio.Event())
    await fleet.after(LEASE_SECONDS + CHECK_SECONDS)
    await leader.take(anyio.Event())
    paused._until = math.inf
    await paused.give_back()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(candidate.take, anyio.Event())
        await fleet.after(LEASE_SECONDS / 2)
        assert (leader.held, candidate.held) == (True, False)
        tasks.cancel_scope.cancel()


async def test_who_gives_up_while_it_takes_a_lease_gives_it_back(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    leases = []
    for _ in range(2):
        backend = fleet.streams.peer()
        backend.reconnect()
        leases.append(Lease(backend, "app", events=Events()))
    publish = backend.publish

    async def publish_and_answer_late(message: Message, **stated: Any) -> PubAck:
        ack = await publish(message, **stated)
        await fleet.clock.sleep(1 if message.data else 0)
        return ack

    monkeypatch.setattr(backend, "publish", publish_and_answer_late)
    other, hasty = leases
    for _ in range(2):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hasty.take, anyio.Event())
            await fleet.after(0.5)
            tasks.cancel_scope.cancel()
        assert not hasty.held
        assert await other.try_to_take()
        await other.give_back()


async def test_a_renewal_that_a_cluster_stores_after_it_was_asked_to_delete_the_lease_is_undone(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster refuses the delete because of what was sent before, and answers reads with what is stored already."""
    backend, beside = fleet.streams.peer(), fleet.streams.peer()
    backend.reconnect()
    beside.reconnect()
    lease, other = Lease(backend, "app", events=Events()), Lease(beside, "app", events=Events())
    assert await lease.try_to_take()
    publish, sent = backend.publish, list[Callable[[], Any]]()

    async def store_late(store: Callable[[], Any]) -> None:
        await fleet.clock.sleep(0.01)
        await store()

    async def publish_to_a_cluster(message: Message, **stated: Any) -> PubAck:
        if message.data:
            sent.append(partial(publish, message, **stated))
            await fleet.clock.sleep(LEASE_SECONDS)
        if sent:
            tasks.start_soon(store_late, sent.pop())
            raise ConflictError("its newest revision is another one")
        return await publish(message, **stated)

    async def hold() -> None:
        async with lease.renewed():
            await fleet.clock.sleep(RENEW_SECONDS + 0.1)

    monkeypatch.setattr(backend, "publish", publish_to_a_cluster)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hold)
        await fleet.after(RENEW_SECONDS + 0.5)
    assert not lease.held
    assert await other.try_to_take()


async def test_a_lease_that_is_another_workers_is_over_at_the_next_renewal(fleet: Fleet) -> None:
    backend = fleet.streams.peer()
    backend.reconnect()
    lease = Lease(backend, "app", events=Events())
    assert await lease.take(anyio.Event())
    await (await backend.key_value("app__leases")).put(LEADER, b"another")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lease.hold, term := anyio.CancelScope())
        await fleet.after(RENEW_SECONDS)
        assert (lease.held, term.cancel_called) == (False, True)


async def test_a_lease_is_counted_from_when_it_was_asked_for(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server counts from when it stored it, which is before the answer comes."""
    backend = fleet.streams.peer()
    backend.reconnect()
    publish = backend.publish

    async def publish_and_answer_late(message: Message, **stated: Any) -> PubAck:
        ack = await publish(message, **stated)
        await fleet.clock.sleep(3)
        return ack

    monkeypatch.setattr(backend, "publish", publish_and_answer_late)
    lease = Lease(backend, "app", events=Events())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lease.take, anyio.Event())
        await fleet.after(3)
    assert lease.held
    await fleet.after(LEASE_SECONDS - 3)
    assert not lease.held


@pytest.mark.parametrize("renewed", [False, True])
async def test_a_lease_that_the_server_does_not_forget_is_over_when_nobody_renews_it(
    fleet: Fleet, *, renewed: bool
) -> None:
    """It was put while the server's clock was ahead."""
    backend = fleet.streams.peer()
    backend.reconnect()
    bucket = RetryingKeyValue(backend, "app__leases", patience_seconds=1)  # without a ttl
    lease = Lease(backend, "app", events=Events())

    async def renew() -> None:
        while True:
            await bucket.put("leader", b"another worker")
            await fleet.clock.sleep(2)

    await bucket.put("leader", b"another worker")
    async with anyio.create_task_group() as tasks:
        if renewed:
            tasks.start_soon(renew)
        tasks.start_soon(lease.take, anyio.Event())
        await fleet.after(LEASE_SECONDS + 1)
        assert not lease.held
        await fleet.after(4)
        assert lease.held is not renewed
        tasks.cancel_scope.cancel()


@pytest.mark.slow
@pytest.mark.parametrize(("catch_up", "ticks"), [(False, [3600, 10800, 14400]), (True, [3600, 7200, 10800, 14400])])
async def test_what_was_missed_while_no_worker_was_there(
    router: Router, fleet: Fleet, catch_up: bool, ticks: list[float]
) -> None:
    @router.every("1h", singleton=True, catch_up=catch_up)
    async def hourly() -> None: ...

    await fleet.start()
    await fleet.after(3601)
    fleet.kill(0)
    await fleet.after(2 * 3600)  # 7200 is missed; 10800 was just now
    await fleet.start()
    await fleet.after(3600)
    assert fleet.ticks == ticks


async def test_ticks_claimed_by_a_leader_that_was_an_hour_ahead_silence_no_successor(
    router: Router, fleet: Fleet
) -> None:
    @router.every("10m", singleton=True)
    async def look() -> None: ...

    # What that leader left behind: the bucket stored it an hour before the time that it names.
    backend = fleet.streams.peer()
    backend.reconnect()
    claims = RetryingKeyValue(backend, "app__timers", patience_seconds=1)
    claim = Claim(time=BEGINNING + timedelta(hours=1), token=1, schedule="every 600s")
    await claims.put("look", msgspec.json.encode(claim), revision=0)
    await fleet.start()
    await fleet.after(1801)
    assert fleet.ticks == [600, 1200, 1800]


async def test_a_timer_of_every_worker_goes_on_when_its_clock_is_set_back(router: Router, fleet: Fleet) -> None:
    @router.every("10m", singleton=False)
    async def look() -> None: ...

    fleet.clock.ahead_seconds = 3600.0
    await fleet.start()
    await fleet.after(1)
    fleet.clock.ahead_seconds = 0.0
    await fleet.after(1801)
    assert fleet.ticks == [600, 1200, 1800]


async def test_a_tick_that_takes_longer_than_the_interval(router: Router, fleet: Fleet) -> None:
    @router.every("10s", singleton=False)
    async def slow(tick: Tick) -> None:
        await fleet.clock.sleep(25 if seconds_of(tick.time) == 10 else 0)

    await fleet.start()
    await fleet.after(51)
    assert fleet.ticks == [10, 30, 40, 50]
    first, late = (fact for fact in fleet.facts[:2] if isinstance(fact, Ticked))
    assert (first.seconds, first.late_seconds, late.late_seconds) == (25, 0, 5)


async def test_one_that_raises_is_told_of_and_runs_at_the_next_tick(router: Router, fleet: Fleet) -> None:
    @router.every("10s", singleton=True)
    async def broken() -> None:
        raise ValueError("no")

    await fleet.start()
    await fleet.after(21)
    errors = [str(fact.error) for fact in fleet.facts if isinstance(fact, Ticked)]
    assert (fleet.ticks, errors) == ([10, 20], ["no", "no"])


async def test_a_stop_waits_for_what_runs_until_the_drain_timeout(router: Router, fleet: Fleet) -> None:
    ended: list[str] = []

    def lasting(name: str, seconds: float) -> Callable[[], Any]:
        async def last() -> None:
            try:
                await fleet.clock.sleep(seconds)
                ended.append(f"{name} is done")
            except anyio.get_cancelled_exc_class():
                ended.append(f"{name} is cancelled")
                raise

        return last

    router.every("10s", name="short", singleton=False)(lasting("short", 5))
    router.every("10s", name="long", singleton=True)(lasting("long", 100))
    worker = await fleet.start()
    await fleet.after(12)
    fleet.stops[worker].set()
    await fleet.after(DRAIN_SECONDS)
    assert ended == ["short is done", "long is cancelled"]
    await fleet.after(100)
    assert ended == ["short is done", "long is cancelled"]
