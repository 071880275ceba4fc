"""A cluster of three: whole, badly used, and with servers that were killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import anyio
import pytest
from msgspec import Struct, structs

from aviso_workers import App, config
from aviso_workers.backends import Administration
from aviso_workers.config import Config
from aviso_workers.errors import BackendError
from aviso_workers.jetstream.info import Cluster as GroupOfServers
from aviso_workers.jetstream.info import Replica
from aviso_workers.ops.doctor import State
from aviso_workers.ops.doctor.monitoring_port import OwnReplica, OwnState
from aviso_workers.ops.doctor.replicas import Looks
from aviso_workers.server import processes
from aviso_workers.server.processes import Node
from tests.ops.conftest import Run
from tests.ops.doctor.conftest import Seen, add_consumer, add_stream, examined, gathered, judged, write
from tests.waits import PATIENCE_SECONDS

SERVER = """
notification_backend: {kind: jetstream, jetstream: {replicas: 3}}
server:
  server_name: n
  server_tags: ["az:x"]
  port: 0
  monitoring: {port: 0}
  jetstream: {unique_tag: "az:", sync_interval: 10s}
"""


class Cluster(Struct, frozen=True):
    nodes: tuple[Node, ...]
    loaded: Config

    def seen(self) -> Seen:
        monitors = tuple(f"http://127.0.0.1:{node.monitoring_port}" for node in self.nodes)
        return examined(self.loaded, monitors=monitors, production=True)


@pytest.fixture(scope="module")
def cluster(directory: Path) -> Iterator[Cluster]:
    (directory / "server.yaml").write_text(SERVER)
    try:
        nodes = processes.start(config.load(directory / "server.yaml", environ={}), directory=directory, nodes=3)
        loaded = write(directory / "config.yaml", ",".join(node.url for node in nodes), reconnect_delay_ms=100)
        anyio.run(use_badly, loaded)
        yield Cluster(nodes, loaded)
    finally:
        processes.stop(directory)


async def use_badly(loaded: Config) -> None:
    """Three copies, two of them, one, and one server that leads nearly everything."""
    async with App("using", config=loaded) as app:
        server = app.session.admin.administration()
        await add_stream(server, "MARS", subjects=["mars.>"], num_replicas=3)
        await add_stream(server, "TWO", num_replicas=2)
        await add_stream(server, "ONE", num_replicas=1, placement={"tags": ["az:2"]})
        await add_consumer(server, "ONE", "reader")
        for i in range(12):
            await add_stream(server, f"S{i}", num_replicas=3)
            await lead(server, f"S{i}", leader="n-1")


async def lead(server: Administration, stream: str, *, leader: str) -> None:
    with anyio.fail_after(PATIENCE_SECONDS):
        while True:
            with suppress(BackendError):  # there is no leader just now, or it has become the leader meanwhile
                found = await server.api(f"STREAM.INFO.{stream}", timeout_seconds=1)
                if found["cluster"].get("leader") == leader:
                    return
                await server.api(f"STREAM.LEADER.STEPDOWN.{stream}", {"placement": {"preferred": leader}})
            await anyio.sleep(0.05)


@pytest.fixture(scope="module")
def whole(cluster: Cluster) -> Seen:
    return cluster.seen()


@pytest.fixture(scope="module")
def maimed(cluster: Cluster, whole: Seen) -> Seen:
    """Once the others know that one was killed, which takes them some seconds."""
    os.kill(cluster.nodes[1].pid, signal.SIGKILL)

    async def until_it_shows() -> Seen:
        monitors = tuple(f"http://127.0.0.1:{node.monitoring_port}" for node in cluster.nodes)
        with anyio.fail_after(PATIENCE_SECONDS):
            while True:
                seen = judged(await gathered(cluster.loaded, monitors=monitors))
                if "n-2" in seen.found("JS017").get("MARS", ""):
                    return seen

    return anyio.run(until_it_shows)


@pytest.mark.slow
def test_a_whole_cluster(whole: Seen) -> None:
    well = ("JS017", "JS041", "JS044", "JS045", "JS049")
    assert {code: whole.state(code) for code in well} == dict.fromkeys(well, State.PASS)
    assert "MARS" not in whole.found("JS003")
    assert "MARS" not in whole.found("JS043")


@pytest.mark.covers("004-29")
def test_an_even_number_of_servers(whole: Seen) -> None:
    assert whole.state("JS062") is State.PASS
    first, *others = whole.facts.monitored
    jetstream = first.varz.jetstream
    assert jetstream.meta is not None
    four = structs.replace(jetstream, meta=structs.replace(jetstream.meta, cluster_size=4))
    first = structs.replace(first, varz=structs.replace(first.varz, jetstream=four))
    seen = judged(structs.replace(whole.facts, monitored=(first, *others)))
    assert seen.found("JS062") == {"": "the meta group has 4 servers"}


@pytest.mark.covers("001-15")
def test_an_even_number_of_copies(whole: Seen) -> None:
    assert whole.found("JS004") == {"TWO": "num_replicas 2"}


def test_one_server_that_leads_nearly_everything(whole: Seen) -> None:
    assert whole.found("JS018").keys() == {"n-1"}
    down = {
        name: structs.replace(stream, cluster=structs.replace(stream.cluster, replicas=(OFFLINE,)))
        for name, stream in whole.facts.streams.items()
    }
    one_is_down = structs.replace(whole.facts, after=structs.replace(whole.facts.after, streams=down))
    assert judged(one_is_down).state("JS018") is State.PASS, "its leaders come back with it"
    spread = {
        name: structs.replace(stream, cluster=structs.replace(stream.cluster, leader=f"n-{i % 3 + 1}"))
        for i, (name, stream) in enumerate(whole.facts.streams.items())
    }
    after = structs.replace(whole.facts.after, streams=spread, consumers={})
    assert judged(structs.replace(whole.facts, after=after)).state("JS018") is State.PASS


OFFLINE = Replica(name="n-3", offline=True)


def test_two_copies_in_one_place(whole: Seen) -> None:
    """By hand: a server with unique_tag makes no such stream, but keeps what was made before."""
    first, second, third = whole.facts.monitored
    moved = structs.replace(second, varz=structs.replace(second.varz, tags=first.varz.tags))
    found = judged(structs.replace(whole.facts, monitored=(first, moved, third))).found("JS045")
    assert found["MARS"] == "n-1 and n-2 are both az:1"


@pytest.mark.parametrize(
    ("replica", "found"),
    [
        (Replica(name="n-3", current=True, lag=5000), "n-3 is 5000 entries behind"),
        (Replica(name="n-3", current=True, active=60 * 10**9), "n-3 was last active 60 s ago"),
        (Replica(name="n-3", offline=True), "n-3 is offline"),
    ],
)
def test_a_copy_that_is_behind(whole: Seen, replica: Replica, found: str) -> None:
    """By hand: on one machine a copy catches up before anybody looks."""
    mars = whole.facts.streams["MARS"]
    behind = structs.replace(mars, cluster=structs.replace(mars.cluster, replicas=(replica,)))
    after = structs.replace(whole.facts.after, streams={"MARS": behind})
    assert judged(structs.replace(whole.facts, before=after, after=after)).found("JS017") == {"MARS": found}
    once = structs.replace(whole.facts, after=after)
    assert judged(once).found("JS017") == {}, "a copy of a busy stream is behind for moments"
    later = structs.replace(whole.facts, before=after, after=after, later=(whole.facts.before,))
    assert judged(later).found("JS017") == {}


def test_a_copy_of_a_bucket_is_not_judged_by_the_number_of_its_messages(whole: Seen) -> None:
    """By hand: a follower's copy has not got the last message."""

    def copy(last: int) -> OwnReplica:
        followers = (Replica(name="n-2", current=True),)
        cluster = GroupOfServers(leader="n-1", replicas=followers)
        state = OwnState(messages=1, first_seq=last, last_seq=last)
        return OwnReplica(name="KV_leases", created=datetime(2026, 1, 1, tzinfo=UTC), cluster=cluster, state=state)

    look = {"n-1": {"KV_leases": copy(7)}, "n-2": {"KV_leases": copy(6)}}
    seen = judged(structs.replace(whole.facts, looks=Looks(before=look, after=look)))
    assert "the number of messages does not say which replica is right" in seen.findings("JS072")["KV_leases"].cure


