"""The agents that an app has run, so that a renamed one is not taken for a new one.

An agent is known to the server by its name alone. One that is renamed, or given a prefix, has no consumer, and would
handle its whole stream again. So workers record which agents of the app they have run (`note`). A new agent does not
begin while an agent that the code does not declare any more has been given notifications of the same stream and filter:
its author, or an operator, says first which of the two it is.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

import anyio
from msgspec import Struct, structs

from aviso_workers.aviso.literals import quoted
from aviso_workers.backends import Backend
from aviso_workers.declare.agents import durable_name
from aviso_workers.errors import BackendError, NotFoundError, RefusedError
from aviso_workers.jetstream import key_value
from aviso_workers.jetstream.key_value import Entry, record_of
from aviso_workers.state import consumer_records


class _Known(Struct, frozen=True, order=True):
    agent: str
    stream: str
    filter_subjects: tuple[str, ...]


class KnownAgents:
    """The agents of one app, as its workers have recorded them."""

    def __init__(self, backend: Backend, *, app: str, declared: Collection[str]) -> None:
        """`declared` are the names of all agents that the code of the app has."""
        self._backend = backend
        self._app = app
        self._declared = declared
        self._noted: set[_Known] = set()
        self._lock = anyio.Lock()

    async def require_new(self, agent: str, stream: str, filter_subjects: tuple[str, ...]) -> None:
        """Raise `RefusedError` where an agent without a consumer may be a renamed one. Raises `BackendError`."""
        for each in await self._read():
            if each.agent in self._declared or (each.stream, each.filter_subjects) != (stream, filter_subjects):
                continue
            if what := await self._read_by(each):
                raise RefusedError(
                    f"agent {agent} has never run, and agent {each.agent}, which the code does not declare any more, "
                    f"has {what}. If {agent} is {each.agent} renamed, give it name={each.agent!r} or run "
                    f"`aviso-workers agents rename {quoted(f'{self._app}/{each.agent}')} {quoted(agent)}`; if it is "
                    "another agent, give it start='new' or start='all', or run "
                    f"`aviso-workers agents rm {quoted(f'{self._app}/{each.agent}')}`"
                )

    async def _read_by(self, known: _Known) -> str:
        """Return what an agent has read of its stream, for people; empty where it has read nothing, or was removed."""
        record = await consumer_records.alive(self._backend, app=self._app, agent=known.agent, stream=known.stream)
        if record is None:
            return ""
        settled, deliveries = record.ack_floor, 0
        with suppress(NotFoundError):  # the record is up to half a minute old
            info = await self._backend.consumer_info(known.stream, durable_name(self._app, known.agent))
            settled, deliveries = max(settled, info.settled), info.deliveries
        if settled:
            return f"settled stream {known.stream} with the same filter up to sequence {settled}"
        if deliveries:  # with its first notification unfinished, as while that waits for a retry
            return f"been given notifications of stream {known.stream} with the same filter"
        return ""

    async def rename(self, agent: str, to: str) -> None:
        """Record that the app has run an agent under another name. Raises `BackendError`."""
        for each in await self._read():
            if each.agent == agent:
                await self._store(structs.replace(each, agent=to))

    async def note(self, agent: str, stream: str, filter_subjects: tuple[str, ...]) -> tuple[str, ...]:
        """Record that the app runs the agent, and return other streams that the agent has read before.

        Where that fails, the next start does it.
        """
        wanted = _Known(agent, stream, filter_subjects)
        if wanted in self._noted:
            return ()
        try:
            async with self._lock:
                known = await self._store(wanted)
        except BackendError:
            return ()
        self._noted.add(wanted)
        return tuple(each.stream for each in known if each.agent == agent and each.stream != stream)

    async def _store(self, wanted: _Known) -> tuple[_Known, ...]:
        """Record an agent, and return those from before."""

        def added(known: tuple[_Known, ...]) -> tuple[_Known, ...]:
            if wanted in known:
                return known
            others = (each for each in known if (each.agent, each.stream) != (wanted.agent, wanted.stream))
            return tuple(sorted([*others, wanted]))

        bucket = await consumer_records.bucket(self._backend, self._app)
        before, _ = await key_value.compare_and_set(bucket, self._key, read=_read, change=added)
        return before

    async def _read(self) -> tuple[_Known, ...]:
        return _read(await consumer_records.entry(self._backend, self._key))

    @property
    def _key(self) -> str:
        return f"{self._app}/agents"


def _read(entry: Entry | None) -> tuple[_Known, ...]:
    """Return the known agents of an entry; none where they cannot be read."""
    return record_of(entry, tuple[_Known, ...]) or ()
