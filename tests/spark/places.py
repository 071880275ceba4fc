"""A server, a configuration with the event types `mars` and `copy`, and what a test of pipelines does with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
from pyspark.sql import DataFrame, SparkSession

from aviso_workers import App, Notification, Notify
from aviso_workers.server import NatsServer

IDENTIFIER = {"class": "od", "date": "20261120", "time": "0600", "step": 0}
RULES = {
    "class": {"type": "StringHandler"},
    "date": {"type": "DateHandler"},
    "time": {"type": "TimeHandler"},
    "step": {"type": "IntHandler", "range": [0, 100_000]},
}
CYCLE = {"event": {"type": "StringHandler"}, "cycle": {"type": "StringHandler"}}


class Place:
    def __init__(self, spark: SparkSession, server: NatsServer, directory: Path) -> None:
        self.directory = directory
        self.spark = spark
        events = {"mars": RULES, "copy": RULES, "newest": RULES, "cycle_complete": CYCLE, "cycle_late": CYCLE}
        document = {
            "notification_backend": {"kind": "jetstream", "jetstream": {"nats_url": server.url}},
            "notification_schema": {
                name: {
                    "topic": {"base": name, "key_order": list(rules)},
                    "identifier": {field: {**rule, "required": True} for field, rule in rules.items()},
                    "storage_policy": {"allow_duplicates": name != "newest"},
                }
                for name, rules in events.items()
            },
        }
        self.config = directory / "aviso.yaml"
        self.config.write_text(json.dumps(document))

    def publish(self, *steps: int, payload: Any = None, event: str = "mars", **identifier: Any) -> None:
        wanted = [Notify(event, {**IDENTIFIER, **identifier, "step": step}, payload) for step in steps]
        self.with_app(lambda app: app.notify_many(wanted))

    def stored(self, event: str = "mars") -> list[Notification[Any]]:
        async def replay(app: App) -> list[Notification[Any]]:
            return [notification async for notification in app.replay(event)]

        return self.with_app(replay)

    def steps(self, event: str = "mars") -> list[int]:
        return [int(notification.identifier["step"]) for notification in self.stored(event)]

    def read(self, event: str = "mars", **options: Any) -> DataFrame:
        return self.spark.read.format("aviso").options(**self._options(event, options)).load()

    def read_stream(self, event: str = "mars", **options: Any) -> DataFrame:
        given = {"startingOffsets": "earliest", **options}
        return self.spark.readStream.format("aviso").options(**self._options(event, given)).load()

    def with_app(self, deed: Callable[[App], Any]) -> Any:
        async def run() -> Any:
            async with App("test", config=self.config) as app:
                return await deed(app)

        return anyio.run(run)

    def _options(self, event: str, options: dict[str, Any]) -> dict[str, str]:
        return {"config": str(self.config), "event": event, **{name: str(value) for name, value in options.items()}}
