"""Scale: what is to stay as it is when there is more of something, each beside the same with less of it."""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import AsyncIterator, Callable, Iterable

import anyio
import nats

from _bench.filling import SUBJECTS
from _bench.ground import Cores, Ground, grounded
from _bench.rivals import Rivals
from _bench.rounds import RUN_SECONDS, Contestant, Figures, Say, Size, compete
from _bench.tally import memory_mib
from aviso_workers import App, Notification
from aviso_workers.events import Ticked
from aviso_workers.ops.dead_letters import Selection, StoredDeadLetters, portions
from aviso_workers.state.dead_letter_records import DeadLetter
from aviso_workers.telemetry.metrics import Metrics

COUNT = 50_000
BACKLOGS = (10_000, 100_000, 1_000_000)
STEPS: dict[str, Callable[[int], int]] = {
    "50000 keys": lambda number: number % 50_000,
    "half on one key": lambda number: number % SUBJECTS if number % 2 else 0,
}
"""Streams with other keys of `order_by`."""
WINDOWED = 10_000
LETTERS = (1_000, 10_000)
IDLE = 500
TIMERS = (1, 500)
CALLERS = (1, 16, 256)
CACHED = (100, 10_000)
TRIALS = 20_000
CALL_SECONDS = 3.0


def scale(cores: Cores, rivals: Rivals, size: Size, say: Say) -> Figures:
    """Return one round: it is long, and what is compared is close to each other in time."""
    size = Size(repetitions=1, scale=size.scale)
    count = size.count(COUNT)
    figures: Figures = {}
    with grounded(cores) as ground:
        figures |= _backlogs(ground, size, say)
        for benchmark, contestants in _of_a_full_stream(count).items():
            figures |= compete(ground, benchmark, contestants, size, say)
        figures |= _in_this_process(ground, size, say)
    for name, step in STEPS.items():
        with grounded(cores) as ground:
            ground.fill(count, step=step)
            contestant = Contestant(name=name, count=count, app="scaled_agents:ordered")
            figures |= compete(ground, "order_by", [contestant], size, say)
    with grounded(cores) as ground:
        figures |= _among_idle(ground, size, say)
    with grounded(cores) as ground:
        figures |= _dead_letters(ground, size, say)
    return figures


def _backlogs(ground: Ground, size: Size, say: Say) -> Figures:
    """Return a stream that grows, and how fast its beginning is handled; it stays filled for what comes after."""
    figures: Figures = {}
    stored = 0
    for backlog in BACKLOGS:
        wanted = size.count(backlog)
        say(f"backlog: storing {wanted - stored:,} notifications")
        if wanted > stored:
            ground.fill(wanted - stored, first=stored)
        stored = wanted
        contestant = Contestant(name=str(backlog), count=min(wanted, size.count(COUNT)), app="notifications")
        figures |= compete(ground, "backlog", [contestant], size, say)
    return figures


