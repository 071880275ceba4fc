"""An app under test: its agents at work without a server, on time that the test moves.

Authors use `harness`, and so do our own tests of the engine. The agents run as in a worker process, on a session of
their own; the app has another one, by which the test and the agents publish. Both are clients of one in-memory
backend. Its time stands still, and `settle` jumps from one wait to the next; the author's own code runs in real time,
and `settle` waits for it. With `server` all of it happens on a real nats-server, in real time.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from contextvars import ContextVar
from types import TracebackType
from typing import Any, cast

import anyio
from anyio.abc import TaskStatus
from anyio.lowlevel import checkpoint
from msgspec import structs

from aviso_workers.app import App
from aviso_workers.aviso import payloads
from aviso_workers.aviso.codec import Message, NotificationReader, is_reserved
from aviso_workers.aviso.notifications import Notification, Notify, Receipt
from aviso_workers.backends import (
    Admin,
    ConnectionListener,
    Consumer,
    Delivery,
    KeyValue,
    Outgoing,
    PubAck,
    StreamInfo,
    open_backend,
)
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.clocks import Clock, VirtualClock, at_rest
from aviso_workers.config import Config, JetStream, streams
from aviso_workers.config.secrets import ServerUrls
from aviso_workers.config.settings import DEFAULT_URL
from aviso_workers.declare.agents import Agent, durable_name, included
from aviso_workers.declare.batches import Source, Stream
from aviso_workers.declare.resources import Resource, spelled
from aviso_workers.declare.tables import PROCESS, Table
from aviso_workers.declare.timers import Timer
from aviso_workers.declare.windows import Window
from aviso_workers.engine import dead_letter_store, delayed_delivery, delayed_messages, max_deliveries, parts
from aviso_workers.engine.buffer import Buffer
from aviso_workers.engine.call_scope import Opened
from aviso_workers.engine.dead_letter_store import DeadLetter
from aviso_workers.engine.handlers import windowed
from aviso_workers.engine.key_value import CachedKeyValue
from aviso_workers.engine.session import Session, open_session
from aviso_workers.engine.threads import in_thread
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
from aviso_workers.events import AgentDisturbed, Event, Events, Settled, Ticked, WindowDone
from aviso_workers.jetstream.specs import StreamSpec

__all__ = ["Harness", "harness"]

VIRTUAL_PATIENCE_SECONDS = 3600.0
REAL_PATIENCE_SECONDS = 30.0
CODE_PATIENCE_SECONDS = 10.0
"""How long, in real time, one call of the author's code may take while time stands still for it."""
ELSEWHERE = (
    *("token", "user", "password", "nkey_seed_file", "credentials_file", "tls", "domain"),
    *("replicas", "retention_policy", "stream_management"),
)
"""Settings that belong to another server than a test has."""
NAP_SECONDS = 0.001
MOST_TURNS = 20
"""Of the event loop, which a request of one of several workers may take longer than another."""
CHECK_SECONDS = 0.05
_WITHIN_CODE: ContextVar[bool] = ContextVar("within_code", default=False)


def harness(
    app: App, *, server: str | None = None, workers: int = 1, resources: Mapping[Any, Any] | None = None
) -> Harness:
    """Return the app with its agents at work: `async with harness(app) as t:`.

    `server` is the URL of a real nats-server that is there for tests: it must not have the app's streams yet, and
    they are removed at the end. Without, no server is needed. `workers` is how many worker processes are played.
    `resources` has values for types that resources of the app give, as in `{AsyncClient: fake}`: these resources are
    not opened. Of the app's configuration everything counts but where and how safely streams are stored.

    Raises `DeclarationError` where no resource of the app gives such a type.
    """
    declared = [resource.gives for resource in app.resources]
    for each in resources or {}:
        if each not in declared:
            raise DeclarationError(f"harness: no resource of app {app.name!r} gives {spelled(each)}")
    return Harness(app, server=server, workers=workers, resources=resources or {})


