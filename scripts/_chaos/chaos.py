"""Chaos: notifications are published while workers and their servers are killed, paused and restarted at random.

Afterwards, when all is whole again and nothing is left to do, the notifications are counted: each must have been
handled by every agent, or be a dead letter of it. What happens is in `strokes`, when it happens follows from the seed;
what else the machine does meanwhile does not, so that two runs of one seed are alike and not equal.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import anyio
import nats
import nats.errors
from anyio import to_thread
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from _chaos import versions
from _chaos.agents import APP, EVENT, Deed, router
from _chaos.clusters import start_nodes, stop_nodes
from _chaos.deployment import Deployment
from _chaos.strokes import Kind, Stroke, plan
from _demo.children import ShortfallError
from aviso_workers import App
from aviso_workers.errors import AvisoWorkersError, BackendError
from aviso_workers.ops.dead_letters import Selection, StoredDeadLetters

STREAM = EVENT.upper()
LANES = 50
READY_SECONDS = 120.0
ENDED_SECONDS = 60.0
"""A worker that is told to stop gets 30 s to finish, and has a server to find first."""
STILL_SECONDS = 60.0
"""When nothing was handled or counted for so long, what is missing will not be any more."""
CHECK_SECONDS = 0.05
SHOWN = 20

console = Console(highlight=False, soft_wrap=True, markup=False)


class Place:
    """Where one worker runs after another."""

    def __init__(self, name: str, deployment: Deployment, stack: ExitStack, *, versions: Sequence[str]) -> None:
        """Its workers are of these versions in turn."""
        self.name = name
        self._versions = itertools.cycle(versions)
        self.turn = anyio.Lock()
        """What strikes it takes turns."""
        self._deployment = deployment
        self._running = ExitStack()
        self._count = 0
        self.start()
        stack.callback(self._end)

    @property
    def has_begun(self) -> bool:
        """Whether its worker has said anything: it does when it obeys signals."""
        return self.worker.child.log_file.stat().st_size > 0

    def start(self) -> None:
        """Another worker, when the last one has ended."""
        self._count += 1
        self._running.close()
        self.worker = self._running.enter_context(
            self._deployment.worker(f"{self.name}.{self._count}", version=next(self._versions))
        )

    def send(self, number: signal.Signals) -> None:
        self.worker.child.process.send_signal(number)

    async def ended(self) -> None:
        """Until its worker has ended. Raises `ShortfallError` where it does not, or not in order."""
        child = self.worker.child
        await to_thread.run_sync(lambda: child.wait(within_seconds=ENDED_SECONDS), abandon_on_cancel=True)

    def _end(self) -> None:
        self.worker.child.kill()
        self._running.close()


class Publisher:
    """Publishes notifications at a rate until it is told to stop."""

    def __init__(self, client: App, *, rate: float, seed: int) -> None:
        self.stored: dict[int, Deed] = {}
        """By number, what was published and acknowledged."""
        self.failed = Counter[str]()
        """Why notifications were not acknowledged; they may be stored or not."""
        self.stop = anyio.Event()
        self._client = client
        self._rate = rate
        self._dice = random.Random(seed)

    async def run(self) -> None:
        started, number = anyio.current_time(), 0
        async with anyio.create_task_group() as publishing:
            while not self.stop.is_set():
                publishing.start_soon(self._publish, number, self._deed())
                number += 1
                await anyio.sleep_until(started + number / self._rate)

    async def _publish(self, number: int, deed: Deed) -> None:
        try:
            await self._client.notify(EVENT, {"lane": number % LANES, "number": number}, deed)
        except BackendError as error:
            self.failed[f"{type(error).__name__}: {error}".replace(f".{number}:", ":")] += 1
        else:
            self.stored[number] = deed

    def _deed(self) -> Deed:
        """Most are quick and succeed; some fail a few times, few take longer than `ack_wait`, few fail for good."""
        chance = self._dice.random()
        if chance < 0.002:
            return Deed(seconds=3.0, fails=0.0)
        if chance < 0.004:
            return Deed(seconds=0.0, fails=1.0)
        return Deed(seconds=self._dice.uniform(0.0, 0.01), fails=0.3 if chance < 0.05 else 0.0)


class Chaos:
    """The servers, the workers, and what is done to them."""

    def __init__(self, directory: Path, *, workers: int, servers: int, mixed: bool, stack: ExitStack) -> None:
        """`mixed`: workers are of two versions; one place has only the old one, one only the new one."""
        self.mixed = mixed
        self.done = Counter[Kind]()
        self._begun = time.monotonic()
        self.problems: list[str] = []
        """What a worker did that it should not have done."""
        self._server_turn = anyio.Lock()
        self._nodes = start_nodes(directory / "nats", servers)
        stack.callback(lambda: stop_nodes(self._nodes))
        self.deployment = Deployment(directory, ",".join(node.url for node in self._nodes), replicas=servers)
        both = tuple(versions.VERSIONS)
        of_places = [*((each,) for each in both), *(both for _ in range(workers - len(both)))] if mixed else []
        self.places = [
            Place(f"worker-{number + 1}", self.deployment, stack, versions=of_places[number] if mixed else [""])
            for number in range(workers)
        ]

    async def strike(self, stroke: Stroke) -> None:
        with self._noting_problems():
            await self._strike(stroke)

    async def _strike(self, stroke: Stroke) -> None:
        match stroke.kind:
            case Kind.KILL | Kind.TERMINATE | Kind.PAUSE:
                place = self.places[stroke.target % len(self.places)]
                async with place.turn:
                    self._note(stroke, place.name)
                    await self._strike_worker(place, stroke)
            case Kind.RESTART | Kind.CRASH if self._server_turn.locked():
                pass  # it is away: one stroke after another would be an outage without an end
            case Kind.RESTART | Kind.CRASH:
                async with self._server_turn:
                    number = stroke.target % len(self._nodes)
                    self._note(stroke, f"{number + 1}" if len(self._nodes) > 1 else "")
                    self._nodes[number].stop(killed=stroke.kind is Kind.CRASH)
                    await anyio.sleep(stroke.seconds)
                    self._nodes[number].start()
            case Kind.DELETE:
                async with self._server_turn:
                    agent = router.agents[stroke.target % len(router.agents)]
                    self._note(stroke, agent.name)
                    await self._delete_consumer(agent.durable_name(APP))

    async def ready(self) -> None:
        """Until all workers are. Raises `ShortfallError` where one takes too long, or has ended."""
        with anyio.move_on_after(READY_SECONDS):
            while not all(place.worker.is_ready() for place in self.places):
                for place in self.places:
                    place.worker.child.check_alive()
                await anyio.sleep(CHECK_SECONDS)
            return
        said = "; ".join(f"{place.name}: {place.worker.ask('/readyz')[1]}" for place in self.places)
        raise ShortfallError(f"not all workers are ready after {READY_SECONDS:.0f} s: {said}")

    async def end(self) -> None:
        """Tell all workers to stop, and have them end in order."""
        for place in self.places:
            place.send(signal.SIGTERM)
        for place in self.places:
            with self._noting_problems():
                await place.ended()

    async def _strike_worker(self, place: Place, stroke: Stroke) -> None:
        with self._noting_problems():
            place.worker.child.check_alive()
            match stroke.kind:
                case Kind.PAUSE:
                    place.send(signal.SIGSTOP)
                    await anyio.sleep(stroke.seconds)
                    place.send(signal.SIGCONT)
                    return
                case Kind.TERMINATE if place.has_begun:
                    place.send(signal.SIGTERM)
                    await place.ended()
                case _:
                    place.worker.child.kill()
        await anyio.sleep(stroke.seconds)
        place.start()

    def note(self, problem: str) -> None:
        self.problems.append(problem)
        console.print(f"wrong: {problem}")

    @contextmanager
    def _noting_problems(self) -> Iterator[None]:
        try:
            yield
        except (ShortfallError, AvisoWorkersError) as error:
            self.note(str(error))

    async def _delete_consumer(self, name: str) -> None:
        with suppress(nats.errors.Error):  # it was not recreated since the last time
            async with await nats.connect([node.url for node in self._nodes]) as client:
                await client.jetstream().delete_consumer(STREAM, name)

    def _note(self, stroke: Stroke, target: str) -> None:
        self.done[stroke.kind] += 1
        console.print(f"{time.monotonic() - self._begun:6.1f} s  {stroke.kind.value} {target}".rstrip())


class Account(Struct, frozen=True, kw_only=True):
    """What became of the notifications with one agent, by number."""

    agent: str
    lanes: set[int] | None
    """The lanes of which it must have all; None: of all lanes."""
    handled: Counter[int]
    dead_lettered: dict[int, str]
    """Why each dead letter is one."""

    def lost(self, published: dict[int, Deed]) -> list[int]:
        return [
            number
            for number in published
            if number not in self.handled
            and number not in self.dead_lettered
            and (self.lanes is None or number % LANES in self.lanes)
        ]

    def repeated(self) -> set[int]:
        return {number for number, times in self.handled.items() if times > 1}


async def account(client: App, deployment: Deployment, *, mixed: bool) -> list[Account]:
    """Raises `BackendError`."""
    lanes: dict[str, set[int] | None] = dict.fromkeys(agent.name for agent in router.agents)
    lanes |= versions.WANTED if mixed else {}
    dead_lettered: dict[str, dict[int, str]] = {name: {} for name in lanes}
    async for dead_letter in StoredDeadLetters(client.session.admin, events=client.events).select(Selection(app=APP)):
        number = int(dead_letter.original.subject.rpartition(".")[2])
        dead_lettered[dead_letter.agent][number] = dead_letter.reason
    handled = deployment.handled()
    if mixed:
        open_now = await versions.open_numbers(client.session.backend, APP, EVENT)
        handled[versions.WINDOWS] = versions.numbers_in_windows(deployment.windows) + Counter(open_now)
    return [
        Account(agent=name, lanes=lanes[name], handled=handled.get(name, Counter()), dead_lettered=dead_lettered[name])
        for name in lanes
    ]


async def settled(client: App, chaos: Chaos, published: dict[int, Deed]) -> str:
    """Wait until every agent is done with everything; else what is left when nothing happens any more."""
    handled, since, left = -1, time.monotonic(), "not asked yet"
    while left and time.monotonic() < since + STILL_SECONDS:
        await anyio.sleep(1.0)
        before = left
        try:
            accounts = await account(client, chaos.deployment, mixed=chaos.mixed)
            left = ", ".join([f"{len(lost)} of {a.agent}" for a in accounts if (lost := a.lost(published))])
            left = left or await _lag(client)
        except BackendError as error:
            left = str(error)
        now = sum(numbers.total() for numbers in chaos.deployment.handled().values())
        if now > handled or left != before:  # windows that count what was published have handled nothing yet
            handled, since = now, time.monotonic()
    return left


async def _lag(client: App) -> str:
    lag = list[str]()
    for agent in router.agents:
        info = await client.session.backend.consumer_info(STREAM, agent.durable_name(APP))
        if info.num_pending or info.num_ack_pending:
            lag.append(f"{agent.name}: {info.num_pending} pending, {info.num_ack_pending} not settled")
    return "; ".join(lag)


async def conduct(chaos: Chaos, *, seed: int, seconds: float, rate: float) -> bool:
    """Return whether nothing was lost and nothing else was wrong. Raises `ShortfallError` where it cannot go on."""
    async with chaos.deployment.client() as client:
        publisher = Publisher(client, rate=rate, seed=seed)
        await chaos.ready()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publisher.run)
            started = anyio.current_time()
            for stroke in plan(seed, duration_seconds=seconds):
                await anyio.sleep_until(started + stroke.at)
                tasks.start_soon(chaos.strike, stroke)
            await anyio.sleep_until(started + seconds)
            publisher.stop.set()
        console.print(f"{len(publisher.stored):,} published; until they are done:")
        await chaos.ready()
        if left := await settled(client, chaos, publisher.stored):
            chaos.note(f"nothing happens any more, and there is still: {left}")
        await chaos.end()
        return report(await account(client, chaos.deployment, mixed=chaos.mixed), publisher, chaos)


def report(accounts: list[Account], publisher: Publisher, chaos: Chaos) -> bool:
    """Show what was done and what became of it; whether that is as it should be."""
    strokes = Table("stroke", "times")
    for kind in Kind:
        strokes.add_row(kind.value, f"{chaos.done[kind]}")
    console.print(strokes)
    published = publisher.stored
    table = Table("agent", "published", "handled", "more than once", "dead letters", "lost")
    for each in accounts:
        counts = (published, each.handled, each.repeated(), each.dead_lettered, each.lost(published))
        table.add_row(each.agent, *(f"{len(count):,}" for count in counts))
    console.print(table)

    for name, lines in chaos.deployment.strays().items():
        chaos.note("\n  ".join([f"{name} wrote:", *lines]))
    for problem in versions.wrong_windows(chaos.deployment.windows):
        chaos.note(problem)
    for each in accounts:
        if lost := each.lost(published):
            chaos.note(f"{each.agent} has lost {_numbers(lost)}")
        if doomed := [number for number in each.dead_lettered if number in published and not published[number].fails]:
            reasons = ", ".join({each.dead_lettered[number] for number in doomed})
            chaos.note(f"{each.agent} has given up what does not fail ({reasons}): {_numbers(doomed)}")
    for why, times in publisher.failed.items():
        console.print(f"{times:,} were not acknowledged and are not counted: {why}")
    handled = set(published).intersection(*(each.handled for each in accounts if each.lanes is None))
    repeated = set[int]().union(*(each.repeated() for each in accounts))
    dead_lettered = set[int]().union(*(each.dead_lettered for each in accounts))
    nothing_lost = not any(each.lost(published) for each in accounts)
    console.print(
        f"{'nothing lost' if nothing_lost else 'lost'}: {len(published):,} published, {len(handled):,} handled, "
        f"{len(repeated):,} handled more than once, {len(dead_lettered):,} dead letters"
    )
    return not chaos.problems


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/chaos", description="Disturb workers, and count what is lost.")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="default: a random one")
    parser.add_argument("--duration", type=float, default=60.0, help="seconds of chaos (default: 60)")
    parser.add_argument("--servers", type=int, choices=(1, 3), default=1, help="how many servers (default: 1)")
    parser.add_argument("--workers", type=int, default=3, help="worker processes (default: 3)")
    parser.add_argument("--rate", type=float, default=100.0, help="notifications a second (default: 100)")
    parser.add_argument("--mixed", action="store_true", help="workers of two versions, with other filters and names")
    wanted = parser.parse_args()
    if wanted.mixed and wanted.workers < len(versions.VERSIONS):
        parser.error(f"--mixed needs {len(versions.VERSIONS)} workers or more")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    console.print(f"seed {wanted.seed}")
    directory, good = Path(tempfile.mkdtemp(prefix="aviso-workers-chaos-")), False
    try:
        with ExitStack() as stack:
            stack.callback(_ignore_signals)
            chaos = Chaos(directory, workers=wanted.workers, servers=wanted.servers, mixed=wanted.mixed, stack=stack)
            good = anyio.run(lambda: conduct(chaos, seed=wanted.seed, seconds=wanted.duration, rate=wanted.rate))
    except (ShortfallError, AvisoWorkersError) as error:
        console.print(f"fell short: {error}")
    except KeyboardInterrupt:
        console.print("interrupted")
        shutil.rmtree(directory)
        return 130
    if not good:
        console.print(f"the logs stay in {directory}")
        return 1
    shutil.rmtree(directory)
    return 0


def _ignore_signals() -> None:
    # What has been started is reaped now, and a second Ctrl-C must not keep us from it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _numbers(numbers: list[int]) -> str:
    more = f" and {len(numbers) - SHOWN:,} more" if len(numbers) > SHOWN else ""
    return ", ".join(map(str, sorted(numbers)[:SHOWN])) + more


if __name__ == "__main__":
    sys.exit(main())
