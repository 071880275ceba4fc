"""The app: what authors declare, and what they call.

Making one does no I/O, so that a module of agents imports anywhere. `async with app:` connects it, for scripts and
tests. `run_until` runs it as a worker process does, and `running` does so inside of another program's event loop.
"""

from __future__ import annotations

import asyncio
import copy
import difflib
import inspect
import os
import re
import sys
from collections.abc import AsyncGenerator, Callable, Container, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Never, ParamSpec, Self, TypeVar, overload

import anyio
import msgspec
from anyio.from_thread import BlockingPortal
from typing_extensions import TypeVar as DefaultTypeVar

from aviso_workers import event_loops
from aviso_workers.aviso import positions, schema, topics, typed_identifiers
from aviso_workers.aviso.literals import AnyDuration, Filter
from aviso_workers.aviso.notifications import Notification, Notify, Receipt
from aviso_workers.backends import KeyValue, Opening, open_backend
from aviso_workers.config import Config, Examined, completed, examine
from aviso_workers.config.documents import YamlNode
from aviso_workers.declare import around, durations, outputs, resources
from aviso_workers.declare.agents import (
    Agent,
    Declaration,
    Router,
    Task,
    check_filter,
    check_name,
    included,
    is_at_prompt,
)
from aviso_workers.declare.around import Around
from aviso_workers.declare.dependencies import Dependency
from aviso_workers.declare.resources import Needing, Resource
from aviso_workers.declare.tables import Counter, Table
from aviso_workers.declare.timers import Timer
from aviso_workers.declare.windows import Window
from aviso_workers.engine.publisher import encode
from aviso_workers.engine.subscription import SubscriptionRun
from aviso_workers.errors import (
    ConfigError,
    DeclarationError,
    InvalidIdentifierError,
    InvalidNotificationError,
    UnknownEventTypeError,
)
from aviso_workers.events import Events, Measured
from aviso_workers.jetstream.specs import OURS
from aviso_workers.sessions.session import Session, is_stopping, open_session
from aviso_workers.task_groups import task_group

if TYPE_CHECKING:
    from aviso_workers.telemetry.listeners import Listeners

__all__ = ["App"]

A = TypeVar("A")
T = TypeVar("T")
P = ParamSpec("P")
S = DefaultTypeVar("S", default=Any)
R = DefaultTypeVar("R", default=Any)
D = TypeVar("D", Agent[Any, Any], Timer[Any, Any], Task, Dependency)

_KEPT: ContextVar[tuple[App, Session] | None] = ContextVar("kept", default=None)
"""The app of a call of `App.sync` and its session, which the call keeps although the app's block ends meanwhile."""
METRIC = re.compile(r"(?!aviso_worker_)[a-zA-Z_][a-zA-Z0-9_]*")


