"""`agents pause|resume|retry|skip|reset|rename|rm`: control of agents, whether their workers run or not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

import typer

from aviso_workers.aviso.positions import parse_position
from aviso_workers.cli import completion
from aviso_workers.cli.agents import agents, one_app
from aviso_workers.cli.arguments import parse_pause
from aviso_workers.cli.confirmation import Yes, confirm
from aviso_workers.cli.options import For, argument, flag, option
from aviso_workers.cli.output import echo, print_record, print_table
from aviso_workers.cli.targets import ConfigOption, ConfigSource, OpenedServer, connected, find_app, named_app
from aviso_workers.errors import DeclarationError
from aviso_workers.ops import agent_control, retirement, retried
from aviso_workers.ops.agent_control import AgentConsumer, Reset
from aviso_workers.ops.retirement import Retirement
from aviso_workers.state.failure_counts import Decides

__all__ = ["agents"]

Agent = Annotated[str, argument("AGENT", "Name of the agent, e.g. index_field.", autocompletion=completion.agents)]
Owner = Annotated[str, option("APP", "Name of the agent's app, or MODULE:APP.", autocompletion=completion.apps)]


@agents.command()
def pause(
    agent: Agent,
    app: Owner,
    for_: For = None,
    config: ConfigOption = None,
) -> None:
    """Pause an agent in all its workers. Notifications that they have begun to handle are finished.

    Example: aviso-workers agents pause index_field --app field-index --for 2h
    """
    seconds = parse_pause(for_)

    async def run(server: OpenedServer, target: AgentConsumer) -> None:
        until = await agent_control.pause(server.admin, target, seconds=seconds)
        typer.echo(f"{agent} is paused until {agent_control.end_text(until)}{_on_all(target)}")

    _control(agent, app, config, run, several=True)


@agents.command()
def resume(agent: Agent, app: Owner, config: ConfigOption = None) -> None:
    """Resume a paused agent in all its workers.

    Example: aviso-workers agents resume index_field --app field-index
    """

    async def run(server: OpenedServer, target: AgentConsumer) -> None:
        await agent_control.resume(server.admin, target)
        typer.echo(f"{agent} is resumed{_on_all(target)}")

    _control(agent, app, config, run, several=True)


Sequences = Annotated[
    list[int] | None, argument("SEQUENCE", "Sequences in the stream, as `agents retrying` lists them.")
]
All = Annotated[bool, flag("--all", "All that the agent retries, as `agents retrying` lists them.")]


@agents.command()
def retry(
    agent: Agent,
    app: Owner,
    sequences: Sequences = None,
    everything: All = False,
    config: ConfigOption = None,
) -> None:
    """Try notifications that an agent retries now, and say what becomes of each. Exit with 1 if any is not handled.

    Example: aviso-workers agents retry index_field 4711 --app field-index
    """
    _decide(agent, app, config, "retry", sequences, everything=everything)


@agents.command()
def skip(
    agent: Agent,
    app: Owner,
    sequences: Sequences = None,
    everything: All = False,
    yes: Yes = False,
    config: ConfigOption = None,
) -> None:
    """Skip notifications that an agent retries: each becomes a dead letter, and those behind it are handled. Exit with
    1 if any is not skipped.

    Example: aviso-workers agents skip index_field 4711 --app field-index --yes
    """
    _decide(agent, app, config, "skip", sequences, everything=everything, yes=yes)


@agents.command()
def reset(
    agent: Agent,
    app: Owner,
    to: Annotated[
        str,
        option(
            "ID|DATE|all|new",
            "Where it goes on: at a sequence, at a time such as 2026-11-20T06:00:00Z, at the first stored "
            "notification (all), or at the next one to be published (new).",
        ),
    ],
    yes: Yes = False,
    config: ConfigOption = None,
) -> None:
    """Reset an agent to another position in its stream: back, to handle notifications again, or forward, to skip some.
    Its workers may run or not. It needs nats-server 2.14 or newer, except where the agent's consumer does not exist.

    Example: aviso-workers agents reset index_field --app field-index --to 2026-11-20T06:00:00Z
    """
    position = parse_position(to, name="--to")

    async def run(server: OpenedServer, target: AgentConsumer) -> None:
        plan = await agent_control.plan_reset(server.admin, target, position)
        _print_plan(plan)
        confirm(yes, to="reset it")
        ahead = await agent_control.reset(server.admin, plan)
        typer.echo(f"{agent} goes on at {target.stream}@{plan.sequence}, with {ahead} notifications ahead of it")

    _control(agent, app, config, run)


@agents.command()
def rename(
    app: Annotated[str, argument("APP", "Name of the app, or MODULE:APP.", autocompletion=completion.apps)],
    agent: Annotated[str, argument("OLD", "Name that the agent has had.", autocompletion=completion.agents)],
    to: Annotated[str, argument("NEW", "Name that the code gives it now.")],
    workers_stopped: Annotated[
        bool,
        flag(
            "--workers-stopped",
            "All workers with the old name are stopped, also those that are frozen or cut off from the server. "
            "Without this, it is refused where the agent was active in the last 5 minutes or has not settled "
            "everything.",
        ),
    ] = False,
    yes: Yes = False,
    config: ConfigOption = None,
) -> None:
    """Rename an agent on the server: under its new name, it goes on where it is. Stop the workers with the old name
    first. Its dead letters stay under the old name.

    Example: aviso-workers agents rename field-index index index_field
    """
    name, config = named_app(app, config)
    assert name is not None

    async def run(server: OpenedServer) -> None:
        plan = await agent_control.plan_rename(server.admin, name, agent, to, workers_stopped=workers_stopped)
        rows = [(stream, str(record.ack_floor + 1)) for stream, record in plan.records.items()]
        print_table(("stream", "goes on at"), rows, none="")
        if plan.unsettled:
            typer.echo(f"{plan.unsettled} notifications begin with their first attempt again")
        if plan.again:
            typer.echo(f"{plan.again} notifications that were settled after an unsettled one are handled again")
        confirm(yes, to="rename it")
        await agent_control.rename(server.admin, plan)
        typer.echo(f"{agent} of {name} is {to} now")

    connected(config, run, declared=True)


@agents.command("rm")
def remove(
    target: Annotated[
        str | None, argument("APP", "Name of the app, or MODULE:APP.", autocompletion=completion.apps)
    ] = None,
    agent: Annotated[
        str,
        option(
            "AGENT",
            "Remove only this agent, and nothing that the app's agents share. Default: the whole app.",
            autocompletion=completion.agents,
        ),
    ] = "",
    app: Annotated[str | None, option("APP", "The same as the argument APP.", autocompletion=completion.apps)] = None,
    workers_stopped: Annotated[
        bool,
        flag(
            "--workers-stopped",
            "All workers are stopped, also those that are frozen or cut off from the server. Without this, it is "
            "refused where an agent was active in the last 5 minutes or has not settled everything.",
        ),
    ] = False,
    yes: Yes = False,
    config: ConfigOption = None,
) -> None:
    """Remove an app, or one of its agents, from the server for good: its consumers, buckets and tables. Stop its
    workers first. Notifications and dead letters stay.

    Example: aviso-workers agents rm field-index
    """
    name, config = named_app(one_app(target, app), config)
    if name is None:
        raise DeclarationError("say which app: its name, or MODULE:APP")

    async def run(server: OpenedServer) -> None:
        plan = await retirement.plan(server.admin, name, agent, workers_stopped=workers_stopped)
        print_table(("what", "of", "entries"), _retirement_rows(plan), none="no consumers, buckets or tables")
        if plan.dead_letters:
            typer.echo(f"{plan.dead_letters} dead letters stay: `aviso-workers dead-letters drop` removes them")
        confirm(yes, to="remove it")
        await retirement.retire(server.admin, plan)
        typer.echo(f"{f'{agent} of {name}' if agent else name} is gone from the server")

    connected(config, run, declared=True)


def _retirement_rows(plan: Retirement) -> list[tuple[str, str, str]]:
    return [
        *(("consumer", f"{stream} > {consumer}", "") for stream, consumer in plan.consumers),
        *(("record of its consumer", f"{stream} > {agent}", "") for agent, stream in plan.records),
        *(("bucket", stream.removeprefix("KV_"), str(entries)) for stream, entries in plan.streams.items()),
        *(("messages", f"{stream}, {subject}", str(count)) for (stream, subject), count in plan.subjects.items()),
    ]


def _control(
    agent: str,
    owner: str,
    config: ConfigSource | None,
    run: Callable[[OpenedServer, AgentConsumer], Awaitable[None]],
    *,
    several: bool = False,
) -> None:
    """Call `run` with an agent's consumer, which is found by the app's code for MODULE:APP, else by its name on the
    server; with `several`, on all streams where it has one.
    """
    if ":" in owner:
        app = find_app(owner, agent=None, config=config)
        target = agent_control.declared(app, app.config, agent)
        connected(app.config, lambda server: run(server, target))
        return

    async def find_and_run(server: OpenedServer) -> None:
        await run(server, await agent_control.find(server.admin, server.config, owner, agent, several=several))

    connected(config, find_and_run, declared=True)


def _on_all(agent: AgentConsumer) -> str:
    """Return the streams, where the agent has a consumer on several."""
    return f", on {', '.join((agent.stream, *agent.beside))}" if agent.beside else ""


def _print_plan(plan: Reset) -> None:
    rows = [
        ("goes on at", f"{plan.agent.stream}@{plan.sequence}"),
        ("handled again", str(plan.again)),
        ("passed over", str(plan.passed_over)),
    ]
    if not plan.has_consumer:
        rows.append(("its consumer", "does not exist; the worker that creates it begins there"))
    if plan.unsettled:
        rows.append(("abandoned", f"up to {plan.unsettled} that are being handled or wait for their next attempt"))
    typer.echo(f"{plan.agent.agent} of {plan.agent.app}:")
    print_record(rows)


def _decide(
    agent: str,
    owner: str,
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

    async def run(server: OpenedServer, target: AgentConsumer) -> None:
        asked = await retried.plan(server.admin, target, sequences or (), decides)
        if decides == "skip":
            behind = sum(each.behind for each in asked)
            waits = f"; {behind} that wait behind them run without" if behind else ""
            typer.echo(f"{len(asked)} of {agent} to be skipped{waits}")
            confirm(yes, to="skip them")
        await retried.decide(server.admin, target, asked)
        answers = await retried.wait(server.admin, target, asked)
        for each in answers:
            echo(f"{each.stream}@{each.sequence}: {each.text}")
        if not all(each.carried_out for each in answers):
            raise typer.Exit(1)

    _control(agent, owner, config, run, several=True)
