"""Mirrors and sources: whether they keep up with their origins, and fences of streams.

Called by the commands `mirror ...`, by `promotion` and by `doctor`. A mirror is judged by its last contact with its
origin, because its lag stays at nought when the origin is gone, and by whether both have the same history (see
`compare`). A fenced stream keeps its messages, and a placeholder takes the place of its subjects, so that it
takes no publish, also after a restart: where a mirror and its former origin both took publishes, the same sequences
would hold different messages, and the streams could not be merged.
Reconciliation leaves a fenced stream alone.

A mirror keeps the sequence, the store time, the subject and the body of each message; of its headers, a server leaves
out those of expectations. An origin that was deleted and recreated counts from the beginning, and its mirror goes on
after the last sequence that it has: the numbers look well, and messages are missing. So the two are compared message by
message: the first and the last that both hold, some in between, and those around the time at which the origin was
created, which differ where it was restored from a backup that lacked the newest messages.

What this cannot see: two differing messages between two equal ones that were compared, as an origin leaves that was
restored from a backup twice; and messages that only one of the streams holds, because they were deleted, replaced or
expired there.

`promotion` and `stream_copies` carry consumers over to a copy of their stream, before it has readers. A server makes a
consumer that begins at a sequence, but none that knows which messages behind that were acked. So the new one begins
after the ack floor of the original: what was delivered and not acked is delivered again, and so is what was acked
behind a message that was not. At least once, as always.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

import anyio
from msgspec import Struct, field, structs

from aviso_workers.aviso import literals
from aviso_workers.aviso.codec import store_time
from aviso_workers.aviso.literals import quoted
from aviso_workers.backends import Admin, Management, Message
from aviso_workers.errors import BackendError, NotFoundError, RefusedError, UnavailableError
from aviso_workers.jetstream import specs
from aviso_workers.jetstream.info import ConsumerInfo, SourceInfo, StreamInfo
from aviso_workers.jetstream.metadata import FENCED
from aviso_workers.ops import inventory

STALE_SECONDS = specs.STALE_SECONDS
"""A mirror without contact for so long is not following: an idle origin sends a heartbeat every few seconds."""
PROMOTED = "aviso-workers-promoted-from"
"""The metadata of a promoted mirror: the API and the name of its origin, and the last sequence that it mirrored."""
COPY_OF = "aviso-workers-copy-of"
"""The metadata of an unfinished copy (see `stream_copies`): when its original was created."""
NOWHERE = "aviso_workers.fenced"
"""The placeholder that a fenced stream has as its subject, followed by its name: a stream without subjects takes what
is published under its name."""
ORIGIN_SECONDS = 2.0
SPREAD = 16
"""Places between the first and the last sequence that both can have."""
BEFORE_CREATION = 4
"""Messages that are compared of those that were stored just before the origin was created."""
AT_ONCE = 8
"""Places that are compared side by side."""
CLOCKS = timedelta(seconds=60)
"""How far the clocks of the servers of one cluster may differ, and how late they may remove what is too old."""
LIMITS = ("max_msgs", "max_bytes", "max_age", "max_msgs_per_subject")
POSITION_UNKNOWN = "no server answers for it, so its position is not known"
ELECTION_SECONDS = 10.0
POLL_SECONDS = 0.2
STARTS = ("opt_start_seq", "opt_start_time")


class HistoryComparison(Struct, frozen=True, kw_only=True):
    """The result of comparing a mirror with its origin: how many messages are the same, and what differs."""

    equal: int = 0
    """Messages that both hold and that are the same."""
    trouble: str = ""
    """Why these are two histories; empty where nothing says so."""


class _ComparedStream:
    """A stream, with its state when it was read."""

    def __init__(self, streams: Management, found: StreamInfo) -> None:
        self._streams = streams
        self.name = found.name
        self.config = found.config
        assert found.created is not None  # a server always states it
        self.created = found.created
        self.asked = found.time
        self.messages = found.messages
        self.first = found.first_sequence
        self.last = found.last_sequence

    async def at(self, sequence: int) -> Message | None:
        return await self._streams.message(self.name, sequence)

    async def next(self, sequence: int) -> Message | None:
        """Return the first message of this sequence or a later one; None where there is none."""
        return await self._streams.message(self.name, sequence, next_by_subject=">")

    async def last_before(self, time: datetime) -> int:
        """Return the last sequence up to which all messages were stored before a time."""
        low, high = self.first - 1, self.last
        while low < high:
            middle = (low + high + 1) // 2
            found = await self.next(middle)
            if found is not None and store_time(found) < time:
                low = middle
            else:
                high = middle - 1
        return low


async def compare(admin: Admin, mirror: str, origin: str, *, api: str, timeout_seconds: float) -> HistoryComparison:
    """Compare a mirror with its origin, which is at another `api` or, where that is empty, in the same account.

    It takes some tens of requests for one message each. Raises `BackendError`.
    """
    here = _ComparedStream(admin, await admin.stream_info(mirror))
    # Asked for later, so that an origin that lives is never behind its mirror.
    streams = admin.at(api)
    there = _ComparedStream(streams, await streams.stream_info(origin, timeout_seconds=timeout_seconds))
    if here.last > there.last:
        return HistoryComparison(
            trouble=f"the origin {origin} was recreated or restored from a backup: it ends at {there.last}, and its "
            f"mirror {mirror}, which has what was stored before, at {here.last}"
        )
    pairs = await _pairs(here, there)
    equal = sum(kept(ours) == kept(theirs) for ours, theirs in pairs)
    for ours, theirs in pairs:
        if kept(ours) != kept(theirs):
            return HistoryComparison(
                equal=equal,
                trouble=f"the origin {origin} was recreated or restored from a backup: its message "
                f"{theirs.sequence} is of {literals.rfc3339(theirs.timestamp_ns)}, and that of its mirror {mirror} of "
                f"{literals.rfc3339(ours.timestamp_ns)}",
            )
    return HistoryComparison(equal=equal, trouble=await _made_later(here, there, equal))


async def _pairs(here: _ComparedStream, there: _ComparedStream) -> list[tuple[Message, Message]]:
    """Return pairs of messages, from the mirror and its origin, that have the same sequence, in its order."""
    first, last = max(here.first, there.first), here.last
    if not (here.messages and there.messages) or first > last:
        return []
    places = {first + (last - first) * step // SPREAD for step in range(SPREAD + 1)}
    boundary = await here.last_before(there.created)
    places |= {place for place in range(boundary - BEFORE_CREATION + 1, boundary + 2) if first <= place <= last}
    found: dict[int, tuple[Message, Message]] = {}
    failures: list[BackendError] = []
    limiter = anyio.CapacityLimiter(AT_ONCE)

    async def compare_at(place: int) -> None:
        async with limiter:
            try:
                pair = None if failures else await _pair(here, there, place)
            except BackendError as error:
                failures.append(error)
                return
            if pair is not None:
                found[pair[0].sequence] = pair

    async with anyio.create_task_group() as tasks:
        for place in places:
            tasks.start_soon(compare_at, place)
    if failures:
        raise failures[0]
    return [found[sequence] for sequence in sorted(found)]


async def _pair(here: _ComparedStream, there: _ComparedStream, place: int) -> tuple[Message, Message] | None:
    """Return the pair of messages of a sequence or, where one stream has deleted it, of one soon after it; None where
    there is none.
    """
    for one, other in ((here, there), (there, here)):
        found = await one.next(place)
        if found is None or (counterpart := await other.at(found.sequence)) is None:
            continue
        return (found, counterpart) if one is here else (counterpart, found)
    return None


async def _made_later(here: _ComparedStream, there: _ComparedStream, equal: int) -> str:
    """Return why an origin that was created later than the mirror's messages is another stream; empty where it is
    not.
    """
    if not equal and here.messages:
        oldest = await here.next(here.first)
        if oldest is not None and store_time(oldest) + CLOCKS < there.created:
            return (
                f"the origin {there.name} was recreated: it was created at {there.created:%Y-%m-%d %H:%M:%S}, its "
                f"mirror {here.name} has older messages, and none that both hold shows that it was restored with these"
            )
    if there.created > here.created + CLOCKS and await _holds_more(here, there):
        return (
            f"the origin {there.name} was recreated: it was created after its mirror {here.name}, and holds messages "
            f"before {here.first}, the first one of the mirror"
        )
    return ""


async def _holds_more(here: _ComparedStream, there: _ComparedStream) -> bool:
    """Return whether an origin holds older messages than its mirror, which no limit of the mirror explains."""
    if any(_limit(here.config, name) < _limit(there.config, name) for name in LIMITS):
        return False
    oldest = await there.next(there.first) if there.messages else None
    if oldest is None or oldest.sequence >= here.first:
        return False
    max_age = timedelta(microseconds=_limit(here.config, "max_age") / 1000)
    return there.asked - store_time(oldest) < max_age - CLOCKS  # else both are about to remove it


def kept(message: Message) -> tuple[int, int, str, bytes]:
    """Return the parts of a message that a mirror keeps as its origin has them."""
    return message.sequence, message.timestamp_ns, message.subject, message.data


def _limit(config: Mapping[str, Any], name: str) -> int:
    value = int(config.get(name) or 0)
    return value if value > 0 else 10**18


class Link(Struct, frozen=True, kw_only=True):
    """The relation of a stream to its origin, and how far it keeps up."""

    stream: str
    origin: str
    relation: str
    """`mirror`, `source`, or `promoted`: it was a mirror."""
    api: str
    """The prefix of the API where the origin is; empty where it is in the same account."""
    whole: bool = True
    """Whether a mirror has no filter, subject transform or start, so that it holds all of its origin, unchanged."""
    lag: int = 0
    """Messages that are still to come, as far as the stream knows."""
    active_seconds: float | None = None
    """Seconds since its last contact with the origin; None: never."""
    trouble: str = ""
    """Why it cannot be relied on; empty where it can."""
    divergence: str = field(default="", name="other_history")
    """Why the messages of a mirror and of its origin differ; empty where they are equal or could not be compared. It is
    part of `trouble` as well, and is called `other_history` in JSON."""
    equal: int | None = None
    """Messages of a mirror that were compared with those of its origin and are the same; None where none could be."""


class Fenced(Struct, frozen=True, kw_only=True):
    """The result of fencing a stream: the subjects that it took, and its last sequence."""

    subjects: tuple[str, ...]
    last_sequence: int
    """Nothing comes after it."""
    already_fenced: bool


class Mirrors:
    """The mirrors and sources of the account. Works inside of `async with app:`. Every method raises `BackendError`."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    async def links(self, streams: Iterable[StreamInfo] | None = None) -> list[Link]:
        """Return the links of all `streams`, or these, that follow another one, or did until they were promoted."""
        streams = await self._admin.streams() if streams is None else streams
        links = [link for stream in streams for link in _links(stream)]

        async def judge(index: int) -> None:
            try:
                links[index] = await self._judged(links[index])
            except BackendError as error:
                trouble = links[index].trouble or f"{links[index].origin} cannot be read: {error}"
                links[index] = structs.replace(links[index], trouble=trouble)

        async with anyio.create_task_group() as tasks:  # those whose origins do not answer are waited for side by side
            for index in range(len(links)):
                tasks.start_soon(judge, index)
        return links

    async def _judged(self, link: Link) -> Link:
        """Return the link after a comparison with its origin, where that answers."""
        try:
            if link.relation == "mirror" and link.whole:
                return await self._compared(link)
            if link.relation == "promoted":
                return await self._promoted(link)
        except UnavailableError:
            pass  # the time since the last contact shows it
        except NotFoundError:
            if link.relation == "mirror":
                return structs.replace(link, trouble=link.trouble or f"{link.origin} does not exist any more")
        return link

    async def _compared(self, link: Link) -> Link:
        comparison = await compare(self._admin, link.stream, link.origin, api=link.api, timeout_seconds=ORIGIN_SECONDS)
        return structs.replace(
            link,
            trouble="; ".join(filter(None, (comparison.trouble, link.trouble))),
            divergence=comparison.trouble,
            equal=comparison.equal,
        )

    async def _promoted(self, link: Link) -> Link:
        config = (await self._admin.at(link.api).stream_info(link.origin, timeout_seconds=ORIGIN_SECONDS)).config
        if FENCED in config.metadata or config.mirror:
            return link
        fence = f"`aviso-workers mirror fence {quoted(link.origin)} --api {quoted(link.api)}`"
        return structs.replace(
            link,
            trouble=f"{link.origin} is back and takes publishes, although a mirror has replaced it: run {fence}",
        )


