"""Every program beside every outage of its servers: it says that it is not connected, and comes back by itself.

All programs run at the same time, each as a process of its own, so that each outage is waited for once.
`scripts/lost-servers` runs it with longer outages.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import nkeys
import pytest

from aviso_workers.server import NatsServer, processes, start_tied
from aviso_workers.server.processes import Node, free_ports
from tests.conftest import write_mars_config
from tests.security.certificates import Authority
from tests.security.tokens import Key
from tests.server.conftest import load_server
from tests.waits import PATIENCE_SECONDS

COMMAND = Path(sys.executable).with_name("aviso-workers")
DEADLINE_SECONDS = 1.0
ATTEMPTS_SECONDS = 29.0
"""How much longer five attempts to publish may take, on a busy machine."""
OUTAGE_SECONDS = [float(each) for each in os.environ.get("OUTAGE_SECONDS", "5").split()]
SPARK_KEYS = ("cluster", "application", "kind", "event", "id")
SPARK_LOG = '{"Event":"SparkListenerApplicationStart","App Name":"x","Timestamp":1}\n'
AGENTS = """
from aviso_workers import App, Notification

app = App("indexer")

@app.agent("mars")
async def index(notification: Notification) -> None: ...
"""
PUBLISHER = """
import json, sys, time
import anyio
from aviso_workers import App
from aviso_workers.errors import AvisoWorkersError

async def main():
    async with App("publisher", config=sys.argv[1]) as app:
        for step in range(1_000_000):
            error, began = "", time.monotonic()
            try:
                await app.notify("mars", {"class": "od", "step": step % 1000})
            except AvisoWorkersError as raised:
                error = str(raised)
            said = {"connected": app.connected, "error": error, "seconds": time.monotonic() - began}
            print(json.dumps(said), flush=True)
            await anyio.sleep(0.1)

anyio.run(main)
"""
SPARK_DRIVER = """
import sys, time
from contextlib import closing
from aviso_workers.errors import AvisoWorkersError
from aviso_workers.spark.data_source import AvisoDataSource
from aviso_workers.spark.readers import DriverRequests

source = AvisoDataSource({"config": sys.argv[1], "event": "mars"})
with closing(DriverRequests(source._plan(True))) as driver:
    while True:
        try:
            print("the last one is", driver.info().last_sequence, flush=True)
        except AvisoWorkersError as error:
            print("failed:", error, flush=True)
        time.sleep(0.1)
