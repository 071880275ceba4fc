"""Snapshots of streams in use that are complete as of one moment.

Called by `creation` in place of the server's snapshot. A server reads a stream while it is in use. Messages that are
deleted before they are read are missing, and those stored after the beginning are not in it. A key of a table that is
written meanwhile is then in the snapshot neither as it was nor as it is, because its new message has removed the old
one. The same goes for all streams in which messages take the place of others (see `may_lack`).

So of such a stream, messages that were stored since are read as well, up to the last sequence of a moment, and again
from there until none is missing. What the stream held at that last moment was either there when the snapshot began and
stayed, so the snapshot has it, or was stored since and stayed, so it was read. Messages that were replaced are left out
again.

What is collected meanwhile is in spools: files without a name in the directory of the backups, where there is space for
a stream. The disk may keep their blocks, so where the backup is to be encrypted the spools are as well: to a key that
is made for each, and that exists in the memory of this process only.
"""

from __future__ import annotations

import heapq
import os
import tempfile
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, closing, contextmanager
from itertools import takewhile
from operator import attrgetter
from pathlib import Path
from typing import IO, Any

import anyio
import anyio.from_thread
import anyio.to_thread
import msgspec
from msgspec import structs

from aviso_workers.aviso.codec import Message
from aviso_workers.backends import Admin, StreamSnapshot
from aviso_workers.backends.jetstream.wire import Headers
from aviso_workers.errors import BackupError
from aviso_workers.jetstream.info import SnapshotState, StreamConfig, StreamInfo
from aviso_workers.ops import inventory
from aviso_workers.ops.backups import archive, encryption, s2
from aviso_workers.ops.backups.archive import ArchiveEntry
from aviso_workers.ops.backups.s2 import MalformedError, Readable
from aviso_workers.ops.backups.storage import explained, make_directory

PIECE_BYTES = 512 * 1024
FEW = 20
"""So many messages are asked for one by one; more are read by a consumer, which has to be made and removed."""
CATCH_UP_SECONDS = 60.0


def may_lack(config: Mapping[str, Any]) -> bool:
    """Return whether messages of the stream replace others, so that a plain snapshot may have neither of the two."""
    found = StreamConfig(config)
    return found.max_msgs_per_subject > 0 or found.allow_rollup_hdrs or found.allow_msg_schedules


@asynccontextmanager
async def snapshot(
    admin: Admin, stream: str, *, beside: Path, encrypted: bool, earlier: Spool | None = None
) -> AsyncIterator[StreamSnapshot]:
    """Take a snapshot as `Administration.snapshot` does, and complete it. Spools meanwhile take space in the directory
    `beside`; with `encrypted` they are encrypted, as the backup is.

    With `earlier`, an archive that `spooled` has made, it also has the messages that only that one has. Raises
    `BackupError` where the directory cannot be written to, or the archive of a server before 2.15 would lack messages.
    """
    async with admin.administration().snapshot(stream) as sent, aclosing(sent.chunks):
        if earlier is None and not may_lack(sent.config):
            yield sent
            return
        with ExitStack() as stack:
            received = stack.enter_context(spool(beside, encrypted=encrypted))
            await _receive(sent, received)
            before = sent.state
            after = await admin.stream_info(stream)
            if earlier is None and _removed(before, after) == 0:
                yield structs.replace(sent, chunks=_following(_pieces(received)))
                return
            since = stack.enter_context(spool(beside, encrypted=encrypted))
            in_bulk = sent.config.retention == "limits"
            last = await _store_since(admin, stream, before.last_sequence, since, in_bulk=in_bulk)
            merge = _Merge([*([earlier] if earlier else []), received, since], sent, last_sequence=last)
            state = await anyio.to_thread.run_sync(merge.count)
            yield structs.replace(sent, state=state, chunks=_following(merge.pieces()))


