"""The contract between the engine and whatever stores notifications, and between operators' tools and a server.

Two Protocols, by who calls them. `Backend` is what the engine needs: publish, consume, read, and ensure that a stream
or a consumer exists. `Admin` is what operators need beside that: JetStream's management API (`Management`), and what
only a server has (`Administration`). `in_memory` and `jetstream` fulfil both with the same semantics, and
tests/contract holds them to it; where the in-memory backend has no server to ask, it raises `RefusedError`.

What a backend promises:

* Names, fields and defaults are JetStream's. Stream and consumer configurations travel as JetStream's own JSON, so
  that a field which is newer than this code survives a read and an update.
* A request that fails raises one of three errors: `UnavailableError` (not done, try again), `OutcomeUnknownError`
  (perhaps done, try again with the same message id), `RefusedError` (not done, do not repeat). A backend never
  retries and never sleeps between attempts: that is the engine's.
* A delivery is handed to exactly one reader at a time, and to one again when it was not settled within `ack_wait`.
* `deliver` is called on the event loop's thread with what has come together, in order; it must not block and must
  not raise.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from itertools import compress
from typing import Any, Literal, Protocol

from anyio.streams.memory import MemoryObjectReceiveStream
from msgspec import Struct

from aviso_workers.aviso.codec import Message
from aviso_workers.clocks import Clock
from aviso_workers.config import Config
from aviso_workers.errors import BackendError
from aviso_workers.jetstream.info import AccountInfo, ConsumerInfo, SnapshotState, StreamConfig, StreamInfo
from aviso_workers.jetstream.key_value import BulkKeyValue, Entry, KeyValue
from aviso_workers.jetstream.specs import ConsumerSpec, StreamSpec

__all__ = [
    "Admin",
    "Administration",
    "Backend",
    "BulkKeyValue",
    "Chunk",
    "Connection",
    "ConnectionListener",
    "Consumer",
    "ConsumerInfo",
    "Delivery",
    "Entry",
    "ForeignListener",
    "KeyValue",
    "Management",
    "Message",
    "Noted",
    "Opening",
    "Outgoing",
    "OutgoingChunk",
    "PubAck",
    "Received",
    "StreamInfo",
    "StreamSnapshot",
    "Streams",
    "open_backend",
]


class Outgoing(Struct, frozen=True, gc=False):
    """A message to be stored in `stream`; one of the same id within the duplicate window is stored once."""

    message: Message
    message_id: str
    stream: str


class OutgoingChunk(Struct, frozen=True, kw_only=True):
    """Messages to be stored one after another, a column for each field of `Outgoing` and its message."""

    subjects: Sequence[str]
    data: Sequence[bytes]
    headers: Sequence[Mapping[str, str] | None]
    message_ids: Sequence[str]

    def __len__(self) -> int:
        return len(self.data)

    def part(self, first: int, end: int) -> OutgoingChunk:
        """Return the messages from `first` on and before `end`."""
        return OutgoingChunk(**{name: getattr(self, name)[first:end] for name in self.__struct_fields__})

    def each(self, stream: str) -> Iterator[Outgoing]:
        """Yield the messages one by one."""
        rows = zip(self.subjects, self.data, self.headers, self.message_ids, strict=True)
        for subject, data, headers, message_id in rows:
            yield Outgoing(Message(subject=subject, data=data, headers=headers), message_id, stream)


class PubAck(Struct, frozen=True, kw_only=True):
    stream: str
    sequence: int
    """0 where it is not known: of many that were stored together, a server says how many there are."""
    duplicate: bool = False
    """It was stored before; False where `sequence` is not known either."""
    total: int | None = None
    """The value of a counter's subject now; None where the stream counts nothing, or the message is a duplicate."""


class Chunk(Struct, frozen=True, kw_only=True):
    """Messages one after another, a column for each field of `Message`: for who makes columns of them."""

    subjects: Sequence[str]
    data: Sequence[bytes]
    headers: Iterable[Mapping[str, str] | None]
    sequences: Sequence[int]
    timestamps_ns: Sequence[int]

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Message]:
        rows = zip(self.subjects, self.data, self.headers, self.sequences, self.timestamps_ns, strict=True)
        for subject, data, headers, sequence, timestamp_ns in rows:
            yield Message(
                subject=subject,
                data=data,
                headers=headers,
                sequence=sequence,
                timestamp_ns=timestamp_ns,
            )

    def only(self, wanted: Sequence[bool]) -> Chunk:
        """Return the chunk without the messages for which `wanted` is false."""
        return Chunk(**{name: list(compress(getattr(self, name), wanted)) for name in self.__struct_fields__})


