"""The app of the main job: one agent keeps an index of fields, another reports when a Spark application ends.

PYTHONPATH=scripts aviso-workers worker _demo.agents:app --config config/dev.yaml
"""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

import msgspec
import structlog

from _demo.generating import stumbles
from _demo.index import Field, Index, JobEnd
from aviso_workers import App, Notification, RetryPolicy, Router

log = structlog.get_logger("main_job")


class Settings(msgspec.Struct, frozen=True):
    """Settings, under `workers.agents.index`."""

    file: str = ".aviso-workers/index.sqlite"


class Location(msgspec.Struct, frozen=True):
    """The payload of a `mars` notification."""

    location: str
    size: int = 0


class ApplicationEnd(msgspec.Struct, frozen=True):
    """The payload of a `spark_job` notification of kind `application` and event `end`, as far as it is read here."""

    time: int


app = App("main-job")
index = Router("index", settings=Settings)


@cache
def open_index() -> Index:
    return Index(Path(app.settings(index).file))


# An upsert takes well under a millisecond, so whoever takes longer than 5 seconds to acknowledge is dead.
@index.agent(
    "mars",
    concurrency=64,
    ack_wait=5,
    retry=RetryPolicy(first=0.5, factor=2, max=10),
)
async def index_field(notification: Notification[Location]) -> None:
    """Upsert the field; a few notifications fail on purpose the first time."""
    identifier = notification.identifier
    if notification.num_delivered == 1 and stumbles(identifier):
        raise TimeoutError("on purpose: the main job shows that failures are tried again")
    field = Field(
        class_=identifier["class"],
        expver=identifier["expver"],
        domain=identifier["domain"],
        date=identifier["date"],
        time=identifier["time"],
        stream=identifier["stream"],
        step=int(identifier["step"]),
        location=notification.payload.location,
        size=notification.payload.size,
        sequence=notification.sequence,
    )
    open_index().put(field)  # here and not in a thread: handing it over would take longer


@index.agent("spark_job", where={"kind": "application", "event": "end"})
async def report_job_end(notification: Notification[ApplicationEnd]) -> None:
    """Note the end of a Spark application, and when it was heard of."""
    application = notification.identifier["application"]
    heard_ms = time.time_ns() // 1_000_000
    log.info("spark.application_ended", application=application)
    open_index().put_job_end(JobEnd(application=application, ended_ms=notification.payload.time, reported_ms=heard_ms))


app.include(index)
