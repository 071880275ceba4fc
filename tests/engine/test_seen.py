"""Lists of seen messages and their pages, where workers write them at once and streams are recreated."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.declare.seen import SeenList, SeenPage
from aviso_workers.engine.key_value import RetryingKeyValue
from aviso_workers.features.seen import SeenPages
from aviso_workers.jetstream.specs import StreamSpec

pytestmark = pytest.mark.anyio

PREFIX = "=seen."
EMPTY = SeenPage(())


class SharedBucket(RetryingKeyValue):
    """Another worker writes first, once, where `before_put` says what."""

    before_put: Callable[[], Awaitable[Any]] | None = None

    async def put(self, key: str, value: bytes, **stated: Any) -> int:
        if self.before_put is not None:
            write, self.before_put = self.before_put, None
            await write()
        return await super().put(key, value, **stated)

    async def page(self) -> SeenPage:
        entry = await self.get(f"{PREFIX}0")
        assert entry is not None
        return msgspec.json.decode(entry.value, type=SeenPage)

    async def write(self, page: SeenPage) -> None:
        await super().put(f"{PREFIX}0", msgspec.json.encode(page))


@pytest.fixture
async def created(backend: InMemoryBackend) -> float:
    """When the stream was created."""
    info = await backend.create_stream(StreamSpec(name="MARS", subjects=("mars.>",)))
    assert info.created is not None
    return info.created.timestamp()


@pytest.fixture
def bucket(backend: InMemoryBackend) -> SharedBucket:
    return SharedBucket(backend, "seen", patience_seconds=1.0)


@pytest.fixture
def pages(bucket: SharedBucket, backend: InMemoryBackend) -> SeenPages:
    return SeenPages(bucket=bucket, backend=backend, prefix=PREFIX, stream="MARS", listed=4)


def listed(*messages: tuple[int, float], marked: tuple[tuple[int, float], ...] = ()) -> SeenList:
    return SeenList(newest=messages, marked=marked)


async def test_what_two_workers_put_on_a_page_at_once_is_on_it(
    pages: SeenPages, bucket: SharedBucket, created: float
) -> None:
    others = EMPTY.plus([(40, created + 1)], created=created)
    bucket.before_put = lambda: bucket.write(others)
    left = await pages.shortened(listed(*((n, created + n) for n in (1, 2, 3, 4))))
    assert [sequence for sequence, _ in left.newest] == [3, 4]
    page = await bucket.page()
    assert [n for n in range(50) if page.find((n, created + 1)) is not None] == [1, 2, 40]


async def test_a_list_with_room_is_not_shortened(pages: SeenPages, bucket: SharedBucket, created: float) -> None:
    short = listed((1, created + 1), (2, created + 2), (3, created + 3))
    assert await pages.shortened(short) is short
    assert await bucket.entries() == []


async def test_a_mark_is_known_in_the_list_and_on_a_page(pages: SeenPages, created: float) -> None:
    messages = [(n, created + n) for n in (1, 2, 3, 4)]
    whole = listed(*messages, marked=(messages[1], messages[3]))
    left = await pages.shortened(whole)
    for known in (whole, left):
        assert [await pages.find(known, message) for message in messages] == [False, True, False, True]


async def test_a_stream_that_was_made_anew_has_seen_nothing_of_what_the_old_one_had(
    pages: SeenPages, bucket: SharedBucket, created: float
) -> None:
    await bucket.write(EMPTY.plus([(5, created - 50)], created=created - 100))
    left = await pages.shortened(listed(*((n, created + n) for n in (7, 8, 9, 10))))
    assert await pages.find(left, (7, created + 7)) is False
    assert await pages.find(left, (5, created + 5)) is None
    assert await pages.find(left, (5, created - 50)) is False, "as from a backup"


async def test_what_a_list_has_of_the_old_stream_is_not_seen_in_the_new_one(pages: SeenPages, created: float) -> None:
    left = await pages.shortened(listed((1, created - 50), (2, created + 2), (3, created + 3), (4, created + 4)))
    assert await pages.find(left, (2, created + 2)) is False
    assert await pages.find(left, (1, created + 1)) is None
    assert await pages.find(left, (1, created - 50)) is False


async def test_a_worker_that_knows_only_the_old_stream_changes_nothing_of_the_new_one(
    pages: SeenPages, bucket: SharedBucket, created: float
) -> None:
    newer = EMPTY.plus([(40, created + 101)], created=created + 100)
    await bucket.write(newer)
    await pages.shortened(listed(*((n, created + n) for n in (1, 2, 3, 4))))
    assert (await bucket.page()).streams[0] == newer.streams[0]


async def test_a_page_with_a_time_to_live_is_written_again_when_a_message_is_found_on_it(
    bucket: SharedBucket, backend: InMemoryBackend, created: float
) -> None:
    pages = SeenPages(bucket=bucket, backend=backend, prefix=PREFIX, stream="MARS", listed=4, ttl_seconds=60.0)
    left = await pages.shortened(listed(*((n, created + n) for n in (1, 2, 3, 4))))
    before = await bucket.revision()
    assert await pages.find(left, (3, created + 3)) is False
    assert await bucket.revision() == before, "the list has it"
    assert await pages.find(left, (1, created + 1)) is False
    assert await bucket.revision() == before + 1
