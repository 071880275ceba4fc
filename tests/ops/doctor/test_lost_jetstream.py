"""Three servers that run, and of which an account has lost JetStream."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
import pytest

from _chaos import clusters
from aviso_workers import App
from aviso_workers.config import Config
from aviso_workers.errors import BackendError
from aviso_workers.ops.doctor import State
from aviso_workers.server.processes import free_ports
from tests.ops.conftest import Run
from tests.ops.doctor.conftest import Seen, add_consumer, add_stream, gathered, judged, write
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.slow

ACCOUNTS = """
accounts {{
  DATA {{ users: [{{user: alice, password: hush}}], jetstream: {jetstream} }}
  SYSTEM {{ users: [{{user: admin, password: hush}}] }}
}}
system_account: SYSTEM
"""


class Doctor:
    """The doctor, who is asked until he says something."""

    def __init__(self, loaded: Config, monitors: tuple[str, ...]) -> None:
        self.loaded = loaded
        self._monitors = monitors

    def eventually(self, condition: Callable[[Seen], bool], *, monitored: bool = True) -> Seen:
        """What the doctor says when this is so at last."""
        return anyio.run(lambda: self._until(condition, monitored=monitored))

    async def _until(self, condition: Callable[[Seen], bool], *, monitored: bool) -> Seen:
        with anyio.fail_after(PATIENCE_SECONDS):
            while True:
                with suppress(BackendError):
                    seen = judged(await gathered(self.loaded, monitors=self._monitors if monitored else ()))
                    if condition(seen):
                        return seen
                await anyio.sleep(0.2)


class Cluster(Doctor):
    """Servers that take over another configuration of the account, and can be restarted."""

    def __init__(self, directory: Path) -> None:
        self._accounts = directory / "accounts.conf"
        self._accounts.write_text(ACCOUNTS.format(jetstream="enabled"))
        ports = free_ports(3)
        included = Path("..") / os.path.relpath(self._accounts, tempfile.gettempdir())
        extra = [f"http: 127.0.0.1:{port}\ninclude '{included}'\n" for port in ports]
        self.nodes = clusters.start_nodes(directory, 3, extra=extra)
        urls = ",".join(node.url for node in self.nodes)
        loaded = write(directory / "config.yaml", urls, user="alice", password="hush", replicas=3)
        super().__init__(loaded, tuple(f"http://127.0.0.1:{port}" for port in ports))

    def take_over(self, jetstream: str) -> None:
        self._accounts.write_text(ACCOUNTS.format(jetstream=jetstream))
        for node in self.nodes:
            node.server.process.send_signal(signal.SIGHUP)

    def restart(self, number: int) -> None:
        self.nodes[number].stop()
        self.nodes[number].start()


@contextmanager
def running(directory: Path) -> Iterator[Cluster]:
    cluster = Cluster(directory)
    try:
        anyio.run(use, cluster.loaded)
        yield cluster
    finally:
        clusters.stop_nodes(cluster.nodes)


async def use(loaded: Config) -> None:
    async with App("using", config=loaded) as app:
        server = app.session.admin.administration()
        await add_stream(server, "MARS", subjects=["mars.>"], num_replicas=3)
        await add_consumer(server, "MARS", "reader")


def test_the_account_loses_jetstream_and_gets_it_back(tmp_path: Path, run: Run) -> None:
    with running(tmp_path) as cluster:
        cluster.take_over("disabled")
        seen = cluster.eventually(lambda seen: seen.state("JS044") is State.FAIL)
        finding = seen.findings("JS044")["JetStream's API"]
        assert "JetStream is off for the account (JetStream 10039)" in finding.found
        assert finding.cure.startswith("Set server.accounts.NAME.jetstream.enabled: true for the account")
        said = run("streams", "ls", "-c", tmp_path / "config.yaml").err
        assert "JetStream is off for the account" in said

        cluster.take_over("enabled")
        seen = cluster.eventually(lambda seen: seen.state("JS017") is State.FAIL)
        finding = seen.findings("JS017")["MARS"]
        assert finding.found == "it has no leader, though all servers are up"
        assert "restart the servers one by one" in finding.cure
        unhealthy = [each for each in seen.results["JS044"].findings if "MARS" in each.found]
        assert {each.cure for each in unhealthy} == {finding.cure}
        blind = cluster.eventually(lambda seen: seen.state("JS017") is State.FAIL, monitored=False)
        assert "If all servers run and no stream has a leader, restart them" in blind.findings("JS017")["MARS"].cure

        for number in range(3):
            cluster.restart(number)
        cluster.eventually(lambda seen: {seen.state("JS044"), seen.state("JS017")} == {State.PASS})
