"""Writes that many callers ask for at once, made as one request.

`failing` uses it: a tenth of all notifications may fail, and a request for each failure would cost more than all the
rest of the handling. Who asks while a request is under way waits for the next one, which takes all that came meanwhile.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import anyio
from anyio.lowlevel import checkpoint

__all__ = ["GroupedWrites"]


class _Group:
    """What is written together."""

    def __init__(self) -> None:
        self.values: dict[str, bytes | None] = {}
        self.over = anyio.Event()
        self.stored = False


class GroupedWrites:
    """Values by key, written by `write_all`, which says whether all of them are stored."""

    def __init__(self, write_all: Callable[[Mapping[str, bytes | None]], Awaitable[bool]]) -> None:
        self._write_all = write_all
        self._group = _Group()
        """The one that is still joined."""
        self._turn = anyio.Lock()

    async def write(self, key: str, value: bytes | None) -> bool:
        """Return whether the value is stored, or removed where it is None. The last one of a key in a group counts."""
        group = self._group
        group.values[key] = value
        if len(group.values) == 1:
            await self._lead(group)
        else:
            await group.over.wait()
        return group.stored

    async def _lead(self, group: _Group) -> None:
        """Write a group when the one before it is written, and whoever runs now has joined it."""
        try:
            async with self._turn:
                await checkpoint()
                self._group = _Group()
                group.stored = await self._write_all(group.values)
        finally:  # also where the leader is cancelled
            if self._group is group:
                self._group = _Group()
            group.over.set()
