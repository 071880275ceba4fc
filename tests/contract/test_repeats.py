"""What comes again although it was handled: its settlement was lost, or came too late. It is not handled again, unless
an operator has asked for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest

from aviso_workers import Agent, App, Batch, Batching, Notification, Reject, Stream
from aviso_workers.backends.in_memory.consumer import InMemoryDelivery
from aviso_workers.backends.jetstream.consumer import JetStreamDelivery
from aviso_workers.testing import Harness, harness
from tests.contract.settings import mars
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

ACK_WAIT_SECONDS = 1.0


class Lossy:
    """Which settlements do not arrive: the next one of each of these sequences."""

    def __init__(self) -> None:
        self.sequences: set[int] = set()


@pytest.fixture
def lossy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lossy]:
    lossy = Lossy()

    def losing(settle: Callable[..., None]) -> Callable[..., None]:
        def settle_or_lose(self: Any, *arguments: Any) -> None:
            if self.message.sequence in lossy.sequences:
                lossy.sequences.discard(self.message.sequence)
            else:
                settle(self, *arguments)

        return settle_or_lose

    for kind in (InMemoryDelivery, JetStreamDelivery):
        for name in ("ack", "term"):
            monkeypatch.setattr(kind, name, losing(getattr(kind, name)))
    yield lossy
    assert lossy.sequences == set(), "none of those was settled"


class Handled:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def note(self, *notifications: Notification[Any]) -> None:
        self.steps += [int(notification.identifier["step"]) for notification in notifications]


def in_order(app: App, handled: Handled) -> Agent[Any, Any]:
    @app.agent("mars", ack_wait=ACK_WAIT_SECONDS, order_by=("expver",))
    async def index(notification: Notification[Any]) -> None:
        handled.note(notification)

    return index


def in_any_order(app: App, handled: Handled) -> Agent[Any, Any]:
    @app.agent("mars", ack_wait=ACK_WAIT_SECONDS)
    async def index(notification: Notification[Any]) -> None:
        handled.note(notification)

    return index


def in_batches(app: App, handled: Handled) -> Agent[Any, Any]:
    @app.agent("mars", ack_wait=ACK_WAIT_SECONDS, batch=Batching(size=4, within=0.1))
    async def index(batch: Batch[Any]) -> None:
        handled.note(*batch)

    return index


def as_stream(app: App, handled: Handled) -> Agent[Any, Any]:
    @app.agent("mars", ack_wait=ACK_WAIT_SECONDS)
    async def index(stream: Stream[Any]) -> None:
        async for notification in stream:
            handled.note(notification)

    return index


async def notify(t: Harness, *steps: int) -> None:
    for step in steps:
        await t.notify("mars", mars(step=step), "x")


@pytest.mark.parametrize("form", [in_order, in_any_order, in_batches, as_stream])
async def test_what_was_handled_is_not_handled_again_where_its_acknowledgement_was_lost(
    app: App, url: str | None, lossy: Lossy, form: Callable[[App, Handled], Agent[Any, Any]]
) -> None:
    handled = Handled()
    agent = form(app, handled)
    lossy.sequences = {1, 3}
    async with harness(app, server=url) as t:
        await notify(t, 1, 2, 3, 4)
        await t.settle()
        assert sorted(handled.steps) == [1, 2, 3, 4]
        assert t.outcomes(agent) == ["acked"] * 4, "and success is told once"


async def test_a_dead_letter_is_stored_once_where_the_end_of_its_original_was_lost(
    app: App, url: str | None, lossy: Lossy
) -> None:
    handled = Handled()

    @app.agent("mars", ack_wait=ACK_WAIT_SECONDS)
    async def index(notification: Notification[Any]) -> None:
        handled.note(notification)
        raise Reject("never")

    lossy.sequences = {1}
    async with harness(app, server=url) as t:
        await notify(t, 1, 2)
        await t.settle()
        assert (handled.steps, t.outcomes(index)) == ([1, 2], ["dead_lettered"] * 2)


@pytest.mark.slow
async def test_order_outlives_a_handler_that_blocks_the_event_loop(app: App, url: str | None) -> None:
    handled = Handled()

    @app.agent("mars", ack_wait=ACK_WAIT_SECONDS, order_by=("expver",))
    async def index(notification: Notification[Any]) -> None:
        handled.note(notification)
        if len(handled.steps) <= 5:
            time.sleep(ACK_WAIT_SECONDS / 2)  # noqa: ASYNC251

    async with harness(app, server=url) as t:
        await notify(t, *range(5))
        await t.settle()
        assert handled.steps == list(range(5))


class TestAReset:
    async def test_has_everything_handled_again(self, app: App, url: str | None) -> None:
        handled = Handled()
        agent = in_order(app, handled)
        async with harness(app, server=url) as t:
            await notify(t, 1, 2, 3)
            await t.settle()
            await app.session.admin.reset_consumer("MARS", agent.durable_name("contract"), sequence=1)
            await t.settle()
            assert handled.steps == [1, 2, 3] * 2

    async def test_has_that_handled_again_with_which_another_worker_died(self, app: App, url: str | None) -> None:
        """It comes to this worker as something that was delivered before, like what it has settled in vain."""
        handled = Handled()
        goes_on = anyio.Event()

        @app.agent("mars", ack_wait=ACK_WAIT_SECONDS)
        async def index(notification: Notification[Any]) -> None:
            handled.note(notification)
            if len(handled.steps) == 4:
                await goes_on.wait()

        durable = index.durable_name("contract")
        async with harness(app, server=url) as t:
            backend = app.session.admin
            await notify(t, 1, 2, 3)
            await t.settle()
            await notify(t, *range(4, 34))
            await wait_until(t, lambda: len(handled.steps) == 4)
            await t.advance(0.3)  # it runs one, and holds as many as it has room for

            await backend.reset_consumer("MARS", durable, sequence=1)
            taken: list[int] = []
            async with backend.consume(
                "MARS",
                durable,
                deliver=lambda several: taken.extend(each.message.sequence for each in several),
                capacity=lambda: 33 - len(taken),
            ):
                await wait_until(t, lambda: len(taken) == 33)
            assert taken == list(range(1, 34)), "another worker takes them, and dies"

            goes_on.set()
            await t.settle()
            assert sorted(step for step in handled.steps if step <= 3) == [1, 1, 2, 2, 3, 3]

    async def test_of_one_agent_leaves_what_another_one_remembers(
        self, app: App, url: str | None, lossy: Lossy
    ) -> None:
        handled, of_other = Handled(), Handled()
        goes_on = anyio.Event()
        agent = in_order(app, handled)

        @app.agent("mars", ack_wait=ACK_WAIT_SECONDS)
        async def other(notification: Notification[Any]) -> None:
            of_other.note(notification)
            await goes_on.wait()

        async with harness(app, server=url) as t:
            await notify(t, 1)
            await wait_until(t, lambda: handled.steps == of_other.steps == [1])
            await t.advance(0.1)
            lossy.sequences = {1}
            goes_on.set()
            await wait_until(t, lambda: not lossy.sequences)
            await app.session.admin.reset_consumer("MARS", agent.durable_name("contract"), sequence=1)
            await t.settle()
            assert (handled.steps, of_other.steps) == ([1, 1], [1])


async def wait_until(t: Harness, true: Callable[[], bool]) -> None:
    deadline = t.clock.monotonic() + PATIENCE_SECONDS
    while not true() and t.clock.monotonic() < deadline:
        await t.advance(0.05)
