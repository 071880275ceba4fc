"""Listeners inside of a Spark driver, which publish what its jobs do within milliseconds.

Called by the author of a driver, through `aviso_workers.spark.listen`. In a classic session it is a SparkListener that
py4j shows to the JVM, with a queue of its own on Spark's bus, so that it delays no other listener; it is called for
streaming queries as well. A session of Spark Connect has no JVM here: there it is a StreamingQueryListener, and it is
not called for jobs. Either way an event is decoded in the call, put into a bounded queue, and published by a thread.

The event log says the same, and later: ids are made of the same JSON, so that the agent `spark-events` and a listener
together store each event once. What happens before the listener is there, what waits too long, and how a driver ended
that was killed: that the agent adds.

An event that is published twice is discarded by its id within the duplicate window of the stream. Within half of the
window the agent and the listener rely on the server; beyond it the agent asks the stream which events it holds, and the
listener leaves an event to the agent. The other half is for what happens in between.

The bus, its queues and JsonProtocol are Spark's own and may change: the tests run against the real ones.
"""

from __future__ import annotations

import asyncio
import atexit
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import anyio
import msgspec
import structlog
from msgspec import Struct

from aviso_workers.aviso.literals import SECOND
from aviso_workers.aviso.notifications import Notify
from aviso_workers.backends import Backend
from aviso_workers.config import Config, load, streams
from aviso_workers.errors import (
    BackendError,
    ConfigError,
    InvalidNotificationError,
    NotFoundError,
    RefusedError,
    UndecodableError,
)
from aviso_workers.events import Events
from aviso_workers.jetstream.fields import DEFAULT_DUPLICATE_WINDOW
from aviso_workers.sessions.session import Session, open_session
from aviso_workers.spark import job_events, trace_contexts
from aviso_workers.spark.job_events import EVENT_TYPE, JobEvent, SparkApplication

QUEUE = "aviso"
MAX_WAITING = 10_000
"""Events between Spark and the thread that publishes; with more than that, the newest are dropped."""
AGAIN_SECONDS = 1.0
CLOSE_SECONDS = 10.0
DRAIN_MILLISECONDS = 2000
"""How long closing waits for what Spark has already put into its queues."""
EVENTS = "ApplicationStart ApplicationEnd JobStart JobEnd StageSubmitted StageCompleted ExecutorAdded ExecutorRemoved"
METHODS = frozenset(f"on{event}" for event in [*EVENTS.split(), "OtherEvent"])
"""The methods of a SparkListener that are used here: none about tasks, which are called most often."""
QUERY_EVENT = "org.apache.spark.sql.streaming.StreamingQueryListener$Query"

MAX_WINDOW_SECONDS = 60.0
"""Half of the usual duplicate window. A longer one is not relied on: what waited for so long was not published for a
reason."""
CACHE_SECONDS = 5.0
"""A changed duplicate window is noticed within this time."""

log = structlog.get_logger(__name__)


def listen(spark: Any, *, config: Config | str | Path | None = None) -> Listener:
    """Listen to the application of a session, as `aviso_workers.spark.listen` describes."""
    loaded = config if isinstance(config, Config) else load(config)
    loaded.event_type(EVENT_TYPE)  # raises where there is none
    if lacking := loaded.workers.traces.lacking:  # the thread that connects would end with it
        raise ConfigError([f"workers.traces.enabled: {lacking}"])
    application = SparkApplication.of_run(spark.conf.get("spark.app.id"), spark.conf.get("spark.app.attempt.id", None))
    listener = Listener(loaded, application, trace=trace_contexts.of_properties(lambda key: spark.conf.get(key, None)))
    remote = type(spark).__module__.startswith("pyspark.sql.connect.")
    listener.start(_listen_to_queries if remote else _listen_to_jobs, spark)
    return listener


class _WaitingEvent(Struct, frozen=True):
    event: JobEvent
    since: float
    """When it happened, by `time.monotonic`: since then the agent may have published it."""