async def fence(streams: Management, stream: str) -> Fenced:
    """Fence a stream: take its subjects away, and keep them in its metadata. A fenced stream stays as it is.

    Raises `BackendError`.
    """
    found = await streams.stream_info(stream, timeout_seconds=ORIGIN_SECONDS)
    metadata, subjects = found.config.metadata, found.config.subjects
    already_fenced = FENCED in metadata
    if not already_fenced:
        if not subjects:
            raise RefusedError(f"{stream} has no subjects of its own, so there is nothing to fence")
        metadata = {**metadata, FENCED: " ".join(subjects)}
        config = {**found.config, "subjects": [f"{NOWHERE}.{stream}"], "metadata": metadata}
        found = await streams.update_stream(config)
    return Fenced(
        subjects=tuple(metadata[FENCED].split()), last_sequence=found.last_sequence, already_fenced=already_fenced
    )


async def unfence(streams: Management, stream: str) -> tuple[str, ...]:
    """Give a fenced stream its subjects back, also an unfinished copy, and return them.

    Raises `RefusedError` where it is not fenced.
    """
    config = (await streams.stream_info(stream)).config
    metadata = dict(config.metadata)
    if FENCED not in metadata:
        raise RefusedError(f"{stream} is not fenced")
    subjects = metadata.pop(FENCED).split()
    if metadata.pop(COPY_OF, None):
        config.pop("subject_transform", None)  # which `stream_copies` used to append to it
    await streams.update_stream({**config, "subjects": subjects, "metadata": metadata})
    return tuple(subjects)


