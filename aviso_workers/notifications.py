"""What authors receive and what publishers get back.

A notification is an identifier and a payload, with the sequence and the time at which its stream stored it.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct, field

from aviso_workers import spatial
from aviso_workers.errors import DeclarationError
from aviso_workers.verdicts import Reject, Retry

__all__ = ["Batch", "Batching", "Notification", "Notify", "Receipt", "Stream"]

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class Notification(Struct, Generic[T], frozen=True, kw_only=True):
    """One notification as an agent, a watch or a replay sees it.

    Only `event_type`, `identifier` and `payload` are needed to make one by hand, as a unit test does.
    """

    event_type: str
    identifier: Mapping[str, str]
    """Canonical values by field name: those in the event type's `key_order`, and its spatial field if any."""
    payload: T
    """The payload, as the type that the agent asked for, or as the plain JSON value."""
    sequence: int = 0
    """The stream sequence: grows with every notification stored, may have holes."""
    time: datetime = datetime(1970, 1, 1, tzinfo=UTC)
    """When the stream stored it, UTC."""
    topic: str = ""
    """The NATS subject it was stored under, as on the wire."""
    headers: Mapping[str, str] = field(default_factory=dict)
    num_delivered: int = 1
    """How often it was handed to this agent, this time included. Crashes and deploys count as well."""

    @property
    def id(self) -> str:
        """`<event type>@<sequence>`, the id of its CloudEvent."""
        return f"{self.event_type}@{self.sequence}"

    def cloud_event(self, base_url: str, *, spatial_arrays: bool = False) -> dict[str, Any]:
        """The CloudEvent 1.0 that an aviso-server with this `application.base_url` sends for it.

        With `spatial_arrays`, polygons and point clouds are arrays of [latitude, longitude], as an aviso-server from
        0.10 on has them; else they are text, as before.
        """
        base_url = base_url.rstrip("/")
        identifier = spatial.with_arrays(self.identifier) if spatial_arrays else dict(self.identifier)
        return {
            "specversion": "1.0",
            "id": self.id,
            "source": base_url,
            "type": f"int.ecmwf.aviso.{self.event_type}",
            "time": self.time.isoformat().replace("+00:00", "Z"),
            "datacontenttype": "application/json",
            "dataschema": f"{base_url}/schema/{self.event_type}",
            "data": {"identifier": identifier, "payload": self.payload},
        }


class Batching(Struct, frozen=True):
    """How a batch agent's notifications are collected: `size` of them, or what came `within` seconds of the first.

    Raises `DeclarationError` for numbers that make no sense.
    """

    size: int = 100
    within: float = 1.0

    def __post_init__(self) -> None:
        if not self.size >= 1:
            raise DeclarationError(f"Batching: size must be 1 or more, found {self.size}")
        if not 0 <= self.within < math.inf:
            raise DeclarationError(f"Batching: within must be a number of seconds from 0, found {self.within}")


class Batch(Generic[T]):
    """Notifications that are handled together.

    When the function returns, all are done but those that it retried or rejected. When it raises, the exception
    concerns those of which it said nothing. A batch for a unit test is made from a list.
    """

    def __init__(self, notifications: Sequence[Notification[T]]) -> None:
        self.notifications = tuple(notifications)
        self.outcomes: dict[int, object] = {}
        """What was said of single notifications, by sequence."""

    def __iter__(self) -> Iterator[Notification[T]]:
        return iter(self.notifications)

    def __len__(self) -> int:
        return len(self.notifications)

    def ack(self, notification: Notification[T]) -> None:
        """It is done, even if the function raises later."""
        self.outcomes[notification.sequence] = None

    def retry(self, notification: Notification[T], *, after: float | None = None) -> None:
        """Try it again, after so many seconds, or when the agent's policy says."""
        self.outcomes[notification.sequence] = Retry(after)

    def reject(self, notification: Notification[T], reason: str) -> None:
        """It can never be handled: keep it as a dead letter."""
        self.outcomes[notification.sequence] = Reject(reason)


class Source(Protocol[T]):
    """Where a stream's notifications come from."""

    async def next(self, *, within_seconds: float | None = None) -> Notification[T] | None: ...
    async def settle(self) -> None: ...


class Stream(Generic[T]):
    """An agent's notifications, for an `async for` loop. One is done when the loop asks for the next.

    The loop ends when the worker stops.
    """

    def __init__(self, source: Source[T], *, only: Callable[[Notification[T]], bool] | None = None) -> None:
        self._source = source
        self._only = only

    def __aiter__(self) -> AsyncIterator[Notification[T]]:
        return self._each()

    def filter(self, only: Callable[[Notification[T]], bool]) -> Stream[T]:
        """The notifications for which `only` is true; the others are done."""
        before = self._only
        return Stream(self._source, only=lambda one: (before is None or before(one)) and only(one))

    async def take(self, size: int, within: float) -> AsyncIterator[list[Notification[T]]]:
        """Lists of up to `size`, or of what came within so many seconds of the first. All of one are done together."""
        while (first := await self._next()) is not None:
            taken = [first]
            while len(taken) < size and (another := await self._source.next(within_seconds=within)) is not None:
                if self._only is None or self._only(another):
                    taken.append(another)
            yield taken
            await self._source.settle()

    async def group_by(
        self, key: Callable[[Notification[T]], K], *, size: int = 100, within: float = 1.0
    ) -> AsyncIterator[dict[K, list[Notification[T]]]]:
        """As `take`, by key: each list in order."""
        async for taken in self.take(size, within):
            groups: dict[K, list[Notification[T]]] = {}
            for notification in taken:
                groups.setdefault(key(notification), []).append(notification)
            yield groups

    async def _each(self) -> AsyncIterator[Notification[T]]:
        while (notification := await self._next()) is not None:
            yield notification
            await self._source.settle()

    async def _next(self) -> Notification[T] | None:
        while (notification := await self._source.next()) is not None:
            if self._only is None or self._only(notification):
                return notification
            await self._source.settle()
        return None


class Notify(Struct, frozen=True):
    """A notification to be published."""

    event_type: str
    identifier: Mapping[str, Any]
    payload: Any = None
    message_id: str | None = None
    """With one of your own, a repeat within the stream's duplicate window is recognised and stored once."""
    ttl: int | None = None
    """Whole seconds, at least 1, after which the stream forgets it, if its own limits have not made it before. It
    needs nats-server 2.11 and a stream with `allow_msg_ttl`. Of one that is delivered later it begins then."""
    deliver_at: datetime | None = None
    """When it is to be stored, with a time zone; what is past means at once. It needs nats-server 2.12, and a worker
    of any app at that time."""
    deliver_after: float | None = None
    """The same, as seconds from now."""


class Receipt(Struct, frozen=True, kw_only=True):
    """The server's word that a notification is stored, or that it waits until it is due."""

    stream: str
    sequence: int
    """0 while it waits."""
    duplicate: bool = False
    """True where the stream already held a message of the same id: nothing new was stored."""
    message_id: str
    due: datetime | None = None
    """When it will be stored, if it waits."""
