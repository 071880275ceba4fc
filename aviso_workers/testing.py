"""An app under test: its agents at work without a server, on time that the test moves.

Authors use `harness`, and so do our own tests of the engine. The agents run as in a worker process, on a session of
their own; the app has another one, by which the test and the agents publish. Both are clients of one in-memory
backend. Its time stands still while nothing needs it. `settle` jumps from one wait to the next, and so does a call of
the app in which the test itself waits. While the author's own code runs, time passes as in reality, so that a timeout
ends what takes too long. With `server` all of it happens on a real nats-server, in real time.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from contextvars import ContextVar
from datetime import UTC, datetime
from inspect import isclass
from types import TracebackType
from typing import Any, cast

import anyio
from anyio.abc import TaskStatus
from anyio.lowlevel import checkpoint
from msgspec import Struct, structs

from aviso_workers.app import App
from aviso_workers.aviso import payloads
from aviso_workers.aviso.codec import Message, NotificationReader, is_reserved
from aviso_workers.aviso.literals import AnyDuration, seconds_of
from aviso_workers.aviso.notifications import Notification, Notify, Receipt
from aviso_workers.aviso.positions import parse_date
from aviso_workers.backends import (
    Admin,
    Consumer,
    Delivery,
    KeyValue,
    Noted,
    Opening,
    Outgoing,
    PubAck,
    StreamInfo,
    open_backend,
)
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.clocks import Clock, VirtualClock, at_rest
from aviso_workers.clocks import ScheduledCall as ClockTimer
from aviso_workers.config import Config, JetStream, streams
from aviso_workers.config.secrets import ServerUrls
from aviso_workers.config.settings import DEFAULT_URL
from aviso_workers.declare.agents import Agent, included
from aviso_workers.declare.batches import NotificationSource, Stream
from aviso_workers.declare.dependencies import Dependency, Unavailable
from aviso_workers.declare.resources import Resource, spelled
from aviso_workers.declare.tables import PROCESS, Table
from aviso_workers.declare.timers import Timer
from aviso_workers.declare.verdicts import GivenUp
from aviso_workers.declare.windows import Window
from aviso_workers.engine.calls import Opened, in_thread
from aviso_workers.engine.key_value import CachedKeyValue
from aviso_workers.errors import (
    AvisoWorkersError,
    BackendError,
    ConfigError,
    DeclarationError,
    NotFoundError,
    UnavailableError,
    UndecodableError,
    describe,
    text_of,
)
from aviso_workers.events import (
    AgentDisturbed,
    DeadLetterCallFailed,
    Event,
    Events,
    Overdue,
    Settled,
    TaskFailed,
    Ticked,
    WindowDone,
)
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.ops import agent_control, retried, timer_control
from aviso_workers.ops.agent_control import AgentConsumer
from aviso_workers.ops.dead_letters import StoredDeadLetters
from aviso_workers.sessions.session import Session, open_session
from aviso_workers.state import delayed_messages, own_streams, window_records
from aviso_workers.state.dead_letter_records import DeadLetter
from aviso_workers.state.orders import Decides
from aviso_workers.state.own_streams import DEAD_LETTERS, RETRIES

__all__ = ["DeadLetter", "Harness", "harness"]

VIRTUAL_PATIENCE_SECONDS = 3600.0
REAL_PATIENCE_SECONDS = 30.0
CODE_PATIENCE_SECONDS = 10.0
"""How long, in real time, one call of the author's code may take."""
ELSEWHERE = (
    *("token", "user", "password", "nkey_seed_file", "credentials_file", "tls", "domain"),
    *("replicas", "retention_policy", "stream_management"),
)
"""Settings that belong to another server than a test has."""
NAP_SECONDS = 0.001
READING = {
    *("api_prefix", "clock", "connection", "consume", "consumer_info", "consumer_names", "consumers", "count"),
    *("message", "read", "read_chunks", "stream_info", "stream_names", "streams", "subject_counts"),
}
"""The verbs of a backend that a worker has after it was ended. What it consumes then it cannot settle."""
MAX_TURNS = 20
"""Of the event loop, which a request of one of several workers may take longer than another."""
CHECK_SECONDS = 0.05
_WITHIN_CODE: ContextVar[bool] = ContextVar("within_code", default=False)
_IN_HARNESS: ContextVar[bool] = ContextVar("in_harness", default=False)
"""Whether a worker or the app's own connection runs this, and not the test."""


def harness(
    app: App,
    *,
    server: str | None = None,
    workers: int = 1,
    resources: Mapping[Any, Any] | None = None,
    start: datetime | None = None,
) -> Harness:
    """Return the app with its agents at work: `async with harness(app) as t:`.

    `server` is the URL of a real nats-server that is there for tests: it must not have the app's streams yet, and
    they are removed at the end. Without, no server is needed. `workers` is how many worker processes are played.
    `resources` has values for types that resources of the app give, as in `{AsyncClient: fake}`: these resources are
    not opened. Of the app's configuration everything counts but where and how safely streams are stored.

    `start` is the time, with a time zone, at which virtual time begins (default: now, so that it agrees with
    `datetime.now` until the test moves it). On a server, time is real and `start` has no effect.

    Raises `DeclarationError` where no resource of the app gives such a type, or `start` has no time zone.
    """
    if start is not None and start.utcoffset() is None:
        raise DeclarationError(f"harness: start={start!r} has no time zone: add one, as in tzinfo=UTC")
    declared = [resource.gives for resource in app.resources]
    for each in resources or {}:
        if each not in declared:
            raise DeclarationError(f"harness: no resource of app {app.name!r} gives {spelled(each)}")
    return Harness(app, server=server, workers=workers, resources=resources or {}, start=start)


