"""Declarations: agents, timers, tasks, tables, event types, and the routers that group them.

Importing an app runs this module and no I/O. What a declaration can get wrong by itself is refused here, at the line
that declares it; what depends on the configuration is `App.mistakes`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import sys
import typing
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from types import FrameType, NoneType, UnionType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, overload

from msgspec import Struct
from typing_extensions import TypeVar as DefaultTypeVar

from aviso_workers.aviso import payloads, positions, typed_identifiers
from aviso_workers.aviso.literals import AnyDuration, Filter
from aviso_workers.aviso.notifications import Notification
from aviso_workers.config.documents import YamlNode
from aviso_workers.declare import around, durations, event_types, resources, timers
from aviso_workers.declare.around import Around, Changing
from aviso_workers.declare.batches import Batch, Batching, Stream
from aviso_workers.declare.dependencies import PATIENCE, Dependency
from aviso_workers.declare.limits import Rate, Slots, identifier_fields, limits_in_order
from aviso_workers.declare.resources import Resource, Scope
from aviso_workers.declare.retry import LONGEST_DELAY_SECONDS, RetryPolicy
from aviso_workers.declare.tables import Counter, Table
from aviso_workers.declare.timers import Schedule, Timer
from aviso_workers.declare.verdicts import Ack, Classifier, GivenUp, Reject, Retry
from aviso_workers.declare.windows import KeyState, Window, Windowing
from aviso_workers.errors import DeclarationError, InvalidPositionError
from aviso_workers.jetstream.specs import OURS

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
M = TypeVar("M", bound=Callable[..., Any])
S = DefaultTypeVar("S", default=Any)
E1 = TypeVar("E1", bound=Exception)
E2 = TypeVar("E2", bound=Exception)
E3 = TypeVar("E3", bound=Exception)
Classifying = Callable[[T], Retry | Reject | Ack | None]
"""A function of `on_error`, by the exceptions that it takes."""
G = TypeVar("G", bound=Callable[[GivenUp[Any, Any]], Any])
"""A function of `on_dead_letter`, with its types."""
C = TypeVar("C", bound=Changing)
Yields = AsyncIterator[None]
A = TypeVar(
    "A",
    bound=Callable[Concatenate[Notification[Any], ...], Yields]
    | Callable[Concatenate[Batch[Any], ...], Yields]
    | Callable[Concatenate[Window[Any], ...], Yields],
)

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
SINGLETON_HANDLES_IN_ORDER = (
    "singleton= is for a function of a Notification without concurrency= and order_by=: "
    "it handles one at a time, in order"
)
SINGLETON_IS_ONE_AT_A_TIME = "Slots are for an agent without singleton=, which has one call at a time"
BY_IS_OF_A_NOTIFICATION = "a dependency with by= is for a function of a Notification: others have many in a call"
TIMEOUT_NEEDS_AN_END = "timeout= is for a function of a Notification or a Batch; a Stream has no end"
RETURNS_INSTRUCTION_CLASS = "annotated to return the class Retry or Reject: return Retry() or Reject(reason) instead"


class Policy(Struct, frozen=True, kw_only=True):
    """The policy by which an agent's notifications are handled, with times in seconds. `Router.agent` explains it."""

    concurrency: int = 1
    retry: RetryPolicy = RetryPolicy()
    ack_wait: float = 20.0
    timeout: float | None = None
    limits: tuple[Rate | Slots, ...] = ()
    """In the order in which they are asked."""
    order_by: tuple[str, ...] = ()
    batch: Batching = Batching()
    window: Windowing[Any, Any] | None = None
    start: str = "all"
    states_start: bool = False
    """Whether the author has stated `start`."""
    singleton: bool = False
    depends_on: Dependency | None = None
    """What the agent depends on and shares with others; None where it has one of its own (`Agent.dependency`)."""

    @property
    def interval_seconds(self) -> float:
        """The longest time that a rate leaves from one call to the next."""
        return max((limit.interval_seconds for limit in self.limits if isinstance(limit, Rate)), default=0.0)


POLICY_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "concurrency": ((int,), "a whole number"),
    "retry": ((RetryPolicy,), "a RetryPolicy"),
    "ack_wait": ((int, float), "seconds"),
    "timeout": ((int, float, NoneType), "seconds"),
    "batch": ((Batching,), "a Batching"),
    "window": ((Windowing, NoneType), "a Windowing"),
    "depends_on": ((Dependency, NoneType), "an object that app.dependency(name) has returned"),
}
"""The types of what a decorator is given, and their names for people."""
MOST = {
    "concurrency": 10_000,
    "ack_wait": LONGEST_DELAY_SECONDS,
    "timeout": LONGEST_DELAY_SECONDS,
}
"""The largest numbers that a decorator takes. A worker has a task for each call of `concurrency`, and a server cannot
read an `ack_wait` of centuries."""
OLD_WORDS: Mapping[str, str] = {
    "rate_limit": 'limits=[Rate(100, per="1m")], which all workers of the app keep together',
    "limit": "limits=[Slots(1)]",
    "breaker": "depends_on=app.dependency(...)",
    "unavailable": "depends_on=app.dependency(..., unavailable=[...])",
    "leader": "singleton=True or False",
}
"""What to say in place of an argument that `agent` or a timer had before."""


