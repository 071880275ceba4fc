"""What Spark jobs do, as notifications: follows Spark's event logs and publishes them as event type `spark_job`.

Each event has an id made of what it is, and how far a log was read is stored in JetStream KV once everything before is
acknowledged. Killed in between, the router would publish the same ids again. So it first asks the stream which of them
it holds, and does so whenever it was not level with a log for a while, as where a store shows a file when it is closed:
the driver's own listener (`aviso_workers.spark.listen`) may have published them long ago. For what is younger there is
the stream's duplicate window. So: from the log on, each event is stored once. The events of one application are
published one after the other, in the order of its log; applications do not wait for each other, and what goes wrong
with the log of one is told and stops no other. While the server is gone, or its stream is full, the router waits for
it, however long that takes, and then goes on from the positions that are stored.

A log that Spark has closed is still looked at now and then: a program that copies it may not have come to its end.

A driver that is killed leaves its log open. Where that has not grown for `lost_after_seconds`, the application and what
had begun in it are published as lost, which Spark has no event for. One that goes on is published as resumed.

Two logs of one application id would make the same ids of different events. So the log whose position is stored is
published, and another one is told and left out, while both are there and where it is of another run.

Run one worker with it per directory: a second one publishes everything once more, for the duplicate window to sort out.
Needs `aviso-workers[spark-events]`, which brings neither PySpark nor Java.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Literal, get_args

import anyio
import anyio.to_thread
import msgspec
import structlog
from msgspec import Meta, Struct

from aviso_workers import App, KeyValue, Notification, Router
from aviso_workers.declare.verdicts import ReadOtherwiseError
from aviso_workers.errors import (
    BackendError,
    DeniedError,
    FullError,
    InvalidNotificationError,
    NotFoundError,
    OutcomeUnknownError,
    RefusedError,
    UnavailableError,
    UndecodableError,
    UnknownEventTypeError,
)
from aviso_workers.jetstream import error_codes
from aviso_workers.spark import job_events, log_directories
from aviso_workers.spark.event_log import EventLog, EventLogReader, LogPosition
from aviso_workers.spark.job_events import JobEvent, SparkApplication
from aviso_workers.spark.listeners import DuplicateWindow
from aviso_workers.spark.log_directories import LogDirectories

BUCKET = "spark-events"
SEARCH_SECONDS = 1.0
"""How often the directories are searched for applications."""
REST_SECONDS = 60.0
"""An application that has logged nothing for so long is looked at in each search only."""
AT_ONCE = 8
"""Applications that are read at the same time."""
OPEN_LOGS = 64
"""Logs kept open. When another one grows it is opened again, and where it is compressed, decompressed again."""
RETRY_SECONDS = 1.0
"""The wait after the server did not answer, or had no room."""
PASSING = (UnavailableError, OutcomeUnknownError, FullError)
"""Errors that end when a server is back or somebody has made room."""
EVENT_REFUSALS = (None, error_codes.MESSAGE_TOO_LARGE, error_codes.STREAM_FULL)
"""JetStream's codes of a refusal that is of one event: it is too large, or its subject has all that it may have. Where
there is none, the event was refused before it was sent."""
LEAST_LOST_AFTER_SECONDS = 60.0
"""Drivers that work may log nothing for so long, as in a stage of few long tasks."""
SLACK_SECONDS = 600.0
"""How much later than a file says an event of it may have been stored: two clocks, and Spark's own queues."""

Published = Notification[dict[str, str]]
Reason = Literal["not_supported", "no_access", "left_out", "refused", "failed"]
"""Why not all of a log is published: its name or format, or another log has its id; it cannot be read now; a part is
damaged, half-written or gone; the server does not take an event; or something that nobody expected."""

