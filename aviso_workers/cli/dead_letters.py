"""`dead-letters ls|show|retry|drop`."""

from __future__ import annotations

import base64
import inspect
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from functools import wraps
from typing import Any

import typer
from msgspec import structs

from aviso_workers.aviso.codec import store_time
from aviso_workers.aviso.literals import body_text, printable
from aviso_workers.aviso.positions import parse_moment
from aviso_workers.cli import completion
from aviso_workers.cli.options import argument, finite, flag, option
from aviso_workers.cli.output import Columns, print_json, print_table, recorded, skipped_reported, terminal, time_text
from aviso_workers.cli.progress import counted
from aviso_workers.cli.targets import CONFIG, ConfigSource, OpenedServer, connected, find_app, named_app
from aviso_workers.errors import DeclarationError, InvalidPositionError, NotFoundError, RefusedError
from aviso_workers.events import Events
from aviso_workers.ops import agent_control, audit
from aviso_workers.ops.audit import ActionResult, AffectedLetters, Audit, Operator
from aviso_workers.ops.dead_letters import (
    Group,
    Selection,
    StoredDeadLetters,
    document,
    grouped,
    portions,
    require_one_app,
)
from aviso_workers.state.audit_records import ERASED, RETURNED
from aviso_workers.state.dead_letter_records import DeadLetter, LetterId

dead_letters = typer.Typer(
    help="List dead letters, return them to the agents that failed, or erase them.", no_args_is_help=True
)

DEAD_LETTERS = ("sequence", "time", "app", "agent", "reason", "attempts", "original", "error")
GROUPS = ("dead letters", "app", "agent", "reason", "at", "first", "last", "newest", "its error")
FEW = 20
"""So many are listed each by itself; more are grouped."""

Action = Callable[..., Awaitable[None]]
"""`StoredDeadLetters.retry` or `StoredDeadLetters.drop`."""
Run = Callable[[StoredDeadLetters, OpenedServer], Awaitable[None]]

OF_APP = option("APP", "Only those of this app: its name, or MODULE:APP.", autocompletion=completion.apps)
DRY_RUN = flag("--dry-run", "Only say which dead letters are selected.")
YES = flag("--yes", "Carry it out for all that the options select; not needed with SEQUENCE.")
ALL = flag("--all", "Select the dead letters of all apps. It excludes the options that select some.")
AS_JSON = flag("--json", "Print one JSON document for each dead letter, with its body in base64.")


def _selection(
    sequences: list[int] | None = argument(
        "SEQUENCE...", "Sequences of single dead letters, as `dead-letters ls` lists them.", min=1, default=None
    ),
    app: str | None = OF_APP,
    agent: str | None = option("AGENT", "Only those of this agent.", autocompletion=completion.agents_of),
    reason: str | None = option("REASON", "Only those with this reason, e.g. attempts_exhausted."),
    stream: str | None = option(
        "STREAM", "Only those whose notification came from this stream, e.g. MARS.", autocompletion=completion.streams
    ),
    since: str | None = option(
        "TIME", "Only those dead-lettered at this time or later, e.g. 2026-11-20, yesterday or 2h."
    ),
    until: str | None = option(
        "TIME", "Only those dead-lettered at this time or earlier. A day is its beginning, in UTC."
    ),
    error: str | None = option("TEXT", "Only those whose error contains this text."),
    config: ConfigSource | None = CONFIG,
) -> tuple[Selection, ConfigSource | None]:
    """Return which dead letters the options select, and the configuration: the app's own where that is MODULE:APP.
    Raises `DeclarationError` where such an app lacks the agent, `InvalidPositionError`.
    """
    if app is not None and ":" in app and agent is not None:
        found = find_app(app, agent=None, config=config)
        agent_control.declared(found, found.config, agent)
    if app is not None:
        app, config = named_app(app, config)
    now, chosen = datetime.now(UTC), frozenset(sequences or ())
    first = parse_moment(since, name="--since", now=now) if since else None
    last = parse_moment(until, name="--until", now=now) if until else None
    if first and last and last < first:
        raise InvalidPositionError(f"--until {until} is before --since {since}")
    wanted = Selection(
        sequences=chosen, app=app, agent=agent, reason=reason, stream=stream, since=first, until=last, error=error
    )
    return wanted, config


