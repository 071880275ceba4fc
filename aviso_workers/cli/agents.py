"""`agents ls|show`: the progress of agents, and the policy that is in effect for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Annotated, Any

import anyio
import typer
from msgspec import Struct, structs
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from aviso_workers.app import App
from aviso_workers.aviso.literals import time_text
from aviso_workers.cli import completion
from aviso_workers.cli.options import argument, flag, option
from aviso_workers.cli.output import AsJson, echo, print_json, print_record, print_rows, printable, terminal
from aviso_workers.cli.report import Seconds
from aviso_workers.cli.tables import table
from aviso_workers.cli.targets import (
    AgentOption,
    ConfigOption,
    OpenedServer,
    Target,
    connected,
    find_app,
    named_app,
    opened,
)
from aviso_workers.declare.agents import Agent
from aviso_workers.errors import BackendError, ConfigError, DeclarationError, NotFoundError
from aviso_workers.ops import agent_inventory, agent_report
from aviso_workers.ops.agent_inventory import Recorded
from aviso_workers.ops.agent_report import AgentProgress, AgentRow
from aviso_workers.ops.denials import Denials, asked
from aviso_workers.state import declarations
from aviso_workers.state.failure_records import Retrying

__all__ = ["agents", "one_app"]

agents = typer.Typer(help="Show the progress of agents, and pause, reset or remove them.", no_args_is_help=True)

ANSWER_SECONDS = 30.0
"""Longer than three servers of which one has just ended take to answer all requests."""

OfApp = Annotated[
    str | None, option("APP", "List only agents of this app: its name, or MODULE:APP.", autocompletion=completion.apps)
]


@agents.command("ls")
def list_agents(
    target: Target = None,
    agent: AgentOption = None,
    app: OfApp = None,
    watch: Annotated[bool, flag("--watch", "Update the list until Ctrl-C, every --seconds.")] = False,
    seconds: Seconds = 2.0,
    as_json: AsJson = False,
    config: ConfigOption = None,
    everyone: Annotated[bool, typer.Option("--all", hidden=True)] = False,
) -> None:
    """List the agents of one app or of all, with their lag. Exit with 1 if an agent is stuck or its consumer is gone.

    Without an app, these are all agents that read the configured event streams. The lag of an agent is pending
    plus ack pending, and its change per second is negative while it shrinks. Redelivered counts the notifications that
    are being tried again. The state names the last error of an agent that fails; timers and tasks are listed while they
    fail.

    Example: aviso-workers agents ls mine.agents:app --watch
    """
    if everyone and (target or agent or app):
        raise DeclarationError("say either --all, or which app: MODULE:APP, or --agent NAME")
    if watch and as_json:
        raise DeclarationError("say either --watch or --json")
    given = one_app(target, app)
    is_name = app is not None and ":" not in app and agent is None
    found = find_app(given, agent=agent, config=config) if (given or agent) and not is_name else None
    asked = _Asked(found, found.name if found else given, Denials())
    source = found.config if found else config
    if watch:
        connected(source, lambda server: _watch(server, asked, seconds), declared=True)
        return
    rows = connected(source, lambda server: _compared(server, asked, seconds), declared=True)
    denied = asked.denied.text()
    print_rows(AGENTS, map(_row, rows), rows, none="no agents", as_json=as_json, partly=bool(denied))
    if denied:
        echo(denied, err=True)
    if denied or any(row.trouble for row in rows):
        raise typer.Exit(1)


class _Asked(Struct, frozen=True):
    """The agents that are asked for: those of an app whose code is at hand, those of an app by its name, or all."""

    app: App | None
    name: str | None
    """The name of the app; None for the agents of all apps."""
    denied: Denials
    """What the server denies our user."""

    async def report(
        self, server: OpenedServer, recorded: Recorded, before: Iterable[AgentProgress] = ()
    ) -> list[AgentProgress]:
        """Return the report. What an earlier one, `before`, has found unanswered is not waited for again."""
        away = {each.stream for each in before if each.unanswered and not each.denied}
        admin, config = server.admin, server.config
        if self.app is not None:
            return await agent_report.of_app(
                admin, config, self.app, recorded=recorded, unavailable=away, denied=self.denied
            )
        everyones = await agent_report.of_deployment(
            admin, config, recorded=recorded, unavailable=away, denied=self.denied
        )
        return _of_app(everyones, self.name) if self.name else everyones

    def rows(
        self, recorded: Recorded, now: list[AgentProgress], before: list[AgentProgress], *, seconds: float
    ) -> list[AgentRow]:
        """Return the rows of agents, from two reports, and those of timers and tasks that fail."""
        return agent_report.rows(now, before, seconds=seconds) + agent_report.failing(recorded, self.name)

    async def unlisted(self, server: OpenedServer, recorded: Recorded) -> str:
        """Return which agents cannot be listed, and what to do, as text; empty where there are none."""
        if self.name:
            return ""
        listing = agent_inventory.elsewhere(server.admin, server.config, recorded)
        found = await asked(self.denied, "streams", listing, [])
        if not found:
            return ""
        return (
            f"agents also read {'; '.join(found)}, of whose event types nothing is known here: name the configuration "
            "that has them by --config, or the app by --app MODULE:APP"
        )


async def _compared(server: OpenedServer, asked: _Asked, seconds: float) -> list[AgentRow]:
    """Return the rows of two reports that are made `seconds` apart."""
    before = await asked.report(server, await agent_inventory.recorded(server.admin, denied=asked.denied))
    began = anyio.current_time()
    await anyio.sleep(seconds)
    recorded = await agent_inventory.recorded(server.admin, denied=asked.denied)
    now = await asked.report(server, recorded, before)
    rows = asked.rows(recorded, now, before, seconds=anyio.current_time() - began)
    if elsewhere := await asked.unlisted(server, recorded):
        if not now:
            raise NotFoundError(elsewhere)
        echo(elsewhere, err=True)
    return rows


def one_app(argument: str | None, option: str | None) -> str | None:
    """Return the app that is given as an argument or by `--app`. Raises `DeclarationError` where both are."""
    if argument and option:
        raise DeclarationError(f"give the app once: {argument}, or --app {option}")
    return argument or option


def _of_app(found: list[AgentProgress], app: str) -> list[AgentProgress]:
    named = [progress for progress in found if progress.app == app]
    if not named:
        apps = ", ".join(sorted({progress.app for progress in found})) or "none"
        raise NotFoundError(f"no agent of app {app} reads one of the configured streams; there are apps: {apps}")
    return named


@agents.command()
def show(
    target: Target = None,
    agent: AgentOption = None,
    app: Annotated[str | None, option("MODULE:APP", "The same as MODULE:APP.")] = None,
    as_json: AsJson = False,
    config: ConfigOption = None,
) -> None:
    """Show the policy and the progress of each agent of an app, and how its consumer on the server differs.

    If the server does not answer, only the policy is shown, and the exit code is 1. Without MODULE:APP, the name of an
    app shows the policy that its workers have recorded.

    Example: aviso-workers agents show mine.agents:app
    """
    named = one_app(target, app)
    if named and ":" not in named and not agent:
        connected(config, partial(_show_recorded, app=named, as_json=as_json), declared=True)
        return
    found = find_app(named, agent=agent, config=config)
    if mistakes := found.mistakes():
        raise ConfigError(mistakes)
    anyio.run(_show, found, as_json)


async def _show_recorded(server: OpenedServer, *, app: str, as_json: bool) -> None:
    recorded = (await declarations.stored(server.admin)).get(app)
    for progress in _of_app(await agent_report.of_deployment(server.admin, server.config), app):
        policy = recorded.policies.get(progress.agent) if recorded else None
        pairs = {"app": app, "agent": progress.agent, **(policy or {"policy": "no worker has recorded it"})}
        _print_pairs(pairs | _progress(progress), as_json=as_json)


def _print_pairs(pairs: Mapping[str, str], *, as_json: bool) -> None:
    if as_json:
        print_json(dict(pairs))
    else:
        print_record(pairs.items())
        typer.echo()


async def _show(app: App, as_json: bool) -> None:
    known: dict[str, AgentProgress] = {}
    unknown = ""
    try:
        with anyio.fail_after(ANSWER_SECONDS):
            async with opened(app.config) as server:
                report = await agent_report.of_app(server.admin, server.config, app)
            known = {progress.agent: progress for progress in report}
    except (BackendError, TimeoutError) as error:
        unknown = str(error) or "the server does not answer"
    for declared in app.agents:
        pairs = {
            "app": app.name,
            "agent": declared.name,
            **declarations.policy(app.config.notification_schema, declared),
        }
        if progress := known.get(declared.name):
            pairs |= _progress(progress) | _differing(app, declared, progress)
            if declared.policy.singleton:
                pairs["pinned since"] = progress.pinned_since
        _print_pairs(pairs, as_json=as_json)
    if unknown:
        echo(f"how far they have come is not known: {unknown}", err=True)
        raise typer.Exit(1)


def _progress(progress: AgentProgress) -> dict[str, str]:
    if progress.why_none:
        return {"consumer": progress.why_none}
    record = progress.record
    recorded = f"settled up to sequence {record.ack_floor}, at {time_text(record.time)}" if record else "none"
    numbers = {
        "pending": progress.pending,
        "ack pending": progress.ack_pending,
        "redelivered": progress.redelivered,
        "dead letters": progress.dead_letters,
    }
    texts = {
        "recorded position": recorded,
        "paused until": progress.paused_until,
        "trouble": progress.trouble,
        "last failure": _last_failure(progress),
    }
    return {name: str(number) for name, number in numbers.items()} | {
        name: text for name, text in texts.items() if text
    }


def _last_failure(progress: AgentProgress) -> str:
    if progress.failing:
        return progress.failing
    failure = progress.failure
    return f"over, the last was at {time_text(failure.last)}: {failure.described}" if failure else ""


def _differing(app: App, agent: Agent[Any, Any], progress: AgentProgress) -> dict[str, str]:
    if progress.events is None:
        return {}
    found = agent_report.differing(app.config, agent, progress.events.config)
    return {"on the server": found} if found else {}


@agents.command()
def retrying(
    app: Annotated[str, argument("APP", "Name of the app, or MODULE:APP.", autocompletion=completion.apps)],
    agent: Annotated[str, argument("AGENT", "Name of the agent.", autocompletion=completion.agents)],
    as_json: AsJson = False,
    config: ConfigOption = None,
) -> None:
    """Show which notifications an agent retries, why, and how many wait behind each by `order_by`. `agents retry` tries
    one again now, and `agents skip` makes a dead letter of it.

    Workers record up to 100, every 5 seconds at most: first those at which the agent is blocked, then those due first.
    So a notification may be listed for some seconds after its next attempt was due.

    Example: aviso-workers agents retrying fields index_field
    """
    name, config = named_app(app, config)
    assert name is not None
    app, denied = name, Denials()

    async def read(server: OpenedServer) -> list[AgentProgress]:
        return await agent_report.of_deployment(server.admin, server.config, denied=denied)

    everyones = connected(config, read, declared=True)
    found = [each for each in _of_app(everyones, app) if each.agent == agent]
    if not found:
        raise NotFoundError(f"app {app} has no agent {agent} that reads one of the configured streams")
    waiting = [each for progress in found for each in progress.retrying]
    print_rows(RETRYING, map(_retrying_row, waiting), waiting, none="nothing is retried", as_json=as_json)
    if not as_json:
        for progress in found:
            echo(f"{progress.stream}: {progress.state_since(None)}")
    if said := denied.text():
        echo(said, err=True)
        raise typer.Exit(1)


RETRYING = ("sequence", "attempt", "waits until", "error", "key", "behind it", "blocked")


def _retrying_row(each: Retrying) -> tuple[str, ...]:
    attempt = f"{each.attempt + 1} of {each.attempts or 'any number'}"
    behind = (each.key, str(each.behind)) if each.key else ("-", "-")
    return (str(each.sequence), attempt, time_text(each.again_at), each.error, *behind, "yes" if each.blocked else "no")


async def _watch(server: OpenedServer, asked: _Asked, seconds: float) -> None:
    recorded = await agent_inventory.recorded(server.admin, denied=asked.denied)
    if elsewhere := await asked.unlisted(server, recorded):
        echo(elsewhere, err=True)
    console = terminal()
    before, began = await asked.report(server, recorded), anyio.current_time()

    async def shown() -> RenderableType:
        nonlocal asked, before, began
        asked = structs.replace(asked, denied=Denials())
        recorded = await agent_inventory.recorded(server.admin, denied=asked.denied)
        now, ended = await asked.report(server, recorded), anyio.current_time()
        rows = asked.rows(recorded, now, before, seconds=ended - began)
        before, began = now, ended
        listed = table(AGENTS, [_row(row) for row in rows], width=console.width) if rows else Text("no agents")
        return Group(listed, Text(printable(text))) if (text := asked.denied.text()) else listed

    while not console.is_terminal:
        await anyio.sleep(seconds)
        console.print(await shown())
    with Live(console=console, auto_refresh=False) as live:
        while True:
            await anyio.sleep(seconds)
            try:
                live.update(await shown(), refresh=True)
            except BackendError as error:
                live.update(Text(printable(str(error))), refresh=True)


AGENTS = (
    "app",
    "agent",
    "stream",
    "pending",
    "ack pending",
    "redelivered",
    "dead letters",
    "lag change per s",
    "state",
)


def _row(row: AgentRow) -> tuple[str, ...]:
    of = (row.app, row.agent, row.stream)
    if row.why_none or row.stream == "-":
        return (*of, *("-",) * 5, row.state)
    numbers = (row.pending, row.ack_pending, row.redelivered, "-" if row.dead_letters is None else row.dead_letters)
    return (*of, *map(str, numbers), f"{row.rate:+.1f}", row.state)
