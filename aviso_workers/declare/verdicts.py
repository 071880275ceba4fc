"""Verdicts on notifications that were not handled: the one place that decides.

Pure, and two steps. The engine runs the author's function and makes a `Failure` of what went wrong, where it went
wrong; `classify` asks the author what the exception means, and `decide` returns the verdict, which
`engine.acknowledging` carries out. What becomes of a delivery in the end is one of three: `Ack`, `Nak` or `Term`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, Literal, TypeGuard

from msgspec import Struct, structs
from typing_extensions import TypeVar

from aviso_workers.aviso import literals
from aviso_workers.aviso.literals import AnyDuration
from aviso_workers.aviso.notifications import Notification
from aviso_workers.declare.retry import LONGEST_DELAY_DAYS, LONGEST_DELAY_SECONDS, RetryPolicy
from aviso_workers.errors import DeclarationError, RefusedError

T = TypeVar("T", default=Any)
K = TypeVar("K", default=Any)

RECORDED_FROM = 2
"""From this delivery on, a record says that a handler begins, unless all deliveries before it have failed."""
SUSPECT_AFTER = 2
"""After so many deliveries without a failure a notification is run alone where no such record can be stored. Elsewhere
the number of deliveries says nothing: workers that stop, and those of another version, give back without a failure."""
LEAST_UNCOUNTED_SECONDS = 1.0
"""The shortest delay after a failure that is not counted: nothing else bounds how often there are such failures."""
UNCOUNTED_DELIVERIES = 20
"""How many deliveries of a notification may have ended without a failure, where failures cannot be stored."""


class Retry(Exception):  # noqa: N818 - an instruction, also given as a value
    """Raised or returned by an agent: try this notification again, `after` this time: a number of seconds, a text such
    as `10m`, or a timedelta.

    Without `after`, the delay is that of the agent's policy. It counts as a failed attempt, unless `counts` is false,
    as where the other side asks to be called less often. Then `after` is needed, at least a second passes, and it may
    be tried again without end. Raises `DeclarationError` for an `after` that is no duration, below 0,
    or above 366 days, such as a time since 1970, and for `counts=False` without one.
    """

    after: float | None = None
    """The delay in seconds."""
    counts: bool = True
    """Whether it is a failed attempt."""

    def __init__(self, after: AnyDuration | None = None, *, counts: bool = True) -> None:
        self.after = None if after is None else _delay_seconds(after)
        self.counts = bool(counts)
        if not counts:
            if self.after is None:
                raise DeclarationError('Retry: counts=False needs the time to wait: Retry(after="30s", counts=False)')
            self.after = max(self.after, LEAST_UNCOUNTED_SECONDS)
        super().__init__("asked to be tried again" + (f" after {self.after:g} s" if self.after is not None else ""))


def _delay_seconds(after: object) -> float:
    with suppress(ValueError):
        if 0 <= (seconds := literals.seconds_of(after)) <= LONGEST_DELAY_SECONDS:
            return seconds
    raise DeclarationError(
        f"Retry: after must be a duration from 0 to {LONGEST_DELAY_SECONDS} seconds ({LONGEST_DELAY_DAYS} days) from "
        f'now on, such as 30 or "30s", found {after!r:.100}'
    )


class Reject(Exception):  # noqa: N818 - an instruction, also given as a value
    """Raised or returned by an agent: this notification can never be handled, and becomes a dead letter with this
    reason.

    Raises `DeclarationError` if the reason is missing, as in `raise Reject`.
    """

    def __init__(self, reason: str = "") -> None:
        if not reason:
            raise DeclarationError('Reject: say why the notification can never be handled: Reject("no such field")')
        self.reason = reason
        super().__init__(reason)


class Ack(Struct, frozen=True):
    """Returned by a function of `on_error`: ack the notification although the handler raised."""


class GivenUp(Struct, Generic[T, K], frozen=True, kw_only=True):
    """A notification that its agent has given up, as the agent's function of `on_dead_letter` has it.

    `T` and `K` are the types of its payload and its key, as in the agent's `Notification[T, K]`.
    """

    notification: Notification[T | bytes, K | None]
    """The notification. Where it cannot be read as the agent's types, its payload is the body's bytes, its key is None,
    and its identifier is empty if the subject cannot be read either. Of a window, it has the `Window` as its payload,
    the window's end as its time, and no identifier."""
    reason: str
    """The reason of the dead letter, such as `attempts_exhausted`, `rejected`, `undecodable` or `worker_died`."""
    attempts: int
    """How many attempts have failed."""
    error: str
    """The class and the text of the last error, as `ValueError: no such field`."""


class Again(Struct, frozen=True, kw_only=True):
    """The verdict to try it again after the delay."""

    after_seconds: float
    reason: str


