"""How much is written about failures, of which thousands can look alike.

Failures of one kind have the same agent, the same outcome and an exception of the same type that was raised at the same
place. The first one of a kind is written with its traceback. Those that follow have a line each without it, as long as
there are few; of the rest it is written every ten seconds how many there were. Messages that cannot be read, or that
nobody may have published, are written in the same way, by stream or agent: whoever stores them chooses how many.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, get_args

import anyio

from aviso_workers.errors import AvisoWorkersError, describe, frames_of_author, raised_at, text_of
from aviso_workers.events import Failed, OfMessages, Suspected, Unreadable, warning
from aviso_workers.telemetry.logs import log
from aviso_workers.telemetry.tracebacks import loggable

__all__ = ["OBSERVED", "FailureLog"]

OBSERVED = get_args(OfMessages)
"""The facts that `FailureLog.observe` is for."""

PERIOD_SECONDS = 10.0
LINES_PER_PERIOD = 10
"""Of one kind; more are only counted."""
UNREADABLE, SUSPECTED = "unreadable", "suspected"
MOST_KINDS = 1000
"""Kinds that are remembered: of the one that was seen first, the next failure has its traceback again."""


class _Kind(NamedTuple):
    """What failures have in common of which only the first is written with its traceback."""

    agent: str
    """For what is `unreadable`, the stream."""
    outcome: str
    reason: str
    error: str
    file: str
    line: int


class _Seen:
    """How many of a kind there were since the period began."""

    __slots__ = ("began", "more", "written")

    def __init__(self, began: float) -> None:
        self.began = began
        self.written = self.more = 0


class FailureLog:
    """Writes to the log what became of deliveries that failed. Keep `keep_counting` running beside it."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._seen: dict[_Kind, _Seen] = {}

    def observe(self, event: OfMessages) -> None:
        """Write a line, or count the event where there are many like it."""
        if isinstance(event, Failed):
            self._observe_failed(event)
        elif self._is_written(_kind_of_message(event)):
            _write_message(event)

    def _observe_failed(self, event: Failed) -> None:
        if event.outcome == "retried" and event.reason == "dead_letter_failed":
            return  # `DeadLettersRefused` says so for all of an agent's
        frames = frames_of_author(event.error)
        kind = _kind_of(event, frames)
        first = kind not in self._seen
        if not self._is_written(kind):
            return
        error = event.error
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

    def _remember(self, kind: _Kind) -> _Seen:
        if len(self._seen) >= MOST_KINDS:
            oldest = next(iter(self._seen))
            self._begin_period(oldest, self._seen.pop(oldest))
        self._seen[kind] = seen = _Seen(self._now())
        return seen

    def _begin_period(self, kind: _Kind, seen: _Seen) -> None:
        now = self._now()
        seconds = round(now - seen.began, 1)
        if seen.more and kind.outcome == UNREADABLE:
            log.warning(
                "message.more_unreadable", stream=kind.agent, reason=kind.reason, more=seen.more, in_seconds=seconds
            )
        elif seen.more and kind.outcome == SUSPECTED:
            log.warning("notification.more_suspected", agent=kind.agent, more=seen.more, in_seconds=seconds)
        elif seen.more:
            log.warning(
                "notification.more_failures",
                agent=kind.agent,
                outcome=kind.outcome,
                reason=kind.reason,
                more=seen.more,
                in_seconds=seconds,
                **_raised(kind),
            )
        seen.began, seen.written, seen.more = now, 0, 0


def _kind_of_message(event: Suspected | Unreadable) -> _Kind:
    if isinstance(event, Unreadable):
        return _Kind(event.stream, UNREADABLE, event.reason, "", "", 0)
    return _Kind(event.agent, SUSPECTED, "", "", "", 0)


def _write_message(event: Suspected | Unreadable) -> None:
    if isinstance(event, Unreadable):
        log.warning(
            "message.unreadable",
            stream=event.stream,
            sequence=event.sequence,
            reason=event.reason,
            error=str(event.error),
            cure="nothing comes of it; find out who writes to the stream beside the workers",
        )
        return
    log.warning(
        "notification.suspected",
        agent=event.agent,
        notification=f"{event.event_type}@{event.sequence}",
        error=warning(event),
        cure="it is handled as any other; to keep publishers apart, give each its own account",
    )


def _raised(kind: _Kind) -> dict[str, str]:
    """Return what was raised, and where: of what has used up its attempts, `reason` does not tell."""
    what = {"error": kind.error} if kind.error else {}
    return what | ({"at": f"{kind.file}:{kind.line}"} if kind.file else {})


def _kind_of(event: Failed, frames: TracebackType | None) -> _Kind:
    file, line = raised_at(frames)
    error = type(event.error).__name__ if event.error is not None else ""
    return _Kind(event.agent, event.outcome, event.reason, error, file, line)


def _write(event: Failed, **error: object) -> None:
    fields: dict[str, object] = {
        "agent": event.agent,
        "notification": event.notification,
        "reason": event.reason,
        "num_delivered": event.num_delivered,
        "seconds": round(event.seconds, 3),
    }
    if event.attempt:
        fields |= {"attempt": event.attempt, "attempts": event.attempts}
    match event.outcome:
        case "dead_lettered":
            log.error("notification.dead_lettered", **fields, **error)
        case "retried":
            log.warning("notification.retried", **fields, again_in_seconds=round(event.again_in_seconds, 1), **error)
        case "acked":
            log.warning("notification.acked", **fields, **error)


def _text(error: BaseException | None) -> str:
    if error is None:
        return "None"
    return text_of(error) if isinstance(error, AvisoWorkersError) else describe(error)
