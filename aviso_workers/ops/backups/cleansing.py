"""Messages taken out of a backup, so that what was erased from a stream does not come back with a restore.

The archive is written anew without them, entry by entry; sequences and consumers stay as they are. It is written
without compression, so that a cleansed backup may be several times as large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Struct

from aviso_workers import schema, subjects, topics
from aviso_workers.backends.jetstream.wire import Headers
from aviso_workers.codec import Message, NotificationReader
from aviso_workers.config import Config
from aviso_workers.errors import BackupError
from aviso_workers.ops.backups import archive, s2
from aviso_workers.ops.backups.archive import Entry
from aviso_workers.ops.backups.storing import Backup, Draft, Progress, ignore, opened
from aviso_workers.ops.backups.verifying import Counted, verify

__all__ = ["Cleansing", "Takes", "cleanse", "of_identifier", "of_subject", "plan_cleanse"]

SECOND = 1_000_000_000

Takes = Callable[[Entry], bool]
"""Whether a message is to go."""


class Cleansing(Struct, frozen=True, kw_only=True):
    """What cleansing a backup would do."""

    backup: Backup
    takes: Takes
    removed: int
    """Messages that would go."""
    state: Mapping[str, Any]
    """The stream's state without them."""


def of_identifier(config: Config, backup: Backup, where: Mapping[str, Any]) -> Takes:
    """The notifications that a filter lets through, as agents have it; a field that is left out takes any value.

    Raises `BackupError` where the stream is that of no configured event type, `InvalidIdentifierError`.
    """
    for name, event_type in config.notification_schema.items():
        if topics.stream_name(schema.topic_of(name, event_type).base) == backup.stream:
            reader = NotificationReader(name, event_type, where=schema.parse_where(name, event_type, where))
            return lambda entry: _is_read(reader, entry)
    raise BackupError(f"{backup.stream} is the stream of no configured event type: say --subject")


def of_subject(subject: str) -> Takes:
    """The messages of a subject, which may have the wildcards of NATS."""
    matches = subjects.pattern([subject]).fullmatch
    return lambda entry: matches(entry.name.decode()) is not None


def plan_cleanse(backup: Backup, takes: Takes, *, progress: Progress = ignore) -> Cleansing:
    """What `cleanse` would do. Raises `BackupError` where the backup is damaged, or an older server's."""
    if verify(backup) is None:
        raise BackupError(f"{backup.archive} was made by a nats-server before 2.15, and cannot be cleansed")
    in_memory = backup.config.get("storage") == "memory"
    kept = removed = size = 0
    first: Entry | None = None
    with opened(backup) as file:
        entries = archive.entries(Counted(file, progress))
        state: dict[str, Any] = msgspec.json.decode(next(entries).body)
        for entry in entries:
            if not entry.sequence:
                continue
            if takes(entry):
                removed += 1
                continue
            first = first or entry
            kept += 1
            size += archive.stored_bytes(entry, in_memory=in_memory)
    return Cleansing(backup=backup, takes=takes, removed=removed, state=_state(state, first, kept, size))


def cleanse(plan: Cleansing, *, progress: Progress = ignore) -> Backup:
    """Carry it out: the backup is replaced. Raises `BackupError`, and leaves the backup as it was then."""
    backup = plan.backup
    with Draft(backup.directory) as draft:
        with opened(backup) as file:
            draft.write_all(s2.written(_kept(archive.entries(Counted(file, progress)), plan)))
        return draft.finish(
            config=backup.config,
            state=plan.state,
            made=backup.made,
            server_version=backup.record.server_version if backup.record else None,
            cleansed=datetime.now(UTC),
        )


def _kept(entries: Iterator[Entry], plan: Cleansing) -> Iterator[bytes]:
    yield archive.MAGIC
    head = next(entries)
    yield archive.encode(head.name, msgspec.json.encode(plan.state), timestamp_ns=head.timestamp_ns)
    for entry in entries:
        if not entry.sequence or not plan.takes(entry):
            yield entry.raw
    yield archive.END


def _state(state: Mapping[str, Any], first: Entry | None, kept: int, size: int) -> dict[str, Any]:
    """A server checks that an empty stream begins after its end."""
    last_sequence = int(state["last_seq"])
    first_sequence = first.sequence if first else last_sequence + 1
    counted = {
        "messages": kept,
        "bytes": size,
        "first_seq": first_sequence,
        "last_seq": last_sequence,
        "num_deleted": last_sequence + 1 - first_sequence - kept,
        "consumer_count": state["consumer_count"],
    }
    times = {"last_ts": state["last_ts"]} | ({"first_ts": _rfc3339(first.timestamp_ns)} if first else {})
    return counted | times


def _rfc3339(timestamp_ns: int) -> str:
    seconds, nanoseconds = divmod(timestamp_ns, SECOND)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{nanoseconds:09d}Z"


def _is_read(reader: NotificationReader, entry: Entry) -> bool:
    message = Message(
        subject=entry.name.decode(),
        data=entry.body,
        headers=Headers(entry.headers),
        sequence=entry.sequence,
        timestamp_ns=entry.timestamp_ns,
    )
    return reader.matches(message)
