"""Notifications that wait to be tried again, and those beside them that can be handled."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from aviso_workers import App, Notification, Notify, Retry, RetryPolicy
from aviso_workers.testing import harness
from tests.contract.settings import mars
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

FAILING, GOOD = 10_500, 500


@pytest.mark.slow
async def test_the_good_ones_are_handled_however_many_wait_for_their_retry(app: App, url: str | None) -> None:
    failed = handled = 0

    @app.agent("mars", retry=RetryPolicy(first=3600.0, jitter=0), concurrency=64)
    async def index(notification: Notification[Any]) -> None:
        nonlocal failed, handled
        if notification.identifier["class"] == "rd":
            failed += 1
            raise Retry  # an answer, which says nothing of what the agent depends on
        handled += 1

    async with harness(app, server=url) as t:
        classes = ["rd"] * FAILING + ["od"] * GOOD
        await app.notify_many(
            Notify("mars", mars(step=step, **{"class": name}), {}) for step, name in enumerate(classes)
        )
        with anyio.move_on_after(PATIENCE_SECONDS):
            while handled < GOOD:
                await t.advance(0.1)

    assert (failed, handled) == (FAILING, GOOD)


@pytest.mark.slow
async def test_due_retries_leave_half_of_the_time_to_what_is_new(app: App, url: str | None) -> None:
    """As many fail as succeed, and their retries alone would keep the worker busy for twenty times as long."""
    count, failing_seconds, attempts = 150, 0.01, 21
    handled = failed = 0
    retried_seconds = 0.0

    @app.agent("mars", retry=RetryPolicy(first=0.2, factor=1, attempts=attempts, jitter=0))
    async def index(notification: Notification[Any]) -> None:
        nonlocal failed, handled, retried_seconds
        if notification.identifier["class"] == "rd":
            failed += 1
            clock = app.session.backend.clock
            began = clock.monotonic()
            await clock.sleep(failing_seconds)
            if notification.attempt > 1:
                retried_seconds += clock.monotonic() - began
            raise ValueError("not yet")
        handled += 1

    async with harness(app, server=url) as t:
        clock = app.session.backend.clock
        began = clock.monotonic()
        await app.notify_many(
            Notify("mars", mars(step=step, **{"class": "rd" if step % 2 else "od"}), {}) for step in range(2 * count)
        )
        with anyio.move_on_after(PATIENCE_SECONDS):
            while handled < count:
                await t.advance(0.02)
        assert handled == count
        share = retried_seconds / (clock.monotonic() - began)
        assert url is not None or failed < 4 * count, "each new one that fails is a retry's time, and brings one retry"
        assert share < 2 / 3, "retries take as long as what is new, and not twenty times as long"


async def test_due_retries_that_take_longer_than_before_give_way_to_what_is_new(app: App, url: str | None) -> None:
    """A worker holds what begins in 0.1 s, so at most 20 retries were delivered to it before there was anything new."""
    count, first_seconds, failing_seconds = 100, 0.005, 0.1
    attempts: list[int] = []
    handled = 0
    retried_seconds = 0.0

    @app.agent("mars", retry=RetryPolicy(first=0.7, factor=1, attempts=50, jitter=0))
    async def index(notification: Notification[Any]) -> None:
        nonlocal handled, retried_seconds
        if notification.identifier["class"] == "od":
            handled += 1
            return
        attempts.append(notification.attempt)
        clock = app.session.backend.clock
        if notification.attempt == 1:
            await clock.sleep(first_seconds)
        else:
            began = clock.monotonic()
            await clock.sleep(failing_seconds)
            retried_seconds += clock.monotonic() - began
        raise Retry  # an answer, which says nothing of what the agent depends on

    async with harness(app, server=url) as t:
        with anyio.fail_after(PATIENCE_SECONDS):
            await app.notify_many(Notify("mars", mars(step=step, **{"class": "rd"}), {}) for step in range(count))
            while 2 not in attempts:
                await t.advance(0.01)
            await app.notify_many(Notify("mars", mars(step=step), {}) for step in range(count))
            clock = app.session.backend.clock
            began, retried_seconds, before = clock.monotonic(), 0.0, attempts.count(2)
            while handled < count:
                await t.advance(0.01)
        assert url is not None or attempts.count(2) - before < count / 2, "all were due before anything new"
        others_seconds = clock.monotonic() - began - retried_seconds
        assert retried_seconds < failing_seconds * count / 2 + others_seconds, "all were due before anything new came"
        assert t.outcomes(index).count("acked") == count
