"""What an operator sees: the answers of commands, of a worker's status port, and of Prometheus."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from msgspec import Struct

from _chaos.deployment import COMMAND, Worker
from _demo.children import ShortfallError

COMMAND_SECONDS = 180.0
HEALTHY = {"idle", "working", "catching up"}
"""The states of agents that nothing is wrong with."""
NO_WORKER = "no answer"
NO_DOCTOR = "could not begin"
TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z")
DOCTOR_LINE = re.compile(r'aviso_doctor_check\{code="(\w+)",state="(warn|fail)"\} 1(?:\.0)?$', re.MULTILINE)


class Done(Struct, frozen=True):
    """A command that has ended."""

    code: int
    out: str
    err: str


class Look(Struct, frozen=True, kw_only=True):
    """What all of them said at one time."""

    state: str
    """Of `agents ls`, or the error of the command."""
    doctor: Mapping[str, str]
    """The codes that are FAIL or WARN; or the error of the command under `could not begin`."""
    readyz: str
    livez: str
    alerts: frozenset[str] = frozenset()

    @property
    def fails(self) -> set[str]:
        return {code for code, state in self.doctor.items() if state != "WARN"}

    @property
    def warns(self) -> set[str]:
        return {code for code, state in self.doctor.items() if state == "WARN"}


class Operator:
    """Runs commands as the user `operator`, with the configuration of one app."""

    def __init__(self, *, config: Path, target: str, monitors: Sequence[str], environment: Mapping[str, str]) -> None:
        self._config = config
        self._target = target
        self._monitors = [part for url in monitors for part in ("--monitor", url)]
        self._environment = dict(environment)

    def run(self, *arguments: str) -> Done:
        """Run `aviso-workers` with these arguments and the configuration."""
        command = [str(COMMAND), *arguments, "--config", str(self._config)]
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_SECONDS, env=self._environment, check=False
        )
        return Done(ended.returncode, ended.stdout, ended.stderr)

    def must(self, *arguments: str) -> str:
        """Run it and return what it prints. Raises `ShortfallError` where it fails."""
        done = self.run(*arguments)
        if done.code:
            raise ShortfallError(f"aviso-workers {' '.join(arguments)}: exit code {done.code}\n{done.out}{done.err}")
        return done.out

    def look(self, app: str, worker: Worker | None, exporter: Exporter) -> Look:
        """Ask everything at the same time, save for the alerts; hand the results of the doctor to Prometheus."""
        with ThreadPoolExecutor() as asking:
            state = asking.submit(self._state, app)
            found = asking.submit(self._doctor, "prometheus")
            readyz, livez = (asking.submit(_answer, worker, path) for path in ("/readyz", "/livez"))
            done = found.result()
            exporter.text = done.out
            codes = {code: level.upper() for code, level in DOCTOR_LINE.findall(done.out)}
            doctor = codes if done.code < 2 else {NO_DOCTOR: _last_line(done.err)}
            return Look(state=state.result(), doctor=doctor, readyz=readyz.result(), livez=livez.result())

    def doctors_words(self) -> str:
        """Return what the doctor prints for people of what is wrong."""
        done = self._doctor("text")
        return re.split(r"^(?=ACCEPTED|SKIP|PASS)", done.out, maxsplit=1, flags=re.MULTILINE)[0] + done.err

    def _doctor(self, form: str) -> Done:
        app = ("--app", self._target) if self._target else ()
        return self.run("doctor", *app, *self._monitors, "--seconds", "1", "--format", form)

    def forget_app(self) -> None:
        """Run the doctor without the app from now on, whose code is gone."""
        self._target = ""

    def _state(self, app: str) -> str:
        done = self.run("agents", "ls", "--json", "--seconds", "1")
        rows = [row for row in map(json.loads, done.out.splitlines()) if row["app"] == app]
        if not rows:
            return _last_line(done.err) or "no agents"
        said = ["; ".join([f"{row['state']}: {row['why']}".removesuffix(": "), *row["also"]]) for row in rows]
        states = [
            text if row["agent"] == "handle" else f"{row['agent']}: {text}"
            for row, text in zip(rows, said, strict=True)
        ]
        return "; ".join(TIME.sub("TIME", state) for state in states)


class Exporter:
    """The port at which Prometheus finds what the doctor has last said, as it would at node_exporter."""

    def __init__(self) -> None:
        self.text = ""
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(exporter.text.encode())

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @contextmanager
    def serving(self) -> Iterator[None]:
        with self._server:
            thread = threading.Thread(target=self._server.serve_forever, daemon=True)
            thread.start()
            try:
                yield
            finally:
                self._server.shutdown()
                thread.join()


def _answer(worker: Worker | None, path: str) -> str:
    """Return the status and the first line of the answer."""
    status, text = worker.ask(path) if worker else (0, "")
    return f"{status} {text.splitlines()[0] if text else ''}".rstrip() if status else NO_WORKER


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].removeprefix("aviso-workers: ")
