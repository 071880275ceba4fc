"""THE CONTRACT between the engine and whatever stores notifications.

The engine knows these names and nothing of a backend behind them. `in_memory` and `jetstream` fulfil them with the
same semantics, and tests/contract holds both to it.

What a backend promises:

* Names, fields and defaults are JetStream's. Stream and consumer configurations travel as JetStream's own JSON, so
  that a field which is newer than this code survives a read and an update.
* A request that fails raises one of three errors: `UnavailableError` (not done, try again), `OutcomeUnknownError`
  (perhaps done, try again with the same message id), `RefusedError` (not done, do not repeat). A backend never
  retries and never sleeps between attempts: that is the engine's.
* A delivery is given to exactly one reader at a time and comes back when it was not settled within `ack_wait`.
* `deliver` is called on the event loop's thread, one delivery at a time; it must not block and must not raise.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from itertools import compress
from typing import Any, Protocol

from anyio.streams.memory import MemoryObjectReceiveStream
from msgspec import Struct

from aviso_workers.clocks import Clock
from aviso_workers.codec import Message
from aviso_workers.config import Config
from aviso_workers.errors import BackendError
from aviso_workers.jetstream.info import ConsumerInfo, SnapshotState, StreamConfig, StreamInfo
from aviso_workers.jetstream.specs import ConsumerSpec, StreamSpec
from aviso_workers.key_value import BulkKeyValue, Entry, KeyValue

__all__ = [
    "Admin",
    "Administration",
    "Backend",
    "BulkKeyValue",
    "Chunk",
    "ConnectionListener",
    "Consumer",
    "ConsumerInfo",
    "Delivery",
    "Entry",
    "Heard",
    "KeyValue",
    "Message",
    "Opening",
    "Outgoing",
    "OutgoingChunk",
    "PubAck",
    "Snapshot",
    "StreamInfo",
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
        """Those from `first` on, and before `end`."""
        return OutgoingChunk(**{name: getattr(self, name)[first:end] for name in self.__struct_fields__})

    def each(self, stream: str) -> Iterator[Outgoing]:
        """One by one."""
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
    """What a counter's subject stands at now; None where the stream counts nothing, or the message is a duplicate."""


class Chunk(Struct, frozen=True, kw_only=True):
    """Messages one after another, a column for each field of `Message`: for who makes columns of them."""

    subjects: Sequence[bytes]
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
                subject=subject.decode("utf-8", "replace"),
                data=data,
                headers=headers,
                sequence=sequence,
                timestamp_ns=timestamp_ns,
            )

    def only(self, wanted: Sequence[bool]) -> Chunk:
        """Without those for which `wanted` is false."""
        return Chunk(**{name: list(compress(getattr(self, name), wanted)) for name in self.__struct_fields__})


class Heard(Struct, frozen=True, kw_only=True):
    """A message as it came: an answer, a chunk of a snapshot, an advisory."""

    subject: str
    data: bytes
    reply: str = ""
    headers: Mapping[str, str] = {}
    status: str = ""
    """As `204`; empty where it has none."""
    description: str = ""
    """Of the status."""


class Snapshot(Struct, frozen=True, kw_only=True):
    """A stream as it is now, its consumers included, on its way to us."""

    config: StreamConfig
    state: SnapshotState
    """Of the stream when the snapshot began."""
    chunks: AsyncGenerator[bytes, None]
    """The archive. Asking for the next chunk tells the server that there is room for it, within seconds of the one
    before. Raises `UnavailableError` where it breaks off."""


