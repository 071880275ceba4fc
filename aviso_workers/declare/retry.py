"""How often and how fast something is tried again: handlers, publishes, subscriptions, key-value, processes, Spark.

Pure: who tries asks here for the wait before the next try, and waits by a clock of its own. What becomes of a
notification that was not handled is decided in `verdicts`, by the same `Backoff`.
"""

from __future__ import annotations

import math
import random
from numbers import Real
from typing import TYPE_CHECKING, TypeGuard

from msgspec import Struct, structs

from aviso_workers.aviso import literals
from aviso_workers.aviso.literals import AnyDuration
from aviso_workers.errors import DeclarationError

__all__ = ["LONGEST_DELAY_DAYS", "LONGEST_DELAY_SECONDS", "Backoff", "Restarts", "Tries", "is_number"]

LONGEST_DELAY_DAYS = 366
LONGEST_DELAY_SECONDS = LONGEST_DELAY_DAYS * 86400
"""The longest delay before something is tried again. The server would take one of more than 292 years for none."""

_SENSIBLE = {
    "first": (0, LONGEST_DELAY_SECONDS),
    "factor": (1, 1000),
    "max": (0, math.inf),
    "attempts": (1, math.inf),
    "jitter": (0, 1),
}


class Backoff(Struct, frozen=True, kw_only=True):
    """How often and after which delays a failed notification is tried again.

    It is tried `attempts` times in all, and becomes a dead letter after the last one. The delay after the n-th failure
    is `first * factor ** (n - 1)`, at most `max` and 366 days. Both are a number of seconds, a text such as `30s`, or a
    timedelta; they are kept as seconds. The delay is varied by plus or minus `jitter`,
    a share of it, so that notifications which failed together do not come back together.

    The defaults wait for 71 seconds in all. With handlers of up to 8 seconds, all six attempts are within a duplicate
    window of 2 minutes, so that what each of them publishes is stored once. Raises `DeclarationError` for numbers out
    of range.
    """

    first: float = 1.0
    factor: float = 2.5
    max: float = 600.0
    attempts: float = 6
    """The number of attempts in all, a whole number, or `math.inf` for no end. After the last one, the notification
    becomes a dead letter."""
    jitter: float = 0.1

    if TYPE_CHECKING:  # it is given any duration, and has seconds

        def __init__(
            self,
            *,
            first: AnyDuration = 1.0,
            factor: float = 2.5,
            max: AnyDuration = 600.0,
            attempts: float = 6,
            jitter: float = 0.1,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name in ("first", "max"):
            if not is_number(given := getattr(self, name)):
                structs.force_setattr(self, name, _seconds(name, given))
        for name, (least, most) in _SENSIBLE.items():
            found = getattr(self, name)
            if not (is_number(found) and least <= found <= most):
                raise DeclarationError(f"Backoff: {name} must be a number from {least} to {most}, found {found!r:.100}")
        if not (isinstance(self.attempts, int) or self.attempts == math.inf):
            raise DeclarationError(f"Backoff: attempts must be a whole number, found {self.attempts!r:.100}")

    def delay_seconds(self, failures: int) -> float:
        """Return the wait after this many failures, jitter included."""
        # The exponent is capped so that a forever-retrying policy cannot overflow a float.
        plain = min(self.max, self.first * self.factor ** min(failures - 1, 64), LONGEST_DELAY_SECONDS)
        return plain * random.uniform(1 - self.jitter, 1 + self.jitter)


class Tries:
    """The tries of one thing that has to succeed until a time, on any clock."""

    def __init__(self, backoff: Backoff, *, until: float, least: int = 1) -> None:
        """At `least` so many are made, also where the time is over before."""
        self.failed = 0
        self._backoff = backoff
        self._until = until
        self._least = least

    def next_wait(self, now: float) -> float | None:
        """Count a try that failed, and return the seconds to wait before the next one; None where there is none."""
        self.failed += 1
        wait = self._backoff.delay_seconds(self.failed)
        return wait if now + wait <= self._until or self.failed < self._least else None


class Restarts:
    """The waits before something is started again that runs and fails; they begin again after a healthy run."""

    def __init__(self, backoff: Backoff, *, healthy_seconds: float) -> None:
        self.failures = 0
        """In a row."""
        self._backoff = backoff
        self._healthy_seconds = healthy_seconds
        self._started = math.inf

    def note_start(self, now: float) -> None:
        """Note that what may be started again is running."""
        self._started = now

    def next_wait(self, now: float) -> float:
        """Count a failure, and return the seconds to wait before it is started again."""
        healthy = now - self._started > self._healthy_seconds
        self.failures = 1 if healthy else self.failures + 1
        self._started = math.inf
        return self._backoff.delay_seconds(self.failures)


def _seconds(name: str, duration: object) -> float:
    try:
        return literals.seconds_of(duration)
    except ValueError as error:
        raise DeclarationError(f"Backoff: {name}: {error}") from error


def is_number(found: object) -> TypeGuard[float]:
    """Return whether it is a number, which text and a truth value are not."""
    return isinstance(found, Real) and not isinstance(found, bool)
