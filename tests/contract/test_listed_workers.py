"""What workers record of themselves and of deploys, in the test harness: in virtual time and on a server."""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import pytest

from aviso_workers import App, Notification, RetryPolicy
from aviso_workers.engine.key_value import RetryingKeyValue
from aviso_workers.errors import DeniedError
from aviso_workers.ops import agent_report, health, snapshots
from aviso_workers.state import declarations, worker_records
from aviso_workers.state.worker_records import AppWorkers, WorkerRecord
from aviso_workers.testing import Harness, harness
from tests.contract.settings import app_config, mars
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

BUCKET, OF_WORKERS = "contract__state", "contract__live"
LIVES_SECONDS, TTL_SECONDS = 90, 86_400
Records = Callable[[dict[str, dict[str, Any]]], Any]


async def records(t: Harness) -> dict[str, dict[str, Any]]:
    """The records of the workers that have not ended in order, by their keys."""
    entries = await (await t.app.key_value(OF_WORKERS)).entries()
    found = {entry.key: json.loads(entry.value) for entry in entries}
    return {key: record for key, record in found.items() if not record.get("ended")}


async def recorded(t: Harness, fits: Records) -> dict[str, dict[str, Any]]:
    """The records of the workers, once they fit."""
    found: dict[str, dict[str, Any]] = {}
    try:
        with anyio.fail_after(PATIENCE_SECONDS):
            while not fits(found := await records(t)):
                await t.advance(0.5)
    except TimeoutError:
        pytest.fail(f"what workers have recorded is {found}")
    return found


def works(found: dict[str, dict[str, Any]]) -> list[str]:
    """The keys of those workers that work as the singleton."""
    return [key for key, each in found.items() if each["agents"]["alone"]["pinned"]]


async def deploys(t: Harness) -> list[dict[str, Any]]:
    entry = await (await t.app.key_value(BUCKET)).get("contract/deploys")
    return json.loads(entry.value) if entry else []


async def deployed(t: Harness, number: int) -> list[list[str]]:
    """What changed in each deploy, once there are so many."""
    with anyio.fail_after(PATIENCE_SECONDS):
        while len(found := await deploys(t)) < number:
            await t.advance(0.1)
    await t.settle()
    return [each["changed"] for each in found]


@pytest.fixture
def begun() -> list[int]:
    """The steps whose calls have begun."""
    return []


@pytest.fixture
def busy(app: App, begun: list[int]) -> App:
    """An app with an agent whose calls do not end, and a singleton."""

    @app.agent("mars", concurrency=4, where={"stream": "oper"})
    async def index(notification: Notification[Any]) -> None:
        begun.append(int(notification.identifier["step"]))
        await anyio.sleep_forever()

    @app.agent("mars", singleton=True, ack_wait=2.0, where={"stream": "enfo"})
    async def alone(notification: Notification[Any]) -> None:
        pass

    return app


@pytest.fixture
async def two(busy: App, url: str | None) -> AsyncIterator[Harness]:
    async with harness(busy, server=url, workers=2) as t:
        yield t


async def test_a_worker_says_where_it_runs_and_what_it_handles(busy: App, url: str | None, begun: list[int]) -> None:
    async with harness(busy, server=url) as t:
        await recorded(t, bool)
        for step in range(3):
            await t.app.notify("mars", mars(step=step), {})
        with anyio.fail_after(PATIENCE_SECONDS):
            while len(begun) < 3:
                await t.advance(0.1)
        await t.app.notify("mars", mars(stream="enfo"), {})  # it is pinned, and so it says all again
        (found,) = (await recorded(t, works)).values()
    assert (found["host"], found["process"], found["member"]) == (socket.gethostname(), os.getpid(), "")
    assert found["rss"] > 2**20
    nothing = {"away": "", "away_seconds": 0.0, "shut_seconds": None, "waits_for": ""}
    assert found["agents"] == {
        "index": {"stream": "MARS", "in_flight": 3, "at_once": 4, "pinned": None, "oldest": 1, **nothing},
        "alone": {"stream": "MARS", "in_flight": 0, "at_once": 1, "pinned": True, "oldest": None, **nothing},
    }
    assert (found["hindrances"], found["timers"]) == ([], [])


async def test_a_worker_of_an_app_with_nothing_but_tasks_or_timers_says_so_too(
    kind: str, nats_url: str, url: str | None
) -> None:
    timed, tasked = (App("contract", config=app_config(kind, nats_url)) for _ in range(2))

    @timed.every("1h", singleton=False)
    async def report() -> None:
        pass

    @tasked.task
    async def look() -> None:
        await anyio.sleep_forever()

    for app in (timed, tasked):
        async with harness(app, server=url) as t:
            (found,) = (await recorded(t, bool)).values()
            assert (found["process"], found["agents"]) == (os.getpid(), {})


