"""What we hold nats-py to, and do ourselves where it does not: is the server there, and leaving one that is not."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import AsyncGenerator

import anyio
import anyio.abc
import anyio.lowlevel
import pytest
from nats.aio.client import ServerVersion
from nats.aio.msg import Msg

from aviso_workers import config
from aviso_workers.backends.jetstream import connection as module
from aviso_workers.backends.jetstream.connection import NatsConnection
from aviso_workers.errors import DeniedError, RefusedError, UnavailableError
from aviso_workers.server import NatsServer
from tests.waits import LONG_SECONDS, PROMPT_SECONDS, stand_still

pytestmark = pytest.mark.anyio


@pytest.fixture
async def connection(nats_server: NatsServer) -> AsyncGenerator[NatsConnection, None]:
    settings = config.JetStream(nats_url=config.ServerUrls(nats_server.url), max_reconnect_attempts=0)
    connection = NatsConnection(settings, on_connection=None)
    await connection.open()
    yield connection
    nats_server.process.send_signal(signal.SIGCONT)
    await connection.close()


async def test_a_server_that_answers_has_what_was_sent_before(connection: NatsConnection) -> None:
    async def hear(message: Msg) -> None:
        pass

    await connection.nc.subscribe("numbers", cb=hear)
    for round_ in range(1, 20):
        for number in range(100):
            await connection.nc.publish("numbers", b"%d" % number)

        assert await connection.answers()

        assert connection.nc.stats["in_msgs"] == round_ * 100


@pytest.mark.parametrize(
    "name",
    ["X 0\r\n\r\nPUB $JS.API.STREAM.DELETE.VICTIM 0\r\n\r\nPUB Y", "MARS 1", "MARS\t", "M" * 5000],
    ids=["commands", "blank", "tab", "long"],
)
async def test_nothing_leaves_of_a_request_whose_subject_would_be_more_than_that(
    connection: NatsConnection, name: str
) -> None:
    """The name of a stream may be from the records of another app."""
    await connection.api("STREAM.CREATE.VICTIM", {"name": "VICTIM", "subjects": ["victim.>"]})
    with pytest.raises(RefusedError):
        await connection.api(f"STREAM.INFO.{name}")
    with pytest.raises(RefusedError):
        await connection.request(f"$JS.API.STREAM.INFO.{name}", b"", timeout_seconds=1)
    with pytest.raises(RefusedError):
        connection.post(f"CONSUMER.MSG.NEXT.{name}.agent", b"", reply="_INBOX.1")
    with pytest.raises(RefusedError):
        await connection.listen(name, lambda _: None)
    assert await connection.answers()
    assert not connection.nc.stats["reconnects"]
    assert (await connection.api("STREAM.DELETE.VICTIM"))["success"]


async def test_who_may_not_hear_answers_is_denied_requests_and_not_publishes(connection: NatsConnection) -> None:
    """What is published is stored all the same, so that only its acknowledgement is missing."""
    connection._note_denial('nats: permissions violation for subscription to "_inbox.1.*"')
    with pytest.raises(DeniedError, match="_inbox"):
        connection.check_allowed("mars.od", since=0)
    connection.check_allowed("mars.od", since=0, answers=False)
    connection._note_denial('nats: permissions violation for publish to "mars.od"')
    with pytest.raises(DeniedError, match=r"mars\.od"):
        connection.check_allowed("mars.od", since=0, answers=False)


async def test_closing_while_it_begins_to_reconnect_cancels_nobody(nats_server: NatsServer) -> None:
    connection = NatsConnection(config.JetStream(nats_url=config.ServerUrls(nats_server.url)), on_connection=None)
    await connection.open()
    await connection.nc.force_reconnect()
    await anyio.lowlevel.checkpoint()  # until nats-py waits for its transport to be closed, which it cancels next
    await connection.close()
    assert connection.nc.is_closed


async def test_a_server_that_stands_still_does_not_answer(
    connection: NatsConnection, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PING_SECONDS", 0.1)
    stand_still(nats_server)

    assert not await connection.answers()


async def test_a_change_without_an_answer_may_still_be_done(
    connection: NatsConnection, nats_server: NatsServer
) -> None:
    await connection.api("STREAM.CREATE.MARS", {"name": "MARS", "subjects": ["mars"]})
    stand_still(nats_server)
    with pytest.raises(UnavailableError, match=r"no answer in time; it may still be done: see what is there"):
        await connection.api("STREAM.DELETE.MARS", timeout_seconds=0.2)
    for reading in ("STREAM.NAMES", "STREAM.INFO.PURGE", "STREAM.MSG.GET.MARS", "CONSUMER.CREATE.MARS"):
        with pytest.raises(UnavailableError, match=r"no answer in time$"):
            await connection.api(reading, timeout_seconds=0.2)
    nats_server.process.send_signal(signal.SIGCONT)

    with anyio.fail_after(LONG_SECONDS):
        while True:
            if not (await connection.api("STREAM.NAMES"))["total"]:
                break
            await anyio.sleep(0.01)


async def test_an_answer_that_comes_when_nobody_waits_any_more_does_no_harm(
    connection: NatsConnection, nats_server: NatsServer
) -> None:
    stand_still(nats_server)
    with anyio.move_on_after(0.1) as waiting:
        await connection.answers()
    nats_server.process.send_signal(signal.SIGCONT)

    assert waiting.cancelled_caught
    assert await connection.answers()
    assert (await connection.api("INFO"))["streams"] == 0


async def test_a_question_that_a_cluster_does_not_answer_while_it_creates_a_stream_is_asked_again(
    connection: NatsConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHECK_AGAIN_SECONDS", 0.1)
    asked, answer = [], {"type": "io.nats.jetstream.api.v1.stream_info_response", "state": {"messages": 3}}

    async def answer_the_second_time(message: Msg) -> None:
        asked.append(message.subject)
        if len(asked) == 2:
            await message.respond(json.dumps(answer).encode())

    await connection.nc.subscribe("$JS.PLAYED.API.>", cb=answer_the_second_time)

    assert await connection.api("STREAM.INFO.DEED", prefix="$JS.PLAYED.API") == answer

    assert asked == ["$JS.PLAYED.API.STREAM.INFO.DEED"] * 2


async def test_a_lost_connection_answers_at_once_that_it_does_not(
    connection: NatsConnection, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PING_SECONDS", LONG_SECONDS)
    stand_still(nats_server)
    started = time.monotonic()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(connection.answers)
        await anyio.wait_all_tasks_blocked()
        nats_server.kill()

    assert time.monotonic() - started < PROMPT_SECONDS


async def test_a_connection_that_is_lost_before_it_is_asked_does_no_harm_to_the_next_one(
    connection: NatsConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush_pending, back = connection.nc._flush_pending, anyio.Event()
    connection.on_reconnect.add(back.set)

    async def lose_it_meanwhile(force_flush: bool = False) -> None:
        if force_flush:
            await connection.nc.force_reconnect()
            await back.wait()
        await flush_pending(force_flush)

    with monkeypatch.context() as patched:
        patched.setattr(connection.nc, "_flush_pending", lose_it_meanwhile)
        assert not await connection.answers()

    assert await connection.answers(), "nobody reads any more what the server says"


async def test_closing_does_not_wait_for_a_server_that_takes_nothing(
    connection: NatsConnection, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.2)
    stand_still(nats_server)
    with anyio.move_on_after(0.5):
        for _ in range(50):  # more than the buffers on the way take
            await connection.nc.publish("numbers", b"x" * 1_000_000)
    started = time.monotonic()

    await connection.close()

    assert time.monotonic() - started < PROMPT_SECONDS


async def test_what_is_flushed_after_the_end_is_an_error(connection: NatsConnection) -> None:
    await connection.close()

    with pytest.raises(UnavailableError, match="closed"):
        await connection.flush()


async def test_the_version_of_the_last_server_holds_until_the_next_one_has_told_its_own(
    connection: NatsConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = connection.server_version
    assert known > (2, 0)

    monkeypatch.setattr(
        type(connection.nc), "connected_server_version", property(lambda _: ServerVersion("0.0.0-unknown"))
    )

    assert connection.server_version == known


async def test_a_listed_server_that_accepts_and_says_nothing_costs_seconds(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SECONDS_PER_SERVER", 1)
    monkeypatch.setattr("nats.aio.client.shuffle", lambda servers: None)  # the silent one is tried first
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as silent:
        port = silent.extra(anyio.abc.SocketAttribute.local_port)
        settings = config.JetStream(nats_url=config.ServerUrls(f"nats://127.0.0.1:{port}", nats_server.url))
        connection = NatsConnection(settings, on_connection=None)
        with anyio.fail_after(PROMPT_SECONDS):
            await connection.open()
        assert connection.ready
        await connection.close()
