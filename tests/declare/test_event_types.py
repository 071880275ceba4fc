"""Event types that are declared in Python: read, checked and told as those of a file."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from aviso_workers import App, Notification, Router, config
from aviso_workers.aviso.literals import Duration, Size
from aviso_workers.aviso.schema import (
    EventType,
    IntHandler,
    PayloadRule,
    PolygonHandler,
    StoragePolicy,
    StringHandler,
    Topic,
)
from aviso_workers.config import Config, NotificationBackend
from aviso_workers.errors import ConfigError, DeclarationError
from aviso_workers.testing import harness
from tests.contract.settings import app_config

IN_MEMORY = "notification_backend: {kind: in_memory}\n"
RIDE = """
notification_schema:
  ride:
    topic: {base: ride, key_order: [vendor, n]}
    identifier:
      vendor: {type: StringHandler, required: true}
      n: {type: IntHandler, range: [0, 10], required: true}
"""
N = {"type": "IntHandler", "range": [0, 10], "required": True}

Write = Callable[[str], str]


@pytest.fixture(autouse=True)
def _without_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in ("AVISO_WORKERS_CONFIG_FILE", "AVISOSERVER_CONFIG_FILE", "NATS_CONTEXT", "NATS_TOKEN"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write(text)`: the path of a configuration with this text."""

    def write(text: str) -> str:
        (tmp_path / "aviso.yaml").write_text(text)
        return "aviso.yaml"

    return write


