"""Notifications that wait to be tried again, and those beside them that can be handled."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from aviso_workers import App, Backoff, Notification, Notify
from aviso_workers.testing import harness
from tests.contract.settings import mars
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

FAILING, GOOD = 10_500, 500


async def test_the_good_ones_are_handled_however_many_wait_for_their_retry(app: App, url: str | None) -> None:
    failed = handled = 0

    @app.agent("mars", retry=Backoff(first=3600.0, jitter=0), concurrency=64)
    async def index(notification: Notification[Any]) -> None:
        nonlocal failed, handled
        if notification.identifier["class"] == "rd":
            failed += 1
            raise ValueError("not yet")
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
