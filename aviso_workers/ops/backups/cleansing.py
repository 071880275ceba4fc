"""Removal of messages from backups, so that messages erased from a stream do not come back with a restore.

Called by `backup cleanse`. Which messages are meant is judged by themselves, as `ops.erasure.copies` does on a server,
by the records of erasures, or by both. A message of a record is identified by its sequence and store time, which
mirrors, restored streams and copies of streams keep, and which differ in a stream that was recreated.

The archive is rewritten without them, entry by entry; sequences and consumers stay as they are. It is written
without compression, so that a cleansed backup may be several times as large. In a chain the newest backup is written
first: it no longer refers to messages that are removed from those before it, which are whole as long as they have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

from aviso_workers.aviso import schema, topics
from aviso_workers.aviso.codec import Message
from aviso_workers.backends.jetstream.wire import Headers
from aviso_workers.config import Config
from aviso_workers.errors import BackupError, UnknownEventTypeError
from aviso_workers.jetstream import subjects
from aviso_workers.jetstream.info import SnapshotState, SourceConfig, StreamConfig
from aviso_workers.ops.backups import archive, chains, s2
from aviso_workers.ops.backups.archive import ArchiveEntry, Takes
from aviso_workers.ops.backups.chains import verify
from aviso_workers.ops.backups.encryption import Identities
from aviso_workers.ops.backups.storage import Backup, Draft, Progress, ignore, load, locked_backups, sweep
from aviso_workers.ops.erasure import copies
from aviso_workers.ops.erasure.copies import Wanted
from aviso_workers.ops.erasure.erase import ErasureRecord


class CleansePlan(Struct, frozen=True, kw_only=True):
    """The plan to cleanse a backup, and all that are made after the same full one."""

    backup: Backup
    removed: Set[tuple[int, int]]
    """The messages that would be removed, as sequence and time in nanoseconds."""
    kept: int
    """The number of messages that the backup has then."""
    changes: Sequence[tuple[Backup, SnapshotState]]
    """The backups that change, each after those that it was made after, and the stream's state without the removed
    messages.
    """
    identities: Identities | None


def plan_cleanse(
    backup: Backup, takes: Takes, *, identities: Identities | None = None, progress: Progress = ignore
) -> CleansePlan:
    """Return the plan to cleanse a backup. A message is stored in one backup of a chain, and others refer to it, so all
    that are made after the same full one are searched, whichever of them is named.

    Raises `BackupError` where one of them is damaged, or an older server's.
    """
    if not backup.of_entries:
        raise BackupError(f"{backup.archive} was made by a nats-server before 2.15, and cannot be cleansed")
    # What a cleansing that was killed has left still has the messages that are to be removed.
    sweep(backup.directory.resolve().parent)
    family = chains.family(backup)
    for each in family:
        chains.require_identities(each, identities)
        verify(each, identities=identities)
    removed: set[tuple[int, int]] = set()
    for each in family:
        with chains.opened_own_entries(each, identities, progress=progress) as entries:
            removed.update(_identity(entry) for entry in entries if entry.sequence and takes(entry))
    changes, kept = [], 0
    for each in family:
        state, changed = _state_without(each, removed, identities)
        kept = state.messages if each.directory.samefile(backup.directory) else kept
        if changed:
            changes.append((each, state))
    return CleansePlan(backup=backup, removed=removed, kept=kept, changes=changes, identities=identities)


def cleanse(plan: CleansePlan, *, progress: Progress = ignore) -> Backup:
    """Cleanse as planned: the backups are replaced, the newest one first, so that each can be restored at every moment.
    It can be repeated where it was interrupted.

    Raises `BackupError`, and leaves the backup that it was replacing as it was.
    """
    for backup, state in reversed(plan.changes):
        _replace(backup, state, plan, progress)
    return load(plan.backup.directory)


def _replace(backup: Backup, state: SnapshotState, plan: CleansePlan, progress: Progress) -> None:
    record = backup.facts
    with ExitStack() as stack:
        draft = stack.enter_context(Draft(backup.directory, encrypt_to=record.encrypted_to))
        entries = stack.enter_context(chains.opened_entries(backup, plan.identities, progress=progress))
        kept = _kept(entries, state, plan.removed)
        if backup.previous:
            before = chains.chain(backup)[-2]
            earlier = stack.enter_context(chains.opened_entries(before, plan.identities))
            draft.write_all(s2.written(chains.encode_increment(kept, earlier)))
        else:
            draft.write_all(s2.written(archive.framed(kept)))
        if backup.record:
            record = structs.replace(record, digests_before=(*record.digests_before, record.digest))
        draft.finish(backup.config, state, structs.replace(record, cleansed=datetime.now(UTC)))


def _kept(
    entries: Iterator[ArchiveEntry], state: Mapping[str, Any], removed: Set[tuple[int, int]]
) -> Iterator[ArchiveEntry]:
    yield archive.with_state(next(entries), state)
    for entry in entries:
        if not entry.sequence or _identity(entry) not in removed:
            yield entry


def _identity(entry: ArchiveEntry) -> tuple[int, int]:
    return entry.sequence, entry.timestamp_ns


def _state_without(
    backup: Backup, removed: Set[tuple[int, int]], identities: Identities | None
) -> tuple[SnapshotState, bool]:
    """Return the stream's state without these messages, and whether it had any of them."""
    in_memory = StreamConfig(backup.config).storage == "memory"
    kept = size = 0
    first: tuple[int, int] | None = None
    changed = False
    with chains.opened_entries(backup, identities) as entries:
        state = SnapshotState(msgspec.json.decode(next(entries).body))
        for entry in entries:
            if not entry.sequence:
                continue
            if _identity(entry) in removed:
                changed = True
                continue
            first = first or _identity(entry)
            kept += 1
            size += archive.stored_bytes(entry, in_memory=in_memory)
    return archive.state_of(state, messages=kept, size=size, first=first), changed


