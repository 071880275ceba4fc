"""Servers of several versions side by side, as while a cluster is upgraded one server after the other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import anyio
import pyrage
import pytest

from _chaos import upgrade
from _chaos.clusters import Node, connected, start_nodes, stop_nodes
from aviso_workers import App
from aviso_workers.errors import RefusedError, UnavailableError
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.ops import backups
from aviso_workers.ops.backups import Backup, Spool
from aviso_workers.server import BINARY_VARIABLE, NatsServer
from tests.contract.settings import app_config, mars
from tests.interop import programs
from tests.security.certificates import Authority
from tests.security.servers import between
from tests.stories.processes import Record, Server, Worker
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

OLDEST, *_, NEWEST = programs.NATS_SERVERS
CONTRACT = ("deferring", "key_value", "pinning", "publishing", "schedules", "streams", "together", "ttl")
"""The modules of the contract that are about what servers differ in. `docs/support.md` says how all of it is run."""


def since(minor: int) -> list[str]:
    return [version for version in programs.NATS_SERVERS if int(version.split(".")[1]) >= minor]


def before(minor: int) -> list[str]:
    return [version for version in programs.NATS_SERVERS if version not in since(minor)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., list[Node]]]:
    """`cluster("2.11.17", "2.15.2", "2.15.2")`: servers of these versions, which form one JetStream."""
    with ExitStack() as running:

        def cluster(*versions: str) -> list[Node]:
            binaries = [str(programs.nats_server(version)) for version in versions]
            nodes = start_nodes(tmp_path, len(versions), binaries=binaries)
            running.callback(stop_nodes, nodes)
            return nodes

        yield cluster


@contextmanager
def server(version: str, tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer.start(store_dir=tmp_path / "store", binary=str(programs.nats_server(version))) as running:
        yield running


class TestAMixedCluster:
    @pytest.mark.parametrize(("old", "new"), [(OLDEST, NEWEST), (programs.NATS_SERVERS[1], NEWEST)])
    async def test_makes_streams_that_all_of_its_servers_serve(
        self, cluster: Callable[..., list[Node]], old: str, new: str
    ) -> None:
        nodes = cluster(old, old, new)
        app = App("mixed", config=app_config("jetstream", nodes[2].url, replicas=3))
        async with connected(app):
            with anyio.fail_after(PATIENCE_SECONDS):
                assert (await app.notify("mars", mars(step="1"), {})).sequence == 1
            config = (await app.session.backend.stream_info("MARS")).config
        assert not config.get("allow_batched")
        assert bool(config.get("allow_atomic")) is (old in since(12))

    async def test_makes_no_stream_that_most_of_its_servers_would_not_serve(
        self, cluster: Callable[..., list[Node]]
    ) -> None:
        nodes = cluster(OLDEST, OLDEST, NEWEST)
        app = App("mixed", config=app_config("jetstream", nodes[2].url, replicas=3))
        async with connected(app):
            backend = app.session.admin
            needed = r"with allow_msg_schedules, nats-server 2\.12 or newer is needed, and one of this cluster is 2\.11"
            with pytest.raises(UnavailableError, match=needed):
                await backend.create_stream(StreamSpec(name="LATER", subjects=("later.>",), allow_msg_schedules=True))
            assert "LATER" not in await backend.stream_names()


@pytest.mark.parametrize("version", before(12))
async def test_what_a_server_does_not_know_is_refused_by_name(version: str, tmp_path: Path) -> None:
    with server(version, tmp_path) as old:
        app = App("old", config=app_config("jetstream", old.url))
        async with connected(app):
            needed = r"with allow_msg_counter, nats-server 2\.12 or newer is needed; this one is 2\.11"
            with pytest.raises(RefusedError, match=needed):
                await app.session.backend.create_stream(StreamSpec(name="SUMS", allow_msg_counter=True))


@pytest.mark.parametrize("version", before(15))
async def test_backups_that_a_server_cannot_make_are_refused_by_name(version: str, tmp_path: Path) -> None:
    key = str(pyrage.x25519.Identity.generate().to_public())

    async def back_up(stream: str, earlier: Spool | None) -> Backup:
        raise AssertionError(f"{stream} is backed up")

    with server(version, tmp_path / "store") as old:
        app = App("old", config=app_config("jetstream", old.url))
        async with connected(app):
            await app.notify("mars", mars(step="1"), {})
            admin = app.session.admin
            with pytest.raises(RefusedError, match=r"to encrypt a backup, nats-server 2\.15 or newer is needed"):
                await backups.create(admin, "MARS", tmp_path / "kept", encrypt_to=[key])
            with pytest.raises(RefusedError, match=r"to back up all streams as a set, nats-server 2\.15 or newer"):
                await backups.create_set(admin, tmp_path / "kept", back_up, encrypted=False)
            assert (await backups.create(admin, "MARS", tmp_path / "kept")).state.messages == 1


@pytest.mark.parametrize("version", programs.NATS_SERVERS)
async def test_a_stream_has_the_batches_that_its_server_knows(version: str, tmp_path: Path) -> None:
    with server(version, tmp_path) as one:
        app = App("alone", config=app_config("jetstream", one.url))
        async with connected(app):
            await app.notify("mars", mars(step="1"), {})
            config = (await app.session.backend.stream_info("MARS")).config
    assert bool(config.get("allow_atomic")) is (version in since(12))
    assert bool(config.get("allow_batched")) is (version in since(14))


@pytest.mark.parametrize("version", before(12))
async def test_a_worker_whose_server_is_too_old_says_so_and_ends(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BINARY_VARIABLE, str(programs.nats_server(version)))
    record, far = Record(tmp_path / "record"), {"workers.priority": 1}
    with (
        Server(tmp_path / "streams") as old,
        Worker(url=old.url, record=record, directory=tmp_path, settings=far) as worker,
    ):
        assert await worker.ended() == 1
        assert "to read with workers.priority 1, nats-server 2.12 or newer is needed; this one is 2.11" in worker.log
        assert "Traceback" not in worker.log


@pytest.mark.parametrize("version", before(12))
async def test_a_server_that_says_nothing_of_itself_within_tls_is_taken_for_the_oldest(
    version: str, tmp_path: Path
) -> None:
    authority = Authority(tmp_path, "authority")
    certificate = authority.sign("server")
    tls = f"tls {{cert_file: {certificate.cert_file}, key_file: {certificate.key_file}}}\n"
    binary = str(programs.nats_server(version))
    with NatsServer.start(store_dir=tmp_path / "store", binary=binary, config=tls) as old:
        async with between(old.port) as attacker:
            attacker.changes = {"version": "9.9.9", "max_payload": 1_000, "headers": False}
            settings = {"tls__ca_file": authority.ca_file}
            app = App("old", config=app_config("jetstream", f"tls://127.0.0.1:{attacker.port}", **settings))
            async with connected(app):
                assert (await app.notify("mars", mars(step="1"), {"of": "x" * 500_000})).sequence == 1
                with pytest.raises(RefusedError, match=r"nats-server 2\.12 or newer is needed; this one is 2\.11"):
                    await app.notify("mars", mars(step="2"), {}, due=60)


@pytest.mark.parametrize("version", programs.NATS_SERVERS)
def test_the_contract_holds(version: str) -> None:
    """What the backend promises, against this server; what that lacks is skipped, and named."""
    suite = [f"tests/contract/test_{module}.py" for module in CONTRACT]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", "jetstream and not long", *suite],
        env={**os.environ, BINARY_VARIABLE: str(programs.nats_server(version))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-10_000:]


def test_a_rolling_upgrade_loses_nothing(tmp_path: Path) -> None:
    binaries = {version: str(programs.nats_server(version)) for version in (OLDEST, NEWEST)}
    told = upgrade.conduct(tmp_path, binaries, rate=30.0)
    assert not told.problems, told.figures
