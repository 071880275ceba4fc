"""What becomes of a delivery: the one place that decides.

Pure. The engine runs the author's function, asks `decide` and carries the verdict out (`engine.settling`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import Struct

from aviso_workers.errors import (
    DeclarationError,
    DeliveriesExhaustedError,
    InvalidNotificationError,
    LateError,
    UndecodableError,
    WorkerDiedError,
)

__all__ = [
    "Ack",
    "Again",
    "Backoff",
    "Classifier",
    "DeadLetter",
    "Record",
    "Reject",
    "Retry",
    "Verdict",
    "before_handling",
    "decide",
]

SUSPECT_AFTER = 2
"""After so many deliveries without a recorded failure a notification is run alone: it may be what ends its workers.
One is common, because a deploy gives back what it had not begun."""

_SENSIBLE = {
    "first": (0, math.inf),
    "factor": (1, 1000),
    "max": (0, math.inf),
    "attempts": (1, math.inf),
    "jitter": (0, 1),
}


class Backoff(Struct, frozen=True, kw_only=True):
    """How often and how fast a failed notification is tried again.

    The wait after the n-th failure is `first * factor ** (n - 1)` seconds, at most `max`, varied by
    plus or minus `jitter` of itself, so that what failed together does not come back together. Raises
    `DeclarationError` for numbers that make no sense.
    """

    first: float = 1.0
    factor: float = 3.0
    max: float = 600.0
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
        plain = min(self.max, self.first * self.factor ** min(failures - 1, 64))
        return plain * random.uniform(1 - self.jitter, 1 + self.jitter)


class Retry(Exception):  # noqa: N818 - an instruction, also given as a value
    """Raised or returned by an agent: try this notification again, `after` seconds, or when its policy says.

    It counts as a failed attempt. Raises `DeclarationError` for an `after` that is no wait.
    """

    def __init__(self, after: float | None = None) -> None:
        if after is not None and not 0 <= after < math.inf:
            raise DeclarationError(f"Retry: after must be a number of seconds from 0, found {after}")
        self.after = after
        super().__init__("asked to be tried again" + (f" after {after:g} s" if after is not None else ""))


class Reject(Exception):  # noqa: N818 - an instruction, also given as a value
    """Raised or returned by an agent: this notification can never be handled, keep it as a dead letter."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class Ack(Struct, frozen=True):
    """It is done."""


class Again(Struct, frozen=True, kw_only=True):
    """Not done: once more after the delay."""

    after_seconds: float
    reason: str


class DeadLetter(Struct, frozen=True, kw_only=True):
    """Never to be done here: keep it with its reason and go on."""

    reason: str


class Record(Struct, frozen=True, kw_only=True):
    """What is known of a notification that was delivered before."""

    failures: int = 0
    began: bool = False
    """It was run alone, and its worker has neither settled it nor given it back."""
    stored: bool = True
    """Whether failures can be stored; where not, some may be unknown."""


Verdict = Ack | Again | DeadLetter
Classifier = Callable[[Exception], Retry | Reject | None]
"""What an author makes of an exception: tried again, rejected, or (None) done all the same."""


def before_handling(
    record: Record, *, num_delivered: int, attempts: int
) -> Literal["run", "run_alone", "worker_died", "give_up"]:
    """What to do with a notification that is delivered again, before its handler is run.

    `worker_died` counts as a failed attempt, `give_up` is the end of what cannot be counted.
    """
    if record.began:
        return "worker_died"
    if not record.stored and record.failures >= attempts:
        return "give_up"
    if num_delivered - 1 - record.failures >= SUSPECT_AFTER:
        return "run_alone"
    return "run"


def decide(
    outcome: object,
    *,
    failures: int,
    retry: Backoff,
    classifiers: Sequence[tuple[type[Exception], Classifier]] = (),
) -> Verdict:
    """The verdict on what a handler returned, or on the exception that it raised.

    `failures` is how often it failed before. The first of `classifiers` whose exception type fits is asked; what one
    raises takes the exception's place. They are not asked about a worker that died, which no handler has raised.
    """
    for kind, classify in classifiers:
        if isinstance(outcome, kind) and not isinstance(outcome, WorkerDiedError | DeliveriesExhaustedError):
            try:
                outcome = classify(outcome)
            except Exception as raised:
                outcome = raised
            break
    match outcome:
        case UndecodableError():
            return DeadLetter(reason="undecodable")
        case InvalidNotificationError():
            return DeadLetter(reason="invalid_notification")
        case LateError():
            return DeadLetter(reason="late")
        case Reject():
            return DeadLetter(reason="rejected")
        case DeliveriesExhaustedError():
            return DeadLetter(reason="max_deliveries")
        case WorkerDiedError() if failures + 1 >= retry.attempts:
            return DeadLetter(reason="worker_died")
        case Exception() if failures + 1 >= retry.attempts:
            return DeadLetter(reason="attempts_exhausted")
        case Retry(after=float() | int() as after):
            return Again(after_seconds=float(after), reason="Retry")
        case Exception():
            return Again(after_seconds=retry.delay_seconds(failures + 1), reason=type(outcome).__name__)
        case _:
            return Ack()