class DeadLetter(Struct, frozen=True, kw_only=True):
    """The verdict to store it as a dead letter with this reason."""

    reason: str


class Nak(Struct, frozen=True):
    """The settlement that has a delivery made again after the delay."""

    delay_seconds: float = 0.0


class Term(Struct, frozen=True):
    """The settlement after which a delivery is never made again."""

    reason: str


RunsAs = Literal["beside_others", "alone"]
"""How the handler of a notification runs that was delivered before."""


class PriorRecord(Struct, frozen=True, kw_only=True):
    """The record of a notification that was delivered or tried before."""

    failures: int = 0
    ended: int = 0
    """How many deliveries ended with a failure. Others failed and were tried again without being given back."""
    began: RunsAs | None = None
    """How a handler began whose worker has neither settled the notification nor given it back."""
    stored: bool = True
    """Whether failures can be stored; where not, some may be unknown."""

    uncounted: int = 0
    """How many calls failed in a way that is no failed attempt, as far as this process knows."""
    away_since: float = 0.0
    """When it failed first because something is away, in seconds since 1970; 0 where it never did."""
    waits: int = 0
    """How often its wait after such a failure has grown, as far as this process knows."""
    succeeded: int = 0
    """How many others had succeeded here when it failed so the last time."""

    @property
    def tried(self) -> bool:
        """Whether a call has failed for it."""
        return bool(self.failures or self.uncounted or self.away_since)

    def handed_over(self, num_delivered: int) -> int:
        """Return how often the notification was handed to the agent, where the server says `num_delivered`."""
        return num_delivered + self.failures + self.uncounted - self.ended


Known = Literal["run", "run_recorded", "run_alone", "worker_died", "max_deliveries"]
"""What to do with a notification that is delivered again; see `before_handling`."""
Verdict = Again | DeadLetter
Settlement = Ack | Nak | Term
Instruction = Retry | Reject
UNFINISHED: Mapping[type, str] = {
    Awaitable: "await it",
    AsyncIterator: "loop over it with `async for`, and yield what it yields",
}
"""The types that a handler may return by mistake, as its work is not done, and the cure."""
Classifier = Callable[[Exception], Retry | Reject | Ack | None]
"""A function of `on_error`, which answers an exception with one of these; None is not an answer."""
FinalReason = Literal["undecodable", "invalid_notification", "late", "max_deliveries", "skipped"]
"""Why a notification would fail each time that it is tried, or is not tried any more."""


class Failure(Struct, frozen=True):
    """Why a notification was not handled: what the author's code raised, or returned instead of raising it."""

    error: BaseException
    instruction: Instruction | None = None
    """The author's answer."""
    final: FinalReason | None = None
    """Set by the step of ours that found it, never by the type of the error: what a handler raises may be about
    something else than its notification."""
    worker_died: bool = False
    """No handler has raised it: the worker ended while the handler ran."""
    other_version: bool = False
    """The notification is given back to a worker of another version of the app, and this is no failed attempt."""
    told: bool = False
    """Another notification of the same call says already how what the agent depends on is: each call says it once."""

    @property
    def is_evidence(self) -> bool:
        """Whether it says how what the agent depends on is. What the author has answered, what can never be handled,
        and what no handler has raised says nothing of that."""
        return not (self.final or self.worker_died or self.other_version) and self.instruction is None


class FinalError(Exception):
    """Raised by a step of ours to say that trying again cannot help. No author's code raises it."""

    def __init__(self, error: Exception, *, reason: FinalReason) -> None:
        self.error = error
        self.reason: FinalReason = reason
        super().__init__(reason)


