"""The way back from the dead letters, on either backend: to the agent that failed, once, and with fresh attempts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest

from aviso_workers import App, Notification, Reject, RetryPolicy
from aviso_workers.aviso.literals import Size
from aviso_workers.aviso.positions import Position
from aviso_workers.backends import Message, Outgoing, PubAck
from aviso_workers.config import Config
from aviso_workers.config.settings import DeadLetters
from aviso_workers.engine import acknowledging
from aviso_workers.errors import BackendError, NotFoundError, RefusedError, UnavailableError
from aviso_workers.ops import agent_control, agent_inventory
from aviso_workers.ops.dead_letters import Selection, StoredDeadLetters
from aviso_workers.state import own_streams
from aviso_workers.state.dead_letter_records import DeadLetter
from aviso_workers.testing import Harness, harness
from tests.contract.settings import app_config, mars
from tests.presence import present
from tests.waits import PATIENCE_SECONDS

DEAD_LETTERS = own_streams.of_app(own_streams.DEAD_LETTERS, "contract")

pytestmark = pytest.mark.anyio

Testing = Callable[[], AbstractAsyncContextManager[tuple[Harness, StoredDeadLetters]]]


class Field(msgspec.Struct):
    location: str


@pytest.fixture
def config(kind: str, nats_url: str) -> Config:
    return App("contract", config=app_config(kind, nats_url)).config


@pytest.fixture
def app(config: Config) -> App:
    return App("contract", config=config)


@pytest.fixture
def testing(app: App, nats_url: str) -> Testing:
    """`async with testing() as (t, stored)`: the app's agents at work, and the dead letters that are stored."""

    @asynccontextmanager
    async def testing() -> AsyncIterator[tuple[Harness, StoredDeadLetters]]:
        async with harness(app, server=nats_url or None) as t:
            yield t, StoredDeadLetters(app.session.admin, events=app.events)

    return testing


async def all_of(stored: StoredDeadLetters, **wanted: Any) -> list[DeadLetter]:
    return [dead_letter async for dead_letter in stored.select(Selection(**wanted))]


async def test_where_nothing_ever_failed_there_is_nothing(testing: Testing) -> None:
    async with testing() as (_, stored):
        assert await all_of(stored) == []
        with pytest.raises(NotFoundError, match="no dead letter 1"):
            await stored.get(1)


async def test_a_letter_goes_back_to_the_agent_that_failed_and_to_no_other(app: App, testing: Testing) -> None:
    seen: list[tuple[str, int, Mapping[str, str]]] = []
    broken = True

    @app.agent("mars")
    async def failing(notification: Notification[Any]) -> None:
        seen.append(("failing", notification.num_delivered, notification.identifier))
        if broken:
            raise Reject("not today")

    @app.agent("mars")
    async def other(notification: Notification[Any]) -> None:
        seen.append(("other", notification.num_delivered, notification.identifier))

    async with testing() as (t, stored):
        receipt = await t.notify("mars", mars(), {"n": 1})
        await t.settle()
        (dead_letter,) = await all_of(stored)
        assert (dead_letter.agent, dead_letter.reason, dead_letter.attempts) == ("failing", "rejected", 1)
        assert (dead_letter.stream, dead_letter.original.sequence) == (receipt.stream, receipt.sequence)
        broken = False
        seen.clear()

        await stored.retry(dead_letter)
        await t.settle()

        assert seen == [("failing", 1, mars())]
        assert t.outcomes("failing") == ["dead_lettered", "acked"]
        assert await all_of(stored) == []


async def test_a_letter_counts_as_fresh_and_what_fails_again_is_another_letter(app: App, testing: Testing) -> None:
    tries: list[int] = []

    @app.agent("mars", retry=RetryPolicy(first=0.01, attempts=2))
    async def failing(notification: Notification[Any]) -> None:
        tries.append(notification.sequence)
        raise ValueError("boom")

    async with testing() as (t, stored):
        await t.notify("mars", mars(), {})
        await t.settle()
        for dead_lettered in (1, 2, 3):
            (dead_letter,) = await all_of(stored)
            assert (len(tries), dead_letter.attempts, dead_letter.reason) == (
                2 * dead_lettered,
                2,
                "attempts_exhausted",
            )
            assert dead_letter.error == "ValueError: boom"
            assert "failing" in dead_letter.traceback
            await stored.retry(dead_letter)
            await t.settle()
        assert set(tries) == {dead_letter.original.sequence}