class Administration(Protocol):
    """All that a server can be asked for, in its own JSON. Operators' tools use it, workers do not."""

    @property
    def server_version(self) -> str:
        """Of the server that we are connected to, as `2.15.0`."""

    @property
    def server_certificate(self) -> bytes | None:
        """Of the server that we are connected to, in DER form; None without TLS."""

    @property
    def api_prefix(self) -> str:
        """What the subjects of JetStream's API begin with: `$JS.API`, or that of a domain."""

    async def api(
        self, subject: str, request: Any = None, *, prefix: str = "", timeout_seconds: float = 5.0
    ) -> dict[str, Any]:
        """Ask JetStream's API. `subject` is what follows the prefix, which may be that of another domain.

        Raises as a backend's requests do.
        """

    async def pages(self, subject: str, found: str, *, prefix: str = "") -> list[Any]:
        """All pages of a listing of JetStream's API, whose entries are under the key `found`. Raises as `api` does."""

    async def request(self, subject: str, data: bytes = b"", *, timeout_seconds: float = 5.0) -> Heard:
        """Ask whoever listens to a subject. Raises `UnavailableError` where nobody answers in time, `RefusedError`
        where the server denies us the subject.
        """

    def send(self, subject: str, data: bytes = b"", *, reply: str = "") -> None:
        """Publish without an acknowledgement, soon."""

    def new_inbox(self) -> str:
        """A subject for answers, which nobody else has."""

    def listen(self, subject: str) -> AbstractAsyncContextManager[MemoryObjectReceiveStream[Heard]]:
        """What comes for a subject, from when the block is entered until it is left. It is kept until it is read."""

    def snapshot(self, stream: str) -> AbstractAsyncContextManager[Snapshot]:
        """Raises `NotFoundError`, and as `api` does."""

    async def restore(
        self,
        config: Mapping[str, Any],
        state: Mapping[str, Any],
        *,
        read: Callable[[int], Awaitable[bytes]],
        stays_unfinished: bool = False,
    ) -> dict[str, Any]:
        """Make a stream of this configuration from a snapshot's state and archive; returns JetStream's stream info.

        Where it `stays_unfinished` it is whole, but still has its mark and none of its subjects.

        `read` gives at most so many bytes of the archive at a time, none at its end. Where it fails or is cancelled,
        what was made of the stream is removed; where this process is killed, a stream stays that is unfinished (see
        `streams.is_unfinished`). Raises `RefusedError` where the name is taken or the archive is damaged, and as `api`.
        """


class Delivery(Protocol):
    """One message handed to one reader, which settles it once. Settling hands over to the wire and returns.

    One that is not `held` any more cannot be settled: nothing comes of it.
    """

    message: Message
    """Whoever holds many may put one without a body here, and read the whole one again from the stream."""

    @property
    def num_delivered(self) -> int: ...
    @property
    def can_be_read_again(self) -> bool:
        """Whether the consumer's stream has its message under its sequence. False for a message made of others."""

    @property
    def held(self) -> bool:
        """Of a pinned reader: whether certainly nobody else has been given it since. Else True."""

    def ack(self) -> None:
        """It is done."""

    def nak(self, *, delay_seconds: float = 0.0) -> None:
        """Deliver it again, not before the delay is over."""

    def term(self, reason: str) -> None:
        """Never deliver it again."""

    def in_progress(self) -> None:
        """Start `ack_wait` anew."""


class Consumer(Protocol):
    """An open reader of a durable consumer. It asks for as much as its `room` says and no more."""

    @property
    def pinned(self) -> bool:
        """Whether it is the one that is served, as far as it knows, of the readers of a pinned consumer."""

    def refill(self) -> None:
        """Say that there is room again."""

    async def lost(self) -> None:
        """Wait until reading cannot go on, then raise the `BackendError` that says why."""

    async def settled(self) -> None:
        """Return when every settlement so far has reached the backend. Raises `UnavailableError`."""

    async def stop(self) -> None:
        """Ask for no more; return when nothing more can arrive. What arrives meanwhile is still delivered."""


class ConnectionListener(Protocol):
    """Called on every change of the connection; `reason` is empty on the way up.

    Also called when the server denies us something for the first time: `denied` says what, and nothing else changes.
    """

    def __call__(self, *, connected: bool, reason: str, denied: str = "") -> None: ...


class Opening(Protocol):
    """How a backend is opened; `open_backend` is one."""

    def __call__(
        self, config: Config, *, on_connection: ConnectionListener | None = None
    ) -> AbstractAsyncContextManager[Admin]: ...


