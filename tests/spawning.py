"""Programs that end with the process of the tests, also where that is killed.

A function that a child runs before its program, as `preexec_fn` of subprocess, makes Python fork. A process that has
all tests takes more time for a fork than a nats-server takes to start, because its whole memory is written as shared.
Without such a function, the child starts within a millisecond. So `setpriv` does the same where there is one.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from aviso_workers import server
from aviso_workers.server import processes

SETPRIV = shutil.which("setpriv") if sys.platform == "linux" else None


def ending_with_us(command: Sequence[str | Path], number: signal.Signals) -> list[str | Path]:
    """Return the command that starts a program to which Linux sends a signal when this process ends."""
    return [SETPRIV, "--pdeathsig", number.name.removeprefix("SIG"), "--", *command] if SETPRIV else [*command]


def start_servers_without_fork(patched: pytest.MonkeyPatch) -> None:
    """Let this process start its nats-servers by `setpriv`; other processes start theirs as users do."""
    if SETPRIV:
        for module in (server, processes):
            patched.setattr(module, "subprocess", _Subprocess())


class _Subprocess:
    """The module subprocess, for the modules that start servers: each `preexec_fn` there is `die_with_parent`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(self, command: list[str], *, preexec_fn: Any, **given: Any) -> subprocess.Popen[bytes]:  # noqa: N802
        started = ending_with_us(command, signal.SIGTERM) if preexec_fn else command
        return subprocess.Popen(started, **given)
