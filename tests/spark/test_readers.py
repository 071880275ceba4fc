"""What a read does when its stream changes under it: planning and tasks, called as Spark calls them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any

import pytest
from msgspec import structs
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable

from aviso_workers.backends.jetstream import readers as wire_reading
from aviso_workers.declare.retry import RetryPolicy
from aviso_workers.errors import DataLossError, InvalidOptionError, UnavailableError
from aviso_workers.spark import connections, readers
from aviso_workers.spark.data_source import AvisoDataSource
from aviso_workers.spark.offsets import Offset, Range
from tests.spark.place import Place
from tests.waits import PATIENCE_SECONDS

CHUNK = 10
COUNT = 100
"""Much more than is under way between the server and a task, where chunks are that small."""
StreamReaders = Callable[..., readers.StreamReader]


@pytest.fixture
def place(spark: SparkSession, nats_server: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(wire_reading, "CHUNK", CHUNK)
    monkeypatch.setattr(connections, "AGAIN", RetryPolicy(first=0.05, factor=1.0, jitter=0.0))
    return Place(spark, nats_server, tmp_path)


def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for no server, from now on."""
    monkeypatch.setattr(readers, "PATIENCE_SECONDS", 0.0)


def batch_reader(place: Place, **options: Any) -> readers.BatchReader:
    columns = place.read(**options).schema
    return AvisoDataSource(place.options(**options)).reader(columns)


@pytest.fixture
def stream_reader(place: Place) -> Iterator[StreamReaders]:
    """Return a reader with the options given, which is stopped in the end as Spark stops one."""
    with ExitStack() as stopping:

        def stream_reader(**options: Any) -> readers.StreamReader:
            columns = place.read_stream(**options).schema
            reader = AvisoDataSource(place.options(**options)).streamReader(columns)
            stopping.callback(reader.stop)
            return reader

        yield stream_reader


class Task:
    """The only task of a batch read, after its first rows."""

    def __init__(self, place: Place, **options: Any) -> None:
        reader = batch_reader(place, **options)
        (partition,) = reader.partitions()
        self._batches: Iterator[Any] = reader.read(partition)
        self.sequences: list[int] = next(self._batches)["sequence"].to_pylist()

    def finish(self) -> list[int]:
        """Read the rest; returns the sequences of all rows."""
        for batch in self._batches:
            self.sequences += batch["sequence"].to_pylist()
        return self.sequences


