"""Notifications that are retried: at which an agent is blocked, and what persons decide about them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import anyio
import pytest
from msgspec import structs

from aviso_workers import App, Notification, Notify, RetryPolicy, Unavailable
from aviso_workers.errors import NotFoundError
from aviso_workers.ops import retried
from aviso_workers.ops.agent_control import AgentConsumer
from aviso_workers.ops.agent_report import AgentHealth
from aviso_workers.ops.retried import Answer
from aviso_workers.state import failure_counts, failure_records, orders
from aviso_workers.state.failure_counts import Taken
from aviso_workers.state.failure_records import Retrying
from aviso_workers.state.orders import Decides
from aviso_workers.testing import Harness, harness
from tests.agent_looks import looked
from tests.contract.settings import mars
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

LONG = RetryPolicy(first="10m", factor=1, attempts=6)
"""Nothing is tried again within a test unless somebody decides so."""
WITHOUT_END = RetryPolicy(first=0.02, factor=1, max="10m", attempts=None)
INDEX = AgentConsumer(app="contract", agent="index", stream="MARS")


class Handled:
    """Which steps were tried, and which of them cannot be handled yet."""

    def __init__(self) -> None:
        self.broken: set[int] = {3}
        self.tried: list[tuple[int, int]] = []
        self.done: list[int] = []
        self.error: type[Exception] = ValueError

    def handle(self, notification: Notification[Any]) -> None:
        step = int(notification.identifier["step"])
        self.tried.append((step, notification.attempt))
        if step in self.broken:
            raise self.error("no such field")
        self.done.append(step)


@pytest.fixture
def handled() -> Handled:
    return Handled()


async def until(t: Harness, condition: Any) -> None:
    with anyio.fail_after(PATIENCE_SECONDS):
        while not condition():
            await t.advance(0.2)


async def listed(t: Harness) -> list[Retrying]:
    """Return what is listed as retried, when something is."""
    with anyio.fail_after(PATIENCE_SECONDS):
        while not (found := await retried.of_agent(t.app.session.admin, INDEX)):
            await t.advance(0.2)
    return found


async def look(t: Harness) -> AgentHealth:
    [now] = await looked(t.app.session.admin, t.app.config)
    return now


async def blocked(t: Harness) -> list[Retrying]:
    """Return the notifications at which the agent is blocked."""
    return [each for each in (await look(t)).facts.retrying if each.blocked]


async def decided(t: Harness, decides: Decides, *sequences: int) -> list[Answer]:
    """Decide as the commands do, and return what they say."""
    admin = t.app.session.admin
    asked = await retried.plan(admin, INDEX, sequences, decides)
    await retried.decide(admin, INDEX, asked)
    return await retried.wait(admin, INDEX, asked, sleep=t.advance)


async def decisions(t: Harness) -> list[str]:
    """Return the keys of the decisions that are stored."""
    return await (await orders.bucket(t.app.session.admin, "contract")).keys()


@pytest.mark.parametrize("order_by", [[], ["class"]])
async def test_one_is_tried_again_at_once_and_said_to_be_handled(
    app: App, url: str | None, handled: Handled, order_by: list[str]
) -> None:
    @app.agent("mars", retry=LONG, order_by=order_by)
    async def index(notification: Notification[Any]) -> None:
        handled.handle(notification)

    async with harness(app, server=url, workers=2) as t:
        await app.notify_many(Notify("mars", mars(step=step), {}) for step in range(2, 5))
        await until(t, lambda: (3, 1) in handled.tried)
        await listed(t)
        handled.broken.clear()
        started = t.clock.monotonic()
        [answer] = await decided(t, "retry", 2)
        assert (answer.carried_out, answer.text) == (True, "handled")
        assert t.clock.monotonic() - started < 2.5
        await t.settle()
        assert [each for each in handled.tried if each[0] == 3] == [(3, 1), (3, 2)]
        assert sorted(handled.done) == [2, 3, 4]
        assert await decisions(t) == []


@pytest.mark.parametrize("order_by", [[], ["class"]])
async def test_one_that_fails_again_is_said_to_have_failed_and_may_be_tried_again(
    app: App, url: str | None, handled: Handled, order_by: list[str]
) -> None:
    @app.agent("mars", retry=LONG, order_by=order_by)
    async def index(notification: Notification[Any]) -> None:
        handled.handle(notification)

    async with harness(app, server=url, workers=2) as t:
        await t.notify("mars", mars(step=3), {})
        await listed(t)
        for attempt in (2, 3):
            [answer] = await decided(t, "retry", 1)
            assert not answer.carried_out
            assert answer.text.startswith("failed again: ValueError: no such field; the next attempt is at 20")
            assert [each for _, each in handled.tried] == list(range(1, attempt + 1))
            assert await decisions(t) == []
        handled.broken.clear()
        assert await t.retry("index") == [1]
        assert handled.done == [3]


async def test_the_last_attempt_of_a_person_is_an_attempt(app: App, url: str | None, handled: Handled) -> None:
    @app.agent("mars", retry=structs.replace(LONG, attempts=2))
    async def index(notification: Notification[Any]) -> None:
        handled.handle(notification)

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(step=3), {})
        await listed(t)
        [answer] = await decided(t, "retry", 1)
        assert answer.text == "failed again, and is a dead letter now: ValueError: no such field"
        assert [(each.reason, each.attempts) for each in t.dead_letters] == [("attempts_exhausted", 2)]


@pytest.mark.parametrize("order_by", [[], ["class"]])
async def test_one_that_is_skipped_is_a_dead_letter_and_its_key_goes_on(
    app: App, url: str | None, handled: Handled, order_by: list[str]
) -> None:
    @app.agent("mars", retry=LONG, order_by=order_by)
    async def index(notification: Notification[Any]) -> None:
        handled.handle(notification)

    async with harness(app, server=url, workers=2) as t:
        for step in range(2, 6):
            await t.notify("mars", mars(step=step), {})
        await until(t, lambda: (3, 1) in handled.tried)
        await listed(t)
        [answer] = await decided(t, "skip", 2)
        assert (answer.carried_out, answer.text) == (True, "skipped: it is a dead letter now")
        await t.settle()
        assert sorted(handled.done) == [2, 4, 5]
        assert [each for each in handled.tried if each[0] == 3] == [(3, 1)], "its handler does not run again"
        assert [(each.reason, each.attempts) for each in t.dead_letters] == [("skipped", 1)]
        assert "skipped by a person after 1 attempts; the last error: ValueError: no such" in t.dead_letters[0].error
        assert await decisions(t) == []


async def test_a_singleton_tries_one_again_and_skips_it(app: App, url: str | None, handled: Handled) -> None:
    @app.agent("mars", retry=LONG, singleton=True, ack_wait=2.0)
    async def index(notification: Notification[Any]) -> None:
        handled.handle(notification)

    async with harness(app, server=url, workers=2) as t:
        await app.notify_many(Notify("mars", mars(step=step), {}) for step in range(3, 5))
        await until(t, lambda: (3, 1) in handled.tried)
        await listed(t)
        await t.advance(5.0)  # longer than a delivery of a pinned consumer is its reader's
        [answer] = await decided(t, "retry", 1)
        assert answer.text.startswith("failed again: ValueError")
        assert handled.done == []
        await t.advance(5.0)
        assert await t.skip("index") == [1]
        await t.settle()
        assert handled.done == [4]


@pytest.mark.parametrize("order_by", [[], ["class"]])
async def test_one_whose_dependency_is_away_is_tried_again(
    app: App, url: str | None, handled: Handled, order_by: list[str]
) -> None:
    @app.agent("mars", retry=LONG, order_by=order_by)
    async def index(notification: Notification[Any]) -> None:
        try:
            handled.handle(notification)
        except ValueError as error:
            raise Unavailable("the catalogue is away", after="10m") from error

    async with harness(app, server=url, workers=2) as t:
        await t.notify("mars", mars(step=3), {})
        await listed(t)
        [answer] = await decided(t, "retry", 1)
        assert answer.text.startswith("failed again: Unavailable: the catalogue is away; the next attempt is at 20")
        handled.broken.clear()
        assert await t.retry("index", 1) == [1]
        assert handled.done == [3]


async def test_more_are_retried_than_are_listed(
    app: App, url: str | None, handled: Handled, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setattr(failure_records, "MAX_RETRYING", 2)
    handled.broken = set(range(6))

    @app.agent("mars", retry=LONG)
    async def index(notification: Notification[Any]) -> None:
        handled.handle(notification)

    async with harness(app, server=url, workers=2) as t:
        await app.notify_many(Notify("mars", mars(step=step), {}) for step in range(6))
        await until(t, lambda: len(handled.tried) == 6)
        left_out = {1, 2, 3, 4, 5, 6} - {each.sequence for each in await listed(t)}
        assert len(left_out) >= 4
        handled.broken.clear()
        for sequence in left_out:
            assert await t.retry("index", sequence) == [sequence]
        assert len(handled.done) == len(left_out)


async def test_what_is_not_retried_is_refused(app: App, url: str | None, handled: Handled) -> None:
    @app.agent("mars", retry=LONG)
    async def index(notification: Notification[Any]) -> None:
        handled.handle(notification)

    async with harness(app, server=url) as t:
        await app.notify_many(Notify("mars", mars(step=step), {}) for step in range(1, 6))
        await until(t, lambda: len(handled.tried) == 5)
        await listed(t)
        with pytest.raises(NotFoundError, match="not retried: 1 is settled: everything on MARS up to 2 is"):
            await decided(t, "retry", 1)
        with pytest.raises(NotFoundError, match="not retried: 9 is in no stream that it reads"):
            await decided(t, "skip", 3, 9)
        assert await decisions(t) == []
        [answer] = await decided(t, "skip", 5)
        assert answer.text == "not retried: no worker that runs knows of it, and nothing is decided"
        assert await decisions(t) == []
        assert t.dead_letters == []


async def test_a_decision_waits_for_a_worker(app: App, url: str | None, handled: Handled) -> None:
    @app.agent("mars", retry=structs.replace(LONG, first=20.0 if url is None else 4.0, jitter=0.0), ack_wait=1.0)
    async def index(notification: Notification[Any]) -> None:
        handled.handle(notification)

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(step=3), {})
        await listed(t)
        await t.crash()
        asked = await retried.plan(t.app.session.admin, INDEX, [1], "skip")
        await retried.decide(t.app.session.admin, INDEX, asked)
        [answer] = await retried.wait(t.app.session.admin, INDEX, asked, seconds=1.0, sleep=t.advance)
        assert not answer.carried_out
        assert "not yet: no worker" in answer.text
        assert "the decision stands until 20" in answer.text
        await t.start()
        await until(t, lambda: t.dead_letters)
        assert [each for _, each in handled.tried] == [1], "the new worker skips it before its handler runs"
        [answer] = await retried.wait(t.app.session.admin, INDEX, asked, sleep=t.advance)
        assert answer.text == "skipped: it is a dead letter now"


@pytest.mark.parametrize("order_by", [[], ["class"]])
async def test_one_whose_worker_dies_after_it_has_taken_the_decision_is_skipped_by_another(
    app: App, url: str | None, handled: Handled, order_by: list[str]
) -> None:
    @app.agent("mars", retry=structs.replace(LONG, first=20.0 if url is None else 4.0, jitter=0.0), ack_wait=1.0)
    async def index(notification: Notification[Any]) -> None:
        handled.handle(notification)

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(step=3), {})
        await listed(t)
        asked = await retried.plan(t.app.session.admin, INDEX, [1], "skip")
        await t.crash()
        await retried.decide(t.app.session.admin, INDEX, asked)
        [order] = await (await orders.bucket(t.app.session.admin, "contract")).entries()
        bucket = await t.app.session.admin.key_value("contract__failures", own=True)
        await failure_counts.store_taken(bucket, order.key, Taken(order=order.revision), revision=0)
        await t.start()
        [answer] = await retried.wait(t.app.session.admin, INDEX, asked, seconds=30, sleep=t.advance)
        assert answer.carried_out
        assert [each for _, each in handled.tried] == [1]


@pytest.mark.parametrize("order_by", [[], ["class"]])
async def test_an_agent_without_a_limit_of_attempts_is_blocked_and_goes_on(
    app: App, url: str | None, handled: Handled, order_by: list[str]
) -> None:
    @app.agent("mars", retry=WITHOUT_END, order_by=order_by, concurrency=4)
    async def index(notification: Notification[Any]) -> None:
        handled.handle(notification)

    async with harness(app, server=url) as t:
        for step in range(6):
            await t.notify("mars", mars(step=step), {})
            await t.notify("mars", {**mars(step=step + 10), "class": "rd"}, {})
        await until(t, lambda: (3, 8) in handled.tried)
        assert t.dead_letters == []
        with anyio.fail_after(PATIENCE_SECONDS):
            while not (found_ones := await blocked(t)):
                await t.advance(0.2)
        [found] = found_ones
        behind = 2 if order_by else 0
        assert (found.sequence, found.key, found.behind) == (7, "od" if order_by else "", behind)
        key, waits = (" (key od)", ", 2 wait behind it") if order_by else ("", "")
        now = await look(t)
        hour_later = structs.replace(now.facts, now=now.facts.now + timedelta(hours=1))
        assert hour_later.retrying == [found], "also while it runs, and while no worker does"
        said = (now.judgement.state, now.judgement.why, now.judgement.needs)
        assert said == ("blocked", f"at MARS@7{key}{waits}: ValueError: no such field", True)
        expected = [0, 1, 2, 10, 11, 12, 13, 14, 15] + ([] if order_by else [4, 5])
        assert sorted(handled.done) == sorted(expected), "what is behind it waits, and no other key"
        assert await t.skip("index") == [7]
        await t.settle()
        assert sorted(handled.done) == [0, 1, 2, 4, 5, 10, 11, 12, 13, 14, 15]
        with anyio.fail_after(PATIENCE_SECONDS):
            while await blocked(t):
                await t.advance(0.2)
    assert [step for step in handled.done if step < 10] == [0, 1, 2, 4, 5]


@pytest.mark.slow
async def test_a_blocked_one_that_succeeds_blocks_no_more(app: App, url: str | None, handled: Handled) -> None:
    @app.agent("mars", retry=WITHOUT_END)
    async def index(notification: Notification[Any]) -> None:
        handled.handle(notification)

    async with harness(app, server=url) as t:
        handled.broken = {3, 4}
        await t.notify("mars", mars(step=4), {})
        await t.notify("mars", mars(step=3), {})
        with anyio.fail_after(PATIENCE_SECONDS):
            while len(await blocked(t)) < 2:
                await t.advance(0.2)
        handled.broken = {4}
        with anyio.fail_after(PATIENCE_SECONDS):
            while len(await blocked(t)) > 1:
                await t.advance(0.2)
        assert [each.sequence for each in await blocked(t)] == [1]


async def test_one_that_has_left_its_stream_blocks_nobody(app: App, url: str | None, handled: Handled) -> None:
    @app.agent("mars", retry=WITHOUT_END)
    async def index(notification: Notification[Any]) -> None:
        handled.handle(notification)

    async with harness(app, server=url) as t:
        await app.notify("mars", mars(step=3), {})
        with anyio.fail_after(PATIENCE_SECONDS):
            while not await blocked(t):
                await t.advance(0.2)
        handled.broken.clear()
        await app.notify("mars", mars(step=3), {})  # it replaces the one before, as Aviso's streams do
        with anyio.fail_after(PATIENCE_SECONDS):
            while await blocked(t):
                await t.advance(0.2)


async def test_a_decision_about_one_whose_failure_could_not_be_stored_is_carried_out(
    app: App, handled: Handled, url: str | None
) -> None:
    if url is not None:
        pytest.skip("the connection is cut in memory")

    @app.agent("mars", order_by=["class"], retry=structs.replace(WITHOUT_END, first="10m"))
    async def index(notification: Notification[Any]) -> None:
        if len(handled.tried) == 1:
            t.disconnect()
        handled.handle(notification)

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(step=3), {})
        await until(t, lambda: len(handled.tried) == 1)
        await listed(t)
        asked = await retried.plan(t.app.session.admin, INDEX, [1], "retry")
        await retried.decide(t.app.session.admin, INDEX, asked)
        await until(t, lambda: len(handled.tried) == 2)
        await t.advance(3.0)
        t.reconnect()
        await t.advance(5.0)
        handled.broken.clear()
        assert await t.retry("index", 1) == [1]
        assert handled.done == [3]
