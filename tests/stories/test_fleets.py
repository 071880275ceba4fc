"""Several processes under one supervisor: what becomes of work when they are killed, recycled, stopped or changed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from aviso_workers import App
from tests.commands import Command
from tests.contract.settings import app_config
from tests.stories.processes import Record, Server, Worker, until
from tests.waits import LONG_SECONDS, PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

KILLS = 4
KILL_SECONDS = 2.0


def running(fleet: Worker) -> dict[str, int]:
    """The process ids of the fleet's processes, by name: the last that were started."""
    return {entry["process"]: entry["pid"] for entry in fleet.logged("process.started")}


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
async def test_nothing_is_lost_though_a_process_is_killed_every_two_seconds(
    run_worker: Callable[..., Worker], publish: Callable[..., Any], record: Record
) -> None:
    fleet = run_worker(options=("--processes", "4"))
    await fleet.ready()

    def acts_of(process: int) -> list[Any]:
        return [act for act in record.acts if act.pid == process]

    stored = 0
    for kill in range(KILLS):
        victim = running(fleet)[str(kill % 4 + 1)]
        await publish(range(stored, stored + 200), seconds=0.01)
        stored += 200
        await until(partial(acts_of, victim), what=lambda: fleet.log)
        os.kill(victim, signal.SIGKILL)
        await anyio.sleep(KILL_SECONDS)
    await until(lambda: len(fleet.logged("process.started")) == 4 + KILLS, what=lambda: fleet.log)
    await fleet.ready()
    again = set(running(fleet).values())
    with anyio.fail_after(PATIENCE_SECONDS):
        while not again <= {act.pid for act in record.acts}:  # those that were started again work, too
            await publish(range(stored, stored + 40))
            stored += 40
    await until(
        lambda: set(record.numbers("done")) == set(range(stored)),
        what=lambda: f"without {sorted(set(range(stored)) - set(record.numbers('done')))}\n{fleet.log}",
    )
    crashes = [entry["ended_with"] for entry in fleet.logged("process.crashed")]
    assert crashes == ["signal 9 (Killed)"] * KILLS
    await fleet.ready()
    assert 'aviso_worker_process_exits_total{app="stories",ending="crashed",process="1"} 1.0' in fleet.get("/metrics")


async def members(url: str) -> dict[str, int]:
    """The process ids of the workers that have not ended in order, by their names in the fleet."""
    async with App("operator", config=app_config("jetstream", url)) as app:
        entries = await (await app.key_value("stories__live")).entries()
    found = [json.loads(entry.value) for entry in entries]
    return {each["member"]: each["process"] for each in found if not each["ended"]}


@pytest.mark.slow
async def test_one_signal_drains_all_processes(
    server: Server, run_worker: Callable[..., Worker], publish: Callable[..., Any], record: Record
) -> None:
    fleet = run_worker(options=("--processes", "3"))
    await fleet.ready()
    with anyio.fail_after(PATIENCE_SECONDS):
        while (found := await members(server.url)).keys() != {"1", "2", "3"}:
            await fleet.ready()
    assert found == running(fleet)
    await publish(range(30), seconds=0.4)
    await until(lambda: len({act.pid for act in record.of("begun")}) == 3, what=lambda: record.acts)
    fleet.terminate()
    assert await fleet.ended() == 0
    assert await members(server.url) == {}, "each has said that it ended"
    assert record.numbers("begun") == record.numbers("done"), "what was begun is finished"
    stopped = [entry for entry in fleet.logged("agent.stopped") if entry["agent"] == "work"]
    assert sorted(entry["process"] for entry in stopped) == ["1", "2", "3"]
    assert sum(entry["finished"] for entry in stopped) == len(record.numbers("done")) < 30
    assert [entry["exit_code"] for entry in fleet.logged("process.stopped")] == [0, 0, 0]

    another = run_worker(options=("--processes", "3"))
    await until(lambda: len(record.numbers("done")) == 30, what=lambda: another.log)
    assert set(record.numbers("done").values()) == {1}


async def test_a_second_signal_cancels_what_still_runs(
    run_worker: Callable[..., Worker], publish: Callable[..., Any], record: Record
) -> None:
    settings = {"workers.drain_timeout_seconds": LONG_SECONDS}
    fleet = run_worker(options=("--processes", "2"), settings=settings)
    await fleet.ready()
    await publish(range(8), seconds=LONG_SECONDS)
    await until(lambda: len({act.pid for act in record.of("begun")}) == 2, what=lambda: record.acts)
    fleet.send(signal.SIGINT)
    await until(lambda: len(fleet.logged("worker.stopping")) == 2, what=lambda: fleet.log)
    assert fleet.process.poll() is None
    fleet.terminate()
    assert await fleet.ended() == 0
    assert {entry["process"] for entry in fleet.logged("worker.cancelled")} == {"1", "2"}
    assert record.of("done") == []


