"""Servers in the background: started, told, and gone without a trace."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest
from nats.js.api import StreamConfig

from aviso_workers import server
from aviso_workers.errors import ServerProcessError
from aviso_workers.server import BINARY_VARIABLE, find_binary, processes
from aviso_workers.server.processes import Node, ask
from tests.cli.conftest import run
from tests.server.conftest import Load, Start, program
from tests.test_server import ended, listens
from tests.waits import PATIENCE_SECONDS

__all__ = ["run"]

AVISO_WORKERS = Path(sys.executable).with_name("aviso-workers")
ANYWHERE = "port: 0\nmonitoring: {port: 0}"


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([AVISO_WORKERS, *arguments], capture_output=True, text=True, timeout=PATIENCE_SECONDS)


def ports(node: Node) -> list[int]:
    return [node.port, node.monitoring_port, node.cluster_port, node.leaf_port]


def test_a_store_that_a_server_of_another_directory_uses_is_refused(load: Load) -> None:
    config = load(f"server_name: n\n{ANYWHERE}\njetstream: {{store_dir: shared}}")
    first, second = Path("first"), Path("second")
    try:
        processes.start(config, directory=first)
        with pytest.raises(ServerProcessError, match=r"started in another directory uses the store .*shared"):
            processes.start(config, directory=second)
        processes.stop(first)
        processes.start(config, directory=second)
    finally:
        for directory in (first, second):
            processes.stop(directory)


def test_a_directory_that_cannot_be_written_is_named(load: Load, tmp_path: Path) -> None:
    config = load(f"server_name: n\n{ANYWHERE}")
    (tmp_path / "file").touch()
    with pytest.raises(ServerProcessError, match=r"because .*file/servers cannot be written: Not a directory"):
        processes.start(config, directory=tmp_path / "file" / "servers")


@pytest.mark.slow
@pytest.mark.covers("001-44", "002-41", "003-09", "004-01", "004-02", "004-18", "004-45", "004-46")
def test_three_nodes_outlive_the_command_that_starts_them_and_stop_leaves_nothing(load: Load) -> None:
    load(f"server_name: n\n{ANYWHERE}\nleafnodes: {{port: 0}}")
    directory = Path("servers")
    try:
        started = command("server", "start", "--nodes", "3", "--directory", "servers", "--config", "dev.yaml")
        assert started.returncode == 0, started.stderr
        states = processes.states(directory)
        assert [(state.node.name, state.health) for state in states] == [("n-1", "ok"), ("n-2", "ok"), ("n-3", "ok")]
        assert all(listens(port) for state in states for port in ports(state.node))
        assert command("server", "status", "--directory", "servers").returncode == 0
        stopped = command("server", "stop", "--directory", "servers")
        assert (stopped.returncode, stopped.stdout) == (0, "n-1: ended\nn-2: ended\nn-3: ended\n")
        assert all(ended(state.pid) for state in states if state.pid)
        assert [port for state in states for port in ports(state.node) if listens(port)] == []
        left = {file.name for state in states for file in state.node.directory.iterdir()}
        assert left == {"jetstream", "nats-server.log"}
    finally:
        processes.stop(directory)


@pytest.mark.slow
def test_starting_again_starts_only_what_does_not_run(load: Load, start: Start) -> None:
    loaded = load(f"server_name: n\n{ANYWHERE}")
    nodes = start(loaded, nodes=3)
    before = [node.pid for node in nodes]
    os.kill(before[1], signal.SIGKILL)
    assert processes.eventually(lambda: not processes.is_running(nodes[1]), PATIENCE_SECONDS)
    with (nodes[1].directory / "nats-server.log").open("a") as log:
        log.write("[1] [ERR] of long ago\n[1] [INF] the end\n")
    assert [state.health for state in processes.states(nodes[0].directory.parent)] == [
        "ok",
        "ended by itself; its log ends with: [1] [INF] the end",
        "ok",
    ]
    assert start(loaded, nodes=3) == nodes
    after = [node.pid for node in nodes]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]
    with pytest.raises(ServerProcessError, match="stop what runs there before you start something else"):
        start(loaded, nodes=1)


def test_what_was_killed_is_forgotten_when_something_else_is_started(load: Load, start: Start) -> None:
    loaded = load(f"server_name: n\n{ANYWHERE}")
    nodes = start(loaded, nodes=2)
    for node in nodes:
        os.kill(node.pid, signal.SIGKILL)
    assert processes.eventually(lambda: not any(map(processes.is_running, nodes)), PATIENCE_SECONDS)
    (alone,) = start(loaded)
    assert [(state.node, state.health) for state in processes.states(alone.directory.parent)] == [(alone, "ok")]


@pytest.mark.covers("004-34")
def test_a_node_that_does_not_start_says_why_and_takes_the_others_with_it(load: Load, start: Start) -> None:
    Path("servers/n-2").mkdir(parents=True)
    Path("servers/n-2/jetstream").write_text("a file where a directory should be")
    with pytest.raises(ServerProcessError, match=r"nats-server n-2 ended at once: .*not a directory"):
        start(load(f"server_name: n\n{ANYWHERE}"), nodes=3)
    assert processes.states(Path("servers")) == ()
    assert list(Path("servers").rglob("nats-server.conf")) == []


def test_a_node_that_does_nothing_is_told_of_and_goes_on(
    load: Load, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be at work on its store, where nobody sees it: it is not killed."""
    hanging = f'case "$1" in -c) echo $$ >pid; exec sleep 600;; *) exec {find_binary()} "$@";; esac'
    monkeypatch.setenv(BINARY_VARIABLE, program(tmp_path, hanging))
    monkeypatch.setattr(server, "STANDSTILL_SECONDS", 0.5)
    loaded = load(ANYWHERE)
    try:
        with pytest.raises(ServerProcessError, match=r"has done nothing for .* It still runs: .* server stop"):
            start(loaded)
        (state,) = processes.states(tmp_path / "servers")
        assert not ended(int(Path("pid").read_text()))
        assert processes.is_running(state.node)
    finally:
        os.kill(int(Path("pid").read_text()), signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a server listen on a port that is reserved")
def test_port_stays_reserved_while_its_server_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = processes.free_ports(2)
    monkeypatch.setattr(processes, "PORTS", [first, second])
    in_another_process = f"from aviso_workers.server import processes; processes.PORTS = [{first}, {second}]; "
    in_another_process += "print(processes.free_ports(2))"
    assert subprocess.check_output([sys.executable, "-c", in_another_process], text=True) == "[]\n"
    for _ in range(2):  # started, and started again
        with socket.create_server(("127.0.0.1", first)) as server, socket.create_connection(server.getsockname()):
            assert processes.free_ports(2) == []


def test_a_port_in_use_is_named(load: Load, start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for key, ports in (
            ("server.port", f"port: {port}\nmonitoring: {{port: 0}}"),
            ("server.monitoring.port", f"port: 0\nmonitoring: {{port: {port}}}"),
        ):
            complaint = f"port {port} on 127.0.0.1 is in use: stop what listens there, or choose another in {key}$"
            with pytest.raises(ServerProcessError, match=complaint):
                start(load(ports))


def test_a_process_that_got_the_number_of_a_node_is_left_alone(load: Load, start: Start) -> None:
    (node,) = start(load(ANYWHERE))
    os.kill(node.pid, signal.SIGKILL)
    assert processes.eventually(lambda: not processes.is_running(node), PATIENCE_SECONDS)
    with subprocess.Popen(["sleep", "60"]) as other:
        (node.directory / "nats-server.pid").write_text(str(other.pid))
        assert processes.stop(node.directory.parent) == ()
        assert other.poll() is None
        other.kill()


def test_status_of_nothing_is_a_failure_and_stop_of_nothing_is_none(load: Load, run: Callable[..., Any]) -> None:
    assert run("server", "status").code == 1
    stopped = run("server", "stop")
    assert (stopped.code, stopped.out) == (0, "nothing runs in .aviso-workers/server\n")


def test_reload_takes_over_what_can_be_taken_over_and_names_what_cannot(load: Load, start: Start) -> None:
    loaded = load(f"{ANYWHERE}\nmax_connections: 10")
    (node,) = start(loaded)
    before = node.pid
    directory = node.directory.parent
    assert processes.reload(load(f"{ANYWHERE}\nmax_connections: 20"), directory=directory) == (node,)
    assert ask(node, "/varz")["max_connections"] == 20
    with pytest.raises(ServerProcessError, match=r"aviso-workers did not take it over: .*jetstream"):
        processes.reload(load(f"{ANYWHERE}\njetstream: {{store_dir: elsewhere}}"), directory=directory)
    with pytest.raises(ServerProcessError, match="names and ports of what runs do not follow the configuration"):
        processes.reload(load(f"{ANYWHERE}\nserver_name: other"), directory=directory)
    assert node.pid == before
    processes.stop(directory)
    with pytest.raises(ServerProcessError, match="no nats-server runs in"):
        processes.reload(loaded, directory=directory)


@pytest.mark.slow
def test_in_lame_duck_mode_clients_are_told_and_have_their_time(load: Load, start: Start) -> None:
    (node,) = start(load(f"{ANYWHERE}\nlame_duck_grace_period: 2s\nlame_duck_duration: 31s"))
    with (
        socket.create_connection(("127.0.0.1", node.port), timeout=PATIENCE_SECONDS) as client,
        client.makefile("rb") as lines,
    ):
        client.sendall(b'CONNECT {"verbose":false,"protocol":1}\r\nPING\r\n')
        assert lines.readline().startswith(b"INFO ")
        assert lines.readline() == b"PONG\r\n"
        at = time.monotonic()
        stopping = subprocess.Popen(
            [AVISO_WORKERS, "server", "stop", "--lame-duck", "--directory", node.directory.parent],
            stdout=subprocess.PIPE,
        )
        assert any(b'"ldm":true' in line for line in lines), node.log
        assert not listens(node.port)
        list(lines)  # until the server hangs up
        assert time.monotonic() - at >= 2.0
        assert stopping.communicate()[0] == b"aviso-workers: ended\n"


PUBLISHED = 150
KILLED_AFTER = 50


@pytest.mark.slow
@pytest.mark.covers("001-13", "001-39", "002-06", "002-39")
@pytest.mark.anyio
async def test_a_stream_of_three_copies_survives_its_leader_and_loses_nothing(load: Load, start: Start) -> None:
    loaded = load(f"server_name: n\n{ANYWHERE}")
    nodes = {node.name: node for node in start(loaded, nodes=3)}
    client = await nats.connect(
        [node.url for node in nodes.values()], max_reconnect_attempts=-1, reconnect_time_wait=0.1
    )
    context = client.jetstream()
    await context.add_stream(StreamConfig(name="DATA", subjects=["data"], num_replicas=3))
    acknowledged: list[str] = []
    killed = ""
    for i in range(PUBLISHED):
        if i == KILLED_AFTER:
            cluster = (await context.stream_info("DATA")).cluster
            assert cluster is not None
            assert cluster.leader is not None
            killed = cluster.leader
            os.kill(nodes[killed].pid, signal.SIGKILL)
        await _publish(context, f"id-{i}")
        acknowledged.append(f"id-{i}")
    stored = await _stored(context)
    assert sorted(stored) == sorted(acknowledged), f"after the end of {killed}"
    start(loaded, nodes=3)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not await _is_whole(context):
        assert time.monotonic() < deadline, (await context.stream_info("DATA")).cluster
        await asyncio.sleep(0.05)
    await client.close()


async def _answered(ask: Callable[[], Awaitable[Any]], what: str) -> Any:
    """Ask until there is an answer: while a leader is elected there is none, or that JetStream is not available."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return await ask()
        except (TimeoutError, nats.errors.Error):
            assert time.monotonic() < deadline, f"{what} had no answer for {PATIENCE_SECONDS:g} s"


async def _publish(context: Any, name: str) -> None:
    """Publish until it is acknowledged; the id keeps it from being stored twice."""
    headers = {"Nats-Msg-Id": name}
    await _answered(lambda: context.publish("data", name.encode(), headers=headers, timeout=1), name)


async def _stored(context: Any) -> list[str]:
    last = (await _answered(lambda: context.stream_info("DATA"), "DATA")).state.last_seq
    messages = [await _answered(partial(context.get_msg, "DATA", seq), f"message {seq}") for seq in range(1, last + 1)]
    return [message.data.decode() for message in messages]


async def _is_whole(context: Any) -> bool:
    cluster = (await _answered(lambda: context.stream_info("DATA"), "DATA")).cluster
    return len(cluster.replicas) == 2 and all(replica.current for replica in cluster.replicas)
