"""Agents on three servers whose processes are restarted, and whose consumers are deleted."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from aviso_workers import App, Notification, config
from aviso_workers.backends import ConsumerInfo
from aviso_workers.config import Config
from aviso_workers.errors import UnavailableError
from aviso_workers.events import AgentDisturbed, AgentStarted, ConsumerResumed, Settled
from aviso_workers.jetstream.identities import MARK
from aviso_workers.jetstream.specs import ConsumerSpec
from aviso_workers.server import processes
from aviso_workers.server.processes import Node
from aviso_workers.telemetry.metrics import Metrics
from tests.server.conftest import load_server
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


class Cluster:
    """Three servers, which can be restarted one by one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._server = load_server(
            directory / "server.yaml", "server_name: n\nport: 0\nmonitoring: {port: 0}", replicas=3
        )
        self.nodes = self._start()

    def config(self, base: str, *, by: str = "n-1") -> Config:
        """Return the configuration of an app with an event type of this name, which connects to this server first."""
        path = self._directory / f"{base}.yaml"
        event_type = {
            "topic": {"base": base, "key_order": ["step"]},
            "identifier": {"step": {"type": "StringHandler", "required": True}},
            "storage_policy": {"allow_duplicates": True},
        }
        backend = {"nats_url": self._node(by).url, "replicas": 3}
        document = {
            "notification_backend": {"kind": "jetstream", "jetstream": backend},
            "notification_schema": {base: event_type},
        }
        path.write_text(json.dumps(document))
        return config.load(path, environ={})

    def restart(self, name: str) -> None:
        node = self._node(name)
        os.kill(node.pid, signal.SIGTERM)
        assert processes.eventually(lambda: not processes.is_running(node), PATIENCE_SECONDS)
        self._start()

    def _node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def _start(self) -> tuple[Node, ...]:
        return processes.start(self._server, directory=self._directory, nodes=3)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("rolled")
    try:
        yield Cluster(directory)
    finally:
        processes.stop(directory)


class Working:
    """A worker of one agent at work, and what it has stated."""

    def __init__(self, loaded: Config, base: str, *, agent: str = "index", **policy: Any) -> None:
        self.base = base
        self.stream = base.upper()
        self.consumer = f"rolled__{agent}"
        self.app = App("rolled", config=loaded)
        self.handled: list[int] = []
        self.disturbed: list[str] = []
        self.resumed: list[int] = []
        self._settled = anyio.Event()
        self._started = anyio.Event()

        @self.app.agent(base, name=agent, **policy)
        async def handle(notification: Notification[Any]) -> None:
            self.handled.append(int(notification.identifier["step"]))

        self.metrics = Metrics(self.app, ready=lambda: True, loop_lag_seconds=lambda: 0.0)
        self.app.events.listen(self.metrics.observe)
        self.app.events.listen(self._note_settled, Settled)
        self.app.events.listen(self._note_started, AgentStarted)
        self.app.events.listen(lambda fact: self.disturbed.append(str(fact.error)), AgentDisturbed)
        self.app.events.listen(self._note_resumed, ConsumerResumed)

    @asynccontextmanager
    async def run(self) -> AsyncIterator[Working]:
        stop = anyio.Event()
        async with self.app, anyio.create_task_group() as tasks:
            tasks.start_soon(self.app._work, stop)
            with anyio.fail_after(PATIENCE_SECONDS):
                await self._started.wait()
            yield self
            stop.set()

    async def publish(self, *steps: int) -> None:
        for step in steps:
            await self.app.notify(self.base, {"step": str(step)})

    async def until_handled(self, *steps: int) -> None:
        with anyio.fail_after(PATIENCE_SECONDS):
            while not {*steps} <= {*self.handled}:
                self._settled = anyio.Event()
                await self._settled.wait()

    async def info(self) -> ConsumerInfo:
        return await self.app.session.admin.consumer_info(self.stream, self.consumer)

    async def until(self, is_so: Callable[[ConsumerInfo], bool]) -> ConsumerInfo:
        """Return the consumer as soon as it is so."""
        with anyio.fail_after(PATIENCE_SECONDS):
            while True:
                with suppress(UnavailableError):  # the leader is being elected
                    if is_so(info := await self.info()):
                        return info
                await anyio.sleep(0.1)

    async def missed(self) -> str:
        """Return how many notifications the worker says that the agent has missed."""
        self.metrics.lag("index", await self.info())
        [line] = [line for line in self.metrics.render().decode().splitlines() if "worker_missed_total{" in line]
        return line.split()[-1]

    async def delete(self) -> None:
        """Delete the consumer under the worker."""
        await self.app.session.admin.delete_consumer(self.stream, self.consumer)

    async def lead(self, server: str) -> None:
        """Let this server lead the consumer."""
        api = self.app.session.admin.administration().api
        await api(f"CONSUMER.LEADER.STEPDOWN.{self.stream}.{self.consumer}", {"placement": {"preferred": server}})

    def _note_started(self, fact: AgentStarted) -> None:
        if fact.stream == self.stream:
            self._started.set()

    def _note_resumed(self, fact: ConsumerResumed) -> None:
        if fact.stream == self.stream:
            self.resumed.append(fact.sequence)

    def _note_settled(self, _: Settled) -> None:
        self._settled.set()


