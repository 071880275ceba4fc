"""Notifications that are parked after their last attempt: they wait for a person, and their ordering key waits too."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import anyio
import pytest
from msgspec import structs

from aviso_workers import App, Backoff, Breaker, Notification, Notify, Window, Windowing
from aviso_workers.declare import verdicts
from aviso_workers.declare.verdicts import Again
from aviso_workers.engine import acknowledging
from aviso_workers.errors import DeclarationError
from aviso_workers.ops import agent_report, parked
from aviso_workers.ops.agent_report import AgentRow
from aviso_workers.ops.parked import Parked
from aviso_workers.testing import Harness, harness
from tests.contract.settings import mars
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

PARKING = Backoff(first=0.05, factor=1, attempts=2, then="park")


@pytest.fixture(autouse=True)
def _looked_at_often(url: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if url:
        often = Again(after_seconds=0.5, reason="parked")
        monkeypatch.setattr(verdicts, "PARKED", often)
        monkeypatch.setattr(acknowledging, "PARKED", often)


class Handled:
    """Which steps were tried, and which of them cannot be handled yet."""

    def __init__(self) -> None:
        self.broken: set[int] = {3}
        self.tried: list[tuple[int, int]] = []
        self.done: list[int] = []

    def handle(self, notification: Notification[Any]) -> None:
        step = int(notification.identifier["step"])
        self.tried.append((step, notification.attempt))
        if step in self.broken:
            raise ValueError("no such field")
        self.done.append(step)


@pytest.fixture
def handled() -> Handled:
    return Handled()


async def until(t: Harness, condition: Any) -> None:
    with anyio.fail_after(PATIENCE_SECONDS):
        while not condition():
            await t.advance(0.2)


async def waiting(t: Harness) -> list[Parked]:
    """Return what is parked, when something is."""
    with anyio.fail_after(PATIENCE_SECONDS):
        while not (found := await parked.of_agent(t.app.session.admin, "contract", "index")):
            await t.advance(0.2)
    return found


async def rows(t: Harness) -> list[AgentRow]:
    """Return what `agents ls` says of the agents, as if an hour had passed."""
    found = await agent_report.of_app(t.app.session.admin, t.app.config, t.app)
    later = [
        structs.replace(each, events=structs.replace(each.events, time=each.events.time + timedelta(hours=1)))
        for each in found
        if each.events
    ]
    assert "3 delivered and not finished" in structs.replace(later[0], parked=()).trouble
    return agent_report.rows(later, later, seconds=1.0)


async def told(t: Harness) -> tuple[str, str]:
    """Return trouble and state of the agent, as if an hour had passed before anybody decided on what is parked."""
    [now] = await agent_report.of_app(t.app.session.admin, t.app.config, t.app)
    assert now.record is not None
    long_ago = structs.replace(now.record, unfinished_since=now.time - timedelta(hours=1))
    assert (
        "delivered and not finished"
        in structs.replace(now, parked=(), record=structs.replace(long_ago, decided=None)).trouble
    ), "without parking"
    now = structs.replace(now, record=long_ago)
    return now.trouble, now.state_since(None)


async def looked_at(t: Harness) -> None:
    """Let workers look twice at what is parked."""
    await t.advance(2.1 * verdicts.PARKED.after_seconds)


async def test_it_waits_and_is_tried_again_with_all_attempts(app: App, url: str | None, handled: Handled) -> None:
    @app.agent("mars", retry=PARKING)
    async def index(notification: Notification[Any]) -> None:
        handled.handle(notification)

    async with harness(app, server=url) as t:
        await app.notify_many(Notify("mars", mars(step=step), {}) for step in range(6))
        (found,) = await waiting(t)
        await looked_at(t)
        assert [attempt for step, attempt in handled.tried if step == 3] == [1, 2], "and is not tried while it waits"
        assert (sorted(handled.done), t.dead_letters) == ([0, 1, 2, 4, 5], [])
        assert (found.sequence, found.record.attempts, found.record.error) == (4, 2, "ValueError: no such field")
        handled.broken.clear()
        handled.tried.clear()
        assert await t.retry_parked(index) == [4]
        await until(t, lambda: 3 in handled.done)
        await t.settle()
        assert handled.tried == [(3, 1)]
        assert await parked.of_agent(t.app.session.admin, "contract", "index") == []


async def test_one_that_has_left_its_stream_waits_for_nobody(app: App, url: str | None, handled: Handled) -> None:
    @app.agent("mars", retry=PARKING)
    async def index(notification: Notification[Any]) -> None:
        handled.handle(notification)

    async def parked_now() -> int:
        [now] = await agent_report.of_app(t.app.session.admin, t.app.config, t.app)
        return len(now.parked)

    async with harness(app, server=url) as t:
        await app.notify("mars", mars(step=3), {})
        await waiting(t)
        assert await parked_now() == 1
        handled.broken.clear()
        await app.notify("mars", mars(step=3), {})  # it replaces the one before, as Aviso's streams do
        with anyio.fail_after(PATIENCE_SECONDS):
            while await parked_now():
                await t.advance(0.2)
        assert handled.done == [3]


@pytest.mark.parametrize("order_by", [[], ["class"]])
async def test_one_that_fails_again_is_parked_again(
    app: App, url: str | None, handled: Handled, order_by: list[str]
) -> None:
    @app.agent("mars", retry=PARKING, order_by=order_by)
    async def index(notification: Notification[Any]) -> None:
        handled.handle(notification)

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(step=3), {})
        for times in (1, 2, 3):
            (found,) = await waiting(t)
            assert [attempt for _, attempt in handled.tried] == times * [1, 2]
            assert (found.sequence, found.record.attempts) == (1, 2)
            if times < 3:
                await t.retry_parked(index)
                await until(t, lambda times=times: len(handled.tried) == 2 * (times + 1))
        await t.skip_parked(index)
        await until(t, lambda: t.dead_letters)
        assert await parked.of_agent(t.app.session.admin, "contract", "index") == []


async def test_its_key_waits_until_it_is_skipped(app: App, url: str | None, handled: Handled) -> None:
    @app.agent("mars", retry=PARKING, order_by=["class"], concurrency=4)
    async def index(notification: Notification[Any]) -> None:
        handled.handle(notification)

    async with harness(app, server=url) as t:
        for step in range(6):
            await t.notify("mars", mars(step=step), {})
            await t.notify("mars", {**mars(step=step + 10), "class": "rd"}, {})
        await until(t, lambda: len(handled.done) == 9)
        await looked_at(t)
        assert sorted(handled.done) == [0, 1, 2, 10, 11, 12, 13, 14, 15], "what is behind it waits, and no other key"
        (found,) = await waiting(t)
        assert (found.record.ordering_key, found.record.behind) == ("od", 2)
        (row,) = await rows(t)
        assert (row.parked, row.trouble, row.state) == (
            1,
            "",
            "parked: 1 wait for your decision, and 2 wait behind them: ValueError: no such field; `agents retrying "
            "contract index` lists them, `agents retry` or `agents skip` decides",
        )
        assert await t.skip_parked("index") == [found.sequence]
        await until(t, lambda: len(handled.done) == 11)
        await t.settle()
        assert [(each.reason, each.attempts) for each in t.dead_letters] == [("skipped", 2)]
        assert "skipped by a person after 2 attempts; the last error: ValueError" in t.dead_letters[0].error
        assert await parked.of_agent(t.app.session.admin, "contract", "index") == []
    assert [step for step in handled.done if step < 10] == [0, 1, 2, 4, 5]


@pytest.mark.parametrize("order", [[], ["class"]])
async def test_a_worker_that_starts_leaves_it_parked(
    app: App, url: str | None, handled: Handled, order: list[str]
) -> None:
    @app.agent("mars", retry=PARKING, order_by=order, ack_wait=1.0)
    async def index(notification: Notification[Any]) -> None:
        handled.handle(notification)

    async with harness(app, server=url) as t:
        await app.notify_many(Notify("mars", mars(step=step), {}) for step in range(3, 5))
        await waiting(t)
        await t.crash()
        await t.start()
        await looked_at(t)
        assert [attempt for step, attempt in handled.tried if step == 3] == [1, 2]
        assert t.dead_letters == []
        assert (4 in handled.done) is not bool(order)
        handled.broken.clear()
        await parked.retry(t.app.session.admin, *await waiting(t))
        await until(t, lambda: sorted(handled.done) == [3, 4])


async def test_others_go_on_however_often_parked_ones_are_looked_at(
    app: App, url: str | None, handled: Handled
) -> None:
    handled.broken = set(range(15))

    @app.agent("mars", retry=Backoff(attempts=1, then="park"))
    async def index(notification: Notification[Any]) -> None:
        handled.handle(notification)

    async with harness(app, server=url) as t:
        await app.notify_many(Notify("mars", mars(step=step), {}) for step in range(15))
        await until(t, lambda: len(handled.tried) == 15)
        await looked_at(t)
        await app.notify_many(Notify("mars", mars(step=step), {}) for step in range(20, 23))
        await t.advance(5.0)
        assert handled.done == [20, 21, 22]


@pytest.mark.parametrize("order", [[], ["step"]])
async def test_they_stay_parked_through_an_outage(
    app: App, url: str | None, handled: Handled, order: list[str]
) -> None:
    handled.broken = set(range(10))
    away = False

    @app.agent(
        "mars",
        retry=Backoff(attempts=1, then="park"),
        order_by=order,
        breaker=Breaker(first=0.2, max=0.5, failures=100),
    )
    async def index(notification: Notification[Any]) -> None:
        if away:
            raise ConnectionRefusedError(111, "refused")
        handled.handle(notification)

    async with harness(app, server=url) as t:
        await app.notify_many(Notify("mars", mars(step=step), {}) for step in range(10))
        await until(t, lambda: len(handled.tried) == 10)
        away = True
        await app.notify_many(Notify("mars", mars(step=step), {}) for step in range(20, 30))
        await looked_at(t)
        away = False
        await until(t, lambda: len(handled.done) == 10)
        await looked_at(t)
    assert sorted(handled.done) == list(range(20, 30))
    assert len([step for step, _ in handled.tried if step < 10]) == 10, "nobody has decided on them"


@pytest.mark.parametrize("skips", [False, True])
async def test_what_is_decided_on_is_handed_back_and_not_stuck(
    app: App, url: str | None, handled: Handled, skips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seldom = Again(after_seconds=60.0, reason="parked")
    monkeypatch.setattr(verdicts, "PARKED", seldom)
    monkeypatch.setattr(acknowledging, "PARKED", seldom)
    handled.broken = {3, 4}

    @app.agent("mars", retry=PARKING)
    async def index(notification: Notification[Any]) -> None:
        handled.handle(notification)

    async with harness(app, server=url) as t:
        admin = t.app.session.admin
        await t.notify("mars", mars(step=3), {})
        await t.notify("mars", mars(step=4), {})
        with anyio.fail_after(PATIENCE_SECONDS):
            while len(found := await waiting(t)) < 2:
                await t.advance(0.1)
        decide = parked.skip if skips else parked.retry
        await decide(admin, found[0])
        trouble, state = await told(t)
        assert (trouble, state.partition(":")[0]) == ("", "parked"), "the other one waits for a decision"
        await decide(admin, found[1])
        trouble, state = await told(t)
        assert trouble == ""
        assert re.fullmatch(r"handed back at \S+: its worker looks within a minute", state)
        [now] = await agent_report.of_app(admin, t.app.config, t.app)
        assert now.events is not None
        later = structs.replace(now.events, time=now.events.time + timedelta(minutes=10))
        assert "2 delivered and not finished" in structs.replace(now, events=later).trouble, "no worker has looked"


def test_windows_cannot_be_parked() -> None:
    app = App("contract")
    with pytest.raises(DeclarationError, match='Backoff\\(then="park"\\) is not for a function of a Window'):

        @app.agent("mars", retry=PARKING, window=Windowing(size="1m", fold=lambda count, _: count + 1, initial=0))
        async def count(window: Window[int]) -> None: ...


def test_what_becomes_of_it_is_one_of_two() -> None:
    with pytest.raises(DeclarationError, match='then must be "dead_letter" or "park", found \'drop\''):
        Backoff(then="drop")  # type: ignore[arg-type]
