"""Limits across the fleet, on every backend: all workers together begin so many calls, or make so many at once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import Any, cast

import anyio
import pytest

from aviso_workers import App, Notification, Notify, Rate, RetryPolicy, Slots
from aviso_workers.backends import Admin
from aviso_workers.engine import flow
from aviso_workers.engine.key_value import RetryingKeyValue
from aviso_workers.errors import RefusedError
from aviso_workers.events import LeadershipHindered, LeadershipUnhindered, Settled
from aviso_workers.features import limits
from aviso_workers.state import lease_records
from aviso_workers.testing import Harness, harness
from tests.contract.settings import mars
from tests.waits import PATIENCE_SECONDS, PROMPT_SECONDS

pytestmark = pytest.mark.anyio

WORKERS = 4
RATE = 20
"""Calls in a second."""
SECONDS = 10.0
LATE = limits.GATHERED_SECONDS + limits.VALID_SECONDS
"""What may come at once beside the rate."""


class Calls:
    """When the calls began, by the value of `class`, on the harness's clock."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)
        self.steps: list[int] = []

    def note(self, notification: Notification[Any], t: Callable[[], float]) -> None:
        self.times[notification.identifier["class"]].append(t())
        self.steps.append(int(notification.identifier["step"]))

    @property
    def all(self) -> list[float]:
        return sorted(time for times in self.times.values() for time in times)


def most_within(times: Iterable[float], seconds: float) -> int:
    """The most that began in any span of so many seconds."""
    ordered = sorted(times)
    return max((sum(begin <= each < begin + seconds for each in ordered) for begin in ordered), default=0)


@pytest.fixture
def calls() -> Calls:
    return Calls()


def clock_of(app: App) -> Callable[[], float]:
    return lambda: app.session.backend.clock.monotonic()


def least(url: str | None) -> float:
    """The share of the rate that is reached at least. On a server, a busy machine makes it slower."""
    return 0.95 if url is None else 0.5


def reached(calls: Calls, count: int) -> bool:
    return len(calls.all) >= count


async def publish(app: App, count: int, *, name: str = "od", first: int = 0) -> None:
    await app.notify_many(Notify("mars", mars(step=first + step, **{"class": name}), {}) for step in range(count))


async def until(t: Harness, condition: Callable[[], Any]) -> None:
    with anyio.fail_after(PATIENCE_SECONDS):
        while not condition():
            await t.advance(0.1)


@pytest.mark.slow
async def test_all_workers_together_keep_the_rate(app: App, url: str | None, calls: Calls) -> None:
    @app.agent("mars", limits=[Rate(RATE * 60, per="1m")], concurrency=3)
    async def index(notification: Notification[Any]) -> None:
        calls.note(notification, clock_of(app))

    async with harness(app, server=url, workers=WORKERS) as t:
        await publish(app, 2 * RATE * int(SECONDS))
        await until(t, lambda: calls.all)
        await t.advance(SECONDS)
        within = [time for time in calls.all if time < calls.all[0] + SECONDS]
    beside = limits.GATHERED_SECONDS + 0.1 if url is None else LATE
    assert RATE * SECONDS * least(url) <= len(within) <= RATE * (SECONDS + beside)


@pytest.mark.slow
async def test_a_worker_that_is_killed_makes_it_slower_for_a_moment_only(
    app: App, url: str | None, calls: Calls
) -> None:
    @app.agent("mars", limits=[Rate(RATE, per=1)], concurrency=3, ack_wait=2)
    async def index(notification: Notification[Any]) -> None:
        calls.note(notification, clock_of(app))

    async with harness(app, server=url, workers=WORKERS) as t:
        await publish(app, 2 * RATE * int(SECONDS))
        await until(t, lambda: len(calls.all) > RATE)
        await t.crash()
        await t.advance(SECONDS)
        within = [time for time in calls.all if time < calls.all[0] + SECONDS]
    assert RATE * (SECONDS - limits.CHUNK_SECONDS * 2) * least(url) <= len(within) <= RATE * (SECONDS + LATE)


