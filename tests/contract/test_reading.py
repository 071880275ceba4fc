"""What a backend promises about reading a stream: every message once, in order, from where to where one wants."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import anyio
import pytest

from aviso_workers.backends import Admin, Message, Outgoing, PubAck
from aviso_workers.errors import NotFoundError, UnavailableError
from tests.contract.conftest import Create, Elapse, Ensure, Eventually, Publish, Stored
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

Sequences = Callable[..., Awaitable[list[int]]]
PublishMany = Callable[[list[str]], Awaitable[None]]


@pytest.fixture
def sequences(backend: Admin) -> Sequences:
    """`await sequences(last_sequence=9)`: those that a bounded reading of MARS yields."""

    async def sequences(*, filter_subjects: tuple[str, ...] = ("mars.>",), **bounds: Any) -> list[int]:
        with anyio.fail_after(PATIENCE_SECONDS):
            return [
                message.sequence async for message in backend.read("MARS", filter_subjects=filter_subjects, **bounds)
            ]

    return sequences


@pytest.fixture
async def five(create: Create, publish: Publish) -> None:
    """MARS with mars.0 to mars.4."""
    await create()
    for number in range(5):
        await publish(f"mars.{number}", str(number).encode())


def time_of(message: Message) -> datetime:
    """When it was stored, or less than a microsecond before."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=message.timestamp_ns // 1000)


@pytest.fixture
def publish_many(backend: Admin) -> PublishMany:
    """`await publish_many(["mars.1", "mars.2"])`: a message on each of these subjects, in this order."""

    async def publish_many(subjects: list[str]) -> None:
        outgoing = [
            Outgoing(Message(subject=subject, data=b"null"), f"message-{number}", "MARS")
            for number, subject in enumerate(subjects)
        ]
        for result in await backend.publish_many(outgoing, timeout_seconds=PATIENCE_SECONDS):
            assert isinstance(result, PubAck), result

    return publish_many


async def following(messages: AsyncIterator[Message], count: int) -> list[Message]:
    with anyio.fail_after(PATIENCE_SECONDS):
        return [await anext(messages) for _ in range(count)]


async def test_all_that_is_stored_comes_in_order(five: None, backend: Admin) -> None:
    messages = [m async for m in backend.read("MARS", filter_subjects=("mars.>",), last_sequence=5)]

    assert [(message.sequence, message.subject, message.data) for message in messages] == [
        (number + 1, f"mars.{number}", str(number).encode()) for number in range(5)
    ]


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"last_sequence": 5}, [1, 2, 3, 4, 5]),
        ({"last_sequence": 3}, [1, 2, 3]),
        ({"start_sequence": 0, "last_sequence": 2}, [1, 2]),
        ({"start_sequence": 4, "last_sequence": 5}, [4, 5]),
        ({"start_sequence": 3, "last_sequence": 3}, [3]),
        ({"start_sequence": 4, "last_sequence": 3}, []),
        ({"start_sequence": 9, "last_sequence": 5}, []),
        ({"last_sequence": 0}, []),
        ({"last_sequence": 99}, [1, 2, 3, 4, 5]),
    ],
)
async def test_both_bounds_are_inclusive(
    five: None, sequences: Sequences, bounds: dict[str, int], expected: list[int]
) -> None:
    assert await sequences(**bounds) == expected


async def test_an_empty_stream_has_nothing_to_read(create: Create, sequences: Sequences) -> None:
    await create()

    assert await sequences(last_sequence=0) == []
    assert await sequences(last_sequence=1) == []


async def test_holes_are_passed_over(five: None, backend: Admin, sequences: Sequences) -> None:
    for sequence in (1, 3, 5):
        await backend.delete_message("MARS", sequence)

    assert await sequences(start_sequence=1, last_sequence=5) == [2, 4]
    assert await sequences(start_sequence=3, last_sequence=3) == []


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ((), [1, 2, 3, 4, 5]),
        (("mars.2",), [3]),
        (("mars.*",), [1, 2, 3, 4, 5]),
        (("mars.4", "mars.0"), [1, 5]),
        (("mars.9",), []),
    ],
)
async def test_only_what_the_filters_take_comes(
    five: None, sequences: Sequences, filters: tuple[str, ...], expected: list[int]
) -> None:
    assert await sequences(filter_subjects=filters, last_sequence=5) == expected


async def test_the_last_sequence_need_not_match_the_filters(five: None, publish: Publish, backend: Admin) -> None:
    messages = backend.read("MARS", filter_subjects=("mars.0",), last_sequence=4)
    await publish("mars.0")

    with anyio.fail_after(PATIENCE_SECONDS):
        assert [message.sequence async for message in messages] == [1]


