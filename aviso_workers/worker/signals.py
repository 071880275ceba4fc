"""The signals that tell a worker or the supervisor of a fleet to end, and what forked children inherit of them.

Python's own handlers are used, and not those of an event loop. A loop is told of a signal through a socket, which each
forked child of the process shares: a signal to such a child would reach the loop of the worker, and end the worker. And
a loop that is blocked is told of nothing.

A child that a handler of notifications forks, as `multiprocessing` does, gets the dispositions that a Python program
begins with. Signals are blocked while it is made: one that arrives before the child has these dispositions waits.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

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
        os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_forget)


def _block() -> None:
    _forks.blocked = frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, TOLD_TO_END))


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forks.blocked)


def _forget() -> None:
    """Let a signal to this child concern the child alone."""
    signal.set_wakeup_fd(
        -1
    )  # that of a loop, which uvloop always has, and asyncio where the app adds handlers of its own
    for number in _heard:
        signal.signal(number, TOLD_TO_END[number])
    _heard.clear()
    _unblock()
