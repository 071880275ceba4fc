"""Batch and streaming reads, planned on the driver and carried out in tasks by our own backend.

Spark makes the readers by `data_source`, pickles them, and calls them in processes of its own: so they hold the
plan and no connection. A task opens one, reads its range of sequences as an ephemeral consumer gives it, and reads on
where that is interrupted. Messages that are lost for good are reported before anything is read in their place.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, closing
from datetime import datetime, timedelta
from typing import Any, TypeVar

from msgspec import Struct
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from aviso_workers.aviso import schema, topics
from aviso_workers.aviso.codec import NotificationReader, is_marker
from aviso_workers.aviso.schema import EventType, Where
from aviso_workers.backends import Backend, Chunk, Message, StreamInfo
from aviso_workers.config import Config, streams
from aviso_workers.declare.retry import Tries
from aviso_workers.errors import InvalidOptionError, NotFoundError, UnavailableError
from aviso_workers.jetstream import error_codes
from aviso_workers.spark import offsets
from aviso_workers.spark.connections import BlockingConnection, connected, load_config, tries
from aviso_workers.spark.offsets import Offset, Range
from aviso_workers.spark.options import ReadOptions, where_of
from aviso_workers.spark.schema import CORRUPT, ColumnConverter, Layout, check_wanted, layout

PATIENCE_SECONDS = 30.0
"""How long a server may be away before a query fails: longer than an election, as for publishing."""

T = TypeVar("T")
logger = logging.getLogger("aviso_workers.spark")


class ReadPlan(Struct, frozen=True, kw_only=True):
    """The plan of a read, as the driver and the tasks know it. It has no connection, and no secret."""

    reading: ReadOptions
    stream: str
    layout: Layout
    event_type: EventType | None = None
    where: Where | None = None

    @property
    def filters(self) -> tuple[str, ...]:
        return topics.filter_subjects(self.where) if self.where else ()

    @property
    def filters_are_wide(self) -> bool:
        """Whether the server's filters may let more through than was asked for."""
        if self.where is None:
            return False
        lists = [accepted for _, accepted in self.where.conditions if isinstance(accepted, frozenset)]
        narrow = len(self.filters) == math.prod(map(len, lists))
        return self.where.place is not None or len(lists) < len(self.where.conditions) or not narrow


def plan(reading: ReadOptions, config: Config) -> ReadPlan:
    """Return the plan of a read. Raises `InvalidOptionError`, `UnknownEventTypeError` and `InvalidIdentifierError`."""
    if config.notification_backend.kind != "jetstream":
        raise InvalidOptionError("Spark reads and writes with notification_backend.kind: jetstream only")
    known = config.notification_schema
    if reading.event is None:
        return ReadPlan(reading=reading, stream=reading.stream or "", layout=layout(reading, known))
    event_type = config.event_type(reading.event)
    where = schema.parse_where(reading.event, event_type, where_of(reading, event_type.identifier))
    stream = streams.event_stream(reading.event, event_type, config).name
    return ReadPlan(reading=reading, stream=stream, layout=layout(reading, known), event_type=event_type, where=where)


class DriverRequests:
    """Requests of the driver to the servers, which are retried while no server answers for a moment."""

    def __init__(self, plan: ReadPlan) -> None:
        self._plan = plan
        self._open = ExitStack()
        self._connection: BlockingConnection | None = None

    def close(self) -> None:
        self._connection = None
        self._open.close()

    def ask(self, request: Callable[[BlockingConnection], T]) -> T:
        """Return the answer to a request. Raises `UnavailableError` where none comes for longer than a server may be
        away.
        """
        left = tries(PATIENCE_SECONDS, now=time.monotonic())
        while True:
            try:
                if self._connection is None:
                    settings = load_config(self._plan.reading.config)
                    self._connection = self._open.enter_context(connected(settings))
                return request(self._connection)
            except UnavailableError as error:
                self.close()
                left = _wait(left, error)

    def info(self, *, read: Offset | None = None) -> StreamInfo:
        """Return the state of the stream. Raises `NotFoundError`.

        A server may lag behind the one that gave what was `read`: then it is asked again, for as long as an election
        may take.
        """
        left = tries(PATIENCE_SECONDS, now=time.monotonic())
        while True:
            info = self.ask(lambda connection: _info(connection, self._plan.stream))
            lags = read is not None and read.created == offsets.created(info) and read.sequence > info.last_sequence
            if not lags or (wait := left.next_wait(time.monotonic())) is None:
                return info
            time.sleep(wait)

    def first_since(self, since: datetime, info: StreamInfo) -> int:
        """Return the sequence of the first message that was stored at that time or later; the next one without any."""
        return self.ask(lambda one: one.call(_first_since, one.backend, self._plan.stream, since, info))

    def count(self, start: int) -> int:
        """Return how many messages match from that sequence on."""
        filters = self._plan.filters
        return self.ask(
            lambda one: one.call(one.backend.count, self._plan.stream, filter_subjects=filters, start_sequence=start)
        )


