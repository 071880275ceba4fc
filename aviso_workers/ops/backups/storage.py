"""Backups on disk: found, read, and written so that an incomplete one is never taken for a complete one.

A backup is a directory in the layout of the nats CLI: `backup.json` with the stream's configuration and state, and the
archive. We add a record of how it was made, under a key of `backup.json` that the nats CLI passes over; a backup that
it made has none. Ours lie in `<directory>/<stream>/<time>`. While one is being written its directory has another name,
and a lock, which the next command finds free where the process that wrote it was killed.

The name of the archive says what it is: `stream...` is all of a stream as a server has it, `increment...` what the
backup before it does not have (`chains`), and `.age` at the end that it is encrypted (`encryption`).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec
from msgspec import Meta, Struct, structs

from aviso_workers import files
from aviso_workers.aviso.codec import UNREADABLE_JSON
from aviso_workers.errors import BackupError
from aviso_workers.jetstream import specs
from aviso_workers.jetstream.info import SnapshotState
from aviso_workers.ops.backups import archive, encryption
from aviso_workers.ops.backups.s2 import MalformedError, Readable

META = "backup.json"
OF_ENTRIES, OF_FILES = "stream.arc.s2", "stream.tar.s2"
"""Archives of nats-server 2.15 and newer, and older."""
INCREMENT = "increment.arc.s2"
ENCRYPTED = ".age"
ARCHIVES = (INCREMENT + ENCRYPTED, OF_ENTRIES + ENCRYPTED, INCREMENT, OF_ENTRIES, OF_FILES)
"""In the order in which they are looked for: a decrypted file beside an encrypted one is ignored."""
UNFINISHED = ".unfinished-"
REPLACED = ".replaced"
NAMED_AFTER_TIME = re.compile(r"\d{8}T\d{6}\.\d{3}Z")
"""The name of a backup of ours, see `place_of`."""
DEPTHS = ("", "*", "*/*")
"""Where below a directory backups are: it is one itself, it has those of a stream, or those of several."""

Progress = Callable[[int], None]
"""Called with so many bytes more of an archive that were sent, written or read; not always in the same thread."""


def ignore(size: int) -> None:
    """Ignore the progress."""


class CountedFile:
    """A file that reports how many bytes of it were read."""

    def __init__(self, file: Readable, progress: Progress) -> None:
        self._file = file
        self._progress = progress

    def read(self, size: int, /) -> bytes:
        data = self._file.read(size)
        self._progress(len(data))
        return data


Moment = Annotated[datetime, Meta(tz=True)]
DirectoryName = Annotated[str, Meta(pattern=r"^(?!\.{1,2}\Z)[^/\x00]+\Z")]


class Previous(Struct, frozen=True):
    """The link of an increment to the backup that it was made after."""

    directory: DirectoryName
    """Its name, beside the increment's."""
    digest: str


class BackupRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The record of how a backup was made, beside what the nats CLI keeps."""

    made: Moment
    """When the snapshot began, UTC."""
    server_version: str | None
    """The version of the server that we were connected to; None where another program made the backup."""
    archive_sha256: str
    """The digest of the archive's file, as it is on the disk."""
    meta_sha256: str
    """The digest of configuration, state and `previous` as JSON without spaces, its keys sorted."""
    previous: Previous | None = None
    """None where the backup is a full one."""
    encrypted_to: tuple[str, ...] = ()
    """Public keys of age."""
    cleansed: Moment | None = None
    """When messages were last removed from it."""
    digests_before: tuple[str, ...] = ()
    """The digests before each cleansing; increments name one of them."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{self.meta_sha256} {self.archive_sha256}".encode()).hexdigest()


def new_record(made: datetime, *, server_version: str | None, previous: Previous | None = None) -> BackupRecord:
    """Return the record of a backup in the making, which gets its digests from `Draft.finish`."""
    return BackupRecord(made=made, server_version=server_version, archive_sha256="", meta_sha256="", previous=previous)


class _Meta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    config: dict[str, Any]
    state: dict[str, Any]
    aviso_workers: BackupRecord | None = None


class Backup(Struct, frozen=True, kw_only=True):
    """A backup of a stream as its directory has it, with the stream's configuration and state."""

    directory: Path
    config: Mapping[str, Any]
    """JetStream's stream configuration, whole."""
    state: SnapshotState
    """JetStream's state of the stream when the snapshot began."""
    record: BackupRecord | None
    """None where another program made it."""
    made: datetime
    size: int
    """Bytes of the archive."""
    archive: Path

    @property
    def stream(self) -> str:
        return str(self.config["name"])

    @property
    def of_entries(self) -> bool:
        """Whether a nats-server 2.15 or newer made the archive."""
        return self.archive.name != OF_FILES

    @property
    def encrypted(self) -> bool:
        return self.archive.name.endswith(ENCRYPTED)

    @property
    def facts(self) -> BackupRecord:
        """The record; where another program made the backup, what would be in it."""
        return self.record or new_record(self.made, server_version=None)

    @property
    def previous(self) -> Previous | None:
        """The link to the backup that this one was made after; None where it is a full one."""
        return self.facts.previous


