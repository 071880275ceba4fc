"""The notifications of agents that are retried: listed, told in words, and decided about by a person. Called by `agents
retrying`, `agents retry` and `agents skip`, and by all that says how agents are.

Which ones are retried, workers record for operators (`state.failure_records`). A decision is an order (`state.orders`),
which the workers of the agent look for (`engine.decisions`). What became of it, they record beside the failure counts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial

import anyio
from msgspec import Struct, structs

from aviso_workers.aviso.literals import time_text
from aviso_workers.backends import Admin
from aviso_workers.backends.buckets import open_existing
from aviso_workers.errors import ConflictError, NotFoundError
from aviso_workers.jetstream.key_value import KeyValue
from aviso_workers.ops import health, inventory
from aviso_workers.ops.agent_control import AgentConsumer, end_text
from aviso_workers.state import consumer_records, failure_counts, failure_records, orders, own_streams
from aviso_workers.state.failure_counts import DECIDED, Taken
from aviso_workers.state.failure_records import Retrying
from aviso_workers.state.orders import DECISION_SECONDS, Decides, Decision
from aviso_workers.state.own_streams import RETRIES

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


async def of_agent(admin: Admin, agent: AgentConsumer) -> list[Retrying]:
    """Return the notifications that an agent retries, on all streams that it reads (`health.retrying`). Raises
    `BackendError`."""
    entry = await consumer_records.entry(admin, failure_records.key_of(agent.app, "agents", agent.agent))
    if (failure := failure_records.read(entry)) is None:
        return []
    now = await consumer_records.time(admin, agent.app)
    retries = await inventory.existing(admin.consumer_info(own_streams.of_app(RETRIES, agent.app), agent.consumer))
    found = []
    for stream in (agent.stream, *agent.beside):
        events = await inventory.existing(admin.consumer_info(stream, agent.consumer))
        found += health.retrying(failure, stream, events, retries, now=now)
    return found


async def plan(
    admin: Admin, agent: AgentConsumer, sequences: Collection[int], decides: Decides, *, by: str = ""
) -> list[Asked]:
    """Return a decision about each of these notifications of an agent, or about all that it is known to retry where
    none is named. Raises `NotFoundError` where one of them is not retried, `BackendError`.
    """
    retrying = await of_agent(admin, agent)
    decision = Decision(decides=decides, at=await consumer_records.time(admin, agent.app), by=by)
    wanted = [each for each in retrying if not sequences or each.sequence in sequences]
    asked = [
        Asked(
            stream=each.stream,
            sequence=each.sequence,
            key=failure_counts.key_of(agent.agent, each.stream, each.sequence, each.timestamp_ns),
            decision=structs.replace(decision, last_error=each.error),
            behind=each.behind,
            again_at=each.again_at,
        )
        for each in wanted
    ]
    missing = sorted({*sequences} - {each.sequence for each in wanted})
    asked += [await _found(admin, agent, each, decision) for each in missing]
    if not asked:
        raise NotFoundError(f"{agent.agent} of {agent.app} retries nothing")
    return asked


async def decide(admin: Admin, agent: AgentConsumer, asked: Sequence[Asked]) -> None:
    """Store decisions, for the workers of the agent. Raises `BackendError`; it can be repeated then."""
    bucket = await orders.bucket(admin, agent.app)
    for each in asked:
        await orders.decide(bucket, each.key, each.decision)


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
    ordered = await orders.bucket(admin, agent.app)
    answers: dict[str, Answer] = {}
    for _ in range(round(seconds / POLL_SECONDS)):
        for each in asked:
            if each.key not in answers and (answer := await _answer(admin, agent, ordered, each)) is not None:
                answers[each.key] = answer
        if len(answers) == len(asked):
            break
        await sleep(POLL_SECONDS)
    for each in asked:
        if each.key not in answers:
            answers[each.key] = await _unanswered(admin, agent, ordered, each)
    return [answers[each.key] for each in asked]


async def _found(admin: Admin, agent: AgentConsumer, sequence: int, decision: Decision) -> Asked:
    """Return one that is not listed: more are retried than are recorded. Raises `NotFoundError` where it cannot be
    retried.
    """
    name = failure_counts.bucket_of(agent.app)
    with suppress(NotFoundError):  # nothing has failed yet
        counts = await admin.subject_counts(f"KV_{name}", subject=f"$KV.{name}.{agent.agent}.*.{sequence}.*")
        bucket = await open_existing(admin, name, own=True)
        for subject in counts:
            key = subject.removeprefix(f"$KV.{name}.")
            if bucket is not None and await bucket.get(key) is not None:
                return Asked(stream=key.split(".")[1], sequence=sequence, key=key, decision=decision)
    why = "is in no stream that it reads"
    for stream in (agent.stream, *agent.beside):
        events = await inventory.existing(admin.consumer_info(stream, agent.consumer))
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


async def _answer(admin: Admin, agent: AgentConsumer, ordered: KeyValue, asked: Asked) -> Answer | None:
    """Return what became of a decision, and remove it; None while that is not known."""
    order, decides = await _order(ordered, asked), asked.decision.decides
    answer = partial(Answer, stream=asked.stream, sequence=asked.sequence)
    if not order:
        return answer(carried_out=False, text="somebody else has decided about it since")
    now = await _taken(admin, agent, asked, order)
    if now is None or not now.outcome:
        return None
    with suppress(ConflictError):  # somebody has decided again
        await ordered.delete(asked.key, revision=order)
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


async def _unanswered(admin: Admin, agent: AgentConsumer, ordered: KeyValue, asked: Asked) -> Answer:
    """Return why nothing is known yet of what became of a decision."""
    order = await _order(ordered, asked)
    events = await inventory.existing(admin.consumer_info(asked.stream, agent.consumer))
    answer = partial(Answer, stream=asked.stream, sequence=asked.sequence, carried_out=False)
    now = await _taken(admin, agent, asked, order)
    if not asked.known and now is None and order:
        with suppress(ConflictError):  # somebody has decided again
            await ordered.delete(asked.key, revision=order)
        if (now := await _taken(admin, agent, asked, order)) is None:  # no worker has taken it just before
            return answer(text="not retried: no worker that runs knows of it, and nothing is decided")
    if now is not None and now.error:
        again = f"; that is tried again at {time_text(now.again_at)}" if now.again_at else ""
        return answer(text=f"not skipped yet: {now.error}{again}")
    if now is not None:
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


async def _order(ordered: KeyValue, asked: Asked) -> int:
    """Return the revision of a decision; 0 where it is not there any more."""
    entry = await ordered.get(asked.key)
    now = orders.decision(entry)
    same = now is not None and (now.at, now.decides) == (asked.decision.at, asked.decision.decides)
    return entry.revision if entry is not None and same else 0


async def _taken(admin: Admin, agent: AgentConsumer, asked: Asked, order: int) -> Taken | None:
    """Return what workers have recorded of the decision of this revision; None where none has taken it."""
    bucket = await open_existing(admin, failure_counts.bucket_of(agent.app), own=True)
    entry = await bucket.get(f"{asked.key}{DECIDED}") if bucket is not None else None
    return failure_counts.taken(entry, order=order)
