"""The end of a worker process: who tells it to end, and how long it may take.

Python's own handlers of signals are used, and not those of an event loop. A loop is told of a signal through a socket,
which each forked child of the process shares: a signal to such a child would reach the loop of the worker, and end the
worker. And a loop that is blocked is told of nothing. A child that a handler of notifications forks, as
`multiprocessing` does, gets the dispositions that a Python program begins with. Signals are blocked while it is made:
one that arrives before the child has these dispositions waits.

A thread passes the signals on to the event loop, which drains. The thread also keeps the time: what an author's code
has begun can keep a process from ending for ever, such as a thread that is not a daemon, an await that cannot be
cancelled, or a blocked event loop. A process that has not ended some seconds after its drain timeout is ended here, as
a kill would do it, with an exit code that says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal, NoReturn

import anyio

from aviso_workers.telemetry.logs import log
from aviso_workers.worker import NOT_ENDED

GRACE_SECONDS = 5.0
"""How much longer than its drain timeout a process may take to end, and how long it may take after a second signal.
Settlements that have begun have 3 seconds of it (`engine.shields`)."""
MAX_LINES = 20
"""How many lines of the author's code are named."""
TIME_OVER: Literal["the time is over"] = "the time is over"
NOT_OF_AUTHORS = (
    contextlib.__file__,
    *(f"{Path(file).parents[up]}{os.sep}" for file, up in ((__file__, 1), (asyncio.__file__, 0), (anyio.__file__, 0))),
    f"{Path(anyio.__file__).parents[1] / 'nats'}{os.sep}",
)
"""The prefixes of the files that run tasks of their own, or await an author's code."""
LOG_SECONDS = 1.0
"""How long the last line may take: who reads the log may have stopped, or a thread may hold what writes it."""
TOLD_TO_END: dict[signal.Signals, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
    signal.SIGHUP: signal.SIG_DFL,
}
"""The signals, each with the disposition that a Python program begins with."""


class _Forks(threading.local):
    """The signals that a thread that forks had blocked before."""

    blocked: frozenset[int] = frozenset()


_forks = _Forks()
_heard: set[signal.Signals] = set()
"""The signals that are heard in this process."""
_children_are_told = False
"""Whether this process, or the one that it was forked from, has hooks for its forks."""


class Ending:
    """Hears the signals of this process and ends it where it does not end by itself. Make it in the main thread."""

    def __init__(self, *, drain_timeout_seconds: float, running: Callable[[], Sequence[str]]) -> None:
        """`running` returns what the agents handle now; it is called in another thread."""
        self._drain_timeout_seconds = drain_timeout_seconds
        self._running = running
        self._queue: SimpleQueue[signal.Signals | None] = SimpleQueue()
        self._signals: list[signal.Signals] = []
        self._wake: Callable[[], object] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        context = contextvars.copy_context()  # with the name of the process in a fleet, for the log
        threading.Thread(target=context.run, args=(self._watch,), name="ending", daemon=True).start()
        hear(self._queue.put)

    def begin(self) -> None:
        """Let the time begin, if it has not begun: the process ends for another reason than a signal."""
        self._queue.put(None)

    async def signals(self) -> AsyncIterator[signal.Signals]:
        """Yield each signal that has come since this was made."""
        arrived, loop, taken = asyncio.Event(), asyncio.get_running_loop(), 0
        self._loop = loop
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
        awaits: Sequence[str] = ()
        with suppress(Exception):  # the loop goes on changing it
            running = self._running()
        with suppress(Exception):
            awaits = sorted({line for task in asyncio.all_tasks(self._loop) for line in _lines_of_author(task)})
        threads = _threads()
        of_app = running or awaits or len(threads) > 1
        log.error(
            "worker.not_ended",
            **({"seconds": round(seconds, 1)} if seconds else {}),
            running=list(running),
            awaits=awaits[:MAX_LINES],
            threads=threads,
            exit_code=NOT_ENDED,
            cure="give what the code waits for a timeout of its own, and let threads of the app be daemons"
            if of_app
            else "no code of the app is known to run: does the nats-server answer? A longer "
            "workers.drain_timeout_seconds leaves more time for it",
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


def _lines_of_author(task: asyncio.Task[Any]) -> Iterator[str]:
    """Yield the line at which a function of the author waits in a task, if one does: the outermost function."""
    frames = (frame for frame in _frames(task.get_coro()) if not frame.f_code.co_filename.startswith(NOT_OF_AUTHORS))
    yield from (_line(frame) for frame in islice(frames, 1))


def _frames(awaited: Any) -> Iterator[Any]:
    """Yield the frames of what awaits each other, the outermost first."""
    while awaited is not None:
        kind = next((kind for kind in ("cr", "gi", "ag") if hasattr(awaited, f"{kind}_frame")), None)
        if kind is None or (frame := getattr(awaited, f"{kind}_frame")) is None:
            return
        yield frame
        awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
        if not any(hasattr(awaited, name) for name in ("cr_frame", "gi_frame", "ag_frame")):
            # `calls.in_context` has what it runs in a variable; a context manager has its generator in an attribute.
            awaited = frame.f_locals.get("called", getattr(frame.f_locals.get("self"), "gen", None))


def _line(frame: Any) -> str:
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def hear(put: Callable[[signal.Signals], object]) -> None:
    """Call `put` with each of these signals from now on, until the process ends; call it in the main thread.

    `put` is called between any two steps of the main thread, also in the midst of itself. So it must wait for nothing
    and take no lock; `put` of a `queue.SimpleQueue` does not. Where SIGHUP is ignored, as below nohup, it stays so.
    """
    global _children_are_told
    for number in TOLD_TO_END:
        if signal.getsignal(number) is not signal.SIG_IGN or number is not signal.SIGHUP:
            signal.signal(number, lambda number, _frame: put(signal.Signals(number)))
            _heard.add(number)
    if not _children_are_told:
        _children_are_told = True
        os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_forget_signals)


def _block_signals() -> None:
    _forks.blocked = frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, TOLD_TO_END))


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forks.blocked)


def _forget_signals() -> None:
    """Let a signal to this child concern the child alone."""
    signal.set_wakeup_fd(
        -1
    )  # that of a loop, which uvloop always has, and asyncio where the app adds handlers of its own
    for number in _heard:
        signal.signal(number, TOLD_TO_END[number])
    _heard.clear()
    _unblock_signals()