async def test_each_value_of_the_key_has_its_own_rate_and_stops_no_other(
    app: App, url: str | None, calls: Calls
) -> None:
    """A backlog of one value comes before the others in the stream, and is larger than what a worker prefetches."""

    @app.agent("mars", limits=[Rate(2, per=1, by=["class"])], concurrency=2)
    async def index(notification: Notification[Any]) -> None:
        calls.note(notification, clock_of(app))

    async with harness(app, server=url, workers=2) as t:
        await publish(app, 200)
        for name in ("rd", "ea", "ti"):
            await publish(app, 2, name=name, first=500)
        began = t.clock.monotonic()
        await until(t, lambda: all(len(calls.times[name]) == 2 for name in ("rd", "ea", "ti")))
        took = t.clock.monotonic() - began
    assert took < PROMPT_SECONDS, "they do not wait for the 200, which take 100 s"
    assert len(calls.times["od"]) <= 2 * (took + LATE)


@pytest.mark.slow
@pytest.mark.parametrize("count", [86, 100])
async def test_after_a_pause_what_one_second_allows_begins_at_once_and_no_more(
    app: App, url: str | None, calls: Calls, count: int
) -> None:
    """Of 86, the worker has leased some that it does not need, and that are too old afterwards."""

    @app.agent("mars", limits=[Rate(RATE, per=1)], concurrency=3)
    async def index(notification: Notification[Any]) -> None:
        calls.note(notification, clock_of(app))

    async with harness(app, server=url) as t:
        for first in (0, 1000):
            await publish(app, count, first=first)
            await until(t, partial(reached, calls, (1 + bool(first)) * count))
            await t.advance(60.0 if url is None else 2 * limits.VALID_SECONDS)
    at_once, seconds = most_within(calls.all[count:], 0.2), limits.GATHERED_SECONDS + 0.2
    assert RATE * limits.GATHERED_SECONDS * least(url) <= at_once <= RATE * seconds + 1


@pytest.mark.slow
async def test_of_a_slow_rate_none_begins_early_after_a_pause(app: App, url: str | None, calls: Calls) -> None:
    @app.agent("mars", limits=[Rate(1, per=2)], concurrency=3)
    async def index(notification: Notification[Any]) -> None:
        calls.note(notification, clock_of(app))

    async with harness(app, server=url) as t:
        for pair in (1, 2, 3):
            await publish(app, 2, first=2 * pair)
            await until(t, partial(reached, calls, 2 * pair))
            await t.advance(2 * limits.VALID_SECONDS)
    apart = [later - earlier for earlier, later in zip(calls.all[::2], calls.all[1::2], strict=True)]
    assert all(seconds > 1.9 if url is None else seconds > 1.5 for seconds in apart), apart


def test_a_call_that_was_leased_may_begin_a_little_later_and_not_much_later() -> None:
    leased = limits._Leased(interval=0.1)
    leased.lease(100.0, 10)
    assert (leased.due(99.9), leased.due(100.0), leased.due(100.35)) == (0, 1, 4)
    assert [leased.use(100.0) for _ in range(2)] == [True, False], "the second one has its turn later"
    assert leased.due(100.45 + limits.VALID_SECONDS) == 5, "four of the nine are too late"
    assert leased.due(200.0) == 0
    assert leased.next_seconds(200.0) is None


@pytest.mark.slow
async def test_several_rates_are_kept_together_and_none_is_spent_in_vain(
    app: App, url: str | None, calls: Calls
) -> None:
    """What one of them lets begin and another does not is not taken from the first."""

    @app.agent("mars", limits=[Rate(6, per=1), Rate(4, per=1, by=["class"])], concurrency=4)
    async def index(notification: Notification[Any]) -> None:
        calls.note(notification, clock_of(app))

    async with harness(app, server=url, workers=2) as t:
        for name in ("od", "rd"):
            await publish(app, 60, name=name)
        await until(t, lambda: calls.all)
        began = calls.all[0]
        await t.advance(8.0)
    within = [time for time in calls.all if time < began + 8]
    assert 6 * 8 * least(url) <= len(within) <= 6 * (8 + LATE)
    assert most_within(calls.times["od"], 1.0) <= 4 * (1 + LATE)


async def test_order_by_is_kept(app: App, url: str | None, calls: Calls) -> None:
    @app.agent("mars", limits=[Rate(20, per=1, by=["class"])], order_by=["class"], concurrency=8)
    async def index(notification: Notification[Any]) -> None:
        calls.note(notification, clock_of(app))
        await app.session.backend.clock.sleep(0.01)

    async with harness(app, server=url) as t:
        await publish(app, 60)
        await until(t, lambda: len(t.outcomes(index)) == 60)
        assert t.outcomes(index) == ["acked"] * 60
    assert calls.steps == list(range(60))
    assert most_within(calls.all, 1.0) <= 20 * (1 + LATE)


