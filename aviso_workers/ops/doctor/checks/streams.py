"""Checks of the configuration and the state of streams."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from aviso_workers.config.streams import OURS
from aviso_workers.engine import dead_letter_store, delayed_messages, max_deliveries, table_store
from aviso_workers.jetstream.fields import SECOND
from aviso_workers.jetstream.info import NEVER, StreamInfo
from aviso_workers.jetstream.metadata import OF_SET, UNFINISHED
from aviso_workers.jetstream.specs import stated
from aviso_workers.ops.doctor.facts import Facts
from aviso_workers.ops.doctor.judgements import Check, Finding, State, check
from aviso_workers.ops.mirrors import STALE_SECONDS

__all__ = ["CHECKS", "overlap"]

CHECKS: list[Check] = []
declare = partial(check, CHECKS)

REPLICAS = 3
NEARLY_FULL, FULL = 0.80, 0.95
MANY_GAPS, GAPS_PER_MESSAGE = 10_000, 10
BY_KEY = "KV_"
OF_SHORT_LIVES = (dead_letter_store.RETRIES, max_deliveries.STREAM)
"""Streams of ours that forget within days, and hold only what failed."""

OUR_REPLICAS = "set notification_backend.jetstream.replicas: 3, and start a worker that uses {stream}"
DEAD_LETTERS_LIMIT = "set workers.dead_letters.max_bytes, and start a worker"
DEAD_LETTERS_FULL = "`aviso-workers dead-letters ls`, then `retry` or `drop`; or raise workers.dead_letters.max_bytes"
APPLY = "then `aviso-workers streams apply`"
BUCKETS_REPLICAS = f"{OUR_REPLICAS}; where none does, declare it: streams.{{stream}}.num_replicas: 3, {APPLY}"


@declare(
    "JS001",
    "Streams have a limit of bytes",
    why="what grows without a limit takes the disk from all other streams of the server",
    cure="set max_bytes, or the event type's storage_policy.max_size, " + APPLY,
    cure_of_others="declare it: streams.{stream}.max_bytes, " + APPLY,
    production=True,
)
def unlimited_bytes(facts: Facts) -> Iterator[Finding]:
    for stream in facts.streams.values():
        if stream.config.max_bytes <= 0 and not _keeps_state(stream) and stream.name not in OF_SHORT_LIVES:
            found = f"no max_bytes, {stream.bytes} bytes so far"
            yield Finding(stream=stream.name, found=found, cure=DEAD_LETTERS_LIMIT if _has_dead_letters(stream) else "")


@declare(
    "JS002",
    "Streams forget what is old",
    why="without max_age and max_msgs everything is kept until max_bytes is reached, and then all gives way at once",
    cure="set retention_time or max_messages, " + APPLY,
    cure_of_others="declare it: streams.{stream}.max_age, " + APPLY,
    production=True,
)
def unlimited_age(facts: Facts) -> Iterator[Finding]:
    for stream in facts.streams.values():
        config = stream.config
        # A dead letter is kept until an operator has dealt with it.
        if not config.max_age and config.max_msgs <= 0 and not _keeps_state(stream) and not _has_dead_letters(stream):
            yield Finding(stream=stream.name, found="neither max_age nor max_msgs")


@declare(
    "JS003",
    "Streams have three replicas",
    why="a stream of one replica stands still with its server, and is gone with its disk",
    cure="set notification_backend.jetstream.replicas: 3, " + APPLY,
    cure_of_others="declare it: streams.{stream}.num_replicas: 3, " + APPLY,
    severity=State.FAIL,
    production=True,
)
def few_replicas(facts: Facts) -> Iterator[Finding]:
    for stream in facts.streams.values():
        if stream.config.num_replicas < REPLICAS:
            yield _replicas(stream)


@declare(
    "JS004",
    "Replicas are an odd number",
    why="the last replica of an even number costs a disk, and the stream survives no more servers down",
    cure="set notification_backend.jetstream.replicas: 3, " + APPLY,
    cure_of_others="declare it: streams.{stream}.num_replicas: 3, " + APPLY,
)
def even_replicas(facts: Facts) -> Iterator[Finding]:
    for stream in facts.streams.values():
        if stream.config.num_replicas % 2 == 0:
            yield _replicas(stream)


@declare(
    "JS005",
    "Streams are on the disk",
    why="a stream in memory is gone when its servers end, in order or not",
    cure="storage cannot be changed: `aviso-workers backup create {stream} --to DIRECTORY`, remove it, and "
    "`aviso-workers backup restore DIRECTORY/{stream}/TIME --storage file`",
    severity=State.FAIL,
    production=True,
)
def in_memory(facts: Facts) -> Iterator[Finding]:
    for stream in facts.streams.values():
        if stream.config.storage == "memory":
            yield Finding(stream=stream.name, found="storage memory")


@declare(
    "JS006",
    "Streams that refuse what does not fit have space left",
    why="with discard new a full stream refuses every publish (JetStream's error 10077)",
    cure="raise the limit, or let the oldest give way with discard_policy: old, " + APPLY,
    cure_of_others="delete messages, or declare a higher limit: streams.{stream}.max_bytes, " + APPLY,
)
def full(facts: Facts) -> Iterator[Finding]:
    for stream in facts.streams.values():
        config = stream.config
        if config.discard != "new":
            continue
        for name, used, limit in (
            ("max_bytes", stream.bytes, config.max_bytes),
            ("max_msgs", stream.messages, config.max_msgs),
        ):
            if limit > 0 and used >= NEARLY_FULL * limit:
                yield Finding(
                    stream=stream.name,
                    found=f"{used / limit:.0%} of {name} {limit} used",
                    state=State.FAIL if used >= FULL * limit else State.WARN,
                    cure=DEAD_LETTERS_FULL if _has_dead_letters(stream) else "",
                )


@declare(
    "JS008",
    "Streams kept by interest have consumers",
    why="with retention interest a message for which there is no consumer is forgotten as it arrives",
    cure="start the consumers before the publishers, or keep messages by limits: a new stream with "
    "retention limits, as retention_policy: limits makes it",
    severity=State.FAIL,
)
def no_interest(facts: Facts) -> Iterator[Finding]:
    for stream in facts.streams.values():
        if stream.config.retention == "interest" and not stream.consumers:
            yield Finding(stream=stream.name, found="retention interest and no consumer")


@declare(
    "JS010",
    "Critical streams cannot be emptied by mistake",
    why="one wrong command removes what metadata critical=true says must stay",
    cure="declare it: streams.{stream}.deny_delete and deny_purge, " + APPLY + "; it cannot be taken back",
)
def deletable(facts: Facts) -> Iterator[Finding]:
    for stream in facts.streams.values():
        missing = [key for key in ("deny_delete", "deny_purge") if not getattr(stream.config, key)]
        if _is_marked(stream, "critical") and missing:
            yield Finding(stream=stream.name, found=f"critical=true without {' and '.join(missing)}")


@declare(
    "JS011",
    "Personal data can be erased",
    why="deny_delete cannot be taken back, and a purge leaves the payload on the disk",
    cure="copy what may stay to a stream without deny_delete, and remove this one: `aviso-workers streams rm {stream}`",
    severity=State.FAIL,
)
def not_erasable(facts: Facts) -> Iterator[Finding]:
    for stream in facts.streams.values():
        if _is_marked(stream, "pii") and stream.config.deny_delete:
            yield Finding(stream=stream.name, found="pii=true with deny_delete")


@declare(
    "JS013",
    "Streams are as configured",
    why="workers and servers of the same configuration disagree about what is kept",
    cure="`aviso-workers streams plan` shows it, `aviso-workers streams apply` does it; what removes stored messages "
    "only with --yes",
)
def drifted(facts: Facts) -> Iterator[Finding]:
    for configured, plan in facts.plans.items():
        if plan.exists and (differences := (*plan.differences, *plan.removing, *plan.fixed)):
            found = "; ".join(map(str, differences))
            state = State.FAIL if plan.storage_mismatch else None
            yield Finding(stream=plan.stream, found=f"{configured}: {found}", state=state)


@declare(
    "JS014",
    "No other stream takes a configured stream's subjects",
    why="a subject belongs to one stream, so the configured one cannot be made, and what is published is refused",
    cure="declare other subjects for it: streams.{stream}.subjects, " + APPLY + "; or give the event type another "
    "topic.base",
    severity=State.FAIL,
)
def taken(facts: Facts) -> Iterator[Finding]:
    for configured, plan in facts.plans.items():
        wanted: list[str] = stated(plan.wanted).get("subjects", [])
        for stream in facts.streams.values():
            if stream.name == plan.stream or stream.config.mirror:
                continue
            for theirs in stream.config.subjects:
                if any(overlap(theirs, ours) for ours in wanted):
                    yield Finding(stream=stream.name, found=f"takes {theirs}, which is of {configured}")


@declare(
    "JS015",
    "Streams have no unexplained gaps",
    why="a server that finds a damaged block leaves out what it cannot read and says nothing; very many gaps cost "
    "memory and make reading slow",
    cure="`aviso-workers streams gaps {stream}` shows where; if no client has deleted there, compare with the newest "
    "backup: `aviso-workers backup restore DIRECTORY/{stream}/TIME --as COPY`. Where a few old messages hold very many "
    "gaps open, a retention_time ends them",
)
def gaps(facts: Facts) -> Iterator[Finding]:
    for stream in facts.streams.values():
        missing, messages = stream.deleted, stream.messages
        if _keeps_state(stream):
            continue
        if missing and _never_deletes(stream):
            yield Finding(stream=stream.name, found=f"{missing} messages are missing between the first and the last")
        elif missing >= MANY_GAPS and missing > GAPS_PER_MESSAGE * messages:
            yield Finding(stream=stream.name, found=f"{missing} gaps between {messages} messages")


@declare(
    "JS016",
    "Nothing is lost on the disk",
    why="the server found blocks that it cannot read",
    cure="check the disk of the server, and restore a backup beside the stream to see what is missing: "
    "`aviso-workers backup restore DIRECTORY/{stream}/TIME --as COPY`",
    severity=State.FAIL,
)
def lost(facts: Facts) -> Iterator[Finding]:
    for stream in facts.streams.values():
        if (lost := stream.lost) is not None:
            yield Finding(stream=stream.name, found=f"{len(lost.msgs or ())} messages, {lost.bytes} bytes lost")


@declare(
    "JS019",
    "Mirrors and sources reach their origins",
    why="with an unreachable origin the lag stays as it was, so only the time since the last contact shows it",
    cure="`aviso-workers report mirrors` and `aviso-workers streams info {stream}` say what it waits for; check the "
    "leaf node or gateway in between, and at the origin's name and domain",
    severity=State.FAIL,
)
def unreachable_origins(facts: Facts) -> Iterator[Finding]:
    for stream in facts.streams.values():
        before = facts.before.streams.get(stream.name, stream)
        lags = {origin.name: origin.lag for origin in before.origins}
        for origin in stream.origins:
            inactive = origin.active / SECOND
            if origin.error:
                yield Finding(stream=stream.name, found=f"{origin.name}: {origin.error.get('description')}")
            elif origin.active == NEVER:
                yield Finding(stream=stream.name, found=f"{origin.name} was never reached")
            elif inactive > STALE_SECONDS:
                yield Finding(stream=stream.name, found=f"last contact with {origin.name} {inactive:.0f} s ago")
            elif (growth := origin.lag - lags.get(origin.name, origin.lag)) > 0:
                rate = growth / facts.elapsed_seconds
                found = f"{origin.lag} behind {origin.name}, and {rate:.0f} more every second"
                yield Finding(stream=stream.name, found=found, state=State.WARN)


@declare(
    "JS020",
    "A promoted mirror has taken its origin's place",
    why="two streams that both take publishes are two histories, which cannot be joined again",
    cure="`aviso-workers mirror fence {place}`, at once; then `aviso-workers mirror recover {stream}`",
    severity=State.FAIL,
)
def two_histories(facts: Facts) -> Iterator[Finding]:
    for link in facts.links:
        if link.relation == "promoted" and link.trouble:
            yield Finding(stream=link.stream, place=link.origin, found=link.trouble)


@declare(
    "JS068",
    "Mirrors have the history of their origins",
    why="a mirror goes on after the last sequence that it has, so it lacks what an origin stored that was made again",
    cure="keep what the mirror has (`aviso-workers backup create {stream} --to DIRECTORY`), remove it, and make it "
    "anew",
    severity=State.FAIL,
)
def other_histories(facts: Facts) -> Iterator[Finding]:
    for link in facts.links:
        if link.divergence:
            yield Finding(stream=link.stream, found=link.divergence)


@declare(
    "JS070",
    "No stream is half-restored",
    why="it takes no publishes, and whoever uses it waits",
    cure="do the restore again: `aviso-workers backup restore DIRECTORY`",
    severity=State.FAIL,
)
def half_restored(facts: Facts) -> Iterator[Finding]:
    for stream in facts.streams.values():
        mark = stream.config.metadata.get(UNFINISHED, "")
        if OF_SET in mark:
            found = (
                "it is of a set of backups that is not whole yet: its restore is under way, has failed or was killed"
            )
            yield Finding(stream=stream.name, found=found, cure="`aviso-workers backup restore --all DIRECTORY` again")
        elif mark:
            yield Finding(stream=stream.name, found="its restore is under way or was killed")


def overlap(one: str, other: str) -> bool:
    """Return whether two subjects, which may have wildcards, can match the same message."""
    ours, theirs = one.split("."), other.split(".")
    for a, b in zip(ours, theirs, strict=False):
        if ">" in (a, b):
            return True
        if a != b and "*" not in (a, b):
            return False
    return len(ours) == len(theirs)


def _replicas(stream: StreamInfo) -> Finding:
    cure = OUR_REPLICAS if stream.name.startswith(OURS) else BUCKETS_REPLICAS if stream.name.startswith(BY_KEY) else ""
    return Finding(stream=stream.name, found=f"num_replicas {stream.config.num_replicas}", cure=cure)


def _keeps_state(stream: StreamInfo) -> bool:
    """Return whether a stream holds state of our own (tables, counters, delayed messages), which must not expire by
    itself.
    """
    return stream.name.startswith(BY_KEY) or stream.name in (table_store.COUNTERS, delayed_messages.STREAM)


def _has_dead_letters(stream: StreamInfo) -> bool:
    return stream.name == dead_letter_store.STREAM


def _is_marked(stream: StreamInfo, mark: str) -> bool:
    return stream.config.metadata.get(mark) == "true"


def _never_deletes(stream: StreamInfo) -> bool:
    """Return whether messages leave this stream only at its old end, unless a client deletes them."""
    config = stream.config
    return (
        config.retention == "limits"
        and config.max_msgs_per_subject <= 0
        and not config.allow_msg_ttl
        and not config.allow_rollup_hdrs
        and not stream.origins
        and not _has_dead_letters(stream)
    )