class Harness:
    """See `harness`. Times are in seconds."""

    def __init__(
        self, app: App, *, server: str | None, workers: int, resources: Mapping[Any, Any], start: datetime | None
    ) -> None:
        self.app = app
        """The app, or what was deployed last."""
        self._resources = resources
        self.published: list[Notify] = []
        """The notifications that the agents and the test have published, in order, with canonical identifiers."""
        self.dead_letters: list[DeadLetter] = []
        """The dead letters, in order, without those that `retry_dead_letters` has handed back."""
        self._dead_lettered: set[tuple[str, int]] = set()
        """The sequences of what is stored as dead letters."""
        self._code = _Code()
        self._clock = None if server else _Clock(self._code, start=start or datetime.now(UTC))
        self._server = server
        self._versions: list[_Version] = []
        """The versions that run or have run; the last is that of `app`."""
        self._watch: Admin
        """A client that no `disconnect` concerns."""
        self._readers: dict[str, NotificationReader] = {}
        """By stream."""
        self._made: set[str] = set()
        """Streams that the app has made, or may have."""
        self._facts: list[Settled | Ticked | WindowDone] = []
        self._calls_failed: list[DeadLetterCallFailed] = []
        """The last failed calls of functions of `on_dead_letter` that the test was not told of."""
        self._disturbed: dict[str, Exception] = {}
        self._overdue: dict[str, Overdue] = {}
        """By message id, the delayed notifications that could not be stored."""
        self._count = workers
        self._random = random.Random(workers)
        """The same in each run, so that a test in virtual time ends as it has ended before."""
        self._workers: list[_Worker] = []
        self._tasks = anyio.create_task_group()
        self._connections = anyio.create_task_group()
        """Those of apps that were deployed, which end after the workers."""
        self._life: asyncio.Task[None]
        """Owns all that is open. A plugin of pytest may enter and leave the harness in two tasks, as a fixture."""
        self._open_now = anyio.Event()
        self._over = anyio.Event()
        self._no_workers = anyio.Event()
        self._entered_in: asyncio.Task[Any] | None = None
        self._block = anyio.CancelScope()
        """The test's own block, as far as it is in one task."""
        self._failure: BaseException | None = None
        """The error of a worker or task that should have gone on; raised where the test ends, which is at once."""

    @property
    def clock(self) -> Clock:
        """The clock of the agents and timers: `monotonic()` in seconds, `time_ns()` in nanoseconds since 1970."""
        return self._watch.clock

    async def notify(self, event_type: str, identifier: Mapping[str, Any], payload: Any = None) -> Receipt:
        """Publish a notification, as `App.notify` does."""
        return await self.app.notify(event_type, identifier, payload)

    async def settle(self, *, within_seconds: float | None = None) -> None:
        """Return when every notification of every agent is settled, none waits and none is held, and every window is
        done that is over by the time of the notifications.

        What is to be delivered later and is not due yet does not count, nor does what waits for an agent that is paused
        until `resume`.

        Time passes as far as needed, at most `within_seconds` (default: an hour; on a server, where it is real time,
        30 s). Raises `AssertionError`, which tells what is not settled and why, or for which dead letter a function of
        `on_dead_letter` has failed as often as it is called.
        """
        patience = VIRTUAL_PATIENCE_SECONDS if self._clock else REAL_PATIENCE_SECONDS
        if within_seconds is not None:
            patience = within_seconds
        deadline = self.clock.monotonic() + patience
        with self._moving():
            while await self._is_unsettled():
                self._raise_failure()
                if not await self._let_time_pass(deadline):
                    raise AssertionError("\n  ".join([f"not settled within {patience:g} s:", *await self._left()]))
        if self._clock is None:
            await self._catch_up()
        self._raise_failed_call()

    async def advance(self, time: AnyDuration) -> None:
        """Let so much time pass: a number of seconds, a text such as `10m`, or a timedelta. On a server this is a
        sleep. Raises `ValueError` for anything else."""
        seconds = _positive_seconds("advance", time)
        with self._moving():
            await (self._clock.advance(seconds) if self._clock else anyio.sleep(seconds))

    def fail(self, agent: Agent[Any, Any] | str, error: Exception, *, times: int = 1) -> None:
        """Let the agent's next calls raise this instead of calling its function (of a Stream: its next turns).

        Raises `TypeError` for what is not an exception.
        """
        if not isinstance(error, BaseException) and not (isclass(error) and issubclass(error, BaseException)):
            raise TypeError(f"fail takes an exception such as ConnectionError(), found {error!r:.100}")
        self._code.faults.setdefault(self._name(agent), deque()).extend([error] * times)

    @contextmanager
    def outage(self, of: Dependency | Agent[Any, Any] | str) -> Iterator[None]:
        """Let each call of the agents that depend on this, or of this agent, raise `Unavailable` instead of calling its
        function, until the block ends. A name is that of a dependency or of an agent.

        Raises `DeclarationError` where there is no such agent.
        """
        away = {each.name for each in self._agents() if (needed := each.policy.depends_on) and needed.is_of(of)}
        if not away:
            away = {self._known("dependency", of.name, ()) if isinstance(of, Dependency) else self._name(of)}
        self._code.away.update(away)
        try:
            yield
        finally:
            self._code.away.difference_update(away)

    def settled(self, agent: Agent[Any, Any] | str) -> list[Settled]:
        """Return how the agent's deliveries ended, in order."""
        name = self._name(agent)
        return [fact for fact in self._facts if isinstance(fact, Settled) and fact.agent == name]

    def outcomes(self, agent: Agent[Any, Any] | str) -> list[str]:
        """Return the same in one word each: `acked`, `retried` or `dead_lettered`."""
        return [fact.outcome for fact in self.settled(agent)]

    def ticks(self, timer: Timer[Any, Any] | str) -> list[Ticked]:
        """Return how the timer's ticks ended, in order; `advance` lets the time come for them."""
        name = self._timer_name(timer)
        return [fact for fact in self._facts if isinstance(fact, Ticked) and fact.timer == name]

    def windows(self, agent: Agent[Any, Any] | str) -> list[WindowDone]:
        """Return how the agent's runs for windows that are over ended, in order."""
        windowed_agents = [each for each in self._agents() if each.form is Window]
        name = self._known("agent of a Window", self._name(agent), windowed_agents)
        return self._windows_done(name)

    def _windows_done(self, agent: str) -> list[WindowDone]:
        return [fact for fact in self._facts if isinstance(fact, WindowDone) and fact.agent == agent]

    async def retry_dead_letters(self, *dead_letters: DeadLetter) -> list[DeadLetter]:
        """Hand these dead letters (default: all) back to their agents, as the command `dead-letters retry` does, and
        return them. They are tried anew, and are in `dead_letters` no more.

        Raises `ValueError` for one that is not in `dead_letters`, `BackendError`.
        """
        for each in dead_letters:
            if each not in self.dead_letters:
                raise ValueError(f"{each.sequence} is not the sequence of one of the dead letters")
        handed_back = list(dead_letters or self.dead_letters)
        await StoredDeadLetters(self._watch, events=Events()).retry(*handed_back)
        self.dead_letters[:] = [each for each in self.dead_letters if each not in handed_back]
        return handed_back

    async def retry(self, agent: Agent[Any, Any] | str, sequence: int | None = None) -> list[int]:
        """Have a notification that the agent retries, or (None) all of them, tried again now, as the command `agents
        retry` does. Return the sequences of those that are handled, once that is known of each, or 10 seconds have
        passed.

        Raises `NotFoundError` where it is not retried, `BackendError`, and `AssertionError` where no worker has ever
        read the agent's stream.
        """
        return await self._decide(agent, sequence, "retry")

    async def skip(self, agent: Agent[Any, Any] | str, sequence: int | None = None) -> list[int]:
        """Have a notification that the agent retries, or (None) all of them, become dead letters, as the command
        `agents skip` does. Return the sequences of those that are skipped; waits and raises as `retry` does.
        """
        return await self._decide(agent, sequence, "skip")

    async def _decide(self, agent: Agent[Any, Any] | str, sequence: int | None, decides: Decides) -> list[int]:
        consumer = self._consumer(agent)
        await self._until_read(consumer)
        for worker in self._workers:
            await worker.session.record_failures()
        asked = await retried.plan(self._watch, consumer, () if sequence is None else (sequence,), decides)
        await retried.decide(self._watch, consumer, asked)
        answers = await retried.wait(self._watch, consumer, asked, sleep=self.advance)
        return [each.sequence for each in answers if each.carried_out]

    async def pause(self, agent: Agent[Any, Any] | Timer[Any, Any] | str, *, seconds: float | None = None) -> None:
        """Pause the agent, as the command `agents pause` does: for so long, or (None) until `resume`. It is given
        neither notifications nor retries. `settle` waits for the end of a pause that has one, and else leaves out what
        waits for the agent. Or pause a timer, as `timers pause` does: none of its ticks is run.

        Raises `ValueError` for what is not a time above 0, `BackendError`, and `AssertionError` where no worker has
        ever read the agent's stream.
        """
        if seconds is not None and _positive_seconds("pause", seconds) == 0:
            raise ValueError("pause takes a time above 0 seconds, or None until resume, found 0")
        if isinstance(agent, Timer) or (isinstance(agent, str) and self._is_timer(agent)):
            await timer_control.pause(self._watch, self.app.name, self._timer_name(agent), seconds=seconds)
            return
        consumer = self._consumer(agent)
        await self._until_read(consumer)
        await agent_control.pause(self._watch, consumer, seconds=seconds)

    async def resume(self, agent: Agent[Any, Any] | Timer[Any, Any] | str) -> None:
        """Resume the agent or the timer, as the commands `agents resume` and `timers resume` do. Raises as `pause`
        does.
        """
        if isinstance(agent, Timer) or (isinstance(agent, str) and self._is_timer(agent)):
            await timer_control.resume(self._watch, self.app.name, self._timer_name(agent))
            return
        consumer = self._consumer(agent)
        await self._until_read(consumer)
        await agent_control.resume(self._watch, consumer)

    async def catch_up(
        self, timer: Timer[Any, Any] | str, start: datetime, end: datetime, *, again: bool = False
    ) -> list[Ticked]:
        """Run the missed ticks of the timer from `start` to `end`, as the command `timers catch-up` does, in order and
        up to the first that fails; return how they ended. `again`: also those that a leader has begun, or that workers
        run by themselves.

        Raises `DeclarationError` for a range that is reversed or not over, `BackendError`.
        """
        version, app = self._versions[-1], self.app
        found = timer_control.declared(app.name, app._timers_at_work(), self._timer_name(timer))
        first, last = parse_date(start, name="start"), parse_date(end, name="end")
        plan = await timer_control.plan_catch_up(self._watch, app.name, found, first, last, again=again)
        if not (times := [each.time for each in plan if not each.left_out]):
            return []
        with self._moving():
            return await app.session.run_timer(app, found, times, given=version.given(self._resources))

    async def deploy(self, app: App, *, beside: bool = False) -> None:
        """Replace the workers by workers of another version of the app: the old ones are stopped in order, then as
        many of the new one are started as there were at the beginning. With `beside`, the old ones go on beside them,
        as in a rolling deploy, until `deploy` is called without it.

        `app` is another `App` that is declared with the same name, or one that was deployed before. From now on,
        `notify` publishes by its schema, and `start` starts its workers.

        Raises `ConfigError` with every mistake of the app, and `DeclarationError` where it has another name or is
        connected elsewhere.
        """
        if app.name != self.app.name:
            raise DeclarationError(
                f"deploy takes another version of the app {self.app.name!r}, declared with the same name, found the "
                f"app {app.name!r}"
            )
        version = next((each for each in self._versions if each.app is app), None)
        if version is None:
            version = _Version(app, self._server, self._resources)
            await self._connections.start(self._keep_connected, version)
        else:
            self._versions.remove(version)
        self._versions.append(version)
        self.app = app
        self._readers |= version.readers
        if not beside:
            await self._stop([worker for worker in self._workers if worker.version is not version])
        await self._start(version)

    async def start(self) -> None:
        """Start workers, until there are as many as there were at the beginning."""
        if len(self._workers) < self._count:
            await self._start(self._versions[-1], count=self._count - len(self._workers))

    async def stop(self) -> None:
        """Stop the workers in order, as a deploy does; what runs may take until the drain timeout is over.

        Time passes as far as that needs.
        """
        await self._stop(self._workers)

    async def _start(self, version: _Version, *, count: int | None = None) -> None:
        """Start so many workers of a version, or (None) as many as are missing to those of the beginning."""
        if count is None:
            count = self._count - sum(worker.version is version for worker in self._workers)
        for _ in range(count):
            worker = _Worker(version, self._failed, self._hear, version.app.events.emit)
            agents = [self._code.watched(agent) for agent in version.app._agents_at_work()]
            await self._tasks.start(worker.run, self._open, agents, version.given(self._resources))
            self._workers.append(worker)
        if self._clock:
            with self._moving():
                await at_rest()  # they read by now
        else:
            for worker in self._workers:
                await worker.begun.wait()

    async def _stop(self, stopping: list[_Worker]) -> None:
        self._workers = [worker for worker in self._workers if worker not in stopping]
        for worker in stopping:
            worker.stop.set()
        with self._moving():
            while self._clock and not all(worker.ended.is_set() for worker in stopping):
                if not await self._let_time_pass(math.inf):
                    await self._clock.advance_to_next_call(until=math.inf)  # the drain timeout is for code that hangs
        for worker in stopping:
            await worker.ended.wait()

    async def crash(self, worker: int = 0) -> None:
        """End a worker as `kill -9` does, so that it gives nothing back, and start another in its place.

        Workers are counted from 0. Raises `ValueError` where there is none of this number.
        """
        killed = self._numbered(worker)
        self._workers.remove(killed)
        await killed.kill()
        await self._start(killed.version, count=1)

    def disconnect(self, worker: int | None = None) -> None:
        """Take the connection away from one worker, or (None) from all and from the app. Not with a server."""
        for client in self._clients(worker):
            client.disconnect()

    def reconnect(self) -> None:
        """Give everybody the connection back."""
        for client in self._clients(None):
            client.reconnect()

    async def __aenter__(self) -> Harness:
        version = _Version(self.app, self._server, self._resources)
        self._versions.append(version)
        self._readers |= version.readers
        self._entered_in = asyncio.current_task()
        self._life = asyncio.create_task(self._live(version))
        self._life.add_done_callback(lambda _: self._open_now.set())
        try:
            await self._open_now.wait()
        except anyio.get_cancelled_exc_class():
            self._life.cancel()
            await self._ended()
            raise
        if self._life.done():
            self._life.result()
        self._block.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        handled = None
        if asyncio.current_task() is self._entered_in:
            handled = self._block.__exit__(kind, error, traceback)
        self._over.set()
        await self._ended()
        self._raise_failure()
        self._life.result()
        if kind is None:
            self._raise_failed_call()
        return handled

    async def _live(self, version: _Version) -> None:
        _IN_HARNESS.set(True)
        async with AsyncExitStack() as stack:
            self._watch = await stack.enter_async_context(self._opening(version.config))
            if self._server:
                await stack.enter_async_context(self._own_streams_removed())
            await stack.enter_async_context(version.connected(self._open))
            async with self._connections:
                try:
                    async with self._tasks:
                        if self._clock:
                            self._tasks.start_soon(self._clock.keep_turning)
                        await self.start()
                        self._open_now.set()
                        await self._over.wait()
                        self._tasks.cancel_scope.cancel()
                finally:
                    self._no_workers.set()

    async def _keep_connected(self, version: _Version, *, task_status: TaskStatus[None]) -> None:
        _IN_HARNESS.set(True)
        PROCESS.set(None)
        known = [table for each in self._versions for table in each.app.tables.values()]
        for table in version.app.tables.values():
            if table in known:
                table.disconnect()  # the test's calls mean the newest; workers have connections of their own
        async with version.connected(self._open):
            task_status.started()
            await self._no_workers.wait()

    async def _ended(self) -> None:
        with anyio.CancelScope(shield=True):
            await asyncio.wait([self._life])

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _raise_failed_call(self) -> None:
        failed, self._calls_failed = self._calls_failed, []
        if failed:
            first = failed[0]
            raise AssertionError(
                f"agent {first.agent!r}: the function of on_dead_letter has failed for {first.notification}, and is "
                f"called no more: {describe(first.error)}"
            ) from first.error

    def _opening(self, config: Config, *, owner: str = "", **listeners: Any) -> AbstractAsyncContextManager[Admin]:
        """Another client of the streams that all of them share; `listeners` are those of `Opening`."""
        if self._clock is None:
            return open_backend(config, owner=owner, **listeners)
        if not hasattr(self, "_watch"):
            return InMemoryBackend(config.notification_backend.in_memory, clock=self._clock)
        return cast(InMemoryBackend, self._watch).peer(**listeners)

    @asynccontextmanager
    async def _open(self, config: Config, **stated: Any) -> AsyncIterator[Admin]:
        async with self._opening(config, **stated) as backend:
            yield cast(Admin, _Recorder(backend, self._note, self._made.add, self._take_turns))

    @asynccontextmanager
    async def _own_streams_removed(self) -> AsyncIterator[None]:
        before = set(await self._watch.stream_names())
        ours = [each for kind in (DEAD_LETTERS, RETRIES) for each in before if own_streams.app_of(kind, each)]
        if taken := before & {*self._readers, *ours, *map(delayed_messages.stream_of, self._readers)}:
            raise AvisoWorkersError(
                f"{self._server} has the streams {', '.join(sorted(taken))} already: a test makes and removes "
                "streams of its own, so give it a server that is there for tests"
            )
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                for name in (set(await self._watch.stream_names()) - before) & self._made:
                    await self._watch.delete_stream(name)

    def _note(self, message: Message, ack: PubAck) -> None:
        stored = structs.replace(message, sequence=ack.sequence, timestamp_ns=self.clock.time_ns())
        if app := own_streams.app_of(DEAD_LETTERS, ack.stream):
            # A repeat is noted as well where the acknowledgement of the first try was lost.
            if not (ack.duplicate and (app, ack.sequence) in self._dead_lettered):
                self._dead_lettered.add((app, ack.sequence))
                with suppress(UndecodableError):  # a test may have written it that tries what others could
                    self.dead_letters.append(DeadLetter.read(stored, app))
        elif ack.duplicate:
            return
        elif reader := self._readers.get(ack.stream):
            with suppress(UndecodableError):  # as below
                if found := reader.notification(stored):
                    headers = {name: value for name, value in found.headers.items() if not is_reserved(name)}
                    payload = found.payload if payloads.is_json(stored.data) else stored.data
                    self.published.append(Notify(found.event_type, found.identifier, payload, headers=headers or None))

    def _hear(self, event: Event) -> None:
        match event:
            case Settled() | Ticked() | WindowDone():
                self._facts.append(event)
            case DeadLetterCallFailed(again_in_seconds=0.0):
                self._calls_failed.append(event)
            case Overdue():
                self._overdue[event.message_id] = event
            case AgentDisturbed():
                self._disturbed[event.agent] = event.error
            case TaskFailed() if not isinstance(event.error, BackendError):  # as `disconnect` causes
                self._failed(event.error)

    async def _take_turns(self) -> None:
        """Let a request of one of several workers take longer than another's: in a loop that they share, and without a
        network, they would go on in step, and each come first in its turn.
        """
        if max(self._count, len(self._workers)) == 1 or PROCESS.get() is None:
            return
        turns = self._random.randrange(MAX_TURNS)
        if self._clock is None:
            await anyio.sleep(turns * NAP_SECONDS / MAX_TURNS)
        for _ in range(turns):
            await checkpoint()

    async def _catch_up(self) -> None:
        """Wait until the test's own copies of tables have what the workers have stored."""
        for table in self.app.tables.values():
            if isinstance(table, Table) and table.cached:
                kept = cast(CachedKeyValue, table._bucket)
                stored = await kept.revision()
                while kept.version is not None and kept.seen < stored:
                    await self.clock.sleep(NAP_SECONDS)

    def _failed(self, error: BaseException) -> None:
        self._failure = error
        self._tasks.cancel_scope.cancel()
        if self._entered_in is not None and not self._entered_in.done():
            self._block.cancel()

    def _name(self, agent: Agent[Any, Any] | str) -> str:
        if isinstance(agent, str):
            name = agent
        else:
            found = (included(agent, version.app.agents) for version in reversed(self._versions))
            name = next(filter(None, found), agent).name
        return self._known("agent", name, self._agents())

    def _is_timer(self, name: str) -> bool:
        """Return whether a timer has this name, and no agent."""
        timers = {each.name for version in self._versions for each in version.app.timers}
        return name in timers - {each.name for each in self._agents()}

    def _timer_name(self, timer: Timer[Any, Any] | str) -> str:
        if isinstance(timer, Timer):
            for version in reversed(self._versions):
                same = [
                    each
                    for each in version.app.timers
                    if (each.function, each.schedule) == (timer.function, timer.schedule)
                ]
                if len(same) == 1:
                    (timer,) = same
                    break
        declared = [each for version in reversed(self._versions) for each in version.app.timers]
        return self._known("timer", timer if isinstance(timer, str) else timer.name, declared)

    def _agents(self) -> list[Agent[Any, Any]]:
        """Return the agents of all versions, those of the newest first."""
        return [agent for version in reversed(self._versions) for agent in version.app.agents]

    def _at_work(self) -> list[_Version]:
        """Return the versions that workers run, the newest first; the newest of all where there is no worker."""
        running = [worker.version for worker in self._workers] or self._versions[-1:]
        return [version for version in reversed(self._versions) if version in running]

    def _consumer(self, agent: Agent[Any, Any] | str) -> AgentConsumer:
        name = self._name(agent)
        return next(
            AgentConsumer(app=version.app.name, agent=name, stream=version.streams[each.event_type])
            for version in reversed(self._versions)
            for each in version.app.agents
            if each.name == name
        )

    async def _until_read(self, consumer: AgentConsumer) -> None:
        """Wait until the agent's consumers are made, which its worker does soon after its start."""
        deadline = self.clock.monotonic() + REAL_PATIENCE_SECONDS
        with self._moving():
            for stream in (consumer.stream, own_streams.of_app(RETRIES, consumer.app)):
                while missing := await self._not_read(stream, consumer.consumer):
                    self._raise_failure()
                    if not self._workers or not await self._let_time_pass(deadline):
                        raise AssertionError(f"agent {consumer.agent} was never at work: {missing}")

    async def _not_read(self, stream: str, durable: str) -> str:
        """Return why the consumer cannot be asked; empty where it exists."""
        try:
            await self._watch.consumer_info(stream, durable)
        except NotFoundError as error:
            return f"not read yet ({error})"
        return ""

    def _known(self, kind: str, name: str, declared: Sequence[Agent[Any, Any]] | Sequence[Timer[Any, Any]]) -> str:
        names = dict.fromkeys(each.name for each in declared)
        if name not in names:
            raise ValueError(f"no {kind} {name!r} in app {self.app.name!r}, which has: {', '.join(names) or 'none'}")
        return name

    def _numbered(self, worker: int) -> _Worker:
        if not -len(self._workers) <= worker < len(self._workers):
            raise ValueError(f"there is no worker {worker}: {len(self._workers)} run, counted from 0")
        return self._workers[worker]

    def _clients(self, worker: int | None) -> list[Any]:
        if self._clock is None:
            raise AvisoWorkersError("the connection to a real server cannot be taken away: stop the server instead")
        workers = self._workers if worker is None else [self._numbered(worker)]
        clients = [each.session.backend for each in workers]
        return [*clients, *(each.app.session.backend for each in self._versions)] if worker is None else clients

    def _moving(self) -> AbstractContextManager[None]:
        return self._clock.moved_by_test() if self._clock else nullcontext()

    async def _let_time_pass(self, deadline: float) -> bool:
        """Let some time pass. Return False where that does not help, or no time is left."""
        if self._clock is None:
            await anyio.sleep(CHECK_SECONDS)
            return self.clock.monotonic() < deadline
        await at_rest()  # nothing may happen between this and the next call: code that ends now needs no time
        if (seconds := self._code.seconds) is None:
            return await self._clock.advance_to_next_call(until=deadline)
        await self._clock.pass_as_in_reality()
        return seconds < CODE_PATIENCE_SECONDS

    async def _is_unsettled(self) -> bool:
        """Return whether any agent has something left.

        In virtual time this is asked after every call that falls due.
        """
        if self._clock:
            await at_rest()
        if any(run.flow for worker in self._workers for run in worker.session.runs.values()):
            return True
        left = await self._left()
        if not left and not self._clock:
            await anyio.sleep(CHECK_SECONDS)  # a server counts a little later
            left = await self._left()
        return bool(left)

    async def _left(self) -> list[str]:
        left = []
        asked = set()
        for version in self._at_work():
            app = version.app.name
            for agent in version.app.agents:
                stream, durable = version.streams[agent.event_type], agent.durable_name(app)
                if (stream, durable) in asked:
                    continue  # two versions share its consumer
                asked.add((stream, durable))
                runs = [worker.session.runs.get(agent.name) for worker in self._workers]
                flows = [run.flow for run in runs if run]
                read = (stream, own_streams.of_app(RETRIES, app))
                facts = [await self._left_of(each, durable) for each in read]
                if held := sum(map(len, flows)):
                    facts.append(f"{held} held by workers, {sum(flow.running for flow in flows)} of them running")
                window = agent.policy.window
                if window and (over := await window_records.unfinished(agent, window, self._watch, app=app)):
                    facts.append(f"{over} windows over and not done")
                if any(facts):
                    left.append(f"{agent.name}: {'; '.join([*filter(None, facts), *self._reasons(agent.name)])}")
        for stream in self._readers:
            schedules = delayed_messages.stream_of(stream)
            if schedules in self._made and (due := await self._left_of(schedules, delayed_messages.DURABLE)):
                overdue = [_reason(each) for each in self._overdue.values() if each.stream == stream]
                left.append(f"delayed notifications: {'; '.join([due, *overdue])}")
        return left

    async def _left_of(self, stream: str, durable: str) -> str:
        try:
            info = await self._watch.consumer_info(stream, durable)
        except NotFoundError as error:
            return f"not read yet ({error})"
        if not info.num_pending + info.num_ack_pending:
            return ""
        if info.paused_until is not None and info.paused_until >= agent_control.UNTIL_RESUMED:
            return ""
        return f"{stream}: {info.num_pending} waiting, {info.num_ack_pending} delivered and not settled"

    def _reasons(self, agent: str) -> Iterator[str]:
        if not self._workers:
            yield "no worker runs"
        elif agent not in self._disturbed and not any(agent in worker.session.runs for worker in self._workers):
            yield "no worker runs it, as it was declared after they had started: declare it before"
        if not all(worker.session.backend.connection.ready for worker in self._workers):
            yield "the connection was taken away"
        if last := self.settled(agent)[-1:]:
            yield f"the last one was {last[0].outcome} ({last[0].reason or 'done'}: {_text(last[0].error)})"
        if (ran := self._windows_done(agent)[-1:]) and ran[0].error:
            yield f"the last window failed: {describe(ran[0].error)}"
        if agent in self._disturbed:
            yield f"reading was disturbed: {self._disturbed[agent]}"
        if any(name == agent for name, _ in self._code.running.values()):
            yield "its code runs, in real time; `advance` lets more time pass meanwhile"


