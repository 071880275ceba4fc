"""Notifications as data frames and back, with a real Spark and a real server."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from tests.presence import present
from tests.spark.place import Place, steps
from tests.waits import PATIENCE_SECONDS

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


class TestReading:
    @pytest.mark.slow
    def test_a_notification_is_a_row_of_typed_columns(self, place: Place) -> None:
        place.publish(6, payload={"location": "/a"})

        (row,) = place.read().collect()

        assert row.asDict(recursive=True) | {"time": None} == {
            "event_type": "mars",
            "sequence": 1,
            "time": None,
            "topic": "mars.od.20261120.0600.6",
            "identifier": {"class": "od", "date": date(2026, 11, 20), "time": "0600", "step": 6},
            "payload": '{"location":"/a"}',
        }
        (notification,) = place.stored()
        assert row["time"].replace(tzinfo=UTC) == notification.time

    def test_values_are_spelled_as_they_were_before_they_were_escaped(self, place: Place) -> None:
        place.publish(1, **{"class": "a.b*c%"})

        assert present(place.read().first())["identifier"]["class"] == "a.b*c%"

    @pytest.mark.slow
    def test_what_does_not_fit_the_schema_is_null(self, place: Place) -> None:
        place.publish(1)
        for subject in ("mars.od", "mars.od.yesterday.0600.many", "mars.*.20261120.0600.2"):
            place.publish_raw(subject)

        found = [row["identifier"] for row in place.read().orderBy("sequence").collect()]

        assert [(one["class"], one["date"], one["step"]) for one in found] == [
            ("od", date(2026, 11, 20), 1),
            (None, None, None),
            ("od", None, None),
            (None, date(2026, 11, 20), 2),
        ]

    @pytest.mark.slow
    def test_a_stream_is_read_without_an_event_type(self, place: Place) -> None:
        place.publish(1, payload="x")
        place.publish_raw("mars.od")

        first, second = place.read(stream="MARS", includeHeaders=True).orderBy("sequence").collect()

        assert first["identifier"] == {"class": "od", "date": "20261120", "time": "0600", "step": "1"}
        assert first["headers"]["Nats-Expected-Stream"] == "MARS"
        assert (second["event_type"], second["identifier"], second["payload"]) == ("mars", None, None)

    @pytest.mark.slow
    @pytest.mark.parametrize("options", [{}, {"stream": "MARS"}, {"where.step": '{"between": [1, 3]}'}])
    def test_what_the_server_notes_in_place_of_a_notification_is_no_row(
        self, place: Place, options: dict[str, str]
    ) -> None:
        place.publish(1, 2)
        place.publish_raw("mars.od.20261120.0600.1", headers={"Nats-Marker-Reason": "MaxAge"})
        place.publish(3)

        found = place.read(**options).orderBy("sequence").collect()

        assert [row["sequence"] for row in found] == [1, 2, 4]

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({}, [0, 1, 2, 3, 4, 5]),
            ({"startingOffsets": "latest"}, []),
            ({"startingOffsets": 3}, [2, 3, 4, 5]),
            ({"startingOffsets": 2, "endingOffsets": 4}, [1, 2, 3]),
            ({"endingOffsets": 99}, [0, 1, 2, 3, 4, 5]),
            ({"where.step": '{"between": [1, 3]}'}, [1, 2, 3]),
            ({"where.step": "[1, 5]", "where.class": "od"}, [1, 5]),
            ({"where.CLASS": "rd"}, []),
            ({"startingTimestamp": "2020-01-01T00:00:00Z"}, [0, 1, 2, 3, 4, 5]),
            ({"endingTimestamp": "2020-01-01T00:00:00Z"}, []),
            ({"startingTimestamp": "2100-01-01T00:00:00Z"}, []),
        ],
    )
    def test_options_say_what_is_read(self, place: Place, options: dict[str, Any], expected: list[int]) -> None:
        place.publish(*range(6))

        assert steps(place.read(**options)) == expected

    @pytest.mark.slow
    def test_times_are_inclusive(self, place: Place) -> None:
        place.publish(1)
        place.publish(2)
        place.publish(3)
        second = place.stored()[1].time.isoformat()

        assert steps(place.read(startingTimestamp=second)) == [2, 3]
        assert steps(place.read(endingTimestamp=second)) == [1, 2]

    @pytest.mark.slow
    def test_many_partitions_read_everything_once(self, place: Place) -> None:
        place.publish(*range(5000))
        gone = (1200, 1250, 2500, 2501, 4999)
        for sequence in gone:
            place.do("delete_message", "MARS", sequence)

        frame = place.read(numPartitions=3)

        assert frame.rdd.getNumPartitions() == 3
        found = sorted(row["sequence"] for row in frame.select("sequence").collect())
        assert found == [number for number in range(1, 5001) if number not in gone]

    @pytest.mark.slow
    def test_a_range_that_is_gone_fails_by_name(self, place: Place, caplog: pytest.LogCaptureFixture) -> None:
        place.publish(*range(6))
        for sequence in (1, 2):
            place.do("delete_message", "MARS", sequence)

        with pytest.raises(PySparkException, match="stream MARS: messages 1 to 2 are gone"):
            place.read(startingOffsets=1).collect()
        assert steps(place.read(startingOffsets=1, failOnDataLoss=False)) == [2, 3, 4, 5]
        assert steps(place.read()) == [2, 3, 4, 5]

    def test_a_configuration_that_is_not_there_is_named(self, place: Place) -> None:
        with pytest.raises(PySparkException, match=r"'/nowhere/aviso\.yaml' is not a file"):
            place.read(config="/nowhere/aviso.yaml").collect()

    @pytest.mark.slow
    def test_a_missing_stream_is_named(self, place: Place) -> None:
        with pytest.raises(PySparkException, match="there is no stream MARS"):
            place.read().collect()

    @pytest.mark.slow
    def test_a_beginning_behind_the_end_of_the_stream_is_refused(self, place: Place) -> None:
        place.publish(1, 2)

        assert steps(place.read(startingOffsets=3)) == []
        with pytest.raises(PySparkException, match="startingOffsets is 4, and stream MARS ends at 2: give a sequence"):
            place.read(startingOffsets=4).collect()

    @pytest.mark.slow
    def test_one_frame_can_be_filtered_again_and_again(self, spark: SparkSession, place: Place) -> None:
        """Where Spark hands filters to data sources, it also remembers for a frame what the last one left."""
        place.publish(*range(6))
        spark.conf.set(PUSHDOWN, "true")
        try:
            frame = place.read()
            assert steps(frame.where("sequence > 2 and sequence <= 4")) == [2, 3]
            assert steps(frame.where("identifier.step > 3 or payload is not null")) == [4, 5]
            assert steps(frame) == [0, 1, 2, 3, 4, 5]
        finally:
            spark.conf.unset(PUSHDOWN)


class TestPayloads:
    SCHEMA = "location STRING, size BIGINT, parts ARRAY<STRUCT<n INT>>, made TIMESTAMP"

    @pytest.mark.slow
    def test_a_schema_makes_columns_of_them(self, place: Place) -> None:
        payload = {"location": "/a", "parts": [{"n": 1}], "made": "2026-11-20T06:00:00Z", "other": 1}
        place.publish(1, payload=payload)
        place.publish(2)

        full, empty = place.read(payloadSchema=self.SCHEMA).orderBy("sequence").collect()

        assert full["payload"].asDict(recursive=True) == {
            "location": "/a",
            "size": None,
            "parts": [{"n": 1}],
            "made": datetime(2026, 11, 20, 6),
        }
        assert (full["_corrupt_record"], empty["payload"], empty["_corrupt_record"]) == (None, None, None)

    @pytest.mark.slow
    def test_one_that_does_not_fit_is_kept_as_text(self, place: Place) -> None:
        place.publish(1, payload={"size": "big"})
        place.publish(2, payload={"size": 5})

        bad, good = place.read(payloadSchema="size BIGINT").orderBy("sequence").collect()

        assert (bad["payload"], bad["_corrupt_record"]) == (None, '{"size":"big"}')
        assert (good["payload"]["size"], good["_corrupt_record"]) == (5, None)

    @pytest.mark.slow
    def test_a_number_too_long_for_its_column_does_not_fit_either(self, place: Place) -> None:
        place.publish(1, payload={"size": 1.25})
        place.publish(2, payload={"size": 12345.678})

        good, bad = place.read(payloadSchema="size DECIMAL(4, 2)").orderBy("sequence").collect()

        assert (good["payload"]["size"], good["_corrupt_record"]) == (Decimal("1.25"), None)
        assert (bad["payload"], bad["_corrupt_record"]) == (None, '{"size":12345.678}')

    def test_a_type_that_json_has_not_is_refused_when_the_query_is_planned(self, place: Place) -> None:
        with pytest.raises(PySparkException, match="payloadSchema: binary has no values in JSON"):
            place.read(payloadSchema="size BINARY").collect()

    @pytest.mark.slow
    def test_or_ends_the_query(self, place: Place) -> None:
        place.publish(1, payload={"size": "big"})

        frame = place.read(payloadSchema="size BIGINT", mode="FAILFAST")

        assert "_corrupt_record" not in frame.columns
        with pytest.raises(PySparkException, match=r"payload of message 1 does not fit payloadSchema.*\$\.size"):
            frame.collect()


class TestWriting:
    @pytest.mark.slow
    def test_rows_are_checked_notifications(self, place: Place) -> None:
        place.write(place.rows(40))

        stored = place.stored()
        assert sorted(int(one.identifier["step"]) for one in stored) == list(range(40))
        assert {one.identifier["time"] for one in stored} == {"0600"}
        assert all(one.payload == {"number": int(one.identifier["step"])} for one in stored)

    @pytest.mark.slow
    def test_what_was_read_can_be_written(self, place: Place) -> None:
        place.publish(1, 2, payload=["x"])

        place.write(place.read(), event="copy")
        place.write(place.read().select("topic", "payload"), event="mars")

        assert [(one.topic, one.payload) for one in place.stored("copy")] == [
            ("copy.od.20261120.0600.1", ["x"]),
            ("copy.od.20261120.0600.2", ["x"]),
        ]
        assert len(place.stored()) == 4

    @pytest.mark.slow
    def test_payloads_may_be_structs(self, place: Place) -> None:
        struct = F.struct(F.lit(5).alias("size"), F.array(F.lit("a")).alias("parts"))

        place.write(place.rows(1).withColumn("payload", struct))

        assert place.stored()[0].payload == {"size": 5, "parts": ["a"]}

    @pytest.mark.slow
    def test_a_column_of_ids_stores_nothing_twice(self, place: Place) -> None:
        rows = place.rows(20).withColumn("id", F.concat(F.lit("field/"), F.col("step")))

        place.write(rows, msgIdColumn="id")
        place.write(rows, msgIdColumn="id")

        assert len(place.stored()) == 20

    @pytest.mark.slow
    def test_a_task_that_is_tried_again_stores_nothing_twice(self, place: Place) -> None:
        @F.udf("string", useArrow=False)
        def fail_once(number: int) -> str:
            from pyspark import TaskContext

            context = TaskContext.get()
            if context and context.attemptNumber() == 0 and number % 1000 == 999:
                raise RuntimeError("the first attempt fails near its end")
            return str(number)

        rows = place.rows(2000).withColumn("payload", fail_once(F.col("step")))

        place.write(rows)

        assert sorted(int(one.identifier["step"]) for one in place.stored()) == list(range(2000))

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda rows: rows.drop("time"), "mars: there is no column for the identifier field 'time'"),
            (lambda rows: rows.withColumnRenamed("step", "stepp"), "column 'stepp' is not part of a notification"),
            (lambda rows: rows.withColumn("step", F.lit(-1)), "mars: identifier field 'step' must be within"),
            (lambda rows: rows.withColumn("payload", F.lit("{")), "mars: the payload of a row is not JSON"),
            (lambda rows: rows.select(F.lit("mars.od").alias("topic")), "topic 'mars.od' is not mars.<class>.<date>"),
        ],
    )
    def test_what_is_no_notification_is_refused(
        self, place: Place, change: Callable[..., DataFrame], said: str
    ) -> None:
        with pytest.raises(PySparkException, match=said):
            place.write(change(place.rows(1)))

    @pytest.mark.slow
    def test_rows_go_to_no_other_stream(self, place: Place) -> None:
        """The subject says where a message goes; the stream that is expected, where it must not."""
        place.publish(1)

        assert present(place.read(includeHeaders=True).first())["headers"]["Nats-Expected-Stream"] == "MARS"

    def test_a_stream_is_not_overwritten(self, place: Place) -> None:
        options = {"config": str(place.config), "event": "mars"}

        with pytest.raises(PySparkException, match="a stream cannot be overwritten"):
            place.rows(1).write.format("aviso").mode("overwrite").options(**options).save()

    @pytest.mark.slow
    def test_several_writes_of_one_batch_are_several(self, place: Place) -> None:
        """In `foreachBatch` all of them run under the number of the same batch."""
        place.publish(*range(3))

        def write_twice(batch: DataFrame, number: int) -> None:
            place.write(batch.select("identifier", "payload"), event="copy")
            place.write(batch.select("identifier", "payload"), event="copy")

        writing = place.read_stream(startingOffsets="earliest").writeStream.foreachBatch(write_twice)
        query = writing.option("checkpointLocation", str(place.directory / "checkpoint")).trigger(availableNow=True)
        assert query.start().awaitTermination(int(PATIENCE_SECONDS))

        assert len(place.stored("copy")) == 6
