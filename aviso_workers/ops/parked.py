"""The notifications of agents that are parked: listed, told in words, and decided upon by a person. Called by `agents
retrying`, `agents retry` and `agents skip`, and by all that says how agents are.

A worker looks at each of its parked notifications once in a minute (`engine.redeliveries`), and does what was decided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import aclosing, suppress

import msgspec
from msgspec import Struct, structs

from aviso_workers.backends import Admin, ConsumerInfo
from aviso_workers.backends.buckets import open_existing
from aviso_workers.errors import NotFoundError, RefusedError, UnavailableError
from aviso_workers.jetstream.key_value import KeyValue
from aviso_workers.ops.denials import Denials, asked, noted
from aviso_workers.state import consumer_records, failure_counts
from aviso_workers.state.failure_counts import ParkedRecord

__all__ = ["Parked", "commands_text", "everywhere", "of_agent", "retry", "skip", "unsettled", "waiting_text"]


class Parked(Struct, frozen=True, kw_only=True):
    """A notification that waits for a person."""

    app: str
    agent: str
    stream: str
    sequence: int
    record: ParkedRecord
    key: str
    """The key of the record in the bucket of failure counts."""


async def of_agent(admin: Admin, app: str, agent: str = "*") -> list[Parked]:
    """Return what is parked of an agent, or of all agents of the app, the oldest first, without what a person has
    decided on. Raises `BackendError`.
    """
    bucket = await _bucket(admin, app)
    if bucket is None:
        return []
    prefix = f"$KV.{app}{failure_counts.BUCKET_SUFFIX}."
    stream = f"KV_{app}{failure_counts.BUCKET_SUFFIX}"
    subjects = (f"{prefix}{agent}.*.*.*{failure_counts.PARKED}",)
    last = (await admin.stream_info(stream)).last_sequence
    found = []
    async with aclosing(admin.read(stream, filter_subjects=subjects, last_sequence=last)) as reading:
        async for message in reading:
            key = message.subject.removeprefix(prefix)
            record = failure_counts.parked(message.data)
            failed = await bucket.get(key.removesuffix(failure_counts.PARKED))
            if record is not None and not record.skip and failed is not None:  # or it has succeeded since
                of, of_stream, sequence = key.split(".")[:3]
                parked = Parked(app=app, agent=of, stream=of_stream, sequence=int(sequence), record=record, key=key)
                found.append(parked)
    return sorted(found, key=lambda each: each.sequence)


async def everywhere(admin: Admin, denied: Denials) -> dict[tuple[str, str, str], tuple[Parked, ...]]:
    """Return what is parked, by app, agent and stream; what the server denies of it is noted as `parked`, and of one
    app as `parked of <app>`. Raises `BackendError`.
    """
    found: dict[tuple[str, str, str], tuple[Parked, ...]] = {}
    names = await asked(denied, "parked", admin.stream_names(), [])
    for app in filter(None, map(failure_counts.app_of, names)):
        with noted(denied, f"parked of {app}"):
            for each in await of_agent(admin, app) if await _has_parked(admin, app) else ():
                key = (app, each.agent, each.stream)
                found[key] = (*found.get(key, ()), each)
    return found


async def _has_parked(admin: Admin, app: str) -> bool:
    stream = f"KV_{app}{failure_counts.BUCKET_SUFFIX}"
    try:
        return bool(await admin.subject_counts(stream, subject=failure_counts.PARKED_SUBJECT))
    except (NotFoundError, UnavailableError):  # deleted meanwhile, or where no server answers for it
        return False


def unsettled(found: Iterable[Parked], consumer: ConsumerInfo | None) -> tuple[Parked, ...]:
    """Return those that their consumer has not settled. One that has left its stream, as by a purge or because a newer
    one has its subject, is settled by the server and keeps its record.
    """
    return tuple(each for each in found if consumer is None or each.sequence > consumer.ack_floor)


def waiting_text(found: Sequence[Parked]) -> str:
    """Return how many notifications of an agent are parked, and why; empty where none is."""
    if not found:
        return ""
    behind = sum(each.record.behind for each in found)
    waits = f", and {behind} wait behind them" if behind else ""
    return f"{len(found)} wait for your decision{waits}: {found[0].record.error}"


def commands_text(found: Sequence[Parked]) -> str:
    """Return which commands list and decide on notifications that are parked."""
    of = found[0]
    return f"`agents retrying {of.app} {of.agent}` lists them, `agents retry` or `agents skip` decides"


async def retry(admin: Admin, *parked: Parked) -> None:
    """Have notifications tried again, with all of their attempts. Raises `BackendError`; it can be repeated then."""
    await _note(admin, parked)
    for each in parked:
        if (bucket := await _bucket(admin, each.app)) is not None:
            await bucket.delete(each.key)  # first: what is broken off here stays parked
            await bucket.put(each.key.removesuffix(failure_counts.PARKED), b"0")


async def skip(admin: Admin, *parked: Parked) -> None:
    """Have notifications become dead letters. Raises `BackendError`; it can be repeated then."""
    await _note(admin, parked)
    for each in parked:
        if (bucket := await _bucket(admin, each.app)) is not None:
            await bucket.put(each.key, msgspec.json.encode(structs.replace(each.record, skip=True)))


async def _note(admin: Admin, parked: Collection[Parked]) -> None:
    """Note when this is decided, before it is: what is broken off between the two stays parked, and is told as that."""
    for (app, agent), count in Counter((each.app, each.agent) for each in parked).items():
        with suppress(RefusedError):  # without it, the agent may be taken for stuck until its worker has looked
            bucket = await consumer_records.bucket(admin)
            await bucket.put(consumer_records.note_key(app, "agents", agent, consumer_records.DECIDED), b"%d" % count)


async def _bucket(admin: Admin, app: str) -> KeyValue | None:
    return await open_existing(admin, f"{app}{failure_counts.BUCKET_SUFFIX}", own=True)
