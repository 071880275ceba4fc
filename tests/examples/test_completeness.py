from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import ModuleType

import msgspec
import pytest

from aviso_workers import Notify
from aviso_workers.testing import Harness, harness
from tests.examples.conftest import Load

pytestmark = pytest.mark.anyio

MIDNIGHT = {"class": "od", "date": "2026-01-01", "time": "0000"}
START = datetime(2026, 1, 1, tzinfo=UTC)
"""When this cycle begins, and the harness's clock."""
EARLIER = "20251231T1200"
DUE_SECONDS = 60.0


@pytest.fixture
def example(load: Load, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    example = load("completeness")
    monkeypatch.setattr(example, "DUE", timedelta(seconds=DUE_SECONDS))
    return example


def announced(t: Harness) -> list[Notify]:
    """What was said of the cycle of midnight: nothing of the one before came."""
    about = [each for each in t.published if each.event_type != "field" and each.identifier["cycle"] != EARLIER]
    return [Notify(each.event_type, each.identifier, each.payload) for each in about]


async def publish(t: Harness, *steps: int) -> None:
    for step in steps:
        await t.notify("field", MIDNIGHT | {"step": step})
    await t.settle()


async def test_complete_cycle_is_announced_once_by_its_last_step(example: ModuleType) -> None:
    async with harness(example.app, start=START) as t:
        await publish(t, 24, 6, 18, 12, 3)
        assert announced(t) == []

        await publish(t, 0)
        await publish(t, 0, 6)
        await t.advance(2 * DUE_SECONDS)

        (complete,) = announced(t)
        assert (complete.event_type, complete.identifier["cycle"]) == ("cycle_complete", "20260101T0000")
        assert complete.payload["late"] is False


async def test_late_cycle_is_announced_once_with_what_is_missing(example: ModuleType) -> None:
    async with harness(example.app, start=START) as t:
        await publish(t, 0, 6, 18)
        await t.advance(5 * DUE_SECONDS)
        (late,) = announced(t)
        assert (late.event_type, late.identifier["cycle"]) == ("cycle_late", "20260101T0000")
        assert late.payload["missing"] == [12, 24]

        await publish(t, 12, 24)
        _, complete = announced(t)
        assert (complete.event_type, complete.payload["late"]) == ("cycle_complete", True)


async def test_cycle_of_which_nothing_came_is_late(example: ModuleType) -> None:
    async with harness(example.app, start=START) as t:
        await t.advance(2 * DUE_SECONDS)

        (late,) = (each for each in t.published if each.identifier["cycle"] == EARLIER)
        assert (late.event_type, late.payload["missing"]) == ("cycle_late", [0, 6, 12, 18, 24])


async def test_cycle_that_was_stored_in_time_is_not_late_although_the_agent_is_behind(example: ModuleType) -> None:
    async with harness(example.app, start=START) as t:
        t.fail(example.note, ConnectionError("no server"), times=3)
        for step in sorted(example.STEPS):
            await t.notify("field", MIDNIGHT | {"step": step})
        t.disconnect()
        await t.advance(2 * DUE_SECONDS)
        t.reconnect()
        await t.settle()
        await t.advance(2 * DUE_SECONDS)

        (complete,) = announced(t)
        assert (complete.event_type, complete.payload["late"]) == ("cycle_complete", False)


async def test_cycle_is_forgotten_after_a_week(example: ModuleType) -> None:
    async with harness(example.app, start=START + timedelta(minutes=59)) as t:
        for days in (8, 6):
            old = example.name_of(START - timedelta(days=days))
            await example.cycles.update(old, lambda cycle: msgspec.structs.replace(cycle, told_late=True))

        await t.advance("2m")

        assert [tick.error for tick in t.ticks("forget")] == [None]
        names = await example.cycles.items()
        assert ("20251224T0000" in names, "20251226T0000" in names) == (False, True)
