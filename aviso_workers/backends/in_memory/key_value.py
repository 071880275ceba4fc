"""Buckets of keys, kept in a stream each as JetStream KV keeps them: a revision is a sequence."""

from __future__ import annotations

import re

from aviso_workers.backends import Entry
from aviso_workers.backends.in_memory.account import Account
from aviso_workers.backends.in_memory.connection import Connection
from aviso_workers.backends.in_memory.stream import Stream
from aviso_workers.codec import Message
from aviso_workers.errors import RefusedError
from aviso_workers.streams import SECOND, StreamSpec

__all__ = ["InMemoryKeyValue", "bucket_stream"]

KEY = re.compile(r"[-/_=.a-zA-Z0-9]+")
DELETED = {"KV-Operation": "DEL"}


def bucket_stream(bucket: str, ttl_seconds: float | None = None) -> StreamSpec:
    return StreamSpec(
        name=f"KV_{bucket}",
        subjects=(f"$KV.{bucket}.>",),
        max_msgs_per_subject=1,
        max_age=int((ttl_seconds or 0) * SECOND),
        discard="new",
    )


class InMemoryKeyValue:
    """See `backends.KeyValue`."""

    def __init__(
        self, bucket: str, account: Account, connection: Connection, *, ttl_seconds: float | None = None
    ) -> None:
        self._bucket = bucket
        self._account = account
        self._connection = connection
        spec = bucket_stream(bucket, ttl_seconds)
        self._stream_name = spec.name
        if spec.name not in account.names():
            account.create(spec)

    async def get(self, key: str) -> Entry | None:
        await self._connection.reach()
        message = self._stream.newest(self._subject(key))
        if message is None or message.headers == DELETED:
            return None
        return Entry(key=key, value=message.data, revision=message.sequence)

    async def put(self, key: str, value: bytes, *, revision: int | None = None) -> int:
        entry = await self.get(key)
        if revision is not None and revision != (entry.revision if entry else 0):
            raise RefusedError(f"bucket {self._bucket}, key {key}: its newest revision is not {revision}", code=10071)
        return self._store(Message(subject=self._subject(key), data=value))

    async def delete(self, key: str) -> None:
        await self._connection.reach()
        self._store(Message(subject=self._subject(key), data=b"", headers=DELETED))

    async def keys(self) -> list[str]:
        await self._connection.reach()
        start = len(f"$KV.{self._bucket}.")
        return sorted(
            message.subject[start:] for message in self._stream.messages.values() if message.headers != DELETED
        )

    @property
    def _stream(self) -> Stream:
        """As it is now: what is too old has left it. Raises `NotFoundError`."""
        return self._account.stream(self._stream_name)

    def _store(self, message: Message) -> int:
        sequence, _ = self._account.store(self._stream, message)
        return sequence

    def _subject(self, key: str) -> str:
        if not KEY.fullmatch(key):
            raise RefusedError(f"bucket {self._bucket}, key {key!r}: keys are made of letters, digits and -_=./")
        return f"$KV.{self._bucket}.{key}"
