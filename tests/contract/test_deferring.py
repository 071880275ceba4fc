"""Notifications that are delivered later, on either backend."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest
from msgspec import structs
from nats.aio.client import Client, ServerVersion

from aviso_workers import App, Notification, Notify, RetryPolicy
from aviso_workers.aviso.literals import SECOND
from aviso_workers.backends import Message, StreamInfo
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.backends.jetstream import JetStreamBackend
from aviso_workers.errors import InvalidNotificationError, RefusedError, UnavailableError, UnknownEventTypeError
from aviso_workers.state import delayed_messages
from aviso_workers.testing import Harness, harness
from tests.contract.settings import app_config, mars
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

DELAYED = delayed_messages.stream_of("PLAIN")
NOT_YET_SECONDS = 4
"""A delay that is not over before a test has looked, also on a busy machine; on a server it is waited for."""
LATER_SECONDS = 3600
"""A delay that no test waits for."""
TWICE = RetryPolicy(first=0.05, factor=1, attempts=3, jitter=0)


@pytest.fixture
async def t(app: App, url: str | None) -> AsyncGenerator[Harness, None]:
    async with harness(app, server=url) as t:
        yield t


def plain(a: object, **stated: Any) -> Notify:
    return Notify("plain", {"a": a, "b": "x"}, **stated)


def now(t: Harness) -> datetime:
    return datetime.fromtimestamp(t.clock.time_ns() / 1e9, UTC)


def delivered(t: Harness) -> list[str]:
    """The field `a` of what was published to `plain`."""
    return [str(one.identifier["a"]) for one in t.published if one.event_type == "plain"]


async def until_delivered(t: Harness, *expected: str) -> None:
    with anyio.move_on_after(PATIENCE_SECONDS):
        while len(delivered(t)) < len(expected):
            await t.advance(0.1)
    assert delivered(t) == list(expected)


async def until_nothing_waits(t: Harness) -> None:
    """What was brought is removed, and nothing else is to be delivered later."""
    with anyio.fail_after(PATIENCE_SECONDS):
        while await t.app.session.admin.subject_counts(DELAYED):
            await t.advance(0.1)


async def test_it_is_stored_when_it_is_due_and_not_before(app: App, t: Harness) -> None:
    due = now(t) + timedelta(seconds=NOT_YET_SECONDS)
    receipt = await app.notify("plain", {"a": 1, "b": "x"}, {"n": 1}, due=due, message_id="mine")
    assert (receipt.id, receipt.stream, receipt.sequence) == (None, "PLAIN", 0)
    assert (receipt.message_id, receipt.due) == ("mine", due)
    await app.notify("plain", {"a": 2, "b": "x"}, due=3600)
    assert delivered(t) == []
    await until_delivered(t, "1")
    [found] = [one async for one in app.replay("plain")]
    assert (found.identifier, found.payload, found.headers["Nats-Msg-Id"]) == ({"a": "1", "b": "x"}, {"n": 1}, "mine")
    assert not [name for name in found.headers if name.startswith(("Aviso-", "Nats-Schedule"))]
    assert timedelta() <= found.time - due < timedelta(seconds=PATIENCE_SECONDS)


async def test_the_time_of_the_server_counts_and_not_that_of_the_publisher(
    app: App, t: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, skew = app.session.backend, timedelta(hours=1)
    stream_info = backend.stream_info

    async def ahead(stream: str, **stated: Any) -> StreamInfo:
        info = await stream_info(stream, **stated)
        return structs.replace(info, time=info.time + skew)

    monkeypatch.setattr(backend, "stream_info", ahead)
    waits = await app.notify("plain", {"a": 1, "b": "x"}, due=600)
    assert waits.due is not None
    assert timedelta() <= waits.due - (now(t) + skew + timedelta(seconds=600 - PATIENCE_SECONDS))
    past = await app.notify("plain", {"a": 2, "b": "x"}, due=now(t) + skew / 2)
    assert (past.due, past.sequence) == (None, 1)


async def test_it_waits_also_where_the_stream_of_what_waits_was_deleted_meanwhile(app: App, t: Harness) -> None:
    await app.notify("plain", {"a": 1, "b": "x"}, due=3600)
    await app.session.admin.delete_stream(DELAYED)
    again = await app.notify("plain", {"a": 1, "b": "x"}, due=3600, message_id="mine")
    assert again.due is not None
    assert await app.cancel("plain", "mine")


async def test_an_agent_sees_it(app: App, url: str | None) -> None:
    seen: list[object] = []

    @app.agent("plain")
    async def index(notification: Notification[Any]) -> None:
        seen.append(notification.payload)

    async with harness(app, server=url) as t:
        await app.notify("plain", {"a": 1, "b": "x"}, "later", due=NOT_YET_SECONDS)
        await t.settle()
        assert seen == []
        await until_delivered(t, "1")
        await t.settle()
        assert seen == ["later"]


async def test_what_is_past_is_stored_at_once(app: App, t: Harness) -> None:
    past = await app.notify("plain", {"a": 1, "b": "x"}, due=now(t) - timedelta(days=1))
    at_once = await app.notify("plain", {"a": 2, "b": "x"}, due=0)
    assert [(one.sequence, one.due) for one in (past, at_once)] == [(1, None), (2, None)]
    assert delivered(t) == ["1", "2"]


async def test_under_its_message_id_it_takes_its_own_place(app: App, t: Harness) -> None:
    await app.notify("mars", mars(), {}, due=1, message_id="mine")
    await app.notify("plain", {"a": 1, "b": "x"}, due=LATER_SECONDS, message_id="mine")
    await app.notify("plain", {"a": 2, "b": "x"}, due=1, message_id="mine")
    await until_delivered(t, "2")
    await until_nothing_waits(t)
    assert delivered(t) == ["2"]
    assert len(t.published) == 2, "the same id in another stream is another notification"


async def test_one_that_is_cancelled_is_never_stored(app: App, t: Harness) -> None:
    receipt = await app.notify("plain", {"a": 1, "b": "x"}, due=LATER_SECONDS)
    await app.notify("plain", {"a": 2, "b": "x"}, due=LATER_SECONDS, message_id="mine")
    assert await app.cancel("plain", receipt.message_id)
    assert await app.cancel("plain", "mine")
    await app.notify("plain", {"a": 3, "b": "x"}, due=1, message_id="mine")
    await until_delivered(t, "3")
    await until_nothing_waits(t)
    assert delivered(t) == ["3"]
    assert not await app.cancel("plain", "mine"), "it was delivered"


async def test_nothing_waits_where_nothing_was_ever_to_be_delivered_later(app: App) -> None:
    async with app:
        assert not await app.cancel("plain", "mine")
        with pytest.raises(UnknownEventTypeError):
            await app.cancel("plane", "mine")


async def test_what_becomes_due_while_nobody_works_is_brought_by_the_next_worker_of_any_app(
    app: App, kind: str, nats_url: str
) -> None:
    if kind == "in_memory":
        pytest.skip("another process would have streams of its own")
    async with app:
        await app.notify("plain", {"a": 1, "b": "x"}, due=0.1)
        await anyio.sleep(1)
        assert [one async for one in app.replay("plain")] == []
    async with App("another", config=app_config(kind, nats_url)) as another:
        stop = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(another._work, stop)
            with anyio.fail_after(PATIENCE_SECONDS):
                async for found in another.watch("plain", from_id=1):
                    assert found.identifier["a"] == "1"
                    break
            stop.set()


async def test_many_may_be_delivered_at_once_and_later(app: App, t: Harness) -> None:
    wanted = [plain(number, due=NOT_YET_SECONDS if number % 2 else None) for number in range(40)]
    assert await app.notify_many(wanted) == 40
    assert delivered(t) == [str(number) for number in range(0, 40, 2)]
    with anyio.move_on_after(PATIENCE_SECONDS):
        while len(delivered(t)) < 40:
            await t.advance(0.1)
    assert sorted(map(int, delivered(t))) == [*range(40)]


@pytest.mark.slow
@pytest.mark.needs_server(2, 12)
async def test_a_handler_that_is_run_again_has_each_stored_once(app: App, url: str | None) -> None:
    runs: list[int] = []

    @app.agent("mars", retry=TWICE)
    async def remind(notification: Notification[Any]) -> list[Notify]:
        runs.append(1)
        again = [plain("same", due=seconds) for seconds in (NOT_YET_SECONDS, NOT_YET_SECONDS + 0.5, None)]
        await app.notify("plain", {"a": "hand", "b": "x"}, due=NOT_YET_SECONDS)
        if len(runs) == 1:
            await app.notify_many(again)
            raise ValueError
        return again[::-1]

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        assert len(runs) == 2
        assert delivered(t) == ["same"]
        await until_nothing_waits(t)
        assert sorted(delivered(t)) == ["hand", "same", "same", "same"]


async def test_it_is_what_it_would_be_if_it_were_published_then(app: App, t: Harness) -> None:
    square = "(0,0,0,1,1,1,1,0,0,0)"
    for later, day in ((None, 1), (0.5, 2)):
        await app.notify("area", {"date": f"2026-11-2{day}", "polygon": square}, {"n": 1}, due=later)
    with anyio.move_on_after(PATIENCE_SECONDS):
        while len(t.published) < 2:
            await t.advance(0.1)
    at_once, deferred = [one async for one in app.replay("area")]
    assert {**at_once.headers, "Nats-Msg-Id": ""} == {**deferred.headers, "Nats-Msg-Id": ""}
    assert (deferred.payload, deferred.identifier["polygon"]) == (at_once.payload, at_once.identifier["polygon"])


async def test_its_time_to_live_begins_when_it_is_delivered(app: App, t: Harness) -> None:
    await app.notify("plain", {"a": 0, "b": "x"})
    backend = app.session.backend
    await backend.update_stream({**(await backend.stream_info("PLAIN")).config, "allow_msg_ttl": True})
    await app.notify("plain", {"a": 1, "b": "x"}, due=1, ttl=3600)
    await until_delivered(t, "0", "1")
    assert [one.headers.get("Nats-TTL") async for one in app.replay("plain")] == [None, "3600s"]


async def test_what_its_stream_refuses_is_kept_until_it_takes_it(app: App, t: Harness) -> None:
    await app.notify("plain", {"a": 0, "b": "x"})
    await app.notify("plain", {"a": 1, "b": "x"}, due=0.5, ttl=3600)  # the stream's allow_msg_ttl is off
    await app.notify("plain", {"a": 2, "b": "x"}, due=0.5)
    await until_delivered(t, "0", "2")
    backend = app.session.backend
    await backend.update_stream({**(await backend.stream_info("PLAIN")).config, "allow_msg_ttl": True})
    await until_delivered(t, "0", "2", "1")


async def remember_ids_for_a_moment(app: App) -> None:
    await app.notify("plain", {"a": 0, "b": "x"})
    backend = app.session.backend
    await backend.update_stream({**(await backend.stream_info("PLAIN")).config, "duplicate_window": SECOND // 10})


@pytest.mark.slow
async def test_one_that_comes_again_after_the_duplicate_window_is_stored_once(
    app: App, t: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where all workers die between storing it and acknowledging it, and the next one runs much later."""
    await remember_ids_for_a_moment(app)
    publish, tried = type(app.session.admin).publish, []

    async def publish_and_die(self: Any, message: Message, **stated: Any) -> Any:
        if not message.subject.startswith("plain.1"):
            return await publish(self, message, **stated)
        tried.append(message)
        ack = await publish(self, message, **stated)
        if len(tried) == 1:
            raise UnavailableError("the worker dies here")
        return ack

    monkeypatch.setattr(type(app.session.admin), "publish", publish_and_die)
    await app.notify("plain", {"a": 1, "b": "x"}, due=0.5)
    await t.advance(6)
    assert delivered(t) == ["0", "1"]


