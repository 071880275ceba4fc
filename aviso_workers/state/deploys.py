"""The last deploys of an app: when a worker first started with other code or declarations than the worker before it.

They are kept in the bucket of `consumer_records`, under `<app>/deploys`, beside what the app declares (`declarations`),
and changed by compare-and-set: of many workers that start at once, one adds an entry. Code that starts again after
other code, as in a rolling deploy or after a rollback, gets no second entry: its first one moves to the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from msgspec import Struct, structs

from aviso_workers.aviso.codec import read_json
from aviso_workers.backends import Backend
from aviso_workers.errors import UndecodableError
from aviso_workers.jetstream import key_value
from aviso_workers.jetstream.key_value import Entry
from aviso_workers.state import consumer_records
from aviso_workers.state.kept import Kept

__all__ = ["KEPT", "Deploy", "key_of", "note", "parsed"]

END = "deploys"
MAX_DEPLOYS = 10
KEPT = (
    Kept(
        bucket=consumer_records.BUCKET,
        key=f"<app>/{END}",
        holds=f"the last {MAX_DEPLOYS} deploys of the app, and what changed (`Deploy`)",
        until="until `agents rm` of the app",
    ),
)


class Deploy(Struct, frozen=True, kw_only=True):
    """Code and declarations of an app, as workers have started with them. Times are by the clocks of these workers."""

    time: datetime
    """When the first worker started with them."""
    version: str
    """Of aviso-workers."""
    fingerprint: str
    """The digest of the declarations and of the sources."""
    changed: tuple[str, ...] = ()
    """What was different, in words, when the first worker started."""
    again: datetime | None = None
    """When a worker last started with them after one had started with others; None where none has."""


async def note(backend: Backend, app: str, started: Deploy) -> None:
    """Record that a worker has started so. Raises `BackendError`."""

    def noted(known: tuple[Deploy, ...]) -> tuple[Deploy, ...]:
        if known and known[-1].fingerprint == started.fingerprint:
            return known
        same = [each for each in known if each.fingerprint == started.fingerprint]
        newest = structs.replace(same[-1], again=started.time) if same else started
        return (*(each for each in known if each not in same), newest)[-MAX_DEPLOYS:]

    bucket = await consumer_records.bucket(backend)
    await key_value.compare_and_set(bucket, key_of(app), read=_read, change=noted)


def parsed(entries: Iterable[Entry]) -> dict[str, tuple[Deploy, ...]]:
    """Return the deploys among the entries of the bucket, by app, the newest last."""
    found = [(each.key.split("/"), each) for each in entries]
    return {key[0]: _read(each) for key, each in found if len(key) == 2 and key[1] == END}


def key_of(app: str) -> str:
    return f"{app}/{END}"


def _read(entry: Entry | None) -> tuple[Deploy, ...]:
    """Return the deploys of an entry; none where they cannot be read."""
    try:
        return read_json(entry.value, tuple[Deploy, ...]) if entry is not None else ()
    except UndecodableError:
        return ()
