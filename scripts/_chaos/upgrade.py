"""A cluster of three nats-servers is upgraded, one server after the other, while an app works on it.

Everything that the app does is counted outside of the servers: what was published and acknowledged, what was handled
and in which order, dead letters, windows, what a table holds, ticks of a timer that one worker of all runs. Each server
is stopped in order and started with the next binary on its old store; the next one follows when every stream has all
its copies again. Afterwards, everything that was acknowledged must be where it belongs.

What the oldest version lacks, delivery at a later time, is tried by the same app before and after: it must be refused
while servers are old, and work when none is, without the app being started again.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread
from msgspec import Struct
from rich.console import Console

from _chaos.clusters import Node, connected, start_nodes, stop_nodes
from _demo.children import ShortfallError
from aviso_workers import App, Notification, RetryPolicy, Tick, Window, Windowing, config
from aviso_workers.backends import Admin
from aviso_workers.declare.tables import Table
from aviso_workers.errors import AvisoWorkersError, BackendError
from aviso_workers.ops.dead_letters import Selection, StoredDeadLetters

APP = "upgrade"
EVENT = "deed"
CONFIG = Path(__file__).with_name("config.yaml")
KEYS = 10
RETRY = RetryPolicy(first=0.1, attempts=3)
FAILS = 97
"""Each so many-th notification cannot be handled."""
PER_WINDOW = 100
READY_SECONDS = 120.0
STILL_SECONDS = 60.0
SHORT_SECONDS = 0.2
WORKS = "works"
FIRST_LATER = 900_000_000
"""The numbers of what is to be delivered later begin here."""
BETWEEN_SECONDS = 2.0
"""For how long the app works undisturbed before the next server is upgraded."""

console = Console(highlight=False, soft_wrap=True, markup=False)


class Ledger:
    """What was published, and what became of it, by number."""

    def __init__(self) -> None:
        self.stored: set[int] = set()
        self.failed = Counter[str]()
        """Why notifications were not acknowledged; they may be stored or not."""
        self.handled = Counter[int]()
        self.by_key: defaultdict[int, list[int]] = defaultdict(list)
        """By key, the sequences in the order in which they were handled, of what was delivered once."""
        self.behind = 0
        """What was delivered again, because it was lost with a connection, and came behind a later one of its key."""
        self.in_windows = Counter[int]()
        self.ticks = Counter[datetime]()
        self.later: set[str] = set()
        self.times = [time.monotonic()]

    def handles(self, notification: Notification[Any]) -> None:
        number = _number(notification)
        self.times.append(time.monotonic())
        before = self.by_key[number % KEYS]
        if notification.num_delivered == 1:
            before.append(notification.sequence)
        elif not self.handled[number] and before and notification.sequence < before[-1]:
            self.behind += 1
        self.handled[number] += 1

    @property
    def longest_pause_seconds(self) -> float:
        return max((after - before for before, after in zip(self.times, self.times[1:], strict=False)), default=0.0)


class Result(Struct, frozen=True):
    """What became of everything, and what is wrong with that."""

    figures: dict[str, Any]
    problems: list[str]


def conduct(directory: Path, binaries: Mapping[str, str], *, rate: float) -> Result:
    """Start a cluster of the first version, and upgrade it to each of the others in turn.

    Raises `ShortfallError` where the cluster does not become whole again.
    """
    nodes = start_nodes(directory, 3, binaries=[next(iter(binaries.values()))] * 3)
    try:
        return anyio.run(_conduct, nodes, binaries, rate)
    finally:
        stop_nodes(nodes)


async def _conduct(nodes: list[Node], binaries: Mapping[str, str], rate: float) -> Result:
    first, *_ = binaries
    others = {version: binary for version, binary in binaries.items() if version != first}
    ledger = Ledger()
    app = App(APP, config=config.load(CONFIG, environ=_environment(nodes)))
    numbers = _declare(app, ledger)
    tried = dict[str, str]()
    async with connected(app) as admin:
        stop, published = anyio.Event(), anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(app._work, stop)
            tasks.start_soon(_publish, app, ledger, rate, published)
            await _until(lambda: len(ledger.handled) > 2 * KEYS, "anything was handled")
            tried[first] = await _said(_later(app, first))
            for version, binary in others.items():
                for node in nodes:
                    await _upgrade(node, binary, admin)
                    await anyio.sleep(BETWEEN_SECONDS)
                console.print(f"all servers are {version}: {len(ledger.stored):,} stored so far")
                tried[version] = await _said(_later(app, version))
            published.set()
            dead_letters, kept = await _settled(app, ledger, numbers, later=[*tried.values()].count(WORKS))
            stop.set()
    return _judged(ledger, dead_letters, kept, tried)


def _declare(app: App, ledger: Ledger) -> Table[int | None]:
    """Return each agent gets every notification. Return the table of their sequences by number."""
    numbers = app.table("numbers", int)

    @app.agent(EVENT, name="in_order", concurrency=8, ack_wait=5.0, order_by=["lane"], retry=RETRY)
    async def in_order(notification: Notification[Any]) -> None:
        if notification.payload == "later":
            ledger.later.add(str(_number(notification)))
            return
        if _number(notification) % FAILS == 0:
            raise RuntimeError("on purpose")
        ledger.handles(notification)

    @app.agent(EVENT, name="keep", concurrency=16, ack_wait=5.0)
    async def keep(notification: Notification[Any]) -> None:
        await numbers.put(str(_number(notification)), notification.sequence)

    def happened(notification: Notification[Any]) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=_number(notification) % FIRST_LATER // PER_WINDOW)

    initial: list[int] = []
    windowing = Windowing(
        size="1h",
        fold=lambda found, notification: [*found, _number(notification)],
        initial=initial,
        time=happened,
        lateness="100h",
        idle="3s",
    )

    @app.agent(EVENT, name="in_windows", ack_wait=5.0, window=windowing)
    async def in_windows(window: Window[list[int]]) -> None:
        ledger.in_windows.update(window.value)

    @app.every("1s", singleton=True)
    async def tick(tick: Tick) -> None:
        ledger.ticks[tick.time] += 1

    return numbers


async def _publish(app: App, ledger: Ledger, rate: float, published: anyio.Event) -> None:
    async def publish(number: int) -> None:
        try:
            await app.notify(EVENT, {"lane": number % KEYS, "number": number}, {})
        except BackendError as error:
            ledger.failed[re.sub(r"\d+", "N", f"{type(error).__name__}: {error}")] += 1
        else:
            ledger.stored.add(number)

    started, number = anyio.current_time(), 0
    async with anyio.create_task_group() as publishing:
        while not published.is_set():
            number += 1
            publishing.start_soon(publish, number)
            await anyio.sleep_until(started + number / rate)


async def _upgrade(node: Node, binary: str, admin: Admin) -> None:
    await to_thread.run_sync(node.stop)
    node.binary = binary
    node.start()
    with anyio.move_on_after(READY_SECONDS):
        while True:
            wrong = await _not_whole(admin)
            if not wrong:
                return
            await anyio.sleep(SHORT_SECONDS)
    raise ShortfallError(f"the cluster is not whole {READY_SECONDS:.0f} s after a server was upgraded: {wrong}")


async def _not_whole(admin: Admin) -> str:
    try:
        for name in await admin.stream_names():
            found = await admin.stream_info(name)
            if found.behind or not found.cluster.leader:
                return f"{name}: {', '.join(found.behind) or 'no leader'}"
    except BackendError as error:
        return str(error)
    return ""


async def _later(app: App, version: str) -> None:
    number = FIRST_LATER + int(version.split(".")[1])
    await app.notify(EVENT, {"lane": 999, "number": number}, "later", due=1)


async def _said(doing: Any) -> str:
    try:
        await doing
    except AvisoWorkersError as error:
        return f"{type(error).__name__}: {error}"
    return WORKS


async def _settled(app: App, ledger: Ledger, numbers: Table[int | None], *, later: int) -> tuple[set[int], set[int]]:
    """Wait until all is done, or nothing happens any more; return the numbers of the dead letters, and the table's."""
    dead_letters, kept = set[int](), set[int]()
    until = time.monotonic() + STILL_SECONDS
    doomed = {number for number in ledger.stored if number % FAILS == 0}
    while time.monotonic() < until:
        await anyio.sleep(1.0)
        dead_letters = {
            int(dead_letter.original.subject.rpartition(".")[2])
            async for dead_letter in StoredDeadLetters(app.session.admin, events=app.events).select(Selection(app=APP))
        }
        kept = {int(key) for key in await numbers.items()}
        done = ledger.stored - doomed <= ledger.handled.keys() and doomed <= dead_letters and ledger.stored <= kept
        if done and ledger.stored <= ledger.in_windows.keys() and len(ledger.later) == later:
            break
    return dead_letters, kept


