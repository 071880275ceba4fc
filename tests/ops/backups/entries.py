"""Entries of an archive, as a nats-server 2.15 writes them, and backups that are made of them without a server."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from aviso_workers.jetstream.info import SnapshotState
from aviso_workers.ops.backups import archive, chains, s2
from aviso_workers.ops.backups.encryption import Identities
from aviso_workers.ops.backups.storage import Backup, Draft, new_record, place_of

TIME = "2026-01-01T00:00:00Z"
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
CONSUMER = archive.encode(b"consumers/index", b'{"config":{},"state":{"delivered":{"stream_seq":0}}}', timestamp_ns=1)


def message(sequence: int, body: bytes, *, subject: bytes = b"mars.od.1") -> bytes:
    headers = b"NATS/1.0\r\nNats-Msg-Id: 1\r\n\r\n"
    fields = (len(subject), sequence << 1, sequence, len(headers), len(body))
    return b"".join(map(varint, fields)) + subject + headers + body


def varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out += bytes((value & 0x7F | 0x80,))
        value >>= 7
    return out + bytes((value,))


def archived(messages: Mapping[int, bytes]) -> tuple[bytes, dict[str, object]]:
    """The archive of a stream with these messages and one consumer, and the stream's state."""
    stored = [message(sequence, messages[sequence]) for sequence in sorted(messages)]
    size = sum(
        archive.stored_bytes(entry, in_memory=False)
        for entry in archive.entries(io.BytesIO(packed(archive.MAGIC, *stored, archive.END)))
    )
    last = max(messages, default=0)
    state: dict[str, object] = {
        "messages": len(messages),
        "bytes": size,
        "first_seq": min(messages, default=last + 1),
        "last_seq": last,
        "consumer_count": 1,
        "first_ts": TIME,
        "last_ts": TIME,
    }
    head = archive.encode(archive.STATE, json.dumps(state).encode(), timestamp_ns=1)
    return b"".join((archive.MAGIC, head, CONSUMER, *stored, archive.END)), state


def packed(*pieces: bytes) -> bytes:
    return b"".join(s2.written(pieces))


def backed_up(
    directory: Path,
    messages: Mapping[int, bytes],
    *,
    since: Backup | None = None,
    encrypt_to: Sequence[str] = (),
    identities: Identities | None = None,
    hours: int = 0,
) -> Backup:
    """A backup of the stream MARS with these messages, made so many hours after the first, in `directory`/MARS."""
    data, state = archived(messages)
    made = BEGAN + timedelta(hours=hours)
    with Draft(place_of(directory, "MARS", made), encrypt_to=encrypt_to) as draft:
        if since is None:
            draft.write_all([packed(data)])
        else:
            with chains.opened_entries(since, identities) as before:
                now = archive.entries(io.BytesIO(packed(data)))
                draft.write_all(s2.written(chains.encode_increment(now, before)))
        previous = chains.link_to(since) if since else None
        record = new_record(made, server_version="2.15.0", previous=previous)
        return draft.finish({"name": "MARS", "subjects": ["mars.>"]}, SnapshotState(state), record)
