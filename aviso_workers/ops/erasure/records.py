"""The record of an erasure: who erased which kind of messages where and when, without anything of their content.

A message is identified by its sequence and its store time, which mirrors, backups and restored streams keep, and
which a stream that is recreated does not repeat. So `backup cleanse` can go by the record alone. A record is readable
by its owner only, and replaces no file that is there.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

import msgspec
from msgspec import Struct

from aviso_workers import files
from aviso_workers.aviso.codec import UNREADABLE_JSON
from aviso_workers.errors import InvalidNotificationError, RefusedError


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


def create(path: Path, record: ErasureRecord) -> None:
    """Write the record to a new file. Raises `RefusedError` where the file exists, or cannot be written."""
    with _explained(path), files.create_file(path) as file:
        try:
            _write(file, record)
        except OSError:
            path.unlink()
            raise


def replace(path: Path, record: ErasureRecord) -> None:
    """Replace our own earlier record as a whole. Raises `RefusedError`; the earlier one stays then."""
    with _explained(path):
        handle, partial = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".partial", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                _write(file, record)
            os.replace(partial, path)
        except OSError:
            os.unlink(partial)
            raise


def read(path: Path) -> ErasureRecord:
    """Return the record in a file. Raises `InvalidNotificationError` where it is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ErasureRecord)
    except OSError as error:
        raise InvalidNotificationError(f"cannot read {path}: {error.strerror}") from error
    except UNREADABLE_JSON as error:
        raise InvalidNotificationError(f"{path} is not a record of an erasure: {error}") from error


def _write(file: IO[bytes], record: ErasureRecord) -> None:
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
