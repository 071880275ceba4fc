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
from aviso_workers.state.audit_records import ERASED, RETURNED
from aviso_workers.state.dead_letter_records import DeadLetter, LetterId

TONES = {"done": "good", "stopped": "", "failed": "bad"}
"""By how a job has ended."""


class ReadAgain(Struct):
    """How far an app's dead letters were read, for those of a job that are dead letters again."""

    failed: int = 0
    """How many of those that are handed back are."""
    most: int = 0
    """How many were, whenever it was looked at: some may be retried or erased once more."""
    to: int = 0
    """The sequence up to which they were read."""
    seen: tuple[int, int] = (0, 0)
    """The last sequence of the stream and the number of its messages, when it was last looked at."""


class CameTo(Struct, frozen=True, kw_only=True):
    """What has become of the dead letters that a job has handed back."""

    of: int
    """How many it has handed back."""
    again: int
    """How many became dead letters again, as far as the dead letters were read."""
    waits: int
    """How many at most wait for their agents, or are in flight."""
    windows: int
    """How many are windows, whose next dead letter does not name the one before."""
    unsure: str
    """Why it is not known of the others what has become of them; empty where it is."""

    @property
    def handled(self) -> int | None:
        """How many are handled; None where that is not known."""
        return None if self.unsure else self.of - self.again - self.waits - self.windows

    @property
    def word(self) -> tuple[str, str]:
        """The same in a word, and its tone as the class of a style."""
        if self.unsure:
            return "not known", ""
        if self.waits:
            return "waits", "warn"
        return ("failed again", "bad") if self.again else ("done", "" if self.windows else "good")

    @property
    def text(self) -> str:
        """The same in a sentence without its full stop."""
        again = f"{self.again:,} became {'dead letters' if self.again > 1 else 'a dead letter'} again"
        waits = f"{self.waits:,} {'wait for their agents' if self.waits > 1 else 'waits for its agent'}"
        windows = f"of {self.windows:,} windows it is not known"
        counted = {again: self.again, waits: self.waits, windows: self.windows}
        others = ", and ".join(text for text, count in counted.items() if count)
        known = f"{self.handled:,} of {self.of:,} are handled" if self.handled is not None else ""
        unsure = f"it is not known how many of {self.of:,} are handled: {self.unsure}"
        return "; ".join(filter(None, (known or unsure, others)))


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
    away: str = ""
    """Why it waits, where no server answers."""
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
        self.away = ""
        self.left.discard(dead_letter.id)
        self.affected.note(dead_letter)
        self.agents.add((dead_letter.app, dead_letter.agent))
        self.windows += is_window(dead_letter)

    @property
    def hands_back(self) -> bool:
        """Whether the dead letters are retried, and not erased."""
        return self.right == "retry"

    def came_to_so_far(self, waiting: int, unsure: str) -> CameTo:
        """Return what has become of those that are handed back, where their agents have so many `waiting`."""
        again = min(self.done - self.windows, sum(read.most for read in self.read.values()))
        waits = min(waiting, self.done - self.windows - again)
        return CameTo(of=self.done, again=again, waits=waits, windows=self.windows, unsure=unsure)

    def told(self, came: CameTo | None) -> tuple[str, str, str]:
        """Return how it is: a word, its tone as the class of a style, and a sentence without its full stop."""
        if not self.ended:
            so_far = f"{self.done:,} of {self.total:,} are {self.does} so far"
            return ("waits", "warn", f"{so_far}; {self.away}") if self.away else ("runs", "", so_far)
        word, tone = came.word if came and self.state == "done" else (self.state, TONES[self.state])
        return word, tone, came.text if came else self.came_to

    @property
    def chosen_by(self) -> dict[str, str]:
        """The filter that has selected the dead letters."""
        return {name: text for name, text in self.selection.items() if name not in ("last", "rate", "why")}

    @property
    def noun(self) -> str:
        return "Retry" if self.hands_back else "Erasure"

    @property
    def does(self) -> str:
        return RETURNED if self.hands_back else ERASED

    @property
    def done(self) -> int:
        return self.total - len(self.left)

    @property
    def ended(self) -> bool:
        return self.state != "runs"

    @property
    def seconds_left(self) -> float | None:
        took = (datetime.now(UTC) - self.begun).total_seconds()
        goes_on = self.done and not self.ended and not self.away
        return took / self.done * (self.total - self.done) if goes_on else None

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
