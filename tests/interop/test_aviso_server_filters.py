"""Filters by value, by place and both select the same of 2,000 notifications on either side."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nats
import pytest

from aviso_workers import App, Notify
from aviso_workers.errors import InvalidIdentifierError
from aviso_workers.server import NatsServer
from tests.interop import conversations, generated, programs
from tests.interop.aviso_server import AvisoServer

pytestmark = pytest.mark.anyio

NOTIFICATIONS = 2000
CLOUDS = 200
CLOUD = """
  cloud:
    topic: { base: cloud, key_order: [number] }
    identifier:
      number: { type: IntHandler, required: false }
      point_cloud: { type: PointCloudHandler, required: false }
"""
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


async def test_both_sides_store_and_find_the_same_point_clouds(
    start_aviso_server: Callable[..., AvisoServer], aviso_config: Path, nats_server: NatsServer
) -> None:
    """Of the newest version: 0.7.1 does not know them, and does not start with them in its file."""
    add_clouds(aviso_config)
    server = start_aviso_server(programs.AVISO_SERVERS[-1], config=aviso_config)
    source = random.Random(generated.SEED)
    clouds = list(generated.clouds(source, CLOUDS))
    async with App("filters", config=aviso_config) as app:
        for cloud in clouds:
            status, answer = server.notify("cloud", cloud)
            assert status == 200, (cloud, answer)
            await app.notify("cloud", {**cloud, "number": cloud["number"] + CLOUDS})
        for wanted in generated.areas(source, FILTERS):
            by_them, by_us = await both(server, app, wanted, event_type="cloud")
            assert by_them == by_us, f"seed {generated.SEED}, filter {wanted}"
        stored = [message async for message in headers_of(nats_server, "CLOUD", 2 * CLOUDS)]

    for theirs, ours in zip(stored[::2], stored[1::2], strict=True):
        assert theirs == {name: ours[name] for name in theirs}


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


def add_clouds(config: Path) -> None:
    config.write_text(config.read_text() + CLOUD)


async def headers_of(server: NatsServer, stream: str, count: int) -> AsyncIterator[Mapping[str, str]]:
    """Yield the headers of the first messages of a stream."""
    client = await nats.connect(server.url)
    try:
        for sequence in range(1, count + 1):
            yield (await client.jetstream().get_msg(stream, sequence)).headers or {}
    finally:
        await client.close()


async def both(
    server: AvisoServer, app: App, wanted: Mapping[str, Any], *, event_type: str = "area"
) -> tuple[set[str], set[str]]:
    """Return the numbers of the notifications that each side selects."""
    by_them = {
        event["data"]["identifier"]["number"] for event in conversations.replay(server, event_type, wanted, from_id="1")
    }
    by_us = {notification.identifier["number"] async for notification in app.replay(event_type, wanted)}
    return by_them, by_us
