"""`Limit(concurrent=...)` on every backend: all workers of the fleet together make so many calls at once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import anyio
import pytest

from aviso_workers import App, Backoff, Limit, Notification, Notify
from aviso_workers.events import Failed
from aviso_workers.features.limits import places
from aviso_workers.state import lease_records
from aviso_workers.testing import Harness, harness
from tests.contract.settings import mars
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

WORKERS = 3
CALL_SECONDS = 0.05


class Running:
    """The calls that run, by the value of `class`, in all workers."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.most_in_all = 0
        self.done: dict[str, list[int]] = defaultdict(list)
        self.attempts: set[int] = set()

    async def call(self, notification: Notification[Any], app: App, seconds: float = CALL_SECONDS) -> None:
        name = notification.identifier["class"]
        self.attempts.add(notification.attempt)
        self.now[name] += 1
        self.most[name] = max(self.most[name], self.now[name])
        self.most_in_all = max(self.most_in_all, self.now.total())
        try:
            await app.session.backend.clock.sleep(seconds)
            self.done[name].append(int(notification.identifier["step"]))
        finally:
            self.now[name] -= 1

    @property
    def count(self) -> int:
        return sum(map(len, self.done.values()))


@pytest.fixture
def running() -> Running:
    return Running()


async def publish(app: App, count: int, *, name: str = "od", first: int = 0) -> None:
    await app.notify_many(Notify("mars", mars(step=first + step, **{"class": name}), {}) for step in range(count))


async def until(t: Harness, condition: Callable[[], Any]) -> None:
    with anyio.fail_after(PATIENCE_SECONDS):
        while not condition():
            await t.advance(0.1)


@pytest.mark.parametrize("concurrent", [1, 2])
async def test_all_workers_together_make_so_many_calls_for_each_key(
    app: App, url: str | None, running: Running, concurrent: int
) -> None:
    @app.agent("mars", limit=Limit(concurrent=concurrent, key=["class"]), concurrency=6, retry=Backoff(attempts=1))
    async def index(notification: Notification[Any]) -> None:
        await running.call(notification, app)

    async with harness(app, server=url, workers=WORKERS) as t:
        for name in ("od", "rd", "ea"):
            await publish(app, 30, name=name)
        await until(t, lambda: running.count == 90)
        assert t.dead_letters == []
    assert running.most == dict.fromkeys(("od", "rd", "ea"), concurrent)
    assert running.most_in_all > concurrent, "calls of several keys run beside each other"
    assert running.attempts == {1}


async def test_without_a_key_it_is_a_mutex_of_the_agent(app: App, url: str | None, running: Running) -> None:
    @app.agent("mars", limit=Limit(concurrent=1), concurrency=4)
    async def index(notification: Notification[Any]) -> None:
        await running.call(notification, app)

    async with harness(app, server=url, workers=WORKERS) as t:
        await publish(app, 20)
        await publish(app, 20, name="rd")
        await until(t, lambda: running.count == 40)
    assert running.most_in_all == 1


async def test_a_key_that_is_taken_occupies_no_call_and_stops_no_other(
    app: App, url: str | None, running: Running
) -> None:
    goes_on = anyio.Event()

    @app.agent("mars", limit=Limit(concurrent=1, key=["class"]), concurrency=2)
    async def index(notification: Notification[Any]) -> None:
        if notification.identifier["class"] == "od":
            await goes_on.wait()
        await running.call(notification, app)

    async with harness(app, server=url, workers=2) as t:
        await publish(app, 100)
        for name in ("rd", "ea", "ti"):
            await publish(app, 5, name=name)
        await until(t, lambda: running.count == 15)
        assert running.done["od"] == []
        goes_on.set()
        await until(t, lambda: running.count == 115)
    assert running.attempts == {1}


async def test_order_by_is_kept_and_failures_are_tried_at_the_head_of_their_key(
    app: App, url: str | None, running: Running
) -> None:
    failed: set[int] = set()

    @app.agent(
        "mars",
        limit=Limit(concurrent=1, key=["class"]),
        order_by=["class"],
        concurrency=4,
        retry=Backoff(first=0.05, jitter=0),
    )
    async def index(notification: Notification[Any]) -> None:
        step = int(notification.identifier["step"])
        if step % 7 == 0 and step not in failed:
            failed.add(step)
            raise ValueError("once")
        await running.call(notification, app, 0.01)

    async with harness(app, server=url) as t:
        for name in ("od", "rd"):
            await publish(app, 30, name=name, first=0 if name == "od" else 100)
        await until(t, lambda: running.count == 60)
    assert running.done == {"od": [*range(30)], "rd": [*range(100, 130)]}


