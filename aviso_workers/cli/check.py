"""`check`: lists all mistakes in an app and its configuration before anything runs."""

from __future__ import annotations

import typer

from aviso_workers.app import App
from aviso_workers.cli.output import echo
from aviso_workers.cli.targets import AgentOption, ConfigOption, Target, find_app
from aviso_workers.errors import ConfigError


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
    for warning in filter(None, (*app.warnings(), app._nothing_to_run())):
        echo(f"warning: {warning}", err=True)
    typer.echo(f"{app.name}: {_counts(app)}, no mistakes")


def _counts(app: App) -> str:
    """Return how many agents, timers and tasks the app has, without those of which it has none."""
    counts = {"agent": len(app.agents), "timer": len(app.timers), "task": len(app.tasks)}
    found = [f"{count} {noun}{'' if count == 1 else 's'}" for noun, count in counts.items() if count]
    return ", ".join(found) or "nothing to run"
