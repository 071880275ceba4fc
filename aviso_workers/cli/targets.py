"""Targets of commands: an app by MODULE:APP or a built-in agent, and the configuration file."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, redirect_stdout
from functools import partial, wraps
from importlib.metadata import EntryPoint, entry_points
from inspect import Parameter
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import anyio
import typer
from msgspec import Struct, structs
from typer.core import TyperOption

from aviso_workers.app import App
from aviso_workers.aviso.literals import printable_lines
from aviso_workers.backends import Admin, open_backend
from aviso_workers.cli.options import argument, option
from aviso_workers.config import Config
from aviso_workers.config import load as load_config
from aviso_workers.config.streams import event_streams
from aviso_workers.declare.agents import Router
from aviso_workers.errors import AvisoWorkersError, BackendError, ConfigError, DeclarationError, NotFoundError, describe
from aviso_workers.jetstream.error_codes import STREAM_NOT_FOUND
from aviso_workers.ops import aviso_admin
from aviso_workers.state import consumer_records, declarations

T = TypeVar("T")
P = ParamSpec("P")

ENTRY_POINTS = "aviso_workers.agents"
PACKAGE = Path(__file__).parents[1]

CONNECT_SECONDS = 10
"""How long each of a command's attempts to connect may take, where the configuration does not say: somebody waits for
it, and Aviso's 30 seconds, three times, are more than a minute and a half of silence."""


class ConfigSource(Struct, frozen=True):
    """The source of a command's configuration: a file, a context of the `nats` command line, an app, or the defaults.

    The commands declare `--config` only; `add_source_options` adds the other options to their parsers.
    """

    path: Path | None = None
    context: str | None = None
    """A context of the `nats` command line, which has the connection."""
    app: str | None = None
    """MODULE:APP, whose configuration it is, with the event types that it declares."""

    @classmethod
    def of_file(cls, text: str) -> ConfigSource:
        return cls(Path(text))


CONFIG = option(
    "FILE",
    "Configuration file to read. Default: the app's own, else the one that AVISO_WORKERS_CONFIG_FILE "
    "or AVISOSERVER_CONFIG_FILE names, else aviso.yaml or config/aviso.yaml, else those of an "
    "aviso-server.",
    "--config",
    "-c",
    parser=ConfigSource.of_file,
)


TARGET = argument("MODULE:APP", "Module and name of the app, e.g. mine.agents:app.", default=None)
INSTALLED_AGENT = option("NAME", "Use this installed agent instead of an app, e.g. spark-events.")


CONTEXT_HELP = (
    "Connect by this context of the nats CLI, and not by the configuration; 'selected' is the one that `nats context "
    "select` chose. Default: the one that NATS_CONTEXT names, if the configuration has no connection."
)


APP_HELP = "Use the configuration of this app, with the event types that it declares in Python."


def add_source_options(command: Any) -> None:
    """Let each command that takes `--config`, of a group or by itself, take `--context` beside it, and `--app` where
    it names no app already. One that takes the name of a stream suggests it where an event type's name was given.
    """
    for below in getattr(command, "commands", {}).values():
        add_source_options(below)
    names = [parameter.name for parameter in command.params]
    if "config" not in names:
        return
    options = [TyperOption(param_decls=["--context", "nats_context"], metavar="NAME", help=CONTEXT_HELP)]
    if not {"app", "target"} & {*names}:
        options.append(TyperOption(param_decls=["--app", "of_app"], metavar="MODULE:APP", help=APP_HELP))
    place = names.index("config") + 1
    command.params[place:place] = options
    run = command.callback

    def run_with_source(
        *, nats_context: str | None, config: ConfigSource | None, of_app: str | None = None, **others: Any
    ) -> Any:
        source = source_of(config, nats_context, of_app)
        try:
            return run(config=source, **others)
        except NotFoundError as error:
            meant = _suggested_stream(others.get("stream"), source) if error.code == STREAM_NOT_FOUND else ""
            if not meant:
                raise
            raise NotFoundError(f"{error}; {meant}", code=error.code) from error

    command.callback = run_with_source


