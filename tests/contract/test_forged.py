"""What a server has stored for somebody who gave a publish a reply subject is none of ours, whatever it replaces."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import anyio
import msgspec
import nats
import pytest
from msgspec import structs

from aviso_workers import App, Batch, Notification, Reject, RetryPolicy, Stream, Window, Windowing
from aviso_workers.aviso.codec import Message
from aviso_workers.backends import Admin
from aviso_workers.errors import UndecodableError
from aviso_workers.events import Settled, Skipped, Ticked, Unreadable
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.ops.dead_letters import Selection, StoredDeadLetters
from aviso_workers.state import consumer_records, dead_letter_records, delayed_messages, own_streams, window_records
from aviso_workers.testing import Harness, harness
from tests import forgeries
from tests.contract.settings import mars
from tests.waits import PATIENCE_SECONDS, flushed

DEAD_LETTERS = own_streams.of_app(own_streams.DEAD_LETTERS, "contract")
RETRIES = own_streams.of_app(own_streams.RETRIES, "contract")

pytestmark = pytest.mark.anyio

Forge = Callable[[App, str], Awaitable[None]]
ACKNOWLEDGED = "attacker.any"
PROMPT = RetryPolicy(first=0.05, factor=1, attempts=3, jitter=0)


@pytest.fixture
def forge(nats_url: str) -> Forge:
    """`await forge(app, "$KV.app__failures.x")`: a publish to a stream of one's own, with this as its reply subject."""

    async def forge(app: App, subject: str) -> None:
        backend = app.session.admin
        stream = await stream_of(backend, subject)
        before = (await backend.stream_info(stream)).last_sequence
        if nats_url:
            await backend.create_stream(StreamSpec(name="ATTACKER", subjects=("attacker.>",)))
            attacker = await nats.connect(nats_url)
            await attacker.publish(ACKNOWLEDGED, b"{}", reply=subject)
            await flushed(attacker)
            await attacker.close()
        else:
            forgeries.store(backend, stream, subject)
        with anyio.fail_after(PATIENCE_SECONDS):
            while (await backend.stream_info(stream)).last_sequence == before:  # noqa: ASYNC110
                await anyio.sleep(0.01)

    return forge


async def stream_of(backend: Admin, subject: str) -> str:
    """Return the stream that takes the subject."""
    for stream in await backend.stream_names():
        if any(subject.startswith(each.rstrip(">")) for each in (await backend.stream_info(stream)).config["subjects"]):
            return stream
    raise AssertionError(f"no stream takes {subject}")


@asynccontextmanager
async def told(app: App) -> AsyncGenerator[list[Unreadable]]:
    """The foreign messages that are told of in the block."""
    unreadable: list[Unreadable] = []
    app.events.listen(unreadable.append, Unreadable)
    yield unreadable
    assert {event.reason for event in unreadable} <= {"foreign"}


async def has_stream(app: App, bucket: str) -> bool:
    return f"KV_{bucket}" in await app.session.admin.stream_names()


async def keys_of(app: App, bucket: str) -> list[str]:
    return await (await app.session.backend.key_value(bucket)).keys()


@pytest.mark.slow
async def test_a_worker_goes_on_whatever_is_in_the_place_of_its_state(app: App, url: str | None, forge: Forge) -> None:
    calls: dict[str, int] = {}

    @app.agent("mars", retry=RetryPolicy(first=0.05, factor=1, attempts=4, jitter=0))
    async def index(notification: Notification[Any]) -> None:
        step = notification.identifier["step"]
        calls[step] = calls.get(step, 0) + 1
        if step == "1" and calls[step] < 3:
            raise ValueError("not yet")

    @app.every("1s", singleton=True)
    async def tick() -> None:
        pass

    ticked: list[Ticked] = []
    app.events.listen(ticked.append, Ticked)
    forged, leading = 0, {"KV_contract__timers", "KV_contract__leases"}
    async with told(app) as unreadable, harness(app, server=url) as t:
        await t.notify("mars", mars(step="1"), {})
        await t.settle()
        await t.advance(2)
        for bucket in ("contract__state", "contract__failures", "contract__timers", "contract__leases"):
            for key in await keys_of(app, bucket):
                await forge(app, f"$KV.{bucket}.{key}")
                forged += 1
        assert forged >= 6
        before = len(ticked)
        await t.notify("mars", mars(step="2"), {})
        await t.settle()
        with anyio.move_on_after(PATIENCE_SECONDS):
            while len(ticked) <= before + 1 or not leading <= {event.stream for event in unreadable}:
                await t.advance(0.5)
        assert calls["2"] == 1
        assert len(ticked) > before + 1, "the timer goes on"
        assert leading <= {event.stream for event in unreadable}
        places = [(event.stream, event.sequence) for event in unreadable]
        assert len(places) == len(set(places)), "each is told once"


