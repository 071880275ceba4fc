"""Counts in a measured process, ours or a rival's, and tells what the counting cost at the marks that were asked for.

Standard library only: rivals run it in an environment of their own. The time runs from the first notification, or
from `begin`, so that starting and connecting are not measured here.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

MARKS_VARIABLE = "BENCHMARK_MARKS"
"""Counts at which a mark is told, rising, joined with commas."""


class Tally:
    """A counter that prints a line of JSON at each mark."""

    def __init__(self) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # a measured process must not outlive who measures it
        self.count = 0
        self._marks = [int(mark) for mark in os.environ[MARKS_VARIABLE].split(",")]
        self.wanted = self._marks[-1]
        self._next = self._marks[0]
        self._began = 0.0
        self._cpu_began = 0.0

    def begin(self) -> None:
        self._began, self._cpu_began = time.perf_counter(), time.process_time()

    def add(self, number: int = 1) -> None:
        if not self._began:
            self.begin()
        self.count += number
        if self.count >= self._next:
            self._tell()

    def _tell(self) -> None:
        seconds, cpu_seconds = time.perf_counter() - self._began, time.process_time() - self._cpu_began
        process = os.getpid()
        mark = {"process": process, "began": self._began, "seconds": seconds, "cpu_seconds": cpu_seconds}
        # In one write: the processes of a fleet share their output.
        sys.stdout.write(json.dumps({"mark": self.count, **mark, **memory_mib(process)}) + "\n")
        sys.stdout.flush()
        self._marks.pop(0)
        self._next = self._marks[0] if self._marks else 1 << 62


def memory_mib(process: int) -> dict[str, float]:
    """Return what is resident now, and was at most; nothing where the system does not tell."""
    status = Path(f"/proc/{process}/status")
    if not status.exists():
        return {}
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return {
        "resident_mib": int(fields["VmRSS"].split()[0]) / 1024,
        "peak_mib": int(fields["VmHWM"].split()[0]) / 1024,
    }
