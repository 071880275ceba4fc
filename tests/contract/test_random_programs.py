"""Random programs of publishes, failures, deaths of workers, deploys, lost connections, pauses, resets and retries of
dead letters, for an app that orders, batches, publishes, delays, and counts in a table and in windows. At the end of
each, nothing is lost and nothing counts twice. On either backend; in memory, where time is virtual, with many programs.

`--minutes 10` runs new programs for so long. A program that fails is printed: keep it in `KEPT`.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from aviso_workers import App, Batch, Batching, Notification, Notify, RetryPolicy, Table, Window, Windowing
from aviso_workers.aviso.positions import Position
from aviso_workers.errors import NotFoundError
from aviso_workers.ops import agent_control
from aviso_workers.ops.dead_letters import Selection, StoredDeadLetters
from aviso_workers.server import NatsServer
from aviso_workers.testing import Harness, harness

ATTEMPTS = 3
KEYS = 3
AGENTS = ("ordered", "batched", "publishing")
"""Those that fail as often as a notification says. The fourth, `windowed`, never fails."""
MANY, FEW = 60, 2
"""Programs in memory and on a server, without `--minutes`."""
EACH_ROUND = 40
REAL_PATIENCE_SECONDS = 30.0

Step = tuple[str, Any]


class Program(NamedTuple):
    """Steps, one after the other, and how many workers there are."""

    workers: int
    steps: list[Step]

    def has(self, *names: str) -> bool:
        return any(name in names for name, _ in self.steps)


def named(name: str, argument: st.SearchStrategy[Any] | None = None) -> st.SearchStrategy[Step]:
    return st.tuples(st.just(name), st.none() if argument is None else argument)


PUBLISH = named("publish", st.tuples(st.integers(0, KEYS - 1), st.sampled_from([0, 0, 0, 1, 2, 3, 4, 7])))
"""Its key, and how many runs of each agent fail for it."""
STEPS = st.one_of(
    *[PUBLISH] * 5,
    named("advance", st.sampled_from([0.1, 1.0, 4.0])),
    named("settle"),
    named("crash", st.integers(0, 1)),
    named("deploy"),
    named("disconnect", st.sampled_from([0.5, 3.0])),
    named("pause", st.sampled_from([*AGENTS, "windowed"])),
    named("reset", st.sampled_from([*AGENTS, "windowed"])),
    named("retry"),
)
PROGRAMS = st.builds(Program, st.integers(1, 2), st.lists(STEPS, min_size=3, max_size=20))

KEPT: list[Program] = []
"""Programs that have failed, run each time."""
ON_A_SERVER = [
    Program(
        2,
        [
            *[("publish", (0, 0)), ("publish", (0, 2)), ("publish", (0, 0)), ("publish", (1, 3)), ("publish", (2, 0))],
            *[("crash", 0), ("publish", (0, 1)), ("settle", None), ("retry", None), ("deploy", None)],
            *[("publish", (1, 0)), ("pause", "ordered"), ("publish", (1, 4)), ("crash", 1), ("publish", (1, 0))],
        ],
    ),
    Program(
        1,
        [
            *[("publish", (0, 7)), ("publish", (0, 0)), ("publish", (1, 0)), ("settle", None), ("retry", None)],
            *[("reset", "batched"), ("publish", (0, 1)), ("deploy", None), ("publish", (2, 2)), ("reset", "windowed")],
            *[("publish", (2, 0)), ("crash", 0), ("publish", (0, 0)), ("advance", 1.0), ("retry", None)],
        ],
    ),
]


class PlannedError(Exception):
    """The failure that a notification asks for."""


class Ledger:
    """What has happened, as the agents' own code saw it."""

    def __init__(self) -> None:
        self.failed: Counter[tuple[str, int]] = Counter()
        """By agent and sequence: the runs that failed as planned."""
        self.cut_off: Counter[tuple[str, int]] = Counter()
        """The runs that ended otherwise, with their worker or for want of a connection."""
        self.retried: Counter[tuple[str, int]] = Counter()
        """The dead letters that were handed back."""
        self.done: list[tuple[str, str, int]] = []
        """Agent, key and sequence of each run that succeeded, in order."""
        self.windows: list[tuple[str, datetime, tuple[int, ...]]] = []
        """Key, start and sequences of each window that the function was run for."""

    @contextmanager
    def running(self, agent: str, notification: Notification[Any]) -> Iterator[None]:
        """A run, which fails at its end while its notification has failures left."""
        this = agent, notification.sequence
        try:
            yield
            if self.failed[this] < notification.payload["fails"]:
                self.failed[this] += 1
                raise PlannedError
        except PlannedError:
            raise
        except BaseException:
            self.cut_off[this] += 1
            raise
        self.done.append((agent, notification.identifier["k"], notification.sequence))