class Received(Struct, frozen=True, kw_only=True):
    """A message as it came: an answer, a chunk of a snapshot, an advisory."""

    subject: str
    data: bytes
    reply: str = ""
    headers: Mapping[str, str] = {}
    status: str = ""
    """As `204`; empty where it has none."""
    description: str = ""
    """Of the status."""


class StreamSnapshot(Struct, frozen=True, kw_only=True):
    """A stream as it is now, its consumers included, on its way to us."""

    config: StreamConfig
    state: SnapshotState
    """Of the stream when the snapshot began."""
    chunks: AsyncGenerator[bytes, None]
    """The archive. Asking for the next chunk tells the server that there is room for it, within seconds of the one
    before. Raises `UnavailableError` where it breaks off."""


class Administration(Protocol):
    """The administration of a nats-server, by requests that only it answers. Operators' tools use it, workers do not.

    Its requests raise `UnavailableError` where nobody answers in time, and `RefusedError` where the server denies us
    the subject or refuses what it was asked for.
    """

    @property
    def server_version(self) -> str:
        """The version of the server that we are connected to, as `2.15.0`."""

    @property
    def server_certificate(self) -> bytes | None:
        """The certificate of the server that we are connected to, in DER form; None without TLS."""

    @property
    def shares_inbox(self) -> bool:
        """Whether our user has a name, and hears answers where other users of the account can hear them too."""
        ...

    async def account(self) -> AccountInfo:
        """Return what our account uses of JetStream, and what it may use."""

    async def api(
        self, subject: str, request: Any = None, *, prefix: str = "", timeout_seconds: float = 5.0
    ) -> dict[str, Any]:
        """Ask JetStream's API what no method of `Management` asks for, and return its JSON.

        `subject` is what follows the prefix, which may be that of another domain.
        """

    async def request(self, subject: str, data: bytes = b"", *, timeout_seconds: float = 5.0) -> Received:
        """Ask whoever listens to a subject, and return the first answer."""

    def send(self, subject: str, data: bytes = b"", *, reply: str = "") -> None:
        """Publish a message soon, without an acknowledgement."""

    def new_inbox(self) -> str:
        """Return a subject for answers, which nobody else has."""

    def listen(
        self, subject: str, *, max_bytes: float = math.inf
    ) -> AbstractAsyncContextManager[MemoryObjectReceiveStream[Received]]:
        """Receive what is published to a subject while the block runs. Messages are kept until they are read; those
        beyond `max_bytes` in all are dropped.
        """

    def snapshot(self, stream: str) -> AbstractAsyncContextManager[StreamSnapshot]:
        """Receive a snapshot of a stream while the block runs. Raises `NotFoundError`."""

    async def replica_count(self, stream: str, *, filter_subjects: Sequence[str]) -> tuple[str, int]:
        """Return the name of one of the stream's servers, chosen by the servers at random, and the number of messages
        that its own replica holds. Raises `NotFoundError`.
        """

    async def restore(
        self,
        config: Mapping[str, Any],
        state: Mapping[str, Any],
        *,
        read: Callable[[int], Awaitable[bytes]],
        stays_unfinished: bool = False,
    ) -> StreamInfo:
        """Create a stream of this configuration from a snapshot's state and archive.

        `read` returns at most so many bytes of the archive at a time, and none at its end. Where it fails or is
        cancelled, what was made of the stream is removed. Where this process is killed, an unfinished stream stays
        (`metadata.is_unfinished`). A stream that `stays_unfinished` is whole, and keeps its mark and none of its
        subjects. Raises `RefusedError` where the name is taken or the archive is damaged, and `UnreadableStreamError`
        where the server cannot read a stream that it has.
        """

    async def require_readable(self, stream: str) -> None:
        """Raise `UnreadableStreamError` where it is known that the server cannot read a stream that it has, so that
        this one must not be created.
        """


