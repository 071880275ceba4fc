"""The notifications in what an agent's function returns or yields, and what its code says of them before it runs.

`engine.handlers` publishes them. Whatever a function returns is published, or says that there is nothing to
publish (None, an `Ack`, the `Receipt` of what is stored), or fails the call. The annotation is judged by the same
rules: `App.mistakes` asks, and the doctor. What a function calls inside of other functions is not looked at.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Generator, Iterable, Iterator, Mapping, Set
from typing import Any, Union, cast

from aviso_workers.aviso.notifications import Notify, Receipt
from aviso_workers.declare import resources, verdicts
from aviso_workers.declare.agents import Agent
from aviso_workers.declare.verdicts import Ack, FinalError, Reject, Retry
from aviso_workers.errors import DeclarationError, InvalidNotificationError

NOTHING = (type(None), Ack, Receipt)
"""Types of which nothing is published where a function returns one by itself."""
ACCEPTED = (Notify, *NOTHING, Retry, Reject, BaseException)
IN_SEVERAL = (Notify, Receipt, BaseException)
"""The types that may be among several values. None may not: there it is more often a forgotten `return` than meant."""
NO_SEVERAL = (str, bytes, bytearray, memoryview, Mapping, Set)
"""Iterables that are not taken for several notifications: these have no order, or are a payload."""
CURE = "return a Notify, several in a list, or None"
PUBLISHING = ("notify", "request")
"""Methods of an app that publish, and take an event type first."""
UNIONS = (Union, types.UnionType)


def notifications(output: object) -> Iterator[Notify]:
    """Yield the notifications in what a function returned or yielded, in order, also of nested lists.

    Raises `FinalError` for anything else, an exception that is among them, and what a lazy iterable raises.
    """
    if output is None or isinstance(output, Ack):
        return
    yield from _inside(output, output)


def _inside(output: object, whole: object) -> Iterator[Notify]:
    if isinstance(output, Notify):
        yield output
    elif isinstance(output, Receipt):
        return
    elif isinstance(output, Iterable) and not isinstance(output, (*NO_SEVERAL, type, AsyncIterator, Awaitable)):
        for each in each_of(output):
            yield from _inside(each, whole)
    elif verdicts.is_instruction(output):
        raise _refused(whole, f"there is {output!r:.100} in a {type(whole).__name__}: return it by itself")
    elif failure := verdicts.failure_returned(output):
        raise failure.error
    elif output is whole:
        raise _refused(whole, f"the handler returned {_shown(output)}: {CURE}")
    else:
        raise _refused(whole, f"the handler returned a {type(whole).__name__} with {_shown(output)} in it: {CURE}")


def each_of(several: Iterable[object]) -> Iterator[object]:
    """Yield what is in an iterable, and at the end what a generator returns with `return`, unless that is None."""
    returned = yield from cast("Generator[object, None, object]", several)  # others return None
    if returned is not None:
        yield returned


def refuse_unpublished(who: str, returned: object) -> None:
    """Raise where a timer or task has returned something of which nothing becomes, because only agents publish so.

    A number, a text or a payload means nothing there. An exception that was returned is raised. Raises
    `DeclarationError` for a notification, `Retry`, `Reject`, an iterator, and a coroutine and others of which nothing
    has run; also where one of these is in a list, tuple, dict or another collection.
    """
    if returned is None or isinstance(returned, (str, bytes, bytearray, memoryview)):
        return
    if isinstance(returned, Notify):
        raise DeclarationError(
            f"{who} returned a Notify, and nothing is published of it: publish it with `await app.notify(...)`"
        )
    if verdicts.is_instruction(returned):
        raise DeclarationError(f"{who} returned {returned!r:.100}, which only an agent may return: raise an exception")
    if failure := verdicts.failure_returned(returned):
        raise failure.error
    if isinstance(returned, Iterator):
        raise DeclarationError(f"{who} returned a {type(returned).__name__}, and nobody iterates over it: loop over it")
    if isinstance(returned, Collection):
        for each in returned.values() if isinstance(returned, Mapping) else returned:
            refuse_unpublished(who, each)


def _refused(whole: object, problem: str) -> FinalError:
    return FinalError(InvalidNotificationError(problem), reason="invalid_notification")


def _shown(output: object) -> str:
    return (
        f"{output!r:.100}"
        if output is None or isinstance(output, type)
        else f"the {type(output).__name__} {output!r:.100}"
    )


def publishes(agent: Agent[Any, Any]) -> bool:
    """Return whether the agent's annotation says that it returns or yields notifications."""
    return Notify in _parts(_returned(agent))


