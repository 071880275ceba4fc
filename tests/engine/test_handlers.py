"""What becomes of one delivery, and of its dead letter."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

import anyio
import msgspec
import pytest
from msgspec import Struct, structs

from aviso_workers import Batch, GivenUp, Notification, Reject, RetryPolicy, Router, Stream, config
from aviso_workers.backends import Delivery, Message, PubAck, StreamInfo
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.backends.in_memory.consumer import InMemoryConnection
from aviso_workers.declare.verdicts import PriorRecord
from aviso_workers.engine.attempts import Failures
from aviso_workers.engine.dead_letter_store import LONGEST_TEXTS
from aviso_workers.engine.flow import Flow
from aviso_workers.engine.shields import Shield
from aviso_workers.errors import BackendError, OutcomeUnknownError, RefusedError, UnavailableError, UndecodableError
from aviso_workers.events import (
    DeadLetterCallFailed,
    DeadLettersRefused,
    DeadLettersStored,
    Events,
    FailuresNotStored,
    Settled,
)
from aviso_workers.sessions.session import Session
from aviso_workers.state import own_streams
from aviso_workers.state.dead_letter_records import COMPRESSED, MAX_RESTORED_BYTES, DeadLetter, retry_of, unwrap
from tests.deliveries import UnsettledDelivery
from tests.engine.conftest import Facts, NotifyStep, Store, Stored, Working
from tests.presence import present

DEAD_LETTERS = own_streams.of_app(own_streams.DEAD_LETTERS, "tests")
RETRIES = own_streams.of_app(own_streams.RETRIES, "tests")

pytestmark = pytest.mark.anyio

PROMPT = RetryPolicy(first=1.0, factor=3.0, attempts=4, jitter=0.0)


class Field(Struct):
    location: str


class DeadLetterGuard(InMemoryBackend):
    """Lets no dead letter in while `closed`."""

    def __init__(self) -> None:
        super().__init__(config.InMemory(max_history_per_topic=1000))
        self.closed: BackendError | None = None
        self.slow_seconds = 0.0
        self.counts_refused = False
        self.looks = 0

    async def publish(self, message: Message, *, stream: str, **stated: Any) -> PubAck:
        if self.counts_refused and stream.endswith("_failures"):
            raise RefusedError("you may not publish there")
        if self.closed is not None and stream == DEAD_LETTERS:
            raise self.closed
        if stream == DEAD_LETTERS:
            await anyio.sleep(self.slow_seconds)
        return await super().publish(message, stream=stream, **stated)

    async def stream_info(self, stream: str, **stated: Any) -> StreamInfo:
        self.looks += stream == DEAD_LETTERS
        return await super().stream_info(stream, **stated)


@pytest.fixture
async def backend() -> AsyncGenerator[DeadLetterGuard, None]:
    async with DeadLetterGuard() as backend:
        yield backend


async def unsettled(session: Session, agent: Any) -> tuple[int, int]:
    info = await session.consumer_info(agent)
    return info.num_pending, info.num_ack_pending


async def test_a_notification_is_acked_after_its_success_and_not_before(
    session: Session, router: Router, notify: NotifyStep, working: Working, facts: Facts
) -> None:
    began, end = anyio.Event(), anyio.Event()

    @router.agent("mars")
    async def index(notification: Notification[Field]) -> None:
        assert (notification.identifier, notification.payload) == ({"class": "od", "step": "6"}, Field("here"))
        began.set()
        await end.wait()

    await notify(6, {"location": "here"})
    async with working(index):
        await began.wait()
        assert await unsettled(session, index) == (0, 1)
        end.set()
        (settled,) = await facts.wait_for(Settled)
        assert await unsettled(session, index) == (0, 0)
    assert (settled.agent, settled.notification, settled.outcome, settled.reason) == ("index", "mars@1", "acked", "")
    assert (settled.num_delivered, settled.error) == (1, None)


async def test_a_failure_comes_back_after_the_wait_of_its_policy(
    router: Router, notify: NotifyStep, working: Working, facts: Facts
) -> None:
    times: list[float] = []

    @router.agent("mars", retry=PROMPT)
    async def index(notification: Notification[Any]) -> None:
        times.append(anyio.current_time())
        if len(times) < 4:
            raise RuntimeError("not now")

    await notify(6)
    async with working(index):
        settled = await facts.wait_for(Settled, 4)
    assert [round(time - times[0], 3) for time in times] == [0.0, 1.0, 4.0, 13.0]
    assert [(event.outcome, event.reason, event.num_delivered) for event in settled] == [
        ("retried", "RuntimeError", 1),
        ("retried", "RuntimeError", 2),
        ("retried", "RuntimeError", 3),
        ("acked", "", 4),
    ]


async def test_one_that_waits_for_its_retry_holds_up_nobody(
    router: Router, notify: NotifyStep, working: Working
) -> None:
    seen: list[str] = []
    done = anyio.Event()

    @router.agent("mars", retry=PROMPT)
    async def index(notification: Notification[Any]) -> None:
        seen.append(notification.identifier["step"])
        if seen == ["0"]:
            raise ConnectionError
        if len(seen) == 4:
            done.set()

    for step in range(3):
        await notify(step)
    async with working(index):
        await done.wait()
    assert seen == ["0", "1", "2", "0"]


async def test_the_last_failure_leaves_a_dead_letter_that_says_everything(
    router: Router, store: Store, stored: Stored, working: Working, facts: Facts, session: Session
) -> None:
    @router.agent("mars", retry=RetryPolicy(attempts=2, jitter=0.0))
    async def index(notification: Notification[Any]) -> None:
        raise ValueError("no such\n  table")

    await store("mars.od.6", b'{"location": "here"}', {"traceparent": "00-1-2-01", "Nats-Schedule-Next": "purge"})
    async with working(index):
        await facts.wait_for(Settled, 2)
        assert await unsettled(session, index) == (0, 0)
    assert [(event.outcome, event.reason) for event in facts.of(Settled)] == [
        ("retried", "ValueError"),
        ("dead_lettered", "attempts_exhausted"),
    ]
    (dead_letter,) = await stored(DEAD_LETTERS)
    (original,) = await stored("MARS")
    assert (dead_letter.subject, dead_letter.data) == (
        "aviso_workers.dead_letters.tests.index",
        b'{"location": "here"}',
    )
    headers = {**present(dead_letter.headers)}
    del headers["Nats-Msg-Id"], headers["Nats-Expected-Stream"]  # what every publish has
    time = headers.pop("Aviso-Time")
    traceback = headers.pop("Aviso-Traceback")
    assert headers == {
        "traceparent": "00-1-2-01",
        "Aviso-Subject": "mars.od.6",
        "Aviso-Stream": "MARS",
        "Aviso-Sequence": "1",
        "Aviso-App": "tests",
        "Aviso-Agent": "index",
        "Aviso-Attempts": "2",
        "Aviso-Timestamp": str(original.timestamp_ns),
        "Aviso-Reason": "attempts_exhausted",
        "Aviso-Error": "ValueError: no such table",
    }
    assert traceback.rpartition(" ")[2] == "index"
    assert time.startswith("20")
    assert time.endswith("+00:00")
    assert present(original.headers)["Nats-Msg-Id"] != present(dead_letter.headers)["Nats-Msg-Id"]


@pytest.mark.parametrize(
    ("data", "subject"),
    [(b"\xff{", "mars.od.6"), (b"{}", "mars.od.6"), (b"", "mars.od.6"), (b'{"location":"here"}', "mars.od.6.7")],
)
async def test_what_cannot_be_decoded_is_kept_with_its_bytes_and_the_agent_goes_on(
    router: Router,
    store: Store,
    stored: Stored,
    notify: NotifyStep,
    working: Working,
    facts: Facts,
    data: bytes,
    subject: str,
) -> None:
    seen: list[str] = []

    @router.agent("mars")
    async def index(notification: Notification[Field]) -> None:
        seen.append(notification.identifier["step"])

    await store(subject, data)
    await notify(12, {"location": "here"})
    async with working(index):
        bad, good = await facts.wait_for(Settled, 2)
    assert (bad.outcome, bad.reason, type(bad.error)) == ("dead_lettered", "undecodable", UndecodableError)
    assert (good.outcome, seen) == ("acked", ["12"])
    (dead_letter,) = await stored(DEAD_LETTERS)
    assert (dead_letter.data, present(dead_letter.headers)["Aviso-Subject"]) == (data, subject)


async def test_where_failures_cannot_be_stored_a_worker_says_so_once_and_counts_by_itself(
    backend: DeadLetterGuard, router: Router, notify: NotifyStep, stored: Stored, working: Working, facts: Facts
) -> None:
    tries: list[int] = []

    @router.agent("mars", retry=PROMPT)
    async def index(notification: Notification[Any]) -> None:
        tries.append(notification.sequence)
        raise RuntimeError("not now")

    backend.counts_refused = True
    await notify(6)
    await notify(12)
    async with working(index):
        await facts.wait_for(Settled, 2 * (PROMPT.attempts or 0))
    assert (tries.count(1), tries.count(2)) == (PROMPT.attempts, PROMPT.attempts)
    assert [present(dead_letter.headers)["Aviso-Reason"] for dead_letter in await stored(DEAD_LETTERS)] == [
        "attempts_exhausted"
    ] * 2
    (said,) = facts.of(FailuresNotStored)
    assert (said.agent, said.bucket) == ("index", "tests__failures")


@pytest.mark.parametrize("error", [UnavailableError("no answer"), OutcomeUnknownError("no answer")])
async def test_a_dead_letter_that_cannot_be_stored_keeps_its_original(
    backend: DeadLetterGuard,
    router: Router,
    store: Store,
    stored: Stored,
    working: Working,
    facts: Facts,
    error: BackendError,
) -> None:
    @router.agent("mars")
    async def index(notification: Notification[Field]) -> None: ...

    await store("mars.od.6", b"not a field")
    backend.closed = error
    async with working(index):
        (first,) = await facts.wait_for(Settled)
        assert (first.outcome, first.reason) == ("retried", "dead_letter_failed")
        backend.closed = None
        began = anyio.current_time()
        _, second = await facts.wait_for(Settled, 2)
        assert round(anyio.current_time() - began) == 10
    assert (second.outcome, second.reason, second.num_delivered) == ("dead_lettered", "undecodable", 2)
    assert [dead_letter.data for dead_letter in await stored(DEAD_LETTERS)] == [b"not a field"]


async def test_an_agent_whose_dead_letters_are_refused_tries_one_at_a_time_and_more_rarely(
    backend: DeadLetterGuard, router: Router, store: Store, stored: Stored, working: Working, facts: Facts
) -> None:
    @router.agent("mars", concurrency=4)
    async def index(notification: Notification[Field]) -> None: ...

    for step in range(20):
        await store(f"mars.od.{step}", b"not a field")
    backend.closed = RefusedError("the stream is full")
    async with working(index):
        refused = await facts.wait_for(DeadLettersRefused, 8)
        assert [event.again_in_seconds for event in refused] == [10, 20, 40, 80, 160, 300, 300, 300]
        assert len(facts.of(Settled)) > 100
        backend.closed = None
        settled = await facts.wait_for(DeadLettersStored)
        await facts.wait_for(Settled, len(facts.of(Settled)) + 15)
        await anyio.sleep(600)
    assert len(settled) == 1
    assert len(await stored(DEAD_LETTERS)) == 20


async def test_an_agent_says_that_all_is_well_when_nothing_is_refused_any_more(
    backend: DeadLetterGuard, router: Router, notify: NotifyStep, working: Working, facts: Facts
) -> None:
    broken = True

    @router.agent("mars")
    async def index(notification: Notification[Any]) -> None:
        if broken:
            raise Reject("not today")

    await notify(6)
    backend.closed = RefusedError("the stream is full")
    async with working(index):
        await facts.wait_for(DeadLettersRefused)
        broken = False
        await facts.wait_for(DeadLettersStored)
    assert [event.outcome for event in facts.of(Settled)] == ["retried", "acked"]


async def test_on_dead_letter_waits_until_the_dead_letter_is_stored_and_each_failed_call_is_stated(
    backend: DeadLetterGuard, router: Router, notify: NotifyStep, working: Working, facts: Facts
) -> None:
    @router.agent("mars")
    async def index(notification: Notification[Any]) -> None:
        raise Reject("not today")

    @index.on_dead_letter
    async def compensate(given_up: GivenUp[Any]) -> None:
        assert backend.closed is None
        raise ConnectionError("away")

    await notify(6)
    backend.closed = RefusedError("the stream is full")
    async with working(index):
        await facts.wait_for(DeadLettersRefused, 2)
        backend.closed = None
        await facts.wait_for(DeadLettersStored)
        failed = await facts.wait_for(DeadLetterCallFailed, 3)
    assert [(event.notification, event.again_in_seconds) for event in failed] == [
        ("mars@1", 1.0),
        ("mars@1", 2.0),
        ("mars@1", 0.0),
    ]
    assert {str(event.error) for event in failed} == {"away"}


@pytest.mark.parametrize(
    ("spare", "longest"), [(4096, LONGEST_TEXTS[0]), (2048, LONGEST_TEXTS[1]), (1536, LONGEST_TEXTS[2])]
)
async def test_the_error_of_a_large_dead_letter_is_cut_so_that_all_fits(
    backend: DeadLetterGuard,
    router: Router,
    store: Store,
    stored: Stored,
    working: Working,
    facts: Facts,
    spare: int,
    longest: int,
) -> None:
    @router.agent("mars")
    async def index(notification: Notification[str]) -> None:
        raise Reject("no " * 1000)

    data = msgspec.json.encode("x" * (backend.connection.max_payload - spare))
    async with working(index):
        await store("mars.od.6", data, {"class": "od"})
        await facts.wait_for(Settled)
    (dead_letter,) = await stored(DEAD_LETTERS)
    headers = present(dead_letter.headers)
    assert (dead_letter.data == data, headers["class"], COMPRESSED in headers) == (True, "od", False)
    assert len(headers["Aviso-Error"]) == longest
    assert len(headers["Aviso-Traceback"]) <= longest


async def test_a_dead_letter_that_is_still_too_large_is_compressed(
    backend: DeadLetterGuard, router: Router, store: Store, stored: Stored, working: Working, facts: Facts
) -> None:
    @router.agent("mars")
    async def index(notification: Notification[Field]) -> None: ...

    data = b"x\r\n\r\n" * ((backend.connection.max_payload - 150) // 5)
    sent = {"class": "od", "note": "here: and there", "Aviso-Agent": "another"}
    async with working(index):
        await store("mars.od.6", data, sent)
        await facts.wait_for(Settled)
    (message,) = await stored(DEAD_LETTERS)
    dead_letter = DeadLetter.read(message, "tests")
    assert (present(message.headers)[COMPRESSED], "class" in present(message.headers)) == ("zlib", False)
    assert (dead_letter.agent, dead_letter.error[:15]) == ("index", "UndecodableErro")
    assert (dead_letter.original.subject, dead_letter.original.data == data) == ("mars.od.6", True)
    kept = present(dead_letter.original.headers)
    assert {name: kept[name] for name in ("class", "note")} == {"class": "od", "note": "here: and there"}
    retry, _, _ = retry_of(dead_letter)
    original, stream = unwrap(retry)
    assert (stream, original.data == data, present(original.headers)["class"]) == ("MARS", True, "od")


async def test_headers_that_leave_no_room_for_ours_are_kept_compressed(
    router: Router, store: Store, stored: Stored, working: Working, facts: Facts
) -> None:
    @router.agent("mars")
    async def index(notification: Notification[Field]) -> None: ...

    async with working(index):
        await store("mars.od.6", b"?", {"all": "ä:" * 21_000})
        await facts.wait_for(Settled)
    (message,) = await stored(DEAD_LETTERS)
    original = DeadLetter.read(message, "tests").original
    assert (original.data, present(original.headers)["all"]) == (b"?", "ä:" * 21_000)


async def test_a_dead_letter_that_cannot_be_made_to_fit_keeps_no_other_from_being_stored(
    backend: DeadLetterGuard, router: Router, store: Store, stored: Stored, working: Working, facts: Facts
) -> None:
    @router.agent("mars")
    async def index(notification: Notification[Field]) -> None: ...

    async with working(index):
        await store("mars.od.6", random.Random(1).randbytes(backend.connection.max_payload - 150))
        (refused,) = await facts.wait_for(DeadLettersRefused)
        assert (refused.again_in_seconds, "does not fit into a message" in str(refused.error)) == (300, True)
        await store("mars.od.12", b"?")
        await facts.wait_for(Settled, 2)
    assert [(each.outcome, each.sequence) for each in facts.of(Settled)] == [("retried", 1), ("dead_lettered", 2)]
    assert [present(message.headers)["Aviso-Subject"] for message in await stored(DEAD_LETTERS)] == ["mars.od.12"]
    assert [message.subject for message in await stored("MARS")] == ["mars.od.6", "mars.od.12"]


async def test_a_server_of_small_messages_has_small_dead_letters(
    router: Router, store: Store, stored: Stored, working: Working, facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    @router.agent("mars")
    async def index(notification: Notification[Field]) -> None: ...

    monkeypatch.setattr(InMemoryConnection, "max_payload", 2000)
    async with working(index):
        await store("mars.od.6", b"?", {"all": "x" * 1500})
        await facts.wait_for(Settled)
    (message,) = await stored(DEAD_LETTERS)
    assert sum(len(name) + len(value) for name, value in present(message.headers).items()) + len(message.data) < 2000
    assert present(DeadLetter.read(message, "tests").original.headers)["all"] == "x" * 1500


async def test_a_dead_letter_is_whole_although_its_original_says_that_it_is_compressed(
    router: Router, store: Store, stored: Stored, working: Working, facts: Facts
) -> None:
    @router.agent("mars")
    async def index(notification: Notification[Field]) -> None: ...

    await store("mars.od.6", b"?", {COMPRESSED: "zlib"})
    async with working(index):
        await facts.wait_for(Settled)
    (dead_letter,) = await stored(DEAD_LETTERS)
    assert DeadLetter.read(dead_letter, "tests").original.data == b"?"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"no zlib", "cannot be decompressed"),
        (zlib.compress(b"no headers"), "holds no headers"),
        (zlib.compress(b"a:1\r\n\r\n" + b"x" * 5000)[:-3], "is cut, or larger"),
        (zlib.compress(b"a:1\r\n\r\n" + b"0" * MAX_RESTORED_BYTES), "is cut, or larger"),
    ],
    ids=["no zlib", "no headers", "cut", "larger than any message"],
)
async def test_what_only_says_that_it_is_compressed_is_neither_read_nor_handled(
    router: Router, store: Store, stored: Stored, working: Working, facts: Facts, body: bytes, why: str
) -> None:
    @router.agent("mars")
    async def index(notification: Notification[Field]) -> None: ...

    await store("mars.od.6", b"?")
    async with working(index):
        await facts.wait_for(Settled)
    (message,) = await stored(DEAD_LETTERS)
    forged = structs.replace(message, data=body, headers={**present(message.headers), COMPRESSED: "zlib"})
    with pytest.raises(UndecodableError, match=why):
        DeadLetter.read(forged, "tests")
    assert unwrap(forged) == (forged, "")


async def test_a_stream_of_dead_letters_that_does_not_answer_is_looked_at_again(
    backend: DeadLetterGuard, router: Router, store: Store, working: Working, facts: Facts
) -> None:
    """It may have been deleted, and is then recreated."""

    @router.agent("mars")
    async def index(notification: Notification[Field]) -> None: ...

    async with working(index):
        await store("mars.od.1", b"?")
        await facts.wait_for(Settled)
        looks = backend.looks
        backend.closed = UnavailableError("no stream takes this subject")
        await store("mars.od.2", b"?")
        await facts.wait_for(Settled, 2)
        assert backend.looks == looks
        backend.closed = None
        await facts.wait_for(Settled, 3)
        assert backend.looks == looks + 1


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("a\r\nX-Injected: 1\x0b\x1cb", "ValueError: a X-Injected: 1 b"),
        ("bad name 'caf\udce9'", "ValueError: bad name 'caf?'"),
        ("grüße", "ValueError: grüße"),
        ("x" * 10_000, f"ValueError: {'x' * 10_000}"[: LONGEST_TEXTS[0]]),
    ],
)
async def test_any_text_of_an_error_fits_into_a_header(
    router: Router, notify: NotifyStep, stored: Stored, working: Working, facts: Facts, text: str, kept: str
) -> None:
    @router.agent("mars", retry=RetryPolicy(attempts=1))
    async def index(notification: Notification[Any]) -> None:
        raise ValueError(text)

    await notify(6)
    async with working(index):
        await facts.wait_for(Settled)
    (dead_letter,) = await stored(DEAD_LETTERS)
    assert present(dead_letter.headers)["Aviso-Error"] == kept
    present(dead_letter.headers)["Aviso-Error"].encode()


async def test_what_the_agent_did_not_ask_for_is_settled_without_a_word(
    session: Session, router: Router, notify: NotifyStep, working: Working, facts: Facts
) -> None:
    seen: list[str] = []
    done = anyio.Event()

    @router.agent("mars", where={"step": {"gte": 6}})
    async def index(notification: Notification[Any]) -> None:
        seen.append(notification.identifier["step"])
        if notification.identifier["step"] == "12":
            done.set()

    for step in (0, 3, 6, 5, 12):
        await notify(step)
    async with working(index):
        await done.wait()
        await facts.wait_for(Settled, 2)
        assert await unsettled(session, index) == (0, 0)
    assert seen == ["6", "12"]


async def test_a_cancellation_from_within_is_a_failure_like_any_other(
    router: Router, notify: NotifyStep, working: Working, facts: Facts
) -> None:
    """Such as that of a task which the author awaits. Taken for ours, it would end the agent without a word."""
    calls = 0

    @router.agent("mars", retry=PROMPT, concurrency=2)
    async def index(notification: Notification[Any]) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            task = asyncio.create_task(asyncio.sleep(60))
            asyncio.get_running_loop().call_soon(task.cancel)
            await task

    await notify(6)
    async with working(index):
        await facts.wait_for(Settled, 2)
        await notify(12)
        settled = await facts.wait_for(Settled, 3)
    assert [(event.outcome, event.reason) for event in settled] == [
        ("retried", "RuntimeError"),
        ("acked", ""),
        ("acked", ""),
    ]
    assert str(settled[0].error) == "cancelled from within: something that it awaited was cancelled"


async def test_a_time_out_of_the_authors_own_is_a_failure_like_any_other(
    router: Router, notify: NotifyStep, working: Working, facts: Facts
) -> None:
    @router.agent("mars", retry=RetryPolicy(attempts=1))
    async def index(notification: Notification[Any]) -> None:
        with anyio.move_on_after(1):
            await anyio.sleep_forever()
        async with asyncio.timeout(1):
            await anyio.sleep_forever()

    await notify(6)
    async with working(index):
        (settled,) = await facts.wait_for(Settled)
    assert (settled.outcome, type(settled.error)) == ("dead_lettered", TimeoutError)


async def test_a_dead_letter_that_is_being_stored_is_stored_also_when_the_worker_has_to_end(
    backend: DeadLetterGuard,
    session: Session,
    router: Router,
    notify: NotifyStep,
    stored: Stored,
    working: Working,
    facts: Facts,
) -> None:
    failed = anyio.Event()

    @router.agent("mars", retry=RetryPolicy(attempts=1))
    async def index(notification: Notification[Any]) -> None:
        failed.set()
        raise ValueError

    backend.slow_seconds = 32.0  # longer than the drain timeout, and not by more than it is shielded
    await notify(6)
    async with working(index) as stop:
        await failed.wait()
        stop.set()
    assert [(event.outcome, event.reason) for event in facts.of(Settled)] == [("dead_lettered", "attempts_exhausted")]
    assert len(await stored(DEAD_LETTERS)) == 1
    assert await unsettled(session, index) == (0, 0)


class Failed(UnsettledDelivery):
    """A delivery whose handling has failed."""

    def __init__(self, sequence: int = 1, timestamp_ns: int = 1) -> None:
        self.message = Message(subject="mars", data=b"", sequence=sequence, timestamp_ns=timestamp_ns)
        self.num_delivered = 2


async def together(batch: Batch[Any]) -> None:
    delivered.extend(notification.num_delivered for notification in batch)


async def as_stream(stream: Stream[Any]) -> None:
    async for notification in stream:
        delivered.append(notification.num_delivered)


delivered: list[int] = []


@pytest.mark.parametrize("form", [together, as_stream])
async def test_what_was_taken_before_the_worker_was_away_and_has_not_begun_is_left_to_others(
    router: Router,
    notify: NotifyStep,
    working: Working,
    facts: Facts,
    monkeypatch: pytest.MonkeyPatch,
    form: Callable[..., Any],
) -> None:
    """As while a batch is collected, and before a function of a stream asks for the first one."""
    may_still_begin, asked = Flow.may_still_begin, 0

    def be_away(flow: Flow, *deliveries: Delivery, lapses: int) -> bool:
        nonlocal asked
        asked += 1
        if asked == 1:
            flow.lapse()
        return may_still_begin(flow, *deliveries, lapses=lapses)

    monkeypatch.setattr(Flow, "may_still_begin", be_away)
    delivered.clear()
    index = router.agent("mars")(form)
    await notify(0)
    async with working(index):
        with anyio.fail_after(600):
            await facts.wait_for(Settled, 1)
    assert delivered == [2]


@pytest.mark.parametrize("kept", [True, False])
async def test_failures_are_those_of_one_notification_and_one_agent(backend: DeadLetterGuard, kept: bool) -> None:
    def counts(**stated: str) -> Failures:
        names = {"app": "tests", "agent": "index", "stream": "MARS", **stated}
        return Failures(backend, **names, shield=Shield(backend.clock), events=Events())

    index = counts()
    record = PriorRecord()

    def counted(record_then: PriorRecord) -> None:
        nonlocal record
        record = record_then

    for _ in range(2):
        await index.add(Failed(), before=record, again_in_seconds=1.0, kept=kept, worker_died=False, then=counted)
    for anew in (index, counts()):
        assert (await anew.read(Failed())).failures == 2
        assert (await anew.read(Failed(sequence=2))).failures == 0, "of another notification"
        assert (await anew.read(Failed(timestamp_ns=2))).failures == 0, "of a stream that was recreated"
    for stated in ({"agent": "sum"}, {"stream": "RD"}, {"app": "others"}):
        assert (await counts(**stated).read(Failed())).failures == 0, stated


@pytest.mark.parametrize("order_by", [(), ("class",)])
async def test_failures_are_forgotten_when_a_notification_is_settled(
    backend: DeadLetterGuard,
    router: Router,
    notify: NotifyStep,
    working: Working,
    facts: Facts,
    order_by: tuple[str, ...],
) -> None:
    tries: list[str] = []

    @router.agent("mars", retry=RetryPolicy(first=1, attempts=2, jitter=0), order_by=order_by)
    async def index(notification: Notification[Any]) -> None:
        tries.append(step := notification.identifier["step"])
        if step == "0" or tries.count(step) == 1:
            raise RuntimeError

    await notify(0)
    await notify(6)
    async with working(index):
        await facts.wait_for(Settled)
        assert await (await backend.key_value("tests__failures")).keys() != []
        await facts.wait_for(Settled, 4)
    assert sorted(event.outcome for event in facts.of(Settled)) == ["acked", "dead_lettered", "retried", "retried"]
    assert await (await backend.key_value("tests__failures")).keys() == []


async def test_what_failed_for_good_in_its_lane_has_all_attempts_again_when_it_is_tried_again(
    backend: DeadLetterGuard, router: Router, notify: NotifyStep, stored: Stored, working: Working, facts: Facts
) -> None:
    tries: list[str] = []

    @router.agent("mars", retry=RetryPolicy(first=1, attempts=2, jitter=0), order_by=("class",))
    async def index(notification: Notification[Any]) -> None:
        tries.append(notification.identifier["step"])
        if len(tries) < 4:
            raise RuntimeError

    await notify(0)
    async with working(index):
        await facts.wait_for(Settled, 2)
        (dead_letter,) = await stored(DEAD_LETTERS)
        retry, message_id, _ = retry_of(DeadLetter.read(dead_letter, "tests"))
        await backend.publish(retry, message_id=message_id, stream=RETRIES, timeout_seconds=1)
        await facts.wait_for(Settled, 4)
    assert [event.outcome for event in facts.of(Settled)] == ["retried", "dead_lettered", "retried", "acked"]


async def test_one_notification_has_a_dead_letter_of_each_agent_that_gives_it_up_whatever_its_headers_say(
    router: Router, store: Store, stored: Stored, working: Working, facts: Facts
) -> None:
    @router.agent("mars")
    async def index(notification: Notification[Field]) -> None: ...

    @router.agent("mars")
    async def sums(notification: Notification[Field]) -> None: ...

    await store("mars.od.6", b"?", {"Aviso-Agent": "another", "Aviso-Reason": "none"})
    async with working(index), working(sums):
        await facts.wait_for(Settled, 2)
    dead_letters = [present(dead_letter.headers) for dead_letter in await stored(DEAD_LETTERS)]
    assert sorted(headers["Aviso-Agent"] for headers in dead_letters) == ["index", "sums"]
    assert [headers["Aviso-Reason"] for headers in dead_letters] == ["undecodable", "undecodable"]
