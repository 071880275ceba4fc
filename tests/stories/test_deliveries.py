"""What becomes of notifications when workers die, are replaced, or cannot handle one: real processes, a real server."""

from __future__ import annotations

import itertools
import signal
import time
from typing import Any

import anyio
import pytest

from aviso_workers import App
from aviso_workers.engine.flow import MAX_PREFETCH
from aviso_workers.ops.dead_letters import Selection, StoredDeadLetters
from aviso_workers.state.dead_letter_records import DeadLetter
from aviso_workers.worker import NOT_ENDED
from tests.contract.settings import app_config
from tests.stories import agents
from tests.stories.agents import ACK_WAIT_SECONDS, RETRY
from tests.stories.conftest import Publish, RunWorker
from tests.stories.processes import Record, Server, Worker, until
from tests.waits import LONG_SECONDS, PATIENCE_SECONDS, PROMPT_SECONDS

pytestmark = pytest.mark.anyio


async def dead_letters(server: Server) -> list[DeadLetter]:
    async with App("reader", config=app_config("jetstream", server.url)) as app:
        stored = StoredDeadLetters(app.session.admin, events=app.events)
        return [dead_letter async for dead_letter in stored.select(Selection())]


async def unfinished(server: Server, consumer: str) -> tuple[int, int]:
    """Notifications that were never delivered, and such that are not settled."""
    async with App("reader", config=app_config("jetstream", server.url)) as app:
        info = await app.session.backend.consumer_info("MARS", consumer)
        return info.num_pending, info.num_ack_pending


async def all_done(record: Record, numbers: range) -> None:
    """Wait until all of them are done, however long that takes while one after the other is."""

    def left() -> set[int]:
        return set(numbers) - set(record.numbers("done"))

    while before := left():
        await until(lambda: len(left()) < len(before), what=lambda: f"not done: {sorted(left())}")


@pytest.mark.slow
async def test_what_a_killed_worker_held_is_done_by_another_soon_after_ack_wait(
    run_worker: RunWorker, publish: Publish, record: Record
) -> None:
    numbers = range(300)
    workers = [run_worker(), run_worker()]
    for worker in workers:
        await worker.ready()
    await publish(numbers, seconds=0.05)
    victim, survivor = workers
    await until(lambda: len(record.of("done")) > 60, what=lambda: record.numbers("done"))

    def stands_still_at_work() -> set[int]:
        """What it has begun and not done, after it was stopped; where that is nothing, it goes on."""
        victim.send(signal.SIGSTOP)
        held = {act.number for act in record.of("begun") if act.pid == victim.pid}
        held -= {act.number for act in record.of("done") if act.pid == victim.pid}
        if not held:
            victim.send(signal.SIGCONT)
        return held

    await until(stands_still_at_work, what=lambda: record.acts)
    victim.kill()
    killed = time.time()
    held = stands_still_at_work()
    await all_done(record, numbers)

    done = record.numbers("done")
    assert held, "the worker was killed while it did nothing: the story shows nothing"
    again = {act.number: act.time - killed for act in record.of("begun") if act.pid == survivor.pid}
    assert {number: again[number] for number in held if again[number] > ACK_WAIT_SECONDS + PROMPT_SECONDS} == {}
    # Done by the victim and not yet acked when it died: at most what it ran at once.
    assert sum(done.values()) - len(numbers) <= 4


@pytest.mark.slow
async def test_a_deploy_under_load_loses_nothing_and_does_nothing_twice(
    run_worker: RunWorker, publish: Publish, record: Record, server: Server
) -> None:
    numbers = range(400)
    old = run_worker()
    await old.ready()
    async with anyio.create_task_group() as publishing:
        publishing.start_soon(lambda: publish(numbers, seconds=0.05))
        await until(lambda: len(record.of("done")) > 40, what=lambda: record.numbers("done"))
        new = run_worker()
        old.terminate()
        assert await old.ended() == 0
        await new.ready()
    await all_done(record, numbers)

    assert {number: n for number, n in record.numbers("begun").items() if n != 1} == {}
    assert {number: n for number, n in record.numbers("done").items() if n != 1} == {}
    assert await unfinished(server, "stories__work") == (0, 0)
    (stopped,) = (entry for entry in old.logged("agent.stopped") if entry["agent"] == "work")
    assert stopped["finished"] == len([act for act in record.of("done") if act.pid == old.pid])
    assert stopped["returned"] >= 1


