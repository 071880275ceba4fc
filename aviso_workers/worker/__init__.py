"""One worker process, and a fleet of them.

What is defined here, the command line reads at its start, and it is to import no more than it needs.
"""

import threading

__all__ = ["NOT_ENDED", "LoopEnded", "threads_run_on"]

NOT_ENDED = 4
"""The exit code of a process that had to end itself, because something in it did not end."""


class LoopEnded(SystemExit):
    """Something else than the worker has ended its event loop, so the process has to end as if killed."""

    code: int


ANYIO_THREAD = "AnyIO worker thread"
IDLE_SECONDS = 0.2


def threads_run_on() -> bool:
    """Return whether plain functions that did not end in time still run in threads, for which Python would wait."""
    return any(_is_running(thread) for thread in threading.enumerate() if thread.name == ANYIO_THREAD)


def _is_running(thread: threading.Thread) -> bool:
    """Return whether a thread is still running. An idle one has been asked to end, and does so in a moment."""
    thread.join(IDLE_SECONDS)
    return thread.is_alive()