class OtherVersionError(Exception):
    """Raised by a step of ours to have a worker of another version of the app handle a notification."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        super().__init__(str(error))


class ReadOtherwiseError(RefusedError):
    """A stream is read otherwise than the configuration of this worker says, so nothing is published to it here. It is
    no failure of what is handled: the agent that publishes stands until `require` returns.
    """

    def __init__(self, message: str, *, require: Callable[[], Awaitable[None]]) -> None:
        self.require = require
        """Compares again. Raises as `engine.key_orders.require_same` does."""
        super().__init__(message)


def before_handling(record: PriorRecord, *, num_delivered: int, retry: RetryPolicy) -> Known:
    """Return what to do with a notification that is delivered again, before its handler is run.

    `run_recorded` is after a record that it begins. `worker_died` counts as a failed attempt, `max_deliveries` is the
    end where failures cannot be counted.
    """
    if record.began == "alone":
        return "worker_died"
    if not record.stored and retry.is_last(num_delivered - 1 - UNCOUNTED_DELIVERIES):
        return "max_deliveries"
    unexplained = num_delivered - 1 - record.ended
    if record.began or (not record.stored and unexplained >= SUSPECT_AFTER):
        return "run_alone"
    return "run_recorded" if unexplained > 0 else "run"


def failure_returned(output: object) -> Failure | None:
    """Return the failure that a handler returned or yielded; None where it is something else."""
    if output is None:  # as nearly always
        return None
    if isinstance(output, type) and is_instruction(output):
        call = 'Reject("no such field")' if issubclass(output, Reject) else "Retry()"
        return Failure(DeclarationError(f"the handler returned the class {output.__name__}: return {call} instead"))
    if _is_raisable(output):
        return Failure(output)
    if isinstance(output, BaseException):
        return Failure(DeclarationError(f"the handler returned a {type(output).__name__}, which is not an exception"))
    for kind, cure in UNFINISHED.items():
        if isinstance(output, kind):
            found = f"{type(output).__name__} {getattr(output, '__qualname__', '')}".rstrip()
            return Failure(DeclarationError(f"the handler returned the {found}, of which nothing has run: {cure}"))
    return None


def is_instruction(output: object) -> bool:
    """Return whether it is `Retry` or `Reject`, or the class of one."""
    return isinstance(output, Instruction) or (isinstance(output, type) and issubclass(output, Instruction))


def classify(failure: Failure, classifiers: Sequence[tuple[type[Exception], Classifier]]) -> Failure | Ack:
    """Return the failure with what the author says of it, or `Ack` where it is done all the same.

    Those of `classifiers` whose exception type fits are asked in turn, until one answers. `Retry` and `Reject` from the
    handler are answers already. A classifier that fails, or answers something else, is a failure instead of this one.
    They are not asked about a worker that died, what another version is to handle, or what a person has decided, which
    no handler has raised.

    The exception and the answer are objects of the author's: what they raise when they are looked at is the failure.
    """
    if failure.worker_died or failure.other_version or failure.final in ("max_deliveries", "skipped"):
        return failure
    try:
        return _classified(failure, classifiers)
    except BaseException as raised:
        return _explained(failure, raised)


def uncounted_seconds(failure: Failure) -> float | None:
    """Return after how long a notification is tried again whose author says that it is no failed attempt; else None."""
    instruction = failure.instruction
    return instruction.after if isinstance(instruction, Retry) and not instruction.counts else None


def decide(failure: Failure, *, failures: int, retry: RetryPolicy) -> Verdict:
    """Return the verdict on a failure. `failures` is how often the notification failed before."""
    if isinstance(failure.instruction, Reject):
        return DeadLetter(reason="rejected")
    if failure.final and failure.instruction is None:
        return DeadLetter(reason=failure.final)
    if retry.is_last(failures + 1):
        return DeadLetter(reason="worker_died" if failure.worker_died else "attempts_exhausted")
    after = failure.instruction.after if failure.instruction is not None else None
    return Again(
        after_seconds=retry.delay_seconds(failures + 1) if after is None else float(after),
        reason="Retry" if isinstance(failure.error, Retry) else type(failure.error).__name__,
    )


def _classified(failure: Failure, classifiers: Sequence[tuple[type[Exception], Classifier]]) -> Failure | Ack:
    if isinstance(failure.error, Instruction):
        return _explained(failure, failure.error)
    for kind, classifier in classifiers:
        if isinstance(failure.error, kind) and (answer := _answer(classifier, failure.error)) is not None:
            return answer if isinstance(answer, Ack) else _explained(failure, answer)
    return failure


def _answer(classifier: Classifier, error: Exception) -> Ack | BaseException | None:
    """Return what the classifier returns or raises."""
    try:
        answer: object = classifier(error)
    except BaseException as raised:
        return raised
    if answer is None or isinstance(answer, Ack) or (isinstance(answer, Instruction) and _is_raisable(answer)):
        return answer
    name = getattr(classifier, "__name__", "the function")
    return DeclarationError(
        f"on_error: {name} returned {type(answer).__name__}: return Retry(), Reject(reason), Ack() or None"
    )


def _explained(failure: Failure, answer: BaseException) -> Failure:
    if isinstance(answer, Instruction):
        try:
            # An `after` that can be relied on: its author may have set it later. Raises `DeclarationError`.
            checked = Retry(answer.after, counts=answer.counts) if isinstance(answer, Retry) else answer
            return structs.replace(failure, instruction=checked)
        except BaseException as raised:
            return structs.replace(failure, error=raised)
    if answer is failure.error:  # raised again
        return failure
    with suppress(BaseException):  # where the author's class has another __context__
        answer.__context__ = failure.error
    return structs.replace(failure, error=answer)


def _is_raisable(found: object) -> TypeGuard[BaseException]:
    """Return whether it is an exception: `isinstance` also takes a mock of one for it."""
    return issubclass(type(found), BaseException)