MEASURED = {
    "directory_missing": "1 while the agent cannot list a directory of event logs, else 0.",
    "last_search_timestamp_seconds": "Time when the agent last searched its directories for event logs, in seconds "
    "since 1970.",
    "followed_logs": "Event logs that may still grow, or are not completely published yet.",
    "incomplete_logs": "Event logs with events that were not published at the last reading, by reason.",
    "unread_bytes": "Bytes of event logs, as stored in their files, that are not read yet.",
    "oldest_unpublished_age_seconds": "Longest time for which an event log has had unpublished content; 0 if there is "
    "none.",
    "lost_applications": "Spark applications that were published as lost and have logged nothing since.",
}
"""The help of each metric."""

log = structlog.get_logger(__name__)


class SparkEvents(Struct, frozen=True, kw_only=True):
    """Settings, in the configuration under `workers.agents.spark-events`."""

    event_log_dirs: Annotated[tuple[str, ...], Meta(min_length=1)]
    """What `spark.eventLog.dir` names: paths on this machine, or URLs of `file:`, `s3:`, `s3a:`, `gs:` or `hdfs:`. They
    need not exist yet. Credentials do not stand here: the provider's own environment or profile has them."""
    cluster: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]+$")] = "local"
    """Part of every identifier and id: two clusters may give one application id."""
    poll_seconds: Annotated[float, Meta(gt=0)] = 0.05
    """The wait between two looks at the logs."""
    start: Literal["all", "new"] = "all"
    """What is published: all logs in the directories, or, with `new`, those that were written to in the minute before
    the agent started for the first time, or later. It remembers that time."""
    lost_after_seconds: Annotated[float, Meta(ge=0)] = 3600
    """An application is lost when its log is open and has not grown for so long; 0: never."""

    def __post_init__(self) -> None:
        for directory in self.event_log_dirs:
            log_directories.check(directory)


class Checkpoint(Struct, frozen=True, kw_only=True):
    """The stored state of an application."""

    position: LogPosition = LogPosition()
    level: float = 0.0
    """Seconds since 1970: all that was written to the log until then is published."""
    lost: bool = False
    trace: dict[str, str] = {}
    """The headers of its events that say in which trace it runs: they stand at the beginning of its log."""
    name: str = ""
    """The name of the application, which stands there too."""
    path: str = ""
    """The log that the position is of."""
    started: str = ""
    """When the application started, as its log says it."""


class _SharedIdError(Exception):
    """Another log, or another run, has the application id of a log."""


router = Router("spark-events", settings=SparkEvents)


@router.task
async def follow_event_logs(app: App) -> None:
    """Follow all applications in the directories until cancelled.

    Raises `ConfigError`, and `RefusedError` where waiting does not help.
    """
    settings: SparkEvents = app.settings(router)
    if 0 < settings.lost_after_seconds < LEAST_LOST_AFTER_SECONDS:
        log.warning(
            "spark_events.lost_after_is_short",
            lost_after_seconds=settings.lost_after_seconds,
            problem="drivers that work may log nothing for so long, and are published as lost: set 60 or more",
        )
    server = _ServerState()
    checkpoints, since = await _begin(app, settings, server)
    await _Tail(app, settings, checkpoints, server, since=since).run()


class _ServerState:
    """Whether the server takes what it is given. It is told once when that changes."""

    def __init__(self) -> None:
        self._answers = True

    def failed(self, error: BackendError) -> None:
        if self._answers:
            log.warning("spark_events.waiting", problem=str(error), then="trying again until it succeeds")
        self._answers = False

    def succeeded(self) -> None:
        if not self._answers:
            log.info("spark_events.server_back")
        self._answers = True


async def _begin(app: App, settings: SparkEvents, server: _ServerState) -> tuple[KeyValue, float]:
    """Return the stored positions, and since when a log must have been written to, in seconds since 1970."""
    while True:
        try:
            checkpoints = await app.key_value(BUCKET)
            return checkpoints, await _first_start(checkpoints, settings)
        except PASSING as error:
            server.failed(error)
            await anyio.sleep(RETRY_SECONDS)