class Harness:
    """See `harness`. Times are in seconds."""

    def __init__(self, app: App, *, server: str | None, workers: int, resources: Mapping[Any, Any]) -> None:
        self.app = app
        self._resources = resources
        self.published: list[Notify] = []
        """What the agents and the test have published, in order, with canonical identifiers."""
        self.dead_letters: list[DeadLetter] = []
        """The dead letters, in order."""
        self._dead_lettered: set[int] = set()
        """The sequences of what is stored as dead letters."""
        self._first_parts: dict[int, bytes] = {}
        """By sequence, of dead letters that are stored as two."""
        self._code = _Code()
        self._clock = None if server else _Clock(self._code)
        self._server = server
        self._config: Config
        self._watch: Admin
        """A client that no `disconnect` concerns."""
        self._streams: dict[str, str]
        """The names of the streams of the events, by event type."""
        self._readers: dict[str, NotificationReader]
        """By stream."""
        self._made: set[str] = set()
        """Streams that the app has made, or may have."""
        self._settled: list[Settled] = []
        self._ticks: list[Ticked] = []
        self._windows: list[WindowDone] = []
        self._disturbed: dict[str, Exception] = {}
        self._count = workers
        self._random = random.Random(workers)
        """The same in each run, so that a test in virtual time ends as it has ended before."""
        self._workers: list[_Worker] = []
        self._tasks = anyio.create_task_group()
        self._life: asyncio.Task[None]
        """Owns all that is open. A plugin of pytest may enter and leave the harness in two tasks, as a fixture."""
        self._open_now = anyio.Event()
        self._over = anyio.Event()
        self._entered_in: asyncio.Task[Any] | None = None
        self._block = anyio.CancelScope()
        """The test's own block, as far as it is in one task."""
        self._failure: Exception | None = None
        """What ended a worker that should have gone on; raised where the test ends, which is at once."""

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

        What is to be delivered later and is not due yet does not count.

        Time passes as far as needed, at most `within_seconds` (default: an hour; on a server, where it is real time,
        30 s). Raises `AssertionError`, which tells what is not settled and why.
        """
        patience = VIRTUAL_PATIENCE_SECONDS if self._clock else REAL_PATIENCE_SECONDS
        if within_seconds is not None:
            patience = within_seconds
        deadline = self.clock.monotonic() + patience
        while await self._is_unsettled():
            self._raise_failure()
            if not await self._let_time_pass(deadline):
                raise AssertionError("\n  ".join([f"not settled within {patience:g} s:", *await self._left()]))
        if self._clock is None:
            await self._catch_up()

    async def advance(self, seconds: float) -> None:
        """Let so much time pass. On a server this is a sleep."""
        await (self._clock.advance(seconds) if self._clock else anyio.sleep(seconds))

    def fail(self, agent: Agent[Any, Any] | str, error: Exception, *, times: int = 1) -> None:
        """Let the agent's next calls raise this instead of calling its function (of a Stream: its next turns)."""
        self._code.faults.setdefault(self._name(agent), deque()).extend([error] * times)

    def settled(self, agent: Agent[Any, Any] | str) -> list[Settled]:
        """Return how the agent's deliveries ended, in order."""
        name = self._name(agent)
        return [fact for fact in self._settled if fact.agent == name]

    def outcomes(self, agent: Agent[Any, Any] | str) -> list[str]:
        """Return the same in one word each: `acked`, `retried` or `dead_lettered`."""
        return [fact.outcome for fact in self.settled(agent)]

    def ticks(self, timer: Timer[Any, Any] | str) -> list[Ticked]:
        """Return how the timer's ticks ended, in order; `advance` lets the time come for them."""
        name = self._timer_name(timer)
        return [fact for fact in self._ticks if fact.timer == name]

    def windows(self, agent: Agent[Any, Any] | str) -> list[WindowDone]:
        """Return how the agent's runs for windows that are over ended, in order."""
        windowed_agents = [each for each in self.app.agents if each.form is Window]
        name = self._known("agent of a Window", self._name(agent), windowed_agents)
        return [fact for fact in self._windows if fact.agent == name]

    async def start(self) -> None:
        """Start workers, until there are as many as there were at the beginning."""
        while len(self._workers) < self._count:
            worker = _Worker(self._failed, self._hear, self.app.events.emit)
            agents = [self._code.watched(agent) for agent in self.app.agents_at_work()]
            await self._tasks.start(worker.run, self.app, self._config, self._open, agents, self._resources)
            self._workers.append(worker)
        if self._clock:
            await at_rest()  # they read by now

    async def stop(self) -> None:
        """Stop the workers in order, as a deploy does; what runs may take until the drain timeout is over.

        Time passes as far as that needs.
        """
        stopping, self._workers = self._workers, []
        for worker in stopping:
            worker.stop.set()
        while self._clock and not all(worker.ended.is_set() for worker in stopping):
            if not await self._let_time_pass(math.inf):
                await self._clock.advance_to_next_call(until=math.inf)  # the drain timeout is for code that hangs
        for worker in stopping:
            await worker.ended.wait()

    async def crash(self, worker: int = 0) -> None:
        """End a worker as `kill -9` does, so that it gives nothing back, and start another in its place."""
        await self._workers.pop(worker).kill()
        await self.start()

    def disconnect(self, worker: int | None = None) -> None:
        """Take the connection away from one worker, or (None) from all and from the app. Not with a server."""
        for client in self._clients(worker):
            client.disconnect()

    def reconnect(self) -> None:
        """Give everybody the connection back."""
        for client in self._clients(None):
            client.reconnect()

    async def __aenter__(self) -> Harness:
        if mistakes := self.app.mistakes():
            raise ConfigError(mistakes)
        before = self.app.config
        self._config = _config(before, self._server)
        schema = self._config.notification_schema
        self._streams = {name: streams.event_stream(name, schema[name], self._config).name for name in schema}
        self._readers = {self._streams[name]: NotificationReader(name, schema[name]) for name in schema}
        self._entered_in = asyncio.current_task()
        self._life = asyncio.create_task(self._live(before))
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
        return handled

    async def _live(self, before: Config) -> None:
        async with AsyncExitStack() as stack:
            self._watch = await stack.enter_async_context(self._opening())
            if self._server:
                await stack.enter_async_context(self._own_streams_removed())
            self.app.configure(self._config, opening=self._open)
            stack.callback(self.app.configure, before)
            await stack.enter_async_context(self.app)
            async with self._tasks:
                await self.start()
                self._open_now.set()
                await self._over.wait()
                self._tasks.cancel_scope.cancel()

    async def _ended(self) -> None:
        with anyio.CancelScope(shield=True):
            await asyncio.wait([self._life])

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _opening(self, on_connection: ConnectionListener | None = None) -> AbstractAsyncContextManager[Admin]:
        """Another client of the streams that all of them share."""
        if self._clock is None:
            return open_backend(self._config, on_connection=on_connection)
        if not hasattr(self, "_watch"):
            return InMemoryBackend(self._config.notification_backend.in_memory, clock=self._clock)
        return cast(InMemoryBackend, self._watch).peer(on_connection=on_connection)

    @asynccontextmanager
    async def _open(self, config: Config, *, on_connection: ConnectionListener | None = None) -> AsyncIterator[Admin]:
        async with self._opening(on_connection) as backend:
            yield cast(Admin, _Recorder(backend, self._note, self._made.add, self._take_turns))

    @asynccontextmanager
    async def _own_streams_removed(self) -> AsyncIterator[None]:
        before = set(await self._watch.stream_names())
        ours = {dead_letter_store.STREAM, dead_letter_store.RETRIES, max_deliveries.STREAM, delayed_messages.STREAM}
        if taken := before & {*self._readers, *ours}:
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
        if ack.stream == dead_letter_store.STREAM:
            # A repeat is noted as well where the acknowledgement of the first try was lost.
            if not (ack.duplicate and ack.sequence in self._dead_lettered):
                self._dead_lettered.add(ack.sequence)
                self._note_dead_letter(stored)
        elif ack.duplicate:
            return
        elif reader := self._readers.get(ack.stream):
            with suppress(UndecodableError):  # as below
                if found := reader.notification(stored):
                    headers = {name: value for name, value in found.headers.items() if not is_reserved(name)}
                    payload = found.payload if payloads.is_json(stored.data) else stored.data
                    self.published.append(Notify(found.event_type, found.identifier, payload, headers=headers or None))

    def _note_dead_letter(self, stored: Message) -> None:
        if parts.is_first_part(stored):
            self._first_parts[stored.sequence] = stored.data
            return
        first = self._first_parts.get(parts.first_part_of(stored), b"")
        with suppress(UndecodableError):  # a test may have written it that tries what others could
            self.dead_letters.append(DeadLetter.read(parts.joined(first, stored)))

    def _hear(self, event: Event) -> None:
        match event:
            case Settled():
                self._settled.append(event)
            case Ticked():
                self._ticks.append(event)
            case WindowDone():
                self._windows.append(event)
            case AgentDisturbed():
                self._disturbed[event.agent] = event.error

    async def _take_turns(self) -> None:
        """Let a request of one of several workers take longer than another's: in a loop that they share, and without a
        network, they would go on in step, and each come first in its turn.
        """
        if self._count == 1 or PROCESS.get() is None:
            return
        turns = self._random.randrange(MOST_TURNS)
        if self._clock is None:
            await anyio.sleep(turns * NAP_SECONDS / MOST_TURNS)
        for _ in range(turns):
            await checkpoint()

    async def _catch_up(self) -> None:
        """Wait until the test's own copies of tables have what the workers have stored."""
        for table in self.app.tables.values():
            if isinstance(table, Table) and table.cached:
                kept = cast(CachedKeyValue, table._kept)
                stored = await kept.revision()
                while kept.version is not None and kept.seen < stored:
                    await self.clock.sleep(NAP_SECONDS)

    def _failed(self, error: Exception) -> None:
        self._failure = error
        self._tasks.cancel_scope.cancel()
        if self._entered_in is not None and not self._entered_in.done():
            self._block.cancel()

    def _name(self, agent: Agent[Any, Any] | str) -> str:
        name = agent if isinstance(agent, str) else (included(agent, self.app.agents) or agent).name
        return self._known("agent", name, self.app.agents)

    def _timer_name(self, timer: Timer[Any, Any] | str) -> str:
        if isinstance(timer, Timer):
            same = [
                each for each in self.app.timers if (each.function, each.schedule) == (timer.function, timer.schedule)
            ]
            timer = same[0] if len(same) == 1 else timer
        return self._known("timer", timer if isinstance(timer, str) else timer.name, self.app.timers)

    def _known(self, kind: str, name: str, declared: Sequence[Agent[Any, Any]] | Sequence[Timer[Any, Any]]) -> str:
        names = [each.name for each in declared]
        if name not in names:
            raise ValueError(f"no {kind} {name!r} in app {self.app.name!r}, which has: {', '.join(names) or 'none'}")
        return name

    def _clients(self, worker: int | None) -> list[Any]:
        if self._clock is None:
            raise AvisoWorkersError("the connection to a real server cannot be taken away: stop the server instead")
        workers = self._workers if worker is None else [self._workers[worker]]
        clients = [each.session.backend for each in workers]
        return [*clients, self.app.session.backend] if worker is None else clients

    async def _let_time_pass(self, deadline: float) -> bool:
        """False where that does not help, or no time is left."""
        if self._clock is None:
            await anyio.sleep(CHECK_SECONDS)
            return self.clock.monotonic() < deadline
        await at_rest()  # nothing may happen between this and the next call: code that ends now needs no time
        if (seconds := self._code.seconds) is None:
            return await self._clock.advance_to_next_call(until=deadline)
        await anyio.sleep(NAP_SECONDS)
        return seconds < CODE_PATIENCE_SECONDS

    async def _is_unsettled(self) -> bool:
        """Return whether any agent has something left.

        In virtual time this is asked after every call that falls due.
        """
        if self._clock:
            await at_rest()
        if any(buffer for agent in self.app.agents for buffer in self._buffers(agent)):
            return True
        left = await self._left()
        if not left and not self._clock:
            await anyio.sleep(CHECK_SECONDS)  # a server counts a little later
            left = await self._left()
        return bool(left)

    def _buffers(self, agent: Agent[Any, Any]) -> list[Buffer]:
        """Return what each worker holds for the agent."""
        return [worker.session.runs[agent.name].buffer for worker in self._workers if worker.session.runs]

    async def _left(self) -> list[str]:
        left = []
        for agent in self.app.agents:
            durable = agent.durable_name(self.app.name)
            buffers = self._buffers(agent)
            read = (self._streams[agent.event_type], dead_letter_store.RETRIES)
            facts = [await self._left_of(stream, durable) for stream in read]
            if held := sum(map(len, buffers)):
                facts.append(f"{held} held by workers, {sum(buffer.running for buffer in buffers)} of them running")
            if over := await self._windows_over(agent):
                facts.append(f"{over} windows over and not done")
            if any(facts):
                left.append(f"{agent.name}: {'; '.join([*filter(None, facts), *self._reasons(agent.name)])}")
        reader = durable_name(self.app.name, max_deliveries.NAME)
        if self.app.agents and (exceeded := await self._left_of(max_deliveries.STREAM, reader)):
            left.append(f"{max_deliveries.NAME}: {exceeded}")
        if delayed_messages.STREAM in self._made and (
            due := await self._left_of(delayed_messages.STREAM, delayed_delivery.DURABLE)
        ):
            left.append(f"{delayed_delivery.NAME}: {due}")
        return left

    async def _left_of(self, stream: str, durable: str) -> str:
        try:
            info = await self._watch.consumer_info(stream, durable)
        except NotFoundError as error:
            return f"not read yet ({error})"
        if not info.num_pending + info.num_ack_pending:
            return ""
        return f"{stream}: {info.num_pending} waiting, {info.num_ack_pending} delivered and not settled"

    async def _windows_over(self, agent: Agent[Any, Any]) -> int:
        if (window := agent.policy.window) is None:
            return 0
        return await windowed.unfinished(agent, window, self._watch, app=self.app.name)

    def _reasons(self, agent: str) -> Iterator[str]:
        if not self._workers:
            yield "no worker runs"
        if not all(worker.session.backend.connection.ready for worker in self._workers):
            yield "the connection was taken away"
        if last := self.settled(agent)[-1:]:
            yield f"the last one was {last[0].outcome} ({last[0].reason or 'done'}: {_text(last[0].error)})"
        if (ran := [fact for fact in self._windows if fact.agent == agent][-1:]) and ran[0].error:
            yield f"the last window failed: {describe(ran[0].error)}"
        if agent in self._disturbed:
            yield f"reading was disturbed: {self._disturbed[agent]}"
        if any(name == agent for name, _ in self._code.running.values()):
            yield "its code runs, in real time; `advance` lets time pass meanwhile"


