"""What a backend tells of consumers and subjects to somebody who watches, and what is known of agents from it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest

from aviso_workers import App, Notification, RetryPolicy
from aviso_workers.aviso.literals import SECOND
from aviso_workers.backends import Admin
from aviso_workers.errors import NotFoundError
from aviso_workers.events import Settled
from aviso_workers.jetstream.specs import ConsumerSpec
from aviso_workers.ops import agent_inventory
from tests.contract.conftest import Create, Ensure, Eventually, Inbox, Publish
from tests.contract.settings import app_config, mars
from tests.presence import present
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


async def test_the_consumers_of_a_stream_are_listed_and_no_others(
    create: Create, ensure: Ensure, publish: Publish, backend: Admin
) -> None:
    await create()
    await create("DISS", ("diss.>",))
    await ensure("one")
    await ensure("two", filter_subjects=("mars.od.>",))
    await ensure("three", stream="DISS", filter_subjects=("diss.>",))
    await publish("mars.od.1")
    await publish("mars.rd.1")

    found = {consumer.name: consumer.num_pending for consumer in await backend.consumers("MARS")}

    assert found == {"one": 2, "two": 1}


@pytest.mark.covers("001-40")
async def test_more_consumers_than_fit_on_a_page_are_listed(create: Create, ensure: Ensure, backend: Admin) -> None:
    await create()
    names = {f"app__agent-{number}" for number in range(300)}
    for name in names:
        await ensure(name)

    found = await backend.consumers("MARS")

    assert len(found) == 300
    assert {consumer.name for consumer in found} == names


async def test_a_stream_without_consumers_lists_none_and_no_stream_is_an_error(create: Create, backend: Admin) -> None:
    await create()

    assert await backend.consumers("MARS") == []
    with pytest.raises(NotFoundError):
        await backend.consumers("OTHER")


async def test_a_consumer_tells_how_often_it_has_delivered_and_how_far_it_has_come(
    create: Create, ensure: Ensure, publish: Publish, backend: Admin, inbox: Inbox, eventually: Eventually
) -> None:
    await create(max_msgs_per_subject=1)
    await publish("mars.before")
    created = await ensure()
    for subject in ("mars.a", "mars.a", "mars.a", "mars.b"):
        await publish(subject)

    async with backend.consume("MARS", "agent", deliver=inbox.deliver, capacity=inbox.capacity) as consumer:
        before, replaced_twice, repeated = await inbox.take(3)
        before.ack()
        replaced_twice.ack()
        repeated.nak()
        (again,) = await inbox.take(1)
        again.ack()
        await consumer.settled()
        await eventually(num_ack_pending=0)
        read = await backend.consumer_info("MARS", "agent")

    assert (created.deliveries, created.position) == (0, 0)
    assert (read.deliveries, read.position) == (4, 5), "of five sequences three were delivered, one of them twice"
    reset = await backend.reset_consumer("MARS", "agent", sequence=5)
    assert (reset.deliveries, reset.position) == (0, 4)


async def test_a_consumer_knows_when_it_last_delivered_and_when_something_was_last_settled(
    create: Create, ensure: Ensure, publish: Publish, backend: Admin, inbox: Inbox, eventually: Eventually
) -> None:
    await create()
    created = await ensure()
    assert (created.last_delivered, created.last_settled) == (None, None)
    for number in range(3):
        await publish(f"mars.{number}")

    async with backend.consume("MARS", "agent", deliver=inbox.deliver, capacity=inbox.capacity) as consumer:
        first, second, third = await inbox.take(3)
        second.ack()
        await consumer.settled()
        await eventually(num_ack_pending=2)
        above = await backend.consumer_info("MARS", "agent")
        first.nak(delay_seconds=60)
        await consumer.settled()
        given_back = await backend.consumer_info("MARS", "agent")
        third.term("no good")
        await consumer.settled()
        await eventually(num_ack_pending=1)
        terminated = await backend.consumer_info("MARS", "agent")

    assert above.ack_floor == 0
    now = datetime.fromtimestamp(backend.clock.time_ns() / 1e9, UTC)
    for moment in (above.last_delivered, above.last_settled):
        assert moment is not None
        assert timedelta(0) <= now - moment < timedelta(minutes=1)
    assert present(above.last_delivered) <= present(above.last_settled)
    assert given_back.last_settled == above.last_settled
    assert present(terminated.last_settled) >= present(above.last_settled)


async def test_messages_are_counted_by_subject(create: Create, publish: Publish, backend: Admin) -> None:
    await create()
    assert await backend.subject_counts("MARS") == {}
    for subject in ("mars.od", "mars.rd", "mars.od"):
        await publish(subject)

    assert await backend.subject_counts("MARS") == {"mars.od": 2, "mars.rd": 1}
    assert await backend.subject_counts("MARS", subject="mars.*") == {"mars.od": 2, "mars.rd": 1}
    assert await backend.subject_counts("MARS", subject="mars.rd") == {"mars.rd": 1}
    assert await backend.subject_counts("MARS", subject="mars.ai") == {}
    with pytest.raises(NotFoundError):
        await backend.subject_counts("OTHER")


@pytest.fixture
async def app(kind: str, nats_url: str) -> AsyncGenerator[App, None]:
    async with App("contract", config=app_config(kind, nats_url)) as app:
        yield app


async def work_off(app: App, count: int) -> None:
    """Publish so many, and run the app's agents until they are settled."""
    stop, settled = anyio.Event(), 0

    def count_down(event: Any) -> None:
        nonlocal settled
        settled += isinstance(event, Settled)
        if settled == count:
            stop.set()

    app.events.listen(count_down)
    for step in range(count):
        await app.notify("mars", mars(step=step), {})
    with anyio.fail_after(PATIENCE_SECONDS):
        await app._work(stop)


async def test_agents_are_known_by_their_consumers_also_when_nobody_runs_them(app: App) -> None:
    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None: ...

    await work_off(app, 2)
    await app.notify("mars", mars(step=9), {})
    await app.session.backend.ensure_consumer("MARS", durable("somebody-else"))

    found = await agent_inventory.agents(app.session.admin, "MARS")

    assert {agent: (info.num_pending, info.num_ack_pending) for agent, info in found.items()} == {
        ("contract", "index"): (1, 0)
    }


async def test_dead_letters_are_counted_by_agent(app: App) -> None:
    @app.agent("mars", retry=RetryPolicy(attempts=1))
    async def broken(notification: Notification[Any]) -> None:
        raise ValueError("no")

    await work_off(app, 2)

    assert await agent_inventory.dead_letters(app.session.admin) == {("contract", "broken"): 2}


def durable(name: str, *, ack_wait_seconds: float = 20.0, max_deliver: int = -1) -> ConsumerSpec:
    return ConsumerSpec(
        durable_name=name,
        filter_subjects=("mars.>",),
        ack_wait=int(ack_wait_seconds * SECOND),
        max_ack_pending=10,
        max_deliver=max_deliver,
    )
