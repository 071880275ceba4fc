"""The last failures of agents, timers and tasks, as workers record them. Time is virtual."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import anyio
import pytest

from aviso_workers import config
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.clocks import VirtualClock
from aviso_workers.engine.failure_recorder import OVER_SECONDS, LastFailures
from aviso_workers.errors import NotFoundError
from aviso_workers.events import TaskFailed, Ticked, WindowDone
from aviso_workers.state import consumer_records, failure_records
from aviso_workers.state.failure_records import WRITE_SECONDS, Kind, LastFailure, Retrying

pytestmark = pytest.mark.anyio

DUE = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
async def backend() -> AsyncGenerator[InMemoryBackend, None]:
    async with InMemoryBackend(config.InMemory(), clock=VirtualClock()) as backend:
        yield backend


async def pass_time(backend: InMemoryBackend, seconds: float) -> None:
    assert isinstance(backend.clock, VirtualClock)
    await backend.clock.advance(seconds)


@pytest.fixture
def failures(backend: InMemoryBackend) -> LastFailures:
    return LastFailures(backend, app="fields")


def raised(text: str) -> ValueError:
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


def retrying(
    sequence: int, *, key: str = "", behind: Callable[[], int] = lambda: 0, blocked: bool = False
) -> Callable[[datetime], Retrying]:
    def known(again_at: datetime) -> Retrying:
        return Retrying(
            again_at=again_at,
            stream="MARS",
            sequence=sequence,
            timestamp_ns=sequence,
            attempt=6 if blocked else 1,
            attempts=None if blocked else 6,
            blocked=blocked,
            error="ValueError",
            key=key,
            behind=behind(),
        )

    return known


async def stored(backend: InMemoryBackend) -> dict[tuple[str, str, str], LastFailure]:
    return failure_records.parsed(await consumer_records.entries(backend))


async def recorded(backend: InMemoryBackend, kind: str = "agents", name: str = "index") -> LastFailure:
    return (await stored(backend))["fields", kind, name]


async def test_the_first_failure_is_recorded_at_once_and_those_that_follow_together(
    backend: InMemoryBackend, failures: LastFailures
) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(failures.keep_writing)
        failures.note("agents", "index", raised("no field\nhere"))
        await pass_time(backend, WRITE_SECONDS / 2)
        first = await recorded(backend)
        assert (first.error, first.text, first.times) == ("ValueError", "no field here", 1)
        assert first.at.startswith("test_last_failures.py:")
        assert first.described.startswith("ValueError: no field here (test_last_failures.py:")

        for _ in range(300):
            failures.note("agents", "index", KeyError("class"))
        assert (await recorded(backend)).times == 1
        await pass_time(backend, WRITE_SECONDS)
        last = await recorded(backend)
        assert (last.error, last.times, last.since) == ("KeyError", 301, first.since)
        assert last.last > first.last
        tasks.cancel_scope.cancel()


async def test_what_is_no_text_of_json_is_recorded_all_the_same(
    backend: InMemoryBackend, failures: LastFailures
) -> None:
    failures.note("agents", "index", raised("a\x00b\ud800c"))
    await failures.write()
    assert (await recorded(backend)).text == r"a\x00b\ud800c"


async def test_nothing_is_written_where_nothing_fails(backend: InMemoryBackend, failures: LastFailures) -> None:
    failures.observe(Ticked(timer="report", time=DUE, late_seconds=0, seconds=0))
    await failures.write()
    with pytest.raises(NotFoundError):
        await backend.stream_info("KV_fields__state")


async def test_workers_count_together(backend: InMemoryBackend, failures: LastFailures) -> None:
    other = LastFailures(backend, app="fields")
    for worker in (failures, other, failures):
        worker.note("agents", "index", raised("no field"))
        await worker.write()
    assert (await recorded(backend)).times == 3


async def test_a_failure_long_after_the_last_begins_anew(backend: InMemoryBackend, failures: LastFailures) -> None:
    failures.note("agents", "index", raised("no field"), again_in_seconds=30)
    await failures.write()
    before = await recorded(backend)
    assert before.until - before.last == timedelta(seconds=30 + OVER_SECONDS)
    await pass_time(backend, 30 + OVER_SECONDS + 1)
    failures.note("agents", "index", raised("no index"))
    await failures.write()
    after = await recorded(backend)
    assert (after.times, after.since) == (1, after.last)


async def test_what_is_retried_is_recorded_until_it_is_due(backend: InMemoryBackend, failures: LastFailures) -> None:
    behind = 3
    failures.note(
        "agents", "index", raised("a"), again_in_seconds=60, retrying=retrying(7, key="od", behind=lambda: behind)
    )
    failures.note("agents", "index", raised("b"), again_in_seconds=30, retrying=retrying(8))
    behind = 5
    await failures.write()
    found = (await recorded(backend)).retrying
    assert [(each.sequence, each.key, each.behind) for each in found] == [(8, "", 0), (7, "od", 5)]

    await pass_time(backend, 40)
    failures.note("agents", "index", raised("c"), again_in_seconds=30, retrying=retrying(9))
    await failures.write()
    assert [each.sequence for each in (await recorded(backend)).retrying] == [7, 9]


async def test_those_that_are_due_next_are_kept_of_very_many(backend: InMemoryBackend, failures: LastFailures) -> None:
    for sequence in range(200):
        failures.note("agents", "index", raised("a"), again_in_seconds=sequence, retrying=retrying(sequence))
    await failures.write()
    assert len((await recorded(backend)).retrying) == failure_records.MAX_RETRYING


async def test_those_at_which_an_agent_is_blocked_are_kept_before_all_others(
    backend: InMemoryBackend, failures: LastFailures
) -> None:
    for sequence in (1000, 1001):
        failures.note("agents", "index", raised("a"), again_in_seconds=600, retrying=retrying(sequence, blocked=True))
    for sequence in range(200):
        failures.note("agents", "index", raised("a"), again_in_seconds=1, retrying=retrying(sequence))
    await failures.write()
    for sequence in range(200, 400):
        failures.note("agents", "index", raised("a"), again_in_seconds=1, retrying=retrying(sequence))
    await failures.write()
    found = (await recorded(backend)).retrying
    assert [each.sequence for each in found[:2]] == [1000, 1001]
    assert len(found) == failure_records.MAX_RETRYING

    await pass_time(backend, 700)  # their next attempt runs
    failures.note("agents", "index", raised("a"), again_in_seconds=1, retrying=retrying(2000))
    failures.note_settled("index", "MARS", 1000, handled=True)
    await failures.write()
    assert [each.sequence for each in (await recorded(backend)).retrying] == [1001, 2000]


async def test_what_is_settled_before_it_was_recorded_is_not_recorded_as_blocked(
    backend: InMemoryBackend, failures: LastFailures
) -> None:
    failures.note("agents", "index", raised("a"), retrying=retrying(7, blocked=True))
    failures.note_settled("index", "MARS", 7, handled=True)
    await failures.write()
    assert (await recorded(backend)).retrying == ()


async def test_a_timer_fails_until_it_succeeds(backend: InMemoryBackend, failures: LastFailures) -> None:
    for _ in range(2):
        failures.observe(Ticked(timer="report", time=DUE, late_seconds=0, seconds=0, error=raised("no report")))
    await failures.write()
    failing = await recorded(backend, "timers", "report")
    assert failing.times == 2
    assert failing.until - failing.last > timedelta(days=365)

    await pass_time(backend, 10)
    failures.observe(Ticked(timer="report", time=DUE, late_seconds=0, seconds=0))
    await failures.write()
    over = await recorded(backend, "timers", "report")
    assert (over.times, over.error) == (2, "ValueError")
    assert over.until == over.last + timedelta(seconds=10)


async def test_a_timer_that_failed_in_another_worker_succeeds_again(
    backend: InMemoryBackend, failures: LastFailures
) -> None:
    """As after a deploy that mends it."""
    failures.observe(Ticked(timer="report", time=DUE, late_seconds=0, seconds=0, error=raised("no report")))
    await failures.write()
    mended = LastFailures(backend, app="fields")
    await pass_time(backend, 10)
    mended.observe(Ticked(timer="report", time=DUE, late_seconds=0, seconds=0))
    await mended.write()
    over = await recorded(backend, "timers", "report")
    assert over.until == over.last + timedelta(seconds=10)


async def test_a_timer_that_fails_while_its_success_is_recorded_fails(
    backend: InMemoryBackend, failures: LastFailures, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ticked(error: Exception | None = None) -> None:
        failures.observe(Ticked(timer="report", time=DUE, late_seconds=0, seconds=0, error=error))

    ticked(raised("no report"))
    await failures.write()
    entry = consumer_records.entry

    async def entry_and_a_failure(*asked: Any) -> Any:
        monkeypatch.undo()
        ticked(raised("no report again"))
        return await entry(*asked)

    monkeypatch.setattr(consumer_records, "entry", entry_and_a_failure)
    ticked()
    await failures.write()
    await failures.write()
    failing = await recorded(backend, "timers", "report")
    assert (failing.text, failing.until - failing.last > timedelta(days=365)) == ("no report again", True)


@pytest.mark.parametrize("ahead_seconds", [-3600, 3600])
async def test_a_worker_whose_clock_is_wrong_is_told_as_failing_for_as_long_as_others(
    backend: InMemoryBackend, failures: LastFailures, monkeypatch: pytest.MonkeyPatch, ahead_seconds: int
) -> None:
    now = failures._now
    monkeypatch.setattr(failures, "_now", lambda: now() + timedelta(seconds=ahead_seconds))
    failures.note("agents", "index", raised("no field"), again_in_seconds=30)
    await failures.write()
    until = (await recorded(backend)).until - now()
    assert timedelta(seconds=29 + OVER_SECONDS) <= until <= timedelta(seconds=31 + OVER_SECONDS)


async def test_what_is_noted_while_a_worker_stops_is_recorded(
    backend: InMemoryBackend, failures: LastFailures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first write is cancelled on its way."""
    with monkeypatch.context() as slow:

        async def never(*_: object, **__: object) -> None:
            await anyio.sleep_forever()

        slow.setattr(backend, "key_value", never)
        failures.note("agents", "index", raised("no field"))
        with anyio.move_on_after(0.01):
            await failures.write()
    await failures.write()
    assert (await recorded(backend)).times == 1


