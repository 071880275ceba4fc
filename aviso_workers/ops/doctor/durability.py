"""The durability of streams in the running configuration: which accidents lose acknowledged messages.

A nats-server acknowledges before it flushes, unless `sync_always` is set. What is in between survives the end of the
process and not the end of the machine; how much that is, and how many machines it takes, follows from `sync_interval`
and the number of replicas.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from aviso_workers.aviso.literals import SECOND, Duration
from aviso_workers.jetstream.info import StreamInfo
from aviso_workers.ops.doctor.facts import Facts

NEVER = 0
UNKNOWN = -1


class StreamDurability(Struct, frozen=True, kw_only=True):
    """The durability of one stream. As text it says which accidents lose acknowledged messages."""

    stream: str
    replicas: int
    in_memory: bool
    unflushed: int
    """Nanoseconds for which an acknowledged message may not be on the disk yet; `NEVER`, or `UNKNOWN`."""

    def __str__(self) -> str:
        return "in memory: lost when its servers stop" if self.in_memory else f"{self._on_loss}; {self._on_power_cut}"

    @property
    def _on_loss(self) -> str:
        if self.replicas == 1:
            return "all messages are lost if the server's disk fails"
        if (spare := (self.replicas - 1) // 2) == 0:
            return "unavailable without one of its 2 servers"
        return f"survives the loss of {spare} of its {self.replicas} servers"

    @property
    def _on_power_cut(self) -> str:
        if self.unflushed == UNKNOWN:
            return "sync_interval is not known (the server's own default is 2m)"
        if self.unflushed == NEVER:
            return "a power cut loses no acknowledged messages (sync_always)"
        machines = (
            "its server" if self.replicas == 1 else f"{self.replicas // 2 + 1} of its {self.replicas} servers at once"
        )
        interval = Duration(max(self.unflushed, SECOND) // SECOND).literal()
        return f"a power cut of {machines} loses up to {interval} of acknowledged messages"


def of_streams(facts: Facts) -> Iterator[StreamDurability]:
    """Yield the durability of every stream, in the order of their names."""
    for _, stream in sorted(facts.streams.items()):
        yield StreamDurability(
            stream=stream.name,
            replicas=stream.config.num_replicas,
            in_memory=stream.config.storage == "memory",
            unflushed=_unflushed(stream, facts),
        )


def _unflushed(stream: StreamInfo, facts: Facts) -> int:
    """Return for how many nanoseconds at most an acknowledged message may not be on the disk: the longest interval of
    the stream's servers, `UNKNOWN` unless all of them are monitored.
    """
    seen = {one.name: one.varz.jetstream.config for one in facts.monitored}
    keepers = stream.cluster.members or {facts.server.name}
    if not keepers <= seen.keys():
        return UNKNOWN
    return max(NEVER if seen[name].sync_always else seen[name].sync_interval for name in keepers)
