"""Real processes for the stories: workers, servers that come and go, a cluster, and a wire that can be cut.

Everything listens on the loopback, and everything that was started is ended by leaving its `with` block.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import anyio
from msgspec import Struct
from nats.aio.client import Client

from aviso_workers.server import NatsServer
from aviso_workers.server.processes import free_ports
from tests.stories.agents import ACK_WAIT_SECONDS, ACK_WAIT_VARIABLE, RECORD_VARIABLE
from tests.waits import PATIENCE_SECONDS

__all__ = ["Act", "Proxy", "Record", "Server", "Worker", "cluster", "until", "until_jetstream"]

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "tests/contract/aviso.yaml"
LOOK_SECONDS = 0.02
MAIN = "from aviso_workers.cli import main; main()"


async def until(condition: Callable[[], Any], *, within: float = PATIENCE_SECONDS, what: Callable[[], Any]) -> None:
    """Wait until the condition holds; say `what` was there instead when it does not in time."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"not within {within:g} s; there was: {what()}"
        await anyio.sleep(LOOK_SECONDS)


class Act(Struct, frozen=True):
    """A line of the record: what a handler did, to which notification, in which process, and when."""

    what: str
    number: int
    pid: int
    time: float


class Record:
    """What the handlers of all workers wrote down."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._acts: list[Act] = []
        self._read_bytes = 0
        path.touch()

    @property
    def acts(self) -> list[Act]:
        """All of them. Stories ask again and again, so only the lines that were added since are read."""
        with self.path.open("rb") as file:
            file.seek(self._read_bytes)
            added = file.read()
        added = added[: added.rfind(b"\n") + 1]  # the last line may be on its way
        self._read_bytes += len(added)
        fields = map(str.split, added.decode().splitlines())
        self._acts += [Act(what, int(number), int(pid), float(when)) for what, number, pid, when in fields]
        return [*self._acts]

    def of(self, what: str, number: int | None = None) -> list[Act]:
        return [act for act in self.acts if act.what == what and number in (None, act.number)]

    def numbers(self, what: str) -> Counter[int]:
        """How often it was done to each notification."""
        return Counter(act.number for act in self.of(what))


class Worker:
    """A worker process of one of the stories' apps."""

    def __init__(
        self,
        *,
        url: str,
        record: Record,
        directory: Path,
        app: str = "app",
        settings: Mapping[str, object] | None = None,
        options: Sequence[str] = (),
        ack_wait_seconds: float = ACK_WAIT_SECONDS,
    ) -> None:
        """`settings` are further `notification_backend.jetstream` keys, or others by their whole path."""
        whole = {
            "notification_backend.jetstream.nats_url": url,
            "notification_backend.jetstream.max_reconnect_attempts": 0,
            "notification_backend.jetstream.reconnect_delay_ms": 100,
            "workers.logging.format": "json",
            **(settings or {}),
        }
        variables = {f"AVISO_WORKERS_{key.replace('.', '__').upper()}": str(value) for key, value in whole.items()}
        variables |= {RECORD_VARIABLE: str(record.path), ACK_WAIT_VARIABLE: str(ack_wait_seconds)}
        self.log_file = directory / f"worker-{time.monotonic_ns()}.log"
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    MAIN,
                    "worker",
                    f"tests.stories.agents:{app}",
                    "--config",
                    str(CONFIG),
                    "--status-port",
                    "0",
                    *options,
                ],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def logged(self, event: str) -> list[dict[str, Any]]:
        """The entries of this name in its log."""
        lines = (line for line in self.log.splitlines() if event in line)
        entries = (json.loads(line) for line in lines if line.startswith("{") and line.endswith("}"))
        return [entry for entry in entries if entry["event"] == event]

    def get(self, path: str, *, token: str = "") -> str:
        """What the status port answers to who sends this token; its code first, where that is not 200."""
        started = self.logged("fleet.started") or self.logged("worker.started")
        if not started:
            return "no answer"
        url = f"{started[0]['status']}{path}"
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as answer:
            with answer:
                return f"{answer.status}: {answer.read().decode()}"
        except OSError:
            return "no answer"

    def why_unready(self) -> str:
        """What /readyz answers, its code first; empty where that is 200."""
        return answer if (answer := self.get("/readyz")) != "ok\n" else ""

    async def ready(self, *, within: float = PATIENCE_SECONDS) -> None:
        await until(lambda: not self.why_unready(), within=within, what=lambda: f"{self.why_unready()}\n{self.log}")

    async def unready(self, why: str, *, within: float = PATIENCE_SECONDS) -> None:
        """Wait until it is not ready because of `why`."""
        await until(
            lambda: (said := self.why_unready()).startswith("503") and why in said,
            within=within,
            what=lambda: f"{self.why_unready() or 'ready'}\n{self.log}",
        )

    async def ended(self, *, within: float = PATIENCE_SECONDS) -> int:
        """Its exit code, once it has one."""
        await until(lambda: self.process.poll() is not None, within=within, what=lambda: self.log)
        assert self.process.returncode is not None
        return self.process.returncode

    def terminate(self) -> None:
        self.process.terminate()

    def kill(self) -> None:
        """As a crash would end it. Does nothing where it has ended."""
        self.process.kill()
        self.process.wait()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def cpu_seconds(self) -> float:
        """The processor time that it has used so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Server:
    """A nats-server that can go and come back, on its port and with its streams."""

    def __init__(self, directory: Path, *, config: str = "") -> None:
        self._directory = directory
        self.config = config
        (self.port,) = free_ports(1)
        self.start()
        self.url = self._running.url

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.send(signal.SIGCONT)
        self._running.stop()

    @property
    def log(self) -> str:
        return self._running.log

    def stop(self) -> None:
        self._running.stop()

    def kill(self) -> None:
        self._running.kill()
        self._running.stop()

    def start(self) -> None:
        self._running = NatsServer.start(store_dir=self._directory, port=self.port, config=self.config)

    def send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self._running.process.send_signal(number)

    async def ended(self) -> None:
        await until(lambda: self._running.process.poll() is not None, what=lambda: self.log)

    def reload(self, before: str, after: str) -> None:
        """Change its configuration and have it read again."""
        command = self._running.process.args
        assert isinstance(command, list)
        file = Path(os.fsdecode(command[-1]))  # behind -c
        file.write_text(file.read_text().replace(before, after))
        self.send(signal.SIGHUP)


@contextmanager
def cluster(directory: Path) -> Iterator[list[NatsServer]]:
    """Three servers that form one JetStream."""
    with ExitStack() as running:
        routing = free_ports(3)
        routes = ", ".join(f"nats-route://127.0.0.1:{port}" for port in routing)
        nodes = [
            running.enter_context(
                NatsServer.start(
                    store_dir=directory / f"node-{port}",
                    config=f'cluster {{ name: stories, listen: "127.0.0.1:{port}", routes: [{routes}] }}\n',
                )
            )
            for port in routing
        ]
        yield nodes
        for node in nodes:
            node.kill()  # one that is about to shut down takes its time


HELD_BYTES = 65536
"""What a proxy's socket may hold. Left to itself, Linux lets one grow to 32 MiB."""