@pytest.mark.slow
async def test_processes_end_in_order_when_their_supervisor_is_killed(
    run_worker: Callable[..., Worker], publish: Callable[..., Any], record: Record
) -> None:
    fleet = run_worker(options=("--processes", "2"))
    await fleet.ready()
    processes = running(fleet)
    await publish(range(4), seconds=0.5)
    await until(lambda: len(record.of("begun")) >= 4, what=lambda: record.acts)
    fleet.kill()
    await until(lambda: not any(map(is_there, processes.values())), what=lambda: fleet.log)
    assert len(record.of("done")) == 4
    assert {entry["process"] for entry in fleet.logged("worker.stopped")} == {"1", "2"}


@pytest.mark.slow
async def test_one_port_answers_for_all_processes(run_worker: Callable[..., Worker]) -> None:
    fleet = run_worker(options=("--processes", "2"), settings={"workers.status.token": "the-token"})
    await fleet.ready()
    assert fleet.get("/metrics").startswith("401: ")
    shown = fleet.get("/metrics", token="the-token").splitlines()
    assert [line for line in shown if line.startswith(("aviso_worker_ready{", "aviso_worker_process_running{"))] == [
        'aviso_worker_process_running{app="stories",process="1"} 1.0',
        'aviso_worker_process_running{app="stories",process="2"} 1.0',
        'aviso_worker_ready{process="1",app="stories"} 1.0',
        'aviso_worker_ready{process="2",app="stories"} 1.0',
    ]
    assert len([line for line in shown if line.startswith("# TYPE aviso_worker_ready ")]) == 1
    assert fleet.get("/livez") == "ok\n"

    (_, second) = running(fleet).values()
    os.kill(second, signal.SIGSTOP)
    await fleet.unready("process 2: has not answered")
    assert fleet.get("/livez").startswith("503: process 2: has not answered")
    os.kill(second, signal.SIGCONT)
    await fleet.ready()
    os.kill(second, signal.SIGKILL)
    await until(lambda: "process 2: " in fleet.why_unready(), what=fleet.why_unready)
    assert fleet.get("/livez") == "ok\n", "it is started again, so nobody needs to do that from outside"
    await fleet.ready()


@pytest.mark.slow
async def test_a_process_that_has_handled_its_share_is_replaced(
    run_worker: Callable[..., Worker], publish: Callable[..., Any], record: Record
) -> None:
    fleet = run_worker(options=("--max-notifications", "50"))
    await fleet.ready()
    await publish(range(150), seconds=0.01)
    await until(lambda: len(record.numbers("done")) == 150, what=lambda: fleet.log)
    shares = {act.pid: len([one for one in record.of("done") if one.pid == act.pid]) for act in record.acts}
    *before, last = shares.values()
    assert len(before) >= 1
    assert all(share >= 50 for share in before), shares
    await until(lambda: len(fleet.logged("process.replaced")) >= len(before), what=lambda: f"{shares}\n{fleet.log}")
    beyond = len(fleet.logged("process.replaced")) - len(before)
    assert beyond in ((0, 1) if last >= 50 else (0,)), f"a share is 50 to 55: {shares}"
    assert set(record.numbers("done").values()) == {1}, "nothing is handled twice, either"
    assert fleet.logged("process.crashed") == []


@pytest.mark.slow
async def test_a_process_that_holds_too_much_memory_is_replaced(
    run_worker: Callable[..., Worker], publish: Callable[..., Any], record: Record
) -> None:
    fleet = run_worker(options=("--processes", "1", "--max-rss", "200Mi"))
    await fleet.ready()
    await publish([0], keeps=200)
    await until(lambda: fleet.logged("process.replaced"), what=lambda: fleet.log)
    stopping = [entry for entry in fleet.logged("worker.stopping") if "reason" in entry]
    assert stopping[0]["reason"].endswith("Mi are resident, and --max-rss allows 200Mi")
    await publish([1])
    await until(lambda: record.of("done", 1), what=lambda: fleet.log)
    assert record.of("done", 0)[0].pid != record.of("done", 1)[0].pid


RELOADED = """
from aviso_workers import App, Notification

app = App("stories")
print("this is {version}", flush=True)
{more}

@app.agent("mars")
async def index_{version}(notification: Notification) -> None: ...
"""


@pytest.mark.slow
async def test_a_change_of_the_sources_starts_the_agents_again(
    start: Callable[..., Command], nats_server: Any, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    agents = tmp_path / "agents.py"
    agents.write_text(RELOADED.format(version="one", more=""))
    config = write_config(nats_server.url)
    worker = start("worker", "agents:app", "--config", config, "--reload")

    async def started(agent: str) -> None:
        while (await anyio.to_thread.run_sync(worker.until, "agent.started"))["agent"] != agent:
            pass

    await started("index_one")
    agents.write_text(RELOADED.format(version="two", more="1 / 0"))
    crashed = await anyio.to_thread.run_sync(worker.until, "process.crashed")
    assert crashed["again"] == "after a change"
    assert "ZeroDivisionError: division by zero\n" in worker.told
    agents.write_text(RELOADED.format(version="three", more=""))
    await started("index_three")
    config.write_text(config.read_text().replace("1000", "2000"))
    reloading = await anyio.to_thread.run_sync(worker.until, "fleet.reloading")
    assert reloading["changed"] == [str(config)]
    await started("index_three")
    assert worker.end(signal.SIGTERM) == 0