def _selecting(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for typer that has the options of `_selection` beside its own."""
    *options, config = inspect.signature(_selection, eval_str=True).parameters.values()
    own = [*inspect.signature(command, eval_str=True).parameters.values()][2:]

    @wraps(command)
    def run(**given: Any) -> None:
        selected = {each.name: given.pop(each.name) for each in (*options, config)}
        command(*_selection(**selected), **given)

    run.__signature__ = inspect.Signature([*options, *own, config])  # type: ignore[attr-defined]
    return run


@dead_letters.command()
@_selecting
def ls(
    wanted: Selection,
    config: ConfigSource | None,
    each: bool = flag("--each", "List each dead letter by itself, however many there are."),
    as_json: bool = AS_JSON,
) -> None:
    """List dead letters, the oldest of an app first. More than 20 are grouped by agent, reason, class of error and
    line.

    A group shows how many there are, when the first and the last became a dead letter, and the newest one.

    Example: aviso-workers dead-letters ls --agent index_field --since 2026-11-20T06:00:00Z
    """

    async def run(stored: StoredDeadLetters, _server: OpenedServer) -> None:
        async with aclosing(stored.select(wanted)) as selected:
            if as_json:
                async for dead_letter in selected:
                    print_json(document(dead_letter))
            elif not await (_list_each(selected) if each or wanted.sequences else _list_few(selected)):
                await _say_none(stored)

    _run(config, run)


async def _list_each(selected: AsyncGenerator[DeadLetter, None]) -> bool:
    """List dead letters, and return whether there are some."""
    columns, found = Columns(*DEAD_LETTERS), False
    async for portion in portions(selected):
        found = True
        _print_rows(columns, portion)
    return found


async def _list_few(selected: AsyncGenerator[DeadLetter, None]) -> bool:
    """List dead letters, in groups where there are many, and return whether there are some."""
    few: list[DeadLetter] = []
    groups: dict[tuple[str, ...], Group] = {}
    async for dead_letter in selected:
        if len(few) <= FEW:
            few.append(dead_letter)
        grouped(groups, dead_letter)
    if len(few) <= FEW:
        _print_rows(Columns(*DEAD_LETTERS), few)
        return bool(few)
    print_table(GROUPS, [_group_row(group) for group in sorted(groups.values(), key=lambda group: -group.count)])
    typer.echo("--each lists each of them, and `dead-letters show SEQUENCE` shows one", err=True)
    return True


def _print_rows(columns: Columns, dead_letters: Sequence[DeadLetter]) -> None:
    if dead_letters and terminal().is_terminal:
        print_table(DEAD_LETTERS, map(_row, dead_letters))
    elif dead_letters:
        columns.print(map(_row, dead_letters))


@dead_letters.command()
def show(
    sequence: int = argument("SEQUENCE", "Sequence of the dead letter, as `dead-letters ls` lists it.", min=1),
    app: str | None = OF_APP,
    as_json: bool = AS_JSON,
    config: ConfigSource | None = CONFIG,
) -> None:
    """Show one dead letter with its reason, its error, its headers and its body.

    Example: aviso-workers dead-letters show 17 --app mars-indexer
    """
    if app is not None:
        app, config = named_app(app, config)

    async def run(stored: StoredDeadLetters, _server: OpenedServer) -> None:
        dead_letter = await stored.get(sequence, app)
        print_json(document(dead_letter)) if as_json else _print_dead_letter(dead_letter)

    _run(config, run)


@dead_letters.command()
@_selecting
def retry(
    wanted: Selection,
    config: ConfigSource | None,
    all_: bool = ALL,
    rate: float | None = option(
        "NUMBER", "Return at most so many a second. Default: all at once.", min=0.001, callback=finite
    ),
    dry_run: bool = DRY_RUN,
    yes: bool = YES,
) -> None:
    """Retry dead letters: each is returned to the agent that failed, and to no other. The agent handles it like a new
    notification.

    Example: aviso-workers dead-letters retry --agent index_field --yes
    """
    _act(config, wanted, StoredDeadLetters.retry, every=all_, rate=rate, dry_run=dry_run, yes=yes)


@dead_letters.command()
@_selecting
def drop(
    wanted: Selection,
    config: ConfigSource | None,
    all_: bool = ALL,
    dry_run: bool = DRY_RUN,
    yes: bool = YES,
) -> None:
    """Erase dead letters for good.

    Example: aviso-workers dead-letters drop 17 --app mars-indexer
    """
    _act(config, wanted, StoredDeadLetters.drop, every=all_, dry_run=dry_run, yes=yes)


def _act(
    config: ConfigSource | None,
    wanted: Selection,
    act: Action,
    *,
    every: bool,
    rate: float | None = None,
    dry_run: bool,
    yes: bool,
) -> None:
    if every and wanted != Selection():
        raise DeclarationError("--all is for those of all apps: leave out what selects some")

    async def run(stored: StoredDeadLetters, server: OpenedServer) -> None:
        found = await _found(stored, wanted)
        if not found or dry_run:
            return
        if wanted == Selection() and not every:
            typer.echo("nothing was done; select dead letters by sequence or by an option, or say --all", err=True)
            raise typer.Exit(2)
        if not (yes or wanted.sequences):
            typer.echo("nothing was done; say --yes, or name the dead letters by their sequences", err=True)
            raise typer.Exit(2)
        chosen = {name: value for name, value in structs.asdict(wanted).items() if value}
        chosen["sequences"] = ", ".join(map(str, sorted(wanted.sequences)))
        action = f"{'retry' if act is StoredDeadLetters.retry else 'drop'}-dead-letters"
        async with recorded(server, action, "dead letters", **chosen) as result:
            await _act_on(stored, found, act, result, rate)
        if act is StoredDeadLetters.retry:
            typer.echo("One that fails again becomes a dead letter again: see `dead-letters ls`", err=True)

    _run(config, run)


async def _found(stored: StoredDeadLetters, wanted: Selection) -> frozenset[LetterId]:
    """Print the counts of the selected dead letters, and return their apps and sequences. Raises `NotFoundError` where
    one that is named by its sequence is missing, `RefusedError` where several apps have such a one.
    """
    found: set[LetterId] = set()
    counts = Counter[tuple[str, str, str]]()
    async with aclosing(stored.select(wanted)) as dead_letters:
        async for dead_letter in dead_letters:
            found.add(dead_letter.id)
            counts[dead_letter.app, dead_letter.agent, dead_letter.reason] += 1
    if wanted.sequences:
        require_one_app({app for app, _ in found})
    if missing := sorted(wanted.sequences - {sequence for _, sequence in found}):
        raise NotFoundError(f"no such dead letter: {', '.join(map(str, missing))}; nothing was done")
    if found:
        rows = [(*key, str(count)) for key, count in sorted(counts.items())]
        print_table(("app", "agent", "reason", "dead letters"), rows)
    else:
        await _say_none(stored)
    return frozenset(found)


async def _say_none(stored: StoredDeadLetters) -> None:
    kept = await stored.count()
    typer.echo(f"no dead letter matches, of {kept} in all" if kept else "no dead letters")


async def _act_on(
    stored: StoredDeadLetters, found: frozenset[LetterId], act: Action, result: ActionResult, rate: float | None
) -> None:
    """Read the dead letters once more, which needs no memory for all of them, and act on exactly those that were
    shown, at most `rate` of them a second.
    """
    done = RETURNED if act is StoredDeadLetters.retry else ERASED
    count, others, refused, affected = 0, "", list[RefusedError](), AffectedLetters()
    try:
        with counted(done, len(found)) as advance:

            def note(dead_letter: DeadLetter) -> None:
                nonlocal count
                count += 1
                affected.note(dead_letter)
                advance()

            async with aclosing(stored.select(Selection(chosen=found))) as dead_letters:
                async for portion in portions(dead_letters, rate=rate):
                    try:
                        await act(stored, *portion, note=note)
                    except RefusedError as error:
                        refused.append(error)  # of one agent: the others are no worse for it
        if refused:
            raise refused[0]
        if count < len(found):
            others = "; the others are not there any more: another command was faster"
    finally:
        result.text = f"{count} of {len(found)} {done}{others}"
        result.affected = affected.records(done)


def _run(config: ConfigSource | None, run: Run) -> None:
    events = Events()
    with skipped_reported(events):

        async def run_connected(server: OpenedServer) -> None:
            operator = Operator(audit.this_user(), Audit(server.admin, server.config))
            await run(StoredDeadLetters(server.admin, events=events, operator=operator), server)

        connected(config, run_connected)


def _row(dead_letter: DeadLetter) -> tuple[str, ...]:
    of = (dead_letter.app, dead_letter.agent, dead_letter.reason, str(dead_letter.attempts))
    original = f"{dead_letter.stream}@{dead_letter.original.sequence}"
    return (str(dead_letter.sequence), time_text(dead_letter.time), *of, original, dead_letter.error)


def _group_row(group: Group) -> tuple[str, ...]:
    of = (str(group.count), group.app, group.agent, group.reason, group.at)
    return (*of, time_text(group.first), time_text(group.last), str(group.newest.sequence), group.newest.error)


def _print_dead_letter(dead_letter: DeadLetter) -> None:
    original = dead_letter.original
    rows = {
        "sequence": str(dead_letter.sequence),
        "dead-lettered": time_text(dead_letter.time),
        "app": dead_letter.app,
        "agent": dead_letter.agent,
        "reason": dead_letter.reason,
        "attempts": str(dead_letter.attempts),
        "error": dead_letter.error,
        "traceback": dead_letter.traceback,
        "original": f"{dead_letter.stream}@{original.sequence}",
        "subject": original.subject,
        "stored": time_text(store_time(original)),
        **{f"header {name}": value for name, value in (original.headers or {}).items()},
    }
    for name, value in rows.items():
        typer.echo(f"{printable(name)}: {printable(value)}")
    typer.echo(f"\n{_body(original.data)}")


def _body(data: bytes) -> str:
    """Return a body as text: JSON with indents, other text as it is, and other bytes as base64."""
    text = body_text(data)
    if text is None:
        return f"{len(data)} bytes that are not text, in base64:\n{base64.b64encode(data).decode()}"
    return text
