"""The agents of `scale`: each is `agents.notifications` with one thing changed."""

from __future__ import annotations

import os
from collections.abc import Callable

from _bench.agents import Field
from _bench.tally import Tally
from aviso_workers import App, Notification, Reject, RetryPolicy, Window, Windowing

__all__ = [
    "among_idle",
    "failing_1",
    "failing_10",
    "failing_50",
    "ordered",
    "ordered_failing",
    "rejecting",
    "windows",
    "windows_unsettled",
]

IDLE = 500
tally = Tally()


def _counting(fails: Callable[[Notification[Field]], bool] = lambda _: False, *, order_by: tuple[str, ...] = ()) -> App:
    """Return an agent that counts what it does not fail."""
    app = App(os.environ["BENCHMARK_NAME"])

    @app.agent("mars", name="count", start="all", concurrency=64, order_by=order_by)
    async def count(notification: Notification[Field]) -> None:
        if fails(notification):
            raise ValueError("not this one")
        tally.add()

    return app


def _with_idle(app: App) -> App:
    """Return the app with agents for which there is nothing to do."""
    for number in range(IDLE):

        @app.agent("mars", name=f"idle-{number}", start="all", where={"class": "rd"}, concurrency=64)
        async def rest(notification: Notification[Field]) -> None: ...

    return app


def _folding(fails: Callable[[Notification[Field]], bool]) -> App:
    """Return an agent with windows; what its fold fails waits for long."""
    app = App(os.environ["BENCHMARK_NAME"])

    def fold(total: int, notification: Notification[Field]) -> int:
        if fails(notification):
            raise ValueError("not this one")
        tally.add()
        return total + 1

    hourly = Windowing(size="1h", fold=fold, initial=0, key=lambda notification: notification.identifier["step"])

    @app.agent("mars", name="count", start="all", window=hourly, concurrency=64, retry=RetryPolicy(first=600.0))
    async def count(window: Window[int]) -> None: ...

    return app


failing_1 = _counting(lambda notification: notification.sequence % 100 < 1)
failing_10 = _counting(lambda notification: notification.sequence % 100 < 10)
failing_50 = _counting(lambda notification: notification.sequence % 100 < 50)
ordered = _counting(order_by=("step",))
ordered_failing = _counting(lambda notification: notification.identifier["step"] == "7", order_by=("step",))
among_idle = _with_idle(_counting())
windows = _folding(lambda _: False)
windows_unsettled = _folding(lambda notification: notification.sequence % 2 == 0)
rejecting = App(os.environ["BENCHMARK_NAME"])


@rejecting.agent("mars", name="count", start="all", concurrency=64)
async def reject(notification: Notification[Field]) -> None:
    tally.add()
    raise Reject("to be handed back")