def _without_old_words(method: M) -> M:
    """Return a method that raises `DeclarationError` for an argument that has another name now."""

    @functools.wraps(method)
    def checked(*args: Any, **named: Any) -> Any:
        for word in named.keys() & OLD_WORDS:
            raise DeclarationError(f"{method.__name__}: {word}= is gone: say {OLD_WORDS[word]}")
        return method(*args, **named)

    return cast(M, checked)


class Agent(Generic[P, R]):
    """A decorated function with its event type, filter and policy.

    A call of it runs the author's function and nothing else, so that a unit test needs no app.
    """

    def __init__(
        self,
        function: Callable[P, R],
        *,
        event_type: str,
        where: Filter,
        name: str | None,
        policy: Policy,
        decode: Callable[[bytes], Any] | None = None,
    ) -> None:
        _refuse_declared("agent", function)
        if inspect.isclass(function):
            raise DeclarationError(f"agent of the class {function.__name__}: give an object of it, which is called")
        function = _routine(function)
        self.function = function
        self.name = check_name("agent", name or _name_of(function))
        self.event_type = event_type
        self.where = dict(where)
        self.policy = policy
        self.classifiers: list[tuple[type[Exception], Classifier]] = []
        """Shared by the declarations of one function, and by its copies with a prefix."""
        self.dead_letter_functions: list[Callable[[GivenUp[Any, Any]], Any]] = []
        """The function of `on_dead_letter`, if there is one; shared as `classifiers` is."""
        self.declaration = object()
        """Shared by the copies of one declaration."""
        self.yields = inspect.isasyncgenfunction(function)
        self.in_thread = not (inspect.iscoroutinefunction(function) or self.yields)
        self.can_be_cancelled = not self.in_thread
        """Python cannot end a thread."""
        self.form, self.argument_type, self.key_type = _call_form(self.name, function)
        self.payload_type = self.argument_type
        self.decode = decode
        """The function that makes payloads of bodies, where the payload type does not say it."""
        first = next(iter(inspect.signature(function).parameters))
        self.needs: Mapping[str, Any] = resources.needs_of(f"agent {self.name!r}", function, without=(first,))
        """By argument after the first, the type of the resource that gives it."""
        self.around: Sequence[Resource] = ()
        """The resources that are opened around each call, the outermost first; `App._agents_at_work` says it."""
        self._refuse(self._wrong_types())
        self._refuse(self._contradictions())
        if policy.window is not None:
            self.payload_type, self.key_type = _folded_types(self.name, policy.window, self.argument_type)
        _refuse_unreadable_key(self.name, self.key_type)
        if decode is None:
            _refuse_unreadable(self.name, self.payload_type)
        elif not callable(decode) or inspect.iscoroutinefunction(decode):
            raise DeclarationError(
                f"agent {self.name!r}: decode= must be a plain function of the body's bytes, found {decode!r:.100}"
            )
        self.__doc__ = function.__doc__

    @overload
    def on_error(self, kind: type[E1], /) -> Callable[[Classifying[E1]], Classifying[E1]]: ...

    @overload
    def on_error(
        self, kind: type[E1], other: type[E2], /
    ) -> Callable[[Classifying[E1 | E2]], Classifying[E1 | E2]]: ...

    @overload
    def on_error(
        self, kind: type[E1], other: type[E2], third: type[E3], /
    ) -> Callable[[Classifying[E1 | E2 | E3]], Classifying[E1 | E2 | E3]]: ...

    @overload
    def on_error(self, *kinds: type[Exception]) -> Callable[[Classifying[Any]], Classifying[Any]]: ...

    def on_error(self, *kinds: type[Exception]) -> Callable[[Classifying[Any]], Classifying[Any]]:
        """Declare a function that says what to do about exceptions of these types.

        It is given the exception and returns an answer:

        - `Retry` or `Reject`: the same as when the handler raises or returns it.
        - `Ack`: the notification is acked although the handler failed, which is logged.
        - None: no answer.

        The functions whose types fit are asked in turn until one answers. They hold for every agent that the function
        was declared as. If none answers, the notification is tried again
        as `retry` says. They are not asked about a `Retry` or `Reject` of the handler.

        Raises `DeclarationError`.
        """
        _check_kinds(self.name, kinds)

        def declare(classify: Classifying[Any]) -> Classifying[Any]:
            wanted = "a function of on_error must be a plain one that takes the exception"
            _check_plain(f"agent {self.name!r}: {wanted}", classify)
            known = [(kind, each) for kind, each in self.classifiers if not _is_again(each, classify, by_name=True)]
            self.classifiers[:] = [*known, *((kind, classify) for kind in kinds)]
            return classify

        return declare

    def on_dead_letter(self, function: G) -> G:
        """Declare the function that is called when a notification of this agent becomes a dead letter.

        It is given a `GivenUp` when the dead letter is stored, at least once for each, and what it returns or yields is
        published, as what the agent's function returns. A plain function runs in a thread, and the agent's `timeout`
        holds for each call. A call that fails is made again after 1 and after 2 seconds; if the third one fails too,
        that is logged, and the dead letter stays. It holds for every agent that the agent's function was declared as.

        Raises `DeclarationError`.
        """
        wanted = f"agent {self.name!r}: on_dead_letter needs a function that takes one GivenUp and no resources"
        _require_one_argument(wanted, function)
        if isgeneratorfunction(function):
            raise DeclarationError(f"{wanted}; one that yields must be async, found {function!r:.100}")
        known = self.dead_letter_functions
        if known and not _is_again(known[0], function):
            raise DeclarationError(f"agent {self.name!r} has a function of on_dead_letter already: {known[0]!r:.100}")
        known[:] = [function]
        return function

    def running(self, function: Callable[..., Any]) -> Agent[Any, Any]:
        """Return an agent of the same name and policy that runs this function of `on_dead_letter` in place of its own,
        and nothing around it."""
        other: Agent[Any, Any] = copy.copy(self)
        other.function, other.form, other.needs, other.around = _routine(function), GivenUp, {}, ()
        other.yields, other.dead_letter_functions = isasyncgenfunction(other.function), []
        other.in_thread = not (iscoroutinefunction(other.function) or other.yields)
        other.can_be_cancelled = not other.in_thread
        return other

    @property
    def dependency(self) -> Dependency:
        """What the agent depends on: that of `depends_on`, or one of its own with the agent's name."""
        return self.policy.depends_on or Dependency(self.name)

    def durable_name(self, app: str) -> str:
        """Return the name of the durable consumer that all workers of an app share for the agent."""
        return durable_name(app, self.name)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Agent {self.name} on {self.event_type}>"

    def _refuse(self, mistakes: Iterable[str]) -> None:
        if lines := [f"agent {self.name!r}: {mistake}" for mistake in mistakes]:
            raise DeclarationError("\n".join(lines))

    def _wrong_types(self) -> Iterator[str]:
        for name, (kind, what) in POLICY_TYPES.items():
            found = getattr(self.policy, name)
            if not isinstance(found, kind) or isinstance(found, bool):
                yield f"{name}= takes {what}, found {found!r:.100}"

    def _contradictions(self) -> Iterator[str]:
        policy, form = self.policy, self.form
        for name, most in MOST.items():
            if (found := getattr(policy, name)) is not None and not 0 < found <= most:
                yield f"{name} must be above 0 and at most {most}, found {found}"
        in_turn = form is Notification and policy.concurrency <= 1 and not policy.order_by
        returned = _hint(self.name, self.function, "return")
        rules = [
            (policy.batch != Batching() and form is not Batch, "batch= is for a function of a Batch"),
            (policy.window is not None and form is not Window, "window= is for a function of a Window"),
            (policy.window is None and form is Window, "a function of a Window needs window=Windowing(...)"),
            (policy.order_by and form is not Notification, "order_by= is for a function of a Notification"),
            (self.dependency.by and form is not Notification, BY_IS_OF_A_NOTIFICATION),
            (policy.limits and form is not Notification, "limits= is for a function of a Notification"),
            (policy.singleton and any(isinstance(each, Slots) for each in policy.limits), SINGLETON_IS_ONE_AT_A_TIME),
            (policy.singleton and not in_turn, SINGLETON_HANDLES_IN_ORDER),
            (policy.timeout and form is Stream, TIMEOUT_NEEDS_AN_END),
            (self.in_thread and form is Stream, "a function of a Stream must be async"),
            (isgeneratorfunction(self.function), "a function that yields must be async; a plain one may return a list"),
            (_holds_instruction_class(returned), RETURNS_INSTRUCTION_CLASS),
        ]
        yield from (mistake for is_made, mistake in rules if is_made)