async def test_one_of_a_stream_that_was_recreated_is_kept_beside_one_of_the_same_sequence(
    app: App, testing: Testing
) -> None:
    @app.agent("mars")
    async def failing(notification: Notification[Any]) -> None:
        raise Reject(notification.payload)

    async with testing() as (t, stored):
        for payload in ("first", "second"):
            await t.notify("mars", mars(), payload)
            await t.settle()
            await t.stop()
            await app.session.admin.delete_stream("MARS")
            await t.start()
        kept = [(dead_letter.original.sequence, dead_letter.error) for dead_letter in await all_of(stored)]
        assert kept == [(1, "Reject: first"), (1, "Reject: second")]


async def test_the_stream_of_the_dead_letters_is_made_anew_where_it_was_deleted(
    app: App, testing: Testing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acknowledging, "STORE_AGAIN", RetryPolicy(first=0.05, factor=1, jitter=0))

    @app.agent("mars")
    async def failing(notification: Notification[Any]) -> None:
        raise Reject(notification.payload)

    async with testing() as (t, stored):
        await t.notify("mars", mars(step=1), "first")
        await t.settle()
        await app.session.admin.delete_stream(DEAD_LETTERS)
        await t.notify("mars", mars(step=2), "second")
        await t.settle()
        assert [dead_letter.error for dead_letter in await all_of(stored)] == ["Reject: second"]


