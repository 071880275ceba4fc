"""The number of an attempt, and how often a notification was handed over, as a handler sees them in each call form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from aviso_workers import Agent, App, Batch, Batching, Notification, Retry, RetryPolicy, Stream
from aviso_workers.aviso.literals import SECOND
from aviso_workers.engine import attempts
from aviso_workers.ops.dead_letters import Selection, StoredDeadLetters
from aviso_workers.state import failure_counts
from aviso_workers.testing import Harness, harness
from tests.contract.settings import mars
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

RETRY = RetryPolicy(first=0.05, factor=1, attempts=3, jitter=0)


class Seen(list[tuple[int, int]]):
    """Attempt and `num_delivered` of each call; the first `failing` calls fail."""

    failing = 0

    def note(self, notification: Notification[Any]) -> None:
        self.append((notification.attempt, notification.num_delivered))
        if len(self) <= self.failing:
            raise RuntimeError("not yet")


def one_by_one(app: App, seen: Seen, **policy: Any) -> Agent[Any, Any]:
    @app.agent("mars", **{"retry": RETRY} | policy)
    async def index(notification: Notification[Any]) -> None:
        seen.note(notification)

    return index


def plain(app: App, seen: Seen) -> Agent[Any, Any]:
    @app.agent("mars", retry=RETRY)
    def index(notification: Notification[Any]) -> None:
        seen.note(notification)

    return index


def in_batches(app: App, seen: Seen) -> Agent[Any, Any]:
    @app.agent("mars", retry=RETRY, batch=Batching(size=10, within=0.01))
    async def index(batch: Batch[Any]) -> None:
        seen.note(*batch)

    return index


def as_stream(app: App, seen: Seen) -> Agent[Any, Any]:
    @app.agent("mars", retry=RETRY)
    async def index(stream: Stream[Any]) -> None:
        async for notification in stream:
            seen.note(notification)

    return index


FORMS: dict[str, Callable[[App, Seen], Agent[Any, Any]]] = {
    "one at a time": one_by_one,
    "in order of a key": lambda app, seen: one_by_one(app, seen, order_by=("class",)),
    "as a singleton": lambda app, seen: one_by_one(app, seen, singleton=True),
    "in a thread": plain,
    "in batches": in_batches,
    "as a stream": as_stream,
}


@pytest.fixture
def seen() -> Seen:
    return Seen()


async def until(count: int, seen: Seen, t: Harness) -> None:
    with anyio.fail_after(PATIENCE_SECONDS):
        while len(seen) < count:
            await t.advance(0.01)


@pytest.mark.parametrize("form", FORMS)
async def test_each_attempt_has_its_number(form: str, app: App, url: str | None, seen: Seen) -> None:
    seen.failing = 2
    agent = FORMS[form](app, seen)
    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        assert seen == [(1, 1), (2, 2), (3, 3)]
        assert [settled.num_delivered for settled in t.settled(agent)] == [1, 2, 3]


@pytest.mark.parametrize("form", FORMS)
async def test_a_dead_letter_that_is_tried_again_begins_with_the_first_attempt(
    form: str, app: App, url: str | None, seen: Seen
) -> None:
    seen.failing = 4
    agent = FORMS[form](app, seen)
    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        stored = StoredDeadLetters(app.session.admin, events=app.events)
        await stored.retry(*[dead_letter async for dead_letter in stored.select(Selection())])
        await t.settle()
        assert seen == [(1, 1), (2, 2), (3, 3), (1, 1), (2, 2)]
        assert t.outcomes(agent) == ["retried", "retried", "dead_lettered", "retried", "acked"]


@pytest.mark.parametrize("order_by", [(), ("class",)])
async def test_a_deploy_uses_up_no_attempt(app: App, url: str | None, seen: Seen, order_by: tuple[str, ...]) -> None:
    seen.failing = 3
    retry = RetryPolicy(first=0.5, factor=1, attempts=6, jitter=0)
    one_by_one(app, seen, order_by=order_by, retry=retry, ack_wait=0.5)
    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await until(2, seen, t)
        await t.stop()
        await t.start()
        await t.settle()
    assert [attempt for attempt, _ in seen] == [1, 2, 3, 4]
    numbers = [num_delivered for _, num_delivered in seen]
    assert numbers == sorted(set(numbers)), "each is handed over once more than the one before"


@pytest.mark.parametrize("order_by", [(), ("class",)])
async def test_attempts_are_counted_however_long_a_notification_waits_between_them(
    app: App, url: str | None, order_by: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_counts, "KEPT_SECONDS", 60.0)
    monkeypatch.setattr(attempts, "WHOLE_SECONDS", 1.0)
    made: list[int] = []

    @app.agent("mars", order_by=order_by, retry=RetryPolicy(attempts=3))
    async def index(notification: Notification[Any]) -> Retry:
        made.append(notification.attempt)
        return Retry(after=100.0)

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        with anyio.fail_after(PATIENCE_SECONDS):
            while not t.settled(index):
                await t.advance(0.01)
        bucket = await app.session.admin.stream_info("KV_contract__failures")
        assert bucket.config.max_age / SECOND >= 200
        if url is not None:
            return  # its time is real
        while not t.dead_letters:
            await t.advance(50.0)
            await t.stop()
            await t.start()
            await t.advance(50.0)
    assert made == [1, 2, 3]
