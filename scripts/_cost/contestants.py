"""The processes that are counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
from msgspec import structs

from _bench import filling
from _bench.ground import CONFIG, NATS_URL_VARIABLE
from _cost.callgrind import Process
from _demo.children import free_port
from aviso_workers import App, config
from aviso_workers.server import NatsServer

STORED = 8_000
"""How many notifications the stream has that agents handle and readers read: there are more to come at the end."""
COUNTED = 2_000
FEWER = 500
"""Where one costs so much that the count is exact enough."""


def _worker(app: str) -> tuple[str, ...]:
    return ("-m", "aviso_workers", "worker", f"_cost.agents:{app}", "--config", str(CONFIG))


PURE = {"AVISO_WORKERS_PURE": "1"}
OURS = {
    "agent": Process(arguments=_worker("one"), notifications=COUNTED),
    "agent_pure": Process(arguments=_worker("one"), notifications=COUNTED, environment=PURE),
    "batch": Process(arguments=_worker("batch"), notifications=2 * COUNTED),
    "batch_pure": Process(arguments=_worker("batch"), notifications=2 * COUNTED, environment=PURE),
    "ordered": Process(arguments=_worker("ordered"), notifications=COUNTED),
    "failing": Process(arguments=_worker("failing"), notifications=FEWER),
    "notify": Process(arguments=("-m", "_cost.ours", "notify"), notifications=FEWER),
    "notify_many": Process(arguments=("-m", "_cost.ours", "notify_many"), notifications=COUNTED),
    "replay": Process(arguments=("-m", "_cost.ours", "replay"), notifications=COUNTED),
    "help": Process(arguments=("-m", "aviso_workers", "--help"), notifications=1, whole=True),
    "start": Process(arguments=_worker("first"), notifications=1, whole=True),
}
"""By name, what is counted of ours: what one notification costs, and a process as a whole. Those that are pure are
without the functions in C."""
RIVALS = {
    "callback": Process(arguments=("-m", "_cost.nats_py", "callback"), notifications=COUNTED),
    "publish": Process(arguments=("-m", "_cost.nats_py", "publish"), notifications=FEWER),
    "publish_many": Process(arguments=("-m", "_cost.nats_py", "publish_many"), notifications=COUNTED),
    "ordered_callback": Process(arguments=("-m", "_cost.nats_py", "ordered"), notifications=COUNTED),
}
"""By name, the same with nats-py."""


@contextmanager
def filled(directory: Path) -> Iterator[dict[str, str]]:
    """Run a server with a full stream, and yield the environment of processes that use it."""
    with NatsServer.start(store_dir=directory / "nats") as server:
        settings = {NATS_URL_VARIABLE: server.url}
        app = App("fill", config=config.load(CONFIG, environ=settings))
        anyio.run(lambda: filling.fill(server.url, app, count=STORED))
        yield settings | {"AVISO_WORKERS_CONFIG_FILE": str(CONFIG), "COST_NATS_URL": server.url}


def process(name: str) -> Process:
    """Return the process of that name; a worker has a status port of its own."""
    found = (OURS | RIVALS)[name]
    if "worker" not in found.arguments:
        return found
    return structs.replace(found, arguments=(*found.arguments, "--status-port", str(free_port())))
