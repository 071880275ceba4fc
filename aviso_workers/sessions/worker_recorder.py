"""Says of a worker process that it lives, and what it handles (`state.worker_records`), so that the console lists it.

It does so when it begins, every `WRITE_SECONDS`, and soon after a singleton has come to another worker. Nothing waits
for it, and where it cannot be written the worker goes on without: why not is stated by the connection.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from aviso_workers import clocks
from aviso_workers.backends import Backend
from aviso_workers.declare.agents import Agent
from aviso_workers.engine.key_value import RetryingKeyValue
from aviso_workers.engine.subscription import SubscriptionRun
from aviso_workers.errors import BackendError, RefusedError
from aviso_workers.jetstream.key_value import encode_key
from aviso_workers.sessions.agent_subscriptions import at_once
from aviso_workers.state.worker_records import BUCKET, TTL_SECONDS, WRITE_SECONDS, AtWork, WorkerRecord
from aviso_workers.version import __version__

__all__ = ["MEMBER", "at_work", "keep_recorded", "resident_bytes"]

MEMBER: ContextVar[str] = ContextVar("member", default="")
"""The name of this process in its fleet."""
LOOK_SECONDS = 2.0
"""How often it is looked which worker of a singleton is pinned; nothing is sent."""
END_SECONDS = 1.0
"""How long a worker that ends takes at most to remove its record."""
STATM = Path("/proc/self/statm")


async def keep_recorded(backend: Backend, app: str, at_work: Callable[[], dict[str, AtWork]]) -> None:
    """Record a worker of the app; cancel this to end it, which removes the record. `at_work` returns what the worker
    handles, by agent.
    """
    clock, host, process, stored = backend.clock, socket.gethostname(), os.getpid(), False
    bucket = RetryingKeyValue(backend, BUCKET, ttl_seconds=TTL_SECONDS, patience_seconds=LOOK_SECONDS, own=True)
    key = encode_key(f"{app}.{host}.{process}.{secrets.token_hex(4)}")
    started, begun = clocks.utc_now(clock), clock.monotonic()
    record = WorkerRecord(
        host=host,
        process=process,
        member=MEMBER.get(),
        version=__version__,
        started=started,
        age_seconds=0.0,
        agents={},
    )
    try:
        while True:
            age = clock.monotonic() - begun
            record = structs.replace(record, age_seconds=age, rss=resident_bytes(), agents=at_work())
            try:
                stored = True  # or it may be, where no answer comes
                await bucket.put(key, msgspec.json.encode(record))
            except BackendError as error:
                stored = not isinstance(error, RefusedError)
            pinned = [each.pinned for each in record.agents.values()]
            wait = WRITE_SECONDS if set(pinned) <= {None} else LOOK_SECONDS
            for _ in range(int(WRITE_SECONDS / wait)):
                await clock.sleep(wait)
                if [each.pinned for each in at_work().values()] != pinned:
                    break
    finally:
        if stored and backend.connection.ready:
            with clocks.move_on_after(clock, END_SECONDS) as end, suppress(BackendError):
                end.shield = True
                await bucket.delete(key)


def at_work(
    agents: Mapping[str, tuple[Agent[Any, Any], str]], runs: Mapping[str, SubscriptionRun]
) -> dict[str, AtWork]:
    """Return what is handled of agents, which are given with their streams; `runs` are those that have begun."""
    return {
        name: AtWork(
            stream=stream,
            in_flight=run.flow.running if (run := runs.get(name)) else 0,
            at_once=at_once(agent),
            pinned=bool(run and run.flow.pinned(stream)) if agent.policy.singleton else None,
        )
        for name, (agent, stream) in agents.items()
    }


def resident_bytes() -> int | None:
    """Return how much memory of this process is resident, in bytes; None where the system does not say it."""
    with suppress(OSError):
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None
