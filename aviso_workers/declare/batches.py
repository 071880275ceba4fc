"""Notifications that an agent takes together: a batch in one call, or a stream for a loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, Protocol

from msgspec import Struct, structs
from typing_extensions import TypeVar

from aviso_workers.aviso import literals
from aviso_workers.aviso.literals import AnyDuration
from aviso_workers.aviso.notifications import Notification
from aviso_workers.declare.verdicts import Reject, Retry
from aviso_workers.errors import DeclarationError

T = TypeVar("T", default=Any)
K = TypeVar("K", default=Any)
G = TypeVar("G", bound=Hashable)


class Batching(Struct, frozen=True):
    """How the notifications of a `Batch` are collected.

    A batch has up to `size` notifications: those that come `within` this time of the first, which is a number of
    seconds, a text such as `5s`, or a timedelta, and is kept as seconds. Raises `DeclarationError` for a size below 1
    and a time below 0.
    """

    size: int = 100
    within: float = 1.0

    if TYPE_CHECKING:  # it is given any duration, and has seconds

        def __init__(self, size: int = 100, within: AnyDuration = 1.0) -> None: ...

    def __post_init__(self) -> None:
        if not (isinstance(self.size, int) and not isinstance(self.size, bool) and self.size >= 1):
            raise DeclarationError(f"Batching: size must be a whole number of 1 or more, found {self.size!r:.100}")
        structs.force_setattr(self, "within", _within("Batching", self.within))


def _within(what: str, duration: object) -> float:
    """Return the seconds. Raises `DeclarationError` for what is no duration, or below 0."""
    with suppress(ValueError):
        if (seconds := literals.seconds_of(duration)) >= 0:
            return seconds
    raise DeclarationError(
        f'{what}: within must be a duration from 0 seconds, such as 5 or "5s", found {duration!r:.100}'
    )


class Batch(Generic[T, K]):
    """Notifications that are handled together, in one call.

    When the function returns, all of them are acked but those for which it called `retry` or `reject`. When it raises,
    the exception holds for those for which it called nothing. In a unit test, make a batch from a list.
    """

    def __init__(self, notifications: Sequence[Notification[T, K]]) -> None:
        self.notifications = tuple(notifications)
        self.outcomes: dict[int, object] = {}
        """The answers for single notifications, by sequence."""

    def __iter__(self) -> Iterator[Notification[T, K]]:
        return iter(self.notifications)

    def __len__(self) -> int:
        return len(self.notifications)

    def ack(self, notification: Notification[T, K]) -> None:
        """Ack a notification of the batch, even if the function raises later."""
        self.outcomes[notification.sequence] = None

    def retry(self, notification: Notification[T, K], *, after: AnyDuration | None = None, counts: bool = True) -> None:
        """Try a notification of the batch again `after` this time, as in `Retry`. Default: the delay of the agent's
        policy."""
        self.outcomes[notification.sequence] = Retry(after, counts=counts)

    def reject(self, notification: Notification[T, K], reason: str) -> None:
        """Make a notification of the batch, which can never be handled, a dead letter with this reason."""
        self.outcomes[notification.sequence] = Reject(reason)


class NotificationSource(Protocol[T, K]):
    """Where a stream's notifications come from."""

    async def next(self, *, within_seconds: float | None = None) -> Notification[T, K] | None: ...
    async def settle(self) -> None: ...


class Stream(Generic[T, K]):
    """The notifications of an agent, for an `async for` loop.

    A notification is acked when the loop asks for the next one. The loop ends when the worker stops.
    """

    def __init__(
        self, source: NotificationSource[T, K], *, only: Callable[[Notification[T, K]], bool] | None = None
    ) -> None:
        self._source = source
        self._only = only

    def __aiter__(self) -> AsyncIterator[Notification[T, K]]:
        return self._each()

    def filter(self, only: Callable[[Notification[T, K]], bool]) -> Stream[T, K]:
        """Return a stream of the notifications for which `only` is true. The others are acked."""
        before = self._only
        return Stream(self._source, only=lambda one: (before is None or before(one)) and only(one))

    async def take(self, size: int, within: AnyDuration) -> AsyncIterator[list[Notification[T, K]]]:
        """Yield lists of up to `size` notifications: those that come `within` this time of the first, which is a number
        of seconds, a text such as `5s`, or a timedelta.

        All notifications of a list are acked when the function asks for the next list. Raises `DeclarationError` for
        what is no duration.
        """
        seconds = _within("take", within)
        while (first := await self._next()) is not None:
            taken = [first]
            while len(taken) < size and (another := await self._source.next(within_seconds=seconds)) is not None:
                if self._only is None or self._only(another):
                    taken.append(another)
            yield taken
            await self._source.settle()

    async def group_by(
        self, key: Callable[[Notification[T, K]], G], *, size: int = 100, within: AnyDuration = 1.0
    ) -> AsyncIterator[dict[G, list[Notification[T, K]]]]:
        """Yield what `take` yields as a mapping from each key to its notifications, in order."""
        async for taken in self.take(size, within):
            groups: dict[G, list[Notification[T, K]]] = {}
            for notification in taken:
                groups.setdefault(key(notification), []).append(notification)
            yield groups

    async def _each(self) -> AsyncIterator[Notification[T, K]]:
        while (notification := await self._next()) is not None:
            yield notification
            await self._source.settle()

    async def _next(self) -> Notification[T, K] | None:
        while (notification := await self._source.next()) is not None:
            if self._only is None or self._only(notification):
                return notification
            await self._source.settle()
        return None
