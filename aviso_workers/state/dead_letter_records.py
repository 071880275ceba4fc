"""Dead letters as they are stored, and the way back to their agents.

A dead letter keeps the bytes and the reason in a stream of its app, under `aviso_workers.dead_letters.<app>.<agent>`:
the body is the original's, untouched, and what is known of it is in the headers below. A dead letter that is to be
tried again is copied to the retries, under `aviso_workers.retries.<app>.<agent>`, where only that agent reads; there it
counts as fresh. `engine.dead_letter_store` stores them.

An original may be as large as a server takes, and a dead letter has more headers. Where both do not fit into a message,
the headers and the body of the original are the body, compressed, and the header `Aviso-Compressed` says so. Only
`_original` reads such a body.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from datetime import datetime

from msgspec import Struct, structs

from aviso_workers.aviso.codec import Message, read_number, store_time
from aviso_workers.aviso.literals import SECOND, quoted
from aviso_workers.config import Config, streams
from aviso_workers.errors import UndecodableError
from aviso_workers.jetstream import answers
from aviso_workers.jetstream.fields import DAY
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.state import own_streams
from aviso_workers.state.own_streams import DEAD_LETTERS, RETRIES

SUBJECT = "aviso_workers.dead_letters"
RETRIES_SUBJECT = "aviso_workers.retries"
RETRIES_KEPT_DAYS = 30
RETRIES_ONCE_SECONDS = 3600
"""A retry that is broken off and repeated within this time is stored once."""
RETRIED = "Aviso-Retried"
"""The header of what is tried again: which dead letter it was."""
BY = "Aviso-Retried-By"
"""The header of what is tried again: who has handed it back, where that is known."""
COMPRESSED = "Aviso-Compressed"
"""The header of a message whose body holds the headers and the body of the original: how it is compressed."""
HEADERS_END = b"\r\n\r\n"
LINE_END = b"\r\n"
MAX_RESTORED_BYTES = 64 * 2**20 + 2**17
"""The most bytes that a compressed body may become: no server takes a body of more than 64 MiB, and no headers of more
than 64 KiB."""
FASTEST = 1
"""The level of compression: the event loop waits for it, and a few kilobytes have to be saved."""


LetterId = tuple[str, int]
"""An app, and the sequence of one of its dead letters."""


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
    """The dead letter itself, as the stream holds it."""

    @property
    def id(self) -> LetterId:
        return self.app, self.sequence

    @classmethod
    def read(cls, message: Message, app: str) -> DeadLetter:
        """Return the dead letter that a message of the app's stream stores. Raises `UndecodableError` where it stores
        none.
        """
        stream = own_streams.of_app(DEAD_LETTERS, app)
        headers = message.headers or {}
        try:
            if why := answers.why_foreign(message):
                raise UndecodableError(why)
            if (named := _require_own(message, subject_of)) != app:
                raise UndecodableError(f"it is of app {named}")
            return cls(
                sequence=message.sequence,
                time=store_time(message),
                app=app,
                agent=headers["Aviso-Agent"],
                reason=headers["Aviso-Reason"],
                error=headers["Aviso-Error"],
                traceback=headers["Aviso-Traceback"],
                attempts=read_number(headers["Aviso-Attempts"]),
                stream=headers["Aviso-Stream"],
                original=_original(message),
                stored=message,
            )
        except (KeyError, UndecodableError) as error:
            raise UndecodableError(
                f"message {message.sequence} of {stream} is not a dead letter: {error}; to remove it: "
                f"nats stream rmm {quoted(stream)} {quoted(str(message.sequence))}"
            ) from error


def stream_spec(app: str, config: Config) -> StreamSpec:
    """Return the stream of an app's dead letters."""
    max_bytes = config.workers.dead_letters.max_bytes
    return streams.own_stream(
        own_streams.of_app(DEAD_LETTERS, app),
        f"{SUBJECT}.{app}.>",
        config,
        discard="new",
        max_bytes=int(max_bytes) if max_bytes else -1,
    )


def retries_spec(app: str, config: Config) -> StreamSpec:
    """Return the stream of an app's dead letters that are tried again."""
    return streams.own_stream(
        own_streams.of_app(RETRIES, app),
        f"{RETRIES_SUBJECT}.{app}.>",
        config,
        max_age=RETRIES_KEPT_DAYS * DAY,
        duplicate_window=RETRIES_ONCE_SECONDS * SECOND,
    )


def subject_of(app: str, agent: str) -> str:
    """Return the subject of an agent's dead letters."""
    return f"{SUBJECT}.{app}.{agent}"


def retry_subject(app: str, agent: str) -> str:
    """Return where only this agent reads."""
    return f"{RETRIES_SUBJECT}.{app}.{agent}"


