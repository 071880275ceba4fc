"""Writes that many callers ask for at once, made as few requests.

`attempts` uses it: a tenth of all notifications may fail, and a request for each failure would cost more than all the
rest of the handling. The first caller writes, for itself and for all that ask meanwhile. The others go on at once, and
what they wanted to do after their write is done for them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

import anyio

from aviso_workers.engine.shields import Shield

MAX_WAITING = 1000
"""Writes that wait for the next request. Who asks for one more waits with them."""


class _Write(NamedTuple):
    """One value, None where it is to be removed, and what is called with whether that was done."""

    key: str
    value: bytes | None
    then: Callable[[bool], None]


class GroupedWrites:
    """Values by key, written by `write_all`, which returns whether all of them are stored."""

    def __init__(self, write_all: Callable[[Mapping[str, bytes | None]], Awaitable[bool]], *, shield: Shield) -> None:
        self._write_all = write_all
        self._shield = shield
        self._waiting: list[_Write] = []
        self._turn = anyio.Lock()

    async def write(self, key: str, value: bytes | None, *, then: Callable[[bool], None]) -> None:
        """Have the value stored, or removed where it is None, and then call `then` with whether it was.

        Where another caller writes at the moment, this returns before that. Of several values of a key that are written
        together the last one counts. `then` is also called when whoever writes is cancelled; it must not raise.
        """
        self._waiting.append(_Write(key, value, then))
        if self._turn.locked() and len(self._waiting) < MAX_WAITING:
            return
        try:
            async with self._shield.hold(), self._turn:  # to take it lets whoever runs now join
                while self._waiting:
                    await self._write_waiting()
        finally:
            if not self._turn.locked():  # else the next one writes what waits
                unwritten, self._waiting = self._waiting, []
                _tell(unwritten, stored=False)

    async def _write_waiting(self) -> None:
        writes, self._waiting = self._waiting, []
        stored = False
        try:
            stored = await self._write_all({write.key: write.value for write in writes})
        finally:
            _tell(writes, stored=stored)


def _tell(writes: list[_Write], *, stored: bool) -> None:
    for write in writes:
        write.then(stored)
