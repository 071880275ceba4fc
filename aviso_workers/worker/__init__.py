"""One worker process, and a fleet of them."""

__all__ = ["NOT_ENDED", "LoopEnded"]

NOT_ENDED = 4
"""The exit code of a process that had to end itself, because something in it did not end."""


class LoopEnded(SystemExit):
    """The event loop of a worker was ended by something else than the worker, so the process has to end as if killed.

    It is defined here because the command line reads it at its start, and is to import no more than it needs.
    """

    code: int
