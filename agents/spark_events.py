"""What Spark jobs do, as notifications: follows Spark's event logs and publishes them as event type `spark_job`.

Each event has an id made of what it is, and how far a log was read is stored in JetStream KV once everything before is
acknowledged. Killed in between, the router publishes the same ids again and the stream's duplicate window takes them
for what they are. So: at least once from the log on, and exactly once where it is back within that window. The events
of one application are published one after the other, in the order of its log; applications do not wait for each other.

Run one worker with it per directory: a second one publishes everything once more, for the duplicate window to sort out.
Needs `aviso-workers[spark]`; neither pyspark nor Java is used.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated

import anyio
import anyio.to_thread
import msgspec
import structlog
from msgspec import Meta, Struct

from aviso_workers import App, KeyValue, Router
from aviso_workers.errors import InvalidNotificationError, RefusedError, UnknownEventTypeError
from aviso_workers.spark import event_log, job_events
from aviso_workers.spark.event_log import EventLog, EventLogReader, Position
from aviso_workers.spark.job_events import Application, JobEvent

__all__ = ["SparkEvents", "router", "tail"]

BUCKET = "spark-events"
SEARCH_SECONDS = 1.0
"""How often the directories are searched for applications."""
REST_SECONDS = 60.0
"""An application that has logged nothing for so long is looked at in each search only."""
AT_ONCE = 8
"""Applications that are read at the same time."""
OPEN_LOGS = 64
"""Logs kept open. When another one grows it is opened again, and where it is compressed, decompressed again."""

log = structlog.get_logger(__name__)


class SparkEvents(Struct, frozen=True, kw_only=True):
    """Settings, in the configuration under `workers.agents.spark-events`."""

    event_log_dirs: Annotated[tuple[str, ...], Meta(min_length=1)]
    """What `spark.eventLog.dir` names, as paths on this machine. They need not exist yet."""
    cluster: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]+$")] = "local"
    """Part of every identifier and id: two clusters may give one application id."""
    poll_seconds: Annotated[float, Meta(gt=0)] = 0.05
    """The wait between two looks at the logs."""


router = Router("spark-events", settings=SparkEvents)


@router.task
async def tail(app: App) -> None:
    """Follow all applications in the directories until cancelled. Raises `ConfigError`, `BackendError`."""
    settings: SparkEvents = app.settings(router)
    await _Tail(app, settings, await app.key_value(BUCKET)).run()


class _Tail:
    """Looks at all logs by turns, and has those that grew published, each in a task of its own."""

    def __init__(self, app: App, settings: SparkEvents, positions: KeyValue) -> None:
        self._settings = settings
        self._new = partial(_Application, app=app, cluster=settings.cluster, positions=positions)
        self._slots = anyio.CapacityLimiter(AT_ONCE)
        self._followed: dict[str, _Application] = {}
        self._finished: set[str] = set()
        """Paths of logs that are complete and published."""
        self._missing: set[str] = set()

    async def run(self) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                search_at = 0.0
                while True:
                    now = anyio.current_time()
                    searching = now >= search_at
                    if searching:
                        await self._search()
                        search_at = now + SEARCH_SECONDS
                    for application, grown in await self._grown(thoroughly=searching):
                        application.busy = True
                        tasks.start_soon(self._publish, application, grown)
                    await anyio.sleep(self._settings.poll_seconds)
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
        finally:
            for application in self._followed.values():
                application.close()

    async def _search(self) -> None:
        """Take in the applications that are new, and forget those whose log is gone."""
        paths, missing = await anyio.to_thread.run_sync(_find_all, self._settings.event_log_dirs)
        for directory in sorted(missing - self._missing):
            log.warning("spark_events.directory_missing", directory=directory, then="waiting for it")
        for directory in sorted(self._missing - missing):
            log.info("spark_events.directory_found", directory=directory)
        self._missing = missing
        self._finished &= paths
        for path in [path for path, known in self._followed.items() if path not in paths and not known.busy]:
            self._followed.pop(path).close()
        for path in paths - self._finished - self._followed.keys():
            self._followed[path] = self._new(path)

    async def _grown(self, *, thoroughly: bool) -> list[tuple[_Application, EventLog]]:
        """The applications whose log is not as it was published; unless thoroughly, of those that are awake."""
        awake_since = 0.0 if thoroughly else anyio.current_time() - REST_SECONDS
        asked = [each for each in self._followed.values() if not each.busy and each.grew_at >= awake_since]
        if not asked:
            return []
        known = [(each.path, None if thoroughly else each.published) for each in asked]
        grown = []
        for application, found in zip(asked, await anyio.to_thread.run_sync(_look_at_all, known), strict=True):
            if isinstance(found, OSError):
                application.report(str(found))
            elif found is not None and found != application.published:
                grown.append((application, found))
        return grown

    async def _publish(self, application: _Application, grown: EventLog) -> None:
        try:
            async with self._slots:
                await application.publish(grown)
        finally:
            application.busy = False
        if grown.complete and application.published == grown:
            self._finished.add(grown.path)
            self._followed.pop(grown.path).close()
        self._limit_open()

    def _limit_open(self) -> None:
        opened = [each for each in self._followed.values() if each.open]
        idle = sorted((each for each in opened if not each.busy), key=lambda each: each.grew_at)
        for application in idle[: max(0, len(opened) - OPEN_LOGS)]:
            application.close()


class _Application:
    """One application: how far its log is published, and the next part of it."""

    def __init__(self, path: str, *, app: App, cluster: str, positions: KeyValue) -> None:
        self.path = path
        self.busy = False
        self.grew_at = anyio.current_time()
        self.published: EventLog | None = None
        """The log as it was when all of it was published."""
        self._app = app
        self._cluster = cluster
        self._positions = positions
        self._stored = Position()
        self._reader: EventLogReader[JobEvent] | None = None
        self._problem = ""

    @property
    def open(self) -> bool:
        return self._reader is not None and self._reader.open

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def report(self, problem: str) -> None:
        """Say it, but not twice in a row."""
        if problem != self._problem:
            log.warning("spark_events.unreadable", path=self.path, problem=problem)
        self._problem = problem

    async def publish(self, grown: EventLog) -> None:
        """Publish what the log has more than before, and store how far that goes. Raises `BackendError`."""
        if grown.problem:
            self.report(grown.problem)
        else:
            try:
                await self._publish(grown)
            except FileNotFoundError:
                return  # Renamed or removed since it was looked at: the next look tells.
            except OSError as error:
                self.report(str(error))
                return
        self.published, self.grew_at = grown, anyio.current_time()

    async def _publish(self, grown: EventLog) -> None:
        key = _key(self._cluster, grown.name)
        reader = self._reader = self._reader or await self._resume(key, grown)
        more = True
        while more:
            batch = await anyio.to_thread.run_sync(reader.read, grown)
            for problem in batch.problems:
                self.report(problem)
            for event in batch.events:
                await self._notify(event)
            more = batch.more
            # Task events alone are not worth a write; the end is, so that a restart need not open what is complete.
            if batch.events or (grown.complete and not more and reader.position != self._stored):
                await self._positions.put(key, msgspec.json.encode(reader.position))
                self._stored = reader.position

    async def _resume(self, key: str, grown: EventLog) -> EventLogReader[JobEvent]:
        entry = await self._positions.get(key)
        if entry is not None:
            self._stored = msgspec.json.decode(entry.value, type=Position)
        decode = partial(job_events.decode, application=Application.of_log(grown.name))
        return EventLogReader(decode, self._stored)

    async def _notify(self, event: JobEvent) -> None:
        message_id = event.message_id(self._cluster)
        try:
            await self._app.notify(
                job_events.EVENT_TYPE, event.identifier(self._cluster), event.payload, message_id=message_id
            )
        except UnknownEventTypeError:
            raise  # No event can be published: nothing of the log must count as read.
        except (InvalidNotificationError, RefusedError) as error:
            log.error("spark_events.refused", event_id=message_id, path=self.path, problem=str(error))


def _find_all(directories: tuple[str, ...]) -> tuple[set[str], set[str]]:
    """The paths of all event logs, and the directories that cannot be listed."""
    paths: set[str] = set()
    missing: set[str] = set()
    for directory in directories:
        try:
            paths.update(event_log.find(directory))
        except OSError:
            missing.add(directory)
    return paths, missing


def _look_at_all(known: list[tuple[str, EventLog | None]]) -> list[EventLog | OSError | None]:
    return [_look(path, log) for path, log in known]


def _look(path: str, known: EventLog | None) -> EventLog | OSError | None:
    try:
        return known if known is not None and event_log.rests(known) else event_log.look(path)
    except OSError as error:
        return error


def _key(cluster: str, name: str) -> str:
    """The key of an application's position: KV takes letters, digits and `-_=./`, so others are written as `=XX`."""
    escaped = re.sub(rb"[^A-Za-z0-9_-]", lambda match: b"=%02X" % match[0][0], name.encode())
    return f"{cluster}/{escaped.decode()}"
