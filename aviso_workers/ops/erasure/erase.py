"""Search for the notifications to erase and their copies on a server, and their erasure there.

A message that is deleted has its bytes overwritten on disk; a purge leaves them, so every message is deleted by its
sequence. A survey goes through the event's stream, the streams that mirror or source it (and those that mirror or
source these), other streams that hold messages of its subjects, the dead letters, retries and delayed
messages. Copies outside of the streams of this account are not searched: see `ELSEWHERE`.

Messages are deleted as fast as possible without delaying publishers. A nats-server (2.15) that erases a message
rewrites the whole block of messages that holds it, up to 8 MB, and the stream takes no publish meanwhile. Where that is
so, many deletions at once are no faster than one after another, and each publish waits for all of them. Where it is
not, as in memory, in small streams and on an encrypted disk, a deletion takes as long as its way there and back, and
many at once are faster. So the time that deletions take decides how many are under way: while each is answered soon,
more are sent.

A record says who erased which kind of messages where and when, without anything of their content. A message is
identified by its sequence and its store time, which mirrors, backups and restored streams keep, and which a stream that
is recreated does not repeat. So `backup cleanse` can go by the record alone. A record is readable by its owner only,
and replaces no file that is there.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

import anyio
import msgspec
from msgspec import Struct, structs

from aviso_workers import files
from aviso_workers.aviso import topics
from aviso_workers.aviso.codec import UNREADABLE_JSON, Message
from aviso_workers.backends import Admin, Backend, StreamInfo
from aviso_workers.config import Config
from aviso_workers.errors import (
    BackendError,
    InvalidNotificationError,
    NotFoundError,
    RefusedError,
    UnavailableError,
    UndecodableError,
)
from aviso_workers.ops import audit
from aviso_workers.ops.aviso_admin import event_type_of
from aviso_workers.ops.erasure import copies
from aviso_workers.ops.erasure.copies import Matches, Suspect, Wanted, parse_key, subject_of_key
from aviso_workers.state import delayed_messages

ELSEWHERE = (
    "backups: `aviso-workers backup cleanse DIR --erasure RECORD` rewrites them",
    "archives that Spark wrote, and whatever agents made of the notifications",
    "mirrors and sources in other accounts and domains: erase there as well",
)
"""Places of copies that no survey covers."""
ROUNDS = 3
"""A copy may arrive while its original is being erased."""
INDEX_WITHIN = timedelta(minutes=3)
"""A nats-server writes the index of a stream, a file that has its subjects, at most so long after a change: 2.15 does
every two minutes or two and a half. Nothing asks it to do so at once on each of the copies. In the same time it
removes from the Raft log of a stream with replicas what is stored, which has the whole messages until then."""
CATCH_UP_SECONDS, POLL_SECONDS = 30.0, 0.2
DENIALS = {"deny_delete": "it has deny_delete, which no server takes back", "sealed": "it is sealed for good"}
NO_NOTIFICATIONS = ("KV_", "OBJ_", "aviso_workers_")
"""How the names of streams begin that hold no notifications under their own subjects."""

Progress = Callable[[int], None]
"""Called with how many messages more were deleted."""
T = TypeVar("T")

MAX_UNDER_WAY = 512
SOON_SECONDS = 0.02
"""A publish may wait for so long because of the deletions before it."""
PATIENCE_SECONDS, AGAIN_SECONDS = 30.0, 0.2
AT_A_TIME = 1000
"""Tasks that wait for their turn."""
WITHIN_SECONDS, COUNT_AGAIN_SECONDS = 30.0, 0.1


class FoundMessages(Struct, frozen=True, kw_only=True):
    """Messages of one stream that are to be erased."""

    stream: str
    what: str
    """The relation of the stream to the notifications, such as `mirror of MARS`."""
    sequences: tuple[int, ...]
    times_ns: tuple[int, ...]
    """When each was stored, in nanoseconds since 1970."""

    @property
    def messages(self) -> Iterator[tuple[int, int]]:
        """The sequence and the store time of each message, in nanoseconds since 1970."""
        return zip(self.sequences, self.times_ns, strict=True)


class ErasureRecord(Struct, frozen=True, kw_only=True):
    """The record of what an erasure did."""

    state: Literal["begun", "done", "incomplete", "nothing found"]
    begun: str
    by: str
    event_type: str
    stream: str = ""
    """The event type's own."""
    by_fields: list[str] = []
    by_id: int | None = None
    by_keys_of: list[str] = []
    """Tables, windows and counters of which keys were erased."""
    found: list[FoundMessages]
    """All that was found so far, also what came meanwhile."""
    not_reached: list[dict[str, Any]] = []
    may_hold_copies: list[dict[str, Any]] = []
    not_looked_at: list[str] = []
    ended: str | None = None
    subjects_on_disk_until: str | None = None
    erased: dict[str, int] = {}
    """The number of erased messages, by stream."""
    left: list[FoundMessages] = []


