"""The whole way, everything real: Spark runs, its event log is followed, a stream holds what happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from pyspark.sql import SparkSession

from aviso_agents import spark_events
from aviso_workers import App, Notification
from tests.waits import PATIENCE_SECONDS


@pytest.mark.anyio
async def test_a_job_is_a_notification_while_its_application_still_runs(
    start_spark: Callable[..., SparkSession], app: App, tmp_path: Path
) -> None:
    async with app, anyio.create_task_group() as tasks:
        tasks.start_soon(spark_events.follow_event_logs, app)
        spark = await anyio.to_thread.run_sync(start_spark, tmp_path / "logs", {})
        try:
            application = spark.sparkContext.applicationId
            await anyio.to_thread.run_sync(count_in_a_group, spark)
            ended = await first(app, {"kind": "sql", "event": "end"})
        finally:
            await anyio.to_thread.run_sync(spark.stop)
        await first(app, {"kind": "application", "event": "end"})
        jobs = [job async for job in app.replay("spark_job", {"kind": "job", "id": "0"}, from_id=1)]
        tasks.cancel_scope.cancel()
    assert (ended.identifier["application"], ended.payload["status"]) == (application, "succeeded")
    assert [(job.identifier["event"], job.payload.get("group")) for job in jobs] == [
        ("start", "nightly"),
        ("end", None),
    ]


def count_in_a_group(spark: SparkSession) -> None:
    spark.sparkContext.setJobGroup("nightly", "count to a thousand")
    assert spark.range(1000).count() == 1000


async def first(app: App, where: dict[str, str]) -> Notification[Any]:
    with anyio.fail_after(PATIENCE_SECONDS):
        async for notification in app.watch("spark_job", where, from_id=1):
            return notification
    raise AssertionError("a watch ended")
