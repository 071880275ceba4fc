"""Runs a process under valgrind's callgrind, and reads what it has counted."""

from __future__ import annotations

import compileall
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from _cost.counting import CALLS_VARIABLE, COUNT_VARIABLE

SCRIPTS = Path(__file__).parents[1]
COUNTER = Path(__file__).with_name("counter.c")
RUN_SECONDS = 300.0
LINES_SHOWN = 25
CALLGRIND = (
    *("valgrind", "--tool=callgrind", "--separate-threads=yes"),
    *("--dump-line=no", "--compress-strings=no", "--compress-pos=no"),
)
OF_FIRST_THREAD = "-01"
"""What callgrind adds to the name of the file for the thread that is counted, that of the event loop."""


class Process(Struct, frozen=True, kw_only=True):
    """A process that is counted."""

    arguments: Sequence[str]
    """Of Python."""
    notifications: int
    environment: Mapping[str, str] = {}
    whole: bool = False
    """Whether it is counted from its start, and not from `counting.begin`."""


class Runner:
    """Runs processes with the package of a tree, such as that of another commit."""

    def __init__(self, tree: Path, environment: Mapping[str, str], directory: Path) -> None:
        """`environment` is what processes need to know besides. What is written goes into `directory`.

        Raises `subprocess.CalledProcessError` where there is no C compiler.
        """
        self._directory = directory
        counter = directory / "counter.so"
        subprocess.run(("cc", "-O2", "-shared", "-fPIC", "-o", counter, COUNTER, "-ldl"), check=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AVISO", "NATS_", "PYTHON"))}
        self._environment = {
            **kept,
            **environment,
            "LD_PRELOAD": str(counter),
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.pathsep.join((str(tree), str(SCRIPTS))),
        }
        compileall.compile_dir(tree / "aviso_workers", quiet=1)  # a whole process would be counted with it

    def instructions(self, process: Process) -> dict[str, float]:
        """Return the instructions of a notification by function of the interpreter and its libraries, each without
        those that it calls. Raises `RuntimeError` where the process fails.
        """
        counted = self._file()
        begin = "yes" if process.whole else "no"
        self._run(process, (*CALLGRIND, f"--callgrind-out-file={counted}", f"--instr-atstart={begin}"))
        counted = counted.with_name(counted.name + OF_FIRST_THREAD)
        return _of_one(process, parse(counted.read_text(errors="replace")))

    def calls(self, process: Process) -> dict[str, float]:
        """Return how often a notification calls each Python function; nothing for a whole process."""
        if process.whole:
            return {}
        file = self._file()
        self._run(process, (), {CALLS_VARIABLE: str(file)})
        return _of_one(process, json.loads(file.read_text()))

    def _file(self) -> Path:
        """Return a file that no other process is given."""
        descriptor, name = tempfile.mkstemp(dir=self._directory)
        os.close(descriptor)
        return Path(name)

    def _run(self, process: Process, under: Sequence[str], more: Mapping[str, str] | None = None) -> None:
        what = " ".join(process.arguments)
        try:
            done = subprocess.run(
                (*under, sys.executable, *process.arguments),
                env={
                    **self._environment,
                    COUNT_VARIABLE: str(process.notifications),
                    **process.environment,
                    **(more or {}),
                },
                cwd=self._directory,
                capture_output=True,
                text=True,
                timeout=RUN_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{what} has not ended after {RUN_SECONDS:.0f} s") from None
        if done.returncode:
            said = "\n".join((done.stdout + done.stderr).splitlines()[-LINES_SHOWN:])
            raise RuntimeError(f"{what} ended with exit code {done.returncode}\n{said}")


def _of_one(process: Process, of_all: Mapping[str, float]) -> dict[str, float]:
    return {name: number / process.notifications for name, number in of_all.items()}


def parse(text: str) -> dict[str, int]:
    """Return the instructions of each function, from what callgrind writes.

    The format is that of Valgrind's manual ("Callgrind Format Specification"), with names in full.
    """
    found: Counter[str] = Counter()
    function, of_callee = "", False
    for line in text.splitlines():
        if line.startswith("fn="):
            function = re.sub(r"'\d+$", "", line[3:])  # without the depth of a recursion
        elif line.startswith("calls="):
            of_callee = True  # the next line has what the called function cost
        elif line[:1].isdigit():
            if not of_callee:
                found[function] += int(line.split()[1])
            of_callee = False
    return dict(found)