class Backend(Protocol):
    """Where notifications are stored. Opened by `open_backend`, closed by leaving it."""

    @property
    def kind(self) -> str: ...
    @property
    def clock(self) -> Clock:
        """The time that its deliveries and expiries live by."""

    @property
    def connected(self) -> bool: ...
    @property
    def slow_because(self) -> str:
        """Why it works slower than it could; empty where it does not."""

    @property
    def max_payload(self) -> int:
        """The largest message (headers and body) that it takes, in bytes."""

    def require_server(self, major: int, minor: int, *, to: str) -> None:
        """Raise `RefusedError`, which names both versions, where the server is older than is needed `to` do this."""

    async def failed(self) -> None:
        """Wait until the backend is lost for good, then raise the `BackendError` that says why."""

    async def stream_info(self, stream: str) -> StreamInfo:
        """Raises `NotFoundError`."""

    async def create_stream(self, spec: StreamSpec) -> StreamInfo:
        """Raises `RefusedError` with JetStream's code, STREAM_NAME_IN_USE where a peer created it differently."""

    async def update_stream(self, config: Mapping[str, Any]) -> StreamInfo:
        """Replace a stream's configuration by this whole one."""

    async def purge_stream(self, stream: str, *, subject: str = "") -> int:
        """Remove all messages, or those of a subject, keep the configuration; returns how many went.

        Raises `NotFoundError`.
        """

    async def delete_message(self, stream: str, sequence: int, *, overwrite: bool = True) -> None:
        """Erase one message. Raises `NotFoundError` where stream or message is missing.

        Without `overwrite` its bytes stay on disk for a while, and a server does thirty times as many a second.
        """

    async def message(self, stream: str, sequence: int) -> Message | None:
        """The message of that sequence, as the stream's leader holds it, for one request; None where there is none.

        Its time may be cut to whole microseconds. Raises `NotFoundError` where the stream is missing.
        """

    async def last_message(self, stream: str, subject: str) -> Message | None:
        """The newest message of a subject, from who decides about the next one; None where there is none.

        Raises `NotFoundError`.
        """

    async def ensure_consumer(self, stream: str, spec: ConsumerSpec) -> ConsumerInfo:
        """Create the durable consumer, or update it where it differs in what can be updated.

        Where no `max_ack_pending` of this size is allowed, it has the largest that is.
        """

    async def consumer_info(self, stream: str, consumer: str) -> ConsumerInfo:
        """Raises `NotFoundError`."""

    def consume(
        self,
        stream: str,
        consumer: str,
        *,
        deliver: Callable[[Delivery], None],
        room: Callable[[], int],
        priority: int = 0,
    ) -> AbstractAsyncContextManager[Consumer]:
        """Read a durable consumer: `room()` tells how many deliveries could be taken now.

        With the `priority_policy` `pinned_client`, one of its readers is given everything, and another one when that
        has left or has not asked for `priority_timeout`. With `prioritized`, a reader is given something while none of
        a lower `priority` (0 to 9) asks.
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
        """Stored messages in sequence order, without acks: up to `last_sequence`, else on and on as they come.

        A `start_time` wins over `start_sequence`; both are inclusive. It ends where nothing more matches up to
        `last_sequence`, and not before. Raises `UnavailableError` where reading was interrupted (read on after the last
        sequence that came), `NotFoundError` where the stream is gone. A stream that was deleted and made anew is
        another one, and interrupts it.
        """

    def read_chunks(
        self, stream: str, *, filter_subjects: Sequence[str], start_sequence: int, last_sequence: int
    ) -> AsyncGenerator[Chunk, None]:
        """As `read`, some thousand messages or some megabytes at a time: for what goes through much of a stream."""

    async def count(
        self,
        stream: str,
        *,
        filter_subjects: Sequence[str],
        start_sequence: int = 1,
        start_time: datetime | None = None,
    ) -> int:
        """How many messages `read` would give now, as one server of the stream counts them: one that is behind counts
        fewer. Raises `NotFoundError`.
        """

    async def publish(self, message: Message, *, message_id: str, stream: str, timeout_seconds: float) -> PubAck:
        """Store one message; see `Outgoing`. These of its headers are obeyed, as JetStream does:

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
        """Store messages in this order, all under way at once; what became of each. One timeout is for all of them.

        One alone is answered as `publish` does. Of more, an acknowledgement may leave out the sequence and whether the
        message was stored before, unless `answered` asks for an answer to each.
        """

    async def publish_chunk(self, stream: str, chunk: OutgoingChunk, *, timeout_seconds: float) -> int:
        """Store messages of one stream in this order, at the least expense; how many, from the first on, are stored.

        What became of the others is not known: `publish_many` of them stores each once, or says why it cannot.
        """

    async def publish_together(self, outgoing: Sequence[Outgoing], *, timeout_seconds: float) -> PubAck:
        """Store all of these messages of one stream, one after another, or none; the sequence is that of the last.

        Their ids must have been used for these messages together and no others: where one is known, all are taken as
        stored before. Raises `RefusedError` where the stream's `allow_atomic` is off, or the server is older than 2.12.
        """

    async def key_value(self, bucket: str, *, ttl_seconds: float | None = None, history: int = 1) -> BulkKeyValue:
        """The bucket of that name. Where it is missing it is created: it forgets values older than `ttl_seconds` and
        keeps `history` (at most 64) values of a key.
        """


