"""Where notifications go that cannot be handled, and the way back.

A dead letter keeps the bytes and the reason in a stream of its own, under `aviso_workers.dead_letters.<app>.<agent>`:
the body is the original's, untouched, and what is known of it is in the headers below. The stream refuses when it is
full, so that old evidence is never overwritten. A dead letter that is to be tried again is copied to the retries, under
`aviso_workers.retries.<app>.<agent>`, where only that agent reads; there it counts as fresh.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import ClassVar

from aviso_workers.aviso.codec import Message, store_time
from aviso_workers.backends import Backend, Delivery, Noted, PubAck
from aviso_workers.backends.provisioning import Provisioner
from aviso_workers.config import Config
from aviso_workers.errors import RefusedError, UnavailableError, describe
from aviso_workers.jetstream import error_codes
from aviso_workers.state import dead_letter_records, parts
from aviso_workers.state.dead_letter_records import RETRIED, SUBJECT
from aviso_workers.state.own_streams import DEAD_LETTERS
from aviso_workers.state.parts import message_at

__all__ = [
    "DeadLetterStore",
    "Requeued",
]

TIMEOUT_SECONDS = 10.0
LONGEST_ERROR = 2000
"""Characters of an error's text that are kept."""
DEEPEST_FRAMES = 5


class DeadLetterStore:
    """Keeps the dead letters of one app."""

    def __init__(self, backend: Backend, *, app: str, config: Config, provisioner: Provisioner) -> None:
        self._backend = backend
        self._app = app
        self._provisioner = provisioner
        self._spec = dead_letter_records.stream_spec(config)

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
        kept = dead_letter_records.without(message.headers, "Nats-", *parts.HEADERS)
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
        while ack.duplicate and await message_at(self._backend, DEAD_LETTERS, ack.sequence) is None:
            message_id = f"{message_id}.{ack.sequence}"  # that one was dropped meanwhile: this is another one as well
            ack = await self._store(dead_letter, message_id)
        return ack

    async def _store(self, dead_letter: Message, message_id: str) -> PubAck:
        try:
            return await self._backend.publish(
                dead_letter, message_id=message_id, stream=DEAD_LETTERS, timeout_seconds=TIMEOUT_SECONDS
            )
        except UnavailableError:
            self._provisioner.forget(DEAD_LETTERS)  # it may have been deleted
            raise
        except RefusedError as error:
            if error.code != error_codes.STREAM_FULL:
                raise
            raise RefusedError(
                f"stream {DEAD_LETTERS} is full: retry or drop dead letters, or raise workers.dead_letters.max_bytes",
                code=error_codes.STREAM_FULL,
            ) from error


class Requeued(Noted, eq=False):
    """A delivery from the retries, as the original that it carries."""

    _delivery: Delivery
    message: Message
    """That of the delivery, with its whole body; then the original."""
    can_be_read_again: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.message, _ = dead_letter_records.unwrap(self.message)

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

    def redeliver(self) -> None:
        self._delivery.redeliver()

    def term(self, reason: str) -> None:
        self._delivery.term(reason)

    def in_progress(self) -> None:
        self._delivery.in_progress()


def _digest(error: BaseException | None) -> str:
    """Return where it was raised, the innermost place last, in one line."""
    frames = traceback.extract_tb(error.__traceback__) if error else []
    return " > ".join(f"{Path(at.filename).name}:{at.lineno} {at.name}" for at in frames[-DEEPEST_FRAMES:])


def _one_line(text: str, *, most: int) -> str:
    """Return a text as a header can carry it: an error may quote a file name that is not text, or bytes."""
    cut = " ".join(text.split())[:most]
    return "".join(character if character.isprintable() else "?" for character in cut)
