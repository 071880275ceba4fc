"""The streams that we make beside those of event types, by name.

A server's permissions bind whole names. So each app has streams of its own for its dead letters, retries and counters:
`of_app` names them.
"""

from __future__ import annotations

from aviso_workers.backends import Admin

DEAD_LETTERS, COUNTERS = "aviso_workers_dead_letters", "aviso_workers_counters"
RETRIES = "aviso_workers_retries"
"""Dead letters that their agents are to handle again. Of these three, each app has a stream: see `of_app`."""
AUDIT = "aviso_workers_audit"
"""What operators have done from the console."""
DRILL, DRILL_MIRROR = "aviso_workers_drill", "aviso_workers_drill_mirror"


def of_app(kind: str, app: str) -> str:
    """Return the name of an app's stream of `DEAD_LETTERS`, `RETRIES` or `COUNTERS`."""
    return f"{kind}__{app}"


def app_of(kind: str, stream: str) -> str:
    """Return the app whose stream of this kind it is; empty where it is none."""
    before, _, app = stream.partition("__")
    return app if before == kind else ""


async def apps_with(admin: Admin, kind: str) -> list[str]:
    """Return the apps that have a stream of this kind, in order. Raises `BackendError`."""
    return sorted(filter(None, (app_of(kind, stream) for stream in await admin.stream_names())))
