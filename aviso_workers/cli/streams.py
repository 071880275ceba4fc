"""`streams`: the streams and messages of a server.

`ls|info|gaps|get` show them, `plan|apply|show|wipe|wipe-all` bring streams in line with the configuration or empty
them, `purge|seal|rm|step-down|remove-peer` change any by hand, and `copy` copies one to another server, cluster or
account. What cannot be taken back is shown, and done with `--yes`.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec
import typer
from rich.filesize import decimal

from aviso_workers.aviso.literals import quoted
from aviso_workers.cli import NOT_PROVEN, completion
from aviso_workers.cli.backup import Storage
from aviso_workers.cli.completion import EVENT, STREAM
from aviso_workers.cli.options import YES, argument, confirm, end_where, flag, option
from aviso_workers.cli.output import (
    AS_ANSWERED,
    AS_JSON,
    echo,
    end_where_unavailable,
    print_details,
    print_json,
    print_rows,
    print_table,
    recorded,
    replicas,
    time_text,
)
from aviso_workers.cli.progress import bar
from aviso_workers.cli.targets import CONFIG, ConfigSource, OpenedServer, connected, find_app, on_server, opened
from aviso_workers.config import Config
from aviso_workers.config.streams import event_streams
from aviso_workers.errors import BackupError, DeclarationError, UnavailableError
from aviso_workers.jetstream.fields import readable
from aviso_workers.jetstream.info import StreamInfo
from aviso_workers.jetstream.plans import ConsumerPlan, Plan
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.ops import (
    aviso_admin,
    inventory,
    maintenance,
    permissions,
    reports,
    stream_copies,
    stream_policy,
)
from aviso_workers.ops.inventory import StoredMessage
from aviso_workers.ops.stream_copies import Copied, Followed

streams = typer.Typer(help="Show, plan, change and remove streams.", no_args_is_help=True)

STREAMS = ("stream", "configured", "messages", "bytes", "consumers", "note")
"""The columns of the table; `report streams` has more for people."""
GAPS = ("first", "last", "gone")
MISSING = (
    "{name}: configured, but there is no such stream. Nothing was published, or the server cannot read it "
    "(docs/operations/checks.md#js042)"
)
NONE_CONFIGURED = (
    "no streams or consumers are configured; those of event types that are declared in Python need --app MODULE:APP"
)
PLAN = ("stream", "consumer", "step", "difference")
POLICY = ("field", "configured", "effective", "as configured", "configured by")

CONFIGURED = argument(
    "NAME",
    "An event type, e.g. mars, or a stream of the configuration's section streams.",
    autocompletion=completion.events_and_streams,
)

OF_ROLE = typer.Option(
    None, help="Role whose programs' own streams and buckets are made as well, as `server render` has it."
)


@streams.command()
@on_server
async def ls(server: OpenedServer, as_json: bool = AS_JSON) -> None:
    """List all streams of the account, and whether the configuration has them; exit 1 where one does not answer.
    Standard error names configured streams that do not exist.

    Example: aviso-workers streams ls
    """
    configured = stream_policy.sections(server.config)
    listed = await inventory.streams(server.admin)
    documents = [_stream_document(stream, configured) for stream in listed.found]
    print_rows(STREAMS, map(_stream_row, documents), documents, none="no streams", as_json=as_json)
    name_missing(configured, {stream.name for stream in listed.found}.union(listed.unavailable))
    end_where_unavailable(listed.unavailable)


@streams.command()
@on_server
async def info(server: OpenedServer, stream: str = STREAM, as_json: bool = AS_ANSWERED) -> None:
    """Show the configuration, the state and the replicas of a stream.

    Example: aviso-workers streams info MARS
    """
    print_details(await server.admin.stream_info(stream), _state, as_json=as_json)


@streams.command()
@on_server
async def gaps(server: OpenedServer, stream: str = STREAM, as_json: bool = AS_JSON) -> None:
    """Show which sequences between a stream's first and last are gone.

    Example: aviso-workers streams gaps MARS
    """
    found = await inventory.gaps(server.admin, stream)
    documents = [{"first": first, "last": last, "gone": last - first + 1} for first, last in found.ranges]
    print_rows(GAPS, (map(str, row.values()) for row in documents), documents, none="no gaps", as_json=as_json)
    if not as_json:
        typer.echo(f"{stream} {found.first} to {found.last}: {found.messages} messages, {found.deleted} gone")
    if found.lost:
        typer.echo(f"{found.lost} of them could not be read by the server: their blocks are damaged", err=True)


@streams.command()
def get(
    stream: str = STREAM,
    sequence: int | None = argument("SEQUENCE", "Sequence of the message.", min=1, default=None),
    last: str | None = option("SUBJECT", "Print the last message of this subject instead."),
    direct: bool = flag(
        "--direct", "Read from any replica, which may lag behind the leader. Default: from the leader."
    ),
    config: ConfigSource | None = CONFIG,
) -> None:
    """Print one message as JSON; `data` is text, or `data_base64` where it is none.

    Example: aviso-workers streams get MARS 4711
    """
    if (sequence is None) == (last is None):
        raise DeclarationError("say which message: its sequence, or --last SUBJECT")
    ask = inventory.direct_message if direct else inventory.message

    async def run(server: OpenedServer) -> None:
        print_json(_document(await ask(server.admin, stream, sequence=sequence, subject=last)))

    connected(config, run)


def name_missing(configured: Iterable[str], found: Container[str]) -> bool:
    """Name the configured streams that were not found on standard error, and return whether all were found."""
    missing = [name for name in configured if name not in found]
    for name in missing:
        typer.echo(MISSING.format(name=name), err=True)
    return not missing


def _stream_document(stream: StreamInfo, configured: dict[str, str]) -> dict[str, str | int]:
    return {
        "stream": stream.name,
        "configured": configured.get(stream.name, "-"),
        "messages": stream.messages,
        "bytes": stream.bytes,
        "first": stream.first_sequence,
        "last": stream.last_sequence,
        "deleted": stream.deleted,
        "consumers": stream.consumers,
        "leader": stream.cluster.leader or "-",
        "replicas": stream.config.num_replicas,
        "note": reports.SEALED if stream.config.sealed else "",
    }


def _state(stream: StreamInfo) -> Iterator[tuple[str, str]]:
    yield "stream", stream.name
    yield "created", time_text(stream.created)
    yield "messages", f"{stream.messages}, {decimal(stream.bytes)}"
    yield "sequences", f"{stream.first_sequence} to {stream.last_sequence}, {stream.deleted} deleted"
    if stream.first_time and stream.last_time:
        yield "stored", f"{time_text(stream.first_time)} to {time_text(stream.last_time)}"
    yield "subjects", str(stream.subjects)
    yield "consumers", str(stream.consumers)
    yield from replicas(stream.cluster)
    for origin in stream.origins:
        relation = "mirror of" if origin is stream.mirror else "source"
        place = f"{origin.name} at {origin.api}" if origin.api else origin.name
        yield relation, f"{place}, lag {origin.lag}{f', {origin.trouble}' if origin.trouble else ''}"


def _stream_row(document: dict[str, str | int]) -> Iterator[str]:
    return (decimal(int(document[name])) if name == "bytes" else str(document[name]) for name in STREAMS)


def _document(message: StoredMessage) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.structs.asdict(message)
    data = document.pop("data")
    try:
        return document | {"data": data.decode()}
    except UnicodeDecodeError:
        return document | {"data_base64": b64encode(data).decode()}


@streams.command()
def plan(
    role: permissions.Role | None = OF_ROLE,
    exit_code: bool = flag("--exit-code", "Exit with 1 if something differs. Default: exit with 0."),
    as_json: bool = AS_JSON,
    config: ConfigSource | None = CONFIG,
) -> None:
    """Show what `streams apply` would change, field by field.

    Example: aviso-workers streams plan --exit-code
    """

    async def run(server: OpenedServer) -> None:
        plans = await stream_policy.plans(server.admin, server.config, _own_streams(server.config, role, config))
        _print_plans(plans, as_json=as_json)
        end_where(exit_code and any(found.needed or found.fixed for found in plans))

    connected(config, run)


@streams.command()
def apply(
    role: permissions.Role | None = OF_ROLE,
    yes: bool = flag("--yes", "Also make updates that remove stored messages."),
    config: ConfigSource | None = CONFIG,
) -> None:
    """Create missing streams and consumers, and update those that differ from the configuration. Exit with 1 if some
    are not as configured afterwards.

    An update that would remove stored messages needs --yes. Without it, nothing at all is done.

    With --role, also create the streams and buckets in which the programs of this role keep their own state. Programs
    with the permissions that `server render --role` prints may create none. Those of a worker are those of --app.

    Example: aviso-workers streams apply --role worker --app mine.agents:app
    """

    async def run(server: OpenedServer) -> None:
        plans = await stream_policy.plans(server.admin, server.config, _own_streams(server.config, role, config))
        _print_plans(plans)
        if any(found.needed and found.removing for found in plans):
            confirm(yes, to="do all of it, and remove the stored messages that are counted above")
        # Those that exist come first: one may give up subjects that a new one takes.
        needed = sorted((found for found in plans if found.needed), key=lambda found: not found.exists)
        differs = bool(needed) and not await _carry_out(server, needed, removals=yes)
        end_where(differs or any(found.fixed or found.fenced or found.unfinished for found in plans))

    connected(config, run)


@streams.command()
@on_server
async def show(server: OpenedServer, name: str = CONFIGURED, as_json: bool = AS_JSON) -> None:
    """Show a stream's configured policy beside the one in effect. Exit with 1 if they differ.

    Example: aviso-workers streams show mars
    """
    rows = await stream_policy.effective_policy(server.admin, server.config, name)
    cells = [(row.field, row.configured, row.effective, "yes" if row.follows else "NO", row.key) for row in rows]
    print_rows(POLICY, cells, rows, none="no fields", as_json=as_json)
    end_where(not all(row.follows for row in rows))


@streams.command()
@on_server
async def wipe(server: OpenedServer, event: str = EVENT, yes: bool = YES) -> None:
    """Remove all notifications of one event type. Its stream, configuration and consumers stay.

    Example: aviso-workers streams wipe mars --yes
    """
    stream = aviso_admin.stream_of(server.config, event)
    found = {stream: (await server.admin.stream_info(stream)).messages}
    await _wipe(server, found, yes=yes)


@streams.command("wipe-all")
@on_server
async def wipe_all(server: OpenedServer, yes: bool = YES) -> None:
    """Remove all notifications of all configured event types. Nothing else is changed. Exit with 3 if one has no
    stream.

    Example: aviso-workers streams wipe-all --yes
    """
    found = await aviso_admin.event_streams(server.admin, server.config)
    is_whole = name_missing(event_streams(server.config.notification_schema), found)
    await _wipe(server, found, yes=yes)
    end_where(not is_whole, code=NOT_PROVEN)


def _own_streams(config: Config, role: permissions.Role | None, source: ConfigSource | None) -> list[StreamSpec]:
    """Return the streams in which the programs of a role keep their own state. Raises `DeclarationError`."""
    match role:
        case "worker":
            if source is None or source.app is None:
                raise DeclarationError("--role worker: say whose streams and buckets, by --app MODULE:APP")
            return permissions.streams_of_worker(find_app(source.app, agent=None, config=source), config)
        case "bridge":
            bridge = find_app(None, agent=permissions.BRIDGE, config=source)
            return permissions.streams_of_worker(bridge, config, opened=[permissions.BRIDGE])
        case "publisher":
            return permissions.streams_of_publisher(config)
        case "spark":
            return permissions.streams_of_spark(config)
    return []


async def _carry_out(server: OpenedServer, plans: Sequence[Plan | ConsumerPlan], *, removals: bool) -> bool:
    """Return whether all is as configured then."""
    differs, said = False, list[str]()
    async with recorded(server, "apply-streams", "streams", streams=", ".join(plan.stream for plan in plans)) as result:
        for plan in plans:
            left = await stream_policy.carry_out(server.admin, server.config, plan, removals=removals)
            outcome = f"not as configured: {'; '.join(map(str, left))}" if left else "done"
            said.append(f"{' '.join(_names(plan)).strip()}: {outcome}")
            result.text = "\n".join(said)
            differs |= bool(left)
    return not differs


async def _wipe(server: OpenedServer, found: Mapping[str, int], *, yes: bool) -> None:
    if not found:
        typer.echo("no stream of a configured event type exists")
        return
    print_table(("stream", "messages"), [(stream, str(messages)) for stream, messages in found.items()])
    confirm(yes, to="remove all of them")
    plans = [await maintenance.plan_purge(server.admin, stream) for stream in found]
    async with recorded(server, "wipe-streams", ", ".join(found)) as result:
        removed = await aviso_admin.wipe(server.admin, list(found))
        result.text = "\n".join(f"{stream}: {count} removed" for stream, count in removed.items())
        result.affected = tuple([each for plan in plans for each in await maintenance.purged(server.admin, plan)])


def _print_plans(plans: Iterable[Plan | ConsumerPlan], *, as_json: bool = False) -> None:
    rows: list[tuple[str, str, str, str]] = []
    for found in plans:
        names = _names(found)
        if found.fenced:
            rows.append((*names, "fenced", "its mirror was promoted"))
        elif found.unfinished:
            rows.append((*names, "wait", "it is being restored, or that was killed"))
        elif not found.exists and found.needed:
            rows.append((*names, "create", ""))
        elif not found.needed and not found.fixed and not _unstated(found):
            rows.append((*names, "keep", ""))
        elif found.needed:
            rows += [(*names, "update", str(difference)) for difference in found.differences]
            rows += [(*names, "remove", str(difference)) for difference in found.removing]
        rows += [(*names, "cannot", str(difference)) for difference in found.fixed]
        rows += [
            (*names, "keep", f"{limit} is no longer in the file, or never was: the stream keeps it")
            for limit in _unstated(found)
        ]
    print_rows(PLAN, rows, none=NONE_CONFIGURED, as_json=as_json)


def _unstated(plan: Plan | ConsumerPlan) -> tuple[str, ...]:
    return tuple(f"{limit}: {readable(limit, plan.config[limit])}" for limit in plan.unstated)


def _names(plan: Plan | ConsumerPlan) -> tuple[str, str]:
    return plan.stream, plan.consumer if isinstance(plan, ConsumerPlan) else ""


@streams.command()
@on_server
async def purge(
    server: OpenedServer,
    stream: str = STREAM,
    subject: str = option("SUBJECT", "Remove only messages with a matching subject, e.g. mars.od.>", default=""),
    keep: int = option("N", "Keep the newest N messages. It excludes --before.", min=0, default=0),
    before: int | None = option("SEQUENCE", "Remove only messages before this sequence.", min=1),
    yes: bool = YES,
) -> None:
    """Remove messages of any stream. Its configuration and consumers stay.

    Example: aviso-workers streams purge MARS --subject 'mars.od.>' --yes
    """
    plan = await maintenance.plan_purge(server.admin, stream, subject=subject, keep=keep, before=before or 0)
    typer.echo(f"{stream}: {plan.messages} messages would be removed")
    confirm(yes, to="remove them")
    async with recorded(server, "purge-stream", stream, subject=subject, keep=keep, before=before) as result:
        result.text = f"{stream}: {await maintenance.purge(server.admin, plan)} removed"
        result.affected = await maintenance.purged(server.admin, plan)


@streams.command()
@on_server
async def seal(server: OpenedServer, stream: str = STREAM, yes: bool = YES) -> None:
    """Seal a stream for good: no message is added, deleted or expired any more.

    Example: aviso-workers streams seal MARS --yes
    """
    kept = (await server.admin.stream_info(stream)).messages
    typer.echo(f"{stream}: {kept} messages would be kept as they are, and no other added, for good")
    confirm(yes, to="seal it")
    async with recorded(server, "seal-stream", stream) as result:
        await maintenance.seal(server.admin, stream)
        result.text = f"{stream}: sealed"


@streams.command("rm")
@on_server
async def remove(server: OpenedServer, stream: str = STREAM, yes: bool = YES) -> None:
    """Remove a stream with its messages and its consumers.

    Example: aviso-workers streams rm MARS --yes
    """
    found = await server.admin.stream_info(stream)
    going = f"{found.messages} messages and {found.consumers} consumers"
    typer.echo(f"{stream}: the stream would be removed with {going}")
    confirm(yes, to="remove it")
    async with recorded(server, "remove-stream", stream) as result:
        await server.admin.delete_stream(stream)
        result.text = f"{stream}: removed with {going}"


@streams.command("step-down")
@on_server
async def step_down(
    server: OpenedServer,
    stream: str = STREAM,
    consumer: str = option(
        "CONSUMER",
        "Move the leader of this consumer instead of the stream's.",
        autocompletion=completion.consumers,
        default="",
    ),
    prefer: str = option("SERVER", "Server that is to become the leader. Default: the servers elect one.", default=""),
) -> None:
    """Move the leader of a stream, or of one of its consumers, to another server.

    Example: aviso-workers streams step-down MARS
    """
    of = f"{stream} {consumer}".strip()
    async with recorded(server, "step-down", of, prefer=prefer) as result:
        leader = await maintenance.step_down(server.admin, stream, consumer=consumer, prefer=prefer)
        result.text = f"{of}: {leader} leads"


@streams.command("remove-peer")
@on_server
async def remove_peer(
    server: OpenedServer,
    stream: str = STREAM,
    peer: str = argument("PEER", "Name of the server whose copy is removed, e.g. n-2."),
    yes: bool = YES,
) -> None:
    """Remove a server's copy of a stream. Another server makes a new copy.

    Example: aviso-workers streams remove-peer MARS n-2 --yes
    """
    print_table(("server", f"copy of {stream}"), (await maintenance.peers(server.admin, stream)).items())
    confirm(yes, to=f"remove the copy on {peer}")
    async with recorded(server, "remove-peer", stream, peer=peer) as result:
        await maintenance.remove_peer(server.admin, stream, peer)
        result.text = f"{stream}: the copy on {peer} is removed"


@streams.command()
def copy(
    stream: str = STREAM,
    to_config: Path = option("FILE", "Configuration file with the connection to the target.", default=...),
    name: str | None = option(
        "NAME",
        "Copy to a stream of this name, without the original's subjects. Default: the original's name and subjects.",
        "--as",
    ),
    storage: Storage | None = typer.Option(None, help="Storage of the copy. Default: that of the original."),
    replicas: int | None = option("N", "Number of replicas of the copy. Default: that of the original.", min=1, max=5),
    follow: bool = flag(
        "--follow",
        "Append new messages to the copy until the original is fenced. It also continues a copy that was interrupted.",
    ),
    config: ConfigSource | None = CONFIG,
) -> None:
    """Copy a stream to another server, cluster or account, and compare the two. Exit with 1 if the copy differs, with 3
    if it lacks messages that were stored meanwhile.

    Example: aviso-workers streams copy MARS --to-config there.yaml
    """

    if follow and name not in (None, stream):
        raise BackupError("--follow goes on until the copy takes the stream's place, which one with --as cannot")

    async def run() -> None:
        async with opened(config) as source, opened(ConfigSource(to_config)) as target:
            is_begun = follow and await stream_copies.is_begun(source.admin, target.admin, stream)
            if follow:
                typer.echo(
                    f"{stream}: {'carrying on with the copy there' if is_begun else 'copying it from its beginning'}",
                    err=True,
                )
            if not is_begun:
                with bar(stream) as progress:
                    copied = await stream_copies.copy(
                        source.admin,
                        target.admin,
                        stream,
                        name=name,
                        storage=storage,
                        replicas=replicas,
                        keep_fenced=follow,
                        progress=progress,
                    )
                _print_copied(stream, copied)
                if copied.subjects or not follow:
                    _end_copy(stream, copied)
                    return
            _print_followed(await _followed(source, target, stream))

    anyio.run(run)


async def _followed(source: OpenedServer, target: OpenedServer, stream: str) -> Followed:
    """Follow the original to its end, also while one of the two servers is away."""
    while True:
        try:
            return await stream_copies.follow(
                source.admin,
                target.admin,
                stream,
                on_progress=lambda appended, last: typer.echo(f"{appended} appended, up to {last}", err=True),
            )
        except UnavailableError as error:
            echo(f"waiting: {error}", err=True)
            await anyio.sleep(stream_copies.PROGRESS_SECONDS)


def _print_copied(stream: str, copied: Copied) -> None:
    name = copied.restored.stream
    if copied.compared.differences:
        raise BackupError(f"{name} is not as {stream} was: {'; '.join(copied.compared.differences)}")
    typer.echo(
        f"{name}: {copied.compared.restored.messages} messages and "
        f"{len(copied.compared.restored.consumers)} consumers copied and compared"
    )
    if copied.subjects:
        typer.echo(f"{name} takes {', '.join(copied.subjects)} there")


def _end_copy(stream: str, copied: Copied) -> None:
    """Print what is left to be done; exit 3 where the copy lacks messages that were stored meanwhile."""
    if copied.subjects and not copied.original_is_fenced:
        typer.echo(
            f"{stream} takes them here as well: to move it for good, `aviso-workers mirror fence {quoted(stream)}` "
            "before",
            err=True,
        )
    if copied.meanwhile:
        moved = f"{stream} has moved on: {copied.meanwhile} messages were stored meanwhile and are not in the copy"
        if copied.restored.stream == stream:
            moved += (
                ", which takes no publishes. The same command with --follow carries on from there; "
                f"`aviso-workers mirror unfence {quoted(stream)}` there lets it take publishes as it is"
            )
        typer.echo(moved, err=True)
        raise typer.Exit(NOT_PROVEN)


def _print_followed(found: Followed) -> None:
    typer.echo(
        f"{found.stream}: {found.messages} messages up to {found.last_sequence} and {found.consumers} consumers are as "
        f"in the original; {found.appended} messages appended by this run, {found.deleted} deleted"
    )
    typer.echo(f"{found.stream} takes {', '.join(found.subjects)} there")
