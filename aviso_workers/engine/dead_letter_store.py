"""Where notifications go that cannot be handled, and the way back.

A dead letter keeps the bytes and the reason in a stream of its own, under `aviso_workers.dead_letters.<app>.<agent>`:
the body is the original's, untouched, and what is known of it is in the headers below. The stream refuses when it is
full, so that old evidence is never overwritten. A dead letter that is to be tried again is copied to the retries, under
`aviso_workers.retries.<app>.<agent>`, where only that agent reads; there it counts as fresh.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from msgspec import Struct

from aviso_workers.aviso.codec import Message, read_number, store_time
from aviso_workers.aviso.literals import quoted
from aviso_workers.backends import Backend, Delivery, Noted, PubAck
from aviso_workers.config import Config, streams
from aviso_workers.engine import parts
from aviso_workers.engine.provisioning import Provisioner
from aviso_workers.engine.replay import message_at
from aviso_workers.errors import RefusedError, UnavailableError, UndecodableError, describe
from aviso_workers.jetstream import answers, error_codes
from aviso_workers.jetstream.fields import DAY, SECOND
from aviso_workers.jetstream.specs import StreamSpec

__all__ = [
    "RETRIES",
    "STREAM",
    "DeadLetter",
    "DeadLetterStore",
    "Requeued",
    "retries_spec",
    "retry_of",
    "retry_subject",
    "stream_spec",
    "unwrap",
]

STREAM = "aviso_workers_dead_letters"
SUBJECT = "aviso_workers.dead_letters"
RETRIES = "aviso_workers_retries"
RETRIES_SUBJECT = "aviso_workers.retries"
RETRIES_KEPT_DAYS = 30
RETRIES_ONCE_SECONDS = 3600
"""A retry that is broken off and repeated within this time is stored once."""
RETRIED = "Aviso-Retried"
"""The header of what is tried again: which dead letter it was."""
TIMEOUT_SECONDS = 10.0
LONGEST_ERROR = 2000
"""Characters of an error's text that are kept."""
DEEPEST_FRAMES = 5


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
                f"message {message.sequence} of {STREAM} is not a dead letter: {why}; to remove it: "
                f"nats stream rmm {quoted(STREAM)} {quoted(str(message.sequence))}"
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
            raise UndecodableError(f"message {message.sequence} of {STREAM} is not a dead letter: {error}") from error