class App(event_loops.Awaited, Router[S]):
    """An application: agents and what else a router declares, the routers that it includes, and a configuration.

    `name` is part of every agent's durable consumer: two apps of the same name share the work. `config` is a path,
    a `Config`, or None for the file that the environment names (see `config.load`). A relative path is looked for in
    the current directory, then in that of the Python file that makes the app. With `event_type`, none is needed.
    `settings` is the msgspec Struct of the app's own settings, as of a router: `app.settings()` returns them.
    `version` says which code it is, for operators; else it is the version of the installed package, or a digest.
    """

    _kind = "app"

    def __init__(
        self,
        name: str,
        *,
        config: Config | str | Path | None = None,
        settings: type[S] | None = None,
        version: str = "",
        **old: Never,
    ) -> None:
        if "unavailable" in old:
            raise DeclarationError(
                "App: unavailable= is gone: say depends_on=app.dependency(..., unavailable=[...]) for its agents"
            )
        if old:
            raise TypeError(f"App.__init__() got an unexpected keyword argument {next(iter(old))!r}")
        super().__init__(name, settings=settings)
        if "__" in name or name.endswith("_"):  # else two apps could have one durable consumer
            raise DeclarationError(f"app name {name!r}: leave out '__' and a last '_', which part it from its agents")
        if f"{name}_".startswith(OURS):
            raise DeclarationError(
                f"app name {name!r}: names of our own streams and readers begin so, choose another one"
            )
        self.version = version
        """Which code it is, as its author says; empty where they do not."""
        self.events = Events()
        self._config = _checked(config)
        self._beside: Path | None = Path(sys._getframe(1).f_code.co_filename).absolute().parent
        self._nats_context: str | None = None
        self._opening: Opening = open_backend
        self._routers: list[Router] = []
        self._given: dict[str, Mapping[str, Any]] = {}
        """By router, the settings that it was included with."""
        self._included: dict[str, tuple[Router, str]] = {}
        """By the name of an agent that was included, its router and its name in that router."""
        self._session: Session | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop in which the app is connected, or is being connected."""
        self._portal: tuple[BlockingPortal, int] | None = None
        """The portal to the event loop on which the app is connected, and the id of that loop's process."""
        self._stack = AsyncExitStack()

    def configure(self, config: Config | str | Path, *, opening: Opening = open_backend) -> None:
        """Use this configuration instead of the one it was made with. Before the first use of `config`.

        `opening` brings another backend than the configuration names, as `testing` does.
        """
        self._config, self._opening, self._beside = _checked(config), opening, None
        self.__dict__.pop("config", None)

    def _use_nats_context(self, name: str) -> None:
        """Take the connection from this context of the `nats` command line, and all else from the configuration.

        Before the first use of `config`. Raises `DeclarationError` where the configuration was loaded already.
        """
        if isinstance(self._config, Config):
            raise DeclarationError(
                f"app {self.name!r} brings a configuration that is loaded already: leave out --context"
            )
        self._nats_context = name

    @cached_property
    def config(self) -> Config:
        """The configuration, with the event types that are declared here, loaded at first use. Raises `ConfigError`."""
        examined = self._examined()
        if examined.mistakes:
            raise ConfigError(examined.mistakes)
        return examined.config

    @property
    def connected(self) -> bool:
        """Whether there is a connection to the servers now. It is False outside of `async with app:`."""
        return self._session is not None and self._session.backend.connection.ready

    @property
    def session(self) -> Session:
        """The session with the open backend.

        Raises `DeclarationError` outside of `async with app:`, and in another event loop than that of the block, where
        its connection would never answer.
        """
        if (kept := _KEPT.get()) is not None and kept[0] is self:
            return kept[1]
        if self._session is None:
            raise DeclarationError(f"app {self.name!r} is not connected: use it inside `async with app:`")
        if event_loops.running_loop() not in (None, self._loop):
            raise DeclarationError(
                f"app {self.name!r} is connected in another event loop: from this one, "
                "`await asyncio.to_thread(app.sync, app.notify, ...)` publishes"
            )
        return self._session

    @property
    def stopping(self) -> bool:
        """Whether the worker that runs this code was asked to stop; False outside of a worker.

        For a handler or timer that takes long, also a plain `def`: it has `workers.drain_timeout_seconds` from then on.
        """
        return is_stopping()

    @property
    def runs(self) -> Mapping[str, SubscriptionRun]:
        """The agents at work in this process, by name."""
        return self._session.runs if self._session else {}

    def include(self, router: Router, *, prefix: str = "", config: Mapping[str, Any] | None = None) -> None:
        """Add all that a router declares, before or after this. With a `prefix`, its names begin with that and `_`.

        `config` has settings for the router, with the keys of `workers.agents.<router>`; the configuration's values
        have precedence. Raises `DeclarationError` where a name is taken.
        """
        if not isinstance(router, Router):
            raise DeclarationError(f"include: the first argument must be a Router, found {router!r:.100}")
        if router.name == self.name and router._settings_type and self._settings_type:
            raise DeclarationError(
                f"router {router.name!r} and the app of that name both have their settings under workers.agents: "
                "give one of them another name"
            )
        again = is_at_prompt() and router.name in [known.name for known in self._routers]  # a cell is run again
        if config is not None:
            if router.name in self._given and not again:
                raise DeclarationError(f"router {router.name!r} has its settings already: give config= once")
            self._given[router.name] = dict(config)
        begin = f"{prefix}_" if prefix else ""
        take = partial(self._take, router, begin)
        for declared in router._declarations():
            take(declared, again=again)
        router._takers[self, begin] = take  # of what is declared from now on
        self._routers = [known for known in self._routers if not (again and known.name == router.name)] + [router]

    def _take(self, router: Router, begin: str, declared: Declaration, *, again: bool) -> None:
        """Add what an included router has declared."""
        match declared:
            case Agent():
                renamed = _renamed(declared, begin)
                needed = declared.policy.depends_on
                if begin and needed is not None and router.dependencies.get(needed.name) is needed:
                    own = self.dependencies[begin + needed.name]  # it was declared, and so taken, before the agent
                    renamed.policy = msgspec.structs.replace(declared.policy, depends_on=own)
                self._add(renamed, again=again)
                self._included[renamed.name] = router, declared.name
            case Timer():
                self._add(_renamed(declared, begin), again=again)
            case Task():
                self._add(_renamed(declared, begin), again=again)
            case Dependency():
                self._add_dependency(_renamed(declared, begin), again=again)
            case Resource():
                self._add_resource(declared, again=again)
            case (name, (Table() | Counter()) as table):
                self._add_table(begin + name, table, again=again)
            case (name, YamlNode() as entry):
                self._add_event_type(name, entry, again=again)
            case _:
                self._add_outgoing(declared)

    @overload
    def settings(self) -> S: ...

    @overload
    def settings(self, router: Router[T]) -> T: ...

    def settings(self, router: Router[Any] | None = None) -> Any:
        """Return the app's own settings, or those of a router, as its settings Struct.

        They are what the configuration has under `workers.agents.<name>`, and those that a router was included with,
        where the configuration says nothing else. Raises `ConfigError`.
        """
        return self._settings(self if router is None else router, self.config)

    def _settings(self, router: Router[Any], config: Config) -> Any:
        sections = config.workers.agents
        # A variable of the environment cannot spell the '-' of a name.
        spellings = (router.name, router.name.lower().replace("-", "_"))
        name = next((each for each in spellings if each in sections), router.name)
        path = f"workers.agents.{name}"
        found = {**self._given.get(router.name, {}), **sections.get(name, {})}
        if router._settings_type is None:
            return found
        known = [field.encode_name for field in msgspec.structs.fields(router._settings_type)]
        unknown = [key for key in found if key not in known]
        if unknown:
            raise ConfigError(
                self._mistake(f"{path}.{key}", f"unknown key{_suggestion(key, known)}", config) for key in unknown
            )
        try:
            return msgspec.convert(found, router._settings_type)
        except msgspec.ValidationError as error:
            problem, _, inside = str(error).partition(" - at `$")
            raise ConfigError([self._mistake(path + inside.rstrip("`"), problem, config)]) from error

    def mistakes(self) -> list[str]:
        """Return every mistake that shows without connecting: in the configuration, the agents and the routers."""
        return self._mistakes()

    def _mistakes(self, *, given: Container[Any] = ()) -> list[str]:
        """Return the same, but for missing settings of these types, which a test gives."""
        try:
            examined = self._examined()
        except ConfigError as error:
            return list(error.mistakes)
        found = list(examined.mistakes)
        if lacking := examined.config.workers.traces.lacking:
            found.append(self._mistake("workers.traces.enabled", lacking, examined.config))
        for agent in self.agents:
            found += [f"agent {agent.name!r}: {problem}" for problem in _agent_mistakes(agent, examined)]
        found += self._mistakes_of_dependencies()
        found += self._mistakes_of_resources()
        for router in (self, *self._routers):
            found += around.mistakes(router._arounds, router.agents, router=router.name)
        for router in (self, *self._routers):
            if router._settings_type in given:
                continue
            try:
                self._settings(router, examined.config)
            except ConfigError as error:
                found += error.mistakes
        return found

    def _mistakes_of_dependencies(self) -> Iterator[str]:
        for agent in self.agents:
            needed = agent.policy.depends_on
            if needed is None or self.dependencies.get(needed.name) is needed or is_at_prompt():
                continue
            yield (
                f"agent {agent.name!r}: depends_on= is a dependency {needed.name!r} that the app does not have under "
                "this name: declare it by app.dependency, or on the router of the agent"
            )

    def _mistakes_of_resources(self) -> list[str]:
        called: list[tuple[str, type | None, Needing]] = [
            *((f"agent {agent.name!r}", agent.form, agent) for agent in self._agents_at_work()),
            *((f"timer {timer.name!r}", None, timer) for timer in self._timers_at_work()),
        ]
        needing = [
            *((what, each.needs) for what, _, each in called),
            *((f"task {task.name!r}", task.needs) for task in self.tasks),
            *((each.label, each.needed_resources) for router in (self, *self._routers) for each in router._arounds),
        ]
        found = resources.mistakes(self.resources, needing, app=type(self))
        for what, form, each in called:
            found += around.mistakes_of_calls(what, form, each.around)
        of_calls = {resource.gives: resource.label for resource in self.resources if resource.scope == "call"}
        found += [
            f"task {task.name!r}: {of_calls[wanted]} is opened for each call, and a task runs as long as its worker: "
            "open it inside of the task"
            for task in self.tasks
            for wanted in task.needs.values()
            if wanted in of_calls
        ]
        return found

    def _examined(self) -> Examined:
        if isinstance(self._config, Config):
            return completed(self._config, self.event_types)
        return examine(self._config, context=self._nats_context, event_types=self.event_types, beside=self._beside)

    def _add_event_type(self, name: str, entry: YamlNode, *, again: bool) -> None:
        super()._add_event_type(name, entry, again=again)
        self.__dict__.pop("config", None)  # one that was loaded before does not have it

    def _nothing_to_run(self) -> str:
        """Return a sentence where a worker of the app would do nothing, as one that only publishes needs none; else an
        empty text.
        """
        if self.agents or self.timers or self.tasks:
            return ""
        return (
            f"app {self.name!r} declares no agent, timer or task, so that a worker of it does nothing; "
            "include the routers that declare them"
        )

    def warnings(self) -> list[str]:
        """Return a sentence for each thing that is not a mistake and may be meant otherwise.

        These are the warnings of the configuration, and the agents whose stream keeps only the newest notification of
        a subject although `allow_duplicates` is not set.
        """
        return [*self.config.warnings, *self._undecided()]

    def _undecided(self) -> Iterator[str]:
        if self.config.notification_backend.kind != "jetstream":
            return
        for agent in self.agents:
            if self.config.notification_schema[agent.event_type].allow_duplicates is None:
                yield (
                    f"agent {agent.name!r}: the stream of {agent.event_type!r} keeps one notification per subject: a "
                    "newer one replaces an older one also before the agent has handled it. Set "
                    f"notification_schema.{agent.event_type}.storage_policy.allow_duplicates: true where each one "
                    "counts, or false where the newest is enough"
                )

    @event_loops.awaited
    async def notify(
        self,
        event_type: str,
        identifier: Mapping[str, Any],
        payload: Any = None,
        *,
        message_id: str | None = None,
        ttl: AnyDuration | None = None,
        due: datetime | AnyDuration | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Receipt:
        """Publish one notification and wait until it is stored, or until it is kept for later.

        With a `message_id` of your own, a repeat within the stream's duplicate window (2 minutes unless configured)
        is recognised and stored once. With a `ttl`, the stream forgets it after that time: see
        `Notify.ttl`. When it is `due` at a datetime with a time zone, or after a time from now, it waits on the
        server until then, and a worker of any app stores it. A duration is a number of seconds, a text such as
        `10m`, or a timedelta. One that waits can be cancelled, and gives way to another
        that is to be delivered later under its message id. `headers` are those of its message: see `Notify.headers`.

        Raises `InvalidNotificationError` before anything is sent, `DeclarationError` where the app is not connected in
        this event loop, `TakenOverError` in a call whose singleton or slot another worker has taken, and `BackendError`
        when it could not be stored; it is tried again until `publish_deadline_seconds` first, where that may help.
        """
        wanted = Notify(
            event_type,
            identifier,
            payload,
            message_id=message_id,
            ttl=ttl,
            due=due,
            headers=headers,
        )
        return await self.session.publisher.notify(wanted)

    @event_loops.awaited
    async def request(
        self,
        event_type: str,
        identifier: Mapping[str, Any],
        payload: Any = None,
        *,
        reply: str,
        where: Filter | None = None,
        reply_type: type[R] = Any,  # type: ignore[assignment]
        timeout: AnyDuration = 30,  # noqa: ASYNC109  # of the wait alone
        message_id: str | None = None,
        ttl: AnyDuration | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Notification[R]:
        """Publish a notification, and return the first one of the event type `reply` that replies to it.

        That is the first that is stored after the request and that `where` lets through, which is as in `watch`.
        Default: it has the same values as `identifier` of all fields that both event types have. Its payload is read as
        `reply_type`. `timeout` counts from when the request is stored: a number of seconds, a text such as `10m`, or a
        timedelta.

        Where the stream knows the `message_id` already, as of a handler that is run again, the request is not stored
        again, and a reply that came since it was stored is returned. `ttl` and `headers` are as in `notify`.

        Raises as `notify` and `watch` do; `NoReplyError` where no reply comes in time, `UndecodableError` for one that
        does not fit `reply_type`, `DeclarationError` where nothing says which reply is meant. A `BackendError` of the
        wait has a note that the request is stored.
        """
        wanted = Notify(event_type, identifier, payload, message_id=message_id, ttl=ttl, headers=headers)
        filtered = None if where is None else check_filter(where)
        seconds = durations.seconds("request: timeout=", timeout)
        found: Notification[R] = await self.session.request(
            wanted, reply, filtered, timeout_seconds=seconds, reply_type=reply_type
        )
        return found

    def sync(self, function: Callable[P, Coroutine[Any, Any, T]], *arguments: P.args, **named: P.kwargs) -> T:
        """Call a coroutine function on the app's event loop from code without one, such as a view, a script, a thread
        or a plain `def`, and return what it returns: `app.sync(app.notify, "mars", {...})`, `app.sync(table.get, "a")`.

        Any number of threads may call it at the same time. `function` may be a coroutine function of your own.

        Where the app is connected in this process, it uses that connection. Else the first call connects, on an event
        loop in a thread of its own, and the connection is kept until the interpreter ends, which waits for what is
        under way. A process that is forked connects by itself. Tables and counters need an app that is connected.

        Raises as the function does, also where no connection can be made; `ConfigError`; `DeclarationError` where an
        event loop runs in this thread, which waiting would stop, and for a function that returns nothing to await.
        """
        name = getattr(function, "__qualname__", repr(function))
        if (running := event_loops.running_loop()) is not None:
            instead = f"{name}(...)" if self._loop in (None, running) else f"asyncio.to_thread(app.sync, {name}, ...)"
            raise DeclarationError(f"app.sync would stop the event loop that runs here: `await {instead}` instead")

        async def called() -> T:
            made = function(*arguments, **named)
            if not inspect.isawaitable(made):
                raise DeclarationError(f"app.sync takes a coroutine function such as app.notify, found {name}")
            return await made

        session, ours = self._session, self._portal
        if session is not None and ours is not None and ours[1] == os.getpid():
            blocking = ours[0]
        else:
            session, blocking = self._kept_open()
        before = _KEPT.set((self, session))
        try:
            return event_loops.call(blocking, called)
        finally:
            _KEPT.reset(before)

    def _kept_open(self) -> tuple[Session, BlockingPortal]:
        """Return a session for code without an event loop, opened at the first call, and the portal to its loop."""
        from aviso_workers.sessions import portal  # only here: most workers need none

        config, opening, kept = self.config, self._opening, portal.of_process()
        session = kept.session(
            (self, id(config)), lambda: open_session(app=self.name, config=config, events=Events(), opening=opening)
        )
        session.publisher.outgoings = self._outgoings
        return session, kept.blocking

    @event_loops.awaited
    async def cancel(self, event_type: str, message_id: str) -> bool:
        """Remove a notification that waits to be delivered; return False where none waits under this message id.

        The message id is in its receipt. Raises `UnknownEventTypeError`, `BackendError`.
        """
        return await self.session.cancel(event_type, message_id)

    @event_loops.awaited
    async def notify_many(self, notifications: Iterable[Notify]) -> int:
        """Publish many, some hundred at a time, and wait until all are stored; returns how many there were.

        They are taken from the iterable as they can be sent. Raises as `notify` does, at the first that fails.
        """
        return await self.session.publisher.notify_many(_several(notifications))

    @event_loops.awaited
    async def notify_together(self, notifications: Iterable[Notify], *, message_id: str | None = None) -> Receipt:
        """Publish up to 1000 notifications of one stream: all of them are stored, in this order, or none.

        The receipt is that of the last; its sequence is 0 where all were stored before. `message_id` is as in
        `notify`, for all together; single ones must have none. Raises as `notify` does;
        `RefusedError` where the server is older than 2.12, or the stream's `allow_atomic` is off.
        """
        return await self.session.publisher.notify_together(_several(notifications), message_id=message_id)

    def check(self, notification: Notify) -> None:
        """Raise `InvalidNotificationError` if `notify` would refuse it before sending. Needs no connection."""
        encode(self.config, around.changed_by(self._outgoings, notification))

    async def watch(
        self,
        event_type: str,
        where: Filter | None = None,
        *,
        from_id: int | str | None = None,
        from_date: datetime | int | str | None = None,
        decode: Callable[[bytes], Any] | None = None,
    ) -> AsyncGenerator[Notification[Any], None]:
        """Yield notifications as they come, without end; before them the stored ones from an id or a date on, if given.

        Nothing is acknowledged and no position is kept: for work that must not be lost, declare an agent. A stream that
        does not exist is waited for, with a warning, and read from its first notification on. Where the stream is
        deleted and recreated, it goes on at the first notification of the new one, with a warning; so it
        does from an id that the stream has never had. `decode` makes the payload of a body's bytes, as that of an
        agent; `bytes` leaves them as they are. What cannot be decoded is left out, with a warning. Raises
        `InvalidPositionError`, `UnknownEventTypeError`, `InvalidIdentifierError`, and `DeclarationError` for a `where`
        that is not a mapping.
        """
        start = positions.position(from_id, from_date)
        replayer = await self.session.replayer(event_type, check_filter(where), waits=True, decode=decode)
        async with aclosing(replayer.watch(start)) as notifications:
            async for notification in notifications:
                yield notification

    async def replay(
        self,
        event_type: str,
        where: Filter | None = None,
        *,
        from_id: int | str | None = None,
        from_date: datetime | int | str | None = None,
        to_id: int | str | None = None,
        to_date: datetime | int | str | None = None,
        decode: Callable[[bytes], Any] | None = None,
    ) -> AsyncGenerator[Notification[Any], None]:
        """Yield the stored notifications from an id or a date (default: the first) to another (default: the last).

        Both ends are included.

        `decode` is that of `watch`. Raises as `watch` does, and `NotFoundError` where there is no stream, it never had
        `from_id` (nor the id before), or it is deleted meanwhile.
        """
        start = positions.position(from_id, from_date)
        end = positions.position(to_id, to_date, names=("to_id", "to_date"))
        replayer = await self.session.replayer(event_type, check_filter(where), decode=decode)
        async with aclosing(replayer.replay(start, end)) as notifications:
            async for notification in notifications:
                yield notification

    @event_loops.awaited
    async def open_windows(self, agent: Callable[Concatenate[Window[A], ...], Any], key: str = "") -> list[Window[A]]:
        """Return the windows of a key that are open now, the oldest first, each with its value so far.

        Leave out `key` where the agent's `Windowing` has none. Hopping windows overlap. They are read from the server,
        and no worker needs to run: every notification that was acked before is counted in them, by whichever worker. A
        window that is over is not among them, even if the agent has not been run for it yet.

        Raises `DeclarationError` where the agent is none of the app's, or has no windows; `InvalidKeyError`;
        `UndecodableError` where what is stored is not of its type; `BackendError` where the server cannot be reached
        within `publish_deadline_seconds`.
        """
        declared = included(agent, self.agents) if isinstance(agent, Agent) else None
        if declared is None:
            names = ", ".join(each.name for each in self.agents if each.form is Window) or "none"
            raise DeclarationError(
                f"{agent!r:.100} is not one agent of app {self.name!r}, whose agents of windows are: {names}"
            )
        if declared.policy.window is None:
            raise DeclarationError(f"agent {declared.name!r} has no windows: it is a function of no Window")
        return await self.session.open_windows(declared, key)

    @event_loops.awaited
    async def key_value(self, bucket: str) -> KeyValue:
        """Return a bucket of JetStream KV, created where it is missing. Raises `BackendError`."""
        return await self.session.backend.key_value(bucket)

    def measure(self, name: str, help: str, *, labels: Sequence[str], values: Mapping[tuple[str, ...], float]) -> None:
        """Show a gauge on `/metrics` from now on, in place of what was measured under its name before.

        `values` has a number for each combination of the labels' values, in the order of `labels`; few of them, as
        Prometheus keeps a series for each. Raises `DeclarationError` where the name or a combination is none.
        """
        if not METRIC.fullmatch(name):
            raise DeclarationError(f"metric {name!r}: use letters, digits and '_', and another prefix than ours")
        if any(len(key) != len(labels) for key in values):
            raise DeclarationError(f"metric {name!r}: every value needs one text for each of {', '.join(labels)}")
        self.events.emit(Measured(name=name, help=help, labels=tuple(labels), values=dict(values)))

    async def __aenter__(self) -> Self:
        await self._connect(self.config)
        return self

    async def _connect(self, config: Config) -> None:
        if self._loop is not None:
            raise DeclarationError(f"app {self.name!r} is connected already")
        self._loop = asyncio.get_running_loop()
        session = open_session(app=self.name, config=config, events=self.events, opening=self._opening)
        try:
            self._session = await self._stack.enter_async_context(session)
            self._session.publisher.outgoings = self._outgoings
            await self._stack.enter_async_context(self._session.connect(self.tables))
            self._portal = await self._stack.enter_async_context(BlockingPortal()), os.getpid()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._session = self._portal = None
        try:
            await self._stack.aclose()
        finally:
            self._loop = None

    async def _work(self, stop: anyio.Event, *, begun: anyio.Event | None = None) -> None:
        """Run all agents, timers and tasks until `stop`, then let them finish. Inside of `async with app:`.

        `begun` is set when each agent reads its stream, or has stated why it cannot yet. Raises `BackendError` when the
        connection is lost for good.
        """
        await self.session.work(self, stop, agents=self._agents_at_work(), begun=begun)

    def _agents_at_work(self) -> list[Agent[Any, Any]]:
        """Return the agents, each with what is opened around its calls."""
        return [resources.surrounded(agent, self._around(agent), self.resources) for agent in self.agents]

    def _timers_at_work(self) -> list[Timer[Any, Any]]:
        """Return the timers, each with the resources that are opened for each of its ticks."""
        return [resources.surrounded(timer, (), self.resources) for timer in self.timers]

    def _around(self, agent: Agent[Any, Any]) -> list[Around]:
        """Return what was declared to run around an agent, the outermost first."""
        places: list[tuple[Router, str]] = [(self, agent.name)]
        if agent.name in self._included:
            places.append(self._included[agent.name])
        return [each for router, name in places for each in router._arounds if each.is_around(name, agent.form)]

    async def _run_until(self, stop: anyio.Event, listeners: Listeners, *, begun: anyio.Event | None = None) -> None:
        """Connect, and run all agents, timers and tasks until `stop`, then let them finish.

        For a worker process, and for `running`, which other programs use. `listeners` log and measure what the app
        does. `begun` is as in `_work`.

        Raises `BackendError` when the connection is refused or lost for good, `ResourceError` when a resource cannot be
        opened.
        """
        # Aviso's default is meant for a process that somebody watches: a worker waits for its servers without end.
        config = self.config.with_defaults(retry_attempts=sys.maxsize)
        async with task_group() as beside:
            beside.start_soon(listeners.work)
            listeners.tell_start(self.warnings())
            await self._connect(config)
            try:
                beside.start_soon(listeners.measure_lag, self.session)
                async with listeners.telling_lineage(self.session):
                    await self._work(stop, begun=begun)
            finally:
                await self.__aexit__(None, None, None)
            beside.cancel_scope.cancel()

    @asynccontextmanager
    async def running(self, *, status_port: int | None = None) -> AsyncGenerator[Self, None]:
        """Run agents, timers and tasks inside of another program's event loop: `async with app.running():`.

        The block begins when every agent reads its stream, or has logged why it cannot yet; a server that is not there
        is waited for, without end unless `retry_attempts` is configured. When the block ends, also because it raises or
        is cancelled, what runs may finish within `workers.drain_timeout_seconds`; a second cancellation ends that too.
        Where the connection is lost for good, the block is cancelled, and raises why. Enter and leave it in one task.

        Logs go where the program's go. With a `status_port`, /metrics, /livez and /readyz are answered on
        `workers.status.host`. Signals are left to the program.

        Raises `ConfigError` with every mistake before anything connects, `BackendError` when the connection is refused
        or lost for good, `ResourceError` when a resource cannot be opened, `DeclarationError` where the app is
        connected already.
        """
        if mistakes := self.mistakes():
            raise ConfigError(mistakes)
        # Imported here because a program that only publishes needs none of it, and metrics take long to import.
        from aviso_workers.telemetry.listeners import listening

        configured = self.config.workers.status
        status = None if status_port is None else msgspec.structs.replace(configured, port=status_port)
        begun, stop, ended = anyio.Event(), anyio.Event(), anyio.Event()
        block, work = anyio.CancelScope(), anyio.CancelScope(shield=True)
        failure: Exception | None = None
        error: BaseException | None = None

        async def run(listeners: Listeners) -> None:
            nonlocal failure
            try:
                with work:
                    await self._run_until(stop, listeners, begun=begun)
            except Exception as raised:
                failure = raised
                listeners.tell_failure(raised)
            finally:
                ended.set()
                block.cancel()

        with listening(self, status=status) as listeners:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run, listeners)
                try:
                    with block:
                        await begun.wait()
                        yield self
                except BaseException as raised:
                    error = raised  # raised below, when what runs has finished
                listeners.stopping()
                stop.set()
                if not begun.is_set():
                    work.cancel()
                try:
                    with anyio.CancelScope(shield=True):
                        await ended.wait()
                finally:
                    work.cancel()
            if failure is None:
                listeners.tell_end()
        if error is not None:
            raise error
        if failure is not None:
            raise failure

    def _mistake(self, path: str, problem: str, config: Config) -> str:
        """Return the mistake with the origin of its key (or section): a file and line, a variable, or the code."""
        origins = {
            f"workers.agents.{router}{key}": f"config= of router {router!r}"
            for router, given in self._given.items()
            for key in ("", *(f".{each}" for each in given))
        } | dict(config.origins)
        known = path
        while known and known not in origins:
            known = known.rpartition(".")[0]
        return f"{path}: {problem} ({origins[known]})" if known else f"{path}: {problem}"


def _checked(config: Config | str | Path | None) -> Config | str | Path | None:
    if config is None or isinstance(config, Config | str | Path):
        return config
    raise DeclarationError(f"config= must be the path of a file or a loaded Config, found {config!r:.100}")


def _several(notifications: Iterable[Notify]) -> Iterable[Notify]:
    if isinstance(notifications, Notify) or not isinstance(notifications, Iterable):
        raise InvalidNotificationError(
            f"notify_many and notify_together take a list of Notify, found {notifications!r:.100}"
        )
    return notifications


def _agent_mistakes(agent: Agent[Any, Any], examined: Examined) -> Iterator[str]:
    """Yield what is wrong with an agent by its annotations, its code and the configuration."""
    yield from _return_mistakes(agent)
    if agent.event_type in examined.unclear:
        return
    event_types = examined.config.notification_schema
    if agent.event_type not in event_types:
        yield str(UnknownEventTypeError(agent.event_type, event_types))
        return
    declared = event_types[agent.event_type]
    try:
        where = schema.parse_where(agent.event_type, declared, agent.where)
    except InvalidIdentifierError as error:
        yield f"where: {error}"
    else:
        if agent.key_type is not Any:
            yield from typed_identifiers.mistakes(agent.key_type, agent.event_type, declared, where)
    named = set[str]().union(*map(outputs.named_event_types, (agent.function, *agent.dead_letter_functions)))
    for name in sorted(named - event_types.keys() - examined.unclear):
        yield f"it publishes {UnknownEventTypeError(name, event_types)}"
    try:
        topic = schema.topic_of(agent.event_type, declared)
        topics.key_of(topic, agent.policy.order_by)
        for limit in agent.policy.limits:
            topics.key_of(topic, limit.by, of=f"{type(limit).__name__}: by")
        topics.key_of(topic, agent.dependency.by, of=f"dependency {agent.dependency.name!r}: by=")
    except InvalidNotificationError as error:
        yield str(error)


def _return_mistakes(agent: Agent[Any, Any]) -> Iterator[str]:
    for running in (agent, *map(agent.running, agent.dead_letter_functions)):
        if refused := outputs.refused_return(running):
            its = "its" if running is agent else "on_dead_letter: its"
            says = f"{its} annotation says that it returns {refused}"
            yield f"{says}, which fails each call: {outputs.CURE}, and annotate that"


def _renamed(declared: D, begin: str) -> D:
    if not begin:
        return declared
    renamed = copy.copy(declared)
    renamed.name = check_name("prefixed", begin + declared.name)
    return renamed


def _suggestion(key: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(key, list(known), n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else f"; known are {', '.join(sorted(known))}"
