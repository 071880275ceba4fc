"""Limits that all workers of an app keep together: how many calls begin in a time, and how many run at once."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Literal

from msgspec import Struct, structs

from aviso_workers.aviso.literals import AnyDuration, Duration
from aviso_workers.declare import durations
from aviso_workers.declare.retry import is_number
from aviso_workers.errors import DeclarationError

__all__ = ["LONGEST_PER_SECONDS", "Limit", "limits_of"]

LONGEST_PER_SECONDS = 86400.0
MOST = 10**9
MOST_CONCURRENT = 100
"""Each is a lease of its own."""


class Limit(Struct, frozen=True):
    """A limit of an agent across the fleet: all workers of the app on all machines keep it together.

    `Limit(100, per="1m")`, for `rate_limit=`, lets a hundred calls begin in a minute, evenly spaced. `per` is a number
    of seconds, a text such as `1m`, or a timedelta, at most a day. `Limit(concurrent=1)`, for `limit=`, lets one call
    run at a time. With `key`, identifier fields that are part of the topic, there is a limit for each of their values.

    Workers lease what they use of a limit in a bucket of the app. One that cannot reach it begins nothing. Raises
    `DeclarationError` for anything else.
    """

    number: float = 0.0
    """How many calls begin in the time `per`; 0 where it is a limit of those that run at once."""
    per: float = 0.0
    """Seconds."""
    key: tuple[str, ...] = ()
    across: Literal["fleet"] = "fleet"
    """Of whom the limit is; a plain number for `rate_limit=` is one of each worker."""
    concurrent: int = 0
    """How many calls run at once; 0 where it is a limit of those that begin in a time."""

    if TYPE_CHECKING:  # it is given any duration and any fields, and has seconds and a tuple

        def __init__(
            self,
            number: float = 0.0,
            per: AnyDuration = 0.0,
            key: Collection[str] = (),
            across: Literal["fleet"] = "fleet",
            concurrent: int = 0,
        ) -> None: ...

    def __post_init__(self) -> None:
        structs.force_setattr(self, "per", durations.seconds("Limit: per", self.per))
        fields = self.key if isinstance(self.key, Collection) and not isinstance(self.key, str) else (None,)
        structs.force_setattr(self, "key", tuple(fields))
        if not all(isinstance(field, str) for field in fields):
            raise DeclarationError('Limit: key must be a list of identifier fields, as in key=["class"]')
        if self.across != "fleet":
            raise DeclarationError(
                f'Limit: across must be "fleet", found {self.across!r:.100}; rate_limit=10 and concurrency=10 are '
                "limits of each worker"
            )
        if not (is_number(self.number) and is_number(self.concurrent) and bool(self.number) != bool(self.concurrent)):
            raise DeclarationError('Limit: say either Limit(100, per="1m") or Limit(concurrent=1)')
        if self.concurrent:
            if not (isinstance(self.concurrent, int) and 0 < self.concurrent <= MOST_CONCURRENT) or self.per:
                raise DeclarationError("Limit: concurrent must be a whole number from 1 to 100, without per")
        elif not (0 < self.number <= MOST and 0 < self.per <= LONGEST_PER_SECONDS):
            raise DeclarationError(
                f"Limit: give a number above 0 and at most {MOST}, and per above 0 s and at most a day, as in "
                f'Limit(100, per="1m"); found {self.number!r:.100} and {self.per:g} s'
            )
        elif self.interval_seconds > LONGEST_PER_SECONDS:
            raise DeclarationError(f"Limit: it must let one begin in a day, found {self.number:g} in {self.per:g} s")

    @property
    def interval_seconds(self) -> float:
        """The time from one call to the next; 0 for a limit of those that run at once."""
        return self.per / self.number if self.number else 0.0

    @property
    def text(self) -> str:
        """The limit for people."""
        each = f" for each {', '.join(self.key)}" if self.key else ""
        what = f"{self.concurrent} at once" if self.concurrent else f"{self.number:g} in {Duration(self.per)}"
        return f"{what}{each}, across the fleet"


def limits_of(rate_limit: object, limit: object) -> tuple[Limit, ...]:
    """Return the limits across the fleet that a decorator is given. Raises `DeclarationError`."""
    if isinstance(rate_limit, Limit) and not rate_limit.number:
        raise DeclarationError("agent: rate_limit= takes Limit(100, per=...); give Limit(concurrent=...) as limit=")
    if limit is not None and not (isinstance(limit, Limit) and limit.concurrent):
        raise DeclarationError('agent: limit= takes Limit(concurrent=1, ...); give Limit(100, per="1m") as rate_limit=')
    # A token is spent where it is asked for, and so last: a place among those that run at once can be given back.
    return tuple(found for found in (limit, rate_limit) if isinstance(found, Limit))
