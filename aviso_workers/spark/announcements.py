"""Announcements of complete and late cycles as notifications, each published once however often a report is made.

`completeness` calls it on the driver. A cycle that the stream of its kind has is not announced again; what two reports
at about the same time both send has the same message id, which the server stores once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from datetime import UTC, datetime
from typing import Any

from anyio.from_thread import start_blocking_portal

from aviso_workers.aviso.notifications import Notify
from aviso_workers.aviso.positions import Position
from aviso_workers.config import Config
from aviso_workers.errors import NotFoundError
from aviso_workers.events import Events
from aviso_workers.sessions.session import Session, open_session

KINDS = ("cycle_complete", "cycle_late")
"""Event types with the identifier fields `event` and `cycle`; and which cycles they are for, by their columns."""
PAYLOAD_COLUMNS = ("start", "due", "expected", "arrived", "in_time", "missing", "last_arrival")
"""The columns of a cycle that its notification has in its payload."""


def announce(cycles: Sequence[Mapping[str, Any]], event: str, settings: Config) -> dict[str, int]:
    """Publish a notification for each complete and each late cycle, and return how many were new, by event type.

    Raises `InvalidNotificationError` where one has other fields or a cycle's name cannot be sent, and `BackendError`.
    """
    with start_blocking_portal() as portal:  # not anyio.run: a notebook has a loop that runs
        return portal.call(_announce, cycles, event, settings)


async def _announce(cycles: Sequence[Mapping[str, Any]], event: str, settings: Config) -> dict[str, int]:
    published = {}
    async with open_session(app="spark-report", config=settings, events=Events()) as session:
        for kind in KINDS:
            if kind in settings.notification_schema:
                announced = await _announced(session, kind, event)
                published[kind] = await session.publisher.notify_many(
                    Notify(kind, {"event": event, "cycle": name}, _payload(cycle), message_id=f"{kind}/{event}/{name}")
                    for cycle in cycles
                    if cycle[kind] and (name := cycle["cycle"]) not in announced
                )
    return published


async def _announced(session: Session, kind: str, event: str) -> Set[str]:
    try:
        replayer = await session.replayer(kind, {"event": event})
        return {one.identifier["cycle"] async for one in replayer.replay(Position(), Position())}
    except NotFoundError:  # nothing was ever published
        return set()


def _payload(cycle: Mapping[str, Any]) -> dict[str, Any]:
    """Return the payload that describes a cycle, with times that name their zone: those that Spark gives are local
    ones.
    """
    values = {name: cycle[name] for name in PAYLOAD_COLUMNS}
    return {name: each.astimezone(UTC) if isinstance(each, datetime) else each for name, each in values.items()}
