"""The leases of an app: of the leader of its timers, of who closes windows, of calls that may run at once, and of the
calls of a rate, which are in a bucket of their own. `engine.leases` and `features.limits` write them.
"""

from __future__ import annotations

import hashlib
from datetime import datetime

from msgspec import Struct

from aviso_workers.backends import Backend
from aviso_workers.backends.buckets import open_existing
from aviso_workers.errors import InvalidKeyError
from aviso_workers.jetstream.key_value import encode_key
from aviso_workers.state import bucket_names

LEASE_SECONDS = 10.0
LEADER, SLOTS = "leader", "slots"
LIMITS_KEPT_SECONDS = 2 * 86400
"""More than a call of a rate is leased ahead: what is forgotten has come to its end."""


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


class LeasedTokens(Struct, frozen=True, kw_only=True):
    """The lease of calls that some worker has taken last.

    Each call takes the time from one call to the next, so that versions with different limits share the time, and none
    begins more than its own limit lets.
    """

    until: float
    """Up to when the calls are leased: seconds since 1970 UTC, by the server's clock."""


def limits_bucket_of(app: str) -> str:
    """Return the bucket of the app's limits."""
    return bucket_names.bucket_of(app, "limits")


def limit_key_of(agent: str, fields: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Return the key of an agent's limit for these values of identifier fields, as they are in a subject."""
    if not fields:
        return f"{agent}/all"
    try:
        return encode_key(f"{agent}/{'.'.join(fields)}/{'.'.join(values)}")
    except InvalidKeyError:  # it is too long
        return f"{agent}/{hashlib.blake2b(repr((fields, values)).encode()).hexdigest()}"