@pytest.mark.slow
async def test_a_worker_that_is_told_to_stop_finishes_what_runs_in_time_and_gives_back_the_rest(
    run_worker: RunWorker, publish: Publish, record: Record, server: Server
) -> None:
    await publish([1, 2], seconds=2)
    await publish([3, 4], seconds=LONG_SECONDS)
    await publish([5, 6])
    worker = run_worker(settings={"workers.drain_timeout_seconds": 4}, ack_wait_seconds=LONG_SECONDS)
    await until(lambda: len(record.of("begun")) == 4, what=lambda: record.acts)
    with anyio.fail_after(PATIENCE_SECONDS):
        while await unfinished(server, "stories__work") != (0, 6):  # noqa: ASYNC110
            await anyio.sleep(0.05)

    worker.terminate()
    await worker.unready("stopping")
    stopping = time.monotonic()
    assert await worker.ended() == 0

    assert time.monotonic() - stopping < 4 + PROMPT_SECONDS
    assert record.numbers("done") == {1: 1, 2: 1}
    (stopped,) = (entry for entry in worker.logged("agent.stopped") if entry["agent"] == "work")
    assert (stopped["finished"], stopped["returned"]) == (2, 4)
    assert await unfinished(server, "stories__work") == (0, 4)
    again = run_worker(ack_wait_seconds=LONG_SECONDS)
    await again.ready()
    await until(lambda: len(record.of("begun")) == 8, what=lambda: record.acts)


@pytest.mark.slow
async def test_a_second_signal_cancels_what_runs_and_gives_it_back(
    run_worker: RunWorker, publish: Publish, record: Record
) -> None:
    settings = {"workers.drain_timeout_seconds": LONG_SECONDS}
    worker = run_worker(settings=settings, ack_wait_seconds=LONG_SECONDS)
    await worker.ready()
    await publish([1], seconds=LONG_SECONDS)
    await until(lambda: record.of("begun"), what=lambda: worker.log)

    worker.terminate()
    await worker.unready("stopping")
    worker.send(signal.SIGTERM)
    await worker.ended()

    assert worker.logged("worker.cancelled")
    again = run_worker(ack_wait_seconds=LONG_SECONDS)
    await again.ready()
    await until(lambda: len(record.of("begun")) == 2, what=lambda: record.acts)


async def test_a_plain_function_that_does_not_end_holds_up_no_worker(
    run_worker: RunWorker, publish: Publish, record: Record
) -> None:
    worker = run_worker(app="threads", settings={"workers.drain_timeout_seconds": 0.5})
    await worker.ready()
    await publish([1], seconds=LONG_SECONDS)
    await until(lambda: record.of("begun"), what=lambda: worker.log)

    worker.terminate()

    assert await worker.ended() == NOT_ENDED


@pytest.mark.slow
async def test_a_poison_notification_is_tried_as_its_policy_says_then_dead_lettered_and_its_neighbours_do_not_notice(
    run_worker: RunWorker, publish: Publish, record: Record, server: Server
) -> None:
    worker = run_worker()
    await worker.ready()
    await publish([0], fails=True)
    await publish(range(1, 201), seconds=0.02)
    await until(lambda: worker.logged("notification.dead_lettered"), what=lambda: worker.log)

    tries = [act.time for act in record.of("begun", 0)]
    assert len(tries) == RETRY.attempts
    waits = [later - earlier for earlier, later in itertools.pairwise(tries)]
    for failures, wait in enumerate(waits, start=1):
        assert wait / RETRY.delay_seconds(failures) >= 0.8, f"after {failures} of {waits}"
        assert wait < RETRY.delay_seconds(failures) + PROMPT_SECONDS, f"after {failures} of {waits}"
    (dead_letter,) = await dead_letters(server)
    assert (dead_letter.agent, dead_letter.attempts, dead_letter.reason) == (
        "work",
        RETRY.attempts,
        "attempts_exhausted",
    )
    assert record.numbers("done") == dict.fromkeys(range(1, 201), 1)
    # 200 of 0.02 s, four at a time: they are long done when the poison is dead-lettered.
    assert max(act.time for act in record.of("done")) < tries[-1]


@pytest.mark.slow
async def test_a_poison_notification_holds_up_its_own_lane_and_no_other(
    run_worker: RunWorker, publish: Publish, record: Record, server: Server
) -> None:
    worker = run_worker(app="lanes")
    await worker.ready()
    await publish([0], expver="0001", fails=True)
    await publish(range(1, 6), expver="0001")
    await publish(range(10, 30), expver="0002", seconds=0.01)
    await all_done(record, range(1, 6))
    await all_done(record, range(10, 30))

    assert [act.number for act in record.of("done") if act.number < 10] == [1, 2, 3, 4, 5]
    assert [act.number for act in record.of("done") if act.number >= 10] == list(range(10, 30))
    assert record.of("begun", 1)[0].time > record.of("begun", 0)[-1].time > record.of("done", 29)[0].time
    assert len(record.of("begun", 0)) == RETRY.attempts
    assert [dead_letter.attempts for dead_letter in await dead_letters(server)] == [RETRY.attempts]


