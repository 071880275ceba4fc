"""A long outage of the server: one worker loses it, another one has never seen it, both get it at the end.

Meanwhile each must be alive, must not be ready and say why, every time it is asked, and must use next to no processor
time; afterwards it must become ready by itself, and handle what is published. Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import anyio
from rich.console import Console

from _chaos.agents import EVENT, Deed, router
from _chaos.deployment import Deployment
from _chaos.interrupts import end_in_order
from _demo.children import ShortfallError, free_port, wait_until
from aviso_workers.errors import AvisoWorkersError
from aviso_workers.server import NatsServer

START_SECONDS = 120.0
READY_SECONDS = 60.0
"""How long after its server a worker may become ready. Agents that fail to start wait for up to 10 s, and the machine
may have more to do."""
HANDLED_SECONDS = 60.0
STOP_SECONDS = 60.0
ASK_SECONDS = 1.0
MAX_CPU = 0.02
"""Of one core; it is half of that where nothing else runs."""

console = Console(highlight=False, soft_wrap=True, markup=False)


class Case:
    """A worker without a server, and what it said and used."""

    def __init__(self, name: str, directory: Path) -> None:
        directory.mkdir()
        self.name = name
        self.deployment = Deployment(directory, f"nats://127.0.0.1:{(port := free_port())}")
        self.reasons = Counter[str]()
        """How often it was not ready, by why."""
        self._port = port
        self._store_dir = directory / "nats"

    @contextmanager
    def without_server(self, *, had_one: bool) -> Iterator[None]:
        """Its worker; with `had_one`, the server goes when the worker has become ready."""
        with ExitStack() as stack:
            server = stack.enter_context(self._server()) if had_one else None
            worker = self.worker = stack.enter_context(self.deployment.worker(self.name))
            if server:
                self._expect("ready", worker.is_ready, within_seconds=START_SECONDS)
                server.stop()
            self._expect("not ready", lambda: worker.ask("/readyz")[0] == 503, within_seconds=START_SECONDS)
            self._since, self._used = time.monotonic(), worker.cpu_seconds()
            yield

    def _server(self) -> NatsServer:
        return NatsServer.start(store_dir=self._store_dir, port=self._port)

    def ask(self) -> None:
        """Raises `ShortfallError` where it is not alive, or ready, or says no reason."""
        alive, ready = self.worker.ask("/livez"), self.worker.ask("/readyz")
        if alive != (200, "ok") or ready[0] != 503 or not ready[1]:
            raise ShortfallError(f"{self.name}: /livez answers {alive}, /readyz {ready}\n{self._last_words()}")
        self.reasons[ready[1].splitlines()[0]] += 1

    def cpu_share(self) -> float:
        """Of one core, since it has no server. Raises `ShortfallError` where that is too much."""
        share = (self.worker.cpu_seconds() - self._used) / (time.monotonic() - self._since)
        if share >= MAX_CPU:
            raise ShortfallError(f"{self.name}: used {share:.2%} of a core, {MAX_CPU:.0%} is too much")
        return share

    def recover(self) -> tuple[float, float]:
        """Give it a server: the seconds until it is ready, and from there until all its agents have handled one."""
        with self._server():
            started = time.monotonic()
            self._expect("ready", self.worker.is_ready, within_seconds=READY_SECONDS)
            ready = time.monotonic()
            anyio.run(self._publish)
            agents = {agent.name for agent in router.agents}
            self._expect(
                "done with what was published",
                lambda: {agent for agent, numbers in self.deployment.handled().items() if numbers} == agents,
                within_seconds=HANDLED_SECONDS,
            )
            done = time.monotonic()
            self.worker.child.process.terminate()
            self.worker.child.wait(within_seconds=STOP_SECONDS)
            return ready - started, done - ready

    async def _publish(self) -> None:
        async with self.deployment.client() as client:
            await client.notify(EVENT, {"lane": 1, "number": 1}, Deed(seconds=0, fails=0))

    def _expect(self, what: str, condition: Callable[[], bool], *, within_seconds: float) -> None:
        wait_until(
            condition,
            lambda: f"{self.name}: not {what}: {self.worker.ask('/readyz')}\n{self._last_words()}",
            within_seconds=within_seconds,
            alive=[self.worker.child],
        )

    def _last_words(self) -> str:
        return self.worker.child.last_words()


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/outage", description="Workers without a server.")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long the server is away (default: 10)")
    minutes = parser.parse_args().minutes
    end_in_order()
    try:
        with tempfile.TemporaryDirectory(prefix="aviso-workers-outage-") as directory:
            conduct(Path(directory), seconds=minutes * 60)
    except (ShortfallError, AvisoWorkersError) as error:
        console.print(f"fell short: {error}")
        return 1
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    console.print("as it should be: alive and not ready all the time, idle, and back at work by themselves")
    return 0


def conduct(directory: Path, *, seconds: float) -> None:
    """Raises `ShortfallError` where something is not as it should be."""
    with ExitStack() as stack:
        cases = []
        for name, had_one in (("lost-it", True), ("never-saw-it", False)):
            case = Case(name, directory / name)
            stack.enter_context(case.without_server(had_one=had_one))
            cases.append(case)
        console.print(f"two workers without a server for {seconds:.0f} s")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(ASK_SECONDS)
            for case in cases:
                case.ask()
        for case in cases:
            console.print(f"{case.name}: used {case.cpu_share():.2%} of a core, not ready whenever it was asked:")
            for reason, times in case.reasons.most_common():
                console.print(f"  {times:,} times: {reason}")
            ready, done = case.recover()
            console.print(
                f"  ready {ready:.1f} s after its server, and done with a notification after {done:.1f} s more"
            )


if __name__ == "__main__":
    sys.exit(main())
