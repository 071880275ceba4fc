"""`backup cleanse`: removes erased messages from backups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import typer

from aviso_workers.cli import completion
from aviso_workers.cli.arguments import parse_where
from aviso_workers.cli.identity import IDENTITY, identities_of
from aviso_workers.cli.options import YES, argument, confirm, end_where, filter_argument, option
from aviso_workers.cli.output import echo
from aviso_workers.cli.progress import bar
from aviso_workers.cli.targets import CONFIG, ConfigSource, connected_app
from aviso_workers.errors import BackupError, DeclarationError
from aviso_workers.ops import backups
from aviso_workers.ops.backups import Backup, Forgotten, Identities, Takes
from aviso_workers.ops.erasure import erase

T = TypeVar("T")
U = TypeVar("U")


def cleanse(
    directory: Path = argument("DIR", "Directory of a backup, or one with backups of streams, e.g. /backups."),
    where: list[str] | None = filter_argument("Remove notifications"),
    event: str | None = option(
        "EVENT",
        "Event type that KEY=VALUE is about. Default: the only one whose stream is among the backups.",
        autocompletion=completion.event_types,
    ),
    erasure: list[Path] | None = option("FILE", "Remove what this record of `erase` lists; may be repeated."),
    key: list[str] | None = option(
        "BUCKET/KEY", "Also remove this key of a table, windows or a counter; may be repeated."
    ),
    subject: str | None = option("SUBJECT", "Remove messages with a matching subject instead, e.g. mars.od.>"),
    identity: Path | None = IDENTITY,
    yes: bool = YES,
    config: ConfigSource | None = CONFIG,
) -> None:
    """Remove messages from backups for good, such as a person's data. The others are restored with their sequences.

    If a full backup has increments, the messages are removed from all of them, whichever one is named.

    Example: aviso-workers backup cleanse /backups class=od date=20261120 --yes
    """
    if bool(subject) == bool(where or erasure or key):
        raise DeclarationError("say which messages: KEY=VALUE, --erasure and --key together or alone, or --subject")
    found, failed = _load(directory)
    identities = identities_of(identity)
    if subject:
        takes, doubts = _of_subject(subject), list[str]()
    else:
        erasures = [erase.read_record(path) for path in erasure or ()]
        named = event or next((each.event_type for each in erasures), "")
        declared = connected_app(config).config
        wanted = backups.of_identifier(declared, found, parse_where(where), event_type=named) if where else None
        forgotten = Forgotten(wanted, records=erasures, keys=key or ())
        takes, doubts = forgotten.takes, forgotten.doubts(found)
    for doubt in doubts:
        echo(doubt, err=True)
    chosen = backups.one_of_each_chain(found)
    counts = [_try(backup, lambda backup: _count(backup, takes(backup), identities)) for backup in chosen]
    if any(counts):
        confirm(yes, to="remove them")
    concerned = [backup for backup, count in zip(chosen, counts, strict=True) if count]
    removed = [_try(backup, lambda backup: _forget(backup, takes(backup), identities)) for backup in concerned]
    end_where(failed or doubts or None in [*counts, *removed])


def _of_subject(subject: str) -> Callable[[Backup], Takes]:
    return lambda _: backups.of_subject(subject)


def _load(directory: Path) -> tuple[list[Backup], bool]:
    """Return the backups in a directory, and whether there are others, which cannot be read."""
    loaded = [_try(place, backups.load) for place in backups.places(directory) or [directory]]
    return [backup for backup in loaded if backup], None in loaded


def _try(thing: T, act: Callable[[T], U]) -> U | None:
    """Return the result of `act`; None where it raises `BackupError`, which is printed."""
    try:
        return act(thing)
    except BackupError as error:
        echo(str(error), err=True)
        return None


def _count(backup: Backup, takes: Takes, identities: Identities | None) -> int:
    with bar(f"{backup.directory}, reading", backup.size) as progress:
        plan = backups.plan_cleanse(backup, takes, identities=identities, progress=progress)
    typer.echo(f"{backup.directory}: {len(plan.removed)} messages match, {plan.kept} stay")
    for changed, _ in plan.changes:
        if not changed.directory.samefile(backup.directory):
            typer.echo(f"{changed.directory}: is rewritten as well")
    return len(plan.removed)


def _forget(backup: Backup, takes: Takes, identities: Identities | None) -> int:
    with bar(f"{backup.directory}, writing") as progress:
        removed = backups.forget(backup, takes, identities=identities, progress=progress)
    typer.echo(f"{backup.directory}: {removed} messages removed")
    return removed
