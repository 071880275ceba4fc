"""Outages of what an agent depends on: which failures show one, and when a breaker opens. Pure code.

`engine.breakers` runs breakers: while one is open, nothing is begun, nothing is counted as an attempt, and one
notification after the other is tried until one succeeds.
"""

from __future__ import annotations

import errno
import socket
import sqlite3
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from aviso_workers.aviso.literals import AnyDuration
from aviso_workers.declare import durations
from aviso_workers.declare.retry import Backoff, is_number
from aviso_workers.errors import DeclarationError

__all__ = ["OWN_TIMEOUT", "Breaker", "Evidence", "Unavailable", "is_unavailable", "retry_after_seconds"]

MAX_CAUSES = 10
"""How many exceptions are looked at, from one that was raised back along what caused it."""
MAX_SPARED = 10_000
"""How many notifications are known of which a failure was not counted; of the oldest, another one is not counted."""
AWAY = (ConnectionError, TimeoutError, socket.gaierror)
AWAY_ERRNOS = frozenset(
    {errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT, errno.ENETUNREACH}
    | {errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}
)
AWAY_STATUSES = frozenset({429, 502, 503, 504})
"""The statuses of HTTP with which a server says that it, or what is behind it, cannot answer now."""
LONGEST_RETRY_AFTER_SECONDS = 3600.0
OWN_TIMEOUT = "aviso_workers_own_timeout"
"""The attribute of the error of a call that exceeded its agent's `timeout`, which says nothing about others."""
MOSTLY = 0.9
"""The share of failures among the last ones at which a breaker opens, although some succeed."""


class Unavailable(Exception):  # noqa: N818 - an instruction, like Retry and Reject
    """Raised by an agent: what it depends on is away. Try the notification again when it is back.

    It is no failed attempt. See `Breaker`. With `after`, a number of seconds, a text such as `30s`, or a timedelta,
    nothing is tried before, once the breaker is open. Raises `DeclarationError` for an `after` that is no duration.
    """

    def __init__(self, reason: str = "", after: AnyDuration | None = None) -> None:
        self.after = None if after is None else durations.seconds("Unavailable: after", after)
        super().__init__(reason or "what the agent depends on is away")


