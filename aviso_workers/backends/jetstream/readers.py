"""Reading a stream without acks, in order: for replay and watch. And counting what could be read.

An ephemeral consumer of our own, read ahead of the caller by a bounded buffer. When it cannot go on it raises; the
engine opens the next one after the last sequence that was seen.

A bounded reading ends where its end is proven: a message at or after the last sequence has come, or the stream's
leader has said that no further message matches up to there. That nothing comes proves nothing: a request ends for
many reasons, messages are deleted while others are read, and the consumer of a replicated stream may be on a server
that has not stored the newest messages yet. Messages in between cannot be missed either, because a consumer numbers
what it delivers. At its beginning, where the replica that serves the consumer begins later than asked for, the leader
is asked whether it has messages before that: a replica that expired them by a wrong clock never gets them back.

Readers of a stream of several apps have the names of a pool (`jetstream.identities`). A server refuses to create a
consumer of a name that is taken, and the next one is tried. Each has a priority group of its own, which its pulls
name. A server hands out an existing consumer to whoever asks for an equal one, and so no two are equal; and it refuses
the pulls of a reader whose consumer is gone, when another reader has made one of the same name.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from functools import partial
from typing import Any

import anyio

from aviso_workers._fast import DATA, NUMBER, PENDING, SEQUENCE, Stored
from aviso_workers.aviso.codec import Message, store_time
from aviso_workers.aviso.literals import SECOND
from aviso_workers.backends import Chunk
from aviso_workers.backends.jetstream.connection import NatsConnection
from aviso_workers.backends.jetstream.management import JetStreamManagement
from aviso_workers.backends.jetstream.pull_requests import (
    HEARTBEAT_SECONDS,
    PullSubscription,
    message_of,
)
from aviso_workers.backends.jetstream.wire import HeaderBlocks
from aviso_workers.errors import (
    BackendError,
    DeniedError,
    RefusedError,
    UnansweredError,
    UnavailableError,
)
from aviso_workers.jetstream import error_codes, identities
from aviso_workers.jetstream.info import ConsumerInfo

AHEAD = 1000
"""Messages that are under way or wait for whoever reads."""
CHUNK = 10_000
CHUNK_BYTES = 4 * 1024 * 1024
INACTIVE_SECONDS = 60
"""After this long without a pull the server removes the consumer: longer than any heartbeat, short for a crash."""
NAMED_SECONDS = 5.0
"""How long a reader waits for a name where all are taken, before it raises."""
NEXT_NAME_SECONDS = 0.05
CHECK_SECONDS = 1.0
"""When nothing has come for so long, the stream's leader is asked whether anything is left to come."""
MAX_CHECKS = 10
"""How often in a row it may say so, while nothing comes."""
CREATE_SECONDS = 1.0
"""A server that lives creates a consumer within milliseconds."""
CREATE_TRIES = 3
LASTING_SECONDS = 3.0
"""How long a message may be missing from one replica only, because the other replicas have yet to delete it."""
ELECTION_SECONDS = 8.0
"""Longer than the servers take to elect another leader for one that has died."""


