"""What somebody else has written to our own streams: it is left out and stated, and nothing else waits for it."""

from __future__ import annotations

import itertools
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest

from aviso_workers import App
from aviso_workers.backends import Message
from aviso_workers.errors import RefusedError
from aviso_workers.events import Skipped
from aviso_workers.ops import agent_inventory, agent_report
from aviso_workers.ops.dead_letters import Selection, StoredDeadLetters
from aviso_workers.state import consumer_records, dead_letter_records, delayed_messages, own_streams, worker_records
from aviso_workers.state.worker_records import AppWorkers
from aviso_workers.testing import Harness
from tests.agent_looks import looked
from tests.contract.settings import mars
from tests.waits import PATIENCE_SECONDS

DEAD_LETTERS = own_streams.of_app(own_streams.DEAD_LETTERS, "contract")
RETRIES = own_streams.of_app(own_streams.RETRIES, "contract")

pytestmark = pytest.mark.anyio

NUMBERS = itertools.count(1)
NO_JSON = (b"\xff\xfe", b"[" * 100_000, b'{"x":' + b"[" * 100_000, b"", b"null", b'{"stream": 1}')
LONG_AGO = "-99999999999999999999"
FAR_AWAY = "9" * 30
MANY_DIGITS = "9" * 5000


async def put(app: App, stream: str, subject: str, data: bytes = b"{}", /, **headers: str) -> None:
    """Store it, as somebody else would who has framework rights."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    message = Message(subject=subject, data=data, headers=named)
    await app.session.backend.publish(
        message, message_id=f"forged-{next(NUMBERS)}", stream=stream, timeout_seconds=PATIENCE_SECONDS
    )


async def test_an_identifier_that_its_rule_does_not_allow_is_left_out_and_told(
    app: App, t: Harness, handled: list[int]
) -> None:
    skipped: list[Skipped] = []
    app.events.listen(skipped.append, Skipped)
    await t.settle()
    await put(app, "MARS", "mars.od.0001.g.20261120.0000.oper.%2E%2E/etc", b"{}")
    receipt = await t.notify("mars", mars(step="1"), {})
    await t.settle()

    assert handled == [1]
    assert [(dead_letter.reason, dead_letter.original.sequence) for dead_letter in t.dead_letters] == [
        ("undecodable", 1)
    ]
    assert [found.sequence async for found in app.replay("mars")] == [receipt.sequence]
    assert [(one.event_type, one.sequence) for one in skipped] == [("mars", receipt.sequence - 1)]


async def test_retries_that_nobody_has_asked_for_harm_nothing(app: App, t: Harness, handled: list[int]) -> None:
    await t.settle()
    subject = dead_letter_records.retry_subject("contract", "index")
    whole = {
        "Aviso_Subject": "mars.od.0001.g.20261120.0000.oper.7",
        "Aviso_Stream": "MARS",
        "Aviso_Sequence": "1",
        "Aviso_Timestamp": "1700000000000000000",
    }
    for name in ("Aviso_Sequence", "Aviso_Timestamp"):
        for value in (LONG_AGO, FAR_AWAY, MANY_DIGITS, "x", ""):
            await put(app, RETRIES, subject, **{**whole, name: value})
    for value in (FAR_AWAY, MANY_DIGITS, "x", "0", "٣"):
        await put(app, RETRIES, subject, **whole, Aviso_First_Part=value)
    await put(app, RETRIES, subject, b"\xff\xfe")
    await t.notify("mars", mars(step="1"), {})
    await t.settle()

    assert 1 in handled, "the worker lives, and handles what is good"
    await t.notify("mars", mars(step="2"), {})
    await t.settle()
    assert handled[-1] == 2


async def test_dead_letters_that_are_none_are_left_out(app: App, t: Harness) -> None:
    await t.notify("mars", mars(step="1"), "reject")
    await t.settle()
    subject = f"{dead_letter_records.SUBJECT}.contract.index"
    names = ("App", "Agent", "Reason", "Error", "Traceback", "Stream", "Subject")
    whole = {f"Aviso_{name}": "x" for name in names}
    whole |= {"Aviso_Attempts": "1", "Aviso_Sequence": "1", "Aviso_Timestamp": "1"}
    for name in ("Aviso_Attempts", "Aviso_Sequence", "Aviso_Timestamp"):
        for value in (LONG_AGO, FAR_AWAY, MANY_DIGITS):
            await put(app, DEAD_LETTERS, subject, **{**whole, name: value})

    dead_letters = [
        dead_letter async for dead_letter in StoredDeadLetters(app.session.admin, events=app.events).select(Selection())
    ]

    assert [dead_letter.agent for dead_letter in dead_letters] == ["index"]


async def test_what_is_due_and_cannot_be_published_is_left_out(app: App, t: Harness) -> None:
    await app.notify("plain", {"a": 1, "b": "x"}, due=1)
    whole = {"Aviso_Stream": "PLAIN", "Aviso_Event_Type": "plain", "Aviso_Message_Id": "forged"}
    schedules, due = delayed_messages.stream_of("PLAIN"), delayed_messages.due_subject("PLAIN")
    subjects = ["plain." + "x" * 5000, "plain.a b", "plain.1.2\x01", "plain.1.", "plain", "plain.*.x", "plain.%zz.x"]
    for subject in subjects:
        await put(app, schedules, due, b"1", **whole, Aviso_Subject=subject)
    await put(app, schedules, due, b"\xff")
    await t.advance(2)
    await t.settle()

    assert [(one.event_type, one.identifier) for one in t.published] == [("plain", {"a": "1", "b": "x"})]
    found = await app.session.backend.consumer_info(schedules, "aviso_workers__schedule-courier")
    assert found.num_ack_pending == 0, "none of them comes again"
    assert app.session.backend.connection.ready


async def test_a_record_of_a_consumer_that_is_none_counts_as_none(app: App, t: Harness, handled: list[int]) -> None:
    await t.settle()
    key = ("contract", "index", "MARS")
    recorded = await consumer_records.stored(app.session.admin)
    for data in NO_JSON:
        await put(app, "KV_contract__state", f"$KV.contract__state.{'/'.join(key)}", data)
        await put(app, "KV_contract__state", "$KV.contract__state.a/b", data)
        assert (await consumer_records.stored(app.session.admin)).keys() == recorded.keys() - {key}
    await t.notify("mars", mars(step="1"), {})
    await t.settle()
    assert handled == [1]


NOW = "2026-11-29T18:00:00Z"
LATER = "2099-01-01T00:00:00Z"
NO_ZONE = "2099-01-01T00:00:00"
NO_UTC = ("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-12:00")
FAILURE = {"error": "E", "text": "t", "at": "", "since": NOW, "last": NOW, "until": LATER, "written": NOW, "times": 1}
RETRYING = {"again_at": LATER, "stream": "MARS", "sequence": 1, "timestamp_ns": 1, "attempt": 1, "attempts": 2}
WORKER = {"host": "h", "process": 1, "member": "", "version": "1", "started": NOW, "age_seconds": 1.0, "agents": {}}


def odd_failures() -> list[dict[str, Any]]:
    """Records of failures with times without a zone, times that UTC does not have, and numbers of too many digits."""
    times = [{name: time} for name in ("since", "last", "until", "written") for time in (NO_ZONE, *NO_UTC)]
    times += [{"handled": time} for time in (NO_ZONE, *NO_UTC)]
    retrying = [{"again_at": time} for time in (NO_ZONE, *NO_UTC)] + [{"behind": 10**4000}]
    return [FAILURE | each for each in times] + [
        FAILURE | {"retrying": [RETRYING | {"error": "x"} | each]} for each in retrying
    ]


def odd_positions(created: str) -> list[dict[str, Any]]:
    """Records of consumers that are gone, with filters and sequences that no server takes."""
    whole = {"stream_created": created, "ack_floor": 0, "filter_subjects": [], "time": NOW}
    filters: list[list[str]] = [[""], ["a b"], ["mars..od"], [f"mars.{number}" for number in range(50_000)]]
    odd: list[dict[str, Any]] = [{"filter_subjects": each} for each in filters]
    odd += [{"ack_floor": each} for each in (-5, 2**63 - 1, 2**64, 10**4000)]
    odd += [{name: each} for name in ("longest_seconds", "attempt_seconds") for each in (-1e300, 1e300)]
    return [whole | each for each in [*odd, {"time": NO_ZONE}, {"unfinished_since": NO_ZONE}]]


def odd_workers() -> list[dict[str, Any]]:
    """Records of workers with times that nothing lasts, and words that nobody reads."""
    hindered: dict[str, Any] = {"agent": "index", "text": "x", "seconds": 1.0}
    at_work: dict[str, Any] = {"stream": "MARS", "in_flight": 0, "at_once": 1}
    odd: list[dict[str, Any]] = [{"age_seconds": age} for age in (1e300, 1e15, -1e15, -1e12, 7e10)]
    odd += [{"rss": 10**4000}, {"hindrances": [hindered] * 2000}]
    odd += [{"hindrances": [hindered | each]} for each in ({"seconds": 1e300}, {"seconds": -1.0}, {"text": "x" * 9999})]
    agents = ({"away_seconds": 1e300}, {"shut_seconds": -1e300}, {"oldest": 10**4000}, {"away": "x" * 9999})
    return [WORKER | each for each in [*odd, *({"agents": {"index": at_work | each}} for each in agents)]]


@pytest.mark.slow
async def test_odd_records_of_one_app_leave_the_report_on_another_as_it_was(app: App, t: Harness) -> None:
    await t.settle()
    admin = app.session.admin
    info = await admin.stream_info("MARS")
    assert info.created is not None
    for bucket, key, values in (
        ("b__state", "b/agents/index/failure", odd_failures()),
        ("b__state", "b/timers/tick/failure", odd_failures()),
        ("b__state", "b/gone/MARS", odd_positions(info.created.isoformat())),
        ("b__live", "h.1.1", odd_workers()),
    ):
        kept = await admin.key_value(bucket, own=True)
        for value in values:
            await kept.put(key, json.dumps(value).encode())
            recorded = await agent_inventory.recorded(admin)
            rows = [each.row for each in await looked(admin, app.config)] + agent_report.failing(recorded)
            assert ("contract", "index", "idle") in [(row.app, row.agent, row.state) for row in rows], value
            assert ("MARS", "b__gone") not in recorded.consumers, value
            assert await worker_records.of_app(admin, "b") == AppWorkers(), value
        await kept.delete(key)


@pytest.mark.needs_server(2, 14)  # an older one lets anybody who may publish there name a schedule as the origin
@pytest.mark.parametrize(
    ("stream", "subject"),
    [
        ("PLAIN", "plain.1.x"),
        ("KV_CONTRACT_FAILURES", "kv_contract__failures.x"),
        ("MARS", "plain.1.x"),
        ("MARS", "MARS.1.x"),
        ("aviso_workers_retries__contract", "aviso_workers.retries.contract.index"),
    ],
)
async def test_who_may_schedule_for_one_stream_has_nothing_published_to_another(
    app: App, t: Harness, stream: str, subject: str
) -> None:
    await app.notify("mars", mars(step="1"), {}, due=1)
    await app.notify("plain", {"a": 1, "b": "x"}, due=2)
    schedules, target = delayed_messages.stream_of("MARS"), delayed_messages.due_subject("MARS")
    due = datetime.fromtimestamp(t.clock.time_ns() / 1e9, UTC) + timedelta(seconds=1)
    said = {"Aviso_Stream": stream, "Aviso_Subject": subject, "Aviso_Message_Id": "forged", "Aviso_Event_Type": "plain"}
    when = {"Nats_Schedule": f"@at {due.isoformat()}", "Nats_Schedule_Target": target}
    await put(app, schedules, delayed_messages.waiting("MARS", "forged"), b"1", **said, **when)
    await put(app, schedules, target, b"1", **said)
    for otherwise in (
        {**when, "Nats_Schedule_Target": delayed_messages.due_subject("PLAIN")},
        {"Nats_Scheduler": delayed_messages.waiting(stream, "forged")},
    ):
        with pytest.raises(RefusedError):
            await put(app, schedules, target, **said, **otherwise)
    with anyio.fail_after(PATIENCE_SECONDS):
        while len(t.published) < 2:
            await t.advance(0.1)
    await t.advance(1)  # in which the others would come
    await t.settle()

    assert sorted(one.event_type for one in t.published) == ["mars", "plain"]


async def test_what_is_for_an_event_type_that_no_worker_knows_waits_for_one_that_does(app: App, t: Harness) -> None:
    schedules, target = delayed_messages.stream_of("DISS"), delayed_messages.due_subject("DISS")
    await app.session.own_streams.ensure(delayed_messages.stream_spec("DISS", app.config))
    due = datetime.fromtimestamp(t.clock.time_ns() / 1e9, UTC)
    said = {"Aviso_Stream": "DISS", "Aviso_Subject": "diss.1", "Aviso_Message_Id": "theirs", "Aviso_Event_Type": "diss"}
    when = {"Nats_Schedule": f"@at {due.isoformat()}", "Nats_Schedule_Target": target}
    await put(app, schedules, delayed_messages.waiting("DISS", "theirs"), b"1", **said, **when)
    with anyio.fail_after(PATIENCE_SECONDS):
        while not await app.session.admin.subject_counts(schedules, subject=target):
            await t.advance(0.1)
    await t.advance(1)  # in which a worker would read it

    assert await app.session.admin.consumer_names(schedules) == []
    assert await app.session.admin.subject_counts(schedules) == {target: 1}
