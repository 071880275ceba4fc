"""Creation of sets: all streams of an account backed up together, while they are in use.

Called by `backup create --all`. `order` says in which order, and why a restored set repeats and never skips.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
from msgspec import Struct

from aviso_workers.backends import Admin
from aviso_workers.errors import AvisoWorkersError, BackupError, UnavailableError
from aviso_workers.jetstream.info import StreamConfig, StreamInfo
from aviso_workers.jetstream.specs import BUCKET, UNREADABLE
from aviso_workers.ops import inventory
from aviso_workers.ops.backups import completion, sets
from aviso_workers.ops.backups.completion import Spool
from aviso_workers.ops.backups.restoration import SCRATCH
from aviso_workers.ops.backups.sets import SetMember, SetRecord
from aviso_workers.ops.backups.storage import Backup
from aviso_workers.state import delayed_messages, own_buckets, own_streams
from aviso_workers.state.own_streams import COUNTERS, DEAD_LETTERS, RETRIES

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
    with sets.draft(to, made) as finish:
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
        members = [
            SetMember(stream=each.stream, directory=f"{each.stream}/{each.directory.name}", made=each.made)
            for each in backups
        ]
        finished = SetRecord(made=made, finished=datetime.now(UTC), members=members, positions=positions)
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
