"""The app of the worker processes: one agent, one timer and one task, which fail, hang or block when they are told to.

Each situation has an app and an event type of its own, whose name the environment gives. What goes wrong is written in
files beside the ledger, so that the service that a handler depends on can be repaired while the worker runs. What takes
minutes in production takes seconds here: how long a notification may be unfinished, how often workers record that, and
when a failure is over.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import anyio

from _incidents import variables
from aviso_workers import App, Notification, Reject, RetryPolicy, Unavailable
from aviso_workers.engine import failure_recorder, shared_filters
from aviso_workers.state import consumer_records

consumer_records.STUCK_SECONDS = 5.0
shared_filters.CHECK_SECONDS = 10.0
failure_recorder.OVER_SECONDS = 5.0

name = os.environ[variables.NAME]
directory = Path(os.environ[variables.DIRECTORY])
attempts = int(os.environ[variables.ATTEMPTS]) if os.environ[variables.ATTEMPTS] else None
retry = RetryPolicy(first=0.2, factor=1.5, max=1.0, jitter=0.0, attempts=attempts)
ledger = os.open(directory / f"{name}.ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
app = App(name)
archive = app.dependency("archive", patience=float(os.environ[variables.PATIENCE]))


@app.agent(name, concurrency=4, ack_wait=2.0, retry=retry, depends_on=archive)
async def handle(notification: Notification[Any]) -> None:
    match notification.payload:
        case "reject" if _fault("handler"):
            raise Reject("no such field")
        case "exit" if _fault("handler"):
            os._exit(137)
    match _fault("handler"):
        case "fails":
            raise RuntimeError("the archive does not answer")
        case "away":
            raise Unavailable("the archive is maintained")
        case "hangs":
            await anyio.sleep_forever()
        case "blocks":
            while _fault("handler") == "blocks":
                time.sleep(0.05)  # noqa: ASYNC251
        case "slow":
            await anyio.sleep(0.2)
    os.write(ledger, f"{notification.identifier['number']}\n".encode())


@app.every(2, singleton=True)
async def tick() -> None:
    if _fault("timer"):
        raise RuntimeError("the report cannot be written")


@app.task
async def poll() -> None:
    while True:
        if _fault("task"):
            raise RuntimeError("the catalogue does not answer")
        await anyio.sleep(0.1)


def _fault(of: str) -> str:
    """Return what is wrong with it now; empty where nothing is."""
    try:
        return (directory / f"{name}.{of}").read_text()
    except FileNotFoundError:
        return ""
