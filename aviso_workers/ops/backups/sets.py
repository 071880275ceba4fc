"""Sets of backups on disk: which backups of an account's streams belong together, and the positions of agents.

Called by `set_creation` and `set_restore`, and by the commands that list and verify. The backups of a set lie where all
backups do. What makes them a set is one file beside the streams' directories, `set-TIME.json`. It is written last and
gets its name when it is on the disk, so there is none of a set that is not whole. While a set is being made there is
another file, `.unfinished-set-TIME.json`, with a lock; the file that a killed process has left is listed and never
restored.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from aviso_workers import files
from aviso_workers.aviso.codec import UNREADABLE_JSON
from aviso_workers.clocks import SKEW
from aviso_workers.errors import BackupError
from aviso_workers.ops.backups import chains
from aviso_workers.ops.backups.storage import Backup, Moment, explained, load, locked, make_directory, time_of

NAMED = "set-*.json"
UNFINISHED = ".unfinished-"


class SetMember(Struct, frozen=True, kw_only=True):
    """A backup that belongs to a set."""

    stream: str
    directory: str
    """Where it lies, from the set's directory on."""
    made: Moment
    """When its snapshot began, UTC."""


class SetRecord(Struct, frozen=True, kw_only=True):
    """The record of a set: its members and the positions of consumers."""

    made: Moment
    """When the set was begun, UTC."""
    finished: Moment
    members: Sequence[SetMember]
    """In the order in which they were made."""
    positions: Mapping[str, Mapping[str, int]]
    """By stream and consumer, the sequence up to which everything was settled before the first member was made."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()


class BackupSet(Struct, frozen=True, kw_only=True):
    """A set of backups that belong together, with its file."""

    file: Path
    written: SetRecord

    @property
    def id(self) -> str:
        """The first 16 hex digits of the record's digest, which identify the set."""
        return self.written.digest[:16]


class _File(Struct, frozen=True, kw_only=True):
    set: SetRecord
    digest: str


def find(directory: Path) -> list[Path]:
    """Return the files of the sets in a directory, the oldest first, whether they can be read or not."""
    return sorted(directory.glob(NAMED))


def unfinished(directory: Path) -> list[str]:
    """Return a sentence for each set in a directory that is not finished."""
    return [
        f"{left}: this set is being made" if _is_locked(left) else f"{left}: this set was not finished, and is none"
        for left in sorted(directory.glob(UNFINISHED + NAMED))
    ]


def load_set(place: Path) -> BackupSet:
    """Return the set in a file, or the newest one in a directory. Raises `BackupError`."""
    file = place
    if place.is_dir():
        found = find(place)
        if not found:
            left = "".join(f"; {sentence}" for sentence in unfinished(place))
            raise BackupError(f"{place} has no finished set of backups of `backup create --all`{left}")
        file = found[-1]
    try:
        read = msgspec.json.decode(file.read_bytes(), type=_File)
    except UNREADABLE_JSON as error:
        raise BackupError(f"{file} is damaged: {error}") from error
    except OSError as error:
        raise BackupError(f"cannot read {file}: {error.strerror}") from error
    if read.set.digest != read.digest:
        raise BackupError(f"{file} is damaged: it has changed since it was written")
    if file != place and read.set.made > datetime.now(UTC) + SKEW:
        raise BackupError(
            f"{file} has a time in the future, from a wrong clock, so it is not known which set is the newest: name "
            "the file of a set"
        )
    return BackupSet(file=file, written=read.set)


def members(found: BackupSet) -> list[Backup]:
    """Return the backups of a set. Raises `BackupError`, which names all that are missing or replaced, or whose chains
    are broken.
    """
    wrong: list[str] = []
    backups: list[Backup] = []
    for member in found.written.members:
        try:
            backup = load(found.file.parent / member.directory)
            chains.chain(backup)
        except BackupError as error:
            wrong.append(str(error))
            continue
        if (backup.stream, backup.made) != (member.stream, member.made):
            wrong.append(f"{backup.directory} is another backup than the set has: of {backup.stream}, {backup.made}")
        backups.append(backup)
    if wrong:
        raise BackupError(f"the set {found.file} is not whole: {'; '.join(wrong)}")
    return backups


def newest(directory: Path, *, until: datetime | None = None) -> BackupSet | None:
    """Return the newest complete set in a directory, as far as is known without reading archives; with `until`, of
    those that were begun by then; None where there is none.
    """
    for file in reversed(find(directory)):
        with suppress(BackupError):
            found = load_set(file)
            if until and found.written.made > until:
                continue
            members(found)
            return found
    return None


def remove_those_with(backup: Backup, directory: Path) -> None:
    """Remove the files of the sets in a directory that include a backup, which is about to be removed. Raises
    OSError.
    """
    for file in find(directory):
        with suppress(BackupError):
            places = [(directory / member.directory).resolve() for member in load_set(file).written.members]
            if backup.directory.resolve() in places:
                file.unlink()


@contextmanager
def draft(directory: Path, made: datetime) -> Iterator[Callable[[SetRecord], Path]]:
    """Begin a set, and give the function that finishes it: it writes the set's file, and returns its path. Unfinished
    files of killed processes are removed. Raises `BackupError`.
    """
    place = directory / f"set-{time_of(made)}.json"
    left = place.with_name(UNFINISHED + place.name)
    with ExitStack() as stack:
        with explained(f"cannot write {left}"):
            make_directory(directory)
            file = stack.enter_context(files.create_file(left))
        fcntl.flock(file, fcntl.LOCK_EX)
        for other in directory.glob(UNFINISHED + NAMED):
            if not _is_locked(other):
                with suppress(OSError):  # another command was faster
                    other.unlink()

        def finish(found: SetRecord) -> Path:
            with explained(f"cannot write {place}", then="the set is not finished"):
                file.write(msgspec.json.format(msgspec.json.encode(_File(set=found, digest=found.digest))) + b"\n")
                files.sync(file)
                left.rename(place)
                files.sync_directory(directory)
            return place

        yield finish


def _is_locked(left: Path) -> bool:
    """Return whether the process that makes the set of this file is alive."""
    try:
        with locked(left, fcntl.LOCK_SH | fcntl.LOCK_NB):
            return False
    except OSError as error:
        return isinstance(error, BlockingIOError)