class Noted(Struct, kw_only=True, eq=False):
    """The notes of the engine on a delivery, for as long as it holds it."""

    waiting_since: float = 0.0
    """When it arrived, or when its retry is due, on the agent's clock."""
    waited: float | None = None
    """How long it waited before its handling began, in seconds; None until it does."""
    begin: Callable[[], Awaitable[None]] | None = None
    """Awaited before its handling begins."""
    record: Any = None
    """The record of earlier deliveries and attempts (`verdicts.PriorRecord`); None where nothing was read, and none
    has failed here."""
    place: int = 0
    """Where it is while it is held; this and the following are of `engine.dispatch`."""
    tried: bool = False
    """Whether it was tried before, or may have been."""
    screened: bool = True
    """Whether it is decided that it may begin."""
    at_once: bool = False
    """Whether a person has asked for it to be tried now."""
    due: float = 0.0
    """It does not begin before, on the agent's clock."""
    timer: int = 0
    line: Any = None
    limit: Any = None


class Delivery(Protocol):
    """One message handed to one reader, which settles it once. Settling hands over to the wire and returns.

    One that is not `held` any more cannot be settled: nothing comes of it.
    """

    message: Message
    """Whoever holds many may put one without a body here, and read the whole one again from the stream."""
    waiting_since: float
    """This and the following are the engine's; see `Noted`."""
    waited: float | None
    begin: Callable[[], Awaitable[None]] | None
    record: Any
    place: int
    tried: bool
    screened: bool
    at_once: bool
    due: float
    timer: int
    line: Any
    limit: Any

    @property
    def num_delivered(self) -> int:
        """How often it has been delivered, this time included."""

    @property
    def num_pending(self) -> int:
        """How many messages waited to be delivered for the first time when this one was delivered, or later."""

    @property
    def can_be_read_again(self) -> bool:
        """Whether the consumer's stream has its message under its sequence. False for a message made of others."""

    @property
    def held(self) -> bool:
        """Whether its reader may settle it: one that was pinned may not, once another one may have been handed it."""

    def ack(self) -> None:
        """Settle it as handled."""

    def nak(self, *, delay_seconds: float = 0.0) -> None:
        """Ask for it to be delivered again, after the delay."""

    def redeliver(self) -> None:
        """Ask for one that was given back with a delay to be delivered again now, whether it is `held` or not.

        To be called before the delay is over: one that was delivered again meanwhile is delivered once more, beside
        whoever handles it.
        """

    def term(self, reason: str) -> None:
        """Ask for it never to be delivered again."""

    def in_progress(self) -> None:
        """Report that it is being handled, which starts `ack_wait` again."""


class Consumer(Protocol):
    """An open reader of a durable consumer. It asks for as many messages as its `capacity` says, and for no more."""

    @property
    def pinned(self) -> bool:
        """Whether this reader of a pinned consumer is the one that is served, as far as it knows."""

    def refill(self) -> None:
        """Tell the reader that there is capacity again, so that it asks for more."""

    async def lost(self) -> None:
        """Wait until reading cannot go on, then raise the `BackendError` that says why."""

    async def reached(self) -> None:
        """Return when the backend has what was sent so far. Raises `UnavailableError` where that is not known."""

    async def settled(self) -> None:
        """Return when every settlement so far has reached the backend. Raises `UnavailableError`."""

    async def stop(self) -> None:
        """Ask for no more, and return when nothing more can arrive. What arrives meanwhile is still delivered."""


class Connection(Protocol):
    """The connection to the place where notifications are stored. It comes back by itself after it was lost."""

    @property
    def ready(self) -> bool:
        """Whether requests can be sent now."""

    @property
    def slow_because(self) -> str:
        """Why it works slower than it could; empty where it does not."""

    @property
    def max_payload(self) -> int:
        """The largest message (headers and body) that can be published, in bytes."""

    def require_server(self, major: int, minor: int, *, to: str) -> None:
        """Raise `RefusedError`, which names both versions, where the server is older than is needed `to` do this."""

    async def failed(self) -> None:
        """Wait until the connection is lost for good, then raise the `BackendError` that says why."""


class ConnectionListener(Protocol):
    """Called on every change of the connection. `reason` says why it was lost, and is empty when it is there.

    It is also called when the server denies us something for the first time: `denied` says what. And for each answer
    that does not belong to the request for which it came: `foreign` says which, and `times` how often it has come by
    now. The rest is as before then.
    """

    def __call__(
        self, *, connected: bool, reason: str, denied: str = "", foreign: str = "", times: int = 0
    ) -> None: ...


