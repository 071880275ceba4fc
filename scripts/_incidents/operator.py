"""What an operator sees: the answers of commands, of a worker's status port, and of Prometheus."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from msgspec import Struct

from _chaos.deployment import COMMAND, Worker
from _demo.children import ShortfallError

COMMAND_SECONDS = 180.0
HEALTHY = {"idle", "working", "catching up"}
"""The states of agents that nothing is wrong with."""
NO_WORKER = "no answer"
NO_DOCTOR = "could not begin"
OBSERVER_LINE = re.compile(r"^aviso_observer_agent_needs_somebody\{(.*)\} (\S+)$", re.MULTILINE)
LAST_POLL = re.compile(r"^aviso_observer_last_poll_timestamp_seconds (\S+)$", re.MULTILINE)
BLIND_SECONDS = 10.0
LABEL = re.compile(r'(\w+)="([^"]*)"')
WRONG = ("FAIL", "WARN")

Said = Mapping[str, Mapping[str, Any]]
"""What a surface says of each agent: its `state`, and whether it `needs` somebody."""
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
    needs: bool = False
    """Whether `agents ls` says of one of its agents that somebody is needed."""

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
            text, needs = state.result()
            return Look(state=text, needs=needs, doctor=doctor, readyz=readyz.result(), livez=livez.result())

    def differing(self, app: str, stream: str, console: str, observer: Worker | None) -> list[str]:
        """Return what surfaces say of agents of which they do not all say the same. A surface that knows nothing of an
        agent says nothing.
        """
        with ThreadPoolExecutor() as asking:
            asked = {
                "agents ls": asking.submit(self._of_list, app, stream),
                "agents show": asking.submit(self._of_show, app),
                "consumers ls": asking.submit(self._of_consumers, app, stream),
                "console": asking.submit(_of_console, console, app, stream),
                "observer": asking.submit(_of_observer, observer, app, stream),
            }
            doctor = asking.submit(self._doctor, "json")
            said = {surface: one.result() for surface, one in asked.items()}
        found = []
        for what in ("state", "needs"):
            for agent in said["agents ls"]:
                words = {name: each[agent][what] for name, each in said.items() if what in each.get(agent, {})}
                if len({*words.values()}) > 1:
                    found.append(f"  {what} of {agent}: {', '.join(f'{name} {word}' for name, word in words.items())}")
        listed = said["agents ls"].values()
        if doctor.result().code < 2 and all(each["state"] != "unknown" for each in listed):  # else it may say SKIP
            codes = {each["code"] for each in json.loads(doctor.result().out)["checks"] if each["state"] in WRONG}
            if ("JS058" in codes) != any(each["needs"] for each in listed):
                found.append(f"  JS058 {'finds' if 'JS058' in codes else 'does not find'} that somebody is needed")
        return found

    def _of_list(self, app: str, stream: str) -> Said:
        rows = self._rows("agents", "ls", "--seconds", "1")
        wanted = [row for row in rows if (row["app"], row["stream"]) == (app, stream)]
        return {row["agent"]: {"state": row["state"], "needs": row["needs"]} for row in wanted}

    def _of_show(self, app: str) -> Said:
        rows = self._rows("agents", "show", app)
        return {row["agent"]: {"state": row["state"].partition(":")[0]} for row in rows if "state" in row}

    def _of_consumers(self, app: str, stream: str) -> Said:
        rows = self._rows("consumers", "ls", stream, "--seconds", "1")
        names = {row["consumer"]: row["needs"] for row in rows}
        return {name.removeprefix(f"{app}__"): {"needs": stuck} for name, stuck in names.items()}

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

    def _rows(self, *arguments: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.run(*arguments, "--json").out.splitlines()]

    def _state(self, app: str) -> tuple[str, bool]:
        """Return what `agents ls` says, and whether an agent needs somebody."""
        done = self.run("agents", "ls", "--json", "--seconds", "1")
        rows = [row for row in map(json.loads, done.out.splitlines()) if row["app"] == app]
        if not rows:
            return _last_line(done.err) or "no agents", False
        said = ["; ".join([f"{row['state']}: {row['why']}".removesuffix(": "), *row["also"]]) for row in rows]
        states = [
            text if row["agent"] == "handle" else f"{row['agent']}: {text}"
            for row, text in zip(rows, said, strict=True)
        ]
        return "; ".join(TIME.sub("TIME", state) for state in states), any(row["needs"] for row in rows)


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


def _of_console(url: str, app: str, stream: str) -> Said:
    """Return what the page of all agents says, as programs read it."""
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "agents", "arguments": {"app": app}}}
    asked = Request(f"{url}/mcp", json.dumps(call).encode(), {"Content-Type": "application/json"})
    with urlopen(asked, timeout=COMMAND_SECONDS) as answer:
        result = json.loads(answer.read())["result"]
    found = [] if result["isError"] else json.loads(result["content"][0]["text"]).get("agents", [])
    of_stream = [each for each in found if each["stream"] == stream]
    return {each["agent"]: {"state": each["state"], "needs": each.get("needs", False)} for each in of_stream}


def _of_observer(observer: Worker | None, app: str, stream: str) -> Said:
    """Return what the gauge of the observer says, of which the alert is made."""
    text = observer.ask("/metrics")[1] if observer else ""
    if not any(time.time() - float(at) < BLIND_SECONDS for at in LAST_POLL.findall(text)):
        return {}  # AvisoObserverBlind says that
    found = [dict(LABEL.findall(labels)) | {"value": value} for labels, value in OBSERVER_LINE.findall(text)]
    of_stream = [each for each in found if (each["app"], each["stream"]) == (app, stream)]
    return {each["agent"]: {"state": each["state"], "needs": float(each["value"]) > 0} for each in of_stream}


def _answer(worker: Worker | None, path: str) -> str:
    """Return the status and the first line of the answer."""
    status, text = worker.ask(path) if worker else (0, "")
    return f"{status} {text.splitlines()[0] if text else ''}".rstrip() if status else NO_WORKER


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].removeprefix("aviso-workers: ")
