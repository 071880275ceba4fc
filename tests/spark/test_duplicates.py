"""Rows that a stream discarded are held against what it has under their ids."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from aviso_workers import config
from aviso_workers.backends import Backend, OutgoingChunk
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.errors import DuplicateIdError
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.spark import writers

pytestmark = pytest.mark.anyio
COUNT = 40


def chunk(**columns: Any) -> OutgoingChunk:
    given: dict[str, Any] = {
        "subjects": [f"mars.{number}" for number in range(COUNT)],
        "data": [b'{"a":1}'] * COUNT,
        "headers": [None] * COUNT,
        "message_ids": [f"id {number}" for number in range(COUNT)],
    }
    return OutgoingChunk(**(given | columns))


async def discarded(backend: Backend, again: OutgoingChunk) -> dict[int, int]:
    results = await backend.publish_many(list(again.each("MARS")), timeout_seconds=1, answered=True)
    return {place: ack.sequence for place, ack in enumerate(results)}  # type: ignore[union-attr]


@pytest.fixture(params=[-1, 1], ids=["keeps all", "keeps the newest of a subject"])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    async with InMemoryBackend(config.InMemory(max_history_per_topic=1)) as backend:
        spec = StreamSpec(name="MARS", subjects=("mars.>",), max_msgs_per_subject=request.param)
        await backend.create_stream(spec)
        await backend.publish_many(list(chunk().each("MARS")), timeout_seconds=1)
        yield backend


async def test_the_same_content_is_no_mistake_however_it_is_spelled(backend: Backend) -> None:
    again = chunk(data=[b'{"a":1}', b'{ "\\u0061": 1 }'] * (COUNT // 2))

    assert await writers.check_discarded(backend, "MARS", again, await discarded(backend, again)) == 0


@pytest.mark.parametrize(
    "other",
    [
        {"data": [b'{"a":1}'] * (COUNT - 1) + [b'{"a":2}']},
        {"data": [b'{"a":1}'] * (COUNT - 1) + [b'{"a":true}']},
        {"subjects": [f"mars.{number}" for number in range(COUNT - 1)] + ["mars.other"]},
        {"headers": [None] * (COUNT - 1) + [{"spatial_bbox": "1,2,3,4"}]},
    ],
)
async def test_other_content_is_named(backend: Backend, other: dict[str, Any]) -> None:
    again = chunk(**other)

    with pytest.raises(DuplicateIdError, match=f"id 'id {COUNT - 1}': the row was not stored") as refused:
        await writers.check_discarded(backend, "MARS", again, await discarded(backend, again))
    assert refused.value.place == COUNT - 1


async def test_what_is_gone_cannot_be_compared(backend: Backend) -> None:
    found = await discarded(backend, chunk())
    await backend.delete_message("MARS", 3)

    with pytest.raises(DuplicateIdError, match="from message 3 of stream MARS, which is gone") as refused:
        await writers.check_discarded(backend, "MARS", chunk(), found)
    assert refused.value.place == 2


async def test_what_a_newer_message_replaced_is_counted(backend: Backend) -> None:
    found = await discarded(backend, chunk())
    newer = chunk(message_ids=[f"newer {number}" for number in range(COUNT)])
    await backend.publish_many(list(newer.each("MARS"))[:5], timeout_seconds=1)
    keeps_newest = (await backend.stream_info("MARS")).config["max_msgs_per_subject"] == 1

    assert await writers.check_discarded(backend, "MARS", chunk(), found) == (5 if keeps_newest else 0)
