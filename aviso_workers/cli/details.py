"""The details of one stream or consumer: its state and its configuration for people, the server's answer for programs.

Called by `streams info` and `consumers show`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Annotated, TypeVar

import typer

from aviso_workers.aviso import literals
from aviso_workers.aviso.literals import SECOND
from aviso_workers.cli.options import flag
from aviso_workers.cli.output import print_json, print_record
from aviso_workers.jetstream import fields
from aviso_workers.jetstream.info import SILENT_NANOSECONDS, Cluster, ConsumerInfo, StreamInfo

AsAnswered = Annotated[bool, flag("--json", "Print the server's whole answer as one JSON document.")]
T = TypeVar("T", StreamInfo, ConsumerInfo)


def print_details(found: T, state: Callable[[T], Iterable[tuple[str, str]]], *, as_json: bool) -> None:
    """Print what `state` says of a stream or consumer, and below it the configuration without its zero values; or the
    server's answer as JSON.
    """
    if as_json:
        print_json(found.answer)
        return
    print_record(state(found))
    typer.echo()
    print_record(fields.configured(found.config))


def replicas(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Yield the leader and the followers of a stream or consumer; of a server without a cluster, nothing."""
    if not cluster.name:
        return
    yield "cluster", cluster.name
    yield "leader", cluster.leader or "none"
    for follower in cluster.followers:
        heard = follower.active / SECOND
        if follower.offline or follower.active > SILENT_NANOSECONDS:
            state = f"not heard of for {heard:.0f} s; then it lagged by {follower.lag}"
        else:
            state = (
                f"{'current' if follower.current else 'not current'}, lag {follower.lag}, heard of {heard:.1f} s ago"
            )
        yield "follower", f"{follower.name}: {state}"


def time_text(time: datetime | None) -> str:
    """Return a time to the second, with its zone; None is `unknown`."""
    return literals.time_text(time) if time else "unknown"
