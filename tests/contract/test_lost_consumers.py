"""Agents whose consumer was deleted on the server: they go on after what was settled, and say so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from aviso_workers import App, Notification
from aviso_workers.engine.consumer_records import ConsumerRecorder
from aviso_workers.errors import NotFoundError, UnavailableError
from aviso_workers.events import ConsumerResumed
from aviso_workers.ops import steering
from aviso_workers.positions import Position
from aviso_workers.testing import Harness, harness
from tests.contract.settings import app_config, mars

pytestmark = pytest.mark.anyio


@pytest.fixture
def handled() -> list[int]:
    """The steps that the agent `index` was given, in order."""
    return []


@pytest.fixture
async def t(kind: str, nats_url: str, handled: list[int]) -> AsyncIterator[Harness]:
    app = App("contract", config=app_config(kind, nats_url))

    @app.agent("mars", where={"stream": "oper"})
    async def index(notification: Notification[Any]) -> None:
        handled.append(int(notification.identifier["step"]))

    async with harness(app, server=nats_url or None) as t:
        yield t


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
    await t.app.session.backend.delete_consumer("MARS", "contract__index")
    await t.notify("mars", mars(step=3), {})
    await t.start()
    await t.settle()
    assert handled == [0, 1, 2, 3]


async def test_it_goes_on_where_it_was_when_it_is_deleted_under_a_worker(t: Harness, handled: list[int]) -> None:
    await settled_before(t)
    await t.start()
    await t.app.session.backend.delete_consumer("MARS", "contract__index")
    await t.notify("mars", mars(step=3), {})
    await t.settle()
    assert handled == [0, 1, 2, 3]


async def test_it_says_so(t: Harness, resumed: list[ConsumerResumed]) -> None:
    await settled_before(t)
    assert resumed == []
    await t.app.session.backend.delete_consumer("MARS", "contract__index")
    await t.start()
    await t.settle()
    assert resumed == [ConsumerResumed(agent="index", stream="MARS", consumer="contract__index", sequence=4)]


async def test_after_a_crash_it_goes_on_where_it_was_last_recorded(t: Harness, handled: list[int]) -> None:
    await settled_before(t)
    await t.start()
    await t.notify("mars", mars(step=3), {})
    await t.settle()
    await t.app.session.backend.delete_consumer("MARS", "contract__index")
    await t.crash()
    await t.settle()
    assert handled == [0, 1, 2, 3, 3]


async def test_in_a_stream_that_was_made_anew_it_begins_at_its_start(t: Harness, handled: list[int]) -> None:
    await settled_before(t)
    await t.app.session.backend.delete_stream("MARS")
    t.app.session.provisioner.forget("MARS")
    await t.notify("mars", mars(step=7), {})
    await t.start()
    await t.settle()
    assert handled == [0, 1, 2, 7]


async def test_after_a_reset_it_goes_on_from_there(t: Harness, handled: list[int]) -> None:
    await settled_before(t)
    steered = steering.declared(t.app, "index")
    await steering.reset(t.app, await steering.plan_reset(t.app, steered, Position(sequence=2)))
    await t.app.session.backend.delete_consumer("MARS", steered.consumer)
    await t.start()
    await t.settle()
    assert handled == [0, 1, 2, 1, 2]


async def test_a_new_consumer_is_not_made_while_it_is_not_known_how_far_the_old_one_had_come(
    t: Harness, handled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(recorder: ConsumerRecorder) -> int | None:
        raise UnavailableError("no answer")

    await settled_before(t)
    await t.app.session.backend.delete_consumer("MARS", "contract__index")
    with monkeypatch.context() as patched:
        patched.setattr(ConsumerRecorder, "look", refuse)
        await t.start()
        await t.advance(0.5)
        with pytest.raises(NotFoundError):
            await t.app.session.backend.consumer_info("MARS", "contract__index")
    await t.notify("mars", mars(step=3), {})
    await t.settle()
    assert handled == [0, 1, 2, 3]
