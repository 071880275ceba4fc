"""The end of a worker process: who tells it to end, and how long it may take.

A thread passes the signals on to the event loop, which drains. The thread also keeps the time: what an author's code
has begun can keep a process from ending for ever, such as a thread that is not a daemon, an await that cannot be
cancelled, or a blocked event loop. A process that has not ended some seconds after its drain timeout is ended here, as
a kill would do it, with an exit code that says so.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Literal, NoReturn

from aviso_workers.telemetry.logs import log
from aviso_workers.worker import NOT_ENDED, signals

__all__ = ["GRACE_SECONDS", "Ending"]

GRACE_SECONDS = 5.0
"""How much longer than its drain timeout a process may take to end, and how long it may take after a second signal.
Settlements that have begun have 3 seconds of it (`engine.shields`)."""
TIME_OVER: Literal["the time is over"] = "the time is over"
LOG_SECONDS = 1.0
"""How long the last line may take: who reads the log may have stopped, or a thread may hold what writes it."""


class Ending:
    """Hears the signals of this process and ends it where it does not end by itself. Make it in the main thread."""

    def __init__(self, *, drain_timeout_seconds: float, running: Callable[[], Sequence[str]]) -> None:
        """`running` returns what the agents handle now; it is called in another thread."""
        self._drain_timeout_seconds = drain_timeout_seconds
        self._running = running
        self._queue: SimpleQueue[signal.Signals | None] = SimpleQueue()
        self._signals: list[signal.Signals] = []
        self._wake: Callable[[], object] | None = None
        context = contextvars.copy_context()  # with the name of the process in a fleet, for the log
        threading.Thread(target=context.run, args=(self._watch,), name="ending", daemon=True).start()
        signals.hear(self._queue.put)

    def begin(self) -> None:
        """Let the time begin, if it has not begun: the process ends for another reason than a signal."""
        self._queue.put(None)

    async def signals(self) -> AsyncIterator[signal.Signals]:
        """Yield each signal that has come since this was made."""
        arrived, loop, taken = asyncio.Event(), asyncio.get_running_loop(), 0
        self._wake = lambda: loop.call_soon_threadsafe(arrived.set)
        try:
            while True:
                arrived.clear()
                while taken < len(self._signals):
                    taken += 1
                    yield self._signals[taken - 1]
                await arrived.wait()
        finally:
            self._wake = None

    def _watch(self) -> NoReturn:
        """Hear signals until the process has ended, or has to be ended."""
        begun, over = 0.0, math.inf
        while (heard := self._next(over)) is not TIME_OVER:
            now = time.monotonic()
            if over == math.inf:
                begun, over = now, now + self._drain_timeout_seconds + GRACE_SECONDS
            elif heard is not None:
                over = min(over, now + GRACE_SECONDS)
            if isinstance(heard, signal.Signals):
                self._signals.append(heard)
                if len(self._signals) > 2:
                    break
                if (wake := self._wake) is not None:
                    with suppress(RuntimeError):  # the loop was closed
                        wake()
        self.end(time.monotonic() - begun)

    def _next(self, over: float) -> signal.Signals | Literal["the time is over"] | None:
        """Return the next signal, None for `begin`, or `TIME_OVER`."""
        try:
            return self._queue.get(timeout=None if over == math.inf else max(0.0, over - time.monotonic()))
        except Empty:
            return TIME_OVER

    def end(self, seconds: float = 0.0) -> NoReturn:
        """End the process, although something has not ended for so many seconds."""
        said = threading.Thread(target=contextvars.copy_context().run, args=(self._say, seconds), daemon=True)
        said.start()
        said.join(LOG_SECONDS)
        if (multiprocessing := sys.modules.get("multiprocessing")) is not None:
            for child in multiprocessing.active_children():  # they would wait for work for ever
                child.kill()
        os._exit(NOT_ENDED)

    def _say(self, seconds: float) -> None:
        running: Sequence[str] = ()
        with suppress(Exception):  # the loop goes on changing it
            running = self._running()
        log.error(
            "worker.not_ended",
            **({"seconds": round(seconds, 1)} if seconds else {}),
            running=list(running),
            threads=_threads(),
            exit_code=NOT_ENDED,
            cure="give what the code waits for a timeout of its own, and let threads of the app be daemons",
        )
        with suppress(OSError, ValueError):
            sys.stdout.flush()


def _threads() -> list[str]:
    """Return the threads that keep the process from ending, each with the line that it is at."""
    frames = sys._current_frames()
    return [
        f"{thread.name} at {_line(frames.get(thread.ident or 0))}"
        for thread in threading.enumerate()
        if not thread.daemon and thread.is_alive()
    ]


def _line(frame: Any) -> str:
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
