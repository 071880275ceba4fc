"""Creation of sets: all streams of an account backed up together, while they are in use.

Called by `backup create --all`. `set_order` says in which order, and why a restored set repeats and never skips.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
from msgspec import Struct

from aviso_workers.backends import Admin
from aviso_workers.errors import AvisoWorkersError, BackupError, UnavailableError
from aviso_workers.jetstream.specs import UNREADABLE
from aviso_workers.ops import inventory
from aviso_workers.ops.backups import completion, set_order, sets
from aviso_workers.ops.backups.restoration import SCRATCH
from aviso_workers.ops.backups.sets import SetMember, SetRecord
from aviso_workers.ops.backups.spools import Spool
from aviso_workers.ops.backups.storage import Backup

T = TypeVar("T")

ELECTION_SECONDS = 30.0
"""An election takes 5 to 7 seconds, and that of a stream begins after that of the meta group."""
LEAST_ATTEMPTS = 3
"""However long each takes: that of a large stream may fail minutes after it has begun."""
AGAIN_SECONDS = 1.0

BackUp = Callable[[str, Spool | None], Awaitable[Backup]]
"""Makes the backup of a stream, with what an earlier snapshot of it had."""


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
    with sets.SetDraft(to, made) as draft:
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
        configs = {stream: config for stream, (_, config) in before.items()}
        failures: list[AvisoWorkersError] = []
        backups: list[Backup] = []

        async def spooled(stack: AsyncExitStack, stream: str) -> Spool:
            return await stack.enter_async_context(completion.spooled(admin, stream, beside=to, encrypted=encrypted))

        async with AsyncExitStack() as stack:
            earlier = {
                stream: await _through_election(partial(spooled, stack, stream)) for stream in set_order.twice(configs)
            }
            for stream in set_order.order(configs):
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
        return MadeSet(file=draft.finish(finished), failures=[], backups=backups)


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


async def _streams(admin: Admin) -> dict[str, tuple[datetime | None, dict[str, Any]]]:
    """Return when each stream was created, and its configuration. Raises `BackupError` where the server cannot read
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
            found[name] = (info.created, dict(info.config))
    return found


def _changed(
    before: dict[str, tuple[datetime | None, dict[str, Any]]], after: dict[str, tuple[datetime | None, dict[str, Any]]]
) -> str:
    """Return the names of streams that were created or deleted meanwhile, as text; empty where there are none."""
    came = sorted(name for name in after if name not in before or after[name][0] != before[name][0])
    went = sorted(before.keys() - after.keys())
    changes = [f"{', '.join(names)} {verb}" for names, verb in ((came, "was created"), (went, "was deleted")) if names]
    return " and ".join(changes)
