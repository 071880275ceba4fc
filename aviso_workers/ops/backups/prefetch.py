"""Pieces of data that one thread makes and another one takes: some ahead, and no more.

Called by `encryption`, whose library writes where a reader is wanted, and by `chains`, where a server waits for what
may take long to find.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

__all__ = ["NobodyTakesError", "Prefetch", "prefetched"]

PIECES_WAITING = 8


class NobodyTakesError(Exception):
    """The pieces are not wanted any more."""


class Prefetch:
    def __init__(self) -> None:
        self._waiting: queue.Queue[bytes | Exception] = queue.Queue(maxsize=PIECES_WAITING)
        self._closed = Event()

    def put(self, piece: bytes) -> None:
        """Raises `NobodyTakesError`."""
        if self._closed.is_set():
            raise NobodyTakesError
        self._waiting.put(piece)

    def next(self, *, within_seconds: float | None = None) -> bytes:
        """Return the next piece, none of length 0; b"" at the end. Raises what the making of it raised, and
        `TimeoutError`.
        """
        try:
            piece = self._waiting.get(timeout=within_seconds)
        except queue.Empty as error:
            raise TimeoutError from error
        if isinstance(piece, Exception):
            raise piece
        return piece

    def run(self, make: Callable[[Callable[[bytes], None]], None]) -> None:
        """Have `make` put all pieces, and then the end. Nothing is raised here."""
        try:
            make(self.put)
            self.put(b"")
        except NobodyTakesError:
            pass
        except Exception as error:
            self._waiting.put(error)

    def close(self) -> None:
        self._closed.set()
        with suppress(queue.Empty):
            while True:  # who waits for room, gets it
                self._waiting.get_nowait()


@contextmanager
def prefetched(make: Callable[[Callable[[bytes], None]], None]) -> Iterator[Prefetch]:
    """What `make` puts, in a thread of its own, which has ended when the block is left."""
    prefetch = Prefetch()
    thread = Thread(target=prefetch.run, args=(make,), name="reading a backup", daemon=True)
    thread.start()
    try:
        yield prefetch
    finally:
        prefetch.close()
        thread.join()
