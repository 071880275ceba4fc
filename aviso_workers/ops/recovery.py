"""Recovery of messages that only the origin of a promoted mirror has: found by comparison, and published to the mirror.

Called by `mirror recover`, when an origin that was lost is back, or after a mirror was promoted whose origin had been
recreated. Up to the sequence that was mirrored last, both have the same messages under the same sequences; what
differs there is of another history, and what comes behind never arrived. The origin is fenced before, so that it stores
nothing more.

What is published gets a sequence and a time of its own, behind everything else, and says in a header where it comes
from. By that header, and by its message id, it is found again: however often this is killed and repeated, nothing is
published twice. Where a stream keeps some messages for each subject, nothing takes the place of a newer one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from msgspec import Struct, structs

from aviso_workers.aviso.literals import quoted
from aviso_workers.backends import Admin, Message, Outgoing, PubAck, open_backend
from aviso_workers.config import Config
from aviso_workers.errors import BackendError, ConflictError, RefusedError
from aviso_workers.jetstream.answers import EXPECTED_LAST, MESSAGE_ID
from aviso_workers.jetstream.info import StreamInfo
from aviso_workers.jetstream.metadata import FENCED
from aviso_workers.ops import inventory, mirrors
from aviso_workers.ops.mirrors import PROMOTED

RECOVERED = "Aviso-Workers-Recovered"
"""The header of what was published again: when its stream was created, and its sequence there."""
LEFT_OUT = ("Nats-Expected-", "Nats-Batch-", "Nats-Rollup", RECOVERED)
"""The prefixes of headers that said how a message was to be stored where it comes from."""
BATCH = 500
PUBLISH_SECONDS = 30.0
DOMAIN_PARTS = 3
"""The number of tokens in the prefix of a domain's API, `$JS.<domain>.API`."""


class Recovered(Struct, frozen=True, kw_only=True):
    """The result of a recovery: how many messages were published, and how many were not and why."""

    published: int
    present: int
    """They had been published again before, or their publishers have repeated them."""
    superseded: int
    """They are older than what the stream has of their subjects now, and it keeps only the newest of these."""
    undecided: int
    """Messages of the origin under sequences that the mirror has had and has not any more, so that they cannot be
    compared. They are not published."""


class Recovery:
    """A promoted mirror beside its origin, which is fenced. `opened` makes one."""

    def __init__(self, admin: Admin, stream: str, there: Admin, origin: StreamInfo, *, mirrored: int) -> None:
        """`there` is the admin that is connected to the origin."""
        self._admin = admin
        self._stream = stream
        self._there = there
        self._origin = origin
        self._mirrored = mirrored
        self.undecided = 0
        """Messages that cannot be compared, counted as far as `only_there` has come."""

    async def only_there(self) -> AsyncGenerator[Message, None]:
        """Yield the messages that only the origin has, by their sequence. Raises `BackendError`."""
        self.undecided = 0
        between: list[Message] = []
        differs = False
        ours = inventory.messages_between(self._admin, self._stream, after=0, last=self._mirrored)
        theirs = inventory.messages_between(self._there, self._origin.name, after=0, last=self._origin.last_sequence)
        async with aclosing(ours), aclosing(theirs):
            async for mirrored, original in inventory.side_by_side(ours, theirs):
                if original is None:
                    continue  # it was deleted at the origin, or it is of the history that the origin has lost
                if original.sequence > self._mirrored:
                    between = self._decide(between, differs)
                    differs = False
                    for message in (*between, original):
                        yield message
                    between = []
                elif mirrored is None:
                    between.append(original)
                else:
                    was_different, differs = differs, mirrors.kept(mirrored) != mirrors.kept(original)
                    for message in self._decide(between, was_different or differs):
                        yield message
                    between = []
                    if differs:
                        yield original
        for message in self._decide(between, differs):
            yield message

    def _decide(self, messages: list[Message], differ: bool) -> list[Message]:
        """Return the given messages where a neighbour differs, so that they are of another history; else count them as
        undecided.
        """
        if differ:
            return messages
        self.undecided += len(messages)
        return []

    async def publish(self) -> Recovered:
        """Publish to the promoted mirror what only the origin has. It can be repeated. Raises `BackendError`."""
        created = self._origin.created_text
        publisher = _RecoveryPublisher(self._admin, self._stream, created=created, mirrored=self._mirrored)
        await publisher.open()
        only_there = self.only_there()
        async with aclosing(only_there):
            async for message in only_there:
                await publisher.take(message)
        await publisher.flush()
        return Recovered(
            published=publisher.published,
            present=publisher.present,
            superseded=publisher.superseded,
            undecided=self.undecided,
        )


