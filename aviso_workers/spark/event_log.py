"""Spark's event logs: which applications have one in a directory, and what is new in them.

Called by the agent that tails event logs, from worker threads: everything here blocks on files. Spark has two
layouts, and both are read while they are being written:

* rolling, the default since Spark 4: a directory `eventlog_v2_<name>` with files `events_<n>_<name>[.<codec>]`, and
  `appstatus_<name>[.inprogress]` to say whether the application still runs;
* single: a file `<name>[.<codec>][.inprogress]`.

`<name>` is `<application id>[_<attempt>]`. A file holds one event per line, as JSON, and only grows; with zstd, Spark
ends a frame at every flush, so that whatever it has flushed can be read, and with lz4 and snappy what fills a block of
32 KiB. Offsets count decompressed bytes: a compressed file that is opened again is decompressed from its beginning, and
skipped up to there.

A history server may compact the older files of a rolling log: `events_<n>_<name>[.<codec>].compact` replaces all up to
the n-th and leaves out jobs that have ended. A reader that had not come as far reads it from its beginning, and meets
events again.

A log may also be copied here by a program that writes it under its final name. So a file that ends in the middle of an
event is read on when it grows, and one that has become smaller is another copy, which is read from its beginning.

Not done here: what an event means (`job_events`), and whether it was published already (the agent).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

import msgspec
from msgspec import Struct, structs

from aviso_workers.aviso.codec import UNREADABLE_JSON
from aviso_workers.errors import UndecodableError
from aviso_workers.spark import compression

T = TypeVar("T")

READ_BYTES = 4 << 20
"""Decompressed bytes after which a read comes back: it bounds memory, and how long a shutdown waits for the thread."""
LINE_BYTES = 64 << 20
"""What one line has beyond this is dropped, which makes it undecodable: no event is so long by good intention."""
COMPRESSED_CHUNK = 1 << 10
"""Compressed bytes per step: few, because repetitive JSON grows a hundredfold."""
PLAIN_CHUNK = 256 << 10
"""Bytes that are split into lines at a time: a kibibyte of zstd may hold 32 MiB of line breaks."""
MAX_BAD_LINES = 100_000
"""After so many in one read, a file counts as damaged: a few thousand compressed bytes may hold millions of them."""

EVENT = b'{"Event":"'
BLANKS = b" \t\r\n"
HEAD_BYTES = 64
"""Enough for the beginning of an event with blanks in it, as other programs write it."""
ROLLING = "eventlog_v2_"
NAME = re.compile(r"[^\s*>]+")
"""Names of applications. Others would look like a filter for several applications, or could not be published."""
ROLLED_FILE = re.compile(r"events_(\d{1,9})_[^.]+(\.\w+)?(\.compact)?")
COMPACTED = ".compact"
APP_STATUS = "appstatus_"
IN_PROGRESS = ".inprogress"
TRUNCATED = "ends in the middle of an event: it is read on when it grows"
UNREADABLE_CODECS = ("lzf",)


class LogFile(Struct, frozen=True, kw_only=True):
    """A file of a log, as the listing of its directory shows it."""

    path: str
    size: int
    modified: float
    """Seconds since 1970."""

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def index(self) -> int:
        """Its place in the order of the log: from 1, or 0 where the log is a single file."""
        rolled = ROLLED_FILE.fullmatch(self.name)
        return int(rolled[1]) if rolled else 0

    @property
    def codec(self) -> str:
        return self.name.removesuffix(IN_PROGRESS).removesuffix(COMPACTED).partition(".")[2]

    @property
    def compacted(self) -> bool:
        return self.path.endswith(COMPACTED)

    @property
    def place(self) -> tuple[int, bool]:
        """The order in which the file is read: a compacted file comes after the files that it was made of."""
        return (self.index, self.compacted)


class OpenFile(Protocol):
    """An open file of an event log."""

    def read(self, size: int, /) -> bytes | None:
        """Read up to `size` bytes; empty or None where the file has no more."""

    def seek(self, offset: int, /) -> int: ...

    def close(self) -> None: ...


class EventLog(Struct, frozen=True, kw_only=True):
    """A snapshot of the event log of one application. Two are equal where nothing happened in between."""

    path: str
    files: tuple[LogFile, ...]
    complete: bool
    """Spark has closed it. A driver that was killed leaves it open for ever."""
    modified: float
    """Seconds since 1970 when it was last written to."""

    @property
    def name(self) -> str:
        """The application id, with the attempt where there are several, as Spark spells them in file names."""
        return os.path.basename(self.path).removeprefix(ROLLING).partition(".")[0]

    @property
    def size(self) -> int:
        """The size of all files together, in bytes as they are stored."""
        return sum(file.size for file in self.files)

    @property
    def problem(self) -> str | None:
        """The reason why nothing of the log can be read; None where it can be."""
        if not NAME.fullmatch(self.name):
            return f"{self.name!r} is not a Spark application id: move it out of the directory of event logs"
        for codec in {file.codec for file in self.files} - {"", *compression.CODECS}:
            if codec in UNREADABLE_CODECS:
                return f"{codec} is not supported: run the application with spark.eventLog.compression.codec=zstd"
            return "not a Spark event log"
        return None

    def unread_bytes(self, position: LogPosition) -> int:
        """Return how many bytes of the files, as they are stored, come after a position."""
        return sum(
            max(0, file.size - position.size) if file.place == position.place else file.size
            for file in self.files
            if file.place >= position.place
        )

    def repeats(self, position: LogPosition) -> bool:
        """Return whether reading on from a position may give events again: of a compacted or a replaced file."""
        if position.size < position.replaced_size:
            return True
        return any(
            (file.compacted and file.place > position.place)
            or (file.place == position.place and file.size < position.size)
            for file in self.files
        )


class LogPosition(Struct, frozen=True, kw_only=True):
    """A position in an event log, up to which it was read."""

    index: int = 0
    offset: int = 0
    """Decompressed bytes of that file, up to the end of its last complete line."""
    size: int = 0
    """Bytes of that file that were read. It holds nothing new before it has more."""
    compacted: bool = False
    replaced_size: int = 0
    """Bytes that were read of the file that this one has replaced; 0 where none was."""

    @property
    def place(self) -> tuple[int, bool]:
        return (self.index, self.compacted)


class NewEvents(Struct, Generic[T], frozen=True, kw_only=True):
    events: list[T]
    problems: list[str]
    """What cannot be read, or what may have been lost: a sentence each."""
    more: bool
    """The log holds more."""


def find(directory: str) -> list[str]:
    """Return the paths of what may be event logs in a directory of this machine, without `.inprogress`.

    Raises `OSError`.
    """
    with os.scandir(directory) as entries:
        return [
            entry.path.removesuffix(IN_PROGRESS)
            for entry in entries
            if may_be_log(entry.name) and (is_rolling(entry.name) or _may_be_file(entry))
        ]


def _may_be_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # as of a symbolic link to itself: `snapshot` of it raises, and the others are found
        return True


def may_be_log(name: str) -> bool:
    """Return whether a file or a directory of this name may be an event log that Spark wrote."""
    # Hadoop leaves a hidden checksum file beside each file that it writes. Spark writes no names but printable ones.
    return name.isprintable() and not name.startswith(".")


def is_rolling(path: str) -> bool:
    """Return whether the log at a path is a directory of files, by its name."""
    return os.path.basename(path).startswith(ROLLING)


def snapshot(path: str) -> EventLog | None:
    """Return a snapshot of the log at a path that `find` gave; None where the log is gone. Raises `OSError`."""
    try:
        return _rolling_snapshot(path) if is_rolling(path) else _single_snapshot(path)
    except FileNotFoundError:
        return None


def is_unchanged(log: EventLog) -> bool:
    """Return whether the newest file of a log has the size of its snapshot. It does not notice a new file: `snapshot`
    does.
    """
    try:
        return os.stat(log.files[-1].path).st_size == log.files[-1].size
    except (IndexError, OSError):
        return False


def _rolling_snapshot(path: str) -> EventLog:
    # All names before any size: a file that they show to be closed then has its last size.
    with os.scandir(path) as listing:
        entries = list(listing)
    return rolling_log(path, [_listed_part(entry) for entry in entries if _is_part(entry.name)])


def _is_part(name: str) -> bool:
    return ROLLED_FILE.fullmatch(name) is not None or name.startswith(APP_STATUS)


def _listed_part(entry: os.DirEntry[str]) -> LogFile:
    try:
        return _listed(entry.path)
    except FileNotFoundError as error:
        if entry.is_symlink():  # which stays in the listing, while a file that was removed does not
            raise OSError(f"{entry.path} is a link to what is not there") from error
        raise


def _single_snapshot(path: str) -> EventLog:
    # In this order, because the one is renamed to the other.
    try:
        return single_log(path, _listed(path + IN_PROGRESS))
    except FileNotFoundError:
        return single_log(path, _listed(path))


def _listed(path: str) -> LogFile:
    found = os.stat(path)
    return LogFile(path=path, size=found.st_size, modified=found.st_mtime)


def rolling_log(path: str, listed: Iterable[LogFile]) -> EventLog:
    """Return the log of a directory with these files; what is not of Spark's writing is left out."""
    parts = [file for file in listed if _is_part(file.name)]
    files = [file for file in parts if not file.name.startswith(APP_STATUS)]
    first = max((file.place for file in files if file.compacted), default=(0, False))
    return EventLog(
        path=path,
        files=tuple(sorted((file for file in files if file.place >= first), key=lambda file: file.place)),
        # Where a rename is a copy, both are there for a moment.
        complete=any(part.name.startswith(APP_STATUS) and not part.name.endswith(IN_PROGRESS) for part in parts),
        modified=max((part.modified for part in parts), default=0.0),
    )


