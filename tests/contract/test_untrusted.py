"""What somebody else has written to our own streams: it is left out and stated, and nothing else waits for it."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta

import anyio
import pytest

from aviso_workers import App
from aviso_workers.backends import Message
from aviso_workers.errors import RefusedError
from aviso_workers.events import Overdue, Skipped
from aviso_workers.ops.dead_letters import Selection, StoredDeadLetters
from aviso_workers.state import consumer_records, dead_letter_records, delayed_messages
from aviso_workers.state.own_streams import DEAD_LETTERS, DELAYED, RETRIES
from aviso_workers.testing import Harness
from tests.contract.settings import mars
from tests.waits import PATIENCE_SECONDS

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
        dead_letter
        async for dead_letter in StoredDeadLetters(app.session.admin, app.config, events=app.events).select(Selection())
    ]

    assert [dead_letter.agent for dead_letter in dead_letters] == ["index"]


async def test_what_is_due_and_cannot_be_published_is_left_out(app: App, t: Harness) -> None:
    await app.notify("plain", {"a": 1, "b": "x"}, deliver_after=1)
    whole = {"Aviso_Stream": "PLAIN", "Aviso_Event_Type": "plain", "Aviso_Message_Id": "forged"}
    subjects = ["plain." + "x" * 5000, "plain.a b", "plain.1.2\x01", "plain.1.", "plain", "plain.*.x", "plain.%zz.x"]
    for subject in subjects:
        await put(app, DELAYED, f"{delayed_messages.DUE}.PLAIN", b"1", **whole, Aviso_Subject=subject)
    await put(app, DELAYED, f"{delayed_messages.DUE}.PLAIN", b"\xff")
    await t.advance(2)
    await t.settle()

    assert [(one.event_type, one.identifier) for one in t.published] == [("plain", {"a": "1", "b": "x"})]
    found = await app.session.backend.consumer_info(DELAYED, "aviso_workers__schedule-courier")
    assert found.num_ack_pending == 0, "none of them comes again"
    assert app.session.backend.connection.ready


async def test_a_record_of_a_consumer_that_is_none_counts_as_none(app: App, t: Harness, handled: list[int]) -> None:
    await t.settle()
    key = ("contract", "index", "MARS")
    recorded = await consumer_records.stored(app.session.admin)
    for data in NO_JSON:
        await put(app, "KV_aviso_workers_consumers", f"$KV.aviso_workers_consumers.{'/'.join(key)}", data)
        await put(app, "KV_aviso_workers_consumers", "$KV.aviso_workers_consumers.a/b", data)
        assert (await consumer_records.stored(app.session.admin)).keys() == recorded.keys() - {key}
    await t.notify("mars", mars(step="1"), {})
    await t.settle()
    assert handled == [1]


@pytest.mark.needs_server(2, 14)  # an older one lets anybody who may publish there name a schedule as the origin
@pytest.mark.parametrize(
    ("stream", "subject"),
    [
        ("PLAIN", "plain.1.x"),
        ("KV_CONTRACT_FAILURES", "kv_contract_failures.x"),
        ("MARS", "plain.1.x"),
        ("MARS", "MARS.1.x"),
        ("aviso_workers_retries", "aviso_workers.retries.contract.index"),
    ],
)
async def test_who_may_schedule_for_one_stream_has_nothing_published_to_another(
    app: App, t: Harness, stream: str, subject: str
) -> None:
    await app.notify("mars", mars(step="1"), {}, deliver_after=1)
    await app.notify("plain", {"a": 1, "b": "x"}, deliver_after=2)
    due = datetime.fromtimestamp(t.clock.time_ns() / 1e9, UTC) + timedelta(seconds=1)
    said = {"Aviso_Stream": stream, "Aviso_Subject": subject, "Aviso_Message_Id": "forged", "Aviso_Event_Type": "plain"}
    when = {"Nats_Schedule": f"@at {due.isoformat()}", "Nats_Schedule_Target": f"{delayed_messages.DUE}.{stream}"}
    await put(app, DELAYED, delayed_messages.waiting("MARS", "forged"), b"1", **said, **when)
    await put(app, DELAYED, f"{delayed_messages.DUE}.{stream}", b"1", **said)
    said["Nats_Scheduler"] = delayed_messages.waiting(stream, "forged")
    with pytest.raises(RefusedError):
        await put(app, DELAYED, f"{delayed_messages.DUE}.{stream}", **said)
    with anyio.fail_after(PATIENCE_SECONDS):
        while len(t.published) < 2:
            await t.advance(0.1)
    await t.advance(1)  # in which the others would come
    await t.settle()

    assert sorted(one.event_type for one in t.published) == ["mars", "plain"]


async def test_what_is_for_an_event_type_that_no_worker_knows_waits_for_one_that_does(app: App, t: Harness) -> None:
    overdue: list[Overdue] = []
    app.events.listen(overdue.append, Overdue)
    await app.notify("mars", mars(step="1"), {}, deliver_after=3600)
    due = datetime.fromtimestamp(t.clock.time_ns() / 1e9, UTC)
    said = {"Aviso_Stream": "DISS", "Aviso_Subject": "diss.1", "Aviso_Message_Id": "theirs", "Aviso_Event_Type": "diss"}
    when = {"Nats_Schedule": f"@at {due.isoformat()}", "Nats_Schedule_Target": f"{delayed_messages.DUE}.DISS"}
    await put(app, DELAYED, delayed_messages.waiting("DISS", "theirs"), b"1", **said, **when)
    with anyio.move_on_after(PATIENCE_SECONDS):
        while not overdue:
            await t.advance(0.1)

    assert {(late.stream, late.message_id) for late in overdue} == {("DISS", "theirs")}
    assert await app.session.admin.subject_counts(DELAYED, subject=f"{delayed_messages.DUE}.>") == {
        f"{delayed_messages.DUE}.DISS": 1
    }