class JetStreamReaders(JetStreamManagement):
    """The management of streams and consumers, which also reads streams without acks."""

    async def read(
        self,
        stream: str,
        *,
        filter_subjects: Sequence[str],
        start_sequence: int = 1,
        start_time: datetime | None = None,
        last_sequence: int | None = None,
    ) -> AsyncGenerator[Message, None]:
        """Yield a stream's messages, as `backends.Backend.read` does."""
        start = _start(start_sequence, start_time)
        first = start_sequence if start_time is None else 1

        async with self._reader(stream, filter_subjects, start, ahead=AHEAD, last_sequence=last_sequence) as reader:
            while messages := await reader.more():
                for message in map(message_of, messages):
                    # A start beyond the end: the server begins with whatever comes next.
                    if message.sequence < first or (start_time is not None and store_time(message) < start_time):
                        continue
                    yield message

    async def read_chunks(
        self, stream: str, *, filter_subjects: Sequence[str], start_sequence: int, last_sequence: int
    ) -> AsyncGenerator[Chunk, None]:
        """Yield a stream's messages in chunks, as `backends.Backend.read_chunks` does."""
        start = _start(start_sequence)
        ahead = 2 * CHUNK
        async with self._reader(stream, filter_subjects, start, ahead=ahead, last_sequence=last_sequence) as reader:
            while messages := await reader.more(worth=CHUNK):
                subjects, _, headers, data, _, sequences, _, timestamps_ns, _ = zip(*messages, strict=True)
                yield Chunk(
                    subjects=subjects,
                    data=data,
                    headers=HeaderBlocks(headers),
                    sequences=sequences,
                    timestamps_ns=timestamps_ns,
                )

    async def count(
        self,
        stream: str,
        *,
        filter_subjects: Sequence[str],
        start_sequence: int = 1,
        start_time: datetime | None = None,
    ) -> int:
        """See `backends.Backend.count`. A consumer that would read them knows how many there are."""
        return (await self._counting(stream, filter_subjects, _start(start_sequence, start_time))).num_pending

    async def replica_count(self, stream: str, *, filter_subjects: Sequence[str]) -> tuple[str, int]:
        """See `backends.Administration.replica_count`. A server counts for a consumer what its own replica holds."""
        created = await self._counting(stream, filter_subjects, _start(1))
        return created.cluster.leader, created.num_pending

    async def _counting(self, stream: str, filter_subjects: Sequence[str], start: Mapping[str, Any]) -> ConsumerInfo:
        created = await self._create_consumer(stream, filter_subjects, start)
        await self.delete_consumer_at_best(stream, created.name)
        return created

    async def next_sequence(self, stream: str, subject: str, *, after: int) -> int | None:
        """Return the sequence of the next message that a filter takes, as the stream's leader holds it; None for
        none.
        """
        found = await self.message(stream, after + 1, next_by_subject=subject)
        return found.sequence if found else None

    async def delete_consumer_at_best(self, stream: str, name: str) -> None:
        """Delete a consumer, or leave it to the server, which removes it when it was inactive for long enough."""
        with suppress(BackendError):
            await self.delete_consumer(stream, name)

    async def _create_consumer(
        self, stream: str, filter_subjects: Sequence[str], start: Mapping[str, Any]
    ) -> ConsumerInfo:
        """Return the consumer as it was made, under a name that is free where the stream is one of several apps.

        Raises `UnavailableError` with the code CONSUMER_EXISTS where all names are taken, and `DeniedError`.
        """
        config = {
            **start,
            "ack_policy": "none",
            "max_deliver": 1,
            "replay_policy": "instant",
            "filter_subjects": list(filter_subjects),
            "inactive_threshold": INACTIVE_SECONDS * SECOND,
            "mem_storage": True,
        }
        names = identities.reader_names(self._connection.owner, stream)
        if not names:
            return await self._create_somewhere(stream, config, name="")
        known_as = f"{names[0]} to {names[-1]}"
        until, order = anyio.current_time() + NAMED_SECONDS, random.sample(names, len(names))
        while order:
            try:
                return await self._create_somewhere(stream, config, name=order.pop())
            except DeniedError as error:
                raise DeniedError(
                    f"{error}; readers of {stream} are called {known_as}: give the user the permissions that "
                    "`aviso-workers server render --role` prints now"
                ) from error
            except RefusedError as error:
                if error.code != error_codes.CONSUMER_EXISTS:
                    raise
            if not order and anyio.current_time() < until:
                await anyio.sleep(NEXT_NAME_SECONDS)
                order.append(random.choice(names))
        raise UnavailableError(
            f"all {len(names)} readers of {stream} are at work, {known_as}: read less of it at once; the name of one "
            f"that was killed is free after {INACTIVE_SECONDS} s",
            code=error_codes.CONSUMER_EXISTS,
        )

    async def _create_somewhere(self, stream: str, config: Mapping[str, Any], *, name: str) -> ConsumerInfo:
        """Return the consumer as it was made, with a random name where none is given.

        For minutes after one of three servers has died, the others give it every third such consumer to keep, and
        nobody answers then. So it is recreated, by chance elsewhere; at last with as many replicas as the stream has,
        of which a majority elects a leader if need be.
        """
        create = partial(self._create_replicated, stream, config, name=name)
        for _ in range(CREATE_TRIES):
            with suppress(UnavailableError):
                return await create(replicas=1, timeout_seconds=CREATE_SECONDS)
        found = await self.stream_info(stream)
        return await create(replicas=found.config.num_replicas, timeout_seconds=ELECTION_SECONDS)

    async def _create_replicated(
        self, stream: str, config: Mapping[str, Any], *, name: str, replicas: int, timeout_seconds: float
    ) -> ConsumerInfo:
        token = secrets.token_hex(8)
        config = {**config, "name": name or token, "num_replicas": replicas}
        try:
            if not name:
                return await self.add_unnamed_consumer(stream, config, timeout_seconds=timeout_seconds)
            config |= {"priority_groups": [token], "priority_policy": "overflow"}
            return await self.put_consumer(stream, name, config, action="create", timeout_seconds=timeout_seconds)
        except UnavailableError:
            # A dead server removes nothing, and a stream with a consumer of which nobody knows the state cannot be
            # backed up. The others remove it, and nobody answers, because that is up to the server that had it.
            self.delete_consumer_soon(stream, name or token)
            raise

    @asynccontextmanager
    async def _reader(
        self,
        stream: str,
        filter_subjects: Sequence[str],
        start: Mapping[str, Any],
        *,
        ahead: int,
        last_sequence: int | None,
    ) -> AsyncIterator[_EphemeralReader]:
        created = await self._create_consumer(stream, filter_subjects, start)
        reader = _EphemeralReader(
            self, self._connection, created, filter_subjects=filter_subjects, ahead=ahead, last_sequence=last_sequence
        )
        await reader.open()
        try:
            if last_sequence is not None and (begin := start.get("opt_start_seq")):
                await self._require_beginning(stream, filter_subjects, begin, created)
            yield reader
        finally:
            with anyio.CancelScope(shield=True):
                await reader.close()

    async def _require_beginning(
        self, stream: str, filter_subjects: Sequence[str], begin: int, created: ConsumerInfo
    ) -> None:
        """Raise `UnavailableError` where the stream's leader has messages from `begin` on that the replica which serves
        the consumer has not: that begins after `created.position`. Another consumer may get a better replica.
        """
        if created.position < begin:
            return
        for subject in filter_subjects or (">",):
            lacking = await self.next_sequence(stream, subject, after=begin - 1)
            if lacking is None or lacking > created.position:
                continue
            await anyio.sleep(LASTING_SECONDS)
            if await self.next_sequence(stream, subject, after=lacking - 1) == lacking:
                raise UnavailableError(
                    f"the replica of {stream} on {created.cluster.leader} lacks messages that the leader of the stream "
                    f"has, such as sequence {lacking} (`aviso-workers doctor`, JS072)"
                )


