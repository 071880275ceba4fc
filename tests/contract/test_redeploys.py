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

from aviso_workers import App, Batch, Batching, Notification, Reject, RetryPolicy, Tick, Window, Windowing
from aviso_workers.aviso.literals import Duration
from aviso_workers.aviso.schema import StoragePolicy
from aviso_workers.config import Config
from aviso_workers.declare import timers
from aviso_workers.declare.verdicts import OtherVersionError
from aviso_workers.engine import acknowledging, leases
from aviso_workers.engine.flow import Isolation
from aviso_workers.errors import InvalidNotificationError, RefusedError, UndecodableError
from aviso_workers.events import (
    AgentDisturbed,
    ConsumerDiffers,
    Event,
    Settled,
    StreamProvisioned,
    TimerRescheduled,
    WindowFunctionsChanged,
)
from aviso_workers.features import windows
from aviso_workers.ops.dead_letters import Selection, StoredDeadLetters
from aviso_workers.state import window_records
from aviso_workers.state.dead_letter_records import DeadLetter
from aviso_workers.state.window_records import PROGRESS, read_progress
from aviso_workers.testing import Harness, harness
from tests.contract.settings import mars
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

F = TypeVar("F", bound=Callable[..., Any])
E = TypeVar("E")

ROOT = Path(__file__).parents[2]
SIX = datetime(2026, 11, 20, 6, tzinfo=UTC)
STEPS = itertools.count()

