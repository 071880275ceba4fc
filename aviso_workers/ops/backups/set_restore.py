"""A set of backups restored as one: all of its streams, and agents that go on where no effect is missing.

Called by `backup restore --all`. Workers and publishers are kept out until the set is whole, in the way in which a
single restore keeps them out: a stream that is not whole has a mark and none of its subjects
(`metadata.is_unfinished`), and whoever uses a stream refuses such a one. Each step can be repeated after this process
was killed at any moment:

1. Every stream of the set is made, empty and marked, so that no worker makes it meanwhile.
2. One after the other is replaced by what its backup holds. Its consumers are taken back to the positions of the set.
   Then its mark says that it is whole, and of which set.
3. When all of them are whole, the marks go, and the subjects come: those of state first and those of events last, so
   that no agent is given anything before all that it uses is there.

Whoever repeats it can tell from the marks how far it came: a stream without one, beside one that is whole, is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import anyio
import anyio.to_thread
from msgspec import Struct

from aviso_workers.backends import Admin, ConsumerInfo, StreamInfo
from aviso_workers.errors import BackendError, BackupError, NotFoundError, UnavailableError
from aviso_workers.jetstream import metadata
from aviso_workers.jetstream.info import StreamConfig
from aviso_workers.jetstream.metadata import OF_SET, UNFINISHED
from aviso_workers.ops.backups import consumer_entries, sets
from aviso_workers.ops.backups.consumer_entries import StoredConsumer
from aviso_workers.ops.backups.encryption import Identities
from aviso_workers.ops.backups.restoration import STANDSTILL_SECONDS, require_restorable, taken, upload
from aviso_workers.ops.backups.sets import BackupSet
from aviso_workers.ops.backups.storage import Backup, Progress

__all__ = ["GoesOn", "RestoredStream", "restore_set"]

CONSUMER_SECONDS = 30.0
"""A cluster elects a leader for each consumer a moment after it is made."""
LOOK_SECONDS = 0.2
Watch = Callable[[Backup], AbstractContextManager[Progress]]
"""Shows how much of a backup was sent, for as long as the block is entered."""


class GoesOn(Struct, frozen=True, kw_only=True):
    """Where a consumer goes on."""

    consumer: str
    sequence: int
    """From here on it is given what it has not settled."""
    again: int | None
    """So many of these were settled while the set was made, and are handled once more; None where it is not known."""
    new: int
    """Messages that it will be given for the first time, or that it had not settled."""


class RestoredStream(Struct, frozen=True, kw_only=True):
    """A stream of a set that was restored."""

    stream: str
    messages: int
    messages_before: int
    """How many it had when it was backed up."""
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
    """Restore a set, or go on where a restore of it ended.

    Raises `BackupError`, with nothing touched, where a member is missing or damaged, or a
    stream exists that is none of the set's; as `restore` does otherwise. What was begun stays marked then: repeat it.
    """
    changes = {"storage": storage, "num_replicas": replicas}
    wanted = {field: value for field, value in changes.items() if value is not None}
    backups = sets.members(found)
    for backup in backups:
        await require_restorable(admin, backup, dict(backup.config) | wanted, identities)
    restoring = _Restoring(admin, found, {backup.stream: dict(backup.config) | wanted for backup in backups})
    await restoring.begin()
    for backup in reversed(backups):  # the origin of a mirror before the mirror
        if not await restoring.is_whole(backup.stream):
            with watch(backup) as progress:
                await restoring.send(backup, identities, progress)
    told = [await restoring.describe(backup, identities) for backup in backups]
    for backup in backups:
        await restoring.finish(backup.stream)
    return told


class _Restoring:
    """The streams of one set on a server, and how far each of them is."""

    def __init__(self, admin: Admin, found: BackupSet, configs: Mapping[str, dict[str, Any]]) -> None:
        self._admin = admin
        self._set = found
        self._whole, self._held = (f"{what}, {OF_SET}{found.id}" for what in ("whole", "empty"))
        self._configs = configs

    async def begin(self) -> None:
        """Make the streams that are missing, marked. Raises `BackupError` where one is there that is not ours."""
        infos = {stream: await self._info(stream) for stream in self._configs}
        whole = [stream for stream, info in infos.items() if info and self._mark(info) == self._whole]
        strange = [stream for stream, info in infos.items() if info and not metadata.is_unfinished(info.config)]
        unmade = [stream for stream, info in infos.items() if not info or self._mark(info) not in ("", self._whole)]
        if strange and (unmade or not whole):
            all_are = (
                "which are all streams of the set, as where it was restored before; " if strange == [*infos] else ""
            )
            raise BackupError(
                f"{', '.join(strange)} exist: nothing is restored; {all_are}delete these streams first, or restore "
                "single ones under another name (--as NAME)"
            )
        for stream, config in self._configs.items():
            if found := await taken(self._admin, StreamConfig(config).subjects, besides=self._configs):
                raise BackupError(f"{found} of {stream}: delete it first")
        await self._require_standstill(
            [info for info in infos.values() if info and metadata.is_unfinished(info.config)]
        )
        for stream, info in infos.items():
            if info is None:
                await self._hold(stream)

    async def is_whole(self, stream: str) -> bool:
        """Return whether nothing is left to be sent of it."""
        info = await self._info(stream)
        return info is not None and self._mark(info) in ("", self._whole)

    async def send(self, backup: Backup, identities: Identities | None, progress: Progress) -> None:
        """Replace what stands for a stream by what its backup holds, and say of it that it is whole."""
        stream = backup.stream
        await self._admin.delete_stream(stream)
        try:
            await upload(self._admin, backup, self._configs[stream], identities, progress, stays_unfinished=True)
            positions = self._set.written.positions.get(stream, {})
            for consumer in await self._durables(backup, identities):
                await self._take_back(stream, consumer, positions.get(consumer, 0) + 1)
            info = await self._admin.stream_info(stream)
            metadata = {**info.config.metadata, UNFINISHED: self._whole}
            await self._admin.update_stream({**info.config, "metadata": metadata})
        except BaseException:
            with anyio.CancelScope(shield=True):
                if await self._info(stream) is None:
                    await self._hold(stream)
            raise

    async def describe(self, backup: Backup, identities: Identities | None) -> RestoredStream:
        """Return what there is of a stream, and where its consumers go on."""
        info = await self._admin.stream_info(backup.stream)
        consumers = await self._consumers(backup.stream)
        stored = await anyio.to_thread.run_sync(consumer_entries.read, backup, identities)
        return RestoredStream(
            stream=backup.stream,
            messages=info.messages,
            messages_before=backup.state.messages,
            consumers=[await self._goes_on(backup.stream, each, stored.get(each.name)) for each in consumers],
        )

    async def _consumers(self, stream: str) -> list[ConsumerInfo]:
        """Return those that outlive their readers."""
        return [each for each in await self._admin.consumers(stream) if each.durable]

    async def _goes_on(self, stream: str, consumer: ConsumerInfo, stored: StoredConsumer | None) -> GoesOn:
        ahead = consumer.num_pending + consumer.num_ack_pending
        new: int | None = None
        if stored is not None:
            filters = consumer.config.filters
            with suppress(BackendError):  # a work queue has no further reader
                undelivered = await self._admin.count(
                    stream, filter_subjects=filters, start_sequence=stored.state.delivered.stream_seq + 1
                )
                new = undelivered + len(stored.state.pending or {})
        again = None if new is None else max(0, ahead - new)
        return GoesOn(consumer=consumer.name, sequence=consumer.ack_floor + 1, again=again, new=ahead - (again or 0))

    async def finish(self, stream: str) -> None:
        """Give a whole stream its subjects, and take its mark away."""
        info = await self._info(stream)
        if info is not None and metadata.is_unfinished(info.config):
            await self._admin.update_stream(self._configs[stream])

    async def _durables(self, backup: Backup, identities: Identities | None) -> list[str]:
        """Return the names of the consumers that are to be taken back. A list of the server lacks those of which it
        has not heard yet, and each of these would go on behind what it has to be given again.
        """
        if not backup.of_entries:
            return [each.name for each in await self._consumers(backup.stream)]
        stored = await anyio.to_thread.run_sync(consumer_entries.read, backup, identities)
        listed = {each.name for each in await self._consumers(backup.stream)}
        return [name for name, each in stored.items() if each.lasts or (each.is_durable and name in listed)]

    async def _take_back(self, stream: str, consumer: str, sequence: int) -> None:
        deadline = anyio.current_time() + CONSUMER_SECONDS
        while True:
            try:
                await self._admin.reset_consumer(stream, consumer, sequence=sequence)
                return
            except (UnavailableError, NotFoundError) as error:  # it is about to be made, or to elect its leader
                if anyio.current_time() > deadline:
                    raise BackupError(
                        f"consumer {consumer} of {stream} cannot be taken back to {sequence}: {error}; the set is not "
                        "whole, so restore it again"
                    ) from error
                await anyio.sleep(LOOK_SECONDS)

    async def _hold(self, stream: str) -> None:
        """Make a stream that only holds the name. Raises `BackupError` where somebody else was faster."""
        empty = {"name": stream, "subjects": [stream], "metadata": {UNFINISHED: self._held}}
        try:
            await self._admin.add_stream(empty)
        except BackendError as error:
            appeared = await self._info(stream)
            if appeared is not None and metadata.is_unfinished(appeared.config):  # a killed restore had asked
                await self._require_standstill([appeared])
                return
            raise BackupError(
                f"stream {stream} cannot be held until it is restored: {error}; stop the workers"
            ) from error

    async def _require_standstill(self, unfinished: Sequence[StreamInfo]) -> None:
        """Raise `BackupError` where somebody else is restoring these."""
        if not unfinished:
            return
        await anyio.sleep(STANDSTILL_SECONDS)
        for before in unfinished:
            stream = before.name
            now = await self._info(stream)
            if now is None or (now.created, now.last_sequence) != (before.created, before.last_sequence):
                raise BackupError(f"stream {stream} is being restored by somebody else")

    async def _info(self, stream: str) -> StreamInfo | None:
        try:
            return await self._admin.stream_info(stream)
        except NotFoundError:
            return None

    @staticmethod
    def _mark(info: StreamInfo) -> str:
        return info.config.metadata.get(UNFINISHED, "")