class Forgotten:
    """A selection of messages to remove from backups: those that `wanted` matches, those in the records of erasures,
    and those of these `keys` (`<bucket>/<key>`, as `erase --key` takes them).
    """

    def __init__(
        self, wanted: Wanted | None = None, *, records: Sequence[ErasureRecord] = (), keys: Sequence[str] = ()
    ) -> None:
        self._wanted = wanted
        self._keys = {subject for key in keys for subject in copies.subjects_of_key(*copies.parse_key(key))}
        findings = [(record.stream, finding) for record in records for finding in record.found]
        self._erased = {message for _, finding in findings for message in finding.messages}
        self._originals = {
            (origin, message)
            for origin, finding in findings
            if finding.stream == origin
            for message in finding.messages
        }
        self._recorded = {finding.stream for _, finding in findings}
        self._broken_off = [record for record in records if record.state == "begun"]
        self._whole = [record for record in records if record.state != "begun"]

    def takes(self, backup: Backup) -> Takes:
        """Return a function that tells whether a message of the backup is to be removed."""
        carrier = copies.carrier(backup.stream, {backup.stream: backup.config})

        def takes(entry: ArchiveEntry) -> bool:
            if (entry.sequence, entry.timestamp_ns) in self._erased or entry.name.decode() in self._keys:
                return True
            message = _message(entry)
            return any(self._is_copy(stream, message) for stream in {backup.stream, carrier or backup.stream})

        return takes

    def _is_copy(self, stream: str, message: Message) -> bool:
        """Return whether a message of that stream is a copy, judged by the message alone."""
        if self._wanted and self._wanted.is_copy(stream, message):
            return True
        if (original := copies.original_in(stream, message)) is None:
            return False
        origin, found = original
        return (origin, (found.sequence, found.timestamp_ns)) in self._originals

    def doubts(self, backups: Iterable[Backup]) -> list[str]:
        """Return sentences on messages of these backups of which it is not known whether they are copies."""
        configs = {backup.stream: backup.config for backup in backups}
        doubts = [
            f"{stream} has other subjects than the streams whose messages it copies, so which of its messages are "
            "copies only the record of an erasure says: give it by --erasure"
            for stream in configs
            if self._wanted and stream not in self._recorded and _is_renamed(self._wanted.stream, stream, configs)
        ]
        for record in self._broken_off:
            if not any(_is_repetition(whole, of=record) for whole in self._whole):
                doubts.append(
                    f"the erasure of {record.event_type} of {record.begun} was broken off, so its record may not have "
                    "all: repeat it, and give the record of that as well"
                )
        return doubts