def load(directory: Path) -> Backup:
    """Return the backup in a directory, without reading its archive. Raises `BackupError`."""
    _put_back(directory)
    try:
        _require_file(directory / META)
        meta = msgspec.json.decode((directory / META).read_bytes(), type=_Meta)
        msgspec.convert(meta.state, archive.StreamState)
        found = next((directory / name for name in ARCHIVES if (directory / name).exists()), directory / OF_FILES)
        size = _require_file(found).st_size
        written = (directory / META).stat().st_mtime
    except UNREADABLE_JSON as error:
        raise BackupError(f"{directory / META}: {error}") from error
    except OSError as error:
        below = next((f"; it holds {place}" for place in places(directory) if place != directory), "")
        raise BackupError(f"{directory} is not a backup: {error.filename}: {error.strerror}{below}") from error
    name = meta.config.get("name")
    if not isinstance(name, str) or not specs.is_name(name):
        raise BackupError(f"{directory / META}: the stream's configuration has no name, or none that a stream can have")
    record = meta.aviso_workers
    if found.name.startswith(INCREMENT) != bool(record and record.previous) or (
        found.name.endswith(ENCRYPTED) and not (record and record.encrypted_to)
    ):
        raise BackupError(
            f"{directory / META} does not match {found.name}: one of the two files belongs to another backup"
        )
    return Backup(
        directory=directory,
        config=meta.config,
        state=SnapshotState(meta.state),
        record=record,
        made=record.made if record else datetime.fromtimestamp(written, UTC),
        size=size,
        archive=found,
    )


def _require_file(path: Path) -> os.stat_result:
    """Return the status of a regular file. Raises `BackupError` for a device or a pipe, where a read may never end, and
    OSError for none.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise BackupError(f"{path} is not a regular file")
    return found


def find(directory: Path, *, stream: str | None = None) -> list[Backup]:
    """Return the backups in a directory, of all streams or of one, the oldest first.

    What cannot be read is left out.
    """
    found: list[Backup] = []
    for place in places(directory):
        with suppress(BackupError):
            found.append(load(place))
    return sorted((each for each in found if stream in (None, each.stream)), key=lambda each: each.made)


def places(directory: Path) -> list[Path]:
    """Return the directories that are or should be backups, the given one or some below, also those that cannot be
    read.

    What is named as a backup of ours, holds a file of one, or lies in a stream's directory beside one, should be one.
    """
    below = [found for depth in DEPTHS for found in ([directory] if not depth else directory.glob(depth))]
    candidates = [found for found in below if not found.name.startswith(UNFINISHED) and found.is_dir()]
    known = {found for found in candidates if _looks_like_backup(found)}
    of_streams = {found.parent for found in known if NAMED_AFTER_TIME.match(found.name)}
    return sorted(known | {found for found in candidates if found.parent in of_streams and found != directory})


def _looks_like_backup(directory: Path) -> bool:
    named = NAMED_AFTER_TIME.match(directory.name) is not None
    return named or any(os.path.lexists(directory / file) for file in (META, *ARCHIVES))


def place_of(directory: Path, stream: str, made: datetime) -> Path:
    """Return the path of a backup of ours in a directory."""
    return directory / stream / time_of(made)


def time_of(made: datetime) -> str:
    """Return a time as it is spelled in names."""
    return f"{made:%Y%m%dT%H%M%S}.{made.microsecond // 1000:03d}Z"


def damage(backup: Backup) -> str:
    """Return the damage that is found without parsing the archive; empty where there is none. Raises `BackupError`."""
    record = backup.record
    if record and _digest(backup.config, backup.state, record.previous) != record.meta_sha256:
        return "backup.json has changed since it was written"
    with opened(backup) as file:
        if record and hashlib.file_digest(file, "sha256").hexdigest() != record.archive_sha256:
            return "the archive has changed since it was written"
        if backup.encrypted:
            return ""  # its end was checked before it was encrypted
        file.seek(0)
        return "" if archive.has_end(file, of_entries=backup.of_entries) else "the archive breaks off before its end"


@contextmanager
def opened(backup: Backup) -> Iterator[BufferedReader]:
    """Open the archive's file. Raises `BackupError` where it cannot be read, or the block finds it malformed."""
    with readable(backup), backup.archive.open("rb") as file:
        yield file


