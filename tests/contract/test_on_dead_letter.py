"""The function of `on_dead_letter`: called when a dead letter is stored, before its original is settled. On either
backend."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest
from msgspec import structs

from aviso_workers import (
    Agent,
    App,
    Batch,
    Batching,
    GivenUp,
    Notification,
    Notify,
    Reject,
    RetryPolicy,
    Router,
    Stream,
    Window,
    Windowing,
)
from aviso_workers.ops import health
from aviso_workers.state import consumer_records, failure_records
from aviso_workers.testing import Harness, harness
from tests.contract.settings import mars
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

PROMPT = RetryPolicy(first=0.05, factor=1, attempts=2, jitter=0)


class Field(msgspec.Struct):
    location: str


def happened(notification: Notification[Any]) -> datetime:
    return datetime(2026, 11, 20, notification.payload, tzinfo=UTC)


def undone(given_up: GivenUp[Any]) -> Notify:
    return Notify("plain", {"a": given_up.notification.identifier["step"], "b": "undone"})


def undone_steps(t: Harness) -> list[str]:
    return [one.identifier["a"] for one in t.published if one.event_type == "plain"]


async def test_it_is_given_the_notification_and_why_it_was_given_up(app: App, url: str | None) -> None:
    calls: list[GivenUp[Field]] = []
    stored: list[int] = []

    @app.agent("mars", retry=PROMPT)
    async def index(notification: Notification[Field]) -> None:
        raise ValueError("no such field")

    @index.on_dead_letter
    async def compensate(given_up: GivenUp[Field]) -> None:
        stored.append(len(t.dead_letters))
        calls.append(given_up)

    async with harness(app, server=url) as t:
        receipt = await t.notify("mars", mars(step=3), {"location": "a/b"})
        await t.settle()
        assert t.outcomes(index) == ["retried", "dead_lettered"]
        [given_up] = calls
        assert (given_up.reason, given_up.attempts) == ("attempts_exhausted", 2)
        assert given_up.error == "ValueError: no such field"
        assert given_up.notification.payload == Field("a/b")
        assert given_up.notification.identifier["step"] == "3"
        assert given_up.notification.sequence == receipt.sequence
        assert given_up.notification.attempt == 2
        assert stored == [1]
        await t.retry_dead_letters()
        await t.settle()
        assert len(calls) == 2  # it was given up a second time


class TestForms:
    """Whatever form the function has, what it returns or yields is published."""

    def returned(self, index: Agent[Any, Any]) -> None:
        @index.on_dead_letter
        async def compensate(given_up: GivenUp[Any]) -> Notify:
            return undone(given_up)

    def returned_by_a_thread(self, index: Agent[Any, Any]) -> None:
        @index.on_dead_letter
        def compensate(given_up: GivenUp[Any]) -> list[Notify]:
            assert threading.current_thread() is not threading.main_thread()
            return [undone(given_up)]

    def yielded(self, index: Agent[Any, Any]) -> None:
        @index.on_dead_letter
        async def compensate(given_up: GivenUp[Any]) -> AsyncIterator[Notify]:
            yield undone(given_up)

    @pytest.mark.parametrize("form", ["returned", "returned_by_a_thread", "yielded"])
    async def test_it_is_published(self, app: App, url: str | None, form: str) -> None:
        @app.agent("mars")
        async def index(notification: Notification[Any]) -> None:
            raise Reject("no such field")

        getattr(self, form)(index)
        async with harness(app, server=url) as t:
            for step in range(3):
                await t.notify("mars", mars(step=step), {})
            await t.settle()
            assert sorted(undone_steps(t)) == ["0", "1", "2"]
            ids = [found.headers["Nats-Msg-Id"] async for found in app.replay("plain")]
            assert all(found.startswith("contract.index.MARS.") for found in ids)


async def test_a_batch_has_it_called_for_each_that_is_given_up(app: App, url: str | None) -> None:
    @app.agent("mars", batch=Batching(size=3, within=0.1))
    async def index(batch: Batch[Any]) -> None:
        for notification in batch:
            if notification.identifier["step"] != "1":
                batch.reject(notification, "no such field")

    index.on_dead_letter(undone)
    async with harness(app, server=url) as t:
        for step in range(3):
            await t.notify("mars", mars(step=step), {})
        await t.settle()
        assert sorted(undone_steps(t)) == ["0", "2"]


async def test_a_loop_has_it_called_for_what_is_given_up(app: App, url: str | None) -> None:
    @app.agent("mars")
    async def index(stream: Stream[Any]) -> None:
        async for notification in stream:
            if notification.identifier["step"] == "1":
                raise Reject("no such field")

    index.on_dead_letter(undone)
    async with harness(app, server=url) as t:
        for step in range(3):
            await t.notify("mars", mars(step=step), {})
        await t.settle()
        assert undone_steps(t) == ["1"]


async def test_a_window_that_is_given_up_is_the_payload(app: App, url: str | None) -> None:
    calls: list[GivenUp[Any]] = []

    @app.agent(
        "mars",
        window=Windowing(size="1h", initial=0, fold=lambda total, _: total + 1, time=happened),
    )
    async def hourly(window: Window[int]) -> None:
        raise Reject("no such hour")

    @hourly.on_dead_letter
    async def compensate(given_up: GivenUp[Window[int]]) -> Notify:
        calls.append(given_up)
        return Notify("plain", {"a": 1, "b": "undone"})

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), 6)
        await t.notify("mars", mars(), 9)
        await t.settle()
        [given_up] = calls
        assert given_up.reason == "rejected"
        assert isinstance(given_up.notification.payload, Window)
        assert given_up.notification.payload.value == 1
        assert given_up.notification.time == given_up.notification.payload.end
        assert undone_steps(t) == ["1"]
        await t.notify("mars", mars(step=3), 6)
        await t.settle()
        _, late = calls
        assert (late.reason, late.notification.payload, late.notification.identifier["step"]) == ("late", 6, "3")


async def test_what_cannot_be_read_has_its_body(app: App, url: str | None) -> None:
    calls: list[GivenUp[Field]] = []

    @app.agent("mars")
    async def index(notification: Notification[Field]) -> None: ...

    index.on_dead_letter(calls.append)
    async with harness(app, server=url) as t:
        await t.notify("mars", mars(step=3), {"no": "location"})
        await t.settle()
        [given_up] = calls
        assert given_up.reason == "undecodable"
        assert given_up.notification.payload == b'{"no":"location"}'
        assert given_up.notification.identifier["step"] == "3"


async def test_a_call_that_fails_is_made_again_and_publishes_once(app: App, url: str | None) -> None:
    calls: list[int] = []

    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None:
        raise Reject("no such field")

    @index.on_dead_letter
    async def compensate(given_up: GivenUp[Any]) -> Notify:
        calls.append(1)
        await app.notify("plain", {"a": 0, "b": "begun"})
        if len(calls) < 3:
            raise ConnectionError
        return undone(given_up)

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(step=3), {})
        await t.settle()
        assert len(calls) == 3
        assert undone_steps(t) == ["0", "3"]
        assert len(t.dead_letters) == 1


@pytest.mark.parametrize("returned", [ConnectionError("away"), Reject("never"), 3])
async def test_a_call_that_always_fails_leaves_the_dead_letter(app: App, url: str | None, returned: Any) -> None:
    handled: list[int] = []
    calls: list[int] = []

    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None:
        handled.append(1)
        raise Reject("no such field")

    @index.on_dead_letter
    def compensate(given_up: GivenUp[Any]) -> Any:
        calls.append(1)
        return returned

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        with pytest.raises(AssertionError, match="agent 'index': the function of on_dead_letter has failed for mars@1"):
            await t.settle()
        assert t.outcomes(index) == ["dead_lettered"]
        assert (len(handled), len(calls)) == (1, 1 if returned == 3 else 3)
        assert len(t.dead_letters) == 1
        await t.settle()  # which tells of each failure once
        await t.stop()  # workers record the last failures
        [failure] = failure_records.parsed(await consumer_records.entries(app.session.admin)).values()
        assert ", 2 times in on_dead_letter: " in health.failing_text(failure)


async def test_a_test_that_never_settles_is_told_of_a_call_that_fails_at_its_end(app: App, url: str | None) -> None:
    ended = anyio.Event()

    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None:
        raise Reject("no such field")

    @index.on_dead_letter
    async def compensate(given_up: GivenUp[Any]) -> Any:
        ended.set()
        return 3

    async def without_settle() -> None:
        async with harness(app, server=url) as t:
            await t.notify("mars", mars(), {})
            with anyio.fail_after(PATIENCE_SECONDS):
                await ended.wait()
            await t.stop()

    with pytest.raises(AssertionError, match="agent 'index': the function of on_dead_letter has failed for mars@1"):
        await without_settle()


async def test_what_the_agent_has_published_itself_is_no_repeat_of_it(app: App, url: str | None) -> None:
    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None:
        await app.notify("plain", {"a": notification.identifier["step"], "b": "undone"})
        raise Reject("no such field")

    index.on_dead_letter(undone)
    async with harness(app, server=url) as t:
        await t.notify("mars", mars(step=3), {})
        await t.settle()
        assert undone_steps(t) == ["3", "3"]


async def test_what_is_given_up_again_after_a_retry_is_no_repeat(app: App, url: str | None) -> None:
    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None:
        raise Reject("no such field")

    index.on_dead_letter(undone)
    async with harness(app, server=url) as t:
        await t.notify("mars", mars(step=3), {})
        await t.settle()
        await t.retry_dead_letters()
        await t.settle()
        assert undone_steps(t) == ["3", "3"]


@pytest.mark.parametrize("policy", [{"order_by": ["class"], "concurrency": 4}, {"singleton": True}])
async def test_the_next_one_in_order_waits_for_its_end(app: App, url: str | None, policy: dict[str, Any]) -> None:
    told: list[str] = []

    @app.agent("mars", **policy)
    async def index(notification: Notification[Any]) -> None:
        told.append(f"handle {notification.identifier['step']}")
        raise Reject("no such field")

    @index.on_dead_letter
    async def compensate(given_up: GivenUp[Any]) -> None:
        await anyio.lowlevel.checkpoint()
        told.append(f"compensate {given_up.notification.identifier['step']}")

    async with harness(app, server=url) as t:
        for step in range(3):
            await t.notify("mars", mars(step=step), {})
        await t.settle()
        assert told == [f"{done} {step}" for step in range(3) for done in ("handle", "compensate")]


async def test_a_worker_that_dies_in_it_leaves_it_to_another_which_publishes_once(app: App, url: str | None) -> None:
    calls: list[int] = []
    begun = anyio.Event()

    @app.agent("mars", ack_wait=1.0)
    async def index(notification: Notification[Any]) -> None:
        raise Reject("no such field")

    @index.on_dead_letter
    async def compensate(given_up: GivenUp[Any]) -> None:
        calls.append(1)
        await app.notify("plain", {"a": given_up.notification.identifier["step"], "b": "undone"})
        if len(calls) == 1:
            begun.set()
            await anyio.sleep_forever()

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(step=3), {})
        with anyio.fail_after(PATIENCE_SECONDS):
            await begun.wait()
        await t.crash()
        await t.settle()
        assert len(calls) == 2
        assert undone_steps(t) == ["3"]
        assert t.outcomes(index) == ["dead_lettered"]


async def test_a_worker_that_stops_in_it_leaves_it_to_another(app: App, url: str | None) -> None:
    workers = structs.replace(app.config.workers, drain_timeout_seconds=0.1)
    app.configure(structs.replace(app.config, workers=workers))
    calls: list[int] = []
    begun = anyio.Event()

    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None:
        raise Reject("no such field")

    @index.on_dead_letter
    async def compensate(given_up: GivenUp[Any]) -> Notify:
        calls.append(1)
        if len(calls) == 1:
            begun.set()
            await anyio.sleep_forever()
        return undone(given_up)

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(step=3), {})
        with anyio.fail_after(PATIENCE_SECONDS):
            await begun.wait()
        await t.stop()
        assert t.outcomes(index) == []
        await t.start()
        await t.settle()
        assert undone_steps(t) == ["3"]


async def test_the_timeout_holds_for_each_call(app: App, url: str | None) -> None:
    calls: list[int] = []

    @app.agent("mars", timeout=0.2)
    async def index(notification: Notification[Any]) -> None:
        raise Reject("no such field")

    @index.on_dead_letter
    async def compensate(given_up: GivenUp[Any]) -> Notify:
        calls.append(1)
        if len(calls) == 1:
            await anyio.sleep_forever()
        return undone(given_up)

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(step=3), {})
        await t.settle()
        assert (len(calls), undone_steps(t)) == (2, ["3"])


async def test_copies_of_a_router_share_it(app: App, url: str | None) -> None:
    router = Router("fields")

    @router.agent("mars")
    async def index(notification: Notification[Any]) -> None:
        raise Reject("no such field")

    app.include(router, prefix="first")
    app.include(router, prefix="second")
    index.on_dead_letter(undone)
    async with harness(app, server=url) as t:
        await t.notify("mars", mars(step=3), {})
        await t.settle()
        assert undone_steps(t) == ["3", "3"]
