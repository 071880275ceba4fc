"""What only a server is asked for: its version, its account, advisories, any request, and streams as archives.

The verbs for streams and consumers are in `management`. What an archive holds and where it is kept is not known here
(see `ops.backups`).

A snapshot comes as chunks to an inbox. The server sends some megabytes ahead and then waits for acknowledgements, which
is how a slow disk slows it down. An empty message is the end, and its status tells whether it is a good one. A restore
goes the other way, and each chunk is answered, by nothing or by what went wrong.

A server makes the stream while it reads the archive, and leaves it as far as it came where the archive breaks off. So
until it is whole, the stream has a mark and none of its subjects: nobody publishes into a half one, and whoever finds
it later can tell. Followed: ADR "JetStream Stream Backup and Restore V2".
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream

from aviso_workers._fast import Arrival
from aviso_workers.backends import Received, StreamSnapshot
from aviso_workers.backends.jetstream import credentials, faults, wire
from aviso_workers.backends.jetstream.connection import API_TIMEOUT_SECONDS, NatsConnection, require_subject
from aviso_workers.backends.jetstream.readers import JetStreamReaders
from aviso_workers.errors import BackendError, RefusedError, UnavailableError
from aviso_workers.jetstream import answers, info
from aviso_workers.jetstream.info import AccountInfo, StreamConfig, StreamInfo
from aviso_workers.jetstream.metadata import UNFINISHED

MESSAGE_BYTES = 1024
"""What a message takes in memory beside its content."""
CHUNK_BYTES = 512 * 1024
"""As the nats CLI asks for; a server takes from 1 KiB to 1 MiB."""
UNANSWERED_CHUNKS = 16
"""Of a restore, on their way at once: with one at a time, both sides wait for each other."""
SILENCE_SECONDS = 60.0
"""A server asks the consumers' leaders one by one before it sends the first chunk."""
CHECK_SECONDS = 1.0
"""So often it is looked whether the server has denied us what we wait for."""
END_SECONDS = 600.0
"""Archives of servers before 2.15 are unpacked and read when they have come whole."""
GIVE_UP_SECONDS = 10.0
DROPPED = ("sources", "republish", "subject_transform")
"""Settings that must not be at work in a stream that is not whole. A mirror cannot be added later, and so it stays."""

Read = Callable[[int], Awaitable[bytes]]


class JetStreamAdministration(JetStreamReaders):
    """The requests of operators to a nats-server, through its JetStream API; see `backends.Administration`."""

    @property
    def server_version(self) -> str:
        found = self._connection.nc.connected_server_version
        return f"{found.major}.{found.minor}.{found.patch}"

    @property
    def server_certificate(self) -> bytes | None:
        return credentials.certificate(self._connection.nc)

    @property
    def shares_inbox(self) -> bool:
        return self._connection.shares_inbox

    async def account(self) -> AccountInfo:
        return info.account(await self.api("INFO"))

    async def request(
        self, subject: str, data: bytes = b"", *, timeout_seconds: float = API_TIMEOUT_SECONDS
    ) -> Received:
        answer = await self._connection.request(subject, data, timeout_seconds=timeout_seconds)
        return _received(answer)

    def send(self, subject: str, data: bytes = b"", *, reply: str = "") -> None:
        require_subject(subject)
        self._connection.wire.send(subject.encode(), data, reply=reply.encode())

    def new_inbox(self) -> str:
        return self._connection.new_inbox()

    @asynccontextmanager
    async def listen(
        self, subject: str, *, max_bytes: float = math.inf
    ) -> AsyncIterator[MemoryObjectReceiveStream[Received]]:
        sender, receiver = anyio.create_memory_object_stream[Received](math.inf)
        left = max_bytes

        def listener(arrivals: Sequence[Arrival]) -> None:
            nonlocal left
            for arrival in arrivals:
                left -= MESSAGE_BYTES + len(arrival[2] or b"") + len(arrival[3])
                if left >= 0:
                    sender.send_nowait(_received(arrival))

        interest = await self._connection.listen(subject, listener)
        try:
            # The server knows of it before anything is asked for. Where it is away, this would wait for it without end.
            with faults.translated(f"listen to {subject}"), anyio.fail_after(API_TIMEOUT_SECONDS):
                await self._connection.flush()
            yield receiver
        finally:
            with anyio.CancelScope(shield=True):
                await self._connection.leave(interest)
            sender.close()
            receiver.close()

    @asynccontextmanager
    async def snapshot(self, stream: str) -> AsyncIterator[StreamSnapshot]:
        """See `Administration.snapshot`."""
        inbox = self.new_inbox()
        async with self._answers(inbox, f"snapshot of {stream}") as answers:
            request = {"deliver_subject": inbox, "chunk_size": CHUNK_BYTES}
            config, state = info.snapshot(await self.api(f"STREAM.SNAPSHOT.{stream}", request))
            yield StreamSnapshot(config=config, state=state, chunks=self._chunks(answers))

    async def restore(
        self, config: Mapping[str, Any], state: Mapping[str, Any], *, read: Read, stays_unfinished: bool = False
    ) -> StreamInfo:
        """Restore a stream from a snapshot, as `Administration.restore` does."""
        name = config["name"]
        request = {"config": _unfinished(config), "state": state}
        async with self._guarding_unreadable(name):
            begun = await self.api(f"STREAM.RESTORE.{name}", request)
            if "deliver_subject" not in begun:
                raise UnavailableError(f"restore of {name}: the server names no subject for the archive: {begun}")
            try:
                inbox = self.new_inbox()
                async with self._answers(inbox, f"restore of {name}") as answers:
                    upload = _Upload(self, answers, begun["deliver_subject"], inbox)
                    await upload.send_all(read, size=min(CHUNK_BYTES, self._connection.nc.max_payload))
            except BaseException:
                await self._remove(name)
                raise
        if stays_unfinished:
            return await self.stream_info(name)
        # From here on somebody may publish into it: unless the server says no, it is not ours to remove any more.
        with anyio.CancelScope(shield=True):
            try:
                made = await self.update_stream(config)
            except RefusedError:
                await self._remove(name)
                raise
        return made

    async def _remove(self, stream: str) -> None:
        with anyio.move_on_after(GIVE_UP_SECONDS, shield=True), suppress(BackendError):
            await self._connection.flush()  # if it was the connection that failed, wait for the next one
            await self.delete_stream(stream)

    @asynccontextmanager
    async def _answers(self, inbox: str, what: str) -> AsyncIterator[_Answers]:
        async with self.listen(inbox) as received:
            answers = _Answers(self._connection, received, what)
            self._connection.on_disconnect.add(answers.lose)
            try:
                yield answers
            finally:
                self._connection.on_disconnect.discard(answers.lose)

    async def _chunks(self, answers: _Answers) -> AsyncGenerator[bytes, None]:
        count, ack = 0, ""
        while (chunk := await answers.next(to=ack)).data:
            count += 1
            if chunk.reply and not chunk.reply.endswith(f".{count}"):
                raise UnavailableError(f"{answers.what}: chunk {count} did not arrive")
            yield chunk.data
            if chunk.reply:  # the last one, shorter than the others, has none
                ack = chunk.reply
                self.send(ack)
        if chunk.status not in ("", "204"):  # servers before 2.15 say nothing
            answers.check_allowed(ack)
            raise UnavailableError(f"{answers.what}: {chunk.description or chunk.status}")


