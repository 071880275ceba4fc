"""Resources: what a worker opens once and gives to the functions that ask for it by annotation.

Pure. A resource is a generator function, async as a rule, that yields one value and closes it afterwards, or a function
that returns one which needs no closing. What it gives is what its return annotation says. `engine.open_resources` opens
them.
"""

from __future__ import annotations

import copy
import functools
import graphlib
import inspect
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from aviso_workers.errors import DeclarationError

__all__ = [
    "Needing",
    "Resource",
    "bound",
    "declare",
    "hints_of",
    "in_order",
    "mistakes",
    "needs_of",
    "spelled",
    "unbound",
]


class Needing(Protocol):
    """An agent or a timer: its function takes further arguments, each of which a resource gives."""

    function: Any

    @property
    def needs(self) -> Mapping[str, Any]: ...


N = TypeVar("N", bound=Needing)


class Resource(Struct, frozen=True, kw_only=True):
    """What gives the values of one type."""

    name: str
    gives: Any
    """A class, a generic such as `Pool[str]`, a protocol, or a NewType, which tells two of one class apart."""
    needs: Mapping[str, Any]
    """By argument, the type of what it is made of."""
    function: Callable[..., AsyncIterator[Any]]


def declare(function: Callable[..., Any]) -> Resource:
    """Return the resource that the function is. Raises `DeclarationError`."""
    name = str(getattr(function, "__name__", ""))
    hints = hints_of(f"resource {name!r}", function)
    gives: Any = (given := hints.get("return"))
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        iterates = typing.get_origin(given) in (AsyncIterator, AsyncGenerator, Iterator, Generator)
        gives = typing.get_args(given)[0] if iterates else None
    if gives in (None, type(None), Any):
        raise DeclarationError(
            f"resource {name!r}: must be a function that yields, annotated `-> AsyncIterator[Type]`, or one that "
            f"returns, annotated `-> Type`, found {spelled(given) if 'return' in hints else 'no annotation'}"
        )
    needs = needs_of(f"resource {name!r}", function)
    return Resource(name=name, gives=gives, needs=needs, function=_as_async_generator(function))


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
    names = [name for name in inspect.signature(function).parameters if name not in {*without, *given}]
    if names[:1] == ["self"]:
        raise unbound(what, function)
    if bare := [name for name in names if name not in hints]:
        raise DeclarationError(f"{what}: annotate {', '.join(bare)} with the type that a resource gives")
    return {name: hints[name] for name in names}


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


def mistakes(resources: Sequence[Resource], needing: Mapping[str, Mapping[str, Any]], *, app: type) -> list[str]:
    """Return a sentence for each need that nobody meets, and for resources that need each other.

    `needing` is what is needed, by who needs it.
    """
    given = {resource.gives for resource in resources} | {app}
    everybody = {**needing, **{f"resource {each.name!r}": each.needs for each in resources}}
    known = sorted(spelled(resource.gives) for resource in resources)
    found = []
    for what, needs in everybody.items():
        for name, wanted in needs.items():
            if wanted not in given:
                there = ", ".join(known) or "none"
                if spelled(wanted) in known:  # a cell of a notebook that is run again makes its classes anew
                    there += f" (but another {spelled(wanted)}: run again what declares the {what.split()[0]})"
                found.append(f"{what}: no resource gives its argument {name}: {spelled(wanted)}; there are: {there}")
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


def bound(needing: N, values: Mapping[Any, Any]) -> N:
    """Return the same, with a function that is given what it needs."""
    if not needing.needs:
        return needing
    filled = copy.copy(needing)
    given = {name: values[wanted] for name, wanted in needing.needs.items()}
    filled.function = functools.partial(needing.function, **given)
    return filled