def here(lines: int = 0) -> str:
    """Return the place of the caller's line, or of one so many lines further up, as origins and mistakes have it."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"{__file__}:{frame.f_back.f_lineno - lines}"


class TestWithoutAFile:
    def test_all_else_has_its_default(self) -> None:
        app = App("rides")
        app.event_type("ride", key=["vendor", "n"])
        assert app.mistakes() == []
        assert app.config.notification_backend == NotificationBackend(kind="jetstream")
        assert app.config.sources == ()

    def test_the_environment_says_the_rest(self, monkeypatch: pytest.MonkeyPatch) -> None:
        app = App("rides")
        app.event_type("ride", key=["vendor", "n"])
        monkeypatch.setenv("AVISO_WORKERS_NOTIFICATION_BACKEND__KIND", "in_memory")
        assert app.config.notification_backend.kind == "in_memory"

    def test_a_file_that_is_named_must_be_there(self) -> None:
        app = App("rides", config="nowhere.yaml")
        app.event_type("ride", key=["vendor", "n"])
        assert [mistake for mistake in app.mistakes() if "'nowhere.yaml' is not a file" in mistake]

    def test_an_app_that_declares_none_needs_a_file(self) -> None:
        (mistake,) = App("rides").mistakes()
        assert "no configuration file: looked for" in mistake

    @pytest.mark.anyio
    async def test_an_agent_is_given_what_is_published(self) -> None:
        app = App("rides")
        app.event_type("ride", key=["vendor", "n"], identifier={"n": N})
        seen: list[str] = []

        @app.agent("ride")
        async def count(notification: Notification) -> None:
            seen.append(notification.identifier["n"])

        async with harness(app) as t:
            await t.notify("ride", {"vendor": "green", "n": 7})
            await t.settle()
            assert t.outcomes(count) == ["acked"]
        assert seen == ["7"]


async def kept_of_two(app: App, url: str | None) -> list[Any]:
    """Return what is stored after two notifications of one subject."""
    async with harness(app, server=url) as t:
        for payload in (1, 2):
            await t.notify("ride", {"n": 1}, payload)
        return [each.payload async for each in app.replay("ride")]


@pytest.fixture(params=["in_memory", "jetstream"])
def url(request: pytest.FixtureRequest) -> str | None:
    return None if request.param == "in_memory" else str(request.getfixturevalue("nats_server").url)


class TestWhatItMeans:
    def test_a_field_of_the_key_without_a_rule_is_any_text(self) -> None:
        app = App("rides")
        app.event_type("ride", key=["vendor", "n"])
        text = StringHandler(required=True)
        assert app.config.notification_schema == {
            "ride": EventType(
                topic=Topic(base="ride", key_order=("vendor", "n")),
                identifier={"vendor": text, "n": text},
                storage_policy=StoragePolicy(allow_duplicates=True),
            )
        }

    @pytest.mark.anyio
    async def test_its_stream_keeps_every_notification(self, url: str | None) -> None:
        app = App("rides")
        app.event_type("ride", key=["n"], storage_policy={"retention_time": "1h"})
        assert await kept_of_two(app, url) == [1, 2]

    @pytest.mark.anyio
    async def test_its_stream_keeps_the_newest_of_each_subject_where_it_says_so(self, url: str | None) -> None:
        app = App("rides")
        app.event_type("ride", key=["n"], latest_only=True)
        assert await kept_of_two(app, url) == [2]

    def test_latest_only_does_not_say_the_opposite_of_the_storage_policy(self) -> None:
        with pytest.raises(DeclarationError, match=r"event type 'ride': latest_only=True keeps one .* and allow_dup"):
            App("rides").event_type("ride", key=["n"], latest_only=True, storage_policy={"allow_duplicates": True})
        with pytest.raises(
            DeclarationError, match="event type 'ride': latest_only= must be True or False, found 'yes'"
        ):
            App("rides").event_type("ride", key=["n"], latest_only="yes")  # type: ignore[arg-type]

    def test_everything_is_said_in_the_words_of_a_file(self) -> None:
        app = App("rides")
        app.event_type(
            "ride",
            key=["n"],
            identifier={"n": N, "polygon": {"type": "PolygonHandler", "required": False, "description": "Where"}},
            payload={"required": True},
            storage_policy={"retention_time": "30d", "max_size": "2Gi", "max_messages": 5, "allow_duplicates": True},
            base="rides",
        )
        (declared,) = app.config.notification_schema.values()
        assert declared == EventType(
            topic=Topic(base="rides", key_order=("n",)),
            identifier={
                "n": IntHandler(required=True, range=(0, 10)),
                "polygon": PolygonHandler(required=False, description="Where"),
            },
            payload=PayloadRule(required=True),
            storage_policy=StoragePolicy(
                retention_time=Duration.parse("30d"), max_size=Size.parse("2Gi"), max_messages=5, allow_duplicates=True
            ),
        )

    def test_it_comes_with_the_router_that_declares_it(self) -> None:
        router = Router("green")
        router.event_type("ride", key=["vendor"])
        app = App("rides")
        app.include(router, prefix="theirs")
        assert list(app.config.notification_schema) == ["ride"]

    def test_it_is_in_the_configuration_that_was_loaded_before(self) -> None:
        app = App("rides", config=app_config("in_memory", ""))
        assert "ride" not in app.config.notification_schema
        app.event_type("ride", key=["vendor"])
        assert "ride" in app.config.notification_schema

    def test_its_values_come_from_the_line_that_declares_it(self) -> None:
        app = App("rides")
        app.event_type("ride", key=["vendor"])
        assert app.config.origins["notification_schema.ride.topic.base"] == f"App 'rides', {here(1)}"

    def test_the_environment_goes_over_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        app = App("rides")
        app.event_type("ride", key=["vendor"], storage_policy={"retention_time": "30d"})
        variable = "AVISO_WORKERS_NOTIFICATION_SCHEMA__RIDE__STORAGE_POLICY__RETENTION_TIME"
        monkeypatch.setenv(variable, "7d")
        policy = app.config.notification_schema["ride"].storage_policy
        assert policy is not None
        assert policy.retention_time == 7 * 86_400
        assert app.config.origins["notification_schema.ride.storage_policy.retention_time"] == variable
        app.configure(app.config.with_defaults(retry_attempts=7))  # as a worker does
        assert app.mistakes() == []


@pytest.mark.parametrize(
    ("stated", "mistake"),
    [
        ({"key": []}, ".topic.key_order must not be empty"),
        ({"key": "vendor"}, ".topic.key_order: expected a list, found text"),
        ({"key": [["a"]]}, ".topic.key_order[0]: expected text, found a list"),
        ({"key": ["n"], "identifier": ["n"]}, ".identifier: expected a mapping, found a list"),
        ({"key": ["a", "a"]}, ".topic.key_order names 'a' twice"),
        ({"key": ["a"], "base": "a.b"}, ".topic.base must match [A-Za-z0-9][A-Za-z0-9_-]*, not 'a.b'"),
        (
            {"key": ["n"], "identifier": {"n": {"type": "Int"}}},
            ".identifier.n.type: expected the name of a rule, found",
        ),
        ({"key": ["n"], "identifier": {"n": {"type": "IntHandler"}}}, ".identifier.n.required is missing"),
        (
            {"key": ["n"], "identifier": {"n": {**N, "rnge": [0, 1]}}},
            ".identifier.n: unknown field(s): rnge; did you mean 'range'?",
        ),
        (
            {"key": ["n"], "identifier": {"n": {**N, "range": [9, 1]}}},
            ".identifier.n.range must be [min, max] with min",
        ),
        (
            {"key": ["n"], "identifier": {"n": {**N, "range": "1-9"}}},
            ".identifier.n.range: expected a list, found text",
        ),
        ({"key": ["n"], "payload": True}, ".payload: expected a mapping, found text"),
        (
            {"key": ["n"], "storage_policy": {"retention_time": "a day"}},
            ".storage_policy.retention_time: Schema 'ride' storage_policy.retention_time is invalid: ",
        ),
    ],
)
def test_a_mistake_is_told_in_the_words_of_a_file_with_the_line_that_declares_it(
    stated: dict[str, Any], mistake: str
) -> None:
    app = App("rides")
    app.event_type("ride", **stated)
    expected = f"App 'rides', {here(1)}: notification_schema.ride{mistake}"

    @app.agent("ride")
    async def count(notification: Notification) -> None: ...

    (found,) = app.mistakes()
    assert found.startswith(expected), found
    with pytest.raises(ConfigError) as raised:
        _ = app.config
    assert raised.value.mistakes == (found,)


@pytest.mark.parametrize(
    ("stated", "complaint"),
    [
        (
            {"key": ["n"], "identifier": {"n": {"type": IntHandler}}},
            "event type 'ride': <class .*IntHandler'> is not a text",
        ),
        ({"key": ["n"], "identifier": {"n": {5: "range"}}}, "event type 'ride': the key 5 must be text"),
        ({"key": {"n"}}, "event type 'ride': {'n'} is not a text, number, boolean, list or mapping"),
        ({"key": 5, "name": 5}, "event type 5: its name must be text"),
        ({"key": ["\ud800"]}, "event type 'ride': '.ud800' is not text: it holds half of a surrogate pair"),
    ],
)
def test_what_no_file_could_hold_is_refused_at_once(stated: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DeclarationError, match=complaint):
        App("rides").event_type(**{"name": "ride", **stated})


class TestBesideAFile:
    def test_both_have_event_types(self, write: Write) -> None:
        app = App("rides", config=write(IN_MEMORY + RIDE))
        app.event_type("fare", key=["vendor"])
        assert list(app.config.notification_schema) == ["ride", "fare"]

    def test_an_empty_section_is_none(self, write: Write) -> None:
        app = App("rides", config=write(IN_MEMORY + "notification_schema:\n"))
        app.event_type("ride", key=["vendor"])
        assert list(app.config.notification_schema) == ["ride"]

    def test_one_that_says_the_same_in_both_is_one(self, write: Write) -> None:
        path = write(IN_MEMORY + RIDE.replace("required: true", "required: false, description: What"))
        app = App("rides", config=path)
        app.event_type("ride", key=["vendor", "n"], identifier={"n": N}, latest_only=True)
        assert app.mistakes() == []
        app = App("rides", config=path)
        app.event_type("ride", key=["vendor", "n"], identifier={"n": N})
        (mistake,) = app.mistakes()
        assert mistake.endswith(
            ". Of the two, only that in Python keeps every notification: say `allow_duplicates: true` in the file, or "
            "latest_only=True in Python"
        )

    def test_one_that_differs_is_a_mistake_that_names_both_places(self, write: Write) -> None:
        app = App("rides", config=write(IN_MEMORY + RIDE))
        app.event_type("ride", key=["n", "vendor"], identifier={"n": N})
        at = here(1)

        @app.agent("ride")
        async def count(notification: Notification) -> None: ...

        assert app.mistakes() == [
            f"aviso.yaml:4: notification_schema.ride is declared another way at App 'rides', {at}: "
            "keep one of them, or let both say the same"
        ]

    def test_one_that_cannot_be_read_differs(self, write: Write) -> None:
        app = App("rides", config=write(IN_MEMORY + RIDE))
        app.event_type("ride", key=["vendor", "n"], identifier={"n": {**N, "range": 5}})
        assert [mistake for mistake in app.mistakes() if "notification_schema.ride is declared another way" in mistake]

    def test_a_mistake_in_the_files_is_told_as_well(self, write: Write) -> None:
        app = App("rides", config=write(IN_MEMORY + RIDE.replace("[0, 10]", "5")))
        app.event_type("ride", key=["vendor", "n"], identifier={"n": N})
        assert [mistake for mistake in app.mistakes() if "ride.identifier.n.range: expected a list" in mistake]

    def test_two_declarations_are_held_to_the_same(self) -> None:
        app = App("rides")
        app.event_type("ride", key=["vendor"])
        first = here(1)
        for key in (["vendor"], ["n"]):
            router = Router("green")
            router.event_type("ride", key=key)
            app.include(router)
        assert app.mistakes() == [
            f"App 'rides', {first}: notification_schema.ride is declared another way at Router 'green', {here(3)}: "
            "keep one of them, or let both say the same"
        ]

    def test_bases_are_not_shared(self, write: Write) -> None:
        app = App("rides", config=write(IN_MEMORY + RIDE))
        app.event_type("fare", key=["vendor"], base="RIDE")
        assert app.mistakes() == [
            f"App 'rides', {here(2)}: notification_schema.fare.topic.base: Schemas 'ride' and 'fare' both define topic "
            "base 'RIDE'; case is ignored"
        ]

    def test_a_section_that_is_no_mapping_is_the_mistake(self, write: Write) -> None:
        app = App("rides", config=write(IN_MEMORY + "notification_schema: [ride]\n"))
        app.event_type("ride", key=["vendor"])
        assert app.mistakes() == ["aviso.yaml:2: notification_schema: expected a mapping, found a list"]


def config_of(event_type: Any, **backend: Any) -> Config:
    return Config(
        notification_backend=NotificationBackend(**{"kind": "jetstream", **backend}),
        notification_schema={"ride": event_type},
    )


def kept(**policy: Any) -> EventType:
    """A ride whose stream keeps what this policy says."""
    return EventType(
        topic=Topic(base="ride", key_order=("n",)),
        identifier={"n": IntHandler(required=True, range=(0, 10))},
        storage_policy=StoragePolicy(**policy),
    )


class TestAConfigThatIsWrittenInPython:
    def test_is_taken_as_it_is_where_nothing_is_wrong(self) -> None:
        ride = kept(allow_duplicates=True, retention_time=Duration.parse("30d"))
        app = App("rides", config=config_of(ride))
        assert app.mistakes() == []
        assert app.config.notification_schema == {"ride": ride}

    @pytest.mark.parametrize(
        ("ride", "mistake"),
        [
            (
                EventType(topic=Topic(base="ride", key_order=("m",)), identifier={"n": IntHandler(required=True)}),
                "topic.key_order names 'm', which is not in identifier",
            ),
            (
                EventType(identifier={"n": IntHandler(required=True, range=(9, 1))}),
                "identifier.n.range must be [min, max] with min <= max, not [9, 1]",
            ),
            (
                EventType(identifier={"n": IntHandler(required=True, range="1-9")}),  # type: ignore[arg-type]
                "identifier.n.range: expected a list, found text",
            ),
        ],
    )
    def test_is_checked_as_a_file_is(self, ride: EventType, mistake: str) -> None:
        app = App("rides", config=config_of(ride))
        assert app.mistakes() == [f"Config(...): notification_schema.ride.{mistake}"]
        with pytest.raises(ConfigError, match=r"^Config\(...\): notification_schema.ride"):
            _ = app.config

    def test_says_what_cannot_be_read_at_all(self) -> None:
        ride = EventType(identifier={"n": IntHandler(required=object())})  # type: ignore[arg-type]
        (mistake,) = App("rides", config=config_of(ride)).mistakes()
        assert mistake.startswith("Config(...): notification_schema.ride cannot be read: <object object")

    def test_may_not_ask_a_backend_for_what_it_does_not_do(self) -> None:
        (mistake,) = App("rides", config=config_of(kept(max_messages=1), kind="in_memory")).mistakes()
        assert mistake.endswith("storage_policy.max_messages is not supported by backend 'in_memory'")

    @pytest.mark.anyio
    async def test_is_at_work_in_a_harness_whatever_its_streams_keep(self) -> None:
        app = App("rides", config=config_of(kept(allow_duplicates=True)))
        app.event_type("fare", key=["n"], storage_policy={"allow_duplicates": True})
        async with harness(app) as t:
            await t.notify("ride", {"n": 1})
            await t.notify("fare", {"n": 1})
            assert [each.event_type for each in t.published] == ["ride", "fare"]
        assert app.mistakes() == []

    def test_has_those_of_the_app_as_well(self) -> None:
        app = App("rides", config=app_config("in_memory", ""))
        app.event_type("ride", key=["vendor"])
        assert app.mistakes() == []
        assert {"mars", "ride"} <= app.config.notification_schema.keys()

    def test_may_differ_from_none_of_the_app(self) -> None:
        ride = EventType(identifier={"n": IntHandler(required=True)})
        app = App("rides", config=config_of(ride))
        app.event_type("ride", key=["vendor"])
        assert app.mistakes() == [
            f"Config(...): notification_schema.ride is declared another way at App 'rides', {here(2)}: "
            "keep one of them, or let both say the same"
        ]

    def test_a_loaded_one_differs_by_its_line(self, write: Write) -> None:
        app = App("rides", config=config.load(write(IN_MEMORY + RIDE), environ={}))
        app.event_type("ride", key=["vendor"])
        (mistake,) = app.mistakes()
        assert mistake.startswith("aviso.yaml:4: notification_schema.ride is declared another way at App 'rides', ")


def test_a_field_that_no_message_carries_is_warned_of() -> None:
    app = App("rides", config=Config(notification_backend=NotificationBackend(kind="in_memory")))
    app.event_type("ride", key=["n"], identifier={"driver": {"type": "StringHandler", "required": True}})
    at = here(1)
    (warning,) = app.config.warnings
    assert warning.startswith(f"App 'rides', {at}: notification_schema.ride.identifier.driver: is not in key_order")


@pytest.mark.parametrize(
    ("key", "complaint"),
    [
        ("zzz", "storage_policy has no key 'zzz': it has retention_time, max_messages, .*, compression$"),
        ("discard_policy", "'discard_policy': .*; discard_policy is a key of notification_backend.jetstream$"),
        ("max_bytes", "'max_bytes': .*; max_bytes is a key of notification_backend.jetstream$"),
        ("max_age", "'max_age': it has .*, compression$"),
        (5, "has no key 5"),
    ],
)
def test_a_storage_policy_has_no_other_keys_than_its_own(key: Any, complaint: str) -> None:
    policy: Any = {"allow_duplicates": True, key: "new"}
    with pytest.raises(DeclarationError, match=f"event type 'ride': .*{complaint}"):
        App("tests").event_type("ride", key=["n"], storage_policy=policy)


@pytest.mark.parametrize("time", ["1d", 86_400, 86_400.0, timedelta(days=1)])
def test_a_retention_time_is_a_duration_in_every_spelling(time: Any) -> None:
    app = App("rides")
    app.event_type("ride", key=["n"], storage_policy={"retention_time": time})
    policy = app.config.notification_schema["ride"].storage_policy
    assert policy is not None
    assert policy.retention_time == Duration(86_400)


@pytest.mark.parametrize("time", [0, -5, 1.5, True, float("nan"), timedelta(seconds=-1), timedelta(milliseconds=5)])
def test_a_retention_time_is_whole_seconds(time: Any) -> None:
    with pytest.raises(DeclarationError, match=r"event type 'ride': storage_policy\.retention_time"):
        App("rides").event_type("ride", key=["n"], storage_policy={"retention_time": time})
