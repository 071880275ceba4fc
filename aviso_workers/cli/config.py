"""`config show|schema|event-types|asyncapi|files`: print what is in effect, the schema of files, an app for other
programs, and files that are shipped.
"""

from __future__ import annotations

import json

import typer

from aviso_workers.cli.options import argument, flag, option
from aviso_workers.cli.output import Columns, echo
from aviso_workers.cli.targets import (
    CONFIG,
    INSTALLED_AGENT,
    TARGET,
    ConfigSource,
    find_app,
    load,
    settings_of_installed,
)
from aviso_workers.config import display
from aviso_workers.errors import ConfigError
from aviso_workers.state.asyncapi import document

config = typer.Typer(
    help="Print the configuration in effect, its JSON Schema, an app as AsyncAPI, and the shipped files.",
    no_args_is_help=True,
)


@config.command()
def schema() -> None:
    """Print the JSON Schema of configuration files, for editors.

    Example: aviso-workers config schema > aviso-workers.schema.json
    """
    typer.echo(json.dumps(display.json_schema(), indent=2))


@config.command()
def show(config: ConfigSource | None = CONFIG) -> None:
    """Print every value in effect and where it was set. Secrets are masked.

    Example: aviso-workers config show --app mine.agents:app
    """
    loaded = load(config)
    settings = settings_of_installed(loaded.workers.agents)
    shown = display.effective(loaded, agents=settings)
    Columns("key", "value", "from").print([(path, json.dumps(value), origin) for path, value, origin in shown])
    for warning in loaded.warnings:
        echo(f"warning: {warning}", err=True)


@config.command("event-types")
def event_types(config: ConfigSource | None = CONFIG) -> None:
    """Print the event types as YAML, for the configuration of an aviso-server that shares their streams.

    Example: aviso-workers config event-types --app mine.agents:app > schema.yaml
    """
    typer.echo(display.event_types(load(config)), nl=False)


@config.command()
def asyncapi(
    target: str | None = TARGET,
    agent: str | None = INSTALLED_AGENT,
    version: str = option("TEXT", "Version of the app, which the document has.", "--app-version", default="0.0.0"),
    as_yaml: bool = flag("--yaml", "Print YAML and not JSON."),
    config: ConfigSource | None = CONFIG,
) -> None:
    """Print what an app reads and publishes as an AsyncAPI 3.0 document, for catalogues, other teams and generators.

    Example: aviso-workers config asyncapi mine.agents:app > asyncapi.json
    """
    app = find_app(target, agent=agent, config=config)
    if mistakes := app.mistakes():
        raise ConfigError(mistakes)
    made = document(app.config, app, version=version)
    typer.echo(display.yaml_text(made) if as_yaml else json.dumps(made, indent=2), nl=not as_yaml)


@config.command()
def files(
    name: str | None = argument(
        "NAME", "Name of the file to print. Default: list all files.", show_default=False, default=None
    ),
) -> None:
    """List the shipped files, for Prometheus, Grafana and others, or print one of them.

    Example: aviso-workers config files prometheus-rules.yml > prometheus-rules.yml
    """
    if name is not None:
        typer.echo(display.shipped(name), nl=False)
        return
    Columns("file", "is").print(list(display.SHIPPED_FILES.items()))
