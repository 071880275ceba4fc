"""Exceptions as they can be logged, whatever an author's code has made of them.

What formats a traceback follows `__cause__` and `__context__` until there is none, calls itself for each exception
group inside of another one, and writes each text in full. An exception for which that takes too long is logged as a
stand-in: an exception of the same name, with the same traceback and a shortened text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from aviso_workers.errors import LONGEST_TEXT, text_of

MAX_EXCEPTIONS = 50
"""Exceptions that one may have as causes, contexts and members of groups, to be logged as it is."""
MAX_CAUSES = 10
"""Causes and contexts that a stand-in is given."""
FOLLOWED = ("__cause__", "__context__", "__suppress_context__", "__traceback__", "__notes__", "exceptions")
"""Attributes that are looked at where a traceback is formatted. A class of an author's may have its own ones."""


def loggable(error: BaseException) -> BaseException:
    """Return the exception, or a stand-in for one that cannot be logged as it is."""
    with suppress(BaseException):  # of the author's code
        if _is_plain(error):
            return error
    return _stand_in(error, MAX_CAUSES)


def _is_plain(error: BaseException) -> bool:
    """Return whether it has few causes, contexts and members, all of them with short texts."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if len(seen) > MAX_EXCEPTIONS or _has_own_attributes(found) or _is_long(found):
            return False
        waiting += _next(found)
    return True


def _has_own_attributes(error: BaseException) -> bool:
    kinds = [kind for kind in type(error).__mro__ if kind not in (BaseException, BaseExceptionGroup)]
    return any(name in vars(kind) for kind in kinds for name in FOLLOWED)


def _is_long(error: BaseException) -> bool:
    notes = getattr(error, "__notes__", ())
    texts = [str(error), *(notes if isinstance(notes, list) else ())]
    return sum(map(len, texts)) > LONGEST_TEXT


def _next(error: BaseException) -> Iterator[BaseException]:
    for found in (error.__cause__, error.__context__):
        if found is not None:
            yield found
    if isinstance(error, BaseExceptionGroup):
        yield from error.exceptions


def _stand_in(error: BaseException, most_causes: int) -> BaseException:
    kind = type(error)
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    stand_in: BaseException = type(kind.__name__, (Exception,), named)(text_of(error))
    cause, context = _as_set(error, "__cause__"), _as_set(error, "__context__")
    if most_causes and cause is not None:
        stand_in.__cause__ = _stand_in(cause, most_causes - 1)
    elif most_causes and context is not None and not _as_set(error, "__suppress_context__"):
        stand_in.__context__ = _stand_in(context, most_causes - 1)
    return stand_in.with_traceback(_as_set(error, "__traceback__"))


def _as_set(error: BaseException, name: str) -> Any:
    """Return an attribute as the interpreter has set it, whatever the author's class has in its place."""
    return vars(BaseException)[name].__get__(error)
