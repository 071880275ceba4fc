"""Attacks by which a user reaches further than its subjects: each is tried on a real server, and what came is read."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal

import anyio
import nats
from msgspec import Struct
from nats.aio.client import Client
from nats.aio.msg import Msg

from tests.waits import PATIENCE_SECONDS, flushed

__all__ = ["ATTACKS", "OTHER_BASE", "PURGE", "STATE", "Cell", "Place", "Reach", "prepare", "reached"]

Reach = Literal[
    "own base",
    "other bases",
    "state of workers",
    "JetStream's API",
    "inboxes of others",
    "reads own base",
    "reads other bases",
    "reads state of workers",
]
Cell = Literal["yes", "answers", "resets", "no"]
"""Whether a user reaches it: with what it likes, with answers of a server such as acknowledgements, or not. `resets`:
with one request, which resets consumers. Of what is read: whether the user hears the content.
"""

CONTENT = b'{"forged": true}'
SECRET = b'{"text": "not for everybody"}'
OTHER_BASE, STATE, PURGE = "other.forged", "$KV.theirs__failures.key", "$JS.API.STREAM.PURGE.VALUABLE"
API = "$JS.API."
RESET = "$JS.API.CONSUMER.RESET.VALUABLE.reader"
READERS = ("field-r0", "spark-events-r0", "aviso_workers_spark-r0")
"""Names of consumers by which the roles may read."""
AFTERWARDS = 20
"""How many rounds of messages a server is given to do what nobody answers."""
INBOX = "_INBOX_everything.answer"
STREAMS = {
    "MARS": "mars.>",
    "OTHER": "other.>",
    "KV_theirs__failures": "$KV.theirs__failures.>",
    "VALUABLE": "valuable.>",
}
STATE_OF_OTHERS = {
    "KV_theirs__failures": "$KV.theirs__failures.>",
    "KV_theirs__orders": "$KV.theirs__orders.>",
    "KV_theirs__state": "$KV.theirs__state.>",
    "KV_theirs__table__newest": "$KV.theirs__table__newest.>",
    "KV_theirs__windows__daily": "$KV.theirs__windows__daily.>",
    "aviso_workers_dead_letters__theirs": "aviso_workers.dead_letters.theirs.>",
    "aviso_workers_retries__theirs": "aviso_workers.retries.theirs.>",
}
"""The streams of another app, which somebody may try to read."""


class Place(Struct, frozen=True):
    """A server, or one of a cluster, and a user of the account with the streams who may do everything there."""

    url: str
    owner: str = "everything"
    copies: int = 1


class Attacker:
    """A connected user, who may be denied anything, and the owner, who reads what came of it."""

    def __init__(self, attacker: Client, owner: Client) -> None:
        self.client, self._owner = attacker, owner

    async def api(self, request: str, **body: Any) -> dict[str, Any]:
        data = json.dumps(body).encode() if body else b""
        answer = await self._owner.request(f"$JS.API.{request}", data, timeout=PATIENCE_SECONDS)
        said: dict[str, Any] = json.loads(answer.data or b"{}")
        return said

    async def publish(self, subject: str, data: bytes = CONTENT, *, reply: str = "") -> None:
        """Publish, and return when the server has done what follows from it, or has denied it.

        Acknowledgements leave a stream in order, and a stream stores messages in order: what the owner publishes
        after that is stored after what came of it.
        """
        await self.client.publish(subject, data, reply=reply)
        await flushed(self.client)
        for _ in range(2):  # what an acknowledgement does is behind it
            for base in ("mars", "other", "$KV.theirs__failures", "valuable"):
                await self._owner.request(f"{base}.marker", b"", timeout=PATIENCE_SECONDS)

    async def messages(self, stream: str, subject: str = ">") -> int:
        info = await self.api(f"STREAM.INFO.{stream}", subjects_filter=subject)
        return sum(info["state"].get("subjects", {}).values())

    async def stored(self, stream: str, subject: str) -> Cell:
        """Return what the last message of a subject is: content, an acknowledgement, or nothing."""
        said = await self.api(f"STREAM.MSG.GET.{stream}", last_by_subj=subject)
        if "message" not in said:
            return "no"
        return "yes" if b64decode(said["message"]["data"]) == CONTENT else "answers"

    async def republish_to(self, subject: str) -> None:
        """Have a message stored under a subject by a stream that republishes what it stores."""
        republish = {"src": "aviso_workers.relay", "dest": subject}
        relay = {"name": "RELAY", "subjects": ["aviso_workers.relay"], "republish": republish}
        await self.publish("$JS.API.STREAM.CREATE.RELAY", json.dumps(relay).encode())
        await self.publish("aviso_workers.relay")
        if "config" in await self.api("STREAM.INFO.RELAY"):
            await self.api("STREAM.DELETE.RELAY")

    async def get_to(self, subject: str, content: bytes = CONTENT) -> None:
        """Have a message of the attacker's own base sent to a subject, as the answer to a request for it."""
        await self.publish("mars.content", content)
        for request in ("DIRECT.GET.MARS.mars.content", "DIRECT.GET.MARS", "STREAM.MSG.GET.MARS"):
            wanted = b"" if request.endswith("content") else b'{"last_by_subj": "mars.content"}'
            await self.publish(f"{API}{request}", wanted, reply=subject)

    async def hears(self, stream: str, subject: str) -> bool:
        """Return whether the attacker hears what is stored in the stream, by a subscription or any request."""
        heard: list[Msg] = []

        async def hear(message: Msg) -> None:
            heard.append(message)

        inbox = self.client.new_inbox()
        for listened in (inbox, subject, ">"):
            await self.client.subscribe(listened, cb=hear)
        await flushed(self.client)
        stored = subject.replace(">", "secret")
        await self._owner.request(stored, SECRET, timeout=PATIENCE_SECONDS)
        for request, body in _readings(stream, stored, inbox):
            await self.client.publish(f"{API}{request}", json.dumps(body).encode(), reply=inbox)
            await flushed(self.client)
        for consumer in (await self.api(f"CONSUMER.NAMES.{stream}"))["consumers"]:  # also those without a name
            await self.client.publish(f"{API}CONSUMER.MSG.NEXT.{stream}.{consumer}", b"1", reply=inbox)
        await self.publish("mars.a")
        for each in (await self.api(f"CONSUMER.NAMES.{stream}"))["consumers"]:
            await self.api(f"CONSUMER.DELETE.{stream}.{each}")
        await self.api("STREAM.DELETE.COPY")
        return any(_has_secret(message.data) for message in heard)

    async def pull_to(self, subject: str) -> None:
        """Have a message of the attacker's own base delivered to a subject, by a pull request with that reply subject.

        The server names a consumer in its answer; here the owner asks which consumers there are.
        """
        await self.publish("mars.content", b'{"seq": 1}')
        for name in ("", *READERS):
            config = {"ack_policy": "none", "filter_subject": "mars.content", **({"name": name} if name else {})}
            request = json.dumps({"stream_name": "MARS", "config": config}).encode()
            named = f".{name}" if name else ""
            await self.publish(f"$JS.API.CONSUMER.CREATE.MARS{named}", request, reply="mars.answer")
        for consumer in (await self.api("CONSUMER.NAMES.MARS"))["consumers"]:
            await self.publish(f"$JS.API.CONSUMER.MSG.NEXT.MARS.{consumer}", b"1", reply=subject)
            await self._until_delivered("MARS", consumer)
            await self.api(f"CONSUMER.DELETE.MARS.{consumer}")

    async def owner_reads(self, stream: str, consumer: str) -> None:
        await self._owner.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}", b"1", reply="mars.read")
        await self._until_delivered(stream, consumer)

    async def _until_delivered(self, stream: str, consumer: str) -> None:
        while not (await self.api(f"CONSUMER.INFO.{stream}.{consumer}"))["delivered"]["consumer_seq"]:
            pass

    async def watch(self, subject: str) -> list[Msg]:
        seen: list[Msg] = []

        async def see(message: Msg) -> None:
            seen.append(message)

        await self.client.subscribe(subject, cb=see)
        await flushed(self.client)
        await self._owner.publish(INBOX, CONTENT)
        await flushed(self._owner)
        await self.publish("mars.a")
        return seen


