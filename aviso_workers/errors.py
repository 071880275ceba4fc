"""Every exception that this package raises.

::

    AvisoWorkersError
    ├── ConfigError                 the configuration has mistakes; the error lists all of them
    ├── DeclarationError            the declaration of an app, agent, router or task is invalid
    ├── InvalidNotificationError    the notification is invalid; nothing was sent
    │   ├── UnknownEventTypeError   the event type has no entry in `notification_schema`
    │   ├── InvalidIdentifierError  a field is missing, unknown or has an illegal value
    │   └── InvalidPayloadError     the payload is required and missing, no JSON, or too large for the server
    ├── LateError                   a notification arrived after its window was closed
    ├── InvalidKeyError             a text is not allowed as the key of a table
    ├── InvalidPositionError        a `from_id`, `from_date`, `to_id` or `to_date` is invalid
    ├── UndecodableError            a stored message is not a notification of its event type
    ├── BackendError                a backend did not do what was requested
    │   ├── UnavailableError        nothing was done; the same request may succeed later
    │   │   └── UnansweredError     nothing receives the request, as where an account does not import it
    │   ├── OutcomeUnknownError     the request may have been done; repeat it with the same message id
    │   └── RefusedError            nothing was done, and repeating the request will not help
    │       ├── DeniedError         the connected user has no right to publish to the subject
    │       ├── NotFoundError       the stream, consumer, key or message does not exist
    │       ├── FullError           the stream has reached a limit and refuses new messages
    │       ├── ConflictError       another client changed the key or stream first
    │       └── UnreadableStreamError  the server has a stream that it cannot read, and would erase
    ├── BackupError                 a backup cannot be written, read or restored, or it is damaged
    │   └── StreamReplacedError     a stream was recreated, or lost messages, since the backup before
    ├── WorkerDiedError             a worker process ended while it handled a notification
    ├── DeliveriesExhaustedError    a notification was delivered very often while its failures could not be counted
    ├── SkippedError                a person has decided that a notification is not tried again
    ├── NoReplyError                no reply to a request came in time; the request is stored
    ├── TakenOverError              another worker may have taken over the notification of a singleton
    ├── ResourceError               a declared resource cannot be opened
    ├── ServerProcessError          a local nats-server could not be found, started or reached
    ├── WorkerProcessError          a worker process of a fleet crashed again and again
    └── SparkError                  the base of errors about Spark
        ├── InvalidOptionError      an option of the data source is unknown, cannot be read, or contradicts another
        ├── DataLossError           the stream has lost messages that a query had to read
        ├── DuplicateIdError        a row was not stored, because another message has its id
        ├── ExecutorError           Spark's executors lack something that the data source needs
        ├── PipelineError           an archive, a backfill or a report cannot be made
        └── SparkRestError          Spark's REST API did not answer, or gave an invalid answer
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType


class AvisoWorkersError(Exception):
    """The base of all errors of aviso-workers."""


class ConfigError(AvisoWorkersError):
    """The configuration cannot be used.

    `mistakes` holds one sentence per mistake, each with its source (file and line, or environment
    variable), its key path and what was expected there.
    """

    def __init__(self, mistakes: Iterable[str]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(self.mistakes))


class DeclarationError(AvisoWorkersError):
    """The declaration of an app, agent, router or task is invalid."""


class InvalidNotificationError(AvisoWorkersError):
    """A notification is invalid, and was refused before anything was sent."""


class UnknownEventTypeError(InvalidNotificationError):
    """The event type has no entry in `notification_schema`."""

    def __init__(self, event_type: str, known: Iterable[str]) -> None:
        self.event_type = event_type
        self.known = tuple(known)
        near = difflib.get_close_matches(str(event_type), self.known, n=1)
        guess = f"; did you mean {near[0]!r}?" if near else ""
        names = ", ".join(self.known) or "none, as no configuration file or app that is named declares any"
        super().__init__(f"unknown event type {event_type!r}; event types: {names}{guess}")


class InvalidIdentifierError(InvalidNotificationError):
    """One field of an identifier is missing, unknown, or has a value that its rule does not allow."""

    def __init__(self, event_type: str, field: str, problem: str) -> None:
        self.event_type = event_type
        self.field = field
        super().__init__(f"{event_type}: identifier field {field!r} {problem}")


class InvalidPayloadError(InvalidNotificationError):
    """The payload is required and missing, is not JSON, or is larger than the server allows."""


class InvalidKeyError(AvisoWorkersError):
    """A key of a table is not a text, is empty or is too long."""


class LateError(AvisoWorkersError):
    """A notification was not counted in one or more of its windows, because these windows were closed already."""


class InvalidPositionError(AvisoWorkersError):
    """The start or the end of a replay is invalid, or two of them exclude each other."""


class UndecodableError(AvisoWorkersError):
    """A stored message is not a notification of its event type, or its payload or identifier does not match the agent's
    types."""


class BackendError(AvisoWorkersError):
    """A backend did not do what was requested.

    `code` is JetStream's `err_code` where the server gave one, else None.
    """

    def __init__(self, message: str, *, code: int | None = None) -> None:
        self.code = code
        super().__init__(message)


class UnavailableError(BackendError):
    """Nothing was done, and the same request may succeed later."""


class UnansweredError(UnavailableError):
    """Nothing receives the request. The account has no JetStream or does not import the request's subject, or a server
    that answers it is away."""


class OutcomeUnknownError(BackendError):
    """No answer arrived, and the request may have been done. Repeat it with the same message id."""

    @classmethod
    def after(cls, error: BackendError) -> OutcomeUnknownError:
        """Return the error of a request of which an earlier attempt may have been done, and the last one has failed
        with `error`."""
        said = f"{error}; the answer to an earlier attempt was lost, and that one may have been done"
        return cls(said, code=error.code)


class RefusedError(BackendError):
    """Nothing was done, and repeating the request will not help."""


class DeniedError(RefusedError):
    """The connected user has no right to publish to the subject, or to receive the answer."""


class NotFoundError(RefusedError):
    """The named stream, consumer, key or message does not exist."""


class FullError(RefusedError):
    """The stream has reached a limit, and refuses new messages until it has space again. It is the one refusal after
    which publishers try again.
    """


class ConflictError(RefusedError):
    """A write was refused, because it depended on a revision that is not the newest. Read again, then decide again."""


class UnreadableStreamError(RefusedError):
    """A stream was not created, because the server has a stream that it cannot read, and would erase its files to
    create the new one."""


class BackupError(AvisoWorkersError):
    """A backup cannot be written or read, is damaged or incomplete, or cannot be restored to the given place."""


class StreamReplacedError(BackupError):
    """An incremental backup cannot be made, because the stream was recreated since the backup before, or has lost
    messages. Make a full backup instead."""


class WorkerDiedError(AvisoWorkersError):
    """A worker process ended while it handled this notification and no other."""

    def __init__(self, times: int) -> None:
        self.times = times
        super().__init__(
            f"the worker process ended while it handled this notification (failed attempts so far: {times})"
        )


class DeliveriesExhaustedError(AvisoWorkersError):
    """A notification was delivered very often while its failures could not be counted."""

    def __init__(self, num_delivered: int) -> None:
        self.num_delivered = num_delivered
        super().__init__(f"the notification was delivered {num_delivered} times, and its failures could not be stored")


class SkippedError(AvisoWorkersError):
    """A person has decided that a notification which was retried is not tried again."""

    def __init__(self, attempts: int, error: str, *, by: str = "") -> None:
        self.attempts = attempts
        self.by = by
        last = error or "not known"
        super().__init__(f"skipped by {by or 'a person'} after {attempts} attempts; the last error: {last}")


class NoReplyError(AvisoWorkersError):
    """No reply to a request came in time. The request is stored, and may still be handled.

    `sequence` and `message_id` are those of the request. Repeated with this message id within the duplicate window of
    its stream, the request is not stored again, and the reply is found even if it came meanwhile.
    """

    def __init__(self, message: str, *, sequence: int, message_id: str) -> None:
        self.sequence = sequence
        self.message_id = message_id
        super().__init__(message)


class TakenOverError(AvisoWorkersError):
    """Another worker may have taken over the notification of a singleton, so anything that the handler still does is
    too late."""

    def __init__(self) -> None:
        super().__init__(
            "this worker was paused or cut off, or the server changed, so another worker may have taken over the "
            "notification"
        )


class ResourceError(AvisoWorkersError):
    """A declared resource raised an error when it was opened."""


class ServerProcessError(AvisoWorkersError):
    """A local nats-server could not be found, started or reached."""


class WorkerProcessError(AvisoWorkersError):
    """A worker process of a fleet crashed again and again."""


class SparkError(AvisoWorkersError):
    """The base of errors of the Spark data source, its pipelines and the bridge."""


class InvalidOptionError(SparkError):
    """An option of the data source is unknown, cannot be read, or contradicts another one."""


class DataLossError(SparkError):
    """The stream has lost messages that a query had to read, or is not the stream that the query has read so far."""


class DuplicateIdError(SparkError):
    """A row was not stored, because the stream has its message id already, and nothing proves that it has the row."""

    def __init__(self, message: str, *, place: int = 0) -> None:
        super().__init__(message)
        self.place = place
        """The index of the row among the rows that were stored together."""


class ExecutorError(SparkError):
    """Spark's executors cannot run the data source: a package is missing, or their version of Python differs."""


