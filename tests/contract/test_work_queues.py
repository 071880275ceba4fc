"""Streams that keep a message until it is settled, on either backend."""

from __future__ import annotations

from typing import Any

import pytest

from aviso_workers.backends import Backend
from aviso_workers.errors import RefusedError

pytestmark = pytest.mark.anyio


async def test_what_is_settled_is_gone_and_what_is_given_back_is_not(
    backend: Backend, create, publish, ensure, eventually, inbox: Any
) -> None:
    await create(retention="workqueue")
    await ensure()
    for number in range(3):
        await publish(f"mars.{number}")
    async with backend.consume("MARS", "agent", deliver=inbox.deliver, room=inbox.room):
        acked, terminated, given_back = await inbox.take(3)
        acked.ack()
        terminated.term("no use")
        given_back.nak(delay_seconds=60)
        await eventually(num_ack_pending=1)
    assert await backend.subject_counts("MARS") == {"mars.2": 1}


@pytest.mark.parametrize("others", [("mars.>",), ("mars.*.b",), ("mars.c.>", "mars.a.b"), ()])
async def test_no_two_consumers_want_the_same(create, ensure, others: tuple[str, ...]) -> None:
    await create(retention="workqueue")
    await ensure(filter_subjects=("mars.a.>",))
    await ensure(filter_subjects=("mars.a.>",), ack_wait_seconds=5)
    await ensure("another", filter_subjects=("mars.b.>",))
    with pytest.raises(RefusedError):
        await ensure("second", filter_subjects=others)


async def test_it_stays_one(backend: Backend, create) -> None:
    info = await create(retention="workqueue")
    with pytest.raises(RefusedError):
        await backend.update_stream({**info.config, "retention": "limits"})