@pytest.mark.slow
async def test_a_handler_of_twice_ack_wait_is_called_once(
    run_worker: RunWorker, publish: Publish, record: Record, server: Server
) -> None:
    ack_wait_seconds = 4.0  # longer than a busy machine needs until a worker says that it goes on
    workers = [run_worker(ack_wait_seconds=ack_wait_seconds) for _ in range(2)]
    for worker in workers:
        await worker.ready()
    await publish([1], seconds=2 * ack_wait_seconds)
    await all_done(record, range(1, 2))

    assert record.numbers("begun") == {1: 1}
    assert await unfinished(server, "stories__work") == (0, 0)


@pytest.mark.slow
async def test_attempts_are_counted_over_restarts_of_the_worker_and_crashes_are_none(
    run_worker: RunWorker, publish: Publish, record: Record, server: Server
) -> None:
    first = run_worker()
    await first.ready()
    await publish([0], fails=True)
    await until(lambda: len(record.of("begun")) == 2, what=lambda: first.log)
    await until(lambda: len(first.logged("notification.retried")) == 2, what=lambda: first.log)
    first.terminate()
    await first.ended()
    second = run_worker()
    await until(lambda: len(second.logged("notification.retried")) == 2, what=lambda: second.log)
    second.kill()
    third = run_worker()
    await until(lambda: third.logged("notification.dead_lettered"), what=lambda: third.log)

    assert len(record.of("begun", 0)) == RETRY.attempts
    assert [dead_letter.attempts for dead_letter in await dead_letters(server)] == [RETRY.attempts]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deed", "ended_by", "exit_code"),
    [
        ({"kills": True}, [], 137),
        pytest.param(
            {"ends_loop": "exit"}, ["SystemExit(0), raised in a task or a callback"], 1, marks=pytest.mark.slow
        ),
        pytest.param(
            {"ends_loop": "interrupt"},
            ["KeyboardInterrupt(), raised in a task or a callback"],
            1,
            marks=pytest.mark.slow,
        ),
        pytest.param({"ends_loop": "stop"}, ["loop.stop()"], 1, marks=pytest.mark.slow),
        pytest.param({"ends_loop": "cancel"}, ["the cancellation of all tasks"], 1, marks=pytest.mark.slow),
    ],
    ids=lambda value: str(*value.values()) if isinstance(value, dict) else "",
)
async def test_a_notification_that_ends_its_process_becomes_a_dead_letter_and_nothing_else_does(
    run_worker: RunWorker,
    publish: Publish,
    record: Record,
    server: Server,
    deed: dict[str, Any],
    ended_by: list[str],
    exit_code: int,
) -> None:
    numbers = range(40)
    worker = run_worker(app="deadly")
    await worker.ready()
    await publish([number for number in numbers if number != 5], seconds=0.05)
    await publish([5], **deed)
    with anyio.fail_after(PATIENCE_SECONDS):
        while not worker.logged("notification.dead_lettered"):
            if (code := worker.process.poll()) is not None:
                assert code == exit_code
                ends = worker.logged("loop.ended")
                assert [end["ended_by"] for end in ends] == ended_by
                assert all("crash mars@40" in end["running"] for end in ends)
                assert all(agents.__file__ in end["line"] for end in ends if "raised" in end["ended_by"])
                assert not worker.logged("agent.stopped")
                worker = run_worker(app="deadly")
            await anyio.sleep(0.05)
    await all_done(record, range(6, 40))

    (dead_letter,) = await dead_letters(server)
    assert (dead_letter.agent, dead_letter.reason, dead_letter.attempts) == ("crash", "worker_died", 2)
    assert (
        dead_letter.error
        == "WorkerDiedError: the worker process ended while it handled this notification (failed attempts so far: 2)"
    )
    assert len(record.of("killed", 5)) == 4  # twice beside others, then twice alone
    assert {number for number in numbers if number != 5} == set(record.numbers("done"))
    await until(lambda: set(record.numbers("beside")) == set(numbers), what=lambda: record.numbers("beside"))
    assert [await unfinished(server, f"deadly__{agent}") for agent in ("crash", "beside")] == [(0, 0), (0, 0)]


