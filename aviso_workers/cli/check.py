"""`check`: lists all mistakes in an app and its configuration before anything runs."""

from __future__ import annotations

import typer

from aviso_workers.aviso.literals import counted
from aviso_workers.cli.output import echo
from aviso_workers.cli.targets import CONFIG, INSTALLED_AGENT, TARGET, ConfigSource, find_app
from aviso_workers.errors import ConfigError


def check(
    target: str | None = TARGET,
    agent: str | None = INSTALLED_AGENT,
    config: ConfigSource | None = CONFIG,
) -> None:
    """List every mistake in an app and its configuration. Exit with 2 if there is one.

    Example: aviso-workers check mine.agents:app
    """
    app = find_app(target, agent=agent, config=config)
    if mistakes := app.mistakes():
        raise ConfigError(mistakes)
    for warning in filter(None, (*app.warnings(), app._nothing_to_run())):
        echo(f"warning: {warning}", err=True)
    counts = {"agent": len(app.agents), "timer": len(app.timers), "task": len(app.tasks)}
    has = ", ".join(counted(count, noun) for noun, count in counts.items() if count)
    typer.echo(f"{app.name}: {has or 'nothing to run'}, no mistakes")
