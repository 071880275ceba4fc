"""The processes of the main job: started with a log file, watched while somebody waits for them, always reaped."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from aviso_workers import http_answers
from aviso_workers.server.processes import free_ports

STOP_SECONDS = 10.0
POLL_SECONDS = 0.05
LINES_SHOWN = 25
ANSWER_SECONDS = 5.0
MAX_BYTES = 1 << 16
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ShortfallError(Exception):
    """Something did not come about; the text says what, and what it looked like instead."""


class Child:
    """A process in a group of its own, so that Ctrl-C reaches it through us and its children end with it."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log_file: Path) -> None:
        self.name = name
        self.process = process
        self.log_file = log_file

    def wait(self, *, within_seconds: float | None = None) -> None:
        """Until it has ended by itself, for however long where no time is given. Raises `ShortfallError` where it takes
        too long or ends with an error.
        """
        try:
            code = self.process.wait(within_seconds)
        except subprocess.TimeoutExpired:
            raise ShortfallError(f"{self.name} is not done after {within_seconds:.0f} s\n{self.last_words()}") from None
        if code != 0:
            raise ShortfallError(f"{self.name} ended with exit code {code}\n{self.last_words()}")

    def check_alive(self) -> None:
        """Raises `ShortfallError` where it has ended."""
        if (code := self.process.poll()) is not None:
            raise ShortfallError(f"{self.name} has ended with exit code {code}\n{self.last_words()}")

    def last_words(self) -> str:
        lines = self.log_file.read_text(errors="replace").splitlines()
        return "\n".join(f"  {self.name} | {line}" for line in lines[-LINES_SHOWN:])

    def kill(self) -> None:
        """End it as a crash would."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """End it in order, by force where that takes longer than 10 s."""
        try:
            if self.process.poll() is None:
                self._signal(signal.SIGTERM)
                self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()  # also what it has started and left behind

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


@contextmanager
def running(
    name: str,
    command: Sequence[str | Path],
    *,
    log_dir: Path,
    environment: Mapping[str, str],
    directory: Path | None = None,
) -> Iterator[Child]:
    """The command as a process that ends with the block; it writes to `<log_dir>/<name>.log`. It runs in the directory,
    by default in ours.
    """
    log_file = log_dir / f"{name}.log"
    with ExitStack() as stack:
        # A signal that came while the process is started would leave it behind.
        with _without_interrupts(), log_file.open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
            child = Child(name, process, log_file)
            stack.callback(child.stop)
        yield child


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Let interrupts wait until the block is left. Python interrupts the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def wait_until(
    condition: Callable[[], bool],
    what: Callable[[], str],
    *,
    within_seconds: float,
    alive: Sequence[Child] = (),
) -> None:
    """Poll until it holds. Raises `ShortfallError` with `what` after that time, or where a child has ended."""
    deadline = time.monotonic() + within_seconds
    while not condition():
        for child in alive:
            child.check_alive()
        if time.monotonic() > deadline:
            raise ShortfallError(f"{what()} after {within_seconds:.0f} s")
        time.sleep(POLL_SECONDS)


def free_port() -> int:
    """Return a port that nobody else is given while this process lives."""
    (port,) = free_ports(1)
    return port


def is_ready(url: str) -> bool:
    """Return whether what listens on a port of this machine answers there that it is ready."""
    try:
        http_answers.read(url, seconds=ANSWER_SECONDS, silent_seconds=ANSWER_SECONDS, max_bytes=MAX_BYTES, near=True)
    except OSError:
        return False  # not there yet, or 503
    return True
