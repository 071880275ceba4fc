"""Breakers that agents share by what they depend on, that code opens, and agents that are halted in a flood."""

from __future__ import annotations

import math
from typing import Any

import anyio
import pytest

from aviso_workers import App, Backoff, Breaker, Notification, Notify, Reject, Window, Windowing
from aviso_workers.errors import DeclarationError
from aviso_workers.events import AgentHalted, AgentResumed, OutageBegan
from aviso_workers.ops import agent_inventory
from aviso_workers.testing import Harness, harness
from tests.contract.settings import app_config, mars
from tests.waits import PATIENCE_SECONDS, PROMPT_SECONDS

pytestmark = pytest.mark.anyio

SHORT = Breaker(first=0.2, max=0.5)
QUICK = Backoff(first=0.05, factor=1, attempts=2)


class GoneError(Exception):
    """What a client raises whose server is away, of a kind that nobody knows."""


async def publish(app: App, count: int) -> None:
    await app.notify_many(Notify("mars", mars(step=step), {}) for step in range(count))


async def until(t: Harness, condition: Any) -> None:
    with anyio.fail_after(PATIENCE_SECONDS):
        while not condition():
            await t.advance(0.1)


async def test_agents_that_depend_on_the_same_wait_together(app: App, url: str | None) -> None:
    away = True
    began: list[str] = []
    tried: list[float] = []
    done: dict[str, int] = {"index": 0, "check": 0}
    app.events.listen(lambda event: began.append(event.agent), OutageBegan)

    def ask(agent: str) -> None:
        tried.append(app.session.backend.clock.monotonic())
        if away:
            raise ConnectionRefusedError(111, "refused")
        done[agent] += 1

    @app.agent("mars", retry=QUICK, breaker=SHORT, depends_on="catalogue", concurrency=2)
    async def index(notification: Notification[Any]) -> None:
        ask("index")

    @app.agent("mars", retry=QUICK, breaker=SHORT, depends_on="catalogue", concurrency=2)
    async def check(notification: Notification[Any]) -> None:
        ask("check")

    async with harness(app, server=url) as t:
        await publish(app, 40)
        await until(t, lambda: len(began) == 2)
        await t.advance(1.0)
        since, before = t.clock.monotonic(), len(tried)
        await t.advance(4.0)
        passed = t.clock.monotonic() - since
        assert 1 <= len(tried) - before <= passed / 0.4, "one in each interval, of both agents together"
        recorded = await agent_inventory.recorded(app.session.admin)
        assert set(recorded.outages) == {("contract", "index"), ("contract", "check")}
        away = False
        await until(t, lambda: done == {"index": 40, "check": 40})
        assert t.dead_letters == []
    assert sorted(began) == ["check", "index"]


@pytest.mark.parametrize("order", [[], ["class"]])
async def test_a_notification_counts_how_often_it_was_handed_over_in_an_outage(
    app: App, url: str | None, order: list[str]
) -> None:
    seen: list[tuple[int, int]] = []

    @app.agent("mars", breaker=SHORT, order_by=order)
    async def index(notification: Notification[Any]) -> None:
        seen.append((notification.attempt, notification.num_delivered))
        if notification.num_delivered < 6:
            raise ConnectionRefusedError(111, "refused")

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(step=1), {})
        await t.settle()
    assert seen == [(1, number) for number in range(1, 7)]


async def test_code_opens_and_closes_a_breaker_and_reads_it(app: App, url: str | None) -> None:
    handled: list[str] = []
    seen: list[tuple[bool, str]] = []

    def note() -> None:
        breaker = app.breaker("catalogue")
        seen.append((breaker.is_open, breaker.reason))

    @app.agent("mars", depends_on="catalogue", where={"step": 0})
    async def trip(notification: Notification[Any]) -> None:
        note()
        app.breaker("catalogue").trip("maintenance until noon", after="1h")
        note()

    @app.agent("mars", depends_on="catalogue", where={"step": {"gte": 1}})
    async def index(notification: Notification[Any]) -> None:
        handled.append(notification.identifier["step"])

    @app.agent("mars", where={"step": 9})
    def reset(notification: Notification[Any]) -> None:
        app.breaker("catalogue").reset()

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(step=0), {})
        await until(t, lambda: len(seen) == 2)
        await t.notify("mars", mars(step=1), {})
        await t.advance(3.0)
        assert handled == [], "nothing is tried before an hour is over"
        await t.notify("mars", mars(step=9), {})
        await until(t, lambda: handled == ["1", "9"])
    assert seen == [(False, ""), (True, "Unavailable: maintenance until noon")]