class Admin(Backend, Protocol):
    """What operators need beside that, of the same object. The engine asks for none of it."""

    def administration(self) -> Administration:
        """Raises `RefusedError` where there is no server."""

    async def stream_names(self) -> list[str]: ...

    async def subject_counts(self, stream: str, *, subject: str = ">") -> dict[str, int]:
        """How many messages of each subject that a filter takes a stream holds, as its leader counts them: for few
        subjects. Raises `NotFoundError`, and `UnavailableError` where subjects come and go faster than they are listed.
        """

    async def consumers(self, stream: str) -> list[ConsumerInfo]:
        """All consumers of a stream, at the price of a request for some hundreds. Raises `NotFoundError`.

        One that has no leader just now may be missing.
        """

    async def delete_consumer(self, stream: str, consumer: str) -> None:
        """Remove a consumer and what is known of how far it has come, for good. Raises `NotFoundError`."""

    async def delete_stream(self, stream: str) -> None:
        """Remove a stream, its messages and its consumers, for good. Raises `NotFoundError`."""

    async def pause_consumer(self, stream: str, consumer: str, *, until: datetime | None) -> None:
        """Deliver nothing, to nobody, before `until`; None: deliver again at once.

        What was delivered before can be settled meanwhile; what comes back waits. Raises `NotFoundError`, and
        `RefusedError` where the server is older than 2.11.
        """

    async def reset_consumer(self, stream: str, consumer: str, *, sequence: int) -> ConsumerInfo:
        """Let the consumer go on at `sequence` (1 or more), as if it had never come further, nor as far.

        What was delivered and not settled is forgotten; from `sequence` on everything is delivered, as for the first
        time. A sequence that the stream has not reached is waited for, and what is stored before it is passed over.
        Raises `NotFoundError`, and `RefusedError` where the server is older than 2.14.
        """

    async def purge_stream(self, stream: str, *, subject: str = "", keep: int = 0, before: int = 0) -> int:
        """As `Backend.purge_stream`, but for the newest `keep`, or only messages before a sequence.

        Raises `NotFoundError`, and `RefusedError` where there is no server and one of the two is given.
        """


def open_backend(
    config: Config, *, on_connection: ConnectionListener | None = None
) -> AbstractAsyncContextManager[Admin]:
    """The backend that the configuration names, connected while the `async with` block runs. The engine
    takes it for a `Backend`.

    Raises `UnavailableError` where no server is reached, `RefusedError` where one turns us away.
    """
    settings = config.notification_backend
    if settings.kind == "in_memory":
        from aviso_workers.backends.in_memory import InMemoryBackend

        return InMemoryBackend(settings.in_memory, on_connection=on_connection)
    from aviso_workers.backends.jetstream import JetStreamBackend

    return JetStreamBackend(settings.jetstream, on_connection=on_connection)
