"""Pull requests on one consumer, and what comes back on their inbox.

Both ways of reading use it: `consuming` (durable, settled) and `reading` (ephemeral, without acks). It counts what
was asked for and has not come, because a server ends a request early for many reasons and says so by a status.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import msgspec
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from aviso_workers.backends.jetstream import faults
from aviso_workers.backends.jetstream.connection import Connection
from aviso_workers.codec import Message
from aviso_workers.errors import BackendError, NotFoundError, RefusedError, UnavailableError

__all__ = ["HEARTBEAT_SECONDS", "PullSubscription", "Received"]

EXPIRES_SECONDS = 30
HEARTBEAT_SECONDS = 5.0
SECOND = 1_000_000_000


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """A message as it came, with what its reply subject says."""

    message: Message
    reply: str
    num_delivered: int
    num_pending: int


class PullSubscription:
    """Asks one consumer for messages and hears what it answers."""

    def __init__(
        self,
        connection: Connection,
        *,
        stream: str,
        consumer: str,
        on_message: Callable[[Received], None],
        on_change: Callable[[], None],
    ) -> None:
        self.outstanding = 0
        """Messages asked for that have not come yet."""
        self.exhausted = False
        """Whether a request without waiting found nothing more."""
        self.error: BackendError | None = None
        """Why no further request can succeed."""
        self._connection = connection
        self._subject = f"CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._name = f"consumer {consumer} of stream {stream}"
        self._on_message = on_message
        self._on_change = on_change
        self._subscription: Subscription | None = None
        self._last_heard = -math.inf
        self._inbox = ""

    async def open(self) -> None:
        with faults.translated(f"read {self._name}"):
            self._inbox = self._connection.nc.new_inbox()
            self._subscription = await self._connection.nc.subscribe(self._inbox, cb=self._on_received)
        self._connection.on_reconnect.add(self._on_reconnect)

    async def close(self) -> None:
        """End the interest; return when nothing more can arrive. What is on its way still does."""
        self._connection.on_reconnect.discard(self._on_reconnect)
        if self._subscription is None:
            return
        with suppress(NatsError, OSError):  # where the connection is gone, the interest is gone with it
            await self._subscription.drain()  # type: ignore[no-untyped-call]
        self._subscription = None

    async def ask(self, batch: int, *, wait: bool) -> None:
        """Ask for `batch` messages: as they come within half a minute, or (not `wait`) those that are there."""
        request: dict[str, Any] = {"batch": batch}
        if wait:
            request |= {
                "expires": EXPIRES_SECONDS * SECOND,
                "idle_heartbeat": int(HEARTBEAT_SECONDS * SECOND),
            }
        else:
            request["no_wait"] = True
        self.outstanding += batch
        self._last_heard = anyio.current_time()
        await self._connection.post(self._subject, msgspec.json.encode(request), reply=self._inbox)

    def silent(self) -> bool:
        """Whether two heartbeats were missed: the server no longer knows of what we asked for."""
        return self.outstanding > 0 and anyio.current_time() - self._last_heard > 2 * HEARTBEAT_SECONDS

    def forget(self) -> None:
        """Take what is outstanding for lost."""
        self.outstanding = 0

    async def _on_received(self, message: Msg) -> None:
        self._last_heard = anyio.current_time()
        if message.reply and message.reply.startswith("$JS.ACK."):
            self.outstanding = max(0, self.outstanding - 1)
            self._on_message(_received(message))
            return
        self._on_status(message.headers or {})

    def _on_status(self, headers: dict[str, str]) -> None:
        status, description = headers.get("Status", ""), headers.get("Description", "")
        if status == "100":
            return
        # A server that ends a request early says how much of it was left; one that rejects it, nothing.
        self.outstanding = max(0, self.outstanding - int(headers.get("Nats-Pending-Messages", self.outstanding)))
        match status:
            case "404" | "408":
                self.exhausted = True
            case "409" if "Consumer Deleted" in description:
                self.error = NotFoundError(f"{self._name} was deleted")
            case "409":
                pass  # leadership change, batch completed, server shutdown: ask again
            case "503":
                self.error = UnavailableError(f"{self._name} does not answer")
            case _:
                self.error = RefusedError(f"read {self._name}: {status} {description}")
        self._on_change()

    def _on_reconnect(self) -> None:
        self.forget()
        self._on_change()


def _received(message: Msg) -> Received:
    # $JS.ACK.<stream>.<consumer>.<delivered>.<sequence>.<consumer sequence>.<time>.<pending>, or, newer,
    # $JS.ACK.<domain>.<account>.<stream>...<pending>[.<token>]: count from the side that stays the same.
    tokens = message.reply.split(".")
    first = 4 if len(tokens) == 9 else 6
    delivered, sequence, _, timestamp_ns, pending = tokens[first : first + 5]
    return Received(
        message=Message(
            subject=message.subject,
            data=message.data,
            headers=message.headers,
            sequence=int(sequence),
            timestamp_ns=int(timestamp_ns),
        ),
        reply=message.reply,
        num_delivered=int(delivered),
        num_pending=int(pending),
    )
