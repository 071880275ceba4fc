"""A backlog drained by an agent of each kind, on one server or on a cluster of three whose streams have three replicas.

Each kind has a server or cluster to itself and begins with the whole backlog stored. What counts is that each
notification was handled, and the longest pause between two of them: an agent that waits for something that never comes
shows as a pause of its heartbeat or of a pull request's lifetime. With `--leader-change` the leaders of the stream and
of the agent's consumer step down half-way.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from _chaos.clusters import connected, started
from _demo.children import ShortfallError
from aviso_workers import App, Batch, Notification, Notify, Stream, Tick, Window, Windowing, config
from aviso_workers.backends import Admin
from aviso_workers.declare.agents import durable_name
from aviso_workers.engine.key_value import RetryingKeyValue
from aviso_workers.errors import AvisoWorkersError
from aviso_workers.server import NatsServer
from aviso_workers.state.timer_records import Claim

APP = "backlog"
EVENT = "deed"
CONFIG = Path(__file__).with_name("config.yaml")
AGENT = "drain"
MAX_PAUSE_HELP = (
    "seconds that none may pause (default: 4); give 25 with --leader-change: what a singleton held is its own for "
    "ack_wait, and a publish whose leader is gone is repeated after 10 s"
)
KEYS = 10
FAILS_ONE_IN = 10
TICK = timedelta(seconds=1)
PER_WINDOW = 100
READY_SECONDS = 60.0
STILL_SECONDS = 60.0
"""When nothing was handled for so long, what is missing will not be handled."""
SHORT_SECONDS = 0.05

console = Console(highlight=False, soft_wrap=True, markup=False)


class Record:
    """Which notifications were handled, and when."""

    def __init__(self) -> None:
        self.numbers = Counter[int]()
        """How often each was handled, by its number."""
        self.times: list[float] = []
        """When the agent began, and when it was given notifications."""
        self.handled = 0

    def add(self, *numbers: int) -> None:
        self.numbers.update(numbers)
        self.note(len(numbers))

    def note(self, count: int) -> None:
        self.handled += count
        self.times.append(time.monotonic())

    @property
    def longest_pause_seconds(self) -> float:
        return max((after - before for before, after in zip(self.times, self.times[1:], strict=False)), default=0.0)


class Result(Struct, frozen=True):
    """How a kind of agent drained its backlog."""

    kind: str
    handled: int
    """Different ones."""
    again: int
    """Handled more than once."""
    per_second: float
    longest_pause_seconds: float


def per_notification(app: App, record: Record, **policy: Any) -> None:
    """Handles one notification per call."""

    @app.agent(EVENT, name=AGENT, **policy)
    async def drain(notification: Notification[Any]) -> None:
        record.add(_number(notification))


def failing(app: App, record: Record) -> None:
    """Handles one notification per call; one of ten fails when it is handled first."""
    failed: set[int] = set()

    @app.agent(EVENT, name=AGENT, concurrency=64)
    async def drain(notification: Notification[Any]) -> None:
        number = _number(notification)
        if number % FAILS_ONE_IN == 0 and number not in failed:
            failed.add(number)
            record.note(1)
            raise RuntimeError("fails the first time")
        record.add(number)


def by_timer(app: App, record: Record) -> None:
    """Runs the ticks of a timer that were missed while no worker ran."""
    first: list[datetime] = []

    @app.every("1s", singleton=True, catch_up=True)
    async def drain(tick: Tick) -> None:
        first.append(tick.time)
        record.add(round((tick.time - first[0]) / TICK))


def in_batches(app: App, record: Record) -> None:
    """Handles up to a hundred notifications per call."""

    @app.agent(EVENT, name=AGENT)
    async def drain(batch: Batch[Any]) -> None:
        record.add(*[_number(notification) for notification in batch])


def as_stream(app: App, record: Record) -> None:
    """Loops over its notifications."""

    @app.agent(EVENT, name=AGENT)
    async def drain(stream: Stream[Any]) -> None:
        async for notification in stream:
            record.add(_number(notification))


def in_windows(app: App, record: Record) -> None:
    """Gathers a hundred notifications per window."""

    def fold(numbers: list[int], notification: Notification[Any]) -> list[int]:
        record.note(1)
        return [*numbers, _number(notification)]

    def happened(notification: Notification[Any]) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=_number(notification) // PER_WINDOW)

    initial: list[int] = []
    windowing = Windowing(size="1h", fold=fold, initial=initial, time=happened, idle="3s")

    @app.agent(EVENT, name=AGENT, window=windowing)
    async def drain(window: Window[list[int]]) -> None:
        record.numbers.update(window.value)


KINDS: dict[str, Callable[[App, Record], None]] = {
    "notification": lambda app, record: per_notification(app, record, concurrency=64),
    "batch": in_batches,
    "stream": as_stream,
    "ordered": lambda app, record: per_notification(app, record, concurrency=16, order_by=["lane"]),
    "window": in_windows,
    "singleton": lambda app, record: per_notification(app, record, singleton=True),
    "failing": failing,
    "delayed": lambda app, record: per_notification(app, record, concurrency=64),
    "timer": by_timer,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/backlog", description="Backlogs drained by each kind of agent.")
    parser.add_argument("--count", type=int, default=10_000, help="notifications stored before (default: 10000)")
    parser.add_argument("--servers", type=int, choices=(1, 3), default=3, help="how many servers (default: 3)")
    parser.add_argument("--kind", choices=list(KINDS), action="append", help="only this kind; may be repeated")
    parser.add_argument("--leader-change", action="store_true", help="let the leaders step down half-way")
    parser.add_argument("--most-pause", type=float, default=4.0, help=MAX_PAUSE_HELP)
    asked = parser.parse_args()
    results: list[Result] = []
    try:
        for kind in asked.kind or KINDS:
            results.append(conduct(kind, count=asked.count, servers=asked.servers, leader_change=asked.leader_change))
    except (ShortfallError, AvisoWorkersError) as error:
        console.print(f"fell short: {error}")
        return 1
    finally:
        _show(results)
    paused = [result.kind for result in results if result.longest_pause_seconds > asked.most_pause]
    if paused:
        console.print(f"fell short: paused for more than {asked.most_pause:g} s: {', '.join(paused)}")
        return 1
    console.print("as it should be: everything handled, and no pauses")
    return 0


def conduct(kind: str, *, count: int, servers: int, leader_change: bool) -> Result:
    """Raises `ShortfallError` where something was not handled."""
    with (
        tempfile.TemporaryDirectory(prefix="aviso-workers-backlog-") as directory,
        started(directory, servers) as nodes,
    ):
        return anyio.run(_drain, kind, count, leader_change, nodes)


async def _drain(kind: str, count: int, leader_change: bool, nodes: Sequence[NatsServer]) -> Result:
    record = Record()
    app = App(APP, config=config.load(CONFIG, environ=_environment(nodes)))
    KINDS[kind](app, record)
    async with connected(app) as admin:
        if kind == "timer":
            await _miss_ticks(app, count)
        else:
            await _store(app, count, delayed=kind == "delayed")
        record.times = [time.monotonic()]
        async with _at_work(app):
            if leader_change:
                await _until(lambda: record.handled >= count // 4, record)
                await _step_down(admin, kind)
            await _until(lambda: len(record.numbers) >= count, record)
    if missing := [number for number in range(count) if number not in record.numbers]:
        raise ShortfallError(f"{kind}: {len(missing):,} of {count:,} not handled, such as number {missing[0]}")
    again = sum(times > 1 for times in record.numbers.values())
    seconds = record.times[-1] - record.times[0]
    return Result(kind, len(record.numbers), again, count / seconds, record.longest_pause_seconds)


@asynccontextmanager
async def _at_work(app: App) -> AsyncIterator[None]:
    stop = anyio.Event()
    async with anyio.create_task_group() as working:
        working.start_soon(app._work, stop)
        try:
            yield
        finally:
            stop.set()


async def _store(app: App, count: int, *, delayed: bool) -> None:
    after = 1.0 if delayed else None
    await app.notify_many(
        [Notify(EVENT, {"lane": number % KEYS, "number": number}, {}, due=after) for number in range(count)]
    )


async def _miss_ticks(app: App, count: int) -> None:
    """Claim a tick of so long ago that the timer has missed `count` since."""
    claim = Claim(time=datetime.now(UTC) - count * TICK, schedule="every 1s")
    # The bucket is made here, and on three servers its leader may be elected first.
    bucket = RetryingKeyValue(app.session.backend, f"{APP}__timers", patience_seconds=READY_SECONDS, own=True)
    await bucket.put(AGENT, msgspec.json.encode(claim))


async def _step_down(admin: Admin, kind: str) -> None:
    stream = EVENT.upper()
    led = [f"CONSUMER.LEADER.STEPDOWN.{stream}.{durable_name(APP, AGENT)}", f"STREAM.LEADER.STEPDOWN.{stream}"]
    if kind == "timer":
        led = [f"STREAM.LEADER.STEPDOWN.KV_{APP}__timers", f"STREAM.LEADER.STEPDOWN.KV_{APP}__leases"]
    for subject in led:
        await admin.administration().api(subject)


async def _until(condition: Callable[[], bool], record: Record) -> None:
    """Wait until the condition holds, or nothing has been handled for too long."""
    while not condition() and time.monotonic() - record.times[-1] < STILL_SECONDS:  # noqa: ASYNC110 - time may run out
        await anyio.sleep(SHORT_SECONDS)


def _environment(nodes: Sequence[NatsServer]) -> dict[str, str]:
    prefix = "AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__"
    return {f"{prefix}NATS_URL": ",".join(node.url for node in nodes), f"{prefix}REPLICAS": str(len(nodes))}


def _number(notification: Notification[Any]) -> int:
    return int(notification.identifier["number"])


def _show(results: list[Result]) -> None:
    table = Table("kind", "handled", "more than once", "per second", "longest pause")
    for result in results:
        pause = f"{result.longest_pause_seconds:.2f} s"
        table.add_row(result.kind, f"{result.handled:,}", f"{result.again:,}", f"{result.per_second:,.0f}", pause)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