@pytest.mark.slow
async def test_what_waits_is_not_delivered_again_and_uses_no_attempt(app: App, url: str | None) -> None:
    """The last one waits for longer than `ack_wait`, which is long enough for a machine that is busy in between."""
    seen: list[tuple[int, int]] = []
    settled: list[Settled] = []
    app.events.listen(settled.append, Settled)

    @app.agent("mars", limits=[Rate(1, per=2)], ack_wait=5, retry=RetryPolicy(attempts=1), concurrency=4)
    async def index(notification: Notification[Any]) -> None:
        seen.append((notification.num_delivered, notification.attempt))

    async with harness(app, server=url) as t:
        await publish(app, 4)
        await until(t, lambda: len(seen) == 4)
        assert t.outcomes(index) == ["acked"] * 4
    assert seen == [(1, 1)] * 4
    waited = [fact.waited_seconds for fact in settled]
    assert all(later - earlier > 1.5 for earlier, later in pairwise(waited)), waited


@pytest.mark.slow
async def test_a_bucket_that_is_deleted_is_made_again_and_nothing_begins_twice_as_fast(
    app: App, url: str | None, calls: Calls
) -> None:
    @app.agent("mars", limits=[Rate(RATE, per=1)], concurrency=3)
    async def index(notification: Notification[Any]) -> None:
        calls.note(notification, clock_of(app))

    async with harness(app, server=url, workers=WORKERS) as t:
        await publish(app, RATE * 20)
        await until(t, lambda: len(calls.all) > RATE)
        for _ in range(3):
            wanted = len(calls.all) + RATE
            await cast(Admin, app.session.backend).delete_stream(f"KV_{lease_records.limits_bucket_of(app.name)}")
            await until(t, partial(reached, calls, wanted))
    took = calls.all[-1] - calls.all[0]
    assert len(calls.all) <= RATE * (took + LATE)


@pytest.mark.slow
async def test_a_foreign_value_stops_nobody_for_long(
    app: App, url: str | None, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SKEW", timedelta(seconds=1))

    @app.agent("mars", limits=[Rate(RATE, per=1)], concurrency=3)
    async def index(notification: Notification[Any]) -> None:
        calls.note(notification, clock_of(app))

    async with harness(app, server=url) as t:
        await publish(app, RATE * 20)
        for value in (b"none of ours", b'{"until": 1e300}', b'{"until": -1e300}'):
            await until(t, partial(reached, calls, len(calls.all) + RATE))
            bucket = await app.session.backend.key_value(lease_records.limits_bucket_of(app.name), own=True)
            await bucket.put("index/all", value)
        await until(t, partial(reached, calls, len(calls.all) + RATE))
        took = calls.all[-1] - calls.all[0]
    assert len(calls.all) <= RATE * (took + LATE)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, WORKERS])
@pytest.mark.parametrize("shift", [3.0, -3.0, -3600.0], ids=["ahead", "behind", "set back by an hour"])
async def test_a_server_with_another_clock_makes_nothing_faster(
    app: App, url: str | None, calls: Calls, monkeypatch: pytest.MonkeyPatch, shift: float, workers: int
) -> None:
    """Workers ask for the time one after the other, so for a while they go by different clocks."""
    shifted = timedelta()
    time = RetryingKeyValue.time

    async def shifted_time(self: RetryingKeyValue) -> datetime:
        return await time(self) + shifted

    monkeypatch.setattr(RetryingKeyValue, "time", shifted_time)
    monkeypatch.setattr(limits, "SYNC_SECONDS", 1.0)
    monkeypatch.setattr(limits, "SKEW", timedelta(seconds=2))

    @app.agent("mars", limits=[Rate(RATE, per=1)], concurrency=3)
    async def index(notification: Notification[Any]) -> None:
        calls.note(notification, clock_of(app))

    async with harness(app, server=url, workers=workers) as t:
        await publish(app, RATE * 20)
        await until(t, partial(reached, calls, 2 * RATE))
        shifted = timedelta(seconds=shift)
        await until(t, partial(reached, calls, 6 * RATE))
        took = calls.all[-1] - calls.all[0]
    assert len(calls.all) <= RATE * (took + LATE)
    assert url is not None or took <= 6 + 2 * min(abs(shift), 5), "on a server, a busy machine makes it slower"


