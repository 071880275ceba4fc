"""`agents` and `lag`: what is in effect for agents, and how far they have come."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

import anyio
import typer
from rich.live import Live
from rich.table import Table

from aviso_workers.app import App
from aviso_workers.cli.output import echo, print_table, table, terminal
from aviso_workers.cli.targets import AgentOption, ConfigOption, Opened, Target, connected, find_app, opened
from aviso_workers.declare.agents import Agent
from aviso_workers.errors import BackendError, ConfigError, DeclarationError
from aviso_workers.ops import agent_report
from aviso_workers.ops.agent_report import Progress

__all__ = ["agents", "lag"]

ANSWER_SECONDS = 30.0
"""Longer than three servers take to answer everything of which one has died a moment ago."""
REFRESH_SECONDS = 2.0

Report = Callable[[Opened], Awaitable[list[Progress]]]


def agents(target: Target = None, agent: AgentOption = None, config: ConfigOption = None) -> None:
    """Show the policy of every agent of an app, what of it differs on the server, and how far each has come.

    Where the server does not tell how far they have come, the policy is shown all the same; exit 1.

    Example: aviso-workers agents mine.agents:app
    """
    app = find_app(target, agent=agent, config=config)
    if mistakes := app.mistakes():
        raise ConfigError(mistakes)
    anyio.run(_print_agents, app)


def lag(
    target: Target = None,
    agent: AgentOption = None,
    everyone: Annotated[bool, typer.Option("--all", help="All agents that read the configured event streams.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again and again, until Ctrl-C.")] = False,
    config: ConfigOption = None,
) -> None:
    """Show what agents have not finished, over all their workers; exit 1 where one is stuck or its consumer is gone.

    Example: aviso-workers lag mine.agents:app --watch
    """
    if everyone and (target or agent):
        raise DeclarationError("say either --all, or which app: MODULE:APP, or --agent NAME")
    app = None if everyone else find_app(target, agent=agent, config=config)

    async def report(server: Opened) -> list[Progress]:
        if app is None:
            return await agent_report.of_deployment(server.admin, server.config)
        return await agent_report.of_app(server.admin, server.config, app)

    show = _watch if watch else _print_lag
    connected(app.config if app else config, lambda server: show(server, report))


async def _print_agents(app: App) -> None:
    known: dict[str, Progress] = {}
    unknown = ""
    try:
        with anyio.fail_after(ANSWER_SECONDS):
            async with opened(app.config) as server:
                report = await agent_report.of_app(server.admin, server.config, app)
            known = {progress.agent: progress for progress in report}
    except (BackendError, TimeoutError) as error:
        unknown = str(error) or "the server does not answer"
    for declared in app.agents:
        rows = {**agent_report.policy(app.config, declared)}
        if declared.name in known:
            rows |= dict(zip(LAG[2:], _row(known[declared.name])[2:], strict=True))
            rows |= _differing(app, declared, known[declared.name])
            if declared.policy.singleton:
                rows["pinned since"] = known[declared.name].pinned_since
        print_table((declared.name, app.name), rows.items())
    if unknown:
        echo(f"how far they have come is not known: {unknown}", err=True)
        raise typer.Exit(1)


def _differing(app: App, agent: Agent[Any, Any], progress: Progress) -> dict[str, str]:
    if progress.events is None:
        return {}
    found = agent_report.differing(app.config, agent, progress.events.config)
    return {"on the server": found} if found else {}


async def _print_lag(server: Opened, report: Report) -> None:
    found = await report(server)
    terminal().print(_table(found))
    if any(progress.trouble for progress in found):
        raise typer.Exit(1)


async def _watch(server: Opened, report: Report) -> None:
    console = terminal()
    if not console.is_terminal:
        while True:
            console.print(_table(await report(server)))
            await anyio.sleep(REFRESH_SECONDS)
    shown = _table([])
    with Live(shown, console=console, auto_refresh=False) as live:
        while True:
            try:
                shown = _table(await report(server))
            except BackendError as error:
                shown.caption = str(error)
            live.update(shown, refresh=True)
            await anyio.sleep(REFRESH_SECONDS)


LAG = ("app", "agent", "stream", "pending", "ack pending", "redelivered", "paused until", "trouble")


def _table(report: Sequence[Progress]) -> Table:
    return table(LAG, map(_row, report))


def _row(progress: Progress) -> tuple[str, ...]:
    of = (progress.app, progress.agent, progress.stream)
    if progress.why_none:
        return (*of, "-", "-", "-", "", progress.why_none)
    numbers = (progress.pending, progress.ack_pending, progress.redelivered)
    return (*of, *map(str, numbers), progress.paused_until, progress.trouble)