class Proxy:
    """A wire to a server that can fall silent, be cut, and say what the server did not.

    It holds little of what the server writes: who does not read from it soon makes the server wait.
    """

    def __init__(self, port: int) -> None:
        self._server = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._speaking = threading.Event()
        self._speaking.set()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._listener.close()
        self._speaking.set()
        self.cut()

    def fall_silent(self) -> None:
        """Pass nothing on any more, in either direction, and take nothing either."""
        self._speaking.clear()

    def speak(self) -> None:
        self._speaking.set()

    def cut(self) -> None:
        """End all connections."""
        for pair in self._pairs:
            for end in pair:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        self._pairs.clear()

    def say(self, line: bytes) -> None:
        """Say this to the clients, as the server would."""
        for client, _ in self._pairs:
            client.sendall(line)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        """Connect a client to the server until one of them ends the connection."""
        with suppress(OSError), client, socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, HELD_BYTES)
            server.connect(("127.0.0.1", self._server))
            pair = (client, server)
            self._pairs.append(pair)
            answers = threading.Thread(target=self._pass_on, args=(server, client), daemon=True)
            answers.start()
            self._pass_on(client, server)
            answers.join()
            with suppress(ValueError):
                self._pairs.remove(pair)

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while True:
                self._speaking.wait()
                if not (data := source.recv(65536)):
                    break
                self._speaking.wait()
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


async def until_jetstream(client: Client) -> None:
    """Wait until the cluster has a leader."""
    with anyio.fail_after(PATIENCE_SECONDS):
        while True:
            try:
                await client.jetstream(timeout=1).account_info()
                return
            except Exception:
                await anyio.sleep(0.1)
