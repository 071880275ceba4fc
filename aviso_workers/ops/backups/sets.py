"""Sets of backups: which backups of an account's streams belong together, and the positions of agents.

Called by `backup create --all`, `backup restore --all`, and the commands that list and verify. All streams of an
account are backed up together, while they are in use: `order` says in which order, and why a restored set repeats and
never skips.

The backups of a set lie where all
backups do. What makes them a set is one file beside the streams' directories, `set-TIME.json`. It is written last and
gets its name when it is on the disk, so there is none of a set that is not whole. While a set is being made there is
another file, `.unfinished-set-TIME.json`, with a lock; the file that a killed process has left is listed and never
restored.

A set is restored with agents at positions from which no effect is missing. Workers and publishers cannot use the
streams until the set is whole, as with a single restore: a stream that is not whole has a mark and none of its subjects
(`metadata.is_unfinished`), and every command and worker refuses such a one. Each step can be repeated after this
process was killed at any moment:

1. Every stream of the set is made, empty and marked, so that no worker makes it meanwhile.
2. One after the other is replaced by the content of its backup. Its consumers are reset to the positions of the set.
   Then its mark says that it is whole, and of which set.
3. When all of them are whole, the marks go, and the subjects come: those of state first and those of events last, so
   that no agent gets a notification before all that it uses is there.

A repeated command sees from the marks how far it came: a stream without one, beside one that is whole, is done.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import msgspec
from msgspec import Struct

from aviso_workers import files
from aviso_workers.aviso.codec import UNREADABLE_JSON
from aviso_workers.backends import Admin, ConsumerInfo
from aviso_workers.clocks import SKEW
from aviso_workers.errors import (
    AvisoWorkersError,
    BackendError,
    BackupError,
    NotFoundError,
    UnavailableError,
    UnreadableStreamError,
)
from aviso_workers.jetstream import metadata
from aviso_workers.jetstream.info import StreamConfig, StreamInfo
from aviso_workers.jetstream.metadata import SET_MARK, UNFINISHED
from aviso_workers.jetstream.specs import BUCKET, UNREADABLE
from aviso_workers.ops import inventory
from aviso_workers.ops.backups import chains, completion, restoration
from aviso_workers.ops.backups.archive import StoredConsumer
from aviso_workers.ops.backups.completion import Spool
from aviso_workers.ops.backups.encryption import Identities
from aviso_workers.ops.backups.restoration import SCRATCH, STANDSTILL_SECONDS, require_restorable, taken, upload
from aviso_workers.ops.backups.storage import Backup, Moment, Progress, explained, load, locked, make_directory, time_of
from aviso_workers.state import delayed_messages, own_buckets, own_streams
from aviso_workers.state.own_streams import COUNTERS, DEAD_LETTERS, RETRIES

NAMED = "set-*.json"
BEGUN = ".unfinished-"
T = TypeVar("T")

ELECTION_SECONDS = 30.0
"""An election takes 5 to 7 seconds, and that of a stream begins after that of the meta group."""
LEAST_ATTEMPTS = 3
"""However long each takes: that of a large stream may fail minutes after it has begun."""
AGAIN_SECONDS = 1.0

BackUp = Callable[[str, Spool | None], Awaitable[Backup]]
"""Makes the backup of a stream, with what an earlier snapshot of it had."""
LIMITS = "limits"
"""The retention of a stream that keeps settled messages."""
CONSUMER_SECONDS = 30.0
"""A cluster elects a leader for each consumer a moment after it is made."""
POLL_SECONDS = 0.2
Watch = Callable[[Backup], AbstractContextManager[Progress]]
"""Shows how much of a backup was sent, for as long as the block is entered."""


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
        for left in sorted(directory.glob(BEGUN + NAMED))
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
    left = place.with_name(BEGUN + place.name)
    with ExitStack() as stack:
        with explained(f"cannot write {left}"):
            make_directory(directory)
            file = stack.enter_context(files.create_file(left))
        fcntl.flock(file, fcntl.LOCK_EX)
        for other in directory.glob(BEGUN + NAMED):
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


class MadeSet(Struct, frozen=True, kw_only=True):
    """The result of making a set: the backups and, where all succeeded, the file that makes them a set."""

    file: Path | None
    """None where it is not whole: then it is not a set, and its backups are backups of single streams."""
    failures: list[AvisoWorkersError]
    backups: list[Backup]
    """The backups that were made."""


async def create_set(admin: Admin, to: Path, back_up: BackUp, *, encrypted: bool) -> MadeSet:
    """Back up all streams of the account, in an order that fits, and record that the backups belong together.

    What fails because no server answers for a stream is tried again for as long as an election may take. Where one
    fails the others are backed up all the same, and there is no set. `encrypted`: `back_up` encrypts, so
    nothing may be on the disk in the clear. Raises `BackupError` where there are no streams, there is no such order or
    `to` cannot be written, `RefusedError` where the server is older than 2.15, and `BackendError`.
    """
    admin.connection.require_server(2, 15, to="back up all streams as a set")
    made = datetime.now(UTC)
    with draft(to, made) as finish:
        before = await _streams(admin)
        if not before:
            raise BackupError("the account has no streams that could be backed up as a set")
        positions = {
            stream: {
                consumer.name: consumer.ack_floor
                for consumer in await _through_election(partial(admin.consumers, stream))
            }
            for stream in before
        }
        configs = {stream: info.config for stream, info in before.items()}
        failures: list[AvisoWorkersError] = []
        backups: list[Backup] = []

        async def spooled(stack: AsyncExitStack, stream: str) -> Spool:
            return await stack.enter_async_context(completion.spooled(admin, stream, beside=to, encrypted=encrypted))

        async with AsyncExitStack() as stack:
            earlier = {stream: await _through_election(partial(spooled, stack, stream)) for stream in twice(configs)}
            for stream in order(configs):
                try:
                    backup = await _through_election(partial(back_up, stream, earlier.get(stream)))
                except AvisoWorkersError as error:
                    failures.append(error)
                else:
                    backups.append(backup)
        if changed := _changed(before, await _streams(admin)):
            failures.append(BackupError(f"the backups are not a set, because meanwhile {changed}: make it again"))
        if failures:
            return MadeSet(file=None, failures=failures, backups=backups)
        made_of = [
            SetMember(stream=each.stream, directory=f"{each.stream}/{each.directory.name}", made=each.made)
            for each in backups
        ]
        finished = SetRecord(made=made, finished=datetime.now(UTC), members=made_of, positions=positions)
        return MadeSet(file=finish(finished), failures=[], backups=backups)


async def _through_election(request: Callable[[], Awaitable[T]]) -> T:
    """Return the result of a request, which is repeated while no server answers. Raises what the last one raises."""
    attempts, failed_at = 0, anyio.current_time()
    while True:
        try:
            return await request()
        except UnavailableError:
            attempts += 1
            failed_at = failed_at if attempts > 1 else anyio.current_time()
            if attempts >= LEAST_ATTEMPTS and anyio.current_time() - failed_at > ELECTION_SECONDS:
                raise
        await anyio.sleep(AGAIN_SECONDS)


async def _streams(admin: Admin) -> dict[str, StreamInfo]:
    """Return the info of each stream. Raises `BackupError` where the server cannot read
    all.
    """
    found = {}
    for name in await _through_election(admin.stream_names):
        if name == UNREADABLE:
            raise BackupError(
                "the server cannot read all of its streams (JS042), so a set of those that it knows is not whole"
            )
        if name.startswith(SCRATCH):
            continue
        if info := await inventory.existing(_through_election(partial(admin.stream_info, name))):
            found[name] = info
    return found


def _changed(before: Mapping[str, StreamInfo], after: Mapping[str, StreamInfo]) -> str:
    """Return the names of streams that were created or deleted meanwhile, as text; empty where there are none."""
    came = sorted(name for name in after if name not in before or after[name].created != before[name].created)
    went = sorted(before.keys() - after.keys())
    changes = [f"{', '.join(names)} {verb}" for names, verb in ((came, "was created"), (went, "was deleted")) if names]
    return " and ".join(changes)


def order(configs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the names of streams in the order in which they are to be backed up, by their configurations.

    So agents on a restored set repeat and never skip. Streams are backed up one after the other while all are in use,
    so each is of another moment. Whatever moves from one place to another is stored in the second before it leaves the
    first. It is lost exactly where the first is taken after it has left and the second before it came. So a source is
    taken before its target:

    1. The positions of all consumers, before anything else. What a position says is settled has had its effects by
       then: tables, counters, windows, outputs, dead letters, delayed messages. Notifications that are settled after
       that are handled again, as after any crash.
    2. The claims of timers and leases, so that a tick whose effects are in a table may be run again and is not skipped.
       The orders of operators, so that what workers have recorded of an order by then is in a later bucket.
    3. Windows. A window leaves its bucket when its result is published, or a dead letter.
    4. Tables, counters and all other buckets.
    5. Dead letters, then retries, which are copied from them.
    6. Delayed messages, which go to the streams of events.
    7. The streams of events and all others. They come last so that they hold every sequence that the state before them
       knows: a stream that is restored with fewer stores other notifications under sequences that tables, windows and
       failure counts remember as handled.

    A mirror, and a stream with sources, is taken before its origin: it goes on after the last sequence that it has, so
    the origin must have at least as many.

    Where things move in both directions no order is safe, and the stream is taken on both sides of the others
    (`twice`): it is restored with what it had at either time. Dead letters are, where there are windows: windows become
    dead letters, and `dead-letters retry` puts them back. So are streams that lose what is settled (a work queue, or by
    interest): they have no position that could be taken before the rest.

    What is not safe: what an author's code moves between two tables of its own, and a tick that was claimed and not
    done when its effects were backed up, which is run at most once anyway.

    Raises `BackupError` where streams are sources of one another: none of them may be taken before the other.
    """
    found: list[str] = []
    copies = {name: [copy for copy in sorted(configs) if name in _origins(configs[copy])] for name in configs}

    def take(name: str, on_behalf_of: tuple[str, ...]) -> None:
        if name in on_behalf_of:
            raise BackupError(
                f"{' and '.join(on_behalf_of)} are sources of one another, so no order of their backups is valid; "
                "back each of them up by its name"
            )
        if name in found:
            return
        for copy in copies[name]:
            take(copy, (*on_behalf_of, name))
        found.append(name)

    for name in sorted(configs, key=lambda name: (_rank(name, configs[name]), name)):
        take(name, ())
    return found


def twice(configs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the names of streams that are to be backed up once more, before all others."""
    losing = [name for name, config in configs.items() if StreamConfig(config).retention != LIMITS]
    buckets = [name.removeprefix(BUCKET) for name in configs if name.startswith(BUCKET)]
    windows = "windows" in map(own_buckets.kind_of, buckets)
    dead_letters = [name for name in configs if windows and own_streams.app_of(DEAD_LETTERS, name)]
    return sorted({*losing, *dead_letters})


def _rank(name: str, config: Mapping[str, Any]) -> int:
    if name.startswith(BUCKET):
        return {"orders": 2, "timers": 2, "leases": 2, "live": 2, "windows": 3}.get(
            own_buckets.kind_of(name.removeprefix(BUCKET)), 4
        )
    if delayed_messages.event_stream_of(name):
        return 7
    for kind, rank in ((COUNTERS, 4), (DEAD_LETTERS, 5), (RETRIES, 6)):
        if own_streams.app_of(kind, name):
            return rank
    return 8 if _origins(config) else 9


def _origins(config: Mapping[str, Any]) -> set[str]:
    """Return the streams of this account that a stream copies."""
    return {each.name for each in StreamConfig(config).origins if not each.external}


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
    backups = members(found)
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