async def test_a_singleton_keeps_it_in_order(app: App, url: str | None, calls: Calls) -> None:
    @app.agent("mars", limits=[Rate(RATE, per=1)], singleton=True)
    async def index(notification: Notification[Any]) -> None:
        calls.note(notification, clock_of(app))

    async with harness(app, server=url, workers=2) as t:
        await publish(app, 60)
        await until(t, partial(reached, calls, 60))
    assert calls.steps == [*range(60)]
    assert calls.all[-1] - calls.all[0] >= 60 / RATE - LATE


async def test_a_worker_hoards_no_more_than_it_can_set_aside(app: App, url: str | None, calls: Calls) -> None:
    @app.agent("mars", limits=[Rate(1, per=1, by=["class"])], concurrency=4)
    async def index(notification: Notification[Any]) -> None:
        calls.note(notification, clock_of(app))

    async def held() -> int:
        return (await app.session.admin.consumer_info("MARS", index.durable_name(app.name))).num_ack_pending

    async with harness(app, server=url) as t:
        await publish(app, 3 * flow.MAX_PREFETCH)
        with anyio.fail_after(PATIENCE_SECONDS):
            while await held() <= flow.MAX_PREFETCH / 2:
                await t.advance(0.1)
        await t.advance(2.0)
        assert flow.MAX_PREFETCH / 2 < await held() < 1.2 * flow.MAX_PREFETCH


@pytest.mark.slow
async def test_what_is_redelivered_to_another_worker_waits_there_as_well(
    app: App, url: str | None, calls: Calls
) -> None:
    attempts: set[int] = set()

    @app.agent("mars", limits=[Rate(5, per=1)], concurrency=4, ack_wait=1, retry=RetryPolicy(attempts=1))
    async def index(notification: Notification[Any]) -> None:
        attempts.add(notification.attempt)
        calls.note(notification, clock_of(app))

    async with harness(app, server=url, workers=2) as t:
        await publish(app, 30)
        await until(t, partial(reached, calls, 5))
        await t.crash()
        await until(t, lambda: set(calls.steps) == {*range(30)})
        assert t.dead_letters == []
    assert attempts == {1}
    assert len(calls.all) <= 5 * (calls.all[-1] - calls.all[0] + LATE)


@pytest.mark.slow
async def test_two_versions_with_different_limits_keep_each_its_own(url: str | None, app: App) -> None:
    """They share the time: what one begins is time that the other cannot use."""
    began: dict[str, list[float]] = defaultdict(list)

    def declared(target: App, version: str, number: int) -> None:
        @target.agent("mars", limits=[Rate(number, per=1)], concurrency=3)
        async def index(notification: Notification[Any]) -> None:
            began[version].append(clock_of(target)())

    declared(app, "old", 10)
    new = App("contract", config=app.config)
    declared(new, "new", 30)
    async with harness(app, server=url, workers=2) as t:
        await publish(app, 600)
        await until(t, lambda: began["old"])
        await t.deploy(new, beside=True)
        await until(t, lambda: began["new"])
        since = t.clock.monotonic()
        await t.advance(8.0)
        until_time = t.clock.monotonic()
    took = until_time - since
    counts = Counter({version: sum(since <= time < until_time for time in times) for version, times in began.items()})
    shares = counts["old"] / 10 + counts["new"] / 30
    assert shares <= took + LATE, "each call takes the time that its own version's limit gives it"
    assert shares >= least(url) * (took - 1), counts


@pytest.mark.slow
async def test_beside_an_older_version_without_a_limit_its_own_calls_are_limited(url: str | None, app: App) -> None:
    began: dict[str, list[float]] = defaultdict(list)

    @app.agent("mars", name="index")
    async def unlimited(notification: Notification[Any]) -> None:
        began["old"].append(clock_of(app)())
        await app.session.backend.clock.sleep(0.01)

    new = App("contract", config=app.config)

    @new.agent("mars", limits=[Rate(5, per=1)], concurrency=3)
    async def index(notification: Notification[Any]) -> None:
        began["new"].append(clock_of(new)())

    async with harness(app, server=url) as t:
        await publish(app, 1000)
        await t.deploy(new, beside=True)
        await until(t, lambda: len(began["new"]) + len(began["old"]) == 1000)
    took = began["new"][-1] - began["new"][0]
    assert 0 < len(began["new"]) <= 5 * (took + LATE)
    assert len(began["old"]) > 500, "it is not limited, and takes what the others leave"


