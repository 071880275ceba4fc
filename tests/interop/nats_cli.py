"""The `nats` command line and ours, run as a user runs them: in a home directory of the test's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.interop import programs

LONGEST_SECONDS = 120


class Shell:
    """A home directory, and the two command lines run in it against the same servers."""

    def __init__(self, home: Path) -> None:
        self.home = home
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("AVISO", "NATS_", "XDG"))}
        self.environ = {**ours, "HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config")}
        self.said: list[str] = []
        """What our command line has printed."""
        self.nats_program = str(programs.nats_cli())

    def nats(self, *arguments: str | Path, given: str | bytes | None = None) -> subprocess.CompletedProcess[str]:
        return self._run(self.nats_program, *arguments, given=given)

    def ours(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        ran = self._run(str(Path(sys.executable).with_name("aviso-workers")), *arguments)
        self.said += [ran.stdout, ran.stderr]
        return ran

    @contextmanager
    def started(self, *arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
        """Our command line while it runs, output and errors in one; ended by force where it does not end by itself."""
        program = [str(Path(sys.executable).with_name("aviso-workers")), *map(str, arguments)]
        with subprocess.Popen(
            program, cwd=self.home, env=self.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            too_late = threading.Timer(LONGEST_SECONDS, process.kill)
            too_late.start()
            try:
                yield process
            finally:
                too_late.cancel()
                process.kill()

    def nats_json(self, *arguments: str | Path) -> Any:
        return json.loads(successful(self.nats(*arguments)))

    def ours_json(self, *arguments: str | Path) -> Any:
        return json.loads(successful(self.ours(*arguments)))

    def _run(
        self, program: str, *arguments: str | Path, given: str | bytes | None = None
    ) -> subprocess.CompletedProcess[str]:
        text = given.decode() if isinstance(given, bytes) else given
        return subprocess.run(
            [program, *map(str, arguments)],
            cwd=self.home,
            env=self.environ,
            input=text or "",
            capture_output=True,
            text=True,
            timeout=LONGEST_SECONDS,
            check=False,
        )


def successful(done: subprocess.CompletedProcess[str]) -> str:
    """Return what it printed. Fails with what it said where it did not succeed."""
    assert done.returncode == 0, f"{done.args} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Return where two documents do not say the same, as sentences.

    The `nats` command line leaves out what is empty, off or zero; ours prints what the server tells.
    """
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [
            said
            for key in sorted(ours.keys() | theirs.keys())
            for said in differences(ours.get(key), theirs.get(key), f"{path}.{key}")
        ]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = zip(ours, theirs, strict=True)
        return [said for at, (our, their) in enumerate(pairs) for said in differences(our, their, f"{path}[{at}]")]
    nothing: tuple[Any, ...] = (None, False, 0, "", "none", "default", "0001-01-01T00:00:00Z", [], {})
    if ours == theirs or (ours in nothing and theirs in nothing):
        return []
    return [f"{path}: ours {ours!r}, theirs {theirs!r}"]