async def _first_start(checkpoints: KeyValue, settings: SparkEvents) -> float:
    """Return since when a log must have been written to; 0 where older ones are published too."""
    if settings.start == "all":
        return 0.0
    if entry := await checkpoints.get(settings.cluster):
        return msgspec.json.decode(entry.value, type=float)
    is_first = not any(key.startswith(f"{settings.cluster}/") for key in await checkpoints.keys())
    since = time.time() - REST_SECONDS if is_first else 0.0  # applications that run now have written in that time
    await checkpoints.put(settings.cluster, msgspec.json.encode(since))
    return since


class _Tail:
    """Looks at all logs by turns, and has those that grew published, each in a task of its own."""

    def __init__(
        self, app: App, settings: SparkEvents, checkpoints: KeyValue, server: _ServerState, *, since: float
    ) -> None:
        self._app = app
        self._settings = settings
        self._server = server
        self._since = since
        self._logs = LogDirectories(settings.event_log_dirs)
        self._path_of: dict[str, str] = {}
        """By name of the application, the log that is published; others of that name are not."""
        self._new = partial(
            _ApplicationLog,
            app=app,
            settings=settings,
            checkpoints=checkpoints,
            logs=self._logs,
            path_of=self._path_of,
            window=DuplicateWindow(app.config),
        )
        self._slots = anyio.CapacityLimiter(AT_ONCE)
        self._followed: dict[str, _ApplicationLog] = {}
        self._finished: dict[str, EventLog] = {}
        """By path, logs that are complete and published and were not written to for a while, and those that are too old
        to be published."""
        self._finished_at = -math.inf
        """When these were last looked at."""
        self._missing: set[str] = set()
        self._incomplete: dict[str, Reason] = {}
        """By path, the logs of which not all is published."""

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
                        self._show_all()
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
        paths, problems = await anyio.to_thread.run_sync(self._logs.find)
        for directory in sorted(problems.keys() - self._missing):
            problem = problems[directory]
            log.warning("spark_events.directory_missing", directory=directory, problem=problem, then="waiting for it")
        for directory in sorted(self._missing - problems.keys()):
            log.info("spark_events.directory_found", directory=directory)
        self._missing = set(problems)
        for name in [name for name, path in self._path_of.items() if path not in paths]:
            del self._path_of[name]
        self._finished = {path: known for path, known in self._finished.items() if path in paths}
        await self._take_up_finished()
        for path in [path for path, known in self._followed.items() if path not in paths and not known.busy]:
            self._followed.pop(path).close()
        for path in paths - self._finished.keys() - self._followed.keys():
            self._followed[path] = self._new(path)

    async def _take_up_finished(self) -> None:
        """Follow those again that have changed: a copy may have been interrupted, and goes on."""
        if anyio.current_time() - self._finished_at < REST_SECONDS:
            return
        self._finished_at = anyio.current_time()
        asked: list[tuple[str, EventLog | None]] = [(path, None) for path in self._finished]
        for (path, _), found in zip(asked, await anyio.to_thread.run_sync(self._look_at_all, asked), strict=True):
            if found != self._finished[path]:
                del self._finished[path]

    async def _grown(self, *, thoroughly: bool) -> list[tuple[_ApplicationLog, EventLog]]:
        """Return the applications whose log is not as it was published; unless thoroughly, of those that are awake."""
        awake_since = -math.inf if thoroughly else anyio.current_time() - REST_SECONDS
        asked = [each for each in self._followed.values() if not each.busy and each.grew_at >= awake_since]
        if not asked:
            return []
        known = [(each.path, None if thoroughly else each.published) for each in asked]
        grown = []
        looked_at = anyio.current_time()
        for application, found in zip(asked, await anyio.to_thread.run_sync(self._look_at_all, known), strict=True):
            if isinstance(found, OSError):
                application.report(str(found), "no_access")
            elif found is not None and (
                found.modified < self._since or (found == application.published and _finished(found))
            ):
                self._finished[found.path] = found
                self._followed.pop(found.path).close()
            elif found is not None and (found != application.published or application.overdue(found)):
                application.notice(found, looked_at=looked_at)
                grown.append((application, found))
        return grown

    def _look_at_all(self, known: list[tuple[str, EventLog | None]]) -> list[EventLog | OSError | None]:
        return [self._logs.snapshot(path, log) for path, log in known]

    async def _publish(self, application: _ApplicationLog, grown: EventLog) -> None:
        try:
            async with self._slots:
                await application.publish(grown)
            self._server.succeeded()
        except PASSING as error:
            self._server.failed(error)
            application.start_over()
            await anyio.sleep(RETRY_SECONDS)
        finally:
            application.busy = False
        self._limit_open()

    def _limit_open(self) -> None:
        opened = [each for each in self._followed.values() if each.open]
        idle = sorted((each for each in opened if not each.busy), key=lambda each: each.grew_at)
        for application in idle[: max(0, len(opened) - OPEN_LOGS)]:
            application.close()

    def _show_all(self) -> None:
        """Measure what is known now."""
        followed = list(self._followed.values())
        finished = {path: reason for path, reason in self._incomplete.items() if path in self._finished}
        self._incomplete = finished | {each.path: why for each in followed if (why := each.shown_incomplete)}
        reasons = Counter(self._incomplete.values())
        directories = self._settings.event_log_dirs
        self._show("directory_missing", {each: each in self._missing for each in directories}, "directory")
        self._show("last_search_timestamp_seconds", time.time())
        self._show("followed_logs", len(followed))
        self._show("incomplete_logs", {reason: reasons[reason] for reason in get_args(Reason)}, "reason")
        self._show("unread_bytes", sum(each.unread_bytes for each in followed))
        oldest = max((each.unpublished_seconds for each in followed), default=0.0)
        self._show("oldest_unpublished_age_seconds", oldest)
        if all(each.published or each.incomplete for each in followed):  # else it is not known of all
            self._show("lost_applications", sum(each.lost for each in followed))

    def _show(self, name: str, found: float | Mapping[str, float], *label: str) -> None:
        """Show a measurement of the cluster, or those of it that another label tells apart."""
        cluster = self._settings.cluster
        values: dict[tuple[str, ...], float] = (
            {(cluster, key): value for key, value in found.items()}
            if isinstance(found, Mapping)
            else {(cluster,): found}
        )
        self._app.measure(f"aviso_spark_events_{name}", MEASURED[name], labels=("cluster", *label), values=values)


