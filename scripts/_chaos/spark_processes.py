"""A Spark driver and its executors as processes: given jobs, killed, and waited for until none of them is left."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from _chaos import spark_driver
from _chaos.spark_driver import Answer, Job
from _demo.children import ShortfallError

START_SECONDS = 180.0
LONGEST_SECONDS = 300.0
"""A job that takes longer is stuck."""
END_SECONDS = 30.0
POLL_SECONDS = 0.05
SHOWN = 3000
EXECUTOR = "CoarseGrainedExecutorBackend"
JVM = "org.apache.spark.deploy.SparkSubmit"


class Driver:
    """A driver, and all that it has started: executors, and the Python workers of both."""

    def __init__(self, master: str, directory: Path) -> None:
        directory.mkdir()
        (directory / "logs").mkdir()
        self.event_logs = directory / "logs"
        self._log = directory / "driver.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                spark_driver.command(master, self.event_logs),
                env=os.environ | spark_driver.environment(directory),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # by which its processes are found, also when it is gone
            )
        self._answers: dict[str, Answer] = {}
        self._told = threading.Condition()
        self._is_gone = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def do(self, job: Job) -> Answer:
        """Do a job to its end. Raises `ShortfallError`."""
        self.begin(job)
        return self.answer(job.name)

    def begin(self, job: Job) -> None:
        """Raises `ShortfallError` where the driver does not come up."""
        self.answer("", within_seconds=START_SECONDS)
        with self._told:
            self._answers.pop(job.name, None)
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(job) + b"\n")
        self._process.stdin.flush()

    def is_done(self, name: str) -> bool:
        """Return whether a job has ended."""
        return name in self._answers

    def answer(self, name: str, *, within_seconds: float = LONGEST_SECONDS) -> Answer:
        """Wait for the end of a job. Raises `ShortfallError`."""
        with self._told:
            self._told.wait_for(lambda: self._is_gone or name in self._answers, within_seconds)
            if name not in self._answers:
                said = self._log.read_text(errors="replace")[-SHOWN:]
                raise ShortfallError(f"the driver does not answer to {name!r}:\n{said}")
            return self._answers[name]

    def executors(self) -> list[int]:
        return [number for number, line in self._processes().items() if EXECUTOR in line]

    def processes(self) -> list[int]:
        """Return the driver and all that it has started."""
        return sorted(self._processes())

    def of_executor(self, executor: int) -> list[int]:
        """Return an executor and its Python workers."""
        ours = [executor]
        for number in ours:
            ours += [other for other in self._processes() if _parent(other) == number]
        return ours

    def kill(self) -> None:
        """Kill the driver, its Python and its JVM; what it has started finds that out by itself, and may go on."""
        ours = [number for number, line in self._processes().items() if JVM in line]
        for number in (self._process.pid, *ours):
            kill(number)
        self._process.wait()

    def end(self) -> None:
        """Wait until no process is left, and kill those that stay for too long."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        deadline = time.monotonic() + END_SECONDS
        while self._processes() and time.monotonic() < deadline:
            self._process.poll()  # which is one of them until it is reaped
            time.sleep(POLL_SECONDS)
        for number in self._processes():
            kill(number)
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = msgspec.json.decode(line, type=Answer)
            with self._told:
                self._answers[answer.name] = answer
                self._told.notify_all()
        with self._told:
            self._is_gone = True
            self._told.notify_all()

    def _processes(self) -> dict[int, str]:
        """Return the command lines of the processes of its session, by number."""
        return _processes(lambda number: os.getsid(number) == self._process.pid)


def kill(number: int) -> None:
    send(number, signal.SIGKILL)


def send(number: int, signal_number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(number, signal_number)


def _parent(number: int) -> int:
    """Return the process that has started it; 0 where it has ended."""
    with suppress(ProcessLookupError, FileNotFoundError):
        return int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _processes(wanted: Callable[[int], bool]) -> dict[int, str]:
    found = {}
    for place in Path("/proc").iterdir():
        # One that has ended meanwhile is none; of one that nobody has reaped the command line is empty.
        with suppress(ProcessLookupError, FileNotFoundError):
            if place.name.isdigit() and wanted(int(place.name)) and (line := (place / "cmdline").read_text()):
                found[int(place.name)] = line
    return found
