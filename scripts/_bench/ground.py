"""Where a benchmark runs: a nats-server of its own, and one measured process at a time, alone on its core."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
from msgspec import Struct

from _bench import filling
from _bench.tally import MARKS_VARIABLE
from _chaos.clusters import connected, started
from _demo.children import Child, ShortfallError, free_port, is_ready, running, wait_until
from aviso_workers import App, config
from aviso_workers.declare.agents import durable_name
from aviso_workers.server import NatsServer

PROJECT = Path(__file__).parents[2]
CONFIG = Path(__file__).with_name("config.yaml")
COMMANDS = Path(sys.executable).parent
NATS_URL_VARIABLE = "AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__NATS_URL"
REPLICAS_VARIABLE = "AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__REPLICAS"
STORE = "nats"
READY_SECONDS = 120.0
ACKED_SECONDS = 10.0
READY_POLL_SECONDS = 0.005


class Mark(Struct, frozen=True, kw_only=True):
    """What `Tally` tells."""

    mark: int
    """How many were counted by then."""
    process: int
    began: float
    """On a clock that all processes of the machine share."""
    seconds: float
    cpu_seconds: float
    resident_mib: float | None = None
    peak_mib: float | None = None


class Cores(Struct, frozen=True, kw_only=True):
    """Who runs where; both are empty where processes cannot be pinned."""

    usable: tuple[int, ...] = ()
    others: frozenset[int] = frozenset()

    @classmethod
    def divide(cls) -> Cores:
        """Return two sets of cores: the last one for the measured process, the others for server and publisher."""
        if sys.platform != "linux" or len(usable := os.sched_getaffinity(0)) < 2:
            return cls()
        return cls(usable=tuple(sorted(usable)), others=frozenset(usable - {max(usable)}))

    def has_room_for(self, processes: int) -> bool:
        """Return whether so many can be measured at a time, with as many cores for the others."""
        return len(self.usable) >= 2 * processes

    @contextmanager
    def for_measured(self, processes: int = 1) -> Iterator[None]:
        """What is started within the block runs on the last core, or on as many as it has processes."""
        if not self.usable:
            yield
            return
        os.sched_setaffinity(0, self.usable[-processes:])
        try:
            yield
        finally:
            os.sched_setaffinity(0, self.others)


class Ground:
    """A running server, and how processes are measured beside it."""

    def __init__(self, directory: Path, servers: Sequence[NatsServer], cores: Cores) -> None:
        self.nats_url = servers[0].url
        self._replicas = len(servers)
        self._directory = directory
        self._cores = cores
        self._started = 0

    @property
    def store(self) -> Path:
        """Where the server has its streams."""
        return self._directory / STORE

    def fill(self, count: int, **which: Any) -> None:
        """Store so many notifications, once the servers have elected their leader; see `filling.fill`."""
        anyio.run(self._fill, count, which)

    async def _fill(self, count: int, which: Mapping[str, Any]) -> None:
        async with connected(self.app("ready")):
            pass
        await filling.fill(self.nats_url, self.app("fill"), count=count, **which)

    def app(self, name: str) -> App:
        """Return an app of this process on this server."""
        return App(name, config=config.load(CONFIG, environ=self._settings))

    @contextmanager
    def worker(
        self, name: str, app: str, *, counts: Sequence[int], processes: int = 1
    ) -> Iterator[tuple[Child, float]]:
        """`aviso-workers worker` with an app, and the seconds that it took to be ready.

        The app is one of `_bench.agents`, or of another module of `_bench` (`module:app`).
        """
        port = free_port()
        module = "_bench." if ":" in app else "_bench.agents:"
        target = ("worker", f"{module}{app}", "--config", CONFIG, "--status-port", str(port))
        fleet = ("--processes", str(processes)) if processes > 1 else ()
        command = (COMMANDS / "aviso-workers", *target, *fleet)
        started = time.perf_counter()
        with self.process(name, command, counts=counts, processes=processes) as child:
            while not is_ready(f"http://127.0.0.1:{port}/readyz"):
                child.check_alive()
                if time.perf_counter() - started > READY_SECONDS:
                    raise ShortfallError(f"{name} is not ready after {READY_SECONDS:.0f} s\n{child.last_words()}")
                time.sleep(READY_POLL_SECONDS)
            yield child, time.perf_counter() - started

    @contextmanager
    def process(
        self, name: str, command: Sequence[str | Path], *, counts: Sequence[int], processes: int = 1
    ) -> Iterator[Child]:
        self._started += 1
        unique = f"{name}-{self._started}".replace(" ", "-")
        environment = self._environment | {
            "BENCHMARK_NAME": unique,
            "BENCHMARK_NATS_URL": self.nats_url,
            MARKS_VARIABLE: ",".join(map(str, counts)),
        }
        with ExitStack() as stack:
            with self._cores.for_measured(processes):
                started = running(unique, command, log_dir=self._directory, environment=environment)
                child = stack.enter_context(started)
            yield child

    def marks(self, child: Child, number: int, *, within_seconds: float) -> list[Mark]:
        """Return the first marks that the process tells, once they are there. Raises `ShortfallError`."""
        found: list[Mark] = []

        def told() -> bool:
            found[:] = _marks_in(child)
            return len(found) >= number

        wait_until(
            told,
            lambda: f"{child.name} has told {len(found)} of {number} marks\n{child.last_words()}",
            within_seconds=within_seconds,
            alive=[child],
        )
        return found

    def joint_mark(self, child: Child, count: int, *, within_seconds: float) -> Mark:
        """Return what the processes of a fleet have counted together, once they tell of so many.

        Raises `ShortfallError`.
        """
        last: dict[int, Mark] = {}

        def told() -> bool:
            last.update((mark.process, mark) for mark in _marks_in(child))
            return counted() >= count

        def counted() -> int:
            return sum(mark.mark for mark in last.values())

        wait_until(
            told,
            lambda: f"{child.name} has counted {counted():,} of {count:,}\n{child.last_words()}",
            within_seconds=within_seconds,
            alive=[child],
        )
        marks = last.values()
        began, ended = min(mark.began for mark in marks), max(mark.began + mark.seconds for mark in marks)
        return Mark(
            mark=counted(),
            process=child.process.pid,
            began=began,
            seconds=ended - began,
            cpu_seconds=sum(mark.cpu_seconds for mark in marks),
            peak_mib=sum(mark.peak_mib or 0 for mark in marks),
        )

    def check_acked(self, child: Child, count: int) -> None:
        """Make sure that the server has the acks of all that the process has counted. Raises `ShortfallError`."""
        found = 0

        def acked() -> bool:
            nonlocal found
            found = anyio.run(self._ack_floor, child.name)
            return found >= count

        wait_until(acked, lambda: f"{child.name} has acked {found:,} of {count:,}", within_seconds=ACKED_SECONDS)

    async def _ack_floor(self, name: str) -> int:
        async with self.app("look") as app:
            consumers = await app.session.admin.consumers(filling.STREAM)
        return next((found.ack_floor for found in consumers if found.name in (name, durable_name(name, "count"))), 0)

    @property
    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AVISO", "NATS_"))}
        return kept | self._settings | {"AVISO_WORKERS_CONFIG_FILE": str(CONFIG)}

    @property
    def _settings(self) -> dict[str, str]:
        return {NATS_URL_VARIABLE: self.nats_url, REPLICAS_VARIABLE: str(self._replicas)}


def _marks_in(child: Child) -> list[Mark]:
    lines = child.log_file.read_text().splitlines()
    return [msgspec.json.decode(line, type=Mark) for line in lines if line.startswith('{"mark"')]


@contextmanager
def grounded(cores: Cores, *, servers: int = 1) -> Iterator[Ground]:
    """Fresh servers whose streams have as many replicas, and are forgotten afterwards."""
    with tempfile.TemporaryDirectory(prefix="aviso-workers-bench-") as directory, ExitStack() as stack:
        if servers == 1:
            nodes = [stack.enter_context(NatsServer.start(store_dir=Path(directory) / STORE))]
        else:
            nodes = stack.enter_context(started(directory, servers))
        yield Ground(Path(directory), nodes, cores)