def create_record(path: Path, record: ErasureRecord) -> None:
    """Write the record to a new file. Raises `RefusedError` where the file exists, or cannot be written."""
    with _explained(path), files.create_file(path) as file:
        try:
            _write_record(file, record)
        except OSError:
            path.unlink()
            raise


def replace_record(path: Path, record: ErasureRecord) -> None:
    """Replace our own earlier record as a whole. Raises `RefusedError`; the earlier one stays then."""
    with _explained(path):
        handle, draft = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".partial", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                _write_record(file, record)
            os.replace(draft, path)
        except OSError:
            os.unlink(draft)
            raise


def read_record(path: Path) -> ErasureRecord:
    """Return the record in a file. Raises `InvalidNotificationError` where it is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ErasureRecord)
    except OSError as error:
        raise InvalidNotificationError(f"cannot read {path}: {error.strerror}") from error
    except UNREADABLE_JSON as error:
        raise InvalidNotificationError(f"{path} is not a record of an erasure: {error}") from error


def _write_record(file: IO[bytes], record: ErasureRecord) -> None:
    file.write(msgspec.json.format(msgspec.json.encode(record), indent=1))
    files.sync(file)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError as error:
        raise RefusedError(f"{path} exists, and no record is overwritten: name another file") from error
    except OSError as error:
        raise RefusedError(f"cannot write the record {path}: {error.strerror}") from error


class DeletionPace:
    """The pace of deletions: how many may be under way at a time."""

    def __init__(self) -> None:
        self.limiter = anyio.CapacityLimiter(1)

    def answered(self, seconds: float) -> None:
        """Adjust the pace by how many seconds a deletion took."""
        now = int(self.limiter.total_tokens)
        self.limiter.total_tokens = min(now + 1, MAX_UNDER_WAY) if seconds <= SOON_SECONDS else max(now // 2, 1)


async def delete(
    backend: Backend, stream: str, sequences: Sequence[int], *, pace: DeletionPace, progress: Callable[[int], None]
) -> None:
    """Delete messages and have their bytes overwritten; one that is gone already is passed over.

    Raises `BackendError` where one cannot be deleted; others may have been deleted then.
    """
    failures: list[BackendError] = []

    async def delete_one(sequence: int) -> None:
        try:
            async with pace.limiter:
                began = anyio.current_time()
                with suppress(NotFoundError):
                    await steadily(partial(backend.delete_message, stream, sequence))
                pace.answered(anyio.current_time() - began)
        except BackendError as error:
            failures.append(error)
            deletions.cancel_scope.cancel()
        else:
            progress(1)

    for start in range(0, len(sequences), AT_A_TIME):
        async with anyio.create_task_group() as deletions:
            for sequence in sequences[start : start + AT_A_TIME]:
                deletions.start_soon(delete_one, sequence)
        if failures:
            raise failures[0]


async def steadily(request: Callable[[], Awaitable[T]]) -> T:
    """Return the result of a request, which is repeated while a leader is elected."""
    deadline = anyio.current_time() + PATIENCE_SECONDS
    while True:
        try:
            return await request()
        except UnavailableError:
            if anyio.current_time() > deadline:
                raise
            await anyio.sleep(AGAIN_SECONDS)


async def not_current(admin: Admin, stream: str, filters: Sequence[str]) -> Sequence[str]:
    """Return the servers whose replicas of a stream are not current, as the leader says. If there are none, return
    those whose replicas do not come to hold as many messages on these subjects as the leader's; without subjects all
    messages count.

    A leader calls a replica current that has received its log, whether or not it has carried out what the log says. So
    a replica that is slow, or that has just come back, holds messages that were deleted, and readers that it serves get
    them. Each server counts the messages of its own replica, and the count is compared with the leader's.

    Raises `BackendError`.
    """
    found = await admin.stream_info(stream)
    if found.behind or not found.cluster.followers:
        return found.behind
    asked = found.cluster.members
    differ = set(asked)
    with anyio.move_on_after(WITHIN_SECONDS):
        while differ:
            before = await _at_leader(admin, stream, filters)
            # The servers choose which of them counts, so each is asked after a few attempts.
            server, counted = await admin.administration().replica_count(stream, filter_subjects=filters)
            after = await _at_leader(admin, stream, filters)
            if min(before, after) <= counted <= max(before, after):
                differ.discard(server)
            elif server in asked:
                differ.add(server)
                await anyio.sleep(COUNT_AGAIN_SECONDS)
    return sorted(differ)


async def _at_leader(admin: Admin, stream: str, filters: Sequence[str]) -> int:
    if not filters:
        return (await admin.stream_info(stream)).messages
    return sum([sum((await admin.subject_counts(stream, subject=each)).values()) for each in filters])


def ignore(count: int) -> None:
    """Ignore the progress."""


class Unreached(Struct, frozen=True, kw_only=True):
    """A stream whose bytes cannot be erased or are not known, why, and what can be done about it."""

    where: str
    why: str
    cure: str
    waits: bool = False
    """Nothing is erased before this has passed."""
    unknown: bool = False
    """The stream may hold notifications to erase that no survey sees."""


class Survey(Struct, frozen=True, kw_only=True):
    """The result of a survey: the messages that were found, and those that cannot be erased."""

    findings: tuple[FoundMessages, ...]
    unreached: tuple[Unreached, ...]
    suspects: tuple[Suspect, ...] = ()
    """Tables, windows and counters that may hold something of it, and are left alone unless their keys are given."""

    @property
    def messages(self) -> int:
        return sum(len(finding.sequences) for finding in self.findings)

    @property
    def whole(self) -> bool:
        """Whether it is known that nothing is left to erase, on any replica."""
        return not self.findings and not any(each.waits or each.unknown for each in self.unreached)


class Eraser:
    """Erases what matches `where`, or the one notification of that `sequence`, and these `keys` of buckets
    (`<bucket>/<key>`, with their history).

    Raises `UnknownEventTypeError`, `InvalidIdentifierError`, and `InvalidNotificationError` unless either fields or a
    sequence name the notifications.
    """

    def __init__(
        self,
        admin: Admin,
        config: Config,
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
        self._admin = admin
        name = event_type_of(config, event_type)
        self._wanted = Wanted(name, config.notification_schema[name], where=where or {}, sequence=sequence)
        self._keys = [parse_key(key) for key in keys]
        self._found: dict[str, FoundMessages] = {}
        """The messages that the present survey has found, by stream."""
        self._known: dict[str, dict[int, int]] = {}
        """Sequences and store times of all messages that were found so far, also of erased ones, by stream."""
        self._what: dict[str, str] = {}
        """The relation of each of these streams to the notifications, for people."""
        conditions = [condition for _, condition in self._wanted.where.conditions]
        self._values = {value for each in conditions if isinstance(each, frozenset) for value in each}
        """Values of the notifications to erase, in the fields that name them."""
        self._not_current: dict[str, Sequence[str]] = {}
        """By stream, the servers whose replicas are not current, or hold other messages than the leader's."""
        self._met: set[str] = set()
        """The subjects of those keys that a survey has found."""
        self._suspects: tuple[Suspect, ...] | None = None
        """Searched for once: buckets are read whole for it."""

    def erased(self, left: Survey) -> dict[str, int]:
        """Return the number of messages that were found and erased, by stream, where `left` is what remains."""
        remaining = {finding.stream: finding.sequences for finding in left.findings}
        gone = {stream: len(found.keys() - remaining.get(stream, ())) for stream, found in self._known.items()}
        return {stream: count for stream, count in gone.items() if count}

    async def survey(self) -> Survey:
        """Search for the notifications and their copies, without a change. Raises `BackendError`."""
        self._not_current.clear()
        infos = {name: await self._admin.stream_info(name) for name in await self._admin.stream_names()}
        self._found.clear()
        await self._survey_own(infos)
        await self._survey_copies(infos)
        await self._survey_others(infos)
        findings = tuple(finding for finding in self._found.values() if finding.sequences)
        # A delayed message has been in the stream of delayed messages, whether or not any waits there now.
        schedules = delayed_messages.stream_of(self._wanted.stream)
        concerned = {finding.stream for finding in findings} | {schedules} & infos.keys()
        unreached = [each for stream in sorted(concerned) for each in _unreached(stream, infos[stream])]
        # Also of those that hold nothing: an erasure before this one may have left the bytes on such a replica.
        unreached += [_lagging(stream, servers) for stream, servers in sorted(self._not_current.items()) if servers]
        if self._wanted.stream not in infos:
            unreached.append(_missing(self._wanted.stream))
        unreached += [_without_keys(stream, count) async for stream, count in self._keys_not_met(infos)]
        if self._suspects is None:
            self._suspects = tuple(await copies.find_suspects(self._admin, infos, self._values))
        return Survey(findings=findings, unreached=tuple(unreached), suspects=self._suspects)

    async def erase(self, survey: Survey, *, audit: Path, progress: Progress = ignore) -> Survey:
        """Erase what the survey found, and what is stored meanwhile, and return a survey of what is left.

        `audit` gets a record that says what was done, and nothing of what was erased: once before, with the state
        `begun`, and once after. A survey that found nothing is recorded as well. Raises `RefusedError`, before anything
        is done, where the record's file exists or cannot be written, the event's own stream denies it, or a stream has
        replicas that are not current.
        """
        for each in survey.unreached:
            if each.waits or (each.where == self._wanted.stream and each.why in DENIALS.values()):
                raise RefusedError(f"{each.where}: {each.why}; nothing was erased. {each.cure.capitalize()}")
        record = self._record(survey)
        try:
            create_record(audit, record)
        except RefusedError as error:
            raise RefusedError(f"{error}. Nothing was erased") from error
        if not survey.findings:
            return survey
        found, left, pace = survey, survey, DeletionPace()
        for _ in range(ROUNDS):
            for finding in reversed(_reachable(found)):  # copies before what they are recognised by
                await delete(self._admin, finding.stream, finding.sequences, pace=pace, progress=progress)
            left = await steadily(self._survey_again)
            if not _reachable(found := left):
                break
        ended = datetime.now(UTC)
        erased = self.erased(left)
        whole = structs.replace(
            record,
            state="done" if left.whole else "incomplete",
            ended=ended.isoformat(),
            subjects_on_disk_until=(ended + INDEX_WITHIN).isoformat(),
            found=self._findings(),
            not_reached=[msgspec.to_builtins(each) for each in left.unreached],
            erased=erased,
            left=list(left.findings),
        )
        try:
            replace_record(audit, whole)
        except RefusedError as error:
            raise RefusedError(
                f"{sum(erased.values())} were erased, {left.messages} are left, and the record says only that the "
                f"erasure was begun: {error}. Keep the record, which lists the messages found, and erase again with "
                "another record"
            ) from error
        return left

    async def _survey_own(self, infos: Mapping[str, StreamInfo]) -> None:
        wanted = self._wanted
        if wanted.stream in infos:
            filters = topics.filter_subjects(wanted.where)
            what = f"notifications of {wanted.event_type}"
            await self._add_counted(wanted.stream, what, wanted.matches, filters)
        configs = {name: info.config for name, info in infos.items()}
        for stream in infos:
            if carrier := copies.carrier(stream, configs):
                await self._add(stream, f"copies of {wanted.stream}", partial(wanted.carried_by, carrier))
        for stream, subjects in self._given_keys(infos).items():
            is_one = partial(_is_one_of, frozenset(subjects))
            await self._add_counted(stream, "keys that were given", is_one, subjects)

    def _given_keys(self, infos: Mapping[str, StreamInfo]) -> dict[str, list[str]]:
        """Return the subjects of the keys, by stream. Raises `NotFoundError`."""
        given: dict[str, list[str]] = {}
        for holder, key in self._keys:
            stream, subject = subject_of_key(infos, holder, key)
            given.setdefault(stream, []).append(subject)
        return given

    async def _keys_not_met(self, infos: Mapping[str, StreamInfo]) -> AsyncIterator[tuple[str, int]]:
        """Yield the streams of given keys that this survey has not found, and none before it, and how many they are."""
        for stream, subjects in self._given_keys(infos).items():
            for subject in set(subjects) - self._met:
                if await self._admin.subject_counts(stream, subject=subject):
                    self._met.add(subject)
            if count := len(set(subjects) - self._met):
                yield stream, count

    async def _survey_copies(self, infos: Mapping[str, StreamInfo]) -> None:
        """Survey the streams that mirror or source a surveyed stream, or the event type's own even if that is gone."""
        own = self._wanted.stream
        waiting = list({own: None, **self._found})
        mirrors = {own}
        seen: set[tuple[str, str]] = set()
        while waiting:
            origin = waiting.pop()
            for name, info in infos.items():
                if (origin, name) not in seen and (relation := copies.relation(info.config, origin)):
                    seen.add((origin, name))
                    waiting.append(name)
                    if relation == "mirror" and origin in mirrors:
                        mirrors.add(name)
                    copied = self._copied_from(origin, name, relation, same_sequences=origin in mirrors)
                    await self._add(name, f"{relation} of {origin}", copied)

    def _copied_from(self, origin: str, name: str, relation: str, *, same_sequences: bool) -> Matches:
        """Return a function that tells whether a message is a copy, also where `origin` has lost the original."""
        known = self._known.get(origin, {})
        if same_sequences:
            known = {**self._known.get(self._wanted.stream, {}), **known}
        return partial(self._wanted.copied_from, origin, name, relation, known, same_sequences=same_sequences)

    async def _survey_others(self, infos: Mapping[str, StreamInfo]) -> None:
        """Survey the streams that hold messages of the event type's subjects, as one restored under another name."""
        wanted = self._wanted
        known = self._known.get(wanted.stream, {})
        for name in infos.keys() - self._found.keys():
            if name.startswith(NO_NOTIFICATIONS):
                continue
            if await self._admin.subject_counts(name, subject=wanted.subjects):
                await self._add(name, f"messages of {wanted.subjects}", partial(wanted.kept_in, name, known))

    async def _add_counted(self, stream: str, what: str, matches: Matches, filters: Sequence[str]) -> None:
        """Add the matching messages, and make sure that the server counts no more of them on the subjects that match.

        Messages that are stored meanwhile are searched for as well. Raises `UnavailableError` where the two do not
        agree.
        """
        last = await self._add(stream, what, matches)
        for _ in range(ROUNDS):
            counts = [await self._admin.subject_counts(stream, subject=each) for each in filters]
            by_subject = chain.from_iterable(each.items() for each in counts)
            counted = sum(count for subject, count in by_subject if matches(Message(subject=subject, data=b"")))
            if counted <= len(self._found[stream].sequences):
                return
            last = await self._add(stream, what, matches, after=last)
            if counted <= len(self._found[stream].sequences):
                return  # the others were stored after the reading before; more of them may be under way
        raise UnavailableError(
            f"{stream}: the server counts {counted} messages that match, and reading finds "
            f"{len(self._found[stream].sequences)}: begin again"
        )

    async def _add(self, stream: str, what: str, matches: Matches, *, after: int = 0) -> int:
        """Add the messages that match after a sequence, and return the sequence up to which the stream was read."""
        # Without subjects all messages are read.
        filters = topics.filter_subjects(self._wanted.where) if stream == self._wanted.stream else ()
        if not after:  # before the reading, which may be served by any of the replicas
            self._not_current[stream] = await not_current(self._admin, stream, filters)
        last = (await self._admin.stream_info(stream)).last_sequence
        messages = dict(self._found[stream].messages) if stream in self._found else {}
        async for message in copies.messages_of(self._admin, stream, after=after, last=last, subjects=filters):
            if matches(message):
                messages[message.sequence] = message.timestamp_ns
                if stream == self._wanted.stream:
                    self._values |= self._values_of(message)
        self._known.setdefault(stream, {}).update(messages)
        self._what[stream] = what
        self._found[stream] = _finding(stream, what, messages)
        return last

    def _values_of(self, message: Message) -> set[str]:
        """Return the values of a notification in the fields that named it; in all fields, where it was named by its
        id.
        """
        where = self._wanted.where
        positions = [position for position, _ in where.conditions] or range(1, len(where.topic.key_order) + 1)
        with suppress(UndecodableError):
            tokens = topics.decode_subject(message.subject)
            return {tokens[position] for position in positions if position < len(tokens)}
        return set()

    async def _survey_again(self) -> Survey:
        """Survey again when the replicas are current, but wait for them no longer than `CATCH_UP_SECONDS`."""
        with anyio.move_on_after(CATCH_UP_SECONDS):
            for stream in [stream for stream, known in self._known.items() if known]:
                while (await self._admin.stream_info(stream)).behind:  # noqa: ASYNC110 - no server announces it
                    await anyio.sleep(POLL_SECONDS)
        return await self.survey()

    def _findings(self) -> list[FoundMessages]:
        return [_finding(stream, self._what[stream], known) for stream, known in self._known.items() if known]

    def _record(self, survey: Survey) -> ErasureRecord:
        return ErasureRecord(
            state="begun" if survey.findings else "nothing found",
            begun=datetime.now(UTC).isoformat(),
            by=audit.this_user(),
            event_type=self._wanted.event_type,
            stream=self._wanted.stream,
            by_fields=self._wanted.fields,
            by_id=self._wanted.sequence,
            by_keys_of=sorted({holder for holder, _ in self._keys}),
            found=self._findings(),
            not_reached=[msgspec.to_builtins(each) for each in survey.unreached],
            may_hold_copies=[
                {"kind": each.kind, "name": each.name, "keys": each.keys, "named": len(each.named)}
                for each in survey.suspects
            ],
            not_looked_at=list(ELSEWHERE),
        )


