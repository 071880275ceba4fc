"""`server render`: a nats-server of our own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aviso_workers import config as configuration
from aviso_workers.cli.finding import ConfigOption
from aviso_workers.cli.printing import print_table
from aviso_workers.server import profiles, rendering

__all__ = ["server"]

server = typer.Typer(help="A nats-server of our own, from the section `server`.", no_args_is_help=True)


@server.command()
def render(
    profile: Annotated[
        profiles.Profile, typer.Option("--profile", help="What chooses where the configuration says nothing.")
    ] = "production",
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("nats-server.conf"),
    config: ConfigOption = None,
) -> None:
    """Write nats-server.conf, once nats-server has checked it, and say what the server stands."""
    loaded = configuration.load(config)
    settings, choices = profiles.choose(loaded, profile=profile)
    rendered = rendering.render(settings, origins=loaded.origins, choices=choices)
    rendering.write(rendered, output, origins=loaded.origins)
    print_table(("key", "value", "so"), [(choice.key, choice.value, choice.why) for choice in choices])
    typer.echo(f"{output}: written, readable by its owner only")