class ForeignListener(Protocol):
    """Called for each message that is read of a bucket and that no client has put there: `problem` says why that is
    known. One message may come several times.
    """

    def __call__(self, *, stream: str, sequence: int, problem: str) -> None: ...


class Opening(Protocol):
    """A function that opens a backend, as `open_backend` does; tests pass their own."""

    def __call__(
        self,
        config: Config,
        *,
        on_connection: ConnectionListener | None = None,
        on_foreign: ForeignListener | None = None,
        owner: str = "",
    ) -> AbstractAsyncContextManager[Admin]: ...


class Streams(Protocol):
    """Requests for what a stream holds and how a consumer stands, which the engine and operators make alike.

    Each raises `NotFoundError` where the stream or the consumer does not exist.
    """

    async def stream_info(
        self, stream: str, *, deleted_details: bool = False, timeout_seconds: float = 5.0
    ) -> StreamInfo:
        """Return a stream's configuration and state; with `deleted_details`, every sequence that was deleted as well.

        Raises `RefusedError` where there is no server and the details are asked for.
        """

    async def update_stream(self, config: Mapping[str, Any]) -> StreamInfo:
        """Replace a stream's configuration by this one, which must be whole: what it leaves out is reset."""

    async def purge_stream(self, stream: str, *, subject: str = "", keep: int = 0, before: int = 0) -> int:
        """Remove all messages, or those of a subject, but keep the newest `keep`, or those from a sequence on.

        Returns how many were removed. Raises `RefusedError` where there is no server and one of the last two is given.
        """

    async def delete_message(self, stream: str, sequence: int, *, overwrite: bool = True) -> None:
        """Delete one message. Raises `NotFoundError` also where the message is missing.

        Without `overwrite` its bytes stay on disk for a while, and a server deletes thirty times as many a second.
        """

    async def message(
        self, stream: str, sequence: int = 0, *, next_by_subject: str = "", last_by_subject: str = ""
    ) -> Message | None:
        """Return the message of that sequence as the stream's leader holds it; None where there is none.

        With a filter, `next_by_subject`, it is the first message from that sequence on whose subject the filter takes.
        With a subject, `last_by_subject`, it is the newest message of that subject, whatever the sequence.
        """

    async def consumer_info(self, stream: str, consumer: str, *, timeout_seconds: float = 5.0) -> ConsumerInfo:
        """Return a consumer's configuration and state."""

    async def consumers(self, stream: str) -> list[ConsumerInfo]:
        """Return the configurations and states of all consumers of a stream, by one request for some hundreds."""

    async def delete_consumer(self, stream: str, consumer: str) -> None:
        """Delete a consumer and its position in the stream, for good."""


