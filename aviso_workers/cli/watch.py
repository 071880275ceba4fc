"""`watch` and `replay`: print notifications as CloudEvents, one JSON document a line."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Annotated, Any

import anyio
import typer

from aviso_workers.app import App
from aviso_workers.aviso.notifications import Notification
from aviso_workers.cli.arguments import parse_where
from aviso_workers.cli.output import print_json, skipped_reported
from aviso_workers.cli.targets import ConfigOption, ConfigSource, connected_app

__all__ = ["replay", "watch"]

Event = Annotated[str, typer.Argument(metavar="EVENT", help="The event type, e.g. mars.")]
Filter = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE...", help='A value, or JSON: step={"gte":24}')]
FromId = Annotated[str | None, typer.Option("--from-id", metavar="ID", help="First sequence, inclusive.")]
FromDate = Annotated[
    str | None, typer.Option("--from-date", metavar="DATE", help="First time, inclusive, e.g. 2026-11-20T06:00:00Z.")
]
ToId = Annotated[str | None, typer.Option("--to-id", metavar="ID", help="Last sequence, inclusive.")]
ToDate = Annotated[str | None, typer.Option("--to-date", metavar="DATE", help="Last time, inclusive.")]

Last = Annotated[
    int | None,
    typer.Option("--last", metavar="NUMBER", min=1, help="Only the last so many of those that match."),
]
SpatialArrays = Annotated[
    bool,
    typer.Option("--spatial-arrays", help="Polygons and point clouds as arrays, as aviso-server 0.10 has them."),
]


def watch(
    event: Event,
    where: Filter = None,
    from_id: FromId = None,
    from_date: FromDate = None,
    spatial_arrays: SpatialArrays = False,
    config: ConfigOption = None,
) -> None:
    """Print notifications as they come, until Ctrl-C.

    Example: aviso-workers watch mars class=od --from-date 2026-11-20T06:00:00Z
    """
    wanted = parse_where(where or [])
    anyio.run(
        _print, config, spatial_arrays, lambda app: app.watch(event, wanted, from_id=from_id, from_date=from_date)
    )


def replay(
    event: Event,
    where: Filter = None,
    from_id: FromId = None,
    from_date: FromDate = None,
    to_id: ToId = None,
    to_date: ToDate = None,
    last: Last = None,
    spatial_arrays: SpatialArrays = False,
    config: ConfigOption = None,
) -> None:
    """Print stored notifications, from the first to the last unless other positions are given.

    What is printed can be published elsewhere by `notify --file -`.

    Example: aviso-workers replay mars --from-id 1000 --to-id 2000
    """
    wanted = parse_where(where or [])

    def read(app: App) -> AsyncIterator[Any]:
        found = app.replay(event, wanted, from_id=from_id, from_date=from_date, to_id=to_id, to_date=to_date)
        return found if last is None else _last(found, last)

    anyio.run(_print, config, spatial_arrays, read)


async def _last(notifications: AsyncGenerator[Notification[Any], None], count: int) -> AsyncIterator[Notification[Any]]:
    """Yield the last of them. All are read, since a server does not find the last ones of a filter."""
    kept: deque[Notification[Any]] = deque(maxlen=count)
    async with aclosing(notifications):
        async for notification in notifications:
            kept.append(notification)
    for notification in kept:
        yield notification


async def _print(config: ConfigSource | None, spatial_arrays: bool, read: Callable[[App], AsyncIterator[Any]]) -> None:
    app = connected_app(config)
    base_url = app.config.application.base_url
    with skipped_reported(app.events):
        async with app, aclosing(read(app)) as notifications:  # type: ignore[type-var]
            async for notification in notifications:
                print_json(notification.cloud_event(base_url, spatial_arrays=spatial_arrays))
