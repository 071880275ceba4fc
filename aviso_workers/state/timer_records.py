"""The ticks that the timers of an app have claimed. `features.timers` writes them."""

from __future__ import annotations

from datetime import datetime

from msgspec import Struct

from aviso_workers.backends import Backend
from aviso_workers.backends.buckets import open_existing
from aviso_workers.jetstream.fields import Time
from aviso_workers.jetstream.key_value import record_of
from aviso_workers.state import bucket_names


def bucket_of(app: str) -> str:
    """Return the bucket of the ticks that the app's timers have claimed."""
    return bucket_names.bucket_of(app, "timers")


async def claims(backend: Backend, app: str) -> dict[str, Claim]:
    """Return the claims of an app, by timer. Raises `BackendError`."""
    bucket = await open_existing(backend, bucket_of(app), own=True)
    entries = await bucket.entries() if bucket is not None else []
    return {each.key: claim for each in entries if (claim := record_of(each, Claim))}


class Claim(Struct, frozen=True, kw_only=True):
    """The last tick of a timer that some leader has begun, or (token 0) from when on there are ticks to run."""

    time: Time
    token: int = 0
    schedule: str
    """`Schedule.text` of the timer whose tick it was."""
    since: Time | None = None
    """Since when every tick of the schedule was begun; None after a claim that could not be read."""
    before: Time | None = None
    """The last tick that was begun before `since`. Those between the two were missed."""

    def may_have_begun(self, tick: datetime) -> bool:
        """Return whether a leader has begun this tick, or it is not known that it was missed."""
        if tick > self.time or self.since is None:
            return tick <= self.time
        return tick >= self.since or (self.before is not None and tick <= self.before)
