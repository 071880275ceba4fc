"""The agents that are counted, each an app of its own that `aviso-workers worker` runs."""

from __future__ import annotations

import asyncio
import os
import signal

import msgspec

from _cost import counting
from aviso_workers import App, Backoff, Batch, Batching, Notification

__all__ = ["batch", "failing", "first", "one", "ordered"]

TURNS = 3
"""Of the event loop, in which the acks of the last notifications leave."""


class Field(msgspec.Struct, frozen=True):
    """The payload."""

    location: str
    size: int


class _Tally:
    """Counts from the first notification to the last one's ack, and ends the worker then."""

    def __init__(self) -> None:
        self._seen = 0
        self._ending: asyncio.Task[None] | None = None

    def add(self, notifications: int = 1) -> None:
        if not self._seen:
            counting.begin()
        self._seen += notifications
        if self._seen >= counting.TO_COUNT and self._ending is None:
            self._ending = asyncio.create_task(self._end())

    async def _end(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)
        counting.end()
        os.kill(os.getpid(), signal.SIGTERM)


tally = _Tally()
one, batch, ordered, failing, first = (App(f"cost-{counting.RUN}") for _ in range(5))


@one.agent("mars", name="count", concurrency=64)
async def count(notification: Notification[Field]) -> None:
    tally.add()


@batch.agent("mars", name="count", batch=Batching(size=500))
async def count_batch(notifications: Batch[Field]) -> None:
    tally.add(len(notifications))


@ordered.agent("mars", name="count", concurrency=64, order_by=["step"])
async def count_in_order(notification: Notification[Field]) -> None:
    tally.add()


@failing.agent("mars", name="count", concurrency=64, retry=Backoff(attempts=1))
async def count_failures(notification: Notification[Field]) -> None:
    tally.add()
    raise ValueError(notification.payload.location)


@first.agent("mars", name="count")
async def end_at_once(notification: Notification[Field]) -> None:
    """The worker is counted from its start."""
    counting.end()
    os.kill(os.getpid(), signal.SIGTERM)
