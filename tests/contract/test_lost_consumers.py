"""Agents whose consumer was deleted on the server: they go on after what was settled, and say so."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from aviso_workers import App, Notification, RetryPolicy
from aviso_workers.aviso.positions import Position
from aviso_workers.engine.consumer_recorder import ConsumerRecorder
from aviso_workers.errors import NotFoundError, UnavailableError
from aviso_workers.events import AgentStarted, ConsumerResumed
from aviso_workers.ops import agent_control, maintenance
from aviso_workers.ops.dead_letters import Selection, StoredDeadLetters
from aviso_workers.state import consumer_records, own_streams
from aviso_workers.testing import Harness, harness
from tests.contract.settings import app_config, mars
from tests.waits import PATIENCE_SECONDS

RETRIES = own_streams.of_app(own_streams.RETRIES, "contract")

pytestmark = pytest.mark.anyio


@pytest.fixture
def resumed(t: Harness) -> list[ConsumerResumed]:
    facts: list[ConsumerResumed] = []
    t.app.events.listen(facts.append, ConsumerResumed)
    return facts


async def settled_before(t: Harness) -> None:
    """A worker handles the steps 0 to 2, and stops."""
    for step in range(3):
        await t.notify("mars", mars(step=step), {})
    await t.settle()
    await t.stop()


async def test_it_goes_on_where_it_was_when_its_workers_come_back(t: Harness, handled: list[int]) -> None:
    await settled_before(t)
    await t.app.session.admin.delete_consumer("MARS", "contract__index")
    await t.notify("mars", mars(step=3), {})
    await t.start()
    await t.settle()
    assert handled == [0, 1, 2, 3]


async def test_it_goes_on_where_it_was_when_it_is_deleted_under_a_worker(t: Harness, handled: list[int]) -> None:
    await settled_before(t)
    await t.start()
    await t.app.session.admin.delete_consumer("MARS", "contract__index")
    await t.notify("mars", mars(step=3), {})
    await t.settle()
    assert handled == [0, 1, 2, 3]


async def test_it_goes_on_where_it_was_when_its_app_is_retired_under_a_worker(
    t: Harness, handled: list[int], resumed: list[ConsumerResumed]
) -> None:
    """As where the worker was frozen, so that `agents rm` did not see it."""
    await settled_before(t)
    opened = anyio.Event()
    t.app.events.listen(lambda fact: opened.set() if fact.stream == "MARS" else None, AgentStarted)
    await t.start()
    with anyio.fail_after(PATIENCE_SECONDS):
        await opened.wait()
    admin = t.app.session.admin
    await admin.delete_consumer("MARS", "contract__index")
    await consumer_records.remove(admin, app="contract", agent="index", stream="MARS")
    await t.notify("mars", mars(step=3), {})
    await t.settle()
    assert handled == [0, 1, 2, 3]
    assert [(fact.sequence, fact.recorded) for fact in resumed] == [(4, False)]


async def test_it_says_so(t: Harness, resumed: list[ConsumerResumed]) -> None:
    await settled_before(t)
    assert resumed == []
    await t.app.session.admin.delete_consumer("MARS", "contract__index")
    await t.start()
    await t.settle()
    assert resumed == [ConsumerResumed(agent="index", stream="MARS", consumer="contract__index", sequence=4)]


async def test_after_a_crash_it_goes_on_where_it_was_last_recorded(t: Harness, handled: list[int]) -> None:
    await settled_before(t)
    await t.start()
    await t.notify("mars", mars(step=3), {})
    await t.settle()
    await t.app.session.admin.delete_consumer("MARS", "contract__index")
    await t.crash()
    await t.settle()
    assert handled == [0, 1, 2, 3, 3]


async def test_in_a_stream_that_was_made_anew_it_begins_at_its_start(t: Harness, handled: list[int]) -> None:
    await settled_before(t)
    await t.app.session.admin.delete_stream("MARS")
    t.app.session.provisioner.forget("MARS")
    await t.notify("mars", mars(step=7), {})
    await t.start()
    await t.settle()
    assert handled == [0, 1, 2, 7]


async def test_after_a_reset_it_goes_on_from_there(t: Harness, handled: list[int]) -> None:
    await settled_before(t)
    index = agent_control.declared(t.app, t.app.config, "index")
    await agent_control.reset(
        t.app.session.admin, await agent_control.plan_reset(t.app.session.admin, index, Position(sequence=2))
    )
    await t.app.session.admin.delete_consumer("MARS", index.consumer)
    await t.start()
    await t.settle()
    assert handled == [0, 1, 2, 1, 2]


@pytest.mark.parametrize("removed", [False, True], ids=["deleted", "removed on purpose"])
async def test_a_reset_says_where_it_goes_on_also_while_it_has_no_consumer(
    t: Harness, handled: list[int], removed: bool
) -> None:
    await settled_before(t)
    admin = t.app.session.admin
    if removed:
        await maintenance.remove_consumer(admin, "MARS", "contract__index")
    else:
        await admin.delete_consumer("MARS", "contract__index")
    index = await agent_control.find(admin, t.app.config, "contract", "index")
    plan = await agent_control.plan_reset(admin, index, Position(sequence=2))
    assert (plan.again, plan.passed_over, plan.has_consumer) == (2, 0, False)
    assert await agent_control.reset(admin, plan) == 2
    await t.start()
    await t.settle()
    assert handled == [0, 1, 2, 1, 2]


async def test_a_reset_of_an_agent_that_has_never_run_is_refused(t: Harness) -> None:
    await t.notify("mars", mars(step=0), {})
    await t.settle()
    await t.stop()
    never = agent_control.AgentConsumer(app="contract", agent="never", stream="MARS")
    with pytest.raises(NotFoundError, match="contract__never"):
        await agent_control.plan_reset(t.app.session.admin, never, Position(sequence=1))


async def test_a_new_consumer_is_not_made_while_it_is_not_known_how_far_the_old_one_had_come(
    t: Harness, handled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(recorder: ConsumerRecorder) -> None:
        raise UnavailableError("no answer")

    await settled_before(t)
    await t.app.session.admin.delete_consumer("MARS", "contract__index")
    with monkeypatch.context() as patched:
        patched.setattr(ConsumerRecorder, "_read", refuse)
        await t.start()
        await t.advance(0.5)
        with pytest.raises(NotFoundError):
            await t.app.session.backend.consumer_info("MARS", "contract__index")
    await t.notify("mars", mars(step=3), {})
    await t.settle()
    assert handled == [0, 1, 2, 3]


async def test_what_was_tried_again_before_is_not_tried_once_more(kind: str, nats_url: str) -> None:
    """The consumer of what is handed back from the dead letters was deleted too."""
    app = App("contract", config=app_config(kind, nats_url))
    tries: list[int] = []

    @app.agent("mars", retry=RetryPolicy(attempts=1))
    async def index(notification: Notification[Any]) -> None:
        tries.append(int(notification.identifier["step"]))
        if tries == [0]:
            raise ValueError("only the first time")

    async with harness(app, server=nats_url or None) as t:
        await t.notify("mars", mars(step=0), {})
        await t.settle()
        stored = StoredDeadLetters(t.app.session.admin, events=t.app.events)
        (dead_letter,) = [dead_letter async for dead_letter in stored.select(Selection())]
        await stored.retry(dead_letter)
        await t.settle()
        await t.stop()
        for stream in ("MARS", RETRIES):
            await t.app.session.admin.delete_consumer(stream, "contract__index")
        await t.start()
        await t.notify("mars", mars(step=1), {})
        await t.settle()
    assert tries == [0, 0, 1]


async def test_one_that_is_removed_on_purpose_begins_at_its_start(t: Harness, handled: list[int]) -> None:
    await settled_before(t)
    await maintenance.remove_consumer(t.app.session.admin, "MARS", "contract__index")
    await t.start()
    await t.settle()
    assert handled == [0, 1, 2, 0, 1, 2]
