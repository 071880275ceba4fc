"""Replay and watch: in order, once each, from where one says, whatever happens to the connection in between."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn

import anyio
import pytest
from msgspec import structs

from aviso_workers import config
from aviso_workers.aviso.codec import store_time
from aviso_workers.aviso.notifications import Notification
from aviso_workers.aviso.positions import Position
from aviso_workers.backends import Message, StreamInfo
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.clocks import LoopClock
from aviso_workers.engine.replay import MAX_FAILURES, Replayer
from aviso_workers.errors import InvalidIdentifierError, NotFoundError, UnavailableError, UnknownEventTypeError
from aviso_workers.events import Skipped, StreamMadeAgain, StreamNotRead
from aviso_workers.sessions.session import Session
from tests.engine.conftest import A_LONG_TIME, Facts, NotifyStep, Store

pytestmark = pytest.mark.anyio

MIDNIGHT = datetime(2026, 11, 20, tzinfo=UTC)


class FromMidnight(LoopClock):
    """The loop's own time, which jumps; the day begins with it."""

    def time_ns(self) -> int:
        return round((MIDNIGHT.timestamp() + self.monotonic()) * 1_000_000) * 1000


class MortalBackend(InMemoryBackend):
    """Its connection can be lost for good."""

    def __init__(self, clock: LoopClock) -> None:
        super().__init__(config.InMemory(max_history_per_topic=1000), clock=clock)
        self.dead = anyio.Event()
        self.connection.failed = self._failed  # type: ignore[method-assign]
        self.unreadable = False
        """Readings fail although there is a connection."""

    def read(self, stream: str, **stated: Any) -> AsyncGenerator[Message, None]:
        if self.unreadable:
            raise UnavailableError("no answer")
        return super().read(stream, **stated)

    async def _failed(self) -> NoReturn:
        await self.dead.wait()
        raise UnavailableError("the connection is lost for good")


@pytest.fixture
async def backend() -> AsyncGenerator[MortalBackend, None]:
    async with MortalBackend(FromMidnight()) as backend:
        yield backend


@pytest.fixture
async def replayer(session: Session, make_stream: Callable[[], Awaitable[None]]) -> Replayer:
    await make_stream()
    return await session.replayer("mars", {})


@pytest.fixture
async def five(notify: NotifyStep) -> None:
    """Steps 0 to 4, stored at midnight, at one o'clock, and so on."""
    for step in range(5):
        await notify(step)
        await anyio.sleep(3600)


def at(hour: float) -> datetime:
    return MIDNIGHT + timedelta(hours=hour)


async def steps(notifications: AsyncGenerator[Notification[Any], None], count: int | None = None) -> list[int]:
    """The steps of all, or of the first `count`."""
    found: list[int] = []
    with anyio.fail_after(A_LONG_TIME):
        async with aclosing(notifications):
            while count is None or len(found) < count:
                try:
                    notification = await anext(notifications)
                except StopAsyncIteration:
                    break
                found.append(int(notification.identifier["step"]))
    return found