def _text(error: BaseException | None) -> str:
    return text_of(error) if error else "no error"


class _Worker:
    """The agents of an app at work, as in a process of their own."""

    def __init__(self, failed: Callable[[Exception], None], *listeners: Callable[[Event], None]) -> None:
        self.stop = anyio.Event()
        self.ended = anyio.Event()
        self.session: Session
        self._failed = failed
        self._listeners = listeners
        self._life = anyio.CancelScope()

    async def run(
        self,
        app: App,
        config: Config,
        opening: Any,
        agents: list[Agent[Any, Any]],
        given: Mapping[Any, Any],
        *,
        task_status: TaskStatus[None],
    ) -> None:
        events = Events()
        events.listen(self._tell)
        try:
            with self._life:
                PROCESS.set(self)
                async with (
                    open_session(app=app.name, config=config, events=events, opening=opening) as session,
                    session.connect(app.tables),
                ):
                    self.session = session
                    task_status.started()
                    try:
                        await session.work(app, self.stop, agents=agents, given=given)
                    except Exception as error:
                        self._failed(error)
        finally:
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
    """Time that also passes where the author's code waits for it, as in a publish that is tried again."""

    def __init__(self, code: _Code) -> None:
        super().__init__()
        self._code = code

    async def sleep(self, seconds: float) -> None:
        with self._code.asleep():
            await super().sleep(seconds)


