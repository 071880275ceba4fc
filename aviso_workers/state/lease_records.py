"""The leases of an app: of the leader of its timers, of who closes windows, and of calls that may run at once.
`engine.leases` and `features.limits.places` write them.
"""

from __future__ import annotations

from aviso_workers.backends import Backend
from aviso_workers.backends.buckets import open_existing
from aviso_workers.state import bucket_names

LEASE_SECONDS = 10.0
LEADER, SLOTS = "leader", "slots"


def bucket_of(app: str) -> str:
    """Return the bucket of the app's leases."""
    return bucket_names.bucket_of(app, "leases")


async def leader(backend: Backend, app: str) -> str:
    """Return the host and the process of the worker that leads the app's timers; empty where none does.

    Raises `BackendError`.
    """
    bucket = await open_existing(backend, bucket_of(app), ttl_seconds=LEASE_SECONDS, own=True)
    lease = await bucket.get(LEADER) if bucket is not None else None
    return lease.value.decode(errors="replace") if lease is not None else ""