def _links(stream: StreamInfo) -> Iterator[Link]:
    if stream.mirror:
        declared = stream.config.mirror
        whole = declared is None or not declared.left_out
        yield structs.replace(_link(stream.name, "mirror", stream.mirror), whole=whole)
    for source in stream.sources:
        yield _link(stream.name, "source", source)
    metadata = stream.config.metadata
    if (promoted := metadata.get(PROMOTED)) and FENCED not in metadata:  # fenced, it replaces nothing any more
        api, origin, _ = promoted.split(" ")
        yield Link(stream=stream.name, origin=origin, relation="promoted", api=api)


def _link(stream: str, relation: str, found: SourceInfo) -> Link:
    active_seconds = found.active / 1e9 if found.active >= 0 else None
    trouble = found.trouble
    if active_seconds is None:
        trouble = trouble or "it has never contacted its origin"
    elif active_seconds > STALE_SECONDS:
        trouble = trouble or f"last contact with its origin {active_seconds:.0f} s ago, so its lag is not known"
    return Link(
        stream=stream,
        origin=found.name,
        relation=relation,
        api=found.api,
        lag=found.lag,
        active_seconds=active_seconds,
        trouble=trouble,
    )


class StreamPlace(Struct, frozen=True, kw_only=True):
    """A stream, with the JetStream that it is in."""

    streams: Management
    """The JetStream that has the stream."""
    stream: str