@contextmanager
def readable(backup: Backup) -> Iterator[None]:
    """Raise `BackupError` where the block cannot read the archive of a backup, or finds it malformed."""
    with explained(f"cannot read {backup.archive}"), understood(f"{backup.archive} is damaged"):
        yield


@contextmanager
def understood(what: str) -> Iterator[None]:
    """Raise a `BackupError` that begins with this text where the block finds an archive malformed."""
    try:
        yield
    except MalformedError as error:
        raise BackupError(f"{what}: {error}") from error


@contextmanager
def explained(what: str, *, then: str = "") -> Iterator[None]:
    """Raise a `BackupError` that begins with this text where the block raises an OSError; `then` is its consequence."""
    try:
        yield
    except OSError as error:
        raise BackupError(f"{what}: {error.strerror}{then and f'; {then}'}") from error


def make_directory(directory: Path) -> None:
    """Make a directory and those above it where they are missing, readable by their owner only. Raises OSError."""
    if not directory.is_dir():
        make_directory(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)


def remove(backup: Backup) -> None:
    """Remove a backup. Raises `BackupError`."""
    leaving = backup.directory.with_name(UNFINISHED + backup.directory.name)
    with explained(f"cannot remove {backup.directory}"):
        backup.directory.rename(leaving)  # so that, if we are killed, the rest of it is not taken for a backup
        shutil.rmtree(leaving)


