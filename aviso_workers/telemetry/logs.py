"""Logs: how they are written, and what the engine's facts look like in them.

A worker process configures them. Inside of another program they go where that has its logs: through structlog where it
has configured it, else through the logging of the standard library.

`FailureLog` decides how much is written about failures, of which thousands can look alike.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple, TextIO

import anyio
import structlog
from msgspec import Struct

from aviso_workers.aviso.literals import printable
from aviso_workers.config import Logging
from aviso_workers.errors import LONGEST_TEXT, AvisoWorkersError, describe, frames_of_author, raised_at, text_of
from aviso_workers.events import (
    UNAVAILABLE,
    Event,
    Failed,
    LogLine,
    Many,
    OutageBegan,
    OutageEnded,
    WindowDone,
    all_kinds,
    only_counted,
    unheard,
)

OBSERVED = tuple(kind for kind in all_kinds() if kind.lines not in (only_counted, unheard) and kind.many is None)
"""The facts that `observe` is for. `FailureLog` has those of which there may be very many."""
COUNTED: tuple[type[Event], ...] = (*(kind for kind in all_kinds() if kind.many is not None), OutageBegan, OutageEnded)
"""The facts that `FailureLog.observe` is for."""
PERIOD_SECONDS = 10.0
LINES_PER_PERIOD = 10
"""Of one kind; more are only counted."""
MAX_KINDS = 1000
"""Kinds that are remembered: of the one that was seen first, the next failure has its traceback again."""
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
ONE_LINE_A_REQUEST = ("httpx", "httpx2")
"""The libraries that write a line of level `info` for each request: only at level `debug`, or where their own level is
set, are these written."""


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
        for each in map(logging.getLogger, ONE_LINE_A_REQUEST):
            if each.level == logging.NOTSET and settings.level == "info":
                each.setLevel(logging.WARNING)


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


def observe(event: Event, **more: object) -> None:
    """Log an event of the engine, with more fields; the observer of those that are `OBSERVED`."""
    for line in event.lines():
        log.write(line, **more)


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


class _Kind(NamedTuple):
    """What failures have in common of which only the first is written with its traceback."""

    many: Many
    alike: tuple[object, ...]
    """The values of the fields of `many.alike`."""
    error: str
    """What was raised, and where: of what has used up its attempts, `reason` does not tell."""
    file: str
    line: int


class _KindCounts(Struct):
    """How many of a kind there were since the period began."""

    began: float
    written: int = 0
    more: int = 0


class FailureLog:
    """Writes to the log what became of deliveries that failed. Keep `keep_counting` running beside it.

    Failures of one kind have the same agent, the same outcome and an exception of the same type that was raised at the
    same place. The first one of a kind is written with its traceback. Those that follow have a line each without it, as
    long as there are few; of the rest it is written every ten seconds how many there were. Other facts with a `many`,
    such as that of a message that cannot be read, are written in the same way: whoever stores the messages chooses how
    many there are.

    While what an agent depends on is away, its failures that say so are not written: `OutageGoesOn` has how many there
    are.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._seen: dict[_Kind, _KindCounts] = {}
        self._away: set[str] = set()
        """The agents that depend on what is away."""

    def observe(self, event: Event) -> None:
        """Write a line, or count the event where there are many like it."""
        match event:
            case OutageBegan():
                self._away.update(event.agents)
            case OutageEnded():
                self._away.difference_update(event.agents)
            case Failed() | WindowDone():
                self._observe_failed(event)
            case _ if self._is_written(_kind_of(event)):
                observe(event)

    def _observe_failed(self, event: Failed | WindowDone) -> None:
        if event.reason == UNAVAILABLE and event.agent in self._away:
            return
        if isinstance(event, Failed) and event.outcome == "retried" and event.reason == "dead_letter_failed":
            return  # `DeadLettersRefused` says so for all of an agent's
        if isinstance(event, WindowDone) and event.error is None:
            return
        frames = frames_of_author(event.error)
        error = event.error
        kind = _kind_of(event, "" if error is None else type(error).__name__, *raised_at(frames))
        first = kind not in self._seen
        if not self._is_written(kind):
            return
        if error is not None and first and not isinstance(error, AvisoWorkersError):
            shown = loggable(error)
            observe(event, exc_info=(type(shown), shown, frames))
        else:
            observe(event, error=_text(error))

    async def keep_counting(self) -> None:
        """Write every period how many failures were only counted; cancel this to end it."""
        try:
            while True:
                await anyio.sleep(PERIOD_SECONDS)
                self.tell_counted()
        finally:
            self.tell_counted()

    def tell_counted(self) -> None:
        """Write how many failures of each kind were only counted, since that was last written."""
        for kind, seen in self._seen.items():
            if seen.more:
                self._begin_period(kind, seen)

    def _is_written(self, kind: _Kind) -> bool:
        """Return whether one more of a kind is written; it is counted otherwise."""
        seen = self._seen.get(kind) or self._remember(kind)
        if self._now() - seen.began >= PERIOD_SECONDS:
            self._begin_period(kind, seen)
        if seen.written >= LINES_PER_PERIOD:
            seen.more += 1
            return False
        seen.written += 1
        return True

    def _remember(self, kind: _Kind) -> _KindCounts:
        if len(self._seen) >= MAX_KINDS:
            oldest = next(iter(self._seen))
            self._begin_period(oldest, self._seen.pop(oldest))
        self._seen[kind] = seen = _KindCounts(self._now())
        return seen

    def _begin_period(self, kind: _Kind, seen: _KindCounts) -> None:
        now = self._now()
        if seen.more:
            fields = dict(zip(kind.many.alike, kind.alike, strict=True))
            fields |= {"more": seen.more, "in_seconds": round(now - seen.began, 1)}
            fields |= {"error": kind.error} if kind.error else {}
            fields |= {"at": f"{kind.file}:{kind.line}"} if kind.file else {}
            log.warning(kind.many.event, **fields)
        seen.began, seen.written, seen.more = now, 0, 0


def _kind_of(event: Event, error: str = "", file: str = "", line: int = 0) -> _Kind:
    assert event.many is not None
    return _Kind(event.many, tuple([getattr(event, name) for name in event.many.alike]), error, file, line)


def _text(error: BaseException | None) -> str:
    if error is None:
        return "None"
    return text_of(error) if isinstance(error, AvisoWorkersError) else describe(error)
