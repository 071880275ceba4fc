"""The leases of an app: of the leader of its timers, of who closes windows, and of calls that may run at once.
`engine.leases` and `features.limits.places` write them.
"""

from __future__ import annotations

from aviso_workers.backends import Backend
from aviso_workers.backends.buckets import open_existing
from aviso_workers.state.kept import Kept

__all__ = ["KEPT", "LEADER", "LEASES", "LEASE_SECONDS", "PLACES", "bucket_of", "leader"]

LEASES = "_leases"
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
)


def bucket_of(app: str) -> str:
    """Return the bucket of the app's leases."""
    return f"{app}{LEASES}"


async def leader(backend: Backend, app: str) -> str:
    """Return the host and the process of the worker that leads the app's timers; empty where none does.

    Raises `BackendError`.
    """
    bucket = await open_existing(backend, bucket_of(app), ttl_seconds=LEASE_SECONDS, own=True)
    lease = await bucket.get(LEADER) if bucket is not None else None
    return lease.value.decode(errors="replace") if lease is not None else ""
