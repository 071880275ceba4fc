"""Filters by value, by place and both select the same of 2,000 notifications on either side."""

from __future__ import annotations

import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from aviso_workers import App, Notify
from aviso_workers.errors import InvalidIdentifierError
from tests.interop import conversations, generated
from tests.interop.aviso_server import AvisoServer

pytestmark = pytest.mark.anyio

NOTIFICATIONS = 2000
FILTERS = 32


async def test_both_sides_select_the_same_notifications(server: AvisoServer, aviso_config: Path) -> None:
    source = random.Random(generated.SEED)
    places = list(generated.places(source, NOTIFICATIONS))
    filters = [*BY_HAND, *generated.filters(source, FILTERS)]
    theirs, ours = places[::2], places[1::2]
    with ThreadPoolExecutor(4) as posting:
        assert {status for status, _ in posting.map(lambda place: server.notify("area", place), theirs)} == {200}

    async with App("filters", config=aviso_config) as app:
        assert await app.notify_many([Notify("area", place) for place in ours]) == len(ours)
        selected = [await both(server, app, wanted) for wanted in filters]

    for wanted, (by_them, by_us) in zip(filters, selected, strict=True):
        only_one = [places[int(number)] for number in sorted(by_them ^ by_us)]
        assert only_one == [], f"seed {generated.SEED}, filter {wanted}"
    sizes = [len(by_us) for _, by_us in selected]
    assert sum(map(bool, sizes)) > len(filters) / 2, "the filters select too little to say anything"
    assert min(sizes) < NOTIFICATIONS / 2


@pytest.mark.parametrize(
    "wanted",
    [
        {"count": {"gte": 1, "lte": 2}},
        {"count": {}},
        {"count": {"near": 1}},
        {"count": {"in": []}},
        {"count": {"between": [1]}},
        {"count": {"between": [2, 1]}},
        {"count": {"between": [1, 2, 3]}},
        {"count": {"gt": "1"}},
        {"count": {"gt": 1.5}},
        {"count": {"gt": True}},
        {"count": {"gt": 51}},
        {"count": {"eq": 2**63}},
        {"level": {"gt": "1.5"}},
        {"level": {"lt": -1001}},
        {"kind": {"gt": "air"}},
        {"kind": {"eq": 1}},
        {"kind": {"in": ["air", "moon"]}},
        {"kind": "moon"},
        {"point": "1,2", "polygon": "(0,0,1,0,1,1,0,0)"},
        {"point": "1"},
        {"point": "1,2,3,4"},
        {"point": "90.1,0"},
        {"point": "0,-180.1"},
        {"polygon": "(0,0,1,0,0,0)"},
        {"polygon": "(0,0,1,0,1,1)"},
        {"polygon": "(0,0,1,0,1,1,0,0,1)"},
        {"polygon": "(0,0,1,0,1,nan,0,0)"},
        {"polygon": "(0,0,91,0,1,1,0,0)"},
    ],
    ids=str,
)
async def test_both_sides_refuse_a_filter_that_means_nothing(
    server: AvisoServer, aviso_config: Path, wanted: Mapping[str, Any]
) -> None:
    async with App("filters", config=aviso_config) as app:
        await app.notify("area", next(iter(generated.places(random.Random(0), 1))))
        status, _ = server.request(
            "POST", "/api/v1/replay", {"event_type": "area", "identifier": dict(wanted), "from_id": "1"}
        )
        with pytest.raises(InvalidIdentifierError):
            await app.session.replayer("area", wanted)

    assert status == 400


BY_HAND: list[dict[str, Any]] = [
    {},
    {"count": {"between": [0, 0]}},
    {"count": {"gte": -50}, "level": {"lte": 1000}},
    {"level": {"eq": 0}},
    {"level": {"in": [0, 1.5]}},
    {"level": "0"},
    {"level": "-0.0"},
    {"point": "0,0"},
    {"point": "90,180"},
    {"point": "-90,-180"},
    {"polygon": "(-90,-180,90,-180,90,180,-90,180,-90,-180)"},
    {"polygon": "(0,179,1,179,1,180,0,180,0,179)"},
    {"polygon": "(0,-180,1,-180,1,-179,0,-179,0,-180)"},
    {"polygon": "(89,-180,90,-180,90,180,89,180,89,-180)"},
    {"polygon": "(0,0,0,0,0,0,0,0)"},
    {"polygon": "(0,0,2,2,0,2,2,0,0,0)"},
]
"""The edges of the world, both spellings of zero, everything, a point, and edges that cross."""


async def both(server: AvisoServer, app: App, wanted: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    """Return the numbers of the notifications that each side selects."""
    by_them = {
        event["data"]["identifier"]["number"] for event in conversations.replay(server, "area", wanted, from_id="1")
    }
    by_us = {notification.identifier["number"] async for notification in app.replay("area", wanted)}
    return by_them, by_us