class _Reader:
    """The part that both readers share: what is read, and the reading of a partition in a task."""

    def __init__(self, plan: ReadPlan, wanted: StructType) -> None:
        check_wanted(wanted, plan.layout, reading=plan.reading)
        self._plan = plan
        self._wanted = wanted

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the record batches of a range of sequences. Spark calls it in a task."""
        if not isinstance(partition, Range):
            return  # Spark makes one of its own where there is nothing to read
        columns = ColumnConverter(self._wanted, self._plan.layout, reading=self._plan.reading)
        matches = _matcher(self._plan)
        for chunk in _chunks(self._plan, partition):
            messages = chunk.only(list(map(matches, chunk))) if matches else chunk
            if not all(messages.data):
                messages = messages.only([not is_marker(message) for message in messages])
            if messages:
                yield columns.batch(messages)
        if columns.misfits:
            logger.warning(
                "stream %s, sequences %d to %d: %s: they are null, and %s has their text",
                *(self._plan.stream, partition.first, partition.last, columns.misfits, CORRUPT),
            )


class BatchReader(_Reader, DataSourceReader):
    """A read of what a stream holds when the query is planned.

    It takes no filters from Spark, though Spark offers them, those on fields of the identifier too. PySpark 4.3 keeps
    one planned reader for each data frame that was loaded, and replaces it whenever a filter is handed over. All
    queries on the frame use it then, whatever they filter, and both sides of a union do: rows would be missing or
    doubled without a word. What the server is to leave out, the `where` options say.
    """

    def partitions(self) -> Sequence[InputPartition]:
        plan, reading = self._plan, self._plan.reading
        with closing(DriverRequests(plan)) as requests:
            info = requests.info()
            first = info.first_sequence if reading.start in (None, "earliest") else _number(plan, info)
            last = info.last_sequence if reading.end == "latest" else min(reading.end, info.last_sequence)
            if reading.start_time is not None:
                first = requests.first_since(reading.start_time, info)
            if reading.end_time is not None:
                after = reading.end_time + timedelta(microseconds=1)
                last = requests.first_since(after, info) - 1
        if first <= last:
            first = _from_what_is_left(plan, info, first)
        created = offsets.created(info)
        return offsets.split(first, last, partitions=reading.partitions, created=created)


class StreamReader(_Reader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A read of what is added to a stream, in micro-batches of sequences.

    Spark keeps one of these in a process of the driver, where it plans and never reads: that has a connection, from
    the first request until `stop`.
    """

    def __init__(self, plan: ReadPlan, wanted: StructType) -> None:
        super().__init__(plan, wanted)
        self._target: int | None = None
        """With Trigger.AvailableNow: where the query ends."""
        self._planned = 0
        self._triggered = time.monotonic()
        self._seen: StreamInfo | None = None
        self._behind = (0, 0, 0)
        """How many messages there were between two sequences."""
        self._requests = DriverRequests(plan)

    def __getstate__(self) -> dict[str, Any]:
        return {"_plan": self._plan, "_wanted": self._wanted}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        reading = self._plan.reading
        info = self._stream_info()
        sequence = info.last_sequence + 1 if reading.start in (None, "latest") else _number(self._plan, info)
        if (since := reading.start_time) is not None:
            sequence = self._requests.first_since(since, info)
        return self._offset(info, sequence - 1).as_dict()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        reading = self._plan.reading
        if reading.most_per_trigger is not None:
            return ReadMaxRows(reading.most_per_trigger)
        return ReadAllAvailable() if reading.least_per_trigger is None else ReadMinRows(reading.least_per_trigger)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        known = Offset.parse(start)
        info = self._stream_info(read=known)
        begin = self._left(info, known)
        last = info.last_sequence if self._target is None else min(self._target, info.last_sequence)
        if isinstance(limit, ReadMaxRows):
            last = min(last, begin.sequence + limit.max_rows)
        if not isinstance(limit, ReadAllAvailable) and self._too_few(last - begin.sequence):
            self._planned = begin.sequence
            return start
        self._planned = max(last, begin.sequence)
        if self._planned == begin.sequence and begin == known:
            return start
        self._triggered = time.monotonic()
        return self._offset(info, self._planned).as_dict()

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the newest offset, with `lag`: how many messages match and are beyond what the query has planned."""
        info = self._last_seen()
        lag = self._lag(self._planned, info.last_sequence)
        return self._offset(info, info.last_sequence).as_dict() | {"lag": lag}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._stream_info().last_sequence

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        begin, until = Offset.parse(start), Offset.parse(end)
        info = self._last_seen()
        first = self._left(info, begin).sequence + 1
        return offsets.split(first, until.sequence, partitions=until.partitions, created=until.created)

    def stop(self) -> None:
        self._requests.close()

    def _offset(self, info: StreamInfo, sequence: int) -> Offset:
        return Offset(
            stream=self._plan.stream,
            created=offsets.created(info),
            sequence=max(0, sequence),
            partitions=self._plan.reading.partitions,
        )

    def _left(self, info: StreamInfo, begin: Offset) -> Offset:
        """Return the offset from which a batch can read on that is planned to begin at `begin`. Raises
        `DataLossError`.
        """
        if begin.stream != self._plan.stream:
            raise InvalidOptionError(
                f"the checkpoint is of stream {begin.stream}, the query reads {self._plan.stream}: take another one"
            )
        same = begin.created == offsets.created(info)
        first = _from_what_is_left(self._plan, info, begin.sequence + 1, created=begin.created)
        return begin if same and first == begin.sequence + 1 else self._offset(info, first - 1)

    def _lag(self, planned: int, last: int) -> int:
        """Return how many messages match after `planned`. Counted only where it can have changed: it costs the server
        something, and Spark asks again and again.
        """
        if planned >= last:
            return 0
        if self._behind[:2] != (planned, last):
            self._behind = (planned, last, self._requests.count(planned + 1))
        return self._behind[2]

    def _too_few(self, count: int) -> bool:
        reading = self._plan.reading
        if reading.least_per_trigger is None or self._target is not None:
            return False
        overdue = time.monotonic() - self._triggered >= reading.trigger_delay_seconds
        return count < reading.least_per_trigger and not overdue

    def _stream_info(self, *, read: Offset | None = None) -> StreamInfo:
        self._seen = self._requests.info(read=read)
        return self._seen

    def _last_seen(self) -> StreamInfo:
        """Return the stream's state as it was when the batch was planned: Spark asks three times for each batch."""
        return self._seen or self._stream_info()


