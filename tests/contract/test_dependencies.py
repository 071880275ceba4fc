"""What agents depend on: they wait for it together, and the author's code reads it and says that it is away."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from aviso_workers import App, Notification, Notify, RetryPolicy
from aviso_workers.engine.outages import UNANSWERED_SECONDS
from aviso_workers.errors import DeclarationError
from aviso_workers.events import DeadLettersRefused, DeadLettersStored, OutageBegan, OutageEnded
from aviso_workers.state import worker_records
from aviso_workers.testing import Harness, harness
from tests.agent_looks import looked
from tests.contract.settings import mars
from tests.presence import present
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

QUICK = RetryPolicy(first=0.05, factor=1, attempts=2)


class GoneError(Exception):
    """What a client raises whose server is away, of a kind that nobody knows."""


async def publish(app: App, count: int) -> None:
    await app.notify_many(Notify("mars", mars(step=step), {}) for step in range(count))


async def until(t: Harness, condition: Any) -> None:
    with anyio.fail_after(PATIENCE_SECONDS):
        while not condition():
            await t.advance(0.1)


async def test_code_says_that_it_is_away_and_back_and_reads_it(app: App, url: str | None) -> None:
    catalogue = app.dependency("catalogue")
    handled: list[str] = []
    seen: list[tuple[bool, str]] = []

    @app.agent("mars", depends_on=catalogue, where={"step": 0})
    async def trip(notification: Notification[Any]) -> None:
        seen.append((catalogue.is_away, catalogue.reason))
        catalogue.trip("maintenance until noon", after="1h")
        seen.append((catalogue.is_away, catalogue.reason))

    @app.agent("mars", depends_on=catalogue, where={"step": {"gte": 1}})
    async def index(notification: Notification[Any]) -> None:
        handled.append(notification.identifier["step"])

    @app.agent("mars", where={"step": 9})
    def reset(notification: Notification[Any]) -> None:
        assert catalogue.since is not None
        catalogue.reset()

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(step=0), {})
        await until(t, lambda: len(seen) == 2)
        await t.notify("mars", mars(step=1), {})
        await t.advance(3.0)
        assert handled == [], "nothing is tried before an hour is over"
        await t.notify("mars", mars(step=9), {})
        await until(t, lambda: handled == ["1", "9"])
        assert (catalogue.is_away, catalogue.since, catalogue.reason) == (False, None, ""), "asked by the test"
    assert seen == [(False, ""), (True, "Unavailable: maintenance until noon")]
    with pytest.raises(DeclarationError, match="dependency 'catalogue' is not at work here"):
        catalogue.reset()


async def test_it_names_errors_that_say_that_it_is_away(app: App, url: str | None) -> None:
    away, handled = True, 0

    @app.agent("mars", retry=QUICK, depends_on=app.dependency("catalogue", unavailable=[GoneError]))
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


async def test_an_outage_of_an_agent_with_few_notifications_is_told(app: App, url: str | None) -> None:
    told: list[OutageBegan | OutageEnded] = []
    app.events.listen(told.append, OutageBegan, OutageEnded)
    away = True

    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None:
        if away:
            raise ConnectionRefusedError(111, "refused")

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(step=1), {})
        await t.advance(UNANSWERED_SECONDS + 5.0)
        assert [type(each) for each in told] == [OutageBegan]
        away = False
        await t.settle()
        assert [type(each) for each in told] == [OutageBegan, OutageEnded]


async def told(
    read: Callable[[], Awaitable[object]], expected: object, wait: Callable[[float], Awaitable[None]]
) -> None:
    """Wait until workers have recorded this: they look every 2 seconds."""
    with anyio.fail_after(PATIENCE_SECONDS):
        while await read() != expected:
            await wait(0.5)


@pytest.mark.slow
async def test_workers_tell_operators_at_once_what_hinders_them(app: App) -> None:
    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None: ...

    async def said() -> list[tuple[str, str]] | None:
        workers = (await worker_records.of_app(app.session.admin, "contract")).living
        return [(each.agent, each.text) for each in present(workers[0].hindrances)] if workers else None

    async with app.running():
        await told(said, [], anyio.sleep)
        app.events.emit(DeadLettersRefused(agent="index", error=OSError("full"), again_in_seconds=1.0))
        await told(said, [("index", "dead letters cannot be stored: full")], anyio.sleep)
        (found,) = [each.judgement for each in await looked(app.session.admin, app.config)]
        assert found.state == "hindered"
        assert found.why.endswith("dead letters cannot be stored: full")
        app.events.emit(DeadLettersStored(agent="index"))
        await told(said, [], anyio.sleep)


async def test_workers_tell_operators_of_it(app: App, url: str | None) -> None:
    catalogue = app.dependency("catalogue")

    @app.agent("mars", depends_on=catalogue)
    async def index(notification: Notification[Any]) -> None: ...

    @app.agent("mars", depends_on=catalogue)
    async def check(notification: Notification[Any]) -> None: ...

    async def away() -> dict[str, str]:
        workers = (await worker_records.of_app(app.session.admin, "contract")).living
        return {name: each.away for worker in workers for name, each in worker.agents.items() if each.away}

    async with harness(app, server=url) as t:
        await t.advance(1.0)
        catalogue.trip("maintenance", after="1h")
        await told(away, dict.fromkeys(["check", "index"], "Unavailable: maintenance"), t.advance)
        catalogue.reset()
        await told(away, {}, t.advance)