def _judged(ledger: Ledger, dead_letters: set[int], kept: set[int], tried: dict[str, str]) -> Result:
    stored = ledger.stored
    doomed = {number for number in stored if number % FAILS == 0}
    problems = [
        f"{what}: {len(lost):,} are missing, such as {min(lost)}"
        for what, lost in {
            "handled": stored - doomed - ledger.handled.keys(),
            "dead letters": doomed - dead_letters,
            "windows": stored - ledger.in_windows.keys(),
            "table": stored - kept,
        }.items()
        if lost
    ]
    if (missing := [*tried.values()].count(WORKS) - len(ledger.later)) > 0:
        problems.append(f"{missing} that were to be delivered later were not")
    if [*tried.values()][-1] != WORKS:
        problems.append("the newest servers deliver nothing later")
    if given_up := {number for number in dead_letters if number in stored} - doomed:
        problems.append(f"{len(given_up):,} were given up that do not fail")
    if out_of_order := [key for key, sequences in ledger.by_key.items() if sequences != sorted(sequences)]:
        problems.append(f"out of order: keys {out_of_order}")
    if twice := [tick for tick, times in ledger.ticks.items() if times > 1]:
        problems.append(f"{len(twice)} ticks of the timer were run twice")
    if counted := [number for number, times in ledger.in_windows.items() if times > 1]:
        problems.append(f"{len(counted)} were counted twice in windows")
    figures = {
        "published and acknowledged": len(stored),
        "not acknowledged": dict(ledger.failed),
        "handled": len(ledger.handled),
        "handled more than once": sum(times > 1 for times in ledger.handled.values()),
        "behind a later one of its key": ledger.behind,
        "dead letters": len(dead_letters),
        "in windows": len(ledger.in_windows),
        "in the table": len(kept),
        "ticks": len(ledger.ticks),
        "longest pause, seconds": round(ledger.longest_pause_seconds, 1),
        **{f"due, {when}": said for when, said in tried.items()},
    }
    return Result(figures=figures, problems=problems)