class _Recorder:
    """A backend of which it is known what was published and made, and that can be cut off from who works with it."""

    def __init__(
        self,
        backend: Admin,
        note: Callable[[Message, PubAck], None],
        note_stream: Callable[[str], None],
        take_turns: Callable[[], Awaitable[None]],
    ) -> None:
        self.cut_off = False
        self.take_turns = take_turns
        """Awaited before each request that writes, or reads what others write."""
        self._backend = backend
        self._note = note
        self._note_stream = note_stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def cut(self) -> None:
        """Let nothing through any more, as if the process were dead."""
        self.cut_off = True
        if isinstance(self._backend, InMemoryBackend):
            self._backend.disconnect()

    async def create_stream(self, spec: StreamSpec) -> StreamInfo:
        self._note_stream(spec.name)
        return await self._backend.create_stream(spec)

    async def key_value(self, bucket: str, **stated: Any) -> KeyValue:
        self._note_stream(f"KV_{bucket}")
        return cast(KeyValue, _MortalBucket(await self._backend.key_value(bucket, **stated), self))

    async def publish(self, message: Message, **stated: Any) -> PubAck:
        if self.cut_off:
            raise UnavailableError("the worker was ended")
        await self.take_turns()
        ack = await self._backend.publish(message, **stated)
        self._note(message, ack)
        return ack

    async def publish_many(
        self, outgoing: Sequence[Outgoing], *, timeout_seconds: float, answered: bool = False
    ) -> list[PubAck | BackendError]:
        if self.cut_off:
            return [UnavailableError("the worker was ended")] * len(outgoing)
        results = await self._backend.publish_many(outgoing, timeout_seconds=timeout_seconds, answered=answered)
        for each, result in zip(outgoing, results, strict=True):
            if isinstance(result, PubAck):
                self._note(each.message, result)
        return results

    async def publish_together(self, outgoing: Sequence[Outgoing], *, timeout_seconds: float) -> PubAck:
        if self.cut_off:
            raise UnavailableError("the worker was ended")
        ack = await self._backend.publish_together(outgoing, timeout_seconds=timeout_seconds)
        for each in outgoing:
            self._note(each.message, ack)
        return ack

    def consume(
        self, stream: str, consumer: str, *, deliver: Callable[[Delivery], None], **stated: Any
    ) -> AbstractAsyncContextManager[Consumer]:
        def deliver_mortal(delivery: Delivery) -> None:
            deliver(_Mortal(delivery, self))

        return self._backend.consume(stream, consumer, deliver=deliver_mortal, **stated)


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


