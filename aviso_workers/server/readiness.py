"""Waiting for a nats-server that starts, for as long as it works.

A server that recovers a large store takes minutes, and one that is killed meanwhile begins again. So a command that
starts one waits while something happens: its log grows, or it uses the processor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable
from pathlib import Path

STANDSTILL_SECONDS = 120.0
REPORT_SECONDS = 5.0
SOON_SECONDS = 5.0
OFTEN_SECONDS, SELDOM_SECONDS = 0.02, 0.5
"""Seconds between checks, while the server is expected to be ready at once, and afterwards."""

Tell = Callable[[str], None]
"""A function that prints a line while a server starts."""


def ignore(line: str) -> None:
    """Ignore a line: a `Tell` for callers without output."""


def wait(is_ready: Callable[[], bool], *, progress: Callable[[], Hashable], tell: Tell) -> bool:
    """Wait until a server is ready, and return True; False when `progress` has not changed for `STANDSTILL_SECONDS`.

    `tell` is called every few seconds with how long it has taken so far.
    """
    began = moved = reported = time.monotonic()
    seen = progress()
    while not is_ready():
        now = time.monotonic()
        if (current := progress()) != seen:
            seen, moved = current, now
        if now - moved > STANDSTILL_SECONDS:
            return False
        if now - reported > REPORT_SECONDS:
            tell(f"{now - began:.0f} s")
            reported = now
        time.sleep(OFTEN_SECONDS if now - began < SOON_SECONDS else SELDOM_SECONDS)
    return True


def processor_seconds(pid: int) -> int:
    """Return the processor time of a process in tens of seconds, which hardly grows while the process only waits.

    0 where the system does not provide it.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return 0
    return (int(fields[11]) + int(fields[12])) // (10 * os.sysconf("SC_CLK_TCK"))