class Listener:
    """A running listener. `close`, the end of its `with` block or the end of the process stops it."""

    def __init__(
        self, config: Config, application: SparkApplication, *, trace: Mapping[str, str] | None = None
    ) -> None:
        self.stored = 0
        """Events that the stream holds, whoever published them first."""
        self.dropped = 0
        """Events that were received and dropped: too many waited, one waited too long, or a server refused it."""
        self._config = config
        self._cluster = job_events.cluster_of(config)
        self._application = application
        self._trace = trace or None
        self._window = DuplicateWindow(config)
        self._waiting: deque[_WaitingEvent] = deque()
        self._leave: Callable[[], None] = lambda: None
        self._close_by: float | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=anyio.run, args=(self._work,), name="aviso-listener", daemon=True)

    def start(self, add: Callable[[Any, Callable[[str], None]], Callable[[], None]], spark: Any) -> None:
        self._thread.start()
        self._started.wait()
        self._leave = add(spark, self._receive)
        atexit.register(self.close)

    def close(self, *, within_seconds: float = CLOSE_SECONDS) -> None:
        """Stop listening, and wait at most `within_seconds` until the received events are stored. A second call does
        nothing.
        """
        if self._close_by is not None:
            return
        self._leave()
        self._close_by = time.monotonic() + within_seconds
        self._loop.call_soon_threadsafe(self._wake.set)
        self._thread.join(within_seconds)
        self.dropped += len(self._waiting)
        atexit.unregister(self.close)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self, line: str) -> None:
        """Take an event as Spark writes it. Called in Spark's threads, so it neither waits nor raises."""
        try:
            event = job_events.decode(line, self._application)
        except UndecodableError as error:
            self._drop("spark_listener.undecodable", problem=str(error))
            return
        if event is None:
            return
        if len(self._waiting) >= MAX_WAITING:
            self._drop("spark_listener.full", waiting=MAX_WAITING)
            return
        self._waiting.append(_WaitingEvent(event, time.monotonic() - _age_seconds(event)))
        self._loop.call_soon_threadsafe(self._wake.set)

    def _drop(self, reason: str, **details: Any) -> None:
        self.dropped += 1
        if self.dropped & (self.dropped - 1) == 0:  # the 1st, 2nd, 4th, ...: a flood is not to become one of lines
            log.warning(reason, dropped=self.dropped, **details, then="the event log has it")

    async def _work(self) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        self._started.set()
        while not self._done:
            try:
                async with open_session(app="spark-listener", config=self._config, events=Events()) as session:
                    await self._publish(session)
            except BackendError as error:
                log.warning("spark_listener.unavailable", problem=str(error), then="trying again")
                await anyio.sleep(AGAIN_SECONDS)

    @property
    def _done(self) -> bool:
        return self._close_by is not None and (not self._waiting or time.monotonic() > self._close_by)

    async def _publish(self, session: Session) -> None:
        """Publish the waiting events one after the other until closed. Raises `BackendError`; then the event still
        waits.
        """
        while not self._done:
            while self._waiting:
                await self._publish_one(session, self._waiting[0])
                self._waiting.popleft()
            self._wake.clear()
            if not self._done:
                await self._wake.wait()

    async def _publish_one(self, session: Session, waiting: _WaitingEvent) -> None:
        event, message_id = waiting.event, waiting.event.message_id(self._cluster)
        # The agent may have published what has waited for longer.
        left = waiting.since + await self._window.half_seconds(session.backend) - time.monotonic()
        if left <= 0:
            self._drop("spark_listener.too_late", event_id=message_id)
            return
        try:
            with anyio.fail_after(left):
                identifier = event.identifier(self._cluster)
                await session.publisher.notify(
                    Notify(EVENT_TYPE, identifier, event.payload, message_id=message_id, headers=self._trace)
                )
        except TimeoutError:
            self._drop("spark_listener.too_late", event_id=message_id)
        except (InvalidNotificationError, RefusedError) as error:
            self._drop("spark_listener.refused", event_id=message_id, problem=str(error))
        else:
            self.stored += 1


def _age_seconds(event: JobEvent) -> float:
    """Return for how many seconds the event may have been in the log: Spark's bus may be late to call listeners."""
    if event.kind == "query":  # Its time is of another machine in Spark Connect, or of when a batch began.
        return 0.0
    return max(0.0, time.time() - (event.payload.get("time") or math.inf) / 1000)


