"""An event type whose `key_order` changes while its stream has notifications: none is read as another one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import anyio
import pytest

from aviso_workers import App, Batch, Notification, Notify, RetryPolicy, Stream, Window, Windowing
from aviso_workers.backends import Admin
from aviso_workers.errors import RefusedError
from aviso_workers.events import AgentDisturbed
from aviso_workers.jetstream import specs
from aviso_workers.jetstream.plans import Plan
from aviso_workers.jetstream.specs import KEY_ORDER, KEY_RULES, StreamSpec
from aviso_workers.ops import stream_policy
from aviso_workers.testing import Harness, harness
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


ONCE = RetryPolicy(attempts=1)


def happened(notification: Notification[Any]) -> datetime:
    return datetime(2026, 11, 20, notification.payload, tzinfo=UTC)


def version(*key: str) -> tuple[App, list[dict[str, str]]]:
    app, handled = App("ordered"), list[dict[str, str]]()
    app.event_type("job", key=list(key), storage_policy={"allow_duplicates": True})

    @app.agent("job")
    async def handle(notification: Notification[Any]) -> None:
        handled.append(dict(notification.identifier))

    return app, handled


@contextmanager
def refusals(app: App, agent: str = "handle") -> Iterator[list[str]]:
    """What agents tell of why they cannot read."""
    told: list[str] = []

    def hear(event: AgentDisturbed) -> None:
        if event.agent == agent:
            told.append(str(event.error))

    with app.events.heard_by(hear, AgentDisturbed):
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


async def applied(admin: Admin, app: App, field: str = "key_order") -> str:
    """Apply the configuration of an app to the stream JOB; why its key order, or its rules, stay."""
    plans = await stream_policy.plans(admin, app.config)
    plan = next(plan for plan in plans if isinstance(plan, Plan) and plan.stream == "JOB")
    await stream_policy.carry_out(admin, app.config, plan)
    return next((each.cure for each in plan.fixed if each.field == field), "")


class TestAnOutputWithAnotherOrder:
    """It is no failure of what is handled: the agent stands, and a worker of the former version handles it."""

    def returned(self, app: App) -> None:
        @app.agent("order", retry=ONCE)
        def produce(notification: Notification[Any]) -> Notify:
            return self.output

    def published(self, app: App) -> None:
        @app.agent("order", retry=ONCE)
        async def produce(notification: Notification[Any]) -> None:
            await app.notify("job", self.output.identifier)

    def published_in_a_group(self, app: App) -> None:
        @app.agent("order", retry=ONCE)
        async def produce(notification: Notification[Any]) -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(app.notify("job", self.output.identifier))

    def in_order(self, app: App) -> None:
        @app.agent("order", retry=ONCE, order_by=["id"])
        async def produce(notification: Notification[Any]) -> Notify:
            return self.output

    def batch(self, app: App) -> None:
        @app.agent("order", retry=ONCE)
        async def produce(batch: Batch[Any]) -> Notify:
            return self.output

    def stream(self, app: App) -> None:
        @app.agent("order", retry=ONCE)
        async def produce(stream: Stream[Any]) -> AsyncIterator[Notify]:
            async for _ in stream:
                yield self.output

    def singleton(self, app: App) -> None:
        @app.agent("order", retry=ONCE, singleton=True)
        async def produce(notification: Notification[Any]) -> Notify:
            return self.output

    output = Notify("job", {"id": "c", "step": "1"})

    @pytest.mark.parametrize("form", [returned, published, published_in_a_group, in_order, batch, stream, singleton])
    async def test_is_refused_and_the_agent_stands(self, nats_url: str, form: Callable[..., None]) -> None:
        old, handled = version("id", "step")
        new, _ = version("step", "id")
        for app in old, new:
            app.event_type("order", key=["id"], storage_policy={"allow_duplicates": True})
            form(self, app)

        async with harness(old, server=nats_url or None) as t:
            await t.notify("job", {"id": "b", "step": "0"})
            await t.settle()
            with refusals(new, "produce") as told:
                await t.deploy(new)
                for _ in range(3):
                    await t.notify("order", {"id": "c"})
                assert "stream JOB is read with id, step" in await told_by(t, told)
            await t.advance(0.5)
            assert t.dead_letters == []
            await t.deploy(old)
            await t.settle()
            assert (t.dead_letters, t.outcomes("produce")[-1]) == ([], "acked")
        assert handled[0] == {"id": "b", "step": "0"}
        assert handled[1:] == [{"id": "c", "step": "1"}] * (len(handled) - 1)


async def test_a_window_whose_output_has_another_order_is_closed_by_the_former_version(nats_url: str) -> None:
    old, handled = version("id", "step")
    new, _ = version("step", "id")
    for app in old, new:
        app.event_type("order", key=["id"], storage_policy={"allow_duplicates": True})

        @app.agent(
            "order", window=Windowing(size="1h", initial=0, fold=lambda total, _: total + 1, time=happened), retry=ONCE
        )
        async def hourly(window: Window[int]) -> Notify:
            return Notify("job", {"id": "c", "step": str(window.value)})

    async with harness(old, server=nats_url or None) as t:
        await t.notify("job", {"id": "b", "step": "0"})
        await t.settle()
        with refusals(new, "hourly") as told:
            await t.deploy(new)
            await t.notify("order", {"id": "c"}, 6)
            await t.notify("order", {"id": "c"}, 9)
            assert "stream JOB is read with id, step" in await told_by(t, told)
        await t.deploy(old)
        await t.settle()
        assert t.dead_letters == []
    assert handled == [{"id": "b", "step": "0"}, {"id": "c", "step": "1"}]


async def test_an_agent_that_stands_goes_on_when_its_output_is_not_refused_any_more(nats_url: str) -> None:
    old, _ = version("id", "step")
    new = App("ordered")
    new.event_type("job", key=["step", "id"])
    new.event_type("order", key=["id"])

    @new.agent("order", retry=ONCE)
    async def produce(notification: Notification[Any]) -> Notify:
        return Notify("job", {"id": "c", "step": "1"})

    async with harness(old, server=nats_url or None) as t:
        await t.notify("job", {"id": "b", "step": "0"})
        await t.settle()
        with refusals(new, "produce") as told:
            await t.deploy(new)
            await t.notify("order", {"id": "c"})
            await told_by(t, told)
        await t.app.session.admin.delete_stream("JOB")
        await t.settle()
        assert (t.dead_letters, t.outcomes("produce")[-1]) == ([], "acked")
        assert t.published[-1].identifier == {"id": "c", "step": "1"}


def dated(rule: dict[str, Any] | None, value: str) -> tuple[App, list[dict[str, str]]]:
    app, handled = App("dated"), list[dict[str, str]]()
    app.event_type("job", key=["id"], identifier={"id": {"required": True, **rule}} if rule else None)

    @app.agent("job", where={"id": value})
    async def handle(notification: Notification[Any]) -> None:
        handled.append(dict(notification.identifier))

    return app, handled


@pytest.mark.parametrize(
    ("before", "value", "after", "spelled"),
    [
        (None, "2026-01-01", {"type": "DateHandler"}, "DateHandler %Y%m%d"),
        ({"type": "DateHandler", "canonical_format": "%Y-%m-%d"}, "2026-01-01", {"type": "DateHandler"}, "DateHandler"),
        (None, "007", {"type": "IntHandler"}, "IntHandler"),
        (None, "OD", {"type": "EnumHandler", "values": ["OD", "RD"]}, "EnumHandler"),
    ],
)
async def test_a_rule_with_another_spelling_passes_over_nothing(
    nats_url: str, before: dict[str, Any] | None, value: str, after: dict[str, Any], spelled: str
) -> None:
    old, handled = dated(before, value)
    new, handled_by_new = dated(after, value)
    async with harness(old, server=nats_url or None) as t:
        await t.stop()
        await t.notify("job", {"id": value})
        with refusals(new) as told:
            await t.deploy(new)
            refusal = await told_by(t, told)
        assert f"event type job has rules id={spelled}" in refusal
        assert "Take the former rules back" in refusal
        with pytest.raises(RefusedError, match="event type job has rules"):
            await t.notify("job", {"id": value})
        await t.deploy(old)
        await t.settle()
    assert (handled, handled_by_new) == ([{"id": value}], [])


async def test_a_test_in_memory_is_told_of_a_rule_with_another_spelling() -> None:
    old, _ = dated(None, "2026-01-01")
    new, _ = dated({"type": "DateHandler"}, "2026-01-01")
    async with harness(old) as t:
        await t.stop()
        await t.notify("job", {"id": "2026-01-01"})
        await t.deploy(new)
        with pytest.raises(AssertionError, match="event type job has rules id=DateHandler"):
            await t.settle(within_seconds=5)


def test_the_rules_of_another_order_are_not_noted() -> None:
    """They would be those by which a worker that is refused reads the stream."""
    wanted = StreamSpec(name="JOB", subjects=("job.>",), read_as={KEY_ORDER: "step,id", KEY_RULES: "step=A,id=B"})
    noted = {"metadata": {KEY_ORDER: "id,step"}}
    assert specs.with_notes(noted, wanted, stated={}) == noted
    same = {"metadata": {KEY_ORDER: "step,id"}}
    assert specs.with_notes(same, wanted, stated={})["metadata"] == wanted.read_as


async def test_a_rule_with_the_same_spelling_goes_on(nats_url: str) -> None:
    old, _ = dated({"type": "EnumHandler", "values": ["od"]}, "od")
    new, handled = dated({"type": "EnumHandler", "values": ["od", "rd"], "description": "of MARS"}, "od")
    async with harness(old, server=nats_url or None) as t:
        await t.stop()
        await t.notify("job", {"id": "od"})
        await t.deploy(new)
        await t.notify("job", {"id": "od"})
        await t.settle()
    assert handled[-1] == {"id": "od"}


async def test_an_operator_gives_a_stream_another_rule_when_nothing_has_the_former_spelling(nats_url: str) -> None:
    old, _ = dated(None, "2026-01-01")
    new, handled = dated({"type": "DateHandler"}, "2026-01-01")
    async with harness(old, server=nats_url or None) as t:
        admin = t.app.session.admin
        await t.notify("job", {"id": "2026-01-01"})
        await t.settle()
        await t.stop()
        assert await applied(admin, new, "identifier") == "1 notifications were stored with it: purge the stream"
        await admin.purge_stream("JOB")
        assert await applied(admin, new, "identifier") == ""
        await t.deploy(new)
        await t.notify("job", {"id": "2026-01-01"})
        await t.settle()
    assert handled == [{"id": "20260101"}]


async def test_dead_letters_keep_the_order_of_their_stream(nats_url: str) -> None:
    old = App("ordered")
    old.event_type("job", key=["id", "step"])

    @old.agent("job", retry=ONCE)
    async def handle(notification: Notification[Any]) -> None:
        raise ValueError("as asked for")

    new, _ = version("step", "id")
    async with harness(old, server=nats_url or None) as t:
        await t.notify("job", {"id": "b", "step": "0"})
        await t.settle()
        await t.app.session.backend.purge_stream("JOB")
        assert await applied(t.app.session.admin, new) == "there are dead letters of the stream: drop them"
