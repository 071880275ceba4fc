"""Causes of dead letters: those of one agent that failed in the same way, and what their notifications have in common.

`dead_letters` reads the dead letters and adds each to its cause. Of the values of a field, so many are remembered, and
of the others that there are more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from msgspec import Struct, field

from aviso_workers.aviso import schema, topics
from aviso_workers.aviso.codec import LEFT_OUT
from aviso_workers.config import Config
from aviso_workers.errors import UndecodableError
from aviso_workers.ops.dead_letters import NO_LINE, Group, grouped
from aviso_workers.state.dead_letter_records import DeadLetter

MOST_VALUES, MOST_NAMED = 1000, 3
"""How many values of a field are counted, and how many are named."""
MOST_DIGITS = 18
BARS = 22
TOLD = {
    "attempts_exhausted": "failed for {}{}, in all attempts",
    "rejected": "rejected {}{}",
    "skipped": "failed for {}{}, until somebody decided to skip",
    "undecodable": "could not read {}{}",
    "worker_died": "ended its worker while it handled {}{}",
}
"""By reason, what an agent did."""


class Values(Struct, kw_only=True):
    """The values of one field."""

    count: int = 0
    """How many dead letters have the field."""
    seen: set[str] = field(default_factory=set)
    has_more: bool = False
    """Whether there are others than those that were `seen`."""

    def add(self, value: str) -> None:
        self.count += 1
        if len(self.seen) < MOST_VALUES:
            self.seen.add(value)
        self.has_more = self.has_more or value not in self.seen

    @property
    def single(self) -> str:
        """The value that all have; empty where they differ."""
        return min(self.seen) if len(self.seen) == 1 and not self.has_more else ""

    @property
    def many(self) -> str:
        return f"{'more than ' if self.has_more else ''}{len(self.seen):,} values"

    @property
    def text(self) -> str:
        are_numbers = all(each.isascii() and each.isdecimal() and len(each) < MOST_DIGITS for each in self.seen)
        if self.has_more:
            return self.many
        if are_numbers and len(self.seen) > 1:
            return f"{min(self.seen, key=int)} to {max(self.seen, key=int)}"
        return ", ".join(sorted(self.seen)) if len(self.seen) <= MOST_NAMED else self.many


class Cause(Struct, kw_only=True):
    """Dead letters of one cause."""

    group: Group
    error: str = ""
    """The text of the first one's error."""
    differs: bool = False
    """Whether the texts of their errors differ."""
    attempts: Values = field(default_factory=Values)
    identifier: dict[str, Values] = field(default_factory=dict)
    minutes: Counter[int] = field(default_factory=Counter)
    """How many became dead letters in each minute since 1970."""

    def add(self, dead_letter: DeadLetter, identifier: Mapping[str, str]) -> None:
        self.error = self.error or dead_letter.error
        self.differs = self.differs or dead_letter.error != self.error
        self.attempts.add(str(dead_letter.attempts))
        self.minutes[int(dead_letter.time.timestamp()) // 60] += 1
        for name, value in identifier.items():
            self.identifier.setdefault(name, Values()).add(value)

    @property
    def bars(self) -> list[float]:
        """How many there were from the first to the last, in parts of the same length: of the largest part, 1.0. Empty
        where that takes less than `BARS` minutes.
        """
        first, last = min(self.minutes), max(self.minutes)
        if last - first < BARS:
            return []
        parts = [0] * BARS
        for minute, count in self.minutes.items():
            parts[(minute - first) * BARS // (last - first + 1)] += count
        return [part / max(parts) for part in parts]

    @property
    def filters(self) -> dict[str, str]:
        """The filter that selects them."""
        group = self.group
        found = {"app": group.app, "agent": group.agent, "reason": group.reason, "error": group.kind}
        return {name: text for name, text in found.items() if text} | {"line": group.at or NO_LINE}

    @property
    def common(self) -> str:
        """What their notifications have in common, such as `class=od date=20261128, step 0 to 240`."""
        same = " ".join(f"{name}={each.single}" for name, each in self.identifier.items() if each.single)
        others = (f"{name} {each.text}" for name, each in self.identifier.items() if not each.single)
        return ", ".join(filter(None, (same, *others)))

    def told(self, what: str) -> str:
        """Return what the agent did with them, which are called so."""
        at, did = f" at {self.group.at}" if self.group.at else "", TOLD.get(self.group.reason)
        return did.format(what, at) if did else f"gave up {what} ({self.group.reason}){at}"


class Causes:
    """The causes of dead letters. Identifiers are read out of the subjects of the event types of `config`."""

    def __init__(self, config: Config) -> None:
        topics_ = (schema.topic_of(name, each) for name, each in config.notification_schema.items())
        self._fields = {topic.base: topic.key_order for topic in topics_}
        self._groups: dict[tuple[str, ...], Group] = {}
        self._found: dict[int, Cause] = {}
        """By the identity of the group."""

    def add(self, dead_letter: DeadLetter) -> None:
        """Add a dead letter, the oldest of all first, to its cause."""
        group = grouped(self._groups, dead_letter)
        self._found.setdefault(id(group), Cause(group=group)).add(dead_letter, self.identifier(dead_letter))

    def identifier(self, dead_letter: DeadLetter) -> dict[str, str]:
        """Return the identifier of its notification; empty where the subject is none of a known event type."""
        try:
            base, *values = topics.decode_subject(dead_letter.original.subject)
        except UndecodableError:
            return {}
        names = self._fields.get(base, ())
        if len(names) != len(values):
            return {}
        return {name: value for name, value in zip(names, values, strict=True) if value not in LEFT_OUT}

    def largest_first(self) -> list[Cause]:
        return sorted(self._found.values(), key=lambda each: -each.group.count)
