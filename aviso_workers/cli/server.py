"""`server render|start|rotate-key|stop|reload|status`: renders nats-server.conf, and runs servers for development."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import typer
from msgspec import structs

from aviso_workers.cli.options import end_where, flag, option
from aviso_workers.cli.output import AS_JSON, print_rows, print_table
from aviso_workers.cli.targets import CONFIG, ConfigSource, find_app, load
from aviso_workers.config import Config, Secret, Server
from aviso_workers.config.nats_server import LOOPBACK_NAMES, Account, Permissions, Subjects, User
from aviso_workers.ops import key_rotation, permissions
from aviso_workers.server import accounts, nats_conf, processes, profiles
from aviso_workers.server.processes import DIRECTORY

IN_AN_ACCOUNT = (
    "A publisher in an account of its own reaches nothing else in the account of the workers. `server render` writes",
    "such accounts (server.accounts.NAME.publishes). In a nats-server.conf of your own:",
)
SERVERS = ("server", "pid", "url", "monitoring", "health")

server = typer.Typer(
    help="Run nats-servers for development, and write nats-server.conf, from the configuration's section server.",
    no_args_is_help=True,
)

OF_SERVERS = option("DIR", "Directory of the servers and their logs.", "--directory", "-d", default=DIRECTORY)


@server.command()
def render(
    profile: profiles.Profile = typer.Option(
        "production", help="Profile that chooses the settings which the configuration leaves open."
    ),
    output: Path = option("FILE", "File to write.", "--output", "-o", default=Path("nats-server.conf")),
    role: permissions.Role | None = typer.Option(
        None, help="Print the permissions of a user of this role instead, and write nothing."
    ),
    app: str | None = option(
        "MODULE:APP",
        "App that a worker runs, which --role worker needs. For other roles, the app whose event types "
        "count. Default: those of the configuration.",
    ),
    user: str | None = option(
        "NAME",
        "User whose permissions --role prints; for an NKey its public key. The answers of servers to the user "
        "go to subjects that no other user may hear. Default: the user of the configuration.",
    ),
    config: ConfigSource | None = CONFIG,
) -> None:
    """Write nats-server.conf after nats-server has checked it, and show what follows from the settings.

    Example: aviso-workers server render --output /etc/nats/nats-server.conf
    """
    if role is not None:
        granted = _permissions(role, app, config, user=user or "")
        typer.echo(_as_yaml(granted))
        if role == "publisher":
            typer.echo(_as_account(load(_source(app, config))))
        for warning in permissions.beyond(granted):
            typer.echo(f"aviso-workers: {warning}", err=True)
        return
    loaded = load(_source(app, config))
    settings, choices = profiles.choose(loaded, profile=profile)
    rendered = nats_conf.render(settings, origins=loaded.origins, choices=choices)
    nats_conf.write(rendered, output, origins=loaded.origins)
    print_table(
        ("key", "value", "so"), [(choice.key, choice.value, choice.why) for choice in choices], none="no choices"
    )
    typer.echo(f"{output}: written, readable by its owner only")


@server.command()
def start(
    nodes: int = option("N", "Number of servers; more than one are a cluster.", min=1, default=1),
    directory: Path = OF_SERVERS,
    config: ConfigSource | None = CONFIG,
) -> None:
    """Start nats-servers in the background on 127.0.0.1, for development and tests. Servers that run already stay as
    they are.

    Example: aviso-workers server start --nodes 3
    """
    loaded = load(config)
    started = processes.start(loaded, directory=directory, nodes=nodes, tell=partial(typer.echo, err=True))
    _print_states(processes.states(directory))
    urls = loaded.notification_backend.jetstream.nats_url
    if not {port for host, port in urls.addresses if host in LOOPBACK_NAMES} & {node.port for node in started}:
        typer.echo(
            f"aviso-workers: commands and workers connect to {urls} (notification_backend.jetstream.nats_url), where "
            f"none of these servers listens: name {started[0].url} there, or set server.port to the port of nats_url",
            err=True,
        )


@server.command("rotate-key")
def rotate_key(
    previous_key_file: Path | None = option(
        "FILE",
        "File with the present key of the stores. Leave it out if they are not encrypted.",
        exists=True,
        dir_okay=False,
    ),
    nodes: int = option("N", "Number of servers, as for `server start`.", min=1, default=1),
    directory: Path = OF_SERVERS,
    config: ConfigSource | None = CONFIG,
) -> None:
    """Rotate the encryption key of stopped servers to that of the configuration, and start them.

    Every stream is copied to an empty store and compared. Then the new stores take the places of the old ones, which
    stay on the disk. Exit with 1 if anything differs. In that case the old stores stay in their places.

    Example: aviso-workers server rotate-key --nodes 3
    """
    all_previous = key_rotation.rotate(
        load(config),
        previous_key_file=previous_key_file,
        directory=directory,
        nodes=nodes,
        tell=partial(typer.echo, err=True),
    )
    _print_states(processes.states(directory))
    for previous in all_previous:
        typer.echo(f"{previous}: the store before; remove it when you do not need it any more")


@server.command()
def stop(
    lame_duck: bool = flag(
        "--lame-duck", "Let each server hand over its streams and tell its clients to leave, before it ends."
    ),
    directory: Path = OF_SERVERS,
) -> None:
    """Stop the servers that `server start` has started. Their streams stay on the disk.

    Example: aviso-workers server stop
    """
    ended = processes.stop(directory, lame_duck=lame_duck)
    for node in ended:
        typer.echo(f"{node.name}: ended")
    if not ended:
        typer.echo(f"nothing runs in {directory}")


@server.command()
def reload(directory: Path = OF_SERVERS, config: ConfigSource | None = CONFIG) -> None:
    """Reload the configuration of the running servers, without a restart. The command names what they cannot take over.

    Example: aviso-workers server reload
    """
    for node in processes.reload(load(config), directory=directory):
        typer.echo(f"{node.name}: reloaded")


@server.command()
def status(directory: Path = OF_SERVERS, as_json: bool = AS_JSON) -> None:
    """Show the servers that `server start` has started. Exit with 1 unless all of them are healthy.

    Example: aviso-workers server status
    """
    states = processes.states(directory)
    _print_states(states, as_json=as_json)
    end_where(not states or any(state.health != "ok" for state in states))


def _source(app: str | None, config: ConfigSource | None) -> ConfigSource:
    return structs.replace(config or ConfigSource(), app=app)


def _permissions(role: permissions.Role, app: str | None, config: ConfigSource | None, *, user: str) -> Permissions:
    source = _source(app, config)
    match role:
        case "worker":
            declared = find_app(app, agent=None, config=config)
            return permissions.of_worker(declared, declared.config, user=user)
        case "bridge":
            bridge = find_app(None, agent=permissions.BRIDGE, config=config)
            return permissions.of_worker(bridge, bridge.config, buckets=[permissions.BRIDGE], user=user)
        case "publisher":
            return permissions.of_publisher(load(source), user=user)
        case "spark":
            return permissions.of_spark(load(source), user=user)
        case "operator":
            return permissions.of_operator(load(source), user=user)


def _as_yaml(granted: Permissions) -> str:
    """Return the permissions as YAML for `server.accounts.<account>.users.<user>`; JSON's texts are YAML's."""
    lines = ["permissions:"]
    for side in ("publish", "subscribe"):
        subjects: Subjects = getattr(granted, side)
        lines += [f"  {side}:", "    allow:", *(f"      - {json.dumps(subject)}" for subject in subjects.allow)]
    return "\n".join(lines)


def _as_account(config: Config) -> str:
    """Return an account of these publishers as it is in a nats-server.conf, in comments of YAML."""
    publishers = Account(publishes=tuple(config.notification_schema), users={"publisher": User(password=Secret("..."))})
    alone = structs.replace(config, server=Server(accounts={"WORKERS": Account(), "PUBLISHERS": publishers}))
    text = nats_conf.accounts(structs.replace(alone.server, accounts=accounts.connected(alone)))
    return "".join(f"# {line}\n" for line in (*IN_AN_ACCOUNT, *text.splitlines())).rstrip()


def _print_states(states: Iterable[processes.NodeState], *, as_json: bool = False) -> None:
    rows = [
        (of.node.name, str(of.pid or "-"), of.node.url, f"http://127.0.0.1:{of.node.monitoring_port}", of.health)
        for of in states
    ]
    print_rows(SERVERS, rows, none="no servers", as_json=as_json)