class Backend(Streams, Protocol):
    """The verbs that the engine needs where notifications are stored: publish, consume, read, and ensure that a
    stream or a consumer exists. Opened by `open_backend`, closed by leaving it.

    Four methods publish, because their answers differ: the acknowledgement of one message, of each of many, how many of
    a chunk are stored, and the acknowledgement of all or none. Two read, message by message and in columns.
    """

    @property
    def clock(self) -> Clock:
        """The clock by which deliveries come again and messages expire."""

    @property
    def connection(self) -> Connection:
        """The connection to the place where notifications are stored."""

    async def create_stream(self, spec: StreamSpec) -> StreamInfo:
        """Create a stream. Raises `RefusedError`; its code is STREAM_NAME_IN_USE where there is another one."""

    async def ensure_consumer(self, stream: str, spec: ConsumerSpec) -> ConsumerInfo:
        """Create the durable consumer, or update it where it differs in what can be updated.

        Where no `max_ack_pending` of this size is allowed, it has the largest that is.
        """

    def consume(
        self,
        stream: str,
        consumer: str,
        *,
        deliver: Callable[[Sequence[Delivery]], None],
        capacity: Callable[[], int],
        priority: int = 0,
    ) -> AbstractAsyncContextManager[Consumer]:
        """Read a durable consumer while the block runs, and call `deliver` with what has come together.

        `capacity()` returns how many deliveries could be taken now. With the `priority_policy` `pinned_client`, one of
        the readers is handed everything, and another one when that has left or has not asked for `priority_timeout`.
        With `prioritized`, a reader is handed something only while none of a lower `priority` (0 to 9) asks.
        """

    def read(
        self,
        stream: str,
        *,
        filter_subjects: Sequence[str],
        start_sequence: int = 1,
        start_time: datetime | None = None,
        last_sequence: int | None = None,
    ) -> AsyncGenerator[Message, None]:
        """Yield stored messages in sequence order, without acks: up to `last_sequence`, else on and on as they come.

        A `start_time` wins over `start_sequence`; both are inclusive. It ends where nothing more matches up to
        `last_sequence`, and not before. Raises `UnavailableError` where reading was interrupted (read on after the last
        sequence that came) or the owner has as many readers of the stream as it may have, `NotFoundError` where the
        stream is gone. A stream that was deleted and recreated is another one, and interrupts it.
        """

    def read_chunks(
        self, stream: str, *, filter_subjects: Sequence[str], start_sequence: int, last_sequence: int
    ) -> AsyncGenerator[Chunk, None]:
        """Read as `read` does, some thousand messages or some megabytes at a time, at the least expense for each."""

    async def count(
        self,
        stream: str,
        *,
        filter_subjects: Sequence[str],
        start_sequence: int = 1,
        start_time: datetime | None = None,
    ) -> int:
        """Return how many messages `read` would yield now. A server of the stream counts them, and one whose replica is
        behind counts fewer. Raises `NotFoundError`.
        """

    async def publish(self, message: Message, *, message_id: str, stream: str, timeout_seconds: float) -> PubAck:
        """Store one message; see `Outgoing`. These of its headers are obeyed as by JetStream:

        * `Nats-Expected-Last-Subject-Sequence`: only where the newest message of the subject is that one (0: there is
          none). Raises `ConflictError` otherwise, also where it is the message itself that was stored before.
        * `Nats-Rollup: sub`: in place of all that its subject held.
        * `Nats-TTL`: forget it after so long. Raises `RefusedError` where the stream's `allow_msg_ttl` is off.
        * `Nats-Incr`: in a stream of counters, add this to what the subject stands at.
        * `Nats-Schedule: @at TIME`, RFC 3339: keep it until then, in place of all that its subject held, and then store
          it under `Nats-Schedule-Target`, a subject of the same stream, without the headers that begin with `Nats-`.
          Removed or replaced before, it is not. Raises `RefusedError` where the stream's `allow_msg_schedules` is off,
          or the server does not understand it.
        """

    async def publish_many(
        self, outgoing: Sequence[Outgoing], *, timeout_seconds: float, answered: bool = False
    ) -> list[PubAck | BackendError]:
        """Store messages in this order, all under way at once, and return what became of each. The timeout is for all.

        One alone is answered as `publish` does. Of more, an acknowledgement may leave out the sequence and whether the
        message was stored before, unless `answered` asks for an answer to each.
        """

    async def publish_chunk(self, stream: str, chunk: OutgoingChunk, *, timeout_seconds: float) -> int:
        """Store messages of one stream in this order, at the least expense for each.

        Returns how many, from the first on, are stored. The others may be published again with `publish_many`, which
        stores each once, or says why it cannot. Raises `OutcomeUnknownError` where any of them may be stored.
        """

    async def publish_together(self, outgoing: Sequence[Outgoing], *, timeout_seconds: float) -> PubAck:
        """Store all of these messages of one stream, one after another, or none. The acknowledgement is of the last.

        Their ids must have been used for these messages together and no others: where one is known, all are taken as
        stored before. Raises `RefusedError` where the stream's `allow_atomic` is off, or the server is older than 2.12.
        """

    async def key_value(
        self, bucket: str, *, ttl_seconds: float | None = None, history: int = 1, own: bool = False
    ) -> BulkKeyValue:
        """Return the bucket of that name, created where it is missing.

        In a bucket of our `own`, a key whose value has no headers counts as deleted: we have not stored it. In others,
        `value` of an entry is refused where it is a server's answer. See `Entry.foreign`.

        A new one forgets values older than `ttl_seconds` and keeps `history` (at most 64) values of a key. One that
        forgets them sooner is changed to keep them for so long, where that is allowed.
        """


