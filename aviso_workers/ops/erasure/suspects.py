"""Search for tables, windows and counters of an account that may hold something of the notifications to erase.

Agents make what they like of notifications, so only people can know which keys stand for somebody. They are named here
for a review: every bucket that apps fill, with those of its keys that have a value of what is to be erased in
their name or in their values.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from msgspec import Struct

from aviso_workers.aviso.codec import UNREADABLE_JSON
from aviso_workers.backends import Admin, Message, StreamInfo
from aviso_workers.errors import BackendError, InvalidNotificationError, NotFoundError
from aviso_workers.jetstream.key_value import decode_key
from aviso_workers.jetstream.specs import BUCKET
from aviso_workers.state import consumer_records, failure_counts, own_buckets, own_streams, table_records
from aviso_workers.state.own_streams import COUNTERS

OF_KEYS = "$KV."
PIECE = re.compile(r"[^\W_]+|[\W_]")
"""A word of letters and digits, or one character between words."""
POSITIONS = {"counted", "sequence", "stored", "closed", "time"}
"""The fields of the state of a window beside the values of windows: sequences and times."""

POSITIONS_ONLY = ("timers", "leases", "live")
"""Kinds of buckets that hold only sequences and times."""
NOTED = tuple(f"/{note}" for note in consumer_records.NOTES)
"""What of the `state` of an app has the texts of errors; the rest are positions, versions and declarations."""

Kind = Literal["table", "windows", "counter", "bucket"]


class Suspect(Struct, frozen=True, kw_only=True):
    """A table, windows or a counter that may hold something of the notifications to erase."""

    kind: Kind
    name: str
    """The name as `--key` takes it before the slash."""
    keys: int
    named: tuple[str, ...] = ()
    """Those keys that have a value of what is to be erased, in their name or in their value."""
    unread: str = ""
    """Why it could not be read; empty where it was."""


async def find(admin: Admin, infos: Mapping[str, StreamInfo], values: Iterable[str]) -> list[Suspect]:
    """Return all tables, windows and counters that hold any key, by name."""
    wanted = _Values(values)
    found = []
    for stream in sorted(infos):
        if stream.startswith(BUCKET) and own_buckets.kind_of(stream.removeprefix(BUCKET)) not in POSITIONS_ONLY:
            found.append(await _bucket(admin, stream.removeprefix(BUCKET), wanted))
        elif app := own_streams.app_of(COUNTERS, stream):
            found += await _counters(admin, app, wanted)
    return [suspect for suspect in found if suspect.keys or suspect.unread]


def parse_key(text: str) -> tuple[str, str]:
    """Parse the value of `--key`: a bucket or `<app>__<counter>`, and a key. Raises `InvalidNotificationError`."""
    holder, slash, key = text.partition("/")
    if not (holder and slash and key):
        raise InvalidNotificationError(f"{text!r} is not BUCKET/KEY, such as index__sums/od")
    return holder, key


def subjects_of_key(holder: str, key: str) -> tuple[str, str]:
    """Return the two subjects that a key may have: that in a bucket, and that in a counter `<app>__<counter>`."""
    app, _, name = holder.partition("__")
    return f"{OF_KEYS}{holder}.{key}", f"{table_records.COUNTERS_SUBJECT}.{app}.{name}.{key}"


def subject_of_key(infos: Mapping[str, StreamInfo], holder: str, key: str) -> tuple[str, str]:
    """Return the stream and the subject of a key, in the streams that exist. Raises `NotFoundError`."""
    of_bucket, of_counter = subjects_of_key(holder, key)
    if f"{BUCKET}{holder}" in infos:
        return f"{BUCKET}{holder}", of_bucket
    if (counters := own_streams.of_app(COUNTERS, holder.partition("__")[0])) in infos:
        return counters, of_counter
    raise NotFoundError(f"no bucket {holder!r}, and no counter")


async def _bucket(admin: Admin, bucket: str, wanted: _Values) -> Suspect:
    found = own_buckets.kind_of(bucket)
    kind: Kind = found if found in ("table", "windows") else "bucket"
    newest: dict[str, bool] = {}
    named: set[str] = set()
    try:
        async for message in messages(admin, f"{BUCKET}{bucket}"):
            key = message.subject.removeprefix(f"{OF_KEYS}{bucket}.")
            if kind == "windows" and key.startswith("="):
                continue  # how far time has come, of all keys
            if found == "state" and not key.endswith(NOTED):
                continue
            if found == "failures" and not key.endswith(failure_counts.DECIDED):
                continue  # counts
            newest[key] = bool(message.data)
            if wanted.any_in(decode_key(key)) or any(map(wanted.any_in, _texts(message.data))):
                named.add(key)
    except BackendError as error:
        return Suspect(kind=kind, name=bucket, keys=0, unread=str(error))
    return Suspect(kind=kind, name=bucket, keys=sum(newest.values()), named=tuple(sorted(named)))


async def _counters(admin: Admin, app: str, wanted: _Values) -> list[Suspect]:
    keys: dict[str, set[str]] = {}
    prefix = f"{table_records.COUNTERS_SUBJECT}.{app}."
    try:
        subjects = await admin.subject_counts(own_streams.of_app(COUNTERS, app), subject=f"{prefix}>")
    except BackendError as error:
        return [Suspect(kind="counter", name=f"all counters of {app}", keys=0, unread=str(error))]
    for subject in subjects:
        name, key = subject.removeprefix(prefix).split(".", 1)
        keys.setdefault(f"{app}__{name}", set()).add(key)
    return [
        Suspect(
            kind="counter",
            name=name,
            keys=len(of_one),
            named=tuple(sorted(key for key in of_one if wanted.any_in(decode_key(key)))),
        )
        for name, of_one in sorted(keys.items())
    ]


async def messages(
    admin: Admin, stream: str, *, after: int = 0, last: int | None = None, subjects: Sequence[str] = ()
) -> AsyncIterator[Message]:
    """Yield the messages of a stream after a sequence, up to `last` or its present end, of some subjects or of all."""
    if last is None:
        last = (await admin.stream_info(stream)).last_sequence
    reading = admin.read_chunks(stream, filter_subjects=subjects, start_sequence=after + 1, last_sequence=last)
    async with aclosing(reading):
        async for chunk in reading:
            for message in chunk:
                yield message


def _texts(data: bytes) -> Iterator[str]:
    """Yield all texts, numbers and keys of a JSON value; of data that is not JSON, the whole as a text."""
    try:
        value = msgspec.json.decode(data) if data else None
    except UNREADABLE_JSON:
        yield data.decode("utf-8", "replace")
        return
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            fields: dict[str, Any] = value
            if "counted" in fields and "open" in fields:
                fields = {name: inside for name, inside in fields.items() if name not in POSITIONS}
            yield from fields
            waiting += fields.values()
        elif isinstance(value, list):
            waiting += value
        elif value is not None and not isinstance(value, bool):
            yield str(value)


class _Values:
    """Values that are searched in texts. A text takes the same time for one value as for many."""

    def __init__(self, values: Iterable[str]) -> None:
        self._values = frozenset(filter(None, values))
        self._counts = {len(PIECE.findall(value)) for value in self._values}
        """The numbers of pieces that the values have."""

    def any_in(self, text: str) -> bool:
        """Return whether one of the values is in a text, without being a part of a longer word or number."""
        if text in self._values:
            return True
        pieces = PIECE.findall(text)
        return any(
            "".join(pieces[start : start + count]) in self._values
            for count in self._counts
            for start in range(len(pieces) - count + 1)
        )
