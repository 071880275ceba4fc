"""Cycles told of as notifications, each once however often a report is made.

`completeness` calls it on the driver. A cycle that the stream of its kind has is not told of again; what two reports
at about the same time both send has the same message id, which the server stores once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from datetime import UTC, datetime
from typing import Any

from anyio.from_thread import start_blocking_portal

from aviso_workers.aviso.notifications import Notify
from aviso_workers.aviso.positions import Position
from aviso_workers.config import Config
from aviso_workers.engine.session import Session, open_session
from aviso_workers.errors import NotFoundError
from aviso_workers.events import Events

__all__ = ["KINDS", "announce"]

KINDS = ("cycle_complete", "cycle_late")
"""Event types with the identifier fields `event` and `cycle`; and which cycles they are for, by their columns."""
TOLD = ("start", "due", "expected", "arrived", "in_time", "missing", "last_arrival")
"""What a payload tells of a cycle."""


def announce(cycles: Sequence[Mapping[str, Any]], event: str, settings: Config) -> dict[str, int]:
    """Return how many cycles were told of, by those event types that the configuration has.

    Raises `InvalidNotificationError` where one has other fields or a cycle's name cannot be sent, and `BackendError`.
    """
    with start_blocking_portal() as portal:  # not anyio.run: a notebook has a loop that runs
        return portal.call(_announce, cycles, event, settings)


async def _announce(cycles: Sequence[Mapping[str, Any]], event: str, settings: Config) -> dict[str, int]:
    known = [kind for kind in KINDS if kind in settings.notification_schema]
    async with open_session(app="spark-report", config=settings, events=Events()) as session:
        return {kind: await _tell(session, kind, event, (cycle for cycle in cycles if cycle[kind])) for kind in known}


async def _tell(session: Session, kind: str, event: str, cycles: Iterable[Mapping[str, Any]]) -> int:
    told = await _told(session, kind, event)
    return await session.publisher.notify_many(
        Notify(kind, {"event": event, "cycle": name}, _payload(cycle), f"{kind}/{event}/{name}")
        for cycle in cycles
        if (name := cycle["cycle"]) not in told
    )


async def _told(session: Session, kind: str, event: str) -> Set[str]:
    try:
        replayer = await session.replayer(kind, {"event": event})
        return {one.identifier["cycle"] async for one in replayer.replay(Position(), Position())}
    except NotFoundError:  # nothing was ever published
        return set()


def _payload(cycle: Mapping[str, Any]) -> dict[str, Any]:
    """Times that Spark gives have this process's zone and do not say so."""
    values = {name: cycle[name] for name in TOLD}
    return {name: each.astimezone(UTC) if isinstance(each, datetime) else each for name, each in values.items()}
