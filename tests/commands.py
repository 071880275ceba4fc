"""The command `aviso-workers` as a process, for tests of what only a process shows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from aviso_workers.server import start_tied
from tests.waits import PATIENCE_SECONDS


class Command:
    """A running `aviso-workers ...`: its log as it comes, and how it ends."""

    def __init__(self, *arguments: str | Path, directory: Path, **environment: str) -> None:
        self.log: list[dict[str, Any]] = []
        self.told: list[str] = []
        """The lines of standard error that are not part of the log."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("AVISO", "NATS_"))}
        program = Path(sys.executable).with_name("aviso-workers")
        self.process = start_tied(
            [*_WITH_SIGNALS, program, *arguments],
            number=signal.SIGKILL,
            cwd=directory,
            env={**ours, "PYTHONUNBUFFERED": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that a test can press Ctrl-C for all of it
        )
        self._too_late = threading.Timer(PATIENCE_SECONDS, self.process.kill)
        self._too_late.start()

    def until(self, event: str) -> dict[str, Any]:
        """The next line of the log that tells of this event."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if self._note(line) == event:
                return self.log[-1]
        raise AssertionError(f"ended before {event}: {self.log}\n{''.join(self.told)}")

    def until_told(self, begin: str) -> str:
        """The next line of standard error that begins so, and is not part of the log."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if not self._note(line) and line.startswith(begin):
                return str(line)
        raise AssertionError(f"ended before {begin!r}: {self.log}\n{''.join(self.told)}")

    def lines(self, count: int) -> list[str]:
        """The next lines of its output."""
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline() for _ in range(count)]
        assert all(lines), f"ended with {self.end()} after {lines}: {self.log}\n{''.join(self.told)}"
        return lines

    def end(self, number: signal.Signals | None = None) -> int:
        """Its exit code, after this signal if there is one, with all that it said until then noted."""
        if number is not None:
            self.process.send_signal(number)
        _, said = self.process.communicate()
        for line in said.splitlines(keepends=True):
            self._note(line)
        self.close()
        return self.process.returncode

    def close(self) -> None:
        self._too_late.cancel()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def _note(self, line: str) -> str:
        """The event that the line tells of."""
        try:
            self.log.append(json.loads(line))
        except ValueError:
            self.told.append(line)
            return ""
        return str(self.log[-1]["event"])


_WITH_SIGNALS = ("/usr/bin/env", "--default-signal=INT,HUP") if sys.platform == "linux" else ()
"""A shell starts what it runs in the background with SIGINT ignored, nohup with SIGHUP, and children inherit that."""
