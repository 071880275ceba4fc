"""What the code of an agent says that it publishes, as far as that can be read before anything runs.

`App.mistakes` and `App.warnings` ask, and the doctor. What a function calls inside of other functions is not looked at.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Union

from aviso_workers.aviso.notifications import Notify
from aviso_workers.declare import resources
from aviso_workers.declare.agents import Agent
from aviso_workers.declare.verdicts import Ack, Reject, Retry

__all__ = ["ignored_return", "named_event_types", "publishes"]

MEANT = (Notify, Retry, Reject, Ack, BaseException)
"""What is done with one of these says the documentation of agents."""
UNIONS = (Union, types.UnionType)


def publishes(agent: Agent[Any, Any]) -> bool:
    """Return whether the agent's annotation says that it returns or yields notifications."""
    return Notify in _inside(_returned(agent))


def ignored_return(agent: Agent[Any, Any]) -> str:
    """Return what the agent's annotation says that it returns although nothing is done with it; empty where it is used.

    Without an annotation it is not known.
    """
    returned = _returned(agent)
    if returned in (None, type(None), Any) or isinstance(returned, str) or agent.yields:
        return ""
    members = typing.get_args(returned) if typing.get_origin(returned) in UNIONS else (returned,)
    ignored = [member for member in members if not _means_something(member)]
    return " | ".join(_spelled(member) for member in ignored)


def named_event_types(function: Callable[..., Any]) -> set[str]:
    """Return the event types that a function names where it makes a `Notify`, written out as text."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return set()  # such as a function that was made at run time
    names = {name for name, found in getattr(function, "__globals__", {}).items() if found is Notify}
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    named = (_first(call) for call in calls if isinstance(call.func, ast.Name) and call.func.id in names)
    return {each.value for each in named if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def _spelled(annotation: Any) -> str:
    is_plain = isinstance(annotation, type) and not typing.get_args(annotation)
    return annotation.__name__ if is_plain else str(annotation).replace("typing.", "")


def _first(call: ast.Call) -> ast.expr | None:
    if call.args:
        return call.args[0]
    return next((each.value for each in call.keywords if each.arg == "event_type"), None)


def _returned(agent: Agent[Any, Any]) -> Any:
    return resources.hints_of(f"agent {agent.name!r}", agent.function).get("return")


def _means_something(annotation: Any) -> bool:
    if annotation in (None, type(None), Any, typing.NoReturn, typing.Never):
        return True
    kinds = [kind for kind in _inside(annotation) if isinstance(kind, type)]
    return not kinds or any(issubclass(kind, MEANT) for kind in kinds)


def _inside(annotation: Any) -> Iterator[Any]:
    yield annotation
    for argument in typing.get_args(annotation):
        yield from _inside(argument)
