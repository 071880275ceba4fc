"""The leases of an app's leader, and the ticks that its timers have claimed. `engine.leases` and `features.timers`
write them.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime

from msgspec import Struct

from aviso_workers.aviso.codec import read_json
from aviso_workers.backends import Backend
from aviso_workers.backends.buckets import open_existing
from aviso_workers.errors import (
    UndecodableError,
)
from aviso_workers.jetstream.fields import Time
from aviso_workers.state.kept import Kept

__all__ = [
    "CLAIMS",
    "KEPT",
    "LEADER",
    "LEASES",
    "LEASE_SECONDS",
    "PLACES",
    "Claim",
    "buckets_of",
    "claims",
    "leader",
    "leases_of",
]

LEASES, CLAIMS = "_leases", "_timers"
LEASE_SECONDS = 10.0
LEADER, PLACES = "leader", "places"
KEPT = (
    Kept(
        bucket=f"<app>{LEASES}",
        key=f"{LEADER}, or windows/<agent>",
        holds="the worker that runs the timers of the leader, or closes windows",
        until=f"{LEASE_SECONDS:g} s after it was renewed",
    ),
    Kept(
        bucket=f"<app>{LEASES}",
        key=f"{PLACES}/<agent>/<fields of the key>/<their values>/<number>",
        holds="the worker that makes one of the calls that may run at once; below `wanted`, one that waits for that",
        until=f"{LEASE_SECONDS:g} s after it was renewed",
    ),
    Kept(
        bucket=f"<app>{CLAIMS}",
        key="<timer>",
        holds="the last tick that a leader has begun (`Claim`)",
        until="for ever",
    ),
)


def buckets_of(app: str) -> tuple[str, str]:
    """Return the buckets of the app's leases, and of the ticks that its timers claimed."""
    return f"{app}{LEASES}", f"{app}{CLAIMS}"


def leases_of(app: str) -> str:
    """Return the bucket of the app's leases."""
    return buckets_of(app)[0]


async def leader(backend: Backend, app: str) -> str:
    """Return the host and the process of the worker that leads the app's timers; empty where none does.

    Raises `BackendError`.
    """
    bucket = await open_existing(backend, buckets_of(app)[0], ttl_seconds=LEASE_SECONDS, own=True)
    lease = await bucket.get(LEADER) if bucket is not None else None
    return lease.value.decode(errors="replace") if lease is not None else ""


async def claims(backend: Backend, app: str) -> dict[str, Claim]:
    """Return the claims of an app, by timer. Raises `BackendError`."""
    bucket = await open_existing(backend, buckets_of(app)[1], own=True)
    found = {}
    for entry in await bucket.entries() if bucket is not None else []:
        with suppress(UndecodableError):
            found[entry.key] = read_json(entry.value, Claim)
    return found


class Claim(Struct, frozen=True, kw_only=True):
    """The last tick of a timer that some leader has begun, or (token 0) from when on there are ticks to run."""

    time: Time
    token: int = 0
    schedule: str = ""
    """`Schedule.text` of the timer whose tick it was; empty where an older version has claimed it."""
    since: Time | None = None
    """Since when every tick of the schedule was begun; None where that is not known, as for an older version."""
    before: Time | None = None
    """The last tick that was begun before `since`. Those between the two were missed."""

    def may_have_begun(self, tick: datetime) -> bool:
        """Return whether a leader has begun this tick, or it is not known that it was missed."""
        if tick > self.time or self.since is None:
            return tick <= self.time
        return tick >= self.since or (self.before is not None and tick <= self.before)