class PipelineError(SparkError):
    """An archive, a backfill or a report cannot be made from the given input."""


class SparkRestError(SparkError):
    """Spark's REST API did not answer, or another program answered."""


__all__ = sorted(
    name for name, kind in dict(globals()).items() if isinstance(kind, type) and issubclass(kind, AvisoWorkersError)
)
LONGEST_TEXT = 4000
"""Characters of an error's text that are kept."""
LONGEST_LINE = 200
"""Characters of it where one line says it; the log and dead letters have more."""
DEEPEST_GROUPS = 20
"""Exception groups within each other of which the text is told."""
OURS = f"{Path(__file__).parent}{os.sep}"
"""The beginning of the names of our own files."""


def text_of(error: BaseException) -> str:
    """Return the text of any exception, whatever its `__str__` does; of a group, with what is in it.

    No more than `LONGEST_TEXT` characters of it are kept.
    """
    text = ""
    for part in _parts(error, DEEPEST_GROUPS):
        text += part[: LONGEST_TEXT + 1]
        if len(text) > LONGEST_TEXT:
            return f"{text[:LONGEST_TEXT]}... (shortened)"
    return text


def line_of(error: BaseException) -> str:
    """Return the beginning of the text of any exception, in one line; in a group, with what is in it."""
    return " ".join(text_of(error).split())[:LONGEST_LINE]