class Carried(Struct, frozen=True, kw_only=True):
    """The result for one durable consumer: where it goes on, and whether it was made."""

    consumer: str
    next_sequence: int
    """Where it goes on: everything before is settled. 0 where that is not known."""
    delivered: int
    """Up to here the original had delivered, so that at most what lies between is handled again."""
    made: bool = True
    """Whether it was made here; False where there was one already, with deliveries or a reader of its own, which stays
    as it is and goes on at `next_sequence`."""
    has_readers: bool = False
    """Whether the original still has readers: what they handle from now on is handled again."""
    refused: str = ""
    """Why it could not be made; empty where it is there."""


async def carry_consumers(source: StreamPlace, target: StreamPlace) -> list[Carried]:
    """Make the durable consumers of one stream again at another one that has the same sequences. It can be repeated.

    Raises `BackendError`; a consumer that the server refuses is in the result, with the reason.
    """
    replicas, last = await _replicas_and_last(target)
    listed, _ = await consumers_of(target)
    present = {consumer.name: consumer for consumer in listed}
    originals, unavailable = await consumers_of(source)
    carried = [
        await _carry_one(consumer, present.get(consumer.name), target, replicas=replicas, last=last)
        for consumer in originals
        if consumer.durable
    ]
    return carried + [
        Carried(consumer=name, next_sequence=0, delivered=0, made=False, refused=POSITION_UNKNOWN)
        for name in unavailable
    ]


