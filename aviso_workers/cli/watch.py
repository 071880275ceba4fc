"""`watch` and `replay`: print notifications, as a table at a terminal and as CloudEvents for programs."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import anyio
import msgspec
import typer
from msgspec import Struct

from aviso_workers.app import App
from aviso_workers.aviso import positions, schema
from aviso_workers.aviso.notifications import Notification
from aviso_workers.aviso.positions import Position
from aviso_workers.cli import completion
from aviso_workers.cli.arguments import parse_where
from aviso_workers.cli.options import argument, end_where, filter_argument, flag, option
from aviso_workers.cli.output import Columns, echo, print_json, skipped_reported, time_text
from aviso_workers.cli.targets import CONFIG, ConfigSource, connected_app
from aviso_workers.config import Config, streams
from aviso_workers.errors import InvalidNotificationError, InvalidPositionError, NotFoundError
from aviso_workers.task_groups import task_group

FROM, TO = ("--from-id", "--from-date"), ("--to-id", "--to-date")
NOTIFICATIONS = ("id", "stored", "identifier", "payload")

Found = AsyncGenerator[Notification[Any], None]
Show = Callable[[Notification[Any]], None]

EVENT = argument(
    "EVENT", "The event type, e.g. mars. Default: all event types.", autocompletion=completion.event_types, default=None
)
FILTER = filter_argument(
    "Print only notifications", more=" Without EVENT, event types that lack one of the keys are left out."
)
FROM_ID = option("ID", "Begin at this sequence, inclusive.")
FROM_DATE = option("DATE", "Begin at this time, inclusive, e.g. 2026-11-20T06:00:00Z.")
TO_ID = option("ID", "End at this sequence, inclusive. Default: the last one.")
TO_DATE = option("DATE", "End at this time, inclusive. Default: now.")

AS_JSON = flag("--json", "Print CloudEvents, one a line, also at a terminal. A pipe or a file always gets them.")
LAST = option("N", "Print only this many notifications, the last ones that match. Default: all.", min=1)
SPATIAL_ARRAYS = flag(
    "--spatial-arrays",
    "Print polygons and point clouds as arrays, as aviso-server 0.10 and newer do. Default: as text.",
)


def watch(
    event: str | None = EVENT,
    where: list[str] | None = FILTER,
    from_id: str | None = FROM_ID,
    from_date: str | None = FROM_DATE,
    spatial_arrays: bool = SPATIAL_ARRAYS,
    as_json: bool = AS_JSON,
    config: ConfigSource | None = CONFIG,
) -> None:
    """Print notifications as they come, until Ctrl-C.

    Example: aviso-workers watch mars class=od --from-date 2026-11-20T06:00:00Z
    """
    app = connected_app(config)
    selection = _selection(app.config, event, where or (), ids={"--from-id": from_id})
    start = positions.position(from_id, from_date, names=FROM)

    async def run(show: Show) -> None:
        async def watch_one(event_type: str) -> None:
            found = app.watch(event_type, selection.where, from_id=start.sequence, from_date=start.time)
            async with aclosing(found):
                async for notification in found:
                    show(notification)

        async with task_group() as tasks:
            for event_type in selection.event_types:
                tasks.start_soon(watch_one, event_type)

    _run(app, run, spatial_arrays=spatial_arrays, as_json=as_json)


def replay(
    event: str | None = EVENT,
    where: list[str] | None = FILTER,
    from_id: str | None = FROM_ID,
    from_date: str | None = FROM_DATE,
    to_id: str | None = TO_ID,
    to_date: str | None = TO_DATE,
    last: int | None = LAST,
    spatial_arrays: bool = SPATIAL_ARRAYS,
    as_json: bool = AS_JSON,
    config: ConfigSource | None = CONFIG,
) -> None:
    """Print stored notifications, from the first to the last unless other positions are given.

    Without EVENT, the event types come one after the other. Exit with 1 if a stored message is no notification of its
    event type, or if an event type has no stream: each is named on standard error, and the others are printed.
    `notify --file -` publishes elsewhere what this prints.

    Example: aviso-workers replay mars --from-id 1000 --to-id 2000
    """
    app = connected_app(config)
    selection = _selection(app.config, event, where or (), ids={"--from-id": from_id, "--to-id": to_id})
    start = positions.position(from_id, from_date, names=FROM)
    end = positions.position(to_id, to_date, names=TO)
    _refuse_reversed(start, end)

    async def run(show: Show) -> None:
        kept = list[Notification[Any]]()
        none = True
        event_types = selection.event_types if selection.is_named else await _stored(app, selection.event_types)
        for event_type in event_types:
            found = app.replay(
                event_type,
                selection.where,
                from_id=start.sequence,
                from_date=start.time,
                to_id=end.sequence,
                to_date=end.time,
            )
            async with aclosing(found):
                if last is not None:
                    kept += await _last(found, last)
                    continue
                async for notification in found:
                    show(notification)
                    none = False
        if not selection.is_named:
            kept.sort(key=lambda notification: notification.time)
        for notification in kept[-last:] if last is not None else ():
            show(notification)
        if none and not kept:
            typer.echo("no notifications match", err=True)
        end_where(len(event_types) < len(selection.event_types))

    _run(app, run, spatial_arrays=spatial_arrays, as_json=as_json)


def _refuse_reversed(start: Position, end: Position) -> None:
    """Raise `InvalidPositionError` where the end is before the start. Only a server compares an id with a date."""
    if start.sequence is not None and end.sequence is not None and end.sequence < start.sequence:
        raise InvalidPositionError(f"--to-id {end.sequence} is before --from-id {start.sequence}")
    if start.time is not None and end.time is not None and end.time < start.time:
        raise InvalidPositionError("--to-date is before --from-date")


class _Selection(Struct, frozen=True):
    """The event types that are read, and the filter."""

    event_types: Sequence[str]
    where: Mapping[str, Any]
    is_named: bool
    """Whether it is the one event type that was named."""


def _selection(config: Config, event: str | None, pairs: Sequence[str], *, ids: Mapping[str, str | None]) -> _Selection:
    """Return what the arguments select. The first pair may be in the place of the event type, as in `watch class=od`.

    Raises `InvalidNotificationError` where no event type has the keys of the filter, and `InvalidPositionError` where
    an id is given for several event types.
    """
    if event is not None and "=" not in event:
        return _Selection((event,), parse_where(pairs), True)
    where = parse_where([event, *pairs] if event else pairs)
    given = next((name for name, value in ids.items() if value is not None), None)
    if given:
        raise InvalidPositionError(f"{given}: an id is of one event type: say which, or give a date")
    event_types = config.notification_schema
    having = [name for name, declared in event_types.items() if where.keys() <= schema.filter_fields(declared)]
    if not event_types:
        raise InvalidNotificationError("the configuration has no event type")
    if not having:
        raise InvalidNotificationError(f"no event type of the configuration has all of the keys {', '.join(where)}")
    for name in event_types.keys() - having:
        echo(f"{name} is left out: it lacks a key of the filter", err=True)
    return _Selection(having, where, False)


async def _stored(app: App, event_types: Iterable[str]) -> list[str]:
    """Return the event types that have a stream, and name the others on standard error.

    Raises `NotFoundError` where none has one, and what keeps a stream from being read.
    """
    found = []
    for name in event_types:
        spec = streams.event_stream(name, app.config.notification_schema[name], app.config)
        try:
            await app.session.provisioner.require_usable(spec)
        except NotFoundError as error:
            echo(f"{name} is not read: {error}", err=True)
            missing = error
        else:
            found.append(name)
    if not found:
        raise missing
    return found


async def _last(notifications: Found, count: int) -> Iterable[Notification[Any]]:
    """Return the last of them. All are read, since a server does not find the last ones of a filter."""
    kept = deque[Notification[Any]](maxlen=count)
    async for notification in notifications:
        kept.append(notification)
    return kept


def _run(app: App, run: Callable[[Show], Awaitable[None]], *, spatial_arrays: bool, as_json: bool) -> None:
    """Connect the app, and call `run` with a function that prints one notification."""
    base_url = app.config.application.base_url
    rows = Columns(*NOTIFICATIONS)

    def show(notification: Notification[Any]) -> None:
        # Not by the console, which takes an environment variable for a terminal: a pipe would get a table then.
        if as_json or not sys.stdout.isatty():
            print_json(notification.cloud_event(base_url, spatial_arrays=spatial_arrays))
        else:
            rows.print([_row(notification)])

    async def connected() -> None:
        with skipped_reported(app.events) as skipped:
            async with app:
                await run(show)
        end_where(skipped())

    anyio.run(connected)


def _row(notification: Notification[Any]) -> tuple[str, ...]:
    identifier = " ".join(f"{key}={value}" for key, value in notification.identifier.items())
    payload = notification.payload
    text = f"{len(payload)} bytes" if isinstance(payload, bytes) else msgspec.json.encode(payload).decode()
    return notification.id, time_text(notification.time), identifier, text