async def test_a_worker_that_starts_replaces_what_was_forged(app: App, url: str | None, forge: Forge) -> None:
    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None:
        pass

    async with told(app) as unreadable, harness(app, server=url) as t:
        await t.notify("mars", mars(step="1"), {})
        await t.settle()
        before = await keys_of(app, "contract__state")
        for key in before:
            await forge(app, f"$KV.contract__state.{key}")
        await t.stop()
        await t.start()
        await t.settle()
        bucket = await consumer_records.bucket(app.session.backend, "contract")
        with anyio.fail_after(PATIENCE_SECONDS):
            while set(before) - set(await bucket.keys()):
                await t.advance(1)
        assert len(unreadable) >= len(before)
        assert ("contract", "index", "MARS") in await consumer_records.stored(app.session.admin)


@pytest.mark.slow
async def test_a_failure_count_that_was_forged_counts_as_none(app: App, url: str | None, forge: Forge) -> None:
    attempts: list[int] = []
    bucket = "contract__failures"

    @app.agent("mars", retry=RetryPolicy(first=2, factor=1, attempts=3, jitter=0))
    async def index(notification: Notification[Any]) -> None:
        attempts.append(notification.attempt)
        raise ValueError("never")

    async with told(app) as unreadable, harness(app, server=url) as t:
        await t.notify("mars", mars(step="1"), {})
        with anyio.fail_after(PATIENCE_SECONDS):
            while not await has_stream(app, bucket) or not await keys_of(app, bucket):
                await t.advance(0.1)
        [key] = await keys_of(app, bucket)
        await t.stop()
        await forge(app, f"$KV.{bucket}.{key}")
        await t.start()
        await t.settle()
        assert attempts == [1, 1, 2, 3]
        assert len(t.dead_letters) == 1
        assert [event.stream for event in unreadable] == [f"KV_{bucket}"]


async def test_a_retry_that_nobody_has_asked_for_is_not_handled(
    app: App, t: Harness, handled: list[int], forge: Forge
) -> None:
    settled: list[Settled] = []
    app.events.listen(settled.append, Settled)
    async with told(app) as unreadable:
        await t.settle()
        await forge(app, dead_letter_records.retry_subject("contract", "index"))
        await t.notify("mars", mars(step="1"), {})
        await t.settle()
        assert handled == [1]
        assert [event.outcome for event in settled] == ["acked"]
        assert [event.stream for event in unreadable] == [RETRIES]
    found = await app.session.backend.consumer_info(RETRIES, "contract__index")
    assert found.num_ack_pending == 0, "it does not come again"


async def test_a_dead_letter_that_was_forged_is_told_and_not_retried(app: App, t: Harness, forge: Forge) -> None:
    await t.notify("mars", mars(step="1"), "reject")
    await t.settle()
    await forge(app, f"{dead_letter_records.SUBJECT}.contract.index")
    skipped: list[Skipped] = []
    app.events.listen(skipped.append, Skipped)
    stored = StoredDeadLetters(app.session.admin, events=app.events)
    found = [letter.sequence async for letter in stored.select(Selection())]
    assert found == [1]
    assert [event.sequence for event in skipped] == [2]
    assert "has no headers and is the answer of a server" in str(skipped[0].error)
    assert f"nats stream rmm {DEAD_LETTERS} 2" in str(skipped[0].error)