class Task:
    """A long-running async function that a worker runs beside its agents and starts again when it raises."""

    def __init__(self, function: Callable[..., Coroutine[Any, Any, None]], *, name: str) -> None:
        if not inspect.iscoroutinefunction(function):
            raise DeclarationError(f"task {name!r}: must be an async function")
        self.function: Callable[..., Coroutine[Any, Any, object]] = function
        self.name = name
        self.needs: Mapping[str, Any] = resources.needs_of(f"task {name!r}", function)
        """By argument, the type of the resource that gives it."""
        self.around: Sequence[Resource] = ()


Declaration = (
    Agent[Any, Any]
    | Timer[Any, Any]
    | Task
    | Dependency
    | Resource
    | Changing
    | tuple[str, Table[Any] | Counter | YamlNode]
)
"""A declaration of a router: some have a name that is not their own."""


class Taker(Protocol):
    """Adds a declaration to an app; `again` lets it take the place of one of the same name."""

    def __call__(self, declared: Declaration, *, again: bool) -> None: ...


class Router(Generic[S]):
    """A group of agents, timers, tasks, tables, dependencies, resources, event types, and functions that run around
    agents.

    An app includes it. `settings` is the msgspec Struct of the group's settings, which the configuration has under
    `workers.agents.<name>`; `app.settings(router)` returns them.
    """

    _kind = "router"
    """The name of the kind in errors."""

    def __init__(self, name: str, *, settings: type[S] | None = None) -> None:
        self.name = check_name(self._kind, name)
        if settings is not None and not (isinstance(settings, type) and issubclass(settings, Struct)):
            raise DeclarationError(
                f"{self._kind} {name!r}: settings= must be a msgspec Struct, found {settings!r:.100}"
            )
        self._settings_type = settings
        self.agents: list[Agent[Any, Any]] = []
        self.timers: list[Timer[Any, Any]] = []
        self.tasks: list[Task] = []
        self.tables: dict[str, Table[Any] | Counter] = {}
        self.dependencies: dict[str, Dependency] = {}
        """What agents depend on, by name."""
        self.resources: list[Resource] = []
        self.event_types: list[tuple[str, YamlNode]] = []
        """By name, each as an entry of `notification_schema`."""
        self._arounds: list[Around] = []
        self._outgoings: list[Changing] = []
        """Those of an app have those of its routers among them. Its publishers have this very list."""
        self._takers: dict[object, Taker] = {}
        """By app and prefix, what adds a declaration to an app that includes the router."""

    @_without_old_words
    def agent(
        self,
        event_type: str,
        *,
        where: Filter | None = None,
        name: str | None = None,
        concurrency: int = 1,
        retry: RetryPolicy | None = None,
        ack_wait: AnyDuration = 20.0,
        timeout: AnyDuration | None = None,
        limits: Sequence[Rate | Slots] = (),
        order_by: Sequence[str] = (),
        batch: Batching | None = None,
        window: Windowing[Any, Any] | None = None,
        start: int | str | datetime | None = None,
        singleton: bool = False,
        depends_on: Dependency | None = None,
        decode: Callable[[bytes], Any] | None = None,
    ) -> Callable[[Callable[P, R]], Agent[P, R]]:
        """Declare an agent: the function is run for every matching notification of `event_type`, at least once.

        The function's first argument is annotated `Notification[T]`, `Batch[T]`, `Stream[T]` or `Window[A]`. `T` is the
        type of the payload. A second type, as in `Notification[T, K]`, is that of `notification.key`. A plain function
        runs in a thread. A duration is a number of seconds, a text such as `30s`, or a timedelta.

        - `where`: a value, a list of values, or one constraint such as `{"gte": 24}` for each identifier field to
          filter by. Default: all notifications.
        - `name`: the agent's name, from which that of its durable consumer is made. Keep it when you rename the
          function. Default: the function's name.
        - `concurrency`: the number of calls that one worker makes at the same time, at most 10,000.
        - `retry`: how often and after which delays a failed notification is tried again. Default: `RetryPolicy()`.
        - `ack_wait`: the time after which another worker is given the notifications of a worker that died. It does not
          limit a call.
        - `timeout`: the time after which a call is cancelled, which counts as a failure. A plain function is not
          cancelled: it has failed when it ends. Default: no limit.
        - `limits`: how many calls all workers of the app begin together in a time, `Rate(100, per="1m")`, or make at
          the same time, `Slots(1)`. A call begins when all of them let it. Default: no limit.
        - `order_by`: identifier fields. Within one worker, notifications with equal values of them are handled strictly
          one after another, also while one of them waits to be tried again.
        - `batch`: how the notifications of a `Batch` are collected. Default: `Batching()`.
        - `window`: how the notifications of a `Window` are gathered, which that type needs.
        - `start`: where an agent begins that has never run: `all` (the first stored notification), `new` (those that
          are published from then on), a sequence or a time. Default: `all`, unless the agent may be a renamed one:
          then it does not begin before it is said which.
        - `singleton`: let one worker of all that run the app handle everything, one notification at a time and in
          order. If it dies, another one takes over within `ack_wait`.
        - `depends_on`: what the agent depends on, such as a database: an object of `dependency(...)`. While it is away,
          no failure that says so counts as an attempt. Agents that are given the same one wait together. Default: the
          agent has one of its own, with the defaults of `dependency`.
        - `decode`: a function that makes the payload of the bytes of a body, such as a protobuf message's `FromString`,
          instead of `T`. A body for which it raises becomes a dead letter.

        A function may be declared again, for another event type or on another router. Each declaration is an agent of
        its own, with a consumer, a name and a policy. What `on_error` of one of them declares holds for all.

        Raises `DeclarationError`.
        """
        _check_text("agent", "event_type", event_type, 'the name of an event type, as in @app.agent("mars")')
        filtered = check_filter(where)
        fields = identifier_fields("agent: order_by=", order_by)
        asked = limits_in_order(limits)

        def declare(function: Callable[P, R]) -> Agent[P, R]:
            itself = function.function if isinstance(function, Agent) else function  # declared for another one already
            policy = Policy(
                concurrency=concurrency,
                retry=RetryPolicy() if retry is None else retry,
                ack_wait=_seconds(name or _name_of(itself), "ack_wait", ack_wait),
                timeout=None if timeout is None else _seconds(name or _name_of(itself), "timeout", timeout),
                limits=asked,
                order_by=fields,
                batch=Batching() if batch is None else batch,
                window=window,
                start="all" if start is None else _start(name or _name_of(itself), start),
                states_start=start is not None,
                singleton=singleton,
                depends_on=depends_on,
            )
            agent = Agent(itself, event_type=event_type, where=filtered, name=name, policy=policy, decode=decode)
            if isinstance(function, Agent):
                agent.classifiers = function.classifiers
                agent.dead_letter_functions = function.dead_letter_functions
            self._add(agent)
            return agent

        return declare

    @_without_old_words
    def every(
        self, interval: AnyDuration, *, singleton: bool, catch_up: bool = False, name: str | None = None
    ) -> Callable[[Callable[P, R]], Timer[P, R]]:
        """Declare a timer: the function is run at whole multiples of an interval such as `30s`, `5m` or `1h`, counted
        from 1970 UTC. It may also be a whole number of seconds or a timedelta.

        The function is async. It may take a `Tick`, and resources.

        - `singleton`: True lets only one worker of all that run the app run the timer, and another one when that dies.
          No tick is run twice. With False, every worker runs it.
        - `catch_up`: run every tick that was missed, the oldest first. With `singleton`, these are also the ticks that
          came while no worker was there. Default: a tick that was missed by more than a minute is skipped.
        - `name`: the timer's name. Default: the function's name.

        A tick that raises is not run again. Raises `DeclarationError`.
        """
        if callable(interval):
            raise DeclarationError(
                f'every: interval must be a duration, as in @app.every("30s", singleton=True), found {interval!r:.100}'
            )
        return self._timer(lambda: timers.every(interval), singleton=singleton, catch_up=catch_up, name=name)

    @_without_old_words
    def cron(
        self,
        expression: str,
        *,
        singleton: bool,
        timezone: str = "UTC",
        catch_up: bool = False,
        name: str | None = None,
    ) -> Callable[[Callable[P, R]], Timer[P, R]]:
        """Declare a timer as `every` does, at the times of a cron expression.

        The `expression` has five fields (minute, hour, day, month, weekday), which are times in `timezone`, such as
        `Europe/Berlin`.

        Raises `DeclarationError`.
        """
        example = '@app.cron("0 6 * * *", singleton=True)'
        _check_text("cron", "expression", expression, f"text of five fields, as in {example}")
        return self._timer(lambda: timers.cron(expression, timezone), singleton=singleton, catch_up=catch_up, name=name)

    def task(self, function: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, Coroutine[Any, Any, None]]:
        """Declare a task: an async function that runs as long as the worker does. If it raises, it is started again.

        It may take resources, and the app as an argument that is annotated `App`. Raises `DeclarationError`.
        """
        if not callable(function):
            raise DeclarationError(f"task: must be an async function below @app.task, found {function!r:.100}")
        _refuse_declared("task", function)
        self._add(Task(function, name=check_name("task", getattr(function, "__name__", ""))))
        return function

    @overload
    def table(self, name: str, type: type[T], *, default: T, history: int = 1, cached: bool = False) -> Table[T]: ...

    @overload
    def table(self, name: str, type: type[T], *, history: int = 1, cached: bool = False) -> Table[T | None]: ...

    @overload  # for what a type checker sees no class in, such as `int | None`
    def table(
        self, name: str, type: UnionType, *, default: Any = None, history: int = 1, cached: bool = False
    ) -> Table[Any]: ...

    def table(self, name: str, type: Any, *, default: Any = None, history: int = 1, cached: bool = False) -> Table[Any]:
        """Declare a table: values of one type by key, in a bucket that all workers of the app share.

        - `type`: a msgspec Struct, a dataclass, a TypedDict, a pydantic model or a plain JSON type.
        - `default`: what `get` returns for a key without a value.
        - `history`: how many values of each key are kept, from 1 to 64.
        - `cached`: also keep the whole table in every worker, for handlers that read often.

        Raises `DeclarationError`.
        """
        table: Table[Any] = Table(check_name("table", name), type, default=default, history=history, cached=cached)
        self._add_table(name, table, again=_is_called_at_prompt(sys._getframe(1)))
        return table

    def counter(self, name: str) -> Counter:
        """Declare a counter: whole numbers by key, which the server adds up (nats-server 2.12 or newer).

        Raises `DeclarationError`.
        """
        counter = Counter(check_name("counter", name))
        self._add_table(name, counter, again=_is_called_at_prompt(sys._getframe(1)))
        return counter

    def dependency(
        self,
        name: str,
        *,
        unavailable: Sequence[type[Exception]] = (),
        patience: AnyDuration = PATIENCE,
        by: Sequence[str] = (),
    ) -> Dependency:
        """Declare what agents depend on, such as a database, which are given it as `depends_on=`.

        While it is away, agents try one call a second and go on when one succeeds. What fails because it is away is
        tried again without a failed attempt.

        - `unavailable`: exceptions that say that it is away, beside `Unavailable` and the errors of connections, which
          every agent knows.
        - `patience`: how long a notification is tried again without a failed attempt: a number of seconds, a text such
          as `12h`, or a timedelta. After that it becomes a dead letter. With 0, such a failure is an attempt as any
          other. Default: a day.
        - `by`: identifier fields that are part of the topic. Then it is away for one value of them alone, as a tenant
          whose server asks to wait.

        The `Dependency` says whether it is away. Raises `DeclarationError`.
        """
        made = Dependency(check_name("dependency", name), unavailable=unavailable, patience=patience, by=by)
        self._add_dependency(made, again=_is_called_at_prompt(sys._getframe(1)))
        return made

    def event_type(
        self,
        name: str,
        *,
        key: Sequence[str],
        identifier: Mapping[str, Mapping[str, Any]] | None = None,
        payload: Mapping[str, Any] | None = None,
        storage_policy: event_types.StorageKeys | None = None,
        latest_only: bool = False,
        base: str | None = None,
    ) -> None:
        """Declare an event type, as an entry of `notification_schema` does in a configuration file.

        Its parts have the keys and values that they have in a file.

        - `key`: the identifier fields that make up the subject, in order (`topic.key_order` in a file).
        - `base`: the first part of the subject, which also names the stream (`topic.base`). Default: the event type's
          name.
        - `identifier`: a rule for each field, such as `{"step": {"type": "IntHandler", "range": [0, 360], "required":
          True}}`. A field of the key without a rule may be any text (StringHandler).
        - `payload`: `{"required": True}` if each notification must have a payload.
        - `latest_only`: keep only the newest notification of each subject, as Aviso does for an event type of a file
          that says nothing else. A newer one then removes an older one, also before an agent has handled that. Default:
          the stream keeps every notification.
        - `storage_policy`: what limits the stream, such as `{"retention_time": "30d", "max_size": "2Gi"}`.

        `App.mistakes` lists what is wrong with it, with the file and line of this call, and also an event type that the
        configuration's file or another declaration describes differently. Raises `DeclarationError` for what no file
        could hold.
        """
        caller = sys._getframe(1)
        declared = event_types.declare(
            name,
            key=key,
            identifier=identifier,
            payload=payload,
            storage_policy=storage_policy,
            latest_only=latest_only,
            base=base,
            owner=f"{type(self).__name__} {self.name!r}",
            call=caller,
        )
        self._add_event_type(*declared, again=_is_called_at_prompt(caller))

    def _add_event_type(self, name: str, entry: YamlNode, *, again: bool) -> None:
        known = [each for each in self.event_types if not (again and each[0] == name)]
        self.event_types = [*known, (name, entry)]
        self._tell((name, entry), again=again)

    def _add_table(self, name: str, table: Table[Any] | Counter, *, again: bool) -> None:
        if name in self.tables and not again:
            raise self._twice("table", name)
        self.tables[name] = table
        self._tell((name, table), again=again)

    def _add_dependency(self, dependency: Dependency, *, again: bool) -> None:
        if dependency.name in self.dependencies and not again:
            raise self._twice("dependency", dependency.name)
        self.dependencies[dependency.name] = dependency
        self._tell(dependency, again=again)

    @overload
    def resource(self, function: Callable[P, R], /) -> Callable[P, R]: ...

    @overload
    def resource(self, /, *, scope: Scope) -> Callable[[Callable[P, R]], Callable[P, R]]: ...

    def resource(self, function: Any = None, /, *, scope: Scope = "worker") -> Any:
        """Declare a resource: an object that a worker opens, such as a connection, for functions that ask for it.

        The function is a generator function that opens the resource, yields it and closes it; or a function that
        returns something that needs no closing. Both may be async or not: one that is not async keeps the rest of the
        worker waiting while it runs. Its return annotation, such as `-> AsyncIterator[Database]` or `-> Settings`, is
        the type of the resource. Agents, timers and other resources that have an argument of that type are given it. A
        worker opens it once, before its agents and timers.

        With `scope="call"`, it is opened for each call of an agent or tick of a timer that needs it, and closed after
        that. It may take the `Notification[Any]` of its call. What the agent's function raises is raised at the
        `yield`; the call fails with it even if the resource catches it. If the resource itself raises, the call fails.

        Raises `DeclarationError`.
        """

        def declare(function: Callable[P, R]) -> Callable[P, R]:
            self._add_resource(resources.declare(function, scope))
            return function

        return declare if function is None else declare(function)

    @overload
    def around(self, function: A, /) -> A: ...

    @overload
    def around(self, /, *, agents: Sequence[str]) -> Callable[[A], A]: ...

    def around(self, function: Any = None, /, *, agents: Sequence[str] | None = None) -> Any:
        """Declare a function that runs around each call of agents: an async generator function that yields once.

        At the `yield`, the agent's function is run, and what it returns or yields is published. The first argument is
        annotated with what the call takes, `Notification[Any]`, `Batch[Any]` or `Window[Any]`; further arguments are
        resources. It runs around all agents of the app or router that take the same, or only around those whose names
        are in `agents`. If there are several, the one that is declared first is the outermost. Those of an app are
        outside of those of a router.

        What the agent's function raises, or returns as `Retry` or `Reject`, is raised at the `yield`. If it is not
        raised again, the notification is acked. Any other exception, also before or after the `yield`, is a failure of
        the call, as if the agent's function had raised it. The agent's `timeout` holds for the agent's function, and
        twice the `timeout` for the whole call.

        Raises `DeclarationError`.
        """

        def declare(function: A) -> A:
            self._add_around(around.declare(function, agents))
            return function

        return declare if function is None else declare(function)

    def outgoing(self, function: C) -> C:
        """Declare a function that sees each notification that the app is about to publish, and may change it.

        It is given the `Notify` and returns another one, or None where it stays as it is. It is called for what
        `App.notify`, `notify_many` and `notify_together` are given, and what agents return or yield,
        before anything of it is checked. If there are several, each is given what the one before has made, in the order
        of their declarations; those of a router hold for all of the app. It runs on the event loop, which it must not
        block. If it raises, `InvalidNotificationError` says so, and nothing is sent. Raises `DeclarationError`.
        """
        _check_plain("outgoing: must be a plain function that takes a Notify", function)
        self._add_outgoing(function)
        return function

    def _add_outgoing(self, function: Changing) -> None:
        known = [
            each for each in self._outgoings if each is not function and not _is_again(each, function, by_name=True)
        ]
        self._outgoings[:] = [*known, function]
        self._tell(function, again=False)

    def _add_resource(self, resource: Resource, *, again: bool = False) -> None:
        others = [
            known
            for known in self.resources
            if known.name != resource.name or not (again or _is_again(known.function, resource.function))
        ]
        for known in others:
            if known.gives == resource.gives:
                raise DeclarationError(
                    f"resources {known.name!r} and {resource.name!r} of {self.name!r} both give "
                    f"{resources.spelled(resource.gives)}: let one of them give a type of its own, such as a NewType"
                )
        self.resources = [*others, resource]
        self._tell(resource, again=again)

    def _add_around(self, declared: Around) -> None:
        for place, known in enumerate(self._arounds):
            if known.name == declared.name and _is_again(known.function, declared.function):
                self._arounds[place] = declared
                return
        self._arounds.append(declared)

    def _timer(
        self, schedule: Callable[[], Schedule], *, singleton: bool, catch_up: bool, name: str | None
    ) -> Callable[[Callable[P, R]], Timer[P, R]]:
        def declare(function: Callable[P, R]) -> Timer[P, R]:
            _refuse_declared("timer", function)
            known_as = check_name("timer", name or str(getattr(function, "__name__", "")))
            try:
                made = schedule()
            except ValueError as error:
                raise DeclarationError(f"timer {known_as!r}: {error}") from error
            timer = Timer(function, name=known_as, schedule=made, singleton=singleton, catch_up=catch_up)
            self._add(timer)
            return timer

        return declare

    def _declarations(self) -> list[Declaration]:
        """Return all that the router has, but for what runs around its agents."""
        return [
            *self.dependencies.values(),  # before the agents that are given them
            *self.agents,
            *self.timers,
            *self.tasks,
            *self.tables.items(),
            *self.resources,
            *self.event_types,
            *self._outgoings,
        ]

    def _tell(self, declared: Declaration, *, again: bool) -> None:
        for taker in self._takers.values():
            taker(declared, again=again)

    def _add(self, declared: Agent[Any, Any] | Timer[Any, Any] | Task, *, again: bool = False) -> None:
        """Add it to those of its kind, in place of one of its name that is declared `again`."""
        kind = type(declared).__name__.lower()
        known: list[Any] = getattr(self, f"{kind}s")
        for place, each in enumerate(known):
            if each.name == declared.name:
                if not (again or _is_again(each.function, declared.function)):
                    raise self._twice(kind, declared.name)
                known[place] = declared
                break
        else:
            known.append(declared)
        self._tell(declared, again=again)

    def _twice(self, kind: str, name: str) -> DeclarationError:
        return DeclarationError(f"{kind} {name!r} is declared twice in {self.name!r}: give one another name")


