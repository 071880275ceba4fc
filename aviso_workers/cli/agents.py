"""`agents`: the progress of agents, the policy that is in effect for them, and control of them.

`ls|show|retrying` show them, and `pause|resume|retry|skip|reset|rename|rm` control them, whether their workers run or
not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial

import anyio
import typer
from msgspec import Struct
from rich.console import Group, RenderableType
from rich.text import Text

from aviso_workers.app import App
from aviso_workers.aviso.literals import printable, time_text
from aviso_workers.aviso.positions import parse_position
from aviso_workers.cli import completion
from aviso_workers.cli.arguments import parse_pause
from aviso_workers.cli.options import FOR, NOTE, YES, argument, confirm, end_where, flag, option
from aviso_workers.cli.output import (
    AS_JSON,
    echo,
    print_json,
    print_record,
    print_rows,
    print_table,
    recorded,
    table,
    terminal,
)
from aviso_workers.cli.report import SECONDS, keep_shown, two_snapshots
from aviso_workers.cli.targets import CONFIG, ConfigSource, OpenedServer, connected, find_app, named_app, opened
from aviso_workers.errors import BackendError, ConfigError, DeclarationError, NotFoundError
from aviso_workers.ops import agent_control, agent_report, audit, aviso_admin, retried, snapshots
from aviso_workers.ops.agent_control import AgentConsumer, Retirement
from aviso_workers.ops.agent_report import AgentHealth, AgentRow
from aviso_workers.ops.health import AgentFacts, failing_text
from aviso_workers.ops.snapshots import ServerSnapshot
from aviso_workers.state import declarations
from aviso_workers.state.consumer_records import ConsumerRecord
from aviso_workers.state.failure_records import LastFailure, Retrying
from aviso_workers.state.orders import Decides

agents = typer.Typer(help="Show the progress of agents, and pause, reset or remove them.", no_args_is_help=True)

LOOK_SECONDS = 2.0
"""Between the two looks of a command that has no `--seconds`."""
ANSWER_SECONDS = 30.0
"""Longer than three servers of which one has just ended take to answer all requests."""

MAYBE_AGENT_HELP = "The app, by its name or as MODULE:APP, or one of its agents."

AGENT = argument(
    "APP/AGENT", "The agent, after its app: the app's name, or MODULE:APP.", autocompletion=completion.agents
)
APP_OR_AGENT = argument("APP[/AGENT]", MAYBE_AGENT_HELP, autocompletion=completion.apps)
SEQUENCES = argument("SEQUENCE", "Sequences in the stream, as `agents retrying` lists them.", default=None)
ALL = flag("--all", "All that the agent retries, as `agents retrying` lists them.")

COUNTS = ("pending", "ack pending", "redelivered", "dead letters")
AGENTS = ("app", "agent", "stream", *COUNTS, "lag change per s", "state")
RETRYING = ("sequence", "attempt", "waits until", "error", "key", "behind it", "blocked")


@agents.command("ls")
def list_agents(
    target: str | None = argument(
        "APP[/AGENT]", f"{MAYBE_AGENT_HELP} Default: all.", autocompletion=completion.apps, default=None
    ),
    watch: bool = flag("--watch", "Update the list until Ctrl-C, every --seconds."),
    seconds: float = SECONDS,
    as_json: bool = AS_JSON,
    config: ConfigSource | None = CONFIG,
) -> None:
    """List the agents of one app or of all, with their lag and how they are. Exit with 1 if one needs somebody.

    The lag of an agent is pending plus ack pending, and its change per second is negative while it shrinks. Redelivered
    counts the notifications that are being tried again. Timers and tasks are listed while they fail, and workers that
    were killed, or that run several versions.

    Example: aviso-workers agents ls mine.agents:app --watch
    """
    if watch and as_json:
        raise DeclarationError("say either --watch or --json")
    given, agent = parts_of(target, form="APP[/AGENT]") if target else (None, "")
    found = find_app(given, agent=None, config=config) if given and ":" in given else None
    asked = _Asked(found, found.name if found else given, agent)
    source = found.config if found else config
    if watch:
        connected(source, lambda server: _watch(server, asked, seconds), declared=True)
        return
    agents, snapshot = connected(source, lambda server: _compared(server, asked, seconds), declared=True)
    rows, denied = asked.rows(agents, snapshot), snapshot.denied.text()
    print_rows(AGENTS, map(_row, rows), rows, none="no agents", as_json=as_json, partly=bool(denied))
    if denied:
        echo(denied, err=True)
    end_where(denied or any(row.needs for row in rows))


class _Asked(Struct, frozen=True):
    """The agents that are asked for: those of an app whose code is at hand, those of an app by its name, or all."""

    app: App | None
    name: str | None
    """The name of the app; None for the agents of all apps."""
    agent: str = ""
    """The name of the agent; empty for all agents of the app."""

    async def report(
        self, server: OpenedServer, now: ServerSnapshot, before: ServerSnapshot | None
    ) -> list[AgentHealth]:
        """Return how they are, from two snapshots."""
        code = []
        if self.app is not None:
            code = [
                (self.app.name, agent.name, aviso_admin.stream_of(self.app.config, agent.event_type))
                for agent in self.app.agents
            ]
        found = await agent_report.of_server(server.admin, server.config, now, before, code=code)
        named = [each for each in found if self.name in (None, each.facts.app)]
        if self.name and not named:
            apps = ", ".join(sorted({each.facts.app for each in found})) or "none"
            raise NotFoundError(f"no agent of app {self.name} is known; there are apps: {apps}")
        if self.agent and not (named := [each for each in named if each.facts.agent == self.agent]):
            raise NotFoundError(f"no agent {self.agent} of app {self.name} is known")
        return named

    def rows(self, found: list[AgentHealth], now: ServerSnapshot) -> list[AgentRow]:
        """Return the rows of agents, and those of timers and tasks that fail and of workers in trouble."""
        rows = [each.row for each in found]
        if not self.agent:
            rows += agent_report.failing(now.recorded, self.name) + agent_report.workers_in_trouble(now, self.name)
        return rows


async def _compared(server: OpenedServer, asked: _Asked, seconds: float) -> tuple[list[AgentHealth], ServerSnapshot]:
    """Return how agents are, from two snapshots that are taken `seconds` apart, and the later one."""
    now, before = await two_snapshots(server, seconds)
    return await asked.report(server, now, before), now


def parts_of(target: str, *, form: str = "APP/AGENT") -> tuple[str, str]:
    """Return the app and the agent of APP/AGENT, or of a form in which the agent may be left out, and is empty then.
    Raises `DeclarationError`.
    """
    app, slash, agent = target.partition("/")
    if not app or (not agent and (slash or form == "APP/AGENT")):
        raise DeclarationError(f"{target!r} is no {form}, such as fields/index")
    return app, agent


@agents.command()
def show(target: str = APP_OR_AGENT, as_json: bool = AS_JSON, config: ConfigSource | None = CONFIG) -> None:
    """Show the policy and the progress of each agent of an app, and how its consumer on the server differs.

    If the server does not answer, only the policy is shown, and the exit code is 1. By the name of an app, the policy
    is the one that its workers have recorded.

    Example: aviso-workers agents show mine.agents:app
    """
    app, agent = parts_of(target, form="APP[/AGENT]")
    if ":" not in app:
        connected(config, partial(_show_recorded, app=app, agent=agent, as_json=as_json), declared=True)
        return
    found = find_app(app, agent=None, config=config)
    if mistakes := found.mistakes():
        raise ConfigError(mistakes)
    if agent:
        agent_control.declared(found, found.config, agent)
    anyio.run(_show, found, agent, as_json)


async def _show_recorded(server: OpenedServer, *, app: str, agent: str, as_json: bool) -> None:
    agents, snapshot = await _compared(server, _Asked(None, app, agent), LOOK_SECONDS)
    recorded = snapshot.recorded.apps.get(app)
    for each in agents:
        policy = recorded.policies.get(each.facts.agent) if recorded else None
        pairs = {"app": app, "agent": each.facts.agent, **(policy or {"policy": "no worker has recorded it"})}
        _print_pairs(pairs | _progress(each), as_json=as_json)


def _print_pairs(pairs: Mapping[str, str], *, as_json: bool) -> None:
    if as_json:
        print_json(dict(pairs))
    else:
        print_record(pairs.items())
        typer.echo()


async def _show(app: App, agent: str, as_json: bool) -> None:
    known: dict[str, AgentHealth] = {}
    unknown = ""
    try:
        with anyio.fail_after(ANSWER_SECONDS):
            async with opened(app.config) as server:
                agents, _ = await _compared(server, _Asked(app, app.name), LOOK_SECONDS)
            known = {each.facts.agent: each for each in agents}
    except (BackendError, TimeoutError) as error:
        unknown = str(error) or "the server does not answer"
    for declared in [each for each in app.agents if agent in ("", each.name)]:
        pairs = {
            "app": app.name,
            "agent": declared.name,
            **declarations.policy(app.config.notification_schema, declared),
        }
        if found := known.get(declared.name):
            pairs |= _progress(found)
            consumer = found.facts.consumer
            if consumer and (differing := agent_report.differing(app.config, declared, consumer.config)):
                pairs["on the server"] = differing
        _print_pairs(pairs, as_json=as_json)
    if unknown:
        echo(f"how far they have come is not known: {unknown}", err=True)
        raise typer.Exit(1)


def _progress(of: AgentHealth) -> dict[str, str]:
    facts, found, row = of.facts, of.judgement, of.row
    record = facts.record if isinstance(facts.record, ConsumerRecord) else None
    recorded = f"settled up to sequence {record.ack_floor}, at {time_text(record.time)}" if record else "none"
    pairs = {
        "state": found.text,
        "since": time_text(found.since) if found.since else "",
        "cure": found.cure,
        **dict(zip(COUNTS, _counts(row, unknown="not known"), strict=True)),
        "recorded position": recorded,
        "pinned since": _pinned_since(facts),
        "last failure": _last_failure(facts),
    }
    return {name: text for name, text in pairs.items() if text}


def _pinned_since(facts: AgentFacts) -> str:
    """Return since when one worker of a singleton is pinned, and handles all notifications; empty of other agents."""
    if (consumer := facts.consumer) is None or not consumer.priority_groups:
        return ""
    since = consumer.pinned_since
    return time_text(since) if since else "no worker is pinned before the first notification"


def _last_failure(facts: AgentFacts) -> str:
    failure = facts.failure
    if not isinstance(failure, LastFailure):
        return ""
    if failure.until > facts.now:
        return failing_text(failure)
    return f"over, the last was at {time_text(failure.last)}: {failure.described}"


@agents.command()
def retrying(target: str = AGENT, as_json: bool = AS_JSON, config: ConfigSource | None = CONFIG) -> None:
    """Show which notifications an agent retries, why, and how many wait behind each by `order_by`. `agents retry` tries
    one again now, and `agents skip` makes a dead letter of it.

    Workers record up to 100, every 5 seconds at most: first those at which the agent is blocked, then those due first.
    So a notification may be listed for some seconds after its next attempt was due.

    Example: aviso-workers agents retrying fields/index_field
    """
    given, agent = parts_of(target)
    app, config = named_app(given, config)
    wanted = _Asked(None, app, agent)
    found, snapshot = connected(config, lambda server: _compared(server, wanted, LOOK_SECONDS), declared=True)
    waiting = [each for of_stream in found for each in of_stream.facts.retrying]
    print_rows(RETRYING, map(_retrying_row, waiting), waiting, none="nothing is retried", as_json=as_json)
    if not as_json:
        for each in found:
            echo(f"{each.facts.stream}: {each.judgement.text}")
    if said := snapshot.denied.text():
        echo(said, err=True)
        raise typer.Exit(1)


def _retrying_row(each: Retrying) -> tuple[str, ...]:
    attempt = f"{each.attempt + 1} of {each.attempts or 'any number'}"
    behind = (each.key, str(each.behind)) if each.key else ("-", "-")
    return (str(each.sequence), attempt, time_text(each.again_at), each.error, *behind, "yes" if each.blocked else "no")


async def _watch(server: OpenedServer, asked: _Asked, seconds: float) -> None:
    before = await snapshots.take(server.admin)

    async def shown() -> RenderableType:
        nonlocal before
        now = await snapshots.take(server.admin)
        rows = asked.rows(await asked.report(server, now, before), now)
        before = now
        listed = table(AGENTS, [_row(row) for row in rows], width=terminal().width) if rows else Text("no agents")
        return Group(listed, Text(printable(text))) if (text := now.denied.text()) else listed

    await anyio.sleep(seconds)
    await keep_shown(shown, seconds=seconds)


def _row(row: AgentRow) -> tuple[str, ...]:
    of, state = (row.app, row.agent, row.stream), row.text
    if row.stream == "-":
        return (*of, *("-",) * 5, state)
    return (*of, *_counts(row, unknown="-"), "-" if row.rate is None else f"{row.rate:+.1f}", state)


def _counts(row: AgentRow, *, unknown: str) -> list[str]:
    """Return the numbers of `COUNTS` as text."""
    numbers = (row.pending, row.ack_pending, row.redelivered, row.dead_letters)
    return [unknown if number is None else str(number) for number in numbers]


@agents.command()
def pause(target: str = AGENT, for_: str | None = FOR, note: str = NOTE, config: ConfigSource | None = CONFIG) -> None:
    """Pause an agent in all its workers. Notifications that they have begun to handle are finished.

    Example: aviso-workers agents pause field-index/index_field --for 2h --note "the archive is down"
    """
    seconds = parse_pause(for_)

    async def run(server: OpenedServer, agent: AgentConsumer) -> None:
        async with recorded(server, "pause-agent", agent.name, **{"for": for_, "why": note}) as result:
            until = await agent_control.pause(server.admin, agent, seconds=seconds, by=audit.this_user(), note=note)
            result.text = f"{agent.agent} is paused until {agent_control.end_text(until)}{_on_all(agent)}"

    _control(target, config, run, several=True)


@agents.command()
def resume(target: str = AGENT, config: ConfigSource | None = CONFIG) -> None:
    """Resume a paused agent in all its workers.

    Example: aviso-workers agents resume field-index/index_field
    """

    async def run(server: OpenedServer, agent: AgentConsumer) -> None:
        async with recorded(server, "resume-agent", agent.name) as result:
            await agent_control.resume(server.admin, agent)
            result.text = f"{agent.agent} is resumed{_on_all(agent)}"

    _control(target, config, run, several=True)


@agents.command()
def retry(
    target: str = AGENT,
    sequences: list[int] | None = SEQUENCES,
    everything: bool = ALL,
    config: ConfigSource | None = CONFIG,
) -> None:
    """Try notifications that an agent retries now, and say what becomes of each. Exit with 1 if any is not handled.

    Example: aviso-workers agents retry field-index/index_field 4711
    """
    _decide(target, config, "retry", sequences, everything=everything)


@agents.command()
def skip(
    target: str = AGENT,
    sequences: list[int] | None = SEQUENCES,
    everything: bool = ALL,
    yes: bool = YES,
    config: ConfigSource | None = CONFIG,
) -> None:
    """Skip notifications that an agent retries: each becomes a dead letter, and those behind it are handled. Exit with
    1 if any is not skipped.

    Example: aviso-workers agents skip field-index/index_field 4711 --yes
    """
    _decide(target, config, "skip", sequences, everything=everything, yes=yes)


@agents.command()
def reset(
    target: str = AGENT,
    to: str = option(
        "ID|DATE|all|new",
        "Where it goes on: at a sequence, at a time such as 2026-11-20T06:00Z or 2h ago (2h), at the first stored "
        "notification (all), or at the next one to be published (new).",
        default=...,
    ),
    yes: bool = YES,
    config: ConfigSource | None = CONFIG,
) -> None:
    """Reset an agent to another position in its stream: back, to handle notifications again, or forward, to skip some.
    Its workers may run or not. It needs nats-server 2.14 or newer, except where the agent's consumer does not exist.

    Example: aviso-workers agents reset field-index/index_field --to 2026-11-20T06:00:00Z
    """
    position = parse_position(to, name="--to", now=datetime.now(UTC))

    async def run(server: OpenedServer, agent: AgentConsumer) -> None:
        plan = await agent_control.plan_reset(server.admin, agent, position)
        rows = [
            ("goes on at", f"{agent.stream}@{plan.sequence}"),
            ("handled again", str(plan.again)),
            ("passed over", str(plan.passed_over)),
        ]
        if not plan.has_consumer:
            rows.append(("its consumer", "does not exist; the worker that creates it begins there"))
        if plan.unsettled:
            rows.append(("abandoned", f"up to {plan.unsettled} that are being handled or wait for their next attempt"))
        typer.echo(f"{agent.agent} of {agent.app}:")
        print_record(rows)
        confirm(yes, to="reset it")
        async with recorded(server, "reset-agent", agent.name, to=to) as result:
            ahead = await agent_control.reset(server.admin, plan)
            result.affected = plan.affected
            result.text = (
                f"{agent.agent} goes on at {agent.stream}@{plan.sequence}, with {ahead} notifications ahead of it"
            )

    _control(target, config, run)


@agents.command()
def rename(
    target: str = AGENT,
    to: str = argument("NEW|APP/NEW", "Name that the code gives it now, with that of its app if that is another one."),
    workers_stopped: bool = flag(
        "--workers-stopped",
        "All workers with the old name are stopped, also those that are frozen or cut off from the server. "
        "Without this, it is refused where the agent was active in the last 5 minutes or has not settled "
        "everything.",
    ),
    yes: bool = YES,
    config: ConfigSource | None = CONFIG,
) -> None:
    """Rename an agent on the server, or move it to another app: under its new name, it goes on where it is. Stop the
    workers with the old name first. Its dead letters stay under the old name.

    Example: aviso-workers agents rename field-index/index index_field
    """
    app, agent = parts_of(target)
    name, config = named_app(app, config)
    to_app, new = parts_of(to) if "/" in to else (name, to)

    async def run(server: OpenedServer) -> None:
        plan = await agent_control.plan_rename(
            server.admin, name, agent, new, to_app=to_app, workers_stopped=workers_stopped
        )
        rows = [(stream, str(record.ack_floor + 1)) for stream, record in plan.records.items()]
        print_table(("stream", "goes on at"), rows, none="")
        if plan.unsettled:
            typer.echo(f"{plan.unsettled} notifications begin with their first attempt again")
        if plan.again:
            typer.echo(f"{plan.again} notifications that were settled after an unsettled one are handled again")
        if plan.to_is_new:
            typer.echo(f"nothing is known of an app {to_app}: make sure that this is its name")
        confirm(yes, to="rename it")
        async with recorded(server, "rename-agent", f"{name}/{agent}", to=to) as result:
            await agent_control.rename(server.admin, plan)
            result.text = f"{agent} of {name} is {to} now"

    connected(config, run, declared=True)


@agents.command("rm")
def remove(
    target: str = APP_OR_AGENT,
    workers_stopped: bool = flag(
        "--workers-stopped",
        "All workers are stopped, also those that are frozen or cut off from the server. Without this, it is "
        "refused where an agent was active in the last 5 minutes or has not settled everything.",
    ),
    yes: bool = YES,
    config: ConfigSource | None = CONFIG,
) -> None:
    """Remove an app, or one of its agents, from the server for good: its consumers, buckets and tables. Stop its
    workers first. Notifications and dead letters stay. With one agent, nothing that the app's agents share is removed.

    Example: aviso-workers agents rm field-index
    """
    app, agent = parts_of(target, form="APP[/AGENT]")
    name, config = named_app(app, config)

    async def run(server: OpenedServer) -> None:
        plan = await agent_control.plan_retirement(server.admin, name, agent, workers_stopped=workers_stopped)
        print_table(("what", "of", "entries"), _retirement_rows(plan), none="no consumers, buckets or tables")
        if plan.dead_letters:
            typer.echo(f"{plan.dead_letters} dead letters stay: `aviso-workers dead-letters drop` removes them")
        confirm(yes, to="remove it")
        async with recorded(server, "remove-agent", f"{name}/{agent}" if agent else name) as result:
            await agent_control.retire(server.admin, plan)
            result.text = f"{f'{agent} of {name}' if agent else name} is gone from the server"

    connected(config, run, declared=True)


def _retirement_rows(plan: Retirement) -> list[tuple[str, str, str]]:
    return [
        *(("consumer", f"{stream} > {consumer}", "") for stream, consumer in plan.consumers),
        *(("record of its consumer", f"{stream} > {agent}", "") for agent, stream in plan.records),
        *(("bucket", stream.removeprefix("KV_"), str(entries)) for stream, entries in plan.streams.items()),
        *(("messages", f"{stream}, {subject}", str(count)) for (stream, subject), count in plan.subjects.items()),
    ]


def _control(
    target: str,
    config: ConfigSource | None,
    run: Callable[[OpenedServer, AgentConsumer], Awaitable[None]],
    *,
    several: bool = False,
) -> None:
    """Call `run` with an agent's consumer, which is found by the app's code for MODULE:APP, else by its name on the
    server; with `several`, on all streams where it has one.
    """
    owner, agent = parts_of(target)
    if ":" in owner:
        app = find_app(owner, agent=None, config=config)
        found = agent_control.declared(app, app.config, agent)
        connected(app.config, lambda server: run(server, found))
        return

    async def find_and_run(server: OpenedServer) -> None:
        await run(server, await agent_control.find(server.admin, server.config, owner, agent, several=several))

    connected(config, find_and_run, declared=True)


def _on_all(agent: AgentConsumer) -> str:
    """Return the streams, where the agent has a consumer on several."""
    return f", on {', '.join((agent.stream, *agent.beside))}" if agent.beside else ""


def _decide(
    target: str,
    config: ConfigSource | None,
    decides: Decides,
    sequences: Sequence[int] | None,
    *,
    everything: bool,
    yes: bool = True,
) -> None:
    """Decide about notifications that an agent retries, and say what becomes of each."""
    if bool(sequences) == everything:
        raise DeclarationError("say which: the sequences that `aviso-workers agents retrying` lists, or --all")

    async def run(server: OpenedServer, agent: AgentConsumer) -> None:
        asked = await retried.plan(server.admin, agent, sequences or (), decides, by=audit.this_user())
        if decides == "skip":
            behind = sum(each.behind for each in asked)
            waits = f"; {behind} that wait behind them run without" if behind else ""
            typer.echo(f"{len(asked)} of {agent.agent} to be skipped{waits}")
            confirm(yes, to="skip them")
        of_some = ", ".join(map(str, sequences or ()))
        async with recorded(server, f"{decides}-notifications", agent.name, sequence=of_some) as result:
            await retried.decide(server.admin, agent, asked)
            answers = await retried.wait(server.admin, agent, asked)
            result.text = "\n".join(f"{each.stream}@{each.sequence}: {each.text}" for each in answers)
        end_where(not all(each.carried_out for each in answers))

    _control(target, config, run, several=True)
