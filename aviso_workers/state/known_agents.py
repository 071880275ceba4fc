"""The agents that an app has run, so that a renamed one is not taken for a new one.

An agent is known to the server by the names of its app and of itself. One that is renamed, given a prefix, or moved to
another app, has no consumer, and would handle its whole stream again. So workers record which agents of the app they
have run (`note`). A new agent does not begin while an agent that the code does not declare any more has been given
notifications of the same stream and filter: its author, or an operator, says first which of the two it is.

Of agents of other apps, a worker sees their consumers on the stream, where it may list them. Such an agent counts only
if it has the same name or the same function as well, and nobody works on it: two apps may read one stream.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

import anyio
from msgspec import Struct, structs

from aviso_workers.aviso.literals import quoted
from aviso_workers.backends import Backend, ConsumerInfo
from aviso_workers.declare.agents import agent_of, durable_name
from aviso_workers.errors import BackendError, DeniedError, NotFoundError, RefusedError, UnansweredError
from aviso_workers.jetstream import key_value, metadata
from aviso_workers.jetstream.key_value import Entry, record_of
from aviso_workers.jetstream.metadata import Version
from aviso_workers.state import consumer_records

SURE_SECONDS = 30.0
"""How long it is looked whether somebody works after all on an agent of another app on which nobody seemed to work. If
its workers are started later, as to go back to the old version, the new agent still does not begin."""


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
        self._left: dict[tuple[str, str], tuple[float, int, int]] = {}
        """The consumers of other apps on which nobody worked, by stream and name: when that was first seen, their
        deliveries and what they had settled then."""
        self._lock = anyio.Lock()

    async def require_new(self, agent: str, stream: str, own: Version) -> None:
        """Raise `RefusedError` where an agent without a consumer may be a renamed one. Raises `BackendError`."""
        for each in await self._read():
            if each.agent in self._declared or (each.stream, each.filter_subjects) != (stream, own.filter_subjects):
                continue
            record = await consumer_records.alive(self._backend, app=self._app, agent=each.agent, stream=stream)
            if record is None:
                continue
            info = None
            with suppress(NotFoundError):  # the record is up to half a minute old
                info = await self._backend.consumer_info(stream, durable_name(self._app, each.agent))
            if what := _read_of(stream, info, settled=record.ack_floor):
                quoted_old = quoted(f"{self._app}/{each.agent}")
                raise RefusedError(
                    f"agent {agent} has never run, and agent {each.agent}, which the code does not declare any more, "
                    f"has {what}. If {agent} is {each.agent} renamed, give it name={each.agent!r} or run "
                    f"`aviso-workers agents rename {quoted_old} {quoted(agent)}`; if it is another agent, give it "
                    "start='new' or start='all', or "
                    + (
                        "give this app another name, if another program runs that one"
                        if info is not None and info.num_waiting
                        else f"run `aviso-workers agents rm {quoted_old}`"
                    )
                )
        await self._require_not_of_another_app(agent, stream, own)

    async def _require_not_of_another_app(self, agent: str, stream: str, own: Version) -> None:
        try:
            consumers = await self._backend.consumers(stream)
        except (DeniedError, NotFoundError, UnansweredError):
            return  # we may not see them: then nothing is known of them
        for info in consumers:
            app, name = agent_of(info.name) or (self._app, "")
            what = _read_of(stream, info)
            if app == self._app or not what or not _is_alike(info, name, agent, own) or self._is_worked_on(info):
                continue
            raise RefusedError(
                f"agent {agent} of app {self._app} has never run, and agent {name} of app {app}, on which nobody "
                f"works, has {what}. If they are one agent, run `aviso-workers agents rename "
                f"{quoted(f'{app}/{name}')} {quoted(f'{self._app}/{agent}')}`; if not, give {agent} start='new' or "
                "start='all'"
            )

    def _is_worked_on(self, info: ConsumerInfo) -> bool:
        """Return whether a worker asks for notifications, or has been given or has settled some since it was first
        seen. One that has enough of them does not ask for a while."""
        now = self._backend.clock.monotonic()
        key = (info.stream, info.name)
        since, *seen = self._left.get(key, (now, info.deliveries, info.settled))
        if now - since < SURE_SECONDS and (info.num_waiting or seen != [info.deliveries, info.settled]):
            return True
        self._left.setdefault(key, (now, info.deliveries, info.settled))
        return False

    async def rename(self, agent: str, to: str, *, app: str) -> None:
        """Record that an app has run an agent of this one under a name there. Raises `BackendError`."""
        for each in await self._read():
            if each.agent == agent:
                await KnownAgents(self._backend, app=app, declared=())._store(structs.replace(each, agent=to))

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


def _is_alike(info: ConsumerInfo, name: str, agent: str, own: Version) -> bool:
    """Return whether a version of the agent of a consumer has the filter of this one, and its name or its function."""
    return metadata.is_of_agent(info.config) and any(
        each.filter_subjects == own.filter_subjects and (name == agent or (own.function == each.function != ""))
        for each in metadata.noted_versions(info.config)
    )


def _read_of(stream: str, info: ConsumerInfo | None, *, settled: int = 0) -> str:
    """Return what an agent has read of its stream, for people; empty where it has read nothing."""
    if settled := max(settled, info.settled if info else 0):
        return f"settled stream {stream} with the same filter up to sequence {settled}"
    if info and info.deliveries:  # with its first notification unfinished, as while that waits for a retry
        return f"been given notifications of stream {stream} with the same filter"
    return ""


def _read(entry: Entry | None) -> tuple[_Known, ...]:
    """Return the known agents of an entry; none where they cannot be read."""
    return record_of(entry, tuple[_Known, ...]) or ()
