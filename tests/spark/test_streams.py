"""Streaming queries from and to the data source: where they are, how far they go, what they do when it is lost."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from aviso_workers.errors import NotFoundError
from aviso_workers.jetstream.info import StreamConfig, StreamInfo
from aviso_workers.spark import job_events, offsets
from aviso_workers.spark.job_events import SparkApplication
from tests.presence import present
from tests.spark.place import Place, run_to_its_end
from tests.waits import PATIENCE_SECONDS

PROGRESS = "org.apache.spark.sql.streaming.StreamingQueryListener$QueryProgressEvent"


class Copying:
    """A query that copies `mars` to `copy`, started again and again from one checkpoint."""

    def __init__(self, place: Place) -> None:
        self.checkpoint = place.directory / "checkpoint"
        self._place = place
        self.queries: list[StreamingQuery] = []

    def start(self, *, trigger: dict[str, Any] | None = None, **options: Any) -> StreamingQuery:
        options.setdefault("startingOffsets", "earliest")
        frame: DataFrame = self._place.read_stream(**options).select("identifier", "payload")
        writing = frame.writeStream.format("aviso").options(config=str(self._place.config), event="copy")
        writing = writing.option("checkpointLocation", str(self.checkpoint)).trigger(
            **(trigger or {"availableNow": True})
        )
        self.queries.append(writing.start())
        return self.queries[-1]

    def run(self, **options: Any) -> list[int]:
        """Copy what there is; returns how many rows each of its batches had."""
        return rows_in(run_to_its_end(lambda: self.start(**options)))

    @property
    def copied(self) -> list[int]:
        return [int(notification.identifier["step"]) for notification in self._place.stored("copy")]


@pytest.fixture
def copying(place: Place) -> Iterator[Copying]:
    copying = Copying(place)
    yield copying
    for query in copying.queries:
        query.stop()


def wait_until(is_so: Callable[[], bool], what: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, f"in vain: {what()}"
        time.sleep(0.05)


@pytest.mark.slow
def test_what_is_there_is_copied_in_batches_and_never_again(place: Place, copying: Copying) -> None:
    place.publish(*range(10))

    assert copying.run(maxMessagesPerTrigger=4) == [4, 4, 2]
    assert copying.run(maxMessagesPerTrigger=4) == []
    place.publish(10, 11)
    assert copying.run() == [2]
    assert sorted(copying.copied) == list(range(12))


@pytest.mark.slow
def test_available_now_takes_nothing_that_comes_later_and_waits_for_no_minimum(place: Place, copying: Copying) -> None:
    place.publish(1)

    assert copying.run(minMessagesPerTrigger=100, maxTriggerDelay="1h") == [1]


@pytest.mark.slow
def test_latest_begins_with_what_comes(place: Place, copying: Copying) -> None:
    place.publish(1)
    query = copying.start(trigger={"processingTime": "0 seconds"}, startingOffsets="latest")
    wait_until(lambda: bool(query.lastProgress), lambda: query.status)

    place.publish(2)

    query.processAllAvailable()
    assert copying.copied == [2]


@pytest.mark.slow
def test_a_minimum_is_waited_for_but_not_for_ever(place: Place, copying: Copying) -> None:
    def rows_of_first_batch(query: StreamingQuery) -> list[int]:
        wait_until(lambda: bool(rows_in(query)), lambda: query.recentProgress)
        query.stop()
        return rows_in(query)

    least: dict[str, Any] = {"trigger": {"processingTime": "0 seconds"}, "minMessagesPerTrigger": 3}
    place.publish(1, 2)
    query = copying.start(**least, maxTriggerDelay="1h")
    wait_until(lambda: bool(query.lastProgress), lambda: query.status)
    assert rows_in(query) == []
    place.publish(3)
    assert rows_of_first_batch(query) == [3]

    place.publish(4)
    assert rows_of_first_batch(copying.start(**least, maxTriggerDelay="1s")) == [1]


def rows_in(query: StreamingQuery) -> list[int]:
    """Of the batches that had any."""
    return [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]


@pytest.mark.slow
def test_progress_says_how_far_the_query_is_behind(place: Place, copying: Copying) -> None:
    place.publish(*range(6))
    options: dict[str, Any] = {"maxMessagesPerTrigger": 4, "where.step": "[0, 1, 2, 3, 4]"}
    query = copying.start(**options)
    assert query.awaitTermination(int(PATIENCE_SECONDS))

    first, second = (json.loads(progress["sources"][0]["latestOffset"]) for progress in query.recentProgress[:2])

    assert (first["stream"], first["sequence"], first["lag"], second["lag"]) == ("MARS", 6, 1, 0)
    told = job_events.decode(
        f'{{"Event":"{PROGRESS}","progress":{query.recentProgress[0].json}}}', SparkApplication(id="local-1")
    )
    assert told is not None
    assert told.payload["sources"][0]["description"] == "aviso stream MARS"
    assert "@" not in told.payload["sink"]["description"]


@pytest.mark.slow
def test_a_batch_that_is_repeated_after_a_crash_stores_nothing_twice(place: Place, copying: Copying) -> None:
    place.publish(*range(8))
    copying.run(maxMessagesPerTrigger=4)
    for commit in (copying.checkpoint / "commits").glob("*1*"):  # as if it had died before it wrote this down
        commit.unlink()

    assert copying.run() == [4]
    assert sorted(copying.copied) == list(range(8))


@pytest.mark.slow
def test_messages_deleted_within_a_range_are_normal(place: Place, copying: Copying) -> None:
    place.publish(*range(10))
    for sequence in (5, 6):
        place.do("delete_message", "MARS", sequence)

    assert copying.run(maxMessagesPerTrigger=5) == [4, 4]


@pytest.mark.slow
def test_messages_that_are_gone_before_they_were_read_fail_the_query_by_name(place: Place, copying: Copying) -> None:
    place.publish(*range(4))
    copying.run()
    place.publish(4, 5)
    place.do("purge_stream", "MARS")
    place.publish(6)

    with pytest.raises(StreamingQueryException, match="stream MARS: messages 5 to 6 are gone"):
        copying.run()
    assert copying.run(failOnDataLoss=False) == [1]
    assert sorted(copying.copied) == [0, 1, 2, 3, 6]


@pytest.mark.slow
def test_a_stream_that_was_created_again_is_another_one(place: Place, copying: Copying) -> None:
    place.publish(*range(3))
    copying.run()
    place.do("delete_stream", "MARS")
    place.publish(*range(10, 15))

    with pytest.raises(StreamingQueryException, match="stream MARS was deleted and recreated"):
        copying.run()
    assert copying.run(failOnDataLoss=False) == [5]
    assert sorted(copying.copied) == [0, 1, 2, 10, 11, 12, 13, 14]


@pytest.mark.slow
def test_a_source_that_is_deleted_fails_the_query_by_name(place: Place, copying: Copying) -> None:
    place.publish(*range(3))
    copying.run()
    place.do("delete_stream", "MARS")

    with pytest.raises(StreamingQueryException, match="there is no stream MARS"):
        copying.run()


@pytest.mark.slow
class TestATargetThatIsDeleted:
    """Earlier batches are gone with it, and no later one stores them again."""

    @pytest.fixture
    def deleted(self, place: Place, copying: Copying) -> None:
        """The target, behind a query that has copied three notifications and has two more to copy."""
        place.publish(*range(3))
        copying.run()
        place.do("delete_stream", "COPY")
        place.publish(3, 4)

    @pytest.mark.usefixtures("deleted")
    def test_is_not_created_again_by_the_next_batch(self, place: Place, copying: Copying) -> None:
        for _ in range(2):
            with pytest.raises(StreamingQueryException, match="stream COPY was deleted; earlier batches of query"):
                copying.run()

        with pytest.raises(NotFoundError):
            place.do("stream_info", "COPY")

    @pytest.mark.usefixtures("deleted")
    def test_and_created_again_fails_the_query_until_it_has_a_new_checkpoint(
        self, place: Place, copying: Copying
    ) -> None:
        place.publish(100, event="copy")

        for _ in range(2):
            with pytest.raises(StreamingQueryException, match=r"stream COPY was deleted and recreated at .*; earl"):
                copying.run()
        assert copying.copied == [100]

        copying.checkpoint = place.directory / "new checkpoint"
        assert copying.run() == [5]
        assert sorted(copying.copied) == [*range(5), 100]

    @pytest.mark.usefixtures("deleted")
    def test_is_done_without_where_the_record_is_deleted(self, place: Place, copying: Copying) -> None:
        with pytest.raises(StreamingQueryException, match="delete the key ") as failed:
            copying.run()
        key = re.search(r"the key (\S+) of the KV bucket aviso_workers_spark__COPY", str(failed.value))
        assert key is not None

        place.delete_key("aviso_workers_spark__COPY", key[1])

        assert copying.run() == [2]
        assert sorted(copying.copied) == [3, 4]

    def test_during_the_first_batch_has_all_of_it_when_that_is_repeated(self, place: Place, copying: Copying) -> None:
        place.publish(*range(3))
        copying.run()
        place.do("delete_stream", "COPY")
        for commit in (copying.checkpoint / "commits").glob("*0*"):  # as if it had failed
            commit.unlink()

        assert copying.run() == [3]
        assert sorted(copying.copied) == list(range(3))


@pytest.mark.slow
def test_a_checkpoint_is_of_one_stream(place: Place, copying: Copying) -> None:
    place.publish(1)
    place.publish(1, event="other")
    copying.run()

    with pytest.raises(StreamingQueryException, match="the checkpoint is of stream MARS, the query reads OTHER"):
        copying.run(event="other")


@pytest.mark.slow
def test_a_query_outlives_its_server(place: Place, copying: Copying) -> None:
    place.publish(1)
    query = copying.start(trigger={"processingTime": "0 seconds"})
    query.processAllAvailable()

    place.restart_server()
    place.publish(2)

    wait_until(lambda: copying.copied == [1, 2], lambda: (query.exception(), copying.copied))


@pytest.mark.slow
def test_stopping_leaves_no_consumer(place: Place, copying: Copying) -> None:
    place.publish(*range(2000))
    query = copying.start(trigger={"processingTime": "0 seconds"})
    query.processAllAvailable()

    query.stop()

    assert query.exception() is None
    assert place.do("consumers", "MARS") == []


@pytest.mark.slow
def test_secrets_are_in_no_plan_no_log_and_no_checkpoint(
    spark: SparkSession, place: Place, copying: Copying, capfd: pytest.CaptureFixture[str]
) -> None:
    place.with_url(place.server.url.replace("nats://", "nats://worker:hunter2@"))
    place.publish(1)

    assert copying.run() == [1]

    place.read().explain("extended")
    written = capfd.readouterr()
    assert "hunter2" not in written.out + written.err
    texts = [path.read_text(errors="replace") for path in copying.checkpoint.rglob("*") if path.is_file()]
    assert not [text for text in texts if "hunter2" in text]
    assert "hunter2" not in _event_logs(spark)


def _event_logs(spark: SparkSession) -> str:
    directory = Path(present(spark.conf.get("spark.eventLog.dir")).removeprefix("file:"))
    return "".join(path.read_text(errors="replace") for path in directory.rglob("*") if path.is_file())


class TestLoss:
    """What of a stream's state is a loss, and what is its nature."""

    @pytest.mark.parametrize(
        ("state", "first", "gone"),
        [
            ({"first_sequence": 1, "last_sequence": 9}, 5, ""),
            ({"first_sequence": 5, "last_sequence": 9}, 5, ""),
            ({"first_sequence": 7, "last_sequence": 9}, 5, "messages 5 to 6 are gone"),
            ({"first_sequence": 10, "last_sequence": 9, "messages": 0}, 10, ""),
            ({"first_sequence": 10, "last_sequence": 9, "messages": 0}, 5, "messages 5 to 9 are gone"),
            ({"first_sequence": 0, "last_sequence": 0, "messages": 0}, 1, ""),
            ({"first_sequence": 1, "last_sequence": 9}, 10, ""),
            ({"first_sequence": 1, "last_sequence": 9}, 11, "ends at 9, and the query has read up to 10"),
            ({"first_sequence": 7, "last_sequence": 9, "config": StreamConfig(max_msgs_per_subject=1)}, 5, ""),
            (
                {
                    "first_sequence": 10,
                    "last_sequence": 9,
                    "messages": 0,
                    "config": StreamConfig(max_msgs_per_subject=1),
                },
                5,
                "messages 5 to 9 are gone",
            ),
        ],
    )
    def test_what_is_missing_is_named(self, state: dict[str, Any], first: int, gone: str) -> None:
        info = StreamInfo(**{"config": StreamConfig(), "time": datetime.now(UTC), "messages": 3, **state})

        loss = offsets.missing(info, stream="MARS", first=first, created_then="")

        assert gone in str(loss) if gone else loss is None, loss

    def test_ranges_cover_everything_once(self) -> None:
        ranges = offsets.split(11, 10_010, partitions=3, created="")

        assert [(one.first, one.last) for one in ranges] == [(11, 3343), (3344, 6676), (6677, 10_010)]
        assert len(offsets.split(1, 999, partitions=3, created="")) == 1
        assert offsets.split(5, 4, partitions=3, created="") == []
