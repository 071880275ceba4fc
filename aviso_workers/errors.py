"""Every exception that this package raises.

::

    AvisoWorkersError
    ├── ConfigError                 the configuration holds mistakes; all of them are listed
    ├── DeclarationError            an app, agent, router or task is declared wrongly
    ├── InvalidNotificationError    refused before anything was sent
    │   ├── UnknownEventTypeError   no such entry in `notification_schema`
    │   ├── InvalidIdentifierError  a field is missing, unknown or has an illegal value
    │   └── InvalidPayloadError     missing though required, not JSON, or larger than the server takes
    ├── LateError                   a notification came when its window had closed
    ├── InvalidKeyError             a text that cannot be the key of a table
    ├── InvalidPositionError        a `from_id`, `from_date`, `to_id` or `to_date` that means nothing
    ├── UndecodableError            a stored message that is no notification of its event type
    ├── BackendError                what a backend answered
    │   ├── UnavailableError        nothing was done; try again
    │   ├── OutcomeUnknownError     it may have been done; try again with the same message id
    │   └── RefusedError            not done and not worth repeating
    │       ├── NotFoundError       no such stream, consumer, key or message
    │       ├── FullError           the stream has reached a limit and refuses what is new
    │       ├── ConflictError       somebody else was faster: what it depended on is not so any more
    │       └── UnreadableStreamError  the server cannot read a stream that it has, and would erase it
    ├── BackupError                 a backup cannot be made, or it is damaged, or it does not fit where it is to go
    │   └── StreamReplacedError     a stream is not the one, or no continuation of the one, that a backup is of
    ├── WorkerDiedError             a worker process ended while it handled a notification
    ├── DeliveriesExhaustedError    a notification was delivered too often, and its failures could not be counted
    ├── TakenOverError              a singleton's notification may have been given to another worker
    ├── ResourceError               a resource that an author declared cannot be opened
    ├── ServerProcessError          a nats-server of our own could not be found or started
    ├── WorkerProcessError          a worker process of a fleet does not stay up
    └── SparkError                  what concerns Spark
        ├── InvalidOptionError      an option of the data source is unknown, cannot be read, or contradicts another
        ├── DataLossError           messages that a query was to read are gone from their stream
        ├── DuplicateIdError        a row was not stored, because other content has its message id
        ├── ExecutorError           Spark's executors lack something that the data source needs
        ├── PipelineError           a pipeline cannot do what it was asked for
        └── SparkRestError          Spark's REST API could not be asked, or did not answer as it should
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "AvisoWorkersError",
    "BackendError",
    "BackupError",
    "ConfigError",
    "ConflictError",
    "DataLossError",
    "DeclarationError",
    "DeliveriesExhaustedError",
    "DeniedError",
    "DuplicateIdError",
    "ExecutorError",
    "FullError",
    "InvalidIdentifierError",
    "InvalidKeyError",
    "InvalidNotificationError",
    "InvalidOptionError",
    "InvalidPayloadError",
    "InvalidPositionError",
    "LateError",
    "NotFoundError",
    "OutcomeUnknownError",
    "PipelineError",
    "RefusedError",
    "ResourceError",
    "ServerProcessError",
    "SparkError",
    "SparkRestError",
    "StreamReplacedError",
    "TakenOverError",
    "UnavailableError",
    "UndecodableError",
    "UnknownEventTypeError",
    "UnreadableStreamError",
    "WorkerDiedError",
    "WorkerProcessError",
]


class AvisoWorkersError(Exception):
    """The root: catch it to catch everything that is ours."""


class ConfigError(AvisoWorkersError):
    """The configuration cannot be used.

    `mistakes` holds one sentence per mistake, each with its source (file and line, or environment
    variable), its key path and what was expected there.
    """

    def __init__(self, mistakes: Iterable[str]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(self.mistakes))


class DeclarationError(AvisoWorkersError):
    """An app, agent, router or task is declared in a way that cannot work."""


class InvalidNotificationError(AvisoWorkersError):
    """A notification was refused before a byte of it was sent."""


class UnknownEventTypeError(InvalidNotificationError):
    """The event type has no entry in `notification_schema`."""

    def __init__(self, event_type: str, known: Iterable[str]) -> None:
        self.event_type = event_type
        self.known = tuple(known)
        super().__init__(
            f"unknown event type {event_type!r}; notification_schema has: {', '.join(self.known) or 'none'}"
        )


class InvalidIdentifierError(InvalidNotificationError):
    """One field of an identifier is missing, unknown, or has a value that its rule does not allow."""

    def __init__(self, event_type: str, field: str, problem: str) -> None:
        self.event_type = event_type
        self.field = field
        super().__init__(f"{event_type}: identifier field {field!r} {problem}")


class InvalidPayloadError(InvalidNotificationError):
    """The payload is missing though required, is not JSON, or is larger than the server takes."""


class InvalidKeyError(AvisoWorkersError):
    """A text that cannot be the key of a table: an empty or a very long one."""


class LateError(AvisoWorkersError):
    """A notification that was not counted in a window, or not in all of its windows, because they had closed."""


class InvalidPositionError(AvisoWorkersError):
    """A start or end of a replay that cannot be read, or two that exclude each other."""


class UndecodableError(AvisoWorkersError):
    """A stored message is no notification of its event type, or its payload or identifier does not fit the agent's
    types."""


class BackendError(AvisoWorkersError):
    """A backend did not do what it was asked for.

    `code` is JetStream's `err_code` where the server gave one, else None.
    """

    def __init__(self, message: str, *, code: int | None = None) -> None:
        self.code = code
        super().__init__(message)


class UnavailableError(BackendError):
    """Nothing was done, and the same request may succeed later."""


class OutcomeUnknownError(BackendError):
    """The answer is missing: the request may have been carried out. Repeat it with the same message id."""


class RefusedError(BackendError):
    """Nothing was done, and repeating the request will not help."""


class DeniedError(RefusedError):
    """The user that is connected has no right to publish to this subject, or to hear an answer."""


class NotFoundError(RefusedError):
    """The stream, consumer, key or message that was named does not exist."""


class FullError(RefusedError):
    """The stream has reached a limit and refuses what is new, until it has lost or removed something."""


class ConflictError(RefusedError):
    """Not stored, because it depended on a revision that is not the newest. Read again, and decide anew."""


class UnreadableStreamError(RefusedError):
    """No stream is created, because the server has one that it cannot read, and erases one in whose place it is to
    create another."""


class BackupError(AvisoWorkersError):
    """A backup cannot be written or read, is damaged or not whole, or does not fit where it is to go."""


class StreamReplacedError(BackupError):
    """No increment can be made, because the stream is not the one that the backup before is of: it was made again, or
    has lost what it had. A full backup can be made."""


class WorkerDiedError(AvisoWorkersError):
    """A notification was being handled, and nothing else in its process, when the process ended."""

    def __init__(self, times: int) -> None:
        self.times = times
        super().__init__(f"its worker process ended while it was handled (failed attempts so far: {times})")


class DeliveriesExhaustedError(AvisoWorkersError):
    """A notification was delivered very often, and its failures could not be counted."""

    def __init__(self, num_delivered: int) -> None:
        self.num_delivered = num_delivered
        super().__init__(f"delivered {num_delivered} times, and its failures could not be stored")


class TakenOverError(AvisoWorkersError):
    """What a singleton's handler works on may have been given to another worker; whatever it does now is too late."""

    def __init__(self) -> None:
        super().__init__("this worker was paused or cut off, or the server changed; another one may have taken over")


