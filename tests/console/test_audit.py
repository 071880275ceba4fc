"""The page Audit: what was done when, from consoles and by command."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from aviso_workers import App
from aviso_workers.ops.audit import Audit
from aviso_workers.testing import Harness
from tests.console.conftest import READER, Served, confirmed, publish, shown, text_of

pytestmark = pytest.mark.anyio

INDEX = {"app": "field-index", "agent": "index"}
DAY = timedelta(days=1)


async def by_command(console: Served, action: str = "purge-stream", of: str = "MARS") -> None:
    def complain(text: str) -> None:
        pytest.fail(text)

    async with Audit(console.admin, console.config, warn=complain).recorded("rolf@desk", action, of) as result:
        result.text = "MARS: 3 removed"


@pytest.mark.slow
async def test_it_shows_by_day_who_did_what_and_why(console: Served, app: App, running: Harness) -> None:
    async with console.client() as client:
        nobody = text_of((await client.get("/audit")).text)
        await confirmed(client, "pause-agent", **INDEX, **{"for": "2h", "why": "the archive moves"})
        await by_command(console)
        page = await shown(client, "/audit?since=1h", "All 2 actions since")
        await shown(client, "/", "by anna, console until", ": the archive moves")
    assert "Nobody has done anything here yet." in nobody
    assert "anna Pause agent field-index/index for 2h “the archive moves” paused until" in page
    assert "rolf@desk, by command Purge stream MARS MARS: 3 removed" in page
    assert f"Today, {datetime.now(UTC):%A}" in page
    assert page.index("by command") < page.index("anna Pause"), "the newest is the first"


async def test_a_filter_that_matches_nothing_says_what_there_is(console: Served, app: App, running: Harness) -> None:
    await by_command(console)
    today = datetime.now(UTC).date()
    async with console.client(READER) as client:
        other = await shown(client, "/audit?since=1h&who=anna&action=drop-dead-letters", "None of the 1 action since")
        before = await shown(
            client, f"/audit?since={today - 2 * DAY}&until={today - DAY}", "Nothing is recorded of that time."
        )
        after = await shown(client, "/audit?since=0s", "Nobody has done anything since")
        elsewhere = await shown(client, f"/audit?until={today - DAY}&since={today - 9 * DAY}&who=rolf@desk", "from")
        found = await shown(client, "/audit?since=1h&who=rolf@desk&of=mars", "All 1 action since")
        mistaken = await client.get("/audit?since=noon")
        reversed_ = await client.get("/audit?since=today&until=yesterday")
    assert "Show all of that time" in other
    assert "The record reaches back to" in before
    assert f"The last one before that time was on {today:%-d %B %Y}" in after
    assert f"The last one that matches was on {today:%-d %B %Y}" in elsewhere
    assert "by command" in found
    assert (mistaken.status_code, reversed_.status_code) == (400, 400)
    assert "rom must be a day such as 2026-11-20" in text_of(mistaken.text)
    assert "he end must be later than the begin" in text_of(reversed_.text)


@pytest.mark.slow
async def test_an_action_on_dead_letters_says_which_it_took(console: Served, app: App, running: Harness) -> None:
    await publish(app, 1, 3, 3)
    async with console.client() as client:
        await shown(client, "/dead-letters", "2 dead letters,")
        await confirmed(client, "drop-dead-letters", app="field-index", agent="fails", why="a rehearsal", number="2")
        page = await shown(client, "/audit?of=field-index/fails", "2 of 2 erased")
    assert "Erase dead letters field-index/fails" in page
    assert "erased: MARS@2 to 3 of field-index/fails, dead letters 1 to 2" in page


@pytest.mark.slow
async def test_an_agent_that_is_resumed_is_not_said_to_be_paused_by_anybody(
    console: Served, app: App, running: Harness
) -> None:
    async with console.client() as client:
        await confirmed(client, "pause-agent", **INDEX, why="the archive moves")
        await shown(client, "/", "the archive moves")
        await confirmed(client, "resume-agent", **INDEX)
        await console.admin.pause_consumer("MARS", "field-index__index", until=datetime.now(UTC) + DAY)
        await shown(client, "/agents/field-index/index", "paused", without="the archive moves")