async def own_base(attacker: Attacker) -> Cell:
    await attacker.publish("mars.content")
    return await attacker.stored("MARS", "mars.content")


async def store(attacker: Attacker, *, stream: str, subject: str) -> Cell:
    """Try to have a message stored in a foreign stream: as it likes, or as the answer to a publish or a request."""
    found: list[Cell] = []
    await attacker.publish("mars.a", reply=subject)
    await attacker.publish("$JS.API.STREAM.INFO.MARS", b"", reply=subject)
    found.append(await attacker.stored(stream, subject))
    for attack in (attacker.get_to, attacker.publish, attacker.republish_to):
        await attack(subject)
        found.append(await attacker.stored(stream, subject))
    return max(found, key=("no", "answers", "yes").index)


async def purge(attacker: Attacker) -> Cell:
    """Try to purge a foreign stream: by an acknowledgement, and by a request."""
    by_acks = await _purged(attacker, attacker.publish("mars.a", reply=PURGE))
    by_request = await _purged(attacker, attacker.publish(PURGE, b""))
    by_content = await _purged(attacker, attacker.get_to(PURGE, b""))
    if by_request or by_content or by_acks:
        return "yes" if by_request or by_content else "answers"
    return "resets" if await _reset(attacker) else "no"


async def _reset(attacker: Attacker) -> bool:
    """Try to have a consumer of a foreign stream begin again, which a request with unknown fields does too."""
    reader = {"durable_name": "reader", "ack_policy": "none"}
    await attacker.api("CONSUMER.CREATE.VALUABLE.reader", stream_name="VALUABLE", config=reader)
    await attacker.publish("mars.a")  # which has the owner's markers stored
    await attacker.owner_reads("VALUABLE", "reader")
    await attacker.publish("mars.a", reply=RESET)
    await attacker.pull_to(RESET)
    for _ in range(AFTERWARDS):
        await attacker.publish("mars.a")
        if not (await attacker.api("CONSUMER.INFO.VALUABLE.reader"))["delivered"]["consumer_seq"]:
            return True
    return False