def is_at_prompt(module: str = "__main__") -> bool:
    """Return whether the module is what is typed at Python's prompt or in the cells of a notebook, which are run again
    and again: what they declare takes the place of what they declared before.
    """
    return module == "__main__" and hasattr(sys, "ps1")  # which an interactive shell sets, IPython's as well


def _refuse_declared(kind: str, function: object) -> None:
    """Raise `DeclarationError` where a decorator is above another one that has made an agent or timer of the function.

    An agent of an agent is declared again (`Router.agent`), with its function.
    """
    if isinstance(function, Agent | Timer):
        raise DeclarationError(
            f"{kind} of {function!r}: a function is one agent, timer or task only: declare another function, which may "
            f"call {function.name}.function"
        )


def _is_called_at_prompt(caller: FrameType) -> bool:
    return is_at_prompt(caller.f_globals.get("__name__", ""))


def _is_again(known: Callable[..., Any], declared: Callable[..., Any], *, by_name: bool = False) -> bool:
    """Return whether both were typed at the prompt, one after the other. One that is declared twice is the same one."""
    functions = [each.func if isinstance(each, partial) else each for each in (known, declared)]
    if by_name and len({getattr(each, "__name__", "") for each in functions}) > 1:
        return False
    return known is not declared and all(is_at_prompt(getattr(each, "__module__", "")) for each in functions)


