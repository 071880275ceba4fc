"""Tables where something goes wrong between a worker and the server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from aviso_workers import config
from aviso_workers.backends import KeyValue, Message, PubAck
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.clocks import VirtualClock, at_rest
from aviso_workers.engine.key_value import CachedKeyValue, RetryingKeyValue
from aviso_workers.errors import BackendError, ConflictError, OutcomeUnknownError, RefusedError, UnavailableError

pytestmark = pytest.mark.anyio


class Lossy(InMemoryBackend):
    """Of the next publishes some are stored, and their acknowledgements are lost."""

    lost = 0
    meanwhile: Callable[[], Any] | None = None

    fails_with: BackendError | None = None
    """What each further publish raises."""

    async def publish(self, message: Message, **stated: Any) -> PubAck:
        if self.fails_with:
            raise self.fails_with
        ack = await super().publish(message, **stated)
        if self.lost:
            self.lost -= 1
            if self.meanwhile:
                await self.meanwhile()
            raise OutcomeUnknownError("the acknowledgement is missing")
        return ack


@pytest.fixture
async def backend() -> AsyncGenerator[Lossy, None]:
    async with Lossy(config.InMemory(), clock=VirtualClock()) as backend:
        yield backend


@pytest.fixture
def bucket(backend: Lossy) -> RetryingKeyValue:
    return RetryingKeyValue(backend, "counts", patience_seconds=30)


@pytest.fixture
async def other(backend: Lossy) -> AsyncGenerator[KeyValue, None]:
    """The same bucket, over another connection."""
    async with backend.peer() as peer:
        yield await peer.key_value("counts")


@asynccontextmanager
async def time_passing(backend: Lossy) -> AsyncGenerator[None, None]:
    async def pass_on() -> None:
        while True:
            await backend.clock.advance(0.1)  # type: ignore[attr-defined]
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pass_on)
        yield
        tasks.cancel_scope.cancel()


async def test_a_write_whose_acknowledgement_is_lost_is_done_once(backend: Lossy, bucket: RetryingKeyValue) -> None:
    async with time_passing(backend):
        first = await bucket.put("od", b"1")
        backend.lost = 2
        second = await bucket.put("od", b"2", revision=first)
        assert second == await bucket.revision() == first + 1
        backend.lost = 1
        await bucket.put("od", b"3")
        assert await bucket.revision() == first + 2
        backend.lost = 1
        await bucket.delete("od", revision=first + 2)
        assert await bucket.get("od") is None


async def test_a_write_that_cannot_be_told_from_anothers_says_so(
    backend: Lossy, bucket: RetryingKeyValue, other: KeyValue
) -> None:
    first = await bucket.put("od", b"1")
    backend.lost = 1
    backend.meanwhile = lambda: other.put("od", b"10")
    async with time_passing(backend):
        with pytest.raises(OutcomeUnknownError, match="the answer to an earlier attempt was lost"):
            await bucket.put("od", b"2", revision=first)


@pytest.mark.parametrize("later", [RefusedError("not here"), UnavailableError("no leader")])
async def test_a_write_that_may_be_done_is_not_told_as_undone_by_a_later_attempt(
    backend: Lossy, bucket: RetryingKeyValue, later: BackendError
) -> None:
    async def fail() -> None:
        backend.fails_with = later

    backend.lost, backend.meanwhile = 1, fail
    async with time_passing(backend):
        with pytest.raises(OutcomeUnknownError, match=f"{later}; the answer to an earlier attempt was lost"):
            await bucket.put("od", b"1")
    entry = await bucket.get("od")
    assert entry is not None
    assert entry.value == b"1"


async def test_a_write_of_which_it_cannot_be_read_whether_it_was_done_says_so(
    backend: Lossy, bucket: RetryingKeyValue, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unreadable(*_: Any, **__: Any) -> int:
        raise UnavailableError("no leader")

    first = await bucket.put("od", b"1")
    backend.lost = 1
    monkeypatch.setattr(RetryingKeyValue, "revision", unreadable)
    async with time_passing(backend):
        with pytest.raises(OutcomeUnknownError, match="the answer to an earlier attempt was lost"):
            await bucket.put("od", b"2", revision=first)


async def test_a_conflict_without_a_doubt_is_one(bucket: RetryingKeyValue) -> None:
    await bucket.put("od", b"1")
    with pytest.raises(ConflictError):
        await bucket.put("od", b"2", revision=0)


async def test_a_lost_connection_is_waited_for_until_the_deadline(backend: Lossy, bucket: RetryingKeyValue) -> None:
    await bucket.put("od", b"1")
    backend.disconnect()
    async with time_passing(backend):
        with pytest.raises(UnavailableError):
            await bucket.get("od")
    assert 29 < backend.clock.monotonic() < 31


async def test_a_bucket_that_was_deleted_is_made_anew(backend: Lossy, bucket: RetryingKeyValue) -> None:
    await bucket.put("od", b"1")
    await backend.delete_stream("KV_counts")
    async with time_passing(backend):
        assert await bucket.get("od") is None
        await bucket.put("od", b"2")
        assert (await bucket.get("od")).value == b"2"  # type: ignore[union-attr]


async def test_what_no_repeat_cures_is_not_repeated(backend: Lossy, bucket: RetryingKeyValue) -> None:
    with pytest.raises(RefusedError, match="keys are made of"):
        await bucket.put("a b", b"1")
    assert backend.clock.monotonic() == 0


@pytest.fixture
async def cached(backend: Lossy) -> AsyncGenerator[CachedKeyValue, None]:
    cached = CachedKeyValue(backend, "counts", patience_seconds=30)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cached.keep_current)
        await at_rest()
        yield cached
        tasks.cancel_scope.cancel()


async def value(bucket: CachedKeyValue, key: str = "od") -> bytes | None:
    entry = await bucket.get(key)
    return entry.value if entry else None


async def test_a_cache_answers_without_the_server(
    backend: Lossy, cached: CachedKeyValue, other: KeyValue, monkeypatch: pytest.MonkeyPatch
) -> None:
    await other.put("od", b"1")
    await at_rest()
    monkeypatch.setattr(backend, "message", None)
    assert await value(cached) == b"1"
    assert await value(cached, "rd") is None


async def test_ones_own_writes_are_told_at_once(cached: CachedKeyValue) -> None:
    await cached.put("od", b"1")
    assert await value(cached) == b"1"
    await cached.delete("od")
    assert await value(cached) is None
    await at_rest()
    assert await value(cached) is None


async def test_ones_own_write_is_not_undone_by_what_was_written_before_it_and_is_heard_of_later(
    cached: CachedKeyValue, other: KeyValue
) -> None:
    await other.put("od", b"1")
    await cached.put("od", b"2")
    for _ in range(20):
        assert await value(cached) == b"2"
        await anyio.lowlevel.checkpoint()


async def test_a_write_to_a_cache_that_is_repeated_under_its_message_id_is_done_once(
    backend: Lossy, cached: CachedKeyValue, bucket: RetryingKeyValue
) -> None:
    first = await cached.put("od", b"1", message_id="mine", ttl_seconds=60)
    assert await cached.put("od", b"1", message_id="mine", ttl_seconds=60) == first
    await backend.clock.advance(61)  # type: ignore[attr-defined]
    assert await bucket.get("od") is None


async def test_ones_own_write_does_not_bring_back_what_was_deleted_before_its_answer_came(
    backend: Lossy, cached: CachedKeyValue, other: KeyValue, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = backend.publish

    async def publish_and_answer_late(message: Message, **stated: Any) -> PubAck:
        ack = await publish(message, **stated)
        await other.delete("od")
        await at_rest()  # until the cache has heard of both
        return ack

    monkeypatch.setattr(backend, "publish", publish_and_answer_late)
    await cached.put("od", b"1")
    assert await value(cached) is None
    assert await cached.entries() == []


async def test_after_an_interruption_a_cache_begins_anew(
    backend: Lossy, cached: CachedKeyValue, other: KeyValue
) -> None:
    await cached.put("od", b"1")
    await cached.put("rd", b"1")
    await at_rest()
    backend.disconnect()
    await other.put("od", b"2")
    await other.delete("rd")
    await backend.clock.advance(3600)  # type: ignore[attr-defined]
    backend.reconnect()
    assert (await value(cached), await value(cached, "rd")) == (b"2", None), "the server is asked meanwhile"
    await backend.clock.advance(5)  # type: ignore[attr-defined]
    assert (await value(cached), await value(cached, "rd")) == (b"2", None)
    assert [entry.key for entry in await cached.entries()] == ["od"]