def one_of_each_chain(found: Iterable[Backup]) -> list[Backup]:
    """Return the first of the backups that are made after the same full one: `forget` rewrites all of them."""
    chosen: dict[Path, Backup] = {}
    for backup in found:
        try:
            full = chains.chain(backup)[0].directory
        except BackupError:
            full = backup.directory  # `forget` raises it again
        chosen.setdefault(full.resolve(), backup)
    return list(chosen.values())


def forget(backup: Backup, takes: Takes, *, identities: Identities | None = None, progress: Progress = ignore) -> int:
    """Remove messages from a backup and all that are made after the same full one, search them again, and return how
    many were removed. It takes seconds for a million.

    Raises `BackupError`, also where any of them is there afterwards.
    """
    with locked_backups(backup.directory.resolve().parent, alone=True):
        plan = plan_cleanse(backup, takes, identities=identities, progress=progress)
        if plan.removed:
            cleansed = cleanse(plan, progress=progress)
            if left := plan_cleanse(cleansed, takes, identities=identities, progress=progress).removed:
                raise BackupError(f"{backup.directory}: {len(left)} messages are still there")
        return len(plan.removed)


def of_identifier(
    config: Config, backups: Sequence[Backup], where: Mapping[str, Any], *, event_type: str = ""
) -> Wanted:
    """Return the notifications that a filter matches, as agents declare it; a field that is left out takes any value.

    Without an event type, it is the one whose stream is among the backups. Raises `BackupError` where that is none or
    not one alone, `UnknownEventTypeError`, `InvalidIdentifierError`.
    """
    declared = config.notification_schema
    if event_type and event_type not in declared:
        raise UnknownEventTypeError(event_type, declared)
    streams = {name: topics.stream_name(schema.topic_of(name, each).base) for name, each in declared.items()}
    there = {backup.stream for backup in backups}
    candidates = [event_type] if event_type else [name for name, stream in streams.items() if stream in there]
    if len(candidates) != 1:
        found = ", ".join(sorted(there)) or "no backup"
        raise BackupError(
            f"{found}: that is the stream of {'no' if not candidates else 'more than one'} configured event type: "
            "say --event, or --subject"
        )
    return Wanted(candidates[0], declared[candidates[0]], where=where)


def of_subject(subject: str) -> Takes:
    """Return a function that tells whether a message is of a subject, which may have the wildcards of NATS."""
    matches = subjects.pattern([subject]).fullmatch
    return lambda entry: matches(entry.name.decode()) is not None


_Configs = Mapping[str, Mapping[str, Any]]


def _is_renamed(origin: str, stream: str, configs: _Configs) -> bool:
    """Return whether a stream has messages of `origin`, maybe by way of others, under subjects that are not theirs, and
    without a header with theirs. A message sourced from the origin has that header, also in a mirror of the stream that
    sources it.
    """
    config = StreamConfig(configs[stream])
    others = {name: each for name, each in configs.items() if name != stream}
    mirror = config.mirror
    if mirror and _transformed(origin, [mirror], others) is not None:
        name = mirror.name
        return bool(mirror.subject_transforms) or (name != origin and _is_renamed(origin, name, others))
    further = [source for source in config.sources if source.name != origin]
    return bool(_transformed(origin, further, others))


def _transformed(origin: str, links: Iterable[SourceConfig], configs: _Configs) -> bool | None:
    """Return whether there is a subject transform on a way from `origin` to these mirrors and sources; None where there
    is no way.
    """
    found = None
    for link in links:
        name = link.name
        way: bool | None = False if name == origin else None
        if way is None and (config := configs.get(name)):
            others = {other: each for other, each in configs.items() if other != name}
            way = _transformed(origin, StreamConfig(config).origins, others)
        if way is not None:
            found = bool(found or way or link.subject_transforms)
    return found


def _is_repetition(record: ErasureRecord, *, of: ErasureRecord) -> bool:
    """Return whether an erasure may repeat another one, as far as records show: none has the values that were
    erased.
    """
    named = [(each.event_type, each.by_fields, each.by_id) for each in (record, of)]
    return named[0] == named[1] and record.begun > of.begun


def _message(entry: ArchiveEntry) -> Message:
    return Message(
        subject=entry.name.decode(),
        data=entry.body,
        headers=Headers(entry.headers),
        sequence=entry.sequence,
        timestamp_ns=entry.timestamp_ns,
    )
