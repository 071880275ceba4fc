"""How often and how fast something is tried again: handlers, publishes, subscriptions, key-value, processes, Spark.

Pure: who tries asks here for the wait before the next try, and waits by a clock of its own. What becomes of a
notification that was not handled is decided in `verdicts`, by a `RetryPolicy`.
"""

from __future__ import annotations

import math
import random
from numbers import Real
from typing import TYPE_CHECKING, TypeGuard

from msgspec import Struct, structs

from aviso_workers.aviso.literals import AnyDuration
from aviso_workers.declare import durations
from aviso_workers.errors import DeclarationError

LONGEST_DELAY_DAYS = 366
USUAL_ATTEMPTS = 6
"""How often a notification is tried by default. An agent without a limit is blocked at one that has failed so often."""
LONGEST_DELAY_SECONDS = LONGEST_DELAY_DAYS * 86400
"""The longest delay before something is tried again. The server would take one of more than 292 years for none."""

SHARE = 0.5
"""The share of a worker's time that retries which are due take at most, while something new waits."""
MAX_LATER_SECONDS = 600.0
"""How much later than its policy says a notification is retried at most."""

_SENSIBLE = {
    "first": (0, LONGEST_DELAY_SECONDS),
    "factor": (1, 1000),
    "max": (0, math.inf),
    "jitter": (0, 1),
}


class Backoff(Struct, frozen=True, kw_only=True):
    """The growing delays before something that failed is tried again: see `RetryPolicy`."""

    first: float = 1.0
    factor: float = 2.5
    max: float = 600.0
    jitter: float = 0.1

    if TYPE_CHECKING:  # it is given any duration, and has seconds

        def __init__(
            self, *, first: AnyDuration = 1.0, factor: float = 2.5, max: AnyDuration = 600.0, jitter: float = 0.1
        ) -> None: ...

    def __post_init__(self) -> None:
        kind = type(self).__name__
        for name in ("first", "max"):
            if not is_number(given := getattr(self, name)):
                structs.force_setattr(self, name, durations.seconds(f"{kind}: {name}", given))
        for name, (least, most) in _SENSIBLE.items():
            found = getattr(self, name)
            if not (is_number(found) and least <= found <= most):
                raise DeclarationError(f"{kind}: {name} must be a number from {least} to {most}, found {found!r:.100}")

    def delay_seconds(self, failures: int) -> float:
        """Return the wait after this many failures, jitter included."""
        # The exponent is capped so that a forever-retrying policy cannot overflow a float.
        plain = min(self.max, self.first * self.factor ** min(failures - 1, 64), LONGEST_DELAY_SECONDS)
        return plain * random.uniform(1 - self.jitter, 1 + self.jitter)


class RetryPolicy(Backoff, frozen=True):
    """How often and after which delays a failed notification is tried again.

    It is tried `attempts` times in all, and becomes a dead letter after the last one. With `attempts=None` it is tried
    until it succeeds or a person skips it (`aviso-workers agents skip`); with `order_by`, all others of its key wait
    behind it. After 6 failures the agent is shown as blocked at it.

    The delay after the n-th failure is `first * factor ** (n - 1)`, at most `max` and 366 days. Both are a number of
    seconds, a text such as `30s`, or a timedelta; they are kept as seconds. The delay is varied by plus or minus
    `jitter`, a share of it, so that notifications which failed together do not come back together.

    The defaults wait for at most 71 seconds in all. With handlers of up to 8 seconds, all six attempts are within a
    duplicate window of 2 minutes, so that what each of them publishes is stored once. Raises `DeclarationError` for
    numbers out of range.
    """

    attempts: int | None = USUAL_ATTEMPTS
    """The number of attempts in all; None for no end. After the last one, the notification becomes a dead letter."""

    if TYPE_CHECKING:  # it is given any duration, and has seconds

        def __init__(
            self,
            attempts: int | None = USUAL_ATTEMPTS,
            *,
            first: AnyDuration = 1.0,
            factor: float = 2.5,
            max: AnyDuration = 600.0,
            jitter: float = 0.1,
        ) -> None: ...

    def __post_init__(self) -> None:
        super().__post_init__()
        found = self.attempts
        if found is not None and not (isinstance(found, int) and not isinstance(found, bool) and found >= 1):
            raise DeclarationError(
                f"RetryPolicy: attempts must be a whole number from 1 on, or None for no end, found {found!r:.100}"
            )

    def is_last(self, failures: int) -> bool:
        """Return whether no attempt is left after this many failures."""
        return self.attempts is not None and failures >= self.attempts


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