@asynccontextmanager
async def spooled(admin: Admin, stream: str, *, beside: Path, encrypted: bool) -> AsyncIterator[Spool]:
    """Take a complete snapshot of a stream into a spool, as the `earlier` one of `snapshot`. Raises as that does."""
    with spool(beside, encrypted=encrypted) as received:
        async with snapshot(admin, stream, beside=beside, encrypted=encrypted) as found:
            await _receive(found, received)
        yield received


def arriving(chunks: AsyncGenerator[bytes, None]) -> Iterator[bytes]:
    """Yield the chunks of a snapshot, in a thread that the event loop has started."""

    async def following() -> bytes:
        return await anext(chunks, b"")

    while True:
        # A cancellation that came while the thread was at work does not reach what it asks of the loop afterwards.
        anyio.from_thread.check_cancelled()
        if not (chunk := anyio.from_thread.run(following)):
            return
        yield chunk


def _removed(before: SnapshotState, after: StreamInfo) -> int:
    """Return how many messages left the stream between two of its states."""
    return (after.last_sequence - before.last_sequence) - (after.messages - before.messages)


async def _receive(sent: StreamSnapshot, received: Spool) -> None:
    await anyio.to_thread.run_sync(lambda: received.write(arriving(sent.chunks)))


async def _store_since(admin: Admin, stream: str, sequence: int, since: Spool, *, in_bulk: bool) -> int:
    """Write an archive of the messages after a sequence, up to a moment as of which none is missing, and return the
    last sequence then. With `in_bulk` they are read by a consumer where they are many.
    """
    entries = [archive.MAGIC]
    try:
        with anyio.fail_after(CATCH_UP_SECONDS):
            complete = False
            while not complete:
                last = (await admin.stream_info(stream)).last_sequence
                read = inventory.messages_between if in_bulk and last - sequence > FEW else _one_by_one
                found = [_encoded(each) async for each in read(admin, stream, after=sequence, last=last)]
                entries += found
                # Where one is missing, it was replaced before it was read, perhaps by one after the last.
                complete = len(found) == last - sequence
                sequence = last
    except TimeoutError as error:
        raise BackupError(
            f"{stream} is written to faster than it is read: after {CATCH_UP_SECONDS:g} s no moment was found of which "
            "nothing is missing; back it up while less is written"
        ) from error
    entries.append(archive.END)
    await anyio.to_thread.run_sync(lambda: since.write(s2.written(entries)))
    return sequence


async def _one_by_one(admin: Admin, stream: str, *, after: int, last: int) -> AsyncGenerator[Message, None]:
    while after < last and (found := await admin.message(stream, after + 1, next_by_subject=">")):
        after = found.sequence
        if after <= last:
            yield found


def _encoded(message: Message) -> bytes:
    headers = message.headers.raw if isinstance(message.headers, Headers) else b""
    return archive.encode(
        message.subject.encode(),
        message.data,
        timestamp_ns=message.timestamp_ns,
        sequence=message.sequence,
        headers=headers,
    )


