"""Replicas that have lost messages which their leader has, and clocks of servers that are wrong."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import pytest
from msgspec import structs

from aviso_workers import App, config
from aviso_workers.config import Config
from aviso_workers.errors import UnavailableError
from aviso_workers.jetstream.info import Cluster, Replica
from aviso_workers.ops.doctor import State, replicas
from aviso_workers.ops.doctor.facts import Facts
from aviso_workers.ops.doctor.monitoring_port import OwnReplica, OwnState
from aviso_workers.ops.doctor.replicas import Look, Looks
from aviso_workers.server import processes
from aviso_workers.server.processes import Node
from tests.ops.doctor.conftest import Seen, add_stream, examined, judged, publish, write
from tests.waits import PATIENCE_SECONDS

SERVER = """
notification_backend: {kind: jetstream, jetstream: {replicas: 3}}
server: {server_name: n, port: 0, monitoring: {port: 0}}
"""
CREATED = datetime(2026, 1, 1, tzinfo=UTC)
FOLLOWERS = (Replica(name="n-2", current=True), Replica(name="n-3", current=True))
WHOLE = (440, 1, 440)


class Broken:
    """A cluster of three, and the server whose replica of MARS lost its first block of messages."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        (directory / "server.yaml").write_text(SERVER)
        self._config = config.load(directory / "server.yaml", environ={})
        self.nodes = self._start()
        self.loaded = write(directory / "config.yaml", ",".join(node.url for node in self.nodes))
        leader = anyio.run(_fill, self.loaded)
        self.leader = next(node for node in self.nodes if node.name == leader)
        self.node = next(node for node in self.nodes if node.name != leader)
        self._kill()
        oldest = min((self.store / "msgs").glob("*.blk"), key=lambda block: int(block.stem))
        oldest.unlink()
        self._start()

    @property
    def store(self) -> Path:
        return next(self.node.directory.glob("**/streams/MARS"))

    def copy_anew(self) -> None:
        """Do what the cure says."""
        self._kill()
        shutil.rmtree(self.store)
        self._start()

    def seen(self) -> Seen:
        return examined(self.loaded, monitors=tuple(f"http://127.0.0.1:{node.monitoring_port}" for node in self.nodes))

    def _start(self) -> tuple[Node, ...]:
        return processes.start(self._config, directory=self._directory, nodes=3)

    def _kill(self) -> None:
        os.kill(self.node.pid, signal.SIGKILL)
        assert processes.eventually(self._is_down, PATIENCE_SECONDS)

    def _is_down(self) -> bool:
        return next(each for each in processes.states(self._directory) if each.node.name == self.node.name).pid is None


async def _fill(loaded: Config) -> str:
    """Store more than a block of messages, and return the leader."""
    async with App("using", config=loaded) as app:
        server = app.session.admin.administration()
        await add_stream(server, "MARS", subjects=["MARS.>"], num_replicas=3)
        await publish(server, "MARS", 20, size=900_000)
        return (await app.session.admin.stream_info("MARS")).cluster.leader


@pytest.fixture(scope="module")
def broken(directory: Path) -> Iterator[Broken]:
    try:
        yield Broken(directory)
    finally:
        processes.stop(directory)


@pytest.mark.slow
def test_a_read_by_a_replica_that_lost_messages_fails_instead_of_leaving_them_out(broken: Broken) -> None:
    """The servers choose which replica serves a read."""

    async def read(app: App, *, last: int) -> list[int]:
        found = app.session.backend.read(
            "MARS", filter_subjects=("MARS.>",), start_sequence=1, start_time=None, last_sequence=last
        )
        return [message.sequence async for message in found]

    async def read_until_three_fail() -> list[str]:
        errors: list[str] = []
        async with App("reading", config=broken.loaded) as app:
            with anyio.fail_after(PATIENCE_SECONDS):
                for last in itertools.cycle((3, 12)):
                    try:
                        assert await read(app, last=last) == list(range(1, last + 1))
                    except UnavailableError as error:
                        errors.append(str(error))
                    if len(errors) == 3:
                        break
        return errors

    lacks = f"the replica of MARS on {broken.node.name} lacks messages that the leader of the stream has, such as"
    assert all(error.startswith(f"{lacks} sequence 1 ") for error in anyio.run(read_until_three_fail))


@pytest.mark.slow
def test_a_replica_that_lost_messages_is_found_and_the_cure_copies_it_anew(broken: Broken) -> None:
    seen = broken.seen()
    assert seen.state("JS072") is State.FAIL
    found = seen.found("JS072")["MARS"]
    assert f"{broken.leader.name}, the leader, has 20 messages, from 1 to 20; " in found
    assert f"{broken.node.name} has 11 messages, from 10 to 20" in found
    assert seen.state("JS017") is State.PASS, "the leader calls it current"

    broken.copy_anew()

    assert processes.eventually(lambda: broken.seen().state("JS072") is State.PASS, PATIENCE_SECONDS)


@pytest.mark.slow
def test_a_server_that_does_not_tell_our_account_is_not_taken_for_well(broken: Broken) -> None:
    """By hand."""
    assert judged(structs.replace(broken.seen().facts, looks=None)).state("JS072") is State.SKIP


