"""Outages of what an agent depends on: nothing is an attempt, nothing becomes a dead letter, and order is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from aviso_workers import App, Backoff, Breaker, Notification, Notify, Unavailable, clocks
from aviso_workers.backends import Message
from aviso_workers.clocks import LoopClock
from aviso_workers.engine import breakers
from aviso_workers.engine.breakers import UNNAMED_SECONDS
from aviso_workers.engine.buffer import Buffer
from aviso_workers.engine.isolation import Isolation
from aviso_workers.errors import UnavailableError
from aviso_workers.events import OutageBegan, OutageEnded
from aviso_workers.jetstream.specs import GROUP
from aviso_workers.state import outage_records
from aviso_workers.state.outage_records import OutageRecord
from aviso_workers.testing import Harness, harness
from tests.contract.settings import app_config, mars
from tests.deliveries import UnsettledDelivery
from tests.waits import LONG_SECONDS, PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

SHORT = Breaker(first=0.2, max=0.5)
OUTAGE_SECONDS = 3.0


class Catalogue:
    """What an agent depends on, with what it was asked for: the step and the number of the attempt."""

    def __init__(self) -> None:
        self.away: Exception | None = ConnectionRefusedError(111, "refused")
        self.asked: list[tuple[int, int]] = []
        self.stored: list[int] = []
        self.poison: set[int] = set()

    def store(self, notification: Notification[Any]) -> None:
        step = int(notification.identifier["step"])
        self.asked.append((step, notification.attempt))
        if self.away is not None:
            raise self.away
        if step in self.poison:
            raise KeyError("param")
        self.stored.append(step)


@pytest.fixture
def catalogue() -> Catalogue:
    return Catalogue()


async def publish(app: App, steps: Sequence[int]) -> None:
    await app.notify_many(Notify("mars", mars(step=step), {}) for step in steps)


async def until(t: Harness, condition: Any) -> None:
    with anyio.fail_after(PATIENCE_SECONDS):
        while not condition():
            await t.advance(0.1)


@pytest.mark.parametrize("concurrency", [1, 8])
async def test_it_counts_no_attempt_and_makes_no_dead_letter(
    app: App, url: str | None, catalogue: Catalogue, concurrency: int
) -> None:
    began: list[OutageBegan] = []
    ended: list[OutageEnded] = []
    app.events.listen(began.append, OutageBegan)
    app.events.listen(ended.append, OutageEnded)

    @app.agent("mars", retry=Backoff(first=0.05, max=0.1, attempts=3), concurrency=concurrency, breaker=SHORT)
    async def index(notification: Notification[Any]) -> None:
        catalogue.store(notification)

    async with harness(app, server=url) as t:
        await publish(app, range(100))
        first = t.clock.monotonic()
        await until(t, lambda: began)
        await t.advance(OUTAGE_SECONDS)
        tried, passed = len(catalogue.asked), t.clock.monotonic() - first
        assert tried <= 3 + concurrency + passed / 0.2 * 1.2, "those that opened it, and one after each interval"
        catalogue.away = None
        await until(t, lambda: len(catalogue.stored) == 100)
        await t.settle()
        assert t.dead_letters == []
    assert sorted(catalogue.stored) == list(range(100))
    assert {attempt for _, attempt in catalogue.asked} == {1}
    assert (len(began), len(ended)) == (1, 1)


async def test_it_opens_up_with_two_more_for_each_that_succeeds(
    app: App, url: str | None, catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breakers, "OPENED_UP_SECONDS", LONG_SECONDS)  # when everything is opened in any case

    @app.agent("mars", retry=Backoff(first=0.05, attempts=3), concurrency=4, breaker=SHORT)
    async def index(notification: Notification[Any]) -> None:
        catalogue.store(notification)

    async with harness(app, server=url) as t:
        await publish(app, range(100))
        await until(t, lambda: len(catalogue.asked) >= 6)
        catalogue.away = None
        began = t.clock.monotonic()
        await until(t, lambda: len(catalogue.stored) == 100)
        assert t.clock.monotonic() - began < LONG_SECONDS


async def test_one_that_is_suspected_begins_when_it_is_over() -> None:
    """It had been decided that it runs alone when the others were held back."""
    clock = LoopClock()
    isolation = Isolation(clock)
    buffer = Buffer(clock, isolation=isolation)
    suspect = UnsettledDelivery()
    suspect.message = Message(subject="mars.x", sequence=1, data=b"x", headers=None, timestamp_ns=1)
    suspect.num_delivered = 3
    buffer.put(suspect)
    assert await buffer.take_redelivered() is suspect
    begun: list[str] = []

    async def begin() -> None:
        begun.append("recorded")

    async def run_alone() -> None:
        async with isolation.of(suspect):
            buffer.hold_back()
            buffer.admit(suspect, first=True, begin=begin)
            await isolation.ended()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_alone)
        while buffer.may_come is None:
            await checkpoint()
        buffer.let(1)
        with anyio.fail_after(PATIENCE_SECONDS):
            assert await buffer.take() is suspect
        assert (begun, buffer.is_trying()) == (["recorded"], True)
        tasks.cancel_scope.cancel()


async def test_order_is_kept(app: App, url: str | None, catalogue: Catalogue) -> None:
    @app.agent("mars", retry=Backoff(first=0.05, attempts=3), concurrency=4, order_by=["class"], breaker=SHORT)
    async def index(notification: Notification[Any]) -> None:
        catalogue.store(notification)

    async with harness(app, server=url) as t:
        await publish(app, range(50))
        await until(t, lambda: len(catalogue.asked) >= 5)
        catalogue.away = None
        await until(t, lambda: len(catalogue.stored) == 50)
        assert t.dead_letters == []
    assert catalogue.stored == list(range(50))


async def test_a_poison_in_it_has_all_of_its_attempts_afterwards(
    app: App, url: str | None, catalogue: Catalogue
) -> None:
    catalogue.poison = {5}

    @app.agent("mars", retry=Backoff(first=0.05, factor=1, attempts=3), concurrency=2, breaker=SHORT)
    async def index(notification: Notification[Any]) -> None:
        catalogue.store(notification)

    async with harness(app, server=url) as t:
        await publish(app, range(20))
        await until(t, lambda: len(catalogue.asked) >= 6)
        assert t.dead_letters == []
        asked = len(catalogue.asked)
        catalogue.away = None
        await until(t, lambda: len(catalogue.stored) == 19)
        await until(t, lambda: t.dead_letters)
        assert [(each.reason, each.attempts) for each in t.dead_letters] == [("attempts_exhausted", 3)]
    assert [attempt for step, attempt in catalogue.asked[asked:] if step == 5] == [1, 2, 3]


async def test_a_poison_that_cannot_be_reached_is_no_outage_while_others_succeed(
    app: App, url: str | None, catalogue: Catalogue
) -> None:
    began: list[OutageBegan] = []
    app.events.listen(began.append, OutageBegan)
    catalogue.away = None

    @app.agent("mars", retry=Backoff(first=0.05, factor=1, attempts=3), breaker=SHORT)
    async def index(notification: Notification[Any]) -> None:
        catalogue.store(notification)
        if notification.identifier["step"] == "7":
            raise ConnectionRefusedError(111, "no such host")

    async with harness(app, server=url) as t:
        for step in range(60):
            await t.notify("mars", mars(step=step), {})
            await t.advance(0.05)
        await until(t, lambda: t.dead_letters)
        assert [each.attempts for each in t.dead_letters] == [3]
    assert began == []


async def test_any_error_of_many_in_a_row_is_an_outage(app: App, url: str | None, catalogue: Catalogue) -> None:
    catalogue.away = ValueError("a deploy that breaks everything")

    @app.agent("mars", retry=Backoff(first=0.05, factor=1, attempts=2), breaker=Breaker(failures=5, first=0.2))
    async def index(notification: Notification[Any]) -> None:
        catalogue.store(notification)

    async with harness(app, server=url) as t:
        await publish(app, range(50))
        await until(t, lambda: len(catalogue.asked) >= 8)
        assert len(t.dead_letters) <= 4
        buried = len(t.dead_letters)
        catalogue.away = None
        await until(t, lambda: len(catalogue.stored) == 50 - buried)


async def test_many_that_fail_again_are_no_outage(app: App, url: str | None, catalogue: Catalogue) -> None:
    began: list[OutageBegan] = []
    app.events.listen(began.append, OutageBegan)
    catalogue.away = None
    catalogue.poison = set(range(0, 120, 2))

    @app.agent("mars", retry=Backoff(first=0.5, factor=1, attempts=3), breaker=SHORT, concurrency=4)
    async def index(notification: Notification[Any]) -> None:
        catalogue.store(notification)

    async with harness(app, server=url) as t:
        await publish(app, range(120))
        await until(t, lambda: len(t.dead_letters) == 60)
        assert {each.attempts for each in t.dead_letters} == {3}
    assert (began, len(catalogue.stored)) == ([], 60)


async def test_many_that_cannot_be_handled_keep_others_back_for_a_while_only() -> None:
    app = App("contract", config=app_config("in_memory", ""))
    catalogue = Catalogue()
    catalogue.away = None
    catalogue.poison = set(range(30))
    ended: list[bool] = []
    app.events.listen(lambda event: ended.append(event.answered), OutageEnded)

    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None:
        catalogue.store(notification)

    async with harness(app) as t:
        await publish(app, range(31))
        await t.advance(UNNAMED_SECONDS)
        assert (catalogue.stored, t.dead_letters) == ([], [])
        await t.advance(150.0)
        assert catalogue.stored == [30]
        assert {each.attempts for each in t.dead_letters} == {6}
        assert len(t.dead_letters) == 30
    assert ended == [False]


async def test_one_worker_of_all_tries_at_a_time(app: App, url: str | None, catalogue: Catalogue) -> None:

    @app.agent("mars", retry=Backoff(first=0.05, attempts=3), concurrency=4, breaker=Breaker(first=0.5, max=0.5))
    async def index(notification: Notification[Any]) -> None:
        catalogue.store(notification)

    async with harness(app, server=url, workers=3) as t:
        await publish(app, range(300))
        await until(t, lambda: len(catalogue.asked) >= 9)
        await t.advance(1.5)
        began, before = t.clock.monotonic(), len(catalogue.asked)
        await t.advance(5.0)
        tried, passed = len(catalogue.asked) - before, t.clock.monotonic() - began
        assert 1 <= tried <= 1.3 * passed / 0.5, "one in each half second, and no other"
        catalogue.away = None
        await until(t, lambda: len(catalogue.stored) == 300)
        assert t.dead_letters == []
    assert Counter(catalogue.stored).most_common(1)[0][1] == 1


@pytest.mark.parametrize("ago", [timedelta(hours=3), pytest.param(timedelta(), marks=pytest.mark.slow)])
async def test_what_workers_left_that_died_in_an_outage_keeps_no_other_from_trying(
    app: App, url: str | None, catalogue: Catalogue, ago: timedelta
) -> None:
    @app.agent("mars", retry=Backoff(first=0.05, attempts=3), breaker=SHORT)
    async def index(notification: Notification[Any]) -> None:
        catalogue.store(notification)

    async with harness(app, server=url) as t:
        backend = app.session.backend
        then = clocks.utc_now(backend.clock) - ago
        left = OutageRecord(since=then, reason="asked", tries=7, again_in_seconds=3600, written=then)
        await outage_records.write(backend, left, key=outage_records.key_of("contract", "index"), revision=0)
        began = backend.clock.monotonic()
        await publish(app, range(20))
        await until(t, lambda: len(catalogue.asked) >= 6)
        assert backend.clock.monotonic() - began < 2 * outage_records.ABANDONED_SECONDS
        catalogue.away = None
        await until(t, lambda: len(catalogue.stored) == 20)


@pytest.mark.slow
async def test_a_worker_that_has_none_to_try_keeps_no_other_from_it(
    app: App, url: str | None, catalogue: Catalogue
) -> None:
    """A singleton is given to another worker in the midst of an outage, and both know of it."""
    if url is None:
        pytest.skip("there is no server")

    @app.agent("mars", singleton=True, breaker=Breaker())
    async def index(notification: Notification[Any]) -> None:
        catalogue.store(notification)

    async with harness(app, server=url, workers=2) as t:
        clock = app.session.backend.clock
        await publish(app, range(20))
        await until(t, lambda: len(catalogue.asked) >= 5)
        for _ in range(3):
            await app.session.admin.unpin_consumer("MARS", "contract__index", group=GROUP)
            await t.advance(15.0)
        catalogue.away = None
        back = clock.monotonic()
        await until(t, lambda: len(catalogue.stored) == 20)
        assert clock.monotonic() - back < 12.0
    assert catalogue.stored == list(range(20))


@pytest.mark.slow
async def test_who_waits_for_long_says_so_and_others_wait_with_it(app: App, url: str | None) -> None:
    asked: list[float] = []

    @app.agent("mars", breaker=SHORT, concurrency=2)
    async def index(notification: Notification[Any]) -> None:
        asked.append(app.session.backend.clock.monotonic())
        raise Unavailable("maintenance", after=15.0)

    async with harness(app, server=url, workers=3) as t:
        await publish(app, range(50))
        await until(t, lambda: len(asked) >= 9)
        await t.advance(3.0)
        before = len(asked)
        await t.advance(10.0)
        assert len(asked) == before
        await t.advance(10.0)
        assert before < len(asked) <= before + 2


@pytest.mark.slow
async def test_a_bucket_that_does_not_answer_delays_no_try(
    app: App, url: str | None, catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.agent("mars", breaker=SHORT)
    async def index(notification: Notification[Any]) -> None:
        catalogue.store(notification)

    async with harness(app, server=url) as t:

        async def be_silent(*_: object, **__: object) -> None:
            await app.session.backend.clock.sleep(5.0)
            raise UnavailableError("no answer in time")

        monkeypatch.setattr(outage_records, "newest", be_silent)
        monkeypatch.setattr(outage_records, "write", be_silent)
        await publish(app, range(50))
        await until(t, lambda: len(catalogue.asked) >= 3)
        await t.advance(14.0)
        assert len(catalogue.asked) >= 3 + 5, "a try every half second between the attempts to reach it"


async def test_the_author_says_what_is_an_outage(app: App, url: str | None) -> None:
    asked: list[float] = []
    back = False

    class DatabaseIsAwayError(Exception):
        pass

    @app.agent("mars", retry=Backoff(attempts=2, first=0.05), breaker=SHORT, unavailable=[DatabaseIsAwayError])
    async def index(notification: Notification[Any]) -> None:
        asked.append(app.session.backend.clock.monotonic())
        if not back:
            raise DatabaseIsAwayError if len(asked) < 4 else Unavailable("maintenance", after=1.0)

    async with harness(app, server=url) as t:
        await publish(app, range(10))
        await until(t, lambda: len(asked) >= 6)
        assert asked[5] - asked[4] >= 0.99, "as the server asked"
        back = True
        await until(t, lambda: len(asked) >= 16)
        assert t.dead_letters == []


async def test_an_agent_without_a_breaker_counts_each_failure(app: App, url: str | None, catalogue: Catalogue) -> None:
    @app.agent("mars", retry=Backoff(first=0.05, factor=1, attempts=2), breaker=None)
    async def index(notification: Notification[Any]) -> None:
        catalogue.store(notification)

    async with harness(app, server=url) as t:
        await publish(app, range(5))
        await until(t, lambda: len(t.dead_letters) == 5)


async def test_a_worker_that_stops_gives_back_what_it_holds(app: App, url: str | None, catalogue: Catalogue) -> None:
    @app.agent("mars", retry=Backoff(first=0.05, attempts=2), concurrency=4, order_by=["step"], breaker=SHORT)
    async def index(notification: Notification[Any]) -> None:
        catalogue.store(notification)

    async with harness(app, server=url) as t:
        await publish(app, range(30))
        await until(t, lambda: len(catalogue.asked) >= 5)
        await t.stop()
        catalogue.away = None
        await t.start()
        await until(t, lambda: len(catalogue.stored) == 30)
        assert t.dead_letters == []
