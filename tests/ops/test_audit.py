"""The record of what operators do, read by date, on a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest

from aviso_workers import App
from aviso_workers.errors import NotFoundError
from aviso_workers.ops import audit, inventory
from aviso_workers.ops.audit import Audit, Period
from aviso_workers.server import NatsServer
from tests.contract.settings import app_config

pytestmark = pytest.mark.anyio

LATER = timedelta(days=1)
YESTERDAY = datetime.now(UTC) - LATER


@pytest.fixture
async def app(nats_server: NatsServer) -> AsyncIterator[App]:
    async with App("field", config=app_config("jetstream", nats_server.url)) as app:
        yield app


@pytest.fixture
def records(app: App) -> Audit:
    return Audit(app.session.admin, app.config)


async def did(records: Audit, *names: str) -> None:
    for name in names:
        async with records.recorded("anna", name, "field/index") as result:
            result.text = f"{name} is done"


def names(period: Period) -> list[str]:
    return [each.record.action for each in period.actions]


async def test_actions_are_read_by_their_time(records: Audit) -> None:
    await did(records, "first", "second", "third")
    third, second, first = await records.newest(10)
    whole = await records.period(first.time, third.time + LATER)
    one = await records.period(second.time, third.time)
    assert (names(whole), whole.before) == (["third", "second", "first"], None)
    assert whole.first is not None
    assert abs(whole.first - first.time) < timedelta(milliseconds=1)
    assert (names(one), one.before) == (["second"], first.ended_at), "what began at the end is of the next time"
    assert [each.end.result for each in one.actions if each.end] == ["second is done"]
    none = await records.period(third.time + LATER, third.time + 2 * LATER)
    assert (names(none), none.before) == ([], third.ended_at)


async def test_an_action_is_of_the_time_in_which_it_began(records: Audit) -> None:
    async with records.recorded("anna", "long", "field/index") as result:
        await did(records, "short", "other")
        result.text = "it is done at last"
    other, short, long = await records.newest(10)
    begin = await records.period(long.time, short.time)
    assert [(each.record.action, each.end and each.end.result) for each in begin.actions] == [
        ("long", "it is done at last")
    ]
    assert names(await records.period(short.time, other.time + LATER)) == ["other", "short"]


async def test_of_many_actions_the_newest_are_read(records: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MOST_READ", 4)
    monkeypatch.setattr(inventory, "SPAN", 1)
    await did(records, *"abcde")
    *_, first = await records.newest(10)
    cut = await records.period(first.time, first.time + LATER)
    assert (names(cut)[:2], cut.is_cut) == (["e", "d"], True)
    assert "a" not in names(cut)


async def test_where_nothing_was_done_there_is_no_time(records: Audit) -> None:
    assert await records.period(YESTERDAY, YESTERDAY + LATER) == Period()


async def test_a_command_that_cannot_be_recorded_goes_on_and_says_so(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: object, **__: object) -> None:
        raise NotFoundError("no such stream")

    admin, warned = app.session.admin, list[str]()
    monkeypatch.setattr(admin, "publish", refused)
    async with Audit(admin, app.config, warn=warned.append).recorded("anna", "pause-agent", "field/index") as result:
        result.text = "done"
    assert warned == ["not recorded in the audit: no such stream; it is done all the same"]
    with pytest.raises(NotFoundError):
        async with Audit(admin, app.config).recorded("anna", "pause-agent", "field/index"):
            pytest.fail("a console does nothing that is not recorded")
