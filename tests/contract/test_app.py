"""What an app promises, on either backend: the document's behaviour as an author sees it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import anyio.from_thread
import pytest

from aviso_workers import App, Notification, Notify
from aviso_workers.errors import (
    InvalidIdentifierError,
    InvalidPayloadError,
    InvalidPositionError,
    NotFoundError,
    UnknownEventTypeError,
)
from aviso_workers.events import Event, StartNotReached, StreamGone, StreamMadeAgain
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.ops import aviso_admin
from tests.contract.settings import app_config, mars
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


@pytest.fixture
async def app(kind: str, nats_url: str) -> AsyncGenerator[App, None]:
    async with App("contract", config=app_config(kind, nats_url)) as app:
        yield app


async def steps(notifications: Any) -> list[str]:
    with anyio.fail_after(PATIENCE_SECONDS):
        return [notification.identifier["step"] async for notification in notifications]


@pytest.mark.covers("002-01", "003-19")
async def test_a_notification_comes_back_as_it_was_published(app: App) -> None:
    before = datetime.now(UTC) - timedelta(seconds=1)
    receipt = await app.notify("mars", mars(expver=1, step="007"), {"b": [1, 2.0, None], "a": "é"})
    (found,) = [notification async for notification in app.replay("mars")]
    assert found.identifier == mars(step="7")
    assert found.payload == {"a": "é", "b": [1, 2.0, None]}
    assert (found.sequence, found.id) == (receipt.sequence, f"mars@{receipt.sequence}")
    assert receipt.id == found.id
    assert found.topic == "mars.od.0001.g.20261120.0000.oper.7"
    assert before < found.time < datetime.now(UTC) + timedelta(seconds=1)


async def test_two_spellings_of_one_value_are_one_topic_and_the_newer_one_stays(app: App) -> None:
    await app.notify("mars", mars(date="2026-11-20", time="0"), {"n": 1})
    await app.notify("mars", mars(date="20261120", time="00:00"), {"n": 2})
    assert [notification.payload async for notification in app.replay("mars")] == [{"n": 2}]


@pytest.mark.covers("002-32")
async def test_a_repeat_of_a_message_id_is_stored_once(app: App) -> None:
    first = await app.notify("mars", mars(), {}, message_id="one")
    second = await app.notify("mars", mars(step=8), {}, message_id="one")
    assert (second.duplicate, second.sequence) == (True, first.sequence)
    assert await steps(app.replay("mars")) == ["12"]


async def test_an_agent_sees_what_it_asked_for_and_nothing_else(app: App) -> None:
    seen: list[str] = []
    stop = anyio.Event()

    @app.agent("mars", where={"stream": ["oper", "wave"], "step": {"gte": 6}})
    async def collect(notification: Notification[dict[str, int]]) -> None:
        seen.append(f"{notification.identifier['stream']}-{notification.identifier['step']}")
        if notification.payload["n"] == 0:
            stop.set()

    wanted = [("oper", 0), ("oper", 6), ("wave", 12), ("enfo", 12)]
    await app.notify_many(Notify("mars", mars(stream=stream, step=step), {"n": 1}) for stream, step in wanted)
    await app.notify("mars", mars(stream="oper", step=99), {"n": 0})
    with anyio.fail_after(PATIENCE_SECONDS):
        await app._work(stop)
    assert sorted(seen) == ["oper-6", "oper-99", "wave-12"]


async def test_a_failed_notification_comes_again(app: App) -> None:
    tries: list[int] = []
    stop = anyio.Event()

    @app.agent("mars")
    async def flaky(notification: Notification[Any]) -> None:
        tries.append(notification.num_delivered)
        if len(tries) == 1:
            raise ConnectionError("not now")
        stop.set()

    await app.notify("mars", mars(), {})
    with anyio.fail_after(PATIENCE_SECONDS):
        await app._work(stop)
    assert tries == [1, 2]


async def test_code_that_takes_long_sees_that_its_worker_is_stopping(app: App) -> None:
    seen: list[str] = []
    coroutine_begun, thread_begun, stop = anyio.Event(), anyio.Event(), anyio.Event()

    @app.agent("mars")
    async def awaiting(notification: Notification[Any]) -> None:
        coroutine_begun.set()
        while not app.stopping:  # noqa: ASYNC110
            await anyio.sleep(0.01)
        seen.append("coroutine")

    @app.agent("mars")
    def blocking(notification: Notification[Any]) -> None:
        anyio.from_thread.run_sync(thread_begun.set)
        while not app.stopping:
            time.sleep(0.01)
        seen.append("thread")

    await app.notify("mars", mars(), {})
    assert not app.stopping
    with anyio.fail_after(PATIENCE_SECONDS):
        async with anyio.create_task_group() as running:
            running.start_soon(app._work, stop)
            await coroutine_begun.wait()
            await thread_begun.wait()
            assert seen == []
            stop.set()
    assert sorted(seen) == ["coroutine", "thread"]
    assert not app.stopping, "only its worker stops"


@pytest.mark.covers("002-03", "003-13", "003-19")
async def test_a_replay_goes_from_one_id_to_another_both_inclusive(app: App) -> None:
    sequences = [(await app.notify("mars", mars(step=step), {})).sequence for step in range(5)]
    assert await steps(app.replay("mars", from_id=sequences[1], to_id=str(sequences[3]))) == ["1", "2", "3"]


@pytest.mark.covers("002-03", "003-13")
async def test_a_replay_goes_from_one_date_to_another(app: App) -> None:
    await app.notify("mars", mars(step=1), {})
    (first,) = [notification async for notification in app.replay("mars")]
    await anyio.sleep(0.01)
    await app.notify("mars", mars(step=2), {})
    later = first.time + timedelta(milliseconds=5)
    assert await steps(app.replay("mars", from_date=later)) == ["2"]
    assert await steps(app.replay("mars", to_date=later.isoformat())) == ["1"]


@pytest.mark.parametrize(
    "ends", [{"from_id": 1, "from_date": "2026-01-01T00:00:00Z"}, {"to_id": "x"}, {"to_date": "x"}]
)
async def test_a_position_that_means_nothing_is_refused(app: App, ends: dict[str, Any]) -> None:
    with pytest.raises(InvalidPositionError):
        await steps(app.replay("mars", **ends))


async def test_a_stream_that_does_not_exist_is_not_replayed_as_an_empty_one(app: App) -> None:
    with pytest.raises(NotFoundError, match="stream MARS does not exist: nothing was ever published"):
        await steps(app.replay("mars", from_id=1))
    assert await app.session.admin.stream_names() == []


async def test_an_empty_stream_replays_nothing(app: App) -> None:
    await app.notify("mars", mars(step=1), {})
    await app.session.backend.purge_stream("MARS")
    assert await steps(app.replay("mars", from_id=1)) == []


async def test_a_watch_waits_for_a_stream_that_does_not_exist(app: App) -> None:
    missed = anyio.Event()
    app.events.listen(lambda _: missed.set(), StreamGone)
    seen: list[str] = []

    async def watch() -> None:
        async with aclosing(app.watch("mars")) as notifications:
            async for notification in notifications:
                seen.append(notification.identifier["step"])
                tasks.cancel_scope.cancel()

    with anyio.fail_after(PATIENCE_SECONDS):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            await missed.wait()
            assert await app.session.admin.stream_names() == []
            await app.notify("mars", mars(step=1), {})
    assert seen == ["1"]


async def test_a_watch_goes_from_history_to_what_comes(app: App) -> None:
    await app.notify("mars", mars(step=1), {})
    seen: list[str] = []
    with anyio.fail_after(PATIENCE_SECONDS):
        async with aclosing(app.watch("mars", from_id=0)) as notifications:
            async for notification in notifications:
                seen.append(notification.identifier["step"])
                if len(seen) == 3:
                    break
                await app.notify("mars", mars(step=len(seen) + 1), {})
    assert seen == ["1", "2", "3"]


async def test_a_replay_does_not_go_on_in_a_stream_that_was_made_again(app: App) -> None:
    notifications = [Notify("mars", mars(step=step % 300, expver=step // 300), {}) for step in range(3000)]
    await app.notify_many(notifications)
    reading = app.replay("mars", from_id=1)
    with anyio.fail_after(PATIENCE_SECONDS):
        async with aclosing(reading):
            await anext(reading)
            await make_again(app)
            await app.notify_many(notifications)
            with pytest.raises(NotFoundError, match="MARS was deleted and recreated"):
                [notification async for notification in reading]


@pytest.mark.parametrize("start", [{"from_id": 1}, {"from_id": 4}, {}, {"from_date": "2026-01-01T00:00:00Z"}])
async def test_a_watch_goes_on_at_the_beginning_of_a_stream_that_was_made_again(
    app: App, start: dict[str, Any]
) -> None:
    for step in range(3):
        await app.notify("mars", mars(step=step), {})
    told = heard(app, StreamMadeAgain)
    async with watching(app, **start) as seen:
        await app.notify("mars", mars(step=3), {})
        await until(lambda: "3" in seen)
        seen.clear()
        await make_again(app)
        for step in range(10, 16):
            await app.notify("mars", mars(step=step), {})
        await until(lambda: "15" in seen)
    assert seen == ["10", "11", "12", "13", "14", "15"]
    assert [each.stream for each in told] == ["MARS"]


@pytest.mark.slow
async def test_a_watch_waits_for_a_stream_that_was_deleted(app: App) -> None:
    told = heard(app, StreamMadeAgain, StreamGone)
    async with watching(app, from_id=1) as seen:
        await app.notify("mars", mars(step=1), {})
        await until(lambda: seen == ["1"])
        await app.session.admin.delete_stream("MARS")
        await until(lambda: len(told) == 1)
        await app.session.backend.create_stream(StreamSpec(name="MARS", subjects=("mars.>",)))
        await app.notify("mars", mars(step=2), {})
        await until(lambda: seen == ["1", "2"])
    assert [type(each) for each in told] == [StreamGone, StreamMadeAgain]


@pytest.mark.slow
@pytest.mark.parametrize("end", [{}, {"to_id": 2000}, {"to_date": "2100-01-01T00:00:00Z"}])
async def test_no_replay_begins_at_an_id_that_the_stream_never_gave(app: App, end: dict[str, Any]) -> None:
    for step in range(3):
        await app.notify("mars", mars(step=step), {})
    with pytest.raises(NotFoundError, match="there is no 1000 to begin at: MARS ends at 3"):
        await steps(app.replay("mars", from_id=1000, **end))


@pytest.mark.slow
async def test_a_watch_from_an_id_that_the_stream_never_gave_begins_at_the_first(app: App) -> None:
    """A program that goes on after the last id that it has seen would wait for it, and miss all until then."""
    for step in range(3):
        await app.notify("mars", mars(step=step), {})
    told = heard(app, StartNotReached, StreamMadeAgain)
    async with watching(app, from_id=1000) as seen:
        await until(lambda: seen == ["0", "1", "2"])
    assert told == [StartNotReached(stream="MARS", sequence=1000, last_sequence=3)]


async def test_the_id_after_the_last_one_is_the_next_one(app: App) -> None:
    await app.notify("mars", mars(step=1), {})
    assert await steps(app.replay("mars", from_id=2)) == []
    assert await steps(app.replay("mars", from_id=2, to_id=2000)) == []


async def make_again(app: App) -> None:
    await app.session.admin.delete_stream("MARS")
    await app.session.backend.create_stream(StreamSpec(name="MARS", subjects=("mars.>",)))


def heard(app: App, *kinds: type[Event]) -> list[Any]:
    found: list[Any] = []
    app.events.listen(found.append, *kinds)
    return found


@asynccontextmanager
async def watching(app: App, **start: Any) -> AsyncIterator[list[str]]:
    """The steps that a watch has shown so far. It has begun when this is entered."""
    seen: list[str] = []

    async def watch() -> None:
        async with aclosing(app.watch("mars", **start)) as notifications:
            async for notification in notifications:
                seen.append(notification.identifier["step"])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        if not start:
            while not seen:  # a watch does not say when it has begun
                await app.notify("mars", mars(step=300), {})
                await anyio.sleep(0.05)
        yield seen
        tasks.cancel_scope.cancel()


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(PATIENCE_SECONDS):
        while not holds():  # noqa: ASYNC110 - what is waited for are a watch's notifications, or its warnings
            await anyio.sleep(0.01)


async def test_a_watch_without_a_start_shows_only_what_comes(app: App) -> None:
    await app.notify("mars", mars(step=1), {})
    watching = app.watch("mars")

    async def publish() -> None:
        step = 2
        while True:  # the watch does not say when it has begun
            await app.notify("mars", mars(step=step), {})
            step += 1
            await anyio.sleep(0.05)

    with anyio.fail_after(PATIENCE_SECONDS):
        async with anyio.create_task_group() as tasks, aclosing(watching):
            tasks.start_soon(publish)
            first = await anext(watching)
            tasks.cancel_scope.cancel()
    assert int(first.identifier["step"]) >= 2


@pytest.mark.parametrize(
    ("event_type", "identifier", "payload", "error", "complaint"),
    [
        ("marsh", {}, {}, UnknownEventTypeError, "event types: mars, area, plain; did you mean 'mars'"),
        ("mars", {"class": "od"}, {}, InvalidIdentifierError, "'expver' is missing"),
        ("mars", mars(step="x"), {}, InvalidIdentifierError, "'step'"),
        ("mars", mars(stepp=1), {}, InvalidIdentifierError, "did you mean 'step'"),
        ("mars", mars(), None, InvalidPayloadError, "a payload is required"),
        ("mars", mars(), float("nan"), InvalidPayloadError, "NaN"),
        ("mars", mars(), "x" * 2_000_000, InvalidPayloadError, "the server takes"),
    ],
)
async def test_a_bad_notification_is_refused_before_anything_is_sent(
    app: App, event_type: str, identifier: dict[str, Any], payload: Any, error: type[Exception], complaint: str
) -> None:
    with pytest.raises(error, match=complaint):
        await app.notify(event_type, identifier, payload)
    with pytest.raises(NotFoundError):
        await app.session.backend.stream_info("MARS")


async def test_wiping_empties_the_stream_and_keeps_what_it_is(app: App) -> None:
    first = await app.notify("mars", mars(), {})
    config_before = (await app.session.backend.stream_info("MARS")).config
    assert await aviso_admin.event_streams(app.session.admin, app.config) == {"MARS": 1}
    assert await aviso_admin.wipe(app.session.admin, ["MARS"]) == {"MARS": 1}
    info = await app.session.backend.stream_info("MARS")
    assert (info.messages, dict(info.config)) == (0, dict(config_before))
    assert (await app.notify("mars", mars(), {})).sequence == first.sequence + 1


async def test_wiping_a_stream_that_does_not_exist_says_so(app: App) -> None:
    with pytest.raises(NotFoundError, match="MARS"):
        await aviso_admin.wipe(app.session.admin, ["MARS"])


async def test_wiping_all_knows_only_streams_of_event_types(app: App) -> None:
    await app.notify("mars", mars(), {})
    await (await app.key_value("tables")).put("key", b"value")
    assert await aviso_admin.event_streams(app.session.admin, app.config) == {"MARS": 1}


@pytest.mark.covers("003-17")
@pytest.mark.parametrize("name", ["mars@{}", "MARS@{}", " mars@{} "])
async def test_a_notification_is_deleted_by_its_id(app: App, name: str) -> None:
    first = await app.notify("mars", mars(step=1), {})
    await app.notify("mars", mars(step=2), {})
    await aviso_admin.delete(app.session.admin, app.config, name.format(first.sequence))
    assert await steps(app.replay("mars")) == ["2"]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("mars@99", NotFoundError),
        ("mars@0", InvalidPositionError),
        ("mars", InvalidPositionError),
        ("@1", InvalidPositionError),
        ("mars@x", InvalidPositionError),
        ("marsh@1", UnknownEventTypeError),
    ],
)
async def test_deleting_what_is_not_there_says_what_is_wrong(app: App, name: str, error: type[Exception]) -> None:
    await app.notify("mars", mars(), {})
    with pytest.raises(error):
        await aviso_admin.delete(app.session.admin, app.config, name)


async def test_a_point_finds_the_polygons_around_it(app: App) -> None:
    square = "(52.5,13.4,52.6,13.4,52.6,13.5,52.5,13.5,52.5,13.4)"
    await app.notify("area", {"date": "20261120", "polygon": square}, {})
    (inside,) = [notification async for notification in app.replay("area", {"point": "52.55,13.45"})]
    assert inside.identifier == {"date": "20261120", "polygon": square}
    assert await app_list(app.replay("area", {"point": "52.7,13.45"})) == []
    assert len(await app_list(app.replay("area", {"polygon": "(52.55,13.45,53,13.45,53,14,52.55,13.45)"}))) == 1


async def app_list(notifications: Any) -> list[Notification[Any]]:
    return [notification async for notification in notifications]


async def test_an_event_type_without_a_topic_has_its_own_name_as_base(app: App) -> None:
    await app.notify("plain", {"b": "2", "a": "1"}, {})
    (found,) = [notification async for notification in app.replay("plain")]
    assert (found.topic, found.identifier) == ("plain.1.2", {"a": "1", "b": "2"})
