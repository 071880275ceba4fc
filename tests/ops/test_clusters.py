"""Copies on three servers: which server leads, whose copy is removed, and which servers may hold one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from aviso_workers import App, Counter, Notification, RetryPolicy, Table, Tick
from aviso_workers.server import processes
from aviso_workers.server.processes import Node
from tests.ops.conftest import Api, Declare, Run
from tests.server.conftest import load_server
from tests.waits import PATIENCE_SECONDS

Make = Callable[..., Path]


@pytest.fixture
def url(nodes: tuple[Node, ...]) -> str:
    return nodes[0].url


@pytest.fixture
def make(run: Run, declare: Declare) -> Make:
    """`make("ORDERS", num_replicas=3)`: the stream, with the consumer shipping; the configuration that has it."""

    def make(name: str, **settings: Any) -> Path:
        stream = {"subjects": [f"{name.lower()}.>"], "consumers": {"shipping": {}}, **settings}
        config = declare({name: stream}, replicas=3)
        ran = run("streams", "apply", "--config", config)
        assert ran.code == 0, ran
        return config

    return make


@pytest.fixture
def holders(api: Api) -> Callable[[str], set[str]]:
    """`holders("ORDERS")`: which servers hold a copy."""

    def holders(stream: str) -> set[str]:
        cluster = api(f"STREAM.INFO.{stream}")["cluster"]
        return {cluster.get("leader"), *(replica["name"] for replica in cluster.get("replicas") or ())}

    return holders


@pytest.mark.covers("002-39")
def test_another_server_leads_the_stream_then_the_one_that_is_preferred(run: Run, make: Make, api: Api) -> None:
    config = make("ORDERS", num_replicas=3)
    before = api("STREAM.INFO.ORDERS")["cluster"]["leader"]
    ran = run("streams", "step-down", "ORDERS", "--config", config)
    after = api("STREAM.INFO.ORDERS")["cluster"]["leader"]
    assert (ran.code, ran.out) == (0, f"ORDERS: {after} leads\n"), ran
    assert after != before
    ran = run("streams", "step-down", "ORDERS", "--prefer", before, "--config", config)
    assert (ran.code, ran.out) == (0, f"ORDERS: {before} leads\n"), ran


def test_another_server_leads_the_consumer(run: Run, make: Make, api: Api) -> None:
    config = make("RETURNS", num_replicas=3)
    before = api("CONSUMER.INFO.RETURNS.shipping")["cluster"]["leader"]
    preferred = next(name for name in ("n-1", "n-2", "n-3") if name != before)
    command = ("streams", "step-down", "RETURNS", "--consumer", "shipping", "--prefer", preferred)
    ran = run(*command, "--config", config)
    assert (ran.code, ran.out) == (0, f"RETURNS shipping: {preferred} leads\n"), ran


@pytest.mark.slow
def test_a_server_gives_up_its_copy_and_another_makes_one(
    run: Run, make: Make, holders: Callable[[str], set[str]]
) -> None:
    config = make("CLAIMS", num_replicas=2)
    before = holders("CLAIMS")
    (spare,) = {"n-1", "n-2", "n-3"} - before
    leaving = min(before)
    asked = run("streams", "remove-peer", "CLAIMS", leaving, "--config", config)
    assert (asked.code, leaving in asked.out, "--yes" in asked.err) == (2, True, True), asked
    ran = run("streams", "remove-peer", "CLAIMS", leaving, "--yes", "--config", config)
    assert ran.code == 0, ran
    assert processes.eventually(lambda: holders("CLAIMS") == before - {leaving} | {spare}, PATIENCE_SECONDS), holders(
        "CLAIMS"
    )


def test_no_server_gives_up_a_copy_that_no_other_can_make(run: Run, make: Make) -> None:
    config = make("REFUNDS", num_replicas=3)
    ran = run("streams", "remove-peer", "REFUNDS", "n-1", "--yes", "--config", config)
    told = "n-1 keeps its copy of REFUNDS, because no other server can have it", "stop n-1, empty its store directory"
    assert (ran.code, [text in ran.err for text in told]) == (1, [True, True]), ran


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_stream_lives_where_its_tags_are(make: Make, holders: Callable[[str], set[str]], number: int) -> None:
    make(f"PLACED{number}", num_replicas=1, placement={"tags": [f"az{number}"]})
    assert holders(f"PLACED{number}") == {f"n-{number}"}


@pytest.mark.covers("002-12", "002-22", "002-38", "002-40")
def test_more_copies_are_made_and_given_up(make: Make, holders: Callable[[str], set[str]]) -> None:
    def are_held(copies: int) -> bool:
        return len(holders("SCALED")) == copies

    for copies in (1, 3, 1):
        make("SCALED", num_replicas=copies)
        assert processes.eventually(partial(are_held, copies), PATIENCE_SECONDS), holders("SCALED")


def test_tags_that_no_server_has_are_told(run: Run, declare: Declare) -> None:
    config = declare({"NOWHERE": {"subjects": ["nowhere.>"], "placement": {"tags": ["moon"]}}}, replicas=3)
    ran = run("streams", "apply", "--config", config)
    assert (ran.code, "no suitable peers for placement" in ran.err) == (1, True), ran


def test_the_servers_of_a_stream_are_listed(run: Run, make: Make, api: Api) -> None:
    config = make("LISTED", num_replicas=3)
    ran = run("streams", "ls", "--json", "--config", config)
    (row,) = (row for row in map(json.loads, ran.lines) if row["stream"] == "LISTED")
    assert (row["leader"], row["replicas"]) == (api("STREAM.INFO.LISTED")["cluster"]["leader"], 3)


@pytest.mark.covers("003-11")
def test_a_client_need_not_know_which_server_holds_a_stream(
    run: Run, make: Make, publish: Callable[..., dict[str, Any]]
) -> None:
    config = make("AWAY", num_replicas=1, placement={"tags": ["az3"]})  # we are connected to n-1
    assert publish("away.1") == {"stream": "AWAY", "seq": 1}
    assert run("streams", "get", "AWAY", "1", "--config", config).code == 0


@pytest.mark.covers("002-69", "002-70", "002-71", "002-76", "002-77", "004-47", "004-48")
def test_the_monitoring_port_tells_of_accounts_streams_and_consumers(make: Make, nodes: tuple[Node, ...]) -> None:
    make("WATCHED", num_replicas=3)
    told = processes.ask(nodes[0], "/jsz?accounts=true&streams=true&consumers=true&config=true")
    assert {"memory", "storage", "reserved_memory", "reserved_storage", "api", "ha_assets", "meta_cluster"} <= set(told)
    streams = {stream["name"]: stream for stream in told["account_details"][0]["stream_detail"]}
    assert streams["WATCHED"]["config"]["num_replicas"] == 3
    assert [consumer["name"] for consumer in streams["WATCHED"]["consumer_detail"]] == ["shipping"]
    assert len(processes.ask(nodes[0], "/routez")["routes"]) > 0


OWN = (
    *("aviso_workers_counters__copies", "aviso_workers_dead_letters__copies", "aviso_workers_retries__copies"),
    *("aviso_workers_schedule__MARS", "KV_copies__state", "KV_copies__table__sizes", "KV_copies__failures"),
    *("KV_copies__leases", "KV_copies__timers"),
)
"""What the app of `at_work` keeps beside the streams of its event types."""


@asynccontextmanager
async def at_work(config: Path) -> AsyncIterator[App]:
    """An app whose worker runs: with an agent that handles nothing, a timer and tables."""
    app = App("copies", config=config)
    app.table("sizes", int)
    app.counter("seen")

    @app.agent("mars", retry=RetryPolicy(attempts=2, first=0.1))
    async def fail(notification: Notification[Any]) -> None:
        raise ValueError("whatever it is")

    @app.every("1s", singleton=True)
    async def look(tick: Tick) -> None: ...

    stop = anyio.Event()
    async with app, anyio.create_task_group() as tasks:
        tasks.start_soon(app._work, stop)
        yield app
        stop.set()


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_worker_that_begins_gives_its_own_streams_the_copies_that_are_configured_and_takes_none(
    write_config: Callable[..., Path], url: str
) -> None:
    async def copies(app: App) -> dict[str, int]:
        there = set(OWN) & set(await app.session.admin.stream_names())
        return {name: (await app.session.backend.stream_info(name)).config["num_replicas"] for name in there}

    async def become(app: App, number: int) -> None:
        with anyio.move_on_after(PATIENCE_SECONDS):
            while await copies(app) != dict.fromkeys(OWN, number):  # noqa: ASYNC110
                await anyio.sleep(0.05)
        assert await copies(app) == dict.fromkeys(OWN, number)

    async with at_work(write_config(url)) as app:
        await app.notify("mars", {"class": "od", "step": 1})
        sizes, seen = app.tables["sizes"], app.tables["seen"]
        assert isinstance(sizes, Table)
        assert isinstance(seen, Counter)
        await sizes.put("od", 1)
        await seen.add("od", 1)
        await become(app, 1)
    async with at_work(write_config(url, replicas=3)) as app:
        await become(app, 3)
    async with at_work(write_config(url, replicas=1)) as app:
        await app.notify("mars", {"class": "od", "step": 2}, due=0.1)
        seen = app.tables["seen"]
        assert isinstance(seen, Counter)
        await seen.add("od", 1)
        assert await copies(app) == dict.fromkeys(OWN, 3)  # another app may have asked for them


@pytest.mark.slow
@pytest.mark.covers("001-14")
def test_five_copies_stand_the_loss_of_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_config: Callable[..., Path], run: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load_server(tmp_path / "five.yaml", "server_name: n\nport: 0\nmonitoring: {port: 0}", replicas=5)
    nodes = processes.start(loaded, directory=tmp_path / "five", nodes=5, detached=False)
    try:
        config = write_config(",".join(node.url for node in nodes), replicas=5)
        assert run("notify", "mars", "class=od", "step=1", "--config", config).code == 0
        for node in nodes[:2]:
            os.kill(node.pid, signal.SIGKILL)
        assert run("notify", "mars", "class=od", "step=2", "--config", config).code == 0
        assert len(run("replay", "mars", "--config", config).lines) == 2
    finally:
        processes.stop(tmp_path / "five")