async def test_of_a_singletons_workers_one_works_and_the_others_stand_by(two: Harness) -> None:
    await two.app.notify("mars", mars(stream="enfo"), {})
    found = await recorded(two, lambda found: len(found) == 2 and works(found))
    assert sorted(each["agents"]["alone"]["pinned"] for each in found.values()) == [False, True]


@pytest.mark.slow
async def test_another_worker_says_soon_that_it_works_where_the_one_before_was_killed(two: Harness) -> None:
    await two.app.notify("mars", mars(stream="enfo"), {})
    (before,) = works(await recorded(two, works))
    for _ in range(2):  # one of them is it
        await two.crash()
    await two.app.notify("mars", mars(stream="enfo", step=13), {})
    now = works(await recorded(two, lambda found: any(key != before for key in works(found))))
    assert set(now) - {before}


async def test_a_worker_that_ends_says_so_and_a_killed_one_does_not(app: App, url: str | None) -> None:
    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None:
        pass

    async with harness(app, server=url) as t:
        first = await recorded(t, bool)
        await t.crash()
        both = await recorded(t, lambda found: len(found) == 2)
        assert first.keys() < both.keys()
        await t.stop()
        await recorded(t, lambda found: found.keys() == first.keys())
        if url is None:  # a server's own time is real
            admin = t.app.session.admin
            assert len((await worker_records.of_app(admin, "contract")).living) == 1
            await t.advance(LIVES_SECONDS + 1)
            found = await worker_records.of_app(admin, "contract")
            assert (found.living, [each.key for each in found.lost]) == ((), [*first])
            await t.advance(TTL_SECONDS)
            assert await records(t) == {}


async def test_a_worker_that_was_cut_off_or_killed_is_told_until_it_is_back_or_another_one_starts(app: App) -> None:
    """In virtual time; `tests/cli/test_workers.py` has processes."""
    if app.config.notification_backend.kind != "in_memory":
        pytest.skip("it takes minutes")

    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None:
        pass

    async def said(t: Harness) -> list[tuple[str, bool]]:
        now = await snapshots.take(t.app.session.admin)
        return [(row.state, row.needs) for row in agent_report.workers_in_trouble(now)]

    async with harness(app, workers=2) as t:
        await recorded(t, lambda found: len(found) == 2)
        t.disconnect(0)
        await t.advance(LIVES_SECONDS + 1)
        assert await said(t) == [("lost", False)], "it may come back"
        await t.advance(LIVES_SECONDS)
        assert await said(t) == [("lost", True)]
        t.reconnect()
        await t.advance(5)
        assert await said(t) == [], "it says at once that it lives"
        await t.crash()  # which starts another one
        await t.advance(3 * LIVES_SECONDS)
        assert await said(t) == []
        assert [len(each) for each in await of_app(t)] == [2, 1]
        await t.stop()
        assert [len(each) for each in await of_app(t)] == [0, 1], "the others have taken their records back"


