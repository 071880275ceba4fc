"""Buckets of keys as JetStream KV has them: what a backend offers, and what tables, leases and counts are kept in."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Mapping
from datetime import datetime
from typing import Protocol, TypeVar

import msgspec
from msgspec import Struct

from aviso_workers.aviso.codec import read_json
from aviso_workers.errors import ConflictError, InvalidKeyError, UndecodableError

T = TypeVar("T")

TTL = "Nats-TTL"
"""The header with the time after which the server forgets a message."""
LONGEST_KEY = 512
"""Bytes, as a bucket spells it."""
_UNIT_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}


class Entry(Struct, frozen=True, kw_only=True):
    """A key's value, or that it has none any more."""

    key: str
    data: bytes
    """The stored bytes; read them as `value`."""
    revision: int
    """Of all keys of the bucket: the greater is the newer."""
    time: datetime
    deleted: bool = False
    """It was deleted, or forgotten after its TTL."""
    message_id: str = ""
    """Of the put or the delete; empty where the bucket itself forgot the key."""
    headers: Mapping[str, str] = {}
    """Of the message that stores it, the server's own as well."""
    foreign: str = ""
    """Why it is known that no client has put the value; empty where that is not known. In a bucket of our own, such a
    key counts as `deleted`."""

    @property
    def value(self) -> bytes:
        """The value of the key. Raises `UndecodableError` where no client has put it."""
        if self.foreign:
            raise UndecodableError(self.foreign)
        return self.data

    @property
    def ttl_seconds(self) -> float | None:
        """How long after `time` the server forgets the key; None where it does not, or where a deletion is forgotten.

        The header is a duration of Go such as `90s` or `1h30m`, or whole seconds.
        """
        text = "" if self.deleted else self.headers.get(TTL, "")
        if text.isdecimal():
            return float(text)
        parts = re.findall(r"(\d{1,19}(?:\.\d{1,9})?)(ms|s|m|h)", text)
        return sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts) or None


def record_of(entry: Entry | None, kind: type[T]) -> T | None:
    """Return the record that an entry stores as JSON; None where there is none, or it is of a version that writes
    another one, or none of ours.
    """
    try:
        return read_json(entry.value, kind) if entry is not None and not entry.deleted else None
    except UndecodableError:
        return None


class KeyValue(Protocol):
    """A bucket of keys in JetStream KV. Keys are made of letters, digits and `-_=./`."""

    async def get(self, key: str) -> Entry | None: ...

    async def newest(self, key: str) -> Entry | None:
        """Return what `get` does, or the key's deletion for as long as it can be read."""

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        revision: int | None = None,
        ttl_seconds: float | None = None,
        message_id: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> int:
        """Store a value and return its revision.

        With `revision`, only if the key's newest revision is that one (0: the key must not exist); `ConflictError`
        otherwise. The revision of a `foreign` value has to be given, also where the key counts as deleted. The key is
        forgotten after `ttl_seconds` (1 or more), in a bucket that keeps no history; `RefusedError` where it does, or
        the server is older than 2.11. A repeat of a `message_id` within two minutes is stored once. `headers` are kept
        with the value.
        """

    async def delete(
        self,
        key: str,
        *,
        revision: int | None = None,
        ttl_seconds: float | None = None,
        message_id: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> int:
        """Remove a key and its history; returns the revision of that. Conditions as for `put`.

        To remove a key that is missing is not an error. The deletion itself can be read for a minute, or for
        `ttl_seconds`; where the server is older than 2.11, until the key is put again.
        """

    async def time(self) -> datetime:
        """Return the time of the server, which the times of entries are of."""

    async def keys(self) -> list[str]:
        """Return the keys that have a value, in alphabetical order."""

    async def entries(self) -> list[Entry]:
        """Return the newest of each key that has a value, oldest first."""

    async def revision(self) -> int:
        """Return the newest of the bucket; 0 where there was none yet."""

    def changes(
        self, key: str | None = None, *, after: int = 0, until: int | None = None
    ) -> AsyncGenerator[Entry, None]:
        """Return what the bucket holds of a key, or of all, after a revision, in order: up to `until`, else on and on
        as it comes, deletions as well. What was replaced meanwhile is left out, except for the bucket's history.

        Raises as `Backend.read` does.
        """


class BulkKeyValue(KeyValue, Protocol):
    """A bucket as a backend opens it, of which many keys can be written at once, and some be found among many."""

    async def put_many(self, values: Mapping[str, bytes | None]) -> None:
        """Store the values of these keys, and remove the keys whose value is None, all under way at once.

        Raises the error of the first that could not be stored; the others are stored or not.
        """

    async def next(self, keys: str, *, after: int = 0) -> Entry | None:
        """Return the first entry after a revision of a key that a filter takes, such as `index.*`, deletions as well;
        None where there is none.
        """


async def compare_and_set(
    bucket: KeyValue, key: str, *, read: Callable[[Entry | None], T], change: Callable[[T], T]
) -> tuple[T, T]:
    """Store as JSON what `change` returns for what `read` makes of a key's entry, and return the value before and now.

    Where somebody else has changed the key meanwhile, both are called again. Nothing is stored where the value stays
    equal, unless what is stored is `foreign`. Raises as `get` and `put` of the bucket do.
    """
    while True:
        entry = await bucket.newest(key)
        foreign = entry is not None and bool(entry.foreign)
        before = read(None if entry is None or (entry.deleted and not foreign) else entry)
        after = change(before)
        if after == before and not foreign:
            return before, before
        try:
            await bucket.put(key, msgspec.json.encode(after), revision=entry.revision if entry else 0)
        except ConflictError:
            continue
        return before, after


def ttl_text(seconds: float) -> str:
    """Return the header of a key that is to be forgotten after so many seconds."""
    return f"{round(seconds * 1000)}ms"


def encode_key(key: str) -> str:
    """Return any text as a bucket's key: what it cannot contain is written as `=` and the hexadecimal of its bytes.

    Raises `InvalidKeyError`.
    """
    if not isinstance(key, str):
        raise InvalidKeyError(f"key {key!r:.100}: it must be a text, found {type(key).__name__}: such as str(key)")
    try:
        raw = key.encode()
    except UnicodeEncodeError as error:
        raise InvalidKeyError(f"key {key!r} is not text: {error}") from error
    # A dot separates the tokens of a subject, none of which may be empty.
    spelled = re.sub(rb"[^-/_.a-zA-Z0-9]|(?<![^.])\.|\.(?![^.])", lambda found: b"=%02X" % found[0][0], raw).decode()
    if not 0 < len(spelled) <= LONGEST_KEY:
        raise InvalidKeyError(f"key {key!r}: it must have 1 to {LONGEST_KEY} bytes, found {len(spelled)} as spelled")
    return spelled


def decode_key(spelled: str) -> str:
    """Return the text that `encode_key` spelled so."""
    raw = re.sub(rb"=([0-9A-F]{2})", lambda found: bytes([int(found[1], 16)]), spelled.encode())
    return raw.decode("utf-8", "replace")
