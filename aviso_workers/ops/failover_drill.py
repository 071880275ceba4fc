"""A drill of a failover, on a stream of its own: it is fenced and promoted while messages are published.

Called by the command `mirror drill`. The result is what the real one would cost: how far the mirror was behind,
for how long no publish was stored, and whether every message is stored exactly once after that.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from msgspec import Struct

from aviso_workers.aviso.codec import Message
from aviso_workers.backends import Admin, Backend, Management
from aviso_workers.errors import BackendError
from aviso_workers.ops import promotion
from aviso_workers.ops.promotion import Promotion
from aviso_workers.state.own_streams import DRILL as ORIGIN
from aviso_workers.state.own_streams import DRILL_MIRROR as MIRROR

SUBJECT = "aviso_workers.drill"
PUBLISH_SECONDS = 1.0
AGAIN_SECONDS = 0.01


class FailoverDrill(Struct, frozen=True, kw_only=True):
    """The result of a drill, which has passed where every message is stored once."""

    promotion: Promotion
    published: int
    """Messages that were acknowledged, before and after."""
    stored: int
    """Messages that the promoted mirror holds."""
    after_fence: int
    """Messages that the origin took after it was fenced."""
    interrupted_seconds: float
    """The longest time without an acknowledgement."""

    @property
    def passed(self) -> bool:
        return self.stored == self.published and self.after_fence == 0


async def rehearse(admin: Admin, *, origin_api: str = "", messages: int = 1000) -> FailoverDrill:
    """Fail over from a scratch stream at `origin_api` (a domain's, such as `$JS.hub.API`; empty: here) to one here.

    Both are removed again. Works inside of `async with app:`. Raises `BackendError`.
    """
    there = admin.at(origin_api)
    mirror, external = (ORIGIN, {"external": {"api": origin_api}}) if origin_api else (MIRROR, {})
    async with (
        _scratch(there, ORIGIN, {"subjects": [f"{SUBJECT}.>"]}),
        _scratch(admin, mirror, {"mirror": {"name": ORIGIN, **external}}),
    ):
        publisher = _Publisher(admin, (mirror, ORIGIN), messages)
        failure: BackendError | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publisher.run)
            await publisher.half.wait()
            try:
                promoted = await promotion.promote(admin, mirror)
                fenced = await there.stream_info(ORIGIN)
            except BackendError as error:
                failure = error
                tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure
        left = await there.stream_info(ORIGIN)
        return FailoverDrill(
            promotion=promoted,
            published=messages,
            stored=(await admin.stream_info(mirror)).messages,
            after_fence=left.last_sequence - fenced.last_sequence,
            interrupted_seconds=publisher.longest_interruption,
        )


class _Publisher:
    """A publisher of one message after another, each until one of the streams has stored it."""

    def __init__(self, backend: Backend, streams: Iterable[str], messages: int) -> None:
        self.half = anyio.Event()
        self.longest_interruption = 0.0
        self._backend = backend
        self._streams = streams
        self._messages = messages

    async def run(self) -> None:
        last = anyio.current_time()
        for number in range(self._messages):
            if number == self._messages // 2:
                self.half.set()
            await self._publish(number)
            last, before = anyio.current_time(), last
            self.longest_interruption = max(self.longest_interruption, last - before)

    async def _publish(self, number: int) -> None:
        message = Message(subject=f"{SUBJECT}.{number}", data=b"")
        # Which stream takes publishes changes meanwhile, and each refuses those for the other one.
        for stream in itertools.cycle(self._streams):
            with suppress(BackendError):
                await self._backend.publish(
                    message, message_id=f"drill-{number}", stream=stream, timeout_seconds=PUBLISH_SECONDS
                )
                return
            await anyio.sleep(AGAIN_SECONDS)


@asynccontextmanager
async def _scratch(streams: Management, name: str, config: dict[str, Any]) -> AsyncIterator[None]:
    await streams.add_stream({"name": name, **config})
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True), suppress(BackendError):
            await streams.delete_stream(name)
