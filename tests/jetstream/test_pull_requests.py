"""Pull requests: what they ask for, and what each answer means for the next one."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import pytest

from aviso_workers._fast import SEQUENCE
from aviso_workers.backends.jetstream import pull_requests
from aviso_workers.backends.jetstream.pull_requests import MAX_BYTES, PullSubscription
from aviso_workers.errors import BackendError, NotFoundError, RefusedError, UnansweredError, UnavailableError
from tests.jetstream.conftest import PlayedConnection
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

SECOND = 1_000_000_000


@pytest.fixture
async def pulls(played: PlayedConnection) -> PullSubscription:
    return PullSubscription(
        played.connection, stream="MARS", consumer="agent", on_messages=lambda received: None, on_change=lambda: None
    )


def asked(played: PlayedConnection) -> list[dict[str, Any]]:
    return [msgspec.json.decode(body) for _, body, _ in played.sent]


async def test_a_request_is_for_some_messages_within_half_a_minute_and_not_too_many_bytes(
    played: PlayedConnection, pulls: PullSubscription
) -> None:
    await pulls.open(limits={})
    pulls.ask(10)

    assert asked(played) == [
        {"batch": 10, "max_bytes": MAX_BYTES, "expires": 30 * SECOND, "idle_heartbeat": 5 * SECOND}
    ]
    assert pulls.outstanding == 10


async def test_a_request_has_room_for_the_largest_message_that_the_server_takes(
    played: PlayedConnection, pulls: PullSubscription
) -> None:
    played.max_payload = 64 * 1024 * 1024
    larger = PullSubscription(
        played.connection, stream="MARS", consumer="agent", on_messages=print, on_change=lambda: None
    )
    await larger.open(limits={})
    larger.ask(1)

    assert asked(played)[0]["max_bytes"] > played.max_payload


@pytest.mark.covers("002-67")
async def test_a_request_obeys_the_limits_of_its_consumer(played: PlayedConnection, pulls: PullSubscription) -> None:
    await pulls.open(limits={"max_batch": 5, "max_expires": 3 * SECOND, "max_bytes": 1000})
    pulls.ask(10)

    assert asked(played) == [{"batch": 5, "max_bytes": 1000, "expires": 3 * SECOND, "idle_heartbeat": SECOND}]
    assert pulls.outstanding == 5


async def test_a_new_consumer_that_is_not_known_everywhere_is_asked_again(
    played: PlayedConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_requests, "ASK_AGAIN_SECONDS", 0.01)
    known = anyio.Event()
    pulls = PullSubscription(
        played.connection, stream="MARS", consumer="new", on_messages=lambda received: None, on_change=known.set
    )
    await pulls.open(limits={})
    pulls.ask(10)

    played.say(status="503")
    assert (pulls.outstanding, known.is_set()) == (0, False)
    with anyio.fail_after(PATIENCE_SECONDS):
        await known.wait()
    assert pulls.error is None


@pytest.mark.parametrize(
    ("status", "description", "left", "outstanding", "error"),
    [
        ("100", "Idle Heartbeat", {}, 10, None),
        ("408", "Request Timeout", {"Nats-Pending-Messages": "4", "Nats-Pending-Bytes": "9"}, 6, None),
        ("404", "No Messages", {}, 0, None),
        ("409", "Leadership Change", {"Nats-Pending-Messages": "4", "Nats-Pending-Bytes": "9"}, 6, None),
        ("409", "Batch Completed", {"Nats-Pending-Messages": "4", "Nats-Pending-Bytes": "9"}, 6, None),
        ("409", "Server Shutdown", {"Nats-Pending-Messages": "10", "Nats-Pending-Bytes": str(MAX_BYTES)}, 0, None),
        ("409", "Message Size Exceeds MaxBytes", {"Nats-Pending-Messages": "4", "Nats-Pending-Bytes": "9"}, 6, None),
        (
            "409",
            "Message Size Exceeds MaxBytes",
            {"Nats-Pending-Messages": "10", "Nats-Pending-Bytes": str(MAX_BYTES)},
            0,
            RefusedError,
        ),
        ("409", "Consumer Deleted", {}, 0, NotFoundError),
        ("409", "Exceeded MaxWaiting", {}, 0, UnavailableError),
        ("409", "Exceeded MaxRequestBatch of 5", {}, 0, UnavailableError),
        ("409", "Consumer is push based", {}, 0, UnavailableError),
        ("503", "", {}, 0, UnansweredError),
        ("400", "Bad Request", {}, 0, RefusedError),
    ],
)
async def test_a_status_ends_the_request_or_the_reading(
    played: PlayedConnection,
    pulls: PullSubscription,
    monkeypatch: pytest.MonkeyPatch,
    status: str,
    description: str,
    left: dict[str, str],
    outstanding: int,
    error: type[BackendError],
) -> None:
    monkeypatch.setattr(pull_requests, "UNKNOWN_SECONDS", 0)  # all servers know of the consumer
    await pulls.open(limits={})
    pulls.ask(10)

    played.say(status=f"{status} {description}", **left)

    assert (pulls.outstanding, type(pulls.error)) == (outstanding, error or type(None))


async def test_requests_that_nobody_answers_are_an_error_when_they_are_lost_again(
    played: PlayedConnection, pulls: PullSubscription
) -> None:
    await pulls.open(limits={})
    pulls.ask(10)
    played.say(status="100")
    pulls.forget()
    assert pulls.error is None

    pulls.ask(10)
    pulls.forget()

    assert "requests for messages are not answered" in str(pulls.error)


async def test_after_a_reconnect_nothing_is_outstanding_and_the_consumer_is_to_be_looked_at(
    played: PlayedConnection, pulls: PullSubscription
) -> None:
    await pulls.open(limits={})
    pulls.ask(10)
    assert not pulls.silent()

    for act in played.on_reconnect:
        act()

    assert pulls.outstanding == 0
    assert pulls.silent()


PINS = {"priority_policy": "pinned_client", "priority_groups": ["workers"], "priority_timeout": 8 * SECOND}


def deliver(played: PlayedConnection, pin: str) -> None:
    block = f"NATS/1.0\r\nNats-Pin-Id: {pin}\r\n\r\n".encode()
    played.heard([(b"mars.od", b"$JS.ACK.MARS.agent.1.1.1.1795256800000000000.0", block, b"{}")])


async def test_a_pinned_reader_asks_by_its_id_and_often_enough_until_it_is_another_ones_turn(
    played: PlayedConnection,
) -> None:
    pulls = PullSubscription(
        played.connection, stream="MARS", consumer="agent", on_messages=lambda *_: None, on_change=lambda: None
    )
    await pulls.open(limits=PINS)
    assert pulls.pin == ""
    for pin in ("one", "one", ""):
        pulls.ask(1)
        deliver(played, pin) if pin else played.say(status="423 Nats-Wrong-Pin-Id")
    pulls.ask(1)

    assert [request.get("id") for request in asked(played)] == [None, "one", "one", None]
    assert {request["group"] for request in asked(played)} == {"workers"}
    assert {request["expires"] for request in asked(played)} == {2 * SECOND}
    assert (pulls.outstanding, pulls.error) == (1, None)


async def test_a_pin_ends_with_the_connection_that_it_was_given_on(played: PlayedConnection) -> None:
    pulls = PullSubscription(
        played.connection, stream="MARS", consumer="agent", on_messages=lambda *_: None, on_change=lambda: None
    )
    await pulls.open(limits=PINS)
    deliver(played, "one")
    for act in played.on_reconnect:
        act()
    assert (pulls.pin, pulls.pinned_as("one")) == ("", False)


async def test_messages_that_come_in_one_read_have_each_the_pin_that_it_came_with(played: PlayedConnection) -> None:
    pins: list[str] = []
    reader = PullSubscription(
        played.connection,
        stream="MARS",
        consumer="agent",
        on_messages=lambda _: pins.append(reader.pin),
        on_change=lambda: None,
    )
    await reader.open(limits=PINS)
    reply, blocks = (
        b"$JS.ACK.MARS.agent.1.1.1.1.0",
        (b"NATS/1.0\r\nNats-Pin-Id: %b\r\n\r\n" % pin for pin in (b"1", b"2")),
    )
    played.heard([(b"mars.od", reply, block, b"{}") for block in blocks])
    assert pins == ["1", "2"]


async def test_a_reader_of_a_prioritized_consumer_says_how_near_it_is(
    played: PlayedConnection, pulls: PullSubscription
) -> None:
    await pulls.open(limits={"priority_policy": "prioritized", "priority_groups": ["others"]}, priority=3)
    pulls.ask(1)

    [request] = asked(played)
    assert (request["group"], request["priority"], request["expires"]) == ("others", 3, 30 * SECOND)


@pytest.mark.parametrize("status", ["423 Nats-Pin-Id mismatch", "409 Leadership Change", "409 Server Shutdown"])
async def test_a_pin_ends_with_the_leader_that_gave_it(played: PlayedConnection, status: str) -> None:
    pulls = PullSubscription(
        played.connection, stream="MARS", consumer="agent", on_messages=lambda *_: None, on_change=lambda: None
    )
    await pulls.open(limits=PINS)
    deliver(played, "one")
    assert pulls.pinned_as("one")
    played.say(status=status)
    assert (pulls.pinned_as("one"), pulls.error) == (False, None)


async def test_a_pin_is_in_doubt_when_nothing_is_heard_for_as_long_as_an_election_takes(
    played: PlayedConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulls = PullSubscription(
        played.connection, stream="MARS", consumer="agent", on_messages=lambda *_: None, on_change=lambda: None
    )
    await pulls.open(limits=PINS)
    deliver(played, "one")
    monkeypatch.setattr(pulls, "_now", lambda: pulls._received_at + 3.6)
    assert not pulls.pinned_as("one")
    played.say(status="100 Idle Heartbeat")
    assert pulls.pin == "one"


async def test_a_server_may_change_the_form_of_its_replies(played: PlayedConnection) -> None:
    read: list[int] = []
    pulls = pulling(played, read)
    await pulls.open(limits={})
    for sequence, own in enumerate((SHORT, LONG, SHORT), start=1):
        played.heard([(b"mars.od", own + b"1.%d.1.1.0" % sequence, b"", b"{}")])
        assert pulls.settled_by == pulling(played, []).settled_by == own, "the next consumer begins with the form"
    assert read == [1, 2, 3]


async def test_what_is_no_status_of_a_server_ends_nothing(
    played: PlayedConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign: list[bytes] = []
    monkeypatch.setattr(played, "tell_foreign", lambda about, data: foreign.append(data), raising=False)
    pulls = pulling(played, [])
    await pulls.open(limits={})
    pulls.ask(10)
    played.heard([(b"_INBOX.test", b"", b"NATS/1.0\r\nname: value\r\n\r\n", b"of another user")])
    assert (foreign, pulls.error, pulls.outstanding) == ([b"of another user"], None, 10)
    played.say(status="409 Message Size Exceeds MaxBytes")
    assert pulls.error is None


def pulling(played: PlayedConnection, read: list[int]) -> PullSubscription:
    """Pull requests on one consumer. The sequences of its messages go to `read`."""
    return PullSubscription(
        played.connection,
        stream="MARS",
        consumer="agent",
        on_messages=lambda messages: read.extend(message[SEQUENCE] for message in messages),
        on_change=lambda: None,
    )


SHORT, LONG = b"$JS.ACK.MARS.agent.", b"$JS.ACK.hub.hash.MARS.agent."
ENDED = (b"_INBOX.test", b"", b"NATS/1.0 408 Request Timeout\r\nNats-Pending-Messages: 3\r\n\r\n", b"")


@pytest.mark.parametrize("own", [SHORT, LONG])
async def test_what_comes_in_one_read_is_a_message_a_status_or_foreign(
    played: PlayedConnection, monkeypatch: pytest.MonkeyPatch, own: bytes
) -> None:
    """With replies in their longer form, which names a domain and an account, it learns that at the first message."""
    foreign: list[bytes] = []
    monkeypatch.setattr(played, "tell_foreign", lambda about, data: foreign.append(data), raising=False)
    read: list[int] = []
    pulls = pulling(played, read)
    await pulls.open(limits={})
    pulls.ask(10)

    played.heard(
        [
            (b"mars.od", own + b"1.41.1.1.2", b"", b"{}"),
            (b"mars.od", own + b"1.x.1.1.2", b"", b"no number"),
            ENDED,
            (b"mars.od", own + b"1.42.2.1.1", b"", b"{}"),
            (b"mars.od", b"$JS.ACK.MARS.another.1.43.2.1.1", b"", b"of another one"),
        ]
    )

    assert (read, sorted(foreign)) == ([41, 42], [b"no number", b"of another one"])
    assert pulls.outstanding == 10 - 2 - 3
