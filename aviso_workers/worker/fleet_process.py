"""The work of a process as one of a fleet (`fleet`): the line to its supervisor, and when it is recycled.

The line is a socket that the process was started with. It writes two lines to it, where its status port is and, when it
begins to drain, that it ends in order. It reads nothing: the line's end is the supervisor's end, after which nobody
would restart or stop the process, so it ends too.
"""

from __future__ import annotations

import math
import os
import random
import signal
import socket
import threading
from contextlib import suppress

import anyio
from msgspec import Struct

from aviso_workers.aviso.literals import Size
from aviso_workers.errors import ConfigError
from aviso_workers.events import Acked, Failed
from aviso_workers.sessions.worker_recorder import STATM, resident_bytes

ENDS_IN_ORDER = b"ends in order"
"""The last line that a process writes, when it begins to drain. An exit code of 0 alone does not say that it was to
end: a library may have exited."""
CHECK_SECONDS = 0.25
SPREAD = 0.1
"""Part of `max_notifications` by which it is raised at random, so that processes that began together part ways."""


class RecycleLimits(Struct, frozen=True, kw_only=True):
    """When a worker process is recycled, which means that it ends and is replaced; None is never."""

    max_notifications: int | None = None
    """Deliveries settled: so many at least, and about a tenth more at most."""
    max_rss: Size | None = None
    """Memory that is resident."""


class FleetMember:
    """A worker process as one of a fleet. Raises `ConfigError` where a limit can never be kept."""

    def __init__(self, name: str, *, line: int, limits: RecycleLimits) -> None:
        """`line` is the descriptor of the socket to the supervisor."""
        if limits.max_rss is not None and (now := _resident()) > limits.max_rss:
            raise ConfigError([f"--max-rss: {limits.max_rss} is less than a worker needs at its start ({now >> 20}Mi)"])
        self.name = name
        self._line = socket.socket(fileno=line)
        self._line.set_inheritable(False)
        self._max_rss = limits.max_rss
        self._left = math.inf
        if limits.max_notifications is not None:
            self._left = limits.max_notifications * random.uniform(1, 1 + SPREAD)
        threading.Thread(target=self._end_with_supervisor, name="fleet-line", daemon=True).start()

    def announce(self, status_url: str) -> None:
        """Tell the supervisor where the status port is."""
        self._line.sendall(status_url.encode() + b"\n")

    def tell_end(self) -> None:
        """Tell the supervisor, where it is still there, that the process is about to end because it is to."""
        with suppress(OSError):
            self._line.sendall(ENDS_IN_ORDER + b"\n")

    def observe(self, event: Acked | Failed) -> None:
        """Count what was done."""
        self._left -= len(event.seconds) if isinstance(event, Acked) else 1

    async def until_recycled(self) -> str:
        """Wait until the process is to be replaced, and return why."""
        while True:
            await anyio.sleep(CHECK_SECONDS)
            if self._left <= 0:
                return "it has handled as many as --max-notifications allows"
            if self._max_rss is not None and (now := _resident()) > self._max_rss:
                return f"{now >> 20}Mi are resident, and --max-rss allows {self._max_rss}"

    def _end_with_supervisor(self) -> None:
        with suppress(ConnectionError):
            self._line.recv(1)
        os.kill(os.getpid(), signal.SIGTERM)


def _resident() -> int:
    """Bytes. Raises `ConfigError`."""
    if (found := resident_bytes()) is None:
        raise ConfigError([f"--max-rss needs {STATM}, which this system does not have"])
    return found
