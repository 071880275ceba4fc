"""The short way through nats-py against nats-py's own: the same arrives, whatever the pieces it comes in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.errors import ProtocolError
from nats.protocol.parser import Parser

from aviso_workers._fast import Arrival
from aviso_workers.backends.jetstream import wire
from aviso_workers.backends.jetstream.wire import (
    HeaderBlocks,
    Headers,
    ListeningParser,
    PublicWire,
    Wire,
    header_block,
    status,
)
from aviso_workers.server import NatsServer
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

OURS, THEIRS = 7, 8
"""Ids of subscriptions: one of a listener, one of nats-py."""


class Recorded:
    """A nats-py client as far as its parser needs one, which writes down what it is told."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.stats = {"in_msgs": 0, "in_bytes": 0}

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        self.heard.append((sid, subject, reply, headers or b"", data))

    async def _process_ping(self) -> None:
        self.heard.append(("PING",))

    async def _process_pong(self) -> None:
        self.heard.append(("PONG",))

    async def _process_err(self, error: str) -> None:
        self.heard.append(("-ERR", error))

    async def _process_info(self, info: dict[str, Any]) -> None:
        self.heard.append(("INFO", info))

    def listen(self, arrivals: Sequence[Arrival]) -> None:
        self.heard += [(OURS, *arrival) for arrival in arrivals]


def message(subject: str, sid: int, reply: str, headers: bytes, data: bytes) -> bytes:
    words = [subject, str(sid), *([reply] if reply else [])]
    if headers:
        words += [str(len(headers)), str(len(headers) + len(data))]
        return f"HMSG {' '.join(words)}\r\n".encode() + headers + data + b"\r\n"
    return f"MSG {' '.join(words)} {len(data)}\r\n".encode() + data + b"\r\n"


SUBJECTS = st.text("abcdefghij.é%", min_size=1, max_size=20)
MESSAGES = st.builds(
    message,
    SUBJECTS,
    st.sampled_from([OURS, THEIRS]),
    st.one_of(st.just(""), SUBJECTS),
    st.sampled_from([b"", b"NATS/1.0 408 Request Timeout\r\n\r\n", b"NATS/1.0\r\nNats-Msg-Id: a\r\n\r\n"]),
    st.one_of(
        st.binary(max_size=50),
        st.sampled_from([b"\r\n", b"MSG a 7 2\r\nhi\r\n", b"PING\r\n"]),
        st.integers(0, 200_000).map(lambda size: b"x" * size),
    ),
)
OTHERS = st.sampled_from([b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b"-ERR 'slow'\r\n", b'INFO {"max_payload": 1}\r\n'])
MALFORMED = [
    b"MSG a 7\r\n",
    b"MSG a seven 2\r\nhi\r\n",
    b"MSG a 7 -2\r\n",
    b"MSG a 7 r x 2\r\n",
    b"MSG a 7 two\r\n",
    b"HMSG a 7 12\r\n",
    b"HMSG a 7 r 12 many\r\n",
    b"msg a 7 2\r\nhi\r\n",
    b"HELLO\r\n",
    b"\r\n",
]


async def feed(parser: Parser, data: bytes, cuts: list[int]) -> type[Exception] | None:
    """Parse the data in pieces; returns the error that ended it."""
    begin = 0
    try:
        for end in [*sorted(cuts), len(data)]:
            if end > begin:
                await parser.parse(data[begin:end])
                begin = end
    except Exception as error:
        return type(error)
    return None


def both(data: bytes, cuts: list[int]) -> tuple[Recorded, Recorded, type[Exception] | None, type[Exception] | None]:
    """What nats-py makes of the data, and what we do."""
    theirs, ours = Recorded(), Recorded()
    dispatcher = ListeningParser(ours, Parser(ours))  # type: ignore[arg-type]
    dispatcher.listeners[OURS] = ours.listen
    return theirs, ours, asyncio.run(feed(Parser(theirs), data, cuts)), asyncio.run(feed(dispatcher, data, cuts))


@pytest.mark.slow
@given(st.lists(st.one_of(MESSAGES, OTHERS), max_size=12), st.data())
def test_what_comes_in_pieces_is_what_nats_py_makes_of_it(commands: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(commands)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=20))

    theirs, ours, their_error, our_error = both(stream, cuts)

    assert (ours.heard, our_error) == (theirs.heard, their_error)


@pytest.mark.parametrize("malformed", MALFORMED)
@pytest.mark.parametrize("pieces", [1, 1000])
def test_what_is_malformed_ends_it_after_what_was_not(malformed: bytes, pieces: int) -> None:
    stream = message("a", OURS, "", b"", b"1") + message("b", THEIRS, "", b"", b"2") + malformed
    cuts = list(range(0, len(stream), pieces))

    theirs, ours, their_error, our_error = both(stream, cuts)

    assert (ours.heard, our_error) == (theirs.heard, their_error)
    assert (len(ours.heard), our_error) == (2, ProtocolError)


