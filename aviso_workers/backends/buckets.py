"""Buckets of keys: a stream each, with a subject for each key, as every client of JetStream KV has them (NATS ADR-8).

Made of what a backend has anyhow (publishing on a condition, the last message of a subject, reading), so that buckets
mean the same on all of them. nats-py's own are not used: they take no message id, without which a put whose
acknowledgement was lost could not be told from somebody else's, and a TTL for new keys only.

No message may roll up a bucket that is made here, as other clients' buckets allow. A server stores what it delivers to
a reply subject together with its headers. So whoever may write one bucket that allows it, and read it by a consumer,
could erase all others (`Nats-Rollup: all`). A marker for a key that is forgotten needs a roll-up too, so there is none.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from datetime import datetime

from aviso_workers.aviso.codec import MARKER_HEADER, Message, store_time
from aviso_workers.aviso.literals import SECOND
from aviso_workers.backends import Backend, BulkKeyValue, ForeignListener, Outgoing, PubAck
from aviso_workers.errors import BackendError, ConflictError, NotFoundError, RefusedError, UnavailableError
from aviso_workers.jetstream import answers, error_codes, metadata
from aviso_workers.jetstream.answers import EXPECTED_LAST
from aviso_workers.jetstream.fields import DEFAULT_DUPLICATE_WINDOW
from aviso_workers.jetstream.info import StreamConfig
from aviso_workers.jetstream.key_value import TTL, Entry, ttl_text
from aviso_workers.jetstream.specs import StreamSpec

NAME = re.compile(r"[-_a-zA-Z0-9]+")
KEY = re.compile(r"(?!\.)[-/_=.a-zA-Z0-9]+(?<!\.)")
MAX_HISTORY = 64
MARKER_SECONDS = 60
"""For how long it can be read that a key was deleted."""
TIMEOUT_SECONDS = 5.0
MAX_PASSES = 10
"""How many times at most `entries` reads on what was changed while it read."""
DELETED = {"KV-Operation": "DEL"}
SHORTEST_TTL_SECONDS = 1.0


def bucket_spec(name: str, *, ttl_seconds: float | None = None, history: int = 1, replicas: int = 1) -> StreamSpec:
    """Return the stream of a bucket. Raises `RefusedError` for a name or a history that none can have."""
    if not NAME.fullmatch(name):
        raise RefusedError(f"bucket {name!r}: a name is made of letters, digits, '-' and '_'")
    if not 1 <= history <= MAX_HISTORY:
        raise RefusedError(f"bucket {name}: history must be from 1 to {MAX_HISTORY}, found {history}")
    max_age = int((ttl_seconds or 0) * SECOND)
    return StreamSpec(
        name=f"KV_{name}",
        subjects=(f"$KV.{name}.>",),
        max_msgs_per_subject=history,
        max_age=max_age,
        duplicate_window=min(DEFAULT_DUPLICATE_WINDOW, int((ttl_seconds or DEFAULT_DUPLICATE_WINDOW) * SECOND)),
        discard="new",
        num_replicas=replicas,
        allow_msg_ttl=True,
    )


async def open_bucket(
    backend: Backend,
    name: str,
    *,
    ttl_seconds: float | None,
    history: int,
    own: bool,
    on_foreign: ForeignListener | None,
    replicas: int = 1,
) -> Bucket:
    """Return a bucket, created if it is missing, as `Backend.key_value` does."""
    spec = bucket_spec(name, ttl_seconds=ttl_seconds, history=history, replicas=replicas)
    try:
        info = await backend.stream_info(spec.name)
    except NotFoundError:
        try:
            info = await backend.create_stream(spec)
        except RefusedError as error:
            if error.code != error_codes.STREAM_NAME_IN_USE:
                raise
            info = await backend.stream_info(spec.name)  # somebody else was faster, and made it a little different
    max_age = int((ttl_seconds or 0) * SECOND)
    if 0 < info.config.max_age < max_age:
        with suppress(BackendError):  # it stays as it is where we may not change it
            info = await backend.update_stream({**info.config, "max_age": max_age})
    if metadata.is_unfinished(info.config):
        raise UnavailableError(f"bucket {name} is being restored; if that was killed, restore it again")
    return Bucket(backend, name, config=info.config, own=own, on_foreign=on_foreign)


async def open_existing(
    backend: Backend, name: str, *, ttl_seconds: float | None = None, own: bool = False
) -> BulkKeyValue | None:
    """Return a bucket as `Backend.key_value` does; None where there is none, as who only reads makes none. Raises
    `BackendError`.
    """
    try:
        await backend.stream_info(f"KV_{name}")
    except NotFoundError:
        return None
    return await backend.key_value(name, ttl_seconds=ttl_seconds, own=own)


class Bucket:
    """A key-value bucket in a stream, laid out as NATS' own clients do; see `BulkKeyValue`."""

    def __init__(
        self, backend: Backend, name: str, *, config: StreamConfig, own: bool, on_foreign: ForeignListener | None
    ) -> None:
        self._backend = backend
        self._own = own
        self._on_foreign = on_foreign
        self._name = name
        self._stream = f"KV_{name}"
        self._prefix = f"$KV.{name}."
        self._history = config.max_msgs_per_subject
        # Of several values, the one before would be the newest when the last is forgotten.
        self._forgets = config.allow_msg_ttl and self._history == 1
        self._knows_ttl = self._forgets and not config.max_age
        # What tells of a deletion goes some time later, so that a bucket does not grow by all keys there ever were.
        self._deletion = {**DELETED, TTL: ttl_text(MARKER_SECONDS)} if self._forgets else DELETED

    async def get(self, key: str) -> Entry | None:
        newest = await self.newest(key)
        return None if newest is None or newest.deleted else newest

    async def newest(self, key: str) -> Entry | None:
        message = await self._backend.message(self._stream, last_by_subject=self._subject(key))
        return self._entry(message) if message else None

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        revision: int | None = None,
        ttl_seconds: float | None = None,
        message_id: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> int:
        whole = {**(headers or {}), **self._ttl(key, ttl_seconds)}
        try:
            return await self._store(key, value, whole, revision, message_id)
        except ConflictError:
            # A key that was deleted is new, and has a revision all the same.
            if revision != 0 or (newest := await self.newest(key)) is None or not newest.deleted or newest.foreign:
                raise
        return await self._store(key, value, whole, newest.revision, message_id)

    async def delete(
        self,
        key: str,
        *,
        revision: int | None = None,
        ttl_seconds: float | None = None,
        message_id: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> int:
        whole = {**(headers or {}), **self._deletion, **self._ttl(key, ttl_seconds)}
        last = await self._store(key, b"", whole, revision, message_id)
        for _ in range(1, self._history):  # the earlier values go
            try:
                last = await self._store(key, b"", self._deletion, last, None)
            except ConflictError:
                newest = await self.newest(key)
                if newest is None or not newest.deleted or newest.foreign:
                    break  # somebody has put a newer value
                last = newest.revision  # an attempt whose acknowledgement was lost has stored some of these
        return last

    async def put_many(self, values: Mapping[str, bytes | None]) -> None:
        request = secrets.token_hex(12)
        outgoing = [
            Outgoing(
                Message(subject=self._subject(key), data=value or b"", headers=self._deletion if value is None else {}),
                message_id=f"{request}.{number}",
                stream=self._stream,
            )
            for number, (key, value) in enumerate(values.items())
        ]
        for result in await self._backend.publish_many(outgoing, timeout_seconds=TIMEOUT_SECONDS):
            if not isinstance(result, PubAck):
                raise result

    async def next(self, keys: str, *, after: int = 0) -> Entry | None:
        found = await self._backend.message(self._stream, after + 1, next_by_subject=f"{self._prefix}{keys}")
        return self._entry(found) if found else None

    async def time(self) -> datetime:
        return (await self._backend.stream_info(self._stream)).time

    async def keys(self) -> list[str]:
        return sorted(entry.key for entry in await self.entries())

    async def entries(self) -> list[Entry]:
        found: dict[str, Entry] = {}
        read = 0
        for _ in range(MAX_PASSES):  # a key that is put again while it is read is missing, and is read in the next one
            if (until := await self.revision()) <= read:
                break
            async with aclosing(self.changes(after=read, until=until)) as changes:
                async for entry in changes:
                    found.pop(entry.key, None)
                    if not entry.deleted:
                        found[entry.key] = entry
            read = until
        return list(found.values())

    async def revision(self) -> int:
        return (await self._backend.stream_info(self._stream)).last_sequence

    async def changes(
        self, key: str | None = None, *, after: int = 0, until: int | None = None
    ) -> AsyncGenerator[Entry, None]:
        if until is not None and until <= after:
            return
        subject = f"{self._prefix}>" if key is None else self._subject(key)
        reading = self._backend.read(
            self._stream, filter_subjects=(subject,), start_sequence=after + 1, last_sequence=until
        )
        async with aclosing(reading):
            async for message in reading:
                yield self._entry(message)

    async def _store(
        self, key: str, value: bytes, headers: dict[str, str], revision: int | None, message_id: str | None
    ) -> int:
        if revision is not None:
            headers = {**headers, EXPECTED_LAST: str(revision)}
        try:
            ack = await self._backend.publish(
                Message(subject=self._subject(key), data=value, headers=headers),
                message_id=message_id or secrets.token_hex(12),
                stream=self._stream,
                timeout_seconds=TIMEOUT_SECONDS,
            )
        except ConflictError as error:
            problem = "it exists" if revision == 0 else f"its newest revision is not {revision}"
            raise ConflictError(f"bucket {self._name}, key {key}: {problem}", code=error.code) from error
        return ack.sequence

    def _entry(self, message: Message) -> Entry:
        headers = message.headers or {}
        key = message.subject.removeprefix(self._prefix)
        foreign = self._foreign(key, message)
        if foreign and self._on_foreign is not None:
            self._on_foreign(stream=self._stream, sequence=message.sequence, problem=foreign)
        return Entry(
            key=key,
            data=message.data,
            revision=message.sequence,
            time=store_time(message),
            deleted="KV-Operation" in headers or MARKER_HEADER in headers or bool(foreign and self._own),
            message_id=headers.get("Nats-Msg-Id", ""),
            headers=headers,
            foreign=foreign,
        )

    def _foreign(self, key: str, message: Message) -> str:
        """Return why it is known that no client has put what the message stores; empty where that is not known.

        Each of our own messages has headers. In another bucket, somebody else's client may have put a value without.
        """
        if self._own or answers.is_stored_by_reply(message):
            why = answers.why_foreign(message)
            cure = "" if self._own else "; put another value, or delete the key"
            return f"bucket {self._name}, key {key}: {why}{cure}" if why else ""
        return ""

    def _ttl(self, key: str, seconds: float | None) -> dict[str, str]:
        """Return the header by which a key is forgotten after this time. Raises `RefusedError`."""
        if seconds is None:
            return {}
        what = f"bucket {self._name}, key {key}"
        self._backend.connection.require_server(2, 11, to="have a key forgotten after a time")
        if not self._knows_ttl:
            raise RefusedError(
                f"{what}: this bucket knows no ttl: it has a history or an age, or was made by somebody else"
            )
        if not seconds >= SHORTEST_TTL_SECONDS:
            raise RefusedError(f"{what}: ttl must be {SHORTEST_TTL_SECONDS:g} s or more, found {seconds:g}")
        return {TTL: ttl_text(seconds)}

    def _subject(self, key: str) -> str:
        if not KEY.fullmatch(key):
            raise RefusedError(f"bucket {self._name}, key {key!r}: keys are made of letters, digits and -_=./")
        return f"{self._prefix}{key}"
