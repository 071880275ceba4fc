"""`worker`: runs agents."""

from __future__ import annotations

import sys

import typer

from aviso_workers.aviso.literals import Size
from aviso_workers.cli.options import flag, option
from aviso_workers.cli.targets import CONFIG, INSTALLED_AGENT, TARGET, ConfigSource, find_app
from aviso_workers.errors import ConfigError
from aviso_workers.worker import fleet, process
from aviso_workers.worker.fleet import FleetPlan
from aviso_workers.worker.process import FleetMember, RecycleLimits

STATUS_PORT = option(
    "PORT",
    "Port for /metrics, /livez and /readyz; 0 is any free port. Default: workers.status.port of the configuration.",
)
RELOAD = flag(
    "--reload", "Restart the agents when a Python or YAML file below this directory changes, or the configuration."
)


def worker(
    target: str | None = TARGET,
    agent: str | None = INSTALLED_AGENT,
    config: ConfigSource | None = CONFIG,
    status_port: int | None = STATUS_PORT,
    processes: int | None = option(
        "N", "Run this many processes, and replace those that crash. Default: this process alone.", min=1
    ),
    max_notifications: int | None = option(
        "N", "Replace a process once it has settled this many notifications. Default: no limit.", min=1
    ),
    max_rss: str | None = option(
        "SIZE", "Replace a process that uses more memory than this, e.g. 500Mi. Default: no limit."
    ),
    reload: bool = RELOAD,
    member: str | None = typer.Option(None, hidden=True),
    quiet: bool = typer.Option(False, "--quiet", hidden=True),
) -> None:
    """Run the agents of an app until SIGTERM or Ctrl-C.

    Example: aviso-workers worker mine.agents:app --processes 4
    """
    limits = RecycleLimits(max_notifications=max_notifications, max_rss=_size(max_rss))
    app = find_app(target, agent=agent, config=config)
    if member is not None:
        name, _, line = member.partition(":")
        process.run(app, member=FleetMember(name, line=int(line), limits=limits), quiet=quiet)
        return
    if processes is None and limits == RecycleLimits() and not reload:
        process.run(app, status_port=status_port)
        return
    command = fleet_command(target, agent, config, max_notifications=max_notifications, max_rss=max_rss)
    console = console_command(target, config)
    plan = FleetPlan(command=command, processes=processes or 1, reload=reload, console=console)
    fleet.run(app, plan, status_port=status_port)


def fleet_command(
    target: str | None, agent: str | None, config: ConfigSource | None, *, quiet: bool = False, **limits: object
) -> tuple[str, ...]:
    """Return the command line of one process of a fleet, which logs warnings only where it is `quiet`."""
    source = config or ConfigSource()
    command = _command("worker", agent=agent, config=source.path, context=source.context, **limits)
    return (*command, *["--quiet"] * quiet, *([target] if target else []))


def console_command(target: str | None, config: ConfigSource | None) -> tuple[str, ...]:
    """Return the command line of a fleet's console, which runs code of the app only where no configuration is named."""
    source = config or ConfigSource()
    return _command("console", config=source.path, context=source.context, app=None if source.path else target)


def _command(name: str, **options: object) -> tuple[str, ...]:
    given = [f"--{option.replace('_', '-')}={value}" for option, value in options.items() if value is not None]
    return (sys.executable, "-P", "-m", "aviso_workers.cli", name, *given)


def _size(text: str | None) -> Size | None:
    try:
        return None if text is None else Size.parse(text)
    except ValueError as error:
        raise ConfigError([f"--max-rss: {error}"]) from error
