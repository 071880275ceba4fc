"""Jobs: actions on many dead letters, as they go on. They live in the memory of the console; the audit stream has their
begin and their end.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

import anyio
from msgspec import Struct, field

from aviso_workers.config.settings import Right
from aviso_workers.ops.audit import AffectedLetters
from aviso_workers.ops.dead_letters import is_window
from aviso_workers.state.dead_letter_records import DeadLetter, LetterId


class ReadAgain(Struct):
    """How far an app's dead letters were read, for those of a job that are dead letters again."""

    failed: int = 0
    """How many of those that are handed back are."""
    to: int = 0
    """The sequence up to which they were read."""
    seen: tuple[int, int] = (0, 0)
    """The last sequence of the stream and the number of its messages, when it was last looked at."""


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
    letters: frozenset[LetterId]
    """The dead letters."""
    left: set[LetterId]
    """Those that are not done."""
    total: int
    rate: float | None
    """The most of them in a second; None: as many as there can be."""
    begun: datetime = field(default_factory=lambda: datetime.now(UTC))
    state: str = "runs"
    """`runs`, `done`, `stopped` or `failed`."""
    failures: list[str] = []
    created: dict[str, datetime | None]
    """By app, when the stream of its dead letters was created: in another one, others have their sequences."""
    finished: bool = False
    """Whether all that were there are done, or have failed."""
    asked_again: bool = False
    """Whether an answer was missing, so that one may be done although nobody has said so."""
    agents: set[tuple[str, str]] = field(default_factory=set)
    """The apps and agents to which some were handed back."""
    windows: int = 0
    """As many of those that are done were windows, whose next dead letter does not name the one before."""
    affected: AffectedLetters = field(default_factory=AffectedLetters)
    read: dict[str, ReadAgain] = field(default_factory=dict)
    """By app, what has become a dead letter again."""
    looking: anyio.Lock = field(default_factory=anyio.Lock)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    """Cancelled where the job is stopped."""

    def note(self, dead_letter: DeadLetter) -> None:
        """Note one that is done."""
        self.left.discard(dead_letter.id)
        self.affected.note(dead_letter)
        self.agents.add((dead_letter.app, dead_letter.agent))
        self.windows += is_window(dead_letter)

    @property
    def hands_back(self) -> bool:
        """Whether the dead letters are retried, and not erased."""
        return self.right == "retry"

    @property
    def does(self) -> str:
        return "handed back" if self.hands_back else "erased"

    @property
    def failed_again(self) -> int:
        """How many of those that are handed back are dead letters again, as far as the dead letters were read."""
        return sum(read.failed for read in self.read.values())

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
        if self.failures or not self.finished:
            why = "are not, as far as is known"
        elif self.asked_again:
            why = "were not there any more when it was tried again: done by this job, or by somebody else"
        else:
            why = "were not there any more, because somebody else has retried or erased them"
        others = f"; {len(self.left)} {why}" if self.left else ""
        return f"{self.done} of {self.total} {self.does}{others}" + (f"; {self.failures[0]}" if self.failures else "")
