"""What is aimed at, as data, and whether a run reached it.

One core for each measured process, 250-byte JSON payloads, 1,000 subjects, one file-backed replica, explicit ack.
Spark: four tasks at once on all cores, 1,000,000 messages with payloads of 200 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct


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

SCALE = (
    ("backlog of a million over one of 10,000", "backlog", "1000000", "10000", 0.8),
    ("10 of 100 fail over none", "failing", "10 of 100", "0 of 100", 0.5),
    ("order_by, 50,000 keys over 1,000", "order_by", "50000 keys", "1000 keys", 0.7),
    ("order_by, one key fails over none", "order_by", "one key fails", "1000 keys", 0.7),
    ("order_by, half on one key over none", "order_by", "half on one key", "1000 keys", 0.5),
    ("windows, half unsettled over none", "windows", "half unsettled", "all settled", 0.5),
    ("among 500 idle agents over none", "idle", "500", "none", 0.8),
    ("update by 256 over by 1", "update", "by 256", "by 1", 0.7),
    ("10,000 dead letters over 1,000", "dead-letters", "10000", "1000", 0.7),
)
"""What is to be about the same with more of it as with less: what, benchmark, more, less, and the least ratio."""

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
    Target(what="from aviso_workers import App", figure="startup.import.seconds", at_most=0.2, unit="s"),
    Target(what="worker ready", figure="startup.worker.seconds", at_most=1.5, unit="s"),
    *(
        Target(
            what=what,
            figure=f"{benchmark}.{more}.per_second",
            over=(f"{benchmark}.{less}.per_second",),
            at_least=at_least,
        )
        for what, benchmark, more, less, at_least in SCALE
    ),
    Target(what="a scrape of 500 agents", figure="idle.500.metrics_ms", at_most=100, unit="ms"),
    Target(
        what="Spark read over the raw socket",
        figure="spark.read.per_second",
        over=("spark.raw-read.per_second",),
        at_least=0.9,
    ),
    Target(
        what="Spark write over the raw socket",
        figure="spark.write.per_second",
        over=("spark.raw-write.per_second",),
        at_least=1,
    ),
    Target(what="Spark copy of a stream", figure="spark.copy.per_second", at_least=40_000, unit="/s"),
    Target(what="Spark archive: a million in 10 s", figure="spark.archive.per_second", at_least=100_000, unit="/s"),
    Target(what="stream to Spark to stream, p50", figure="spark.delay.p50_ms", at_most=300, unit="ms"),
    Target(what="Spark job end to notification, p50", figure="spark.job-events.p50_ms", at_most=100, unit="ms"),
    Target(what="Spark job end to notification, p99", figure="spark.job-events.p99_ms", at_most=500, unit="ms"),
)


def judge(medians: Mapping[str, float], target: Target) -> Finding:
    """Return the finding about one target, from the medians of the figures."""
    found = medians.get(target.figure)
    rivals = [medians[name] for name in target.over if name in medians]
    if target.over and found is not None:
        found = found / max(rivals) if rivals else None
    reached = None
    if found is not None:
        reached = found >= target.at_least if target.at_least is not None else found <= (target.at_most or 0)
    wanted = f">= {target.at_least:g}" if target.at_least is not None else f"<= {target.at_most:g}"
    return Finding(what=target.what, wanted=f"{wanted} {target.unit}", found=found, unit=target.unit, reached=reached)
