"""`console`: serves pages that say what needs an operator, and why."""

from __future__ import annotations

import socket
import sys

import anyio
import structlog
import typer
from msgspec import structs

from aviso_workers.cli.options import option
from aviso_workers.cli.output import echo
from aviso_workers.cli.signals import until_signal
from aviso_workers.cli.targets import CONFIG, ConfigSource, load, opened
from aviso_workers.config import Config
from aviso_workers.errors import ConfigError
from aviso_workers.telemetry import logs


def console(
    host: str | None = option("HOST", "Address to listen on. Default: workers.console.host of the configuration."),
    port: int | None = option(
        "PORT",
        "Port to listen on; 0 is any free port. Default: workers.console.port of the configuration.",
        min=0,
        max=65535,
    ),
    config: ConfigSource | None = CONFIG,
    member: str | None = typer.Option(None, hidden=True),
) -> None:
    """Serve pages that say what needs an operator, and why, until SIGTERM or Ctrl-C. Needs the extra `console`.

    Example: aviso-workers console --port 9480
    """
    loaded, line = load(config), None
    if member is not None:
        name, _, descriptor = member.partition(":")
        structlog.contextvars.bind_contextvars(process=name)
        line = socket.socket(fileno=int(descriptor))
        loaded = loaded.with_defaults(retry_attempts=sys.maxsize)  # as workers do
        host = loaded.workers.status.host
    loaded = _with(loaded, host, port)
    if refusals := loaded.workers.console.refusals(loaded.workers.console.host):
        raise ConfigError(refusals)
    from aviso_workers.console.web import serve

    logs.configure(loaded.workers.logging)

    async def work() -> None:
        async with opened(loaded) as server:
            await serve(
                server.admin, server.config, on_listening=lambda url: echo(f"console: {url}", err=True), line=line
            )

    anyio.run(until_signal, work)


def _with(config: Config, host: str | None, port: int | None) -> Config:
    """Return the configuration with another address of the console."""
    console = config.workers.console
    chosen = structs.replace(
        console, host=console.host if host is None else host, port=console.port if port is None else port
    )
    return structs.replace(config, workers=structs.replace(config.workers, console=chosen))