async def test_a_retry_that_was_broken_off_and_is_repeated_is_handled_once(
    app: App, testing: Testing, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled: list[int] = []

    @app.agent("mars")
    async def failing_once(notification: Notification[Any]) -> None:
        handled.append(notification.sequence)
        if len(handled) == 1:
            raise Reject("not today")

    async def unreachable(stream: str, sequence: int, *, overwrite: bool) -> None:
        raise UnavailableError("not connected")

    async with testing() as (t, stored):
        await t.notify("mars", mars(), {})
        await t.settle()
        (dead_letter,) = await all_of(stored)
        with monkeypatch.context() as broken:
            broken.setattr(app.session.admin, "delete_message", unreachable)
            done: list[DeadLetter] = []
            with pytest.raises(UnavailableError, match="they are handed back, and some are still among the dead"):
                await stored.retry(dead_letter, note=done.append)
            assert done == [], "it is among the dead letters still"
        await t.settle()
        assert await all_of(stored) == [dead_letter], "it must not leave before its copy is there"

        await stored.retry(dead_letter)
        await stored.retry(dead_letter)
        await t.settle()

        assert len(handled) == 2
        assert await all_of(stored) == []


async def test_of_several_letters_the_one_whose_copy_is_not_stored_stays(
    app: App, testing: Testing, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled: list[int] = []
    broken = True

    @app.agent("mars")
    async def failing(notification: Notification[Any]) -> None:
        if broken:
            raise Reject("not today")
        handled.append(notification.sequence)

    async with testing() as (t, stored):
        for step in (0, 6, 12):
            await t.notify("mars", mars(step=step), {})
        await t.settle()
        dead_letters = await all_of(stored)
        backend, gone = app.session.admin, list[DeadLetter]()
        publish_many = backend.publish_many

        async def lose_one(outgoing: Sequence[Outgoing], *, timeout_seconds: float) -> list[PubAck | BackendError]:
            first, last = await publish_many([outgoing[0], outgoing[2]], timeout_seconds=timeout_seconds)
            return [first, UnavailableError("no leader"), last]

        broken = False
        with monkeypatch.context() as disturbed:
            disturbed.setattr(backend, "publish_many", lose_one)
            with pytest.raises(UnavailableError, match="no leader"):
                await stored.retry(*dead_letters, note=gone.append)
        assert gone == [dead_letters[0], dead_letters[2]]
        assert await all_of(stored) == [dead_letters[1]]

        await stored.retry(*dead_letters)
        await t.settle()
        assert sorted(handled) == [dead_letter.original.sequence for dead_letter in dead_letters]


async def test_only_what_is_dropped_is_overwritten_on_disk(
    app: App, testing: Testing, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.agent("mars")
    async def failing(notification: Notification[Any]) -> None:
        raise Reject("never")

    async with testing() as (t, stored):
        for step in (0, 6):
            await t.notify("mars", mars(step=step), {})
        await t.settle()
        backend, deleted = app.session.admin, list[tuple[int, bool]]()
        delete = backend.delete_message

        async def note_how(stream: str, sequence: int, *, overwrite: bool = True) -> None:
            deleted.append((sequence, overwrite))
            await delete(stream, sequence, overwrite=overwrite)

        monkeypatch.setattr(backend, "delete_message", note_how)
        first, second = await all_of(stored)
        await stored.retry(first)
        await stored.drop(second)
        assert deleted == [(first.sequence, False), (second.sequence, True)]


async def test_what_fails_again_before_the_letter_is_gone_is_kept(
    app: App, testing: Testing, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.agent("mars")
    async def failing(notification: Notification[Any]) -> None:
        raise Reject("never")

    async with testing() as (t, stored):
        await t.notify("mars", mars(), {})
        await t.settle()
        (dead_letter,) = await all_of(stored)
        delete = app.session.backend.delete_message

        async def delete_late(stream: str, sequence: int, *, overwrite: bool) -> None:
            await t.settle()
            await delete(stream, sequence, overwrite=overwrite)

        monkeypatch.setattr(app.session.admin, "delete_message", delete_late)
        await stored.retry(dead_letter)

        (again,) = await all_of(stored)
        assert again.sequence > dead_letter.sequence
        assert (again.original.sequence, again.original.data) == (
            dead_letter.original.sequence,
            dead_letter.original.data,
        )


async def test_a_letter_from_before_its_stream_was_made_anew_waits_for_the_notification_that_has_its_sequence(
    app: App, testing: Testing
) -> None:
    handled: list[str] = []
    broken = True

    @app.agent("mars", ack_wait=0.6, concurrency=2)
    async def index(notification: Notification[Any]) -> None:
        if broken:
            raise Reject("never")
        handled.append(notification.payload)
        await app.session.backend.clock.sleep(1.0)  # longer than `ack_wait`

    async with testing() as (t, stored):
        await t.notify("mars", mars(), "old")
        await t.settle()
        (dead_letter,) = await all_of(stored)
        broken = False
        await t.stop()
        await app.session.admin.delete_stream("MARS")
        await t.start()
        await t.notify("mars", mars(), "new")
        while not handled:
            await t.advance(0.01)
        await stored.retry(dead_letter)
        await t.settle(within_seconds=20)

        assert handled == ["new", "old"]


async def test_what_is_dropped_and_fails_again_at_once_is_kept(app: App, testing: Testing) -> None:
    @app.agent("mars")
    async def failing(notification: Notification[Any]) -> None:
        raise Reject("never")

    async with testing() as (t, stored):
        await t.notify("mars", mars(), {})
        await t.settle()
        for _ in range(3):  # each within the time in which a repeat of one message is not stored
            (dead_letter,) = await all_of(stored)
            await stored.drop(dead_letter)
            assert await all_of(stored) == []
            plan = await agent_control.plan_reset(
                app.session.admin, agent_control.declared(app, app.config, "failing"), Position(sequence=1)
            )
            await agent_control.reset(app.session.admin, plan)
            await t.settle()
        assert len(await all_of(stored)) == 1


async def test_a_retry_whose_worker_dies_each_time_comes_back_as_the_letter_that_it_was(
    app: App, testing: Testing
) -> None:
    began: list[int] = []
    deadly = False

    @app.agent("mars", retry=RetryPolicy(attempts=1), ack_wait=0.3)
    async def failing(notification: Notification[Any]) -> None:
        if not deadly:
            raise Reject("not today")
        began.append(notification.num_delivered)
        await anyio.sleep_forever()

    async with testing() as (t, stored):
        await t.notify("mars", mars(), {"n": 1})
        await t.settle()
        (dead_letter,) = await all_of(stored)
        deadly = True
        await stored.retry(dead_letter)
        for deaths in (1, 2, 3):
            with anyio.fail_after(PATIENCE_SECONDS):
                while len(began) < deaths:
                    await t.advance(0.05)
            await t.crash()
        await t.settle()

        (again,) = await all_of(stored)
        assert (began, again.reason, again.attempts) == ([1, 2, 3], "worker_died", 1)
        assert (again.stream, again.original.subject) == ("MARS", dead_letter.original.subject)
        assert (again.original.sequence, again.original.data) == (
            dead_letter.original.sequence,
            dead_letter.original.data,
        )


async def test_bytes_that_are_no_notification_are_kept_as_they_are(app: App, testing: Testing) -> None:
    data, headers = b'\xff\x00{"location": 1', {"traceparent": "00-1-2-03", "other": "grüße"}

    @app.agent("mars")
    async def typed(notification: Notification[Field]) -> None: ...

    async with testing() as (t, stored):
        await t.settle()
        subject = "mars.od.0001.g.20261120.0000.oper.12"
        await app.session.backend.publish(
            Message(subject=subject, data=data, headers=headers),
            message_id="x",
            stream="MARS",
            timeout_seconds=PATIENCE_SECONDS,
        )
        await t.settle()
        (dead_letter,) = await all_of(stored)
        assert (dead_letter.reason, dead_letter.original.subject, dead_letter.original.data) == (
            "undecodable",
            subject,
            data,
        )
        assert dead_letter.original.headers == headers

        await stored.retry(dead_letter)
        await t.settle()

        (again,) = await all_of(stored)
        assert (again.reason, again.original.subject, again.original.data) == ("undecodable", subject, data)
        assert {**headers}.items() <= (again.original.headers or {}).items()


async def test_letters_are_chosen_by_all_that_is_said_of_them(app: App, testing: Testing) -> None:
    @app.agent("mars")
    async def rejecting(notification: Notification[Any]) -> None:
        raise Reject(f"no step {notification.identifier['step']}")

    @app.agent("plain", retry=RetryPolicy(attempts=1))
    async def breaking(notification: Notification[Any]) -> None:
        raise RuntimeError("Nobody there")

    async with testing() as (t, stored):
        for step in (0, 6):
            await t.notify("mars", mars(step=step), {})
        await t.settle()
        await t.advance(0.01)
        await t.notify("plain", {"a": "1", "b": "2"})
        await t.settle()
        first, second, third = await all_of(stored)

        async def chosen(**wanted: Any) -> list[int]:
            found = await all_of(stored, **wanted)
            return [[first, second, third].index(dead_letter) for dead_letter in found]

        assert await chosen(agent="rejecting") == [0, 1]
        assert await chosen(app="contract", reason="attempts_exhausted") == [2]
        assert await chosen(app="other") == []
        assert await chosen(stream="mars") == [0, 1]
        assert await chosen(stream="MARS", error="STEP 6") == [1]
        assert await chosen(error="runtimeerror: nobody") == [2]
        assert await chosen(since=third.time) == [2]
        assert await chosen(until=second.time) == [0, 1]
        assert await chosen(since=first.time, until=second.time, agent="breaking") == []
        assert await chosen(sequences=frozenset({first.sequence, third.sequence, 99})) == [0, 2]


async def test_a_letter_of_an_agent_that_nobody_runs_stays(app: App, testing: Testing) -> None:
    @app.agent("mars")
    async def failing(notification: Notification[Any]) -> None:
        raise Reject("never")

    async with testing() as (t, stored):
        await t.notify("mars", mars(), {})
        await t.settle()
        (dead_letter,) = await all_of(stored)
        stranger = msgspec.structs.replace(dead_letter, agent="renamed")
        with pytest.raises(RefusedError, match="agent renamed of app contract has no consumer for retries"):
            await stored.retry(stranger)
        assert await all_of(stored) == [dead_letter]
        with pytest.raises(RefusedError, match="agent renamed of app contract has no consumer for retries"):
            await stored.retry(stranger, dead_letter)
        assert dead_letter not in await all_of(stored), "the one of the other agent is handed back all the same"


async def test_when_the_dead_letters_are_full_what_fails_waits_and_says_so(
    app: App, config: Config, testing: Testing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acknowledging, "STORE_AGAIN", RetryPolicy(first=0.2, factor=1, jitter=0))
    full = msgspec.structs.replace(config.workers, dead_letters=DeadLetters(max_bytes=Size(1500)))
    app.configure(msgspec.structs.replace(config, workers=full))

    @app.agent("mars")
    async def failing(notification: Notification[Any]) -> None:
        raise Reject("never")

    async with testing() as (t, stored):
        for step in (0, 6):
            await t.notify("mars", mars(step=step), {"fills": "x" * 300})
        with pytest.raises(AssertionError, match="stream aviso_workers_dead_letters__contract is full: retry or drop"):
            await t.settle(within_seconds=1.0)
        (dead_letter,) = await all_of(stored)
        waiting = t.settled("failing")[-1]
        assert (waiting.outcome, waiting.reason) == ("retried", "dead_letter_failed")

        await stored.drop(dead_letter)
        await t.settle()

        (kept,) = await all_of(stored)
        assert {dead_letter.original.sequence, kept.original.sequence} == {1, 2}
        assert kept.attempts == t.outcomes("failing").count("retried") + 1


@pytest.mark.parametrize("order_by", [(), ("expver",)], ids=["in any order", "in order of a key"])
async def test_originals_wait_for_as_long_as_their_dead_letters_are_refused(
    order_by: tuple[str, ...],
    app: App,
    config: Config,
    testing: Testing,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acknowledging, "STORE_AGAIN", RetryPolicy(first=0.05, factor=1, jitter=0))
    full = msgspec.structs.replace(config.workers, dead_letters=DeadLetters(max_bytes=Size(500)))
    app.configure(msgspec.structs.replace(config, workers=full))

    @app.agent("mars", order_by=order_by, retry=RetryPolicy(attempts=1))
    async def failing(notification: Notification[Any]) -> None:
        raise ValueError("never")

    async with testing() as (t, stored):
        for expver in ("0001", "0002"):
            await t.notify("mars", mars(expver=expver), {"fills": "x" * 300})
        with anyio.fail_after(PATIENCE_SECONDS):
            while t.outcomes("failing").count("retried") < 60:  # each of them more often than a server would deliver it
                await t.advance(0.05)
        assert await all_of(stored) == []
        info = await app.session.consumer_info(app.agents[0])
        assert (info.num_pending + info.num_ack_pending, info.config["max_deliver"]) == (2, -1)

        stream = await app.session.backend.stream_info(DEAD_LETTERS)
        await app.session.backend.update_stream({**stream.config, "max_bytes": -1})
        await t.settle()

        assert sorted(dead_letter.original.sequence for dead_letter in await all_of(stored)) == [1, 2]


@pytest.mark.parametrize(
    ("policy", "headers", "body"),
    [
        ({"order_by": ["expver"]}, 65_000, 980_000),
        ({"order_by": ["expver"]}, 65_000, 1),
        ({"singleton": True}, 0, 1_040_000),
    ],
    ids=["in order, large headers and body", "in order, large headers", "a singleton, a large body"],
)
async def test_what_is_as_large_as_the_server_takes_and_cannot_be_read_holds_nothing_up(
    app: App, testing: Testing, policy: dict[str, Any], headers: int, body: int
) -> None:
    handled: list[object] = []

    @app.agent("mars", **policy)
    async def failing(notification: Notification[Field]) -> None:
        handled.append(notification.payload.location)

    async with testing() as (t, stored):
        await t.settle()
        subject = "mars.od.0001.g.20261120.0000.oper.12"
        sent = {"large": "ä\x01:" * (headers // 4), "small": "here: and there"}
        unreadable = Message(subject=subject, data=b"\xff" * body, headers=sent)
        backend = app.session.backend
        await backend.publish(unreadable, message_id="x", stream="MARS", timeout_seconds=PATIENCE_SECONDS)
        await t.notify("mars", mars(step=18), {"location": "behind"})
        await t.settle()
        assert handled == ["behind"]

        (dead_letter,) = await all_of(stored)
        for _ in range(2):
            assert (dead_letter.reason, dead_letter.original.subject) == ("undecodable", subject)
            assert dead_letter.original.data == unreadable.data
            assert {name: present(dead_letter.original.headers)[name] for name in sent} == sent
            await stored.retry(dead_letter)
            await t.settle()
            (dead_letter,) = await all_of(stored)
        await stored.drop(dead_letter)
        assert (await backend.stream_info(DEAD_LETTERS)).messages == 0


async def test_a_body_as_large_as_the_server_takes_is_kept_shown_and_tried_again(app: App, testing: Testing) -> None:
    handled: list[int] = []
    broken = True

    @app.agent("mars")
    async def failing(notification: Notification[str]) -> None:
        if broken:
            raise Reject("not today")
        handled.append(len(notification.payload))

    async with testing() as (t, stored):
        await t.settle()
        backend = app.session.backend
        data = msgspec.json.encode("x" * (backend.connection.max_payload - 150))
        subject = "mars.od.0001.g.20261120.0000.oper.12"
        await backend.publish(
            Message(subject=subject, data=data), message_id="x", stream="MARS", timeout_seconds=PATIENCE_SECONDS
        )
        await t.settle()

        (dead_letter,) = await all_of(stored)
        assert (dead_letter.reason, dead_letter.original.subject, dead_letter.original.data) == (
            "rejected",
            subject,
            data,
        )
        assert [dead_letter.original.data for dead_letter in t.dead_letters] == [data]
        assert await agent_inventory.dead_letters(app.session.admin) == {("contract", "failing"): 1}

        await stored.retry(dead_letter)
        await t.settle()
        (again,) = await all_of(stored)
        assert again.original.data == data

        broken = False
        await stored.retry(again)
        await t.settle()
        assert handled == [backend.connection.max_payload - 150]
        assert (await backend.stream_info(DEAD_LETTERS)).messages == 0
