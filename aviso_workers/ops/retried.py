"""The notifications of agents that are retried: listed, told in words, and decided about by a person. Called by `agents
retrying`, `agents retry` and `agents skip`, and by all that says how agents are.

Which ones are retried, workers record for operators (`state.failure_records`). A decision is a record in the bucket of
failure counts, which the workers of the agent look for (`engine.decisions`) and in which they say what became of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial

import anyio
from msgspec import Struct

from aviso_workers.aviso.literals import time_text
from aviso_workers.backends import Admin, BulkKeyValue, ConsumerInfo
from aviso_workers.backends.buckets import open_existing
from aviso_workers.errors import ConflictError, NotFoundError
from aviso_workers.ops import agent_inventory
from aviso_workers.ops.agent_control import AgentConsumer, end_text
from aviso_workers.state import consumer_records, failure_counts, failure_records
from aviso_workers.state.failure_counts import DECIDED, DECISION_SECONDS, Decides, Decision
from aviso_workers.state.failure_records import WRITE_SECONDS, LastFailure, Retrying
from aviso_workers.state.own_streams import RETRIES

__all__ = [
    "Answer",
    "Asked",
    "blocked",
    "blocked_text",
    "commands_text",
    "decide",
    "is_settled",
    "listed",
    "of_agent",
    "plan",
    "wait",
]

ANSWER_SECONDS = 10.0
"""How long is waited for what becomes of a decision."""
POLL_SECONDS = 0.25


class Asked(Struct, frozen=True, kw_only=True):
    """A notification about which a person decides, and the decision."""

    stream: str
    sequence: int
    key: str
    """The key of its failure count."""
    decision: Decision
    behind: int = 0
    """How many notifications wait behind it."""
    again_at: datetime | None = None
    """When it is tried again without a decision; None where that is not known."""
    known: bool = True
    """Whether workers have recorded that it is retried. Else that is known only once one of them has taken it."""


class Answer(Struct, frozen=True, kw_only=True):
    """What became of a decision."""

    stream: str
    sequence: int
    carried_out: bool
    """Whether the notification was handled, or skipped as decided."""
    text: str


def listed(
    failure: LastFailure | None, events: ConsumerInfo | None, retries: ConsumerInfo | None, *, now: datetime
) -> list[Retrying]:
    """Return the notifications that an agent retries, as far as they are recorded: first those at which it is blocked,
    then those due first. One that was due and has not failed again since is handled by now, or runs.
    """
    if failure is None:
        return []
    recently = now - timedelta(seconds=2 * WRITE_SECONDS)
    return [
        each
        for each in failure.retrying
        if (each.blocked or (each.again_at > recently and failure.until > now))
        and not is_settled(each, retries if each.handed_back else events)
    ]


def blocked(
    failures: Mapping[tuple[str, str, str], LastFailure], stream: str, consumer: ConsumerInfo
) -> list[Retrying]:
    """Return the notifications of a consumer at which its agent is blocked, by the failures that are recorded."""
    app, agent = agent_inventory.agent_of(consumer.name) or ("", "")
    failure = failures.get((app, "agents", agent))
    return [
        each
        for each in (failure.retrying if failure is not None else ())
        if each.blocked and stream == (RETRIES if each.handed_back else each.stream) and not is_settled(each, consumer)
    ]


def is_settled(retrying: Retrying, consumer: ConsumerInfo | None) -> bool:
    """Return whether its consumer says that a notification is settled. One that has left its stream, as by a purge or
    because a newer one has its subject, is settled by the server.
    """
    if consumer is None:
        return False
    return not consumer.num_ack_pending or (not retrying.handed_back and retrying.sequence <= consumer.ack_floor)


def blocked_text(found: Sequence[Retrying]) -> str:
    """Return at which notifications an agent is blocked, how many wait behind them, and why; empty where at none."""
    if not found:
        return ""
    first = found[0]
    at = f"{first.stream}@{first.sequence}" + (f" (key {first.key})" if first.key else "")
    if len(found) > 1:
        at = f"{len(found)} notifications, {at} and others"
    behind = sum(each.behind for each in found)
    waits = f", and {behind} wait behind {'it' if len(found) == 1 else 'them'}" if behind else ""
    return f"blocked at {at}{waits}: {first.error}"


def commands_text(app: str, agent: str) -> str:
    """Return which commands list and decide about the notifications that an agent retries."""
    return f"`agents retrying {app} {agent}` lists them, `agents retry` or `agents skip` decides"


async def of_agent(admin: Admin, agent: AgentConsumer) -> list[Retrying]:
    """Return what `listed` does of an agent, on all streams that it reads. Raises `BackendError`."""
    entry = await consumer_records.entry(admin, failure_records.key_of(agent.app, "agents", agent.agent))
    if (failure := failure_records.read(entry)) is None:
        return []
    now, retries = await consumer_records.time(admin), await _consumer(admin, RETRIES, agent)
    found = []
    for stream in (agent.stream, *agent.beside):
        events = await _consumer(admin, stream, agent)
        found += [each for each in listed(failure, events, retries, now=now) if each.stream == stream]
    return found


async def plan(
    admin: Admin, agent: AgentConsumer, sequences: Collection[int], decides: Decides, *, by: str = ""
) -> list[Asked]:
    """Return a decision about each of these notifications of an agent, or about all that it is known to retry where
    none is named. Raises `NotFoundError` where one of them is not retried, `BackendError`.
    """
    retrying = await of_agent(admin, agent)
    decision = Decision(decides=decides, at=await consumer_records.time(admin), by=by)
    wanted = [each for each in retrying if not sequences or each.sequence in sequences]
    asked = [_asked(agent, each, decision) for each in wanted]
    missing = sorted({*sequences} - {each.sequence for each in wanted})
    asked += [await _found(admin, agent, each, decision) for each in missing]
    if not asked:
        raise NotFoundError(f"{agent.agent} of {agent.app} retries nothing")
    return asked


async def decide(admin: Admin, agent: AgentConsumer, asked: Sequence[Asked]) -> None:
    """Store decisions, for the workers of the agent. Raises `BackendError`; it can be repeated then."""
    bucket = await admin.key_value(_bucket(agent), ttl_seconds=failure_counts.KEPT_SECONDS, own=True)
    for each in asked:
        await failure_counts.store_decision(bucket, each.key, each.decision)


async def wait(
    admin: Admin,
    agent: AgentConsumer,
    asked: Sequence[Asked],
    *,
    seconds: float = ANSWER_SECONDS,
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
) -> list[Answer]:
    """Wait at most so long for what becomes of decisions, and return it. A decision that no worker has taken stands on,
    or is withdrawn where it is not known that its notification is retried. Raises `BackendError`.
    """
    bucket = await open_existing(admin, _bucket(agent), own=True)
    answers: dict[str, Answer] = {}
    for _ in range(round(seconds / POLL_SECONDS)):
        for each in asked:
            if each.key not in answers and (answer := await _answer(bucket, each)) is not None:
                answers[each.key] = answer
        if len(answers) == len(asked):
            break
        await sleep(POLL_SECONDS)
    for each in asked:
        if each.key not in answers:
            answers[each.key] = await _unanswered(admin, agent, bucket, each)
    return [answers[each.key] for each in asked]


async def _found(admin: Admin, agent: AgentConsumer, sequence: int, decision: Decision) -> Asked:
    """Return one that is not listed: more are retried than are recorded. Raises `NotFoundError` where it cannot be
    retried.
    """
    name = _bucket(agent)
    with suppress(NotFoundError):  # nothing has failed yet
        counts = await admin.subject_counts(f"KV_{name}", subject=f"$KV.{name}.{agent.agent}.*.{sequence}.*")
        bucket = await open_existing(admin, name, own=True)
        for subject in counts:
            key = subject.removeprefix(f"$KV.{name}.")
            if bucket is not None and await bucket.get(key) is not None:
                return Asked(stream=key.split(".")[1], sequence=sequence, key=key, decision=decision)
    why = "is in no stream that it reads"
    for stream in (agent.stream, *agent.beside):
        events = await _consumer(admin, stream, agent)
        message = await admin.message(stream, sequence) if events is not None else None
        if events is None or message is None:
            continue
        if sequence <= events.ack_floor:
            why = f"is settled: everything on {stream} up to {events.ack_floor} is"
        elif sequence > events.position:
            why = f"was not delivered yet: {agent.agent} has come to {events.position} of {stream}"
        else:
            key = failure_counts.key_of(agent.agent, stream, sequence, message.timestamp_ns)
            return Asked(stream=stream, sequence=sequence, key=key, decision=decision, known=False)
    raise NotFoundError(f"not retried: {sequence} {why}; `aviso-workers agents retrying` lists what is")


def _asked(agent: AgentConsumer, retrying: Retrying, decision: Decision) -> Asked:
    return Asked(
        stream=retrying.stream,
        sequence=retrying.sequence,
        key=failure_counts.key_of(agent.agent, retrying.stream, retrying.sequence, retrying.timestamp_ns),
        decision=Decision(decides=decision.decides, at=decision.at, by=decision.by, last_error=retrying.error),
        behind=retrying.behind,
        again_at=retrying.again_at,
    )


async def _answer(bucket: BulkKeyValue | None, asked: Asked) -> Answer | None:
    """Return what became of a decision, and remove it; None while that is not known."""
    entry = None if bucket is None else await bucket.get(f"{asked.key}{DECIDED}")
    now, decides = failure_counts.decision(entry), asked.decision.decides
    answer = partial(Answer, stream=asked.stream, sequence=asked.sequence)
    if bucket is None or entry is None or now is None or (now.at, now.decides) != (asked.decision.at, decides):
        return answer(carried_out=False, text="somebody else has decided about it since")
    if not now.outcome:
        return None
    with suppress(ConflictError):  # somebody has decided again
        await bucket.delete(f"{asked.key}{DECIDED}", revision=entry.revision)
    match now.outcome:
        case "handled":
            text = "handled" if decides == "retry" else "handled before it could be skipped"
            return answer(carried_out=decides == "retry", text=text)
        case "skipped":
            return answer(carried_out=True, text="skipped: it is a dead letter now")
        case "dead_letter":
            return answer(carried_out=False, text=f"failed again, and is a dead letter now: {now.error}")
    again = f"; the next attempt is at {time_text(now.again_at)}" if now.again_at else ""
    return answer(carried_out=False, text=f"failed again: {now.error}{again}")


async def _unanswered(admin: Admin, agent: AgentConsumer, bucket: BulkKeyValue | None, asked: Asked) -> Answer:
    """Return why nothing is known yet of what became of a decision."""
    entry = None if bucket is None else await bucket.get(f"{asked.key}{DECIDED}")
    now, events = failure_counts.decision(entry), await _consumer(admin, asked.stream, agent)
    answer = partial(Answer, stream=asked.stream, sequence=asked.sequence, carried_out=False)
    is_taken = now is not None and now.taken
    if not asked.known and not is_taken and bucket is not None and entry is not None:
        try:
            await bucket.delete(f"{asked.key}{DECIDED}", revision=entry.revision)
        except ConflictError:
            is_taken = True
        else:
            return answer(text="not retried: no worker that runs knows of it, and nothing is decided")
    if now is not None and now.error:
        again = f"; that is tried again at {time_text(now.again_at)}" if now.again_at else ""
        return answer(text=f"not skipped yet: {now.error}{again}")
    if is_taken:
        why = "a worker has taken it, and it runs or waits for its turn"
    elif events is not None and events.paused_until is not None:
        why = f"{agent.agent} is paused until {end_text(events.paused_until)}"
    elif events is None or not events.num_waiting:
        why = f"no worker of {agent.agent} asks for notifications"
    else:
        again = f": it is delivered again at {time_text(asked.again_at)}" if asked.again_at else ""
        why = f"no worker that runs has given it back{again}"
    until = asked.decision.at + timedelta(seconds=DECISION_SECONDS)
    return answer(text=f"not yet: {why}; the decision stands until {time_text(until)}")


async def _consumer(admin: Admin, stream: str, agent: AgentConsumer) -> ConsumerInfo | None:
    try:
        return await admin.consumer_info(stream, agent.consumer)
    except NotFoundError:
        return None


def _bucket(agent: AgentConsumer) -> str:
    return f"{agent.app}{failure_counts.BUCKET_SUFFIX}"