@pytest.mark.parametrize("control", ["\v", "\f", "\x1c", "\x85", "\u2028"])
async def test_a_subject_may_hold_what_python_takes_for_a_blank(control: str) -> None:
    """A server parts the words of a line by spaces and tabs, and takes all else that a client puts into a subject."""
    heard = Recorded()
    dispatcher = ListeningParser(heard, Parser(heard))  # type: ignore[arg-type]
    dispatcher.listeners[OURS] = heard.listen
    subject = f"mars.a{control}b"

    for headers in (b"", b"NATS/1.0\r\n\r\n"):
        await dispatcher.parse(message(subject, OURS, "r", headers, b"1"))

    assert [arrival[1:3] for arrival in heard.heard] == [(subject.encode(), b"r")] * 2


async def test_a_command_that_is_not_whole_is_kept_for_the_next_read() -> None:
    heard = Recorded()
    dispatcher = ListeningParser(heard, Parser(heard))  # type: ignore[arg-type]
    dispatcher.listeners[OURS] = heard.listen
    whole = message("a", OURS, "r", b"NATS/1.0\r\n\r\n", b"x" * 10)
    for position in range(len(whole) - 1):
        await dispatcher.parse(whole[position : position + 1])
    assert heard.heard == []

    await dispatcher.parse(whole[-1:])

    assert heard.heard == [(OURS, b"a", b"r", b"NATS/1.0\r\n\r\n", b"x" * 10)]
    assert heard.stats == {"in_msgs": 1, "in_bytes": len(b"NATS/1.0\r\n\r\n") + 10}


async def test_what_was_left_of_a_lost_connection_does_not_come_into_the_next() -> None:
    heard = Recorded()
    dispatcher = ListeningParser(heard, Parser(heard))  # type: ignore[arg-type]
    dispatcher.listeners[OURS] = heard.listen
    await dispatcher.parse(message("a", OURS, "", b"", b"lost")[:-3])
    dispatcher.reset()

    await dispatcher.parse(message("b", OURS, "", b"", b"new"))

    assert heard.heard == [(OURS, b"b", b"", b"", b"new")]


async def test_a_connection_that_ends_within_a_read_ends_it() -> None:
    heard = Recorded()
    dispatcher = ListeningParser(heard, Parser(heard))  # type: ignore[arg-type]
    dispatcher.listeners[OURS] = heard.listen

    async def lose_connection(error: str) -> None:
        dispatcher.reset()

    heard._process_err = lose_connection  # type: ignore[method-assign]
    await dispatcher.parse(b"-ERR 'stale connection'\r\n" + message("a", OURS, "", b"", b"old"))
    await dispatcher.parse(message("b", OURS, "", b"", b"new"))

    assert heard.heard == [(OURS, b"b", b"", b"", b"new")]


async def test_a_listener_that_fails_does_not_end_the_reading() -> None:
    reported: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context["message"]))
    heard = Recorded()
    dispatcher = ListeningParser(heard, Parser(heard))  # type: ignore[arg-type]

    def fail(arrivals: Sequence[Arrival]) -> None:
        raise ValueError("not now")

    dispatcher.listeners.update({OURS: fail, THEIRS: heard.listen})
    await dispatcher.parse(message("a", OURS, "", b"", b"1") + message("b", THEIRS, "", b"", b"2"))

    assert heard.heard == [(OURS, b"b", b"", b"", b"2")]
    assert reported == ["a listener failed"]


LINES = st.sampled_from(
    [
        b"Name: value",
        b"Name:value",
        b"Name:  v  ",
        b"Other: a: b",
        b"no colon",
        b"Two Words: x",
        b"N\xc3\xa4me: x",
        b"Name: gr\xc3\xbc\xc3\x9f",
        b"Name: \xff",
        b": nameless",
        b"Empty:",
    ]
)


@given(st.lists(LINES, max_size=6))
def test_headers_are_read_as_nats_py_reads_them(lines: list[bytes]) -> None:
    block = b"".join(line + b"\r\n" for line in lines)
    headers = Headers(b"NATS/1.0\r\n" + block + b"\r\n")

    expected = Client._parse_header_lines(block)

    assert dict(headers) == expected
    assert {name: name in headers for name in ("Name", "Other", "Missing")} == {
        name: name in expected for name in ("Name", "Other", "Missing")
    }


def test_header_blocks_are_read_where_somebody_looks() -> None:
    blocks = HeaderBlocks([b"", header_block({"Name": "value"})])

    for _ in range(2):
        assert [headers and dict(headers) for headers in blocks] == [None, {"Name": "value"}]