def _suggested_stream(stream: str | None, source: ConfigSource | None) -> str:
    """Return which stream was meant by the name of an event type, or by a stream's in small letters; else nothing."""
    for name, event_type in event_streams(load(source).notification_schema).items():
        if stream is not None and stream != name and stream.lower() in (name.lower(), event_type.lower()):
            return f"did you mean {name}, the stream of the event type {event_type}?"
    return ""


def source_of(config: ConfigSource | None, nats_context: str | None, of_app: str | None) -> ConfigSource | None:
    """Return the source that the three options say together; None where none of them is given."""
    if nats_context is None and of_app is None:
        return config
    return ConfigSource(config.path if config else None, nats_context, of_app)


def find_app(target: str | None, *, agent: str | None, config: ConfigSource | None) -> App:
    """Return the app that MODULE:APP names, or one that runs the installed router `agent`.

    Raises `DeclarationError`.
    """
    if (target is None) == (agent is None):
        raise DeclarationError("say what to run: MODULE:APP, or --agent NAME")
    if target is not None:
        app = _import(target)
        return _configured(app, config)
    assert agent is not None
    app = _configured(App(agent), config)
    app.include(_router(agent))
    return app


def connected_app(config: ConfigSource | None) -> App:
    """Return an app without agents, for a command that publishes or reads notifications."""
    app = App("aviso-workers-cli")

    app.configure(shared(load(config)).with_defaults(timeout_seconds=CONNECT_SECONDS), opening=_opened_by_operator)
    return app


def _opened_by_operator(config: Config, *, owner: str = "", **listeners: Any) -> AbstractAsyncContextManager[Admin]:
    return open_backend(config, **listeners)


def named_app(app: str, config: ConfigSource | None) -> tuple[str, ConfigSource | None]:
    """Return the name of an app, and the configuration: the app's own where it is given as MODULE:APP."""
    if ":" not in app:
        return app, config
    return find_app(app, agent=None, config=config).name, structs.replace(config or ConfigSource(), app=app)


def load(config: ConfigSource | None) -> Config:
    """Return the configuration of a source. Raises `ConfigError`."""
    source = config or ConfigSource()
    if source.app is not None:
        return find_app(source.app, agent=None, config=source).config
    return load_config(source.path, context=source.context)


def shared(config: Config) -> Config:
    """Return the configuration, whose notifications other processes see.

    Raises `ConfigError` for the backend `in_memory`, in which a command would find nothing and leave nothing.
    """
    if config.notification_backend.kind == "in_memory":
        raise ConfigError(
            [
                "notification_backend.kind: in_memory is the memory of one process, so no worker and no aviso-server "
                "sees what this command does, nor it what they store; set kind: jetstream and jetstream.nats_url "
                "(for this command alone: AVISO_WORKERS_NOTIFICATION_BACKEND__KIND=jetstream), or name another file "
                "by --config"
            ]
        )
    return config


class OpenedServer(Struct, frozen=True):
    """A connection to the server of a configuration, for commands that need no agents."""

    admin: Admin
    config: Config


@asynccontextmanager
async def opened(config: Config | ConfigSource | None) -> AsyncIterator[OpenedServer]:
    """Connect to the server of a configuration for the block. Raises `ConfigError` and `BackendError`."""
    loaded = config if isinstance(config, Config) else load(config).with_defaults(timeout_seconds=CONNECT_SECONDS)
    async with open_backend(shared(loaded)) as admin:
        yield OpenedServer(admin, loaded)


def run_connected(app: App, run: Callable[[App], Awaitable[T]]) -> T:
    """Connect the app, call `run` with it, and return its result."""

    async def connect() -> T:
        async with app:
            return await run(app)

    return anyio.run(connect)


def connected(
    config: Config | ConfigSource | None, run: Callable[[OpenedServer], Awaitable[T]], *, declared: bool = False
) -> T:
    """Connect to the server of a configuration, call `run`, and return its result. `declared` is for commands about
    agents: they know the event types too that only workers have recorded.
    """

    async def connect() -> T:
        async with opened(config) as server:
            return await run(await _with_declared(server) if declared else server)

    return anyio.run(connect)


