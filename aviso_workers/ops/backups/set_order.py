"""The order in which the streams of an account are backed up, so that agents on a restored set repeat and never skip.

Called by `set_creation`; pure. Streams are backed up one after the other while all are in use, so each is of another
moment. Whatever moves from one place to another is stored in the second before it leaves the first. It is lost exactly
where the first is taken after it has left and the second before it came. So a source is taken before its target:

1. The positions of all consumers, before anything else. What a position says is settled has had its effects by then:
   tables, counters, windows, outputs, dead letters, delayed messages. Notifications that are settled after that are
   handled again, as after any crash.
2. The claims of timers and leases, so that a tick whose effects are in a table may be run again and is not skipped. The
   orders of operators, so that what workers have recorded of an order by then is in a later bucket.
3. Windows. A window leaves its bucket when its result is published, or a dead letter.
4. Tables, counters and all other buckets.
5. Dead letters, then retries, which are copied from them.
6. Delayed messages, which go to the streams of events.
7. The streams of events and all others. They come last so that they hold every sequence that the state before them
   knows: a stream that is restored with fewer stores other notifications under sequences that tables, windows and
   failure counts remember as handled.

A mirror, and a stream with sources, is taken before its origin: it goes on after the last sequence that it has, so the
origin must have at least as many.

Where things move in both directions no order is safe, and the stream is taken on both sides of the others (`twice`): it
is restored with what it had at either time. Dead letters are, where there are windows: windows become dead letters, and
`dead-letters retry` puts them back. So are streams that lose what is settled (a work queue, or by interest): they have
no position that could be taken before the rest.

What is not safe: what an author's code moves between two tables of its own, and a tick that was claimed and not done
when its effects were backed up, which is run at most once anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aviso_workers.errors import BackupError
from aviso_workers.jetstream.info import StreamConfig
from aviso_workers.jetstream.specs import BUCKET
from aviso_workers.state import delayed_messages, own_buckets, own_streams
from aviso_workers.state.own_streams import COUNTERS, DEAD_LETTERS, RETRIES

LIMITS = "limits"
"""The retention of a stream that keeps settled messages."""


def order(configs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the names of streams in the order in which they are to be backed up, by their configurations.

    Raises `BackupError` where streams are sources of one another: none of them may be taken before the other.
    """
    found: list[str] = []
    copies = {name: [copy for copy in sorted(configs) if name in _origins(configs[copy])] for name in configs}

    def take(name: str, on_behalf_of: tuple[str, ...]) -> None:
        if name in on_behalf_of:
            raise BackupError(
                f"{' and '.join(on_behalf_of)} are sources of one another, so no order of their backups is valid; "
                "back each of them up by its name"
            )
        if name in found:
            return
        for copy in copies[name]:
            take(copy, (*on_behalf_of, name))
        found.append(name)

    for name in sorted(configs, key=lambda name: (_rank(name, configs[name]), name)):
        take(name, ())
    return found


def twice(configs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the names of streams that are to be backed up once more, before all others."""
    losing = [name for name, config in configs.items() if StreamConfig(config).retention != LIMITS]
    buckets = [name.removeprefix(BUCKET) for name in configs if name.startswith(BUCKET)]
    windows = "windows" in map(own_buckets.kind_of, buckets)
    dead_letters = [name for name in configs if windows and own_streams.app_of(DEAD_LETTERS, name)]
    return sorted({*losing, *dead_letters})


def _rank(name: str, config: Mapping[str, Any]) -> int:
    if name.startswith(BUCKET):
        return {"orders": 2, "timers": 2, "leases": 2, "live": 2, "windows": 3}.get(
            own_buckets.kind_of(name.removeprefix(BUCKET)), 4
        )
    if delayed_messages.event_stream_of(name):
        return 7
    for kind, rank in ((COUNTERS, 4), (DEAD_LETTERS, 5), (RETRIES, 6)):
        if own_streams.app_of(kind, name):
            return rank
    return 8 if _origins(config) else 9


def _origins(config: Mapping[str, Any]) -> set[str]:
    """Return the streams of this account that a stream copies."""
    return {each.name for each in StreamConfig(config).origins if not each.external}
