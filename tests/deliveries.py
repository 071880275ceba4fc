"""What the tests' stand-ins for deliveries have in common."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aviso_workers.backends import Message


class UnsettledDelivery:
    """A delivery that is held and that nothing settles; a test that settles it says what is to come of it."""

    message: Message
    num_delivered = 1
    num_pending = 0
    can_be_read_again = True
    held = True
    waiting_since = 0.0
    waited: float | None = None
    begin: Callable[[], Awaitable[None]] | None = None
    record: Any = None
    place = 0
    tried = False
    screened = True
    at_once = False
    due = 0.0
    timer = 0
    line: Any = None
    limit: Any = None

    def ack(self) -> None:
        raise AssertionError("acked")

    def nak(self, *, delay_seconds: float = 0.0) -> None:
        raise AssertionError(f"naked with a delay of {delay_seconds} s")

    def redeliver(self) -> None:
        raise AssertionError("asked for again")

    def term(self, reason: str) -> None:
        raise AssertionError(f"terminated: {reason}")

    def in_progress(self) -> None:
        raise AssertionError("reported to be in progress")
