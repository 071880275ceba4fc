"""The pages of what windows have counted, where workers write them at once and streams are recreated."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.declare import windows
from aviso_workers.declare.windows import CountedPage, KeyState, SettledUpTo
from aviso_workers.engine.key_value import RetryingKeyValue
from aviso_workers.features.windows.counted import CountedPages
from aviso_workers.jetstream import sequences
from aviso_workers.jetstream.key_value import Entry
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.state.window_records import PAGES

pytestmark = pytest.mark.anyio

NOTHING = SettledUpTo()
FIRST_PAGE = f"{PAGES}0"


class SharedBucket(RetryingKeyValue):
    """Another worker writes first, once, where `before_put` says what."""

    before_put: Callable[[], Awaitable[Any]] | None = None

    async def put(self, key: str, value: bytes, **stated: Any) -> int:
        if self.before_put is not None:
            write, self.before_put = self.before_put, None
            await write()
        return await super().put(key, value, **stated)

    async def page(self) -> CountedPage:
        entry = await self.get(FIRST_PAGE)
        assert entry is not None
        return msgspec.json.decode(entry.value, type=CountedPage)

    async def write(self, page: CountedPage) -> Entry:
        await super().put(FIRST_PAGE, msgspec.json.encode(page))
        entry = await self.get(FIRST_PAGE)
        assert entry is not None
        return entry


@pytest.fixture(autouse=True)
def lists_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "LISTED", 4)


@pytest.fixture
async def created(backend: InMemoryBackend) -> float:
    """When the stream was created."""
    info = await backend.create_stream(StreamSpec(name="MARS", subjects=("mars.>",)))
    assert info.created is not None
    return info.created.timestamp()


@pytest.fixture
def bucket(backend: InMemoryBackend) -> SharedBucket:
    return SharedBucket(backend, "windows", patience_seconds=1.0)


@pytest.fixture
def counted(bucket: SharedBucket, backend: InMemoryBackend) -> CountedPages:
    return CountedPages(bucket, backend, stream="MARS")


async def test_what_two_workers_put_on_a_page_at_once_is_on_it(
    counted: CountedPages, bucket: SharedBucket, created: float
) -> None:
    others = CountedPage(created=created).plus({40: created + 1}, ())
    bucket.before_put = lambda: bucket.write(others)
    state = await counted.shortened(KeyState(counted={n: created + n for n in (1, 2, 3, 4)}), NOTHING)
    assert sorted(state.counted) == [3, 4]
    page = await bucket.page()
    assert [n for n in range(50) if page.has(n, created + 1)] == [1, 2, 40]


async def test_what_was_late_for_one_of_its_windows_is_still_known_to_be_when_it_is_on_a_page(
    counted: CountedPages, created: float
) -> None:
    listed = {n: created + n for n in (1, 2, 3, 4)}
    state = await counted.shortened(KeyState(counted=listed, missed={2: created + 2, 4: created + 4}), NOTHING)
    found = [await counted.find(state, sequence, created + sequence, retried=False) for sequence in (1, 2)]
    assert found == ["counted", "missed"]


async def test_a_page_that_another_worker_has_added_to_meanwhile_is_not_removed(
    counted: CountedPages, bucket: SharedBucket, created: float
) -> None:
    page = CountedPage(created=created).plus({1: created + 1}, ())
    read = await bucket.write(page)
    await bucket.write(page.plus({2: created + 9}, ()))
    settled = SettledUpTo(sequence=sequences.PAGE_SEQUENCES, time=created + 5)
    await counted.remove_settled([read], settled)
    assert (await bucket.page()).has(2, created + 9)
    await bucket.write(page)
    await counted.remove_settled(await bucket.entries(), settled)
    assert await bucket.entries() == []


async def test_a_stream_that_was_made_anew_has_counted_nothing_of_what_the_old_one_had(
    counted: CountedPages, bucket: SharedBucket, created: float
) -> None:
    await bucket.write(CountedPage(created=created - 100).plus({5: created - 50}, ()))
    state = await counted.shortened(KeyState(counted={n: created + n for n in (7, 8, 9, 10)}), NOTHING)
    assert await counted.find(state, 7, created + 7, retried=False) == "counted"
    assert await counted.find(state, 5, created + 5, retried=False) is None


async def test_what_a_state_lists_of_the_old_stream_is_not_counted_in_the_new_one(
    counted: CountedPages, created: float
) -> None:
    listed = {1: created - 50, 2: created + 2, 3: created + 3, 4: created + 4}
    state = await counted.shortened(KeyState(counted=listed), NOTHING)
    assert await counted.find(state, 2, created + 2, retried=False) == "counted"
    assert await counted.find(state, 1, created + 1, retried=False) is None


async def test_a_worker_that_knows_only_the_old_stream_leaves_the_pages_of_the_new_one(
    counted: CountedPages, bucket: SharedBucket, created: float
) -> None:
    newer = CountedPage(created=created + 100).plus({40: created + 101}, ())
    await bucket.write(newer)
    await counted.shortened(KeyState(counted={n: created + n for n in (1, 2, 3, 4)}), NOTHING)
    assert await bucket.page() == newer


@pytest.mark.parametrize(("retried", "found"), [(False, "counted"), (True, None)])
async def test_what_is_settled_was_counted_unless_it_is_a_dead_letter_that_is_tried_again(
    counted: CountedPages, bucket: SharedBucket, created: float, *, retried: bool, found: str | None
) -> None:
    progress = windows.WindowProgress(settled=SettledUpTo(sequence=10, time=created + 10))
    await bucket.put("=passed", msgspec.json.encode(progress))
    state: KeyState[Any] = KeyState(left_out=(20, created + 20))
    assert await counted.find(state, 5, created + 5, retried=retried) == found
    assert await counted.find(state, 15, created + 15, retried=retried) is None
