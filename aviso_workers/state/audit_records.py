"""What operators have done, in a stream of its own: their actions from a console and by command, and the dead letters
that were erased.

An action is recorded before it begins and again when it has ended, so that one that was broken off is seen as well: it
has no end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime
from typing import Literal

import msgspec
from msgspec import Struct

from aviso_workers.aviso.codec import Message, read_json, store_time
from aviso_workers.aviso.literals import printable
from aviso_workers.config import Config, streams
from aviso_workers.errors import UndecodableError
from aviso_workers.jetstream.fields import DAY
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.state.dead_letter_records import DeadLetter
from aviso_workers.state.own_streams import AUDIT

SUBJECT = "aviso_workers.audit"
ACTIONS = f"{SUBJECT}.actions"
KEPT_DAYS = 400
MAX_RECORDS = 100_000
DEAD_LETTERS = "dead letters"
"""What actions on many of them are recorded to be done to."""
PASSED_OVER, GIVEN_AGAIN = "passed over", "given again"
"""What a reset does to notifications of its agent."""
RETURNED, ERASED = "handed back", "erased"
"""What is done to dead letters, and so to their notifications."""
PURGED = "purged"
"""How a purge begins to say what it does."""
MAX_RANGES = 1000
"""Of sequences, in one record: it has to fit into a message of any server."""

State = Literal["begun", "done", "stopped", "failed"]


class Affected(Struct, frozen=True, kw_only=True):
    """Messages of one stream that an action has removed, or has taken from an agent or given back to it."""

    how: str
    """Such as `erased` or `passed over`."""
    of: str = ""
    """The agent that had them, such as `field/index`; empty where it is of no agent."""
    stream: str
    ranges: tuple[tuple[int, int], ...]
    """The first and the last sequence of each."""
    letters: tuple[tuple[int, int], ...] = ()
    """The same of the dead letters that were made of them."""
    more: int = 0
    """Messages that are left out, because there are too many ranges."""

    def has(self, stream: str, sequence: int) -> bool:
        return stream == self.stream and any(first <= sequence <= last for first, last in self.ranges)

    @property
    def text(self) -> str:
        letters = f", dead letters {_spelled(self.letters)}" if self.letters else ""
        more = f", and {self.more} more" if self.more else ""
        return f"{self.how}: {self.stream}@{_spelled(self.ranges)}{f' of {self.of}' if self.of else ''}{letters}{more}"


class AuditRecord(Struct, frozen=True, kw_only=True):
    """The begin or the end of an action."""

    who: str
    """The user, as the console knows it, or the user and the host of a command."""
    by_command: bool = False
    action: str
    """Such as `pause agent`."""
    of: str
    """What it is done to, such as `field/index_field`."""
    selection: Mapping[str, str] = {}
    """What selects the notifications, and other arguments."""
    state: State
    result: str = ""
    """What came of it, in words."""
    begun: int | None = None
    """The sequence of the record of its begin; None in that one."""
    affected: tuple[Affected, ...] = ()
    """In the record of its end."""

    @property
    def by(self) -> str:
        """Who has done it, and from where."""
        return f"{self.who}, {'by command' if self.by_command else 'console'}"

    @property
    def why(self) -> str:
        """The reason that was given; empty where none was."""
        return self.selection.get("why") or self.selection.get("note", "")

    @property
    def target(self) -> str:
        """The app and the agent, where it is done to dead letters of these; else what it is done to."""
        named = [
            self.selection[name] for name in ("app", "agent") if self.of == DEAD_LETTERS and name in self.selection
        ]
        return "/".join(named) or self.of

    @property
    def agent(self) -> str:
        """The app and the agent, such as `field/index`, where it is done to one; else empty."""
        return self.target if "/" in self.target and not self.action.endswith("-timer") else ""


class ErasedLetters(Struct, frozen=True, kw_only=True):
    """Dead letters of an agent that are erased together."""

    by: str
    letters: tuple[tuple[int, str, int], ...]
    """The sequence of each, and the stream and the sequence of its notification."""


class Erased(Struct, frozen=True, kw_only=True):
    """How the dead letter of a notification was erased."""

    sequence: int
    """Of the dead letter."""
    by: str
    time: datetime


class Deed(Struct, frozen=True, kw_only=True):
    """How a message was affected by an action."""

    how: str
    by: str
    begun: datetime
    """When the action began, as far as that is known."""
    time: datetime
    """When it had ended."""
    why: str = ""
    """The reason that was given, if one was."""


class RecordedAction(Struct, frozen=True, kw_only=True):
    """An action, with its end where that is recorded."""

    sequence: int
    """Of the record of its begin."""
    time: datetime
    record: AuditRecord
    end: AuditRecord | None = None
    ended_at: datetime | None = None

    @property
    def day(self) -> date:
        """In UTC."""
        return self.time.date()


def stream_spec(config: Config) -> StreamSpec:
    """Return the stream of the records."""
    return streams.own_stream(AUDIT, f"{SUBJECT}.>", config, max_age=KEPT_DAYS * DAY, max_msgs=MAX_RECORDS)


def message_of(record: AuditRecord) -> Message:
    """Return the message that stores a record."""
    return Message(subject=ACTIONS, data=msgspec.json.encode(record))


def read(message: Message) -> AuditRecord | None:
    """Return the record that a message stores; None where it stores none."""
    try:
        return read_json(message.data, AuditRecord)
    except UndecodableError:
        return None


def joined(messages: Iterable[Message], *, since: int) -> list[RecordedAction]:
    """Return the actions among messages, the newest first. An end is left out whose begin is not among them, though it
    is kept: its sequence is `since` or later.
    """
    found: dict[int, RecordedAction] = {}
    for message in messages:
        record = read(message)
        if record is None:
            continue
        begun = found.get(record.begun) if record.begun is not None else None
        if begun is not None:
            found[begun.sequence] = msgspec.structs.replace(begun, end=record, ended_at=store_time(message))
        elif record.begun is None or record.begun < since:  # it has begun, or its begin is not kept any more
            found[message.sequence] = RecordedAction(sequence=message.sequence, time=store_time(message), record=record)
    return sorted(found.values(), key=lambda each: -each.sequence)


def deed(record: AuditRecord, how: str, ended: datetime, begun: datetime) -> Deed:
    """Return how a message was affected by an action of which this is the record of its end."""
    return Deed(how=how, by=printable(record.by), begun=begun, time=ended, why=printable(record.why))


def erasures_of(app: str, agent: str) -> str:
    """Return the subject of the records of dead letters of an agent that were erased."""
    return f"{SUBJECT}.erased.{app}.{agent}"


def agent_of(subject: str) -> tuple[str, str]:
    """Return the app and the agent of such a subject."""
    *_, app, agent = subject.split(".")
    return app, agent


def erasures(by: str, dead_letters: Sequence[DeadLetter]) -> Iterator[Message]:
    """Yield the messages that record that somebody erases dead letters, one for each agent."""
    by_agent = defaultdict[tuple[str, str], list[tuple[int, str, int]]](list)
    for each in dead_letters:
        by_agent[each.app, each.agent].append((each.sequence, each.stream, each.original.sequence))
    for (app, agent), letters in sorted(by_agent.items()):
        data = msgspec.json.encode(ErasedLetters(by=by, letters=tuple(letters)))
        yield Message(subject=erasures_of(app, agent), data=data)


def _spelled(ranges: Iterable[tuple[int, int]]) -> str:
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in ranges)


def erased(message: Message, stream: str, sequence: int) -> Erased | None:
    """Return how the dead letter of a notification was erased; None where the message does not record that."""
    try:
        record = read_json(message.data, ErasedLetters)
    except UndecodableError:
        return None
    for letter, of_stream, of_sequence in record.letters:
        if (of_stream, of_sequence) == (stream, sequence):
            return Erased(sequence=letter, by=printable(record.by), time=store_time(message))
    return None