@pytest.mark.usefixtures("five")
class TestAReplay:
    @pytest.mark.parametrize(
        ("start", "end", "expected"),
        [
            ({}, {}, [0, 1, 2, 3, 4]),
            ({"sequence": 0}, {}, [0, 1, 2, 3, 4]),
            ({"sequence": 3}, {}, [2, 3, 4]),
            ({"sequence": 6}, {}, []),
            ({}, {"sequence": 2}, [0, 1]),
            ({"sequence": 2}, {"sequence": 4}, [1, 2, 3]),
            ({"sequence": 3}, {"sequence": 3}, [2]),
            ({"sequence": 4}, {"sequence": 3}, []),
            ({}, {"sequence": 0}, []),
            ({}, {"sequence": 2**64 - 1}, [0, 1, 2, 3, 4]),
            ({"time": at(2)}, {}, [2, 3, 4]),
            ({"time": at(1.5)}, {}, [2, 3, 4]),
            ({"time": at(4.5)}, {}, []),
            ({"time": at(-1)}, {"time": at(1)}, [0, 1]),
            ({"time": at(1)}, {"time": at(1.5)}, [1]),
            ({"time": at(2)}, {"sequence": 4}, [2, 3]),
            ({"sequence": 2}, {"time": at(2)}, [1, 2]),
        ],
    )
    async def test_has_both_ends_in_it(
        self, replayer: Replayer, start: dict[str, Any], end: dict[str, Any], expected: list[int]
    ) -> None:
        assert await steps(replayer.replay(Position(**start), Position(**end))) == expected

    async def test_from_and_to_the_time_of_a_notification_has_it_in_it(
        self, replayer: Replayer, session: Session
    ) -> None:
        async for notification in replayer.replay(Position(), Position()):
            only = Position(time=notification.time)
            assert await steps(replayer.replay(only, only)) == [int(notification.identifier["step"])]

    async def test_ends_with_what_was_stored_when_it_began(self, replayer: Replayer, notify: NotifyStep) -> None:
        found = []
        async with aclosing(replayer.replay(Position(), Position())) as notifications:
            async for notification in notifications:
                found.append(notification.sequence)
                await notify(100 + len(found))
        assert found == [1, 2, 3, 4, 5]

    async def test_has_only_what_was_asked_for(self, session: Session) -> None:
        replayer = await session.replayer("mars", {"step": {"between": [1, 3]}})
        assert await steps(replayer.replay(Position(sequence=3), Position())) == [2, 3]

    async def test_leaves_out_what_cannot_be_decoded_and_says_so(
        self, replayer: Replayer, store: Store, facts: Facts
    ) -> None:
        await store("mars.od", b"")
        await store("mars.od.6", b"not JSON")
        assert await steps(replayer.replay(Position(sequence=5), Position())) == [4, 6]
        (skipped,) = facts.of(Skipped)
        assert (skipped.event_type, skipped.sequence) == ("mars", 6)

    async def test_goes_on_after_the_last_one_it_saw(self, replayer: Replayer, backend: MortalBackend) -> None:
        found = []
        async with aclosing(replayer.replay(Position(), Position())) as notifications:
            async for notification in notifications:
                found.append(notification.sequence)
                assert len(found) <= 5, f"it begins again: {found}"
                backend.disconnect()
                backend.reconnect()
        assert found == [1, 2, 3, 4, 5]

    async def test_waits_for_a_connection_that_comes_back(self, replayer: Replayer, backend: MortalBackend) -> None:
        async with aclosing(replayer.replay(Position(time=at(1)), Position())) as notifications:
            assert (await anext(notifications)).sequence == 2
            backend.disconnect()
            async with anyio.create_task_group() as tasks:

                async def reconnect() -> None:
                    await anyio.sleep(60)
                    backend.reconnect()

                tasks.start_soon(reconnect)
                assert (await anext(notifications)).sequence == 3

    async def test_goes_on_for_as_long_as_it_gets_something(
        self, replayer: Replayer, backend: MortalBackend, notify: NotifyStep, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read = backend.read

        async def read_one(*of: Any, **bounds: Any) -> AsyncGenerator[Message, None]:
            async with aclosing(read(*of, **bounds)) as messages:
                async for message in messages:
                    yield message
                    raise UnavailableError("broken off")

        count = MAX_FAILURES + 5
        for step in range(5, count):
            await notify(step)
        monkeypatch.setattr(backend, "read", read_one)
        assert await steps(replayer.replay(Position(), Position())) == list(range(count))

    async def test_ends_with_an_error_where_it_gets_nothing_although_there_is_a_connection(
        self, replayer: Replayer, backend: MortalBackend, facts: Facts
    ) -> None:
        backend.unreadable = True
        with pytest.raises(UnavailableError, match="no answer"):
            await steps(replayer.replay(Position(), Position()))
        assert [str(told.error) for told in facts.of(StreamNotRead)] == ["no answer"]

    async def test_ends_with_an_error_when_the_connection_is_lost_for_good(
        self, replayer: Replayer, backend: MortalBackend
    ) -> None:
        async with aclosing(replayer.replay(Position(), Position())) as notifications:
            await anext(notifications)
            backend.disconnect()
            backend.dead.set()
            with pytest.raises(UnavailableError, match="lost for good"):
                await anext(notifications)


class TestATimeOfAServerThatWasAhead:
    @pytest.fixture(autouse=True)
    async def three(self, backend: MortalBackend, notify: NotifyStep, monkeypatch: pytest.MonkeyPatch) -> None:
        """Steps 0 to 2, stored 10 seconds after each other; the server of step 1 was 30 seconds ahead."""
        for step in range(3):
            await notify(step)
            await anyio.sleep(10)
        read = backend.read

        async def redated(*of: Any, start_time: datetime | None, **bounds: Any) -> AsyncGenerator[Message, None]:
            begun = start_time is None
            async with aclosing(read(*of, start_time=None, **bounds)) as messages:
                async for message in messages:
                    ahead = 30 * 10**9 if message.sequence == 2 else 0
                    message = structs.replace(message, timestamp_ns=message.timestamp_ns + ahead)
                    begun = begun or (start_time is not None and store_time(message) >= start_time)
                    if begun:
                        yield message

        monkeypatch.setattr(backend, "read", redated)

    async def test_ends_no_replay_before_what_was_stored_after_it(self, replayer: Replayer) -> None:
        end = Position(time=MIDNIGHT + timedelta(seconds=25))
        assert await steps(replayer.replay(Position(sequence=1), end)) == [0, 2]

    async def test_lets_nothing_in_that_is_older_than_the_start(self, replayer: Replayer) -> None:
        start = Position(time=MIDNIGHT + timedelta(seconds=25))
        assert await steps(replayer.replay(start, Position())) == [1]
        assert await steps(replayer.watch(start), 1) == [1]

    async def test_is_no_reason_to_read_on_for_long(self, replayer: Replayer, notify: NotifyStep) -> None:
        await anyio.sleep(120)
        await notify(3)
        end = Position(time=MIDNIGHT + timedelta(seconds=25))
        assert await steps(replayer.replay(Position(sequence=1), end)) == [0, 2]


class TestAWatch:
    async def test_without_a_start_has_only_what_comes(
        self, replayer: Replayer, five: None, notify: NotifyStep
    ) -> None:
        async with aclosing(replayer.watch(Position())) as notifications, anyio.create_task_group() as tasks:

            async def publish() -> None:
                await anyio.wait_all_tasks_blocked()
                await notify(6)

            tasks.start_soon(publish)
            assert (await anext(notifications)).identifier["step"] == "6"

    @pytest.mark.parametrize(
        ("start", "expected"),
        [
            ({"sequence": 0}, [0, 1, 2, 3, 4, 6]),
            ({"sequence": 4}, [3, 4, 6]),
            ({"sequence": 6}, [6]),
            ({"time": at(3)}, [3, 4, 6]),
            ({"time": at(4.5)}, [6]),
        ],
    )
    async def test_goes_from_history_to_what_comes(
        self, replayer: Replayer, five: None, notify: NotifyStep, start: dict[str, Any], expected: list[int]
    ) -> None:
        async with anyio.create_task_group() as tasks:

            async def publish() -> None:
                await anyio.wait_all_tasks_blocked()
                await notify(6)

            tasks.start_soon(publish)
            assert await steps(replayer.watch(Position(**start)), len(expected)) == expected

    @pytest.mark.parametrize("interrupted", [False, True])
    async def test_has_every_one_once_however_fast_they_come(
        self, replayer: Replayer, backend: MortalBackend, notify: NotifyStep, interrupted: bool
    ) -> None:
        seen: list[int] = []

        async def publish() -> None:
            for number in range(500):
                await notify(number % 7)
                if interrupted and number % 50 == 0:
                    backend.disconnect()
                    await anyio.sleep(0.5)
                    backend.reconnect()

        for step in range(100):
            await notify(step)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publish)
            async with aclosing(replayer.watch(Position(sequence=0))) as notifications:
                async for notification in notifications:
                    seen.append(notification.sequence)
                    if len(seen) == 600:
                        break
        assert seen == list(range(1, 601))

    async def test_that_saw_nothing_yet_still_starts_where_it_was_told(
        self, replayer: Replayer, backend: MortalBackend, notify: NotifyStep
    ) -> None:
        await notify(0)
        async with anyio.create_task_group() as tasks:

            async def interrupt() -> None:
                await anyio.wait_all_tasks_blocked()
                backend.disconnect()
                await anyio.sleep(5)
                backend.reconnect()
                await notify(1)
                await anyio.sleep(3600)
                await notify(2)

            tasks.start_soon(interrupt)
            assert await steps(replayer.watch(Position(time=at(1))), 1) == [2]

    async def test_waits_for_as_long_as_it_gets_nothing(
        self, replayer: Replayer, backend: MortalBackend, notify: NotifyStep, facts: Facts
    ) -> None:
        await notify(0)
        backend.unreadable = True
        async with anyio.create_task_group() as tasks:

            async def answer() -> None:
                await anyio.sleep(10 * MAX_FAILURES)
                backend.unreadable = False

            tasks.start_soon(answer)
            assert await steps(replayer.watch(Position(sequence=1)), 1) == [0]
        assert len(facts.of(StreamNotRead)) == 1

    async def test_ends_with_an_error_when_the_connection_is_lost_for_good(
        self, replayer: Replayer, backend: MortalBackend
    ) -> None:
        async with aclosing(replayer.watch(Position(sequence=0))) as notifications, anyio.create_task_group() as tasks:

            async def end() -> None:
                await anyio.wait_all_tasks_blocked()
                backend.disconnect()
                await anyio.sleep(10)
                backend.dead.set()

            tasks.start_soon(end)
            with pytest.raises(UnavailableError, match="lost for good"):
                await anext(notifications)

    async def test_begins_again_where_the_stream_has_lost_its_end(
        self, replayer: Replayer, backend: MortalBackend, notify: NotifyStep, facts: Facts
    ) -> None:
        """As a restored backup has, and a server that lost power: created when it was, with less in it."""
        for step in range(5):
            await notify(step)
        async with anyio.create_task_group() as tasks:

            async def set_back() -> None:
                await anyio.wait_all_tasks_blocked()
                stream = backend._account.stream("MARS")
                for sequence in (3, 4, 5):
                    stream.delete(sequence)
                stream.last_sequence = 2
                backend.disconnect()
                backend.reconnect()
                await notify(6)

            tasks.start_soon(set_back)
            assert await steps(replayer.watch(Position(sequence=4)), 5) == [3, 4, 0, 1, 6]
        (told,) = facts.of(StreamMadeAgain)
        assert told == StreamMadeAgain(stream="MARS", next_sequence=6, last_sequence=3)


