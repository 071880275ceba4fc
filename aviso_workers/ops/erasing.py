"""Erasing notifications for good, as data protection asks for it: found wherever a server keeps them, erased there,
and looked for again.

Called by the command `erase`. A message that is deleted has its bytes overwritten on disk; a purge leaves them, so
every message is deleted by its sequence. A survey goes through the event's stream, the streams that mirror or source
it (and those that mirror or source these), the dead letters, what waits to be tried again and what waits to be
delivered. Copies are recognised by what they say of themselves, not by the original, so that an erasure that was broken
off can be repeated. Nothing is done here about what is no stream of this account: see `ELSEWHERE`.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
from msgspec import Struct

from aviso_workers import schema, topics
from aviso_workers.app import App
from aviso_workers.backends import StreamInfo
from aviso_workers.codec import Message, NotificationReader
from aviso_workers.engine import dead_lettering, deferring
from aviso_workers.engine.dead_lettering import DeadLetter
from aviso_workers.errors import (
    BackendError,
    InvalidNotificationError,
    NotFoundError,
    RefusedError,
    UnavailableError,
    UndecodableError,
)
from aviso_workers.ops.wiping import event_type_of

__all__ = ["ELSEWHERE", "INDEX_WITHIN", "Eraser", "Finding", "Survey", "Unreached"]

ELSEWHERE = (
    "backups: `aviso-workers backup cleanse` rewrites them",
    "archives that Spark wrote, and whatever agents made of the notifications",
    "mirrors and sources in other accounts and domains: erase there as well",
)
"""What no survey can see."""
AT_ONCE = 32
"""Deletions under way."""
ROUNDS = 3
"""A copy may arrive while its original is being erased."""
SOURCE = "Nats-Stream-Source"
INDEX_WITHIN = timedelta(minutes=3)
"""A nats-server writes the index of a stream, a file that has its subjects, at most so long after a change: 2.15 does
every two minutes or two and a half. Nothing asks it to do so at once on each of the copies. In the same time it
removes from the Raft log of a stream with replicas what is stored, which has the whole messages until then."""
DENIALS = {"deny_delete": "it has deny_delete, which no server takes back", "sealed": "it is sealed for good"}

Matches = Callable[[Message], bool]


class Finding(Struct, frozen=True, kw_only=True):
    """Messages of one stream that are to be erased."""

    stream: str
    what: str
    """What the stream is to the notifications, as `mirror of MARS`."""
    sequences: tuple[int, ...]


class Unreached(Struct, frozen=True, kw_only=True):
    """Bytes that stay, why, and what can be done about it."""

    where: str
    why: str
    cure: str
    waits: bool = False
    """Nothing is erased before this has passed."""


class Survey(Struct, frozen=True, kw_only=True):
    """What was found, and what cannot be erased of it."""

    findings: tuple[Finding, ...]
    unreached: tuple[Unreached, ...]

    @property
    def messages(self) -> int:
        return sum(len(finding.sequences) for finding in self.findings)


class Eraser:
    """Erases what matches `where`, or the one notification of that `sequence`, and these `keys` of buckets
    (`<bucket>/<key>`, with their history). Works inside of `async with app:`.

    Raises `UnknownEventTypeError`, `InvalidIdentifierError`, and `InvalidNotificationError` where nothing is named.
    """

    def __init__(
        self,
        app: App,
        event_type: str,
        *,
        where: Mapping[str, Any] | None = None,
        sequence: int | None = None,
        keys: Sequence[str] = (),
    ) -> None:
        if bool(where) == (sequence is not None):
            raise InvalidNotificationError(
                "say which notifications to erase, by KEY=VALUE or by their id; `streams wipe` removes all of them"
            )
        self._backend = app.session.backend
        self._name = event_type_of(app, event_type)
        declared = app.config.notification_schema[self._name]
        self._where = schema.parse_where(self._name, declared, where or {})
        self._reader = NotificationReader(self._name, declared, where=self._where)
        self._stream = topics.stream_name(schema.topic_of(self._name, declared).base)
        self._fields = sorted(where or {})
        self._sequence = sequence
        self._keys = [_bucket_and_key(key) for key in keys]
        self._known: dict[str, set[int]] = {}
        """By stream, what has been found of it so far, also what is erased by now."""

    def erased(self, left: Survey) -> dict[str, int]:
        """By stream, how many of the messages that were found are there no more, where these are left."""
        remaining = {finding.stream: finding.sequences for finding in left.findings}
        gone = {stream: len(found.difference(remaining.get(stream, ()))) for stream, found in self._known.items()}
        return {stream: count for stream, count in gone.items() if count}

    async def survey(self) -> Survey:
        """Look for them, without a change. Raises `BackendError`."""
        infos = {name: await self._backend.stream_info(name) for name in await self._backend.stream_names()}
        found: dict[str, Finding] = {}
        await self._look_into_ours(infos, found)
        waiting = list(found)
        seen: set[tuple[str, str]] = set()
        while waiting:
            origin = waiting.pop()
            for name, info in infos.items():
                if (origin, name) not in seen and (relation := _relation(info.config, origin)):
                    seen.add((origin, name))
                    waiting.append(name)
                    await self._add(found, name, f"{relation} of {origin}", self._copy_of(origin, relation))
        findings = tuple(finding for finding in found.values() if finding.sequences)
        # What was delivered has been in the stream of what waits, whether or not anything waits now.
        concerned = {finding.stream for finding in findings} | {deferring.STREAM} & infos.keys()
        unreached = [each for stream in sorted(concerned) for each in _unreached(stream, infos[stream])]
        return Survey(findings=findings, unreached=tuple(unreached))

    async def erase(self, survey: Survey, *, audit: Path) -> Survey:
        """Erase what the survey found, and what comes after it; returns a survey of what is left.

        `audit` gets a record that says what was done, and nothing of what was erased: once before, with the state
        `begun`, and once after. Raises `RefusedError`, before anything is done, where the event's own stream denies it,
        or a stream has replicas that are not current.
        """
        for each in survey.unreached:
            if each.waits or (each.where == self._stream and each.why in DENIALS.values()):
                raise RefusedError(f"{each.where}: {each.why}; nothing was erased. {each.cure.capitalize()}")
        record = self._record(survey)
        _write(audit, record | {"state": "begun"})
        found, left = survey, survey
        for _ in range(ROUNDS):
            await self._delete(found)
            left = await self.survey()
            if not (found := _reachable(left)).findings:
                break
        _write(
            audit,
            record
            | {
                "state": "incomplete" if left.findings else "done",
                "ended": datetime.now(UTC).isoformat(),
                "subjects_on_disk_until": (datetime.now(UTC) + INDEX_WITHIN).isoformat(),
                "erased": self.erased(left),
                "left": [msgspec.to_builtins(finding) for finding in left.findings],
            },
        )
        return left

    async def _look_into_ours(self, infos: Mapping[str, StreamInfo], found: dict[str, Finding]) -> None:
        if self._stream in infos:
            filters = topics.filter_subjects(self._where)
            await self._add_counted(found, self._stream, f"notifications of {self._name}", self._matches, filters)
        carrying = {dead_lettering.STREAM: _buried, dead_lettering.RETRIES: _requeued, deferring.STREAM: _deferred}
        for stream, original in carrying.items():
            if stream in infos:
                await self._add(found, stream, f"copies of {self._stream}", self._as(original))
        for bucket, key in self._keys:
            stream, subject = f"KV_{bucket}", f"$KV.{bucket}.{key}"
            if stream not in infos:
                raise NotFoundError(f"no bucket {bucket!r}")
            await self._add_counted(found, stream, "key of a table", partial(_is_of, subject), [subject])

    async def _add_counted(
        self, found: dict[str, Finding], stream: str, what: str, matches: Matches, filters: Sequence[str]
    ) -> None:
        """Add what is found, and make sure that the server counts no more on the subjects that match.

        What is stored meanwhile is looked for as well. Raises `UnavailableError` where the two do not agree.
        """
        last = await self._add(found, stream, what, matches)
        for _ in range(ROUNDS):
            counts = [await self._backend.subject_counts(stream, subject=each) for each in filters]
            counted = sum(
                count
                for each in counts
                for subject, count in each.items()
                if matches(Message(subject=subject, data=b""))
            )
            if counted <= len(found[stream].sequences):
                return
            last = await self._add(found, stream, what, matches, after=last)
            if counted <= len(found[stream].sequences):
                return  # the others were stored after the reading before; more of them may be under way
        raise UnavailableError(
            f"{stream}: the server counts {counted} messages that match, and reading finds "
            f"{len(found[stream].sequences)}: begin again"
        )

    async def _add(self, found: dict[str, Finding], stream: str, what: str, matches: Matches, *, after: int = 0) -> int:
        """Add what matches after a sequence; returns the one up to which the stream was read."""
        last = (await self._backend.stream_info(stream)).last_sequence
        known = self._known.setdefault(stream, set())
        sequences = {message.sequence async for message in self._messages(stream, after, last) if matches(message)}
        known |= sequences
        if stream in found:
            sequences |= set(found[stream].sequences)
        found[stream] = Finding(stream=stream, what=what, sequences=tuple(sorted(sequences)))
        return last

    async def _messages(self, stream: str, after: int, last: int) -> AsyncIterator[Message]:
        filters = topics.filter_subjects(self._where) if stream == self._stream else ()
        reading = self._backend.read_chunks(
            stream, filter_subjects=filters, start_sequence=after + 1, last_sequence=last
        )
        async with aclosing(reading):
            async for chunk in reading:
                for message in chunk:
                    yield message

    def _matches(self, original: Message) -> bool:
        if self._sequence is not None:
            return original.sequence == self._sequence
        return self._reader.matches(original)

    def _as(self, original: Callable[[Message], tuple[str, Message] | None]) -> Matches:
        """Whether the original matches that a message of ours carries."""

        def matches(message: Message) -> bool:
            carried = original(message)
            return carried is not None and carried[0] == self._stream and self._matches(carried[1])

        return matches

    def _copy_of(self, origin: str, relation: str) -> Matches:
        """Whether a message is the copy of one that was found there, or that would have been before it went."""
        known = self._known[origin]
        direct = origin == self._stream

        def matches(message: Message) -> bool:
            copied = message
            if relation == "source":
                if (sourced := _sourced(message)) is None or sourced[0] != origin:
                    return False
                copied = sourced[1]
            return copied.sequence in known or (direct and self._matches(copied))

        return matches

    async def _delete(self, survey: Survey) -> None:
        limiter = anyio.CapacityLimiter(AT_ONCE)
        failures: list[BackendError] = []

        async def delete(stream: str, sequence: int) -> None:
            try:
                async with limiter:
                    with suppress(NotFoundError):  # it went by itself
                        await self._backend.delete_message(stream, sequence)
            except BackendError as error:
                failures.append(error)
                deletions.cancel_scope.cancel()

        for finding in reversed(_reachable(survey).findings):  # copies before what they are recognised by
            for start in range(0, len(finding.sequences), 1000):
                async with anyio.create_task_group() as deletions:
                    for sequence in finding.sequences[start : start + 1000]:
                        deletions.start_soon(delete, finding.stream, sequence)
                if failures:
                    raise failures[0]

    def _record(self, survey: Survey) -> dict[str, Any]:
        return {
            "begun": datetime.now(UTC).isoformat(),
            "by": getpass.getuser(),
            "event_type": self._name,
            "by_fields": self._fields,
            "by_id": self._sequence,
            "found": [msgspec.to_builtins(finding) for finding in survey.findings],
            "not_reached": [msgspec.to_builtins(each) for each in survey.unreached],
            "not_looked_at": ELSEWHERE,
        }


def _unreached(stream: str, info: StreamInfo) -> list[Unreached]:
    config = info.config
    if denied := next((why for field, why in DENIALS.items() if config.get(field)), ""):
        cure = "delete the stream, or let a backup of it be cleansed and restored in its place"
        return [Unreached(where=stream, why=denied, cure=cure)]
    found = []
    if info.behind:
        found.append(
            Unreached(
                where=stream,
                why=f"its replica on {', '.join(info.behind)} is not current, and would keep the bytes on its disk",
                cure="start that server, or one of its name with an empty disk where its own is gone; "
                "erase when `aviso-workers report streams` shows no trouble",
                waits=True,
            )
        )
    if config.get("storage") != "memory" and info.messages < info.last_sequence:
        found.append(
            Unreached(
                where=stream,
                why="messages that were replaced, purged or too old may have left their bytes on disk",
                cure="a backup has only what is stored: restore one in the stream's place; or encrypt at rest",
            )
        )
    if republish := config.get("republish"):
        found.append(
            Unreached(
                where=stream,
                why=f"it republishes to {republish['dest']}",
                cure="ask those who listen there",
            )
        )
    return found


def _reachable(survey: Survey) -> Survey:
    denied = {each.where for each in survey.unreached if each.why in DENIALS.values()}
    findings = tuple(finding for finding in survey.findings if finding.stream not in denied)
    return Survey(findings=findings, unreached=survey.unreached)


def _relation(config: Mapping[str, Any], origin: str) -> str:
    """What a stream of that configuration is to another one: its mirror, a stream that has it as source, or nothing."""
    if (config.get("mirror") or {}).get("name") == origin:
        return "mirror"
    return "source" if any(source.get("name") == origin for source in config.get("sources") or ()) else ""


def _sourced(message: Message) -> tuple[str, Message] | None:
    """Where a sourced message comes from, and what it was there: stream, sequence, filter, transform, subject."""
    words = (message.headers or {}).get(SOURCE, "").split()
    if len(words) < 2 or not words[1].isdigit():
        return None
    subject = words[4] if len(words) > 4 else message.subject
    stream = words[0].partition(":")[0]
    original = Message(
        subject=subject, data=message.data, headers=message.headers, sequence=int(words[1]), timestamp_ns=1
    )
    return stream, original


def _buried(message: Message) -> tuple[str, Message] | None:
    with suppress(UndecodableError):
        letter = DeadLetter.read(message)
        return letter.stream, letter.original
    return None


def _requeued(message: Message) -> tuple[str, Message] | None:
    original, stream = dead_lettering.unwrap(message)
    return stream, original


def _deferred(message: Message) -> tuple[str, Message] | None:
    with suppress(UndecodableError):
        outgoing = deferring.original(message)
        return outgoing.stream, outgoing.message
    return None


def _is_of(subject: str, message: Message) -> bool:
    return message.subject == subject


def _bucket_and_key(text: str) -> tuple[str, str]:
    bucket, slash, key = text.partition("/")
    if not (bucket and slash and key):
        raise InvalidNotificationError(f"{text!r} is not BUCKET/KEY, such as index__sums/od")
    return bucket, key


def _write(audit: Path, record: Mapping[str, Any]) -> None:
    """The whole record or the one before: what was erased must be known although this process may die."""
    partial = audit.with_name(f"{audit.name}.partial")
    with partial.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(record), indent=1))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(audit)
