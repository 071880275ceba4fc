"""The app that is tried: an agent of each call form, and each of them gets every notification.

What an agent has handled it writes, a line each with the process and the time, into a file that all workers share.
"""

from __future__ import annotations

import os
import random
import time
from functools import cache

import anyio
import msgspec
from msgspec import Struct

from _chaos import versions
from aviso_workers import App, Batch, Batching, Notification, RetryPolicy, Router, Stream

VERSION = versions.VERSIONS.get(os.environ.get(versions.VARIABLE, ""))
"""Of which version this process is; None where there is one."""

APP = "endurance"
EVENT = "deed"
ACK_WAIT_SECONDS = 2.0
RETRY = RetryPolicy(first=0.1, factor=2, max=2)
AWAY, MENDED = ".away", ".mended"
"""Files beside the record: while the first is there, what is needed is away; where the second is, nothing fails."""


class Settings(Struct, frozen=True):
    """Settings, under `workers.agents.endurance`."""

    record: str
    """The file to write into."""


class Deed(Struct, frozen=True):
    """What handling a notification takes."""

    seconds: float
    fails: float
    """The probability that an attempt fails: 1 makes a dead letter."""


app = App(APP)
router = Router(APP, settings=Settings)


@router.agent(EVENT, concurrency=16, ack_wait=ACK_WAIT_SECONDS, retry=RETRY)
async def single(notification: Notification[Deed]) -> None:
    await _do("single", notification)


@router.agent(EVENT, concurrency=16, ack_wait=ACK_WAIT_SECONDS, retry=RETRY, order_by=("lane",))
async def in_lanes(notification: Notification[Deed]) -> None:
    await _do("in_lanes", notification)


@router.agent(EVENT, ack_wait=ACK_WAIT_SECONDS, retry=RETRY, batch=Batching(size=50, within=0.1))
async def in_batches(batch: Batch[Deed]) -> None:
    async def do(notification: Notification[Deed]) -> None:
        try:
            await _do("in_batches", notification)
        except RuntimeError:
            batch.retry(notification)

    async with anyio.create_task_group() as together:
        for notification in batch:
            together.start_soon(do, notification)


@router.agent(EVENT, concurrency=16, ack_wait=ACK_WAIT_SECONDS, retry=RETRY)
async def as_stream(stream: Stream[Deed]) -> None:
    async for notification in stream:
        await _do("as_stream", notification)


async def _do(agent: str, notification: Notification[Deed]) -> None:
    deed = msgspec.convert(notification.payload, Deed)
    await anyio.sleep(deed.seconds)
    if _exists(AWAY):
        raise ConnectionRefusedError("on purpose: what is needed is away")
    if random.random() < deed.fails and not _exists(MENDED):
        raise RuntimeError("on purpose: failures are tried again, and at last become dead letters")
    # One write, so that processes do not tear each other's lines.
    number = notification.identifier["number"]
    os.write(_record(), f"{agent} {number} {os.getpid()} {time.monotonic()}\n".encode())


def _exists(suffix: str) -> bool:
    return os.path.exists(f"{app.settings(router).record}{suffix}")


@cache
def _record(suffix: str = "") -> int:
    return os.open(f"{app.settings(router).record}{suffix}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def _write_window(line: str) -> None:
    os.write(_record(versions.RECORD_SUFFIX), line.encode())


if VERSION is not None:
    versions.declare(router, VERSION, EVENT, do=_do, write_window=_write_window, ack_wait=ACK_WAIT_SECONDS, retry=RETRY)
app.include(router)
