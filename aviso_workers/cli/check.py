"""`check`: lists all mistakes in an app and its configuration before anything runs."""

from __future__ import annotations

import typer

from aviso_workers.cli.output import echo
from aviso_workers.cli.targets import AgentOption, ConfigOption, Target, find_app
from aviso_workers.errors import ConfigError

__all__ = ["check"]


def check(
    target: Target = None,
    agent: AgentOption = None,
    config: ConfigOption = None,
) -> None:
    """List every mistake in an app and its configuration. Exit with 2 if there is one.

    Example: aviso-workers check mine.agents:app
    """
    app = find_app(target, agent=agent, config=config)
    if mistakes := app.mistakes():
        raise ConfigError(mistakes)
    for warning in filter(None, (*app.warnings(), app.nothing_to_run())):
        echo(f"warning: {warning}", err=True)
    typer.echo(f"{app.name}: {len(app.agents)} agents, {len(app.timers)} timers, {len(app.tasks)} tasks, no mistakes")