@pytest.mark.slow
def test_clocks_that_agree(broken: Broken) -> None:
    assert broken.seen().state("JS073") is State.PASS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ahead", "found", "state"),
    [
        ((7200, 0, 0.2), {"n-1": "its clock is 7200 s ahead of the clock of this machine"}, State.FAIL),
        ((0, -8, 0), {"n-2": "its clock is 8 s behind the clock of this machine"}, State.WARN),
        ((0, 2, -2), {}, State.PASS),
        ((-300, -300, -300), {"this machine": "its clock is 300 s ahead of the other clocks"}, State.FAIL),
    ],
)
def test_a_clock_that_is_wrong(broken: Broken, ahead: tuple[float, ...], found: dict[str, str], state: State) -> None:
    """By hand: all servers of the test have one clock."""
    seen = judged(with_clocks(broken.seen().facts, ahead))
    assert (seen.found("JS073"), seen.state("JS073")) == (found, state)


@pytest.mark.slow
def test_an_answer_that_took_long_is_not_taken_for_a_wrong_clock(broken: Broken) -> None:
    slow = with_clocks(broken.seen().facts, (4, 0, 0), uncertain_seconds=4)
    assert judged(slow).state("JS073") is State.PASS


def with_clocks(facts: Facts, ahead: tuple[float, ...], *, uncertain_seconds: float = 0.0) -> Facts:
    servers = sorted(facts.monitored, key=lambda one: one.name)
    monitored = tuple(
        structs.replace(one, ahead_seconds=seconds, uncertain_seconds=uncertain_seconds)
        for one, seconds in zip(servers, ahead, strict=True)
    )
    return structs.replace(facts, monitored=monitored)


def look(
    *states: tuple[int, int, int], followers: tuple[Replica, ...] = FOLLOWERS, created: datetime = CREATED
) -> Look:
    """What n-1, the leader, n-2 and n-3 say of their replicas of MARS: messages, first and last sequence."""
    clusters = [Cluster(leader="n-1", replicas=followers), Cluster(leader="n-1"), Cluster(leader="n-1")]
    return {
        f"n-{number}": {
            "MARS": OwnReplica(
                name="MARS",
                created=created,
                cluster=cluster,
                state=OwnState(messages=messages, first_seq=first, last_seq=last),
            )
        }
        for number, (cluster, (messages, first, last)) in enumerate(zip(clusters, states, strict=True), 1)
    }


LOST = (10, 431, 440)
BUSY = [(440, 1, 440), (441, 1, 441), (439, 1, 439)], [(540, 1, 540), (541, 1, 541), (542, 1, 542)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param([WHOLE, LOST, WHOLE], [WHOLE, LOST, WHOLE], id="at its beginning"),
        pytest.param([LOST, WHOLE, WHOLE], [LOST, WHOLE, WHOLE], id="the leader's"),
        pytest.param([WHOLE, WHOLE, (438, 1, 440)], [WHOLE, WHOLE, (438, 1, 440)], id="in between"),
        pytest.param([WHOLE, LOST, WHOLE], [(540, 1, 540), (109, 431, 539), (541, 1, 541)], id="while messages come"),
        pytest.param([WHOLE, (430, 1, 430), WHOLE], [WHOLE, (430, 1, 430), WHOLE], id="at its end"),
    ],
)
def test_a_replica_that_has_diverged(before: list[tuple[int, int, int]], after: list[tuple[int, int, int]]) -> None:
    ((stream, found),) = replicas.diverged(Looks(before=look(*before), after=look(*after)))
    assert stream == "MARS"
    messages, first, last = after[1]
    assert f"n-2 has {messages} messages, from {first} to {last}" in found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(*BUSY, id="messages come"),
        pytest.param([WHOLE, LOST, WHOLE], [WHOLE, WHOLE, WHOLE], id="it caught up"),
        pytest.param([WHOLE, LOST, WHOLE], [(9, 432, 440), LOST, LOST], id="the others expired them a little later"),
        pytest.param([(0, 441, 440)] * 3, [(0, 441, 440), (0, 0, 440), (0, 441, 440)], id="it is empty"),
        pytest.param([(440, 1, 440)] * 3, [(300, 1, 500), (301, 1, 501), (302, 1, 502)], id="messages are replaced"),
    ],
)
def test_a_stream_that_changes_is_not_taken_for_one_that_has_diverged(
    before: list[tuple[int, int, int]], after: list[tuple[int, int, int]]
) -> None:
    assert list(replicas.diverged(Looks(before=look(*before), after=look(*after)))) == []


def test_a_replica_that_is_not_current_may_be_behind() -> None:
    followers = (Replica(name="n-2"), Replica(name="n-3", current=True))
    states = look(WHOLE, LOST, WHOLE, followers=followers)
    assert list(replicas.diverged(Looks(before=states, after=states))) == []


def test_a_stream_that_was_recreated_between_the_looks_is_not_compared_with_itself() -> None:
    recreated = look((9, 1, 9), (9, 1, 9), (9, 1, 9), created=CREATED + timedelta(days=1))
    assert list(replicas.diverged(Looks(before=look(LOST, LOST, LOST), after=recreated))) == []
