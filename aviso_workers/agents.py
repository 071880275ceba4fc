"""Declarations: agents, tasks, and the routers that group them.

Importing an app runs this module and no I/O. What a declaration can get wrong by itself is refused here, at the line
that declares it; what depends on the configuration is `App.mistakes`.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import msgspec
from msgspec import Struct

from aviso_workers.errors import DeclarationError
from aviso_workers.notifications import Notification
from aviso_workers.verdicts import Backoff

__all__ = ["Agent", "Router", "Task", "check_name"]

P = ParamSpec("P")
R = TypeVar("R")

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Agent(Generic[P, R]):
    """A decorated async function, bound to an event type, a filter and a policy.

    Called, it is the author's function and nothing else, so that a unit test needs no app.
    """

    def __init__(
        self,
        function: Callable[P, Awaitable[R]],
        *,
        event_type: str,
        where: Mapping[str, Any],
        name: str | None,
        concurrency: int,
        retry: Backoff,
        ack_wait_seconds: float,
    ) -> None:
        self.function = function
        self.name = check_name("agent", name or str(getattr(function, "__name__", "")))
        self.event_type = event_type
        self.where = dict(where)
        self.concurrency = concurrency
        self.retry = retry
        self.ack_wait_seconds = ack_wait_seconds
        self.payload_type = _payload_type(self.name, function)
        if concurrency < 1:
            raise DeclarationError(f"agent {self.name!r}: concurrency must be 1 or more, found {concurrency}")
        if ack_wait_seconds <= 0:
            raise DeclarationError(f"agent {self.name!r}: ack_wait_seconds must be > 0, found {ack_wait_seconds}")
        self.__doc__ = function.__doc__

    def durable_name(self, app: str) -> str:
        """The durable consumer that all workers of `app` share for this agent."""
        return f"{app}__{self.name}"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R]:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Agent {self.name} on {self.event_type}>"


class Task(Struct, frozen=True, kw_only=True):
    """A long-running coroutine function that a worker runs beside its agents and starts again when it raises."""

    name: str
    function: Callable[[Any], Coroutine[Any, Any, None]]
    """Called with the app."""


class Router:
    """A group of agents and tasks that an app includes.

    `settings` is the msgspec Struct of what the group can be told in the configuration, under `workers.agents.<name>`;
    `app.settings(router)` returns it.
    """

    def __init__(self, name: str, *, settings: type[Struct] | None = None) -> None:
        self.name = check_name("router", name)
        self.settings_type = settings
        self.agents: list[Agent[Any, Any]] = []
        self.tasks: list[Task] = []

    def agent(
        self,
        event_type: str,
        *,
        where: Mapping[str, Any] | None = None,
        name: str | None = None,
        concurrency: int = 1,
        retry: Backoff | None = None,
        ack_wait_seconds: float = 20.0,
    ) -> Callable[[Callable[P, Awaitable[R]]], Agent[P, R]]:
        """Declare an agent: the function is run for every matching notification of `event_type`, at least once.

        `where` maps identifier fields to a value, a list of values, or one constraint such as `{"gte": 24}`.
        `concurrency` is how many notifications one worker handles at a time. A notification that is not settled
        within `ack_wait_seconds` is given to somebody else. `name` (default: the function's) names the durable
        consumer, so keep it when you rename the function. Raises `DeclarationError`.
        """

        def declare(function: Callable[P, Awaitable[R]]) -> Agent[P, R]:
            agent = Agent(
                function,
                event_type=event_type,
                where=where or {},
                name=name,
                concurrency=concurrency,
                retry=retry or Backoff(),
                ack_wait_seconds=ack_wait_seconds,
            )
            self._add_agent(agent)
            return agent

        return declare

    def task(self, function: Callable[[Any], Coroutine[Any, Any, None]]) -> Callable[[Any], Coroutine[Any, Any, None]]:
        """Declare a task: an async function of one argument, the app, that runs as long as the worker does."""
        name = check_name("task", getattr(function, "__name__", ""))
        if not inspect.iscoroutinefunction(function):
            raise DeclarationError(f"task {name!r}: must be an async function")
        self._add_task(Task(name=name, function=function))
        return function

    def _add_agent(self, agent: Agent[Any, Any]) -> None:
        self._refuse_twice("agent", agent.name, [known.name for known in self.agents])
        self.agents.append(agent)

    def _add_task(self, task: Task) -> None:
        self._refuse_twice("task", task.name, [known.name for known in self.tasks])
        self.tasks.append(task)

    def _refuse_twice(self, kind: str, name: str, known: Sequence[str]) -> None:
        if name in known:
            raise DeclarationError(f"{kind} {name!r} is declared twice in {self.name!r}: give one another name")


def check_name(kind: str, name: str) -> str:
    """The name, if a NATS consumer can carry it. Raises `DeclarationError`."""
    if not NAME.fullmatch(name):
        raise DeclarationError(f"{kind} name {name!r}: use 1 to 64 letters, digits, '-' and '_'")
    return name


def _payload_type(name: str, function: Callable[..., Any]) -> Any:
    """The T of the function's `Notification[T]` parameter; `Any` for a bare `Notification`."""
    wanted = "an async function of one argument, annotated `Notification` or `Notification[T]`"
    if not inspect.iscoroutinefunction(function):
        raise DeclarationError(f"agent {name!r}: must be {wanted}")
    parameters = list(inspect.signature(function).parameters.values())
    if len(parameters) != 1:
        raise DeclarationError(f"agent {name!r}: must be {wanted}, found {len(parameters)} arguments")
    try:
        hint = typing.get_type_hints(function).get(parameters[0].name)
    except (AttributeError, NameError, SyntaxError, TypeError) as error:
        raise DeclarationError(
            f"agent {name!r}: its annotation cannot be resolved ({error}); "
            "declare the payload type at module level, before the agent"
        ) from error
    if hint is Notification:
        return Any
    if typing.get_origin(hint) is Notification:
        (payload_type,) = typing.get_args(hint)
        _refuse_unreadable(name, payload_type)
        return payload_type
    raise DeclarationError(f"agent {name!r}: must be {wanted}, found {hint!r}")


def _refuse_unreadable(name: str, payload_type: Any) -> None:
    try:
        readable = not isinstance(msgspec.inspect.type_info(payload_type), msgspec.inspect.CustomType)
        msgspec.json.Decoder(payload_type)
    except TypeError as error:
        raise DeclarationError(f"agent {name!r}: its payload type cannot be read: {error}") from error
    if not readable:
        raise DeclarationError(
            f"agent {name!r}: msgspec cannot read its payload type {payload_type!r}; "
            "use a msgspec.Struct, a dataclass, a TypedDict or a plain JSON type"
        )
