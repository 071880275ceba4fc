"""The trace context that a Spark job was given, in the notifications that it writes. Spark and the server are real."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.spark.place import Place, run_to_its_end
from tests.spark.test_traces import GIVEN, HEADERS, of_trace

OTHER = GIVEN.replace("4bf9", "5bf9")


@pytest.mark.slow
@pytest.mark.parametrize("ids", [{}, {"msgIdColumn": "id"}])
def test_rows_that_a_job_writes_carry_the_context_that_it_was_given(place: Place, ids: Mapping[str, str]) -> None:
    rows = place.rows(20)
    if ids:
        rows = rows.selectExpr("*", "concat('field/', step) AS id")
    place.write(rows, **ids, traceparent=GIVEN, tracestate="a=1")
    stored = place.stored()
    assert len(stored) == 20
    assert {tuple(of_trace(one).items()) for one in stored} == {tuple(HEADERS.items())}
    [read] = place.read(includeHeaders="true").where("identifier.step = 7").collect()
    assert read["headers"]["traceparent"] == GIVEN


@pytest.mark.slow
def test_a_batch_that_is_written_again_in_another_trace_is_stored_once(place: Place) -> None:
    """As by a query that was killed and is started again: ids do not depend on the context."""
    for traceparent in (GIVEN, OTHER):
        place.write(place.rows(20), queryId="copy", batchId="1", traceparent=traceparent)
    assert [of_trace(one) for one in place.stored()] == [{"traceparent": GIVEN}] * 20


@pytest.mark.slow
def test_a_streaming_query_carries_it_too(place: Place) -> None:
    place.publish_numbered(3)
    options = place.options("copy", traceparent=GIVEN, checkpointLocation=str(place.directory / "checkpoint"))
    rows = place.read_stream(startingOffsets="earliest").select("identifier", "payload")
    run_to_its_end(lambda: rows.writeStream.format("aviso").trigger(availableNow=True).options(**options).start())
    assert [of_trace(one) for one in place.stored("copy")] == [{"traceparent": GIVEN}] * 3
