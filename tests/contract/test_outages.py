"""What agents depend on is away: nothing is an attempt, nothing is given up, and what can be handled is handled."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from aviso_workers import (
    App,
    Batch,
    Batching,
    Notification,
    Notify,
    Reject,
    RetryPolicy,
    Stream,
    Unavailable,
    Window,
    Windowing,
)
from aviso_workers.declare.verdicts import GivenUp
from aviso_workers.errors import DeclarationError
from aviso_workers.events import OutageBegan, OutageEnded, OutageGoesOn
from aviso_workers.testing import Harness, harness
from tests.contract.settings import app_config, mars
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

QUICK = RetryPolicy(3, first=0.05, max=0.1)
UNTIL_SHUT = 100
"""So many failures in a row, and one begins each second."""
BACK_SECONDS = 10.0
"""Within this time after the end all that waited has begun."""


class GoneError(Exception):
    """What a client raises whose server is away, of a kind that nobody knows."""


class AnswerError(Exception):
    """What a client of HTTP raises."""

    def __init__(self, status: int, **headers: str) -> None:
        self.status, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}
        super().__init__(f"status {status}")


class Catalogue:
    """What an agent depends on, with what it was asked for: the step and the number of the attempt."""

    def __init__(self) -> None:
        self.away: Exception | None = ConnectionRefusedError(111, "refused")
        self.asked: list[tuple[int, int]] = []
        self.stored: list[int] = []
        self.bad: dict[int, Exception] = {}

    def store(self, notification: Notification[Any]) -> None:
        step = int(notification.identifier["step"])
        self.asked.append((step, notification.attempt))
        if self.away is not None:
            raise self.away
        if step in self.bad:
            raise self.bad[step]
        self.stored.append(step)


@pytest.fixture
def catalogue() -> Catalogue:
    return Catalogue()


@pytest.fixture
def virtual() -> App:
    return App("contract", config=app_config("in_memory", ""))


async def publish(app: App, steps: Sequence[int]) -> None:
    await app.notify_many(Notify("mars", mars(step=step), {}) for step in steps)


async def until(t: Harness, condition: Any) -> float:
    began = t.clock.monotonic()
    with anyio.fail_after(PATIENCE_SECONDS):
        while not condition():
            await t.advance(0.1)
    return t.clock.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 8])
async def test_it_counts_no_attempt_and_makes_no_dead_letter(
    app: App, url: str | None, catalogue: Catalogue, concurrency: int
) -> None:
    began: list[OutageBegan] = []
    ended: list[OutageEnded] = []
    app.events.listen(began.append, OutageBegan)
    app.events.listen(ended.append, OutageEnded)

    @app.agent("mars", retry=QUICK, concurrency=concurrency)
    async def index(notification: Notification[Any]) -> None:
        catalogue.store(notification)

    async with harness(app, server=url) as t:
        await publish(app, range(300))
        await until(t, lambda: began)
        first, before = t.clock.monotonic(), len(catalogue.asked)
        assert len({step for step, _ in catalogue.asked}) <= UNTIL_SHUT + concurrency
        await t.advance(6.0)
        tried, passed = len(catalogue.asked) - before, t.clock.monotonic() - first
        again = UNTIL_SHUT if url else 0  # on a busy machine, retries come before the pace is shut
        assert 2 <= tried <= concurrency + 1 + passed + again, "those that ran, and one a second"
        catalogue.away = None
        assert await until(t, lambda: len(catalogue.stored) == 300) < BACK_SECONDS
        await t.settle()
        assert t.dead_letters == []
    assert sorted(catalogue.stored) == list(range(300))
    assert {attempt for _, attempt in catalogue.asked} == {1}
    assert (len(began), len(ended)) == (1, 1)


async def test_a_few_that_are_away_stop_no_other(app: App, url: str | None, catalogue: Catalogue) -> None:
    began: list[OutageBegan] = []
    app.events.listen(began.append, OutageBegan)
    catalogue.away = None
    catalogue.bad = {step: ConnectionRefusedError(111, "refused") for step in range(0, 120, 4)}

    @app.agent("mars", retry=QUICK)
    async def index(notification: Notification[Any]) -> None:
        catalogue.store(notification)

    async with harness(app, server=url) as t:
        await publish(app, range(120))
        await until(t, lambda: len(catalogue.stored) == 90)
        assert t.dead_letters == []
        catalogue.bad.clear()
        await until(t, lambda: len(catalogue.stored) == 120)
    assert began == []


async def test_many_bad_ones_before_the_good_ones_stop_none_of_them(
    app: App, url: str | None, catalogue: Catalogue
) -> None:
    catalogue.away = None
    catalogue.bad = {step: ValueError("no such field") for step in range(50)}

    @app.agent("mars", retry=QUICK)
    async def index(notification: Notification[Any]) -> None:
        catalogue.store(notification)

    async with harness(app, server=url) as t:
        await publish(app, range(500))
        await until(t, lambda: len(catalogue.stored) == 450)
        await until(t, lambda: len(t.dead_letters) == 50)
        assert {each.attempts for each in t.dead_letters} == {3}


@pytest.mark.parametrize("error", [ConnectionRefusedError(111, "refused"), ValueError("wrong")], ids=["away", "wrong"])
async def test_what_lies_behind_five_hundred_bad_ones_is_handled_within_a_minute(
    virtual: App, catalogue: Catalogue, error: Exception
) -> None:
    catalogue.away = None
    catalogue.bad = dict.fromkeys(range(500), error)

    @virtual.agent("mars", concurrency=8)
    async def index(notification: Notification[Any]) -> None:
        catalogue.store(notification)

    async with harness(virtual) as t:
        await publish(virtual, range(1500))
        began = t.clock.monotonic()
        await until(t, lambda: catalogue.stored)
        assert t.clock.monotonic() - began < 60.0
        await until(t, lambda: len(catalogue.stored) == 1000)
        assert t.clock.monotonic() - began < 120.0


@pytest.mark.slow
async def test_a_deploy_that_breaks_everything_makes_a_dead_letter_a_second(virtual: App) -> None:
    @virtual.agent("mars", retry=RetryPolicy(1), concurrency=8)
    async def index(notification: Notification[Any]) -> None:
        raise KeyError("param")

    async with harness(virtual) as t:
        await publish(virtual, range(1000))
        await t.advance(120.0)
        assert UNTIL_SHUT + 90 <= len(t.dead_letters) <= UNTIL_SHUT + 8 + 121


async def test_what_cannot_be_decoded_and_what_is_rejected_slows_nothing(app: App, url: str | None) -> None:
    handled: list[int] = []

    @app.agent("mars", retry=QUICK)
    async def index(notification: Notification[dict[str, int]]) -> None:
        if notification.payload["n"] % 2:
            raise Reject("odd")
        handled.append(notification.payload["n"])

    async with harness(app, server=url) as t:
        await app.notify_many(Notify("mars", mars(step=n), {"n": "none"}) for n in range(150))
        await app.notify_many(Notify("mars", mars(step=150 + n), {"n": 2 * n + 1}) for n in range(150))
        assert await until(t, lambda: len(t.dead_letters) == 300) < 60.0, "paced, the last 200 would take 200 s"
        await app.notify_many(Notify("mars", mars(step=300 + n), {"n": 2 * n}) for n in range(150))
        await until(t, lambda: len(handled) == 150)
        assert Counter(each.reason for each in t.dead_letters) == {"undecodable": 150, "rejected": 150}


async def test_a_time_limit_of_the_author_is_no_outage(app: App, url: str | None) -> None:
    handled: list[str] = []

    @app.agent("mars", retry=RetryPolicy(2, first=0.05))
    async def index(notification: Notification[Any]) -> None:
        async with asyncio.timeout(0.01 if notification.identifier["step"] == "0" else None):
            await asyncio.sleep(0.05)
        handled.append(notification.identifier["step"])

    async with harness(app, server=url) as t:
        await publish(app, range(5))
        await until(t, lambda: t.dead_letters)
        await until(t, lambda: len(handled) == 4)
        assert [(each.reason, each.attempts) for each in t.dead_letters] == [("attempts_exhausted", 2)]


@pytest.mark.parametrize("order", [[], ["class"]])
async def test_patience_ends(virtual: App, catalogue: Catalogue, order: list[str]) -> None:
    disk = virtual.dependency("disk", patience="10m")

    @virtual.agent("mars", depends_on=disk, order_by=order)
    async def index(notification: Notification[Any]) -> None:
        catalogue.store(notification)

    async with harness(virtual) as t:
        await publish(virtual, range(3))
        await t.advance(300.0)
        assert t.dead_letters == []
        await t.stop()  # since when it is away is known to whoever is given it
        await t.start()
        await t.advance(400.0)
        assert [each.reason for each in t.dead_letters][:1] == ["unavailable"]
        await until(t, lambda: order or len(t.dead_letters) == 3)


async def test_without_patience_each_failure_is_an_attempt(app: App, url: str | None, catalogue: Catalogue) -> None:
    @app.agent("mars", retry=RetryPolicy(2, first=0.05, factor=1), depends_on=app.dependency("disk", patience=0))
    async def index(notification: Notification[Any]) -> None:
        catalogue.store(notification)

    async with harness(app, server=url) as t:
        await publish(app, range(5))
        await until(t, lambda: len(t.dead_letters) == 5)
        assert {(each.reason, each.attempts) for each in t.dead_letters} == {("attempts_exhausted", 2)}


async def test_order_is_kept(app: App, url: str | None, catalogue: Catalogue) -> None:
    @app.agent("mars", retry=QUICK, concurrency=4, order_by=["class"])
    async def index(notification: Notification[Any]) -> None:
        catalogue.store(notification)

    async with harness(app, server=url) as t:
        await publish(app, range(50))
        await until(t, lambda: len(catalogue.asked) >= 3)
        catalogue.away = None
        await until(t, lambda: len(catalogue.stored) == 50)
        assert t.dead_letters == []
    assert catalogue.stored == list(range(50))


@pytest.mark.slow
async def test_order_is_kept_when_a_worker_ends_in_an_outage(app: App, url: str | None, catalogue: Catalogue) -> None:
    @app.agent("mars", retry=QUICK, concurrency=4, order_by=["class"], ack_wait=3.0)
    async def index(notification: Notification[Any]) -> None:
        catalogue.store(notification)

    async with harness(app, server=url) as t:
        await publish(app, range(60))
        await until(t, lambda: len(catalogue.asked) >= 3)
        for _ in range(2):
            await t.stop()
            await t.start()
            before = len(catalogue.asked)
            await until(t, lambda before=before: len(catalogue.asked) > before)
        catalogue.away = None
        await until(t, lambda: len(catalogue.stored) == 60)
        assert t.dead_letters == []
    assert catalogue.stored == list(range(60))


async def test_a_bad_one_in_it_has_all_of_its_attempts_afterwards(
    app: App, url: str | None, catalogue: Catalogue
) -> None:
    catalogue.bad = {5: KeyError("param")}

    @app.agent("mars", retry=QUICK, concurrency=2)
    async def index(notification: Notification[Any]) -> None:
        catalogue.store(notification)

    async with harness(app, server=url) as t:
        await publish(app, range(20))
        await until(t, lambda: len(catalogue.asked) >= 20)
        assert t.dead_letters == []
        asked = len(catalogue.asked)
        catalogue.away = None
        await until(t, lambda: len(catalogue.stored) == 19)
        await until(t, lambda: t.dead_letters)
        assert [(each.reason, each.attempts) for each in t.dead_letters] == [("attempts_exhausted", 3)]
    assert [attempt for step, attempt in catalogue.asked[asked:] if step == 5] == [1, 2, 3]


@pytest.mark.parametrize("order", [[], ["class"]])
async def test_a_notification_counts_how_often_it_was_handed_over(app: App, url: str | None, order: list[str]) -> None:
    seen: list[tuple[int, int]] = []

    @app.agent("mars", order_by=order)
    async def index(notification: Notification[Any]) -> None:
        seen.append((notification.attempt, notification.num_delivered))
        if notification.num_delivered < 5:
            raise ConnectionRefusedError(111, "refused")

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(step=1), {})
        await t.settle()
    assert seen == [(1, number) for number in range(1, 6)]


@pytest.mark.slow
async def test_agents_that_depend_on_the_same_wait_together(app: App, url: str | None) -> None:
    away = True
    began: list[OutageBegan] = []
    tried: list[float] = []
    done = {"index": 0, "check": 0}
    app.events.listen(began.append, OutageBegan)
    disk = app.dependency("disk", unavailable=[GoneError])

    def ask(agent: str) -> None:
        tried.append(app.session.backend.clock.monotonic())
        if away:
            raise GoneError
        done[agent] += 1

    @app.agent("mars", retry=QUICK, depends_on=disk, concurrency=2)
    async def index(notification: Notification[Any]) -> None:
        ask("index")

    @app.agent("mars", retry=QUICK, depends_on=disk, concurrency=2)
    async def check(notification: Notification[Any]) -> None:
        ask("check")

    async with harness(app, server=url) as t:
        await publish(app, range(120))
        await until(t, lambda: began)
        await t.advance(1.0)
        since, before = t.clock.monotonic(), len(tried)
        await t.advance(5.0)
        assert 1 <= len(tried) - before <= 1 + t.clock.monotonic() - since, "one a second, of both agents together"
        away = False
        await until(t, lambda: done == {"index": 120, "check": 120})
        assert t.dead_letters == []
    assert [each.agents for each in began] == [("index", "check")]


async def test_code_takes_a_dependency_for_away_and_reads_it(app: App, url: str | None) -> None:
    handled: list[str] = []
    seen: list[tuple[bool, str]] = []
    disk = app.dependency("disk")

    @app.agent("mars", depends_on=disk, where={"step": 0})
    async def trip(notification: Notification[Any]) -> None:
        seen.append((disk.is_away, disk.reason))
        disk.trip("maintenance until noon", after="1h")
        seen.append((disk.is_away, disk.reason))

    @app.agent("mars", depends_on=disk, where={"step": {"gte": 1}})
    async def index(notification: Notification[Any]) -> None:
        handled.append(notification.identifier["step"])

    @app.agent("mars", where={"step": 9})
    def reset(notification: Notification[Any]) -> None:
        disk.reset()

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(step=0), {})
        await until(t, lambda: len(seen) == 2)
        await t.notify("mars", mars(step=1), {})
        await t.advance(3.0)
        assert handled == [], "nothing is tried before an hour is over"
        await t.notify("mars", mars(step=9), {})
        await until(t, lambda: sorted(handled) == ["1", "9"])
        assert not disk.is_away
    assert seen == [(False, ""), (True, "Unavailable: maintenance until noon")]
    with pytest.raises(DeclarationError, match="'disk' is not at work here"):
        disk.reset()


@pytest.mark.slow
async def test_one_key_is_away_and_the_others_are_not(app: App, url: str | None) -> None:
    """A tenant that asks to be left alone is left alone, and stops nobody else."""
    away = True
    asked: dict[str, list[float]] = {"od": [], "rd": []}
    began: list[OutageBegan] = []
    app.events.listen(began.append, OutageBegan)
    tenants = app.dependency("tenants", by=["class"])

    @app.agent("mars", retry=QUICK, depends_on=tenants, concurrency=4)
    async def deliver(notification: Notification[Any]) -> None:
        name = notification.identifier["class"]
        asked[name].append(app.session.backend.clock.monotonic())
        if away and name == "rd":
            raise AnswerError(429, Retry_After="4")

    async with harness(app, server=url) as t:
        for step in range(20):
            for name in ("rd", "od"):
                await t.notify("mars", {**mars(step=step), "class": name}, {})
        await until(t, lambda: len(asked["od"]) == 20)
        left_alone = t.clock.monotonic()
        await t.advance(2.0)
        assert len(asked["rd"]) <= 4, "those that ran already when it asked"
        await until(t, lambda: asked["rd"][-1] > left_alone)
        assert asked["rd"][-1] - asked["rd"][0] >= 4.0
        away = False
        await until(t, lambda: t.outcomes(deliver).count("acked") == 40)
        assert t.dead_letters == []
    assert [each.key for each in began] == ["class=rd"]


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "its own"])
async def test_a_server_that_asks_to_wait_speaks_of_the_dependency_where_one_is_declared(
    virtual: App, declared: bool
) -> None:
    handled: list[str] = []
    given: dict[str, Any] = {"depends_on": virtual.dependency("catalogue")} if declared else {}

    @virtual.agent("mars", **given)
    async def index(notification: Notification[Any]) -> None:
        if notification.identifier["step"] == "0" and notification.num_delivered == 1:
            raise AnswerError(503, Retry_After="600")
        handled.append(notification.identifier["step"])

    async with harness(virtual) as t:
        await publish(virtual, range(3))
        await t.advance(590.0)
        assert sorted(handled) == ([] if declared else ["1", "2"])
        await t.advance(30.0)
        assert sorted(handled) == ["0", "1", "2"]


async def test_an_author_who_asks_to_wait_speaks_of_the_dependency(virtual: App) -> None:
    handled: list[str] = []

    @virtual.agent("mars")
    async def index(notification: Notification[Any]) -> None:
        if notification.identifier["step"] == "0" and notification.num_delivered == 1:
            raise Unavailable("maintenance", after="60s")
        handled.append(notification.identifier["step"])

    async with harness(virtual) as t:
        await publish(virtual, range(3))
        await t.advance(50.0)
        assert handled == []
        await t.advance(30.0)
        assert sorted(handled) == ["0", "1", "2"]


async def test_half_of_the_calls_fail_and_the_rate_is_kept(virtual: App) -> None:
    """As where one of two replicas behind a balancer is away."""
    calls = handled = 0

    @virtual.agent("mars", concurrency=8)
    async def index(notification: Notification[Any]) -> None:
        nonlocal calls, handled
        calls += 1
        number = calls
        await virtual.session.backend.clock.sleep(0.05)
        if number * 2654435761 % 2**32 < 2**31:
            raise ConnectionRefusedError(111, "refused")
        handled += 1

    async with harness(virtual) as t:
        await publish(virtual, range(600))
        await t.advance(12.0)
        assert handled > 540, "each notification takes two calls of 0.05 s, of which eight run at once"


@pytest.mark.slow
async def test_a_batch_is_one_piece_of_evidence(virtual: App, catalogue: Catalogue) -> None:
    """One bad one in a hundred fails its batch, which says nothing of a hundred."""
    catalogue.away = None
    began: list[OutageBegan] = []
    virtual.events.listen(began.append, OutageBegan)
    calls = 0

    @virtual.agent("mars", retry=RetryPolicy(6, first=1.0))
    async def index(batch: Batch[Any]) -> None:
        nonlocal calls
        calls += 1
        steps = [int(each.identifier["step"]) for each in batch]
        if calls <= 40:
            raise ConnectionRefusedError(111, "refused")
        catalogue.stored += steps

    async with harness(virtual) as t:
        await publish(virtual, range(500))
        await until(t, lambda: len(set(catalogue.stored)) == 500)
        assert t.dead_letters == []
    assert began == [], "forty calls are no hundred"


@pytest.mark.parametrize("concurrency", [1, 8])
async def test_each_failed_call_of_batches_counts_once(virtual: App, catalogue: Catalogue, concurrency: int) -> None:
    """Also where several calls fail at the same moment, and their notifications are settled by turns."""
    calls, shut_at = 0, list[int]()
    virtual.events.listen(lambda began: shut_at.append(calls), OutageBegan)

    @virtual.agent("mars", batch=Batching(size=3, within=1), concurrency=concurrency)
    async def index(batch: Batch[Any]) -> None:
        nonlocal calls
        calls += 1
        await virtual.session.backend.clock.sleep(0.01)
        raise ConnectionRefusedError(111, "refused")

    async with harness(virtual) as t:
        await publish(virtual, range(600))
        await until(t, lambda: shut_at)
    assert UNTIL_SHUT <= shut_at[0] < 2 * UNTIL_SHUT, "retries run beside the first tries"


async def test_each_failed_run_over_a_stream_counts_once(virtual: App) -> None:
    runs, shut_at = 0, list[int]()
    virtual.events.listen(lambda began: shut_at.append(runs), OutageBegan)

    @virtual.agent("mars")
    async def index(stream: Stream[Any]) -> None:
        nonlocal runs
        runs += 1
        async for group in stream.take(3, within="1s"):
            assert len(group) == 3
            raise ConnectionRefusedError(111, "refused")

    async with harness(virtual) as t:
        await publish(virtual, range(600))
        await until(t, lambda: shut_at)
    assert UNTIL_SHUT <= shut_at[0] < 2 * UNTIL_SHUT


@pytest.mark.slow
async def test_windows_whose_function_needs_what_is_away_are_tried_one_a_second(virtual: App) -> None:
    away = True
    calls: list[float] = []
    done: set[str] = set()
    told: list[object] = []
    virtual.events.listen(told.append, OutageBegan, OutageGoesOn, OutageEnded)
    windowing = Windowing[Any, Any](
        size="1m",
        fold=lambda count, _: count + 1,
        initial=0,
        key=lambda each: each.identifier["step"],
        lateness="0s",
        idle="5s",
    )

    @virtual.agent("mars", window=windowing)
    async def count(window: Window[int]) -> None:
        calls.append(virtual.session.backend.clock.monotonic())
        if away:
            raise ConnectionRefusedError(111, "refused")
        done.add(window.key)

    async with harness(virtual) as t:
        await publish(virtual, range(120))
        await t.advance(90.0)
        began, before = t.clock.monotonic(), len(calls)
        await t.advance(120.0)
        assert 25 <= len(calls) - before <= 1 + t.clock.monotonic() - began
        away = False
        await t.advance(30.0)
        assert len(done) == 120
        assert t.dead_letters == []
    assert [type(each) for each in told[:1] + told[-1:]] == [OutageBegan, OutageEnded]
    assert len(told) <= 2 + 4, "a line at the beginning, one a minute, and one at the end"


@pytest.mark.slow
async def test_a_function_of_on_dead_letter_that_needs_what_is_away_is_paced(virtual: App) -> None:
    calls: list[float] = []

    @virtual.agent("mars")
    async def index(notification: Notification[Any]) -> None:
        raise Reject("not ours")

    @index.on_dead_letter
    async def tell(given_up: GivenUp) -> None:
        calls.append(virtual.session.backend.clock.monotonic())
        raise ConnectionRefusedError(111, "refused")

    async def two_minutes() -> None:
        async with harness(virtual) as t:
            await publish(virtual, range(200))
            await t.advance(120.0)
            assert len(calls) <= UNTIL_SHUT + 121
            await until(t, lambda: len(t.dead_letters) == 200)

    with pytest.raises(AssertionError, match="the function of on_dead_letter has failed for mars@"):
        await two_minutes()


async def test_a_worker_that_stops_gives_back_what_it_holds(app: App, url: str | None, catalogue: Catalogue) -> None:
    @app.agent("mars", retry=QUICK, concurrency=4)
    async def index(notification: Notification[Any]) -> None:
        catalogue.store(notification)

    async with harness(app, server=url) as t:
        await publish(app, range(200))
        await until(t, lambda: len(catalogue.asked) >= UNTIL_SHUT)
        await t.stop()
        catalogue.away = None
        await t.start()
        await until(t, lambda: len(catalogue.stored) == 200)
        assert t.dead_letters == []


@pytest.mark.slow
async def test_ten_minutes_in_virtual_time(virtual: App) -> None:
    """As a test of an author's: nothing is lost, nothing given up, and windows are not closed early."""
    handled: list[int] = []
    counted: list[int] = []
    disk = virtual.dependency("disk")

    @virtual.agent("mars", depends_on=disk, order_by=["class"])
    async def index(notification: Notification[Any]) -> None:
        handled.append(int(notification.identifier["step"]))

    @virtual.agent(
        "mars",
        depends_on=disk,
        window=Windowing(size="1m", fold=lambda count, _: count + 1, initial=0, lateness="0s", idle="5s"),
    )
    async def count(window: Window[int]) -> None:
        counted.append(window.value)

    async with harness(virtual) as t:
        with t.outage("disk"):
            for step in range(600):
                await t.notify("mars", mars(step=step), {})
                await t.advance(1.0)
            assert t.dead_letters == []
        await t.settle()
        await t.advance(10.0)
        assert t.dead_letters == []
    assert handled == list(range(600))
    assert sum(counted) == 600


async def test_what_cannot_be_counted_does_not_stop_windows(virtual: App) -> None:
    counted = list[int]()

    def fold(count: int, notification: Notification[Any]) -> int:
        if int(notification.identifier["step"]) < 30:
            raise ConnectionRefusedError(111, "refused")
        return count + 1

    @virtual.agent("mars", retry=QUICK, window=Windowing(size="1m", fold=fold, initial=0, lateness="0s", idle="5s"))
    async def count(window: Window[int]) -> None:
        counted.append(window.value)

    async with harness(virtual) as t:
        await publish(virtual, range(40))
        await t.settle()
        await t.advance(120.0)
        assert len(t.dead_letters) == 30
    assert sum(counted) == 10