def _text(error: BaseException | None) -> str:
    return text_of(error) if error else "no error"


def _reason(overdue: Overdue) -> str:
    return f"one of stream {overdue.stream} cannot be stored yet: {_text(overdue.error)}"


def _positive_seconds(method: str, time: object) -> float:
    """Return the seconds of a duration. Raises `ValueError` for a negative one, and for what is none."""
    try:
        seconds = seconds_of(time)
    except ValueError as error:
        raise ValueError(f"{method}: {error}") from error
    if seconds < 0:
        raise ValueError(f"{method}: a time from 0 seconds, found {time!r}")
    return seconds


class _Version:
    """One version of the app's code, whose test gives resources of the types `given`. Raises `ConfigError` with its
    mistakes.
    """

    def __init__(self, app: App, server: str | None, given: Container[Any]) -> None:
        if mistakes := app._mistakes(given=given):
            raise ConfigError(mistakes)
        self.app = app
        self.config = _config(app.config, server)
        schema = self.config.notification_schema
        self.streams = {name: streams.event_stream(name, schema[name], self.config).name for name in schema}
        """The names of the streams of the events, by event type."""
        self.readers = {self.streams[name]: NotificationReader(name, schema[name]) for name in schema}
        """By stream."""

    @asynccontextmanager
    async def connected(self, opening: Opening) -> AsyncIterator[None]:
        """Connect the app, as the test and the handlers use it, and leave it as it was."""
        before = self.app.config
        self.app.configure(self.config, opening=opening)
        try:
            async with self.app:
                if self.app.agents:
                    self.app.session.publisher.compare_key_orders()  # as in a worker, whose session the app uses
                yield
        finally:
            self.app.configure(before)

    def given(self, resources: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Return those of the test's resources that the app declares."""
        declared = [resource.gives for resource in self.app.resources]
        return {kind: value for kind, value in resources.items() if kind in declared}


class _Worker:
    """The agents of an app at work, as in a process of their own."""

    def __init__(
        self, version: _Version, failed: Callable[[Exception], None], *listeners: Callable[[Event], None]
    ) -> None:
        self.version = version
        self.stop = anyio.Event()
        self.begun = anyio.Event()
        """Set when each agent reads its stream, or has stated why it cannot."""
        self.ended = anyio.Event()
        self.session: Session
        self._failed = failed
        self._listeners = listeners
        self._life = anyio.CancelScope()

    async def run(
        self,
        opening: Any,
        agents: list[Agent[Any, Any]],
        given: Mapping[Any, Any],
        *,
        task_status: TaskStatus[None],
    ) -> None:
        app, config = self.version.app, self.version.config
        events = Events()
        events.listen(self._tell)
        try:
            with self._life:
                PROCESS.set(self)
                _IN_HARNESS.set(True)
                async with (
                    open_session(app=app.name, config=config, events=events, opening=opening) as session,
                    session.connect(app.tables),
                ):
                    self.session = session
                    session.publisher.outgoings = app._outgoings
                    task_status.started()
                    try:
                        await session.work(app, self.stop, agents=agents, given=given, begun=self.begun)
                    except Exception as error:
                        self._failed(error)
        finally:
            self.begun.set()
            self.ended.set()

    async def kill(self) -> None:
        self._listeners = ()
        cast(_Recorder, self.session.backend).cut()
        self._life.cancel()
        await self.ended.wait()

    def _tell(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)


class _Clock(VirtualClock):
    """Time that also passes where the author's code waits for it, as in a publish that is tried again, and where the
    test itself does. While the author's code runs, it passes as in reality.
    """

    def __init__(self, code: _Code, *, start: datetime) -> None:
        super().__init__(start=start)
        self._code = code
        self._awaited_by_test = 0
        self._moved_by_test = 0

    async def sleep(self, seconds: float) -> None:
        with self._awaited():
            await super().sleep(seconds)

    def call_at(self, when: float, callback: Callable[[], None]) -> ClockTimer:
        timer = super().call_at(when, callback)
        # What ends a scope is waited for, as by `clocks.move_on_after`. Other calls are due without anybody there.
        if isinstance(getattr(callback, "__self__", None), anyio.CancelScope):
            return _Wait(timer, self._awaited())
        return timer

    async def keep_turning(self) -> None:
        """Let time pass beside code that runs, and where the test waits for it and nobody else moves it. Never returns.

        One call a turn, with a nap in between: the test may have done something, or have got what it waited for.
        """
        while True:
            if self._moved_by_test:
                await anyio.sleep(NAP_SECONDS)  # two that wait until nothing runs would keep each other waiting
            elif self._code.seconds is not None:
                await self.pass_as_in_reality()
            else:
                await anyio.sleep(NAP_SECONDS)
                if self._is_awaited():
                    await at_rest()
                if self._is_awaited():
                    await self.advance_to_next_call(until=math.inf)

    async def pass_as_in_reality(self) -> None:
        """Let as much time pass as a nap takes."""
        began = time.monotonic()
        await anyio.sleep(NAP_SECONDS)
        if (seconds := self._code.seconds) is not None:
            await self.advance(min(seconds, time.monotonic() - began))

    def _is_awaited(self) -> bool:
        """Return whether the test waits in a call, and nothing else lets time pass."""
        return bool(self._awaited_by_test) and not self._moved_by_test and self._code.seconds is None

    @contextmanager
    def moved_by_test(self) -> Iterator[None]:
        """Note that the test itself lets time pass while the block runs."""
        self._moved_by_test += 1
        try:
            yield
        finally:
            self._moved_by_test -= 1

    @contextmanager
    def _awaited(self) -> Iterator[None]:
        by_test = not _IN_HARNESS.get()
        self._awaited_by_test += by_test
        try:
            with self._code.asleep():
                yield
        finally:
            self._awaited_by_test -= by_test


class _Wait:
    """A call for which somebody waits until it is cancelled, also where it was made before."""

    def __init__(self, timer: ClockTimer, awaited: AbstractContextManager[None]) -> None:
        self._timer = timer
        self._stack = ExitStack()
        self._stack.enter_context(awaited)

    def when(self) -> float:
        return self._timer.when()

    def cancel(self) -> None:
        self._timer.cancel()
        self._stack.close()


class _Recorder(Struct, eq=False, dict=True):
    """A backend of which it is known what was published and made, and that can be cut off from who works with it."""

    _backend: Admin
    _note: Callable[[Message, PubAck], None]
    _note_stream: Callable[[str], None]
    take_turns: Callable[[], Awaitable[None]]
    """Awaited before each request that writes, or reads what others write."""
    cut_off: bool = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def cut(self) -> None:
        """Let nothing through any more, as if the process were dead."""
        self.cut_off = True
        if isinstance(self._backend, InMemoryBackend):
            self._backend.disconnect()
        self._backend = cast(Admin, _OnlyReading(self._backend))

    async def create_stream(self, spec: StreamSpec) -> StreamInfo:
        self._note_stream(spec.name)
        return await self._backend.create_stream(spec)

    async def key_value(self, bucket: str, **stated: Any) -> KeyValue:
        self._note_stream(f"KV_{bucket}")
        return cast(KeyValue, _MortalBucket(await self._backend.key_value(bucket, **stated), self))

    async def publish(self, message: Message, **stated: Any) -> PubAck:
        await self.take_turns()
        ack = await self._backend.publish(message, **stated)
        self._note(message, ack)
        return ack

    async def publish_many(self, outgoing: Sequence[Outgoing], **stated: Any) -> list[PubAck | BackendError]:
        if self.cut_off:
            return [UnavailableError("the worker was ended")] * len(outgoing)
        results = await self._backend.publish_many(outgoing, **stated)
        for each, result in zip(outgoing, results, strict=True):
            if isinstance(result, PubAck):
                self._note(each.message, result)
        return results

    async def publish_together(self, outgoing: Sequence[Outgoing], **stated: Any) -> PubAck:
        ack = await self._backend.publish_together(outgoing, **stated)
        for each in outgoing:
            self._note(each.message, ack)
        return ack

    def consume(
        self, stream: str, consumer: str, *, deliver: Callable[[Sequence[Delivery]], None], **stated: Any
    ) -> AbstractAsyncContextManager[Consumer]:
        def deliver_mortal(deliveries: Sequence[Delivery]) -> None:
            deliver([cast(Delivery, _Mortal(delivery, self, delivery.message)) for delivery in deliveries])

        return self._backend.consume(stream, consumer, deliver=deliver_mortal, **stated)


class _OnlyReading:
    """The backend of a worker that was ended, which refuses every verb but those that read."""

    def __init__(self, backend: Admin) -> None:
        self._itself = backend

    def __getattr__(self, name: str) -> Any:
        if name not in READING:
            raise UnavailableError("the worker was ended")
        return getattr(self._itself, name)


class _MortalBucket:
    """A bucket in which nothing is changed by a worker that is dead."""

    def __init__(self, bucket: KeyValue, holder: _Recorder) -> None:
        self._bucket = bucket
        self._holder = holder

    def __getattr__(self, name: str) -> Any:
        if self._holder.cut_off:
            raise UnavailableError("the worker was ended")
        itself = getattr(self._bucket, name)
        if not inspect.iscoroutinefunction(itself):
            return itself

        async def in_its_time(*arguments: Any, **stated: Any) -> Any:
            await self._holder.take_turns()
            return await itself(*arguments, **stated)

        return in_its_time


class _Mortal(Noted, eq=False):
    """A delivery that nobody can settle once the worker that holds it is dead."""

    _delivery: Delivery
    _holder: _Recorder
    message: Message

    def __getattr__(self, name: str) -> Any:
        if self._holder.cut_off and name not in ("can_be_read_again", "held", "num_delivered", "num_pending"):
            return _do_nothing
        return getattr(self._delivery, name)


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


class _Code:
    """The author's functions: which of them run now, and what they are to fail with."""

    def __init__(self) -> None:
        self.running: dict[object, tuple[str, float]] = {}
        """By call, the agent and when it began, on the real clock. A call is over when nobody waits for it."""
        self.faults: dict[str, deque[Exception]] = {}
        """By agent."""
        self.away: set[str] = set()
        """The agents of which each call fails because what they depend on is away."""
        self._asleep = 0

    @property
    def seconds(self) -> float | None:
        """The real seconds since the oldest running call began; None if each one only waits for the clock."""
        began = [began for _, began in self.running.values()]
        return time.monotonic() - min(began) if len(began) > self._asleep else None

    def watched(self, agent: Agent[Any, Any]) -> Agent[Any, Any]:
        """Return the agent with its function, and what is around it, called from here."""
        watched = copy.copy(agent)
        call = in_thread(agent) if agent.in_thread else agent.function

        def begin(argument: Any, turn: object, resources: Mapping[str, Any]) -> Any:
            if agent.form is Stream:
                return call(Stream(_WatchedSource(argument._source, self, turn)), **resources)
            if agent.form is not GivenUp:
                self.strike(agent.name)
            return call(argument, **resources)

        async def call_it(argument: Any, **resources: Any) -> object:
            with self._inside(agent.name) as turn:
                return await begin(argument, turn, resources)

        async def loop_over_it(argument: Any, **resources: Any) -> AsyncIterator[object]:
            with self._inside(agent.name) as turn:
                async with aclosing(begin(argument, turn, resources)) as outputs:
                    async for output in outputs:
                        with self.outside(turn):
                            yield output

        watched.function = loop_over_it if agent.yields else call_it
        watched.in_thread = False  # as far as its worker knows, which cannot cancel it all the same
        watched.around = [structs.replace(each, function=self._opened(each, agent.name)) for each in agent.around]
        watched.dead_letter_functions = [self.watched(agent.running(f)).function for f in agent.dead_letter_functions]
        return watched

    def _opened(self, resource: Resource, agent: str) -> Callable[..., AsyncIterator[Any]]:
        async def opened(**given: Any) -> AsyncIterator[Any]:
            with self._inside(agent) as turn:
                async with Opened(resource, given) as value:
                    with self.outside(turn):
                        yield value

        return opened

    def strike(self, agent: str) -> None:
        if agent in self.away:
            raise Unavailable("an outage in a test")
        if faults := self.faults.get(agent):
            raise faults.popleft()

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """Note that the code in the block waits for the clock, if it is the author's."""
        ours = int(_WITHIN_CODE.get())
        self._asleep += ours
        try:
            yield
        finally:
            self._asleep -= ours

    @contextmanager
    def _inside(self, agent: str) -> Iterator[object]:
        call = object()
        before = _WITHIN_CODE.set(True)
        self.running[call] = agent, time.monotonic()
        try:
            yield call
        finally:
            _WITHIN_CODE.reset(before)
            del self.running[call]

    @contextmanager
    def outside(self, call: object) -> Iterator[str]:
        """Note that the call has left the author's function while the block runs, and give the agent's name."""
        agent, _ = self.running.pop(call)
        before = _WITHIN_CODE.set(False)
        try:
            yield agent
        finally:
            _WITHIN_CODE.reset(before)
            self.running[call] = agent, time.monotonic()


class _WatchedSource:
    """Where the function of a Stream gets its notifications: while it asks, none of it runs."""

    def __init__(self, source: NotificationSource[Any], code: _Code, call: object) -> None:
        self._source = source
        self._code = code
        self._call = call

    async def next(self, *, within_seconds: float | None = None) -> Notification[Any] | None:
        with self._code.outside(self._call) as agent:
            if (notification := await self._source.next(within_seconds=within_seconds)) is not None:
                self._code.strike(agent)
            return notification

    async def settle(self) -> None:
        with self._code.outside(self._call):
            await self._source.settle()


def _config(config: Config, server: str | None) -> Config:
    """Return what the app is configured with, for a server with nothing but what a test brings."""
    backend, workers = config.notification_backend, config.workers
    jetstream = structs.replace(
        backend.jetstream,
        **{name: getattr(JetStream(), name) for name in ELSEWHERE},
        nats_url=ServerUrls(server or DEFAULT_URL),
    )
    return structs.replace(
        config,
        notification_backend=structs.replace(backend, kind="jetstream" if server else "in_memory", jetstream=jetstream),
        workers=structs.replace(workers, dead_letters=structs.replace(workers.dead_letters, replicas=None)),
    )
