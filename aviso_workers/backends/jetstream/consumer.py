"""Reading a durable consumer and settling what it delivers.

One task per consumer keeps it asked for as much as there is capacity for: a new request goes out when it would ask for
at least as much as is still outstanding, so that there is always one on the server and never a request per message.
When it hears nothing for two heartbeats, or after a reconnect, it looks whether the consumer is still the one that it
opened. Settlements leave through one outbox per connection, in the order in which they were made.

A consumer or stream that was deleted and recreated counts from 1 again: to settle what came from the old one would
settle another message. So such settlements are dropped.

A server takes an acknowledgement from whoever sends it, also from a reader that it has unpinned. Where readers are
pinned, one settles only what nobody else can have been given: it came for a request that is younger than `ack_wait`,
or the server has confirmed an `in progress` that is, without a gap; and the reader has been pinned all the time. That
is judged by this side's clock when it settles, so a process that was paused, or a network that was silent, settles
nothing late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import ClassVar, NamedTuple

import anyio

from aviso_workers._fast import Arrival, Stored
from aviso_workers.aviso.codec import Message
from aviso_workers.aviso.literals import SECOND
from aviso_workers.backends import Delivery, Noted
from aviso_workers.backends.jetstream.connection import NatsConnection
from aviso_workers.backends.jetstream.inboxes import Inbox
from aviso_workers.backends.jetstream.management import JetStreamManagement
from aviso_workers.backends.jetstream.pull_requests import HEARTBEAT_SECONDS, PullSubscription, message_of
from aviso_workers.backends.jetstream.wire import Headers
from aviso_workers.errors import BackendError, NotFoundError, UnavailableError
from aviso_workers.jetstream import identities, metadata
from aviso_workers.jetstream.identities import Identity
from aviso_workers.jetstream.specs import GROUP, PINNED

CONFIRM_SECONDS = 0.5
"""The time after which an unconfirmed settlement is sent again: it is lost while the consumer has no leader."""
ACK = b"+ACK"
IN_PROGRESS = b"+WPI"


class _Unconfirmed(NamedTuple):
    """A settlement that is to be confirmed and is not yet."""

    reply: bytes
    body: bytes
    sent_at: float
    held: Callable[[], bool]
    """Whether it may be sent again."""


class Outbox:
    """Sends settlements, and sends those again that are to be confirmed and are not. `open` it before use."""

    def __init__(self, connection: NatsConnection) -> None:
        self._connection = connection
        self._unconfirmed: dict[bytes, _Unconfirmed] = {}
        """By the subject on which the confirmation comes."""
        self._confirmed = anyio.Event()
        self._sent = 0
        self._arrived = 0
        """How many of those that were sent the server has for certain."""
        self._in_progress: dict[bytes, Callable[[], None]] = {}
        """By the same, the function to call when an `in progress` is confirmed."""
        self._inbox: Inbox

    async def open(self) -> None:
        self._inbox = await self._connection.open_inbox(Inbox(self._on_confirmed))

    def put(
        self, reply: bytes, body: bytes, *, confirmed: bool = False, held: Callable[[], bool] = lambda: True
    ) -> None:
        """Send a settlement; with `confirmed`, `flush` waits until the consumer has taken it, and sends it again.

        One that gets lost does no harm: the server delivers again after ack_wait.
        """
        answer = b""
        if confirmed:
            answer = next(self._inbox.replies)
            self._unconfirmed[answer] = _Unconfirmed(reply, body, asyncio.get_running_loop().time(), held)
        self._sent += 1
        self._connection.wire.send(reply, body, reply=answer)

    def repeat(self) -> None:
        """Send again what was not confirmed in time, and forget what is not `held` any more."""
        now = asyncio.get_running_loop().time()
        for answer, settlement in tuple(self._unconfirmed.items()):
            if not settlement.held():
                del self._unconfirmed[answer]
            elif settlement.sent_at <= now - CONFIRM_SECONDS:
                if not answer.startswith(self._inbox.subject.encode()):  # nobody listens there any more
                    del self._unconfirmed[answer]
                    answer = next(self._inbox.replies)
                self._unconfirmed[answer] = settlement._replace(sent_at=now)
                self._connection.wire.send(settlement.reply, settlement.body, reply=answer)

    def send_in_progress(self, reply: bytes, on_confirmed: Callable[[], None], *, before: bytes) -> bytes:
        """Send `in progress`; return the subject of its confirmation. That of the one `before` counts no more."""
        self._in_progress.pop(before, None)
        answer = next(self._inbox.replies)
        self._in_progress[answer] = on_confirmed
        self._connection.wire.send(reply, IN_PROGRESS, reply=answer)
        return answer

    async def flush(self) -> None:
        """Return when the server has what was put so far, and has confirmed what is to be confirmed.

        Where nothing was put since the last time there is nothing to ask for, of a server that may be gone.
        """
        if (sent := self._sent + self._connection.wire.acks) > self._arrived:
            await self._connection.flush()
            self._arrived = max(self._arrived, sent)
        while self._unconfirmed:
            self._confirmed = anyio.Event()
            with anyio.move_on_after(CONFIRM_SECONDS):
                await self._confirmed.wait()
                return
            self.repeat()

    def _on_confirmed(self, arrivals: Sequence[Arrival]) -> None:
        for subject, _, headers, data in arrivals:
            if headers:  # 503: the consumer has no leader just now
                self._in_progress.pop(subject, None)
                continue
            if data:  # a confirmation is empty
                self._connection.tell_foreign("confirm a settlement", data)
                continue
            if on_confirmed := self._in_progress.pop(subject, None):
                on_confirmed()
            self._unconfirmed.pop(subject, None)
        if not self._unconfirmed:
            self._confirmed.set()


class JetStreamDelivery(Noted, eq=False):
    """One message of a durable consumer."""

    message: Message
    num_delivered: int
    num_pending: int
    reply: bytes
    """The subject by which it is settled."""
    consumer: PullConsumer
    can_be_read_again: ClassVar[bool] = True
    held: ClassVar[bool] = True

    def ack(self) -> None:
        self.consumer.ack(self.reply)

    def nak(self, *, delay_seconds: float = 0.0) -> None:
        self.consumer.settle(self.reply, _nak(delay_seconds))

    def redeliver(self) -> None:
        self.nak()

    def term(self, reason: str) -> None:
        self.consumer.settle(self.reply, b"+TERM " + reason.encode())

    def in_progress(self) -> None:
        self.consumer.settle(self.reply, IN_PROGRESS)


class PinnedDelivery(Noted, eq=False):
    """One of a pinned consumer, ours for `hold_seconds` after the last `in progress` that was confirmed in time."""

    message: Message
    num_delivered: int
    num_pending: int
    _reply: bytes
    _settle: Callable[[bytes, bytes, Callable[[], bool]], None]
    _outbox: Outbox
    _now: Callable[[], float]
    _pinned: Callable[[], bool]
    _hold_seconds: float
    _until: float
    _last_in_progress: bytes = b""
    can_be_read_again: ClassVar[bool] = True

    @property
    def held(self) -> bool:
        return self._now() < self._until and self._pinned()

    def ack(self) -> None:
        self._settle_if_held(ACK)

    def nak(self, *, delay_seconds: float = 0.0) -> None:
        self._settle_if_held(_nak(delay_seconds))

    def redeliver(self) -> None:
        self._settle(self._reply, _nak(0), lambda: False)  # not sent again: it may be delivered by then

    def term(self, reason: str) -> None:
        self._settle_if_held(b"+TERM " + reason.encode())

    def in_progress(self) -> None:
        sent = self._now()

        def confirmed() -> None:
            if self.held:
                self._until = sent + self._hold_seconds

        self._last_in_progress = self._outbox.send_in_progress(self._reply, confirmed, before=self._last_in_progress)

    def _settle_if_held(self, body: bytes) -> None:
        if self.held:
            self._settle(self._reply, body, lambda: self.held)


def _nak(delay_seconds: float) -> bytes:
    return b'-NAK {"delay":%d}' % int(delay_seconds * SECOND) if delay_seconds > 0 else b"-NAK"


class PullConsumer:
    """An open reader of a durable consumer; see `backends.Consumer`.

    `made` has the identity of each consumer of the connection, as any of its readers last saw it.
    """

    def __init__(
        self,
        connection: NatsConnection,
        outbox: Outbox,
        *,
        stream: str,
        consumer: str,
        made: dict[tuple[str, str], Identity],
        deliver: Callable[[Sequence[Delivery]], None],
        capacity: Callable[[], int],
        priority: int,
    ) -> None:
        self._connection = connection
        self._wire = connection.wire
        self._management = JetStreamManagement(connection)
        self._outbox = outbox
        self._consumer = (stream, consumer)
        self._name = f"consumer {consumer} of stream {stream}"
        self._opened_at = 0.0
        self._made = made
        self._opened: Identity | None = None
        self._deliver = deliver
        self._capacity = capacity
        self._priority = priority
        self._hold_seconds: float | None = None
        """For how long a delivery is ours alone; None where readers are not pinned."""
        self._stopped = False
        self._left_as = ""
        """The id by which the reader was pinned when it stopped; after that, it hears of no other."""
        self._changed = anyio.Event()
        self._ended = anyio.Event()
        self._error: BackendError = UnavailableError(f"{self._name} was closed")
        self._pulls = PullSubscription(
            connection,
            stream=stream,
            consumer=consumer,
            on_messages=self._on_messages,
            on_change=self._change,
        )

    async def open(self) -> None:
        """Begin to pull messages. Raises `BackendError`, also where the server does not allow a pull request."""
        found = await self._management.consumer_info(*self._consumer)
        self._opened = self._made[self._consumer] = identities.of(found)
        if found.config.priority_policy == PINNED:
            # The ack_wait may become as short as that while this is open, when the workers of other versions are gone.
            self._hold_seconds = min(each.ack_wait for each in metadata.noted_versions(found.config)) / SECOND
        await self._pulls.open(limits=found.config, priority=self._priority)
        await self._check_settling()
        self._ask()
        await self._pulls.check_allowed()

    async def _check_settling(self) -> None:
        """Raise `RefusedError` where the server denies us to settle. It says so beside the settlement, and nobody could
        tell what was handled from what was not: so that is tried before anything is asked for, with an `in progress`
        for no message.
        """
        self._opened_at = asyncio.get_running_loop().time()
        subject = f"{self._pulls.settled_by.decode()}0.0.0.0.0"
        self._connection.wire.send(subject.encode(), IN_PROGRESS)
        if not await self._connection.answers():
            raise UnavailableError(f"{self._name}: no answer in time")
        self._connection.check_allowed(subject, since=self._opened_at)

    async def run(self) -> None:
        """Keep the consumer asked, until it is lost or this is cancelled."""
        try:
            while True:
                with anyio.move_on_after(HEARTBEAT_SECONDS):
                    await self._changed.wait()
                self._changed = anyio.Event()
                if self._pulls.silent() and self._connection.ready:
                    await self._check()
                if self._pulls.error:
                    raise self._pulls.error
                self._connection.check_allowed_below(self._pulls.settled_by.decode(), since=self._opened_at)
                self._outbox.repeat()
                self._ask()
        except NotFoundError as error:
            if self._same():  # else another reader has opened the one that was created in its place
                del self._made[self._consumer]
            self._error = error
        except BackendError as error:
            self._error = error
        finally:
            self._ended.set()

    @property
    def pinned(self) -> bool:
        return bool(self._pulls.pin)

    def refill(self) -> None:
        self._ask()

    async def lost(self) -> None:
        await self._ended.wait()
        raise self._error

    async def reached(self) -> None:
        if not await self._connection.answers():
            raise UnavailableError(f"{self._name}: no answer in time")

    async def settled(self) -> None:
        await self._outbox.flush()

    async def stop(self) -> None:
        if not self._stopped:
            self._stopped, self._left_as = True, self._pulls.pin
        await self.close()

    async def close(self) -> None:
        await self._pulls.close()
        if self.pinned:
            self._pulls.pin = ""
            with suppress(BackendError):  # else it notices after a while that nobody asks
                await self._management.unpin_consumer(*self._consumer, group=GROUP)

    def _ask(self) -> None:
        """Ask for what there is capacity for, unless that would only be a small request."""
        while not self._stopped and self._connection.ready:
            outstanding = self._pulls.outstanding
            wanted = self._capacity() - outstanding
            if wanted <= 0 or wanted < outstanding:
                return
            if outstanding and self._hold_seconds is not None:
                return  # one request at a time, so that it is known for which one something came
            self._pulls.ask(wanted)

    async def _check(self) -> None:
        """Make sure that the consumer exists and was not recreated, and give up the requests that are not answered.
        Raises `NotFoundError`.
        """
        found = await self._management.consumer_info(*self._consumer)
        if not identities.of(found).is_same(self._opened):
            raise NotFoundError(f"{self._name} was deleted and recreated")
        if self._pulls.silent():  # a loop that was stuck finds by now what had come
            self._pulls.forget()

    def _on_messages(self, messages: list[Stored]) -> None:
        if self._hold_seconds is None:
            self._deliver(
                [
                    JetStreamDelivery(
                        Message(
                            subject=subject,
                            data=data,
                            headers=Headers(headers) if headers else None,
                            sequence=sequence,
                            timestamp_ns=timestamp_ns,
                        ),
                        num_delivered,
                        num_pending,
                        reply,
                        self,
                    )
                    for subject, reply, headers, data, num_delivered, sequence, _, timestamp_ns, num_pending in messages
                ]
            )
            return
        for each in messages:
            self._deliver_pinned(each, hold_seconds=self._hold_seconds)

    def _deliver_pinned(self, pulled: Stored, *, hold_seconds: float) -> None:
        _, reply, _, _, num_delivered, _, _, _, num_pending = pulled
        pin = self._pulls.pin
        delivery = PinnedDelivery(
            message_of(pulled),
            num_delivered,
            num_pending,
            reply,
            self._settle_pinned,
            self._outbox,
            asyncio.get_running_loop().time,
            lambda: self._left_as == pin if self._stopped else self._pulls.pinned_as(pin),
            hold_seconds,
            self._pulls.asked_at + hold_seconds,
        )
        if delivery.held:  # else it has waited for a process that was paused
            self._deliver([delivery])

    def ack(self, reply: bytes) -> None:
        """Acknowledge a message of the consumer."""
        if self._stopped or self._made.get(self._consumer) is not self._opened:
            self.settle(reply, ACK)
        else:
            self._wire.ack(reply)

    def settle(self, reply: bytes, body: bytes) -> None:
        """Settle a message of the consumer, unless this is another one by now."""
        if self._same():
            # Who leaves must know that it arrived: nobody would repeat it.
            self._outbox.put(reply, body, confirmed=self._stopped and body != IN_PROGRESS)

    def _settle_pinned(self, reply: bytes, body: bytes, held: Callable[[], bool]) -> None:
        if self._same():
            # The next message waits for this settlement, which is lost while the consumer has no leader.
            self._outbox.put(reply, body, confirmed=True, held=lambda: held() and self._same())

    def _same(self) -> bool:
        """Return whether the consumer is the one that was opened."""
        made = self._made.get(self._consumer)
        return made is not None and made.is_same(self._opened)

    def _change(self) -> None:
        self._changed.set()
