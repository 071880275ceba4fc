"""Consumers that serve some of their readers before others: a pinned one alone, or the nearest that ask."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import anyio
import pytest
from msgspec import structs
from nats.aio.client import Client, ServerVersion

from aviso_workers import App, Notification
from aviso_workers.backends import Admin, Consumer, ConsumerInfo
from aviso_workers.errors import RefusedError
from aviso_workers.jetstream.specs import GROUP, PINNED, PRIORITIZED, ConsumerSpec
from aviso_workers.testing import harness
from tests.contract.conftest import SECOND, Create, Elapse, Ensure, Eventually, Inbox, Publish
from tests.contract.settings import app_config, mars
from tests.waits import LONG_SECONDS, PATIENCE_SECONDS, PROMPT_SECONDS

pytestmark = pytest.mark.anyio

ACK_WAIT_SECONDS = 1.0
PRIORITY = {"priority_groups": (GROUP,)}
PINS = {
    **PRIORITY,
    "priority_policy": PINNED,
    "priority_timeout": int(ACK_WAIT_SECONDS * SECOND),
    "ack_wait_seconds": ACK_WAIT_SECONDS,
    "max_ack_pending": 1,
}


def patient(seconds: float) -> dict[str, Any]:
    """Such a consumer that waits for so long for a reader that it does not hear."""
    return {**PINS, "priority_timeout": int(seconds * SECOND), "ack_wait_seconds": seconds}


@pytest.fixture
def reading(backend: Admin) -> Callable[..., Any]:
    """`async with reading(inbox) as reader`: of the consumer `agent`."""

    def reading(inbox: Inbox, **stated: Any) -> Any:
        return backend.consume("MARS", "agent", deliver=inbox.deliver, capacity=inbox.capacity, **stated)

    return reading


def spec_of(found: ConsumerInfo, **over: Any) -> ConsumerSpec:
    """The consumer as it is, but for this."""
    stated = ("ack_wait", "max_ack_pending", "max_deliver", "metadata")
    return ConsumerSpec(
        durable_name=found.name,
        filter_subjects=tuple(found.config.filters),
        **{field: found.config[field] for field in stated},
        **over,
    )


async def chosen(*readers: tuple[Consumer, Inbox]) -> list[tuple[Consumer, Inbox]]:
    """The readers and their inboxes, first the one that was given something."""
    for _ in range(int(PATIENCE_SECONDS * 100)):
        if any(inbox.waiting for _, inbox in readers):
            break
        await anyio.sleep(0.01)
    return sorted(readers, key=lambda reader: not reader[1].waiting)


class TestAPinnedReader:
    async def test_is_given_everything_one_after_another(
        self,
        reading: Callable[..., Any],
        create: Create,
        ensure: Ensure,
        publish: Publish,
        inbox_of: Callable[[int], Inbox],
    ) -> None:
        await create()
        await ensure(**PINS)
        async with reading(one := inbox_of(5)) as reader, reading(other := inbox_of(5)) as other_reader:
            for step in range(6):
                await publish(f"mars.{step}")
            (pinned, inbox), (stands_by, left_out) = await chosen((reader, one), (other_reader, other))
            for step in range(6):
                delivery = await inbox.next()
                assert (delivery.message.subject, delivery.held) == (f"mars.{step}", True)
                assert inbox.subjects == [], "the next one comes when this one is settled"
                delivery.ack()
                pinned.refill()
            assert (pinned.pinned, stands_by.pinned, left_out.subjects) == (True, False, [])

    async def test_stays_pinned_while_it_is_busy(
        self,
        reading: Callable[..., Any],
        create: Create,
        ensure: Ensure,
        publish: Publish,
        inbox_of: Callable[[int], Inbox],
        elapse: Callable[[float], Awaitable[None]],
    ) -> None:
        await create()
        await ensure(**patient(3.0))  # longer than a busy machine needs until it says so
        async with reading(one := inbox_of(1)) as reader, reading(other := inbox_of(1)) as other_reader:
            await publish("mars.1")
            (pinned, inbox), (_, left_out) = await chosen((reader, one), (other_reader, other))
            busy = await inbox.next()
            pinned.refill()
            await publish("mars.2")
            for _ in range(8):
                await elapse(0.5)
                busy.in_progress()
            assert busy.held
            busy.ack()
            assert (await inbox.next()).message.subject == "mars.2"
        assert left_out.subjects == []

    async def test_hands_over_at_once_when_it_leaves(
        self,
        backend: Admin,
        reading: Callable[..., Any],
        create: Create,
        ensure: Ensure,
        publish: Publish,
        inbox_of: Callable[[int], Inbox],
    ) -> None:
        await create()
        await ensure(**patient(LONG_SECONDS))
        async with reading(one := inbox_of(1)) as reader, reading(other := inbox_of(1)) as other_reader:
            await publish("mars.1")
            (leaving, inbox), (_, next_inbox) = await chosen((reader, one), (other_reader, other))
            (await inbox.next()).ack()
            assert (await backend.consumer_info("MARS", "agent")).pinned_since is not None
            await leaving.stop()
            assert (await backend.consumer_info("MARS", "agent")).pinned_since is None
            await publish("mars.2")
            assert (await next_inbox.next(PROMPT_SECONDS)).message.subject == "mars.2"

    async def test_waits_with_what_follows_while_one_waits_to_be_tried_again(
        self,
        backend: Admin,
        reading: Callable[..., Any],
        create: Create,
        ensure: Ensure,
        publish: Publish,
        inbox: Inbox,
        elapse: Callable[[float], Awaitable[None]],
    ) -> None:
        await create()
        await ensure(**patient(3.0))  # longer than a busy machine needs until it says so
        async with reading(inbox) as reader:
            await publish("mars.1")
            await publish("mars.2")
            delivery, since = await inbox.next(), backend.clock.monotonic()
            delivery.nak(delay_seconds=0.3)
            reader.refill()
            while not inbox.waiting:
                await elapse(0.1)
            assert backend.clock.monotonic() - since > 0.25
            again = await inbox.next()
            assert (again.message.subject, again.num_delivered) == ("mars.1", 2)

    async def test_may_end_a_delay_also_after_its_delivery_is_not_held_any_more(
        self,
        reading: Callable[..., Any],
        create: Create,
        ensure: Ensure,
        publish: Publish,
        inbox: Inbox,
        elapse: Callable[[float], Awaitable[None]],
    ) -> None:
        await create()
        await ensure(**PINS)
        async with reading(inbox) as reader:
            await publish("mars.1")
            delivery = await inbox.next()
            delivery.nak(delay_seconds=600.0)
            reader.refill()
            await elapse(ACK_WAIT_SECONDS * 2.5)
            assert (delivery.held, bool(inbox.waiting)) == (False, False)
            delivery.redeliver()
            with anyio.fail_after(PATIENCE_SECONDS):
                while not inbox.waiting:
                    reader.refill()
                    await elapse(0.1)
            assert (await inbox.next()).num_delivered == 2


class TestAReaderThatIsNotHeardAnyMore:
    async def test_is_followed_by_another_and_settles_nothing_late(
        self,
        reading: Callable[..., Any],
        create: Create,
        ensure: Ensure,
        publish: Publish,
        inbox_of: Callable[[int], Inbox],
        eventually: Eventually,
        elapse: Callable[[float], Awaitable[None]],
    ) -> None:
        """It does not report what it holds in progress, nor ask, for it has no room."""
        await create()
        await ensure(**PINS)
        async with reading(one := inbox_of(1)) as reader, reading(other := inbox_of(1)) as other_reader:
            await publish("mars.1")
            await publish("mars.2")
            (_, inbox), (follower, next_inbox) = await chosen((reader, one), (other_reader, other))
            inbox.size = 0
            late = await inbox.next()
            await elapse(ACK_WAIT_SECONDS * 1.2)
            taken_over = await next_inbox.next()
            assert (taken_over.message.subject, taken_over.num_delivered) == ("mars.1", 2)
            assert (late.held, taken_over.held) == (False, True)
            follower.refill()
            late.ack()
            late.nak()
            late.term("too late")
            await elapse(0.2)
            await eventually(num_ack_pending=1, num_pending=1)
            assert next_inbox.subjects == []
            taken_over.ack()
            assert (await next_inbox.next()).message.subject == "mars.2"

    async def test_has_nothing_to_settle_after_it_was_cut_off(
        self,
        backend: Admin,
        reading: Callable[..., Any],
        create: Create,
        ensure: Ensure,
        publish: Publish,
        inbox: Inbox,
        elapse: Elapse,
        kind: str,
    ) -> None:
        if kind != "in_memory":
            pytest.skip("the stories pause processes")
        await create()
        await ensure(**PINS)
        async with reading(inbox):
            await publish("mars.1")
            cut_off = await inbox.next()
            backend.disconnect()  # type: ignore[attr-defined]
            for _ in range(4):
                await elapse(ACK_WAIT_SECONDS / 3)
                cut_off.in_progress()
            backend.reconnect()  # type: ignore[attr-defined]
            assert not cut_off.held


async def test_a_consumer_of_another_policy_leaves_everything_held(
    reading: Callable[..., Any],
    create: Create,
    ensure: Ensure,
    publish: Publish,
    inbox: Inbox,
    elapse: Callable[[float], Awaitable[None]],
) -> None:
    await create()
    await ensure(ack_wait_seconds=0.3)
    async with reading(inbox) as reader:
        await publish("mars.1")
        delivery = await inbox.next()
        await elapse(0.5)
        assert (delivery.held, reader.pinned) == (True, False)


class TestAPrioritizedConsumer:
    @pytest.mark.needs_server(2, 12)
    async def test_serves_the_nearest_first_and_the_far_when_no_near_one_asks(
        self,
        reading: Callable[..., Any],
        create: Create,
        ensure: Ensure,
        publish: Publish,
        inbox_of: Callable[[int], Inbox],
    ) -> None:
        await create()
        await ensure(**PRIORITY, priority_policy=PRIORITIZED)
        far, near = inbox_of(10), inbox_of(2)
        async with reading(far, priority=1), reading(near, priority=0):
            for step in range(5):
                await publish(f"mars.{step}")
            await far.take(3)
            assert near.subjects == ["mars.0", "mars.1"]

    @pytest.mark.needs_server(2, 12)
    async def test_serves_a_far_reader_that_is_alone(
        self, reading: Callable[..., Any], create: Create, ensure: Ensure, publish: Publish, inbox: Inbox
    ) -> None:
        await create()
        await ensure(**PRIORITY, priority_policy=PRIORITIZED)
        async with reading(inbox, priority=9):
            await publish("mars.1")
            assert (await inbox.next()).message.subject == "mars.1"


class TestAnOlderServer:
    @pytest.fixture
    async def app(self, kind: str, nats_url: str) -> AsyncGenerator[App, None]:
        if kind == "in_memory":
            pytest.skip("there is no server")
        async with App("contract", config=app_config(kind, nats_url)) as app:
            yield app

    async def test_is_named_when_it_knows_no_singletons(self, app: App, monkeypatch: pytest.MonkeyPatch) -> None:
        @app.agent("mars", singleton=True)
        async def write(notification: Notification[Any]) -> None: ...

        monkeypatch.setattr(Client, "connected_server_version", property(lambda _: ServerVersion("2.10.29")))
        said = "to run agent 'write' as a singleton, nats-server 2.11 or newer is needed; this one is 2.10"
        with pytest.raises(RefusedError, match=said):
            await app._work(anyio.Event())

    async def test_is_named_when_it_knows_no_priorities(
        self, kind: str, nats_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if kind == "in_memory":
            pytest.skip("there is no server")
        near = App("contract", config=app_config(kind, nats_url)).config
        far = structs.replace(near, workers=structs.replace(near.workers, priority=1))
        monkeypatch.setattr(Client, "connected_server_version", property(lambda _: ServerVersion("2.11.4")))
        async with App("contract", config=far) as app:
            said = "to read with workers.priority 1, nats-server 2.12 or newer is needed; this one is 2.11"
            with pytest.raises(RefusedError, match=said):
                await app._work(anyio.Event())


class TestThePolicy:
    @pytest.mark.needs_server(2, 12)
    async def test_may_change_below_a_worker(self, kind: str, nats_url: str) -> None:
        """The worker goes on: a reader that does not know of the change is refused, and opened anew."""
        app = App("contract", config=app_config(kind, nats_url))
        seen: list[str] = []

        @app.agent("mars")
        async def index(notification: Notification[Any]) -> None:
            seen.append(notification.identifier["step"])

        async with harness(app, server=nats_url or None) as t:
            await t.notify("mars", mars(step=0), {})
            await t.settle()
            found = await app.session.consumer_info(index)
            prioritized: dict[str, Any] = {"priority_policy": PRIORITIZED, "priority_groups": (GROUP,)}
            pinned: dict[str, Any] = {
                "priority_policy": PINNED,
                "priority_groups": (GROUP,),
                "priority_timeout": SECOND,
            }
            for number, policy in enumerate((prioritized, pinned, {}), 1):
                await app.session.backend.ensure_consumer("MARS", spec_of(found, **policy))
                for step in range(3):
                    await t.notify("mars", mars(step=10 * number + step), {})
                    await t.settle()
            assert len(seen) == 10

    @pytest.mark.needs_server(2, 12)
    async def test_can_be_changed_and_taken_back(self, create: Create, ensure: Ensure) -> None:
        await create()
        policies = []
        for stated in ({}, PINS, {**PRIORITY, "priority_policy": PRIORITIZED}, PINS, {}):
            info = await ensure(**stated)
            policies.append((info.config.get("priority_policy", "none"), info.config["max_ack_pending"]))
        assert policies == [("none", 100), (PINNED, 1), (PRIORITIZED, 100), (PINNED, 1), ("none", 100)]

    @pytest.mark.needs_server(2, 12)
    async def test_of_who_is_far_is_left_by_who_is_near(self, create: Create, ensure: Ensure) -> None:
        await create()
        await ensure(**PRIORITY, priority_policy=PRIORITIZED)
        info = await ensure()
        assert info.config["priority_policy"] == PRIORITIZED
