"""Notifications whose handler kills its worker process: they become dead letters, and those beside them do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from msgspec import structs

from aviso_workers import Agent, App, Batch, Batching, Notification, Notify, RetryPolicy, Stream
from aviso_workers.errors import NotFoundError
from aviso_workers.ops import agent_inventory
from aviso_workers.testing import Harness, harness
from tests.contract.settings import mars
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

COUNT = 40
ATTEMPTS = 3
RETRY = RetryPolicy(first=0.05, factor=1, attempts=ATTEMPTS, jitter=0)
ONCE = RetryPolicy(attempts=1)
ACK_WAIT_SECONDS = 0.4
HANDLING_SECONDS = 0.02


class Handlers:
    """What the handlers of a test do: most of them wait a little, those of the deadly steps end their worker."""

    def __init__(self, app: App, *deadly: int) -> None:
        self.deadly = set(deadly)
        self.began: Counter[int] = Counter()
        """By step, how often it was handed to a function."""
        self.killed = anyio.Event()
        self.deaths = 0
        self._app = app

    async def handle(self, *notifications: Notification[Any]) -> None:
        steps = [int(notification.identifier["step"]) for notification in notifications]
        self.began.update(steps)
        if self.deadly & set(steps):
            self.killed.set()
            await anyio.sleep_forever()
        await self._app.session.backend.clock.sleep(HANDLING_SECONDS)

    async def crash_until_done(self, t: Harness, *agents: Agent[Any, Any]) -> None:
        """End the worker whenever a deadly notification is handled, until every notification is settled."""
        deadline = t.clock.monotonic() + PATIENCE_SECONDS
        while await self._unsettled(*agents):
            assert t.clock.monotonic() < deadline, f"{self.deaths} deaths, and began: {self.began}"
            if self.killed.is_set():
                self.killed = anyio.Event()
                self.deaths += 1
                await t.crash()
            await t.advance(0.01)

    async def _unsettled(self, *agents: Agent[Any, Any]) -> int:
        try:
            infos = [await self._app.session.consumer_info(agent) for agent in agents]
        except NotFoundError:
            return COUNT  # the worker is about to make the consumer
        return sum(info.num_pending + info.num_ack_pending for info in infos)


def one_by_one(app: App, handlers: Handlers, *, retry: RetryPolicy = RETRY, **policy: Any) -> Agent[Any, Any]:
    @app.agent("mars", retry=retry, ack_wait=ACK_WAIT_SECONDS, **policy)
    async def index(notification: Notification[Any]) -> None:
        await handlers.handle(notification)

    return index


def in_batches(app: App, handlers: Handlers) -> Agent[Any, Any]:
    @app.agent("mars", retry=RETRY, ack_wait=ACK_WAIT_SECONDS, batch=Batching(size=10, within=0.05), concurrency=2)
    async def index(batch: Batch[Any]) -> None:
        await handlers.handle(*batch)

    return index


def as_stream(app: App, handlers: Handlers) -> Agent[Any, Any]:
    @app.agent("mars", retry=RETRY, ack_wait=ACK_WAIT_SECONDS)
    async def index(stream: Stream[Any]) -> None:
        async for notification in stream:
            await handlers.handle(notification)

    return index


def as_stream_of_lists(app: App, handlers: Handlers) -> Agent[Any, Any]:
    @app.agent("mars", retry=RETRY, ack_wait=ACK_WAIT_SECONDS)
    async def index(stream: Stream[Any]) -> None:
        async for notifications in stream.take(10, within=0.05):
            await handlers.handle(*notifications)

    return index


FORMS: dict[str, Callable[[App, Handlers], Agent[Any, Any]]] = {
    "one at a time": one_by_one,
    "eight at a time": lambda app, handlers: one_by_one(app, handlers, concurrency=8),
    "in order of a key": lambda app, handlers: one_by_one(app, handlers, concurrency=4, order_by=("expver",)),
    "as a singleton": lambda app, handlers: one_by_one(app, handlers, singleton=True),
    "in batches": in_batches,
    "as a stream": as_stream,
    "as a stream of lists": as_stream_of_lists,
}


async def publish(app: App) -> None:
    await app.notify_many(
        Notify("mars", mars(step=step, expver=f"000{step % 4}"), {"n": step}) for step in range(COUNT)
    )


def dead_letters(t: Harness) -> list[tuple[str, str, int]]:
    """Of each dead letter the agent, the reason, and the step of the notification."""
    return [
        (dead_letter.agent, dead_letter.reason, int(dead_letter.original.subject.split(".")[-1]))
        for dead_letter in t.dead_letters
    ]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "deadly", [(5,), pytest.param((3, 25), marks=pytest.mark.slow)], ids=["one deadly", "two deadly"]
)
async def test_only_what_kills_its_worker_becomes_a_dead_letter(
    form: str, deadly: tuple[int, ...], app: App, url: str | None
) -> None:
    handlers = Handlers(app, *deadly)
    agent = FORMS[form](app, handlers)
    async with harness(app, server=url) as t:
        await publish(app)

        await handlers.crash_until_done(t, agent)

        assert sorted(dead_letters(t)) == [("index", "worker_died", step) for step in sorted(deadly)]
        assert [dead_letter.attempts for dead_letter in t.dead_letters] == [ATTEMPTS] * len(deadly)
        assert {step for step in range(COUNT) if handlers.began[step] == 0} == set()
        assert handlers.deaths <= len(deadly) * (ATTEMPTS + 3)


@pytest.mark.slow
async def test_failures_of_an_ordering_key_do_not_hide_what_kills_its_worker_later(app: App, url: str | None) -> None:
    """They are counted within one delivery, and do not say why a later one came."""
    failed, attempts = 4, 6
    handlers = Handlers(app, 5)

    @app.agent("mars", ack_wait=ACK_WAIT_SECONDS, order_by=("step",), retry=structs.replace(RETRY, attempts=attempts))
    async def index(notification: Notification[Any]) -> None:
        if notification.identifier["step"] == "5" and notification.attempt <= failed:
            raise RuntimeError("not yet")
        await handlers.handle(notification)

    async with harness(app, server=url) as t:
        await publish(app)

        await handlers.crash_until_done(t, index)

        assert dead_letters(t) == [("index", "worker_died", 5)]
        assert handlers.deaths == 2 + attempts - failed, "two beside others, and then alone as many as were left"


@pytest.mark.slow
async def test_of_an_agent_that_tries_once_nothing_else_becomes_a_dead_letter_either(app: App, url: str | None) -> None:
    handlers = Handlers(app, 3, 25)
    agent = one_by_one(app, handlers, retry=ONCE, concurrency=8)
    async with harness(app, server=url) as t:
        await publish(app)

        await handlers.crash_until_done(t, agent)

        assert sorted(dead_letters(t)) == [("index", "worker_died", 3), ("index", "worker_died", 25)]


@pytest.mark.slow
async def test_another_agent_of_the_same_process_loses_nothing(app: App, url: str | None) -> None:
    handlers, innocent = Handlers(app, 5), Handlers(app)
    agent = one_by_one(app, handlers, concurrency=4)

    @app.agent("mars", retry=ONCE, ack_wait=ACK_WAIT_SECONDS, concurrency=4)
    async def beside(notification: Notification[Any]) -> None:
        await innocent.handle(notification)

    async with harness(app, server=url) as t:
        await publish(app)

        await handlers.crash_until_done(t, agent, beside)

        assert dead_letters(t) == [("index", "worker_died", 5)]
        assert set(innocent.began) == set(range(COUNT))
        assert t.outcomes(beside).count("acked") >= COUNT


async def test_a_worker_that_gives_back_what_it_cannot_finish_is_no_failure(
    app: App, url: str | None, drained_at_once: None
) -> None:
    began = anyio.Event()

    @app.agent("mars", retry=ONCE, ack_wait=ACK_WAIT_SECONDS)
    async def index(notification: Notification[Any]) -> None:
        began.set()
        if t.settled(index) == [] and deploys < 6:
            await app.session.backend.clock.sleep(3600)

    deploys = 0
    async with harness(app, server=url) as t:
        await app.notify("mars", mars(), {})
        while deploys < 6:
            await until(began, t)
            deploys, began = deploys + 1, anyio.Event()
            await t.stop()
            await t.start()
        await t.settle()
        assert t.outcomes(index) == ["acked"]
        assert t.settled(index)[0].num_delivered > 6


async def test_what_workers_gave_back_is_handled_side_by_side(app: App, url: str | None, drained_at_once: None) -> None:
    began, deploys, most = anyio.Event(), 0, 0
    running: set[str] = set()

    @app.agent("mars", ack_wait=ACK_WAIT_SECONDS, concurrency=4)
    async def index(notification: Notification[Any]) -> None:
        nonlocal most
        running.add(notification.id)
        most = max(most, len(running))
        if len(running) == 4:
            began.set()
        try:
            await app.session.backend.clock.sleep(3600 if deploys < 4 else 0.2)
        finally:
            running.remove(notification.id)

    async with harness(app, server=url) as t:
        await app.notify_many(Notify("mars", mars(step=step), {}) for step in range(4))
        while deploys < 4:
            await until(began, t)
            deploys, began, most = deploys + 1, anyio.Event(), 0
            await t.stop()
            await t.start()
        await t.settle()
        assert t.outcomes(index) == ["acked"] * 4
        assert most == 4, "nothing has ended a worker, so nothing had to be run alone"


async def until(event: anyio.Event, t: Harness) -> None:
    with anyio.fail_after(PATIENCE_SECONDS):
        while not event.is_set():
            await t.advance(0.01)


@pytest.fixture
def drained_at_once(app: App) -> None:
    """A worker that stops gives its handlers no time."""
    app.configure(structs.replace(app.config, workers=structs.replace(app.config.workers, drain_timeout_seconds=0.1)))


async def test_what_ends_its_worker_is_told_to_operators_meanwhile(app: App, url: str | None) -> None:
    handlers = Handlers(app, 1)

    @app.agent("mars", ack_wait=ACK_WAIT_SECONDS, retry=RETRY)
    async def index(notification: Notification[Any]) -> None:
        await handlers.handle(notification)

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(step=1), {})
        seen: list[agent_inventory.RunAlone] = []
        with anyio.fail_after(PATIENCE_SECONDS):
            while not seen:
                if handlers.killed.is_set():
                    handlers.killed = anyio.Event()
                    await t.crash()
                await t.advance(0.01)
                seen = await agent_inventory.run_alone(app.session.admin, ["KV_contract__failures", "MARS"])
        assert seen == [agent_inventory.RunAlone(app="contract", agent="index", stream="MARS", sequence=1)]
