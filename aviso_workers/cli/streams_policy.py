"""`streams plan|apply|show|wipe|wipe-all`: bring streams in line with the configuration, or empty them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import typer

from aviso_workers.cli import NOT_PROVEN, completion
from aviso_workers.cli.completion import EVENT
from aviso_workers.cli.options import YES, argument, confirm, end_where, flag
from aviso_workers.cli.output import AS_JSON, print_rows, print_table
from aviso_workers.cli.recorded import recorded
from aviso_workers.cli.streams import name_missing, streams
from aviso_workers.cli.targets import CONFIG, ConfigSource, OpenedServer, connected, find_app, on_server
from aviso_workers.config import Config
from aviso_workers.config.streams import event_streams
from aviso_workers.errors import DeclarationError
from aviso_workers.jetstream.fields import readable
from aviso_workers.jetstream.plans import ConsumerPlan, Plan
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.ops import aviso_admin, maintenance, permissions, stream_policy

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
        plans = await stream_policy.plans(server.admin, server.config, _own(server.config, role, config))
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
        plans = await stream_policy.plans(server.admin, server.config, _own(server.config, role, config))
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


def _own(config: Config, role: permissions.Role | None, source: ConfigSource | None) -> list[StreamSpec]:
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
