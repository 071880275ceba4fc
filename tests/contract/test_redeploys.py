"""A new version of an app takes the place of an old one, and what is stored keeps the meaning with which it was stored.

Each row of the table in docs/deployment.md has a test here, or names where it has one. A test runs twice on either
backend: with the old version stopped before the new one starts, and with both side by side for a while.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import anyio
import msgspec
import pytest
from anyio.abc import TaskGroup

from aviso_workers import App, Notification, Window, Windowing
from aviso_workers.engine import timer_loops
from aviso_workers.engine.handlers import windowed
from aviso_workers.events import AgentDisturbed, Event, Settled, WindowsResized
from aviso_workers.testing import Harness, harness
from tests.contract.settings import mars

pytestmark = pytest.mark.anyio

F = TypeVar("F", bound=Callable[..., Any])
E = TypeVar("E")

ROOT = Path(__file__).parents[2]
SIX = datetime(2026, 11, 20, 6, tzinfo=UTC)
STEPS = itertools.count()

ELSEWHERE = {
    "`where` of an agent": "tests/contract/test_shared_filters.py",
    "`ack_wait` of an agent": "tests/contract/test_shared_filters.py",
}
"""Rows of the table that another module tests."""
HERE: set[str] = set()
"""Rows that a test of this module is of."""


def row(name: str) -> Callable[[F], F]:
    """Say of which row of the table in docs/deployment.md a test is."""

    def note(test: F) -> F:
        HERE.add(name)
        return test

    return note


def test_each_row_of_the_table_has_a_test() -> None:
    section = (ROOT / "docs" / "deployment.md").read_text().split("\n## What a new version changes\n")[1]
    table = section.split("\n## ")[0]
    rows = set(re.findall(r"^\| (?!declaration|---)(.*?) \|", table, re.MULTILINE))
    assert rows == {*HERE, *ELSEWHERE}
    assert all((ROOT / module).is_file() for module in ELSEWHERE.values())


class Deploy:
    """Workers of versions of one app, which share its streams."""

    def __init__(self, t: Harness, tasks: TaskGroup, *, rolling: bool) -> None:
        self.t = t
        self.rolling = rolling
        """Whether the old version runs beside the new one for a while."""
        self.events: list[tuple[App, Event]] = []
        """What the workers of each version have stated."""
        self._tasks = tasks
        self._stops: dict[int, tuple[anyio.Event, anyio.Event]] = {}

    async def start(self, version: App) -> None:
        """Start a worker of this version; return when its agents read, or have said why they do not."""
        stop, begun, ended = anyio.Event(), anyio.Event(), anyio.Event()
        version.configure(self.t.app.config, opening=self.t.app._opening)
        version.events.listen(lambda event: self.events.append((version, event)))

        async def run() -> None:
            async with version:
                await version.work(stop, begun=begun)
            ended.set()

        self._stops[id(version)] = stop, ended
        self._tasks.start_soon(run)
        await self.until(begun.is_set)

    async def stop(self, version: App) -> None:
        stop, ended = self._stops.pop(id(version))
        stop.set()
        await self.until(ended.is_set)

    async def replace(self, old: App, new: App) -> None:
        """Start the new version, after the old one was stopped unless the deploy is rolling."""
        if not self.rolling:
            await self.stop(old)
        await self.start(new)

    async def finish(self, old: App) -> None:
        """Stop the old version if it still runs."""
        if self.rolling:
            await self.stop(old)

    async def stop_all(self, *versions: App) -> None:
        for version in versions:
            if id(version) in self._stops:
                await self.stop(version)

    async def until(self, condition: Callable[[], bool], *, seconds: float = 60.0) -> None:
        passed = 0.0
        while not condition():
            assert passed < seconds, "it did not come about"
            await self.t.advance(0.05)
            passed += 0.05

    def stated(self, version: App, kind: type[E]) -> list[E]:
        """What the workers of a version have stated of a kind."""
        return [event for by, event in self.events if by is version and isinstance(event, kind)]

    async def until_handled(self, agent: str) -> None:
        """Wait until an agent has nothing left to handle."""
        admin = self.t.app.session.admin
        while (info := await admin.consumer_info("MARS", f"contract__{agent}")).num_pending or info.num_ack_pending:
            await self.t.advance(0.05)


@pytest.fixture(params=["stopped", "rolling"])
async def deploy(
    request: pytest.FixtureRequest, app: App, url: str | None, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Deploy]:
    monkeypatch.setattr(windowed, "CHECK_SECONDS", 0.1)
    monkeypatch.setattr(timer_loops, "CHECK_SECONDS", 0.1)
    async with harness(app, server=url) as t:
        await t.notify("mars", mars(step=next(STEPS), **{"class": "xx"}), {"minute": -600})  # makes the stream
        async with anyio.create_task_group() as tasks:
            yield Deploy(t, tasks, rolling=request.param == "rolling")
            tasks.cancel_scope.cancel()


class Hours:
    """A version of the app with an agent of windows, and what it has published of them."""

    def __init__(self, published: dict[str, list[int]], **windowing: Any) -> None:
        self.app = App("contract")
        window: Windowing[int, Any] = Windowing(
            **{"size": "1h", "fold": counted, "initial": 0, "time": happened, **windowing}
        )

        @self.app.agent("mars", where={"class": "od"}, start="new", window=window)
        async def sums(window: Window[int]) -> None:
            label = f"{window.key}{window.start:%H:%M}-{window.end:%H:%M}"
            published.setdefault(label, []).append(window.value)

        self.sums = sums


def counted(count: int, notification: Notification[Any]) -> int:
    return count + 1


def happened(notification: Notification[Any]) -> datetime:
    return SIX + timedelta(minutes=notification.payload["minute"])


async def notify(deploy: Deploy, minutes: range) -> None:
    for minute in minutes:
        await deploy.t.notify("mars", mars(step=next(STEPS), **{"class": "od"}), {"minute": minute})


@row("`size`, `every` of a `Windowing`")
@pytest.mark.parametrize(
    ("old", "new", "published"),
    [
        pytest.param(
            {"size": "1h"},
            {"size": "10m"},
            {"06:00-07:00": 12, "07:00-07:10": 2, "07:10-07:20": 2, "07:20-07:30": 2},
            id="shorter",
        ),
        pytest.param(
            {"size": "10m"},
            {"size": "1h"},
            {**{f"06:{minute}0-06:{minute + 1}0": 2 for minute in range(5)}, "06:50-07:00": 2, "07:00-08:00": 12},
            id="longer",
        ),
        pytest.param(
            {"size": "1h"},
            {"size": "1h", "every": "30m"},
            {"06:00-07:00": 12, "07:00-08:00": 12},
            id="hopping",
        ),
    ],
)
async def test_windows_keep_the_size_that_they_were_opened_with(
    deploy: Deploy, old: dict[str, str], new: dict[str, str], published: dict[str, int]
) -> None:
    found: dict[str, list[int]] = {}
    before, after = Hours(found, **old), Hours(found, **new)
    await deploy.start(before.app)
    await notify(deploy, range(0, 30, 5))
    await deploy.until_handled("sums")
    await deploy.replace(before.app, after.app)
    await notify(deploy, range(30, 50, 5))
    await deploy.until_handled("sums")
    await deploy.finish(before.app)
    await deploy.until(lambda: deploy.stated(after.app, WindowsResized) != [])
    await notify(deploy, range(50, 165, 5))
    await deploy.until_handled("sums")
    await deploy.until(lambda: published.keys() <= found.keys())
    expected = {label: [value] for label, value in published.items()}
    assert {label: values for label, values in found.items() if label in published} == expected
    [told] = deploy.stated(after.app, WindowsResized)
    assert datetime.fromtimestamp(told.since, UTC) == SIX + timedelta(hours=1)
    await deploy.stop_all(after.app)


class Count(msgspec.Struct, frozen=True):
    n: int = 0


class CountAndLast(msgspec.Struct, frozen=True):
    n: int = 0
    last: float = 0.0


class Renamed(msgspec.Struct, frozen=True):
    number: int = 0


def into_count(count: Count, notification: Notification[Any]) -> Count:
    return Count(count.n + 1)


def into_count_and_last(count: CountAndLast, notification: Notification[Any]) -> CountAndLast:
    return CountAndLast(count.n + 1, max(count.last, notification.payload["minute"]))


def into_renamed(count: Renamed, notification: Notification[Any]) -> Renamed:
    return Renamed(count.number + 1)


def of_values(published: dict[str, list[Any]], value: type[Any], fold: Callable[..., Any]) -> App:
    """A version of the app whose windows have values of this type."""
    app = App("contract")

    async def sums(window: Any) -> None:
        published.setdefault(f"{window.start:%H:%M}", []).append(window.value)

    sums.__annotations__["window"] = Window[value]
    window: Windowing[Any, Any] = Windowing(size="1h", fold=fold, initial=value(), time=happened)
    app.agent("mars", name="sums", where={"class": "od"}, start="new", window=window)(sums)
    return app


@row("the type of a window's values")
@pytest.mark.parametrize(
    ("value", "fold"),
    [
        pytest.param(int, counted, id="another"),
        pytest.param(Renamed, into_renamed, id="renamed"),
    ],
)
async def test_values_that_the_new_type_cannot_have_are_left_to_the_old_version(
    deploy: Deploy, value: type[Any], fold: Callable[..., Any]
) -> None:
    found: dict[str, list[Any]] = {}
    before, after = of_values(found, Count, into_count), of_values(found, value, fold)
    await deploy.start(before)
    await notify(deploy, range(0, 30, 5))
    await deploy.until_handled("sums")
    await deploy.replace(before, after)
    [error, *_] = [str(disturbed.error) for disturbed in deploy.stated(after, AgentDisturbed)]
    assert "what windows of agent 'sums' hold is not a" in error
    assert "let the version that opened them close them, or give the agent another name" in error
    await notify(deploy, range(30, 65, 5))
    if not deploy.rolling:
        await deploy.t.advance(1.0)
        assert not deploy.stated(after, Settled), "what comes waits"
        await deploy.start(before)
    await deploy.until_handled("sums")
    await deploy.until(lambda: found == {"06:00": [Count(12)]})
    await deploy.stop_all(before, after)


@row("the type of a window's values")
async def test_a_type_that_has_all_values_takes_them_over(deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, list[Any]] = {}
    before, after = of_values(found, Count, into_count), of_values(found, CountAndLast, into_count_and_last)
    await deploy.start(before)
    await notify(deploy, range(0, 30, 5))
    await deploy.until_handled("sums")
    await deploy.replace(before, after)
    await notify(deploy, range(30, 65, 5))
    await deploy.until_handled("sums")
    await deploy.until(lambda: found == {"06:00": [CountAndLast(12, 55)]})
    await deploy.finish(before)
    await deploy.stop_all(after)


@row("the type of a window's values")
async def test_the_version_that_stays_counts_in_the_end(deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windowed, "GIVEN_WAY_SECONDS", 0.5)
    found: dict[str, list[Any]] = {}
    stays, goes = of_values(found, CountAndLast, into_count_and_last), of_values(found, Count, into_count)
    await deploy.start(stays)
    await deploy.replace(stays, goes)
    await notify(deploy, range(0, 30, 5))
    await deploy.until_handled("sums")
    await deploy.stop(goes)
    if not deploy.rolling:
        await deploy.start(stays)
    await notify(deploy, range(30, 65, 5))
    await deploy.until_handled("sums")
    await deploy.until(lambda: found == {"06:00": [CountAndLast(12, 55)]})
    await deploy.stop_all(stays)
