"""Consumers recreated beside a copy of their stream, each at the position of the original.

Called by `promotion` and `stream_copies`, before the copy has readers. A server makes a consumer that begins at a
sequence, but none that knows which messages behind that were acked. So the new one begins after the ack floor of the
original: what was delivered and not acked is delivered again, and so is what was acked behind a message that was not.
At least once, as always.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import anyio
from msgspec import Struct, structs

from aviso_workers.backends import Management
from aviso_workers.errors import NotFoundError, RefusedError, UnavailableError
from aviso_workers.jetstream.info import ConsumerInfo
from aviso_workers.ops import inventory

UNKNOWN = "no server answers for it, so its position is not known"
ELECTION_SECONDS = 10.0
POLL_SECONDS = 0.2
STARTS = ("opt_start_seq", "opt_start_time")


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


async def carry(source: StreamPlace, target: StreamPlace) -> list[Carried]:
    """Make the durable consumers of one stream again at another one that has the same sequences. It can be repeated.

    Raises `BackendError`; a consumer that the server refuses is in the result, with the reason.
    """
    replicas, last = await _replicas_and_last(target)
    listed, _ = await consumers(target)
    present = {consumer.name: consumer for consumer in listed}
    originals, unavailable = await consumers(source)
    carried = [
        await _carry_one(consumer, present.get(consumer.name), target, replicas=replicas, last=last)
        for consumer in originals
        if consumer.durable
    ]
    return carried + [
        Carried(consumer=name, next_sequence=0, delivered=0, made=False, refused=UNKNOWN) for name in unavailable
    ]


async def bring_on(source: StreamPlace, target: StreamPlace) -> int:
    """Move the consumers of a copy to the positions of their originals, and return how many there are.

    One that has the same ack floor stays as it is, with what was acked behind it. Raises `BackendError`.
    """
    replicas, last = await _replicas_and_last(target)
    there, _ = await consumers(target)
    ack_floors = {consumer.name: consumer.ack_floor for consumer in there}
    listed, unavailable = await consumers(source)
    if unavailable:
        raise UnavailableError(f"{source.stream}: consumer {unavailable[0]}: {UNKNOWN}")
    originals = [consumer for consumer in listed if consumer.durable]
    for consumer in originals:
        if ack_floors.get(consumer.name) == consumer.ack_floor:
            continue
        await _delete(target, consumer.name)
        await _make(consumer, target, replicas=replicas, last=last)
    return len(originals)


async def remove(target: StreamPlace, carried: Iterable[Carried]) -> None:
    """Remove the consumers that `carry` made. Raises `BackendError`."""
    for each in carried:
        if each.made:
            await _delete(target, each.consumer)


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
        await _delete(target, name)  # it has delivered nothing, as where this is repeated
    try:
        await _make(original, target, replicas=replicas, last=last)
    except RefusedError as error:
        return structs.replace(carried, made=False, refused=str(error))
    return carried


def _next_sequence(original: ConsumerInfo, *, last: int) -> int:
    """Return the sequence at which a consumer goes on in a stream that ends at `last`.

    The original has settled more where the newest messages of its stream were deleted; a mirror never got
    their sequences, and gives them to other messages.
    """
    return min(original.ack_floor, last) + 1


async def _make(original: ConsumerInfo, target: StreamPlace, *, replicas: int, last: int) -> None:
    """Make a consumer that begins after the ack floor of the original."""
    config = {key: value for key, value in original.config.items() if key not in STARTS}
    config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": _next_sequence(original, last=last)}
    config["num_replicas"] = min(original.config.num_replicas, replicas)
    await target.streams.put_consumer(target.stream, original.name, config, action="create")


async def consumers(place: StreamPlace) -> tuple[list[ConsumerInfo], list[str]]:
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


async def _delete(place: StreamPlace, consumer: str) -> None:
    with suppress(NotFoundError):
        await place.streams.delete_consumer(place.stream, consumer)
