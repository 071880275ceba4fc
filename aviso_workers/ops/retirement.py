"""Retirement of an app, or of one of its agents: its consumers, buckets and retries are removed from the server.

Called by `agents rm`, which first makes a plan of what there is, and then carries it out. The notifications themselves
and the dead letters stay. Workers that still run would recreate the consumers: while there are some, nothing is
removed. The server does not know of a worker that is frozen or cut off from it, whose pull requests have expired. So an
app that was active lately counts as one whose workers run, unless the operator says that they are stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

from msgspec import Struct

from aviso_workers.backends import Admin, ConsumerInfo
from aviso_workers.errors import NotFoundError, RefusedError, UnavailableError
from aviso_workers.jetstream.specs import BUCKET
from aviso_workers.ops import agent_inventory, inventory
from aviso_workers.ops.inventory import Listing, T
from aviso_workers.state import (
    consumer_records,
    dead_letter_records,
    declarations,
    failure_counts,
    orders,
    own_buckets,
    own_streams,
    table_records,
    timer_requests,
)
from aviso_workers.state.own_streams import COUNTERS, RETRIES

ACTIVE = timedelta(minutes=5)
"""An agent that was delivered something, or has settled something, within this time may have a worker. A version of an
agent counts as gone after as long (`engine.shared_filters`)."""


class Retirement(Struct, frozen=True, kw_only=True):
    """The plan of a retirement: what would be removed of an app, or of one of its agents."""

    app: str
    agent: str
    """The agent; empty for all of them, and what belongs to the app as a whole."""
    consumers: tuple[tuple[str, str], ...]
    """Stream and name of each."""
    records: tuple[tuple[str, str], ...]
    """Agent and stream of each record of how far a consumer had come."""
    streams: dict[str, int]
    """Streams of buckets, such as failure counts, leases, windows and tables, with their entries."""
    subjects: dict[tuple[str, str], int]
    """By stream and subject, messages in streams that others share."""
    dead_letters: int
    """Dead letters, which stay until they are dropped."""

    @property
    def nothing(self) -> bool:
        return not (self.consumers or self.records or self.streams or self.subjects)


async def plan(admin: Admin, owner: str, agent: str = "", *, workers_stopped: bool = False) -> Retirement:
    """Return the plan to retire the app named `owner`, or its agent `agent`.

    Raises `NotFoundError` where there is nothing, `RefusedError` where a worker of it asks for notifications or, unless
    all `workers_stopped`, may hold some or was active lately, `UnavailableError` where no server answers for something
    that may be the app's.
    """
    streams = _require_all(await inventory.streams(admin))
    listed = [_require_all(await inventory.consumers(admin, stream.name)) for stream in streams if stream.consumers]
    consumers = [consumer for found in listed for consumer in found if _is_of(consumer.name, owner, agent)]
    _require_no_workers(consumers, workers_stopped=workers_stopped)
    dead_letters = await agent_inventory.dead_letters(admin)
    found = Retirement(
        app=owner,
        agent=agent,
        consumers=tuple((consumer.stream, consumer.name) for consumer in consumers),
        records=tuple(
            (of, stream)
            for (by, of, stream) in await consumer_records.stored(admin)
            if by == owner and agent in ("", of)
        ),
        streams={
            stream.name: stream.messages
            for stream in streams
            if stream.name.startswith(BUCKET) and own_buckets.is_of(stream.name.removeprefix(BUCKET), owner, agent)
        },
        subjects=await _subjects(admin, owner, agent),
        dead_letters=sum(count for of, count in dead_letters.items() if of[0] == owner and agent in ("", of[1])),
    )
    if found.nothing:
        raise NotFoundError(f"there is nothing of {f'agent {agent} of ' if agent else ''}app {owner} on this server")
    return found


def _require_no_workers(consumers: Sequence[ConsumerInfo], *, workers_stopped: bool) -> None:
    if at_work := sorted({consumer.name for consumer in consumers if consumer.num_waiting}):
        raise RefusedError(f"workers ask for notifications of {', '.join(at_work)}: stop them first")
    if not workers_stopped and (why := [text for consumer in consumers if (text := why_active(consumer))]):
        raise RefusedError(
            f"{'; '.join(why)}: a worker that is frozen or cut off from the server may go on later. Make sure that all "
            "workers are stopped, and say --workers-stopped"
        )


def why_active(consumer: ConsumerInfo) -> str:
    """Return the reason why a worker may have the consumer open, although none asks for anything; empty: none has."""
    if consumer.num_ack_pending:
        return f"{consumer.name} of {consumer.stream} has {consumer.num_ack_pending} delivered and not settled"
    last = max(filter(None, (consumer.last_delivered, consumer.last_settled)), default=None)
    if last is None or consumer.time - last > ACTIVE:
        return ""
    return f"{consumer.name} of {consumer.stream} was active {(consumer.time - last).total_seconds():.0f} s ago"


def _require_all(listed: Listing[T]) -> list[T]:
    if listed.unavailable:
        raise UnavailableError(
            f"no server answers for {', '.join(listed.unavailable)}: start the server that has it first"
        )
    return listed.found


async def retire(admin: Admin, plan: Retirement) -> None:
    """Remove everything in the plan. What is gone already is passed over. Raises `BackendError`."""
    for stream, consumer in plan.consumers:
        with suppress(NotFoundError):
            await admin.delete_consumer(stream, consumer)
    for agent, stream in plan.records:
        await consumer_records.remove(admin, app=plan.app, agent=agent, stream=stream)
    await consumer_records.remove_notes(admin, app=plan.app, agent=plan.agent)
    if not plan.agent:
        await declarations.remove(admin, app=plan.app)
    for stream, subject in plan.subjects:
        with suppress(NotFoundError):
            await admin.purge_stream(stream, subject=subject)
    for stream in plan.streams:
        with suppress(NotFoundError):
            await admin.delete_stream(stream)


async def _subjects(admin: Admin, owner: str, agent: str) -> dict[tuple[str, str], int]:
    """Return the number of messages to purge by stream and subject: the retries, and the counters of the app or the
    failure counts and decisions of the agent.
    """
    wanted = [(own_streams.of_app(RETRIES, owner), dead_letter_records.retry_subject(owner, agent or "*"))]
    if not agent:
        wanted.append((own_streams.of_app(COUNTERS, owner), f"{table_records.COUNTERS_SUBJECT}.{owner}.>"))
    if agent:
        failures = failure_counts.bucket_of(owner)
        ordered = orders.bucket_of(owner)
        wanted += [(f"KV_{bucket}", f"$KV.{bucket}.{agent}.>") for bucket in (failures, ordered)]
        wanted.append((f"KV_{ordered}", f"$KV.{ordered}.{timer_requests.pause_key(owner, agent, of='agents')}"))
    found = {}
    for stream, subject in wanted:
        with suppress(NotFoundError):
            if count := sum((await admin.subject_counts(stream, subject=subject)).values()):
                found[stream, subject] = count
    return found


def _is_of(consumer: str, owner: str, agent: str) -> bool:
    of = agent_inventory.agent_of(consumer)
    return of is not None and of[0] == owner and agent in ("", of[1])
