"""Delayed notifications of an event type that are due: read by one consumer for all workers, and published.

See `delayed_messages` for how it waits. A notification is published under the message id that it was given at first,
and acknowledged after that. Where a worker dies in between, another one does it again: within the duplicate window the
stream stores it once, and after that it is found there by its id. It is removed from where it waited too; whether that
succeeds changes nothing of this, and what was left is removed later.
"""

from __future__ import annotations

from contextlib import aclosing, suppress
from datetime import datetime
from typing import Literal

from msgspec import Struct

from aviso_workers.aviso import schema
from aviso_workers.aviso.codec import Message, lacks_body, store_time
from aviso_workers.backends import Backend, Delivery, Outgoing
from aviso_workers.backends.provisioning import Provisioner
from aviso_workers.clocks import SKEW
from aviso_workers.config import Config, streams
from aviso_workers.declare.retry import Backoff
from aviso_workers.declare.verdicts import Ack, Nak, Settlement, Term
from aviso_workers.engine import acknowledging
from aviso_workers.engine.flow import Flow
from aviso_workers.engine.shields import Shield
from aviso_workers.engine.subscription import Feed, Subscription, SubscriptionRun, consumer_spec
from aviso_workers.errors import BackendError, NotFoundError, UndecodableError
from aviso_workers.events import Events, NotRemoved, Overdue, Published, PublishOutcome, Unreadable
from aviso_workers.jetstream import answers
from aviso_workers.jetstream.answers import MESSAGE_ID
from aviso_workers.state import delayed_messages
from aviso_workers.state.delayed_messages import DURABLE, READER

ACK_WAIT_SECONDS = 5.0
CONCURRENCY = 16
PREFETCH = 64
TIMEOUT_SECONDS = 10.0
REMOVE_SECONDS = 600.0
"""How often it is looked whether there is something that was delivered and not removed."""
AGAIN = Backoff(first=1, factor=2, max=60)
"""When it is tried again to store what its stream does not take: without end, because it must not be lost."""


def subscription(
    event_type: str, backend: Backend, *, config: Config, own_streams: Provisioner, events: Events
) -> Subscription:
    """Return the subscription that brings what is due to the stream of an event type, whichever app has published it.

    The server must be new enough (`delayed_messages.is_served`).
    """
    flow = Flow(backend.clock, workers=CONCURRENCY, least=PREFETCH)
    declared = config.event_type(event_type)
    stream, base = streams.event_stream(event_type, declared, config).name, schema.topic_of(event_type, declared).base
    waits_in, due = delayed_messages.stream_of(stream), delayed_messages.due_subject(stream)
    delayed = _DelayedDelivery(backend, flow, event_type, stream=waits_in, due=due, base=base, events=events)
    consumer = consumer_spec(DURABLE, (due,), ACK_WAIT_SECONDS, max_ack_pending=-1)
    return Subscription(
        name=READER,
        feeds=[Feed(stream=delayed_messages.stream_spec(stream, config), consumer=consumer, provisioner=own_streams)],
        run=SubscriptionRun(
            handler=delayed,
            flow=flow,
            clock=backend.clock,
            ack_wait_seconds=ACK_WAIT_SECONDS,
            shield=Shield(backend.clock),
        ),
        beside=[delayed.keep_removing],
    )


