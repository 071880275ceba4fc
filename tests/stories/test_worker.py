"""A worker process and a real nats-server: what it does, how it stops, and what it says when it cannot start."""

from __future__ import annotations

import signal
import socket
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import nats
import pytest
from nats.aio.client import Client

from aviso_workers import App, Notify
from aviso_workers.server import NatsServer
from aviso_workers.state import own_streams
from tests.commands import Command
from tests.waits import PATIENCE_SECONDS, PROMPT_SECONDS

DEAD_LETTERS = own_streams.of_app(own_streams.DEAD_LETTERS, "stories")

AGENTS = """
from pathlib import Path

import anyio
import msgspec

from aviso_workers.state import own_streams
from aviso_workers import App, Notification


app = App("stories")


class Field(msgspec.Struct):
    location: str


@app.agent("mars")
async def index(notification: Notification[Field]) -> None:
    while notification.payload.location == "slow" and not Path("go").exists():
        await anyio.sleep(0.01)
    with open("indexed", "a") as index:
        index.write(notification.identifier["step"] + "\\n")
"""


@pytest.fixture(autouse=True)
def agents(tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text(AGENTS)


@pytest.fixture
def config(nats_server: NatsServer, write_config: Callable[..., Path]) -> Path:
    return write_config(nats_server.url)


@pytest.fixture
def indexed(tmp_path: Path) -> Callable[[], list[int]]:
    """`indexed()`: the steps that were handled so far, in order, again where one came again."""

    def indexed() -> list[int]:
        path = tmp_path / "indexed"
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    return indexed


def connected(config: Path, act: Callable[[App], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with App("tests", config=config) as app:
            return await act(app)

    return anyio.run(run)


def publish(config: Path, *steps: int, location: str = "here") -> None:
    wanted = [Notify("mars", {"class": "od", "step": step}, {"location": location}) for step in steps]
    connected(config, lambda app: app.notify_many(wanted))


def eventually(holds: Callable[[], bool], complaint: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, complaint()
        time.sleep(0.01)


def get(worker_started: dict[str, Any], path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(worker_started["status"] + path, timeout=PATIENCE_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def held(worker_started: dict[str, Any]) -> tuple[float, float]:
    """How many deliveries the worker handles now, and how many wait in it."""
    numbers = get(worker_started, "/metrics")[1].splitlines()

    def value(name: str) -> float:
        (value,) = (line.rpartition(" ")[2] for line in numbers if line.startswith(f"aviso_worker_{name}{{"))
        return float(value)

    return value("in_flight"), value("waiting")


def stopped_agent(worker: Command) -> dict[str, Any]:
    """What the log says of the end of the agent `index`."""
    (stopped,) = (line for line in worker.log if line["event"] == "agent.stopped" and line["agent"] == "index")
    return stopped


Start = Callable[..., Command]


@pytest.mark.covers("002-31")
def test_a_worker_handles_what_is_published_and_leaves_in_order(
    start: Start, config: Path, indexed: Callable[[], list[int]]
) -> None:
    publish(config, 0, 1)
    worker = start("worker", "agents:app", "--config", config)
    started = worker.until("worker.started")
    worker.until("agent.started")
    publish(config, 2)
    eventually(lambda: indexed() == [0, 1, 2], indexed)
    assert get(started, "/readyz") == get(started, "/livez") == (200, "ok\n")
    numbers = get(started, "/metrics")[1]
    assert 'aviso_worker_notifications_total{agent="index",app="stories",base="mars",outcome="acked"} 3.0' in numbers

    asked = time.monotonic()
    assert worker.end(signal.SIGTERM) == 0
    assert time.monotonic() - asked < PROMPT_SECONDS
    assert [line["event"] for line in worker.log if line.get("agent", "index") == "index"][-3:] == [
        "worker.stopping",
        "agent.stopped",
        "worker.stopped",
    ]
    stopped = stopped_agent(worker)
    assert (stopped["finished"], stopped["returned"]) == (3, 0)
    assert worker.told == []


@pytest.mark.slow
def test_a_worker_that_is_told_to_stop_finishes_what_runs_and_gives_back_what_waits(
    start: Start, config: Path, tmp_path: Path, indexed: Callable[[], list[int]]
) -> None:
    publish(config, 0, location="slow")
    publish(config, 1, 2, location="here")
    worker = start("worker", "agents:app", "--config", config)
    started = worker.until("worker.started")
    eventually(lambda: held(started) == (1, 1), lambda: held(started))
    worker.process.send_signal(signal.SIGTERM)
    worker.until("worker.stopping")
    (tmp_path / "go").touch()
    assert worker.end() == 0
    stopped = stopped_agent(worker)
    assert (indexed(), stopped["finished"], stopped["returned"]) == ([0], 1, 1)

    another = start("worker", "agents:app", "--config", config)
    eventually(lambda: len(indexed()) == 3, indexed)
    assert another.end(signal.SIGTERM) == 0
    assert Counter(indexed()) == {0: 1, 1: 1, 2: 1}


def test_a_second_signal_ends_what_does_not_want_to_end(start: Start, config: Path) -> None:
    publish(config, 0, location="slow")
    worker = start("worker", "agents:app", "--config", config)
    started = worker.until("worker.started")
    eventually(lambda: held(started) == (1, 0), lambda: held(started))
    worker.process.send_signal(signal.SIGINT)
    worker.until("worker.stopping")
    asked = time.monotonic()
    assert worker.end(signal.SIGINT) == 0
    assert time.monotonic() - asked < PROMPT_SECONDS
    assert [line["event"] for line in worker.log if line["event"].startswith("worker.")][-2:] == [
        "worker.cancelled",
        "worker.stopped",
    ]


@pytest.mark.slow
def test_a_worker_is_ready_when_it_is_connected_and_reads(
    start: Start, tmp_path: Path, free_port: int, write_config: Callable[..., Path]
) -> None:
    config = write_config(f"nats://127.0.0.1:{free_port}", retry_attempts=1000)
    worker = start("worker", "agents:app", "--config", config)
    started = worker.until("worker.started")
    worker.until("connection.down")
    why = "not connected: [Errno 111] Connect call failed"
    eventually(lambda: get(started, "/readyz")[1].startswith(why), lambda: get(started, "/readyz"))
    assert get(started, "/readyz")[0] == 503
    assert get(started, "/livez") == (200, "ok\n")
    with NatsServer.start(store_dir=tmp_path / "store", port=free_port) as server:
        worker.until("agent.started")
        eventually(lambda: get(started, "/readyz") == (200, "ok\n"), lambda: get(started, "/readyz"))
        server.kill()
        worker.until("connection.down")
        eventually(lambda: get(started, "/readyz")[0] == 503, lambda: get(started, "/readyz"))
        assert get(started, "/readyz")[1].startswith("not connected: ")
    assert worker.end(signal.SIGTERM) == 0, "".join(worker.told)


def test_what_cannot_be_decoded_is_kept_and_the_agent_goes_on(
    start: Start, nats_server: NatsServer, config: Path, indexed: Callable[[], list[int]]
) -> None:
    publish(config, 0)

    async def publish_raw(client: Client) -> None:
        await client.jetstream().publish("mars.od.1", b"\xffno field")

    async def read_dead_letter(client: Client) -> Any:
        return await client.jetstream().get_last_msg(DEAD_LETTERS, "aviso_workers.dead_letters.stories.index")

    anyio.run(_with_client, nats_server.url, publish_raw)
    worker = start("worker", "agents:app", "--config", config)
    told = worker.until("notification.dead_lettered")
    publish(config, 2)
    eventually(lambda: indexed() == [0, 2], indexed)
    assert worker.end(signal.SIGTERM) == 0
    assert (told["notification"], told["reason"]) == ("mars@2", "undecodable")
    assert told["error"] == "the payload does not fit: Expected `object`, got `str`"
    dead_letter = anyio.run(_with_client, nats_server.url, read_dead_letter)
    assert dead_letter.data == b"\xffno field"
    assert dead_letter.headers["Aviso-Subject"] == "mars.od.1"
    assert dead_letter.headers["Aviso-Reason"] == "undecodable"


async def _with_client(url: str, act: Callable[[Client], Awaitable[Any]]) -> Any:
    client = await nats.connect(url)
    try:
        return await act(client)
    finally:
        await client.close()


@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back_costs_nothing(
    start: Start,
    tmp_path: Path,
    free_port: int,
    write_config: Callable[..., Path],
    indexed: Callable[[], list[int]],
) -> None:
    config = write_config(f"nats://127.0.0.1:{free_port}")
    store_dir = tmp_path / "store"
    with NatsServer.start(store_dir=store_dir, port=free_port) as server:
        worker = start("worker", "agents:app", "--config", config)
        worker.until("agent.started")
        publish(config, *range(100))
        eventually(lambda: len(indexed()) == 100, indexed)
        time.sleep(1.0)  # a server writes what is settled to disk within this time, and tells nobody when
        publish(config, *range(100, 200))
        server.kill()
    worker.until("connection.down")
    with NatsServer.start(store_dir=store_dir, port=free_port):
        worker.until("connection.up")
        publish(config, *range(200, 300))
        eventually(lambda: len(set(indexed())) == 300, lambda: set(range(300)) - set(indexed()))
        assert worker.end(signal.SIGTERM) == 0
    counts = Counter(indexed())
    assert {step: counts[step] for step in range(100) if counts[step] > 1} == {}


def hang_up(port: int, times: int) -> None:
    """Be no NATS server on this port: return when that was seen by so many connections."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        listener.settimeout(PATIENCE_SECONDS)
        for _ in range(times):
            listener.accept()[0].close()


@pytest.mark.slow
def test_a_worker_that_is_told_nothing_else_waits_for_its_server_without_end(
    start: Start,
    tmp_path: Path,
    free_port: int,
    write_config: Callable[..., Path],
    indexed: Callable[[], list[int]],
) -> None:
    """Commands give up after three attempts to connect and five to reconnect."""
    config = write_config(f"nats://127.0.0.1:{free_port}", max_reconnect_attempts=None)
    worker = start("worker", "agents:app", "--config", config)
    hang_up(free_port, 6)
    with NatsServer.start(store_dir=tmp_path / "store", port=free_port):
        publish(config, 0)
        eventually(lambda: indexed() == [0], lambda: indexed() or worker.log)
    hang_up(free_port, 12)
    with NatsServer.start(store_dir=tmp_path / "store", port=free_port):
        publish(config, 1)
        eventually(lambda: 1 in indexed(), lambda: indexed() or worker.log)
    assert worker.end(signal.SIGTERM) == 0, "".join(worker.told)


class TestAWorkerThatCannotStart:
    def test_names_the_server_and_the_attempts(
        self, start: Start, free_port: int, write_config: Callable[..., Path]
    ) -> None:
        config = write_config(f"nats://user:s3cret@127.0.0.1:{free_port}", retry_attempts=2)
        worker = start("worker", "agents:app", "--config", config)
        assert worker.end() == 1
        (told,) = worker.told
        assert told.startswith(f"aviso-workers: no NATS server at nats://***@127.0.0.1:{free_port} after 2 attempts: ")
        assert "Connect call failed" in told or "Connection refused" in told
        assert "s3cret" not in str(worker.log)

    def test_says_that_its_credentials_are_refused(
        self, start: Start, tmp_path: Path, write_config: Callable[..., Path]
    ) -> None:
        with NatsServer.start(store_dir=tmp_path / "store", config="authorization { token: right }\n") as server:
            worker = start("worker", "agents:app", "--config", write_config(server.url, token="wrong-one"))
            assert worker.end() == 1
        (told,) = worker.told
        assert told.startswith(f"aviso-workers: {server.url} refused the credentials: ")
        assert "wrong-one" not in told

    @pytest.mark.parametrize("options", [(), ("--processes", "1")])
    def test_names_the_status_port_that_is_in_use_and_may_be_restarted(
        self, start: Start, config: Path, options: tuple[str, ...]
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            worker = start("worker", "agents:app", "--config", config, "--status-port", str(port), *options)
            assert worker.end() == 1
        (told,) = worker.told
        assert f"workers.status.port: cannot listen on 127.0.0.1:{port} (Address already in use)" in told

    def test_names_every_mistake_with_its_file_and_key(self, start: Start, config: Path) -> None:
        config.write_text(config.read_text().replace('"port": 0', '"prot": 0').replace("0, 1000", "1000, 0"))
        worker = start("worker", "agents:app", "--config", config)
        assert worker.end() == 2
        told = "".join(worker.told)
        assert f"{config}:1: workers.status: unknown field(s): prot; did you mean 'port'?" in told, told
        assert f"{config}:1: notification_schema.mars.identifier.step.range must be [min, max]" in told, told
        assert worker.log == []

    def test_can_be_interrupted_while_it_still_tries(
        self, start: Start, free_port: int, write_config: Callable[..., Path]
    ) -> None:
        config = write_config(f"nats://127.0.0.1:{free_port}", retry_attempts=1000)
        worker = start("worker", "agents:app", "--config", config)
        worker.until("worker.started")
        asked = time.monotonic()
        assert worker.end(signal.SIGTERM) == 0
        assert time.monotonic() - asked < PROMPT_SECONDS

    def test_ends_when_the_connection_is_lost_for_good(
        self, start: Start, nats_server: NatsServer, write_config: Callable[..., Path]
    ) -> None:
        config = write_config(nats_server.url, max_reconnect_attempts=1)
        worker = start("worker", "agents:app", "--config", config)
        worker.until("agent.started")
        nats_server.kill()
        assert worker.end() == 1
        (told,) = worker.told
        assert told.startswith(f"aviso-workers: the connection to {nats_server.url} is lost for good: ")


def test_a_worker_that_has_said_anything_stops_in_order_when_it_is_told_to(
    config: Path, start: Callable[..., Command]
) -> None:
    config.write_text(
        config.read_text().replace('"storage_policy": {"allow_duplicates": true}', '"storage_policy": {}')
    )
    worker = start("worker", "agents:app", "--config", config)

    worker.until("config.warning")

    assert worker.end(signal.SIGTERM) == 0, worker.log
