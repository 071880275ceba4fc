"""Begin and end of what is counted, called by the process that is counted itself."""

from __future__ import annotations

import ctypes
import gc
import json
import os
from collections.abc import Callable
from cProfile import Profile
from pathlib import Path

COUNT_VARIABLE = "COST_NOTIFICATIONS"
CALLS_VARIABLE = "COST_CALLS_FILE"
"""Set where calls of Python functions are counted in place of instructions: the file that they are written to."""
RUN = os.getpid()
"""A name of this run, whose agents have handled nothing yet."""
TO_COUNT = int(os.environ.get(COUNT_VARIABLE, "1"))
"""How many notifications are counted."""
BEFOREHAND = TO_COUNT // 2
"""How many are handled before: what is in flight then is as much as at the end."""

_counter = ctypes.CDLL(None)
_profile = Profile(builtins=False)


def begin() -> None:
    """Count from here on.

    What is in memory by now takes no part in collections of garbage: one more or less of these would be 5 % of a count.
    """
    gc.collect()
    gc.freeze()
    if CALLS_VARIABLE in os.environ:
        _profile.enable()
    _counter.count_begin()


def end() -> None:
    """Count no more."""
    _counter.count_end()
    if file := os.environ.get(CALLS_VARIABLE):
        _profile.disable()
        _write_calls(Path(file))


class Tally:
    """Counts while some notifications are handled, of many: each step of a notification is counted as often."""

    def __init__(self, *, ended: Callable[[], None]) -> None:
        """`ended` is called when all are counted."""
        self._handled = 0
        self._ended = ended

    def add(self, notifications: int = 1) -> None:
        """Take them as handled."""
        before = self._handled
        self._handled += notifications
        if before < BEFOREHAND <= self._handled:
            begin()
        elif before < BEFOREHAND + TO_COUNT <= self._handled:
            end()
            self._ended()


def _write_calls(file: Path) -> None:
    calls: dict[str, int] = {}
    for entry in _profile.getstats():
        if isinstance(entry.code, str):
            continue
        module = Path(entry.code.co_filename).with_suffix("").parts
        name = f"{'.'.join(module[-2:])}.{entry.code.co_qualname}"
        calls[name] = calls.get(name, 0) + entry.callcount
    file.write_text(json.dumps(calls))
