"""Whole deployments: the demo's, and a cluster for production before and after somebody was at it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import create_task_group
from msgspec import Struct, structs

from aviso_workers import App, Notification, Notify, Reject, Router, config
from aviso_workers.backends import Administration
from aviso_workers.config import Config
from aviso_workers.events import Settled
from aviso_workers.ops import stream_policy
from aviso_workers.ops.doctor import State
from aviso_workers.ops.doctor.checks import servers
from aviso_workers.ops.doctor.facts import Facts
from aviso_workers.server import NatsServer, processes, profiles
from aviso_workers.server.processes import Node
from tests.ops.doctor.conftest import (
    SECOND,
    Seen,
    add_consumer,
    add_stream,
    between_samples,
    examined,
    gathered,
    judged,
    publish,
    pull,
)
from tests.ops.doctor.test_clients import back_up
from tests.waits import PATIENCE_SECONDS

DEMO = Path(__file__).parents[3] / "config" / "dev.yaml"
MARS = {"class": "od", "expver": "0001", "domain": "g", "date": "20261120", "time": "0000", "stream": "oper"}

PRODUCTION = """
notification_backend:
  kind: jetstream
  jetstream:
    nats_url: [{urls}]
    user: worker
    password: hush
    replicas: 3
    max_bytes: 1000000
    retention_time: 30d
    max_reconnect_attempts: 0
notification_schema:
  mars:
    topic: {{base: mars, key_order: [class]}}
    identifier: {{class: {{type: StringHandler, required: true}}}}
    storage_policy: {{allow_duplicates: true}}
workers:
  dead_letters: {{max_bytes: 1Mi}}
server:
  server_name: n
  server_tags: ["az:x"]
  port: 0
  monitoring: {{port: 0}}
  cluster: {{routes: ["n1.example.org:6222", "n2.example.org:6222", "n3.example.org:6222"]}}
  jetstream:
    store_dir: {store_dir}
    max_memory_store: 64Mi
    max_file_store: 100Mi
    unique_tag: "az:"
    encryption: {{key: hush}}
  accounts:
    SYSTEM: {{users: {{admin: {{password: hush}}}}}}
    DATA:
      jetstream: {{max_storage: 50Mi, max_memory: 1Mi, max_streams: 100, max_consumers: 100}}
      users: {{worker: {{password: hush}}}}
  system_account: SYSTEM
