"""`agents pause|resume|retry|skip|reset|rename|rm`: control of agents, whether their workers run or not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime

import typer

from aviso_workers.aviso.positions import parse_position
from aviso_workers.cli.agents import AGENT, APP_OR_AGENT, agents, parts_of
from aviso_workers.cli.arguments import parse_pause
from aviso_workers.cli.options import FOR, NOTE, YES, argument, confirm, end_where, flag, option
from aviso_workers.cli.output import print_record, print_table
from aviso_workers.cli.recorded import recorded
from aviso_workers.cli.targets import CONFIG, ConfigSource, OpenedServer, connected, find_app, named_app
from aviso_workers.errors import DeclarationError
from aviso_workers.ops import agent_control, audit, retried
from aviso_workers.ops.agent_control import AgentConsumer, Retirement
from aviso_workers.state.orders import Decides


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


SEQUENCES = argument("SEQUENCE", "Sequences in the stream, as `agents retrying` lists them.", default=None)
ALL = flag("--all", "All that the agent retries, as `agents retrying` lists them.")


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
    to: str = argument("NEW", "Name that the code gives it now."),
    workers_stopped: bool = flag(
        "--workers-stopped",
        "All workers with the old name are stopped, also those that are frozen or cut off from the server. "
        "Without this, it is refused where the agent was active in the last 5 minutes or has not settled "
        "everything.",
    ),
    yes: bool = YES,
    config: ConfigSource | None = CONFIG,
) -> None:
    """Rename an agent on the server: under its new name, it goes on where it is. Stop the workers with the old name
    first. Its dead letters stay under the old name.

    Example: aviso-workers agents rename field-index/index index_field
    """
    app, agent = parts_of(target)
    name, config = named_app(app, config)

    async def run(server: OpenedServer) -> None:
        plan = await agent_control.plan_rename(server.admin, name, agent, to, workers_stopped=workers_stopped)
        rows = [(stream, str(record.ack_floor + 1)) for stream, record in plan.records.items()]
        print_table(("stream", "goes on at"), rows, none="")
        if plan.unsettled:
            typer.echo(f"{plan.unsettled} notifications begin with their first attempt again")
        if plan.again:
            typer.echo(f"{plan.again} notifications that were settled after an unsettled one are handled again")
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
