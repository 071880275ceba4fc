"""Resources: what a worker opens, and gives to the functions that ask for it by annotation.

Pure. A resource is a generator function, async as a rule, that yields one value and closes it afterwards, or a function
that returns one which needs no closing. What it gives is what its return annotation says. `sessions.session` opens
those that a worker opens once, `engine.calls` those that are opened for each call of a function.
"""

from __future__ import annotations

import copy
import functools
import graphlib
import inspect
import typing
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from typing import Any, Literal, Protocol, TypeVar, get_args

from msgspec import Struct, structs

from aviso_workers.aviso.notifications import Notification
from aviso_workers.errors import DeclarationError

Scope = Literal["worker", "call"]
"""How long a resource is open: as long as its worker runs, or for one call of a function that needs it."""

BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
"""The kinds of arguments that can be given by position, and by name."""


class Resource(Struct, frozen=True, kw_only=True):
    """The function that gives the values of one type."""

    name: str
    gives: Any
    """A class, a generic such as `Pool[str]`, a protocol, or a NewType, which tells two of one class apart."""
    needs: Mapping[str, Any]
    """By argument, the type of what it is made of."""
    function: Callable[..., AsyncIterator[Any]]
    scope: Scope = "worker"

    @property
    def label(self) -> str:
        """Return its name in errors."""
        return f"resource {self.name!r}"


class Needing(Protocol):
    """An agent or a timer: its function takes further arguments, each of which a resource gives."""

    function: Any
    needs: Mapping[str, Any]
    around: Sequence[Resource]
    """The resources that are opened around each call of it, the outermost first."""


N = TypeVar("N", bound=Needing)
ITERATES = (AsyncIterator, AsyncGenerator, Iterator, Generator)
"""The types that a function is annotated to return that yields."""


def declare(function: Callable[..., Any], scope: Scope = "worker") -> Resource:
    """Return the resource that the function is. Raises `DeclarationError`."""
    name = str(getattr(function, "__name__", ""))
    if scope not in get_args(Scope):
        raise DeclarationError(f"resource {name!r}: scope must be 'worker' or 'call', found {scope!r}")
    hints = hints_of(f"resource {name!r}", function)
    gives: Any = (given := hints.get("return"))
    if inspect.iscoroutinefunction(function) and typing.get_origin(given) in ITERATES:
        (wanted, *_) = (*typing.get_args(given), Any)
        raise DeclarationError(
            f"resource {name!r}: it is annotated {spelled(given)} and yields nothing: let it yield the "
            f"{spelled(wanted)}, or return it and annotate it -> {spelled(wanted)}"
        )
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        gives = typing.get_args(given)[0] if typing.get_origin(given) in ITERATES else None
    if gives in (None, type(None), Any):
        raise DeclarationError(
            f"resource {name!r}: must be a function that yields, annotated `-> AsyncIterator[Type]`, or one that "
            f"returns, annotated `-> Type`, found {spelled(given) if 'return' in hints else 'no annotation'}"
        )
    needs = needs_of(f"resource {name!r}", function)
    if scope == "call":
        needs = {argument: Notification if _is_notification(wanted) else wanted for argument, wanted in needs.items()}
    return Resource(name=name, gives=gives, needs=needs, function=_as_async_generator(function), scope=scope)


def _is_notification(annotation: Any) -> bool:
    """Return whether it is the notification of a call, whose payload may be of any type."""
    return typing.get_origin(annotation) is Notification and typing.get_args(annotation)[0] is Any


