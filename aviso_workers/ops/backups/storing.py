"""Backups on disk: found, read, and written so that a half one is never taken for a whole one.

A backup is a directory in the layout of the nats CLI: `backup.json` with the stream's configuration and state, and the
archive. We add a record of how it was made, under a key of `backup.json` that the nats CLI passes over; a backup that
it made has none. Ours lie in `<directory>/<stream>/<time>`. While one is being written its directory has another name,
and a lock, by which whoever comes next can tell what nobody goes on writing.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import IO, Annotated, Any

import msgspec
from msgspec import Meta, Struct

from aviso_workers import streams
from aviso_workers.codec import UNREADABLE_JSON
from aviso_workers.errors import BackupError
from aviso_workers.ops.backups import archive
from aviso_workers.ops.backups.s2 import MalformedError

__all__ = [
    "Backup",
    "Draft",
    "Progress",
    "Record",
    "create_file",
    "damage",
    "find",
    "ignore",
    "load",
    "make_directory",
    "newest",
    "opened",
    "place_of",
    "places",
    "remove",
]

META = "backup.json"
OF_ENTRIES, OF_FILES = "stream.arc.s2", "stream.tar.s2"
"""Archives of nats-server 2.15 and newer, and older."""
UNFINISHED = ".unfinished-"
REPLACED = ".replaced"
NAMED_AFTER_TIME = re.compile(r"\d{8}T\d{6}\.\d{3}Z")
"""The name of a backup of ours, see `place_of`."""
DEPTHS = ("", "*", "*/*")
"""Where below a directory backups are: it is one itself, it has those of a stream, or those of several."""

Progress = Callable[[int], None]
"""Called with so many bytes more of an archive that were sent, written or read; not always in the same thread."""


def ignore(size: int) -> None:
    """A `Progress` that nobody looks at."""


Moment = Annotated[datetime, Meta(tz=True)]


class Record(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a backup was made, beside what the nats CLI keeps."""

    made: Moment
    """When the snapshot began, UTC."""
    server_version: str | None
    """Of the server that we were connected to; None where another program made the backup."""
    archive_sha256: str
    meta_sha256: str
    """Of configuration and state as JSON without spaces, its keys sorted."""
    cleansed: Moment | None = None
    """When messages were last removed from it."""


class _Meta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    config: dict[str, Any]
    state: dict[str, Any]
    aviso_workers: Record | None = None


class Backup(Struct, frozen=True, kw_only=True):
    """A backup of a stream, on disk."""

    directory: Path
    config: Mapping[str, Any]
    """JetStream's stream configuration, whole."""
    state: Mapping[str, Any]
    """JetStream's state of the stream when the snapshot began."""
    record: Record | None
    """None where another program made it."""
    made: datetime
    size: int
    """Bytes of the archive."""
    of_entries: bool
    """Whether a nats-server 2.15 or newer made the archive."""

    @property
    def stream(self) -> str:
        return str(self.config["name"])

    @property
    def archive(self) -> Path:
        return self.directory / (OF_ENTRIES if self.of_entries else OF_FILES)


def load(directory: Path) -> Backup:
    """The backup that a directory is, without a look into its archive. Raises `BackupError`."""
    try:
        _require_file(directory / META)
        meta = msgspec.json.decode((directory / META).read_bytes(), type=_Meta)
        msgspec.convert(meta.state, archive.StreamState)
        of_entries = (directory / OF_ENTRIES).exists()
        size = _require_file(directory / (OF_ENTRIES if of_entries else OF_FILES)).st_size
        written = (directory / META).stat().st_mtime
    except UNREADABLE_JSON as error:
        raise BackupError(f"{directory / META}: {error}") from error
    except OSError as error:
        below = next((f"; it holds {place}" for place in places(directory) if place != directory), "")
        raise BackupError(f"{directory} is no backup: {error.filename}: {error.strerror}{below}") from error
    name = meta.config.get("name")
    if not isinstance(name, str) or not streams.is_name(name):
        raise BackupError(f"{directory / META}: the stream's configuration has no name, or none that a stream can have")
    record = meta.aviso_workers
    return Backup(
        directory=directory,
        config=meta.config,
        state=meta.state,
        record=record,
        made=record.made if record else datetime.fromtimestamp(written, UTC),
        size=size,
        of_entries=of_entries,
    )


def _require_file(path: Path) -> os.stat_result:
    """Raise `BackupError` for a device or a pipe, which has no end or waits for somebody to write; OSError for none."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise BackupError(f"{path} is no regular file")
    return found


def find(directory: Path, *, stream: str | None = None) -> list[Backup]:
    """The backups in a directory, of all streams or of one, the oldest first. What cannot be read is left out."""
    found: list[Backup] = []
    for place in places(directory):
        with suppress(BackupError):
            found.append(load(place))
    return sorted((each for each in found if stream in (None, each.stream)), key=lambda each: each.made)


def places(directory: Path) -> list[Path]:
    """Return the directories that are or should be backups, one itself or some below, the readable and the others.

    What is named as a backup of ours, holds a file of one, or lies in a stream's directory beside one, should be one.
    """
    below = [found for depth in DEPTHS for found in ([directory] if not depth else directory.glob(depth))]
    candidates = [found for found in below if not found.name.startswith(UNFINISHED) and found.is_dir()]
    known = {found for found in candidates if _looks_like_backup(found)}
    of_streams = {found.parent for found in known if NAMED_AFTER_TIME.match(found.name)}
    return sorted(known | {found for found in candidates if found.parent in of_streams and found != directory})


def _looks_like_backup(directory: Path) -> bool:
    named = NAMED_AFTER_TIME.match(directory.name) is not None
    return named or any(os.path.lexists(directory / file) for file in (META, OF_ENTRIES, OF_FILES))


def newest(directory: Path, *, stream: str | None = None) -> datetime | None:
    """When the newest backup in a directory was begun, of any stream or of one; None where there is none."""
    return max((found.made for found in find(directory, stream=stream)), default=None)


def place_of(directory: Path, stream: str, made: datetime) -> Path:
    """Where in a directory a backup of ours goes."""
    return directory / stream / f"{made:%Y%m%dT%H%M%S}.{made.microsecond // 1000:03d}Z"


def damage(backup: Backup) -> str:
    """What shows without reading the archive's messages; empty where nothing does. Raises `BackupError`."""
    record = backup.record
    if record and _digest(backup.config, backup.state) != record.meta_sha256:
        return "backup.json has changed since it was written"
    with opened(backup) as file:
        if record and hashlib.file_digest(file, "sha256").hexdigest() != record.archive_sha256:
            return "the archive has changed since it was written"
        file.seek(0)
        return "" if archive.has_end(file, of_entries=backup.of_entries) else "the archive breaks off before its end"