def _chunks(plan: ReadPlan, range: Range) -> Iterator[Chunk]:
    """Yield the messages of a range in order, each once, also where reading was interrupted in between.

    The stream's state is read before, behind each chunk and at the end: what is removed from its beginning while it is
    read would look like the holes that deleted messages leave. Raises `DataLossError`.
    """
    settings = load_config(plan.reading.config)
    first, left = range.first, tries(PATIENCE_SECONDS, now=time.monotonic())
    while first <= range.last:
        try:
            with connected(settings) as connection, ExitStack() as stack:
                first = _left_in(connection, plan, range, first)
                if first > range.last:
                    return
                reading = connection.backend.read_chunks(
                    plan.stream, filter_subjects=plan.filters, start_sequence=first, last_sequence=range.last
                )
                stack.callback(connection.call, reading.aclose)
                while first <= range.last and (chunk := connection.call(anext, reading, None)) is not None:
                    _left_in(connection, plan, range, first, read=chunk.sequences)
                    yield chunk
                    first, left = chunk.sequences[-1] + 1, tries(PATIENCE_SECONDS, now=time.monotonic())
                if first <= range.last:
                    _left_in(connection, plan, range, first)
                return
        except UnavailableError as error:
            left = _wait(left, error)


def _wait(left: Tries, error: UnavailableError) -> Tries:
    """Wait until a request is repeated, and return the retries that are left. Raises the error where there are none.

    A read that begins when one of another task ends, which may take long, has all of them again.
    """
    if error.code == error_codes.CONSUMER_EXISTS:
        logger.warning("a read waits for others to end: %s", error)
        left = tries(PATIENCE_SECONDS, now=time.monotonic())
    if (wait := left.next_wait(time.monotonic())) is None:
        raise error
    time.sleep(wait)
    return left