async def test_a_dead_letter_of_another_app_that_says_it_is_of_this_one_is_not_handed_back(
    app: App, t: Harness, handled: list[int]
) -> None:
    await t.notify("mars", mars(step="1"), "reject")
    await t.settle()
    backend, others = app.session.admin, dead_letter_records.stream_spec("evil", app.config)
    letter = await backend.message(DEAD_LETTERS, 1)
    assert letter is not None
    await backend.create_stream(others)
    forged = structs.replace(letter, subject=f"{dead_letter_records.SUBJECT}.evil.x", data=b"7")
    await backend.publish(forged, message_id="forged", stream=others.name, timeout_seconds=PATIENCE_SECONDS)
    skipped: list[Skipped] = []
    app.events.listen(skipped.append, Skipped)
    stored = StoredDeadLetters(backend, events=app.events)
    found = [letter async for letter in stored.select(Selection())]
    assert [letter.id for letter in found] == [("contract", 1)]
    assert "say that it is of agent contract/index, its subject is aviso_workers.dead_letters.evil.x" in str(
        skipped[0].error
    )
    forged = structs.replace(forged, subject=dead_letter_records.retry_subject("contract", "index"))
    wrong = structs.replace(forged, headers={**(letter.headers or {}), "Aviso-App": "evil"})
    await backend.publish(wrong, message_id="wrong", stream=RETRIES, timeout_seconds=PATIENCE_SECONDS)
    await t.settle()
    assert handled == [1]


async def test_a_dead_letter_is_stored_although_another_message_has_taken_its_message_id(
    app: App, url: str | None
) -> None:
    """The id is made of what others can know: what they publish can be stored under it before, by a server's answer."""
    may_fail = anyio.Event()

    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None:
        await may_fail.wait()
        raise Reject("no")

    async with harness(app, server=url) as t:
        receipt = await t.notify("mars", mars(step="1"), {})
        backend = app.session.admin
        await backend.create_stream(dead_letter_records.stream_spec("contract", app.config))
        original = await backend.message(receipt.stream, receipt.sequence)
        assert original is not None
        guessed = f"contract.index.{receipt.stream}.{receipt.sequence}.{original.timestamp_ns}."
        squat = Message(subject=f"{dead_letter_records.SUBJECT}.contract.x", data=b"", headers={"A": "b"})
        await backend.publish(squat, message_id=guessed, stream=DEAD_LETTERS, timeout_seconds=PATIENCE_SECONDS)
        may_fail.set()
        await t.settle()
        stored = StoredDeadLetters(backend, events=app.events)
        found = [(letter.agent, letter.original.sequence) async for letter in stored.select(Selection(app="contract"))]
    assert found == [("index", receipt.sequence)]


async def test_the_dead_letter_of_a_window_that_names_another_key_is_put_back_nowhere(app: App) -> None:
    kept = window_records.KeptWindow(start=0, end=60, value=1, values="")
    message = Message(subject="$KV.contract__leases.windows", data=msgspec.json.encode(kept))
    async with harness(app):
        with pytest.raises(UndecodableError, match="is no key of the agent's windows"):
            await window_records.put_back(app.session.admin, message, app="contract", agent="count")


@pytest.mark.needs_server(2, 12)
async def test_a_due_notification_that_was_forged_is_published_nowhere(app: App, t: Harness, forge: Forge) -> None:
    async with told(app) as unreadable:
        await app.notify("plain", {"a": 1, "b": "x"}, due=1)
        await forge(app, delayed_messages.due_subject("PLAIN"))
        with anyio.move_on_after(PATIENCE_SECONDS):
            while not (t.published and unreadable):
                await t.advance(0.1)
        await t.settle()
        assert [one.event_type for one in t.published] == ["plain"]
        assert [event.stream for event in unreadable] == [delayed_messages.stream_of("PLAIN")]


@pytest.mark.parametrize("cached", [False, True])
async def test_a_value_of_a_table_that_was_forged_is_refused(app: App, forge: Forge, cached: bool) -> None:
    places = app.table("places", dict, cached=cached)
    refusal = r"bucket contract__table__places, key step: it has no headers and is the answer of a server"
    async with told(app) as unreadable, app:
        await places.put("step", {"at": 1})
        await places.put("other", {"stream": "MARS", "seq": 12})
        assert await places.get("step") == {"at": 1}
        await forge(app, "$KV.contract__table__places.step")
        await refused(lambda: places.get("step"), refusal)
        await refused(lambda: places.update("step", lambda at: at), refusal)
        with pytest.raises(UndecodableError, match=refusal):
            await places.items()
        assert await places.get("other") == {"stream": "MARS", "seq": 12}, "our own value may look like one"
        await places.put("step", {"at": 2})
        assert await places.items() == {
            "other": {"stream": "MARS", "seq": 12},
            "step": {"at": 2},
        }
    assert [event.stream for event in unreadable] == ["KV_contract__table__places"]


