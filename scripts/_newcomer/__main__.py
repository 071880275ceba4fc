"""Builds the wheel and does with it what a newcomer does, in an empty folder; says how long each step took.

The commands are those of the pages that a newcomer reads, so that a page that is wrong is found out. Exits with 1 and a
reason where a step does not do what its page says, or where all of them take longer than was promised.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from _demo.children import Child, ShortfallError, free_port, is_ready, running, wait_until
from _newcomer import archives, pages
from _newcomer.pages import Page

PROJECT = Path(__file__).parents[2]
TUTORIAL = PROJECT / "docs" / "tutorial.md"
NATS_URL = "AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__NATS_URL"
PROMISED_SECONDS = 300.0
"""From nothing to the first notification that is handled."""
STEP_SECONDS = 300.0
"""For one command, of which pip's are the longest."""
WAIT_SECONDS = 60.0
"""For what a running `dev` is to do."""
OURS = ("AVISO", "NATS_", "PYTHON", "VIRTUAL_ENV")
"""Beginnings of environment variables that a newcomer does not have."""


class Newcomer:
    """Somebody with a folder, a Python and a wheel, and the time that they have spent."""

    def __init__(self, folder: Path, *, python: str, wheel: Path) -> None:
        self.folder = folder
        self.seconds = 0.0
        self._python = python
        self._wheel = wheel
        kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        self._installing = {**kept, "PATH": f"{folder / '.venv' / 'bin'}{os.pathsep}{kept.get('PATH', os.defpath)}"}
        self._environment = {**self._installing, "HOME": str(folder), "PYTHONUNBUFFERED": "1"}

    def install(self) -> None:
        """Install the wheel into a virtual environment, and see that it is the one that was built."""
        with self._step("make a virtual environment"):
            self._run([self._python, "-m", "venv", ".venv"], self._installing)
        with self._step("pip install 'aviso-workers[server]'"):
            self._run(["pip", "install", "--disable-pip-version-check", f"{self._wheel}[server]"], self._installing)
        with self._step("aviso-workers --version"):
            told = self._run(["aviso-workers", "--version"], self._environment).strip()
            version = self._wheel.name.split("-")[1]
            if not told.startswith(f"aviso-workers {version} "):
                raise ShortfallError(f"--version says {told!r}, and the wheel is that of {version}")

    def projects(self) -> Iterator[tuple[Path, Page]]:
        """Make the projects that a newcomer begins with, each with the page that tells of it."""
        yield self._by_tutorial()
        if " new " in self._run(["aviso-workers", "--help"], self._environment):
            yield self._by_new()

    def _by_tutorial(self) -> tuple[Path, Page]:
        directory = self.folder / "tutorial"
        directory.mkdir()
        text = TUTORIAL.read_text()
        with self._step("write the files of the tutorial"):
            pages.write_files(text, directory)
        with self._step("pip install pytest"):
            self._run(["pip", "install", "--disable-pip-version-check", "pytest"], self._installing)
        return directory, pages.read(text)

    def _by_new(self) -> tuple[Path, Page]:
        directory = self.folder / "field_index"
        with self._step("aviso-workers new field_index"):
            self._run(["aviso-workers", "new", directory.name], self._environment)
        return directory, pages.read((directory / "README.md").read_text())

    def follow(self, page: Page, directory: Path) -> None:
        """Do what the page says, until the first notification is handled."""
        environment = {**self._environment, NATS_URL: f"nats://127.0.0.1:{free_port()}"}
        if page.install is not None:
            with self._step(" ".join(page.install)):
                self._run(page.install, self._installing, directory)
        with self._step("pytest"):
            self._run(["pytest"], environment, directory)
        with self._step(" ".join(page.check)):
            self._run(page.check, environment, directory)
        status_port = free_port()
        dev = [*page.dev, "--status-port", str(status_port)]
        with running("dev", dev, log_dir=directory, environment=environment, directory=directory) as child:
            with self._step(f"{' '.join(page.dev)}, until it is ready"):
                _wait(lambda: is_ready(f"http://127.0.0.1:{status_port}/readyz"), child, "it is not ready")
            with self._step("aviso-workers notify, until it is handled"):
                self._run(page.notify, environment, directory)
                _wait(lambda: page.handled in child.log_file.read_text(), child, f"it has not told {page.handled!r}")
            with self._step("Ctrl-C"):
                child.process.send_signal(signal.SIGINT)
                child.wait(within_seconds=WAIT_SECONDS)

    def _run(self, command: Sequence[str], environment: Mapping[str, str], directory: Path | None = None) -> str:
        """Return what the command prints. Raises `ShortfallError` where it fails."""
        try:
            done = subprocess.run(
                command,
                cwd=directory or self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=STEP_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ShortfallError(str(error)) from error
        if done.returncode != 0:
            raise ShortfallError(f"it ended with exit code {done.returncode}:\n{done.stdout}")
        return done.stdout

    @contextmanager
    def _step(self, what: str) -> Iterator[None]:
        """Say how long the block took, and count it. What falls short in it is told with its name."""
        started = time.perf_counter()
        try:
            yield
        except ShortfallError as error:
            raise ShortfallError(f"{what}: {error}") from error
        seconds = time.perf_counter() - started
        self.seconds += seconds
        print(f"{seconds:7.1f} s  {what}", flush=True)


def _wait(condition: Callable[[], bool], child: Child, what: str) -> None:
    """Wait until the condition holds. Raises `ShortfallError` with what the child has printed."""
    wait_until(condition, lambda: f"{what}\n{child.last_words()}\n", within_seconds=WAIT_SECONDS, alive=[child])


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/newcomer", description="Do what a newcomer does with the wheel.")
    parser.add_argument("--python", default=sys.executable, metavar="PATH", help="the Python to install it for")
    python = parser.parse_args().python
    with tempfile.TemporaryDirectory(prefix="aviso-workers-newcomer-") as temporary:
        built, folder = Path(temporary, "built"), Path(temporary, "folder")
        folder.mkdir()
        started = time.perf_counter()
        wheel = archives.build(PROJECT, built, pure=python != sys.executable).wheel
        print(f"{wheel.name} was built in {time.perf_counter() - started:.1f} s; now with {python}:", flush=True)
        try:
            _spend(Newcomer(folder, python=python, wheel=wheel))
        except ShortfallError as error:
            print(f"fell short: {error}", file=sys.stderr)
            return 1
    return 0


def _spend(newcomer: Newcomer) -> None:
    """Go from nothing to a notification that is handled. Raises `ShortfallError` where that fails or takes too long."""
    newcomer.install()
    installed = newcomer.seconds
    for directory, page in newcomer.projects():
        newcomer.follow(page, directory)
        print(f"{newcomer.seconds:7.1f} s  in all, from nothing: {directory.name} works\n", flush=True)
        if newcomer.seconds > PROMISED_SECONDS:
            raise ShortfallError(f"{directory.name} took longer than {PROMISED_SECONDS:.0f} s")
        newcomer.seconds = installed  # each project is one that a newcomer may begin with


if __name__ == "__main__":
    sys.exit(main())