async def test_a_worker_that_may_not_record_itself_any_more_is_not_said_to_be_lost(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    if app.config.notification_backend.kind != "in_memory":
        pytest.skip("it takes minutes")
    put = RetryingKeyValue.put

    async def denied(bucket: RetryingKeyValue, key: str, value: bytes, **given: Any) -> int:
        if bucket.name == OF_WORKERS:
            raise DeniedError("permissions violation")
        return await put(bucket, key, value, **given)

    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None:
        pass

    async with harness(app) as t:
        await recorded(t, bool)
        monkeypatch.setattr(RetryingKeyValue, "put", denied)
        await t.advance(3 * LIVES_SECONDS)
        now = await snapshots.take(t.app.session.admin)
        (found,) = agent_report.workers_in_trouble(now)
        assert (found.state, found.needs) == ("unknown", True)
        assert "--role worker" in found.cure
        (of_agent,) = [each.row for each in await agent_report.of_server(t.app.session.admin, app.config, now, now)]
        assert of_agent.state == "unknown"
        assert "--role worker" in of_agent.cure


async def of_app(t: Harness) -> tuple[tuple[WorkerRecord, ...], tuple[WorkerRecord, ...]]:
    """The workers that live and those that were lost."""
    found = await worker_records.of_app(t.app.session.admin, "contract")
    return found.living, found.lost


async def test_two_versions_are_told_once_they_run_for_longer_than_a_deploy_takes(
    kind: str, nats_url: str, url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> App:
        app = App("contract", config=app_config(kind, nats_url), version=name)

        @app.agent("mars")
        async def index(notification: Notification[Any]) -> None:
            pass

        return app

    async with harness(version("v1"), server=url) as t:
        await recorded(t, bool)
        await t.advance(1)
        await t.deploy(version("v2"), beside=True)
        await recorded(t, lambda found: len(found) == 2)
        now = await snapshots.take(t.app.session.admin)
        calm = health.judge_app(now.workers_of("contract"), now=now.recorded.time)
        here = f"{socket.gethostname()}/{os.getpid()}"
        assert (calm.state, calm.why) == ("deploying", f"2 versions run: v1 on {here}, v2 on {here}")
        if url is None:
            await t.advance("16m")
        else:
            monkeypatch.setattr(health, "DEPLOY", timedelta(0))
        (row,) = agent_report.workers_in_trouble(await snapshots.take(t.app.session.admin))
        assert (row.agent, row.state, row.why, row.needs) == ("all workers", "several versions", calm.why, True)
        await t.deploy(t.app)
        await recorded(t, lambda found: len(found) == 1)
        assert agent_report.workers_in_trouble(await snapshots.take(t.app.session.admin)) == []


def version(kind: str, nats_url: str, attempts: int, *, names: tuple[str, ...] = ("index",)) -> App:
    """A version of the app, with agents of these names."""
    app = App("contract", config=app_config(kind, nats_url))
    for name in names:

        @app.agent("mars", name=name, retry=RetryPolicy(attempts=attempts), start="new")
        async def index(notification: Notification[Any]) -> None:
            pass

    return app


async def test_of_workers_that_start_at_once_one_adds_a_deploy(kind: str, nats_url: str, url: str | None) -> None:
    async with harness(version(kind, nats_url, 3), server=url, workers=4) as t:
        assert await deployed(t, 1) == [["the first start that was recorded"]]
        await t.deploy(version(kind, nats_url, 5, names=("index", "other")))
        assert await deployed(t, 2) == [
            ["the first start that was recorded"],
            ["agent index: retry: 3 attempts -> 5 attempts", "agent other added"],
        ]


async def test_code_that_starts_again_after_other_code_gets_no_second_entry(
    kind: str, nats_url: str, url: str | None
) -> None:
    old, new = version(kind, nats_url, 3), version(kind, nats_url, 5)
    async with harness(old, server=url) as t:
        await deployed(t, 1)
        await t.deploy(new)
        await deployed(t, 2)
        assert [each["again"] for each in await deploys(t)] == [None, None]
        await t.deploy(version(kind, nats_url, 3))
        with anyio.fail_after(PATIENCE_SECONDS):
            while (await deploys(t))[-1]["again"] is None:
                await t.advance(0.1)
        rolled_back = await deploys(t)
    assert [each["changed"] for each in rolled_back] == [
        ["agent index: retry: 3 attempts -> 5 attempts"],
        ["the first start that was recorded"],
    ]


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Write this text as the module `shop_agents`, and import it."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text: str) -> ModuleType:
        (tmp_path / "shop_agents.py").write_text(f"async def handle(notification):\n    {text}\n")
        sys.modules.pop("shop_agents", None)
        importlib.invalidate_caches()
        module = importlib.import_module("shop_agents")
        module.handle.__annotations__["notification"] = Notification[Any]
        return module

    return write


async def test_other_code_of_the_same_declarations_is_a_deploy(
    kind: str, nats_url: str, url: str | None, code: Callable[[str], ModuleType]
) -> None:
    def app_of(text: str) -> App:
        app = App("contract", config=app_config(kind, nats_url))
        app.agent("mars", start="new")(code(text).handle)
        return app

    async with harness(app_of("first = 1"), server=url) as t:
        await deployed(t, 1)
        (first,) = (await recorded(t, bool)).values()
        await t.deploy(app_of("second = 'longer'"))
        (second,) = (await recorded(t, bool)).values()
        assert len({first["code"], second["code"]} - {""}) == 2
        assert (await deployed(t, 2))[-1] == ["code of shop_agents changed"]


async def test_what_an_app_declares_is_recorded_again_where_somebody_has_deleted_it(
    app: App, url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(declarations, "LOOK_SECONDS", 0.2)

    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None: ...

    async with harness(app, server=url) as t:
        bucket = await app.key_value(BUCKET)
        for key in ("contract/asyncapi", "contract/declared"):
            with anyio.fail_after(PATIENCE_SECONDS):
                while await bucket.get(key) is None:
                    await t.advance(0.1)
        for key in ("contract/asyncapi", "contract/declared"):
            await bucket.delete(key)
        with anyio.fail_after(PATIENCE_SECONDS):
            while await bucket.get("contract/asyncapi") is None:
                await t.advance(0.1)
        assert await bucket.get("contract/declared") is not None


async def test_a_worker_that_says_nothing_more_is_forgotten_also_in_a_bucket_without_an_age(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_records, "LIVES_SECONDS", 0.1)
    monkeypatch.setattr(worker_records, "TTL_SECONDS", 0.2)
    record = {"host": "h", "process": 1, "member": "", "version": "1", "started": "2026-11-20T00:00:00Z"}
    record |= {"age_seconds": 1.0, "agents": {}}
    async with app:
        bucket = await app.key_value(OF_WORKERS)  # as somebody else has made it
        await bucket.put("h.1.a", json.dumps(record).encode())
        assert await worker_records.of_app(app.session.admin, "contract") != AppWorkers()
        with anyio.fail_after(PATIENCE_SECONDS):
            while True:
                if await worker_records.of_app(app.session.admin, "contract") == AppWorkers():
                    break
                await anyio.sleep(0.05)