async def test_a_start_time_is_inclusive_and_wins(
    create: Create, publish: Publish, stored: Stored, elapse: Elapse, sequences: Sequences
) -> None:
    await create()
    for number in range(4):
        await publish(f"mars.{number}")
        await elapse(0.05)
    start_time = time_of((await stored())[2])

    assert await sequences(start_time=start_time, start_sequence=2, last_sequence=4) == [3, 4]
    between = start_time + timedelta(milliseconds=10)
    assert await sequences(start_time=between, last_sequence=4) == [4]
    long_ago = datetime(2001, 1, 1, tzinfo=UTC)
    assert await sequences(start_time=long_ago, start_sequence=4, last_sequence=4) == [1, 2, 3, 4]
    never = datetime(2100, 1, 1, tzinfo=UTC)
    assert await sequences(start_time=never, last_sequence=4) == []


async def test_a_start_time_may_be_in_any_zone(
    create: Create, publish: Publish, stored: Stored, elapse: Elapse, sequences: Sequences
) -> None:
    await create()
    await publish("mars.0")
    await elapse(0.05)
    await publish("mars.1")
    start_time = time_of((await stored())[1]).astimezone(timezone(timedelta(hours=5, minutes=30)))

    assert await sequences(start_time=start_time, last_sequence=2) == [2]


async def test_without_an_end_it_goes_on_as_messages_come(five: None, publish: Publish, backend: Admin) -> None:
    async with aclosing(backend.read("MARS", filter_subjects=("mars.>",), start_sequence=4)) as messages:
        assert [message.sequence for message in await following(messages, 2)] == [4, 5]
        await publish("mars.5")
        await publish("mars.6")
        assert [message.subject for message in await following(messages, 2)] == ["mars.5", "mars.6"]


async def test_it_waits_for_what_matches(five: None, publish: Publish, backend: Admin) -> None:
    async with aclosing(backend.read("MARS", filter_subjects=("mars.new",))) as messages:
        async with anyio.create_task_group() as tasks:

            async def publish_later() -> None:
                await publish("mars.old")
                await publish("mars.new")

            tasks.start_soon(publish_later)
            (message,) = await following(messages, 1)
        assert message.sequence == 7


@pytest.mark.parametrize("start", [{"start_sequence": 8}, {"start_time": timedelta(seconds=1.0)}])
async def test_a_start_beyond_the_end_is_waited_for(
    five: None, publish: Publish, stored: Stored, elapse: Elapse, backend: Admin, start: dict[str, Any]
) -> None:
    if "start_time" in start:
        start = {"start_time": time_of((await stored())[-1]) + start["start_time"]}
    got = []

    async def read() -> None:
        async with aclosing(backend.read("MARS", filter_subjects=("mars.>",), **start)) as messages:
            got.extend(await following(messages, 1))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await elapse(0.3)
        await publish("mars.5")
        await publish("mars.6")
        await elapse(1.0)
        await publish("mars.7")

    assert [message.sequence for message in got] == [8]


async def test_what_is_purged_before_it_was_read_does_not_come(five: None, publish: Publish, backend: Admin) -> None:
    await backend.purge_stream("MARS")
    await publish("mars.new")

    async with aclosing(backend.read("MARS", filter_subjects=("mars.>",))) as messages:
        assert [message.sequence for message in await following(messages, 1)] == [6]


async def test_many_messages_come_once_and_in_order(create: Create, publish: Publish, sequences: Sequences) -> None:
    await create()
    async with anyio.create_task_group() as tasks:
        for number in range(2500):
            tasks.start_soon(publish, f"mars.{number}")

    assert await sequences(last_sequence=2500) == list(range(1, 2501))


def randomly_chosen(number: int) -> tuple[tuple[str, ...], list[str]]:
    """Filters, and the subjects of 3,000 messages of which they take any share, from none to all."""
    chance = random.Random(number)
    share = chance.choice([0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 1.0])
    filters = chance.choice([("mars.wanted.>",), ("mars.wanted.1", "mars.wanted.2", "mars.wanted.3")])
    kinds = ["wanted" if chance.random() < share else "other" for _ in range(3000)]
    return filters, [f"mars.{kind}.{chance.randint(1, 3)}" for kind in kinds]


@pytest.mark.parametrize("number", range(6))
async def test_whatever_share_of_a_stream_the_filters_take_all_of_it_comes(
    create: Create, backend: Admin, publish_many: PublishMany, sequences: Sequences, number: int
) -> None:
    filters, subjects = randomly_chosen(number)
    await create()
    await publish_many(subjects)
    wanted = [sequence for sequence, subject in enumerate(subjects, 1) if subject.startswith("mars.wanted.")]

    assert await sequences(filter_subjects=filters, last_sequence=3000) == wanted
    part = {"start_sequence": 1000, "last_sequence": 2500}
    assert await sequences(filter_subjects=filters, **part) == [each for each in wanted if 1000 <= each <= 2500]
    chunks = backend.read_chunks("MARS", filter_subjects=filters, start_sequence=1, last_sequence=3000)
    assert [message.sequence async for chunk in chunks for message in chunk] == wanted


