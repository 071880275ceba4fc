"""Snapshots of a server, of which all reports are made: its streams, their consumers, and what workers have recorded.

A snapshot is one request for all streams and one or more for each that has consumers, which a server lists some
hundreds at a time, and some for the records. Which streams are looked at, the server says, and no declaration.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import TypeVar

import anyio
from msgspec import Struct

from aviso_workers.aviso.codec import store_time
from aviso_workers.backends import Admin
from aviso_workers.declare.agents import agent_of
from aviso_workers.errors import NotFoundError, UnavailableError
from aviso_workers.jetstream.info import ConsumerInfo, StreamInfo
from aviso_workers.ops import agent_inventory, inventory
from aviso_workers.ops.agent_inventory import Recorded
from aviso_workers.ops.health import CATCHES_UP, AllWorkers, Unknown
from aviso_workers.ops.inventory import Denials, Listing, asked, noted
from aviso_workers.state import bucket_names, own_streams, worker_records
from aviso_workers.state.own_streams import RETRIES
from aviso_workers.state.worker_records import AppWorkers
from aviso_workers.task_groups import asked_of_each, task_group

T = TypeVar("T")
AT_ONCE = 32
"""The most streams whose consumers are listed side by side."""
MOST_ASKED = 10


class ServerSnapshot(Struct, frozen=True, kw_only=True):
    """A snapshot of the streams and consumers of a server."""

    at: float
    """Seconds of a monotonic clock."""
    streams: dict[str, StreamInfo]
    unavailable: list[str]
    """Streams and, as `STREAM > CONSUMER`, consumers for which no server answers: they are in none of the others."""
    consumers: dict[tuple[str, str], ConsumerInfo]
    """By stream and name."""
    oldest_pending: Mapping[tuple[str, str], datetime] = {}
    """As `oldest_pending` returns it."""
    recorded: Recorded
    workers: AllWorkers
    denied: Denials
    """What the server denies our user of it."""

    def workers_of(self, app: str) -> AppWorkers | Unknown:
        """Return the workers of an app, as far as they have recorded themselves."""
        return self.workers if isinstance(self.workers, Unknown) else self.workers.get(app, AppWorkers())


async def take(admin: Admin, *, stream: str = "") -> ServerSnapshot:
    """Take a snapshot of all streams and their consumers, or of one `stream` and of what is handed back to its agents.
    What is denied is left out, and what no server answers for. Raises `BackendError`, and `NotFoundError` where there
    is no such stream.
    """
    denied = Denials()
    listed = await (_listed(admin, stream) if stream else inventory.streams(admin, denied=denied))
    streams, away = {each.name: each for each in listed.found}, [*listed.unavailable]
    consumers: dict[tuple[str, str], ConsumerInfo] = {}
    limiter = anyio.CapacityLimiter(AT_ONCE)

    async def list_consumers(name: str) -> None:
        async with limiter:
            try:
                found = await inventory.consumers(admin, name, denied=denied)
            except NotFoundError:
                streams.pop(name, None)  # it was deleted meanwhile
            else:
                consumers.update({(name, each.name): each for each in found.found})
                away.extend(f"{name} > {consumer}" for consumer in found.unavailable)

    async with task_group() as tasks:  # a server waits for those that do not answer
        for name in [stream] if stream else [name for name, found in streams.items() if found.consumers]:
            tasks.start_soon(list_consumers, name)
    if stream:
        apps = {of[0] for _, name in consumers if (of := agent_of(name))}
        async with task_group() as tasks:
            for app in apps:
                tasks.start_soon(list_consumers, own_streams.of_app(RETRIES, app))
    return ServerSnapshot(
        at=anyio.current_time(),
        streams=streams,
        unavailable=sorted(away),
        consumers=consumers,
        oldest_pending=await asked(denied, "messages", oldest_pending(admin, consumers), {}),
        recorded=await agent_inventory.recorded(admin, denied=denied),
        workers=await workers(admin, denied=denied),
        denied=denied,
    )


async def _listed(admin: Admin, stream: str) -> Listing[StreamInfo]:
    try:
        return Listing(found=[await admin.stream_info(stream)], unavailable=[])
    except UnavailableError:
        return Listing(found=[], unavailable=[stream])


async def oldest_pending(
    admin: Admin, consumers: Mapping[tuple[str, str], ConsumerInfo]
) -> dict[tuple[str, str], datetime]:
    """Return when the first notification was stored that an agent was not delivered yet, by stream and consumer, of
    those with many that wait, or of which nobody asks for any. `MOST_ASKED` messages are looked at. Raises
    `DeniedError`.
    """
    agents: dict[tuple[str, int, str], list[tuple[str, str]]] = defaultdict(list)
    for key, each in consumers.items():
        if agent_of(key[1]) and each.num_pending and (each.num_pending >= CATCHES_UP or not each.num_waiting):
            (wanted,) = each.config.filters if len(each.config.filters) == 1 else (">",)
            agents[key[0], each.position + 1, wanted].append(key)
    found: dict[tuple[str, str], datetime] = {}

    async def ask(stream: str, sequence: int, wanted: str) -> None:
        with suppress(NotFoundError, UnavailableError):
            message = await admin.message(stream, sequence, next_by_subject=wanted)
            if message is not None:
                stored = store_time(message)
                found.update(dict.fromkeys(agents[stream, sequence, wanted], stored))

    async with task_group() as asking:  # a server waits for a leader that does not answer
        for one in sorted(agents, key=lambda one: -max(consumers[key].num_pending for key in agents[one]))[:MOST_ASKED]:
            asking.start_soon(ask, *one)
    return found


async def workers(admin: Admin, *, denied: Denials) -> AllWorkers:
    """Return the workers of all apps. What is denied is noted as `workers`, or as `workers of` one app. Raises
    `BackendError`.
    """

    async def known(part: str, request: Awaitable[T]) -> T | Unknown:
        try:
            with noted(denied, part):
                return await request
        except UnavailableError as error:  # the other things are worth more
            return Unknown(str(error))
        return Unknown(denied.reason(part))

    apps = await known("workers", bucket_names.apps_with(admin, "live"))
    if isinstance(apps, Unknown):
        return apps
    return await asked_of_each(apps, lambda app: known(f"workers of {app}", worker_records.of_app(admin, app)))
