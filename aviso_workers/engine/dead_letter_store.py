"""Where notifications go that cannot be handled, and the way back.

A dead letter keeps the bytes and the reason in a stream of its app, under `aviso_workers.dead_letters.<app>.<agent>`:
the body is the original's, untouched, and what is known of it is in the headers below. Where that is too large for a
message, the texts of the error are cut; where it is still too large, the original is compressed. The stream refuses
when it is full, so that old evidence is never overwritten. A dead letter that is to be tried again is copied to the
retries, under `aviso_workers.retries.<app>.<agent>`, where only that agent reads; there it counts as fresh.
"""

from __future__ import annotations

import secrets
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

from msgspec import structs

from aviso_workers.aviso.codec import Message, store_time
from aviso_workers.backends import Backend, Delivery, Noted, PubAck
from aviso_workers.backends.provisioning import Provisioner
from aviso_workers.config import Config
from aviso_workers.errors import RefusedError, UnavailableError, describe
from aviso_workers.jetstream import error_codes
from aviso_workers.state import dead_letter_records
from aviso_workers.state.dead_letter_records import COMPRESSED, RETRIED

TIMEOUT_SECONDS = 10.0
LONGEST_TEXTS = (2000, 200, 40)
"""Characters that are kept of an error's text, and of its traceback: the first number with which all fits."""
MAX_HEADER_BYTES = 65_535
"""JetStream stores no message with more."""
ADDED_BYTES = 1024
"""Bytes that publishing adds to the headers, here and to a copy in the retries, and those of the headers' own frame."""
DEEPEST_FRAMES = 5


class DeadLetterStore:
    """Keeps the dead letters of one app."""

    def __init__(self, backend: Backend, *, app: str, config: Config, provisioner: Provisioner) -> None:
        self._backend = backend
        self._app = app
        self._provisioner = provisioner
        self._spec = dead_letter_records.stream_spec(app, config)

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
        }
        kept = dead_letter_records.without(message.headers, "Nats-", COMPRESSED)
        original = Message(subject=dead_letter_records.subject_of(self._app, agent), data=message.data, headers=kept)
        # With its time, because a stream that is recreated counts from 1 again. What was tried again and failed again
        # is another letter, although the first may still be there: it is removed a moment after it was copied.
        message_id = f"{self._app}.{agent}.{stream}.{message.sequence}.{message.timestamp_ns}.{kept.get(RETRIED, part)}"
        await self._store_once(self._fitted(original, headers, error), message_id)

    def _fitted(self, original: Message, headers: Mapping[str, str], error: BaseException | None) -> Message:
        """Return the dead letter with as much of the error's texts as fits, and compressed where it must be.

        Raises `RefusedError` with `MESSAGE_TOO_LARGE` where it fits in no way.
        """
        max_payload = self._backend.connection.max_payload
        forms: tuple[Callable[[Message], Message], ...] = (lambda plain: plain, dead_letter_records.compressed)
        for form in forms:
            carrier = form(original)
            for most in LONGEST_TEXTS:
                texts = {
                    "Aviso-Error": _one_line(describe(error) if error else "", most=most),
                    "Aviso-Traceback": _one_line(_digest(error, most=most), most=most),
                }
                found = structs.replace(carrier, headers={**(carrier.headers or {}), **headers, **texts})
                if _fits(found, max_payload=max_payload):
                    return found
        raise RefusedError(
            f"{original.subject}: the dead letter does not fit into a message of {max_payload} bytes, also compressed",
            code=error_codes.MESSAGE_TOO_LARGE,
        )

    async def _store_once(self, dead_letter: Message, message_id: str) -> PubAck:
        ack = await self._store(dead_letter, message_id)
        while ack.duplicate:
            found = await self._backend.message(self._spec.name, ack.sequence)
            if found is not None and found.subject == dead_letter.subject:
                break
            # It was dropped meanwhile, and this is another one as well. Or somebody else who may store dead letters of
            # another agent has guessed the id, so that this one would be taken for that.
            message_id = f"{message_id}.{ack.sequence if found is None else secrets.token_hex(8)}"
            ack = await self._store(dead_letter, message_id)
        return ack

    async def _store(self, dead_letter: Message, message_id: str) -> PubAck:
        try:
            return await self._backend.publish(
                dead_letter, message_id=message_id, stream=self._spec.name, timeout_seconds=TIMEOUT_SECONDS
            )
        except UnavailableError:
            self._provisioner.forget(self._spec.name)  # it may have been deleted
            raise
        except RefusedError as error:
            if error.code != error_codes.STREAM_FULL:
                raise
            raise RefusedError(
                f"stream {self._spec.name} is full: retry or drop dead letters, or raise "
                "workers.dead_letters.max_bytes",
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


def _fits(message: Message, *, max_payload: int) -> bool:
    """Return whether a server takes the message."""
    size = sum(len(f"{name}: {value}\r\n".encode()) for name, value in (message.headers or {}).items()) + ADDED_BYTES
    return size <= MAX_HEADER_BYTES and size + len(message.data) <= max_payload


def _digest(error: BaseException | None, *, most: int) -> str:
    """Return where it was raised, the innermost place last, in one line: of the places, those that `most` characters
    have room for.
    """
    frames = traceback.extract_tb(error.__traceback__)[-DEEPEST_FRAMES:] if error else []
    places = [f"{Path(at.filename).name}:{at.lineno} {at.name}" for at in frames]
    while len(" > ".join(places)) > most:
        del places[0]
    return " > ".join(places)


def _one_line(text: str, *, most: int) -> str:
    """Return a text as a header can carry it: an error may quote a file name that is not text, or bytes."""
    cut = " ".join(text.split())[:most]
    return "".join(character if character.isprintable() else "?" for character in cut)
