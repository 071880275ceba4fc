"""The agents that are counted, each an app of its own that `aviso-workers worker` runs."""

from __future__ import annotations

import os
import signal

import msgspec

from _cost import counting
from aviso_workers import App, Batch, Batching, Notification, Reject


class Field(msgspec.Struct, frozen=True):
    """The payload."""

    location: str
    size: int


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


tally = counting.Tally(ended=stop)
one, batch, ordered, failing, first = (App(f"cost-{counting.RUN}") for _ in range(5))


@one.agent("mars", name="count", start="all", concurrency=64)
async def count(notification: Notification[Field]) -> None:
    tally.add()


@batch.agent("mars", name="count", start="all", batch=Batching(size=500))
async def count_batch(notifications: Batch[Field]) -> None:
    tally.add(len(notifications))


@ordered.agent("mars", name="count", start="all", concurrency=64, order_by=["step"])
async def count_in_order(notification: Notification[Field]) -> None:
    tally.add()


@failing.agent("mars", name="count", start="all", concurrency=64)
async def count_failures(notification: Notification[Field]) -> None:
    tally.add()
    raise Reject(notification.payload.location)  # other failures would be paced


@first.agent("mars", name="count", start="all")
async def end_at_once(notification: Notification[Field]) -> None:
    """The worker is counted from its start."""
    counting.end()
    stop()
