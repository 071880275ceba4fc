"""Deliveries that come again although this process has settled them, because the settlement did not arrive in time.

An acknowledgement is lost with its connection, or leaves later than `ack_wait` where a handler has stopped the event
loop. The server delivers the notification again, and handling it again would be a repeat, and with `order_by` one
behind its successors. So what was settled lately is remembered, and what comes again is acknowledged again.
`acknowledging` notes what it settles; `subscription` asks here about each delivery of the agent's stream.

An operator who takes a consumer back (`reset`), or deletes it, wants everything handled again. Of such a consumer
everything comes as for the first time, but another worker may have been given it before this one. So before anything
is acknowledged again, the server is asked whether the consumer is still the one that was known; where it is another
one, everything is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from aviso_workers.backends import Backend, ConsumerInfo, Delivery
from aviso_workers.declare.verdicts import Ack, Nak, Settlement
from aviso_workers.errors import BackendError
from aviso_workers.jetstream import identities
from aviso_workers.jetstream.identities import Identity

MAX_REMEMBERED = 20_000
"""More than a worker settles between the moment at which its connection is lost and the one at which it notices."""
AGAIN_SECONDS = 1.0
"""When what came again is delivered once more where the server does not say whether the consumer is the same."""


class Repeats:
    """The notifications that one worker has settled lately of an agent's stream."""

    def __init__(self, backend: Backend, *, stream: str, consumer: str) -> None:
        self._backend = backend
        self._stream = stream
        self._consumer = consumer
        self._newer: dict[int, int] = {}
        """The store time by sequence: those of a stream that is deleted and recreated differ."""
        self._older: dict[int, int] = {}
        self._known: Identity | None = None
        """Which consumer it was that delivered them."""
        self._found: list[Delivery] = []

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)

    def note(self, delivery: Delivery) -> None:
        """Remember a delivery that is settled for good."""
        if not delivery.can_be_read_again:
            return  # a dead letter that was handed back, which has the sequence of its original
        message, newer = delivery.message, self._newer
        newer[message.sequence] = message.timestamp_ns
        if len(newer) >= MAX_REMEMBERED // 2:
            self._older, self._newer = newer, {}

    def may_include(self, deliveries: Sequence[Delivery]) -> bool:
        """Return whether `includes` has to be asked, because the sequence of one of them is remembered. Nearly all are
        new.
        """
        sequences = [delivery.message.sequence for delivery in deliveries]
        return not (self._newer.keys().isdisjoint(sequences) and self._older.keys().isdisjoint(sequences))

    def includes(self, delivery: Delivery) -> bool:
        """Return whether this process has settled the delivery before. Where one that it has settled comes as for the
        first time, its consumer was taken back: then everything is forgotten.
        """
        sequence, time = delivery.message.sequence, delivery.message.timestamp_ns
        if self._newer.get(sequence) != time and self._older.get(sequence) != time:
            return False
        if delivery.num_delivered == 1:
            self._forget()
            return False
        return True

    def opened(self, consumer: ConsumerInfo) -> bool:
        """Note the consumer that is read from now on, and return whether it is the known one. If not, everything is
        forgotten.
        """
        found, known = identities.of(consumer), self._known
        same = known is not None and found.goes_on(known) and found.deliveries >= known.deliveries
        if not same:
            self._forget()
        self._known = found
        return same

    def add(self, delivery: Delivery) -> bool:
        """Keep a delivery that `includes` has found until `judge`, and return whether the caller has to call that."""
        self._found.append(delivery)
        return len(self._found) == 1

    async def judge(self) -> tuple[list[Delivery], Settlement | None]:
        """Return the deliveries that were found, and their settlement; None where they are to be handled, because the
        consumer is another one.
        """
        settlement: Settlement | None = Nak(AGAIN_SECONDS)
        with suppress(BackendError):
            info = await self._backend.consumer_info(self._stream, self._consumer)
            settlement = Ack() if self.opened(info) else None
        found, self._found = self._found, []
        return found, settlement

    def _forget(self) -> None:
        self._newer, self._older = {}, {}
