"""What the code of an app declares, as workers record it for commands that have no code."""

from __future__ import annotations

import json
import re
from typing import Any

import anyio
import pydantic
import pytest
from msgspec import structs

from aviso_workers import App, Notification, config
from aviso_workers.aviso.schema import topic_of
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.config import Config, completed
from aviso_workers.jetstream.fields import DeclaredStream
from aviso_workers.ops import aviso_admin
from aviso_workers.state import asyncapi, consumer_records, declarations
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

TYPES: dict[str, dict[str, Any]] = {
    "plain": {"key": ["class", "step"]},
    "kept": {
        "key": ["class", "date", "step"],
        "identifier": {
            "date": {"type": "DateHandler", "canonical_format": "%Y%m%d", "required": True},
            "step": {"type": "IntHandler", "range": [0, 240], "required": True},
            "class": {"type": "EnumHandler", "values": ["od", "rd"], "required": True},
        },
        "payload": {"required": True},
        "storage_policy": {"retention_time": "7d", "max_messages": 1000, "max_size": "1Gi", "compression": True},
    },
    "named": {"key": ["expver"], "base": "other", "latest_only": True},
}


EMPTY = config.Config(notification_backend=config.NotificationBackend(kind="jetstream"))


class Odd(pydantic.BaseModel):
    @classmethod
    def __get_pydantic_json_schema__(cls, *_: Any) -> Any:
        raise KeyError("no schema today")


def app_with(*types: str, settings: Config = EMPTY) -> App:
    app = App("fields", config=settings)
    for name in types:
        app.event_type(name, **TYPES[name])

        @app.agent(name, name=f"index_{name}")
        async def index(notification: Notification) -> None: ...

    return app


async def recorded(backend: InMemoryBackend, app: App) -> declarations.AppDeclarations:
    schema = app.config.notification_schema
    await declarations.record(backend, app=app.name, declared=app, schema=schema, agents=app.agents)
    return (await declarations.stored(backend))[app.name]


@pytest.mark.parametrize("name", TYPES)
async def test_an_event_type_is_read_as_it_was_declared(backend: InMemoryBackend, name: str) -> None:
    app = app_with(name)
    await recorded(backend, app)
    found = declarations.event_types(await declarations.stored(backend), known=())
    examined = completed(EMPTY, [(each, entry) for each, (entry, _) in found.items()])
    assert examined.mistakes == ()
    assert examined.config.notification_schema == app.config.notification_schema


async def test_agents_timers_and_tasks_are_recorded(backend: InMemoryBackend) -> None:
    app = app_with("plain", "kept")
    app.every("1h", singleton=False)(report)
    app.task(watch)
    found = await recorded(backend, app)
    assert found.agents == {"index_plain": "plain", "index_kept": "kept"}
    assert (found.timers, found.tasks) == ({"report": "every 3600s"}, ("watch",))
    assert found.modules == (__name__,)


async def report() -> None: ...


async def watch() -> None: ...


async def test_what_is_recorded_already_is_not_written_again(backend: InMemoryBackend) -> None:
    first = await recorded(backend, app_with("plain"))
    revision = await (await consumer_records.bucket(backend, "fields")).revision()
    assert await recorded(backend, app_with("plain")) == first
    assert await (await consumer_records.bucket(backend, "fields")).revision() == revision
    assert (await recorded(backend, app_with("named"))).agents == {"index_named": "named"}


