"""Jobs: actions on many dead letters, as they go on. They live in the memory of the console; the audit stream has their
begin and their end.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

import anyio
from msgspec import Struct, field

from aviso_workers.config.settings import Right
from aviso_workers.ops.dead_letters import DeadLetter

__all__ = ["Job"]


class Job(Struct, kw_only=True):
    """An action on many dead letters."""

    number: int
    title: str
    right: Right
    """Who has it may stop the job."""
    who: str
    selection: Mapping[str, str]
    confirmed: str
    """What was confirmed: the same form is the same job."""
    left: set[int]
    """The sequences of the dead letters that are not done."""
    total: int
    rate: float | None
    """The most of them in a second; None: as many as there can be."""
    begun: datetime = field(default_factory=lambda: datetime.now(UTC))
    state: str = "runs"
    """`runs`, `done`, `stopped` or `failed`."""
    failures: list[str] = []
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    """Cancelled where the job is stopped."""

    def note(self, dead_letter: DeadLetter) -> None:
        """Note one that is done."""
        self.left.discard(dead_letter.sequence)

    @property
    def done(self) -> int:
        return self.total - len(self.left)

    @property
    def ended(self) -> bool:
        return self.state != "runs"

    @property
    def seconds_left(self) -> float | None:
        took = (datetime.now(UTC) - self.begun).total_seconds()
        return took / self.done * (self.total - self.done) if self.done and not self.ended else None

    @property
    def came_to(self) -> str:
        """What has come of it, in words."""
        why = (
            "are not"
            if self.failures or self.scope.cancel_called
            else "were not there any more, because somebody else has retried or erased them"
        )
        others = f"; {len(self.left)} {why}" if self.left else ""
        return f"{self.done} of {self.total} done{others}" + (f"; {self.failures[0]}" if self.failures else "")
