"""An answer counts only if it belongs to the request: somebody else's may come on the same subject."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import nats
import pytest
from nats.aio.msg import Msg

from aviso_workers import config
from aviso_workers.backends import Message, Outgoing, PubAck
from aviso_workers.backends.jetstream import JetStreamBackend, inboxes
from aviso_workers.errors import BackendError, FullError, RefusedError, UnavailableError
from aviso_workers.jetstream import answers
from aviso_workers.jetstream.info import StreamConfig
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.ops import inventory
from aviso_workers.server import NatsServer
from tests.waits import PATIENCE_SECONDS, flushed

pytestmark = pytest.mark.anyio

FOREIGN = b'{"stream": "OTHER", "seq": 7}'
OWN = b'{"stream": "MARS", "seq": 3}'
FULL = {"code": 503, "err_code": 10077, "description": "maximum messages exceeded"}
TOLD = "an acknowledgement of stream OTHER came as its answer"


class Told(list[str]):
    """What the connection says of answers that it ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = anyio.Event()

    def listen(self, *, connected: bool, reason: str, denied: str = "", foreign: str = "", times: int = 0) -> None:
        if foreign:
            self.append(foreign)
            self.heard.set()


@pytest.fixture
async def told() -> Told:
    return Told()


@asynccontextmanager
async def connected(server: NatsServer, told: Told, **settings: Any) -> AsyncGenerator[JetStreamBackend, None]:
    settings = {"nats_url": config.ServerUrls(server.url), "max_reconnect_attempts": 0, **settings}
    async with JetStreamBackend(config.JetStream(**settings), on_connection=told.listen) as backend:
        yield backend


@pytest.fixture
async def backend(nats_server: NatsServer, told: Told) -> AsyncGenerator[JetStreamBackend, None]:
    async with connected(nats_server, told) as backend:
        yield backend


@asynccontextmanager
async def answering(server: NatsServer, subject: str, *bodies: bytes) -> AsyncGenerator[list[str], None]:
    """Answer each message to the subject by all bodies; yields the subjects to which the answers went."""
    replies: list[str] = []

    async def answer(message: Msg) -> None:
        if message.reply:
            replies.append(message.reply)
            for body in bodies:
                await client.publish(message.reply, body)

    client = await nats.connect(server.url)
    await client.subscribe(subject, cb=answer)
    await flushed(client)
    yield replies
    await client.close()


def outgoing(count: int = 1) -> list[Outgoing]:
    return [Outgoing(Message(subject="mars.od", data=b"{}"), f"id-{n}", "MARS") for n in range(count)]


async def store(backend: JetStreamBackend, subject: str, data: bytes) -> None:
    stream = subject.partition(".")[0].upper()
    message = Message(subject=subject, data=data)
    await backend.publish(message, message_id=subject, stream=stream, timeout_seconds=PATIENCE_SECONDS)


async def publish(backend: JetStreamBackend, *, timeout_seconds: float = PATIENCE_SECONDS) -> PubAck:
    [message] = outgoing()
    return await backend.publish(message.message, message_id="id", stream="MARS", timeout_seconds=timeout_seconds)


async def publish_many(backend: JetStreamBackend, *, timeout_seconds: float = PATIENCE_SECONDS) -> PubAck:
    [result] = await backend.publish_many(outgoing(), timeout_seconds=timeout_seconds)
    if isinstance(result, BackendError):
        raise result
    return result


async def publish_together(backend: JetStreamBackend, *, timeout_seconds: float = PATIENCE_SECONDS) -> PubAck:
    return await backend.publish_together(outgoing(2), timeout_seconds=timeout_seconds)


async def goes_on_waiting(call: Callable[[], Awaitable[Any]], told: Told) -> None:
    """Return when a foreign answer has come and was ignored; the call has not ended by it."""
    ended: list[Any] = []

    async def run() -> None:
        ended.append(await call())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        with anyio.fail_after(PATIENCE_SECONDS):
            await told.heard.wait()
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert not ended


PUBLISHES: Sequence[Callable[..., Awaitable[PubAck]]] = (publish, publish_many, publish_together)


@pytest.mark.parametrize("call", PUBLISHES)
async def test_the_acknowledgement_of_another_stream_is_no_success(
    backend: JetStreamBackend, nats_server: NatsServer, told: Told, call: Callable[..., Awaitable[PubAck]]
) -> None:
    async with answering(nats_server, "mars.od", FOREIGN):
        await goes_on_waiting(partial(call, backend), told)
    assert told == [f"publish to stream MARS: {TOLD}"]


@pytest.mark.parametrize("call", PUBLISHES)
async def test_the_right_acknowledgement_counts_also_after_a_foreign_one(
    backend: JetStreamBackend, nats_server: NatsServer, told: Told, call: Callable[..., Awaitable[PubAck]]
) -> None:
    async with answering(nats_server, "mars.od", FOREIGN, b"no JSON", OWN):
        assert await call(backend) == PubAck(stream="MARS", sequence=3)
    assert told == [
        f"publish to stream MARS: {TOLD}",
        "publish to stream MARS: a message of 7 bytes came as its answer",
    ]