class Management(Streams, Protocol):
    """The streams and consumers of one account and domain: JetStream's management API, a method for each request.

    Configurations are JetStream's own JSON; answers are parsed by `jetstream.info`. Every method raises
    `UnavailableError`, `RefusedError`, and `NotFoundError` where the stream or the consumer does not exist. A listing
    of a cluster leaves out a stream or a consumer that has no leader at the moment, but its name is listed.
    """

    @property
    def api_prefix(self) -> str:
        """The prefix of the subjects of this API: `$JS.API`, or that of a domain. Empty without a server."""

    async def stream_names(self, *, subject: str = "") -> list[str]:
        """Return the names of all streams, or of those that take a subject.

        Raises `RefusedError` where there is no server and a subject is given.
        """

    async def streams(self) -> list[StreamInfo]:
        """Return the configurations and states of all streams. Raises `RefusedError` without a server."""

    async def subject_counts(self, stream: str, *, subject: str = ">") -> dict[str, int]:
        """Return how many messages of each subject that a filter takes a stream holds, as its leader counts them.

        It is meant for few subjects. Raises `UnavailableError` where subjects come and go faster than they are listed.
        """

    async def add_stream(self, config: Mapping[str, Any]) -> StreamInfo:
        """Create a stream of this configuration, and of the server's defaults for the rest.

        The engine asks for `Backend.create_stream`, which takes more care. Raises `UnreadableStreamError` where the
        server cannot read a stream that it has, and `RefusedError` without a server.
        """

    async def delete_stream(self, stream: str) -> None:
        """Delete a stream with its messages and its consumers, for good."""

    async def consumer_names(self, stream: str) -> list[str]:
        """Return the names of all consumers of a stream."""

    async def put_consumer(
        self,
        stream: str,
        consumer: str,
        config: Mapping[str, Any],
        *,
        action: Literal["create", "update"],
        filter_in_subject: str = "",
    ) -> ConsumerInfo:
        """Create a consumer of this configuration, or update one to it.

        Its single filter may be part of the request's subject, so that permissions can be given by filter. Raises
        `RefusedError` without a server.
        """

    async def unpin_consumer(self, stream: str, consumer: str, *, group: str) -> None:
        """Let the server pin another reader of a consumer's priority group. Raises `RefusedError` without a server."""

    async def pause_consumer(self, stream: str, consumer: str, *, until: datetime | None) -> float:
        """Let a consumer deliver nothing to anybody before `until`, by the server's clock; None: let it deliver again
        at once. Return for how many seconds the server says that it is paused now; 0 where it is not.

        What was delivered before can be settled meanwhile, and what is to be delivered again waits. Raises
        `RefusedError` where the server is older than 2.11.
        """

    async def reset_consumer(self, stream: str, consumer: str, *, sequence: int) -> ConsumerInfo:
        """Let a consumer go on at `sequence` (1 or more), as if it had never come further, nor as far.

        It forgets what was delivered and not settled, and delivers everything from `sequence` on as for the first time.
        It waits for a sequence that the stream has not reached, and passes over what is stored before. Raises
        `RefusedError` where the server is older than 2.14.
        """


class Admin(Backend, Management, Protocol):
    """The backend of operators: that of the engine, which also manages the streams and consumers that it sees."""

    def at(self, prefix: str) -> Management:
        """Return the streams and consumers at another prefix, such as `$JS.hub.API` of a domain; empty: our own.

        Raises `RefusedError` where there is no server and a prefix is given.
        """

    def administration(self) -> Administration:
        """Return what only a server is asked for. Raises `RefusedError` where there is none."""


def open_backend(
    config: Config,
    *,
    on_connection: ConnectionListener | None = None,
    on_foreign: ForeignListener | None = None,
    owner: str = "",
) -> AbstractAsyncContextManager[Admin]:
    """Return the backend that the configuration names, connected while the `async with` block runs. The engine
    takes it for a `Backend`.

    The `owner` is the app by whose names streams of several apps are read (`jetstream.identities`); empty for an
    operator, who may use any.

    Raises `UnavailableError` where no server is reached, `RefusedError` where one turns us away.
    """
    settings = config.notification_backend
    if settings.kind == "in_memory":
        from aviso_workers.backends.in_memory import InMemoryBackend

        return InMemoryBackend(settings.in_memory, on_connection=on_connection, on_foreign=on_foreign)
    from aviso_workers.backends.jetstream import JetStreamBackend

    return JetStreamBackend(settings.jetstream, on_connection=on_connection, on_foreign=on_foreign, owner=owner)
