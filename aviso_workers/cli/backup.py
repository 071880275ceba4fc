"""`backup create|ls|verify|restore|drill|cleanse|merge`: backups of streams in a directory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TypedDict, TypeVar, Unpack

import anyio
import typer
from rich.filesize import decimal

from aviso_workers.aviso.literals import Duration
from aviso_workers.backends import Admin, open_backend
from aviso_workers.cli import completion
from aviso_workers.cli.arguments import parse_where
from aviso_workers.cli.options import YES, argument, confirm, end_where, filter_argument, flag, option
from aviso_workers.cli.output import AS_JSON, echo, print_rows, print_table, time_text
from aviso_workers.cli.progress import bar
from aviso_workers.cli.signals import until_signal
from aviso_workers.cli.targets import CONFIG, ConfigSource, OpenedServer, connected, connected_app, load
from aviso_workers.errors import AvisoWorkersError, BackendError, BackupError, DeclarationError
from aviso_workers.ops import backups
from aviso_workers.ops.backups import (
    Backup,
    BackupSchedule,
    Forgotten,
    Identities,
    Keep,
    Making,
    RestoredStream,
    Spool,
    Takes,
)
from aviso_workers.ops.erasure import erase
from aviso_workers.telemetry import logs

BACKUPS = ("stream", "made", "messages", "bytes", "nats-server", "kind", "directory")

backup = typer.Typer(
    help="Back up streams with their consumers, in the layout of the nats CLI, and restore them.", no_args_is_help=True
)

DIRECTORY = argument("DIR", "Directory of a backup, e.g. backups/MARS/20261120T060000.000Z.")
ENCRYPT_TO = option("KEY|FILE", "Encrypt to this public key of age, or to those in this file. Default: no encryption.")
IDENTITY = option("FILE", "File with the secret keys of age that open encrypted backups.")
BELOW = argument("DIR", "Directory of a backup, or one with backups of streams, e.g. /backups.")

T = TypeVar("T")
U = TypeVar("U")


class Storage(StrEnum):
    FILE = "file"
    MEMORY = "memory"


class Chosen(TypedDict):
    """What a restore of a stream and one of a set are told."""

    storage: Storage | None
    replicas: int | None
    identities: Identities | None


@backup.command()
def create(
    names: list[str] | None = argument(
        "EVENT|STREAM...",
        "Event types, e.g. mars, or names of streams.",
        autocompletion=completion.events_and_streams,
        default=None,
    ),
    *,
    to: Path = option("DIR", "Directory for the backups. Each one is written to DIR/STREAM/TIME.", default=...),
    everything: bool = flag("--all", "Back up all streams of the account, as a set that is restored as one."),
    newest: int | None = option(
        "N", "Keep the newest N backups of each stream, and remove others. Default: remove none.", "--keep", min=1
    ),
    days: int | None = option(
        "N",
        "Keep the newest backup and those of the last N days, and remove others. With --keep, a backup "
        "stays if one of the two keeps it.",
        "--keep-days",
        min=1,
    ),
    since: str | None = option(
        "last|BACKUP",
        "Store only what this backup lacks; `last` is the newest one of each stream. Default: a full backup.",
    ),
    full_every: str | None = option(
        "DURATION", "As --since last, but make a full backup once the last one is older than this, e.g. 7d."
    ),
    every: str | None = option(
        "DURATION",
        "Keep running until SIGTERM or Ctrl-C, and back up at this interval, e.g. 6h. Default: back up once.",
    ),
    encrypt_to: list[str] | None = ENCRYPT_TO,
    identity: Path | None = IDENTITY,
    config: ConfigSource | None = CONFIG,
) -> None:
    """Back up streams while they stay in use, and remove old backups if --keep or --keep-days says so.

    Example: aviso-workers backup create mars --to /backups --since last --keep 14
    """
    if bool(names) == everything:
        raise DeclarationError("say what to back up: event types or streams, or --all")
    making = _making(to, since, full_every, encrypt_to, identity)
    if every:
        if encrypt_to and (since or full_every) and not identity:
            raise DeclarationError("increments after encrypted backups need --identity, to compare with them")
        schedule = BackupSchedule(
            names=names or (),
            to=to,
            every_seconds=_parsed(every),
            keep=Keep(newest, days),
            encrypted=bool(encrypt_to),
        )
        loaded = load(config)
        logs.configure(loaded.workers.logging)
        keep_on = partial(backups.keep_backing_up, schedule, loaded, lambda: open_backend(loaded), making.make)
        anyio.run(until_signal, keep_on)
        return

    async def run(server: OpenedServer) -> list[AvisoWorkersError]:
        async def back_up(stream: str, earlier: Spool | None = None) -> Backup:
            with bar(stream) as progress:
                made = await making.make(server.admin, stream, earlier, progress=progress)
            if made.full_because:
                typer.echo(f"{stream}: a full backup, because {made.full_because}", err=True)
            typer.echo(_described(made.backup))
            return made.backup

        prune = partial(_pruned, server.admin, to, keep=Keep(newest, days))
        if everything:
            made = await backups.create_set(server.admin, to, back_up, encrypted=bool(encrypt_to))
            if made.file:
                typer.echo(f"{len(made.backups)} streams are a set, to be restored as one: {made.file}")
            return [*made.failures, *[each for backup in made.backups for each in await prune(backup.stream)]]
        streams = await backups.named_streams(server.admin, server.config, names or ())
        return await backups.create_each(streams, back_up, prune)

    _end(connected(config, run))


async def _pruned(admin: Admin, to: Path, stream: str, *, keep: Keep) -> list[AvisoWorkersError]:
    """Remove old backups of a stream, print which, and return a failure for each that does not count."""
    try:
        pruned = await backups.prune_by_server(admin, to, stream, keep)
    except (BackendError, BackupError) as error:
        return [error]
    for gone in pruned.removed:
        typer.echo(f"{stream}: removed {gone.directory}")
    return [BackupError(f"{found}; it is kept, and does not count") for found in pruned.not_counted]


@backup.command()
def ls(directory: Path = BELOW, as_json: bool = AS_JSON) -> None:
    """List the backups in a directory, the oldest first. Exit with 1 if one cannot be read, or needs one that is
    missing.

    Example: aviso-workers backup ls /backups
    """
    if not directory.is_dir():
        raise BackupError(f"{directory} is not a directory")
    found: list[backups.Backup] = []

    def add(place: Path) -> None:
        found.append(backups.load(place))
        backups.chain(found[-1])

    failures = _each(backups.places(directory), add)
    found.sort(key=lambda each: each.made)
    rows = [_row(each) for each in found]
    if rows or as_json:
        documents = (dict(zip(BACKUPS, row, strict=True)) for row in rows)
        print_rows(BACKUPS, map(_cells, rows), documents, none="no backups", as_json=as_json)
    elif not failures:
        typer.echo(f"no backups in {directory}")
    for file in backups.sets_in(directory):
        typer.echo(f"set: {file}", err=as_json)
    for sentence in backups.unfinished_sets(directory):
        typer.echo(sentence, err=True)
    _end(failures)


@backup.command()
def verify(directory: Path = BELOW, *, identity: Path | None = IDENTITY) -> None:
    """Verify a backup, or all backups in a directory: read all of it, and count what is in it. Exit with 1 if one is
    damaged.

    Example: aviso-workers backup verify /backups
    """
    identities = identities_of(identity)
    sets = backups.sets_in(directory)
    failures = _each(
        backups.places(directory) or ([] if sets else [directory]), lambda place: _verify(place, identities)
    )
    failures += _each(sets, _verify_set)
    failures += [BackupError(sentence) for sentence in backups.unfinished_sets(directory)]
    _end(failures)


@backup.command()
def restore(
    directory: Path = argument(
        "DIR",
        "Directory of a backup, e.g. backups/MARS/20261120T060000.000Z; with --all, the file of a set or "
        "the directory with it.",
    ),
    name: str | None = option(
        "NAME",
        "Restore to a stream of this name, without the original's subjects. Default: the original's name and subjects.",
        "--as",
    ),
    everything: bool = flag(
        "--all", "Restore all streams of a set. Of several sets in a directory, the newest is restored."
    ),
    storage: Storage | None = typer.Option(None, help="Storage of the stream. Default: as it was."),
    replicas: int | None = option("N", "Number of replicas of the stream. Default: as it was.", min=1, max=5),
    identity: Path | None = IDENTITY,
    config: ConfigSource | None = CONFIG,
) -> None:
    """Restore a stream from a backup, with its sequences and consumers, or all streams of a set. A stream that exists
    already is not touched: the command fails.

    Example: aviso-workers backup restore /backups/MARS/20261120T060000.000Z
    """
    if everything and name:
        raise DeclarationError("a set is restored under its own names: say --all or --as")
    chosen = Chosen(storage=storage, replicas=replicas, identities=identities_of(identity))
    if everything:
        connected(config, lambda server: _restore_set(server, directory, **chosen))
        return
    found = backups.load(directory)

    async def run(server: OpenedServer) -> None:
        with bar(found.stream, backups.size(found)) as progress:
            restored = await backups.restore(server.admin, found, name=name, progress=progress, **chosen)
        now = restored.state.messages
        typer.echo(f"{restored.stream}: {now} messages, from {restored.state.first_sequence} on")
        if now != restored.messages_before:
            _tell_fewer(restored.stream, f"{restored.messages_before}")

    connected(config, run)


async def _restore_set(server: OpenedServer, place: Path, **chosen: Unpack[Chosen]) -> None:
    """Restore the set of a file, or the newest one in a directory, and print where agents go on."""
    found = backups.load_set(place)
    restored = await backups.restore_set(
        server.admin, found, watch=lambda backup: bar(backup.stream, backups.size(backup)), **chosen
    )
    columns = ("stream", "messages", "consumer", "goes on at", "again", "new to it")
    print_table(columns, [row for each in restored for row in _set_rows(each)], none="no streams")
    typer.echo(
        f"the set of {found.written.made:%Y-%m-%dT%H:%M:%SZ} is restored; what is counted under again was settled "
        "while it was made, and is handled once more"
    )
    for each in restored:
        if each.messages != each.messages_before:
            _tell_fewer(each.stream, f"{each.messages_before} messages")


def _tell_fewer(stream: str, before: str) -> None:
    why = "the rest is beyond its limits by now, or was deleted during the backup"
    typer.echo(f"{stream}: it had {before}: {why}", err=True)


def _set_rows(restored: RestoredStream) -> list[tuple[str, ...]]:
    stream = (restored.stream, str(restored.messages))
    if not restored.consumers:
        return [(*stream, "", "", "", "")]
    return [
        (*stream, each.consumer, *map(str, (each.sequence, "unknown" if each.again is None else each.again, each.new)))
        for each in restored.consumers
    ]


@backup.command()
def drill(
    directory: Path = DIRECTORY, *, identity: Path | None = IDENTITY, config: ConfigSource | None = CONFIG
) -> None:
    """Rehearse a restore: restore a backup to a scratch stream, compare every message and consumer, and delete that
    stream.

    Example: aviso-workers backup drill /backups/MARS/20261120T060000.000Z
    """
    found, identities = backups.load(directory), identities_of(identity)

    async def run(server: OpenedServer) -> None:
        with bar(found.stream, backups.size(found)) as progress:
            done = await backups.drill(server.admin, found, identities=identities, progress=progress)
        if done.differences:
            raise BackupError(f"{directory} does not restore as it was: {'; '.join(done.differences)}")
        typer.echo(
            f"{found.stream}: {done.restored.messages} messages and {len(done.restored.consumers)} consumers "
            f"restored and compared, sha256 {done.restored.sha256}"
        )

    connected(config, run)


@backup.command()
def cleanse(
    directory: Path = BELOW,
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
    loaded = [_try(place, backups.load) for place in backups.places(directory) or [directory]]
    found = [backup for backup in loaded if backup]
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
    end_where(doubts or None in [*loaded, *counts, *removed])


@backup.command()
def merge(
    directory: Path = DIRECTORY,
    *,
    to: Path = option("DIR", "Directory for the merged backup, which is written to DIR/STREAM/TIME.", default=...),
    encrypt_to: list[str] | None = ENCRYPT_TO,
    identity: Path | None = IDENTITY,
) -> None:
    """Merge an increment and the backups before it into one full backup. Without --encrypt-to, the result is not
    encrypted, even if the backup is.

    Example: aviso-workers backup merge /backups/MARS/20261120T060000.000Z --to /merged
    """
    found, identities = backups.load(directory), identities_of(identity)
    with bar(found.stream, backups.size(found)) as progress:
        made = backups.merge(
            found,
            to,
            encrypt_to=backups.read_recipients(encrypt_to or ()),
            identities=identities,
            progress=progress,
        )
    typer.echo(_described(made))


def _making(
    to: Path, since: str | None, full_every: str | None, encrypt_to: Sequence[str] | None, identity: Path | None
) -> Making:
    """Return how backups are made as the options say. Raises `DeclarationError`."""
    if since and full_every:
        raise DeclarationError("say --since or --full-every: the second makes increments as well")
    return Making(
        to=to,
        since="last" if full_every or since == "last" else Path(since) if since else None,
        full_every_seconds=_parsed(full_every) if full_every else None,
        encrypt_to=backups.read_recipients(encrypt_to or ()),
        identities=identities_of(identity),
    )


def _parsed(duration: str) -> Duration:
    try:
        parsed = Duration.parse(duration)
    except ValueError as error:
        raise DeclarationError(str(error)) from error
    if not parsed:
        raise DeclarationError(f"{duration} is not a time to wait")
    return parsed


def _described(made: Backup) -> str:
    return f"{made.stream}: {made.state.messages} messages, {decimal(made.size)} in {made.directory}" + (
        f", after {made.previous.directory}" if made.previous else ""
    )


def _row(found: backups.Backup) -> tuple[str | int, ...]:
    version = (found.record and found.record.server_version) or "unknown"
    kind = (f"after {found.previous.directory}" if found.previous else "full") + ", encrypted" * found.encrypted
    counts = (found.state.messages, found.size)
    return (found.stream, time_text(found.made), *counts, version, kind, str(found.directory))


def _cells(row: Iterable[str | int]) -> Iterator[str]:
    return (decimal(int(cell)) if name == "bytes" else str(cell) for name, cell in zip(BACKUPS, row, strict=True))


def _verify(directory: Path, identities: Identities | None) -> None:
    found = backups.load(directory)
    with bar(found.stream, backups.size(found)) as progress:
        contents = backups.verify(found, identities=identities, progress=progress)
    if contents is None and found.of_entries:
        typer.echo(
            f"{directory}: its files are as they were written; it is encrypted, and only with --identity FILE can its "
            "messages be counted"
        )
        return
    if contents is None:
        typer.echo(f"{directory}: whole; a nats-server before 2.15 made it, and its messages cannot be counted here")
        return
    typer.echo(
        f"{directory}: {contents.messages} messages, {decimal(contents.bytes)}, {len(contents.consumers)} consumers"
        + (f"; {contents.missing} messages were deleted or expired while it was made" if contents.missing else "")
    )


def _verify_set(file: Path) -> None:
    found = backups.load_set(file)
    backups.members(found)
    typer.echo(f"{file}: a set of {len(found.written.members)} streams, all of which are there")


def identities_of(file: Path | None) -> Identities | None:
    """Return the keys in a file; None where no file is given. Raises `DeclarationError`."""
    return Identities.read(file) if file else None


def _each(directories: Sequence[Path], act: Callable[[Path], None]) -> list[AvisoWorkersError]:
    failures: list[AvisoWorkersError] = []
    for directory in directories:
        try:
            act(directory)
        except BackupError as error:
            failures.append(error)
    return failures


def _end(failures: Sequence[AvisoWorkersError]) -> None:
    """Raise all failures as one `BackupError`, when everything else is done."""
    if failures:
        raise BackupError("\n".join(map(str, failures)))


def _of_subject(subject: str) -> Callable[[Backup], Takes]:
    return lambda _: backups.of_subject(subject)


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
