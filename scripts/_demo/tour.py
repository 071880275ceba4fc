"""A second app, which runs while the demo stays up: something of each kind goes wrong, so that each page of the console
has something to show.

PYTHONPATH=scripts aviso-workers worker _demo.tour:app --config config/dev.yaml
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from aviso_workers import App, Notification, Notify, Reject, RetryPolicy

STREAMS = ("oper", "wave", "enfo", "waef")
OF_TOUR = {"expver": "tour"}
OUTAGE_SECONDS, OUTAGE_EVERY_SECONDS = 60, 180
ONE_IN = 10

app = App("tour")
app.event_type("region", key=["stream", "step", "region"], storage_policy={"allow_duplicates": True})


@app.every("2s", singleton=True)
async def produce() -> None:
    """Publish the next field of each stream."""
    now = datetime.now(UTC)
    step = int(now.timestamp() / 2) % 10_000
    for stream in STREAMS:
        identifier = {
            "class": "rd",
            "domain": "g",
            "date": f"{now:%Y%m%d}",
            "time": "0000",
            "stream": stream,
            "step": step,
            **OF_TOUR,
        }
        await app.notify("mars", identifier, {"location": f"/tour/{stream}/{step}.grib2", "size": 4096})


@app.cron("0 3 * * *", singleton=True)
async def tidy_up() -> None:
    """Nothing: it is here to be paused."""


@app.agent("mars", where=OF_TOUR, concurrency=4)
async def cut_regions(notification: Notification[Any]) -> list[Notify]:
    """Work, and publish what came of it."""
    found = {name: notification.identifier[name] for name in ("stream", "step")}
    return [Notify("region", {**found, "region": region}, {"size": 1024}) for region in ("europe", "tropics")]


@app.agent("mars", where=OF_TOUR)
async def check_field(notification: Notification[Any]) -> None:
    """Refuse some fields, which become dead letters."""
    if int(notification.identifier["step"]) % ONE_IN == 0:
        raise Reject("the field has no values")


@app.agent("mars", where=OF_TOUR, retry=RetryPolicy(first=5, attempts=5))
async def draw_map(notification: Notification[Any]) -> None:
    """Fail twice for some fields, which are tried again."""
    if int(notification.identifier["step"]) % ONE_IN == 1 and notification.num_delivered < 3:
        raise ValueError("the projection does not converge")


@app.agent("mars", where=OF_TOUR, order_by=["stream"], retry=RetryPolicy(first=0.2, attempts=None))
async def copy_to_archive(notification: Notification[Any]) -> None:
    """Fail for one stream, which waits for somebody to decide."""
    if notification.identifier["stream"] == "waef":
        raise PermissionError("the archive takes no wave ensembles from us")


@app.agent("mars", where=OF_TOUR)
async def tell_catalogue(notification: Notification[Any]) -> None:
    """Need a catalogue that is away again and again."""
    if time.time() % OUTAGE_EVERY_SECONDS < OUTAGE_SECONDS:
        raise ConnectionRefusedError("the catalogue does not answer")
