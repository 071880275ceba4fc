"""Search of backups for messages that were erased from a server, or are to be, and their removal.

Called by `backup cleanse`. It judges messages by themselves, as `ops.erasure.copies` does on a server, by the records
of erasures, or by both. A message of a record is identified by its sequence and store time, which mirrors, restored
streams and copies of streams keep, and which differ in a stream that was recreated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from aviso_workers.aviso import schema, topics
from aviso_workers.aviso.codec import Message
from aviso_workers.backends.jetstream.wire import Headers
from aviso_workers.config import Config
from aviso_workers.errors import BackupError, UnknownEventTypeError
from aviso_workers.jetstream import subjects
from aviso_workers.jetstream.info import SourceConfig, StreamConfig
from aviso_workers.ops.backups import chains
from aviso_workers.ops.backups.archive import ArchiveEntry, Takes
from aviso_workers.ops.backups.cleansing import cleanse, plan_cleanse
from aviso_workers.ops.backups.encryption import Identities
from aviso_workers.ops.backups.storage import Backup, Progress, ignore, locked_backups
from aviso_workers.ops.erasure import copies, suspects
from aviso_workers.ops.erasure.copies import Wanted
from aviso_workers.ops.erasure.records import ErasureRecord


class Forgotten:
    """A selection of messages to remove from backups: those that `wanted` matches, those in the records of erasures,
    and those of these `keys` (`<bucket>/<key>`, as `erase --key` takes them).
    """

    def __init__(
        self, wanted: Wanted | None = None, *, records: Sequence[ErasureRecord] = (), keys: Sequence[str] = ()
    ) -> None:
        self._wanted = wanted
        self._keys = {subject for key in keys for subject in suspects.subjects_of_key(*suspects.parse_key(key))}
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
