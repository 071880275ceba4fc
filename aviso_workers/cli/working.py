"""`worker` and `dev`: run agents."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from aviso_workers import serve
from aviso_workers.cli.finding import AgentOption, ConfigOption, Target, find_app
from aviso_workers.errors import ConfigError
from aviso_workers.server import NatsServer

__all__ = ["dev", "worker"]

STORE_DIR = Path(".aviso-workers/nats")

StatusPort = Annotated[
    int | None, typer.Option("--status-port", help="Port of /metrics, /livez and /readyz; 0 is any free one.")
]


def worker(
    target: Target = None,
    agent: AgentOption = None,
    config: ConfigOption = None,
    status_port: StatusPort = None,
) -> None:
    """Run the agents of an app until SIGTERM or Ctrl-C."""
    serve.run(find_app(target, agent=agent, config=config), status_port=status_port)


def dev(
    target: Target = None,
    agent: AgentOption = None,
    config: ConfigOption = None,
    status_port: StatusPort = None,
    ephemeral: Annotated[bool, typer.Option("--ephemeral", help="Forget the streams afterwards.")] = False,
) -> None:
    """Run the agents of an app with a nats-server of their own, on the port that nats_url names."""
    app = find_app(target, agent=agent, config=config)
    (first, *_) = app.config.notification_backend.jetstream.servers
    url = urlsplit(first if "://" in first else f"nats://{first}")
    if (host := url.hostname) not in ("localhost", "127.0.0.1"):
        raise ConfigError([f"notification_backend.jetstream.nats_url: dev serves 127.0.0.1 only, found {host}"])
    with tempfile.TemporaryDirectory() as forgotten:
        store_dir = Path(forgotten) if ephemeral else Path.cwd() / STORE_DIR
        store_dir.mkdir(parents=True, exist_ok=True)
        with NatsServer.start(store_dir=store_dir, port=url.port or 4222) as server:
            typer.echo(f"nats-server {server.url}, streams in {store_dir}", err=True)
            serve.run(app, status_port=status_port)