def _name_of(function: Callable[..., Any]) -> str:
    found = getattr(function, "__name__", "")
    if found in ("", "__call__", "<lambda>"):
        raise DeclarationError(f"the agent of {function!r:.100} has no name of its own: give it name=")
    return str(found)


def _check_text(decorator: str, argument: str, found: object, wanted: str) -> None:
    """Raise `DeclarationError` where the first argument of a decorator is not text, as where it has no parentheses."""
    if not isinstance(found, str):
        raise DeclarationError(f"{decorator}: {argument} must be {wanted}, found {found!r:.100}")


def _check_kinds(agent: str, kinds: Sequence[object]) -> None:
    """Raise `DeclarationError` for what is not a type of exceptions, also where there is none."""
    wrong = [kind for kind in kinds if not (isinstance(kind, type) and issubclass(kind, BaseException))]
    if wrong or not kinds:
        found = f"{wrong[0]!r:.100}" if wrong else "none"
        raise DeclarationError(
            f"agent {agent!r}: on_error takes types of exceptions, as in @{agent}.on_error(ValueError, OSError), "
            f"found {found}"
        )


def _check_plain(wanted: str, function: object) -> None:
    if any(is_one(function) for is_one in (iscoroutinefunction, isasyncgenfunction, isgeneratorfunction)):
        raise DeclarationError(f"{wanted}, found an async function or one that yields: {function!r:.100}")
    _require_one_argument(wanted, function)