class _RecoveryPublisher:
    """A publisher of recovered messages into a promoted mirror, each at most once."""

    def __init__(self, admin: Admin, stream: str, *, created: str, mirrored: int) -> None:
        self.published = self.present = self.superseded = 0
        self._admin = admin
        self._stream = stream
        self._created = created
        self._mirrored = mirrored
        self._replaces = False
        """Whether the stream keeps some messages for each subject, and removes the older ones."""
        self._recovered: set[int] = set()
        self._ids: set[str] = set()
        """Message ids that publishers have used since the promotion."""
        self._used_ids: set[str] = set()
        """Message ids of recovered messages: the origin may have stored one again after its duplicate window."""
        self._newest: dict[str, tuple[int, int | None]] = {}
        """By subject, the newest message that was stored since the promotion: its sequence, and its sequence at the
        origin where it comes from there."""
        self._waiting: list[Outgoing] = []

    async def open(self) -> None:
        """Read which messages were published since the promotion."""
        info = await self._admin.stream_info(self._stream)
        self._replaces = info.config.max_msgs_per_subject > 0
        stored = inventory.messages_between(self._admin, self._stream, after=self._mirrored, last=info.last_sequence)
        async with aclosing(stored):
            async for message in stored:
                headers = message.headers or {}
                recovered = self._sequence_of(headers.get(RECOVERED, ""))
                if recovered is not None:
                    self._recovered.add(recovered)
                if message_id := headers.get(MESSAGE_ID):
                    (self._ids if recovered is None else self._used_ids).add(message_id)
                self._newest[message.subject] = message.sequence, recovered

    async def take(self, message: Message) -> None:
        if message.sequence in self._recovered or (message.headers or {}).get(MESSAGE_ID) in self._ids:
            self.present += 1
        elif self._replaces:
            await self._publish_unless_newer(message)
        else:
            self._waiting.append(self._outgoing(message))
            if len(self._waiting) == BATCH:
                await self.flush()

    async def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        answers = await self._admin.publish_many(waiting, timeout_seconds=PUBLISH_SECONDS)
        for answer in answers:
            if isinstance(answer, BackendError):
                raise answer
            self._count(answer)

    async def _publish_unless_newer(self, message: Message) -> None:
        newest, recovered = self._newest.get(message.subject, (0, None))
        if newest and (recovered is None or recovered > message.sequence):
            self.superseded += 1
            return
        found = await self._admin.message(self._stream, last_by_subject=message.subject)
        last = found.sequence if found else 0
        if last > max(newest, self._mirrored):
            self.superseded += 1
            return
        each = self._outgoing(message, **{EXPECTED_LAST: str(last)})
        try:
            answer = await self._admin.publish(
                each.message, message_id=each.message_id, stream=self._stream, timeout_seconds=PUBLISH_SECONDS
            )
        except ConflictError:  # a newer one came just now
            self.superseded += 1
            return
        self._count(answer)
        self._newest[message.subject] = answer.sequence, message.sequence

    def _count(self, answer: PubAck) -> None:
        self.present += answer.duplicate
        self.published += not answer.duplicate

    def _outgoing(self, message: Message, **headers: str) -> Outgoing:
        """Return the message with its id, or one made of its origin, so that two commands at the same time store it
        once.
        """
        theirs = message.headers or {}
        kept = {key: value for key, value in theirs.items() if not key.startswith(LEFT_OUT) and key != MESSAGE_ID}
        mark = f"{self._created} {message.sequence}"
        again = Message(subject=message.subject, data=message.data, headers=kept | headers | {RECOVERED: mark})
        message_id = theirs.get(MESSAGE_ID, "")
        if not message_id or message_id in self._used_ids:
            message_id = f"recovered {mark}"
        self._used_ids.add(message_id)
        return Outgoing(again, message_id, self._stream)

    def _sequence_of(self, mark: str) -> int | None:
        created, _, sequence = mark.rpartition(" ")
        return int(sequence) if created == self._created and sequence.isdecimal() else None


@asynccontextmanager
async def opened(
    admin: Admin, config: Config, stream: str, *, origin_config: Config | None = None
) -> AsyncIterator[Recovery]:
    """Open the recovery of a promoted mirror, whose origin is reached by its domain or else by `origin_config`.

    Raises `RefusedError` where the stream is not a promoted mirror, its origin cannot be
    reached this way or is not fenced, and `BackendError`.
    """
    promoted = (await admin.stream_info(stream)).config.metadata.get(PROMOTED)
    if promoted is None:
        raise RefusedError(f"{stream} is not a promoted mirror")
    api, origin, last = promoted.split(" ")
    async with _origin_at(admin, config, api, origin_config) as there:
        if FENCED not in (found := await there.stream_info(origin)).config.metadata:
            raise RefusedError(
                f"{origin} takes publishes, so the messages that only it has cannot be listed. Fence it first: "
                f"`aviso-workers mirror fence {quoted(origin)} --api {quoted(api)}`"
            )
        yield Recovery(admin, stream, there, found, mirrored=int(last))


@asynccontextmanager
async def _origin_at(admin: Admin, config: Config, api: str, origin_config: Config | None) -> AsyncIterator[Admin]:
    """Open the JetStream of an API prefix: this one, one at another domain, or that of the origin's own
    configuration.
    """
    if origin_config is None and api == admin.api_prefix:
        yield admin
        return
    async with open_backend(origin_config or _at_domain(config, api)) as there:
        yield there


def _at_domain(config: Config, api: str) -> Config:
    parts = api.split(".")
    if len(parts) != DOMAIN_PARTS or parts[0] != "$JS" or parts[2] != "API":
        raise RefusedError(
            f"the origin is at {api}, which is not a domain: say --origin-config, the configuration there"
        )
    backend = config.notification_backend
    there = structs.replace(backend, jetstream=structs.replace(backend.jetstream, domain=parts[1]))
    return structs.replace(config, notification_backend=there)