def _unreached(stream: str, info: StreamInfo) -> list[Unreached]:
    config = info.config
    if denied := next((why for field, why in DENIALS.items() if config.get(field)), ""):
        cure = "delete the stream, or let a backup of it be cleansed and restored in its place"
        return [Unreached(where=stream, why=denied, cure=cure)]
    found = []
    if config.storage != "memory" and info.messages < info.last_sequence:
        found.append(
            Unreached(
                where=stream,
                why="messages that were replaced, purged or too old may have left their bytes on disk",
                cure="a backup has only what is stored: restore one in the stream's place; or encrypt at rest",
            )
        )
    if republish := config.republish:
        found.append(
            Unreached(
                where=stream,
                why=f"it republishes to {republish['dest']}",
                cure="ask the owners of the subscribers there",
            )
        )
    return found


def _missing(stream: str) -> Unreached:
    return Unreached(
        where=stream,
        why="there is no such stream on this server, which may be the wrong one, or one that cannot read the stream",
        cure="make sure that no server has it (docs/operations/checks.md#js042), create it with "
        "`aviso-workers streams apply` and erase again",
        unknown=True,
    )


def _without_keys(stream: str, count: int) -> Unreached:
    """It does not say which keys: the record must not hold them."""
    return Unreached(
        where=stream,
        why=f"{count} of the keys that were given for it {'is' if count == 1 else 'are'} not there",
        cure="compare their spelling with the keys that the survey names, and leave out what was erased before",
        unknown=True,
    )


def _lagging(stream: str, servers: Sequence[str]) -> Unreached:
    return Unreached(
        where=stream,
        why=f"its replica on {', '.join(servers)} is not current, and may keep the bytes on its disk",
        cure="wait until the server has caught up; start it where it does not run, or one of its name with an empty "
        "disk where its own is gone; then erase again",
        waits=True,
    )


def _reachable(survey: Survey) -> list[FoundMessages]:
    denied = {each.where for each in survey.unreached if each.why in DENIALS.values()}
    return [finding for finding in survey.findings if finding.stream not in denied]


def _finding(stream: str, what: str, messages: Mapping[int, int]) -> FoundMessages:
    ordered = sorted(messages)
    return FoundMessages(
        stream=stream,
        what=what,
        sequences=tuple(ordered),
        times_ns=tuple(messages[sequence] for sequence in ordered),
    )


def _is_one_of(subjects: frozenset[str], message: Message) -> bool:
    return message.subject in subjects