class Draft:
    """A backup in the making. It is at its place when it is finished, and not before; where the block is left earlier
    nothing of it stays. A backup that was there is replaced.

    Every method raises `BackupError` where the disk is full, or not ours to write to.
    """

    def __init__(self, place: Path, *, encrypt_to: Sequence[str] = ()) -> None:
        self._place = place.absolute()
        self._encrypt_to = tuple(encrypt_to)
        self._directory: Path
        self._file: IO[bytes]
        self._sha256 = hashlib.sha256()
        self._left = ExitStack()

    def __enter__(self) -> Draft:
        with self._explained():
            parent = self._place.parent
            make_directory(parent)
            sweep(parent)
            self._directory = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=parent))  # readable by its owner only
            self._left.enter_context(locked(self._directory))
            self._left.callback(shutil.rmtree, self._directory, ignore_errors=True)  # renamed, where it was finished
            self._file = files.create_file(self._directory / OF_ENTRIES)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # what could not be written cannot be flushed either
            self._file.close()
        self._left.close()

    def write_all(self, pieces: Iterable[bytes]) -> None:
        """Write the archive, encrypted where the backup is."""
        if self._encrypt_to:
            encryption.encrypt(pieces, self._write, self._encrypt_to)
            return
        for piece in pieces:
            self._write(piece)

    def _write(self, data: bytes) -> None:
        with self._explained():
            self._file.write(data)
        self._sha256.update(data)

    def finish(self, config: Mapping[str, Any], state: Mapping[str, Any], record: BackupRecord) -> Backup:
        """Write the metadata, put the backup in place, and return it. The record gets the digests and the recipients.

        Raises `BackupError` also where the archive is not complete; that of an encrypted one was checked while it was
        written.
        """
        record = structs.replace(
            record,
            archive_sha256=self._sha256.hexdigest(),
            meta_sha256=_digest(config, state, record.previous),
            encrypted_to=self._encrypt_to,
        )
        with self._explained():
            files.sync(self._file)
            self._file.close()
            name = INCREMENT if record.previous else OF_ENTRIES
            if not self._encrypt_to:
                name = name if self._check_end() else OF_FILES
            (self._directory / OF_ENTRIES).rename(self._directory / (name + ENCRYPTED * bool(self._encrypt_to)))
            meta = _Meta(config=dict(config), state=dict(state), aviso_workers=record)
            with files.create_file(self._directory / META) as file:
                file.write(msgspec.json.format(msgspec.json.encode(meta)) + b"\n")
                files.sync(file)
            files.sync_directory(self._directory)
            self._put_in_place()
        return load(self._place)

    def _check_end(self) -> bool:
        """Return whether the written archive is one of entries. Raises `BackupError` where it breaks off."""
        not_whole = f"{self._place}: the archive is not whole, and nothing of it is kept"
        with understood(not_whole), (self._directory / OF_ENTRIES).open("rb") as file:
            of_entries = archive.has_entries(file)
            file.seek(0)
            if not archive.has_end(file, of_entries=of_entries):
                raise MalformedError("it breaks off before its end")
        return of_entries

    def _put_in_place(self) -> None:
        replaced = self._place.with_name(self._place.name + REPLACED)
        if self._place.exists():
            shutil.rmtree(replaced, ignore_errors=True)  # left by a process that was killed before the last line
            self._place.rename(replaced)
        self._directory.rename(self._place)
        files.sync_directory(self._place.parent)
        if replaced.exists():
            shutil.rmtree(replaced)

    def _explained(self) -> AbstractContextManager[None]:
        return explained(f"cannot write {self._place}", then="nothing of it is kept")


def _digest(config: Mapping[str, Any], state: Mapping[str, Any], previous: Previous | None) -> str:
    said = {"config": config, "state": state} | ({"previous": previous} if previous else {})
    return hashlib.sha256(msgspec.json.encode(said, order="sorted")).hexdigest()


def _put_back(directory: Path) -> None:
    """Restore the name of a backup that was being replaced when its process was killed."""
    replaced = directory.with_name(directory.name + REPLACED)
    if directory.name and replaced.exists() and not directory.exists():
        with suppress(OSError):
            replaced.rename(directory)


def sweep(parent: Path) -> None:
    """Remove the unfinished and the replaced backups of killed processes from a directory."""
    for replaced in parent.glob(f"*{REPLACED}"):
        place = replaced.with_name(replaced.name.removesuffix(REPLACED))
        with suppress(BackupError):  # a directory of another program
            if _stream_and_time(load(place)) == _stream_and_time(load(replaced)):
                shutil.rmtree(replaced, ignore_errors=True)
    for left in parent.glob(f"{UNFINISHED}*"):
        with suppress(OSError), locked(left):  # another process has the lock, or another command was faster
            shutil.rmtree(left)


def _stream_and_time(backup: Backup) -> tuple[str, datetime]:
    return backup.stream, backup.made


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory for the block. Raises `BlockingIOError` where another process holds it,
    `BackupError`.
    """
    with ExitStack() as held:
        try:
            make_directory(directory)
            held.enter_context(locked(directory))
        except BlockingIOError:
            raise
        except OSError as error:
            raise BackupError(f"cannot write to {directory}: {error.strerror}") from error
        yield


@contextmanager
def locked_backups(directory: Path, *, alone: bool) -> Iterator[None]:
    """Wait until no process removes or rewrites backups in a stream's directory, and hold its lock for the block.

    Commands that make an increment after one of them share the lock, and those that remove or rewrite one hold it
    `alone`. It blocks. Raises `BackupError`.
    """
    with ExitStack() as held:
        with explained(f"cannot lock {directory}"):
            held.enter_context(locked(directory, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        yield


@contextmanager
def locked(path: Path, operation: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> Iterator[None]:
    """Hold the lock of a file or a directory for the block. Raises `BlockingIOError` where another process has it and
    the operation does not wait, OSError.
    """
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, operation)
        yield
    finally:
        os.close(lock)
