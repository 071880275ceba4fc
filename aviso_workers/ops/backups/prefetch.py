"""Prefetching of data: one thread makes pieces that another one takes, with a few pieces in between.

Called by `encryption`, whose library writes where a reader is wanted, and by `chains`, where a server waits for what
may take long to find.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

PIECES_WAITING = 8


class NotReadError(Exception):
    """The reader does not take pieces any more."""


class Prefetch:
    def __init__(self) -> None:
        self._waiting: queue.Queue[bytes | Exception] = queue.Queue(maxsize=PIECES_WAITING)
        self._closed = Event()

    def put(self, piece: bytes) -> None:
        """Add a piece, and wait while there are enough. Raises `NotReadError` where the reader is closed."""
        if self._closed.is_set():
            raise NotReadError
        self._waiting.put(piece)

    def next(self, *, within_seconds: float | None = None) -> bytes:
        """Return the next piece, which is never empty; b"" at the end. Raises what `make` raised, and
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
        """Call `make` with the function that adds pieces, then add the end. An exception is passed to the reader."""
        try:
            make(self.put)
            self.put(b"")
        except NotReadError:
            pass
        except Exception as error:
            self._waiting.put(error)

    def close(self) -> None:
        self._closed.set()
        with suppress(queue.Empty):
            while True:  # so that a `put` that waits for space returns
                self._waiting.get_nowait()


@contextmanager
def prefetched(make: Callable[[Callable[[bytes], None]], None]) -> Iterator[Prefetch]:
    """Run `make` in a thread of its own, and give the reader of its pieces. The thread has ended when the block is
    left.
    """
    prefetch = Prefetch()
    thread = Thread(target=prefetch.run, args=(make,), name="reading a backup", daemon=True)
    thread.start()
    try:
        yield prefetch
    finally:
        prefetch.close()
        thread.join()
