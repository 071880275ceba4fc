"""Logs: how they are written, and what the engine's facts look like in them.

A worker process configures them. Inside of another program they go where that has its logs: through structlog where it
has configured it, else through the logging of the standard library.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from typing import Any, Literal, TextIO

import structlog

from aviso_workers.aviso.literals import printable
from aviso_workers.config import Logging
from aviso_workers.errors import LONGEST_TEXT, text_of
from aviso_workers.events import Event, LogLine, all_kinds, only_counted, unheard

OBSERVED = tuple(kind for kind in all_kinds() if kind.lines not in (only_counted, unheard) and kind.many is None)
"""The facts that `observe` is for. `failure_logs` has those of which there may be very many."""
MAX_EXCEPTIONS = 50
"""Exceptions that one may have as causes, contexts and members of groups, to be logged as it is."""
MAX_CAUSES = 10
"""Causes and contexts that a stand-in is given."""
FOLLOWED = ("__cause__", "__context__", "__suppress_context__", "__traceback__", "__notes__", "exceptions")
"""Attributes that are looked at where a traceback is formatted. A class of an author's may have its own ones."""


class Log:
    """Where lines go: an event, and what there is to say of it, by name."""

    _structlog = structlog.get_logger("aviso_workers")
    _standard = logging.getLogger("aviso_workers")
    _least = logging.NOTSET

    def write_from(self, level: Literal["info", "warning"]) -> None:
        """Write lines of this level and above from now on, as far as structlog or the standard library take them."""
        self._least = logging.getLevelNamesMapping()[level.upper()]

    def info(self, event: str, **fields: Any) -> None:
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._write(logging.ERROR, event, fields)

    def write(self, line: LogLine, **more: Any) -> None:
        """Write a line of a fact, with more fields."""
        getattr(self, line.level)(line.event, **line.fields, **more)

    def _write(self, level: int, event: str, fields: dict[str, Any]) -> None:
        if level < self._least:
            return
        if isinstance(error := fields.get("exc_info"), BaseException):
            shown = loggable(error)
            fields["exc_info"] = type(shown), shown, shown.__traceback__
        if structlog.is_configured():
            getattr(self._structlog, logging.getLevelName(level).lower())(event, **fields)
        elif self._standard.isEnabledFor(level):
            raised = fields.pop("exc_info", None)
            said = "".join(f" {name}={value!r}" for name, value in fields.items())  # repr spells out what is invisible
            self._standard.log(level, "%s%s", event, said, exc_info=raised)


log = Log()


def configure(settings: Logging) -> None:
    """Write to standard error, as lines for people or as JSON for collectors.

    So goes what is logged by structlog, and by the standard library unless its root logger has handlers already.
    """
    render: list[structlog.typing.Processor]
    if settings.format == "json":
        render = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        console = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=_write_traceback)
        render = [_make_visible, console]
    before: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*before, *render],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, settings.level.upper())),
        # One write per line, so that the processes of a fleet do not tear each other's.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
    if not logging.root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(
            structlog.stdlib.ProcessorFormatter(
                foreign_pre_chain=[*before, structlog.stdlib.add_logger_name],
                processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
            )
        )
        logging.root.addHandler(handler)
        logging.root.setLevel(settings.level.upper())


def _make_visible(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Spell out what could steer a terminal or begin another line. (JSON has no such characters.)"""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = printable(value)
        elif isinstance(value, list):
            event[name] = [printable(each) if isinstance(each, str) else each for each in value]
    return event


def _write_traceback(target: TextIO, raised: structlog.typing.ExcInfo) -> None:
    """Write the traceback, indented, so that no line of an exception's text looks like a line of the log.

    Without the values of local variables, which structlog's own choice shows, and which may be secrets.
    """
    for line in "".join(traceback.format_exception(*raised)).rstrip("\n").split("\n"):
        target.write(f"\n    {printable(line)}")


def observe(event: Event) -> None:
    """Log an event of the engine; the observer of those that are `OBSERVED`."""
    for line in event.lines():
        log.write(line)


def loggable(error: BaseException) -> BaseException:
    """Return the exception, or a stand-in for one that cannot be logged as it is, whatever an author's code has made of
    it.

    What formats a traceback follows `__cause__` and `__context__` until there is none, calls itself for each exception
    group inside of another one, and writes each text in full. An exception for which that takes too long is logged as
    a stand-in: an exception of the same name, with the same traceback and a shortened text.
    """
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
