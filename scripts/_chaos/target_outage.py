"""An outage of what agents need: every call fails, and says that something is away.

Meanwhile a worker is killed, all workers are replaced one after another as by a rolling deploy, and a dead letter of
before is handed back. When the outage ends, everything must be handled soon, within each worker in the order of its
key, and nothing may have become a dead letter. The log of a worker must stay small.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import anyio
from rich.console import Console

from _chaos.agents import APP, AWAY, EVENT, MENDED, Deed, router
from _chaos.chaos import LANES, Account, Place, Publisher, account
from _chaos.clusters import start_nodes, stop_nodes
from _chaos.deployment import Deployment
from _chaos.interrupts import end_in_order
from _demo.children import ShortfallError
from aviso_workers import App
from aviso_workers.errors import AvisoWorkersError
from aviso_workers.ops.dead_letters import Selection, StoredDeadLetters
from aviso_workers.state.dead_letter_records import DeadLetter

SERVERS, WORKERS = 3, 4
READY_SECONDS = 120.0
DONE_SECONDS = 120.0
"""How long after the outage everything may take to be handled."""
LOOK_SECONDS = 0.25
MAX_LOG_BYTES = 200_000
BAD_SECONDS = 20.0
"""Longer than its attempts take."""
BAD = 10_000 * LANES
"""The number of the notification that fails before the outage, for another reason."""

console = Console(highlight=False, soft_wrap=True, markup=False)


class Numbered(Publisher):
    """Publishes, without a notification that fails."""

    def _deed(self) -> Deed:
        return Deed(seconds=0.001, fails=0.0)


async def conduct(directory: Path, *, seconds: float, rate: float, stack: ExitStack) -> None:
    """Raises `ShortfallError` where something is not as it should be."""
    nodes = start_nodes(directory / "nats", SERVERS)
    stack.callback(lambda: stop_nodes(nodes))
    deployment = Deployment(directory, ",".join(node.url for node in nodes), replicas=SERVERS)
    away, mended = (Path(f"{deployment.record}{suffix}") for suffix in (AWAY, MENDED))
    places = [Place(f"worker-{number + 1}", deployment, stack, versions=[""]) for number in range(WORKERS)]
    async with deployment.client() as client:
        await _until(lambda: all(place.worker.is_ready() for place in places), "all workers are ready", READY_SECONDS)
        publisher = Numbered(client, rate=rate, seed=1)
        await client.notify(EVENT, {"lane": BAD % LANES, "number": BAD}, Deed(seconds=0.0, fails=1.0))
        await anyio.sleep(BAD_SECONDS)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publisher.run)
            await anyio.sleep(5.0)
            away.touch()
            mended.touch()
            console.print(f"away for {seconds:.0f} s, after {len(publisher.stored):,} notifications")
            started = time.monotonic()
            await anyio.sleep(seconds * 0.2)
            console.print("kill -9 of worker-1")
            places[0].worker.child.kill()
            places[0].start()
            await anyio.sleep(seconds * 0.1)
            for place in places:
                console.print(f"SIGTERM to {place.name}, and another one in its place")
                place.send(signal.SIGTERM)
                await place.ended()
                place.start()
                await anyio.sleep(seconds * 0.05)
            letters = await _dead_letters(client)
            if len(letters) != len(router.agents):
                raise ShortfallError(f"{len(letters)} dead letters, and not one of each agent")
            await StoredDeadLetters(client.session.admin, events=client.events).retry(*letters)
            console.print(f"{len(letters)} dead letters handed back")
            await anyio.sleep(max(0.0, started + seconds - time.monotonic()))
            publisher.stop.set()
        away.unlink()
        ended = time.monotonic()
        wanted = {*publisher.stored, BAD}
        await _until(
            lambda: all(wanted <= set(deployment.handled().get(agent.name, ())) for agent in router.agents),
            "everything is handled",
            DONE_SECONDS,
        )
        console.print(f"{len(wanted):,} notifications, all handled {time.monotonic() - ended:.1f} s after its end")
        accounts = await account(client, deployment, mixed=False)
    for place in places:
        place.send(signal.SIGTERM)
    for place in places:
        await place.ended()
    _judge(deployment, accounts, ended)


def _judge(deployment: Deployment, accounts: list[Account], ended: float) -> None:
    wrong = [f"{each.agent} has {len(each.dead_lettered)} dead letters" for each in accounts if each.dead_lettered]
    order = defaultdict[tuple[str, int], list[int]](list)
    last = defaultdict[str, float](float)
    for line in deployment.record.read_text().splitlines():
        agent, number, process, at = line.split()
        last[agent] = max(last[agent], float(at) - ended)
        if agent == "in_lanes" and int(number) != BAD:
            order[process, int(number) % LANES].append(int(number))
    for agent, seconds in last.items():
        console.print(f"{agent}: the last one {seconds:.1f} s after the end")
    pairs = sum(later < earlier for of in order.values() for earlier, later in pairwise(of))
    if pairs:
        wrong.append(f"{pairs} pairs of a key are out of order within their worker")
    for file in sorted(deployment.log_dir.iterdir()):
        size = file.stat().st_size
        console.print(f"{file.name}: {size:,} bytes")
        if size > MAX_LOG_BYTES:
            wrong.append(f"{file.name} has {size:,} bytes")
    for each in accounts:
        console.print(f"{each.agent}: {len(each.repeated()):,} handled more than once")
    if wrong:
        raise ShortfallError("; ".join(wrong))


async def _dead_letters(client: App) -> list[DeadLetter]:
    stored = StoredDeadLetters(client.session.admin, events=client.events)
    return [each async for each in stored.select(Selection(app=APP))]


async def _until(condition: Callable[[], bool], what: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise ShortfallError(f"not within {seconds:.0f} s: {what}")
        await anyio.sleep(LOOK_SECONDS)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/target-outage", description="An outage of what agents need.")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long it is away (default: 10)")
    parser.add_argument("--rate", type=float, default=20.0, help="notifications a second (default: 20)")
    wanted = parser.parse_args()
    end_in_order()
    directory = Path(tempfile.mkdtemp(prefix="aviso-workers-outage-"))
    try:
        with ExitStack() as stack:
            anyio.run(lambda: conduct(directory, seconds=wanted.minutes * 60, rate=wanted.rate, stack=stack))
    except (ShortfallError, AvisoWorkersError) as error:
        console.print(f"fell short: {error}; the logs stay in {directory}")
        return 1
    except KeyboardInterrupt:
        console.print("interrupted")
        shutil.rmtree(directory)
        return 130
    shutil.rmtree(directory)
    console.print("as it should be: nothing left, no dead letter, in order, and small logs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