@pytest.mark.parametrize("filters", [("mars.wanted",), ("mars.>",)])
async def test_a_reading_ends_although_what_it_was_to_read_is_purged_meanwhile(
    create: Create, backend: Admin, publish_many: PublishMany, filters: tuple[str, ...]
) -> None:
    await create()
    await publish_many(["mars.wanted", "mars.other"] * 3000)
    messages = backend.read("MARS", filter_subjects=filters, last_sequence=6000)

    with anyio.fail_after(PATIENCE_SECONDS):
        came = [(await anext(messages)).sequence]
        await backend.purge_stream("MARS", subject="mars.wanted")
        came += [message.sequence async for message in messages]

    assert came == sorted(set(came))
    if filters == ("mars.>",):
        assert set(range(2, 6001, 2)) <= set(came)


async def test_a_reading_ends_although_the_last_message_is_deleted_meanwhile(
    create: Create, backend: Admin, publish_many: PublishMany
) -> None:
    await create()
    await publish_many(["mars.wanted"] * 3000)
    messages = backend.read("MARS", filter_subjects=("mars.wanted",), last_sequence=3000)

    with anyio.fail_after(PATIENCE_SECONDS):
        came = [(await anext(messages)).sequence]
        for sequence in range(2991, 3001):
            await backend.delete_message("MARS", sequence)
        came += [message.sequence async for message in messages]

    assert came == list(range(1, 2991))


async def test_readings_do_not_know_of_each_other(five: None, sequences: Sequences, backend: Admin) -> None:
    async with aclosing(backend.read("MARS", filter_subjects=("mars.>",))) as messages:
        await following(messages, 3)

        assert await sequences(last_sequence=5) == [1, 2, 3, 4, 5]
        assert [message.sequence for message in await following(messages, 2)] == [4, 5]


async def test_a_reading_ends_with_its_stream_and_goes_on_in_no_other(
    five: None, create: Create, publish: Publish, backend: Admin
) -> None:
    async with aclosing(backend.read("MARS", filter_subjects=("mars.>",))) as messages:
        await following(messages, 5)
        await backend.delete_stream("MARS")
        await create()
        for number in range(7):
            await publish(f"mars.{number}", message_id=f"anew-{number}")

        with pytest.raises((UnavailableError, NotFoundError)):
            await following(messages, 1)


async def test_a_reading_takes_nothing_from_a_consumer(
    five: None, sequences: Sequences, ensure: Ensure, eventually: Eventually
) -> None:
    await ensure()

    await sequences(last_sequence=5)

    await eventually(num_pending=5, num_ack_pending=0)


async def test_a_stream_that_is_missing_cannot_be_read(backend: Admin) -> None:
    with pytest.raises(NotFoundError):
        await following(backend.read("MARS", filter_subjects=("mars.>",)), 1)


@pytest.mark.parametrize(
    ("filters", "start", "expected"),
    [((), 1, 5), ((), 3, 3), ((), 6, 0), ((), 99, 0), (("mars.2",), 1, 1), (("mars.4", "mars.0"), 2, 1)],
)
async def test_what_would_come_can_be_counted(
    five: None, backend: Admin, filters: tuple[str, ...], start: int, expected: int
) -> None:
    assert await backend.count("MARS", filter_subjects=filters, start_sequence=start) == expected


async def test_a_stream_that_is_missing_cannot_be_counted(backend: Admin) -> None:
    with pytest.raises(NotFoundError):
        await backend.count("MARS", filter_subjects=())


async def test_chunks_hold_the_same_as_single_messages(five: None, backend: Admin) -> None:
    bounds: dict[str, Any] = {"filter_subjects": ("mars.*",), "start_sequence": 2, "last_sequence": 4}

    chunks = [chunk async for chunk in backend.read_chunks("MARS", **bounds)]

    assert [message.sequence for chunk in chunks for message in chunk] == [2, 3, 4]
    assert [chunk async for chunk in backend.read_chunks("MARS", **(bounds | {"start_sequence": 9}))] == []


async def test_chunks_pass_over_what_was_deleted_and_what_is_filtered_out(five: None, backend: Admin) -> None:
    await backend.delete_message("MARS", 2)

    async def sequences(**bounds: Any) -> list[int]:
        with anyio.fail_after(PATIENCE_SECONDS):
            chunks = backend.read_chunks("MARS", **bounds)
            return [message.sequence async for chunk in chunks for message in chunk]

    assert await sequences(filter_subjects=(), start_sequence=1, last_sequence=5) == [1, 3, 4, 5]
    assert await sequences(filter_subjects=("mars.4",), start_sequence=1, last_sequence=4) == []
    assert await sequences(filter_subjects=("mars.4",), start_sequence=1, last_sequence=99) == [5]
