"""A server, a configuration and the data source, for tests with a real Spark."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery

from aviso_workers import App, Notification, Notify
from aviso_workers.backends import Message
from aviso_workers.server import NatsServer
from tests.waits import PATIENCE_SECONDS

IDENTIFIER = {"class": "od", "date": "20261120", "time": "0600", "step": 0}


class Place:
    """A server, a configuration with the event types `mars`, `copy` and `other`, and what one wants to do with them."""

    def __init__(self, spark: SparkSession, server: NatsServer, directory: Path) -> None:
        self.server = server
        self.directory = directory
        self._spark = spark
        self.config = directory / "aviso.yaml"
        self.with_url(server.url)

    def use(self, spark: SparkSession) -> None:
        """From now on, another application."""
        self._spark = spark

    def with_url(self, url: str, **further: Any) -> None:
        """Write the configuration with this URL of the server, and further settings of the connection."""
        rules: dict[str, dict[str, Any]] = {
            "class": {"type": "StringHandler"},
            "date": {"type": "DateHandler"},
            "time": {"type": "TimeHandler"},
            "step": {"type": "IntHandler", "range": [0, 100_000]},
        }
        identifier = {field: {**rule, "required": True} for field, rule in rules.items()}
        jetstream = {"nats_url": url, "reconnect_delay_ms": 100, **further}
        document = {
            "notification_backend": {"kind": "jetstream", "jetstream": jetstream},
            "notification_schema": {
                name: {
                    "topic": {"base": name, "key_order": list(rules)},
                    "identifier": identifier,
                    "storage_policy": {"allow_duplicates": True},
                }
                for name in ("mars", "copy", "other")
            },
        }
        self.config.write_text(json.dumps(document))  # JSON is YAML

    def restart_server(self) -> None:
        """Kill the server and start it again where it was."""
        self.server.kill()
        again = NatsServer.start(store_dir=self.server.store_dir, port=self.server.port)
        self.server.process, self.server.run_dir = again.process, again.run_dir

    def publish(self, *steps: int, payload: Any = None, event: str = "mars", **identifier: Any) -> None:
        wanted = [Notify(event, {**IDENTIFIER, **identifier, "step": step}, payload) for step in steps]
        self._with_app(lambda app: app.notify_many(wanted))

    def publish_numbered(self, count: int) -> None:
        """Notifications of the steps from 0 on, whose payloads say the number."""
        wanted = [Notify("mars", {**IDENTIFIER, "step": number}, {"number": number}) for number in range(count)]
        self._with_app(lambda app: app.notify_many(wanted))

    def publish_raw(self, subject: str, *, stream: str = "MARS", headers: dict[str, str] | None = None) -> None:
        """A message that no schema has seen."""
        message = Message(subject=subject, data=b"", headers=headers)
        self._with_app(
            lambda app: app.session.backend.publish(
                message, message_id=subject, stream=stream, timeout_seconds=PATIENCE_SECONDS
            )
        )

    def stored(self, event: str = "mars") -> list[Notification[Any]]:
        async def replay(app: App) -> list[Notification[Any]]:
            return [notification async for notification in app.replay(event)]

        found: list[Notification[Any]] = self._with_app(replay)
        return found

    def do(self, deed: str, *arguments: Any) -> Any:
        """A deed of the backend, such as `purge_stream`."""
        return self._with_app(lambda app: getattr(app.session.admin, deed)(*arguments))

    def delete_key(self, bucket: str, key: str) -> None:
        async def delete(app: App) -> None:
            await (await app.session.backend.key_value(bucket)).delete(key)

        self._with_app(delete)

    def read(self, event: str = "mars", **options: Any) -> DataFrame:
        return self._spark.read.format("aviso").options(**self.options(event, **options)).load()

    def read_stream(self, event: str = "mars", **options: Any) -> DataFrame:
        return self._spark.readStream.format("aviso").options(**self.options(event, **options)).load()

    def write(self, frame: DataFrame, event: str = "mars", **options: Any) -> None:
        frame.write.format("aviso").mode("append").options(**self.options(event, **options)).save()

    def rows(self, count: int, *, first: int = 0) -> DataFrame:
        """Rows that are notifications, in two partitions."""
        fixed = [F.lit(IDENTIFIER[field]).alias(field) for field in ("class", "date", "time")]
        payload = F.to_json(F.struct(F.col("id").alias("number"))).alias("payload")
        return self._spark.range(first, first + count, 1, 2).select(*fixed, F.col("id").alias("step"), payload)

    def options(self, event: str = "mars", /, **options: Any) -> dict[str, str]:
        """What a query of this event type is given."""
        source = {} if "stream" in options else {"event": event}
        return {"config": str(self.config), **source, **{name: str(value) for name, value in options.items()}}

    def _with_app(self, deed: Callable[[App], Any]) -> Any:
        async def run() -> Any:
            async with App("test", config=self.config) as app:
                return await deed(app)

        return anyio.run(run)


def run_to_its_end(start: Callable[[], StreamingQuery]) -> StreamingQuery:
    """Start a query that ends by itself, and return it when it has.

    Spark gives a Python worker ten seconds to start. On a machine that is too busy for that the query ends before it
    has begun, or waits for that worker without end, and is started again as an operator would.
    """
    for _ in range(5):
        query = start()
        try:
            if not query.awaitTermination(int(PATIENCE_SECONDS)):
                query.stop()
                assert query.lastProgress is None, "it has begun and does not end"
                continue
        except StreamingQueryException as error:
            if "Python worker failed to connect back" not in str(error):
                raise
        else:
            return query
    raise AssertionError("Spark's Python workers do not start within ten seconds")


def steps(frame: DataFrame) -> list[int]:
    return sorted(row["step"] for row in frame.select("identifier.step").collect())