@contextmanager
def opened(backup: Backup) -> Iterator[BufferedReader]:
    """The archive, to be read. Raises `BackupError` where it cannot be, or what is read is malformed."""
    try:
        with backup.archive.open("rb") as file:
            yield file
    except MalformedError as error:
        raise BackupError(f"{backup.archive} is damaged: {error}") from error
    except OSError as error:
        raise BackupError(f"cannot read {backup.archive}: {error.strerror}") from error


def make_directory(directory: Path) -> None:
    """Make a directory and those above it where they are missing, for nobody but their owner. Raises OSError."""
    if not directory.is_dir():
        make_directory(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)


def create_file(path: Path) -> IO[bytes]:
    """Open a new file to be written, which nobody but its owner can read. Raises OSError."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def remove(backup: Backup) -> None:
    """Raises `BackupError`."""
    leaving = backup.directory.with_name(UNFINISHED + backup.directory.name)
    try:
        backup.directory.rename(leaving)  # so that, if we are killed, the rest of it is not taken for a backup
        shutil.rmtree(leaving)
    except OSError as error:
        raise BackupError(f"cannot remove {backup.directory}: {error.strerror}") from error


class Draft:
    """A backup that is being written. It is at its place when it is finished, and not before; where the block is left
    earlier nothing of it stays. A backup that was there is replaced.

    Every method raises `BackupError` where the disk is full, or not ours to write to.
    """

    def __init__(self, place: Path) -> None:
        self._place = place.absolute()
        self._directory: Path
        self._lock: int
        self._file: IO[bytes]
        self._sha256 = hashlib.sha256()

    def __enter__(self) -> Draft:
        with self._explained():
            parent = self._place.parent
            make_directory(parent)
            _sweep(parent)
            self._directory = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=parent))  # for nobody else's eyes
            self._lock = _locked(self._directory)
            self._file = create_file(self._directory / OF_ENTRIES)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(OSError):  # what could not be written cannot be flushed either
            self._file.close()
        shutil.rmtree(self._directory, ignore_errors=True)  # renamed, where it was finished
        os.close(self._lock)

    def write(self, data: bytes) -> None:
        """More of the archive."""
        with self._explained():
            self._file.write(data)
        self._sha256.update(data)

    def write_all(self, pieces: Iterable[bytes]) -> None:
        for piece in pieces:
            self.write(piece)

    def finish(
        self,
        *,
        config: Mapping[str, Any],
        state: Mapping[str, Any],
        made: datetime,
        server_version: str | None,
        cleansed: datetime | None = None,
    ) -> Backup:
        """Raises `BackupError` also where the archive is not whole."""
        record = Record(
            made=made,
            server_version=server_version,
            archive_sha256=self._sha256.hexdigest(),
            meta_sha256=_digest(config, state),
            cleansed=cleansed,
        )
        with self._explained():
            _sync(self._file)
            self._file.close()
            self._check_end()
            meta = _Meta(config=dict(config), state=dict(state), aviso_workers=record)
            with create_file(self._directory / META) as file:
                file.write(msgspec.json.format(msgspec.json.encode(meta)) + b"\n")
                _sync(file)
            _sync_directory(self._directory)
            self._put_in_place()
        return load(self._place)

    def _check_end(self) -> None:
        path = self._directory / OF_ENTRIES
        try:
            with path.open("rb") as file:
                of_entries = archive.has_entries(file)
                file.seek(0)
                if not archive.has_end(file, of_entries=of_entries):
                    raise MalformedError("it breaks off before its end")
        except MalformedError as error:
            raise BackupError(f"{self._place}: the archive is not whole, and nothing of it is kept: {error}") from error
        if not of_entries:
            path.rename(path.with_name(OF_FILES))

    def _put_in_place(self) -> None:
        replaced = self._place.with_name(self._place.name + REPLACED)
        if self._place.exists():
            shutil.rmtree(replaced, ignore_errors=True)  # left by one who was killed before the last line
            self._place.rename(replaced)
        self._directory.rename(self._place)
        _sync_directory(self._place.parent)
        if replaced.exists():
            shutil.rmtree(replaced)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BackupError(f"cannot write {self._place}: {error.strerror}; nothing of it is kept") from error


def _digest(config: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    return hashlib.sha256(msgspec.json.encode({"config": config, "state": state}, order="sorted")).hexdigest()


def _sweep(parent: Path) -> None:
    """Remove what was being written by processes that are no more."""
    for left in parent.glob(f"{UNFINISHED}*"):
        with suppress(OSError):  # it is locked, or somebody else was faster
            lock = _locked(left)
            try:
                shutil.rmtree(left)
            finally:
                os.close(lock)


def _locked(directory: Path) -> int:
    """Raises `BlockingIOError` where somebody has it."""
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
