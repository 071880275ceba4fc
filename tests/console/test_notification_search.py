"""Notifications that are looked for by values of their identifier."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from aviso_workers import App
from aviso_workers.ops import aviso_admin, inventory
from aviso_workers.testing import Harness
from tests.console.conftest import Served, publish, shown, text_of
from tests.contract.settings import mars

pytestmark = pytest.mark.anyio


async def test_the_newest_with_the_values_are_listed_and_lead_to_what_became_of_them(
    console: Served, app: App, running: Harness
) -> None:
    await publish(app, 1, 2, 1, 2)
    async with console.client() as client:
        page = await shown(client, "/notification?name=mars+class%3Dod+step%3D1", "2 notifications")
        assert page.index("MARS@3") < page.index("MARS@1"), "the newest is the first"
        assert "MARS@2" not in page
        await shown(client, "/notification?name=mars", "4 notifications")
        await shown(client, "/notification?name=mars+step%3D9", "No stored notification has these values.")
        await shown(client, "/notification?name=MARS%403", "At each agent")


async def test_what_is_to_be_stored_later_is_listed_and_says_when(console: Served, app: App, running: Harness) -> None:
    await app.notify("mars", mars(step=9), {}, due=datetime(2040, 1, 2, 12, tzinfo=UTC), message_id="forecast-9")
    async with console.client() as client:
        page = await shown(client, "/notification?name=mars+step%3D9", "To be stored later", "2040-01-02T12:00:00Z")
        assert "No stored notification has these values." in page
        await shown(
            client,
            "/notification?name=MARS%40delayed%3Aforecast-9",
            "Not given to field-index/blocks and 2 more yet: it is stored in MARS at 2040-01-02 12:00:00",
            "now field-index/blocks and 2 more waits until it is due",
        )
        absent = await client.get("/notification?name=MARS%40delayed%3Aforecast-8")
    assert absent.status_code == 404


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        ("mars+steps%3D1", 400, "steps"),
        ("mars+step", 400, "is not key=value"),
        ("other+step%3D1", 400, "other"),
        ("mars+step%3D1", 404, "MARS"),
    ],
)
async def test_what_cannot_be_looked_for_is_named(console: Served, asked: str, status: int, said: str) -> None:
    async with console.client() as client:
        answer = await client.get(f"/notification?name={asked}")
    assert answer.status_code == status
    assert said in text_of(answer.text)


@pytest.mark.parametrize("rare", [[], [0], [0, 1, 120], range(30), range(90, 121)], ids=str)
async def test_only_a_part_of_a_long_stream_is_read(
    console: Served, app: App, running: Harness, rare: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "SPAN", 5)
    await publish(app, *(1 if place in rare else 2 for place in range(121)))
    found = await aviso_admin.search(console.admin, console.config, "mars step=1")
    wanted = [f"MARS@{place + 1}" for place in rare][::-1]
    assert (found.count, [each.name for each in found.newest]) == (len(wanted), wanted[:20])


async def test_the_newest_are_found_while_others_come(
    console: Served, app: App, running: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def count(*given: Any, **named: Any) -> int:
        await publish(app, *[1] * 25)
        return await counting(*given, **named)

    counting = console.admin.count
    monkeypatch.setattr(inventory, "SPAN", 5)
    await publish(app, *[1] * 30)
    monkeypatch.setattr(console.admin, "count", count)
    found = await aviso_admin.search(console.admin, console.config, "mars step=1")
    assert len(found.newest) == 20
