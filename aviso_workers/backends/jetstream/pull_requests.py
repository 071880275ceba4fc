"""Pull requests on one consumer, and what comes back on their inbox.

Both ways of reading use it: `consumer` (durable, settled) and `readers` (ephemeral, without acks). It counts what
was asked for and has not come, because a server ends a request early for many reasons and says so by a status.
What a status means for the next request is decided here, as ADR-13 lists them; what to do about a consumer that is
lost is the reader's.

A consumer may serve some of its readers before others (ADR-42). Of a pinned one's, the server chooses one by an id,
which comes with every message, and the others wait. Nothing but its requests keeps that one pinned, neither one that
waits nor messages: so requests end soon there, and the next one follows.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import msgspec

from aviso_workers._fast import Arrival, Stored, stored
from aviso_workers.aviso.codec import Message
from aviso_workers.aviso.literals import SECOND
from aviso_workers.backends.jetstream.connection import NatsConnection
from aviso_workers.backends.jetstream.inboxes import Inbox
from aviso_workers.backends.jetstream.wire import Headers, status
from aviso_workers.errors import BackendError, NotFoundError, RefusedError, UnansweredError, UnavailableError
from aviso_workers.jetstream.specs import PINNED, PRIORITIZED

EXPIRES_SECONDS = 30
RENEWALS = 4
"""How many requests a pinned reader makes in the time after which it would be unpinned: some may get lost."""
PINNED_HEARTBEAT_SECONDS = 1.0
ELECTION_SECONDS = 3.5
"""Less than the four seconds that followers wait, at least, before they elect another leader of a consumer."""
HEARTBEAT_SECONDS = 5.0
MAX_BYTES = 16 * 1024 * 1024
"""The most bytes of one request. A server cuts off who leaves 64 MiB unread, as a loop does that an author blocks."""
UNKNOWN_SECONDS = 1.0
"""For so long the server that we are connected to may say that nobody answers for a consumer which another server of
its cluster has just created."""
ASK_AGAIN_SECONDS = 0.05
TOO_LARGE = "Message Size Exceeds MaxBytes"
"""The reason of a 409 for a next message that is larger than the bytes that are left of the request. If nothing was
delivered for the request yet, the message is larger than any request may be."""
LEADER_GONE = ("Leadership Change", "Server Shutdown")
ASK_AGAIN = (*LEADER_GONE, "Batch Completed", TOO_LARGE)
"""Reasons of a 409 that only end the request."""
FROM_STREAM = b"$JS.ACK."
"""How the reply subject of a stored message begins."""


class PullSubscription:
    """Asks one consumer for messages and hears what it answers."""

    def __init__(
        self,
        connection: NatsConnection,
        *,
        stream: str,
        consumer: str,
        on_messages: Callable[[list[Stored]], None],
        on_change: Callable[[], None],
    ) -> None:
        self.outstanding = 0
        """Messages asked for that have not come yet."""
        self.error: BackendError | None = None
        """Why no further request can succeed, unless something is done about it."""
        self._connection = connection
        self._subject = f"CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._name = f"consumer {consumer} of stream {stream}"
        self._on_messages = on_messages
        self._on_change = on_change
        self._closing = anyio.Lock()
        self._now = asyncio.get_running_loop().time
        self._last_received = self._opened_at = self._now()
        self.asked_at = self._now()
        """When the last request left."""
        self.pin = ""
        """The id by which this reader is served before all others; empty while it is not, or that is not known."""
        self._answered = False
        """Whether anything has come since `forget` was last called."""
        self._group: dict[str, Any] = {}
        """The fields by which a request names the priority group, and the reader's priority in it."""
        self._may_be_pinned = False
        self._received_at = self._now()
        self._heartbeat_seconds = HEARTBEAT_SECONDS
        self._inbox = Inbox(self._on_arrivals, ending="")
        self._consumer = f"{stream}.{consumer}.".encode()
        self.settled_by = connection.settled_below + self._consumer
        """How the subjects begin by which the consumer's messages are settled, as far as that is known; what else comes
        is a status, or none of ours."""
        self._most_messages = sys.maxsize
        self._most_bytes = max(MAX_BYTES, 2 * connection.nc.max_payload)
        self._expires_ns = EXPIRES_SECONDS * SECOND

    async def open(self, *, limits: Mapping[str, Any], priority: int = 0) -> None:
        """Subscribe, so that requests can be sent. `limits` is the consumer's configuration, which may limit them."""
        self._most_messages = limits.get("max_batch") or self._most_messages
        self._most_bytes = min(self._most_bytes, limits.get("max_bytes") or self._most_bytes)
        self._expires_ns = min(self._expires_ns, limits.get("max_expires") or self._expires_ns)
        if groups := limits.get("priority_groups"):
            self._group = {"group": groups[0]}
        if limits.get("priority_policy") == PRIORITIZED:
            self._group["priority"] = priority
        self._may_be_pinned = limits.get("priority_policy") == PINNED
        if self._may_be_pinned:
            self._expires_ns = min(self._expires_ns, limits["priority_timeout"] // RENEWALS)
            self._heartbeat_seconds = PINNED_HEARTBEAT_SECONDS
        await self._connection.open_inbox(self._inbox)
        self._connection.on_reconnect.add(self._on_reconnect)

    async def close(self) -> None:
        """End the interest; return when nothing more can arrive. What is on its way still does."""
        self._connection.on_reconnect.discard(self._on_reconnect)
        async with self._closing:
            await self._connection.close_inbox(self._inbox)

    def ask(self, batch: int) -> None:
        """Ask for `batch` messages, as they come within half a minute."""
        batch = min(batch, self._most_messages)
        request: dict[str, Any] = {
            "batch": batch,
            "max_bytes": self._most_bytes,
            "expires": self._expires_ns,
            "idle_heartbeat": min(int(self._heartbeat_seconds * SECOND), self._expires_ns // 3),
            **self._group,
        }
        if self.pin:
            request["id"] = self.pin
        self.outstanding += batch
        self._last_received = self.asked_at = self._now()
        self._connection.post(self._subject, msgspec.json.encode(request), reply=self._inbox.subject)

    async def check_allowed(self) -> None:
        """Raise `RefusedError` where the server denied us what was asked, `UnavailableError` where it is silent."""
        if not await self._connection.answers():
            raise UnavailableError(f"{self._name}: no answer in time")
        self.require_allowed()

    def require_allowed(self) -> None:
        """Raise `DeniedError` where the server has denied us what was asked, as far as it has said so by now."""
        self._connection.check_allowed(f"{self._connection.api_prefix}.{self._subject}", since=self._opened_at)

    def pinned_as(self, pin: str) -> bool:
        """Return whether it has been pinned by this id all the time: the consumer may have no other leader meanwhile,
        for a new one knows of no pin, and hands out at once what another one had handed out.
        """
        return self.pin == pin and self._now() - self._received_at < ELECTION_SECONDS

    def silent(self) -> bool:
        """Return whether nothing came for two heartbeats: the server may no longer know of what we asked for."""
        return self._now() - self._last_received > 2 * HEARTBEAT_SECONDS

    def forget(self) -> None:
        """Give up the outstanding requests. Where nothing has come since this was last done, nobody answers: set
        `error`.
        """
        if self.outstanding and not self._answered:
            self.error = UnavailableError(f"{self._name}: requests for messages are not answered")
        self.outstanding = 0
        self._answered = False
        self._last_received = self._now()

    def _on_arrivals(self, arrivals: Sequence[Arrival]) -> None:
        if self._may_be_pinned and len(arrivals) > 1:  # whose pin it is may change from one to the next
            for arrival in arrivals:
                self._on_arrivals([arrival])
            return
        self._last_received = self._received_at = self._now()
        self._answered = True
        messages = stored(arrivals, self.settled_by)
        if not messages and any(self._learns_beginning(reply) for _, reply, _, _ in arrivals):
            messages = stored(arrivals, self.settled_by)
        if messages:
            self.outstanding = max(0, self.outstanding - len(messages))
            if self._may_be_pinned and (headers := messages[0][2]):
                self.pin = Headers(headers).get("Nats-Pin-Id", "")
            self._on_messages(messages)
        if len(messages) < len(arrivals):
            known = {reply for _, reply, *_ in messages}
            for _, reply, headers, data in arrivals:
                if reply in known:
                    continue
                if reply.startswith(FROM_STREAM) or not headers:
                    self._connection.tell_foreign(f"pull from {self._name}", data)
                else:
                    self._on_status(headers, data)

    def _learns_beginning(self, reply: bytes) -> bool:
        """Return whether it is the reply subject of a message of the consumer, which begins otherwise than before. Then
        the others begin as this one. In its longer form it names a domain and an account first; a server may be set to
        use it (`js_ack_fc_v2`), or not any more.
        """
        words = reply.split(b".")
        if words[:2] != [b"$JS", b"ACK"]:
            return False
        for end in (6, 4):
            below = b".".join(words[: end - 2]) + b"."
            if len(words) > end + 3 and reply.startswith(below + self._consumer):
                self._connection.settled_below, self.settled_by = below, below + self._consumer
                return True
        return False

    def _on_status(self, block: bytes, data: bytes) -> None:
        code, description = status(block)
        headers = Headers(block)
        if code == "100":
            return
        if not code:
            self._connection.tell_foreign(f"pull from {self._name}", data)
            return
        # A server that ends a request early says how much of it was left; one that rejects it, nothing.
        self.outstanding = max(0, self.outstanding - int(headers.get("Nats-Pending-Messages", self.outstanding)))
        match code:
            case "423":
                self.pin = ""  # it is another reader's
            case "409" if description.startswith(LEADER_GONE):
                self.pin = ""
            case "409" if not description.startswith(ASK_AGAIN) or (
                description == TOO_LARGE and headers.get("Nats-Pending-Bytes") == str(self._most_bytes)
            ):
                self.error = self._end_of_pulls(description)
            case "404" | "408" | "409":
                pass  # the request has ended, which says nothing of the stream
            case "503" if self._now() - self._opened_at < UNKNOWN_SECONDS:
                asyncio.get_running_loop().call_later(ASK_AGAIN_SECONDS, self._on_change)
                return
            case "503":
                self.error = UnansweredError(
                    f"{self._name} does not answer CONSUMER.MSG.NEXT; is it imported from its account?"
                )
            case _:
                self.error = RefusedError(f"read {self._name}: {code} {description}")
        self._on_change()

    def _end_of_pulls(self, description: str) -> BackendError:
        if "Consumer Deleted" in description:
            return NotFoundError(f"{self._name} was deleted")
        if description == TOO_LARGE:
            return RefusedError(
                f"{self._name}: its next message is larger than the {self._most_bytes} bytes that its max_bytes "
                "lets a request have; raise it"
            )
        # Such as too many requests waiting, or larger ones than the consumer was changed to allow.
        return UnavailableError(f"{self._name}: {description}")

    def _on_reconnect(self) -> None:
        self.outstanding = 0
        self.pin = ""
        self._last_received = -math.inf
        self._on_change()


def message_of(pulled: Stored) -> Message:
    subject, _, headers, data, _, sequence, _, timestamp_ns, _ = pulled
    return Message(
        subject=subject,
        data=data,
        headers=Headers(headers) if headers else None,
        sequence=sequence,
        timestamp_ns=timestamp_ns,
    )
