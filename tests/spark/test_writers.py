"""Every row of a write arrives, or the write says which one did not and fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from aviso_workers.errors import DataLossError, NotFoundError
from aviso_workers.server import NatsServer
from aviso_workers.spark import writers
from aviso_workers.spark.data_source import AvisoDataSource
from tests.spark.place import Place
from tests.waits import PATIENCE_SECONDS

FEW = "spark.sql.execution.arrow.maxRecordsPerBatch"
NO_JSON = "{"


@pytest.fixture
def in_tens(spark: SparkSession) -> Iterator[None]:
    """Spark hands ten rows to a writer at a time, so that those before a failure are stored."""
    spark.conf.set(FEW, "10")
    yield
    spark.conf.unset(FEW)


def copied(place: Place) -> list[int]:
    return sorted(notification.payload["number"] for notification in place.stored("copy"))


def copy(place: Place, rows: DataFrame) -> None:
    """Copy `rows`, of a stream, to the event type `copy`, from where the last copy ended."""
    writing = rows.select("identifier", "payload").writeStream.format("aviso").trigger(availableNow=True)
    options = {"config": str(place.config), "event": "copy", "checkpointLocation": str(place.directory / "checkpoint")}
    assert writing.options(**options).start().awaitTermination(int(PATIENCE_SECONDS))


def numbered(place: Place, count: int) -> DataFrame:
    """Rows of the steps from 0 on, whose payloads and ids say the number."""
    return place.rows(count).withColumn("id", F.concat(F.lit("field/"), F.col("step")))


class TestAChangedRepeat:
    @pytest.mark.usefixtures("in_tens")
    @pytest.mark.slow
    def test_of_a_batch_loses_nothing(self, place: Place) -> None:
        """It fails in the middle, the source loses messages, and the program is repaired and goes on."""
        place.publish_numbered(20)
        source = place.read_stream(startingOffsets="earliest")
        failing = source.withColumn(
            "payload", F.when(F.col("sequence") == 18, F.lit(NO_JSON)).otherwise(F.col("payload"))
        )
        with pytest.raises(StreamingQueryException, match="is not JSON"):
            copy(place, failing)
        assert copied(place) == list(range(10)), "what came before the failure is stored"

        for sequence in (2, 3, 4):
            place.do("delete_message", "MARS", sequence)
        copy(place, source.where("sequence != 18"))

        assert copied(place) == [number for number in range(20) if number != 17]

    @pytest.mark.slow
    @pytest.mark.usefixtures("in_tens")
    def test_of_a_task_loses_nothing(self, place: Place) -> None:
        def other_rows_at_each_attempt(batches: Iterator[Any]) -> Iterator[Any]:
            import pyarrow as pa
            import pyarrow.compute as pc
            from pyspark import TaskContext

            context = TaskContext.get()
            assert context is not None
            for batch in batches:
                if context.attemptNumber():
                    yield batch.filter(pc.greater_equal(batch.column("step"), 3))
                    continue
                yield batch
                yield batch.set_column(batch.schema.get_field_index("payload"), "payload", pa.array(["{"] * len(batch)))

        rows = place.rows(40)

        place.write(rows.mapInArrow(other_rows_at_each_attempt, rows.schema), event="copy")

        assert copied(place) == list(range(40)), "also what only the first attempt had"


class TestAStreamThatIsDeleted:
    """What a write had stored is gone with it: nothing but the whole write again has all rows in one stream."""

    @pytest.fixture(autouse=True)
    def task(self, monkeypatch: pytest.MonkeyPatch) -> None:
        task = SimpleNamespace(partitionId=lambda: 0)
        monkeypatch.setattr(writers, "TaskContext", SimpleNamespace(get=lambda: task))

    @pytest.fixture
    def writer(self, place: Place) -> writers.BatchWriter:
        return AvisoDataSource(place.options("copy")).writer(place.rows(0).schema, False)

    @pytest.mark.parametrize("options", [{}, {"msgIdColumn": "payload"}])
    def test_while_a_task_writes_fails_the_task_and_is_not_created_again(
        self, place: Place, options: dict[str, str]
    ) -> None:
        def deleting() -> Iterator[pa.RecordBatch]:
            first, second = place.rows(6).toArrow().to_batches(max_chunksize=3)
            yield first
            place.do("delete_stream", "COPY")
            yield second

        writer = AvisoDataSource(place.options("copy", **options)).writer(place.rows(0).schema, False)
        with pytest.raises(DataLossError, match="copy: its stream was deleted, while"):
            writer.write(deleting())
        with pytest.raises(NotFoundError):
            place.do("stream_info", "COPY")

    def test_behind_the_last_row_of_a_task_fails_the_task(self, place: Place, writer: writers.BatchWriter) -> None:
        def deleting() -> Iterator[pa.RecordBatch]:
            yield from place.rows(3).toArrow().to_batches()
            place.do("delete_stream", "COPY")

        with pytest.raises(DataLossError, match="copy: its stream was deleted, while"):
            writer.write(deleting())
        with pytest.raises(NotFoundError):
            place.do("stream_info", "COPY")

    def test_and_created_again_while_a_task_writes_fails_the_task(
        self, place: Place, writer: writers.BatchWriter
    ) -> None:
        def deleting() -> Iterator[pa.RecordBatch]:
            first, second = place.rows(6).toArrow().to_batches(max_chunksize=3)
            yield first
            place.do("delete_stream", "COPY")
            place.publish(100, event="copy")
            yield second

        with pytest.raises(DataLossError, match=r"copy: its stream was deleted and recreated at .*, while"):
            writer.write(deleting())

    def test_between_tasks_fails_the_write(self, place: Place, writer: writers.BatchWriter) -> None:
        first = writer.write(iter(place.rows(3).toArrow().to_batches()))
        place.do("delete_stream", "COPY")
        second = writer.write(iter(place.rows(3, first=3).toArrow().to_batches()))
        nothing = writer.write(iter([]))

        with pytest.raises(DataLossError, match=r"copy: its stream was deleted and recreated at .*, while"):
            writer.commit([first, nothing, second])
        writer.commit([second, nothing])

    @pytest.mark.slow
    @pytest.mark.parametrize("denied", ["$JS.API.STREAM.*.KV_aviso_workers_spark__COPY", "$KV.>"])
    def test_is_not_noticed_by_the_next_batch_whose_user_may_not_record_it(
        self, place: Place, caplog: pytest.LogCaptureFixture, denied: str
    ) -> None:
        allowed = {"allow": ">", "deny": denied}
        user = {"user": "spark", "password": "spark", "permissions": {"publish": allowed}}
        options = place.options("copy", queryId="nightly copy", batchId=0)
        writer = AvisoDataSource(options).writer(place.rows(0).schema, False)
        users = f"authorization {{ users: [{json.dumps(user)}] }}"
        with NatsServer.start(store_dir=place.directory / "with users", config=users) as server:
            place.with_url(server.url.replace("nats://", "nats://spark:spark@"))

            written = writer.write(iter(place.rows(3).toArrow().to_batches()))
            writer.commit([written])

            assert copied(place) == [0, 1, 2]
        assert "the next batches will not notice" in caplog.text
        assert "permissions violation" in caplog.text.lower()


class TestMessageIds:
    @pytest.mark.slow
    def test_a_row_whose_id_other_content_has_fails_the_write(self, place: Place) -> None:
        five_ids = numbered(place, 10).withColumn("id", F.concat(F.lit("field/"), F.col("step") % 5))

        with pytest.raises(PySparkException, match=r"id 'field/\d'.*was not stored.*holds other content"):
            place.write(five_ids, event="copy", msgIdColumn="id")

    @pytest.mark.slow
    def test_the_same_rows_again_are_no_failure_unless_they_are_to_be_one(self, place: Place) -> None:
        rows = numbered(place, 10)
        place.write(rows, event="copy", msgIdColumn="id")

        place.write(rows, event="copy", msgIdColumn="id")
        with pytest.raises(
            PySparkException, match=r"id 'field/\d'.*the stream has it already, and onDuplicate is fail"
        ):
            place.write(rows, event="copy", msgIdColumn="id", onDuplicate="fail")

        assert copied(place) == list(range(10))


class TestARowThatIsWrong:
    @pytest.mark.slow
    def test_is_named(self, place: Place) -> None:
        rows = place.rows(6).withColumn("step", F.when(F.col("step") == 4, F.lit(-1)).otherwise(F.col("step")))

        with pytest.raises(
            PySparkException, match=r"row 1 of partition 1 .*'step': -1.*: mars: .*'step' must be within"
        ):
            place.write(rows)

    @pytest.mark.slow
    def test_goes_to_the_dead_letters_once_and_the_others_are_stored(self, spark: SparkSession, place: Place) -> None:
        rows = place.rows(6)
        wrong = rows.withColumn("payload", F.when(F.col("step") % 3 == 1, F.lit(NO_JSON)).otherwise(F.col("payload")))
        table = str(place.directory / "dead letters")

        for _ in range(2):  # as if a batch were repeated
            place.write(wrong, event="copy", deadLetters=table, queryId="copy", batchId=1)

        assert copied(place) == [0, 2, 3, 5]
        found = spark.read.parquet(table).orderBy("step").collect()
        assert [(row["step"], row["payload"]) for row in found] == [(1, NO_JSON), (4, NO_JSON)]
        assert all("the payload of a row is not JSON" in row["reason"] for row in found)


@pytest.mark.slow
def test_a_batch_of_foreach_batch_is_not_written_to_another_stream_than_those_before(place: Place) -> None:
    def write(number: int) -> None:
        place.write(place.rows(2, first=2 * number), event="copy", queryId="nightly copy", batchId=number)

    write(0)
    write(1)
    place.do("delete_stream", "COPY")

    with pytest.raises(PySparkException, match="stream COPY was deleted; earlier batches of query nightly copy"):
        write(2)
    write(0)
    write(1)
    assert copied(place) == list(range(4)), "from the first batch on, as with a new checkpoint"


@pytest.mark.slow
def test_what_foreach_batch_writes_with_the_ids_of_its_batch_is_stored_once_after_a_crash(place: Place) -> None:
    place.publish_numbered(6)
    crashes = [True]

    def write(batch: DataFrame, number: int) -> None:
        rows = batch.select("identifier", "payload")
        place.write(rows, event="copy", queryId="nightly copy", batchId=number)
        if crashes:
            raise RuntimeError(f"ended behind the write of batch {crashes.pop()}")

    def run() -> None:
        writing = place.read_stream(startingOffsets="earliest").writeStream.foreachBatch(write)
        writing = writing.option("checkpointLocation", str(place.directory / "checkpoint"))
        assert writing.trigger(availableNow=True).start().awaitTermination(int(PATIENCE_SECONDS))

    with pytest.raises(StreamingQueryException, match="ended behind the write"):
        run()
    run()

    assert copied(place) == list(range(6))