async def refused(deed: Callable[[], Awaitable[Any]], refusal: str) -> None:
    """Wait until it is refused: a copy of a table is a little older than the table."""
    with anyio.fail_after(PATIENCE_SECONDS):
        while True:
            try:
                await deed()
            except UndecodableError as error:
                found = str(error)
                break
            await anyio.sleep(0.01)
    assert refusal in found


async def test_a_bucket_that_others_write_to_is_read_as_ever_but_for_answers(
    app: App, nats_url: str, forge: Forge
) -> None:
    async with told(app), app:
        bucket = await app.key_value("shared")
        if nats_url:
            other = await nats.connect(nats_url)
            await (await other.jetstream().key_value("shared")).put("theirs", b'{"stream":"oper"}')
            await other.close()
            entry = await bucket.get("theirs")
            assert entry is not None
            assert entry.value == b'{"stream":"oper"}'
        await forge(app, "$KV.shared.key")
        entry = await bucket.get("key")
        assert entry is not None
        assert not entry.deleted
        with pytest.raises(UndecodableError, match="put another value, or delete the key"):
            entry.value  # noqa: B018
        await bucket.delete("key")
        assert await bucket.get("key") is None


@pytest.mark.needs_server(2, 11)
async def test_a_window_that_was_forged_fails_alone(app: App, url: str | None, forge: Forge) -> None:
    @app.agent(
        "mars",
        retry=PROMPT,
        window=Windowing(
            size="1h",
            fold=lambda total, _: total + 1,
            initial=0,
            key=lambda one: one.identifier["class"],
            idle=timedelta(seconds=2),
        ),
    )
    async def sums(window: Window[int]) -> None:
        counts[window.key] = window.value

    counts: dict[str, int] = {}
    bucket = window_records.bucket_of("contract", "sums")
    async with told(app) as unreadable, harness(app, server=url) as t:
        for of in ("od", "rd"):
            await t.notify("mars", mars(step="1", **{"class": of}), {})
        await t.settle()
        await forge(app, f"$KV.{bucket}.rd")
        await forge(app, f"$KV.{bucket}.=passed")
        await t.notify("mars", mars(step="2", **{"class": "od"}), {})
        await t.notify("mars", mars(step="3", **{"class": "rd"}), {})
        with anyio.fail_after(PATIENCE_SECONDS):
            while "od" not in counts or not t.dead_letters:
                await t.advance(0.5)
        assert counts == {"od": 2}
        assert len(t.dead_letters) == 1
        assert "answer of a server" in t.dead_letters[0].error
        assert {event.stream for event in unreadable} == {f"KV_{bucket}"}


@pytest.mark.parametrize("form", [Notification, Batch, Stream])
async def test_a_notification_that_may_be_a_servers_answer_is_handled(
    app: App, url: str | None, forge: Forge, form: Any
) -> None:
    handled: list[Any] = []

    async def index(argument: Any) -> None:
        if form is Notification:
            handled.append(argument.payload)
        elif form is Batch:
            handled.extend(each.payload for each in argument)
        else:
            async for each in argument:
                handled.append(each.payload)

    index.__annotations__["argument"] = form[Any]
    app.agent("plain")(index)
    async with harness(app, server=url) as t:
        await t.notify("plain", {"a": 1, "b": "x"}, {"stream": "PLAIN", "seq": 1})
        await t.settle()
        await forge(app, "plain.2.x")
        await t.settle()
        assert [set(payload) for payload in handled] == [{"stream", "seq"}] * 2
        assert len([one async for one in app.replay("plain")]) == 2


async def test_a_counter_takes_no_answer(app: App, nats_url: str) -> None:
    if not nats_url:
        pytest.skip("a server refuses what has no increment")
    counter = app.counter("done")
    async with app:
        await counter.add("all", 2)
        await app.session.backend.create_stream(StreamSpec(name="ATTACKER", subjects=("attacker.>",)))
        attacker = await nats.connect(nats_url)
        await attacker.publish(ACKNOWLEDGED, b"{}", reply="aviso_workers.counters.contract.done.all")
        await flushed(attacker)
        await attacker.close()
        assert await counter.add("all", 1) == 3