def _as_async_generator(function: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
    if inspect.isasyncgenfunction(function):
        return function

    @functools.wraps(function)
    async def opened(**needs: Any) -> AsyncIterator[Any]:
        if inspect.isgeneratorfunction(function):
            with contextmanager(function)(**needs) as value:
                yield value
        elif inspect.iscoroutinefunction(function):
            yield await function(**needs)
        else:
            yield function(**needs)

    return opened


def needs_of(what: str, function: Callable[..., Any], *, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the types of its arguments, but for some. Raises `DeclarationError` where one is not annotated."""
    hints = hints_of(what, function)
    given = function.keywords if isinstance(function, functools.partial) else {}
    parameters = inspect.signature(function).parameters
    names = [name for name in parameters if name not in {*without, *given}]
    if names[:1] == ["self"]:
        raise unbound(what, function)
    if wrong := [str(parameters[name]) for name in names if parameters[name].kind not in BY_NAME]:
        raise DeclarationError(f"{what}: resources are given by the names of arguments: leave out {', '.join(wrong)}")
    if bare := [name for name in names if name not in hints]:
        raise DeclarationError(f"{what}: annotate {', '.join(bare)} with the type that a resource gives")
    return {name: hints[name] for name in names}


def require_positional(what: str, function: Callable[..., Any], parameter: str) -> None:
    """Raise `DeclarationError` for a first argument that cannot be given by its position."""
    found = inspect.signature(function).parameters[parameter]
    if found.kind not in BY_POSITION:
        raise DeclarationError(f"{what}: its first argument is given by position, which '{found}' cannot take")


def unbound(what: str, function: Callable[..., Any]) -> DeclarationError:
    """Return the error of a function that wants a `self` which nobody gives it."""
    name = getattr(function, "__name__", "method")
    return DeclarationError(
        f"{what}: a method in a class has no object yet, on which it could be called: declare it where the object is, "
        f"as self.{name}"
    )


def hints_of(what: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return a function's annotations, resolved. Raises `DeclarationError`."""
    while isinstance(function, functools.partial):
        function = function.func
    try:
        return typing.get_type_hints(function)
    except (AttributeError, NameError, SyntaxError, TypeError) as error:
        raise DeclarationError(
            f"{what}: its annotation cannot be resolved ({error}); declare the type at module level, before it"
        ) from error


def mistakes(
    resources: Sequence[Resource], needing: Iterable[tuple[str, Mapping[str, Any]]], *, app: type
) -> list[str]:
    """Return a sentence for each need that nobody meets, and for resources that need each other.

    `needing` is who needs something, and what.
    """
    given = {resource.gives for resource in resources} | set(app.__mro__)
    of_calls = {resource.gives for resource in resources if resource.scope == "call"}
    known = sorted(spelled(resource.gives) for resource in resources)
    everybody = [
        *((what, needs, given) for what, needs in needing),
        *((each.label, each.needs, given | {Notification} if each.scope == "call" else given) for each in resources),
    ]
    found = []
    for what, needs, met in everybody:
        for name, wanted in needs.items():
            if wanted not in met:
                there = ", ".join(known) or "none"
                if spelled(wanted) in known:  # a cell of a notebook that is run again makes its classes again
                    there += f" (but another {spelled(wanted)}: run again what declares the {what.split()[0]})"
                found.append(f"{what}: no resource gives its argument {name}: {spelled(wanted)}; there are: {there}")
    found += [
        f"{each.label}: a worker opens it once, and its argument {name} is opened for each call: give it "
        'scope="call" as well'
        for each in resources
        for name, wanted in each.needs.items()
        if each.scope == "worker" and wanted in of_calls
    ]
    try:
        in_order(resources)
    except DeclarationError as error:
        found.append(str(error))
    return found


def in_order(resources: Sequence[Resource]) -> list[Resource]:
    """Return what is needed before what needs it. Raises `DeclarationError` where there is no such order."""
    by_type = {resource.gives: resource for resource in resources}
    needs = {each.gives: [wanted for wanted in each.needs.values() if wanted in by_type] for each in resources}
    try:
        return [by_type[each] for each in graphlib.TopologicalSorter(needs).static_order()]
    except graphlib.CycleError as error:
        circle = " needs ".join(by_type[each].name for each in reversed(error.args[1]))
        raise DeclarationError(f"resources need each other: {circle}") from error


def spelled(annotation: Any) -> str:
    """Return a type as an author writes it."""
    has_name = isinstance(annotation, type | typing.NewType) and not typing.get_args(annotation)
    return str(annotation.__name__ if has_name else annotation)


def surrounded(needing: N, outside: Sequence[Resource], resources: Sequence[Resource]) -> N:
    """Return the agent or timer with the resources that are opened around each of its calls: `outside`, and those of
    scope `call` that these and its function need, each right before the first that needs it.
    """
    closed = {each.gives: each for each in resources if each.scope == "call"}
    around: list[Resource] = []

    def open_needs(needs: Mapping[str, Any]) -> None:
        for wanted in needs.values():
            if (resource := closed.pop(wanted, None)) is not None:
                open_needs(resource.needs)
                around.append(resource)

    for each in outside:
        open_needs(each.needs)
        around.append(each)
    open_needs(needing.needs)
    if not around:
        return needing
    filled = copy.copy(needing)
    filled.around = around
    return filled


def bound(needing: N, values: Mapping[Any, Any]) -> N:
    """Return the agent or timer with its function, and the resources around its calls, given what they need of these
    values.

    A resource whose type is among the values is not opened for a call.
    """
    if not needing.needs and not needing.around:
        return needing
    filled = copy.copy(needing)
    filled.function, filled.needs = _given(needing, values)
    filled.around = [
        structs.replace(each, function=function, needs=needs)
        for each in needing.around
        if each.gives not in values
        for function, needs in [_given(each, values)]
    ]
    return filled


def _given(needing: Resource | Needing, values: Mapping[Any, Any]) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """Return the function with the arguments that these values give, and the types of its other arguments."""
    given = {name: values[wanted] for name, wanted in needing.needs.items() if wanted in values}
    needs = {name: wanted for name, wanted in needing.needs.items() if name not in given}
    return (functools.partial(needing.function, **given) if given else needing.function), needs
