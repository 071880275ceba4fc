"""The measured agents. Each is an app of its own, run by `aviso-workers worker`; the environment names the run."""

from __future__ import annotations

import json
import os
import time

import msgspec

from _bench.tally import Tally
from aviso_workers import App, Batch, Batching, Notification


class Field(msgspec.Struct, frozen=True):
    """The payload."""

    location: str
    size: int
    due_ns: int = 0
    """When it was due to be published, on the system's monotonic clock."""


tally = Tally()
notifications = App(os.environ["BENCHMARK_NAME"])
batches = App(os.environ["BENCHMARK_NAME"])
schedule = App(os.environ["BENCHMARK_NAME"])
latencies_ms: list[float] = []


@notifications.agent("mars", name="count", start="all", concurrency=64)
async def count(notification: Notification[Field]) -> None:
    if notification.identifier["step"]:
        tally.add()


@batches.agent("mars", name="count", start="all", batch=Batching(size=500))
async def count_batch(batch: Batch[Field]) -> None:
    tally.add(len(batch))


@schedule.agent("mars", name="count", concurrency=64, start="new")  # not those of a run before
async def note_latency(notification: Notification[Field]) -> None:
    latencies_ms.append((time.monotonic_ns() - notification.payload.due_ns) / 1e6)
    if len(latencies_ms) == tally.wanted:
        print(json.dumps(latencies_ms), flush=True)
    tally.add()
