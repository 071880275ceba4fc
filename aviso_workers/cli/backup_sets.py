"""`backup create|restore --all`: sets of backups."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import typer

from aviso_workers.backends import Admin
from aviso_workers.cli.output import print_table
from aviso_workers.cli.progress import bar
from aviso_workers.errors import AvisoWorkersError, BackendError, BackupError
from aviso_workers.ops import backups
from aviso_workers.ops.backups import Backup, Identities, Keep, RestoredStream, Spool


async def create(
    admin: Admin,
    to: Path,
    back_up: Callable[[str, Spool | None], Awaitable[Backup]],
    prune: Callable[[str], Awaitable[list[AvisoWorkersError]]],
    *,
    encrypted: bool,
) -> list[AvisoWorkersError]:
    """Back up all streams, print whether the backups are a set, remove old ones, and return the failures."""
    made = await backups.create_set(admin, to, back_up, encrypted=encrypted)
    if made.file:
        typer.echo(f"{len(made.backups)} streams are a set, to be restored as one: {made.file}")
    failures = list(made.failures)
    for backup in made.backups:
        failures += await prune(backup.stream)
    return failures


async def restore(
    admin: Admin,
    place: Path,
    *,
    storage: str | None,
    replicas: int | None,
    identities: Identities | None,
) -> None:
    """Restore the set of a file, or the newest one in a directory, and print where agents go on."""
    found = backups.load_set(place)
    restored = await backups.restore_set(
        admin,
        found,
        storage=storage,
        replicas=replicas,
        identities=identities,
        watch=lambda backup: bar(backup.stream, backups.size(backup)),
    )
    print_table(
        ("stream", "messages", "consumer", "goes on at", "again", "new to it"),
        [row for each in restored for row in _rows(each)],
        none="no streams",
    )
    typer.echo(
        f"the set of {found.written.made:%Y-%m-%dT%H:%M:%SZ} is restored; what is counted under again was settled "
        "while it was made, and is handled once more"
    )
    for each in restored:
        if each.messages != each.messages_before:
            typer.echo(
                f"{each.stream}: it had {each.messages_before} messages: the rest is beyond its limits by now, "
                "or was deleted during the backup",
                err=True,
            )


async def prune(admin: Admin, to: Path, stream: str, keep: Keep) -> list[AvisoWorkersError]:
    """Remove old backups of a stream, print which, and return a failure for each that does not count."""
    try:
        pruned = await backups.prune_by_server(admin, to, stream, keep)
    except (BackendError, BackupError) as error:
        return [error]
    for gone in pruned.removed:
        typer.echo(f"{stream}: removed {gone.directory}")
    return [BackupError(f"{found}; it is kept, and does not count") for found in pruned.not_counted]


def _rows(restored: RestoredStream) -> list[tuple[str, ...]]:
    stream = (restored.stream, str(restored.messages))
    if not restored.consumers:
        return [(*stream, "", "", "", "")]
    return [
        (*stream, each.consumer, *map(str, (each.sequence, "unknown" if each.again is None else each.again, each.new)))
        for each in restored.consumers
    ]
