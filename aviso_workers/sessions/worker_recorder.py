"""Says of a worker process that it lives, what it handles, and what hinders it (`state.worker_records`), for all that
says how agents are.

It does so when it begins, every `WRITE_SECONDS`, and within `LOOK_SECONDS` after something has changed that operators
are to hear at once. Nothing waits for it, and where it cannot be written the worker goes on without: why not is stated
by the connection.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Hashable, Iterable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

from aviso_workers import clocks
from aviso_workers.aviso.literals import printable
from aviso_workers.backends import Backend
from aviso_workers.declare.agents import Agent
from aviso_workers.engine.key_value import RetryingKeyValue
from aviso_workers.engine.subscription import SubscriptionRun
from aviso_workers.errors import BackendError, RefusedError
from aviso_workers.events import CONNECTION, WORKER, AgentDisturbed, AgentStarted, Event, Hindrance, all_kinds
from aviso_workers.jetstream.fields import LONGEST_SAID
from aviso_workers.jetstream.key_value import encode_key
from aviso_workers.sessions.agent_subscriptions import at_once
from aviso_workers.state import own_streams
from aviso_workers.state.own_streams import RETRIES
from aviso_workers.state.worker_records import (
    MOST_HINDRANCES,
    TTL_SECONDS,
    WRITE_SECONDS,
    AtWork,
    Hindered,
    WorkerRecord,
    bucket_of,
)
from aviso_workers.version import __version__

OBSERVED = tuple(kind for kind in all_kinds() if kind.hindrance is not Event.hindrance)
"""The facts that `Hindrances.observe` is for."""
START = ""
"""What an agent lacks that has not begun to read; no stream has such a name."""
MEMBER: ContextVar[str] = ContextVar("member", default="")
"""The name of this process in its fleet."""
LOOK_SECONDS = 2.0
"""How often it is looked whether something has changed; nothing is sent."""
END_SECONDS = 1.0
"""How long a worker that ends takes at most to remove its record."""
STATM = Path("/proc/self/statm")


class Hindrances:
    """What keeps a worker from being ready, as the facts say it. `/readyz` tells it, and the worker records it.

    A worker is ready when it is connected, this worker could lead, and every agent reads, is not stuck, can read again
    what waits, and can store dead letters.
    """

    def __init__(self, agents: Iterable[str]) -> None:
        now = datetime.now(UTC)
        self._found = {(WORKER, CONNECTION): Hindrance(WORKER, CONNECTION, "not connected yet", since=now)}
        """By agent (or `WORKER`) and by what they are about."""
        for agent in agents:
            self._found[agent, START] = Hindrance(agent, START, "has not started", since=now)

    def observe(self, event: Event) -> None:
        """Note what hinders the worker, or does so no more."""
        hindrance = event.hindrance()
        assert hindrance is not None
        agent, of = hindrance.agent, hindrance.of
        if isinstance(event, AgentStarted | AgentDisturbed) and not own_streams.app_of(RETRIES, event.stream):
            self._found.pop((agent, START), None)  # an agent may read what is tried again before its own stream
        if hindrance.text is None:
            self._found.pop((agent, of), None)
        else:
            before = self._found.get((agent, of))
            self._found[agent, of] = hindrance._replace(since=before.since if before else datetime.now(UTC))

    @property
    def found(self) -> list[Hindrance]:
        """The connection first, then what else the worker lacks, then what its agents lack."""
        return sorted(self._found.values(), key=lambda each: (each.agent != WORKER, each.of != CONNECTION))


AWAY, SHUT, PINNED = "away", "shut", "pinned"
"""What is so of an agent, of which operators are to hear at once."""


class WorkerRecorder(Struct, eq=False, dict=True):
    """Records one worker of an app. `agents` are given with their streams; `runs` are those that have begun."""

    backend: Backend
    app: str
    agents: Mapping[str, tuple[Agent[Any, Any], str]]
    runs: Mapping[str, SubscriptionRun]
    hindrances: Hindrances
    timers: tuple[str, ...] = ()
    code: str = ""

    def __post_init__(self) -> None:
        self._clock = self.backend.clock
        self._since: dict[Hashable, float] = {}
        """When something was seen first that is so."""
        self._bucket = RetryingKeyValue(
            self.backend, bucket_of(self.app), ttl_seconds=TTL_SECONDS, patience_seconds=LOOK_SECONDS, own=True
        )
        self._key = encode_key(f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}")
        self._begun = self._clock.monotonic()
        self._record = WorkerRecord(
            host=socket.gethostname(),
            process=os.getpid(),
            member=MEMBER.get(),
            version=__version__,
            started=clocks.utc_now(self._clock),
            age_seconds=0.0,
            agents={},
            timers=self.timers,
            code=self.code,
        )

    async def keep_recorded(self) -> None:
        """Record the worker; cancel this to end it, which records that it has ended in order."""
        stored = False
        try:
            while True:
                told, again = self._changing(), False
                try:
                    stored = True  # or it may be, where no answer comes
                    await self._bucket.put(self._key, msgspec.json.encode(self._now()))
                except BackendError as error:
                    stored = not isinstance(error, RefusedError)
                    again = stored  # soon, or it seems to be killed when the server is back
                for _ in range(int(WRITE_SECONDS / LOOK_SECONDS)):
                    await self._clock.sleep(LOOK_SECONDS)
                    if again or self._changing() != told:
                        break
        finally:
            if stored and self.backend.connection.ready:
                with clocks.move_on_after(self._clock, END_SECONDS) as end, suppress(BackendError):
                    end.shield = True
                    age = self._clock.monotonic() - self._begun
                    ended = structs.replace(self._record, age_seconds=age, timers=(), ended=True)
                    await self._bucket.put(self._key, msgspec.json.encode(ended))

    def _changing(self) -> set[Hashable]:
        """Return what is so of which operators are to hear at once, and note since when."""
        found: set[Hashable] = {(each.agent, each.text) for each in self._told}
        for name, (agent, stream) in self.agents.items():
            if (run := self.runs.get(name)) is None or run.outage is None:
                continue
            if run.outage.is_away or run.outage.pace.is_shut:
                found.add((name, AWAY if run.outage.is_away else SHUT))
            if agent.policy.singleton and run.flow.pinned(stream):
                found.add((name, PINNED))
        now = self._clock.monotonic()
        self._since = {each: self._since.get(each, now) for each in found}
        return found

    def _now(self) -> WorkerRecord:
        now = self._clock.monotonic()
        hindered = [
            Hindered(
                agent=each.agent,
                text=printable(each.text or "")[:LONGEST_SAID],
                seconds=now - self._since.get((each.agent, each.text), now),
            )
            for each in self._told
        ]
        return structs.replace(
            self._record,
            age_seconds=now - self._begun,
            rss=resident_bytes(),
            agents={name: self._at_work(agent, stream) for name, (agent, stream) in self.agents.items()},
            hindrances=tuple(hindered),
        )

    @property
    def _told(self) -> list[Hindrance]:
        """What keeps it from being ready. That it has not begun, or has no connection, it cannot record."""
        found = self.hindrances.found
        return [each for each in found if not each.is_ready and each.of not in (CONNECTION, START)][:MOST_HINDRANCES]

    def _at_work(self, agent: Agent[Any, Any], stream: str) -> AtWork:
        """Return what is handled of an agent."""
        singleton = agent.policy.singleton
        known = AtWork(stream=stream, in_flight=0, at_once=at_once(agent), pinned=False if singleton else None)
        if (run := self.runs.get(agent.name)) is None or run.outage is None:
            return known
        oldest, waits_for = run.flow.dispatch.oldest() or (None, "")
        shut_at = self._since.get((agent.name, SHUT))
        return structs.replace(
            known,
            in_flight=run.flow.running,
            pinned=run.flow.pinned(stream) if singleton else None,
            oldest=oldest,
            waits_for=waits_for,
            away=run.outage.reason[:LONGEST_SAID] if run.outage.is_away else "",
            away_seconds=run.outage.away_seconds,
            shut_seconds=None if shut_at is None else self._clock.monotonic() - shut_at,
        )


def resident_bytes() -> int | None:
    """Return how much memory of this process is resident, in bytes; None where the system does not say it."""
    with suppress(OSError):
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None