def single_log(path: str, file: LogFile) -> EventLog:
    """Return the log at `path` that is this one file."""
    return EventLog(path=path, files=(file,), complete=not file.path.endswith(IN_PROGRESS), modified=file.modified)


def _open_here(path: str) -> OpenFile:
    return open(path, "rb", buffering=0)


class EventLogReader(Generic[T]):
    """A reader of the event log of one application, file after file, from a position on.

    `decode` turns a line into what is wanted of it, None to leave it out; it raises `UndecodableError`. A file that is
    damaged is left out from there on, and reading goes on with the next one. The newest file, where it ends in the
    middle of an event, is read on when it has grown.
    """

    def __init__(
        self,
        decode: Callable[[bytes], T | None],
        position: LogPosition,
        *,
        open_file: Callable[[str], OpenFile] = _open_here,
    ) -> None:
        self.position = position
        """After the last event that `read` returned."""
        self._decode = decode
        self._open_file = open_file
        self._reached = position
        self._lines: _Lines | None = None
        self._damaged: LogFile | None = None
        self._truncated: LogFile | None = None

    @property
    def open(self) -> bool:
        return self._lines is not None

    def read(self, log: EventLog) -> NewEvents[T]:
        """Return the next events, no further than the snapshot `log` reaches. Raises `OSError`; then the call may be
        repeated.
        """
        events: list[T] = []
        problems: list[str] = []
        try:
            more = self._read_files(log, events, problems)
        except OSError:
            # What was read by this call is lost with it: the next one begins where this one did.
            self.close()
            self._reached = self.position
            raise
        self.position = self._reached
        return NewEvents(events=events, problems=problems, more=more)

    def close(self) -> None:
        """Close the open file. Another `read` opens it again."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def _read_files(self, log: EventLog, events: list[T], problems: list[str]) -> bool:
        left = READ_BYTES
        for file in log.files:
            if file.place < self._reached.place or self._is_damaged(file) or file == self._truncated:
                continue
            if file.place > self._reached.place:
                problems += self._missing(log, file)
                self.close()
                self._reached = LogPosition(index=file.index, compacted=file.compacted)
            closed = log.complete or file is not log.files[-1]
            try:
                left -= self._read_file(file, left, events, problems, closed=closed)
                if left <= 0:
                    return True
            except _TruncatedError as error:
                problems.append(f"{file.path}: {error}")
                self._truncated = file
            except UndecodableError as error:
                problems.append(f"{file.path}: {error}")
                self._damaged = file
                self.close()
        return False

    def _is_damaged(self, file: LogFile) -> bool:
        """Return whether a file is the damaged one, whose rest is left out, whatever is appended to it.

        One that was written since and has no more bytes is another copy.
        """
        if self._damaged is None or file.place != self._damaged.place:
            return False
        if file.size <= self._damaged.size and file != self._damaged:
            self._damaged = None
        return self._damaged is not None

    def _missing(self, log: EventLog, file: LogFile) -> list[str]:
        if file.compacted:
            return [f"{file.path}: compacted before all of it was read; of jobs that had ended some events are missing"]
        first, last = self._reached.index + 1, file.index - 1
        return [f"{log.path}: events_{first} to events_{last} went before they were read"] if first <= last else []

    def _read_file(self, file: LogFile, limit: int, events: list[T], problems: list[str], *, closed: bool) -> int:
        """Decode the new lines of one file into `events`, and return how many decompressed bytes were read."""
        if file.size < self._reached.size:
            problems.append(self._begin_again(file))
        if self._lines is None:
            if file.size == self._reached.size:
                return 0
            self._lines = _Lines(file, self._open_file(file.path), self._reached.offset)
        elif self._lines.path != file.path:
            self._lines.go_on_in(file.path, self._open_file(file.path))
        lines, begin = self._lines, self._lines.decompressed
        bad, reason = 0, ""
        try:
            for line in filter(bytes.strip, lines.up_to(file.size, limit=limit, closed=closed)):
                try:
                    event = self._decode(line)
                except UndecodableError as error:
                    bad, reason = bad + 1, reason or f"before byte {lines.offset}: {error}"
                    if bad > MAX_BAD_LINES:
                        raise UndecodableError(f"damaged: more than {MAX_BAD_LINES} lines are no events") from error
                else:
                    events += [] if event is None else [event]
        finally:
            offset = max(lines.offset, self._reached.offset)
            self._reached = structs.replace(self._reached, offset=offset, size=lines.size)
            if bad:
                problems.append(f"{file.path}: left out {bad} lines, the first {reason}")
        return lines.decompressed - begin

    def _begin_again(self, file: LogFile) -> str:
        """Go back to the beginning of a file that was replaced, and return a sentence that says so."""
        before = self._reached
        self.close()
        self._reached = LogPosition(
            index=file.index, compacted=file.compacted, replaced_size=max(before.size, before.replaced_size)
        )
        sizes = f"from {before.size} to {file.size} bytes"
        return f"{file.path}: was replaced, since it has shrunk {sizes}: read from its beginning"


class _TruncatedError(UndecodableError):
    """An `UndecodableError` for a file that ends in the middle of an event, and may still be growing."""


class _Lines:
    """The lines of one open file, read as it grows."""

    def __init__(self, file: LogFile, opened: OpenFile, start: int) -> None:
        self.size = 0
        """Bytes read."""
        self.decompressed = 0
        self.path = file.path
        self._file = opened
        self._decompressor = self._decompressor_of(file)
        self._start = start
        self._rest: list[bytes] = []
        self._rest_bytes = 0
        if self._decompressor is None and start:
            self.size = self.decompressed = self._file.seek(start)

    def _decompressor_of(self, file: LogFile) -> compression.Decompressor | None:
        if not file.compacted:
            return compression.by_name(file.codec)
        # A history server compresses with the codec of its own configuration, and keeps the name.
        decompressor = compression.by_content(self._file.read(compression.MAGIC_BYTES) or b"")
        self._file.seek(0)
        return decompressor

    @property
    def offset(self) -> int:
        """The end of the last complete line, in decompressed bytes."""
        return self.decompressed - self._rest_bytes

    def up_to(self, size: int, *, limit: int, closed: bool) -> Iterator[bytes]:
        """Yield the lines of the file up to that size, in bytes as stored, or until `limit` decompressed bytes were
        read. The last line of a `closed` file needs no line break.

        Raises `UndecodableError` after the last good line, and `OSError` where the file has become smaller.
        """
        begin = self.decompressed
        while self.size < size and self.decompressed - begin < limit:
            yield from self._step(size - self.size)
        if closed and self.size >= size:
            yield from self._end()

    def _step(self, limit: int) -> Iterator[bytes]:
        data = self._file.read(min(limit, PLAIN_CHUNK if self._decompressor is None else COMPRESSED_CHUNK))
        if not data:
            raise OSError(f"{self.path} shrank while it was read: it is read again")
        for piece in [data] if self._decompressor is None else self._decompressor.decompress(data):
            for begin in range(0, len(piece), PLAIN_CHUNK):
                yield from self._split(piece[begin : begin + PLAIN_CHUNK])
        self.size += len(data)  # so that a file which is damaged at its end is not taken for one that was read

    def _end(self) -> list[bytes]:
        """Return the last line, which no line break ends; none where there is none. Raises `_TruncatedError` where the
        file ends in the middle of it or of a compressed block.
        """
        last = b"".join(self._rest)
        if self._decompressor is not None and self._decompressor.open:
            raise _TruncatedError(TRUNCATED)
        if not last:
            return []
        try:
            msgspec.json.decode(last)
        except UNREADABLE_JSON as error:
            raise _TruncatedError(TRUNCATED) from error
        self._rest, self._rest_bytes = [], 0
        return [last]

    def go_on_in(self, path: str, opened: OpenFile) -> None:
        """Read on in the file of another name that this one was renamed to."""
        self._file.close()
        self.path, self._file = path, opened
        self._file.seek(self.size)

    def close(self) -> None:
        self._file.close()

    def _split(self, data: bytes) -> list[bytes]:
        if self.decompressed == 0 and not EVENT.startswith(data[:HEAD_BYTES].translate(None, BLANKS)[: len(EVENT)]):
            raise UndecodableError("not a Spark event log")
        known = max(0, self._start - self.decompressed)
        self.decompressed += len(data)
        *lines, rest = data[known:].split(b"\n")
        if lines:
            lines[0] = b"".join([*self._rest, lines[0]])
            self._rest, self._rest_bytes = [], 0
        if rest and self._rest_bytes < LINE_BYTES:
            self._rest.append(rest)
        self._rest_bytes += len(rest)
        return lines