def on_server(command: Callable[Concatenate[OpenedServer, P], Awaitable[None]]) -> Callable[..., None]:
    """Return a command for typer that has `--config` as its last option, connects, and awaits `command`."""

    @wraps(command)
    def run(*, config: ConfigSource | None, **others: Any) -> None:
        connected(config, partial(command, **others))

    signature = inspect.signature(command, eval_str=True)
    option = Parameter("config", Parameter.KEYWORD_ONLY, default=CONFIG, annotation=ConfigSource | None)
    run.__signature__ = signature.replace(parameters=[*[*signature.parameters.values()][1:], option])  # type: ignore[attr-defined]
    return run


async def _with_declared(server: OpenedServer) -> OpenedServer:
    """Return the connection with the event types that workers have recorded; standard error says where they come
    from. Where the records cannot be read, there are none.
    """
    try:
        stored, unreadable = declarations.parsed(await consumer_records.entries(server.admin))
    except BackendError:
        return server
    config, told = aviso_admin.with_declared(server.config, stored)
    for text in told + unreadable:
        typer.echo(printable_lines(text), err=True)
    return OpenedServer(server.admin, config)


def _configured(app: App, config: ConfigSource | None) -> App:
    if config is not None and config.path is not None:
        app.configure(config.path)
    if config is not None and config.context is not None:
        app._use_nats_context(config.context)
    return app


def _import(target: str) -> App:
    module_name, _, name = target.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise DeclarationError(f"{target!r} names no module; say MODULE:APP, e.g. mine.agents:app")
    sys.path.insert(0, str(Path.cwd()))
    try:
        with redirect_stdout(sys.stderr):  # standard output is for what the command prints, which a pipe may read
            module = importlib.import_module(module_name)
    except SystemExit as error:  # else the command ends as if it had done its work
        raise DeclarationError(
            f"{module_name!r} exits while it is imported, with {describe(error)}; no app can be taken from it"
        ) from error
    except DeclarationError as error:
        place = "".join(f"{frame.filename}:{frame.lineno}: " for frame in _frames(error)[-1:])
        raise DeclarationError(f"{place}{error}") from error
    except AvisoWorkersError:
        raise
    except Exception as error:  # of any kind, because it is the author's code that is run here
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise DeclarationError(f"no module {module_name!r} here or installed; say MODULE:APP") from error
        # Without the frames before and behind those of its author.
        text = "".join([*traceback.format_list(_frames(error)), *traceback.format_exception_only(error)]).rstrip()
        raise DeclarationError(f"{module_name!r} cannot be imported:\n{text}") from error
    found = getattr(module, name or "app", None)
    if not isinstance(found, App):
        names = ", ".join(each for each, value in vars(module).items() if isinstance(value, App)) or "none"
        raise DeclarationError(f"{module_name!r} has no App named {name or 'app'!r}; it has: {names}")
    return found


def _frames(error: Exception) -> list[traceback.FrameSummary]:
    """Return the lines of the author's code that led to an error, that which was run last at the end."""
    ours = ("<frozen importlib", str(PACKAGE), str(importlib.__file__))
    return [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]


def settings_of_installed(names: Iterable[str]) -> dict[str, type[Struct]]:
    """Return the settings types of installed routers by name, of those with these names that have settings."""
    installed = _installed()
    routers = [_router(name) for name in names if name in installed]
    return {router.name: router._settings_type for router in routers if router._settings_type is not None}


def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


def _router(name: str) -> Router:
    found = _installed()
    if name not in found:
        raise DeclarationError(f"no agent {name!r} is installed; there are: {', '.join(sorted(found)) or 'none'}")
    try:
        router = found[name].load()
    except ImportError as error:
        raise DeclarationError(f"the agent {name!r} cannot be imported: {describe(error)}") from error
    if not isinstance(router, Router):
        raise DeclarationError(f"the entry point {name!r} of {ENTRY_POINTS} is not a Router")
    return router
