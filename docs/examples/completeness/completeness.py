"""Watches which steps of each forecast cycle have come, and tells when a cycle is complete and when it is late."""

from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

import msgspec
from msgspec.structs import replace

from aviso_workers import App, Notification, Notify, Tick

app = App("completeness", config="aviso.yaml")

STEPS = frozenset(range(0, 25, 6))
TIMES = (time(0), time(12))
DUE = timedelta(hours=6)
"""How long after its start a cycle must be complete."""
WATCHED = timedelta(days=1)
"""How long after that it is looked for what is late."""
KEPT = timedelta(days=7)
WHERE = {"class": "od"}


class FieldKey(msgspec.Struct, frozen=True):
    date: date
    time: time
    step: int


class Cycle(msgspec.Struct, frozen=True):
    steps: frozenset[int] = frozenset()
    newest: datetime = datetime(1970, 1, 1, tzinfo=UTC)
    """When the last of them was stored."""
    completed_by: int = 0
    """The sequence of the notification with which it was complete."""
    told_late: bool = False


cycles = app.table("cycles", Cycle, default=Cycle())


def name_of(start: datetime) -> str:
    return f"{start:%Y%m%dT%H%M}"


@app.agent("field", where=WHERE | {"step": sorted(STEPS)}, concurrency=8)
async def note(notification: Notification[Any, FieldKey]) -> Notify | None:
    """Add a step to its cycle; the notification that completes the cycle announces it."""
    key, sequence = notification.key, notification.sequence
    start = datetime.combine(key.date, key.time, UTC)

    def add(cycle: Cycle) -> Cycle:
        if cycle.completed_by:
            return cycle
        steps, newest = cycle.steps | {key.step}, max(cycle.newest, notification.time)
        return replace(cycle, steps=steps, newest=newest, completed_by=sequence if steps == STEPS else 0)

    cycle = await cycles.update(name_of(start), add)
    if cycle.completed_by != sequence:
        return None
    told = {"late": cycle.newest > start + DUE, "completed": cycle.newest}
    return Notify("cycle_complete", {"event": "field", "cycle": name_of(start)}, told)


def due_before(now: datetime) -> Iterator[datetime]:
    """The starts of the cycles that were due lately."""
    days = ((now - DUE).date() - timedelta(days=n) for n in range(WATCHED.days + 2))
    starts = (datetime.combine(day, at, UTC) for day in days for at in TIMES)
    return (start for start in starts if now - WATCHED < start + DUE <= now)


@app.every("1m", singleton=True)
async def tell_late(tick: Tick) -> None:
    """Announce each cycle of which a step was not stored when it was due."""
    for start in due_before(tick.time):
        cycle = await cycles.get(name_of(start))
        if cycle.completed_by or cycle.told_late:
            continue
        # Read from the stream: the agent may be behind, as after an outage.
        wanted = WHERE | {"date": f"{start:%Y%m%d}", "time": f"{start:%H%M}"}
        stored = {int(field.identifier["step"]) async for field in app.replay("field", wanted, to_date=start + DUE)}
        if missing := sorted(STEPS - stored):
            identifier, told = {"event": "field", "cycle": name_of(start)}, {"missing": missing, "due": start + DUE}
            await app.notify("cycle_late", identifier, told, message_id=f"late.{name_of(start)}")
            await cycles.update(name_of(start), lambda cycle: replace(cycle, told_late=True))


@app.every("1h", singleton=True)
async def forget(tick: Tick) -> None:
    for name in await cycles.items():
        if name < name_of(tick.time - KEPT):
            await cycles.delete(name)