async def test_what_changed_is_told_in_words(backend: InMemoryBackend) -> None:
    app = app_with("plain", "kept")
    app.every("1h", singleton=False)(report)
    before = await recorded(backend, app)
    after = structs.replace(
        before,
        version="0.9.0",
        agents={"index_plain": "plain", "added": "plain"},
        policies={
            "index_plain": {**before.policies["index_plain"], "concurrency": "7", "batch": "10, or what came"},
            "added": before.policies["index_plain"],
        },
        timers={"report": "every 60s"},
        tasks=("watch",),
        code={__name__: "another", "shop.agents": "new"},
        event_types={**before.event_types, "kept": {}},
    )
    assert list(declarations._changes(before, after)) == [
        f"aviso-workers: version: {before.version} -> 0.9.0",
        "code of shop.agents added",
        f"code of {__name__} changed",
        "agent index_plain: batch: none -> 10, or what came",
        f"agent index_plain: concurrency: {before.policies['index_plain']['concurrency']} -> 7",
        "agent index_kept removed",
        "timer report: schedule: every 3600s -> every 60s",
        "event type kept changed",
        "agent added added",
        "task watch added",
    ]


async def test_of_very_many_changes_the_first_are_told(backend: InMemoryBackend) -> None:
    before = await recorded(backend, app_with("plain"))
    after = structs.replace(before, agents=before.agents | {f"agent{number}": "plain" for number in range(50)})
    changed = declarations._noted((), before, after)[0].changed
    assert changed[-2:] == ("agent agent19 added", "and 30 more")


async def test_a_deploy_is_in_the_list_although_the_worker_that_added_it_was_killed(backend: InMemoryBackend) -> None:
    await recorded(backend, app_with("plain"))
    bucket = await consumer_records.bucket(backend, "fields")
    declared = await bucket.get("fields/declared")
    assert declared is not None
    await recorded(backend, app_with("named"))
    await bucket.put("fields/declared", declared.value)  # as where it was killed before it wrote this
    await recorded(backend, app_with("named"))
    found = declarations.deploys(await bucket.entries())["fields"]
    assert [each.changed[0] for each in found] == ["the first start that was recorded", "agent index_plain removed"]


async def test_so_many_deploys_are_kept_and_the_oldest_go(backend: InMemoryBackend) -> None:
    for number in range(15):
        app = app_with()
        app.every(f"{number + 1}s", singleton=False)(report)
        await recorded(backend, app)
    found = declarations.deploys(await consumer_records.entries(backend))["fields"]
    assert [each.changed[0] for each in found] == [
        f"timer report: schedule: every {number}s -> every {number + 1}s" for number in range(5, 15)
    ]


@pytest.mark.parametrize("data", [b"", b"[7]", b"{}", b'[{"time": "x"}]'])
async def test_a_list_of_deploys_that_cannot_be_read_is_begun_again(backend: InMemoryBackend, data: bytes) -> None:
    bucket = await consumer_records.bucket(backend, "fields")
    await bucket.put("fields/deploys", data)
    assert declarations.deploys(await bucket.entries()).get("fields", ()) == ()
    await recorded(backend, app_with("plain"))
    (found,) = declarations.deploys(await bucket.entries())["fields"]
    assert found.changed == ("the first start that was recorded",)


async def test_known_event_types_stay_as_they_are(backend: InMemoryBackend) -> None:
    await recorded(backend, app_with("plain", "kept"))
    found = declarations.event_types(await declarations.stored(backend), known={"kept": None})
    assert found.keys() == {"plain"}
    assert str(found["plain"][0].place).startswith(f"app fields ({__name__}; aviso-workers ")


async def test_apps_that_declare_one_name_differently_are_named(backend: InMemoryBackend) -> None:
    for name, types in (("old", "plain"), ("new", "kept"), ("same", "kept")):
        app = app_with(types)
        await declarations.record(
            backend, app=name, declared=app, schema=app.config.notification_schema, agents=app.agents
        )
    found = await declarations.stored(backend)
    renamed = structs.replace(found["old"], event_types={"kept": found["old"].event_types["plain"]})
    entries = declarations.event_types({**found, "old": renamed}, known=())
    assert entries["kept"][1] == ("old",)


async def test_a_record_of_another_version_counts_as_none(backend: InMemoryBackend) -> None:
    await (await consumer_records.bucket(backend, "fields")).put("fields/declared", b'{"event_types": 7}')
    assert await declarations.stored(backend) == {}


