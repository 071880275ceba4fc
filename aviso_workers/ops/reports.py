"""Reports on streams and consumers from two snapshots of a server: a single one does not show whether anything changes.

Called by the commands `report streams`, `consumers ls` and `top`, and by the console.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from datetime import datetime

import anyio
import anyio.to_thread
from msgspec import Struct

from aviso_workers.backends import Admin
from aviso_workers.config import Config
from aviso_workers.errors import ServerProcessError
from aviso_workers.jetstream.info import Cluster, StreamInfo
from aviso_workers.ops import agent_report
from aviso_workers.ops.doctor import monitoring_port
from aviso_workers.ops.health import Judgement, why_stuck
from aviso_workers.ops.snapshots import ServerSnapshot

SEALED = "sealed: it takes no publish any more"


class StreamRow(Struct, frozen=True, kw_only=True):
    """The report on a stream: its size, its rate, its replicas and its trouble."""

    stream: str
    messages: int
    bytes: int
    used: float | None
    """The part of the nearest of its limits (max_msgs, max_bytes) that is used; None where it has none."""
    deleted: int
    """Gaps within it."""
    rate: float
    """Messages stored per second."""
    last: datetime | None
    """When the last message was stored."""
    time: datetime
    """When this was so, by the server's clock."""
    consumers: int
    replicas: int
    """The number of replicas that its configuration asks for."""
    current: int | None
    """Replicas that are current; None on a server that is in no cluster."""
    leader: str
    """The server that leads; empty where there is none, or the server is in no cluster."""
    sealed: bool
    trouble: str

    @property
    def note(self) -> str:
        """The trouble, or else that it is sealed, which may be meant so; empty where it is neither."""
        return self.trouble or (SEALED if self.sealed else "")


class ServerRow(Struct, frozen=True, kw_only=True):
    """The report on what a server stores."""

    server: str
    bytes: int
    may_store: int
    free: int | None
    """Bytes of its disk; None where that is not on this machine."""
    trouble: str


class ConsumerRow(Struct, frozen=True, kw_only=True):
    """The report on a consumer: its lag, its rate, and whether it is stuck."""

    stream: str
    consumer: str
    filters: tuple[str, ...]
    """The subjects that it delivers; empty: all of the stream."""
    pending: int
    """Notifications that were never delivered yet."""
    ack_pending: int
    """Notifications that are delivered and not settled."""
    redelivered: int
    """Those of them that were delivered more than once."""
    rate: float
    """By how many notifications the lag grows in a second; negative where it shrinks."""
    deliveries: int
    """The number of all deliveries."""
    last_settled: datetime | None
    """The time of the last acknowledgement; None where there was none since its server was started."""
    paused: bool
    trouble: str
    """What is wrong with it; empty where nothing is. Of a consumer of an agent it says how that is."""
    needs: bool
    """Whether somebody should look at it."""

    @property
    def lag(self) -> int:
        """The number of notifications that are not settled."""
        return self.pending + self.ack_pending

    @property
    def drain_seconds(self) -> float | None:
        """Seconds until the lag is gone at the present rate; None where it does not shrink."""
        if self.lag == 0:
            return 0.0
        return self.lag / -self.rate if self.rate < 0 else None


def streams(now: ServerSnapshot, before: ServerSnapshot) -> list[StreamRow]:
    """Return a row for each stream, in the order of their names."""
    return [
        StreamRow(
            stream=name,
            messages=found.messages,
            bytes=found.bytes,
            used=found.part_used,
            deleted=found.deleted,
            rate=_per_second(found.last_sequence - before.streams.get(name, found).last_sequence, now, before),
            last=found.last_time,
            time=found.time,
            consumers=found.consumers,
            replicas=found.config.num_replicas,
            current=None if found.cluster == Cluster() else 1 + sum(peer.current for peer in found.cluster.followers),
            leader=found.cluster.leader,
            sealed=found.config.sealed,
            trouble=_trouble(found),
        )
        for name, found in sorted(now.streams.items())
    ]


async def servers(admin: Admin, config: Config, named: Sequence[str]) -> list[ServerRow]:
    """Return a row for each server of these monitoring ports, or for that of the section `server`.

    One that was named and does not answer has that as its trouble. One that was not named is left out where it is
    another server than those that we are connected to.
    """
    connected = await monitoring_port.connected_server(admin)
    rows = []
    for url in monitoring_port.urls(config, named):
        try:
            found = await anyio.to_thread.run_sync(monitoring_port.inspect, url)
            if named or found.is_of(connected):
                jetstream = found.varz.jetstream
                row = ServerRow(
                    server=found.name,
                    bytes=jetstream.stats.storage,
                    may_store=jetstream.config.max_storage,
                    free=shutil.disk_usage(found.disk).free if found.disk else None,
                    trouble="" if found.health == "ok" else found.health,
                )
                rows.append(row)
        except ServerProcessError as error:
            if named:
                rows.append(ServerRow(server=url, bytes=0, may_store=0, free=None, trouble=str(error)))
    return rows


def consumers(now: ServerSnapshot, before: ServerSnapshot, *, stream: str = "") -> list[ConsumerRow]:
    """Return a row for each consumer, or for each of one `stream`, the largest lag first."""
    judged = agent_report.by_consumer(now, before)
    rows = [_consumer_row(key, now, before, judged.get(key)) for key in now.consumers if stream in ("", key[0])]
    return sorted(rows, key=lambda row: (-row.lag, row.stream, row.consumer))


def _consumer_row(
    key: tuple[str, str], now: ServerSnapshot, before: ServerSnapshot, agent: Judgement | None
) -> ConsumerRow:
    found = now.consumers[key]
    known = before.consumers.get(key, found)
    stuck = why_stuck(found, known) if agent is None else ""
    return ConsumerRow(
        stream=key[0],
        consumer=key[1],
        filters=tuple(found.config.filters),
        pending=found.num_pending,
        ack_pending=found.num_ack_pending,
        redelivered=found.num_redelivered,
        rate=_per_second(found.lag - known.lag, now, before),
        deliveries=found.deliveries,
        last_settled=found.last_settled,
        paused=found.paused,
        trouble=agent.text if agent is not None and agent.is_trouble else stuck,
        needs=agent.needs if agent is not None else bool(stuck),
    )


def _per_second(change: int, now: ServerSnapshot, before: ServerSnapshot) -> float:
    return change / (now.at - before.at) if now.at > before.at else 0.0


def _trouble(found: StreamInfo) -> str:
    if found.lost and found.lost.msgs:
        return f"{len(found.lost.msgs)} messages are lost: a block is damaged"
    if found.cluster != Cluster() and not found.cluster.leader:
        return "it has no leader"
    return f"not current: {', '.join(found.behind)}" if found.behind else ""
