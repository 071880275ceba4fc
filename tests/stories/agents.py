"""The apps that the stories run in worker processes. What a notification's payload says is what its handler does.

Every handler writes a line when it begins and one when it is done, so that a test can see what several processes did.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import anyio
from msgspec import Struct

from aviso_agents import observer, spark_events
from aviso_workers import App, Notification, Notify, Rate, RetryPolicy, Slots, Tick, Window, Windowing

__all__ = [
    "ACK_WAIT_SECONDS",
    "ACK_WAIT_VARIABLE",
    "LATENESS_SECONDS",
    "RECORD_VARIABLE",
    "RETRY",
    "WINDOW_SECONDS",
    "Deed",
    "app",
    "deadly",
    "exclusive",
    "hanging",
    "lanes",
    "limited",
    "observing",
    "other",
    "outputs",
    "shown",
    "singletons",
    "threads",
    "ticking",
    "windows",
]

RECORD_VARIABLE = "AVISO_STORY_RECORD"
ACK_WAIT_VARIABLE = "AVISO_STORY_ACK_WAIT"
ACK_WAIT_SECONDS = float(os.environ.get(ACK_WAIT_VARIABLE, "2.0"))
WINDOW_SECONDS = 100
"""A deed happens at the second that is its number."""
LATENESS_SECONDS = 50
RETRY = RetryPolicy(first=0.4, factor=1.5, max=1.0, attempts=6, jitter=0.0)


class Deed(Struct, frozen=True):
    """What the handler of a notification is to do."""

    n: int
    seconds: float = 0.0
    fails: bool = False
    blocks: bool = False
    """Sleep without letting the event loop turn."""
    sends: int = 0
    """Megabytes to publish afterwards."""
    filler: str = ""
    kills: bool = False
    """End the process at once."""
    ends_loop: str = ""
    """End the event loop, in one of the ways of `_end_loop`."""
    keeps: int = 0
    """Megabytes not to give back."""


app = App("stories")
other = App("other")
lanes = App("lanes")
threads = App("threads")
hanging = App("hanging")
outputs = App("outputs")
ticking = App("ticking")
windows = App("windows")
deadly = App("deadly")
observing = App("observing")
observing.include(observer.router)
singletons = App("singletons")
counting = App("counting")
limited = App("limited")
exclusive = App("exclusive")
shown = App("shown")
shown.include(observer.router)
shown.include(spark_events.router)
shown.event_type("spark_job", base="spark", key=["cluster", "application", "kind", "event", "id"])
sums = counting.table("sums", int, default=0)
kept: list[bytes] = []


@app.agent("mars", concurrency=4, ack_wait=ACK_WAIT_SECONDS, retry=RETRY)
async def work(notification: Notification[Deed]) -> None:
    await _do(notification.payload, app)


@limited.agent("mars", limits=[Rate(600, per="1m")], concurrency=2, ack_wait=ACK_WAIT_SECONDS)
async def pace(notification: Notification[Deed]) -> None:
    await _do(notification.payload, limited)


@exclusive.agent("mars", limits=[Slots(1, by=["expver"])], concurrency=2, ack_wait=ACK_WAIT_SECONDS)
async def alone(notification: Notification[Deed]) -> None:
    await _do(notification.payload, exclusive)


@other.agent("mars", concurrency=4, ack_wait=ACK_WAIT_SECONDS, retry=RETRY)
async def work_too(notification: Notification[Deed]) -> None:
    await _do(notification.payload, other)


@deadly.agent("mars", concurrency=4, ack_wait=ACK_WAIT_SECONDS, retry=RetryPolicy(first=0.4, attempts=2))
async def crash(notification: Notification[Deed]) -> None:
    if notification.payload.kills:
        _write("killed", notification.payload.n)
        os._exit(137)
    if notification.payload.ends_loop:
        _write("killed", notification.payload.n)
        await _end_loop(notification.payload.ends_loop)
    await _do(notification.payload, deadly)


@deadly.agent("mars", concurrency=4, ack_wait=ACK_WAIT_SECONDS, retry=RetryPolicy(attempts=1))
async def beside(notification: Notification[Deed]) -> None:
    await anyio.sleep(notification.payload.seconds)
    _write("beside", notification.payload.n)


@lanes.agent("mars", concurrency=4, ack_wait=ACK_WAIT_SECONDS, retry=RETRY, order_by=("expver",))
async def in_order(notification: Notification[Deed]) -> None:
    await _do(notification.payload, lanes)


@threads.agent("mars", ack_wait=ACK_WAIT_SECONDS, retry=RETRY)
def in_thread(notification: Notification[Deed]) -> None:
    _write("begun", notification.payload.n)
    time.sleep(notification.payload.seconds)
    _write("done", notification.payload.n)


@hanging.agent("mars", concurrency=2, timeout=0.2, ack_wait=ACK_WAIT_SECONDS, retry=RETRY)
def hang(notification: Notification[Deed]) -> None:
    _write("begun", notification.payload.n)
    time.sleep(notification.payload.seconds)


@ticking.every("1s", singleton=True)
async def tick(tick: Tick) -> None:
    _write("tick", int(tick.time.timestamp()))


@outputs.agent("mars", ack_wait=ACK_WAIT_SECONDS, retry=RETRY)
async def derive(notification: Notification[Deed]) -> AsyncIterator[Notify]:
    deed = notification.payload
    _write("begun", deed.n)
    await outputs.notify("plain", {"a": deed.n, "b": "begun"})
    yield Notify("plain", {"a": deed.n, "b": "made"})
    _write("published", deed.n)
    await anyio.sleep(deed.seconds)
    _write("done", deed.n)


def _add(total: int, notification: Notification[Deed]) -> int:
    _write("counted", notification.payload.n)
    return total + notification.payload.n


@windows.agent(
    "mars",
    concurrency=4,
    ack_wait=ACK_WAIT_SECONDS,
    retry=RETRY,
    window=Windowing(
        size=f"{WINDOW_SECONDS}s",
        fold=_add,
        initial=0,
        key=lambda notification: notification.identifier["expver"],
        time=lambda notification: datetime.fromtimestamp(notification.payload.n, UTC),
        lateness=f"{LATENESS_SECONDS}s",
    ),
)
async def sum_up(window: Window[int]) -> AsyncIterator[Notify]:
    yield Notify("plain", {"a": int(window.start.timestamp()), "b": window.key}, window.value)
    _write("published", int(window.start.timestamp()))


@shown.agent("mars", ack_wait=ACK_WAIT_SECONDS, retry=RetryPolicy(first=0.1, attempts=2))
async def show(notification: Notification[Deed]) -> None:
    """Its notifications that fail do so once; one that has no number is a dead letter."""
    if notification.payload.fails and notification.num_delivered == 1:
        raise ValueError("at first")
    await shown.notify("plain", {"a": notification.payload.n, "b": "shown"})


@shown.agent("plain", window=Windowing(size="1s", fold=lambda count, _: count + 1, initial=0, idle="1s"))
async def count_shown(window: Window[int]) -> None: ...


@shown.every("1s", singleton=False)
async def look() -> None: ...


@counting.agent("mars", concurrency=4, ack_wait=ACK_WAIT_SECONDS, retry=RETRY)
async def count_once(notification: Notification[Deed]) -> None:
    """A notification that fails does so after its update, the first time that it is handled."""
    await sums.update("all", lambda total: total + 1, once=notification)
    _write("counted", notification.payload.n)
    await anyio.sleep(notification.payload.seconds)
    if notification.payload.fails and notification.num_delivered == 1:
        raise ValueError("after its update")


@singletons.agent("mars", singleton=True, ack_wait=ACK_WAIT_SECONDS, retry=RETRY)
async def write(notification: Notification[Deed]) -> Notify:
    """Its effects are a line in a file, which refuses what is no later than the last, and what it returns."""
    deed = notification.payload
    _write("begun", deed.n)
    await anyio.sleep(deed.seconds)
    _write_fenced(deed.n, notification.sequence)
    return Notify("plain", {"a": deed.n, "b": "made"}, os.getpid())


async def _end_loop(how: str) -> None:
    async def exit_in_a_task() -> None:
        sys.exit(0)

    async def interrupt_in_a_task() -> None:
        raise KeyboardInterrupt

    match how:
        case "exit":
            await asyncio.create_task(exit_in_a_task())
        case "interrupt":
            await asyncio.create_task(interrupt_in_a_task())
        case "stop":
            asyncio.get_running_loop().stop()
        case "cancel":
            for task in asyncio.all_tasks():
                task.cancel()
    await asyncio.sleep(0)


async def _do(deed: Deed, app: App) -> None:
    _write("begun", deed.n)
    kept.append(b"x" * deed.keeps * 1_000_000)
    if deed.blocks:
        time.sleep(deed.seconds)  # noqa: ASYNC251 - a mistake that authors make
    else:
        await anyio.sleep(deed.seconds)
    if deed.sends:
        await app.notify_many(Notify("plain", {"a": n, "b": "x"}, "x" * 900_000) for n in range(deed.sends))
    if deed.fails:
        raise ValueError(f"deed {deed.n} was told to fail")
    _write("done", deed.n)


def _write_fenced(number: int, sequence: int) -> None:
    with open(f"{os.environ[RECORD_VARIABLE]}.fence", "a+") as fence:
        fcntl.flock(fence, fcntl.LOCK_EX)
        fence.seek(0)
        last = max(map(int, fence.read().split()), default=0)
        _write("written" if sequence > last else "refused", number)
        fence.write(f"{sequence}\n")


def _write(what: str, number: int) -> None:
    """One line, by one write, so that processes do not tear each other's lines."""
    line = f"{what} {number} {os.getpid()} {time.time():.6f}\n"
    with open(os.environ[RECORD_VARIABLE], "a", buffering=1) as record:
        record.write(line)
