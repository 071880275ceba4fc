"""`Slots(...)` on every backend: all workers of the fleet together make so many calls at once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from threading import Event
from typing import Any, cast

import anyio
import pytest

from aviso_workers import App, Notification, Notify, Rate, Reject, RetryPolicy, Slots
from aviso_workers.backends import Admin
from aviso_workers.backends.buckets import Bucket
from aviso_workers.clocks import VirtualClock
from aviso_workers.engine.leases import RENEW_SECONDS
from aviso_workers.errors import TakenOverError
from aviso_workers.events import Failed
from aviso_workers.features import limits
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


def pause(app: App) -> None:
    """Let time pass as in a process that does not run: longer than a lease lasts."""
    cast(VirtualClock, app.session.backend.clock)._now += 1.2 * lease_records.LEASE_SECONDS


async def take_from(app: App, slot: str) -> None:
    """Take a slot from the worker that has it, as another one does that has not heard of it."""
    bucket = await app.session.backend.key_value(
        lease_records.bucket_of(app.name), ttl_seconds=lease_records.LEASE_SECONDS, own=True
    )
    mine = await bucket.newest(slot)
    assert mine is not None
    await bucket.put(slot, b"another worker", revision=mine.revision)


async def until(t: Harness, condition: Callable[[], Any]) -> None:
    with anyio.fail_after(PATIENCE_SECONDS):
        while not condition():
            await t.advance(0.1)


@pytest.mark.parametrize("concurrent", [1, 2])
async def test_all_workers_together_make_so_many_calls_for_each_key(
    app: App, url: str | None, running: Running, concurrent: int
) -> None:
    @app.agent("mars", limits=[Slots(concurrent, by=["class"])], concurrency=6, retry=RetryPolicy(attempts=1))
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
    @app.agent("mars", limits=[Slots(1)], concurrency=4)
    async def index(notification: Notification[Any]) -> None:
        await running.call(notification, app)

    async with harness(app, server=url, workers=WORKERS) as t:
        await publish(app, 20)
        await publish(app, 20, name="rd")
        await until(t, lambda: running.count == 40)
    assert running.most_in_all == 1


@pytest.mark.slow
async def test_a_key_that_is_taken_occupies_no_call_and_stops_no_other(
    app: App, url: str | None, running: Running
) -> None:
    goes_on = anyio.Event()

    @app.agent("mars", limits=[Slots(1, by=["class"])], concurrency=2)
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
        limits=[Slots(1, by=["class"])],
        order_by=["class"],
        concurrency=4,
        retry=RetryPolicy(first=0.05, jitter=0),
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


@pytest.mark.slow
async def test_workers_take_turns(app: App, url: str | None, running: Running) -> None:
    """Who has a key under backlog leaves it to others that wait for it."""
    by: list[str] = []
    beside = App(app.name, config=app.config)

    def declared(target: App, version: str) -> None:
        @target.agent("mars", limits=[Slots(1, by=["class"])], concurrency=2)
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


@pytest.mark.slow
async def test_a_worker_that_is_killed_is_followed(app: App, url: str | None, running: Running) -> None:
    @app.agent("mars", limits=[Slots(1, by=["class"])], concurrency=2, ack_wait=2)
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


@pytest.mark.slow
async def test_a_call_whose_place_is_lost_is_cancelled_and_uses_no_attempt(
    app: App, url: str | None, running: Running
) -> None:
    failed: list[Failed] = []
    app.events.listen(failed.append, Failed)
    cancelled: list[int] = []

    @app.agent("mars", limits=[Slots(1)], concurrency=2, retry=RetryPolicy(attempts=1))
    async def index(notification: Notification[Any]) -> None:
        try:
            await running.call(notification, app, 0.1 if cancelled else 60.0)
        except BaseException:
            cancelled.append(int(notification.identifier["step"]))
            raise

    async with harness(app, server=url) as t:
        await publish(app, 1)
        await until(t, lambda: running.now["od"])
        await take_from(app, "slots/index/all/0")
        await until(t, lambda: running.count == 1)
        assert t.dead_letters == []
    assert cancelled == [0]
    assert running.attempts == {1}
    assert [fact.reason for fact in failed] == ["uncounted"]
    assert "was lost" in str(failed[0].error)


@pytest.mark.slow
@pytest.mark.parametrize("slot", ["slots/index/all/0", "slots/index/class/od/0"])
async def test_a_call_that_needs_several_slots_ends_with_any_of_them(app: App, url: str | None, slot: str) -> None:
    begun: list[int] = []
    refused: list[TakenOverError] = []

    @app.agent("mars", limits=[Slots(1), Slots(1, by=["class"])], retry=RetryPolicy(attempts=1))
    async def index(notification: Notification[Any]) -> None:
        begun.append(notification.attempt)
        if len(begun) > 1:
            return
        try:
            await app.session.backend.clock.sleep(60)
        finally:
            with anyio.CancelScope(shield=True), pytest.raises(TakenOverError) as found:
                await app.notify("mars", notification.identifier, {})
            refused.append(found.value)

    async with harness(app, server=url) as t:
        await publish(app, 1)
        await until(t, lambda: begun)
        await take_from(app, slot)
        await until(t, lambda: len(begun) > 1)
        await t.settle()
        assert t.dead_letters == []
    assert (begun, len(refused)) == ([1, 1], 1)


async def test_it_combines_with_a_rate(app: App, url: str | None, running: Running) -> None:
    @app.agent(
        "mars",
        limits=[Rate(20, per=1), Slots(1, by=["class"])],
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
    @app.agent("mars", limits=[Slots(1, by=["class"])], concurrency=2)
    async def index(notification: Notification[Any]) -> None:
        await running.call(notification, app)

    async with harness(app, server=url) as t:
        await publish(app, 2)
        await until(t, lambda: running.count == 2)
        ended = t.clock.monotonic()
        bucket = await app.session.backend.key_value(
            lease_records.bucket_of(app.name), ttl_seconds=lease_records.LEASE_SECONDS, own=True
        )
        with anyio.fail_after(PATIENCE_SECONDS):
            while await bucket.get("slots/index/class/od/0") is not None:
                await t.advance(0.1)
        assert t.clock.monotonic() - ended < lease_records.LEASE_SECONDS / 2, "it was not forgotten, but given back"


@pytest.mark.slow
async def test_a_slot_that_is_given_back_while_it_is_renewed_can_be_taken_at_once(
    app: App, url: str | None, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the server answers late. Here it answers a renewal after a minute, and nobody waits for that."""
    renewing = anyio.Event()
    put = Bucket.put

    async def put_and_answer_late(self: Bucket, key: str, value: bytes, **given: Any) -> int:
        stored = await put(self, key, value, **given)
        if key == "slots/index/all/0" and given["revision"]:
            renewing.set()
            await app.session.backend.clock.sleep(60)
        return stored

    monkeypatch.setattr(Bucket, "put", put_and_answer_late)

    @app.agent("mars", limits=[Slots(1)])
    async def index(notification: Notification[Any]) -> None:
        await renewing.wait()
        running.done["od"].append(int(notification.identifier["step"]))

    async with harness(app, server=url, workers=2) as t:
        for call in range(3):
            renewing = anyio.Event()
            began = t.clock.monotonic()
            await publish(app, 1, first=call)
            await until(t, partial(lambda count: running.count > count, call))
            assert t.clock.monotonic() - began < RENEW_SECONDS + limits.TURN_SECONDS
            await t.advance(4 * limits.LINGER_SECONDS)


