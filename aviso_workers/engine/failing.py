"""How often a notification has failed, kept where every worker finds it.

The delivery count of a server also rises when a worker dies or is replaced, and a deploy must not use up attempts.
So failures are counted in a bucket of the app's own. It is asked only where a notification may have failed before,
which is rare, and forgets what nobody asked for within a week. Where it cannot be reached, at worst one attempt too
many is made.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from aviso_workers.backends import Backend, Delivery, KeyValue
from aviso_workers.errors import BackendError

__all__ = ["Failures"]

T = TypeVar("T")

FORGOTTEN_AFTER_SECONDS = 7 * 86400.0


class Failures:
    """The failure counts of one agent."""

    def __init__(self, backend: Backend, *, app: str, agent: str, stream: str) -> None:
        self._backend = backend
        self._bucket = f"{app}_failures"
        self._prefix = f"{agent}.{stream}"
        self._values: KeyValue | None = None
        self._kept: dict[str, int] = {}
        """By key: failures of what stays here and waits in its lane, and is not delivered anew."""

    async def count(self, delivery: Delivery) -> int:
        """How often it failed before."""
        key = self._key(delivery)
        kept = self._kept.get(key, 0)
        if delivery.num_delivered == 1:
            return kept
        entry = await self._try(lambda values: values.get(key))
        return max(kept, int(entry.value)) if entry else kept

    async def add(self, delivery: Delivery, *, before: int, kept: bool) -> None:
        """Remember one more failure. `kept`: it stays here, and is not given back to the server."""
        key = self._key(delivery)
        if kept:
            self._kept[key] = before + 1
        await self._try(lambda values: values.put(key, str(before + 1).encode()))

    async def forget(self, delivery: Delivery) -> None:
        """It is settled."""
        if delivery.num_delivered == 1 and not self._kept:
            return
        key = self._key(delivery)
        if await self.count(delivery):
            self._kept.pop(key, None)
            await self._try(lambda values: values.delete(key))

    async def _try(self, deed: Callable[[KeyValue], Awaitable[T]]) -> T | None:
        try:
            if self._values is None:
                self._values = await self._backend.key_value(self._bucket, ttl_seconds=FORGOTTEN_AFTER_SECONDS)
            return await deed(self._values)
        except BackendError:
            self._values = None  # it may have been deleted
            return None

    def _key(self, delivery: Delivery) -> str:
        # With its time, because a stream that is made anew counts from 1 again.
        return f"{self._prefix}.{delivery.message.sequence}.{delivery.message.timestamp_ns}"