class Breaker(Struct, frozen=True, kw_only=True):
    """The breaker of an agent: when it takes failures for an outage of what the agent depends on, and how it waits.

    It opens after `unavailable` failures in a row that say that something is away: refused, reset and aborted
    connections, every TimeoutError, names that cannot be resolved, a locked sqlite3, and the HTTP statuses 429, 502,
    503 and 504 where the exception of a client has them; and `raise Unavailable(...)`. It also opens after `failures`
    different notifications in a row that failed with any error the first time, or where nine of ten of the last
    `3 * failures` did.
    After `dead_letters` within a minute, which are more than a tenth of what was settled meanwhile, a worker halts the
    agent until a person resumes it.

    While it is open, the agent begins nothing and counts no attempt, and nothing becomes a dead letter. One
    notification is tried after `first`, then after growing times up to `max`: a number of seconds, a text such as
    `5s`, or a timedelta. All workers of the app together try one at a time. When one succeeds, the agent goes on, with
    two more after each success. Raises `DeclarationError` for numbers out of range.
    """

    unavailable: int = 3
    failures: int = 20
    dead_letters: int = 100
    first: float = 1.0
    max: float = 4.0

    if TYPE_CHECKING:  # it is given any duration, and has seconds

        def __init__(
            self,
            *,
            unavailable: int = 3,
            failures: int = 20,
            dead_letters: int = 100,
            first: AnyDuration = 1.0,
            max: AnyDuration = 4.0,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name in ("first", "max"):
            if not is_number(given := getattr(self, name)):
                structs.force_setattr(self, name, durations.seconds(f"Breaker: {name}", given))
            if not 0 < (found := getattr(self, name)) <= LONGEST_RETRY_AFTER_SECONDS:
                raise DeclarationError(f"Breaker: {name} must be above 0 s and at most 1 h, found {found!r:.100}")
        for name in ("unavailable", "failures", "dead_letters"):
            found = getattr(self, name)
            if not isinstance(found, int) or isinstance(found, bool) or found < 1:
                raise DeclarationError(f"Breaker: {name} must be a whole number from 1 on, found {found!r:.100}")

    @property
    def intervals(self) -> Backoff:
        """When it is tried, by how often it was."""
        return Backoff(first=self.first, factor=1.5, max=max(self.first, self.max))


class Evidence:
    """What a worker knows of the failures of one agent, to decide whether they are an outage."""

    def __init__(self, policy: Breaker, *, answered: int = -1) -> None:
        """Failures of any kind are no evidence until more than `answered` have succeeded."""
        self._policy = policy
        self._answered = answered
        self._call: float | None = None
        self._away = 0
        """Failures in a row that say that something is away."""
        self._away_succeeded = 0
        """How many had succeeded when the last of these failed."""
        self._failed: deque[tuple[Hashable, int]] = deque(maxlen=3 * policy.failures)
        """The notifications that failed last, each with how many had succeeded then."""
        self._spared: dict[Hashable, int] = {}
        """The notifications of which a failure was not counted, with how many had succeeded then."""

    def is_outage(self, key: Hashable, *, call: float | None, away: bool, first: bool, succeeded: int) -> bool:
        """Note that a notification failed, and return whether that makes an outage; `succeeded` have by now. `call` is
        when its call began, if a call takes several: they fail together, and count once. `first`: it has not failed
        before. What fails again says nothing of others, unless it says that something is away.
        """
        if call is not None and call == self._call:
            return False
        self._call = call
        if away:
            self._away = self._away + 1 if succeeded == self._away_succeeded else 1
            self._away_succeeded = succeeded
        if first and succeeded > self._answered and all(known != key for known, _ in self._failed):
            self._failed.append((key, succeeded))
        most, failed = self._policy.failures, self._failed
        in_a_row = len(failed) >= most and failed[-most][1] == succeeded
        mostly = len(failed) == failed.maxlen and succeeded - failed[0][1] <= len(failed) * (1 - MOSTLY)
        return self._away >= self._policy.unavailable or in_a_row or mostly

    def spares(self, key: Hashable, *, succeeded: int) -> bool:
        """Return whether a failure that says that something is away is not to be counted: the first of a notification,
        and those while nothing else succeeds.
        """
        before = self._spared.get(key, succeeded)
        self._spared[key] = succeeded
        if len(self._spared) > MAX_SPARED:
            del self._spared[next(iter(self._spared))]
        return before == succeeded


def is_unavailable(error: BaseException, kinds: tuple[type[BaseException], ...] = ()) -> bool:
    """Return whether an error, or one that caused it, says that something is away. `kinds` are further ones.

    An error may be an object of the author's, and whatever it raises when it is looked at says nothing.
    """
    with suppress(Exception):
        if getattr(error, OWN_TIMEOUT, False):
            return False  # whatever the call was ended in
        return any(_is_away(each, kinds) for each in _causes(error))
    return False


def retry_after_seconds(error: BaseException, now: datetime) -> float:
    """Return how long a server asks to wait by `Retry-After` (RFC 9110, 10.2.3); 0 where it does not ask."""
    with suppress(Exception):
        for each in _causes(error):
            if isinstance(each, Unavailable) and each.after is not None:
                return min(each.after, LONGEST_RETRY_AFTER_SECONDS)
            holder = getattr(each, "response", each)
            if (asked := getattr(holder, "headers", {}).get("Retry-After")) is not None:
                return min(max(0.0, _asked_seconds(str(asked), now)), LONGEST_RETRY_AFTER_SECONDS)
    return 0.0


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    for _ in range(MAX_CAUSES):
        if found is None:
            return
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def _is_away(error: BaseException, kinds: tuple[type[BaseException], ...]) -> bool:
    if isinstance(error, (Unavailable, *AWAY, *kinds)):
        return True
    if isinstance(error, OSError) and error.errno in AWAY_ERRNOS:
        return True
    if isinstance(error, sqlite3.OperationalError):
        return "locked" in str(error)
    return _status(error) in AWAY_STATUSES


def _status(error: BaseException) -> int | None:
    """Return the status of HTTP that an exception of a client has: requests, httpx, aiohttp, urllib or botocore."""
    holder = getattr(error, "response", None)
    for found in (
        getattr(holder, "status_code", None),
        getattr(error, "status_code", None),
        getattr(error, "status", None),
        getattr(error, "code", None),
    ):
        if isinstance(found, int):
            return found
    return None


def _asked_seconds(asked: str, now: datetime) -> float:
    if asked.strip().isdecimal():
        return float(asked)
    time = parsedate_to_datetime(asked)
    return ((time if time.tzinfo else time.replace(tzinfo=UTC)) - now).total_seconds()