async def test_a_worker_that_was_paused_begins_nothing_in_a_slot_that_others_may_have(
    app: App, running: Running
) -> None:
    paused = False

    @app.agent("mars", limits=[Slots(1)], ack_wait=60)
    async def index(notification: Notification[Any]) -> None:
        nonlocal paused
        if paused:
            await running.call(notification, app, 3.0)
        else:
            paused = True
            pause(app)

    async with harness(app, workers=2) as t:
        await publish(app, 7)
        await until(t, lambda: running.count == 6)
    assert running.most_in_all == 1


async def test_no_call_begins_in_a_slot_that_was_lost_after_it_was_given_to_it(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a process that is paused in between."""
    begun: list[int] = []
    failed: list[Failed] = []
    app.events.listen(failed.append, Failed)
    admits, paused = limits.Places.admits, False

    def admit_and_be_paused(self: limits.Places, *given: Any) -> bool:
        nonlocal paused
        admitted = admits(self, *given)
        if admitted and not paused:
            paused = True
            pause(app)
        return admitted

    monkeypatch.setattr(limits.Places, "admits", admit_and_be_paused)

    @app.agent("mars", limits=[Slots(1)], ack_wait=60, retry=RetryPolicy(attempts=1))
    async def index(notification: Notification[Any]) -> None:
        begun.append(int(notification.identifier["step"]))
        await app.session.backend.clock.sleep(0.1)

    async with harness(app, workers=2) as t:
        await publish(app, 5)
        await until(t, lambda: {*range(5)} <= {*begun})
        await t.settle()
        assert t.dead_letters == []
    assert sorted(begun) == [*range(5)]
    assert [fact.reason for fact in failed] == ["uncounted"]


@pytest.mark.slow
@pytest.mark.parametrize("outcome", ["raises", "rejects", "succeeds"])
async def test_a_thread_whose_slot_is_lost_ends_without_an_attempt_and_its_slot_is_not_used_again(
    app: App, url: str | None, running: Running, outcome: str
) -> None:
    goes_on = Event()
    begun: list[int] = []

    @app.agent("mars", limits=[Slots(1)], concurrency=2, retry=RetryPolicy(attempts=1))
    def index(notification: Notification[Any]) -> Reject | None:
        begun.append(int(notification.identifier["step"]))
        if len(begun) > 1:
            return None
        assert goes_on.wait(PATIENCE_SECONDS)
        if outcome == "raises":
            raise ValueError
        return Reject("its slot is lost") if outcome == "rejects" else None

    async with harness(app, server=url) as t:
        await publish(app, 2)
        await until(t, lambda: begun)
        await take_from(app, "slots/index/all/0")
        await t.advance(RENEW_SECONDS + 0.5)
        goes_on.set()
        since = t.clock.monotonic()
        await until(t, lambda: len(begun) > 1)
        took = t.clock.monotonic() - since
        await t.settle()
        assert t.dead_letters == []
    assert took > lease_records.LEASE_SECONDS - 2 * RENEW_SECONDS, "another worker had the slot meanwhile"
    assert len(begun) == len({*begun}) + (outcome != "succeeds") == 2 + (outcome != "succeeds")


@pytest.mark.slow
async def test_a_slot_whose_thread_runs_on_is_not_given_back_when_its_worker_ends(app: App) -> None:
    goes_on = Event()
    begun: list[float] = []

    @app.agent("mars", limits=[Slots(1)])
    def index(notification: Notification[Any]) -> None:
        begun.append(app.session.backend.clock.monotonic())
        if len(begun) == 1:
            goes_on.wait(PATIENCE_SECONDS)

    async with harness(app) as t:
        await publish(app, 1)
        await until(t, lambda: begun)
        await t.stop()
        ended = t.clock.monotonic()
        await t.start()
        await until(t, lambda: len(begun) > 1)
        goes_on.set()
    assert begun[1] - ended > lease_records.LEASE_SECONDS - 2 * RENEW_SECONDS


@pytest.mark.parametrize("count", [1, 2])
async def test_a_call_whose_stream_is_recreated_has_its_slot_until_it_ends_and_not_longer(
    app: App, url: str | None, count: int
) -> None:
    goes_on, all_in_use = anyio.Event(), anyio.Event()
    runs, most = 0, 0
    done: list[str] = []

    @app.agent("mars", limits=[Slots(count)], concurrency=4)
    async def index(notification: Notification[Any]) -> None:
        nonlocal runs, most
        runs += 1
        most = max(most, runs)
        match name := notification.identifier["class"]:
            case "ea":
                done.append("begun")
                await goes_on.wait()
            case "rd" if runs == count:
                all_in_use.set()
            case "rd":
                await all_in_use.wait()
        runs -= 1
        done.append(name)

    async with harness(app, server=url) as t:
        await publish(app, 1, name="ea")
        await until(t, lambda: done)
        await cast(Admin, app.session.backend).delete_stream("MARS")
        await publish(app, 3)
        await t.advance(5.0 if url is None else 2.0)
        assert (done.count("od"), most) == (3 * (count - 1), count)
        goes_on.set()
        await until(t, lambda: done.count("od") == 3)
        await publish(app, count, name="rd")
        await until(t, lambda: done.count("rd") == count)
    assert most == count


async def test_what_gave_way_to_another_worker_is_still_the_first_of_its_key(app: App) -> None:
    begun: list[int] = []

    @app.agent("mars", limits=[Slots(1, by=["class"])], concurrency=4)
    async def index(notification: Notification[Any]) -> None:
        begun.append(int(notification.identifier["step"]))
        await app.session.backend.clock.sleep(0.25)

    async with harness(app) as t:
        await app.notify_many(Notify("mars", mars(step=step), {}) for step in range(40))
        await t.settle()
    assert begun == list(range(40))
