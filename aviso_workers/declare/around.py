"""Functions that authors declare to run around each call of their agents: before it, after it, and where it fails;
and functions of `outgoing`, which see what their app is about to publish, and change it.

Pure. `engine.calls` runs the former, beside the resources that are opened for each call. `engine.publisher` asks the
latter before anything of a notification is checked.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from aviso_workers.aviso import literals
from aviso_workers.aviso.notifications import Notification, Notify
from aviso_workers.declare import resources
from aviso_workers.declare.batches import Batch, Stream
from aviso_workers.declare.resources import Resource
from aviso_workers.declare.windows import Window
from aviso_workers.errors import DeclarationError, InvalidNotificationError, describe

FORMS = (Notification, Batch, Window)
Changing = Callable[[Notify], Notify | None]
"""A function of `outgoing`; None leaves the notification as it is."""


class Called(Protocol):
    """An agent, or what runs around it: its name, and the annotation of its function's first argument.

    Of `Notification[T]`, `form` is `Notification` and `argument_type` is `T`; likewise of a Batch, Stream or Window.
    """

    @property
    def name(self) -> str: ...
    @property
    def form(self) -> type: ...
    @property
    def argument_type(self) -> Any: ...


class Around(Resource, frozen=True, kw_only=True):
    """An async generator function that runs around the calls of agents: each call is made where it yields."""

    form: type
    """The type of its first argument: a Notification, a Batch or a Window. It runs around agents that take the same."""
    argument_type: Any
    """The `T` of `Notification[T]`; `Any` fits every agent."""
    agents: tuple[str, ...] | None
    """The names of the agents that it runs around; None for all of the app or router."""

    @property
    def label(self) -> str:
        return f"around {self.name!r}"

    @property
    def needed_resources(self) -> Mapping[str, Any]:
        """For each argument after the first, the type of the resource that it is given."""
        return {name: wanted for name, wanted in self.needs.items() if wanted is not self.form}

    def is_around(self, name: str, form: type) -> bool:
        """Return whether it runs around the calls of an agent of this form.

        `name` is the agent's name in the app or router that declares this one.
        """
        return form is self.form and (self.agents is None or name in self.agents)


def declare(function: Callable[..., AsyncIterator[None]], agents: Sequence[str] | None) -> Around:
    """Return the declaration of a function that runs around the agents of these names; None for all.

    Raises `DeclarationError`.
    """
    name = str(getattr(function, "__name__", ""))
    what = f"around {name!r}"
    if isinstance(agents, str):
        raise DeclarationError(f"{what}: agents= is a list of names, found {agents!r}")
    wanted = (
        "an async generator function whose first argument is annotated Notification[Any], Batch[Any] or Window[Any]"
    )
    if not inspect.isasyncgenfunction(function):
        raise DeclarationError(f"{what}: must be {wanted}, found {function!r:.100}")
    first = next(iter(inspect.signature(function).parameters), "")
    hint = resources.hints_of(what, function).get(first)
    if hint is None and first == "self":
        raise resources.unbound(what, function)
    if hint is None:
        found = f"{first}, which is not annotated" if first else "none"
        raise DeclarationError(f"{what}: must be {wanted}, found {found}")
    form = typing.get_origin(hint) or hint
    if form is Stream:
        raise DeclarationError(
            f"{what}: a function of a Stream is not called for each notification, so that nothing can run around that: "
            "put it into the loop, or let the agents take a Notification[T]"
        )
    if form not in FORMS:
        raise DeclarationError(f"{what}: must be {wanted}, found {resources.spelled(hint)}")
    resources.require_positional(what, function, first)
    return Around(
        name=name,
        gives=None,
        needs={first: form, **resources.needs_of(what, function, without=(first,))},
        function=function,
        scope="call",
        form=form,
        argument_type=next(iter(typing.get_args(hint)), Any),
        agents=None if agents is None else tuple(agents),
    )


def mistakes(arounds: Iterable[Around], agents: Sequence[Called], *, router: str) -> Iterator[str]:
    """Yield a sentence for each that names an agent which its router does not have, or takes another type than it."""
    by_name = {agent.name: agent for agent in agents}
    for around in arounds:
        for name in around.agents or ():
            if (agent := by_name.get(name)) is None:
                hint = literals.suggestion(name, sorted(by_name))
                yield f"{around.label}: no agent {name!r} in {router!r}; {hint}"
            elif agent.form is not around.form:
                yield _other_form(around, agent)
        for agent in agents:
            if around.is_around(agent.name, agent.form) and around.argument_type not in (Any, agent.argument_type):
                yield (
                    f"{around.label} takes a {_spelled(around)}, and agent {agent.name!r} a {_spelled(agent)}: "
                    f"annotate it {around.form.__name__}[Any], or name other agents in agents="
                )


def mistakes_of_calls(what: str, form: type | None, around: Iterable[Resource]) -> Iterator[str]:
    """Yield a sentence for each resource that cannot be opened for each call of an agent or timer.

    `form` is what the agent's function takes; None for a timer.
    """
    for each in around:
        if form is Stream:
            yield (
                f"{what}: {each.label} is opened for each call, and a function of a Stream is not called for each "
                "notification: open it inside of the loop, or let the agent take a Notification[T]"
            )
        elif form is not Notification and Notification in each.needs.values() and not isinstance(each, Around):
            yield f"{what}: {each.label} needs the Notification of its call, and there is none: let it do without"


def _other_form(around: Around, agent: Called) -> str:
    taken = f"{around.label} takes a {around.form.__name__}, and agent {agent.name!r} a {agent.form.__name__}"
    if agent.form is Stream:
        return (
            f"{taken}, which is not called for each notification: take it out of agents=, and put into its loop what "
            "is to run around each"
        )
    return f"{taken}: take it out of agents=, and declare another one that takes a {agent.form.__name__}[Any]"


def _spelled(taking: Called) -> str:
    return f"{taking.form.__name__}[{resources.spelled(taking.argument_type)}]"


def changed_by(functions: Iterable[Changing], wanted: Notify) -> Notify:
    """Return what the functions make of a notification, one after the other. What is no `Notify` is left as it is.

    Raises `InvalidNotificationError` where a function raises, or returns something else.
    """
    for function in functions if isinstance(wanted, Notify) else ():
        who = f"{wanted.event_type}: {getattr(function, '__name__', function)}, a function of outgoing,"
        try:
            returned: object = function(wanted)
        except Exception as error:
            raise InvalidNotificationError(f"{who} raised {describe(error)}") from error
        if isinstance(returned, Notify):
            wanted = returned
        elif returned is not None:
            raise InvalidNotificationError(f"{who} returned {returned!r:.100}: return a Notify, or None to leave it")
    return wanted
