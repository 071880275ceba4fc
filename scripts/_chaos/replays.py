"""What random filters take of a stream, replayed and counted, on one server or on a cluster of three.

The filters take any share of the stream, from one notification to half of them, and the positions at which a replay
begins and ends are random as well. On a cluster, a server that has a replica of the stream is killed before the last
tenth is stored; it comes back when half of the filters are done, so that it is behind while it is read from.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from _chaos.clusters import connected, started
from _demo.children import ShortfallError
from aviso_workers import App, Notify
from aviso_workers.errors import AvisoWorkersError
from aviso_workers.server import NatsServer

EVENT = "reading"
LANES = 1000
NUMBERS = 10

console = Console(highlight=False, soft_wrap=True, markup=False)


class Asked(Struct, frozen=True):
    """What a replay was asked for, and what came."""

    where: dict[str, int]
    first: int
    last: int
    wanted: int
    seconds: float
    right: bool


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/replays", description="Replays of random filters, counted.")
    parser.add_argument("--count", type=int, default=1_000_000, help="notifications stored (default: 1000000)")
    parser.add_argument("--servers", type=int, choices=(1, 3), default=1, help="how many servers (default: 1)")
    parser.add_argument("--filters", type=int, default=20, help="how many filters (default: 20)")
    parser.add_argument("--seed", type=int, default=1, help="of what is random (default: 1)")
    asked = parser.parse_args()
    results: list[Asked] = []
    try:
        with (
            tempfile.TemporaryDirectory(prefix="aviso-workers-replays-") as directory,
            started(directory, asked.servers) as nodes,
        ):
            path = Path(directory) / "config.json"
            # What is connected to one of the others would lose it when that is killed.
            path.write_text(json.dumps(_config(nodes[0].url, replicas=len(nodes))))
            app = App("replays", config=path)
            anyio.run(_conduct, app, asked.count, asked.filters, random.Random(asked.seed), nodes, results)
    except (ShortfallError, AvisoWorkersError) as error:
        console.print(f"fell short: {error}")
        return 1
    finally:
        _show(results)
    if wrong := sum(not result.right for result in results):
        console.print(f"fell short: {wrong} of {len(results)} replays were not complete, or not in order")
        return 1
    console.print("as it should be: every replay was complete and in order")
    return 0


async def _conduct(
    app: App, count: int, filters: int, chance: random.Random, nodes: Sequence[NatsServer], results: list[Asked]
) -> None:
    lanes = [min(LANES, int(chance.paretovariate(0.5))) for _ in range(count)]
    async with connected(app):
        most = count * 9 // 10 if len(nodes) > 1 else count
        await _store(app, lanes[:most], first=0)
        killed = await _follower(app, nodes)
        if killed is not None:
            killed.kill()
            await _store(app, lanes[most:], first=most)
        for number in range(filters):
            if killed is not None and number == filters // 2:
                _start_again(killed)
            results.append(await _replay(app, lanes, chance))


async def _store(app: App, lanes: Sequence[int], *, first: int) -> None:
    await app.notify_many(
        Notify(EVENT, {"lane": lane, "number": position % NUMBERS}, position)
        for position, lane in enumerate(lanes, first)
    )


async def _follower(app: App, nodes: Sequence[NatsServer]) -> NatsServer | None:
    """Return a server of the cluster that does not lead the stream, and is not the one that we are connected to."""
    if len(nodes) == 1:
        return None
    leader = (await app.session.admin.stream_info(EVENT.upper())).cluster.leader
    return next(node for node in nodes[1:] if node.name != leader)


def _start_again(node: NatsServer) -> None:
    """Let it come back under the same name: under another one it would be a new member of the cluster."""
    node.process = subprocess.Popen(node.process.args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


async def _replay(app: App, lanes: Sequence[int], chance: random.Random) -> Asked:
    where = {"lane": chance.choice([chance.choice(lanes), chance.randint(1, LANES)])}
    if chance.random() < 0.3:
        where["number"] = chance.randrange(NUMBERS)
    first = chance.choice([1, chance.randint(1, len(lanes))])
    last = chance.choice([len(lanes), chance.randint(first, len(lanes))])
    wanted = [
        position
        for position in range(first - 1, last)
        if lanes[position] == where["lane"] and position % NUMBERS == where.get("number", position % NUMBERS)
    ]
    began = time.monotonic()
    async with aclosing(app.replay(EVENT, where, from_id=first, to_id=last)) as notifications:
        came = [notification.payload async for notification in notifications]
    return Asked(where, first, last, len(wanted), time.monotonic() - began, came == wanted)


def _config(url: str, *, replicas: int) -> dict[str, Any]:
    numbers = {"type": "IntHandler", "range": [0, LANES], "required": True}
    event = {
        "payload": {"required": True},
        "topic": {"base": EVENT, "key_order": ["lane", "number"]},
        "identifier": {"lane": numbers, "number": numbers},
        "storage_policy": {"allow_duplicates": True},
    }
    backend = {"nats_url": url, "replicas": replicas, "max_reconnect_attempts": 0}
    return {
        "notification_backend": {"kind": "jetstream", "jetstream": backend},
        "notification_schema": {EVENT: event},
    }


def _show(results: Sequence[Asked]) -> None:
    table = Table("where", "from", "to", "wanted", "seconds", "complete")
    for each in results:
        where = ", ".join(f"{field}={value}" for field, value in each.where.items())
        seconds, right = f"{each.seconds:.2f}", "yes" if each.right else "NO"
        table.add_row(where, f"{each.first:,}", f"{each.last:,}", f"{each.wanted:,}", seconds, right)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
