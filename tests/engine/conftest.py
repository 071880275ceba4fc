"""The engine at work in memory, in a time of its own: where nothing more can happen now, the next timer falls due."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

import anyio
import pytest

from aviso_workers import Agent, Notify, Receipt, Router, config
from aviso_workers.aviso.schema import EventType, IntHandler, StringHandler, Topic
from aviso_workers.backends import Message
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.config import Config, NotificationBackend, streams
from aviso_workers.events import AgentDisturbed, AgentStarted, Event, Events
from aviso_workers.sessions.session import Session

E = TypeVar("E", bound=Event)

A_LONG_TIME = 86_400.0
"""Seconds after which a test takes what it waits for as never coming; they cost nothing."""

MARS = EventType(
    topic=Topic(base="mars", key_order=("class", "step")),
    identifier={"class": StringHandler(required=True), "step": IntHandler(required=True, range=(0, 1000))},
)


class AutojumpLoop(asyncio.SelectorEventLoop):
    """An event loop that does not wait for timers: its clock jumps to the next one when all tasks are at rest."""

    def __init__(self) -> None:
        self._now_ns = 0
        """Every jump moves it. A sum of fractions may stop just before a deadline, and one more may not change it."""
        super().__init__(AutojumpSelector(self._jump))

    def time(self) -> float:
        return self._now_ns / 1e9

    def _jump(self, seconds: float) -> None:
        self._now_ns += max(1, round(seconds * 1e9))
        assert self.time() < 10 * A_LONG_TIME, "what the test waits for does not come"


class AutojumpSelector(selectors.DefaultSelector):
    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0 if timeout is not None else 1.0)
        if not ready:
            assert timeout is not None, "nothing will ever happen any more"
            self._jump(timeout)
        return ready


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"loop_factory": AutojumpLoop}


@pytest.fixture
async def backend() -> AsyncGenerator[InMemoryBackend, None]:
    """Several notifications of a topic are kept, so that a test may use one topic for many."""
    async with InMemoryBackend(config.InMemory(max_history_per_topic=1000)) as backend:
        yield backend


@pytest.fixture
def settings() -> Config:
    return config_with()


def config_with(*, drain_timeout_seconds: float = 30.0, event_type: EventType = MARS, **jetstream: Any) -> Config:
    return Config(
        notification_backend=NotificationBackend(kind="in_memory", jetstream=config.JetStream(**jetstream)),
        notification_schema={"mars": event_type},
        workers=config.Workers(drain_timeout_seconds=drain_timeout_seconds),
    )


class Facts:
    """What the engine has stated so far."""

    def __init__(self) -> None:
        self.events = Events()
        self.events.listen(self._note)
        self._stated: list[Event] = []
        self._changed = anyio.Event()

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self._stated if isinstance(event, kind)]

    async def wait_for(self, kind: type[E], count: int = 1) -> list[E]:
        """All of a kind, once there are `count`."""
        with anyio.move_on_after(A_LONG_TIME):
            while len(self.of(kind)) < count:
                self._changed = anyio.Event()
                await self._changed.wait()
        found = self.of(kind)
        assert len(found) >= count, f"waited for {count} {kind.__name__}, found {self._stated}"
        return found

    def _note(self, event: Event) -> None:
        if isinstance(event, AgentStarted | AgentDisturbed) and event.stream != "MARS":
            return  # every agent also reads the retries
        self._stated.append(event)
        self._changed.set()


@pytest.fixture
def facts() -> Facts:
    return Facts()


@pytest.fixture
def session(backend: InMemoryBackend, settings: Config, facts: Facts) -> Session:
    return Session(backend, app="tests", config=settings, events=facts.events)


@pytest.fixture
def router() -> Router:
    return Router("tests")


@pytest.fixture
def notify(session: Session) -> NotifyStep:
    """`await notify(6, {"location": "here"})`: a notification of step 6."""

    async def notify(step: int, payload: Any = None) -> Receipt:
        return await session.publisher.notify(Notify("mars", {"class": "od", "step": step}, payload))

    return notify


@pytest.fixture
def make_stream(session: Session, settings: Config) -> Callable[[], Awaitable[None]]:
    """`await make_stream()`: the stream of the event type mars, as whoever publishes makes it."""
    spec = streams.event_stream("mars", settings.notification_schema["mars"], settings)
    return lambda: session.provisioner.ensure(spec)


@pytest.fixture
def store(make_stream: Callable[[], Awaitable[None]], backend: InMemoryBackend) -> Store:
    """`await store("mars.od.6", b"...")`: a message that somebody else has published."""

    async def store(subject: str, data: bytes, headers: dict[str, str] | None = None) -> None:
        await make_stream()
        message = Message(subject=subject, data=data, headers=headers)
        await backend.publish(message, message_id=f"{subject} {hash(data)}", stream="MARS", timeout_seconds=1.0)

    return store


NotifyStep = Callable[..., Awaitable[Receipt]]
Store = Callable[..., Awaitable[None]]
Stored = Callable[[str], Awaitable[list[Message]]]
Working = Callable[[Agent[Any, Any]], AbstractAsyncContextManager[anyio.Event]]


@pytest.fixture
def working(session: Session) -> Working:
    """`async with working(agent) as stop`: a worker runs the agent; set `stop`, or leave, and it drains."""

    @asynccontextmanager
    async def working(agent: Agent[Any, Any]) -> AsyncIterator[anyio.Event]:
        stop = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.run_agent, agent, stop)
            yield stop
            stop.set()

    return working


@pytest.fixture
def stored(backend: InMemoryBackend) -> Stored:
    """`await stored("MARS")`: what a stream holds."""

    async def stored(stream: str) -> list[Message]:
        last = (await backend.stream_info(stream)).last_sequence
        return [message async for message in backend.read(stream, filter_subjects=(), last_sequence=last)]

    return stored
