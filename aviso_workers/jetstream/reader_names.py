"""The names of the consumers by which a stream of several apps is read without acks, for replays and listings.

A server's permissions bind whole names. So readers of a stream that several apps share have the names of a pool, which
belongs to one app: nobody else may pull from them, change or delete them. `backends.jetstream.readers` takes a name
that is free, and `ops.permissions` gives the right to each. Who reads as an operator, who may do everything, and who
reads a stream of the own app uses names at random.

The names contain no `__`, as those of agents' consumers do. An app's name is followed by the number alone, so no two
apps have one name.
"""

from __future__ import annotations

from aviso_workers.jetstream.specs import OURS, SCHEDULES

SPARK = "aviso_workers_spark"
"""The owner of the readers of Spark's drivers and tasks."""
COUNT = 16
"""How many readers of a stream an app may have at once, those of all its workers together."""
COUNT_OF_SPARK = 64
"""The same for all queries of Spark: each task that reads has one."""


def names(owner: str, stream: str) -> tuple[str, ...]:
    """Return the names that readers of an owner may have on a stream; none where they may have any."""
    if not owner or not _is_shared(owner, stream):
        return ()
    return tuple(f"{owner}-r{number}" for number in range(COUNT_OF_SPARK if owner == SPARK else COUNT))


def _is_shared(app: str, stream: str) -> bool:
    """Return whether other apps may read a stream that this one may read, as it is no bucket of its own state."""
    if stream.startswith(OURS):
        return stream.startswith(SCHEDULES)
    return not stream.startswith(f"KV_{app}__")