def _left_in(
    connection: BlockingConnection, plan: ReadPlan, range: Range, first: int, *, read: Sequence[int] = ()
) -> int:
    """Return where a task reads on from `first`, behind messages that are gone; those it has `read` cannot be lost any
    more.

    Raises `DataLossError`, and `UnavailableError` where the servers do not have all of the range.
    """
    info = _info(connection, plan.stream)
    if offsets.created(info) != range.created:
        _from_what_is_left(plan, info, first, created=range.created)
        return range.last + 1  # what was planned is gone; the next batch begins with what there is instead
    if info.last_sequence < range.last:
        raise UnavailableError(
            f"stream {plan.stream} ends at {info.last_sequence} on the server that answered, and the query planned to "
            f"read up to {range.last}: either the server lags behind and will catch up, or the servers have lost the "
            "newest messages, and the query needs a new checkpoint"
        )
    before = bisect_left(read, info.first_sequence)
    return _from_what_is_left(plan, info, read[before - 1] + 1 if before else first, last=range.last)


def _matcher(plan: ReadPlan) -> Callable[[Message], bool] | None:
    """Return a function that tells whether a message matches the filter; None where the server's filters suffice."""
    if not plan.filters_are_wide or plan.event_type is None or plan.reading.event is None:
        return None
    return NotificationReader(plan.reading.event, plan.event_type, where=plan.where).matches


def _from_what_is_left(
    plan: ReadPlan, info: StreamInfo, first: int, *, created: str | None = None, last: int | None = None
) -> int:
    """Return the sequence from which to read on instead of `first`.

    Raises `DataLossError`, or warns of it where it does not matter to the query.
    """
    known = offsets.created(info) if created is None else created
    lost = offsets.missing(info, stream=plan.stream, first=first, last=last, created_then=known)
    if lost is None:
        return first
    if plan.reading.fail_on_data_loss:
        raise lost
    logger.warning("%s; reading goes on without them", str(lost).partition(". ")[0])
    return offsets.following(info, first=first, created_then=known)


def _info(connection: BlockingConnection, stream: str) -> StreamInfo:
    try:
        return connection.call(connection.backend.stream_info, stream)
    except NotFoundError as error:
        raise NotFoundError(
            f"there is no stream {stream}: publish to it first, or make it with `aviso-workers streams apply`",
            code=error.code,
        ) from error


async def _first_since(backend: Backend, stream: str, since: datetime, info: StreamInfo) -> int:
    """Return the sequence of the first message stored at that time or later; the next one, if there is none."""
    reading = backend.read(stream, filter_subjects=(), start_time=since, last_sequence=info.last_sequence)
    async with aclosing(reading):
        message = await anext(reading, None)
    return message.sequence if message else info.last_sequence + 1


def _number(plan: ReadPlan, info: StreamInfo) -> int:
    """Return the sequence at which a read begins. Raises `InvalidOptionError` where the stream ends before it."""
    start = plan.reading.start
    if not isinstance(start, int):
        return info.first_sequence if start == "earliest" else info.last_sequence + 1
    if start > info.last_sequence + 1:
        raise InvalidOptionError(
            f"startingOffsets is {start}, and stream {plan.stream} ends at {info.last_sequence}: give a sequence that "
            "it has, or latest"
        )
    return max(1, start)
