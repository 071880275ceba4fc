"""What becomes of a delivery: the one place that decides.

Pure. `engine.handling` runs the author's function, asks `decide` and carries the verdict out.
"""

from __future__ import annotations

import math
import random

from msgspec import Struct

from aviso_workers.errors import DeclarationError, UndecodableError

__all__ = ["Ack", "Backoff", "DeadLetter", "Retry", "Verdict", "decide"]

_SENSIBLE = {
    "first_seconds": (0, math.inf),
    "factor": (1, 1000),
    "max_seconds": (0, math.inf),
    "attempts": (1, math.inf),
    "jitter": (0, 1),
}


class Backoff(Struct, frozen=True, kw_only=True):
    """How often and how fast a failed notification is tried again.

    The wait after the n-th failure is `first_seconds * factor ** (n - 1)`, at most `max_seconds`, varied by
    plus or minus `jitter` of itself, so that what failed together does not come back together. Raises
    `DeclarationError` for numbers that make no sense.
    """

    first_seconds: float = 1.0
    factor: float = 3.0
    max_seconds: float = 600.0
    attempts: int = 6
    """Tries in all; after the last one the notification becomes a dead letter."""
    jitter: float = 0.1

    def __post_init__(self) -> None:
        for name, (least, most) in _SENSIBLE.items():
            if not least <= (found := getattr(self, name)) <= most:
                raise DeclarationError(f"Backoff: {name} must be from {least} to {most}, found {found}")

    def delay_seconds(self, failures: int) -> float:
        """The wait after this many failures, jitter included."""
        # The exponent is capped so that a forever-retrying policy cannot overflow a float.
        plain = min(self.max_seconds, self.first_seconds * self.factor ** min(failures - 1, 64))
        return plain * random.uniform(1 - self.jitter, 1 + self.jitter)


class Ack(Struct, frozen=True):
    """It is done."""


class Retry(Struct, frozen=True, kw_only=True):
    """Not done: again after the delay."""

    after_seconds: float
    reason: str


class DeadLetter(Struct, frozen=True, kw_only=True):
    """Never to be done here: keep it with its reason and go on."""

    reason: str


Verdict = Ack | Retry | DeadLetter


def decide(error: Exception | None, *, failures: int, retry: Backoff) -> Verdict:
    """The verdict on a delivery whose handling ended with `error` (None: it returned).

    `failures` counts this one.
    """
    if error is None:
        return Ack()
    if isinstance(error, UndecodableError):
        return DeadLetter(reason="undecodable")
    if failures >= retry.attempts:
        return DeadLetter(reason="attempts_exhausted")
    return Retry(after_seconds=retry.delay_seconds(failures), reason=type(error).__name__)