def make_app(ledger: Ledger, *, real: bool) -> tuple[App, Table[int]]:
    app = App("programs")
    for name in ("event", "derived", "delayed", "closed"):
        app.event_type(
            name,
            key=["k"],
            identifier={"k": {"type": "IntHandler", "required": True}},
            storage_policy={"allow_duplicates": True, "retention_time": "30d"},
        )
    sums = app.table("sums", int, default=0)
    first = 0.1 if real else 1.0
    stated: dict[str, Any] = {
        "retry": RetryPolicy(first=first, factor=1.5, max=2 * first, attempts=ATTEMPTS, jitter=0),
        "ack_wait": 1 if real else 5,
    }

    @app.agent("event", order_by=("k",), concurrency=4, **stated)
    async def ordered(notification: Notification[Any]) -> None:
        with ledger.running("ordered", notification):
            await sums.update(notification.identifier["k"], lambda total: total + 1, once=notification)

    @app.agent("event", batch=Batching(size=3, within=0.5), **stated)
    async def batched(batch: Batch[Any]) -> None:
        for notification in batch:
            try:
                with ledger.running("batched", notification):
                    pass
            except PlannedError:
                batch.retry(notification)

    @app.agent("event", concurrency=3, **stated)
    async def publishing(notification: Notification[Any]) -> AsyncIterator[Notify]:
        with ledger.running("publishing", notification):
            of = {"of": notification.sequence}
            yield Notify("derived", notification.identifier, of)
            yield Notify("delayed", notification.identifier, of, due=2 * first)

    @app.agent(
        "event",
        window=Windowing(
            size="1m",
            lateness="3m",
            idle="1s" if real else "10s",
            key=lambda notification: notification.identifier["k"],
            time=lambda notification: datetime.fromtimestamp(1.8e9 + 40 * notification.payload["number"], UTC),
            initial=[],
            fold=lambda sequences, notification: [*sequences, notification.sequence],
        ),
        **stated,
    )
    async def windowed(window: Window[list[int]]) -> Notify:
        ledger.windows.append((window.key, window.start, tuple(window.value)))
        return Notify("closed", {"k": window.key}, {"sequences": window.value})

    return app, sums


