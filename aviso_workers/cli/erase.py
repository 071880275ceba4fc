"""`erase`: erases notifications and their copies for good."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import typer

from aviso_workers.aviso.literals import quoted
from aviso_workers.cli.arguments import parse_where
from aviso_workers.cli.completion import EVENT
from aviso_workers.cli.options import YES, confirm, end_where, filter_argument, flag, option
from aviso_workers.cli.output import echo, print_table
from aviso_workers.cli.progress import ProgressLines
from aviso_workers.cli.targets import CONFIG, ConfigSource, OpenedServer, connected
from aviso_workers.errors import DeclarationError
from aviso_workers.ops.erasure import ELSEWHERE, INDEX_WITHIN, Eraser, Survey, Suspect

SHOWN = 5
"""Sequences in a row of the table."""
SHOWN_KEYS = 50


def erase(
    event: str = EVENT,
    where: list[str] | None = filter_argument("Erase notifications"),
    id: int | None = option("N", "Erase the notification with this sequence, instead of KEY=VALUE.", min=1),
    key: list[str] | None = option(
        "BUCKET/KEY", "Also erase this key of a table, windows or a counter; may be repeated."
    ),
    audit: Path | None = option("FILE", "New file for the record of the erasure. Default: erasure-TIME.json here."),
    dry_run: bool = flag("--dry-run", "Only say what would be erased."),
    yes: bool = YES,
    config: ConfigSource | None = CONFIG,
) -> None:
    """Erase notifications for good, wherever this account keeps them: also their copies and dead letters. Their bytes
    on the disk are overwritten.

    Example: aviso-workers erase mars class=od date=20261120 --audit record.json --yes
    """
    if where and id is not None:
        raise DeclarationError("give either KEY=VALUE or --id, not both")
    if not where and id is None:
        raise DeclarationError(
            "say which notifications to erase: give KEY=VALUE or --id N; `streams wipe` removes all of them"
        )
    wanted = parse_where(where or [])

    async def run(server: OpenedServer) -> bool:
        eraser = Eraser(server.admin, server.config, event, where=wanted, sequence=id, keys=key or ())
        survey = await eraser.survey()
        _print(survey)
        if dry_run:
            return True
        if survey.findings:
            confirm(yes, to="erase all of them")
        elif not yes:
            return survey.whole
        record = audit or Path(f"erasure-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}.json")
        left = await eraser.erase(survey, audit=record, progress=ProgressLines("erased", total=survey.messages))
        _print_erased(sum(eraser.erased(left).values()), left, record)
        return left.whole

    is_whole = connected(config, run)
    end_where(not is_whole)


def _print(survey: Survey) -> None:
    if not survey.findings:
        typer.echo("nothing matches")
    else:
        rows = []
        for finding in survey.findings:
            found = finding.sequences
            some = ", ".join(map(str, found[:SHOWN])) + (", ..." if len(found) > SHOWN else "")
            rows.append((finding.stream, finding.what, str(len(found)), some))
        print_table(("stream", "holds", "messages", "sequences"), rows)
    for suspect in survey.suspects:
        _print_suspect(suspect)
    for each in survey.unreached:
        echo(f"not reached: {each.where}: {each.why}. {each.cure.capitalize()}.")
    for what in ELSEWHERE:
        echo(f"not searched: {what}.")


def _print_erased(erased: int, left: Survey, record: Path) -> None:
    typer.echo(f"{erased} erased, {left.messages} left; the record is {record}")
    for each in left.unreached:
        if each.waits or each.unknown:
            echo(f"not proven: {each.where}: {each.why}. {each.cure.capitalize()}.")
    if not erased:
        return
    typer.echo(
        "the subjects of what is erased, with the values that are in them, stay in the index files of the servers "
        f"until {datetime.now(UTC) + INDEX_WITHIN:%Y-%m-%dT%H:%M:%SZ} at the latest, and the whole messages in the "
        "Raft logs of streams with replicas: keep no copy of these before"
    )
    typer.echo(
        "next, for all backups below a directory: "
        f"aviso-workers backup cleanse DIR --erasure {quoted(str(record))}, "
        "with the KEY=VALUE given here where there are any, because backups also hold what had left the streams "
        "before"
    )


def _print_suspect(suspect: Suspect) -> None:
    what = f"{suspect.kind} {suspect.name}"
    if suspect.unread:
        echo(f"may hold copies: {what}, which cannot be read: {suspect.unread}")
        return
    if not suspect.named:
        echo(f"may hold copies: {what}, {suspect.keys} keys, of which none has a value of what matches: see yourself")
        return
    echo(f"may hold copies: {what}, {suspect.keys} keys, of which {len(suspect.named)} have a value of what matches:")
    for key in suspect.named[:SHOWN_KEYS]:
        echo(f"  --key {quoted(f'{suspect.name}/{key}')}")
    if len(suspect.named) > SHOWN_KEYS:
        echo(f"  and {len(suspect.named) - SHOWN_KEYS} more")
