"""Creation of backups of streams that are in use, full ones and increments."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import anyio.to_thread
from msgspec import Struct

from aviso_workers.backends import Admin
from aviso_workers.config import Config
from aviso_workers.errors import (
    AvisoWorkersError,
    BackupError,
    NotFoundError,
    StreamReplacedError,
    UnavailableError,
    UnknownEventTypeError,
)
from aviso_workers.jetstream import metadata
from aviso_workers.ops import aviso_admin
from aviso_workers.ops.backups import archive, chains, completion, s2
from aviso_workers.ops.backups.archive import ArchiveEntry
from aviso_workers.ops.backups.completion import Spool
from aviso_workers.ops.backups.encryption import Identities
from aviso_workers.ops.backups.s2 import Pieces
from aviso_workers.ops.backups.storage import (
    Backup,
    Draft,
    Progress,
    find,
    ignore,
    load,
    locked_backups,
    new_record,
    place_of,
    understood,
)


class NewBackup(Struct, frozen=True, kw_only=True):
    """A new backup."""

    backup: Backup
    full_because: str = ""
    """Why a full backup was made where an increment was asked for; empty otherwise."""


class Making(Struct, frozen=True, kw_only=True):
    """How backups are made: to which directory, after which ones, and for whom they are encrypted."""

    to: Path
    since: Path | Literal["last"] | None = None
    """The backup that increments are made after; `last` is the newest one of each stream."""
    full_every_seconds: float | None = None
    """With `last`, the age of the last full backup at which another full one is made."""
    encrypt_to: Sequence[str] = ()
    identities: Identities | None = None

    async def make(
        self, admin: Admin, stream: str, earlier: Spool | None = None, *, progress: Progress = ignore
    ) -> NewBackup:
        """Make one backup of a stream. Raises as `create` does."""
        stated: dict[str, Any] = {"encrypt_to": self.encrypt_to, "identities": self.identities}
        stated |= {"earlier": earlier, "progress": progress}
        if self.since == "last":
            return await create_next(admin, stream, self.to, full_every_seconds=self.full_every_seconds, **stated)
        since = load(self.since) if self.since else None
        return NewBackup(backup=await create(admin, stream, self.to, since=since, **stated))


async def create_each(
    streams: Sequence[str],
    back_up: Callable[[str], Awaitable[Backup]],
    prune: Callable[[str], Awaitable[Sequence[AvisoWorkersError]]],
) -> list[AvisoWorkersError]:
    """Back up streams one after another, remove old backups of each, and return the failures."""
    failures: list[AvisoWorkersError] = []
    for stream in streams:
        try:
            await back_up(stream)
            failures += await prune(stream)
        except AvisoWorkersError as error:  # the others are backed up all the same
            failures.append(error)
    return failures


async def create(
    admin: Admin,
    stream: str,
    to: Path,
    *,
    since: Backup | None = None,
    encrypt_to: Sequence[str] = (),
    identities: Identities | None = None,
    earlier: Spool | None = None,
    progress: Progress = ignore,
) -> Backup:
    """Back up a stream with its consumers into `<to>/<stream>/<time>`, while it is in use.

    With `since`, a backup in `<to>/<stream>`, only what that one does not have is stored, and the two are restored as
    one; the stream is read whole all the same, and compared. `encrypt_to` are public keys of age; `identities` are
    needed where `since` is encrypted. `earlier` is an older snapshot of the same stream, see `completion.spooled`:
    messages that only that one contains are stored as well.

    Raises `StreamReplacedError` where the stream is not the one that `since` is of, `BackupError` where `since` is
    damaged or the backup cannot be written, `RefusedError` where it is to be encrypted and the server is older than
    2.15, and `BackendError`. No part of the backup stays in the directory then.
    """
    if encrypt_to:
        admin.connection.require_server(2, 15, to="encrypt a backup")
    made = datetime.now(UTC)
    place = place_of(to, stream, made)
    server = admin.administration()
    async with (
        _opened_before(admin, stream, since, place, encrypt_to, identities) as before,
        completion.snapshot(admin, stream, beside=to, encrypted=bool(encrypt_to), earlier=earlier) as snapshot,
        aclosing(snapshot.chunks) as chunks,
    ):
        if metadata.is_unfinished(snapshot.config):
            raise BackupError(f"{stream} is incomplete, because its restore was interrupted: restore it again first")
        if since and snapshot.state.last_sequence < since.state.last_sequence:
            raise StreamReplacedError(
                f"{stream} has {snapshot.state.last_sequence} as its last sequence, and {since.directory} has "
                f"{since.state.last_sequence}: it was deleted and recreated, or has lost its newest messages; "
                "make a full backup"
            )

        def write() -> Backup:
            with Draft(place, encrypt_to=encrypt_to) as draft:
                draft.write_all(_archive(stream, _arriving(chunks, progress), before, encrypted=bool(encrypt_to)))
                previous = chains.link_to(since) if since else None
                record = new_record(made, server_version=server.server_version, previous=previous)
                return draft.finish(snapshot.config, snapshot.state, record)

        return await anyio.to_thread.run_sync(write)


@asynccontextmanager
async def _opened_before(
    admin: Admin,
    stream: str,
    since: Backup | None,
    place: Path,
    encrypt_to: Sequence[str],
    identities: Identities | None,
) -> AsyncIterator[Iterator[ArchiveEntry] | None]:
    """Open the messages of the previous backup, from the stream's first sequence on; None where there is none.

    A server aborts a snapshot that is not received for 5 seconds. So messages that have left the stream at its
    beginning, which may be millions, are read before the snapshot is asked for.
    """
    if since is None:
        yield None
        return
    first = (await admin.stream_info(stream)).first_sequence
    with ExitStack() as stack:
        beside = locked_backups(since.directory.resolve().parent, alone=False)
        await anyio.to_thread.run_sync(stack.enter_context, beside)
        await anyio.to_thread.run_sync(lambda: _require_continuable(since, place, encrypt_to, identities))
        entries = stack.enter_context(chains.opened_entries(since, identities))
        yield await anyio.to_thread.run_sync(lambda: _from(first, entries))


def _from(first: int, entries: Iterator[ArchiveEntry]) -> Iterator[ArchiveEntry]:
    found = next((entry for entry in entries if entry.sequence >= first), None)
    return chain([found] if found else [], entries)


async def create_next(
    admin: Admin,
    stream: str,
    to: Path,
    *,
    full_every_seconds: float | None = None,
    encrypt_to: Sequence[str] = (),
    identities: Identities | None = None,
    earlier: Spool | None = None,
    progress: Progress = ignore,
) -> NewBackup:
    """Make an increment after the newest backup of a stream in `<to>/<stream>`, or a full backup where that cannot be.

    A full one is made where there is none, where the last full one is older than `full_every_seconds`, where the newest
    chain is damaged, where the stream is not the one that it is of, and where the server aborted the snapshot while the
    two were compared. Raises as `create` does otherwise.
    """
    since, why = await anyio.to_thread.run_sync(_newest_to_continue, to, stream, full_every_seconds)
    make = partial(
        create, admin, stream, to, encrypt_to=encrypt_to, identities=identities, earlier=earlier, progress=progress
    )
    if since:
        try:
            return NewBackup(backup=await make(since=since))
        except (StreamReplacedError, UnavailableError) as error:
            why = str(error)
    return NewBackup(backup=await make(), full_because=why)


def _newest_to_continue(to: Path, stream: str, full_every_seconds: float | None) -> tuple[Backup | None, str]:
    """Return the newest backup, where an increment can be made after it; else None and the reason."""
    found = [each for each in find(to / stream, stream=stream) if each.record]
    if not found:
        return None, "there is no earlier backup"
    try:
        links = chains.chain(found[-1])
        chains.require_whole(found[-1])
    except BackupError as error:
        return None, str(error)
    if not found[-1].of_entries:
        return None, f"{found[-1].directory} was made by a nats-server before 2.15"
    if len(links) == chains.MAX_LINKS:
        return None, f"a chain has {chains.MAX_LINKS} backups at most"
    age = datetime.now(UTC) - links[0].made
    if full_every_seconds is not None and age.total_seconds() >= full_every_seconds:
        return None, f"the last full one is of {links[0].made:%Y-%m-%dT%H:%M:%SZ}"
    return found[-1], ""


def _require_continuable(since: Backup, place: Path, encrypt_to: Sequence[str], identities: Identities | None) -> None:
    """Raise `BackupError` where no increment can be made after a backup, or would store in the clear what that one
    encrypts.
    """
    if not since.record or not since.of_entries:
        raise BackupError(f"{since.directory} was made by another program or an older server: make a full backup first")
    if since.directory.resolve().parent != place.resolve().parent:
        raise BackupError(f"{since.directory} is not in {place.parent}, where the increment would be stored")
    if len(chains.chain(since)) == chains.MAX_LINKS:
        raise BackupError(f"a chain has {chains.MAX_LINKS} backups at most: make a full one")
    if since.encrypted and not encrypt_to:
        raise BackupError(f"{since.directory} is encrypted: give the public keys for the increment with --encrypt-to")
    chains.require_identities(since, identities)
    chains.require_whole(since)


def _archive(
    stream: str, arriving: Iterator[bytes], before: Iterator[ArchiveEntry] | None, *, encrypted: bool
) -> Iterator[bytes]:
    """Yield the archive of the new backup: that of the server, or an increment of it.

    An encrypted archive cannot be checked afterwards, so it is read while it is written.
    """
    if before is None:
        yield from _read_meanwhile(arriving) if encrypted else arriving
        return
    try:
        with understood(f"the server's archive of {stream} cannot be read"):
            yield from s2.written(chains.encode_increment(archive.entries(Pieces(arriving)), before))
    except StreamReplacedError as error:
        raise StreamReplacedError(f"{stream}: {error}; it needs a full backup") from error


def _read_meanwhile(arriving: Iterator[bytes]) -> Iterator[bytes]:
    seen: list[bytes] = []

    def noted() -> Iterator[bytes]:
        for piece in arriving:
            seen.append(piece)
            yield piece

    with understood("the server's archive of the stream is damaged, so no encrypted backup was made"):
        for _ in archive.entries(Pieces(noted())):
            yield from seen
            seen.clear()
        yield from seen


def _arriving(chunks: AsyncGenerator[bytes, None], progress: Progress) -> Iterator[bytes]:
    for chunk in completion.arriving(chunks):
        progress(len(chunk))
        yield chunk


async def named_streams(admin: Admin, config: Config, names: Sequence[str]) -> list[str]:
    """Return the stream of each name, which is an event type or a stream; without names all streams of the account.

    Raises `NotFoundError`, which names the streams that exist.
    """
    present = await admin.stream_names()
    if not names:
        return sorted(present)
    wanted = [_stream(config, name, present) for name in names]
    if missing := [stream for stream in wanted if stream not in present]:
        raise NotFoundError(f"no stream {', '.join(missing)}; there are: {', '.join(sorted(present)) or 'none'}")
    return list(dict.fromkeys(wanted))


def _stream(config: Config, name: str, present: Sequence[str]) -> str:
    if name in present:
        return name
    try:
        return aviso_admin.stream_of(config, name)
    except UnknownEventTypeError:
        return name
