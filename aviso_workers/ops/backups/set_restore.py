"""Restoration of a set of backups: all of its streams, with agents at positions from which no effect is missing.

Called by `backup restore --all`. Workers and publishers cannot use the streams until the set is whole, as with a single
restore: a stream that is not whole has a mark and none of its subjects (`metadata.is_unfinished`), and every command
and worker refuses such a one. Each step can be repeated after this process was killed at any moment:

1. Every stream of the set is made, empty and marked, so that no worker makes it meanwhile.
2. One after the other is replaced by the content of its backup. Its consumers are reset to the positions of the set.
   Then its mark says that it is whole, and of which set.
3. When all of them are whole, the marks go, and the subjects come: those of state first and those of events last, so
   that no agent gets a notification before all that it uses is there.

A repeated command sees from the marks how far it came: a stream without one, beside one that is whole, is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import anyio
import anyio.to_thread
from msgspec import Struct

from aviso_workers.backends import Admin, ConsumerInfo, StreamInfo
from aviso_workers.errors import BackendError, BackupError, NotFoundError, UnavailableError, UnreadableStreamError
from aviso_workers.jetstream import metadata
from aviso_workers.jetstream.info import StreamConfig
from aviso_workers.jetstream.metadata import SET_MARK, UNFINISHED
from aviso_workers.ops import inventory
from aviso_workers.ops.backups import restoration, sets
from aviso_workers.ops.backups.archive import StoredConsumer
from aviso_workers.ops.backups.encryption import Identities
from aviso_workers.ops.backups.restoration import STANDSTILL_SECONDS, require_restorable, taken, upload
from aviso_workers.ops.backups.sets import BackupSet
from aviso_workers.ops.backups.storage import Backup, Progress

CONSUMER_SECONDS = 30.0
"""A cluster elects a leader for each consumer a moment after it is made."""
POLL_SECONDS = 0.2
Watch = Callable[[Backup], AbstractContextManager[Progress]]
"""Shows how much of a backup was sent, for as long as the block is entered."""


class GoesOn(Struct, frozen=True, kw_only=True):
    """The position at which a consumer goes on after a restore."""

    consumer: str
    sequence: int
    """The sequence from which it is delivered messages that it has not settled."""
    again: int | None
    """The number of these that were settled while the set was made, and are handled again; None where it is not
    known."""
    new: int
    """Messages that it will be given for the first time, or that it had not settled."""


class RestoredStream(Struct, frozen=True, kw_only=True):
    """A stream of a set that was restored."""

    stream: str
    messages: int
    messages_before: int
    """The number of messages when it was backed up."""
    consumers: Sequence[GoesOn]


async def restore_set(
    admin: Admin,
    found: BackupSet,
    *,
    storage: str | None = None,
    replicas: int | None = None,
    identities: Identities | None = None,
    watch: Watch,
) -> list[RestoredStream]:
    """Restore a set, or continue a restore of it that was interrupted.

    Raises `BackupError`, with nothing touched, where a member is missing or damaged, or a
    stream exists that is none of the set's; as `restore` does otherwise. What was begun stays marked then: repeat it.
    """
    changes = {"storage": storage, "num_replicas": replicas}
    wanted = {field: value for field, value in changes.items() if value is not None}
    backups = sets.members(found)
    for backup in backups:
        await require_restorable(admin, backup, dict(backup.config) | wanted, identities)
    restoration = _SetRestoration(admin, found, {backup.stream: dict(backup.config) | wanted for backup in backups})
    await restoration.begin()
    for backup in reversed(backups):  # the origin of a mirror before the mirror
        if not await restoration.is_whole(backup.stream):
            with watch(backup) as progress:
                await restoration.send(backup, identities, progress)
    restored = [await restoration.describe(backup, identities) for backup in backups]
    for backup in backups:
        await restoration.finish(backup.stream)
    return restored


class _SetRestoration:
    """The restoration of the streams of one set on a server, and how far each of them is."""

    def __init__(self, admin: Admin, found: BackupSet, configs: Mapping[str, dict[str, Any]]) -> None:
        self._admin = admin
        self._set = found
        self._whole, self._empty = (f"{what}, {SET_MARK}{found.id}" for what in ("whole", "empty"))
        self._configs = configs

    async def begin(self) -> None:
        """Create the missing streams, marked as unfinished. Raises `BackupError` where a stream exists that is not of
        this set.
        """
        infos = {stream: await self._info(stream) for stream in self._configs}
        present = {stream: info for stream, info in infos.items() if info}
        missing = [stream for stream in infos if stream not in present]
        marks = {self._mark(info) for info in present.values()}
        strange = [stream for stream, info in present.items() if not metadata.is_unfinished(info.config)]
        if strange and (missing or self._whole not in marks or marks - {"", self._whole}):
            all_are = " (all streams of the set, so it may be restored already)" if strange == [*infos] else ""
            raise BackupError(
                f"{', '.join(strange)} exist, so nothing is restored{all_are}: delete these streams first, or restore "
                "single streams under another name (--as NAME)"
            )
        for stream, config in self._configs.items():
            if found := await taken(self._admin, StreamConfig(config).subjects, besides=self._configs):
                raise BackupError(f"{found} of {stream}: delete it first")
        await self._require_standstill([info for info in present.values() if metadata.is_unfinished(info.config)])
        for stream in missing:
            await self._reserve(stream)

    async def is_whole(self, stream: str) -> bool:
        """Return whether all of a stream was sent."""
        info = await self._info(stream)
        return info is not None and self._mark(info) in ("", self._whole)

    async def send(self, backup: Backup, identities: Identities | None, progress: Progress) -> None:
        """Replace the empty stream by the content of its backup, and mark it as whole."""
        stream = backup.stream
        await self._admin.delete_stream(stream)
        try:
            await upload(self._admin, backup, self._configs[stream], identities, progress, stays_unfinished=True)
            positions = self._set.written.positions.get(stream, {})
            for consumer in await self._durables(backup, identities):
                await self._reset(stream, consumer, positions.get(consumer, 0) + 1)
            info = await self._admin.stream_info(stream)
            metadata = {**info.config.metadata, UNFINISHED: self._whole}
            await self._admin.update_stream({**info.config, "metadata": metadata})
        except BaseException:
            with anyio.CancelScope(shield=True):
                if await self._info(stream) is None:
                    await self._reserve(stream)
            raise

    async def describe(self, backup: Backup, identities: Identities | None) -> RestoredStream:
        """Return the report on a restored stream and the positions of its consumers."""
        info = await self._admin.stream_info(backup.stream)
        consumers = await self._consumers(backup.stream)
        stored = await anyio.to_thread.run_sync(restoration.consumers_in, backup, identities)
        return RestoredStream(
            stream=backup.stream,
            messages=info.messages,
            messages_before=backup.state.messages,
            consumers=[await self._goes_on(backup.stream, each, stored.get(each.name)) for each in consumers],
        )

    async def _consumers(self, stream: str) -> list[ConsumerInfo]:
        """Return the durable consumers of a stream."""
        return [each for each in await self._admin.consumers(stream) if each.durable]

    async def _goes_on(self, stream: str, consumer: ConsumerInfo, stored: StoredConsumer | None) -> GoesOn:
        ahead = consumer.lag
        new: int | None = None
        if stored is not None:
            filters = consumer.config.filters
            with suppress(BackendError):  # a work queue has no further reader
                start = stored.progress.delivered.stream_seq + 1
                undelivered = await self._admin.count(stream, filter_subjects=filters, start_sequence=start)
                new = undelivered + len(stored.progress.pending or {})
        again = None if new is None else max(0, ahead - new)
        return GoesOn(consumer=consumer.name, sequence=consumer.ack_floor + 1, again=again, new=ahead - (again or 0))

    async def finish(self, stream: str) -> None:
        """Give a whole stream its subjects, and remove its mark."""
        info = await self._info(stream)
        if info is not None and metadata.is_unfinished(info.config):
            await self._admin.update_stream(self._configs[stream])

    async def _durables(self, backup: Backup, identities: Identities | None) -> list[str]:
        """Return the names of the consumers to reset to the positions of the set. The server's list may lack some that
        it is still making, and each of these would go on behind messages that it has to handle again.
        """
        if not backup.of_entries:
            return [each.name for each in await self._consumers(backup.stream)]
        stored = await anyio.to_thread.run_sync(restoration.consumers_in, backup, identities)
        listed = {each.name for each in await self._consumers(backup.stream)}
        return [name for name, each in stored.items() if each.lasts or (each.is_durable and name in listed)]

    async def _reset(self, stream: str, consumer: str, sequence: int) -> None:
        deadline = anyio.current_time() + CONSUMER_SECONDS
        while True:
            try:
                await self._admin.reset_consumer(stream, consumer, sequence=sequence)
                return
            except (UnavailableError, NotFoundError) as error:  # it is about to be made, or to elect its leader
                if anyio.current_time() > deadline:
                    raise BackupError(
                        f"consumer {consumer} of {stream} cannot be reset to {sequence}: {error}; the set is not "
                        "whole, so restore it again"
                    ) from error
                await anyio.sleep(POLL_SECONDS)

    async def _reserve(self, stream: str) -> None:
        """Create an empty stream that reserves the name. Raises `BackupError` where another client creates it."""
        empty = {"name": stream, "subjects": [stream], "metadata": {UNFINISHED: self._empty}}
        try:
            await self._admin.add_stream(empty)
        except UnreadableStreamError:
            raise
        except BackendError as error:
            appeared = await self._info(stream)
            if appeared is not None and metadata.is_unfinished(appeared.config):  # a killed restore had asked
                await self._require_standstill([appeared])
                return
            raise BackupError(
                f"stream {stream} cannot be reserved until it is restored: {error}; stop the workers"
            ) from error

    async def _require_standstill(self, unfinished: Sequence[StreamInfo]) -> None:
        """Raise `BackupError` where another command is restoring these streams."""
        if not unfinished:
            return
        await anyio.sleep(STANDSTILL_SECONDS)
        for before in unfinished:
            stream = before.name
            now = await self._info(stream)
            if now is None or (now.created, now.last_sequence) != (before.created, before.last_sequence):
                raise BackupError(f"stream {stream} is being restored by another command")

    async def _info(self, stream: str) -> StreamInfo | None:
        return await inventory.existing(self._admin.stream_info(stream))

    @staticmethod
    def _mark(info: StreamInfo) -> str:
        return info.config.metadata.get(UNFINISHED, "")