class ResourceError(AvisoWorkersError):
    """A resource that an author declared raised when it was opened."""


class ServerProcessError(AvisoWorkersError):
    """A nats-server of our own could not be found, started or reached."""


class WorkerProcessError(AvisoWorkersError):
    """A worker process of a fleet crashed again and again."""


class SparkError(AvisoWorkersError):
    """The base of errors of the Spark data source, its pipelines and the bridge."""


class InvalidOptionError(SparkError):
    """An option of the data source is unknown, cannot be read, or contradicts another one."""


class DataLossError(SparkError):
    """Messages that a query was to read are gone from their stream, or the stream is not the one that it knew."""


class DuplicateIdError(SparkError):
    """A row was not stored, because the stream knows its message id, and it is not shown that it has the row."""

    def __init__(self, message: str, *, place: int = 0) -> None:
        super().__init__(message)
        self.place = place
        """The row's, among those that were stored together."""


class ExecutorError(SparkError):
    """Spark's executors cannot run the data source: a package is missing, or their Python is another one."""


class PipelineError(SparkError):
    """An archive, a backfill or a report cannot be made of what was given."""


class SparkRestError(SparkError):
    """Spark's REST API could not be asked, or what answered is another one's."""


def text_of(error: BaseException) -> str:
    """Return the text of any exception, whatever its `__str__` does; of a group, with what is in it."""
    try:
        text = str(error)
    except BaseException as raised:  # an author's code as well
        text = f"its text cannot be had, as __str__ raises {type(raised).__name__}"
    if isinstance(error, BaseExceptionGroup):
        return f"{text}: {', '.join(map(describe, error.exceptions))}"
    return text


def describe(error: BaseException) -> str:
    """Return `Type: text` of any exception, with the text of `text_of`."""
    return f"{type(error).__name__}: {text_of(error)}"