class _Mortal:
    """A delivery that nobody can settle once the worker that holds it is dead."""

    def __init__(self, delivery: Delivery, holder: _Recorder) -> None:
        self.message = delivery.message
        self.can_be_read_again = delivery.can_be_read_again
        self._delivery = delivery
        self._holder = holder

    @property
    def num_delivered(self) -> int:
        return self._delivery.num_delivered

    @property
    def num_pending(self) -> int:
        return self._delivery.num_pending

    @property
    def held(self) -> bool:
        return self._delivery.held

    def ack(self) -> None:
        if not self._holder.cut_off:
            self._delivery.ack()

    def nak(self, *, delay_seconds: float = 0.0) -> None:
        if not self._holder.cut_off:
            self._delivery.nak(delay_seconds=delay_seconds)

    def term(self, reason: str) -> None:
        if not self._holder.cut_off:
            self._delivery.term(reason)

    def in_progress(self) -> None:
        if not self._holder.cut_off:
            self._delivery.in_progress()


class _Code:
    """The author's functions: which of them run now, and what they are to fail with."""

    def __init__(self) -> None:
        self.running: dict[object, tuple[str, float]] = {}
        """By call, the agent and when it began, on the real clock. A call is over when nobody waits for it."""
        self.faults: dict[str, deque[Exception]] = {}
        """By agent."""
        self._asleep = 0

    @property
    def seconds(self) -> float | None:
        """How long, in real time, some of it has run; None where none does but to wait for the clock."""
        began = [began for _, began in self.running.values()]
        return time.monotonic() - min(began) if len(began) > self._asleep else None

    def watched(self, agent: Agent[Any, Any]) -> Agent[Any, Any]:
        """Return the agent with its function, and what is around it, called from here."""
        watched = copy.copy(agent)
        call = in_thread(agent) if agent.in_thread else agent.function

        def begin(argument: Any, turn: object, resources: Mapping[str, Any]) -> Any:
            if agent.form is Stream:
                return call(Stream(_Source(argument._source, self, turn)), **resources)
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
        return watched

    def _opened(self, resource: Resource, agent: str) -> Callable[..., AsyncIterator[Any]]:
        async def opened(**given: Any) -> AsyncIterator[Any]:
            with self._inside(agent) as turn:
                async with Opened(resource, given) as value:
                    with self.outside(turn):
                        yield value

        return opened

    def strike(self, agent: str) -> None:
        if faults := self.faults.get(agent):
            raise faults.popleft()

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """Whoever is here waits for the clock. It counts where it is the author's code."""
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
        """The call has left the function for a while; of this agent."""
        agent, _ = self.running.pop(call)
        before = _WITHIN_CODE.set(False)
        try:
            yield agent
        finally:
            _WITHIN_CODE.reset(before)
            self.running[call] = agent, time.monotonic()


class _Source:
    """Where the function of a Stream gets its notifications: while it asks, none of it runs."""

    def __init__(self, source: Source[Any], code: _Code, call: object) -> None:
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
