"""What agents publish: with what they return, with what they yield, and by `app.notify`. On either backend."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextvars import copy_context
from typing import Any

import anyio
import pytest
from msgspec import structs

from aviso_workers import App, Batch, Batching, Notification, Notify, Receipt, Reject, Retry, RetryPolicy, Stream
from aviso_workers.aviso.codec import Message
from aviso_workers.engine.publisher import IdempotencyKeys, Publisher, message_id
from aviso_workers.errors import DeclarationError, RefusedError
from aviso_workers.testing import Harness, harness
from tests.contract.settings import mars

pytestmark = pytest.mark.anyio

PROMPT = RetryPolicy(first=0.05, factor=1, attempts=3, jitter=0)


def plain(step: str | int, text: str = "x") -> Notify:
    return Notify("plain", {"a": step, "b": text})


def outputs(t: Harness) -> list[tuple[str, str]]:
    return [(one.identifier["a"], one.identifier["b"]) for one in t.published if one.event_type == "plain"]


async def stored_ids(app: App) -> list[str]:
    return [found.headers["Nats-Msg-Id"] async for found in app.replay("plain")]


class TestForms:
    """Whatever form a function has, its outputs are stored once each."""

    def returned(self, app: App) -> None:
        @app.agent("mars")
        async def derive(notification: Notification[Any]) -> Notify:
            return plain(notification.identifier["step"])

    def returned_by_a_thread(self, app: App) -> None:
        @app.agent("mars")
        def derive(notification: Notification[Any]) -> list[Notify]:
            return [plain(notification.identifier["step"])]

    def published(self, app: App) -> None:
        @app.agent("mars")
        async def derive(notification: Notification[Any]) -> None:
            async with anyio.create_task_group() as tasks:
                step = plain(notification.identifier["step"])
                tasks.start_soon(app.notify, step.event_type, step.identifier)

    def published_from_a_thread(self, app: App) -> None:
        @app.agent("mars")
        def derive(notification: Notification[Any]) -> None:
            anyio.from_thread.run(app.notify_many, [plain(notification.identifier["step"])])

    def yielded(self, app: App) -> None:
        @app.agent("mars")
        async def derive(notification: Notification[Any]) -> AsyncIterator[Notify]:
            yield plain(notification.identifier["step"])

    def returned_for_a_batch(self, app: App) -> None:
        @app.agent("mars", batch=Batching(size=3, within=0.1))
        async def derive(batch: Batch[Any]) -> list[Notify]:
            return [plain(notification.identifier["step"]) for notification in batch]

    def yielded_for_a_batch(self, app: App) -> None:
        @app.agent("mars", batch=Batching(size=3, within=0.1))
        async def derive(batch: Batch[Any]) -> AsyncIterator[list[Notify]]:
            yield [plain(notification.identifier["step"]) for notification in batch]

    def yielded_in_a_loop(self, app: App) -> None:
        @app.agent("mars")
        async def derive(stream: Stream[Any]) -> AsyncIterator[Notify]:
            async for notification in stream:
                yield plain(notification.identifier["step"])

    def published_in_a_loop(self, app: App) -> None:
        @app.agent("mars")
        async def derive(stream: Stream[Any]) -> None:
            async for taken in stream.take(2, 0.1):
                await app.notify_many(plain(notification.identifier["step"]) for notification in taken)

    @pytest.mark.parametrize(
        "form",
        [
            *("returned", "returned_by_a_thread", "published", "published_from_a_thread", "yielded"),
            *("returned_for_a_batch", "yielded_for_a_batch", "yielded_in_a_loop", "published_in_a_loop"),
        ],
    )
    async def test_are_published(self, app: App, url: str | None, form: str) -> None:
        getattr(self, form)(app)
        async with harness(app, server=url) as t:
            for step in range(5):
                await t.notify("mars", mars(step=step), {})
            await t.settle()
            assert sorted(outputs(t)) == [(str(step), "x") for step in range(5)]
            assert all(found.startswith("contract.derive.MARS.") for found in await stored_ids(app))


@pytest.mark.parametrize("many", [3, 30])  # a server is given as many as these in two ways
async def test_what_a_failed_handling_has_published_is_stored_once(app: App, url: str | None, many: int) -> None:
    tries: list[int] = []

    @app.agent("mars", retry=PROMPT)
    async def derive(notification: Notification[Any]) -> list[Notify]:
        tries.append(1)
        receipt = await app.notify("plain", {"a": "first", "b": "x"})
        await app.notify_many(plain(number) for number in range(many))
        assert receipt.duplicate == (len(tries) > 1)
        if len(tries) < 3:
            raise ConnectionError
        return [plain("last")]

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        assert t.outcomes(derive) == ["retried", "retried", "acked"]
        found = [one.identifier["a"] async for one in app.replay("plain")]
        assert sorted(found) == sorted(["first", *map(str, range(many)), "last"])
        assert len(set(await stored_ids(app))) == many + 2


async def test_what_a_loop_publishes_for_one_has_nothing_to_do_with_those_before_it(app: App, url: str | None) -> None:
    """So that it is stored once also where it comes again alone."""
    tries: list[str] = []

    @app.agent("mars", retry=PROMPT)
    async def derive(stream: Stream[Any]) -> None:
        async for notification in stream:
            tries.append(step := notification.identifier["step"])
            await app.notify("plain", {"a": step, "b": "x"})
            if step == "1" and tries.count(step) == 1:
                raise ConnectionError

    async with harness(app, server=url) as t:
        for step in range(2):
            await t.notify("mars", mars(step=step), {})
        await t.settle()
        assert tries == ["0", "1", "1"]
        assert sorted(outputs(t)) == [("0", "x"), ("1", "x")]


async def test_in_another_order_they_are_stored_once_all_the_same(app: App, url: str | None) -> None:
    tries: list[int] = []

    @app.agent("mars", retry=PROMPT)
    async def derive(notification: Notification[Any]) -> AsyncIterator[Notify | Retry]:
        tries.append(1)
        for number in (1, 2, 3) if len(tries) == 1 else (3, 1, 2):
            yield plain(number)
        if len(tries) == 1:
            yield Retry()

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        assert [one.identifier["a"] async for one in app.replay("plain")] == ["1", "2", "3"]


async def test_what_differs_from_the_try_before_is_no_repeat(app: App, url: str | None) -> None:
    """A job that says that it failed, and succeeds the next time, must not have its success taken for a repeat."""
    tries: list[int] = []

    @app.agent("mars", retry=PROMPT)
    async def run(notification: Notification[Any]) -> None:
        tries.append(1)
        await app.notify("plain", {"a": 1, "b": "job"}, "failed" if len(tries) == 1 else "done")
        if len(tries) == 1:
            raise ConnectionError

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        assert [one.payload for one in t.published if one.event_type == "plain"] == ["failed", "done"]


async def test_equal_ones_of_one_handling_are_two(app: App, url: str | None) -> None:
    @app.agent("mars")
    async def derive(notification: Notification[Any]) -> list[Notify]:
        return [plain(1), plain(1)]

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        assert outputs(t) == [("1", "x"), ("1", "x")]


async def test_equal_ones_of_two_notifications_are_two(app: App, url: str | None) -> None:
    @app.agent("mars")
    async def derive(notification: Notification[Any]) -> Notify:
        return plain(1)

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(step=1), {})
        await t.notify("mars", mars(step=2), {})
        await t.settle()
        assert outputs(t) == [("1", "x"), ("1", "x")]


async def test_a_message_id_of_its_own_is_kept(app: App, url: str | None) -> None:
    @app.agent("mars")
    async def derive(notification: Notification[Any]) -> Notify:
        return Notify("plain", {"a": 1, "b": "x"}, message_id="mine")

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        assert await stored_ids(app) == ["mine"]


async def test_outside_of_a_handler_equal_ones_are_two(app: App) -> None:
    async with app:
        for _ in range(2):
            assert not (await app.notify("plain", {"a": 1, "b": "x"})).duplicate


@pytest.mark.parametrize("wrong", [Notify("plain", {"a": 1}), Notify("none", {}), [plain(1), "another"]])
async def test_an_invalid_output_makes_a_dead_letter_and_publishes_nothing(
    app: App, url: str | None, wrong: Any
) -> None:
    @app.agent("mars", retry=PROMPT)
    async def derive(notification: Notification[Any]) -> Any:
        return wrong

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        (settled,) = t.settled(derive)
        assert (settled.outcome, settled.reason) == ("dead_lettered", "invalid_notification")
        assert outputs(t) == []
        (dead_letter,) = t.dead_letters
        assert dead_letter.reason == "invalid_notification"


async def test_a_returned_reject_is_no_output(app: App, url: str | None) -> None:
    @app.agent("mars", batch=Batching(size=1, within=0))
    async def derive(batch: Batch[Any]) -> AsyncIterator[Any]:
        yield plain(1)
        yield Reject("not today")

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        assert (outputs(t), t.outcomes(derive)) == ([("1", "x")], ["dead_lettered"])


async def test_an_output_that_cannot_be_stored_is_a_failure_of_the_handling(
    app: App, url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    notify = Publisher.notify

    async def notify_but_plain(publisher: Publisher, wanted: Notify) -> Receipt:
        if wanted.event_type == "plain":
            raise RefusedError("the stream is full")
        return await notify(publisher, wanted)

    monkeypatch.setattr(Publisher, "notify", notify_but_plain)

    @app.agent("mars", retry=PROMPT)
    async def derive(notification: Notification[Any]) -> Notify:
        return plain(1)

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        assert t.outcomes(derive) == ["retried", "retried", "dead_lettered"]
        assert [fact.reason for fact in t.settled(derive)] == ["RefusedError", "RefusedError", "attempts_exhausted"]


async def test_a_worker_that_dies_before_its_acknowledgement_has_published_once(app: App) -> None:
    tries: list[int] = []
    published = anyio.Event()

    @app.agent("mars", ack_wait=5)
    async def derive(notification: Notification[Any]) -> AsyncIterator[Notify]:
        tries.append(notification.num_delivered)
        yield plain(1)
        yield plain(2)
        if len(tries) == 1:
            published.set()
            await anyio.sleep_forever()

    async with harness(app, server=None) as t:
        await t.notify("mars", mars(), {})
        await published.wait()
        await t.crash()
        await t.settle()
        assert (tries, outputs(t)) == ([1, 2], [("1", "x"), ("2", "x")])


def test_a_plain_function_cannot_yield(app: App) -> None:
    with pytest.raises(DeclarationError, match="a function that yields must be async; a plain one may return a list"):

        @app.agent("mars")
        def derive(notification: Notification[Any]) -> Any:
            yield plain(1)


def test_an_id_says_where_it_comes_from() -> None:
    copy_context().run(look_at_ids)


def look_at_ids() -> None:
    with IdempotencyKeys(app="app", agent="agent", stream="MARS") as keys:
        output = Message(subject="plain.1.x", data=b"null")
        assert message_id(output) is None, "nothing is handled yet"
        handled = Message(subject="mars.od", data=b"", sequence=4711, timestamp_ns=1)
        keys.begin(handled)
        first = message_id(output)
        assert first is not None
        assert first.startswith("app.agent.MARS.4711.")
        keys.begin(handled)
        assert message_id(output) == first
        assert message_id(output) != first, "it is published a second time"
        keys.begin(structs.replace(handled, timestamp_ns=2))
        assert message_id(output) != first, "a stream was recreated, and its sequences begin again"
        keys.begin(handled, structs.replace(handled, sequence=4712))
        of_two = message_id(output)
        keys.begin(handled, structs.replace(handled, sequence=4713))
        assert len({first, of_two, message_id(output)}) == 3, "batches that begin alike are several"
        keys.begin(handled)
        assert message_id(structs.replace(output, headers={"Nats-TTL": "60s"})) != first, "it lives for another time"
