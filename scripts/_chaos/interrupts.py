"""Leaving a script in order when it is told to end."""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_in_order() -> None:
    """Let the first signal that ends a process raise `KeyboardInterrupt`, and ignore the others.

    What has been started is reaped on the way out, and a second Ctrl-C must not keep us from it.
    """
    for number in SIGNALS:
        signal.signal(number, _leave)


def _leave(number: int, _frame: FrameType | None) -> None:
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt
