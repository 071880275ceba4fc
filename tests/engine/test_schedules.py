"""A hundred random schedules of failures, crashes, deploys, lost connections and clock jumps, against the contract.

The contract in short: no notification is lost, each is settled exactly once, as what its handler did says, and those
of one lane are handled in order. `Book` is the model: it sees what handlers did and what reached the backend, and
knows nothing of how the engine works. Everything happens in memory and in virtual time, so that a seed that fails
fails again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
from msgspec import Struct, structs

from aviso_workers import App, Batch, Batching, Notification, Reject, RetryPolicy, Stream
from aviso_workers.aviso.schema import StoragePolicy
from aviso_workers.backends.in_memory.consumer import InMemoryDelivery
from aviso_workers.config import Config, NotificationBackend
from aviso_workers.engine.acknowledging import STORE_AGAIN
from aviso_workers.events import Settled
from aviso_workers.testing import Harness, harness
from tests.engine.conftest import MARS, config_with

pytestmark = pytest.mark.anyio

SCHEDULES, EVERYDAY = 100, 8
"""How many there are, and how many of them are not marked `slow`."""
STEPS = 40
ATTEMPTS = 3
RETRY = RetryPolicy(first=1, factor=3, attempts=ATTEMPTS)
LANES = ("od", "rd", "ea")
AGENTS = ("one_by_one", "in_lanes", "in_batches", "as_stream")


class Deed(Struct, frozen=True, kw_only=True):
    """A notification's payload: what its handlers are to do."""

    seconds: float
    """How long each of their runs takes."""
    fails: int = 0
    """How many runs fail before one succeeds."""
    rejects: bool = False


class Step(Struct, frozen=True, kw_only=True):
    """One line of a schedule."""

    what: Literal["publish", "advance", "crash", "deploy", "disconnect"]
    seconds: float = 0.0
    lane: str = ""
    payload: Deed | str | None = None
    worker: int = 0

    def __str__(self) -> str:
        stated = {name: value for name, value in structs.asdict(self).items() if value and name != "what"}
        return " ".join([self.what, *(f"{name}={value}" for name, value in stated.items())])


class Schedule(Struct, frozen=True, kw_only=True):
    workers: int
    steps: list[Step]


def schedule_of(seed: int) -> Schedule:
    chance = random.Random(seed)
    workers = chance.choice((1, 1, 2))

    def step() -> Step:
        match chance.choices(("publish", "advance", "crash", "deploy", "disconnect"), (50, 30, 8, 6, 6))[0]:
            case "publish":
                return Step(what="publish", lane=chance.choice(LANES), payload=payload())
            case "crash":
                return Step(what="crash", worker=chance.randrange(workers))
            case "disconnect" if workers == 1:  # of several, two could work on one notification: at least once
                return Step(what="disconnect", seconds=chance.choice((0.5, 5, 60)))
            case "deploy":
                return Step(what="deploy")
            case _:
                return Step(what="advance", seconds=chance.choice((0.0, 0.1, 1, 1, 7, 25, 120)))

    def payload() -> Deed | str:
        seconds = chance.choice((0, 0, 0.5, 3, 45))
        return chance.choices(
            (
                Deed(seconds=seconds),
                Deed(seconds=seconds, fails=chance.randint(1, ATTEMPTS - 1)),
                Deed(seconds=seconds, fails=1000),
                Deed(seconds=seconds, rejects=True),
                "no deed",
            ),
            (50, 25, 12, 8, 5),
        )[0]

    return Schedule(workers=workers, steps=[step() for _ in range(STEPS)])