async def bring_consumers_on(source: StreamPlace, target: StreamPlace) -> int:
    """Move the consumers of a copy to the positions of their originals, and return how many there are.

    One that has the same ack floor stays as it is, with what was acked behind it. Raises `BackendError`.
    """
    replicas, last = await _replicas_and_last(target)
    there, _ = await consumers_of(target)
    ack_floors = {consumer.name: consumer.ack_floor for consumer in there}
    listed, unavailable = await consumers_of(source)
    if unavailable:
        raise UnavailableError(f"{source.stream}: consumer {unavailable[0]}: {POSITION_UNKNOWN}")
    originals = [consumer for consumer in listed if consumer.durable]
    for consumer in originals:
        if ack_floors.get(consumer.name) == consumer.ack_floor:
            continue
        await _delete_consumer(target, consumer.name)
        await _make_consumer(consumer, target, replicas=replicas, last=last)
    return len(originals)


async def remove_carried(target: StreamPlace, carried: Iterable[Carried]) -> None:
    """Remove the consumers that `carry` made. Raises `BackendError`."""
    for each in carried:
        if each.made:
            await _delete_consumer(target, each.consumer)


async def _carry_one(
    original: ConsumerInfo, present: ConsumerInfo | None, target: StreamPlace, *, replicas: int, last: int
) -> Carried:
    name, next_sequence = original.name, _next_sequence(original, last=last)
    carried = Carried(
        consumer=name,
        next_sequence=next_sequence,
        delivered=original.position,
        has_readers=bool(original.num_waiting or original.push_bound),
    )
    if present is not None:
        if present.deliveries or present.num_waiting:
            return structs.replace(carried, made=False, next_sequence=present.ack_floor + 1)
        await _delete_consumer(target, name)  # it has delivered nothing, as where this is repeated
    try:
        await _make_consumer(original, target, replicas=replicas, last=last)
    except RefusedError as error:
        return structs.replace(carried, made=False, refused=str(error))
    return carried


def _next_sequence(original: ConsumerInfo, *, last: int) -> int:
    """Return the sequence at which a consumer goes on in a stream that ends at `last`.

    The original has settled more where the newest messages of its stream were deleted; a mirror never got
    their sequences, and gives them to other messages.
    """
    return min(original.ack_floor, last) + 1


async def _make_consumer(original: ConsumerInfo, target: StreamPlace, *, replicas: int, last: int) -> None:
    """Make a consumer that begins after the ack floor of the original."""
    config = {key: value for key, value in original.config.items() if key not in STARTS}
    config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": _next_sequence(original, last=last)}
    config["num_replicas"] = min(original.config.num_replicas, replicas)
    await target.streams.put_consumer(target.stream, original.name, config, action="create")


async def consumers_of(place: StreamPlace) -> tuple[list[ConsumerInfo], list[str]]:
    """Return the consumers of a stream, and the names of those for which no server answers.

    The list of a cluster leaves out, without a word, a consumer that has no leader. Elections are waited for. Raises
    `BackendError`.
    """
    until = anyio.current_time() + ELECTION_SECONDS
    while True:
        listed = await inventory.consumers(place.streams, place.stream)
        if not listed.unavailable or anyio.current_time() > until:
            return listed.found, listed.unavailable
        await anyio.sleep(POLL_SECONDS)


async def _replicas_and_last(place: StreamPlace) -> tuple[int, int]:
    """Return the number of replicas of a stream, and its last sequence."""
    found = await place.streams.stream_info(place.stream)
    return found.config.num_replicas, found.last_sequence


async def _delete_consumer(place: StreamPlace, consumer: str) -> None:
    with suppress(NotFoundError):
        await place.streams.delete_consumer(place.stream, consumer)