"""
"""Without Spark, whose driver asks for the end of the stream before each micro-batch."""
LOST = r"not connected to [^\n]+ since 20"


class Program:
    """A process that must not be restarted. `lost` is what it says of an outage, if it says anything, and `back` what
    it says when it works; with a `url`, they are what it answers there.
    """

    def __init__(
        self, name: str, *command: str | Path, directory: Path, back: str, lost: str = "", url: str = ""
    ) -> None:
        self.name = name
        self.tells = bool(lost)
        self._lost, self._back = re.compile(lost, re.DOTALL), re.compile(back, re.DOTALL)
        self._url = url
        self._output = directory / f"{name}.out"
        self._seen = 0
        ours = {key: value for key, value in os.environ.items() if not key.startswith(("AVISO", "NATS_"))}
        with self._output.open("wb") as output:
            self.process = start_tied(
                command,
                number=signal.SIGKILL,
                cwd=directory,
                env={**ours, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def mark(self) -> None:
        """From now on, only what is said later counts."""
        self._seen = len(self.output)

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def says(self) -> str:
        if not self._url:
            return self.output[self._seen :]
        try:
            answer = httpx.get(self._url, timeout=PATIENCE_SECONDS, trust_env=False)
        except httpx.TransportError as error:
            return f"no answer: {error}"
        return f"{answer.status_code} {answer.text}"

    def is_lost(self) -> bool:
        return bool(self._lost.search(self.says()))

    def is_back(self) -> bool:
        return bool(self._back.search(self.says()))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Programs:
    """One program of each kind, on the servers of a configuration."""

    def __init__(self, config: Path) -> None:
        directory = config.parent
        (directory / "agents.py").write_text(AGENTS)
        self.logs = directory / "spark"
        self.logs.mkdir()
        console, *ports = free_ports(4)
        watched: tuple[str | Path, ...] = ("--seconds", "0.2", "--config", config)

        def python(name: str, code: str, **says: str) -> Program:
            return Program(name, sys.executable, "-c", code, config, directory=directory, **says)

        def command(name: str, *arguments: str | Path, **says: str) -> Program:
            return Program(name, COMMAND, *arguments, directory=directory, **says)

        def worker(*target: str) -> Program:
            port = str(ports.pop())
            says = {"url": f"http://127.0.0.1:{port}/readyz", "lost": "^503 not connected: .", "back": "^200"}
            name, arguments = f"worker {target[-1]}", ("--status-port", port, "--config", config)
            return command(name, "worker", *target, *arguments, **says)

        self.publisher = python("publisher", PUBLISHER, lost=LOST, back='"connected": true, "error": ""')
        self.watch = command("watch", "watch", "--config", config, back='"mars@')
        self.all = [
            self.publisher,
            worker("agents:app"),
            worker("--agent", "observer"),
            worker("--agent", "spark-events"),
            command(
                "console",
                *("console", "--port", str(console), "--config", config),
                url=f"http://127.0.0.1:{console}/agents",
                lost="^200 .*does not answer",
                back="^200 (?!.*does not answer).*indexer",
            ),
            self.watch,
            command("agents ls --watch", "agents", "ls", "--watch", *watched, lost=LOST, back="indexer .*MARS"),
            command("top", "top", *watched, lost=LOST, back="MARS"),
            python("spark driver", SPARK_DRIVER, back="the last one is"),
        ]

    def until(self, condition: Callable[[Program], bool], what: str, among: Sequence[Program] = ()) -> dict[str, float]:
        """Wait until it is so of each program, and return after how many seconds it was."""
        began, found = time.monotonic(), dict[str, float]()
        waiting = list(among or self.all)
        while waiting:
            for program in tuple(waiting):
                code = program.process.poll()
                assert code is None, f"{program.name} ended with {code}: {program.output[-3000:]}"
                if condition(program):
                    found[program.name] = round(time.monotonic() - began, 1)
                    waiting.remove(program)
            late = {program.name: program.says()[-1500:] for program in waiting}
            assert time.monotonic() < began + PATIENCE_SECONDS, f"not {what}: {late}"
            time.sleep(0.2)
        return found

    @property
    def telling(self) -> list[Program]:
        return [program for program in self.all if program.tells]

    def mark(self) -> None:
        for program in self.all:
            program.mark()

    def check_publisher(self) -> None:
        """What is published meanwhile fails after its deadline, and says since when there is no connection, and why."""
        said = json.loads(self.publisher.says().splitlines()[-1])
        assert not said["connected"], said
        assert re.search(LOST + r"\S+ \S+ UTC: .+", said["error"]), said
        assert said["seconds"] < DEADLINE_SECONDS + ATTEMPTS_SECONDS, said


class OneServer:
    """One server, which is away for so long."""

    ends_connections = True

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __str__(self) -> str:
        return f"one server, {self._seconds:g} s"

    @contextmanager
    def running(self, directory: Path) -> Iterator[dict[str, Any]]:
        """Run the server for the block; the settings of who connects."""
        self._store, self._server = directory / "store", NatsServer.start(store_dir=directory / "store")
        yield {"nats_url": self._server.url, "reconnect_delay_ms": None}
        self._server.stop()

    def lose(self) -> None:
        self._server.stop()

    def end(self, programs: Programs) -> None:
        time.sleep(self._seconds)
        self._server = NatsServer.start(store_dir=self._store, port=self._server.port)


class OtherSecrets(OneServer):
    """One server, which comes back with a certificate of another authority, and takes another nkey."""

    def __init__(self) -> None:
        super().__init__(0)

    def __str__(self) -> str:
        return "one server, other certificate and nkey"

    @contextmanager
    def running(self, directory: Path) -> Iterator[dict[str, Any]]:
        self._store = directory / "store"
        self._trusted, self._seed = directory / "trusted.pem", directory / "worker.nk"
        self._former, self._new = [
            (Authority(directory, name), Key(nkeys.PREFIX_BYTE_USER)) for name in ("former", "new")
        ]
        self._trust(self._former[0])
        self._seed.write_text(self._former[1].seed)
        self._server = self._start(*self._former, port=0)
        yield {
            "nats_url": self._server.url.replace("nats:", "tls:"),
            "tls": {"ca_file": str(self._trusted)},
            "nkey_seed_file": str(self._seed),
        }
        self._server.stop()

    def end(self, programs: Programs) -> None:
        self._server = self._start(*self._new, port=self._server.port)
        programs.until(lambda program: "certificate verify failed" in program.says(), "distrusting", programs.telling)
        self._trust(self._new[0])
        programs.until(lambda program: "Authorization" in program.says(), "turned away", programs.telling)
        self._seed.write_text(self._new[1].seed)

    def _trust(self, authority: Authority) -> None:
        shutil.copy(authority.ca_file, self._trusted)

    def _start(self, authority: Authority, key: Key, *, port: int) -> NatsServer:
        made = authority.sign("server")
        files = f"cert_file: {made.cert_file}, key_file: {made.key_file}"
        config = f'tls {{{files}}}\nauthorization {{users: [{{nkey: "{key.public}"}}]}}\n'
        return NatsServer.start(store_dir=self._store, port=port, config=config)


class ThreeServers:
    """Three servers, of which so many are killed and away for so long."""

    def __init__(self, seconds: float, *, killed: int = 3) -> None:
        self._seconds, self._killed = seconds, killed
        self.ends_connections = killed == 3

    def __str__(self) -> str:
        return f"{self._killed} of three servers, {self._seconds:g} s"

    @contextmanager
    def running(self, directory: Path) -> Iterator[dict[str, Any]]:
        self._directory = directory / "servers"
        self._directory.mkdir()
        server = f"server_name: n\nport: {three_in_a_row()}\nmonitoring: {{port: 0}}"  # the same ones after an outage
        self._config = load_server(directory / "server.yaml", server, replicas=3)
        try:
            yield {"nats_url": [node.url for node in self._start()], "replicas": 3, "reconnect_delay_ms": None}
        finally:
            processes.stop(self._directory)

    def lose(self) -> None:
        for node in self._nodes[: self._killed]:
            os.kill(node.pid, signal.SIGKILL)

    def end(self, programs: Programs) -> None:
        time.sleep(self._seconds)
        self._start()

    def _start(self) -> tuple[Node, ...]:
        self._nodes = processes.start(self._config, directory=self._directory, nodes=3)
        return self._nodes


def three_in_a_row() -> int:
    """Return the first of three ports that nobody listens on."""

    def is_free(port: int) -> bool:
        with socket.socket() as taken:
            return taken.connect_ex(("127.0.0.1", port)) != 0

    return next(port for port in free_ports(20) if all(map(is_free, range(port, port + 3))))


def lasting(seconds: float) -> Iterator[Any]:
    """The outages that are so long."""
    for outage in (OneServer(seconds), ThreeServers(seconds), ThreeServers(seconds, killed=1)):
        yield pytest.param(outage, id=str(outage), marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "outage",
    [
        pytest.param(OtherSecrets(), id="other secrets"),
        *(outage for seconds in OUTAGE_SECONDS for outage in lasting(seconds)),
    ],
)
def test_every_program_comes_back(
    tmp_path: Path, outage: OneServer | ThreeServers, capsys: pytest.CaptureFixture[str]
) -> None:
    with outage.running(tmp_path) as settings, programs_of(tmp_path, settings) as programs:
        programs.until(Program.is_back, "at work")
        programs.mark()
        outage.lose()
        lost = dict[str, float]()
        if outage.ends_connections:
            lost = programs.until(Program.is_lost, "told", programs.telling)
            programs.check_publisher()
        outage.end(programs)
        programs.mark()
        (programs.logs / "local-1").write_text(SPARK_LOG)
        back = programs.until(Program.is_back, "back")
        programs.until(lambda program: '"spark_job@' in program.says(), "told of the job", [programs.watch])
    with capsys.disabled():
        print(f"{outage}: lost {lost}, back {back}")


@contextmanager
def programs_of(directory: Path, settings: dict[str, Any]) -> Iterator[Programs]:
    config = directory / "config.yaml"
    url = settings.pop("nats_url")
    write_mars_config(config, url, publish_deadline_seconds=DEADLINE_SECONDS, max_reconnect_attempts=None, **settings)
    document = json.loads(config.read_text())
    document["notification_schema"]["spark_job"] = {
        "topic": {"base": "spark", "key_order": list(SPARK_KEYS)},
        "identifier": {key: {"type": "StringHandler", "required": True} for key in SPARK_KEYS},
        "storage_policy": {"allow_duplicates": True},
    }
    agents = {"spark-events": {"event_log_dirs": [str(directory / "spark")], "poll_seconds": 0.2}}
    document["workers"]["agents"] = {**agents, "observer": {"poll_seconds": 1}}
    config.write_text(json.dumps(document))
    programs = Programs(config)
    try:
        yield programs
    finally:
        for program in programs.all:
            program.end()
