"""`dev`: runs agents with a nats-server of their own, and says what there is to try."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import typer
from msgspec import structs

from aviso_workers.app import App
from aviso_workers.aviso import examples
from aviso_workers.aviso.literals import quoted
from aviso_workers.aviso.notifications import Notify
from aviso_workers.cli.options import flag
from aviso_workers.cli.output import echo
from aviso_workers.cli.targets import CONFIG, INSTALLED_AGENT, TARGET, ConfigSource, find_app, shared
from aviso_workers.cli.worker import RELOAD, STATUS_PORT, console_command, fleet_command
from aviso_workers.config import Config
from aviso_workers.config.nats_server import LOOPBACK_NAMES
from aviso_workers.declare.agents import Agent
from aviso_workers.errors import ConfigError, InvalidNotificationError, ServerProcessError
from aviso_workers.server import processes
from aviso_workers.server.processes import DIRECTORY, Node
from aviso_workers.worker import fleet, process
from aviso_workers.worker.fleet import FleetPlan

NATS_URL = "notification_backend.jetstream.nats_url"
MAX_PORTS = 20
"""How many ports after the configured one are tried for the status port."""


def dev(
    target: str | None = TARGET,
    agent: str | None = INSTALLED_AGENT,
    config: ConfigSource | None = CONFIG,
    status_port: int | None = STATUS_PORT,
    ephemeral: bool = flag(
        "--ephemeral", "Delete the streams when the command ends. Default: keep them in .aviso-workers/server."
    ),
    reload: bool = RELOAD,
    verbose: bool = flag("--verbose", "Show the whole log, not only warnings and errors.", "-v"),
) -> None:
    """Run an app's agents beside a nats-server of their own, for development. The server listens on the port that
    nats_url names.

    Example: aviso-workers dev mine.agents:app --reload
    """
    app = find_app(target, agent=agent, config=config)
    if mistakes := app.mistakes():
        raise ConfigError(mistakes)
    port = _nats_port(shared(app.config))
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) if ephemeral else DIRECTORY
        with _served(app.config, directory, port) as node:
            status_port = _status_port(app.config) if status_port is None else status_port
            source = _source(target, config)
            if reload:
                _tell(app, node, source, ephemeral=ephemeral)
                echo("The agents start again when a file changes. Ctrl-C ends all.", err=True)
                command = fleet_command(target, agent, config, quiet=not verbose)
                plan = FleetPlan(command=command, processes=1, reload=True, console=console_command(target, config))
                fleet.run(app, plan, status_port=status_port)
                return

            def ready(status_url: str) -> None:
                _tell(app, node, source, ephemeral=ephemeral)
                echo(f"status       {status_url}/metrics", err=True)
                echo(f"Ready. Ctrl-C ends it{'' if verbose else ', and -v shows the whole log'}.", err=True)

            process.run(app, status_port=status_port, quiet=not verbose, ready=ready)


def _nats_port(config: Config) -> int:
    ((host, port), *_) = config.notification_backend.jetstream.nats_url.addresses
    if host not in LOOPBACK_NAMES:
        raise ConfigError([f"{NATS_URL}: dev serves 127.0.0.1 only, found {host}"])
    return port


@contextmanager
def _served(config: Config, directory: Path, port: int) -> Iterator[Node]:
    """Run the nats-server of `server start` for the block. Raises `ServerProcessError` where that runs already, or the
    port is in use.
    """
    if any(state.pid for state in processes.states(directory)):
        raise ServerProcessError(
            f"a nats-server runs in {directory} already: run the agents by `aviso-workers worker`, or stop it by "
            "`aviso-workers server stop`"
        )
    if not processes.is_free(port):
        raise ServerProcessError(processes.in_use(port, NATS_URL))
    monitoring = config.server.monitoring
    if monitoring.port and not processes.is_free(monitoring.port):
        monitoring = structs.replace(monitoring, port=0)
    server = structs.replace(config.server, port=port, monitoring=monitoring)
    started = structs.replace(config, server=server)
    (node,) = processes.start(started, directory=directory, detached=False, tell=partial(typer.echo, err=True))
    try:
        yield node
    finally:
        processes.stop(directory)


def _status_port(config: Config) -> int:
    """Return the configured status port, or the next one that is free."""
    configured, host = config.workers.status.port, config.workers.status.host
    if not configured:
        return 0
    following = range(configured + 1, configured + MAX_PORTS)
    port = next((each for each in (configured, *following) if processes.is_free(each, host=host)), 0)
    if port != configured:
        echo(f"port {configured} is taken: the status port is {port or 'any free one'}", err=True)
    return port


def _source(target: str | None, config: ConfigSource | None) -> tuple[str, ...]:
    """Return the options that give another command the configuration of this app."""
    if config is not None and config.path is not None:
        return ("--config", str(config.path))
    return ("--app", target) if target else ()


def _tell(app: App, node: Node, source: tuple[str, ...], *, ephemeral: bool) -> None:
    for agent in app.agents:
        echo(f"agent        {agent.name}, which reads {agent.event_type}", err=True)
    if tried := next(filter(None, (_example(app, agent) for agent in app.agents)), None):
        echo(f"try          aviso-workers notify {' '.join(map(quoted, (*tried, *source)))}", err=True)
    kept = "forgotten afterwards" if ephemeral else f"kept in {node.directory}"
    echo(f"streams      {kept}", err=True)
    echo(f"nats-server  {node.url}, monitoring http://127.0.0.1:{node.monitoring_port}", err=True)


def _example(app: App, agent: Agent[Any, Any]) -> tuple[str, ...] | None:
    """Return the arguments of `notify` for a notification that the agent takes; None where none is known."""
    event_type = app.config.notification_schema[agent.event_type]
    try:
        identifier = examples.identifier(event_type, agent.where)
        body = examples.payload(agent.payload_type) if agent.payload_type not in (None, Any) else None
        if body is None and event_type.payload is not None and event_type.payload.required:
            body = {}
        app.check(Notify(agent.event_type, identifier, body))
    except (TypeError, InvalidNotificationError):
        return None
    pairs = [f"{field}={value}" for field, value in identifier.items()]
    given = ("--payload", msgspec.json.encode(body).decode()) if body is not None else ()
    return (agent.event_type, *pairs, *given)
