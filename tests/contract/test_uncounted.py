"""`Retry(after=..., counts=False)`: tried again, and no failed attempt, on every backend."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import anyio
import pytest

from aviso_workers import App, Batch, Notification, Notify, Retry, RetryPolicy
from aviso_workers.testing import Harness, harness
from tests.contract.settings import mars
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

TIMES = 4


class ThrottledError(Exception):
    """The other side asks to be called less often."""


async def until(t: Harness, condition: Any) -> None:
    with anyio.fail_after(PATIENCE_SECONDS):
        while not condition():
            await t.advance(0.1)


@pytest.mark.parametrize("patience", [0, "1d"], ids=["no patience", "a day"])
@pytest.mark.parametrize("order_by", [(), ("step",)], ids=["no order", "order_by"])
async def test_it_is_no_failed_attempt(
    app: App, url: str | None, patience: str | int, order_by: tuple[str, ...]
) -> None:
    attempts: list[int] = []
    times: list[float] = []

    needed = app.dependency("catalogue", patience=patience)

    @app.agent("mars", retry=RetryPolicy(first=0.05, attempts=2, jitter=0), depends_on=needed, order_by=order_by)
    async def index(notification: Notification[Any]) -> None:
        attempts.append(notification.attempt)
        times.append(app.session.backend.clock.monotonic())
        if len(attempts) <= TIMES:
            raise Retry(after=0, counts=False)
        if len(attempts) == TIMES + 1:
            raise ValueError("a failure that counts")

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await until(t, lambda: t.outcomes(index)[-1:] == ["acked"])
        reasons = [settled.reason for settled in t.settled(index)]
        assert t.dead_letters == []

    assert attempts == [1] * (TIMES + 1) + [2]
    assert reasons[:TIMES] == ["uncounted"] * TIMES
    assert all(later - earlier >= 0.95 for earlier, later in pairwise(times[: TIMES + 1])), times


async def test_what_on_error_answers_is_no_failed_attempt(app: App, url: str | None) -> None:
    attempts: list[int] = []

    @app.agent("mars", retry=RetryPolicy(first=0.05, attempts=1))
    async def index(notification: Notification[Any]) -> Retry | None:
        attempts.append(notification.attempt)
        if len(attempts) < 3:
            raise ThrottledError
        return None

    @index.on_error(ThrottledError)
    def wait(error: ThrottledError) -> Retry:
        return Retry(after="1s", counts=False)

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await until(t, lambda: t.outcomes(index)[-1:] == ["acked"])
        assert t.dead_letters == []
    assert attempts == [1, 1, 1]


async def test_one_of_a_batch_is_no_failed_attempt(app: App, url: str | None) -> None:
    attempts: dict[str, list[int]] = {}

    @app.agent("mars", retry=RetryPolicy(first=0.05, attempts=1))
    async def index(batch: Batch[Any]) -> None:
        for notification in batch:
            seen = attempts.setdefault(notification.identifier["step"], [])
            seen.append(notification.attempt)
            if notification.identifier["step"] == "1" and len(seen) < 3:
                batch.retry(notification, after=1, counts=False)

    async with harness(app, server=url) as t:
        await app.notify_many(Notify("mars", mars(step=step), {}) for step in range(3))
        await until(t, lambda: t.outcomes(index).count("acked") == 3)
        assert t.dead_letters == []
    assert attempts == {"0": [1], "1": [1, 1, 1], "2": [1]}
