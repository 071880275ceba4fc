"""A package of somebody else's with one router: found by its entry point, checked, and at work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aviso_workers.cli.targets import ConfigSource, find_app
from aviso_workers.testing import harness

pytestmark = pytest.mark.anyio

MODULE = """
from collections.abc import AsyncIterator

from msgspec import Struct

from aviso_workers import App, Notification, Router


class Settings(Struct, frozen=True):
    unit: str = "fields"


class Unit:
    def __init__(self, name: str) -> None:
        self.name = name


router = Router("tally", settings=Settings)
totals = router.table("totals", dict[str, int], default={})


@router.resource
async def unit(app: App) -> AsyncIterator[Unit]:
    yield Unit(app.settings(router).unit)


@router.agent("mars")
async def tally(notification: Notification, unit: Unit) -> None:
    kind = notification.identifier["class"]
    await totals.update(unit.name, lambda known: known | {kind: known.get(kind, 0) + 1})


@router.every("1h", singleton=True)
async def forget() -> None:
    await totals.delete(Settings().unit)
"""
ENTRY_POINTS = """
[aviso_workers.agents]
tally = aviso_tally:router
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package, as pip would have installed it."""
    (tmp_path / "aviso_tally.py").write_text(MODULE)
    metadata = tmp_path / "aviso_tally-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: aviso-tally\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("aviso_tally")


async def test_it_runs_with_nothing_but_its_name(write_config: Callable[..., Path]) -> None:
    app = find_app(None, agent="tally", config=ConfigSource(write_config("nats://127.0.0.1:1")))
    assert app.mistakes() == []
    totals: Any = app.tables["totals"]
    async with harness(app) as t:
        for step in range(3):
            await t.notify("mars", {"class": "od", "step": step})
        await t.settle()
        assert await totals.get("fields") == {"od": 3}
        await t.advance(3600)
        assert await totals.get("fields") == {}