"""

WHOLE = {"num_replicas": 3, "max_bytes": 100_000, "max_age": 3600 * SECOND}

router = Router("fields")


@router.agent("mars", concurrency=16)
async def index(notification: Notification[Any]) -> None:
    if notification.payload == "nonsense":
        raise Reject("no such field")


async def work_on(loaded: Config, notifications: list[Notify]) -> None:
    """Publish notifications, and let the agent handle them."""
    app, stop, done = App("field", config=loaded), anyio.Event(), anyio.Semaphore(0)
    app.include(router)
    app.events.listen(lambda _: done.release(), Settled)
    async with app, create_task_group() as working:
        working.start_soon(app._work, stop)
        await app.notify_many(notifications)
        with anyio.fail_after(PATIENCE_SECONDS):
            for _ in notifications:
                await done.acquire()
        stop.set()


def test_the_demos_deployment(tmp_path: Path) -> None:
    with NatsServer.start(store_dir=tmp_path) as server:
        url = {"AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__NATS_URL": server.url}
        loaded = config.load(DEMO, environ=url)
        assert examined(loaded).state("JS042") is State.PASS, "nothing was published yet"
        anyio.run(apply, loaded)
        good, bad = Notify("mars", {**MARS, "step": "0"}, "field"), Notify("mars", {**MARS, "step": "6"}, "nonsense")
        anyio.run(work_on, loaded, [good, bad])
        seen = examined(loaded, agents=tuple(router.agents), app="field")
    assert seen.found("JS057") == {"field, agent index > field__index": "1 dead letters"}
    assert {code for code, state in seen.wrong.items() if state is State.FAIL} == set()
    assert seen.state("JS043") is State.SKIP  # it has no monitoring port; what is certain is told all the same
    told = {each.stream: str(each) for each in servers.durabilities(seen.facts)}
    assert told["MARS"].startswith("all messages are lost if the server's disk fails; sync_interval is not known")


async def apply(loaded: Config) -> None:
    async with App("applying", config=loaded) as applying:
        for plan in await stream_policy.plans(applying.session.admin, applying.config):
            await stream_policy.carry_out(applying.session.admin, applying.config, plan)


class Cluster(Struct, frozen=True):
    loaded: Config
    monitors: tuple[str, ...]
    backups: Path

    def seen(self) -> Seen:
        return judged(anyio.run(self.gather))

    async def gather(self) -> Facts:
        async with App("measuring", config=self.loaded) as measuring:
            server = measuring.session.admin.administration()
            async with between_samples(server, lambda: measure(server)):
                return await gathered(
                    self.loaded,
                    monitors=self.monitors,
                    backups=self.backups,
                    agents=tuple(router.agents),
                    app="field",
                    production=True,
                    seconds=1.0,
                )


async def measure(server: Administration) -> None:
    """Acknowledge a message of a consumer that is sampled, between the samples."""
    await publish(server, "MEASURED", 1)
    for reply in await pull(server, "MEASURED", "sampled", 1):
        server.send(reply, b"+ACK")


@pytest.fixture(scope="module")
def production(directory: Path) -> Iterator[Cluster]:
    """As `server render --profile production` chooses, of three servers on this machine, with agents that worked."""
    with tempfile.TemporaryDirectory(prefix=".aviso-workers-", dir=Path.home()) as store_dir:  # not a temporary one
        try:
            nodes = start(directory, Path(store_dir))
            loaded = load(directory, Path(store_dir), nodes)
            anyio.run(apply, loaded)
            anyio.run(work_on, loaded, [Notify("mars", {"class": "od"}, "field")] * 2)
            anyio.run(sample, loaded)
            back_up(directory / "backups", "MARS")
            anyio.run(hear_of_all_requests, loaded)
            monitors = tuple(f"http://127.0.0.1:{node.monitoring_port}" for node in nodes)
            yield Cluster(loaded, monitors, directory / "backups")
        finally:
            processes.stop(directory)


def start(directory: Path, store_dir: Path) -> tuple[Node, ...]:
    loaded = load(directory, store_dir, ())
    server, _ = profiles.choose(loaded, profile="production")
    return processes.start(structs.replace(loaded, server=server), directory=directory, nodes=3, detached=False)


def load(directory: Path, store_dir: Path, nodes: tuple[Node, ...]) -> Config:
    file = directory / "production.yaml"
    urls = ", ".join(node.url for node in nodes) or "nats://127.0.0.1:4222"
    file.write_text(PRODUCTION.format(urls=urls, store_dir=store_dir))
    return config.load(file, environ={})


async def hear_of_all_requests(loaded: Config) -> None:
    """Wait until the servers have told each other what they were asked so far.

    They tell it together with what they store, so it is known where all of a new message is.
    """
    async with App("settling", config=loaded) as settling:
        server = settling.session.admin.administration()
        await measure(server)
        with anyio.fail_after(PATIENCE_SECONDS):
            while (await server.api("INFO"))["storage"] != await stored(server):  # noqa: ASYNC110
                await anyio.sleep(0.05)


async def stored(server: Administration) -> int:
    """Bytes of all replicas, by what the leaders have."""
    streams = (await server.api("STREAM.LIST"))["streams"]
    return sum(each["state"]["bytes"] * each["config"]["num_replicas"] for each in streams)


async def sample(loaded: Config) -> None:
    async with App("sampling", config=loaded) as sampling:
        server = sampling.session.admin.administration()
        await add_stream(server, "MEASURED", **WHOLE)
        patient = {"backoff": [SECOND, 5 * SECOND], "max_deliver": 20}
        await add_consumer(server, "MEASURED", "sampled", sample_freq="100", **patient)
        given_up = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.MEASURED.sampled"
        await add_stream(server, "GIVEN_UP", **{**WHOLE, "subjects": [given_up]})


@pytest.mark.slow
def test_a_cluster_for_production(production: Cluster) -> None:
    seen = production.seen()
    assert {code: [str(each) for each in seen.results[code].findings] for code in seen.wrong} == {}
    (mars,) = [str(each) for each in servers.durabilities(seen.facts) if each.stream == "MARS"]
    assert mars == (
        "survives the loss of 1 of its 3 servers; "
        "a power cut of 2 of its 3 servers at once loses up to 10s of acknowledged messages"
    )


@pytest.mark.slow
def test_a_cluster_that_was_broken_in_ten_ways(production: Cluster) -> None:
    before = production.seen()
    anyio.run(break_in_ten_ways, production.loaded)
    seen = production.seen()
    found = {(code, finding.stream): finding for code in seen.wrong for finding in seen.results[code].findings}
    new = found.keys() - {(code, finding.stream) for code in before.wrong for finding in before.results[code].findings}
    follows = {("JS043", "ALONE"), ("JS003", "TWO")}  # one copy stands no power cut, and two are not three
    assert new == {*BROKEN, *follows}
    assert {where: found[where].cure for where in BROKEN if BROKEN[where] not in found[where].cure} == {}


BROKEN = {
    ("JS002", "ENDLESS"): "streams.ENDLESS.max_age",
    ("JS003", "ALONE"): "streams.ALONE.num_replicas: 3",
    ("JS004", "TWO"): "streams.TWO.num_replicas: 3",
    ("JS005", "MEMORY"): "aviso-workers backup create MEMORY",
    ("JS006", "FULL"): "streams.FULL.max_bytes",
    ("JS008", "UNHEARD"): "Start the consumers before the publishers",
    ("JS010", "CRITICAL"): "streams.CRITICAL.deny_delete and deny_purge",
    ("JS011", "PEOPLE"): "aviso-workers streams rm PEOPLE",
    ("JS013", "MARS"): "aviso-workers streams apply",
    ("JS019", "ORPHAN"): "aviso-workers streams info ORPHAN",
}
"""What is broken, and the cure."""


async def break_in_ten_ways(loaded: Config) -> None:
    async with App("breaking", config=loaded) as breaking:
        server = breaking.session.admin.administration()
        await add_stream(server, "ENDLESS", **{**WHOLE, "max_age": 0})
        await add_stream(server, "ALONE", **{**WHOLE, "num_replicas": 1})
        await add_stream(server, "TWO", **{**WHOLE, "num_replicas": 2})
        await add_stream(server, "MEMORY", **WHOLE, storage="memory")
        await add_stream(server, "FULL", **WHOLE, max_msgs=2, discard="new")
        await publish(server, "FULL", 2)
        await add_stream(server, "UNHEARD", **WHOLE, retention="interest")
        await add_stream(server, "CRITICAL", **WHOLE, metadata={"critical": "true"})
        await add_stream(server, "PEOPLE", **WHOLE, metadata={"pii": "true"}, deny_delete=True)
        mars = (await server.api("STREAM.INFO.MARS"))["config"]
        await server.api("STREAM.UPDATE.MARS", {**mars, "max_bytes": 900_000})
        far = {"name": "FAR", "external": {"api": "$JS.nowhere.API"}}
        await add_stream(server, "ORPHAN", **WHOLE, subjects=None, sources=[far])