async def _until(condition: Callable[[], bool], what: str) -> None:
    with anyio.move_on_after(READY_SECONDS):
        while not condition():  # noqa: ASYNC110 - what happens tells nobody
            await anyio.sleep(SHORT_SECONDS)
        return
    raise ShortfallError(f"{READY_SECONDS:.0f} s were over before {what}")


def _environment(nodes: list[Node]) -> dict[str, str]:
    prefix = "AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__"
    return {f"{prefix}NATS_URL": ",".join(node.url for node in nodes), f"{prefix}REPLICAS": str(len(nodes))}


def _number(notification: Notification[Any]) -> int:
    return int(notification.identifier["number"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/upgrade", description="Upgrade a cluster under load, and count.")
    parser.add_argument("binaries", nargs="+", help="the nats-servers: the first is what the cluster begins with")
    parser.add_argument("--rate", type=float, default=50.0, help="notifications a second (default: 50)")
    asked = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="aviso-workers-upgrade-") as directory:
            told = conduct(Path(directory), {_version(each): each for each in asked.binaries}, rate=asked.rate)
    except (ShortfallError, AvisoWorkersError) as error:
        console.print(f"fell short: {error}")
        return 1
    for what, figure in told.figures.items():
        console.print(f"{what}: {figure}")
    for problem in told.problems:
        console.print(f"wrong: {problem}")
    console.print("something was lost or wrong" if told.problems else "nothing lost")
    return 1 if told.problems else 0


def _version(binary: str) -> str:
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    return said.split()[-1].lstrip("v")


if __name__ == "__main__":
    sys.exit(main())