class TestTasks:
    @pytest.mark.slow
    def test_more_tasks_than_may_read_at_once_wait_and_warn(
        self, place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("aviso_workers.jetstream.identities.READERS_OF_SPARK", 1)
        monkeypatch.setattr(wire_reading, "NAMED_SECONDS", 0.1)
        place.publish(*range(COUNT))
        task = Task(place)

        with ThreadPoolExecutor() as threads:
            waiting = threads.submit(lambda: Task(place).finish())
            deadline = time.monotonic() + PATIENCE_SECONDS
            while "a read waits for others to end: all 1 readers of MARS are at work" not in caplog.text:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert not waiting.done()
            everything = list(range(1, COUNT + 1))
            assert task.finish() == everything
            assert waiting.result(PATIENCE_SECONDS) == everything

    def test_a_task_tells_how_many_payloads_have_numbers_that_do_not_fit(
        self, place: Place, caplog: pytest.LogCaptureFixture
    ) -> None:
        place.publish(*range(COUNT - 3), payload={"size": 1, "share": 0.5})
        place.publish(1, 2, payload={"size": 2**31, "share": 0.5})
        place.publish(3, payload={"size": 1, "share": 1e39})

        Task(place, payloadSchema="size INT, share FLOAT").finish()

        (told,) = caplog.messages
        assert told == (
            f"stream MARS, sequences 1 to {COUNT}: 3 of the payloads do not fit payloadSchema (message {COUNT - 2}: "
            "Expected `int` <= 2147483647 - at `$.size`): they are null, and _corrupt_record has their text"
        )

    def test_a_stream_that_is_purged_while_it_is_read_fails_the_task(self, place: Place) -> None:
        place.publish(*range(COUNT))
        task = Task(place)

        place.do("purge_stream", "MARS")

        with pytest.raises(DataLossError, match=r"stream MARS: messages \d+ to 100 are gone"):
            task.finish()

    @pytest.mark.slow
    def test_so_does_one_whose_beginning_is_removed_faster_than_it_is_read(self, place: Place) -> None:
        place.publish(*range(COUNT))
        task = Task(place)

        for sequence in range(1, 91):
            place.do("delete_message", "MARS", sequence)

        with pytest.raises(DataLossError, match=r"stream MARS: messages \d+ to 90 are gone"):
            task.finish()

    def test_what_was_read_before_it_is_removed_is_no_loss(self, place: Place) -> None:
        place.publish(*range(COUNT))
        task = Task(place)

        for sequence in range(1, CHUNK + 1):
            place.do("delete_message", "MARS", sequence)

        assert task.finish() == list(range(1, COUNT + 1))

    def test_nor_are_messages_that_are_deleted_one_by_one_within_the_stream(self, place: Place) -> None:
        place.publish(*range(COUNT))
        task = Task(place)

        for sequence in (80, 81, COUNT):
            place.do("delete_message", "MARS", sequence)

        assert task.finish() == [*range(1, 80), *range(82, COUNT)]

    def test_a_query_that_may_lose_messages_reads_what_is_left(self, place: Place) -> None:
        place.publish(*range(COUNT))
        task = Task(place, failOnDataLoss=False)

        place.do("purge_stream", "MARS")

        assert task.finish() == list(range(1, len(task.sequences) + 1))

    def test_a_stream_that_is_made_again_while_it_is_read_fails_the_task(self, place: Place) -> None:
        place.publish(*range(COUNT))
        task = Task(place)

        place.do("delete_stream", "MARS")
        place.publish(*range(COUNT))

        with pytest.raises(DataLossError, match="stream MARS was deleted and recreated"):
            task.finish()

    def test_a_stream_that_ends_before_its_range_does_is_waited_for_and_then_an_error(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As on a server that lags behind, or after an older backup has been restored."""
        place.publish(1, 2)
        reader = batch_reader(place)
        (partition,) = reader.partitions()
        assert isinstance(partition, Range)
        longer = Range(first=1, last=5, created=partition.created)
        impatient(monkeypatch)

        with pytest.raises(UnavailableError, match=r"stream MARS ends at 2 .* and the query planned to read up to 5"):
            list(reader.read(longer))


class TestPlanning:
    def test_times_are_those_of_the_server_where_the_clock_of_the_driver_is_behind(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Behind(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> Behind:
                return super().now(tz) - timedelta(hours=1)

        monkeypatch.setattr(readers, "datetime", Behind, raising=False)
        place.publish_numbered(COUNT)
        before = datetime.now(UTC) - timedelta(minutes=30)

        (since,) = batch_reader(place, startingTimestamp=before.isoformat()).partitions()
        until = batch_reader(place, endingTimestamp=before.isoformat()).partitions()
        after = batch_reader(place, startingTimestamp=(before + timedelta(hours=1)).isoformat()).partitions()

        assert isinstance(since, Range)
        assert (since.first, since.last) == (1, COUNT)
        assert until == after == []

    def test_a_batch_read_waits_for_a_server_that_is_away(self, place: Place) -> None:
        place.publish(1, 2)
        reader = batch_reader(place)
        place.server.kill()
        with ThreadPoolExecutor(1) as driver:
            planned = driver.submit(reader.partitions)
            assert not wait([planned], timeout=0.5).done, "it did not wait"

            place.restart_server()

            (partition,) = planned.result(PATIENCE_SECONDS)
        assert isinstance(partition, Range)
        assert (partition.first, partition.last) == (1, 2)

    def test_a_stream_that_ends_before_the_checkpoint_is_a_loss(
        self, place: Place, stream_reader: StreamReaders, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place.publish(1, 2)
        ahead = _ahead(stream_reader)
        impatient(monkeypatch)

        reader = stream_reader()
        with pytest.raises(DataLossError, match="stream MARS ends at 2, and the query has read up to 7"):
            reader.latestOffset(ahead, ReadAllAvailable())

    def test_a_query_that_may_lose_messages_goes_on_behind_its_end(
        self, place: Place, stream_reader: StreamReaders, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place.publish(1, 2)
        ahead = _ahead(stream_reader)
        impatient(monkeypatch)

        reader = stream_reader(failOnDataLoss=False)
        found = reader.latestOffset(ahead, ReadAllAvailable())

        assert found["sequence"] == 2

    def test_what_waits_for_a_minimum_is_no_lag_but_what_came_since_the_checkpoint(
        self, place: Place, stream_reader: StreamReaders
    ) -> None:
        place.publish(1, 2, 3)
        reader = stream_reader(startingOffsets=3, minMessagesPerTrigger=10, maxTriggerDelay="1h")
        start = reader.initialOffset()
        reader.latestOffset(start, reader.getDefaultReadLimit())

        assert reader.latestOffset(start, reader.getDefaultReadLimit()) == start
        assert reader.reportLatestOffset()["lag"] == 1

    def test_a_first_sequence_that_the_stream_has_not_reached_is_refused(
        self, place: Place, stream_reader: StreamReaders
    ) -> None:
        place.publish(1, 2)
        reader = stream_reader(startingOffsets=4)

        with pytest.raises(InvalidOptionError, match="startingOffsets is 4, and stream MARS ends at 2"):
            reader.initialOffset()


def _ahead(stream_reader: StreamReaders) -> dict[str, Any]:
    """An offset of the stream that is beyond its end."""
    reader = stream_reader(startingOffsets="latest")
    offset = Offset.parse(reader.initialOffset())
    return structs.replace(offset, sequence=7).as_dict()


def test_a_batch_that_is_repeated_has_the_partitions_that_it_had(
    place: Place, stream_reader: StreamReaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows would have other message ids otherwise, and be stored twice."""
    monkeypatch.setattr("aviso_workers.spark.offsets.LEAST_PER_PARTITION", 10)
    place.publish(*range(COUNT))
    first = stream_reader(startingOffsets="earliest", numPartitions=4)
    start = first.initialOffset()
    end = first.latestOffset(start, ReadAllAvailable())

    again = stream_reader(startingOffsets="earliest", numPartitions=2)

    assert again.partitions(start, end) == first.partitions(start, end)
    assert len(again.partitions(start, end)) == 4
    assert again.latestOffset(end, ReadAllAvailable()) == end, "the option alone makes no batch"
    place.publish(*range(COUNT))
    assert len(again.partitions(end, again.latestOffset(end, ReadAllAvailable()))) == 2