ELSEWHERE = {
    "`where` of an agent": "tests/contract/test_shared_filters.py",
    "the name of an agent, also by the prefix of its router": "tests/contract/test_renamed_agents.py",
    "the name of the app, the app that has an agent": "tests/contract/test_renamed_agents.py",
    "the function or the module of an agent": "tests/contract/test_renamed_agents.py",
    "`key_order`, the type or format of a rule of an event type": "tests/contract/test_key_orders.py",
    "`topic.base` of an event type": "tests/contract/test_renamed_agents.py",
    "`ack_wait` of an agent": "tests/contract/test_shared_filters.py",
    "`limits` of an agent": "tests/contract/test_limits.py",
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

    async def start(self, version: App, *, config: Config | None = None) -> None:
        """Start a worker of this version; return when its agents read, or have said why they do not."""
        stop, begun, ended = anyio.Event(), anyio.Event(), anyio.Event()
        version.configure(config or self.t.app.config, opening=self.t.app._opening)
        version.events.listen(lambda event: self.events.append((version, event)))

        async def run() -> None:
            async with version:
                await version._work(stop, begun=begun)
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
    monkeypatch.setattr(windows, "CHECK_SECONDS", 0.1)
    monkeypatch.setattr(leases, "CHECK_SECONDS", 0.1)
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


WINDOWS = "KV_contract__windows__sums"


async def refused(deploy: Deploy, version: App, told: str) -> None:
    """Wait until a version was refused again and again, each time with this text."""
    before = len(deploy.stated(version, AgentDisturbed))
    await deploy.until(lambda: len(deploy.stated(version, AgentDisturbed)) > before + 2)
    for disturbed in deploy.stated(version, AgentDisturbed)[before:]:
        assert isinstance(disturbed.error, RefusedError)
        assert told in str(disturbed.error)


@row("`size`, `every` of a `Windowing`")
@pytest.mark.parametrize(
    ("new", "told"),
    [
        pytest.param({"size": "10m"}, "size 10m and every 10m", id="shorter"),
        pytest.param({"size": "1d"}, "size 1d and every 1d", id="longer"),
        pytest.param({"every": "30m"}, "size 1h and every 30m", id="hopping"),
    ],
)
async def test_another_size_is_left_to_the_version_that_has_the_stored_one(
    deploy: Deploy, new: dict[str, str], told: str
) -> None:
    found: dict[str, list[int]] = {}
    before, after = Hours(found), Hours(found, **new)
    await deploy.start(before.app)
    await notify(deploy, range(0, 30, 5))
    await deploy.until_handled("sums")
    await deploy.replace(before.app, after.app)
    stored = "agent 'sums' has windows of size 1h and every 1h, and the code states"
    await refused(deploy, after.app, f"{stored} {told}: take the former ones back, or give the agent another name")
    open_windows = await after.app.open_windows(after.sums)
    assert [(window.start, window.end, window.value) for window in open_windows] == [
        (SIX, SIX + timedelta(hours=1), 6)
    ], "they are read with the stored size"
    await notify(deploy, range(30, 65, 5))
    if not deploy.rolling:
        await deploy.t.advance(1.0)
        assert not deploy.stated(after.app, Settled), "what comes waits"
        await deploy.start(before.app)
    await deploy.until_handled("sums")
    await deploy.until(lambda: found == {"06:00-07:00": [12]})
    await deploy.stop_all(before.app, after.app)


@row("`size`, `every` of a `Windowing`")
async def test_windows_that_are_removed_begin_anew_with_another_size(deploy: Deploy) -> None:
    found: dict[str, list[int]] = {}
    before, after = Hours(found), Hours(found, size="10m")
    await deploy.start(before.app)
    await notify(deploy, range(0, 30, 5))
    await deploy.until_handled("sums")
    await deploy.replace(before.app, after.app)
    await refused(deploy, after.app, "size 10m")
    await deploy.finish(before.app)
    admin = deploy.t.app.session.admin
    await admin.reset_consumer("MARS", "contract__sums", sequence=1)
    await refused(deploy, after.app, "size 10m")
    await admin.delete_stream(WINDOWS)
    await deploy.until_handled("sums")
    await notify(deploy, range(30, 45, 5))
    await deploy.until(
        lambda: found == {"06:00-06:10": [2], "06:10-06:20": [2], "06:20-06:30": [2], "06:30-06:40": [2]}
    )
    await deploy.start(before.app)
    await refused(deploy, before.app, "has windows of size 10m and every 10m, and the code states size 1h and every 1h")
    await deploy.stop_all(before.app, after.app)


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

    window_of: Any = Window
    sums.__annotations__["window"] = window_of[value]
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
    await deploy.until(lambda: len(deploy.stated(after, AgentDisturbed)) > 2)
    for disturbed in deploy.stated(after, AgentDisturbed):
        assert "what windows of agent 'sums' hold is not a" in str(disturbed.error)
        assert "let the version that opened them close them, or give the agent another name" in str(disturbed.error)
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
    monkeypatch.setattr(windows, "GIVEN_WAY_SECONDS", 0.5)
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


@row("`lateness`, `idle` of a `Windowing`")
async def test_the_version_that_closes_windows_waits_as_it_says(deploy: Deploy) -> None:
    found: dict[str, list[int]] = {}
    before, after = Hours(found, lateness="5h"), Hours(found, lateness="10m")
    await deploy.start(before.app)
    await notify(deploy, range(50, 80, 5))
    await deploy.until_handled("sums")
    assert not found
    await deploy.replace(before.app, after.app)
    await deploy.finish(before.app)
    await deploy.until(lambda: found == {"06:00-07:00": [2]})
    await deploy.stop_all(after.app)


@row("`fold`, `initial`, `key`, `time` of a `Windowing`")
async def test_what_an_open_window_has_counted_stays_in_it(deploy: Deploy) -> None:
    found: dict[str, list[int]] = {}
    before = Hours(found)
    after = Hours(
        found, fold=lambda count, notification: count + 100, key=lambda notification: notification.identifier["class"]
    )
    await deploy.start(before.app)
    await notify(deploy, range(0, 30, 5))
    await deploy.until_handled("sums")
    bucket = await deploy.t.app.session.backend.key_value(window_records.bucket_of("contract", "sums"))
    while not read_progress(await bucket.get(PROGRESS)).functions:  # which who closes windows records
        await deploy.t.advance(0.05)
    await deploy.replace(before.app, after.app)
    await deploy.finish(before.app)
    await notify(deploy, range(30, 65, 5))
    await deploy.until_handled("sums")
    await deploy.until(lambda: found == {"06:00-07:00": [6], "od06:00-07:00": [600]})
    await deploy.until(lambda: bool(deploy.stated(after.app, WindowFunctionsChanged)))
    assert [told.functions for told in deploy.stated(after.app, WindowFunctionsChanged)] == [("fold", "key")]
    assert deploy.stated(before.app, WindowFunctionsChanged) == []
    await deploy.stop_all(after.app)


def of_agent(handled: list[tuple[str, int]], version: str, fails: int = 0, **policy: Any) -> App:
    """A version of the app whose agent `index` says so where it handles a step, and fails so often for each first."""
    app = App("contract")

    @app.agent("mars", where={"class": "od"}, **{"start": "new", **policy})
    async def index(notification: Notification[Any]) -> None:
        handled.append((version, int(notification.identifier["step"])))
        if sum(step == handled[-1][1] for _, step in handled) <= fails:
            raise RuntimeError("not yet")

    return app


async def publish(deploy: Deploy, *steps: int) -> None:
    for step in steps:
        await deploy.t.notify("mars", mars(step=step, **{"class": "od"}), {"minute": 0})


@row("`retry` of an agent")
async def test_attempts_of_the_old_version_count_by_the_policy_of_the_new_one(deploy: Deploy) -> None:
    handled: list[tuple[str, int]] = []
    before = of_agent(handled, "old", fails=9, retry=RetryPolicy(first=1.0, factor=1, jitter=0, attempts=9))
    after = of_agent(handled, "new", fails=9, retry=RetryPolicy(first=0.1, factor=1, jitter=0, attempts=3))
    await deploy.start(before)
    await publish(deploy, 1)
    await deploy.until(lambda: len(handled) == 2)
    await deploy.replace(before, after)
    await deploy.finish(before)
    await deploy.until(lambda: deploy.t.dead_letters != [])
    assert [step for _, step in handled] == [1, 1, 1]
    await deploy.stop_all(after)


@row("`concurrency`, `timeout`, `order_by` of an agent")
async def test_settings_of_a_worker_hold_for_what_it_handles(deploy: Deploy) -> None:
    handled: list[tuple[str, int]] = []
    before = of_agent(handled, "old", concurrency=4)
    after = of_agent(handled, "new", concurrency=2, timeout=60, order_by=["class"])
    await deploy.start(before)
    await publish(deploy, *range(10))
    await deploy.until_handled("index")
    await deploy.replace(before, after)
    await publish(deploy, *range(10, 20))
    await deploy.until_handled("index")
    await deploy.finish(before)
    await publish(deploy, *range(20, 30))
    await deploy.until_handled("index")
    assert sorted(step for _, step in handled) == [*range(30)]
    by_new = [step for version, step in handled if version == "new"]
    assert by_new == sorted(by_new)
    await deploy.stop_all(after)


@row("`singleton` of an agent")
async def test_a_singleton_goes_on_where_the_agent_was_when_its_workers_had_stopped(deploy: Deploy) -> None:
    handled: list[tuple[str, int]] = []
    before, alone, after = (
        of_agent(handled, version, singleton=version == "alone") for version in ("old", "alone", "new")
    )
    for old, new, steps in ((None, before, (1, 2)), (before, alone, (3, 4)), (alone, after, (5, 6))):
        if old is not None:
            await deploy.stop(old)
        await deploy.start(new)
        await publish(deploy, *steps)
        await deploy.until_handled("index")
    assert sorted(handled) == [("alone", 3), ("alone", 4), ("new", 5), ("new", 6), ("old", 1), ("old", 2)]
    await deploy.stop_all(after)


@row("`start` of an agent")
async def test_an_agent_that_has_run_goes_on_where_it_is(deploy: Deploy) -> None:
    handled: list[tuple[str, int]] = []
    before, after = of_agent(handled, "old"), of_agent(handled, "new", start="all")
    await deploy.start(before)
    await publish(deploy, 1)
    await deploy.until_handled("index")
    await deploy.replace(before, after)
    await publish(deploy, 2)
    await deploy.until_handled("index")
    assert sorted(step for _, step in handled) == [1, 2]
    [told, *_] = deploy.stated(after, ConsumerDiffers)
    assert told.differences == ("start: new -> all",)
    await deploy.finish(before)
    await deploy.stop_all(after)


@row("the type of a payload, `decode`, the kind of function of an agent")
async def test_what_waits_is_read_by_the_version_that_handles_it(deploy: Deploy) -> None:
    handled: list[tuple[str, int]] = []

    class Minute(msgspec.Struct):
        minute: int

    after, gathered = App("contract"), list[int]()

    async def index(batch: Any) -> None:
        gathered.extend(notification.payload.minute for notification in batch)

    index.__annotations__["batch"] = Batch[Minute]
    after.agent("mars", where={"class": "od"}, start="new", batch=Batching(size=2, within=0.1))(index)
    before = of_agent(handled, "old", fails=99, retry=RetryPolicy(first=2.0, jitter=0))
    await deploy.start(before)
    await publish(deploy, 1)
    await deploy.t.notify("mars", mars(step=2, **{"class": "od"}), "no struct")
    await deploy.until(lambda: len(handled) >= 2)
    await deploy.replace(before, after)
    await deploy.finish(before)
    await deploy.until(lambda: gathered == [0] and deploy.t.dead_letters != [])
    assert [dead_letter.reason for dead_letter in deploy.t.dead_letters] == ["undecodable"]
    await deploy.stop_all(after)


@row("the type of a table's values")
async def test_a_value_is_read_by_the_type_of_the_version_that_asks(deploy: Deploy) -> None:
    before, after = App("contract"), App("contract")
    numbers: Any = before.table("t", int)
    counts: Any = after.table("t", Count | int)
    other: Any = (third := App("contract")).table("t", Count)
    await deploy.start(before)
    await numbers.put("a", 3)
    await deploy.replace(before, after)
    assert await counts.get("a") == 3
    await counts.put("b", Count(4))
    if deploy.rolling:
        with pytest.raises(
            UndecodableError, match=r"key 'b': what is stored does not fit: .*give the table another name"
        ):
            await numbers.get("b")
    await deploy.finish(before)
    await deploy.start(third)
    with pytest.raises(UndecodableError, match="key 'a': what is stored does not fit"):
        await other.update("a", lambda found: found)
    assert await counts.get("a") == 3, "nothing was changed"
    await other.put("a", Count(3))
    assert list((await other.items()).items()) == [("b", Count(4)), ("a", Count(3))]
    await deploy.stop_all(after, third)


@row("`history` of a table")
async def test_a_table_keeps_the_longest_history_that_a_version_wants(deploy: Deploy) -> None:
    before, after, back = App("contract"), App("contract"), App("contract")
    short, long = before.table("t", int), after.table("t", int, history=3)
    shorter = back.table("t", int)
    await deploy.start(before)
    await short.put("a", 1)
    await deploy.replace(before, after)
    await deploy.until(lambda: deploy.stated(after, StreamProvisioned) != [])
    [told] = deploy.stated(after, StreamProvisioned)
    assert (told.stream, told.action) == ("KV_contract__table__t", "updated")
    assert "max_msgs_per_subject: 1 -> 3" in told.differences
    await long.put("a", 2)
    await deploy.finish(before)
    await long.put("a", 3)
    await deploy.replace(after, back)
    await shorter.put("a", 4)
    await deploy.finish(after)
    assert [change.value for change in await shorter.history("a")] == [2, 3, 4]
    await deploy.stop_all(back)


@row("`default`, `cached` of a table")
async def test_nothing_is_stored_of_a_default(deploy: Deploy) -> None:
    before, after = App("contract"), App("contract")
    plain, cached = before.table("t", int, default=1), after.table("t", int, default=2, cached=True)
    await deploy.start(before)
    await plain.update("a", lambda value: value + 10)
    await deploy.replace(before, after)
    assert (await cached.get("a"), await cached.get("b")) == (11, 2)
    assert await cached.update("b", lambda value: value + 10) == 12
    if deploy.rolling:
        assert await plain.get("b") == 12
    await deploy.finish(before)
    await deploy.stop_all(after)


@row("the name of a table, counter or timer, also by that of the app")
async def test_another_name_begins_with_nothing(deploy: Deploy) -> None:
    before, after, back = App("contract"), App("contract"), App("contract")
    old, new, again = before.counter("jobs"), after.counter("tasks"), back.counter("jobs")
    await deploy.start(before)
    await old.add("a", 3)
    await deploy.replace(before, after)
    assert await new.add("a", 1) == 1
    await deploy.finish(before)
    await deploy.replace(after, back)
    assert await again.get("a") == 3
    await deploy.finish(after)
    await deploy.stop_all(back)


def of_timer(ticks: list[tuple[str, datetime]], version: str, interval: str, **stated: Any) -> App:
    app = App("contract")

    @app.every(interval, **{"singleton": True, "catch_up": True, **stated})
    async def look(tick: Tick) -> None:
        ticks.append((version, tick.time))

    return app


@row("the schedule, `catch_up` of a timer")
async def test_a_new_schedule_begins_when_its_first_worker_leads(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timers, "LATE_SECONDS", 0.5)
    ticks: list[tuple[str, datetime]] = []
    before, after = of_timer(ticks, "old", "1000d"), of_timer(ticks, "new", "1s")
    await deploy.start(before)
    bucket = await deploy.t.app.key_value("contract__timers")
    claim: list[Any] = []
    while not claim:
        await deploy.t.advance(0.1)
        claim = await bucket.keys()
    await deploy.t.advance(4.0)
    began = datetime.fromtimestamp(deploy.t.clock.time_ns() / 1e9, UTC)
    await deploy.replace(before, after)
    await deploy.finish(before)
    await deploy.until(lambda: len(ticks) == 3)
    assert {version for version, _ in ticks} == {"new"}
    assert min(time for _, time in ticks) > began - timedelta(seconds=1), (
        "what was no tick of the old one is not missed"
    )
    assert len({time for _, time in ticks}) == 3, "a tick was run twice"
    [told] = deploy.stated(after, TimerRescheduled)
    assert (told.before, told.schedule) == ("every 86400000s", "every 1s")
    await deploy.stop_all(after)


@row("`singleton` of a timer")
async def test_a_tick_is_run_once_as_soon_as_no_worker_runs_its_own(deploy: Deploy) -> None:
    ticks: list[tuple[str, datetime]] = []
    before, after = of_timer(ticks, "old", "1s", singleton=False, catch_up=False), of_timer(ticks, "new", "1s")
    await deploy.start(before)
    await deploy.until(lambda: ticks != [])
    await deploy.replace(before, after)
    await deploy.finish(before)
    ticks.clear()
    await deploy.until(lambda: len(ticks) == 3)
    assert len({time for _, time in ticks}) == 3
    await deploy.stop_all(after)


@row("`storage_policy` of an event type")
async def test_a_stream_takes_a_new_policy_and_loses_nothing_by_it(deploy: Deploy) -> None:
    def of_policy(**policy: Any) -> Config:
        schema = dict(deploy.t.app.config.notification_schema)
        schema["mars"] = msgspec.structs.replace(schema["mars"], storage_policy=StoragePolicy(**policy))
        return msgspec.structs.replace(deploy.t.app.config, notification_schema=schema)

    before, longer, smaller = (of_agent([], version) for version in ("before", "longer", "smaller"))
    await deploy.start(before)
    await publish(deploy, 1, 2, 3)
    stored = (await deploy.t.app.session.admin.stream_info("MARS")).messages
    for old, new, policy, changed in (
        (before, longer, {"retention_time": Duration(60 * 86_400)}, "max_age"),
        (longer, smaller, {"max_messages": 1}, "max_msgs"),
    ):
        if not deploy.rolling:
            await deploy.stop(old)
        await deploy.start(new, config=of_policy(**policy))
        [told, *_] = [each for each in deploy.stated(new, StreamProvisioned) if each.stream == "MARS"]
        assert any(each.startswith(changed) for each in told.differences), told
        assert (told.action, bool(told.refused)) == (("kept", True) if new is smaller else ("updated", False))
        await deploy.finish(old)
    assert (await deploy.t.app.session.admin.stream_info("MARS")).messages == stored
    await deploy.stop_all(smaller)


@row("other options of rules, such as `values` and `range`, and `payload` of an event type")
async def test_what_is_stored_and_refused_by_new_rules_is_a_dead_letter(deploy: Deploy) -> None:
    handled: list[tuple[str, int]] = []
    before = of_agent(handled, "old", fails=99, retry=RetryPolicy(first=1.0, factor=1, jitter=0, attempts=99))
    after = of_agent(handled, "new")
    await deploy.start(before)
    await publish(deploy, 500)
    await deploy.until(lambda: len(handled) > 0)
    if not deploy.rolling:
        await deploy.stop(before)
    schema = dict(deploy.t.app.config.notification_schema)
    rules = {
        **schema["mars"].identifier,
        "step": msgspec.structs.replace(schema["mars"].identifier["step"], range=(0, 9)),
    }
    schema["mars"] = msgspec.structs.replace(schema["mars"], identifier=rules)
    await deploy.start(after, config=msgspec.structs.replace(deploy.t.app.config, notification_schema=schema))
    await deploy.finish(before)
    await deploy.until_handled("index")
    assert [dead_letter.reason for dead_letter in deploy.t.dead_letters] == ["undecodable"]
    assert "'step' must be within [0, 9], not 500" in deploy.t.dead_letters[0].error
    with pytest.raises(InvalidNotificationError, match="step"):
        await after.notify("mars", mars(step=500), {})
    await deploy.stop_all(after)


class TestADeadLetterOfAWindow:
    @row("`size`, `every` of a `Windowing`")
    async def test_of_another_size_stays_one(self, deploy: Deploy) -> None:
        found: dict[str, list[int]] = {}
        before, after = failing(), Hours(found, size="10m").app
        [dead_letter] = await self.stored(deploy, before)
        await deploy.stop(before)
        await deploy.t.app.session.admin.delete_stream(WINDOWS)
        with pytest.raises(RefusedError, match="a window of agent sums has another size"):
            await self.retry(deploy, dead_letter)
        await deploy.start(after)
        with pytest.raises(RefusedError, match="a window of agent sums has another size"):
            await self.retry(deploy, dead_letter)
        assert len(deploy.t.dead_letters) == 1
        await deploy.stop_all(after)

    @row("the type of a window's values")
    async def test_of_another_type_stops_no_agent(self, deploy: Deploy) -> None:
        before, after = failing(), of_values({}, Count, into_count)
        [dead_letter] = await self.stored(deploy, before)
        await deploy.stop(before)
        bucket = await deploy.t.app.key_value("contract__windows__sums")
        await bucket.delete("=")  # as a key is forgotten that has no open window
        await deploy.start(after)
        with pytest.raises(
            RefusedError, match="a value of another type, than its windows have now: retry its dead letter while"
        ):
            await self.retry(deploy, dead_letter)
        assert deploy.stated(after, AgentDisturbed) == []
        await deploy.stop_all(after)

    async def stored(self, deploy: Deploy, version: App) -> list[DeadLetter]:
        """The dead letters after a window that failed in this version."""
        await deploy.start(version)
        await notify(deploy, range(0, 65, 5))
        await deploy.until(lambda: deploy.t.dead_letters != [])
        return [dead_letter async for dead_letter in self.letters(deploy).select(Selection())]

    async def retry(self, deploy: Deploy, dead_letter: DeadLetter) -> None:
        await self.letters(deploy).retry(dead_letter)

    def letters(self, deploy: Deploy) -> StoredDeadLetters:
        app = deploy.t.app
        return StoredDeadLetters(app.session.admin, events=app.events)


def failing() -> App:
    """A version of the app whose hours all become dead letters."""
    app = App("contract")
    window: Windowing[int, Any] = Windowing(size="1h", fold=counted, initial=0, time=happened)

    @app.agent("mars", where={"class": "od"}, start="new", window=window)
    async def sums(window: Window[int]) -> None:
        raise Reject("no database")

    return app


async def test_what_is_given_back_to_another_version_is_no_failed_attempt(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often: neither as a failure, nor as what may end its worker, which is handled alone."""
    app, turns, alone = App("contract"), list[int](), list[Any]()
    of = Isolation.of

    def note(isolation: Isolation, delivery: Any) -> Any:
        alone.append(delivery)
        return of(isolation, delivery)

    monkeypatch.setattr(Isolation, "of", note)

    @app.agent("mars", where={"class": "od"}, start="new", retry=RetryPolicy(attempts=2))
    async def index(notification: Notification[Any]) -> None:
        turns.append(notification.attempt)
        if len(turns) < 7:
            raise OtherVersionError(UndecodableError("of another type"))

    monkeypatch.setattr(acknowledging, "OTHER_VERSION", RetryPolicy(first=0.05, factor=1.0, jitter=0.0))
    await deploy.start(app)
    await publish(deploy, 1)
    with anyio.fail_after(PATIENCE_SECONDS):
        while len(turns) < 7:  # a consumer may not know yet of what its stream has just stored
            await deploy.t.advance(0.05)
    await deploy.until_handled("index")
    assert turns == [1] * 7
    assert [settled.reason for settled in deploy.stated(app, Settled)] == ["other_version"] * 6 + [""]
    assert (deploy.t.dead_letters, alone) == ([], [])
    await deploy.stop_all(app)