@pytest.mark.slow
@pytest.mark.covers("004-32")
def test_one_server_that_was_killed(cluster: Cluster, maimed: Seen) -> None:
    assert maimed.state("JS017") is State.FAIL
    assert "n-2" in maimed.found("JS017")["MARS"]
    dead = f"http://127.0.0.1:{cluster.nodes[1].monitoring_port}"
    assert "no answer of a nats-server" in maimed.found("JS044")[dead]
    assert maimed.found("JS049")["n-1"] == "connected to n-3, in a cluster of 3 servers"
    assert maimed.state("JS042") is State.PASS
    assert maimed.state("JS053") is not State.PASS  # n-2 is not seen


def test_streams_of_the_others_are_told_of_beside_one_that_went_down_with_its_server(maimed: Seen) -> None:
    """A cluster waits for 4 s for what is on that server, and then lists the others."""
    assert "streams" not in maimed.facts.unknown
    assert maimed.found("JS017")["ONE"] == "no server answers for it: it has no leader"
    leaderless = [where for where, found in maimed.found("JS017").items() if "no server answers" in found]
    assert set(leaderless) - {"TWO"} == {"ONE"}, "TWO has no quorum where one of its two replicas was there"


@pytest.mark.parametrize("command", ["streams ls", "report streams", "consumers ls"])
@pytest.mark.slow
def test_commands_that_list_tell_what_went_down_with_its_server(
    directory: Path, run: Run, maimed: Seen, command: str
) -> None:
    listed = run(*command.split(), "--config", directory / "config.yaml")
    assert listed.code == 1
    assert listed.err.splitlines()[0] == "ONE: no server answers for it, so that it is not shown"