class Run:
    """A program that is run, and what is wrong afterwards."""

    def __init__(self, program: Program, *, url: str | None) -> None:
        self._program = program
        self._real = url is not None
        self._ledger = Ledger()
        self._app, self._sums = make_app(self._ledger, real=self._real)
        self._url = url
        self._published: dict[int, tuple[str, int]] = {}
        """By sequence: the key, and how many runs are to fail."""
        self._was_reset: set[str] = set()

    async def problems(self) -> list[str]:
        """Run the program, and return what is wrong at its end."""
        async with harness(self._app, server=self._url, workers=self._program.workers) as t:
            for step in self._program.steps:
                await self._take(t, *step)
            await t.settle(within_seconds=REAL_PATIENCE_SECONDS if self._real else None)
            if not self._real:
                await t.advance(20)
                await t.settle()
            found = [problem async for problem in self._found(t)]
            ends = time.monotonic() + REAL_PATIENCE_SECONDS
            while found and self._real and time.monotonic() < ends:  # what is delayed, and windows
                await anyio.sleep(0.3)
                found = [problem async for problem in self._found(t)]
            return found

    async def _take(self, t: Harness, name: str, argument: Any) -> None:
        match name:
            case "publish":
                key, fails = argument
                payload = {"fails": fails, "number": len(self._published)}
                receipt = await t.notify("event", {"k": key}, payload)
                self._published[receipt.sequence] = str(key), fails
            case "advance":
                await t.advance(argument / 10 if self._real else argument)
            case "settle":
                await t.settle(within_seconds=REAL_PATIENCE_SECONDS if self._real else None)
            case "crash":
                await t.crash(argument % self._program.workers)
            case "deploy":
                await t.stop()
                await t.start()
            case "disconnect" if not self._real:
                t.disconnect()
                await t.advance(argument)
                t.reconnect()
            case "pause" | "reset" | "retry":
                with suppress(NotFoundError):  # nothing was published yet
                    await self._steer(t, name, argument)

    async def _steer(self, t: Harness, name: str, agent: str) -> None:
        app, admin = self._app, self._app.session.admin
        if name == "retry":
            stored = StoredDeadLetters(admin, events=app.events)
            dead_letters = [each async for each in stored.select(Selection()) if each.agent in AGENTS]
            await stored.retry(*dead_letters)
            self._ledger.retried.update((each.agent, each.original.sequence) for each in dead_letters)
            return
        consumer = agent_control.declared(app, app.config, agent)
        if name == "pause":
            await agent_control.pause(admin, consumer, seconds=0.5)
            return
        await agent_control.reset(admin, await agent_control.plan_reset(admin, consumer, Position(sequence=1)))
        self._was_reset.add(agent)

    async def _found(self, t: Harness) -> AsyncIterator[str]:
        dead: defaultdict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
        for each in t.dead_letters:
            dead[each.agent, each.original.sequence].append((each.reason, each.attempts))
        for agent in AGENTS:
            for sequence in self._published:
                for problem in self._wrong_with(agent, sequence, dead[agent, sequence]):
                    yield f"{agent} of notification {sequence}, {self._published[sequence]}: {problem}"
        for problem in self._wrong_with_windows({sequence for agent, sequence in dead if agent == "windowed"}):
            yield problem
        for problem in self._wrong_with_order({sequence for agent, sequence in dead if agent == "ordered"}):
            yield problem
        for key in map(str, range(KEYS)):
            wanted = sum(each == key for each, _ in self._published.values())
            if (total := await self._sums.get(key)) != wanted:
                yield f"key {key} of the table is {total}, and not {wanted}"
        for event_type in ("derived", "delayed"):
            counts = Counter([each.payload["of"] for each in await self._stored(event_type)])
            if counts != Counter(self._published.keys()):
                yield f"{event_type}: {counts}, and not one of each"

    def _wrong_with(self, agent: str, sequence: int, dead: list[tuple[str, int]]) -> Iterator[str]:
        this = agent, sequence
        fails, failed, retried = self._published[sequence][1], self._ledger.failed[this], self._ledger.retried[this]
        done = self._ledger.done.count((agent, self._published[sequence][0], sequence))
        # A run whose worker dies before its failure is counted uses up a planned failure and no attempt.
        uncounted = self._program.has("crash", "disconnect") or agent in self._was_reset
        if not done and len(dead) <= retried:
            yield f"lost: neither handled nor a dead letter, failed {failed}, retried {retried}"
        if not self._ledger.cut_off[this] and any(each != ("attempts_exhausted", ATTEMPTS) for each in dead):
            yield f"dead letters {dead}"
        if uncounted or self._ledger.cut_off[this]:
            if fails < ATTEMPTS and dead and not (self._ledger.cut_off[this] or retried):
                yield f"a dead letter after {failed} failures"
            return
        if len(dead) != min(fails // ATTEMPTS, retried + 1):
            yield f"dead letters {dead}, retried {retried}"
        if done > 1 and not self._program.has("deploy"):
            yield f"handled {done} times"

    def _wrong_with_windows(self, late: set[int]) -> Iterator[str]:
        values: dict[tuple[str, datetime], tuple[int, ...]] = {}
        for key, start, value in self._ledger.windows:
            if values.setdefault((key, start), value) != value:
                yield f"the window {key} {start} has {values[key, start]} and {value}"
        counted = Counter(sequence for value in values.values() for sequence in value)
        for sequence in self._published:
            again = "windowed" in self._was_reset and sequence in late  # when its window was closed and had it
            if counted[sequence] + (sequence in late and not again) != 1:
                yield f"notification {sequence} is counted {counted[sequence]} times, late: {sequence in late}"

    def _wrong_with_order(self, dead: set[int]) -> Iterator[str]:
        """Order holds within one worker, for what is handled without having been a dead letter."""
        if self._program.workers > 1 or "ordered" in self._was_reset or self._program.has("disconnect"):
            return
        last: Counter[str] = Counter()
        seen: set[int] = set()
        for agent, key, sequence in self._ledger.done:
            if agent == "ordered" and sequence not in dead and sequence not in seen:
                seen.add(sequence)
                if sequence < last[key]:
                    yield f"key {key}: {sequence} was handled after {last[key]}"
                last[key] = max(last[key], sequence)

    async def _stored(self, event_type: str) -> list[Notification[Any]]:
        try:
            return [each async for each in self._app.replay(event_type, from_id=1)]
        except NotFoundError:
            return []


def run(program: Program, kind: str) -> None:
    """Run a program. Raises `AssertionError` with what is wrong at its end."""
    if not program.has("publish"):
        return
    if kind == "in_memory":
        found = anyio.run(Run(program, url=None).problems)
    else:
        with tempfile.TemporaryDirectory() as store_dir, NatsServer.start(store_dir=Path(store_dir)) as server:
            found = anyio.run(Run(program, url=server.url).problems)
    assert not found, f"{program!r}: {found[:5]}"


def run_random(kind: str, *, number: int, count: int) -> None:
    """Run `count` programs, always the same ones for a number."""

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink] if kind == "in_memory" else [Phase.generate],
    )
    @given(PROGRAMS)
    def check(program: Program) -> None:
        run(program, kind)

    check()


@pytest.mark.slow
def test_random_programs_lose_nothing_and_count_nothing_twice(kind: str, pytestconfig: pytest.Config) -> None:
    ends = time.monotonic() + 60 * pytestconfig.getoption("--minutes")
    if kind == "in_memory":
        run_random(kind, number=0, count=MANY)
    number = int(time.time())
    while time.monotonic() < ends:
        run_random(kind, number=number, count=EACH_ROUND if kind == "in_memory" else FEW)
        number += 1


@pytest.mark.parametrize("program", KEPT)
def test_a_program_that_has_failed_fails_no_more(program: Program) -> None:
    run(program, "in_memory")


@pytest.mark.slow
@pytest.mark.parametrize("program", ON_A_SERVER, ids=["deaths", "resets"])
def test_programs_lose_nothing_and_count_nothing_twice(kind: str, program: Program) -> None:
    run(program, kind)