class _DelayedDelivery(Struct, eq=False):
    """Handles what is due: publishes it where it belongs."""

    backend: Backend
    flow: Flow
    event_type: str
    stream: str
    """That in which it waits."""
    due: str
    """The subject of what is due there."""
    base: str
    events: Events

    async def work(self) -> None:
        """Handle one delivery after the other from the flow; see `subscription.Handler`."""
        while (delivery := await self.flow.take()) is not None:
            acknowledging.settle(delivery, await self._settlement(delivery))
            self.flow.finish(delivery)

    async def _settlement(self, delivery: Delivery) -> Settlement:
        try:
            return await self._handle(delivery)
        except UndecodableError as error:
            message = delivery.message
            foreign = answers.is_stored_by_reply(message)
            self.events.emit(
                Unreadable(
                    stream=self.stream,
                    sequence=message.sequence,
                    error=UndecodableError(answers.why_foreign(message)) if foreign else error,
                    reason="foreign" if foreign else "content",
                )
            )
            return Term("no notification that waited")

    async def _handle(self, delivery: Delivery) -> Settlement:
        """Return how one that is due is settled. Raises `UndecodableError`."""
        message = delivery.message
        if lacks_body(message):  # somebody has edited the consumer
            try:
                message = await self.backend.message(self.stream, message.sequence) or message
            except BackendError:
                return Nak(AGAIN.delay_seconds(delivery.num_delivered))
        outgoing = delayed_messages.original(message)
        if not outgoing.message.subject.startswith(f"{self.base}."):
            raise UndecodableError(f"{outgoing.message.subject} is not a subject of event type {self.event_type}")
        return await self._deliver(delivery, outgoing)

    async def keep_removing(self) -> None:
        """Remove, now and then, what was delivered and is still there. Never returns."""
        while True:
            with suppress(BackendError):  # the next time; what could not be removed was told of
                await self._remove_acked()
            await self.backend.clock.sleep(REMOVE_SECONDS)

    def _give_back(self, delivery: Delivery, outgoing: Outgoing, error: BackendError) -> Settlement:
        delay = AGAIN.delay_seconds(delivery.num_delivered)
        self.events.emit(
            Overdue(stream=outgoing.stream, message_id=outgoing.message_id, error=error, again_in_seconds=delay)
        )
        return Nak(delay)

    async def _deliver(self, delivery: Delivery, outgoing: Outgoing) -> Settlement:
        try:
            again = delivery.num_delivered > 1 and await self._is_stored(outgoing, due=store_time(delivery.message))
            outcome: PublishOutcome = "duplicate" if again else await self._publish(outgoing)
        except BackendError as error:
            return self._give_back(delivery, outgoing, error)
        try:
            await self.backend.delete_message(self.stream, delivery.message.sequence, overwrite=False)
        except NotFoundError:
            pass  # it was delivered before
        except BackendError as error:
            self.events.emit(NotRemoved(stream=self.stream, message_id=outgoing.message_id, error=error))
        self.events.emit(Published(event_type=self.event_type, outcome=outcome, attempts=delivery.num_delivered))
        return Ack()

    async def _publish(self, outgoing: Outgoing) -> Literal["stored", "duplicate"]:
        ack = await self.backend.publish(
            outgoing.message, message_id=outgoing.message_id, stream=outgoing.stream, timeout_seconds=TIMEOUT_SECONDS
        )
        return "duplicate" if ack.duplicate else "stored"

    async def _is_stored(self, outgoing: Outgoing, *, due: datetime) -> bool:
        """Return whether an earlier delivery has stored it.

        The stream may not remember message ids for as long as that.
        """
        subject, stream = outgoing.message.subject, outgoing.stream
        try:
            last = (await self.backend.stream_info(stream)).last_sequence
            reading = self.backend.read(stream, filter_subjects=(subject,), start_time=due - SKEW, last_sequence=last)
            async with aclosing(reading):
                return any([(each.headers or {}).get(MESSAGE_ID) == outgoing.message_id async for each in reading])
        except NotFoundError:
            return False

    async def _remove_acked(self) -> None:
        acked = (await self.backend.consumer_info(self.stream, DURABLE)).ack_floor
        if not acked:
            return
        reading = self.backend.read(self.stream, filter_subjects=(self.due,), last_sequence=acked)
        async with aclosing(reading):
            left = [message.sequence async for message in reading if _is_ours(message)]
        for sequence in left:
            with suppress(NotFoundError):  # another worker was faster
                await self.backend.delete_message(self.stream, sequence, overwrite=False)


def _is_ours(message: Message) -> bool:
    try:
        delayed_messages.original(message)
    except UndecodableError:
        return False  # it was delivered nowhere, and is kept for whoever looks for it
    return True