@pytest.mark.slow
def test_the_consumers_of_a_stream_that_went_down_with_its_server(directory: Path, run: Run, maimed: Seen) -> None:
    listed = run("consumers", "ls", "ONE", "--config", directory / "config.yaml")
    lines = [f"{name}: no server answers for it, so that it is not shown" for name in ("ONE", "ONE > reader")]
    assert (listed.code, listed.err.splitlines()) == (1, lines)


@pytest.mark.slow
def test_an_app_is_not_retired_by_halves(directory: Path, run: Run, maimed: Seen) -> None:
    refused = run("agents", "rm", "fields", "--config", directory / "config.yaml")
    assert (refused.code, "no server answers for ONE" in refused.err) == (1, True)


def test_the_monitoring_port_of_a_server_that_was_killed_is_not_asked_for(maimed: Seen) -> None:
    """It was given."""
    told = [finding.found for result in maimed.results.values() for finding in result.findings]
    assert any("no monitoring port of n-2" in found for found in told)
    assert not any("give --monitor" in found for found in told)


@pytest.mark.slow
def test_two_servers_that_were_killed(cluster: Cluster, maimed: Seen) -> None:
    """What is left may still answer, from what it remembers, or not at all: neither is taken for health."""
    os.kill(cluster.nodes[2].pid, signal.SIGKILL)
    seen = cluster.seen()
    dead = {f"http://127.0.0.1:{node.monitoring_port}" for node in cluster.nodes[1:]}
    assert dead < seen.findings("JS044").keys()
    assert seen.state("JS017") in (State.FAIL, State.SKIP)
    assert "MARS" in seen.found("JS017") or "streams" in seen.facts.unknown