def _has_all_replicas(info: ConsumerInfo) -> bool:
    return all(each.current for each in info.cluster.followers)


@pytest.mark.slow
async def test_a_consumer_is_not_taken_for_recreated_because_its_server_says_another_time_of_creation(
    cluster: Cluster,
) -> None:
    """As nats-server 2.15 does after an update between two restarts."""
    async with Working(cluster.config("rolled"), "rolled").run() as worker:
        await worker.publish(1)
        await worker.until_handled(1)
        before = await worker.info()
        leader, follower = before.cluster.leader, before.cluster.followers[0].name
        await anyio.to_thread.run_sync(cluster.restart, follower)
        await worker.until(_has_all_replicas)
    async with Working(cluster.config("rolled", by=leader), "rolled", ack_wait=60.0).run() as worker:
        await worker.until(_has_all_replicas)
        await anyio.to_thread.run_sync(cluster.restart, follower)
        await worker.until(_has_all_replicas)
        await worker.lead(follower)
        now = await worker.until(lambda info: info.cluster.leader == follower)
        assert now.created != before.created, "this server does not do it: what is tested here does not occur"
        await anyio.to_thread.run_sync(cluster.restart, leader)  # the worker connects again, and looks at the consumer
        await worker.publish(2)
        await worker.until_handled(2)
        after = await worker.info()
    assert after.created != before.created
    assert [error for error in worker.disturbed if "recreated" in error] == []
    assert after.config.metadata[MARK] == before.config.metadata[MARK]


@pytest.mark.slow
async def test_a_consumer_that_is_deleted_twice_goes_on_where_it_was_and_has_missed_nothing(cluster: Cluster) -> None:
    loaded = cluster.config("deleted")
    async with Working(loaded, "deleted").run() as worker:
        await worker.publish(*range(1, 101))
        await worker.until_handled(*range(1, 101))
    async with Working(loaded, "deleted").run() as worker:
        for step in (101, 102):
            await worker.delete()
            await worker.publish(step)
            await worker.until_handled(step)
            assert await worker.missed() == "0.0"
    assert min(worker.resumed) == 101
    assert {*worker.handled} == {101, 102}


@pytest.mark.slow
async def test_a_consumer_that_begins_with_what_is_new_and_is_deleted_handles_nothing_old(cluster: Cluster) -> None:
    loaded = cluster.config("begun")
    async with Working(loaded, "begun").run() as worker:
        await worker.publish(*range(1, 101))
    async with Working(loaded, "begun", agent="late", start="new").run() as worker:
        await worker.delete()
        await worker.publish(101)
        await worker.until_handled(101)
    assert worker.handled == [101]


async def test_what_is_before_the_beginning_of_a_consumer_is_settled_also_before_its_first_ack(
    cluster: Cluster,
) -> None:
    """A cluster says that the ack floor is 0, and a single server says where the consumer begins."""
    loaded = cluster.config("begins")
    async with Working(loaded, "begins").run() as worker:
        await worker.publish(1, 2, 3)
        spec = ConsumerSpec(
            durable_name="other",
            filter_subjects=(),
            ack_wait=10**9,
            max_ack_pending=10,
            deliver_policy="by_start_sequence",
            opt_start_seq=3,
        )
        backend = worker.app.session.backend
        await backend.ensure_consumer(worker.stream, spec)
        assert (await backend.consumer_info(worker.stream, "other")).ack_floor == 2