def refused_return(agent: Agent[Any, Any]) -> str:
    """Return what the agent's annotation says that it returns or yields although that fails each call; else "".

    Without an annotation it is not known.
    """
    returned = _returned(agent)
    if agent.yields:
        returned = next(iter(typing.get_args(returned)), Any)
    return " | ".join(_spelled(member) for member in _members(returned) if not _is_accepted(member, ACCEPTED))


def named_event_types(function: Callable[..., Any], *, methods: Collection[str] = ()) -> set[str]:
    """Return the event types that a function names where it makes a `Notify`, written out as text; also where it calls
    one of these methods of anything.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return set()  # such as a function that was made at run time
    names = {name for name, found in getattr(function, "__globals__", {}).items() if found is Notify}
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    named = (_event_type(call, names, methods) for call in calls)
    return {each.value for each in named if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def _spelled(annotation: Any) -> str:
    is_plain = isinstance(annotation, type) and not typing.get_args(annotation)
    return annotation.__name__ if is_plain else str(annotation).replace("typing.", "")


def _event_type(call: ast.Call, names: Collection[str], methods: Collection[str]) -> ast.expr | None:
    """Return what stands for the event type in a call of such a function or method, also by `app.sync`."""
    called, arguments = call.func, call.args
    if isinstance(called, ast.Attribute) and called.attr == "sync" and arguments:
        called, *arguments = arguments
    if isinstance(called, ast.Name):
        is_meant = called.id in names
    else:
        is_meant = isinstance(called, ast.Attribute) and called.attr in methods
    if not is_meant:
        return None
    if arguments:
        return arguments[0]
    return next((each.value for each in call.keywords if each.arg == "event_type"), None)


def _returned(agent: Agent[Any, Any]) -> Any:
    return resources.hints_of(f"agent {agent.name!r}", agent.function).get("return")


def _members(annotation: Any) -> tuple[Any, ...]:
    annotation = _plain(annotation)
    return typing.get_args(annotation) if typing.get_origin(annotation) in UNIONS else (annotation,)


def _plain(annotation: Any) -> Any:
    """Return what an alias, a NewType or an Annotated stands for."""
    while True:
        if typing.get_origin(annotation) is typing.Annotated:
            annotation = typing.get_args(annotation)[0]
        elif hasattr(annotation, "__supertype__"):
            annotation = annotation.__supertype__
        elif hasattr(annotation, "__value__"):
            annotation = annotation.__value__
        else:
            return annotation


def _is_accepted(annotation: Any, accepted: tuple[type, ...]) -> bool:
    """Return whether a value of this type can be one that does not fail the call; also where that is not known."""
    annotation = _plain(annotation)
    if annotation is Any:
        return True
    if annotation is None:
        return type(None) in accepted
    if typing.get_origin(annotation) in UNIONS:
        return all(_is_accepted(member, accepted) for member in typing.get_args(annotation))
    kind = typing.get_origin(annotation) or annotation
    if not isinstance(kind, type):
        return kind is not typing.Literal
    if kind is type:
        return False
    if issubclass(kind, (Retry, Reject)) and accepted is IN_SEVERAL:
        return False
    if issubclass(kind, accepted) or any(issubclass(each, kind) for each in accepted):
        return True
    if not issubclass(kind, Iterable) or issubclass(kind, (*NO_SEVERAL, AsyncIterator, Awaitable)):
        return False
    return all(_is_accepted(each, IN_SEVERAL) for each in _elements(kind, annotation))


def _elements(kind: type, annotation: Any) -> list[Any]:
    """Return the types of the values that an iterable gives; a generator's are those that it yields and returns."""
    within = [each for each in typing.get_args(annotation) if each is not Ellipsis]
    if not issubclass(kind, Generator):
        return within
    return [within[0], *(each for each in within[2:] if each not in (None, type(None)))] if within else []


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for argument in typing.get_args(annotation):
        yield from _parts(argument)