def _require_one_argument(wanted: str, function: object) -> None:
    """Raise `DeclarationError` with what is wanted, where it is no function of one argument."""
    if not callable(function):
        raise DeclarationError(f"{wanted}, found {function!r:.100}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # of a function that is not written in Python
    try:
        signature.bind(object())
    except TypeError as error:
        raise DeclarationError(f"{wanted}, and nothing else; found {function!r:.100}{signature}") from error


def _routine(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function; of an object that is called, its method."""
    if not isinstance(function, partial) and not inspect.isroutine(function) and callable(function):
        return cast(Callable[P, R], function.__call__)  # type: ignore[operator]
    return function


def _seconds(name: str, argument: str, duration: object) -> float:
    return durations.seconds(f"agent {name!r:.100}: {argument}=", duration)


def _start(name: str, start: int | str | datetime) -> str:
    try:
        return positions.parse_start(start)
    except InvalidPositionError as error:
        raise DeclarationError(
            f"agent {name!r:.100}: start must be `all`, `new`, a sequence, or a time such as 2026-11-20T06:00:00Z, "
            f"found {start!r:.100}"
        ) from error


def durable_name(app: str, agent: str) -> str:
    """Return the durable consumer that all workers of the app share for this agent."""
    return f"{app}__{agent}"


def agent_of(consumer: str) -> tuple[str, str] | None:
    """Return the app and the agent of a durable consumer; None where the name is not that of an agent."""
    app, between, agent = consumer.partition("__")
    return (app, agent) if app and between and agent and not f"{app}_".startswith(OURS) else None


def included(agent: Agent[Any, Any], agents: Sequence[Agent[Any, Any]]) -> Agent[Any, Any] | None:
    """Return the one of an app's agents that was declared as this one, and may have a prefix now; None where there is
    none, or several."""
    same = [each for each in agents if each.declaration is agent.declaration]
    return same[0] if len(same) == 1 else None


def check_filter(where: Filter | None) -> Filter:
    """Return the filter of an agent, a watch or a replay, empty where there is none. Raises `DeclarationError`."""
    if where is None:
        return {}
    if not isinstance(where, Mapping):
        raise DeclarationError(
            f'where= must be a mapping of identifier fields, as in where={{"class": "od"}}, found {where!r:.100}'
        )
    return where


def check_name(kind: str, name: str) -> str:
    """Return the name, if a NATS consumer can carry it. Raises `DeclarationError`."""
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        raise DeclarationError(f"{kind} name {name!r:.100}: use 1 to 64 letters, digits, '-' and '_'")
    return name


def _call_form(name: str, function: Callable[..., Any]) -> tuple[type, Any, Any]:
    """Return which of Notification, Batch, Stream and Window the function takes, and the types of payload and key
    (`Any` for none)."""
    wanted = "a function whose first argument is annotated Notification[T], Batch[T], Stream[T] or Window[A]"
    if not callable(function):
        raise DeclarationError(f"agent {name!r}: must be {wanted}, found {function!r:.100}")
    parameters = list(inspect.signature(function).parameters)
    if not parameters:
        raise DeclarationError(f"agent {name!r}: must be {wanted}, found no argument")
    hint = _hint(name, function, parameters[0])
    form = typing.get_origin(hint) or hint
    if form not in (Notification, Batch, Stream, Window):
        if parameters[0] == "self":
            raise resources.unbound(f"agent {name!r}", function)
        found = "no annotation" if hint is None else resources.spelled(hint)
        raise DeclarationError(f"agent {name!r}: must be {wanted}, found {found} of {parameters[0]!r}")
    resources.require_positional(f"agent {name!r}", function, parameters[0])
    return form, *_types_of(hint)


def _folded_types(name: str, window: Windowing[Any, Any], value_type: Any) -> tuple[Any, Any]:
    """Return the types of payload and key of what is folded into windows of this type of values (`Any` for none)."""
    _refuse_unreadable(name, value_type)
    state: Any = KeyState
    try:
        payloads.json_reader(state[value_type])(payloads.to_json(KeyState(open={0: window.initial})))
    except (TypeError, ValueError) as error:
        raise DeclarationError(f"agent {name!r}: initial= is not a value of its Window: {error}") from error
    try:
        _, folded = inspect.signature(window.fold).parameters
    except (TypeError, ValueError) as error:
        raise DeclarationError(
            f"agent {name!r}: fold= must be a function of a value and a Notification[T], found {window.fold!r}"
        ) from error
    return _types_of(_hint(name, window.fold, folded))


def _types_of(hint: Any) -> tuple[Any, Any]:
    """Return the types of payload and key that an annotation such as `Notification[T, K]` names (`Any` for none)."""
    payload_type, key_type, *_ = (*typing.get_args(hint), Any, Any)
    return payload_type, key_type


def _hint(name: str, function: Callable[..., Any], parameter: str) -> Any:
    """Return the annotation, resolved; None for none."""
    try:
        return resources.hints_of(f"agent {name!r}", function).get(parameter)
    except DeclarationError as error:
        raise DeclarationError(
            f"agent {name!r}: its annotation cannot be resolved ({error.__cause__}); "
            "declare the payload type at module level, before the agent"
        ) from error


def _holds_instruction_class(annotation: Any) -> bool:
    """Return whether `type[Retry]` or `type[Reject]` is a part of the annotation."""
    parts = typing.get_args(annotation)
    if typing.get_origin(annotation) is type:
        return bool({Retry, Reject}.intersection(parts))
    return any(map(_holds_instruction_class, parts))


def _refuse_unreadable_key(name: str, key_type: Any) -> None:
    try:
        if key_type is not Any:
            typed_identifiers.check(key_type)
    except TypeError as error:
        spelled = resources.spelled(key_type)
        raise DeclarationError(f"agent {name!r}: no identifier can be read as {spelled}: {error}") from error


def _refuse_unreadable(name: str, payload_type: Any) -> None:
    try:
        payloads.decoder(payload_type)
    except TypeError as error:
        raise DeclarationError(
            f"agent {name!r}: its payload type cannot be read: {error}; use a msgspec.Struct, a dataclass, a "
            "TypedDict, a pydantic model, a plain JSON type or bytes, or say decode="
        ) from error
