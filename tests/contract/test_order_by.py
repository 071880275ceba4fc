"""`order_by`: what one key may hold up, on every backend. A key that fails or is slow stops no other key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import anyio
import pytest

from aviso_workers import App, Notification, Notify, Reject, Retry, RetryPolicy
from aviso_workers.backends import Delivery
from aviso_workers.engine import flow
from aviso_workers.ops.dead_letters import Selection, StoredDeadLetters
from aviso_workers.testing import Harness, harness
from tests.contract.settings import mars
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

PREFETCH = flow.MAX_PREFETCH
LATER = RetryPolicy(first=3600.0, factor=1.0, attempts=5, jitter=0.0)
SOON = RetryPolicy(first=0.05, factor=1.0, attempts=2, jitter=0.0)
BAD, GOOD = "0bad", "good"


async def publish(app: App, steps_by_key: Iterable[tuple[str, int]], payload: Any = "x") -> None:
    await app.notify_many(Notify("mars", mars(expver=key, step=step), payload) for key, step in steps_by_key)


async def wait_until(t: Harness, true: Callable[[], bool]) -> None:
    deadline = t.clock.monotonic() + PATIENCE_SECONDS
    while not true() and t.clock.monotonic() < deadline:
        await t.advance(0.05)


class Handled:
    """What the handler of a test was given, by key."""

    def __init__(self) -> None:
        self.steps: dict[str, list[int]] = {}
        self.sequences: dict[str, list[int]] = {}
        self.sizes: set[int] = set()
        """Of the payloads."""

    def note(self, notification: Notification[Any]) -> str:
        key = notification.identifier["expver"]
        self.steps.setdefault(key, []).append(int(notification.identifier["step"]))
        self.sequences.setdefault(key, []).append(notification.sequence)
        self.sizes.add(len(notification.payload))
        return key

    def count(self, *, without: str) -> int:
        return sum(len(steps) for key, steps in self.steps.items() if key != without)


def held_up(app: App) -> tuple[Handled, anyio.Event]:
    """Declare the agent `index`, whose handler of the key BAD goes on at the event; what it is given is noted."""
    handled, goes_on = Handled(), anyio.Event()

    @app.agent("mars", order_by=("expver",), concurrency=4)
    async def index(notification: Notification[str]) -> None:
        if handled.note(notification) == BAD:
            await goes_on.wait()

    return handled, goes_on


async def test_a_key_that_fails_stops_no_other(app: App, url: str | None) -> None:
    handled = Handled()

    @app.agent("mars", order_by=("expver",), concurrency=4, retry=LATER)
    async def index(notification: Notification[Any]) -> None:
        if handled.note(notification) == BAD:
            raise ConnectionError("its database is down")

    async with harness(app, server=url) as t:
        await publish(app, ((BAD, step) for step in range(2 * PREFETCH)))
        await publish(app, ((f"{GOOD[:2]}{key:02}", step) for step in range(3) for key in range(20)))
        await wait_until(t, lambda: handled.count(without=BAD) == 60)

        assert handled.count(without=BAD) == 60, "those behind what fails"
        assert all(steps == [0, 1, 2] for key, steps in handled.steps.items() if key != BAD)
        assert handled.steps[BAD] == [0]


@pytest.mark.slow
async def test_many_keys_that_fail_stop_no_other(app: App, url: str | None) -> None:
    handled = Handled()

    @app.agent("mars", order_by=("expver",), concurrency=4)
    async def index(notification: Notification[Any]) -> None:
        if handled.note(notification) != GOOD:
            raise Retry("1h")

    async with harness(app, server=url) as t:
        await publish(app, ((f"{key:04}", step) for step in range(3) for key in range(PREFETCH // 2)))
        await publish(app, ((GOOD, step) for step in range(20)))
        await wait_until(t, lambda: len(handled.steps.get(GOOD, [])) == 20)

        assert handled.steps[GOOD] == list(range(20))


@pytest.mark.slow
async def test_a_key_that_takes_long_stops_no_other(app: App, url: str | None) -> None:
    handled, goes_on = held_up(app)

    async with harness(app, server=url) as t:
        await publish(app, (pair for step in range(2 * PREFETCH) for pair in ((BAD, step), (f"{step % 20:04}", step))))
        await wait_until(t, lambda: handled.count(without=BAD) == 2 * PREFETCH)
        assert handled.count(without=BAD) == 2 * PREFETCH
        assert len(handled.steps[BAD]) == 1

        goes_on.set()
        await t.settle()
        assert sorted(handled.steps[BAD]) == list(range(2 * PREFETCH))
        assert handled.sequences[BAD] == sorted(handled.sequences[BAD]), "in the order of the stream"
        assert Counter(t.outcomes(*app.agents)) == {"acked": 4 * PREFETCH}


class TestWhatIsTooLargeTogether:
    """What waits behind a key fills the budget of bytes, and other keys are asked for while a handler is idle."""

    COUNT = 200

    @pytest.fixture(autouse=True)
    def small_budget(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(flow, "MAX_WAITING_BYTES", 20_000)

    async def test_is_handled_whole_and_in_order(self, app: App, url: str | None) -> None:
        handled, goes_on = held_up(app)

        async with harness(app, server=url) as t:
            await publish(app, ((BAD, step) for step in range(self.COUNT)), "x" * 1000)
            await publish(app, ((GOOD, step) for step in range(self.COUNT)), "x" * 1000)
            await wait_until(t, lambda: handled.count(without=BAD) == self.COUNT)
            assert handled.steps == {BAD: [0], GOOD: list(range(self.COUNT))}

            goes_on.set()
            await t.settle()
            assert handled.steps == {BAD: list(range(self.COUNT)), GOOD: list(range(self.COUNT))}
            assert handled.sizes == {1000}

    async def test_is_handled_whole_after_it_was_a_dead_letter(
        self, app: App, url: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also where its original has left the stream."""
        monkeypatch.setattr(flow, "KEY_PREFETCH", 2)
        broken, handled, goes_on = [True], list[tuple[int, int]](), anyio.Event()

        @app.agent("mars", order_by=("expver",))
        async def index(notification: Notification[str]) -> None:
            if broken:
                raise Reject("not yet")
            await goes_on.wait()
            handled.append((len(notification.payload), notification.num_delivered))

        async with harness(app, server=url) as t:
            await publish(app, ((BAD, step) for step in range(self.COUNT)), "x" * 1000)
            await t.settle()
            broken.clear()
            await app.session.admin.purge_stream("MARS")
            stored = StoredDeadLetters(app.session.admin, events=app.events)
            await stored.retry(*[dead_letter async for dead_letter in stored.select(Selection())])
            await t.advance(0.5)
            goes_on.set()
            await t.settle()
            assert handled == [(1000, 1)] * self.COUNT

    async def test_becomes_whole_dead_letters(self, app: App, url: str | None) -> None:
        @app.agent("mars", order_by=("expver",), retry=SOON)
        async def index(notification: Notification[str]) -> None:
            raise ValueError("not to be handled")

        async with harness(app, server=url) as t:
            await publish(app, ((BAD, step) for step in range(40)), "x" * 1000)
            await t.settle()
            assert [dead_letter.original.sequence for dead_letter in t.dead_letters] == list(range(1, 41))
            assert {len(dead_letter.original.data) for dead_letter in t.dead_letters} == {1002}
            assert {dead_letter.attempts for dead_letter in t.dead_letters} == {2}


async def test_what_a_dead_worker_held_comes_in_order_although_it_becomes_due_in_another(
    app: App, url: str | None
) -> None:
    """It becomes due when the last `in progress` of each is `ack_wait` old."""
    handled = Handled()

    @app.agent("mars", order_by=("expver",), ack_wait=1.0)
    async def index(notification: Notification[Any]) -> None:
        handled.note(notification)

    durable = index.durable_name("contract")
    async with harness(app, server=url) as t:
        await t.settle()  # it has made the consumer
        await t.stop()
        await publish(app, ((BAD, step) for step in range(20)))
        backend = app.session.backend
        held: list[Delivery] = []
        async with backend.consume("MARS", durable, deliver=held.extend, capacity=lambda: 20 - len(held)) as reader:
            await wait_until(t, lambda: len(held) == 20)
            await t.advance(0.5)
            for delivery in held[:10]:
                delivery.in_progress()
            await reader.settled()

        await t.start()
        await publish(app, [(BAD, 20)])
        await t.settle()
        assert handled.sequences[BAD] == list(range(1, 22))