@pytest.mark.slow
async def test_one_that_may_not_be_removed_is_stored_once(
    app: App, t: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def deny(self: Any, stream: str, sequence: int, **stated: Any) -> None:
        raise RefusedError("permissions violation")

    for backend in (InMemoryBackend, JetStreamBackend):
        monkeypatch.setattr(backend, "delete_message", deny)
    await remember_ids_for_a_moment(app)
    await app.notify("plain", {"a": 1, "b": "x"}, due=0.5)
    await t.advance(6)
    assert delivered(t) == ["0", "1"]


@pytest.mark.parametrize(
    ("subject", "stream"), [("", ""), ("$JS.API.STREAM.DELETE.PLAIN", "$JS"), ("plain.x.y", "MARS"), ("", "PLAIN")]
)
async def test_what_somebody_else_has_put_there_is_not_obeyed(app: App, t: Harness, subject: str, stream: str) -> None:
    await app.notify("plain", {"a": 1, "b": "x"}, due=0.5)
    headers = {"Aviso-Subject": subject, "Aviso-Stream": stream, "Aviso-Message-Id": "1", "Aviso-Event-Type": "plain"}
    foreign = Message(subject=delayed_messages.due_subject("PLAIN"), data=b"", headers=headers if stream else {})
    await app.session.backend.publish(foreign, message_id="1", stream=DELAYED, timeout_seconds=PATIENCE_SECONDS)
    await until_delivered(t, "1")


@pytest.mark.parametrize(
    ("stated", "problem"),
    [
        ({"due": -1}, "plain: due must be a datetime with a time zone, or a duration from 0 seconds, .* found -1"),
        ({"due": "10"}, "or a duration from 0 seconds, .* found '10'"),
        ({"due": float("nan")}, "found nan"),
        ({"due": 1e15}, "it cannot be delivered that late"),
        ({"due": datetime(2262, 1, 1, tzinfo=UTC)}, "it cannot be delivered in 2262: servers count nanoseconds"),
        ({"due": datetime.max.replace(tzinfo=UTC)}, "it cannot be delivered in 9999"),
        ({"due": datetime(2030, 1, 1)}, "due must be a datetime with a time zone, .* found"),
        ({"due": "2030-01-01T00:00:00Z"}, "due must be a datetime with a time zone, .* found"),
    ],
)
async def test_a_time_that_is_none_is_refused(app: App, stated: dict[str, Any], problem: str) -> None:
    async with app:
        with pytest.raises(InvalidNotificationError, match=problem):
            await app.notify("plain", {"a": 1, "b": "x"}, **stated)


async def test_what_is_stored_together_cannot_be_delivered_later(app: App) -> None:
    async with app:
        with pytest.raises(InvalidNotificationError, match="publish one by one what is to be delivered later"):
            await app.notify_together([plain(1), plain(2, due=1)])


async def test_an_older_server_is_named_and_its_workers_run_without_it(
    app: App, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "in_memory":
        pytest.skip("there is no server")
    monkeypatch.setattr(Client, "connected_server_version", property(lambda _: ServerVersion("2.11.4")))
    async with app:
        stop = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(app._work, stop)
            with pytest.raises(
                RefusedError, match=r"to deliver a notification later, nats-server 2.12 or newer is needed"
            ):
                await app.notify("plain", {"a": 1, "b": "x"}, due=1)
            stop.set()
        assert DELAYED not in await app.session.admin.stream_names()
