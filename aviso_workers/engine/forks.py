"""The end of a child that an author's function forks and that comes back from the function.

Such a child is a copy of the worker. It would go on as the worker does, on the same connection and with the same event
loop, whose list of sockets it shares with its parent: the parent would hear of no message any more. So the child ends
where the author's code has ended in it, or waits for something on the event loop.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

generation = 0
"""How many forks lie between the first process and this one. Code in which it changes has forked, and is the child."""


def end_child(error: BaseException | None = None) -> NoReturn:
    """End this process as Python ends one whose program has ended, or has ended in this error; close nothing."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        code = 1
        traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed, or there is none
            code = code or 1
    os._exit(code & 0xFF)


def _count() -> None:
    global generation
    generation += 1


os.register_at_fork(after_in_child=_count)