class _ApplicationLog:
    """One application: how far its log is published, and the next part of it."""

    def __init__(
        self,
        path: str,
        *,
        app: App,
        settings: SparkEvents,
        checkpoints: KeyValue,
        logs: LogDirectories,
        path_of: dict[str, str],
        window: DuplicateWindow,
    ) -> None:
        self.path = path
        self.busy = False
        self.grew_at = anyio.current_time()
        self.published: EventLog | None = None
        """The log as it was when all of it was published."""
        self.incomplete: Reason | None = None
        """Why not all of the log was published when it was last read."""
        self._app = app
        self._settings = settings
        self._checkpoints = checkpoints
        self._window = window
        self._logs = logs
        self._path_of = path_of
        self._open_file = partial(logs.open, log=path)
        self._stored = Checkpoint()
        self._decode: job_events.Decoder
        self._reader: EventLogReader[JobEvent] | None = None
        self._recalled: set[str] = set()
        """Ids that the stream held when it was last asked."""
        self._held: set[str] = set()
        """Ids that the stream holds, of events that may not be read yet."""
        self._known_at = -math.inf
        """When every event that the stream held was read, or was among these."""
        self._looked_at = -math.inf
        self._problem = ""
        self._noticed: EventLog | None = None
        """The log as it was last seen to have something that is not published; None where all is."""
        self._noticed_at = 0.0
        self._seen: EventLog | None = None
        self._writers_clock_behind = 0.0
        """Seconds between ours and the time of the log when it was last seen to grow, which the writer's clock gave."""
        self._left_out: Reason | None = None
        self._left_out_at = -math.inf
        self._published_to = LogPosition()

    @property
    def lost(self) -> bool:
        return self._stored.lost

    @property
    def shown_incomplete(self) -> Reason | None:
        """Why not all is published: of a log that was read on since, what was left out shows for a while."""
        if self.incomplete or anyio.current_time() - self._left_out_at > REST_SECONDS:
            return self.incomplete
        return self._left_out

    @property
    def unread_bytes(self) -> int:
        return self._noticed.unread_bytes(self._published_to) if self._noticed else 0

    @property
    def unpublished_seconds(self) -> float:
        """For how long there has been something that is not published."""
        return anyio.current_time() - self._noticed_at if self._noticed else 0.0

    @property
    def open(self) -> bool:
        return self._reader is not None and self._reader.open

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def start_over(self) -> None:
        """Read again from the position that is stored: what was read after it may be published in part."""
        self.close()
        self._reader, self._known_at = None, -math.inf
        self._published_to = self._stored.position

    def notice(self, grown: EventLog, *, looked_at: float) -> None:
        """Know that the log had something that is not published when it was looked at."""
        self._looked_at = looked_at
        if self._seen is not None and grown.size != self._seen.size:
            self._writers_clock_behind = time.time() - grown.modified
        self._seen = grown
        if self._noticed is None:
            self._noticed_at = anyio.current_time()
        self._noticed = grown

    def report(self, problem: str, reason: Reason) -> None:
        """Say it, but not twice in a row."""
        self._know_incomplete(reason)
        if problem != self._problem:
            log.warning("spark_events.unreadable", path=self.path, problem=problem)
        self._problem = problem

    def _know_incomplete(self, reason: Reason) -> None:
        self.incomplete = reason
        if reason != "no_access":  # which is over when the log is read
            self._left_out, self._left_out_at = reason, anyio.current_time()

    def overdue(self, log: EventLog) -> bool:
        """Return whether it is to be called lost."""
        after = self._settings.lost_after_seconds
        silent = 0 < after < time.time() - log.modified - self._writers_clock_behind
        return silent and not log.complete and not self._stored.lost and self._stored.position != LogPosition()

    async def publish(self, grown: EventLog) -> None:
        """Publish what the log has more than before, and store how far that goes.

        Raises `BackendError` and `UnknownEventTypeError`, which are about all applications.
        """
        self.incomplete = None
        if grown.problem:
            self.report(grown.problem, "not_supported")
        else:
            try:
                await self._publish(grown)
            except FileNotFoundError:
                self._wait_for_search()
                return  # Renamed or removed since it was looked at: the next look tells.
            except OSError as error:
                self.report(str(error), "no_access")
                self._wait_for_search()
                return
            except _SharedIdError as error:
                await self._leave_out(grown)
                self.report(str(error), "not_supported")
                return
            except (BackendError, UnknownEventTypeError):
                raise  # It is the same for all applications.
            except Exception as error:
                # It is looked at again when the log grows, and after a restart. Other applications go on.
                self.report(f"failed for good: {type(error).__name__}: {error}", "failed")
        self.published, self.grew_at = grown, anyio.current_time()
        self._noticed = None

    async def _leave_out(self, grown: EventLog) -> None:
        """Look at the log again in each search, or when it grows where nothing else can change."""
        if self._stored.path == self.path:  # a log that was overwritten is not read on where the first one was
            await self._store(grown, msgspec.structs.replace(self._stored, path=""))
        self._stored = Checkpoint()
        self._noticed = None  # it is told once, and waits for nothing
        self.start_over()
        self._wait_for_search()
        if self._path_of.get(grown.name) == self.path:
            del self._path_of[grown.name]
            self.published = grown

    def _wait_for_search(self) -> None:
        """Do not look again before the next search: what cannot be read now would be asked for many times a second."""
        self.grew_at = -math.inf

    async def _publish(self, grown: EventLog) -> None:
        reader = self._reader = self._reader or await self._resume(grown)
        repeats = grown.repeats(reader.position)
        more = True
        while more:
            await self._learn(grown, all_of_it=repeats)
            repeats = False
            batch = await anyio.to_thread.run_sync(reader.read, grown)
            for problem in batch.problems:
                self.report(problem, "left_out")
            self._check_run(self._decode.started)
            moved = reader.position != self._stored.position
            goes_on = self._stored.lost and moved
            if goes_on:
                await self._notify(job_events.resumed(SparkApplication.of_log(grown.name), since=self._stored.level))
            for event in batch.events:
                await self._learn(grown)
                await self._notify(event)
            self._published_to = reader.position
            more = batch.more
            # Task events alone are not worth a write; the end is, so that a restart need not open what is complete.
            if batch.events or goes_on or (grown.complete and not more and moved):
                level = self._stored.level if more else min(grown.modified, time.time())
                read = {"position": reader.position, "level": level, "lost": False}
                said = {"trace": self._decode.trace, "name": self._decode.name, "started": self._decode.started}
                await self._store(grown, msgspec.structs.replace(self._stored, **read, **said))
        if grown.unread_bytes(reader.position) and not self.incomplete:
            self.incomplete = "left_out"  # by an earlier reading, which said so
        if self.overdue(grown):
            await self._notify_of_loss(grown)
            await self._store(grown, msgspec.structs.replace(self._stored, lost=True))
        self._known_at = max(self._known_at, self._level_at(grown))
        self._held &= self._recalled  # all else is read: a log of years would fill the memory with it

    def _level_at(self, log: EventLog) -> float:
        """Return when all that had happened was in the log: when it was looked at, or last written to if that is
        earlier.
        """
        return min(self._looked_at, anyio.current_time() - (time.time() - log.modified))

    async def _notify_of_loss(self, grown: EventLog) -> None:
        """Publish that the application is lost, after all that had begun in it."""
        application = SparkApplication.of_log(grown.name)
        unfinished = job_events.Unfinished(application, self._settings.cluster)
        async for notification in self._replay(application, since=0):
            unfinished.add(notification.headers.get("Nats-Msg-Id", ""), notification.identifier)
        for begun in (*unfinished, None):
            await self._notify(job_events.lost(application, begun, since=grown.modified))

    async def _resume(self, grown: EventLog) -> EventLogReader[JobEvent]:
        entry = await self._checkpoints.get(self._key(grown))
        try:
            self._stored = msgspec.json.decode(entry.value, type=Checkpoint) if entry else Checkpoint()
        except (msgspec.DecodeError, UndecodableError) as error:
            log.warning(
                "spark_events.checkpoint_unreadable", path=self.path, problem=str(error), then="read from its beginning"
            )
        self._published_to = self._stored.position
        await self._claim(grown)
        stored, application = self._stored, SparkApplication.of_log(grown.name)
        self._decode = job_events.Decoder(application, trace=stored.trace, name=stored.name, started=stored.started)
        return EventLogReader(self._decode, stored.position, open_file=self._open_file)

    async def _claim(self, grown: EventLog) -> None:
        """Record that the position is of this log, before anything of it is published. Raises `_SharedIdError`."""
        known = self._stored.path if self._stored.path in self._logs else self.path
        if (path := self._path_of.setdefault(grown.name, known)) != self.path:
            raise _SharedIdError(
                f"{path} has the same application id and is published, so that nothing of this log is: remove the "
                "one that is a copy, or let a worker with another `cluster` follow one of the directories"
            )
        if self._stored.path == self.path:
            return
        if self._stored.started:  # a log that was moved goes on where it was
            start = job_events.Decoder(SparkApplication.of_log(grown.name), started=self._stored.started)
            reader = EventLogReader(start, LogPosition(), open_file=self._open_file)
            try:
                await anyio.to_thread.run_sync(reader.read, grown)
            finally:
                reader.close()
            self._check_run(start.started)
        await self._store(grown, msgspec.structs.replace(self._stored, path=self.path))

    def _check_run(self, started: str) -> None:
        """Raise `_SharedIdError` where a log is of another run than the one of its id that is published."""
        if self._stored.started not in ("", started):
            raise _SharedIdError(
                "another run of the same application id is published, so that nothing of this log is: let a worker "
                "with another `cluster` follow the directory"
            )

    async def _store(self, grown: EventLog, checkpoint: Checkpoint) -> None:
        await self._checkpoints.put(self._key(grown), msgspec.json.encode(checkpoint))
        self._stored = checkpoint

    def _key(self, log: EventLog) -> str:
        return _key(self._settings.cluster, log.name)

    async def _learn(self, log: EventLog, *, all_of_it: bool = False) -> None:
        """Ask what the stream holds, where that was not known for longer than its duplicate window tells."""
        now = anyio.current_time()
        if all_of_it or now - self._known_at > await self._window.half_seconds(self._app.session.backend):
            self._recalled = await self._recall(log, since=0 if all_of_it else self._stored.level)
            self._held |= self._recalled
            self._known_at = now

    async def _recall(self, log: EventLog, *, since: float) -> set[str]:
        """Return the ids that the stream holds of the application, from a little before `since` on."""
        replayed = self._replay(SparkApplication.of_log(log.name), since=since - SLACK_SECONDS)
        return {notification.headers.get("Nats-Msg-Id", "") async for notification in replayed}

    async def _replay(self, application: SparkApplication, *, since: float) -> AsyncIterator[Published]:
        """Yield what the stream holds of an application from this time on, seconds since 1970."""
        where = {"cluster": self._settings.cluster, "application": application.id}
        start = datetime.fromtimestamp(max(0, since), UTC)
        try:
            async with aclosing(self._app.replay(job_events.EVENT_TYPE, where, from_date=start)) as stored:
                async for notification in stored:
                    yield notification
        except NotFoundError:  # nothing was ever published
            return

    async def _notify(self, event: JobEvent) -> None:
        """Publish an event, unless the stream has it, and tell what it says of a run."""
        await self._publish_one(event)
        if run := job_events.run_of(event, self._settings.cluster, name=self._decode.name):
            self._app.events.emit(run)

    async def _publish_one(self, event: JobEvent) -> None:
        message_id = event.message_id(self._settings.cluster)
        if message_id in self._held:
            self._held.remove(message_id)
            return
        identifier = event.identifier(self._settings.cluster)
        try:
            # Beyond the window, another attempt at what was stored already would store it twice.
            with anyio.fail_after(await self._window.half_seconds(self._app.session.backend)):
                await self._app.notify(
                    job_events.EVENT_TYPE,
                    identifier,
                    event.payload,
                    message_id=message_id,
                    headers=self._decode.trace or None,
                )
        except TimeoutError as error:
            raise OutcomeUnknownError(f"{message_id} was not acknowledged within the duplicate window") from error
        except (UnknownEventTypeError, FullError):
            raise  # No event can be published now: nothing of the log must count as read.
        except InvalidNotificationError as error:
            self._pass_over(message_id, error)
        except RefusedError as error:
            if isinstance(error, DeniedError | ReadOtherwiseError) or error.code not in EVENT_REFUSALS:
                raise UnavailableError(f"{message_id}: {error}") from error  # until a right or the stream is mended
            self._pass_over(message_id, error)

    def _pass_over(self, message_id: str, error: Exception) -> None:
        """Say that an event is left out which the server will never take."""
        self._know_incomplete("refused")
        log.error("spark_events.refused", event_id=message_id, path=self.path, problem=str(error))


def _finished(published: EventLog) -> bool:
    """Return whether nothing more is expected.

    Spark has closed it, but a program that copies logs may still be writing.
    """
    return published.complete and time.time() - published.modified > REST_SECONDS


def _key(cluster: str, name: str) -> str:
    """Return the key of an application's position: KV takes letters, digits and `-_=./`, so others are written as
    `=XX`.
    """
    escaped = re.sub(rb"[^A-Za-z0-9_-]", lambda match: b"=%02X" % match[0][0], name.encode())
    return f"{cluster}/{escaped.decode()}"
