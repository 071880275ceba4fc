"""The leases of an app: of the leader of its timers, of who closes windows, and of calls that may run at once.
`engine.leases` and `features.limits` write them.
"""

from __future__ import annotations

from datetime import datetime

from msgspec import Struct

from aviso_workers.backends import Backend
from aviso_workers.backends.buckets import open_existing
from aviso_workers.state import bucket_names

LEASE_SECONDS = 10.0
LEADER, SLOTS = "leader", "slots"


def bucket_of(app: str) -> str:
    """Return the bucket of the app's leases."""
    return bucket_names.bucket_of(app, "leases")


class Leader(Struct, frozen=True, kw_only=True):
    """Who leads the timers of an app."""

    name: str = ""
    """The host and the process of the worker; empty where none leads."""
    renewed: datetime | None = None
    """When the last lease was renewed or given back, by the server's clock; None where that is not known."""


async def leader(backend: Backend, app: str) -> Leader:
    """Return who leads the app's timers. Raises `BackendError`."""
    bucket = await open_existing(backend, bucket_of(app), ttl_seconds=LEASE_SECONDS, own=True)
    if bucket is None:
        return Leader()
    if (lease := await bucket.newest(LEADER)) is not None:
        return Leader(name="" if lease.deleted else lease.value.decode(errors="replace"), renewed=lease.time)
    info = await backend.stream_info(f"KV_{bucket_of(app)}")
    return Leader(renewed=None if info.messages else info.last_stored)  # else it may be another lease's time