async def test_the_refusal_of_another_stream_does_not_count(
    backend: JetStreamBackend, nats_server: NatsServer, told: Told
) -> None:
    refusals = [json.dumps({"stream": stream, "error": FULL}).encode() for stream in ("OTHER", "MARS")]
    async with answering(nats_server, "mars.od", *refusals):
        with pytest.raises(FullError):
            await publish(backend)
    assert told == [f"publish to stream MARS: {TOLD}"]


async def test_of_a_domain_that_is_configured_another_one_does_not_answer(nats_server: NatsServer, told: Told) -> None:
    bodies = (b'{"stream": "MARS", "seq": 1, "domain": "leaf"}', b'{"stream": "MARS", "seq": 2, "domain": "hub"}')
    async with connected(nats_server, told, domain="hub") as backend, answering(nats_server, "mars.od", *bodies):
        assert (await publish(backend)).sequence == 2
    assert told == ["publish to stream MARS: an acknowledgement of stream MARS came as its answer"]


async def test_a_fast_batch_counts_what_its_own_stream_says(
    backend: JetStreamBackend, nats_server: NatsServer, told: Told
) -> None:
    backend._ingester.learn(StreamConfig({"name": "MARS", "allow_batched": True}))
    committed = json.dumps({"stream": "MARS", "seq": 20, "batch": "any", "count": 20}).encode()
    forged = json.dumps({"stream": "OTHER", "seq": 20, "batch": "any", "count": 20}).encode()
    async with answering(nats_server, "mars.od", forged):
        await goes_on_waiting(partial(backend.publish_many, outgoing(20), timeout_seconds=PATIENCE_SECONDS), told)
    assert set(told) == {f"publish to stream MARS: {TOLD}"}

    async with answering(nats_server, "mars.od", forged, committed):
        results = await backend.publish_many(outgoing(20), timeout_seconds=PATIENCE_SECONDS)
    assert results == [PubAck(stream="MARS", sequence=0)] * 20


REQUESTS: dict[str, tuple[str, Callable[[JetStreamBackend], Awaitable[Any]]]] = {
    "info": ("STREAM.INFO.MARS", lambda backend: backend.stream_info("MARS")),
    "delete": ("STREAM.DELETE.MARS", lambda backend: backend.delete_stream("MARS")),
    "purge": ("STREAM.PURGE.MARS", lambda backend: backend.purge_stream("MARS")),
    "message": ("STREAM.MSG.GET.MARS", lambda backend: backend.message("MARS", 1)),
    "delete message": ("STREAM.MSG.DELETE.MARS", lambda backend: backend.delete_message("MARS", 1)),
    "consumer": ("CONSUMER.INFO.MARS.one", lambda backend: backend.consumer_info("MARS", "one")),
    "delete consumer": ("CONSUMER.DELETE.MARS.one", lambda backend: backend.delete_consumer("MARS", "one")),
    "names": ("STREAM.NAMES", lambda backend: backend.stream_names()),
}


@pytest.mark.parametrize("request_", REQUESTS)
async def test_an_acknowledgement_answers_no_request_of_the_api(
    backend: JetStreamBackend, nats_server: NatsServer, told: Told, request_: str
) -> None:
    """Here nobody but the forger answers."""
    subject, ask = REQUESTS[request_]
    async with answering(nats_server, f"$JS.hub.API.{subject}", FOREIGN):
        await goes_on_waiting(partial(ask, backend.at("$JS.hub.API")), told)  # type: ignore[arg-type]
    assert told == [f"$JS.hub.API.{subject}: {TOLD}"]


def body(kind: str, **fields: object) -> bytes:
    return json.dumps({"type": f"io.nats.jetstream.api.v1.{kind}_response", **fields}).encode()


@pytest.mark.parametrize(
    ("request_", "answer", "belongs"),
    [
        ("INFO", body("account_info"), True),
        ("STREAM.INFO.MARS", body("stream_info", config={"name": "MARS"}), True),
        ("STREAM.INFO.MARS", body("stream_info", config={"name": "OTHER"}), False),
        ("STREAM.INFO.MARS", body("stream_info", error={"code": 404}), True),
        ("STREAM.INFO.MARS", body("stream_delete", success=True), False),
        ("STREAM.INFO.MARS", b"[]", False),
        ("STREAM.INFO.MARS", b"", False),
        ("STREAM.MSG.GET.MARS", body("stream_msg_get", message={}), True),
        ("STREAM.PEER.REMOVE.MARS", body("stream_remove_peer", success=True), True),
        ("CONSUMER.LEADER.STEPDOWN.MARS.one", body("consumer_leader_stepdown", success=True), True),
        ("CONSUMER.CREATE.MARS.one.mars.od", body("consumer_create", stream_name="MARS", name="one"), True),
        ("CONSUMER.DURABLE.CREATE.MARS.one", body("consumer_create", stream_name="MARS", name="one"), True),
        ("CONSUMER.CREATE.MARS", body("consumer_create", stream_name="MARS", name="given", config={}), True),
        ("CONSUMER.INFO.MARS.one", body("consumer_info", stream_name="MARS", name="two"), False),
        ("CONSUMER.INFO.MARS.one", body("consumer_info", stream_name="OTHER", name="one"), False),
    ],
)
def test_an_answer_is_of_the_kind_of_its_request_and_names_what_it_is_about(
    request_: str, answer: bytes, belongs: bool
) -> None:
    assert answers.belongs_to(request_, answer) is belongs