async def test_what_the_code_does_not_have_any_more_does_not_fail(
    backend: InMemoryBackend, failures: LastFailures
) -> None:
    for kind, name in (("timers", "report"), ("timers", "gone"), ("tasks", "watch"), ("agents", "index")):
        failures.note(cast(Kind, kind), name, raised("no report"))
    await failures.write()
    await failure_records.remove_others(backend, app="fields", timers=["report"], tasks=[])
    assert {(kind, name) for _, kind, name in await stored(backend)} == {
        ("timers", "report"),
        ("agents", "index"),
    }


async def test_tasks_and_windows_are_recorded_too(backend: InMemoryBackend, failures: LastFailures) -> None:
    failures.observe(TaskFailed(task="<lambda>", error=raised("no task"), again_in_seconds=1))
    window = WindowDone(agent="index", key="od", start=DUE, end=DUE, seconds=0, error=raised("no window"))
    failures.observe(window)
    await failures.write()
    assert (await recorded(backend, "tasks", "_lambda_")).text == "no task"
    found = await recorded(backend)
    assert (found.text, found.of) == ("no window", "a window")


async def test_what_cannot_be_written_is_written_later(
    backend: InMemoryBackend, failures: LastFailures, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures.note("agents", "index", raised("no field"))
    with monkeypatch.context() as denied:

        async def deny(*_: object, **__: object) -> None:
            raise NotFoundError("denied")

        denied.setattr(backend, "key_value", deny)
        await failures.write()
    failures.note("agents", "index", raised("no field"))
    await failures.write()
    assert (await recorded(backend)).times == 2


async def test_a_record_that_cannot_be_read_counts_as_none(backend: InMemoryBackend, failures: LastFailures) -> None:
    await (await consumer_records.bucket(backend, "fields")).put("fields/agents/index/failure", b"[")
    assert await stored(backend) == {}
    failures.note("agents", "index", raised("no field"))
    await failures.write()
    assert (await recorded(backend)).times == 1


async def test_a_retired_agent_has_none(backend: InMemoryBackend, failures: LastFailures) -> None:
    failures.note("agents", "index", raised("no field"))
    await failures.write()
    failures.note("timers", "report", raised("no report"))
    await failures.write()
    await consumer_records.remove_notes(backend, app="fields", agent="index")
    assert {*await stored(backend)} == {("fields", "timers", "report")}
    await consumer_records.remove_notes(backend, app="fields")
    assert await stored(backend) == {}


async def test_what_was_handled_that_had_failed_is_told(backend: InMemoryBackend, failures: LastFailures) -> None:
    failures.note("agents", "index", raised("a"), again_in_seconds=1, retrying=retrying(7))
    failures.note("agents", "index", raised("a"), again_in_seconds=1, retrying=retrying(8))
    await failures.write()
    await pass_time(backend, 1)
    failures.note_settled("index", "MARS", 7, handled=False)
    await failures.write()
    found = await recorded(backend)
    assert ([each.sequence for each in found.retrying], found.handled) == ([8], None), "it is a dead letter"
    failures.note_settled("index", "MARS", 8, handled=True)
    await failures.write()
    found = await recorded(backend)
    assert found.handled is not None
    assert (found.retrying, found.handled > found.last) == ((), True)
    failures.note_settled("index", "MARS", 9, handled=False)
    failures.note("agents", "index", raised("a"), again_in_seconds=1, retrying=retrying(9))  # it was handed back
    await failures.write()
    assert [each.sequence for each in (await recorded(backend)).retrying] == [9], "as it has failed again"
    await pass_time(backend, 1)
    failures.note("agents", "index", raised("a"), again_in_seconds=1, retrying=retrying(9))
    await failures.write()
    found = await recorded(backend)
    assert found.handled is not None
    assert found.handled < found.last, "it fails again"