async def _purged(attacker: Attacker, attack: Awaitable[None]) -> bool:
    await attacker.publish("mars.a")  # which has the owner's markers stored
    before = await attacker.api("STREAM.INFO.VALUABLE")
    await attack
    after = await attacker.api("STREAM.INFO.VALUABLE")
    return bool(after["state"]["first_seq"] > before["state"]["first_seq"])


async def read_inboxes(attacker: Attacker) -> Cell:
    """Try to read the answers to another user: by a subscription, and by a stream that stores them."""
    if await attacker.watch("_INBOX_everything.>") or await attacker.watch("_INBOX.>"):
        return "yes"
    theft = json.dumps({"name": "THEFT", "subjects": ["_INBOX_everything.>"], "no_ack": True}).encode()
    await attacker.publish("$JS.API.STREAM.CREATE.THEFT", theft)
    await attacker.watch("mars.nothing")
    created = "config" in await attacker.api("STREAM.INFO.THEFT")
    await attacker.api("STREAM.DELETE.THEFT") if created else None
    return "yes" if created else "no"


async def read(attacker: Attacker, *, streams: Mapping[str, str]) -> Cell:
    """Try to read what is stored in these streams."""
    return "yes" if any([await attacker.hears(stream, subject) for stream, subject in streams.items()]) else "no"


