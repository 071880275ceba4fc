"""What is aimed at, as data, and whether a run reached it.

One core for each measured process, 250-byte JSON payloads, 1,000 subjects, one file-backed replica, explicit ack.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

__all__ = ["TARGETS", "Finding", "Target", "judge"]


class Target(Struct, frozen=True, kw_only=True):
    """A figure, or its ratio to the best of others, that should be at least or at most so much."""

    what: str
    figure: str
    over: tuple[str, ...] = ()
    at_least: float | None = None
    at_most: float | None = None
    unit: str = "x"


class Finding(Struct, frozen=True, kw_only=True):
    """A target beside what was measured; `found` is None where the run did not measure it."""

    what: str
    wanted: str
    found: float | None
    unit: str
    reached: bool | None


FASTSTREAM = tuple(f"consume.{mode}.per_second" for mode in ("faststream 1", "faststream 64", "faststream-pull"))
AGENT, BATCH = "consume.agent.per_second", "consume.batch.per_second"
PUBLISHED, REPLAYED = "publish.notify-many.per_second", "replay.replay.per_second"

TARGETS = (
    Target(what="agent over FastStream's best per message", figure=AGENT, over=FASTSTREAM, at_least=20),
    Target(what="agent over nats-py fetch(500)", figure=AGENT, over=("consume.nats-fetch.per_second",), at_least=4),
    Target(what="agent, CPU per notification", figure="consume.agent.cpu_us", at_most=22, unit="us"),
    Target(what="agent over the bare loop", figure=AGENT, over=("consume.bare-loop.per_second",), at_least=0.6),
    Target(what="two processes over one", figure="consume.two-processes.per_second", over=(AGENT,), at_least=1.7),
    Target(
        what="batch agent over FastStream batch=True",
        figure=BATCH,
        over=("consume.faststream-batch.per_second",),
        at_least=7,
    ),
    Target(
        what="notify_many over nats-py publish_async",
        figure=PUBLISHED,
        over=("publish.nats-publish-async.per_second",),
        at_least=4,
    ),
    Target(what="replay over nats-py fetch", figure=REPLAYED, over=("replay.nats-history.per_second",), at_least=10),
    Target(what="publish to handler, p50", figure="latency.agent.p50_ms", at_most=1.5, unit="ms"),
    Target(what="publish to handler, p99", figure="latency.agent.p99_ms", at_most=8, unit="ms"),
    Target(what="worker, resident after start", figure="memory.worker.ready_mib", at_most=90, unit="MiB"),
    Target(what="worker, growth while it works", figure="memory.worker.growth_mib", at_most=5, unit="MiB"),
    Target(what="import aviso_workers", figure="startup.import.seconds", at_most=0.2, unit="s"),
    Target(what="worker ready", figure="startup.worker.seconds", at_most=1.5, unit="s"),
)


def judge(medians: Mapping[str, float], target: Target) -> Finding:
    """The finding about one target, from the medians of the figures."""
    found = medians.get(target.figure)
    rivals = [medians[name] for name in target.over if name in medians]
    if target.over and found is not None:
        found = found / max(rivals) if rivals else None
    reached = None
    if found is not None:
        reached = found >= target.at_least if target.at_least is not None else found <= (target.at_most or 0)
    wanted = f">= {target.at_least:g}" if target.at_least is not None else f"<= {target.at_most:g}"
    return Finding(what=target.what, wanted=f"{wanted} {target.unit}", found=found, unit=target.unit, reached=reached)