class Book:
    """What was published, what handlers did with it, and what of that reached the backend. By agent and sequence."""

    def __init__(self) -> None:
        self.published: dict[int, tuple[str, Deed | str]] = {}
        """By sequence: lane and payload."""
        self.failures: Counter[tuple[str, int]] = Counter()
        """Runs that have failed."""
        self.deaths: Counter[tuple[str, int]] = Counter()
        """How often the engine has said that its worker died while it ran alone. Each is a failed attempt."""
        self.successes: Counter[tuple[str, int]] = Counter()
        self.ended: Counter[tuple[str, int]] = Counter()
        """How often the engine has said that it is done with it."""
        self.settled: Counter[tuple[str, int]] = Counter()
        """How often the backend was told so."""
        self.unheard: Counter[tuple[str, int]] = Counter()
        """How often it was told so while there was no connection."""
        self.too_early: list[str] = []

    def hear(self, event: Any) -> None:
        if not isinstance(event, Settled):
            return
        key = event.agent, event.sequence
        self.deaths[key] += event.reason in ("WorkerDiedError", "worker_died")
        if event.outcome != "retried":
            self.ended[key] += 1

    def begin(self, agent: str, sequence: int) -> None:
        """In a lane nothing may begin before all that came earlier has ended."""
        lane, _ = self.published[sequence]
        for earlier, (its_lane, _) in self.published.items():
            if its_lane == lane and earlier < sequence and not self.ended[agent, earlier]:
                self.too_early.append(f"{agent}: {sequence} began before {earlier} of its lane {lane} had ended")

    def end(self, agent: str, sequence: int, deed: Deed) -> None:
        """Raises what the deed says."""
        if deed.rejects:
            raise Reject("as it was told to")
        if self.failures[agent, sequence] < deed.fails:
            self.failures[agent, sequence] += 1
            raise RuntimeError("as it was told to")
        self.successes[agent, sequence] += 1

    def mistakes(self, t: Harness, schedule: Schedule) -> Iterator[str]:
        """Where the contract was not kept."""
        if schedule.workers == 1:
            yield from self.too_early
        uncounted = sum(map(_uncounted, schedule.steps))
        crashes = sum(step.what in ("crash", "disconnect") for step in schedule.steps)
        for sequence, (_, payload) in self.published.items():
            for agent in AGENTS:
                key = agent, sequence
                deaths = self.deaths[key]
                dead_letters = [
                    (dead_letter.reason, dead_letter.attempts)
                    for dead_letter in t.dead_letters
                    if _is_of(dead_letter, key)
                ]
                if (found := self.settled[key]) != 1:
                    yield f"{agent}: {sequence} was settled {found} times"
                # What was not heard comes again, and is handled again by a worker that has not settled it.
                if not 1 <= (found := self.ended[key]) <= 1 + self.unheard[key]:
                    yield f"{agent}: {sequence} was said to be settled {found} times"
                if deaths > crashes:
                    yield f"{agent}: {sequence} is said to have ended its worker {deaths} times, not {crashes}"
                wanted = _letters(payload, deaths)
                if not any(_fits(dead_letters, one, uncounted) for one in wanted):
                    yield f"{agent}: {sequence} has the dead letters {dead_letters}, not one of {wanted}"
                if not dead_letters and not self.successes[key]:
                    yield f"{agent}: {sequence} was acked and never handled"
                most = _failures(payload)
                if not most - deaths <= self.failures[key] <= most + uncounted * bool(most):
                    yield f"{agent}: {sequence} failed {self.failures[key]} times, not {most}"


def _is_of(dead_letter: Any, key: tuple[str, int]) -> bool:
    return (dead_letter.agent, dead_letter.original.sequence) == key


def _fits(dead_letters: list[tuple[str, int]], wanted: list[tuple[str, int]], uncounted: int) -> bool:
    """Whether the dead letters are these. One that could not be stored at first has attempts more."""
    return [reason for reason, _ in dead_letters] == [reason for reason, _ in wanted] and all(
        least <= attempts <= least + uncounted for (_, attempts), (_, least) in zip(dead_letters, wanted, strict=True)
    )


def _letters(payload: Deed | str, deaths: int) -> list[list[tuple[str, int]]]:
    """Reason and attempts of each dead letter that there must be: one of these lists.

    A crash that keeps a failure from being counted leaves an attempt more, and a death takes one away.
    """
    exhausted = [[("attempts_exhausted", ATTEMPTS)], [("worker_died", ATTEMPTS)]]
    match payload:
        case str():
            return [[("undecodable", 1 + deaths)], *exhausted[:deaths]]
        case Deed(rejects=True):
            return [[("rejected", 1 + deaths)], *exhausted[:deaths]]
        case Deed(fails=fails) if fails >= ATTEMPTS:
            return exhausted[: 1 + deaths]
        case Deed(fails=fails) if fails + deaths >= ATTEMPTS:
            return [[], *exhausted]
        case _:
            return [[]]


def _failures(payload: Deed | str) -> int:
    return min(payload.fails, ATTEMPTS) if isinstance(payload, Deed) else 0


