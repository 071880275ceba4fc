"""An event type whose `key_order` changes while its stream has notifications: none is read as another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest

from aviso_workers import App, Notification, Notify, RetryPolicy
from aviso_workers.backends import Admin
from aviso_workers.events import AgentDisturbed
from aviso_workers.jetstream.plans import Plan
from aviso_workers.ops import stream_policy
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


async def test_a_reordered_key_reads_nothing_of_a_stream_that_is_read_with_another_order(nats_url: str) -> None:
    old, handled = version("id", "step")
    new, handled_by_new = version("step", "id")
    async with harness(old, server=nats_url or None) as t:
        await t.notify("job", {"id": "b", "step": "0"})
        await t.settle()
        with refusals(new) as told:
            await t.deploy(new)
            refusal = await told_by(t, told)
        assert "event type job has key_order step, id, and stream JOB is read with id, step" in refusal
        assert "topic.base" in refusal
        await t.deploy(old)
        await t.notify("job", {"id": "c", "step": "1"})
        await t.settle()
    assert handled == [{"id": "b", "step": "0"}, {"id": "c", "step": "1"}]
    assert handled_by_new == []


async def test_an_operator_gives_a_stream_another_order_when_nothing_has_the_former_one(nats_url: str) -> None:
    old, _ = version("id", "step")
    new, handled = version("step", "id")
    async with harness(old, server=nats_url or None) as t:
        admin = t.app.session.admin
        await t.notify("job", {"id": "b", "step": "0"})
        await t.settle()
        assert await applied(admin, new) == "1 notifications were stored with it: purge the stream"
        await admin.purge_stream("JOB")
        assert await applied(admin, new) == "workers of agent handle of app ordered read the stream: stop them"
        waits = await old.notify("job", {"id": "b", "step": "0"}, due=3600)
        assert await applied(admin, new) == "1 delayed notifications wait for the stream: cancel them"
        assert await old.cancel("job", waits.message_id)
        await t.stop()
        assert await applied(admin, new) == ""
        await t.deploy(new)
        await t.notify("job", {"id": "c", "step": "1"})
        await t.settle()
    assert handled == [{"step": "1", "id": "c"}]


async def applied(admin: Admin, app: App) -> str:
    """Apply the configuration of an app to the stream JOB; why its key order stays."""
    plans = await stream_policy.plans(admin, app.config)
    plan = next(plan for plan in plans if isinstance(plan, Plan) and plan.stream == "JOB")
    await stream_policy.carry_out(admin, app.config, plan)
    return next((each.cure for each in plan.fixed if each.field == "key_order"), "")


async def test_an_output_with_another_order_is_refused(nats_url: str) -> None:
    old, handled = version("id", "step")
    new, _ = version("step", "id")
    new.event_type("order", key=["id"])

    @new.agent("order", retry=RetryPolicy(attempts=1))
    def produce(notification: Notification[Any]) -> Notify:
        return Notify("job", {"id": "c", "step": "1"})

    async with harness(old, server=nats_url or None) as t:
        await t.notify("job", {"id": "b", "step": "0"})
        await t.settle()
        await t.deploy(new, beside=True)
        await t.notify("order", {"id": "c"})
        with anyio.fail_after(PATIENCE_SECONDS):
            while not t.dead_letters:
                await t.advance(0.1)
        (dead_letter,) = t.dead_letters
        assert "stream JOB is read with id, step" in dead_letter.error
        await t.deploy(old)
        await t.settle()
    assert handled == [{"id": "b", "step": "0"}]


async def test_dead_letters_keep_the_order_of_their_stream(nats_url: str) -> None:
    old = App("ordered")
    old.event_type("job", key=["id", "step"])

    @old.agent("job", retry=RetryPolicy(attempts=1))
    async def handle(notification: Notification[Any]) -> None:
        raise ValueError("as asked for")

    new, _ = version("step", "id")
    async with harness(old, server=nats_url or None) as t:
        await t.notify("job", {"id": "b", "step": "0"})
        await t.settle()
        await t.app.session.backend.purge_stream("JOB")
        assert await applied(t.app.session.admin, new) == "there are dead letters of the stream: drop them"