async def test_what_did_not_come_from_the_consumer_is_not_delivered(
    backend: JetStreamBackend, nats_server: NatsServer, told: Told
) -> None:
    """A status has headers, and a message a reply subject that names the consumer."""
    pulls: list[str] = []

    async def hear(message: Msg) -> None:
        pulls.append(message.reply)
        heard.set()

    heard = anyio.Event()
    client = await nats.connect(nats_server.url)
    await client.subscribe("$JS.API.CONSUMER.MSG.NEXT.MARS.>", cb=hear)
    await flushed(client)
    for name in ("MARS", "OTHER"):
        await backend.create_stream(StreamSpec(name=name, subjects=(f"{name.lower()}.>",)))
    await backend.put_consumer("OTHER", "one", {"durable_name": "one", "ack_policy": "explicit"}, action="create")
    await store(backend, "other.od", b"forged")
    read: list[bytes] = []
    complete = anyio.Event()

    async def follow() -> None:
        async for message in backend.read("MARS", filter_subjects=()):
            read.append(message.data)
            complete.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        with anyio.fail_after(PATIENCE_SECONDS):
            await heard.wait()
            await client.publish(pulls[-1], FOREIGN)
            await client.publish("$JS.API.CONSUMER.MSG.NEXT.OTHER.one", reply=pulls[-1])
            await flushed(client)
            await store(backend, "mars.od", b"own")
            await complete.wait()
        tasks.cancel_scope.cancel()
    await client.close()

    assert read == [b"own"]
    assert [each.partition(": ")[2] for each in told] == [TOLD, "a message of 6 bytes came as its answer"]
    assert all(each.startswith("pull from consumer ") for each in told)


async def test_nobody_can_guess_where_the_next_answer_goes(backend: JetStreamBackend, nats_server: NatsServer) -> None:
    async with answering(nats_server, "mars.od", OWN) as replies:
        for _ in range(3):
            await publish(backend)
    beginnings, ends = zip(*(reply.rsplit(".", 1) for reply in replies), strict=True)
    assert len(set(beginnings)) == 1
    assert len(set(ends)) == 3
    assert {len(end) for end in ends} == {12}  # of 64 characters each: 72 bits


@pytest.mark.parametrize(
    ("user", "stated", "prefix"),
    [
        ("mars", None, "_INBOX_mars"),
        ("", None, "_INBOX"),
        ("mars", "_INBOX.mine", "_INBOX.mine"),
        ("a.b", None, "_INBOX_a=2Eb"),
        ("a=2Eb", None, "_INBOX_a=3D2Eb"),
        ("ö >*", None, "_INBOX_=C3=B6=20=3E=2A"),
    ],
)
def test_no_two_users_have_one_prefix_for_their_answers(user: str, stated: str | None, prefix: str) -> None:
    assert inboxes.prefix(config.JetStream(inbox_prefix=stated), user) == prefix


async def test_an_acknowledgement_is_no_message_of_a_direct_get(nats_server: NatsServer, told: Told) -> None:
    stream = {"name": "MARS", "subjects": ["mars.>"], "allow_direct": True}
    times = dict.fromkeys(("created", "ts"), "2026-11-20T00:00:00Z")
    found = body("stream_info", config=stream, state={"last_seq": 1}, **times)
    async with (
        connected(nats_server, told, api_prefix="JS.played") as backend,
        answering(nats_server, "JS.played.STREAM.INFO.MARS", found),
        answering(nats_server, "JS.played.DIRECT.GET.MARS", FOREIGN),
    ):
        with pytest.raises(UnavailableError, match="an acknowledgement of stream OTHER"):
            await inventory.direct_message(backend, "MARS", sequence=1)


async def test_a_request_that_the_server_does_not_take_is_not_sent(backend: JetStreamBackend) -> None:
    """The server would close the connection."""
    with pytest.raises(RefusedError, match=r"2097152 bytes, the server takes 1048576"):
        await backend.administration().request("anything", b"x" * (2 << 20))
    with pytest.raises(RefusedError, match=r"STREAM.CREATE.MARS: .* the server takes 1048576"):
        await backend.create_stream(StreamSpec(name="MARS", subjects=tuple(f"mars.{n:0100}" for n in range(15_000))))
    assert await backend.stream_names() == []
