"""Consumers that a subscription reads, and the steps of a delivery between its consumer and the flow.

Most go straight into the flow. What never gets there is what another version of the agent wants (`shared_filters`),
what was settled before and comes again, and a dead letter that is tried again whose sequence is taken.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from anyio.abc import TaskGroup
from msgspec import Struct

from aviso_workers.aviso.codec import Message, lacks_body
from aviso_workers.backends import Backend, ConsumerInfo, Delivery
from aviso_workers.backends.provisioning import Provisioner
from aviso_workers.declare.verdicts import Nak
from aviso_workers.engine import acknowledging
from aviso_workers.engine.flow import Flow
from aviso_workers.engine.repeats import Repeats
from aviso_workers.errors import BackendError
from aviso_workers.jetstream.specs import ConsumerSpec, StreamSpec

UNREAD_SECONDS = 10.0
"""When a dead letter is delivered again whose body could not be read."""
SEQUENCE_HELD_SECONDS = 1.0
"""How much later a dead letter that was handed back is delivered again whose sequence another notification has."""


class Feed(Struct, frozen=True, kw_only=True):
    """A durable consumer that an agent reads, and its stream."""

    stream: StreamSpec
    consumer: ConsumerSpec
    provisioner: Provisioner
    unwrap: Callable[[Delivery, Message], Delivery] | None = None
    """Makes of what comes, and its whole message, what the agent is to see."""
    refuses: Callable[[Delivery], bool] | None = None
    """Takes a delivery that is not to be unwrapped, and returns whether it did. None: there is none."""
    in_order: bool = False
    """Deliveries must come in order: what a dead worker held is waited for before anything new is asked for."""
    capacity: Callable[[], int] | None = None
    """How many deliveries could be taken now; None where that is the agent's to say."""
    priority: int = 0
    """See `Backend.consume`."""
    ensure: Callable[[], Awaitable[ConsumerInfo]] | None = None
    """Creates the consumer or brings it in line; None where `consumer` says all that is wanted of it."""
    leaves: Callable[[Delivery], bool] | None = None
    """Takes a delivery that the agent is not to have, and returns whether it did. None: the agent has all."""
    interrupted: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()
    """Each returns when reading has to stop until `ensure` lets it begin again."""
    repeats: Repeats | None = None
    """The notifications of the stream that were settled lately; None where what comes again is always handled again."""


Deliver = Callable[[Sequence[Delivery]], None]


def delivering(feed: Feed, flow: Flow, *, backend: Backend, joining: TaskGroup) -> Deliver:
    """Return what a backend is to call with deliveries of the feed: it puts those into the flow that belong there.

    What cannot be done at once is done by a task of `joining`.
    """
    put = flow.put_all if feed.repeats is None else _unrepeated(feed.repeats, flow, joining)
    leaves = feed.leaves
    take = put if leaves is None else lambda deliveries: put([each for each in deliveries if not leaves(each)])
    if feed.unwrap is None:
        return take
    return _Unwrapping(feed, feed.unwrap, flow, backend, joining, put, take).deliver


class _Unwrapping(Struct):
    """Puts what comes of a feed into the flow as what the agent is to see."""

    feed: Feed
    unwrap: Callable[[Delivery, Message], Delivery]
    flow: Flow
    backend: Backend
    joining: TaskGroup
    put: Deliver
    take: Deliver

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            if self.feed.refuses is not None and self.feed.refuses(delivery):
                continue
            if lacks_body(delivery.message):
                self.joining.start_soon(self._deliver_whole, delivery)
            else:
                self._take_unwrapped(self.unwrap(delivery, delivery.message))

    async def _deliver_whole(self, delivery: Delivery) -> None:
        try:
            message = await self.backend.message(self.feed.stream.name, delivery.message.sequence)
        except BackendError:
            acknowledging.settle(delivery, Nak(UNREAD_SECONDS))
        else:
            self._take_unwrapped(self.unwrap(delivery, message or delivery.message))

    def _take_unwrapped(self, delivery: Delivery) -> None:
        """Take an unwrapped delivery, unless the flow holds the agent's own message of the same sequence.

        A flow holds one delivery of each sequence, and settling one of the two does not settle the other.
        """
        held = self.flow.delivery_of(delivery.message.sequence)
        if held is None or held.message == delivery.message:
            self.take([delivery])
        else:
            acknowledging.settle(delivery, Nak(SEQUENCE_HELD_SECONDS))


def _unrepeated(repeats: Repeats, flow: Flow, joining: TaskGroup) -> Deliver:
    """Return what puts deliveries into the flow and leaves out what was settled here before; see `repeats`."""

    async def settle() -> None:
        found, settlement = await repeats.judge()
        for delivery in found:
            if settlement is None:
                flow.put(delivery)
            else:
                acknowledging.settle(delivery, settlement)

    def put_new(deliveries: Sequence[Delivery]) -> None:
        if not repeats.may_include(deliveries):
            flow.put_all(deliveries)
            return
        for delivery in deliveries:
            if not repeats.includes(delivery):
                flow.put(delivery)
            elif repeats.add(delivery):
                joining.start_soon(settle)

    return put_new