async def test_what_is_reset_in_one_worker_goes_on_in_all(app: App, url: str | None) -> None:
    broken = True
    done: list[str] = []

    @app.agent("mars", depends_on="catalogue", where={"class": "od"}, breaker=Breaker(first=30.0, max=30.0))
    async def index(notification: Notification[Any]) -> None:
        if broken:
            raise ConnectionRefusedError(111, "refused")
        done.append(notification.identifier["step"])

    @app.agent("mars", where={"class": "rd"})
    async def reset(notification: Notification[Any]) -> None:
        app.breaker("catalogue").reset()

    began: list[str] = []
    app.events.listen(lambda event: began.append(event.agent), OutageBegan)
    async with harness(app, server=url, workers=2) as t:
        await publish(app, 60)
        await until(t, lambda: len(began) == 2)
        await t.advance(3.0)
        broken = False
        await t.notify("mars", {**mars(step=1), "class": "rd"}, {})
        began_again = t.clock.monotonic()
        await until(t, lambda: len(done) >= 50)
        passed = t.clock.monotonic() - began_again
        assert passed < PROMPT_SECONDS, "before one would have been tried; what had failed comes later"


async def test_a_breaker_that_no_agent_has_is_named(app: App, url: str | None) -> None:
    @app.agent("mars", depends_on="catalogue")
    async def index(notification: Notification[Any]) -> None:
        app.breaker("katalog")

    async with harness(app, server=url):
        with pytest.raises(
            DeclarationError, match="no breaker 'katalog' at work here; its agents depend on: catalogue"
        ):
            app.breaker("katalog")


async def test_the_app_says_what_is_an_outage_for_all_agents(kind: str, url: str | None) -> None:
    app = App("contract", config=app_config(kind, url or ""), unavailable=[GoneError])
    away, handled = True, 0

    @app.agent("mars", retry=QUICK, breaker=SHORT)
    async def index(notification: Notification[Any]) -> None:
        nonlocal handled
        if away:
            raise GoneError
        handled += 1

    async with harness(app, server=url) as t:
        await publish(app, 10)
        await t.advance(3.0)
        away = False
        await until(t, lambda: handled == 10)
        assert t.dead_letters == []


@pytest.mark.parametrize("order", [[], ["class"]])
async def test_an_agent_is_halted_in_a_flood_of_dead_letters(app: App, url: str | None, order: list[str]) -> None:
    broken = True
    handled: list[int] = []
    told: list[AgentHalted | AgentResumed] = []
    app.events.listen(told.append, AgentHalted, AgentResumed)

    @app.agent("mars", retry=Backoff(attempts=1), breaker=Breaker(failures=10_000, dead_letters=20), order_by=order)
    async def index(notification: Notification[Any]) -> None:
        step = int(notification.identifier["step"])
        if broken and step % 2:
            raise KeyError("param")
        handled.append(step)

    async with harness(app, server=url) as t:
        await publish(app, 100)
        await until(t, lambda: told)
        await t.advance(3.0)
        assert len(t.dead_letters) == 20
        before = len(handled)
        await t.advance(15.0)
        assert (len(t.dead_letters), len(handled)) == (20, before), "nothing begins, and nothing becomes a dead letter"
        halted = (await agent_inventory.recorded(app.session.admin)).outages["contract", "index"]
        assert (halted.halted, halted.reason[:26]) == (True, "20 dead letters within 1 s")
        broken = False
        await t.resume(index)
        await until(t, lambda: len(handled) == 80)
        assert len(t.dead_letters) == 20
    assert [type(each) for each in told] == [AgentHalted, AgentResumed]


async def test_few_among_many_and_what_the_author_rejects_are_no_flood(app: App, url: str | None) -> None:
    told: list[AgentHalted] = []
    app.events.listen(told.append, AgentHalted)

    @app.agent("mars", retry=Backoff(attempts=1), breaker=Breaker(failures=10_000, dead_letters=5))
    async def index(notification: Notification[Any]) -> None:
        step = int(notification.identifier["step"])
        if step % 20 == 0:
            raise KeyError("param")
        if step % 5 == 0:
            raise Reject("not ours")

    async with harness(app, server=url) as t:
        await publish(app, 200)
        await until(t, lambda: len(t.dead_letters) == 40)
    assert told == []