class RetryShare:
    """When the notifications of one agent are retried by one worker: their retries leave time for what is new.

    A server delivers all that is due for a retry before anything new. So where something new waits, a retry is set for
    a second in which less than `SHARE` is taken by others, as far as can be said before. Where retries have taken more
    than that, those that are due are set for later.
    """

    def __init__(self) -> None:
        self._taken: dict[int, float] = {}
        """By second, how much of it the retries take that are due then."""
        self._now = 0
        self._overspent = 0.0
        """How many seconds more retries have taken than their share."""
        self._spent_at = 0.0
        self._takes_seconds = 0.0
        """How long the last retry took."""

    def spend(self, now: float, seconds: float) -> None:
        """Note that a retry has taken so much of the worker's time."""
        self._overspent = self._overspent_at(now) + seconds
        self._spent_at, self._takes_seconds = now, seconds

    def later_seconds(self, now: float) -> float:
        """Return after how long a retry that is due is to be made where something new waits; 0 where it is now."""
        if (overspent := self._overspent_at(now)) <= SHARE:
            return 0.0
        after = min(overspent / SHARE, MAX_LATER_SECONDS)
        return self.delay_seconds(now, after, takes_seconds=self._takes_seconds, new_wait=True)

    def _overspent_at(self, now: float) -> float:
        return max(0.0, self._overspent - SHARE * (now - self._spent_at))

    def delay_seconds(self, now: float, after_seconds: float, *, takes_seconds: float, new_wait: bool) -> float:
        """Return after how long to retry what is to be retried `after_seconds`, and takes so much of the worker's time.

        It is not later where nothing `new_wait`s.
        """
        if int(now) > self._now:
            self._now = int(now)
            self._taken = {second: taken for second, taken in self._taken.items() if second >= self._now}
        due = now + after_seconds
        second, latest = int(due), int(due + MAX_LATER_SECONDS)
        while (taken := self._taken.get(second, 0.0)) >= SHARE and second < latest:
            second += 1
        again = max(due, second + min(taken / SHARE, 1.0))
        while takes_seconds > 0 and second <= latest:
            free = max(0.0, SHARE - self._taken.get(second, 0.0))
            self._taken[second] = SHARE - free + min(free, takes_seconds)
            takes_seconds -= free
            second += 1
        return again - now if new_wait else after_seconds


class Restarts:
    """The waits before something is started again that runs and fails; they begin again after a healthy run."""

    def __init__(self, backoff: Backoff, *, healthy_seconds: float) -> None:
        self.failures = 0
        """In a row."""
        self._backoff = backoff
        self._healthy_seconds = healthy_seconds
        self._started = math.inf

    def note_start(self, now: float) -> None:
        """Note the time at which the run began, so that `next_wait` knows how long it was healthy."""
        self._started = now

    def next_wait(self, now: float) -> float:
        """Count a failure, and return the seconds to wait before it is started again."""
        healthy = now - self._started > self._healthy_seconds
        self.failures = 1 if healthy else self.failures + 1
        self._started = math.inf
        return self._backoff.delay_seconds(self.failures)


def is_number(found: object) -> TypeGuard[float]:
    """Return whether it is a number, which text and a truth value are not."""
    return isinstance(found, Real) and not isinstance(found, bool)