async def test_workers_take_turns(app: App, url: str | None, running: Running) -> None:
    """Who has a key under backlog leaves it to others that wait for it."""
    by: list[str] = []
    beside = App(app.name, config=app.config)

    def declared(target: App, version: str) -> None:
        @target.agent("mars", limit=Limit(concurrent=1, key=["class"]), concurrency=2)
        async def index(notification: Notification[Any]) -> None:
            by.append(version)
            await running.call(notification, target)

    declared(app, "one")
    declared(beside, "another")
    async with harness(app, server=url) as t:
        await t.deploy(beside, beside=True)
        await publish(app, 300)
        await until(t, lambda: running.count == 300)
    turns = sum(earlier != later for earlier, later in pairwise(by))
    assert turns >= 3, (turns, Counter(by))
    assert running.most["od"] == 1


async def test_a_worker_that_is_killed_is_followed(app: App, url: str | None, running: Running) -> None:
    @app.agent("mars", limit=Limit(concurrent=1, key=["class"]), concurrency=2, ack_wait=2)
    async def index(notification: Notification[Any]) -> None:
        await running.call(notification, app, 0.2)

    async with harness(app, server=url, workers=2) as t:
        await publish(app, 20)
        await until(t, lambda: running.count == 3)
        await t.crash(0)
        await t.crash(0)
        await until(t, lambda: set(running.done["od"]) == {*range(20)})
        assert t.dead_letters == []
    assert running.most["od"] == 1


async def test_a_call_whose_place_is_lost_is_cancelled_and_uses_no_attempt(
    app: App, url: str | None, running: Running
) -> None:
    failed: list[Failed] = []
    app.events.listen(failed.append, Failed)
    cancelled: list[int] = []

    @app.agent("mars", limit=Limit(concurrent=1), concurrency=2, retry=Backoff(attempts=1))
    async def index(notification: Notification[Any]) -> None:
        try:
            await running.call(notification, app, 0.1 if cancelled else 60.0)
        except BaseException:
            cancelled.append(int(notification.identifier["step"]))
            raise

    async with harness(app, server=url) as t:
        await publish(app, 1)
        await until(t, lambda: running.now["od"])
        bucket = await app.session.backend.key_value(
            lease_records.bucket_of(app.name), ttl_seconds=lease_records.LEASE_SECONDS, own=True
        )
        key = "places/index/all/0"
        mine = await bucket.newest(key)
        assert mine is not None
        await bucket.put(key, b"another worker", revision=mine.revision)
        await until(t, lambda: running.count == 1)
        assert t.dead_letters == []
    assert cancelled == [0]
    assert running.attempts == {1}
    assert [fact.reason for fact in failed] == ["uncounted"]
    assert "was lost" in str(failed[0].error)


async def test_it_combines_with_a_rate(app: App, url: str | None, running: Running) -> None:
    @app.agent(
        "mars",
        limit=Limit(concurrent=1, key=["class"]),
        rate_limit=Limit(20, per=1),
        concurrency=4,
    )
    async def index(notification: Notification[Any]) -> None:
        await running.call(notification, app, 0.01)

    async with harness(app, server=url, workers=2) as t:
        began = t.clock.monotonic()
        for name in ("od", "rd"):
            await publish(app, 40, name=name)
        await until(t, lambda: running.count == 80)
        took = t.clock.monotonic() - began
    assert took >= 80 / 20 - 3.1
    assert running.most == {"od": 1, "rd": 1}


async def test_a_place_that_is_not_used_is_given_back(app: App, url: str | None, running: Running) -> None:
    @app.agent("mars", limit=Limit(concurrent=1, key=["class"]), concurrency=2)
    async def index(notification: Notification[Any]) -> None:
        await running.call(notification, app)

    async with harness(app, server=url) as t:
        await publish(app, 2)
        await until(t, lambda: running.count == 2)
        await t.advance(4 * places.LINGER_SECONDS)
        bucket = await app.session.backend.key_value(
            lease_records.bucket_of(app.name), ttl_seconds=lease_records.LEASE_SECONDS, own=True
        )
        with anyio.fail_after(PATIENCE_SECONDS):
            while await bucket.get("places/index/class/od/0") is not None:
                await t.advance(0.1)


async def test_what_gave_way_to_another_worker_is_still_the_first_of_its_key(app: App) -> None:
    begun: list[int] = []

    @app.agent("mars", limit=Limit(concurrent=1, key=["class"]), concurrency=4)
    async def index(notification: Notification[Any]) -> None:
        begun.append(int(notification.identifier["step"]))
        await app.session.backend.clock.sleep(0.25)

    async with harness(app) as t:
        await app.notify_many(Notify("mars", mars(step=step), {}) for step in range(40))
        await t.settle()
    assert begun == list(range(40))