MARS: dict[str, Any] = {
    "topic": {"base": "mars", "key_order": ["step"]},
    "identifier": {"step": {"type": "StringHandler", "required": True}},
}
INJECTED = "X 0\r\n\r\nPUB $JS.API.STREAM.DELETE.VICTIM 0\r\n\r\nPUB Y"


def based(base: str) -> dict[str, Any]:
    return {**MARS, "topic": {**MARS["topic"], "base": base}}


async def of_two_apps(
    backend: InMemoryBackend, others: dict[str, Any], *, settings: Config = EMPTY, **further: Any
) -> tuple[dict[str, str], list[str]]:
    """Return the bases by event type that operators' tools know, and what they tell, where the app `fields` reads
    `mars`, and an app `b` has recorded these event types, at a time to come."""
    await put(backend, "b", {"event_types": others, "time": "2099-01-01T00:00:00Z", **further})
    await put(backend, "fields", {"event_types": {"mars": MARS}, "agents": {"index": "mars"}})
    stored, unreadable = declarations.parsed(await consumer_records.entries(backend))
    known, told = aviso_admin.with_declared(settings, stored)
    return {name: topic_of(name, each).base for name, each in known.notification_schema.items()}, told + unreadable


async def put(backend: InMemoryBackend, app: str, record: dict[str, Any]) -> None:
    empty: dict[str, Any] = {"modules": [], "agents": {}, "timers": {}, "tasks": [], "policies": {}, "code": {}}
    whole = {"time": "2026-01-01T00:00:00Z", "version": "1", **empty, "event_types": {}, **record}
    await (await consumer_records.bucket(backend, app)).put(f"{app}/declared", json.dumps(whole).encode())


@pytest.mark.parametrize(
    "others",
    [
        {"zzz": based(INJECTED)},
        {INJECTED: {**MARS, "topic": None}},
        {"": based("zzz")},
        {"mars\r\n": based("zzz")},
        {"zzz": based("aviso_workers_audit")},
        {"zzz": based("KV_fields__state")},
        {"zzz": based("a" * 5000)},
        {"zzz": based("mars")},
        {"zzz": {**MARS, "newer": 1, "identifier": {"step": {**MARS["identifier"]["step"], "newer": 1}}}},
        {"zzz": based(INJECTED), "zzz.topic": {}, "mars.topic": {}, "mars.identifier": based("a.b")},
    ],
    ids=lambda others: f"{others}"[:40],
)
async def test_a_recorded_event_type_with_a_mistake_is_left_out_and_hides_no_other(
    backend: InMemoryBackend, others: dict[str, Any]
) -> None:
    known, told = await of_two_apps(backend, others)
    assert known == {"mars": "mars"}
    assert [text for text in told if text.startswith("left out: app b (")]


async def test_a_recorded_event_type_that_contradicts_a_stream_of_the_configuration_is_left_out(
    backend: InMemoryBackend,
) -> None:
    settings = structs.replace(EMPTY, streams={"ORDERS": DeclaredStream(subjects=("orders.new",))})
    known, told = await of_two_apps(backend, {"zzz": based("orders"), "broken": {}}, settings=settings)
    assert known == {"mars": "mars"}
    assert [text for text in told if "streams.ORDERS.subjects contradicts notification_schema.zzz" in text]


@pytest.mark.parametrize("agents", [{}, {"mine": "mars"}])
async def test_an_event_type_of_another_app_takes_the_place_of_none(
    backend: InMemoryBackend, agents: dict[str, str]
) -> None:
    """Whatever the other app records, also that it is newer and that its agents read the event type."""
    known, told = await of_two_apps(backend, {"mars": based("stolen")}, agents=agents)
    assert sorted(known.values()) == ["mars", "stolen"]
    assert [text for text in told if text.startswith("another event type mars is that of app ")]
    if not agents:
        assert known == {"mars": "mars", "mars (app b)": "stolen"}