def _readings(stream: str, subject: str, inbox: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield requests that read a subject of a stream, with their bodies."""
    for request in ("STREAM.MSG.GET", "DIRECT.GET"):
        yield f"{request}.{stream}", {"last_by_subj": subject}
    yield f"DIRECT.GET.{stream}.{subject}", {}
    config = {"ack_policy": "none", "filter_subject": subject}
    yield f"CONSUMER.CREATE.{stream}", {"stream_name": stream, "config": config}
    for reader in READERS:
        named = {**config, "name": reader}
        yield f"CONSUMER.CREATE.{stream}.{reader}", {"stream_name": stream, "config": named}
        yield f"CONSUMER.CREATE.{stream}.{reader}.{subject}", {"stream_name": stream, "config": named}
        yield f"CONSUMER.MSG.NEXT.{stream}.{reader}", {"batch": 1}
        if stream != "MARS":
            yield f"CONSUMER.CREATE.MARS.{reader}", {"stream_name": stream, "config": named}
    pushed = {**config, "deliver_subject": inbox}
    yield f"CONSUMER.CREATE.{stream}.{READERS[0]}", {"stream_name": stream, "config": {**pushed, "name": READERS[0]}}
    yield "STREAM.CREATE.COPY", {"name": "COPY", "mirror": {"name": stream}, "allow_direct": True}
    yield "STREAM.MSG.GET.COPY", {"last_by_subj": subject}
    yield "DIRECT.GET.COPY", {"last_by_subj": subject}


def _has_secret(data: bytes) -> bool:
    if SECRET in data:
        return True
    said = json.loads(data) if data.startswith(b"{") else {}
    return SECRET in b64decode(said.get("message", {}).get("data", ""))


ATTACKS: dict[Reach, Callable[[Attacker], Awaitable[Cell]]] = {
    "own base": own_base,
    "other bases": partial(store, stream="OTHER", subject=OTHER_BASE),
    "state of workers": partial(store, stream="KV_theirs__failures", subject=STATE),
    "JetStream's API": purge,
    "inboxes of others": read_inboxes,
    "reads own base": partial(read, streams={"MARS": "mars.>"}),
    "reads other bases": partial(read, streams={"OTHER": "other.>"}),
    "reads state of workers": partial(read, streams=STATE_OF_OTHERS),
}


async def prepare(place: Place) -> None:
    """Create the streams: the attacker's own, of another base, of workers' state, and one to purge."""
    async with _connected(place.url, place.owner) as owner:
        for name, subject in {**STATE_OF_OTHERS, **STREAMS}.items():
            # As streams of others may have it: what is stored there can then be read by more requests.
            config = {"name": name, "subjects": [subject], "num_replicas": place.copies, "allow_direct": True}
            said: dict[str, Any] = {}
            with anyio.fail_after(PATIENCE_SECONDS):
                while "config" not in said:  # a cluster needs a moment
                    answer = await owner.request(
                        f"$JS.API.STREAM.CREATE.{name}", json.dumps(config).encode(), timeout=9
                    )
                    said = json.loads(answer.data)


async def reached(place: Place, user: str, reach: Reach, *, url: str = "") -> Cell:
    """Return what the user reaches, whose password is its name. Every attack begins with streams as they were."""
    async with _connected(place.url, place.owner) as owner, _connected(url or place.url, user) as client:
        attacker = Attacker(client, owner)
        for name in STREAMS:
            await attacker.api(f"STREAM.PURGE.{name}")
        await attacker.api("CONSUMER.DELETE.VALUABLE.reader")
        with anyio.fail_after(PATIENCE_SECONDS):
            return await ATTACKS[reach](attacker)


@asynccontextmanager
async def _connected(url: str, user: str) -> AsyncGenerator[Client, None]:
    async def ignore(_: Exception) -> None:
        """A denied attack is one of the results."""

    prefix = f"_INBOX_{user}".encode()
    client = await nats.connect(url, user=user, password=user, error_cb=ignore, inbox_prefix=prefix)
    yield client
    await client.close()