def _of_a_full_stream(count: int) -> dict[str, list[Contestant]]:
    """Return what a worker does with a stream that is full, by benchmark."""
    windowed = min(count, WINDOWED)
    return {
        "failing": [
            Contestant(name="0 of 100", count=count, app="notifications"),
            Contestant(name="1 of 100", count=count, app="scaled_agents:failing_1"),
            Contestant(name="10 of 100", count=count, app="scaled_agents:failing_10"),
            Contestant(name="50 of 100", count=count // 2, app="scaled_agents:failing_50"),
        ],
        "order_by": [
            Contestant(name=f"{SUBJECTS} keys", count=count, app="scaled_agents:ordered"),
            Contestant(name="one key fails", count=count, app="scaled_agents:ordered_failing"),
        ],
        "windows": [
            Contestant(name="all settled", count=windowed, app="scaled_agents:windows"),
            Contestant(name="half unsettled", count=windowed // 2, app="scaled_agents:windows_unsettled"),
        ],
    }


def _among_idle(ground: Ground, size: Size, say: Say) -> Figures:
    """Return what agents cost that have nothing to do, beside a busy one and when that is done."""
    count = size.count(COUNT)
    ground.fill(2 * count)
    figures = compete(ground, "idle", [Contestant(name="none", count=count, app="notifications")], size, say)
    say(f"idle: an agent among {IDLE} idle ones")
    with ground.worker("among-idle", "scaled_agents:among_idle", counts=[count, 2 * count]) as (child, _):
        # The busy one begins before the others have started, so its first half tells of that.
        first, last = ground.marks(child, 2, within_seconds=RUN_SECONDS)
        seconds, cpu_seconds = last.seconds - first.seconds, last.cpu_seconds - first.cpu_seconds
        found = {"per_second": count / seconds, "cpu_us": cpu_seconds / count * 1e6}
        found["requests"] = anyio.run(_asked, ground, CALL_SECONDS)
        if resident := memory_mib(child.process.pid).get("resident_mib"):
            found["resident_mib"] = resident
    app = ground.app("idle")
    _declare_idle(app)
    metrics = Metrics(app, ready=lambda: True, loop_lag_seconds=lambda: 0.0)
    found["metrics_ms"] = min(timeit.repeat(metrics.render, timer=time.process_time, number=1, repeat=5)) * 1000
    return figures | {f"idle.{IDLE}.{measure}": [value] for measure, value in found.items()}


def _declare_idle(app: App) -> None:
    for number in range(IDLE):

        @app.agent("mars", name=f"idle-{number}", start="all")
        async def rest(notification: Notification[None]) -> None: ...


async def _asked(ground: Ground, seconds: float) -> float:
    """Requests to JetStream within a second, whoever makes them."""
    connection = await nats.connect(ground.nats_url)
    try:
        asked = await connection.subscribe("$JS.API.>")
        await connection.flush()
        await anyio.sleep(seconds)
        return asked.pending_msgs / seconds
    finally:
        await connection.close()


def _in_this_process(ground: Ground, size: Size, say: Say) -> Figures:
    """Timers and tables, which no notification is measured with."""
    figures: Figures = {}
    for timers in TIMERS:
        say(f"timers: {timers}")
        late = anyio.run(_lateness, ground.app(f"timers-{timers}"), timers)
        figures[f"timers.{timers}.late_p99_ms"] = [late]
    for callers in CALLERS:
        say(f"update: by {callers}")
        rate = anyio.run(_updates, ground.app(f"updates-{callers}"), callers)
        figures[f"update.by {callers}.per_second"] = [rate]
    for keys in CACHED:
        say(f"cached: {keys} keys")
        found = anyio.run(_cached, ground.app(f"cached-{keys}"), max(10, round(keys * size.scale)))
        figures[f"cached.{keys} keys.get_us"] = [found]
    return figures


async def _lateness(app: App, timers: int) -> float:
    """Return the 99th percentile of how late timers run that are due every second, all at once."""
    late: list[float] = []
    app.events.listen(lambda ticked: late.append(ticked.late_seconds * 1000), Ticked)
    for number in range(timers):

        @app.every("1s", name=f"tick-{number}", singleton=False)
        async def tick() -> None: ...

    stop = anyio.Event()
    async with app, anyio.create_task_group() as tasks:
        tasks.start_soon(app._work, stop)
        await anyio.sleep(CALL_SECONDS)
        stop.set()
    return statistics.quantiles(late, n=100)[-1]


async def _updates(app: App, callers: int) -> float:
    """Updates of one key a second, by so many callers at the same time."""
    table = app.table("counts", int, default=0)
    done = 0

    async def call() -> None:
        nonlocal done
        while True:
            await table.update("all", lambda count: count + 1)
            done += 1

    async with app, anyio.create_task_group() as tasks:
        await table.put("all", 0)
        for _ in range(callers):
            tasks.start_soon(call)
        await anyio.sleep(CALL_SECONDS)
        tasks.cancel_scope.cancel()
    return done / CALL_SECONDS


async def _cached(app: App, keys: int) -> float:
    """Microseconds for reading a value of a table that is kept in the process."""
    table = app.table("values", int, default=0, cached=True)
    async with app:
        for number in range(keys):
            await table.put(str(number), number)
        begun = time.perf_counter()
        for number in range(TRIALS):
            await table.get(str(number % keys))
        return (time.perf_counter() - begun) / TRIALS * 1e6


def _dead_letters(ground: Ground, size: Size, say: Say) -> Figures:
    """Return how fast dead letters are handed back, by how many there are."""
    counts = [size.count(count) for count in LETTERS]
    say(f"dead-letters: {sum(counts):,}")
    ground.fill(sum(counts))
    with ground.worker("letters", "scaled_agents:rejecting", counts=[sum(counts)]) as (child, _):
        ground.marks(child, 1, within_seconds=RUN_SECONDS)
    name = child.name
    return {
        f"dead-letters.{whole}.per_second": [anyio.run(_hand_back, ground, name, count)]
        for whole, count in zip(LETTERS, counts, strict=True)
    }


async def _hand_back(ground: Ground, name: str, count: int) -> float:
    """Dead letters handed back a second; those of so many originals, the first in the stream."""
    async with ground.app(name) as app:
        stored = StoredDeadLetters(app.session.admin, events=app.events)
        dead_letters = [dead_letter async for dead_letter in stored.select(Selection(app=name))][:count]
        begun = time.perf_counter()
        async for portion in portions(_each(dead_letters)):
            await stored.retry(*portion)
        return count / (time.perf_counter() - begun)


async def _each(dead_letters: Iterable[DeadLetter]) -> AsyncIterator[DeadLetter]:
    for dead_letter in dead_letters:
        yield dead_letter
