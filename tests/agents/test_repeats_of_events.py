"""What the agent and a driver's listener try again is stored once where the duplicate window is over meanwhile."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import yaml

from aviso_workers import App
from aviso_workers.config import load
from aviso_workers.spark import job_events
from aviso_workers.spark.job_events import EVENT_TYPE, JobEvent, SparkApplication
from aviso_workers.spark.listeners import Listener
from tests.agents.test_spark_events import app_of, config_file, job_start
from tests.stories.processes import Server
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

APPLICATION = SparkApplication(id="local-1")


async def test_a_listener_ends_an_attempt_that_outlasts_the_duplicate_window(tmp_path: Path) -> None:
    hear: list[Callable[[str], None]] = []

    def add(_: Any, heard: Callable[[str], None]) -> Callable[[], None]:
        hear.append(heard)
        return lambda: None

    with Server(tmp_path / "jetstream") as server:
        file = with_a_window_of_a_second(config_file(tmp_path, tmp_path / "logs", server.url))
        listening = Listener(load(file), APPLICATION)
        listening.start(add, None)
        hear[0](started_now(1))
        async with app_of(file) as app:
            with anyio.fail_after(PATIENCE_SECONDS):
                while not listening.stored:  # noqa: ASYNC110, a thread's
                    await anyio.sleep(0.02)
            await publish(app, event(2))
        server.kill()
        hear[0](started_now(2))
        await anyio.sleep(1.2)  # until the stream has forgotten its id
        server.start()
        await anyio.to_thread.run_sync(listening.close)
        async with app_of(file) as app:
            stored = Counter([each.headers["Nats-Msg-Id"] async for each in app.replay(EVENT_TYPE, from_id=1)])
    assert stored == {event(1).message_id("local"): 1, event(2).message_id("local"): 1}
    assert (listening.stored, listening.dropped) == (1, 1)


def started_now(job: int) -> str:
    """The event as Spark tells it without delay; the listener leaves an old one to the agent."""
    return job_start(job).replace('"Submission Time":1,', f'"Submission Time":{int(time.time() * 1000)},')


def with_a_window_of_a_second(file: Path) -> Path:
    document = yaml.safe_load(file.read_text())
    document["streams"] = {"SPARK": {"duplicate_window": "1s"}}
    document["notification_backend"]["jetstream"]["publish_deadline_seconds"] = 30
    file.write_text(yaml.safe_dump(document))
    return file


def event(job: int) -> JobEvent:
    decoded = job_events.decode(job_start(job), APPLICATION)
    assert decoded is not None
    return decoded


async def publish(app: App, event: JobEvent) -> None:
    """What the agent does with an event."""
    await app.notify(EVENT_TYPE, event.identifier("local"), event.payload, message_id=event.message_id("local"))