async def test_a_listener_is_told_at_once_of_all_that_came_for_it_in_one_read() -> None:
    told: list[int] = []
    heard = Recorded()
    dispatcher = ListeningParser(heard, Parser(heard))  # type: ignore[arg-type]
    dispatcher.listeners[OURS] = lambda arrivals: told.append(len(arrivals))

    await dispatcher.parse(message("a", OURS, "", b"", b"1") * 3 + b"PING\r\n" + message("a", OURS, "", b"", b"1"))

    assert told == [3, 1]


def test_a_line_break_in_a_value_makes_no_header_of_its_own() -> None:
    assert header_block({"Name": "a\r\nNats-TTL: 1s "}) == b"NATS/1.0\r\nName: a  Nats-TTL: 1s\r\n\r\n"


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (b"NATS/1.0 503\r\n\r\n", ("503", "")),
        (b"NATS/1.0 409 Consumer Deleted\r\n\r\n", ("409", "Consumer Deleted")),
        (b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 7\r\n\r\n", ("100", "Idle Heartbeat")),
        (b"NATS/1.0\r\nName: value\r\n\r\n", ("", "")),
        (b"", ("", "")),
    ],
)
def test_a_status_is_the_first_line(block: bytes, said: tuple[str, str]) -> None:
    assert status(block) == said


class TestAttach:
    async def test_takes_the_short_way_with_the_nats_py_that_it_was_tested_with(self, client: Client) -> None:
        assert wire.attach(client).slow_because == ""

    async def test_takes_public_names_with_another_and_says_so(
        self, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(wire, "version", lambda package: "2.99.0")
        assert wire.attach(client).slow_because == "nats-py 2.99.0 was not tested, 2.16.x was"

    async def test_takes_public_names_where_a_private_one_is_missing(
        self, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(wire, "PRIVATE", (*wire.PRIVATE, "_gone"))
        assert "has no _gone" in wire.attach(client).slow_because


@pytest.fixture
async def client(nats_server: NatsServer) -> AsyncGenerator[Client, None]:
    client = Client()
    await client.connect(nats_server.url)
    yield client
    await client.close()


@pytest.fixture(params=["short", "public"])
async def attached(request: pytest.FixtureRequest, client: Client) -> Wire:
    return wire.attach(client) if request.param == "short" else PublicWire(client, because="asked for")


async def answered(attached: Wire) -> bool:
    pong: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    await attached.ping(pong)
    with anyio.fail_after(PATIENCE_SECONDS):
        return await pong


class TestAWire:
    async def test_brings_what_is_sent(self, attached: Wire, client: Client) -> None:
        heard: list[Arrival] = []
        await attached.listen("news.*", heard.extend)
        attached.send(b"news.1", b"plain")
        attached.send(b"news.2", b"", reply=b"answers.1")
        attached.ack(b"news.acked")
        attached.send(b"news.3", b"x" * 100_000, headers=header_block({"Name": "value"}))

        assert await answered(attached)
        await anyio.wait_all_tasks_blocked()

        assert heard == [
            (b"news.1", b"", b"", b"plain"),
            (b"news.2", b"answers.1", b"", b""),
            (b"news.acked", b"", b"", b"+ACK"),
            (b"news.3", b"", header_block({"Name": "value"}), b"x" * 100_000),
        ]

    async def test_sends_no_ping_that_nobody_waits_for_any_more(self, attached: Wire) -> None:
        pong: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        pong.set_result(False)  # as when the connection is lost before it is sent

        await attached.ping(pong)

        assert await answered(attached)

    async def test_says_that_nobody_listens(self, attached: Wire) -> None:
        heard: list[Arrival] = []
        await attached.listen("answers", heard.extend)
        attached.send(b"nobody", b"", reply=b"answers")

        assert await answered(attached)
        await anyio.wait_all_tasks_blocked()

        assert [status(block)[0] for _, _, block, _ in heard] == ["503"]

    async def test_brings_nothing_any_more_once_it_is_forgotten(self, attached: Wire) -> None:
        heard: list[Arrival] = []
        interest = await attached.listen("news", heard.extend)
        attached.send(b"news", b"1")
        attached.mute(interest)
        assert await answered(attached)
        await anyio.wait_all_tasks_blocked()
        await attached.forget(interest)
        attached.send(b"news", b"2")

        assert await answered(attached)
        assert heard == [(b"news", b"", b"", b"1")]

    async def test_listens_again_after_a_reconnect(
        self, attached: Wire, client: Client, nats_server: NatsServer
    ) -> None:
        heard: list[Arrival] = []
        await attached.listen("news", heard.extend)
        back = anyio.Event()

        async def reconnected() -> None:
            back.set()

        client._reconnected_cb = reconnected
        client._transport.close()  # type: ignore[union-attr]
        with anyio.fail_after(PATIENCE_SECONDS):
            await back.wait()
        attached.send(b"news", b"again")

        assert await answered(attached)
        await anyio.wait_all_tasks_blocked()
        assert heard == [(b"news", b"", b"", b"again")]
