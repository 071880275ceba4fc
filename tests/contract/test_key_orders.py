"""An event type whose `key_order` changes while its stream has notifications: none is read as another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest

from aviso_workers import App, Notification
from aviso_workers.events import AgentDisturbed
from aviso_workers.testing import Harness, harness
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


def version(*key: str) -> tuple[App, list[dict[str, str]]]:
    app, handled = App("ordered"), list[dict[str, str]]()
    app.event_type("job", key=list(key), storage_policy={"allow_duplicates": True})

    @app.agent("job")
    async def handle(notification: Notification[Any]) -> None:
        handled.append(dict(notification.identifier))

    return app, handled


@contextmanager
def refusals(app: App) -> Iterator[list[str]]:
    told: list[str] = []
    with app.events.heard_by(lambda event: told.append(str(event.error)), AgentDisturbed):
        yield told


async def told_by(t: Harness, told: list[str]) -> str:
    with anyio.fail_after(PATIENCE_SECONDS):
        while not told:
            await t.advance(0.1)
    return told[0]


async def test_a_reordered_key_reads_nothing_of_a_stream_that_has_notifications(nats_url: str) -> None:
    old, handled = version("id", "step")
    new, handled_by_new = version("step", "id")
    async with harness(old, server=nats_url or None) as t:
        await t.notify("job", {"id": "b", "step": "0"})
        await t.settle()
        with refusals(new) as told:
            await t.deploy(new)
            refusal = await told_by(t, told)
        assert "event type job has key_order step, id" in refusal
        assert "the 1 notifications of stream JOB were stored with id, step" in refusal
        assert "topic.base" in refusal
        await t.deploy(old)
        await t.notify("job", {"id": "c", "step": "1"})
        await t.settle()
    assert handled == [{"id": "b", "step": "0"}, {"id": "c", "step": "1"}]
    assert handled_by_new == []


async def test_a_stream_without_notifications_is_read_with_the_new_order(nats_url: str) -> None:
    old, _ = version("id", "step")
    new, handled = version("step", "id")
    async with harness(old, server=nats_url or None) as t:
        await t.notify("job", {"id": "b", "step": "0"})
        await t.settle()
        await t.app.session.backend.purge_stream("JOB")
        await t.deploy(new)
        await t.notify("job", {"id": "c", "step": "1"})
        await t.settle()
    assert handled == [{"step": "1", "id": "c"}]