class _EphemeralReader:
    """A buffer that is kept filled from one ephemeral consumer, up to `last_sequence` or on and on.

    `created` is what the server answered when the consumer was created.
    """

    def __init__(
        self,
        server: JetStreamReaders,
        connection: NatsConnection,
        created: ConsumerInfo,
        *,
        filter_subjects: Sequence[str],
        ahead: int,
        last_sequence: int | None,
    ) -> None:
        self._connection = connection
        self._server = server
        self._stream = created.stream
        self._consumer = created.name
        self._limits = created.config
        self._filters = filter_subjects or (">",)
        self._ahead = ahead
        self._last = last_sequence
        self._buffer: list[Stored] = []
        self._buffered_bytes = 0
        self._seen = created.position
        """The sequence of the newest message that came; in the beginning, the one before the start."""
        self._delivered = 0
        """How many messages have come."""
        self._pending = created.num_pending
        """How many more match, as the consumer said with the newest message; 0 also where that may have changed."""
        self._ended = self._has_passed(self._seen)
        """Whether it is proven that nothing more comes."""
        self._checks = 0
        """How often in a row something was left to come, and nothing came."""
        self._changed = anyio.Event()
        self._lost: BackendError | None = None
        self._pulls = PullSubscription(
            connection,
            stream=self._stream,
            consumer=self._consumer,
            on_messages=self._on_messages,
            on_change=self._change,
        )

    async def open(self) -> None:
        await self._pulls.open(limits=self._limits)
        self._connection.on_disconnect.add(self._on_disconnect)

    async def close(self) -> None:
        self._connection.on_disconnect.discard(self._on_disconnect)
        await self._pulls.close()
        if not isinstance(self._pulls.error, RefusedError):  # it is gone, and another reader may have its name
            await self._server.delete_consumer_at_best(self._stream, self._consumer)

    async def more(self, *, worth: int = 1) -> list[Stored]:
        """Return the next messages in order, as soon as there are so many; none where a bounded reading has all."""
        while True:
            self._ask()
            enough = len(self._buffer) >= worth or self._buffered_bytes >= CHUNK_BYTES
            if self._buffer and (enough or self._ended):
                messages, self._buffer, self._buffered_bytes = self._buffer, [], 0
                return messages
            if self._ended:
                return []
            if lost := self._pulls.error or self._lost:
                # The consumer is ours alone: whatever became of it, another one can read on.
                kind = UnansweredError if isinstance(lost, UnansweredError) else UnavailableError
                raise kind(f"reading {self._stream} was interrupted: {lost}") from lost
            await self._wait()
            if not self._ended and self._pulls.silent():
                raise UnavailableError(f"the server is silent about consumer {self._consumer} of {self._stream}")

    def _ask(self) -> None:
        """Ask for more when half of what may be under way has come; never for what would be thrown away."""
        if self._ended:
            return
        under_way = len(self._buffer) + self._pulls.outstanding
        wanted = self._ahead // 2
        if self._last is not None:
            wanted = min(wanted, self._last - self._seen - self._pulls.outstanding)
        if wanted > 0 and under_way <= self._ahead // 2:
            self._pulls.ask(wanted)

    async def _wait(self) -> None:
        """Return when something has come, or has changed, or the end is proven; after a while in any case."""
        self._changed = anyio.Event()
        bounded = self._last is not None
        if bounded and not self._pending and await self._is_at_end():
            self._ended = True
            return
        with anyio.move_on_after(CHECK_SECONDS if bounded else HEARTBEAT_SECONDS) as waiting:
            await self._changed.wait()
        if waiting.cancelled_caught:
            self._pulls.require_allowed()
            self._pending = 0  # what it counts may have been deleted meanwhile

    async def _is_at_end(self) -> bool:
        """Return whether the stream's leader holds no message that matches, after those that came and up to the last
        one.

        Raises `UnavailableError` where it has some and they do not come.
        """
        seen = self._seen
        for subject in self._filters:
            following = await self._server.next_sequence(self._stream, subject, after=seen)
            if following is not None and not self._has_passed(following - 1):
                break
        else:
            return seen == self._seen
        self._checks += 1
        if self._checks > MAX_CHECKS and seen == self._seen:
            raise UnavailableError(f"consumer {self._consumer} delivers nothing of {self._stream} after {seen}")
        return False

    def _has_passed(self, sequence: int) -> bool:
        """Return whether nothing after this sequence is wanted."""
        return self._last is not None and sequence >= self._last

    def _on_messages(self, messages: list[Stored]) -> None:
        if self._lost:
            return
        first, newest = messages[0][NUMBER], messages[-1][NUMBER]
        if (first, newest) != (self._delivered + 1, self._delivered + len(messages)):
            # Some got lost on their way, or the consumer has begun again, as one does whose server is replaced.
            found = f"its message {first} came instead of {self._delivered + 1}"
            self._lost = UnavailableError(f"consumer {self._consumer}: {found}")
            self._change()
            return
        self._delivered, self._checks = newest, 0
        self._seen, self._pending = messages[-1][SEQUENCE], messages[-1][PENDING]
        self._ended = self._ended or self._has_passed(self._seen)
        if self._ended:
            messages = [each for each in messages if not self._has_passed(each[SEQUENCE] - 1)]
        self._buffer += messages
        self._buffered_bytes += sum([len(each[DATA]) for each in messages])
        self._change()

    def _on_disconnect(self) -> None:
        # What was on its way is lost to this consumer: there are no acks, and so no redelivery.
        self._lost = UnavailableError(f"the connection was lost while reading {self._stream}")
        self._change()

    def _change(self) -> None:
        self._changed.set()


def _start(sequence: int, time: datetime | None = None) -> dict[str, Any]:
    """Return where a consumer begins."""
    if time is not None:
        return {"deliver_policy": "by_start_time", "opt_start_time": time.isoformat()}
    return {"deliver_policy": "by_start_sequence", "opt_start_seq": max(1, sequence)}