async def test_ten_minutes_in_virtual_time() -> None:
    """As a test of an author's: nothing is lost, nothing given up, and windows are not closed early."""
    app = App("contract", config=app_config("in_memory", ""))
    handled: list[int] = []
    counted: list[int] = []

    @app.agent("mars", depends_on="catalogue", order_by=["class"])
    async def index(notification: Notification[Any]) -> None:
        handled.append(int(notification.identifier["step"]))

    @app.agent(
        "mars",
        depends_on="catalogue",
        window=Windowing(size="1m", fold=lambda count, _: count + 1, initial=0, lateness="0s", idle="5s"),
    )
    async def count(window: Window[int]) -> None:
        counted.append(window.value)

    async with harness(app) as t:
        with t.outage("catalogue"):
            for step in range(600):
                await t.notify("mars", mars(step=step), {})
                await t.advance(1.0)
            assert t.dead_letters == []
        await t.settle()
        await t.advance(10.0)
        assert t.dead_letters == []
    assert handled == list(range(600))
    assert sum(counted) == 600


async def test_what_cannot_be_counted_does_not_stop_windows() -> None:
    app = App("contract", config=app_config("in_memory", ""))
    counted = list[int]()

    def fold(count: int, notification: Notification[Any]) -> int:
        if int(notification.identifier["step"]) < 30:
            raise ConnectionRefusedError(111, "refused")
        return count + 1

    @app.agent("mars", retry=QUICK, window=Windowing(size="1m", fold=fold, initial=0, lateness="0s", idle="5s"))
    async def count(window: Window[int]) -> None:
        counted.append(window.value)

    async with harness(app) as t:
        await publish(app, 40)
        await t.settle()
        await t.advance(120.0)
        assert len(t.dead_letters) == 30
    assert sum(counted) == 10


async def test_few_among_many_are_no_flood_for_windows_either() -> None:
    app = App("contract", config=app_config("in_memory", ""))
    told: list[AgentHalted] = []
    app.events.listen(told.append, AgentHalted)

    def fold(count: int, notification: Notification[Any]) -> int:
        if int(notification.identifier["step"]) % 20 == 0:
            raise KeyError("param")
        return count + 1

    windowing = Windowing(size="1m", fold=fold, initial=0, lateness="0s", idle="5s")

    @app.agent("mars", retry=Backoff(attempts=1), window=windowing, breaker=Breaker(dead_letters=5))
    async def count(window: Window[int]) -> None: ...

    async with harness(app) as t:
        await publish(app, 200)
        await t.settle()
        assert len(t.dead_letters) == 10
    assert told == []


def test_breakers_that_differ_cannot_be_shared() -> None:
    app = App("contract", config=app_config("in_memory", ""))

    @app.agent("mars", depends_on="catalogue")
    async def index(notification: Notification[Any]) -> None: ...

    @app.agent("mars", depends_on="catalogue", breaker=SHORT)
    async def check(notification: Notification[Any]) -> None: ...

    assert app.mistakes() == [
        "agents 'index' and 'check' share the breaker of 'catalogue': give both the same breaker="
    ]


@pytest.mark.parametrize("depends_on", ["", "a b", 3])
def test_what_names_nothing_is_refused(depends_on: Any) -> None:
    app = App("contract")
    with pytest.raises(DeclarationError, match="depends_on"):

        @app.agent("mars", depends_on=depends_on)
        async def index(notification: Notification[Any]) -> None: ...


def test_a_shared_breaker_cannot_be_switched_off() -> None:
    app = App("contract")
    with pytest.raises(DeclarationError, match="depends_on= names a breaker that is shared: leave out breaker=None"):

        @app.agent("mars", depends_on="catalogue", breaker=None)
        async def index(notification: Notification[Any]) -> None: ...


@pytest.mark.parametrize("dead_letters", [0, True, 1.5, math.inf])
def test_a_rate_that_is_no_number_is_refused(dead_letters: Any) -> None:
    with pytest.raises(DeclarationError, match="dead_letters must be a whole number"):
        Breaker(dead_letters=dead_letters)
