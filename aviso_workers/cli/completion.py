"""Completion in shells: the event types of a configuration, and the streams, consumers, agents and apps of its server;
and the two arguments that many commands take, with their completion.

A shell asks for it while somebody types, so it prints nothing else, ends within `SECONDS`, and offers nothing where the
configuration or the server cannot be read.
"""

from __future__ import annotations

import io
from collections.abc import Awaitable, Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from typing import TypeVar

import anyio
import typer

from aviso_workers.aviso.literals import quoted
from aviso_workers.cli.options import argument
from aviso_workers.cli.targets import OpenedServer, opened, source_of
from aviso_workers.cli.targets import load as load_config
from aviso_workers.config import Config
from aviso_workers.declare.agents import agent_of
from aviso_workers.errors import AvisoWorkersError
from aviso_workers.ops import aviso_admin

T = TypeVar("T")

SECONDS = 3.0
"""How long a server may take to answer: longer than that, somebody has typed the name."""


def event_types(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the event types of the configuration that begin with what was typed."""
    config = _config(ctx)
    return _beginning(incomplete, config.notification_schema if config else ())


def streams(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the streams of the server that begin with what was typed."""
    return _beginning(incomplete, _asked(ctx, lambda server: server.admin.stream_names()))


def events_and_streams(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the event types and the streams that begin with what was typed."""
    return event_types(ctx, incomplete) + streams(ctx, incomplete)


def consumers(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the consumers, of the stream that was typed before, that begin with what was typed."""
    stream = ctx.params.get("stream")
    return _beginning(incomplete, _asked(ctx, lambda server: server.admin.consumer_names(stream)) if stream else ())


def agents(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the agents on the server, as APP/AGENT, that begin with what was typed."""
    return _beginning(incomplete, ("/".join(each) for each in _asked(ctx, _agents)))


def agents_of(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the agents, of the app that was typed before if there is one, that begin with what was typed."""
    wanted = ctx.params.get("app") or ":"  # which MODULE:APP has too, whose name only its author's code says
    return _beginning(incomplete, (agent for app, agent in _asked(ctx, _agents) if ":" in wanted or app == wanted))


def apps(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the apps with agents on the server that begin with what was typed, or the agents behind `APP/`."""
    found = _asked(ctx, _agents)
    return _beginning(incomplete, ("/".join(each) if "/" in incomplete else each[0] for each in found))


async def _agents(server: OpenedServer) -> set[tuple[str, str]]:
    """Return the names of all agents that read one of the configured event streams, each after that of its app."""
    streams = await aviso_admin.event_streams(server.admin, server.config)
    names = [name for stream in streams for name in await server.admin.consumer_names(stream)]
    return set(filter(None, map(agent_of, names)))


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    """Return the names that begin with what was typed, without those that a shell or a command reads as more than a
    name: bash inserts `$(...)` as it is and runs it, and a command takes `-x` for an option.
    """
    plain = (name for name in names if quoted(name) == name)
    no_name = ("-", "=")  # zsh reads =NAME as the path of a program
    return sorted({name for name in plain if name.startswith(incomplete) and not name.startswith(no_name)})


def _config(ctx: typer.Context) -> Config | None:
    given = ctx.params
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # of an author's module that is imported
        try:
            return load_config(source_of(given.get("config"), given.get("nats_context"), given.get("of_app")))
        except AvisoWorkersError:
            return None


def _asked(ctx: typer.Context, ask: Callable[[OpenedServer], Awaitable[Iterable[T]]]) -> Iterable[T]:
    """Return what the server of the configuration answers; nothing where it does not in time."""
    config = _config(ctx)

    async def run() -> Iterable[T]:
        with anyio.move_on_after(SECONDS):
            async with opened(config) as server:
                return await ask(server)
        return ()

    if config is None:
        return ()
    try:
        return anyio.run(run)
    except AvisoWorkersError:
        return ()


EVENT = argument("EVENT", "The event type, e.g. mars.", autocompletion=event_types)
STREAM = argument("STREAM", "Name of the stream, e.g. MARS.", autocompletion=streams)
