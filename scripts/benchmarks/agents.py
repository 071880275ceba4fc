"""The measured agents. Each is an app of its own, run by `aviso-workers worker`; the environment names the run."""

from __future__ import annotations

import os

import msgspec

from aviso_workers import App, Batch, Batching, Notification
from benchmarks.tally import Tally

__all__ = ["batches", "notifications"]


class Field(msgspec.Struct, frozen=True):
    """The payload."""

    location: str
    size: int


tally = Tally()
notifications = App(os.environ["BENCHMARK_NAME"])
batches = App(os.environ["BENCHMARK_NAME"])


@notifications.agent("mars", name="count", concurrency=64)
async def count(notification: Notification[Field]) -> None:
    if notification.identifier["step"]:
        tally.add()


@batches.agent("mars", name="count", batch=Batching(size=500))
async def count_batch(batch: Batch[Field]) -> None:
    tally.add(len(batch))
