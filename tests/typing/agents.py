"""Agents in each call form, and what their handlers return."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, timedelta
from typing import Any, TypedDict, assert_type

import msgspec
from pydantic import BaseModel

from aviso_workers import (
    Ack,
    Agent,
    App,
    Batch,
    Batching,
    GivenUp,
    Notification,
    Notify,
    Rate,
    Reject,
    Retry,
    RetryPolicy,
    Router,
    Slots,
    Stream,
    Window,
    Windowing,
)

FOREVER = RetryPolicy(attempts=None)


class Field(msgspec.Struct):
    location: str
    size: int = 0


def listed(values: list[int], notification: Notification[Field]) -> list[int]:
    return [*values, notification.payload.size]


def by_location(values: dict[str, int], notification: Notification[Field]) -> dict[str, int]:
    return values | {notification.payload.location: notification.payload.size}


assert_type(Windowing(size="1h", fold=listed, initial=[]), Windowing[list[int], Field])
assert_type(Windowing(size="1h", fold=by_location, initial={}), Windowing[dict[str, int], Field])
Windowing(size="1h", fold=listed, initial=())  # type: ignore[arg-type]  # pyright: ignore


class Database:
    async def insert(self, step: str, location: str) -> None: ...


class Session:
    name = ""


class Options(msgspec.Struct, frozen=True):
    limit: int = 10


app = App("typed")
router = Router("fields", settings=Options)
totals = app.table("totals", int, default=0)


@app.resource
async def database() -> AsyncIterator[Database]:
    yield Database()


@app.resource
def options() -> Options:
    return Options()


@app.resource(scope="call")
async def session(database: Database, notification: Notification[Any]) -> AsyncIterator[Session]:
    yield Session()


assert_type(options(), Options)


@app.around
async def measure(notification: Notification[Any], database: Database) -> AsyncIterator[None]:
    assert_type(notification.num_delivered, int)
    yield


@app.around(agents=["index"])
async def log(notification: Notification[Field]) -> AsyncGenerator[None, None]:
    assert_type(notification.payload, Field)
    yield


@app.agent("mars", where={"class": "od", "step": {"gte": 24}}, concurrency=4, retry=RetryPolicy(attempts=3))
async def index(notification: Notification[Field], database: Database, session: Session) -> None:
    assert_type(session.name, str)
    assert_type(notification.payload, Field)
    assert_type(notification.time, datetime)
    assert_type(notification.sequence, int)
    await database.insert(notification.identifier["step"], notification.payload.location)


@app.agent("mars", order_by=["date", "step"], start=datetime(2026, 1, 1, tzinfo=UTC))
async def derive(notification: Notification[dict[str, int]]) -> Notify | None:
    assert_type(notification.payload, dict[str, int])
    return Notify("products", {"step": 1}) if notification.payload else None


@app.agent("mars")
@app.agent("products", name="index_products")
async def bare(notification: Notification) -> None:
    assert_type(notification.payload, Any)


class Ride(BaseModel):
    vendor: int


@app.agent("rides")
async def ride(notification: Notification[Ride]) -> Notify:
    assert_type(notification.payload, Ride)
    return Notify("products", {"step": 1}, notification.payload)


@app.agent("raw")
async def body(notification: Notification[bytes]) -> None:
    assert_type(notification.payload, bytes)


def from_bytes(data: bytes) -> Database:
    return Database()


@app.agent("raw", name="decoded", decode=from_bytes)
async def decoded(notification: Notification[Database]) -> None:
    assert_type(notification.payload, Database)


class FieldKey(msgspec.Struct):
    date: date
    step: int


class StepKey(TypedDict):
    step: int


@app.agent("mars")
async def typed(notification: Notification[Field, FieldKey]) -> Notify:
    assert_type(notification.key, FieldKey)
    assert_type(notification.key.step + 1, int)
    assert_type(notification.identifier["step"], str)
    shared(notification)
    await totals.update("all", lambda total: total + 1, once=notification)
    return Notify("products", {"date": notification.key.date, "step": notification.key.step + 1})


def shared(notification: Notification[Field]) -> None:
    assert_type(notification.payload, Field)
    assert_type(notification.key, Any)


@app.agent("mars")
async def typed_batch(batch: Batch[Field, StepKey]) -> None:
    for notification in batch:
        assert_type(notification, Notification[Field, StepKey])
        assert_type(notification.key["step"], int)
        batch.ack(notification)


@app.agent("mars")
async def typed_stream(stream: Stream[Field, FieldKey]) -> None:
    async for groups in stream.filter(lambda one: one.key.step > 0).group_by(lambda one: one.key.date):
        assert_type(groups, dict[date, list[Notification[Field, FieldKey]]])


def latest(step: int, notification: Notification[Field, FieldKey]) -> int:
    return max(step, notification.key.step)


@app.agent("mars", window=Windowing(size="1h", fold=latest, initial=0))
async def latest_steps(window: Window[int]) -> None:
    assert_type(window.value, int)


class Counting:
    async def handle(self, notification: Notification[Field], database: Database) -> None: ...


app.agent("mars", name="counting")(Counting().handle)


@app.agent("mars")
async def each(notification: Notification[Any]) -> AsyncIterator[Notify | Retry]:
    yield Notify("products", {"step": 1}, {"n": 1})
    if notification.num_delivered > 1:
        yield Retry(after=60)


@app.agent("mars")
async def many(notification: Notification[Field]) -> list[Notify]:
    return [Notify("products", {"step": number}) for number in range(notification.payload.size)]


@app.agent("mars", singleton=True)
async def verdict(notification: Notification[Field]) -> Retry | Reject | None:
    if not notification.payload.location:
        return Reject("it has no location")
    return Retry(after=30) if notification.payload.size == 0 else None


@router.agent("mars", timeout=30)
def in_a_thread(notification: Notification[Field]) -> None:
    assert_type(notification.payload.size, int)


@router.around
async def measure_batches(batch: Batch[Any]) -> AsyncIterator[None]:
    assert_type(len(batch), int)
    yield


@router.around(agents=["sums"])
async def measure_windows(window: Window[int]) -> AsyncIterator[None]:
    assert_type(window.value, int)
    yield


async def that_does_not_yield(notification: Notification[Any]) -> None: ...


async def of_a_stream(stream: Stream[Any]) -> AsyncIterator[None]:
    yield


async def refused() -> None:
    """What no type checker lets through, and no declaration."""
    app.around(that_does_not_yield)  # type: ignore[type-var]
    app.around(of_a_stream)  # type: ignore[type-var]
    app.resource(scope="notification")  # type: ignore[call-overload]


@router.agent("mars", batch=Batching(size=500, within=1.0))
async def load(batch: Batch[Field]) -> None:
    for notification in batch:
        assert_type(notification, Notification[Field])
        if notification.payload.size:
            batch.ack(notification)
        else:
            batch.retry(notification, after=60)
    assert_type(len(batch), int)


@router.agent("mars")
async def follow(stream: Stream[Field]) -> None:
    async for notification in stream.filter(lambda one: one.payload.size > 0):
        assert_type(notification, Notification[Field])


@router.agent("mars")
async def follow_lists(stream: Stream[Field]) -> AsyncIterator[Notify]:
    async for taken in stream.take(100, within=5.0):
        assert_type(taken, list[Notification[Field]])
        yield Notify("products", {"step": len(taken)})


def add(total: int, notification: Notification[Field]) -> int:
    return total + notification.payload.size


hourly = Windowing(size="1h", every="15m", fold=add, initial=0, lateness="10m", time=lambda one: one.time)
assert_type(hourly, Windowing[int, Field])


@router.agent("mars", window=hourly)
async def sums(window: Window[int]) -> Notify:
    assert_type(window.value, int)
    assert_type(window.start, datetime)
    return Notify("sums", {"date": window.start}, {"bytes": window.value})


@router.agent("mars", window=hourly)
async def sums_kept(window: Window[int], database: Database) -> None:
    await database.insert(window.key, str(window.value))


async def so_far(app: App) -> None:
    for window in await app.open_windows(sums, "od"):
        assert_type(window, Window[int])
    assert_type(await app.open_windows(sums_kept), list[Window[int]])


@index.on_error(ConnectionError, TimeoutError)
def later(error: Exception) -> Retry:
    return Retry(after=60)


class CatalogueError(Exception):
    seconds: int = 3


@index.on_error(CatalogueError)
def wait(error: CatalogueError) -> Retry | None:
    return Retry(after=error.seconds)


@index.on_error(CatalogueError, OSError)
def skip(error: CatalogueError | OSError) -> Ack | None: ...


@index.on_error(CatalogueError, OSError, KeyError)
def give_up(error: CatalogueError | OSError | KeyError) -> Reject:
    return Reject(str(error))


@index.on_error(ValueError, OSError, KeyError, CatalogueError)
def wait_again(error: Exception) -> Retry:
    return Retry(after="1m", counts=False)


@index.on_error(OSError)  # type: ignore[arg-type]
def of_another_error(error: ValueError) -> Ack:  # pyright: ignore
    return Ack()


@index.on_error(ValueError)
def decide(error: Exception) -> Reject | Ack | None:
    return Reject(str(error)) if "forever" in str(error) else Ack()


@index.on_dead_letter
async def compensate(given_up: GivenUp[Field]) -> Notify:
    assert_type(given_up.notification, Notification[Field | bytes, Any | None])
    assert_type((given_up.reason, given_up.attempts, given_up.error), tuple[str, int, str])
    return Notify("undone", given_up.notification.identifier)


@many.on_dead_letter
def compensate_in_a_thread(given_up: GivenUp[Any]) -> list[Notify]:
    return [Notify("undone", given_up.notification.identifier)]


@derive.on_dead_letter
async def compensate_each(given_up: GivenUp[Field, FieldKey]) -> AsyncIterator[Notify]:
    assert_type(given_up.notification.key, FieldKey | None)
    yield Notify("undone", {})


@in_a_thread.on_dead_letter  # type: ignore[type-var]
def of_another_argument(given_up: str) -> None: ...  # pyright: ignore


app.include(router, prefix="fields", config={"limit": 20})

agents: list[Agent[Any, Any]] = [index, in_a_thread, *router.agents]


async def call_an_agent(notification: Notification[Field]) -> None:
    """An agent is called as the function that it was made of, as a unit test does it."""
    assert_type(await many(notification), list[Notify])
    assert_type(await verdict(notification), Retry | Reject | None)
    assert_type(await index(notification, Database(), Session()), None)
    async with asynccontextmanager(log)(notification):
        in_a_thread(notification)
    await index(notification)  # type: ignore[call-arg]
    in_a_thread("no notification")  # type: ignore[arg-type]
    await load(Batch([notification]))


@app.agent("mars", limits=[Rate(100, per="1m", by=["class"]), Rate(10, 1), Slots(1)])
async def limited(notification: Notification[Field]) -> None: ...


catalogue = app.dependency("catalogue", unavailable=[OSError], patience="2h", by=["class"])


@app.agent("mars", depends_on=catalogue)
async def depending(notification: Notification[Field]) -> None:
    away: bool = catalogue.is_away
    since: datetime | None = catalogue.since
    if catalogue.reason and away and since:
        catalogue.reset()
    catalogue.trip("maintenance", after=timedelta(hours=1))


def refused_dependency() -> None:
    app.agent("mars", depends_on="catalogue")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def refused_limits() -> None:
    assert_type(Rate(100, per="1m").per, timedelta)
    Rate(100)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Slots(1, ["class"])  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    app.agent("mars", limits=Slots(1))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    app.agent("mars", rate_limit=10)  # type: ignore[call-arg]  # pyright: ignore[reportArgumentType]
