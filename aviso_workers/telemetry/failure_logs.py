"""How much is written about failures, of which thousands can look alike.

Failures of one kind have the same agent, the same outcome and an exception of the same type that was raised at the same
place. The first one of a kind is written with its traceback. Those that follow have a line each without it, as long as
there are few; of the rest it is written every ten seconds how many there were. Other facts with a `many`, such as that
of a message that cannot be read, are written in the same way: whoever stores the messages chooses how many there are.

While what an agent depends on is away, its failures that say so are not written: `OutageGoesOn` has how many there are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import anyio

from aviso_workers.errors import AvisoWorkersError, describe, frames_of_author, raised_at, text_of
from aviso_workers.events import UNAVAILABLE, Event, Failed, Many, OutageBegan, OutageEnded, WindowDone, all_kinds
from aviso_workers.telemetry.logs import log, loggable

OBSERVED: tuple[type[Event], ...] = (*(kind for kind in all_kinds() if kind.many is not None), OutageBegan, OutageEnded)
"""The facts that `FailureLog.observe` is for."""

PERIOD_SECONDS = 10.0
LINES_PER_PERIOD = 10
"""Of one kind; more are only counted."""
MAX_KINDS = 1000
"""Kinds that are remembered: of the one that was seen first, the next failure has its traceback again."""


class _Kind(NamedTuple):
    """What failures have in common of which only the first is written with its traceback."""

    many: Many
    alike: tuple[object, ...]
    """The values of the fields of `many.alike`."""
    error: str
    """What was raised, and where: of what has used up its attempts, `reason` does not tell."""
    file: str
    line: int


class _KindCounts:
    """How many of a kind there were since the period began."""

    __slots__ = ("began", "more", "written")

    def __init__(self, began: float) -> None:
        self.began = began
        self.written = self.more = 0


class FailureLog:
    """Writes to the log what became of deliveries that failed. Keep `keep_counting` running beside it."""

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
                _write(event)

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
            _write(event, exc_info=(type(shown), shown, frames))
        else:
            _write(event, error=_text(error))

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


def _write(event: Event, **error: object) -> None:
    for line in event.lines():
        log.write(line, **error)


def _text(error: BaseException | None) -> str:
    if error is None:
        return "None"
    return text_of(error) if isinstance(error, AvisoWorkersError) else describe(error)