@pytest.mark.slow
async def test_a_worker_whose_dead_letters_are_refused_is_not_ready_and_says_so_once(
    run_worker: RunWorker, publish: Publish, record: Record
) -> None:
    worker = run_worker(settings={"workers.dead_letters.max_bytes": "1Ki"})
    await worker.ready()
    await publish(range(4), fails=True)

    await worker.unready(
        "agent work: dead letters cannot be stored: stream aviso_workers_dead_letters__stories is full"
    )

    await publish([4])
    await all_done(record, range(4, 5))  # it goes on meanwhile
    (said, *_) = worker.logged("dead_letters.not_stored")
    assert (said["agent"], said["level"], said["again_in_seconds"]) == ("work", "error", 10.0)
    assert len(worker.logged("dead_letters.not_stored")) == 1
    assert 'aviso_worker_dead_letters_refused{agent="work",app="stories",base="mars"} 1.0' in worker.get("/metrics")


@pytest.mark.slow
async def test_a_worker_whose_threads_are_stuck_is_not_ready_says_so_once_and_stops(
    run_worker: RunWorker, publish: Publish, record: Record
) -> None:
    worker = run_worker(app="hanging", settings={"workers.drain_timeout_seconds": 1.0})
    await worker.ready()
    await publish(range(4), seconds=3600)

    await worker.unready("agent hang: 2 threads are stuck")

    assert len(record.numbers("begun")) == 2
    (said,) = worker.logged("threads.stuck")
    assert (said["agent"], said["level"], said["threads"]) == ("hang", "error", 2)
    for name in ("threads_stuck", "threads_overdue", "in_flight"):
        assert f'aviso_worker_{name}{{agent="hang",app="hanging",base="mars"}} 2.0' in worker.get("/metrics")
    worker.process.terminate()
    assert await worker.ended() == NOT_ENDED


@pytest.mark.slow
async def test_a_key_with_more_than_a_worker_prefetches_stays_in_order_in_each_worker_although_they_are_killed(
    run_worker: RunWorker, publish: Publish, record: Record, server: Server
) -> None:
    slow, fast = range(MAX_PREFETCH + 200), range(10_000, 10_100)
    await publish(slow, expver="0001", seconds=0.002)
    await publish(fast, expver="0002")
    pids = []
    for enough in (20, 60):
        worker = run_worker(app="lanes")
        pids.append(worker.pid)
        await until(lambda: set(fast) <= set(record.numbers("done")), what=lambda: record.numbers("done"))
        await until(lambda: len(record.of("done")) > len(fast) + enough, what=lambda: record.numbers("done"))  # noqa: B023
        worker.kill()
    pids.append(run_worker(app="lanes").pid)
    await all_done(record, slow)

    for pid in pids:
        begun = [act.number for act in record.of("begun") if act.pid == pid and act.number in slow]
        assert begun == list(range(begun[0], begun[-1] + 1)), "one after another, and none passed over"
    assert await unfinished(server, "lanes__in_order") == (0, 0)
    # Done by a worker and not yet acknowledged when it was killed: one of the key, and some of those beside it.
    assert sum(record.numbers("done").values()) - len(slow) - len(fast) <= 2 * 4


@pytest.mark.slow
@pytest.mark.parametrize("app", ["app", "lanes"])
async def test_a_worker_that_was_paused_begins_nothing_that_another_one_has_handled_meanwhile(
    run_worker: RunWorker, publish: Publish, record: Record, app: str
) -> None:
    paused = run_worker(app=app)
    await paused.ready()
    await publish(range(40), seconds=0.05)
    await until(lambda: len(record.of("done")) >= 4, what=lambda: record.acts)
    paused.send(signal.SIGSTOP)
    begun_before = {act.number for act in record.of("begun")}
    other = run_worker(app=app)
    await other.ready()
    await until(lambda: {*range(40)} - begun_before <= done_by(record, other), what=lambda: record.acts)

    woken = time.time()
    paused.send(signal.SIGCONT)
    await publish(range(40, 60), seconds=0.05)
    await all_done(record, range(60))

    again = {act.number for act in record.of("begun") if act.pid == paused.pid and act.time > woken}
    # The pause may have come after one was taken and before its handler began.
    assert len(again & done_by(record, other)) <= 1, record.acts
    assert "was away for longer than ack_wait" in str(paused.logged("agent.disturbed")[0])


def done_by(record: Record, worker: Worker) -> set[int]:
    return {act.number for act in record.of("done") if act.pid == worker.pid}
