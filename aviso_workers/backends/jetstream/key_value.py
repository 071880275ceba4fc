"""Buckets of JetStream KV, on nats-py's own."""

from __future__ import annotations

import nats.js.errors
from nats.js import JetStreamContext
from nats.js.kv import KeyValue as NatsKeyValue

from aviso_workers.backends import Entry
from aviso_workers.backends.jetstream import faults
from aviso_workers.errors import RefusedError

__all__ = ["JetStreamKeyValue", "open_bucket"]


async def open_bucket(
    context: JetStreamContext, bucket: str, *, replicas: int, ttl_seconds: float | None
) -> JetStreamKeyValue:
    """The bucket, created with one value per key where it is missing."""
    with faults.translated(f"bucket {bucket}"):
        try:
            return JetStreamKeyValue(bucket, await context.key_value(bucket))
        except nats.js.errors.BucketNotFoundError:
            return JetStreamKeyValue(
                bucket, await context.create_key_value(bucket=bucket, replicas=replicas, ttl=ttl_seconds)
            )


class JetStreamKeyValue:
    """See `backends.KeyValue`."""

    def __init__(self, bucket: str, values: NatsKeyValue) -> None:
        self._bucket = bucket
        self._values = values

    async def get(self, key: str) -> Entry | None:
        with faults.translated(f"bucket {self._bucket}, key {key}"):
            try:
                entry = await self._values.get(key)
            except nats.js.errors.KeyNotFoundError:
                return None
        return Entry(key=key, value=entry.value or b"", revision=entry.revision or 0)

    async def put(self, key: str, value: bytes, *, revision: int | None = None) -> int:
        with faults.translated(f"bucket {self._bucket}, key {key}"):
            if revision is None:
                return await self._values.put(key, value)
            try:
                if revision == 0:
                    return await self._values.create(key, value)
                return await self._values.update(key, value, last=revision)
            except nats.js.errors.KeyWrongLastSequenceError as error:
                raise RefusedError(
                    f"bucket {self._bucket}, key {key}: its newest revision is not {revision}", code=10071
                ) from error

    async def delete(self, key: str) -> None:
        with faults.translated(f"bucket {self._bucket}, key {key}"):
            await self._values.delete(key)

    async def keys(self) -> list[str]:
        with faults.translated(f"bucket {self._bucket}"):
            try:
                return sorted(await self._values.keys())
            except nats.js.errors.NoKeysError:
                return []