class _Merge:
    """A merge of archives of one stream, the oldest first. Of a message that several have, the first is taken. The last
    but one is what the server sent, and has the consumers.
    """

    def __init__(self, archives: Sequence[Spool], sent: StreamSnapshot, *, last_sequence: int) -> None:
        self._archives = archives
        self._received = archives[-2]
        self._sent = sent
        self._last_sequence = last_sequence
        self._most = max(0, sent.config.max_msgs_per_subject)
        self._in_memory = sent.config.storage == "memory"
        self._replaced: set[int] = set()
        self._state = SnapshotState()

    def count(self) -> SnapshotState:
        """Return the stream's state with the messages of all archives. Raises `BackupError`."""
        newest: defaultdict[bytes, deque[int]] = defaultdict(deque)
        sizes: dict[int, int] = {}
        times_ns: dict[int, int] = {}
        for entry in self._messages():
            sizes[entry.sequence] = archive.stored_bytes(entry, in_memory=self._in_memory)
            times_ns[entry.sequence] = entry.timestamp_ns
            if self._most:
                newest[entry.name].append(entry.sequence)
                if len(newest[entry.name]) > self._most:
                    self._replaced.add(newest[entry.name].popleft())
        kept = [sequence for sequence in sizes if sequence not in self._replaced]
        # That of the archive: a reader of the stream may have come or gone since the server said what it would send.
        with closing(self._entries(self._received)) as sent:
            before = SnapshotState(msgspec.json.decode(next(sent).body))
        self._state = archive.state_of(
            before,
            messages=len(kept),
            size=sum(sizes[sequence] for sequence in kept),
            first=(kept[0], times_ns[kept[0]]) if kept else None,
            last_sequence=self._last_sequence,
        )
        return self._state

    def pieces(self) -> Iterator[bytes]:
        """Yield the merged archive in pieces. Call `count` before."""
        return s2.written(archive.framed(self._merged()))

    def _merged(self) -> Iterator[ArchiveEntry]:
        with closing(self._entries(self._received)) as sent:
            yield archive.with_state(next(sent), self._state)
            yield from takewhile(lambda entry: not entry.sequence, sent)
        yield from (entry for entry in self._messages() if entry.sequence not in self._replaced)

    def _messages(self) -> Iterator[ArchiveEntry]:
        last = 0
        with ExitStack() as stack:
            opened = [stack.enter_context(closing(self._entries(each))) for each in self._archives]
            each = [(entry for entry in entries if entry.sequence) for entries in opened]
            for entry in heapq.merge(*each, key=attrgetter("sequence")):
                if entry.sequence > last:
                    last = entry.sequence
                    yield entry

    def _entries(self, of: Spool) -> Generator[ArchiveEntry]:
        try:
            with of.opened() as plain:
                yield from archive.entries(plain)
        except MalformedError as error:
            raise BackupError(
                f"{self._sent.config.name} was written to while the server read it, and its archive cannot be "
                f"completed: {error}. Of a nats-server before 2.15, back it up while no client writes"
            ) from error


def _pieces(of: Spool) -> Iterator[bytes]:
    with of.opened() as plain:
        yield from iter(lambda: plain.read(PIECE_BYTES), b"")


async def _following(pieces: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    while piece := await anyio.to_thread.run_sync(next, pieces, b""):
        yield piece


class Spool:
    """An archive that is written once and read as often as needed, also by several readers at once."""

    def __init__(self, file: IO[bytes], key: encryption.OwnKey | None) -> None:
        self._file = file
        self._key = key

    def write(self, pieces: Iterable[bytes]) -> None:
        """Write the archive. Raises what the pieces raise, and OSError."""
        if self._key:
            encryption.encrypt(pieces, self._file.write, [self._key.public])
        else:
            self._file.writelines(pieces)
        self._file.flush()

    @contextmanager
    def opened(self) -> Iterator[Readable]:
        """Open the archive from its beginning. Reading raises `MalformedError` where the file has changed, OSError."""
        if not self._key:
            yield _SpoolReader(self._file)
            return
        with encryption.decrypted(_SpoolReader(self._file), self._key.identities) as plain:
            yield plain


class _SpoolReader:
    """A reader of a file from its beginning, with a position of its own."""

    def __init__(self, file: IO[bytes]) -> None:
        self.name = "a temporary file"
        self._number = file.fileno()
        self._at = 0

    def read(self, size: int = -1, /) -> bytes:
        data = os.pread(self._number, size, self._at)
        self._at += len(data)
        return data


@contextmanager
def spool(beside: Path, *, encrypted: bool) -> Iterator[Spool]:
    """Make an empty spool in a directory. Raises `BackupError` where the directory cannot be written to."""
    with explained(f"cannot write to {beside}"):
        make_directory(beside)
        with tempfile.TemporaryFile(dir=beside) as file:
            yield Spool(file, encryption.OwnKey() if encrypted else None)
