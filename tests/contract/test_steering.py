"""Agents paused and reset from outside, and what is told of them, on either backend."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from msgspec import structs

from aviso_workers import Notification
from aviso_workers.aviso.positions import Position
from aviso_workers.backends import Admin, ConsumerInfo
from aviso_workers.errors import DeclarationError, InvalidPositionError, NotFoundError, RefusedError
from aviso_workers.jetstream.specs import ConsumerSpec
from aviso_workers.ops import agent_control, reports, snapshots
from aviso_workers.ops.agent_control import UNTIL_RESUMED, AgentConsumer
from aviso_workers.ops.dead_letters import Selection, StoredDeadLetters
from aviso_workers.state import consumer_records, own_streams
from aviso_workers.testing import Harness
from tests.agent_looks import looked
from tests.contract.conftest import Create, Ensure
from tests.contract.settings import mars

RETRIES = own_streams.of_app(own_streams.RETRIES, "contract")

pytestmark = pytest.mark.anyio

INDEX = AgentConsumer(app="contract", agent="index", stream="MARS")


@pytest.fixture
async def four(t: Harness, handled: list[int]) -> list[datetime]:
    """Steps 0 to 3 were handled, with one of another `stream` between 1 and 2; returns when they were stored."""
    for step in (0, 1):
        await t.notify("mars", mars(step=step), {})
    await t.notify("mars", mars(step=1, stream="wave"), {})
    await t.advance(0.01)
    for step in (2, 3):
        await t.notify("mars", mars(step=step), {})
    await t.settle()
    assert handled == [0, 1, 2, 3]
    handled.clear()
    return [notification.time async for notification in t.app.replay("mars", {"stream": "oper"})]


class TestFinding:
    async def test_an_agent_is_found_by_its_name_and_its_apps(self, t: Harness, four: list[datetime]) -> None:
        assert await agent_control.find(t.app.session.admin, t.app.config, "contract", "index") == INDEX
        assert agent_control.declared(t.app, t.app.config, "index") == INDEX

    async def test_one_that_is_not_there_is_told_with_those_that_are(self, t: Harness, four: list[datetime]) -> None:
        with pytest.raises(NotFoundError, match=r"no agent indx of app contract reads .*; that app has: index"):
            await agent_control.find(t.app.session.admin, t.app.config, "contract", "indx")
        with pytest.raises(NotFoundError, match="there are apps: contract"):
            await agent_control.find(t.app.session.admin, t.app.config, "contrct", "index")
        with pytest.raises(DeclarationError, match="app 'contract' has no agent 'indx'; it has: index"):
            agent_control.declared(t.app, t.app.config, "indx")

    async def test_one_that_was_moved_to_another_stream_must_be_named_by_its_code(
        self, t: Harness, four: list[datetime]
    ) -> None:
        await t.notify("plain", {"a": "1", "b": "2"})
        left_behind = ConsumerSpec(
            durable_name=INDEX.consumer, filter_subjects=(), ack_wait=1_000_000_000, max_ack_pending=1
        )
        await t.app.session.backend.ensure_consumer("PLAIN", left_behind)
        with pytest.raises(DeclarationError, match=r"a consumer on each of MARS, PLAIN: .*MODULE:APP/index"):
            await agent_control.find(t.app.session.admin, t.app.config, "contract", "index")

    async def test_one_on_two_streams_is_paused_and_resumed_on_both(self, t: Harness, four: list[datetime]) -> None:
        """As two versions that read different event types; operators may have the configuration of one of them."""
        await t.notify("plain", {"a": "1", "b": "2"})
        admin, backend = t.app.session.admin, t.app.session.backend
        spec = ConsumerSpec(durable_name=INDEX.consumer, filter_subjects=(), ack_wait=1_000_000_000, max_ack_pending=1)
        await backend.ensure_consumer("PLAIN", spec)
        await consumer_records.move(
            backend, app="contract", agent="index", stream="PLAIN", ack_floor=0, filter_subjects=()
        )
        mars_only = structs.replace(
            t.app.config, notification_schema={"mars": t.app.config.notification_schema["mars"]}
        )
        both = await agent_control.find(admin, mars_only, "contract", "index", several=True)
        assert (both.stream, both.beside) == ("MARS", ("PLAIN",))
        with pytest.raises(DeclarationError, match="a consumer on each of MARS, PLAIN"):
            await agent_control.find(admin, mars_only, "contract", "index")
        await agent_control.pause(admin, both)
        assert [(await backend.consumer_info(each, INDEX.consumer)).paused for each in ("MARS", "PLAIN")] == [
            True,
            True,
        ]
        await agent_control.resume(admin, both)
        assert [(await backend.consumer_info(each, INDEX.consumer)).paused for each in ("MARS", "PLAIN")] == [False] * 2


class TestAPause:
    @pytest.mark.slow
    async def test_holds_back_events_and_what_is_tried_again(self, t: Harness, handled: list[int]) -> None:
        await t.notify("mars", mars(step=0), "reject")
        await t.settle()
        stored = StoredDeadLetters(t.app.session.admin, events=t.app.events)
        (dead_letter,) = [dead_letter async for dead_letter in stored.select(Selection())]
        handled.clear()

        await agent_control.pause(t.app.session.admin, INDEX)
        await stored.retry(dead_letter)
        await t.notify("mars", mars(step=6), {})
        await t.advance(0.3)
        (index,) = await looked(t.app.session.admin, t.app.config)
        said = (index.judgement.state, index.judgement.why)
        assert (handled, index.facts.pending, said) == ([], 2, ("paused", "until it is resumed"))

        await agent_control.resume(t.app.session.admin, INDEX)
        await t.settle()
        (index,) = await looked(t.app.session.admin, t.app.config)
        assert (sorted(handled), index.facts.pending) == ([0, 6], 0)
        assert index.judgement.state != "paused"

    @pytest.mark.parametrize(("stream", "paused"), [("MARS", "notifications"), (RETRIES, "retries")])
    async def test_of_one_half_of_it_is_trouble(
        self, t: Harness, four: list[datetime], stream: str, paused: str
    ) -> None:
        """As where a pause or a resume broke off between the two consumers."""
        await t.app.session.admin.pause_consumer(stream, INDEX.consumer, until=UNTIL_RESUMED)
        (index,) = await looked(t.app.session.admin, t.app.config)
        assert (index.judgement.state, index.judgement.why) == ("half paused", f"only its {paused} are paused")
        of_stream = await snapshots.take(t.app.session.admin, stream="MARS")
        assert {row.trouble for row in reports.consumers(of_stream, of_stream, stream="MARS")} == {index.judgement.text}
        await agent_control.pause(t.app.session.admin, INDEX)
        (index,) = await looked(t.app.session.admin, t.app.config)
        assert (index.judgement.state, index.judgement.needs) == ("paused", False)

    async def test_has_an_end(self, t: Harness, handled: list[int], four: list[datetime]) -> None:
        await agent_control.pause(t.app.session.admin, INDEX, seconds=1)
        await t.notify("mars", mars(step=6), {})
        await t.advance(0.3)
        assert handled == []
        await t.settle()
        assert handled == [6]

    @pytest.mark.parametrize("answered", [0.0, 7000.0])
    async def test_is_refused_where_the_server_says_that_it_pauses_for_another_time(
        self, t: Harness, four: list[datetime], monkeypatch: pytest.MonkeyPatch, answered: float
    ) -> None:
        """As where the clock of the cluster's leader is not that of the consumer's leader."""

        async def pause_consumer(stream: str, consumer: str, *, until: datetime | None) -> float:
            return answered

        monkeypatch.setattr(t.app.session.admin, "pause_consumer", pause_consumer)
        said = rf"contract__index of stream MARS is paused for {answered:.0f} s, and not for 600 s"
        with pytest.raises(RefusedError, match=said):
            await agent_control.pause(t.app.session.admin, INDEX, seconds=600)


class TestAReset:
    async def test_back_to_a_sequence_handles_again_what_the_agent_asked_for(
        self, t: Harness, handled: list[int], four: list[datetime]
    ) -> None:
        plan = await agent_control.plan_reset(t.app.session.admin, INDEX, Position(sequence=2))
        assert (plan.sequence, plan.again, plan.passed_over, plan.unsettled) == (2, 3, 0, 0)
        assert handled == [], "planning does nothing"

        assert await agent_control.reset(t.app.session.admin, plan) == 3
        await t.settle()
        assert handled == [1, 2, 3]

    @pytest.mark.parametrize("zero", [0, 1])
    async def test_back_to_the_beginning(self, t: Harness, handled: list[int], four: list[datetime], zero: int) -> None:
        plan = await agent_control.plan_reset(t.app.session.admin, INDEX, Position(sequence=zero))
        assert (plan.sequence, plan.again) == (1, 4)

    async def test_back_to_a_date_begins_with_the_first_from_then_on(
        self, t: Harness, handled: list[int], four: list[datetime]
    ) -> None:
        for time, again in ((four[2], 2), (four[2] - timedelta(milliseconds=5), 2), (four[0] - timedelta(days=1), 4)):
            plan = await agent_control.plan_reset(t.app.session.admin, INDEX, Position(time=time))
            assert plan.again == again, time
        after = await agent_control.plan_reset(t.app.session.admin, INDEX, Position(time=four[3] + timedelta(days=1)))
        assert (after.sequence, after.again, after.passed_over) == (6, 0, 0)

    @pytest.mark.slow
    async def test_forward_passes_over_and_says_so(self, t: Harness, handled: list[int], four: list[datetime]) -> None:
        await agent_control.pause(t.app.session.admin, INDEX)
        for step in (6, 7, 8):
            await t.notify("mars", mars(step=step), {})
        plan = await agent_control.plan_reset(t.app.session.admin, INDEX, Position(sequence=8))
        assert (plan.again, plan.passed_over) == (0, 2)
        await agent_control.reset(t.app.session.admin, plan)
        await agent_control.resume(t.app.session.admin, INDEX)
        await t.settle()
        assert handled == [8]

    async def test_behind_the_last_notification_asks_no_clock(self, t: Harness, four: list[datetime]) -> None:
        plan = await agent_control.plan_reset(t.app.session.admin, INDEX, Position())
        assert (plan.sequence, plan.again, plan.passed_over) == (6, 0, 0)

    async def test_past_what_waits_for_its_next_attempt_tells_of_it(self, t: Harness, four: list[datetime]) -> None:
        t.fail("index", ConnectionError("not now"), times=1)
        await t.notify("mars", mars(step=6), {})
        await t.advance(0.3)
        (index,) = await looked(t.app.session.admin, t.app.config)
        assert index.facts.ack_pending == 1
        assert (await agent_control.plan_reset(t.app.session.admin, INDEX, Position(sequence=6))).unsettled == 0
        assert (await agent_control.plan_reset(t.app.session.admin, INDEX, Position(sequence=7))).unsettled == 1

    async def test_beyond_the_end_is_refused(self, t: Harness, four: list[datetime]) -> None:
        with pytest.raises(InvalidPositionError, match="MARS ends at 5: an agent cannot go on at 7"):
            await agent_control.plan_reset(t.app.session.admin, INDEX, Position(sequence=7))


class TestTheReport:
    async def test_tells_of_every_agent_of_the_deployment(self, t: Harness, four: list[datetime]) -> None:
        other = ConsumerSpec(durable_name="other__one", filter_subjects=(), ack_wait=1_000_000_000, max_ack_pending=1)
        await t.app.session.backend.ensure_consumer("MARS", other)
        report = [each.facts for each in await looked(t.app.session.admin, t.app.config)]
        assert [(found.app, found.agent, found.stream, found.pending) for found in report] == [
            ("contract", "index", "MARS", 0),
            ("other", "one", "MARS", 5),
        ]

    async def test_tells_of_an_agent_that_no_worker_has_run(self, t: Harness, four: list[datetime]) -> None:
        @t.app.agent("area")
        async def new(notification: Notification[Any]) -> None: ...

        code = (("contract", "index", "MARS"), ("contract", "new", "AREA"))
        new_one, index = await looked(t.app.session.admin, t.app.config, code=code)
        assert index.facts.consumer is not None
        assert (new_one.facts.agent, new_one.facts.events, new_one.judgement.state) == ("new", None, "never started")


@pytest.mark.parametrize("paused", [True, False], ids=["paused", "resumed"])
async def test_a_worker_that_writes_a_consumer_as_it_was_before_a_pause_or_resume_undoes_neither(
    backend: Admin, create: Create, ensure: Ensure, monkeypatch: pytest.MonkeyPatch, *, paused: bool
) -> None:
    """It reads the whole configuration, and writes it with what it wants otherwise."""
    await create()
    await ensure(ack_wait_seconds=30)
    an_hour = (await backend.consumer_info("MARS", "agent")).time + timedelta(hours=1)
    if not paused:
        await backend.pause_consumer("MARS", "agent", until=an_hour)
    consumer_info = backend.consumer_info

    async def consumer_info_just_before(*arguments: Any, **stated: Any) -> ConsumerInfo:
        found = await consumer_info(*arguments, **stated)
        await backend.pause_consumer("MARS", "agent", until=an_hour if paused else None)
        return found

    monkeypatch.setattr(backend, "consumer_info", consumer_info_just_before)
    await backend.consumer_info("MARS", "agent")  # in memory `ensure` does not ask for it
    await ensure(ack_wait_seconds=20)
    monkeypatch.undo()

    found = await backend.consumer_info("MARS", "agent")
    assert (found.paused, found.config.ack_wait) == (paused, 20_000_000_000)
