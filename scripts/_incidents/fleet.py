"""The app of a busy cluster in which nothing is wrong: an agent of each kind, and a timer that one worker leads."""

from __future__ import annotations

import os
from typing import Any

import anyio

from _incidents import variables
from aviso_workers import App, Batch, Batching, Notification, Window, Windowing

name = os.environ.get(variables.NAME, "healthy")
app = App(name)


@app.agent(name, concurrency=8)
async def single(notification: Notification[Any]) -> None:
    await anyio.sleep(0.01)


@app.agent(name, concurrency=8, order_by=["number"])
async def in_order(notification: Notification[Any]) -> None:
    await anyio.sleep(0.01)


@app.agent(name, singleton=True)
async def alone(notification: Notification[Any]) -> None: ...


@app.agent(name, batch=Batching(size=50, within=0.1))
async def in_batches(batch: Batch[Any]) -> None:
    await anyio.sleep(0.01)


@app.agent(name, concurrency=8, window=Windowing(size="5s", fold=lambda total, _: total + 1, initial=0))
async def in_windows(window: Window[int]) -> None: ...


@app.agent(name, concurrency=8)
def in_threads(notification: Notification[Any]) -> None: ...


@app.every(2, singleton=True)
async def report() -> None: ...
