"""The duplicate window of the stream of job events, within which the server discards an event that has a known id.

Asked by the agent that tails event logs (`agents.spark_events`) and by the listeners inside of a driver (`listeners`),
which both publish each event. Within half of the window each relies on the server; beyond it the agent asks the stream
which events it holds, and the listener leaves an event to the agent. The other half is for what happens in between.
"""

from __future__ import annotations

import math

import anyio

from aviso_workers.aviso.literals import SECOND
from aviso_workers.backends import Backend
from aviso_workers.config import Config, streams
from aviso_workers.errors import NotFoundError
from aviso_workers.jetstream.fields import DEFAULT_DUPLICATE_WINDOW
from aviso_workers.spark.job_events import EVENT_TYPE

MAX_SECONDS = 60.0
"""Half of the usual window. A longer one is not relied on: what waited for so long was not published for a reason."""
CACHE_SECONDS = 5.0
"""A changed window is noticed within this time."""


class DuplicateWindow:
    """The duplicate window of the stream of job events, read from the server again when it is `CACHE_SECONDS` old."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._half_seconds = MAX_SECONDS
        self._read_at = -math.inf

    async def half_seconds(self, backend: Backend) -> float:
        """Return half of the duplicate window in seconds, at most a minute. Raises `UnknownEventTypeError` and
        `BackendError`.
        """
        if anyio.current_time() - self._read_at <= CACHE_SECONDS:
            return self._half_seconds
        try:
            self._half_seconds = await self._read(backend)
        except NotFoundError:  # whoever publishes first makes it, so the next event asks again
            return MAX_SECONDS
        self._read_at = anyio.current_time()
        return self._half_seconds

    async def _read(self, backend: Backend) -> float:
        event_type = self._config.event_type(EVENT_TYPE)
        info = await backend.stream_info(streams.event_stream(EVENT_TYPE, event_type, self._config).name)
        window = info.config.duplicate_window or DEFAULT_DUPLICATE_WINDOW
        return min(MAX_SECONDS, window / SECOND / 2)