def retry_id(dead_letter: DeadLetter) -> str:
    """Return the message id of the copy that hands a dead letter back, which is always the same."""
    return f"{dead_letter.sequence}.{dead_letter.stored.timestamp_ns}"


def retry_of(dead_letter: DeadLetter, by: str = "") -> tuple[Message, str, str]:
    """Return the copy that hands a dead letter back to its agent, its message id and its stream. `by` is who does so;
    empty where that is not known.
    """
    message_id = retry_id(dead_letter)
    headers = {**without(dead_letter.stored.headers, "Nats-", BY), RETRIED: message_id} | ({BY: by} if by else {})
    subject = retry_subject(dead_letter.app, dead_letter.agent)
    copy = Message(subject=subject, data=dead_letter.stored.data, headers=headers)
    return copy, message_id, own_streams.of_app(RETRIES, dead_letter.app)


def unwrap(retry: Message) -> tuple[Message, str]:
    """Return the original that a message of the retries carries, and its stream. What nobody of us has written is
    returned as it is, without a stream: it will not decode, and become a dead letter with its bytes.
    """
    headers = retry.headers or {}
    try:
        _require_own(retry, retry_subject)
        return _original(retry), headers["Aviso-Stream"]
    except (KeyError, UndecodableError):
        return retry, ""


def handed_back(retry: Message, app: str) -> tuple[DeadLetter, str]:
    """Return the dead letter that a message of an app's retries was, and who has handed it back; empty where that is
    not known. Raises `UndecodableError` where nobody of us has written it.
    """
    headers = retry.headers or {}
    number, _, time = headers.get(RETRIED, "").partition(".")
    subject = subject_of(app, retry.subject.rpartition(".")[2])
    stored = structs.replace(retry, subject=subject, sequence=read_number(number), timestamp_ns=read_number(time))
    return DeadLetter.read(stored, app), headers.get(BY, "")


def _require_own(message: Message, subject_of: Callable[[str, str], str]) -> str:
    """Return the app that the headers name. Raise `UndecodableError` where they name another agent than the subject,
    which permissions of the server concern; `KeyError` where they name none.
    """
    headers = message.headers or {}
    app, agent = headers["Aviso-App"], headers["Aviso-Agent"]
    if message.subject != subject_of(app, agent):
        raise UndecodableError(f"its headers say that it is of agent {app}/{agent}, its subject is {message.subject}")
    return app


def compressed(original: Message) -> Message:
    """Return the message with its headers and its body compressed in its body. `RETRIED` is left where it is."""
    headers = original.headers or {}
    kept = {name: value for name, value in headers.items() if name == RETRIED}
    lines = [f"{name}:{value}".encode() for name, value in headers.items() if name not in kept]
    data = zlib.compress(LINE_END.join(lines) + HEADERS_END + original.data, FASTEST)
    return structs.replace(original, data=data, headers={**kept, COMPRESSED: "zlib"})


def _restored(message: Message) -> Message:
    """Return the message as it was before `compressed`. Raises `UndecodableError` where it cannot have been so."""
    headers = dict(message.headers or {})
    if COMPRESSED not in headers:
        return message
    decompression = zlib.decompressobj()
    try:
        body = decompression.decompress(message.data, MAX_RESTORED_BYTES)
    except zlib.error as error:
        raise UndecodableError(f"its body cannot be decompressed: {error}") from error
    if not decompression.eof:
        raise UndecodableError("its compressed body is cut, or larger than any message")
    lines, ended, data = body.partition(HEADERS_END)
    if not ended:
        raise UndecodableError("its compressed body holds no headers")
    del headers[COMPRESSED]
    for line in filter(None, lines.split(LINE_END)):
        name, _, value = line.decode("utf-8", "replace").partition(":")
        headers.setdefault(name, value)
    return structs.replace(message, data=data, headers=headers)


def without(headers: Mapping[str, str] | None, *prefixes: str) -> dict[str, str]:
    return {name: value for name, value in (headers or {}).items() if not name.startswith(prefixes)}


def _original(message: Message) -> Message:
    """Return the original that a message carries. Raises `KeyError` and `UndecodableError`."""
    restored = _restored(message)
    headers = restored.headers or {}
    kept = without(headers, "Aviso-", "Nats-")
    if RETRIED in headers:
        kept[RETRIED] = headers[RETRIED]
    return Message(
        subject=headers["Aviso-Subject"],
        data=restored.data,
        headers=kept,
        sequence=read_number(headers["Aviso-Sequence"]),
        timestamp_ns=read_number(headers["Aviso-Timestamp"]),
    )