@pytest.mark.parametrize("where", [{"class": "od"}, {"class": "rd"}], ids=["some match", "none matches"])
async def test_a_stream_that_is_recreated_until_its_reading_begins_is_not_taken_for_the_one_that_was_asked_for(
    session: Session,
    backend: MortalBackend,
    five: None,
    notify: NotifyStep,
    monkeypatch: pytest.MonkeyPatch,
    where: dict[str, Any],
) -> None:
    read = backend.read

    async def read_another(stream: str, **stated: Any) -> AsyncGenerator[Message, None]:
        await backend.delete_stream("MARS")
        for step in range(10, 15):
            await notify(step)
        async with aclosing(read(stream, **stated)) as messages:
            async for message in messages:
                yield message

    replayer = await session.replayer("mars", where)
    monkeypatch.setattr(backend, "read", read_another)
    with pytest.raises(NotFoundError, match="was deleted and recreated while it was read"):
        await steps(replayer.replay(Position(), Position()))


async def test_a_stream_may_be_behind_several_times_while_its_end_is_there_in_between(
    replayer: Replayer, backend: MortalBackend, five: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, looks = backend.stream_info, iter([5, 1, 1, 5, 1, 1])
    read, interruptions = backend.read, iter([True])

    async def look_behind(name: str) -> StreamInfo:
        info = await look(name)
        return structs.replace(info, last_sequence=min(info.last_sequence, next(looks, info.last_sequence)))

    def read_unless_interrupted(stream: str, **stated: Any) -> AsyncGenerator[Message, None]:
        if next(interruptions, False):
            raise UnavailableError("no answer")
        return read(stream, **stated)

    monkeypatch.setattr(backend, "stream_info", look_behind)
    monkeypatch.setattr(backend, "read", read_unless_interrupted)
    assert await steps(replayer.replay(Position(sequence=4), Position())) == [3, 4]


class TestAStreamWhoseNewLeaderHasNotComeSoFarYet:
    @pytest.fixture(autouse=True)
    async def behind(self, backend: MortalBackend, five: None, monkeypatch: pytest.MonkeyPatch) -> None:
        """For two looks after the first one, the stream's last sequence is 1."""
        look, looks = backend.stream_info, iter([5, 1, 1])

        async def look_behind(name: str) -> StreamInfo:
            info = await look(name)
            return structs.replace(info, last_sequence=min(info.last_sequence, next(looks, info.last_sequence)))

        monkeypatch.setattr(backend, "stream_info", look_behind)

    async def test_is_read_on_in_a_replay(self, replayer: Replayer, facts: Facts) -> None:
        assert await steps(replayer.replay(Position(sequence=4), Position())) == [3, 4]
        assert facts.of(StreamMadeAgain) == []

    async def test_is_read_on_in_a_watch(self, replayer: Replayer, facts: Facts) -> None:
        assert await steps(replayer.watch(Position(sequence=4)), 2) == [3, 4]
        assert facts.of(StreamMadeAgain) == []


@pytest.mark.parametrize(
    ("event_type", "where", "error", "complaint"),
    [
        ("marsh", {}, UnknownEventTypeError, "unknown event type 'marsh'; event types: mars; did you mean 'mars'"),
        ("mars", {"stop": 1}, InvalidIdentifierError, "'stop' is unknown; did you mean 'step'"),
        ("mars", {"step": {"near": 4}}, InvalidIdentifierError, "'step' takes the operators"),
    ],
)
async def test_what_cannot_be_asked_for_is_refused(
    session: Session, event_type: str, where: dict[str, Any], error: type[Exception], complaint: str
) -> None:
    with pytest.raises(error, match=complaint):
        await session.replayer(event_type, where)