def _uncounted(step: Step) -> int:
    """How many failures of one notification a step may keep from being counted, or from being the last."""
    match step.what:
        case "crash" | "deploy":
            return 1
        case "disconnect":
            return 1 + int(step.seconds / STORE_AGAIN.first)
        case _:
            return 0


def app_of(book: Book, settings: Config) -> App:
    app = App("schedules", config=settings)
    app.events.listen(book.hear)

    @app.agent("mars", retry=RETRY, concurrency=2)
    async def one_by_one(notification: Notification[Deed]) -> None:
        await app.session.backend.clock.sleep(notification.payload.seconds)
        book.end("one_by_one", notification.sequence, notification.payload)

    @app.agent("mars", retry=RETRY, concurrency=2, order_by=("class",))
    async def in_lanes(notification: Notification[Deed]) -> None:
        book.begin("in_lanes", notification.sequence)
        await app.session.backend.clock.sleep(notification.payload.seconds)
        book.end("in_lanes", notification.sequence, notification.payload)

    @app.agent("mars", retry=RETRY, batch=Batching(size=3, within=0.5))
    async def in_batches(batch: Batch[Deed]) -> None:
        for notification in batch:
            await app.session.backend.clock.sleep(notification.payload.seconds)
            try:
                book.end("in_batches", notification.sequence, notification.payload)
            except RuntimeError:
                batch.retry(notification)
            except Reject as error:
                batch.reject(notification, error.reason)

    @app.agent("mars", retry=RETRY)
    async def as_stream(stream: Stream[Deed]) -> None:
        async for notification in stream:
            await app.session.backend.clock.sleep(notification.payload.seconds)
            book.end("as_stream", notification.sequence, notification.payload)

    return app


async def carry_out(step: Step, t: Harness, book: Book) -> None:
    match step.what:
        case "publish":
            assert step.payload is not None
            sequence = len(book.published) + 1
            book.published[sequence] = step.lane, step.payload  # before it can be handled
            receipt = await t.notify("mars", {"class": step.lane, "step": sequence}, step.payload)
            assert receipt.sequence == sequence
        case "advance":
            await t.advance(step.seconds)
        case "crash":
            await t.crash(step.worker)
        case "deploy":
            await t.stop()
            await t.start()
        case "disconnect":
            t.disconnect(step.worker)
            await t.advance(step.seconds)
            t.reconnect()


@contextmanager
def told(seed: int, schedule: Schedule) -> Iterator[None]:
    """Say with every failure what led to it."""
    try:
        yield
    except BaseException as error:
        steps = "\n  ".join(f"{number:2} {step}" for number, step in enumerate(schedule.steps, start=1))
        error.add_note(f"seed {seed}, workers {schedule.workers}:\n  {steps}")
        raise


@pytest.fixture
def anyio_backend() -> Any:
    return "asyncio"  # the harness brings its own time


@pytest.fixture
def settings() -> Config:
    kept = structs.replace(MARS, storage_policy=StoragePolicy(allow_duplicates=True))
    backend = NotificationBackend(kind="jetstream")  # which the harness plays: in_memory itself keeps one of each topic
    return structs.replace(config_with(event_type=kept), notification_backend=backend)


@pytest.fixture
def book(monkeypatch: pytest.MonkeyPatch) -> Book:
    """It looks on where deliveries are settled: what is told to the backend, and what of that gets there."""
    book, ack = Book(), InMemoryDelivery.ack

    def ack_in_the_book(delivery: InMemoryDelivery) -> None:
        agent = delivery._dispatcher.name.partition("__")[2].partition(" ")[0]
        counter = book.settled if delivery._reader.connection.ready else book.unheard
        counter[agent, delivery.message.sequence] += 1
        ack(delivery)

    monkeypatch.setattr(InMemoryDelivery, "ack", ack_in_the_book)
    return book


@pytest.mark.parametrize(
    "seed",
    [*range(EVERYDAY), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(EVERYDAY, SCHEDULES))],
)
async def test_the_contract_is_kept(seed: int, book: Book, settings: Config) -> None:
    schedule = schedule_of(seed)
    random.seed(seed)  # for the jitter of retries
    with told(seed, schedule):
        async with harness(app_of(book, settings), workers=schedule.workers) as t:
            for step in schedule.steps:
                await carry_out(step, t, book)
            await t.settle()
            mistakes = list(book.mistakes(t, schedule))
            assert not mistakes, "\n".join(["the contract was not kept:", *mistakes])