class _Answers:
    """The messages to an inbox, over one connection: one that is lost while there is none is not sent again."""

    def __init__(self, connection: NatsConnection, received: MemoryObjectReceiveStream[Received], what: str) -> None:
        self.what = what
        self._connection = connection
        self._received = received
        self._began = anyio.current_time()
        self._lost = False
        self._waiting = anyio.CancelScope()

    async def next(self, *, to: str, within: float = SILENCE_SECONDS) -> Received:
        """Return the next message.

        Raises `UnavailableError` where none comes `within` so many seconds, `RefusedError` where the permissions deny
        to publish to the subject `to`.
        """
        until = anyio.current_time() + within
        while not self._lost and anyio.current_time() < until:
            with anyio.move_on_after(CHECK_SECONDS) as self._waiting:
                return await self._received.receive()
            self.check_allowed(to)
        raise UnavailableError(
            f"{self.what}: " + ("the connection was lost meanwhile" if self._lost else f"no answer for {within:g} s")
        )

    def check_allowed(self, to: str) -> None:
        self._connection.check_allowed(to, since=self._began)

    def lose(self) -> None:
        self._lost = True
        self._waiting.cancel()


class _Upload:
    """The chunks of an archive on their way to a server, some at once, each to be answered."""

    def __init__(self, server: JetStreamAdministration, answers: _Answers, subject: str, inbox: str) -> None:
        self._server = server
        self._answers = answers
        self._subject = subject
        self._inbox = inbox
        self._unanswered = 0

    async def send_all(self, read: Read, *, size: int) -> None:
        try:
            while chunk := await read(size):
                if self._unanswered == UNANSWERED_CHUNKS:
                    await self._answer()
                self._send(chunk)
            while self._unanswered:
                await self._answer()
        except BaseException:
            await self._end_early()
            raise
        self._send(b"")
        await self._answer(within=END_SECONDS)

    def _send(self, chunk: bytes) -> None:
        self._server.send(self._subject, chunk, reply=self._inbox)
        self._unanswered += 1

    async def _answer(self, *, within: float = SILENCE_SECONDS) -> None:
        """Wait for the answer to a chunk. Raises `RefusedError` where the server does not take the archive."""
        answer = await self._answers.next(to=self._subject, within=within)
        self._unanswered -= 1
        if answer.status:  # nobody listens
            raise UnavailableError(f"{self._answers.what}: the server takes no more of it")
        if not answer.data:
            return
        said = msgspec.json.decode(answer.data)
        if not str(said.get("type")).startswith(answers.API):
            raise UnavailableError(f"{self._answers.what}: {answers.described(answer.data)} came as its answer")
        if "error" in said:
            raise faults.from_api(self._answers.what, said["error"])

    async def _end_early(self) -> None:
        """Else the server waits for more, for 5 s, before it gives up. What it answers then is not news."""
        with anyio.move_on_after(GIVE_UP_SECONDS, shield=True), suppress(BackendError):
            self._send(b"")
            while self._unanswered:
                await self._answer(within=GIVE_UP_SECONDS)


def _unfinished(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if key not in DROPPED}
    if not kept.get("mirror"):
        kept["subjects"] = [config["name"]]
    return kept | {"metadata": {**StreamConfig(config).metadata, UNFINISHED: "true"}}


def _received(arrival: Arrival) -> Received:
    subject, reply, block, data = arrival
    code, description = wire.status(block) if block else ("", "")
    return Received(
        subject=subject.decode(),
        reply=reply.decode(),
        data=data,
        headers=wire.Headers(block),
        status=code,
        description=description,
    )
