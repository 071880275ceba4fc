"""Says of a worker process that it lives, and what it handles (`state.worker_records`), so that the console lists it.

The record is put when the worker begins, every `WRITE_SECONDS`, and soon after the server has pinned this worker or
another one for a singleton. It is removed at an orderly end. Nothing waits for it, and where it cannot be written the
worker goes on without.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec

from aviso_workers import clocks
from aviso_workers.backends import Backend
from aviso_workers.declare.agents import Agent
from aviso_workers.engine.key_value import RetryingKeyValue
from aviso_workers.engine.subscription import SubscriptionRun
from aviso_workers.errors import BackendError, RefusedError, UnavailableError
from aviso_workers.events import Events, WorkerNotRecorded
from aviso_workers.sessions import agent_subscriptions
from aviso_workers.state import worker_records
from aviso_workers.state.worker_records import BUCKET, TTL_SECONDS, WRITE_SECONDS, AtWork, WorkerRecord
from aviso_workers.version import __version__

__all__ = ["MEMBER", "WorkerRecorder", "resident_bytes"]

MEMBER: ContextVar[str] = ContextVar("member", default="")
"""The name of this process in its fleet."""
LOOK_SECONDS = 2.0
"""How often a worker looks whether it is still the one that a singleton's server has pinned; nothing is sent."""
END_SECONDS = 1.0
"""How long a worker that ends takes at most to remove its record."""
STATM = Path("/proc/self/statm")


class WorkerRecorder:
    """Records one worker of an app. Keep `keep_writing` running beside its agents."""

    def __init__(
        self,
        backend: Backend,
        *,
        app: str,
        agents: Mapping[str, tuple[Agent[Any, Any], str]],
        runs: Mapping[str, SubscriptionRun],
        events: Events,
    ) -> None:
        """`agents` are by name, each with its stream; `runs` are those that are at work by now."""
        self._backend = backend
        self._agents = agents
        self._runs = runs
        self._events = events
        self._host, self._process, self._member = socket.gethostname(), os.getpid(), MEMBER.get()
        self._started = clocks.utc_now(backend.clock)
        self._key = worker_records.key_of(app, f"{self._host}_{self._process}_{secrets.token_hex(4)}")
        self._bucket = RetryingKeyValue(
            backend, BUCKET, ttl_seconds=TTL_SECONDS, patience_seconds=LOOK_SECONDS, own=True
        )
        self._stored = self._reported = False

    async def keep_writing(self) -> None:
        """Record the worker; cancel this to end it, which removes the record."""
        try:
            while True:
                pinned = self._pinned()
                await self._write()
                await self._until_due(pinned)
        finally:
            if self._stored and self._backend.connection.ready:
                with clocks.move_on_after(self._backend.clock, END_SECONDS) as end, suppress(BackendError):
                    end.shield = True
                    await self._bucket.delete(self._key)

    async def _until_due(self, pinned: Mapping[str, bool]) -> None:
        """Wait until the record is to be put again: after its time, or when another one of `pinned` is so."""
        wait = LOOK_SECONDS if pinned else WRITE_SECONDS
        for _ in range(int(WRITE_SECONDS / wait)):
            await self._backend.clock.sleep(wait)
            if self._pinned() != pinned:
                return

    async def _write(self) -> None:
        self._stored = True  # or it may be, where no answer comes
        try:
            await self._bucket.put(self._key, msgspec.json.encode(self._record()))
        except UnavailableError:
            return  # it is put again; that the connection is lost is stated elsewhere
        except BackendError as error:
            self._stored = not isinstance(error, RefusedError)
            if not self._reported:
                self._reported = True
                self._events.emit(WorkerNotRecorded(bucket=BUCKET, error=error))
        else:
            self._reported = False

    def _pinned(self) -> dict[str, bool]:
        """Return whether this worker is the pinned one, by singleton."""
        return {
            name: name in self._runs and self._runs[name].pinned(stream)
            for name, (agent, stream) in self._agents.items()
            if agent.policy.singleton
        }

    def _record(self) -> WorkerRecord:
        pinned = self._pinned()
        return WorkerRecord(
            host=self._host,
            process=self._process,
            member=self._member,
            version=__version__,
            started=self._started,
            rss=_resident_bytes_if_known(),
            agents={
                name: AtWork(
                    stream=stream,
                    in_flight=self._runs[name].buffer.running if name in self._runs else 0,
                    at_once=agent_subscriptions.at_once(agent),
                    pinned=pinned.get(name),
                )
                for name, (agent, stream) in self._agents.items()
            },
        )


def resident_bytes() -> int:
    """Return how much memory of this process is resident, in bytes. Raises OSError where the system does not say it."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _resident_bytes_if_known() -> int | None:
    try:
        return resident_bytes()
    except OSError:
        return None
