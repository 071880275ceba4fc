"""Dead letters as they are stored, and the way back to their agents.

A dead letter keeps the bytes and the reason in a stream of its own, under `aviso_workers.dead_letters.<app>.<agent>`:
the body is the original's, untouched, and what is known of it is in the headers below. A dead letter that is to be
tried again is copied to the retries, under `aviso_workers.retries.<app>.<agent>`, where only that agent reads; there it
counts as fresh. `engine.dead_letter_store` stores them.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from msgspec import Struct

from aviso_workers.aviso.codec import Message, read_number, store_time
from aviso_workers.aviso.literals import quoted
from aviso_workers.config import Config, streams
from aviso_workers.errors import UndecodableError
from aviso_workers.jetstream import answers
from aviso_workers.jetstream.fields import DAY, SECOND
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.state import parts
from aviso_workers.state.kept import Kept
from aviso_workers.state.own_streams import DEAD_LETTERS, RETRIES

__all__ = [
    "KEPT",
    "RETRIED",
    "SUBJECT",
    "DeadLetter",
    "retries_spec",
    "retry_of",
    "retry_subject",
    "stream_spec",
    "unwrap",
    "without",
]

SUBJECT = "aviso_workers.dead_letters"
RETRIES_SUBJECT = "aviso_workers.retries"
RETRIES_KEPT_DAYS = 30
RETRIES_ONCE_SECONDS = 3600
"""A retry that is broken off and repeated within this time is stored once."""
KEPT = (
    Kept(
        stream=DEAD_LETTERS,
        key=f"{SUBJECT}.<app>.<agent>",
        holds="a dead letter: the original's body, and in headers what is known of it",
        until="until it is retried or dropped",
    ),
    Kept(
        stream=RETRIES,
        key=f"{RETRIES_SUBJECT}.<app>.<agent>",
        holds="a dead letter that its agent is to handle again",
        until=f"{RETRIES_KEPT_DAYS} days",
    ),
)
RETRIED = "Aviso-Retried"
"""The header of what is tried again: which dead letter it was."""


class DeadLetter(Struct, frozen=True, kw_only=True):
    """A stored dead letter, read."""

    sequence: int
    """Of the dead letter itself."""
    time: datetime
    """When it was stored."""
    app: str
    agent: str
    reason: str
    error: str
    traceback: str
    attempts: int
    stream: str
    """The stream of the original."""
    original: Message
    stored: Message
    """The dead letter itself, as the stream holds it, with its whole body."""

    @classmethod
    def read(cls, message: Message) -> DeadLetter:
        """Return the dead letter that a message stores. Raises `UndecodableError` where it stores none."""
        headers = dict(message.headers or {})
        if why := answers.why_foreign(message):
            raise UndecodableError(
                f"message {message.sequence} of {DEAD_LETTERS} is not a dead letter: {why}; to remove it: "
                f"nats stream rmm {quoted(DEAD_LETTERS)} {quoted(str(message.sequence))}"
            )
        try:
            return cls(
                sequence=message.sequence,
                time=store_time(message),
                app=headers["Aviso-App"],
                agent=headers["Aviso-Agent"],
                reason=headers["Aviso-Reason"],
                error=headers["Aviso-Error"],
                traceback=headers["Aviso-Traceback"],
                attempts=read_number(headers["Aviso-Attempts"]),
                stream=headers["Aviso-Stream"],
                original=_original(message, headers),
                stored=message,
            )
        except (KeyError, UndecodableError) as error:
            raise UndecodableError(
                f"message {message.sequence} of {DEAD_LETTERS} is not a dead letter: {error}"
            ) from error


def stream_spec(config: Config) -> StreamSpec:
    """Return the stream of the dead letters."""
    max_bytes = config.workers.dead_letters.max_bytes
    return streams.own_stream(
        DEAD_LETTERS, f"{SUBJECT}.>", config, discard="new", max_bytes=int(max_bytes) if max_bytes else -1
    )


def retries_spec(config: Config) -> StreamSpec:
    """Return the stream of the dead letters that are tried again."""
    return streams.own_stream(
        RETRIES,
        f"{RETRIES_SUBJECT}.>",
        config,
        max_age=RETRIES_KEPT_DAYS * DAY,
        duplicate_window=RETRIES_ONCE_SECONDS * SECOND,
    )


def retry_subject(app: str, agent: str) -> str:
    """Return where only this agent reads."""
    return f"{RETRIES_SUBJECT}.{app}.{agent}"


def retry_of(dead_letter: DeadLetter) -> tuple[Message, str]:
    """Return the copy that hands a dead letter back to its agent, and its message id, which is always the same."""
    message_id = f"{dead_letter.sequence}.{dead_letter.stored.timestamp_ns}"
    headers = {**without(dead_letter.stored.headers, "Nats-", *parts.HEADERS), RETRIED: message_id}
    return Message(
        subject=retry_subject(dead_letter.app, dead_letter.agent), data=dead_letter.stored.data, headers=headers
    ), message_id


def unwrap(retry: Message) -> tuple[Message, str]:
    """Return the original that a message of the retries carries, and its stream."""
    headers = retry.headers or {}
    try:
        return _original(retry, headers), headers["Aviso-Stream"]
    except (KeyError, UndecodableError):
        return (
            retry,
            RETRIES,
        )  # not written by us: it will not decode, and become a dead letter with its bytes


def without(headers: Mapping[str, str] | None, *prefixes: str) -> dict[str, str]:
    return {name: value for name, value in (headers or {}).items() if not name.startswith(prefixes)}


def _original(message: Message, headers: Mapping[str, str]) -> Message:
    kept = without(headers, "Aviso-", "Nats-")
    if RETRIED in headers:
        kept[RETRIED] = headers[RETRIED]
    return Message(
        subject=headers["Aviso-Subject"],
        data=message.data,
        headers=kept,
        sequence=read_number(headers["Aviso-Sequence"]),
        timestamp_ns=read_number(headers["Aviso-Timestamp"]),
    )