async def test_the_time_of_a_record_is_when_it_was_stored(backend: InMemoryBackend) -> None:
    await put(backend, "b", {"time": "2099-01-01T00:00:00Z"})
    (entry,) = await consumer_records.entries(backend)
    assert (await declarations.stored(backend))["b"].time == entry.time


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"event_types": {f"z{number}": {} for number in range(20_000)}}, "20,000 event types, and at most 2,000"),
        ({"agents": {f"z{number}": "" for number in range(2_001)}}, "2,001 agents, and at most 2,000 are read"),
        ({"timers": {f"z{number}": "" for number in range(2_001)}}, "2,001 timers, and at most 2,000 are read"),
        ({"version": "x" * 600_000}, "bytes, and at most 524,288 are read"),
        ({"event_types": {"zzz": [0] * 10_000}}, "more than 10,000 values"),
        ({"event_types": {"x" * 201: {}}}, "a key of more than 200 characters"),
        ({"event_types": {"zzz": [[[[[[[[[]]]]]]]]]}}, "nested deeper than 8 levels"),
    ],
    ids=lambda value: f"{value}"[:30],
)
async def test_a_record_of_more_than_an_app_can_mean_is_not_read_and_told(
    backend: InMemoryBackend, record: dict[str, Any], why: str
) -> None:
    known, told = await of_two_apps(backend, record.pop("event_types", {}), **record)
    assert known == {"mars": "mars"}
    assert told[-1].startswith("what app b declares is left out, because its record cannot be read: ")
    assert why in told[-1]


async def test_the_first_mistakes_of_an_app_are_told(backend: InMemoryBackend) -> None:
    _, told = await of_two_apps(backend, {f"z{number:03}": {} for number in range(500)})
    assert "z004.identifier is missing" in told[4]
    assert told[5] == "app b: and 495 more"


async def test_a_retired_app_declares_nothing(backend: InMemoryBackend) -> None:
    await recorded(backend, app_with("plain"))
    await asyncapi.record(backend, EMPTY, app_with("plain"))
    await declarations.remove(backend, app="fields")
    assert await declarations.stored(backend) == {}
    assert await consumer_records.entries(backend) == []


async def test_a_document_is_recorded_once(backend: InMemoryBackend) -> None:
    app = app_with("plain")
    assert await asyncapi.stored(backend, "fields") is None
    for _ in range(2):
        await asyncapi.record(backend, app.config, app)
    assert await asyncapi.stored(backend, "fields") == asyncapi.document(app.config, app, version="0.0.0")
    assert (
        len(await consumer_records.entries(backend))
        == await (await consumer_records.bucket(backend, "fields")).revision()
    )


async def test_a_document_that_cannot_be_made_or_is_too_large_is_left_out(
    backend: InMemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = app_with("plain")
    monkeypatch.setattr(asyncapi, "MAX_BYTES", 1000)
    await asyncapi.record(backend, app.config, app)
    left_out = (await asyncapi.stored(backend, "fields") or {})[asyncapi.LEFT_OUT]
    assert re.fullmatch(r"it has 1,\d+ bytes, and at most 1,000 are recorded", left_out)

    @app.agent("plain")
    async def odd(notification: Notification[Odd]) -> None: ...

    await asyncapi.record(backend, app.config, app)
    assert await asyncapi.stored(backend, "fields") == {
        asyncapi.LEFT_OUT: "it cannot be made: KeyError: 'no schema today'"
    }


async def test_a_worker_records_them_when_it_starts() -> None:
    in_memory = config.Config(notification_backend=config.NotificationBackend(kind="in_memory"))
    app, stop = app_with("plain", settings=in_memory), anyio.Event()
    async with app, anyio.create_task_group() as tasks:
        tasks.start_soon(app._work, stop)
        with anyio.fail_after(PATIENCE_SECONDS):
            while not await asyncapi.stored(app.session.backend, "fields"):
                await app.session.backend.clock.sleep(0.01)
            assert (await declarations.stored(app.session.admin)).keys() == {"fields"}
        stop.set()