def _listen_to_jobs(spark: Any, receive: Callable[[str], None]) -> Callable[[], None]:
    """Add a SparkListener to a classic session, and return a function that removes it."""
    from py4j.protocol import Py4JError
    from pyspark import java_gateway

    context = spark.sparkContext
    start_callbacks: Any = java_gateway.ensure_callback_server_started
    start_callbacks(context._gateway)
    to_json = context._jvm.org.apache.spark.util.JsonProtocol.sparkEventToJsonString

    def pass_on(event: Any) -> None:
        try:
            receive(to_json(event))
        except Py4JError as error:  # Spark would print a page about it
            log.warning("spark_listener.failed", problem=str(error))

    def pass_on_if_known(event: Any) -> None:
        # Many of them carry whole query plans: too long to be written down just to be left out.
        if event.getClass().getName().encode() in job_events.PROJECTIONS:
            pass_on(event)

    # py4j makes a new Java object of ours at each call, and Spark removes none but the one that was added.
    held = context._jvm.java.util.ArrayList()
    held.add(_SparkListener(dict.fromkeys(METHODS, pass_on) | {"onOtherEvent": pass_on_if_known}))
    listener = held.get(0)
    bus = context._jsc.sc().listenerBus()
    bus.addToQueue(listener, QUEUE)

    def leave() -> None:
        with suppress(Py4JError, OSError):  # too much at once, or the JVM is gone
            bus.waitUntilEmpty(DRAIN_MILLISECONDS)
        with suppress(Py4JError, OSError):
            bus.removeListener(listener)

    return leave


class _SparkListener:
    """A SparkListener with all methods: those that are given, and others that do nothing."""

    class Java:
        implements: ClassVar = ["org.apache.spark.scheduler.SparkListenerInterface"]

    def __init__(self, methods: dict[str, Callable[[Any], None]]) -> None:
        self._methods = methods

    def __getattr__(self, name: str) -> Callable[[Any], None]:
        if not name.startswith("on"):
            raise AttributeError(name)
        return self._methods.get(name, lambda event: None)


def _listen_to_queries(spark: Any, receive: Callable[[str], None]) -> Callable[[], None]:
    """Add a StreamingQueryListener to a session of Spark Connect, and return a function that removes it."""
    from pyspark.sql.streaming.listener import StreamingQueryListener

    def tell(kind: str, fields: dict[str, Any]) -> None:
        receive(msgspec.json.encode({"Event": f"{QUERY_EVENT}{kind}Event", **fields}).decode())

    class QueryListener(StreamingQueryListener):
        """A listener to streaming queries, which passes their events on as the event log spells them."""

        def onQueryStarted(self, event: Any) -> None:  # noqa: N802
            fields = {"id": event.id, "runId": event.runId, "name": event.name, "timestamp": event.timestamp}
            tell("Started", fields)

        def onQueryProgress(self, event: Any) -> None:  # noqa: N802
            tell("Progress", {"progress": msgspec.json.decode(event.progress.json)})

        def onQueryIdle(self, event: Any) -> None:  # noqa: N802
            pass

        def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
            fields = {"id": event.id, "runId": event.runId, "exception": event.exception}
            tell("Terminated", {**fields, "errorClassOnException": event.errorClassOnException})

    listener = QueryListener()
    spark.streams.addListener(listener)
    return lambda: spark.streams.removeListener(listener)


class DuplicateWindow:
    """The duplicate window of the stream of job events, read from the server again when it is `CACHE_SECONDS` old."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._half_seconds = MAX_WINDOW_SECONDS
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
            return MAX_WINDOW_SECONDS
        self._read_at = anyio.current_time()
        return self._half_seconds

    async def _read(self, backend: Backend) -> float:
        event_type = self._config.event_type(EVENT_TYPE)
        info = await backend.stream_info(streams.event_stream(EVENT_TYPE, event_type, self._config).name)
        window = info.config.duplicate_window or DEFAULT_DUPLICATE_WINDOW
        return min(MAX_WINDOW_SECONDS, window / SECOND / 2)