def describe(error: BaseException) -> str:
    """Return `Type: text` of any exception, with the text of `text_of`."""
    return f"{type(error).__name__}: {text_of(error)}"


def frames_of_author(error: BaseException | None) -> TracebackType | None:
    """Return the traceback without our own frames at its beginning: those of the author are what helps."""
    frames = error.__traceback__ if error is not None else None
    while frames and frames.tb_next and frames.tb_frame.f_code.co_filename.startswith(OURS):
        frames = frames.tb_next
    return frames


def raised_at(frames: TracebackType | None) -> tuple[str, int]:
    """Return the file and the line that raised an exception, from its traceback; empty and 0 where nothing did."""
    while frames and frames.tb_next:
        frames = frames.tb_next
    return (frames.tb_frame.f_code.co_filename, frames.tb_lineno) if frames else ("", 0)


def place_of(error: BaseException) -> str:
    """Return the file and the line that raised an exception, as `fields.py:12`; empty where nothing did."""
    file, line = raised_at(error.__traceback__)
    return f"{Path(file).name}:{line}" if file else ""


def _parts(error: BaseException, deepest: int) -> Iterator[str]:
    try:
        text = str(error)
    except BaseException as raised:  # an author's code as well
        text = f"the error has no text, because its __str__ raises {type(raised).__name__}"
    yield text
    if not issubclass(type(error), BaseExceptionGroup):
        return
    if not deepest:
        yield ": ..."
        return
    # As the interpreter has it, whatever the author's class has in its place.
    for place, each in enumerate(BaseExceptionGroup.exceptions.__get__(error)):
        yield f"{', ' if place else ': '}{type(each).__name__}: "
        yield from _parts(each, deepest - 1)