class DeadLetterStore:
    """Keeps the dead letters of one app."""

    def __init__(self, backend: Backend, *, app: str, config: Config, provisioner: Provisioner) -> None:
        self._backend = backend
        self._app = app
        self._provisioner = provisioner
        self._spec = stream_spec(config)

    async def dead_letter(
        self,
        message: Message,
        *,
        agent: str,
        stream: str,
        reason: str,
        attempts: int,
        error: BaseException | None,
        part: str = "",
    ) -> None:
        """Store a copy, acknowledged. Raises `BackendError`: then the original must stay.

        `part` says which part of the message it is, where it is not the whole of it.
        """
        await self._provisioner.ensure(self._spec)
        headers = {
            "Aviso-Subject": message.subject,
            "Aviso-Stream": stream,
            "Aviso-Sequence": str(message.sequence),
            "Aviso-Timestamp": str(message.timestamp_ns),
            "Aviso-Time": store_time(message).isoformat(),
            "Aviso-App": self._app,
            "Aviso-Agent": agent,
            "Aviso-Attempts": str(attempts),
            "Aviso-Reason": reason,
            "Aviso-Error": _one_line(describe(error) if error else "", most=self._longest_text),
            "Aviso-Traceback": _one_line(_digest(error), most=self._longest_text),
        }
        kept = _without(message.headers, "Nats-", *parts.HEADERS)
        dead_letter = Message(subject=f"{SUBJECT}.{self._app}.{agent}", data=message.data, headers={**kept, **headers})
        # With its time, because a stream that is recreated counts from 1 again. What was tried again and failed again
        # is another letter, although the first may still be there: it is removed a moment after it was copied.
        message_id = f"{self._app}.{agent}.{stream}.{message.sequence}.{message.timestamp_ns}.{kept.get(RETRIED, part)}"
        await parts.store(dead_letter, message_id, self._store_once, max_payload=self._backend.connection.max_payload)

    @property
    def _longest_text(self) -> int:
        """Characters of an error or a traceback: few, where a server takes small messages only."""
        return min(LONGEST_ERROR, self._backend.connection.max_payload // 32)

    async def _store_once(self, dead_letter: Message, message_id: str) -> PubAck:
        ack = await self._store(dead_letter, message_id)
        while ack.duplicate and await message_at(self._backend, STREAM, ack.sequence) is None:
            message_id = f"{message_id}.{ack.sequence}"  # that one was dropped meanwhile: this is another one as well
            ack = await self._store(dead_letter, message_id)
        return ack

    async def _store(self, dead_letter: Message, message_id: str) -> PubAck:
        try:
            return await self._backend.publish(
                dead_letter, message_id=message_id, stream=STREAM, timeout_seconds=TIMEOUT_SECONDS
            )
        except UnavailableError:
            self._provisioner.forget(STREAM)  # it may have been deleted
            raise
        except RefusedError as error:
            if error.code != error_codes.STREAM_FULL:
                raise
            raise RefusedError(
                f"stream {STREAM} is full: retry or drop dead letters, or raise workers.dead_letters.max_bytes",
                code=error_codes.STREAM_FULL,
            ) from error


class Requeued(Noted, eq=False):
    """A delivery from the retries, as the original that it carries."""

    _delivery: Delivery
    message: Message
    """That of the delivery, with its whole body; then the original."""
    can_be_read_again: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.message, _ = unwrap(self.message)

    @property
    def num_delivered(self) -> int:
        return self._delivery.num_delivered

    @property
    def num_pending(self) -> int:
        return self._delivery.num_pending

    @property
    def held(self) -> bool:
        return self._delivery.held

    def ack(self) -> None:
        self._delivery.ack()

    def nak(self, *, delay_seconds: float = 0.0) -> None:
        self._delivery.nak(delay_seconds=delay_seconds)

    def term(self, reason: str) -> None:
        self._delivery.term(reason)

    def in_progress(self) -> None:
        self._delivery.in_progress()


def stream_spec(config: Config) -> StreamSpec:
    """Return the stream of the dead letters."""
    max_bytes = config.workers.dead_letters.max_bytes
    return streams.own_stream(
        STREAM, f"{SUBJECT}.>", config, discard="new", max_bytes=int(max_bytes) if max_bytes else -1
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
    headers = {**_without(dead_letter.stored.headers, "Nats-", *parts.HEADERS), RETRIED: message_id}
    return Message(
        subject=retry_subject(dead_letter.app, dead_letter.agent), data=dead_letter.stored.data, headers=headers
    ), message_id


def unwrap(retry: Message) -> tuple[Message, str]:
    """Return the original that a message of the retries carries, and its stream."""
    headers = retry.headers or {}
    try:
        return _original(retry, headers), headers["Aviso-Stream"]
    except (KeyError, UndecodableError):
        return retry, RETRIES  # not written by us: it will not decode, and become a dead letter with its bytes


def _without(headers: Mapping[str, str] | None, *prefixes: str) -> dict[str, str]:
    return {name: value for name, value in (headers or {}).items() if not name.startswith(prefixes)}


def _original(message: Message, headers: Mapping[str, str]) -> Message:
    kept = _without(headers, "Aviso-", "Nats-")
    if RETRIED in headers:
        kept[RETRIED] = headers[RETRIED]
    return Message(
        subject=headers["Aviso-Subject"],
        data=message.data,
        headers=kept,
        sequence=read_number(headers["Aviso-Sequence"]),
        timestamp_ns=read_number(headers["Aviso-Timestamp"]),
    )


def _digest(error: BaseException | None) -> str:
    """Return where it was raised, the innermost place last, in one line."""
    frames = traceback.extract_tb(error.__traceback__) if error else []
    return " > ".join(f"{Path(at.filename).name}:{at.lineno} {at.name}" for at in frames[-DEEPEST_FRAMES:])


def _one_line(text: str, *, most: int) -> str:
    """Return a text as a header can carry it: an error may quote a file name that is not text, or bytes."""
    cut = " ".join(text.split())[:most]
    return "".join(character if character.isprintable() else "?" for character in cut)