@pytest.mark.slow
async def test_without_the_bucket_nothing_begins_but_what_was_leased(
    app: App, calls: Calls, kind: str, url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hindered: list[Any] = []
    denied = False
    put = RetryingKeyValue.put

    async def put_or_refuse(self: RetryingKeyValue, key: str, value: bytes, **given: Any) -> int:
        if denied:
            raise RefusedError("publish $KV.contract__limits.index/all: permissions violation")
        return await put(self, key, value, **given)

    monkeypatch.setattr(RetryingKeyValue, "put", put_or_refuse)
    app.events.listen(hindered.append, LeadershipHindered)
    app.events.listen(hindered.append, LeadershipUnhindered)

    @app.agent("mars", limits=[Rate(RATE, per=1)], concurrency=3)
    async def index(notification: Notification[Any]) -> None:
        calls.note(notification, clock_of(app))

    async with harness(app, server=url) as t:
        await publish(app, 30 * RATE)
        await until(t, lambda: len(calls.all) > RATE)
        denied, before = True, len(calls.all)
        await until(t, lambda: hindered)
        began = len(calls.all) - before
        assert began <= RATE * limits.CHUNK_SECONDS * 2, "no more than it had leased"
        await t.advance(30.0 if url is None else 1.0)
        assert len(calls.all) == before + began
        denied = False
        await until(t, lambda: len(calls.all) > before + began + RATE)
    assert [type(fact).__name__ for fact in hindered] == ["LeadershipHindered", "LeadershipUnhindered"]
    assert hindered[0].bucket == "contract__limits"


async def test_the_harness_settles_what_waits_for_its_turn(app: App, url: str | None, calls: Calls) -> None:
    @app.agent("mars", limits=[Rate(2, per=1), Slots(1, by=["class"])])
    async def index(notification: Notification[Any]) -> None:
        calls.note(notification, clock_of(app))

    async with harness(app, server=url) as t:
        await publish(app, 5)
        await t.settle()
    assert sorted(calls.steps) == [*range(5)]


@pytest.mark.slow
@pytest.mark.parametrize("order", [[], ["class"]])
@pytest.mark.parametrize(
    "limit",
    [Slots(1, by=["class"]), Rate(100, per="1s", by=["class"])],
    ids=["slots", "rate"],
)
async def test_an_outage_is_waited_for_beside_a_limit(
    app: App, url: str | None, order: list[str], limit: Rate | Slots
) -> None:
    away = True
    attempts: list[int] = []
    done: list[tuple[str, str]] = []

    @app.agent(
        "mars",
        retry=RetryPolicy(first=0.05, factor=1, attempts=2),
        concurrency=4,
        order_by=order,
        limits=[limit],
    )
    async def index(notification: Notification[Any]) -> None:
        attempts.append(notification.attempt)
        await app.session.backend.clock.sleep(0.01)
        if away:
            raise ConnectionRefusedError(111, "refused")
        done.append((notification.identifier["class"], notification.identifier["step"]))

    async def until(condition: Any) -> None:
        with anyio.fail_after(PATIENCE_SECONDS):
            while not condition():
                await t.advance(0.1)

    async with harness(app, server=url, workers=2) as t:
        classes = ("od", "rd")
        await app.notify_many(
            Notify("mars", mars(step=step, **{"class": n}), {}) for step in range(30) for n in classes
        )
        await until(lambda: len(attempts) > 4)
        await t.advance(10.0)
        began, tried = t.clock.monotonic(), len(attempts)
        await t.advance(4.0)
        assert len(attempts) - tried <= 2 * (1 + t.clock.monotonic() - began), "each worker tries one a second"
        away = False
        await until(lambda: len(done) == 60)
        await t.settle()
        assert t.dead_letters == []
    assert (len(set(done)), set(attempts)) == (60, {1})
