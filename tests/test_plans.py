"""What is wanted of a stream, and the way there from what a server has."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import UNSET, structs

from aviso_workers.aviso.literals import Duration, Size, SizeLimit
from aviso_workers.aviso.schema import EventType, StoragePolicy, StringHandler, Topic
from aviso_workers.config import Config, DeclaredStream, JetStream, NotificationBackend, streams
from aviso_workers.jetstream import plans
from aviso_workers.jetstream.plans import Plan, Stored
from aviso_workers.jetstream.specs import ConsumerSpec, StreamSpec

SECOND = 1_000_000_000
MINUTE = 60 * SECOND
DAY = 86_400 * SECOND

SPEC = StreamSpec(
    name="MARS",
    subjects=("mars.>",),
    storage="file",
    retention="limits",
    discard="old",
    max_msgs=1000,
    max_bytes=2**30,
    max_age=7 * DAY,
    max_msgs_per_subject=1,
    num_replicas=1,
    compression="s2",
)

REPORTED: dict[str, Any] = {
    "name": "MARS",
    "subjects": ["mars.>"],
    "retention": "limits",
    "max_consumers": -1,
    "max_msgs": 1000,
    "max_bytes": 2**30,
    "max_age": 7 * DAY,
    "max_msgs_per_subject": 1,
    "max_msg_size": -1,
    "discard": "old",
    "storage": "file",
    "num_replicas": 1,
    "duplicate_window": 2 * MINUTE,
    "compression": "s2",
    "allow_direct": True,
}
"""As a server reports `SPEC`."""


def plan_of(wanted: StreamSpec, found: dict[str, Any] | None, **stored: int) -> Plan:
    """The plan for a stream that is empty, or stores so much."""
    return plans.plan(wanted, found, Stored(**stored))


class TestThePlan:
    def test_is_to_create_what_does_not_exist(self) -> None:
        plan = plan_of(SPEC, None)
        assert (plan.stream, plan.exists, plan.needed, plan.differences) == ("MARS", False, True, ())

    def test_is_nothing_where_the_server_has_what_is_wanted(self) -> None:
        plan = plan_of(SPEC, REPORTED)
        assert (plan.exists, plan.needed, plan.differences, plan.config) == (True, False, (), REPORTED)

    @pytest.mark.parametrize(
        ("field", "wanted", "reported"),
        [
            ("max_msgs", 0, -1),
            ("max_bytes", -5, -1),
            ("max_msgs_per_subject", 0, -1),
            ("num_replicas", 0, 1),
            ("compression", "none", None),
            ("max_age", 0, None),
            ("storage", "file", None),
        ],
    )
    def test_is_nothing_where_both_mean_the_same(self, field: str, wanted: Any, reported: Any) -> None:
        found = {name: value for name, value in {**REPORTED, field: reported}.items() if value is not None}
        assert plan_of(structs.replace(SPEC, **{field: wanted}), found).differences == ()

    @pytest.mark.parametrize(
        ("field", "found", "told"),
        [
            ("subjects", ["mars.>", "more.>"], "subjects: mars.>, more.> -> mars.>"),
            ("retention", "interest", "retention: interest -> limits"),
            ("discard", "new", "discard: new -> old"),
            ("max_msgs", -1, "max_msgs: unlimited -> 1000"),
            ("max_bytes", 2**20, "max_bytes: 1Mi -> 1Gi"),
            ("max_age", 30 * DAY, "max_age: 30d -> 7d"),
            ("max_age", 0, "max_age: unlimited -> 7d"),
            ("max_msgs_per_subject", -1, "max_msgs_per_subject: unlimited -> 1"),
            ("num_replicas", 3, "num_replicas: 3 -> 1"),
            ("compression", "none", "compression: none -> s2"),
        ],
    )
    def test_changes_a_field_that_has_drifted_and_no_other(self, field: str, found: Any, told: str) -> None:
        plan = plan_of(SPEC, {**REPORTED, field: found})
        assert [str(difference) for difference in plan.differences] == [told]
        assert plan.config == REPORTED

    @pytest.mark.parametrize("field", [name for name in REPORTED if name not in ("name", "subjects")])
    def test_leaves_alone_what_nobody_stated(self, field: str) -> None:
        found = {**REPORTED, field: "whatever it is"}
        plan = plan_of(StreamSpec(name="MARS", subjects=("mars.>",)), found)
        assert (plan.differences, plan.config) == ((), found)

    def test_hands_on_fields_that_are_newer_than_this_code(self) -> None:
        newer = {"allow_msg_schedules": True, "metadata": {"_nats.level": "5"}, "placement": {"tags": ["az:1"]}}
        plan = plan_of(SPEC, {**REPORTED, **newer, "discard": "new"})
        assert plan.config == {**REPORTED, **newer}

    def test_says_that_storage_cannot_be_changed(self) -> None:
        plan = plan_of(SPEC, {**REPORTED, "storage": "memory", "max_msgs": 5})
        assert (plan.storage_mismatch, plan.needed, plan.config["storage"]) == (True, False, "memory")
        assert [str(difference) for difference in plan.differences] == ["max_msgs: 5 -> 1000"]
        assert "storage: memory -> file; storage is chosen when" in str(plan.fixed[0])

    @pytest.mark.parametrize(
        ("field", "wanted", "reported"),
        [
            ("max_msg_size", -1, None),
            ("placement", {"tags": []}, None),
            ("consumer_limits", {"max_ack_pending": 5}, {"inactive_threshold": 0, "max_ack_pending": 5}),
            ("republish", {"src": ">", "dest": "a.>", "headers_only": False}, {"src": ">", "dest": "a.>"}),
            (
                "mirror",
                {"name": "A", "external": {"api": "$JS.hub.API"}},
                {"name": "A", "external": {"api": "$JS.hub.API", "deliver": ""}},
            ),
            ("sources", [{"name": "A"}], [{"name": "A", "filter_subject": ""}]),
            ("sources", [], None),
            ("allow_msg_ttl", False, None),
            ("persist_mode", "default", None),
            ("metadata", {"ours": "1"}, {"ours": "1", "theirs": "2"}),
        ],
    )
    def test_knows_what_a_server_leaves_out_of_what_is_declared(self, field: str, wanted: Any, reported: Any) -> None:
        found = REPORTED if reported is None else {**REPORTED, field: reported}
        plan = plan_of(structs.replace(SPEC, further={field: wanted}), found)
        assert (plan.differences, plan.fixed) == ((), ())

    @pytest.mark.parametrize(
        ("field", "found", "wanted", "told"),
        [
            ("deny_purge", False, True, "deny_purge: false -> true, for good"),
            ("max_msg_size", -1, 1024, "max_msg_size: unlimited -> 1Ki"),
            ("subject_delete_marker_ttl", None, 90 * SECOND, "subject_delete_marker_ttl: 0s -> 90s"),
            ("placement", None, {"tags": ["a"]}, 'placement: none -> {"tags":["a"]}'),
            ("sources", None, [{"name": "A"}], 'sources: none -> [{"name":"A"}]'),
            ("metadata", {"theirs": "2"}, {"ours": "1"}, 'metadata: {"theirs":"2"} -> {"theirs":"2","ours":"1"}'),
            ("duplicate_window", 2 * MINUTE, MINUTE, "duplicate_window: 2m -> 1m"),
        ],
    )
    def test_tells_of_what_is_declared_as_people_write_it(self, field: str, found: Any, wanted: Any, told: str) -> None:
        plan = plan_of(structs.replace(SPEC, further={field: wanted}), {**REPORTED, field: found})
        assert [str(difference) for difference in plan.differences] == [told]


STORED = {"messages": 100, "bytes": 1000, "subjects": 20}


class TestWhatWouldBeRemoved:
    @pytest.mark.parametrize(
        ("field", "found", "wanted", "told"),
        [
            ("max_msgs", -1, 30, "removes 70 of 100 messages"),
            ("max_msgs", -1, 100, ""),
            ("max_msgs", 100, -1, ""),
            ("max_bytes", -1, 300, "removes about 70 of 100 messages"),
            ("max_bytes", -1, 1000, ""),
            ("max_msgs_per_subject", -1, 1, "removes 80 of 100 messages"),
            ("max_msgs_per_subject", 10, 3, "removes up to 78 of 100 messages"),
            ("max_msgs_per_subject", 10, 81, ""),
            ("max_msgs_per_subject", 1, -1, ""),
            ("max_age", 0, DAY, "removes up to 100 of 100 messages"),
            ("max_age", DAY, 2 * DAY, ""),
            ("retention", "limits", "interest", "removes 100 of 100 messages"),
            ("retention", "interest", "limits", ""),
            ("max_msg_size", -1, 1, ""),
            ("duplicate_window", 2 * MINUTE, MINUTE, ""),
            ("subjects", ["mars.>"], ["mars.od.>"], ""),
        ],
    )
    def test_is_counted_and_left_out_of_the_update(self, field: str, found: Any, wanted: Any, told: str) -> None:
        spec = StreamSpec(name="MARS", further={field: wanted})
        plan = plan_of(spec, {**REPORTED, field: found}, **STORED)
        assert [str(each.removal) for each in plan.removing] == ([told] if told else [])
        assert [each.field for each in plan.differences] == ([] if told else [field])
        assert plan.config[field] == (found if told else wanted)
        assert plans.with_removals(plan).config[field] == wanted

    @pytest.mark.parametrize("older", [0, 7])
    def test_by_an_age_is_what_is_older(self, older: int) -> None:
        plan = plan_of(structs.replace(SPEC, max_age=DAY), REPORTED, **STORED, older=older)
        assert [each.removal.count for each in plan.removing if each.removal] == ([older] if older else [])

    def test_by_interest_is_at_most_everything_where_there_are_consumers(self) -> None:
        plan = plan_of(structs.replace(SPEC, retention="interest"), REPORTED, **STORED, consumers=1)
        assert [str(each.removal) for each in plan.removing] == ["removes up to 100 of 100 messages"]

    def test_is_nothing_where_a_full_stream_refuses_what_comes(self) -> None:
        spec = StreamSpec(name="MARS", max_msgs=30, max_bytes=300)
        assert plan_of(spec, {**REPORTED, "discard": "new"}, **STORED).removing == ()
        together = plan_of(structs.replace(spec, discard="old"), {**REPORTED, "discard": "new"}, **STORED)
        assert [each.field for each in together.removing] == ["discard", "max_msgs", "max_bytes"]

    def test_is_nothing_of_an_empty_stream(self) -> None:
        plan = plan_of(structs.replace(SPEC, max_msgs=1, max_age=DAY, retention="interest"), REPORTED)
        assert (plan.removing, len(plan.differences)) == ((), 3)

    def test_takes_the_duplicate_window_along(self) -> None:
        plan = plan_of(structs.replace(SPEC, max_age=MINUTE), REPORTED, **STORED)
        assert plan.differences == ()
        whole = plans.with_removals(plan)
        assert (whole.config["max_age"], whole.config["duplicate_window"]) == (MINUTE, MINUTE)

    def test_names_the_key_that_says_so(self) -> None:
        declared = {"MARS": DeclaredStream(max_msg_size=SizeLimit(1024))}
        config = Config(
            notification_backend=NotificationBackend(kind="jetstream", jetstream=JetStream(max_messages=5)),
            notification_schema={"mars": MARS},
            streams=declared,
        )
        keys = streams.event_stream("mars", MARS, config).keys
        assert keys["max_msgs"] == "notification_backend.jetstream.max_messages"
        assert keys["max_msgs_per_subject"] == "notification_schema.mars.storage_policy.allow_duplicates"
        assert keys["max_msg_size"] == "streams.MARS.max_msg_size"


class TestTheDuplicateWindow:
    """A server refuses an age below it."""

    def test_shrinks_with_the_age(self) -> None:
        plan = plan_of(structs.replace(SPEC, max_age=MINUTE), REPORTED)
        assert [str(difference) for difference in plan.differences] == [
            "max_age: 7d -> 1m",
            "duplicate_window: 2m -> 1m",
        ]
        assert plan.config == {**REPORTED, "max_age": MINUTE, "duplicate_window": MINUTE}

    @pytest.mark.parametrize("window", [30 * SECOND, MINUTE])
    def test_stays_where_it_is_short_enough(self, window: int) -> None:
        plan = plan_of(structs.replace(SPEC, max_age=MINUTE), {**REPORTED, "duplicate_window": window})
        assert [difference.field for difference in plan.differences] == ["max_age"]

    def test_is_not_grown_again(self) -> None:
        assert plan_of(SPEC, {**REPORTED, "duplicate_window": 30 * SECOND}).differences == ()


MARS = EventType(topic=Topic(base="Mars", key_order=("class",)), identifier={"class": StringHandler(required=True)})


def spec_of(policy: StoragePolicy | None = None, **jetstream: Any) -> StreamSpec:
    backend = NotificationBackend(kind="jetstream", jetstream=JetStream(**jetstream))
    event_type = structs.replace(MARS, storage_policy=policy)
    return streams.event_stream("mars", event_type, Config(notification_backend=backend))


def test_a_stream_of_our_own_keeps_its_replicas_where_the_configuration_says_nothing_of_them() -> None:
    found = {"name": "aviso_workers_retries", "subjects": ["retries.>"], "storage": "file", "num_replicas": 3}
    config = Config(notification_backend=NotificationBackend(kind="jetstream"))
    spec = streams.own_stream("aviso_workers_retries", "retries.>", config)
    assert not plans.plan(spec, found, Stored()).needed


class TestTheStreamOfAnEventType:
    def test_is_named_after_the_base_and_bound_to_it(self) -> None:
        assert (spec_of().name, spec_of().subjects) == ("MARS", ("Mars.>",))

    def test_has_the_event_types_name_where_there_is_no_topic(self) -> None:
        config = Config(notification_backend=NotificationBackend(kind="jetstream"))
        spec = streams.event_stream("plain", structs.replace(MARS, topic=None), config)
        assert (spec.name, spec.subjects) == ("PLAIN", ("plain.>",))

    def test_leaves_to_the_server_what_nobody_states(self) -> None:
        spec = spec_of()
        assert (spec.storage, spec.retention, spec.discard, spec.max_msgs_per_subject) == ("file", "limits", "old", 1)
        assert {spec.max_msgs, spec.max_bytes, spec.max_age, spec.num_replicas, spec.compression} == {UNSET}

    def test_has_the_backends_defaults(self) -> None:
        spec = spec_of(
            max_messages=5,
            max_bytes=1024,
            retention_time=Duration.parse("1d"),
            replicas=3,
            storage_type="memory",
            retention_policy="interest",
            discard_policy="new",
        )
        assert (spec.max_msgs, spec.max_bytes, spec.max_age, spec.num_replicas) == (5, 1024, DAY, 3)
        assert (spec.storage, spec.retention, spec.discard) == ("memory", "interest", "new")

    def test_has_the_schemas_policy_over_the_backends_defaults(self) -> None:
        policy = StoragePolicy(
            retention_time=Duration.parse("2h"),
            max_messages=7,
            max_size=Size.parse("1Ki"),
            allow_duplicates=True,
            compression=True,
        )
        spec = spec_of(policy, max_messages=5, max_bytes=9, retention_time=Duration.parse("1d"))
        assert (spec.max_age, spec.max_msgs, spec.max_bytes) == (7200 * SECOND, 7, 1024)
        assert (spec.max_msgs_per_subject, spec.compression) == (-1, "s2")

    def test_has_the_backends_default_where_the_policy_is_silent(self) -> None:
        spec = spec_of(StoragePolicy(max_messages=7), max_messages=5, retention_time=Duration.parse("1d"))
        assert (spec.max_msgs, spec.max_age, spec.compression) == (7, DAY, UNSET)

    def test_turns_compression_off_where_the_policy_says_so(self) -> None:
        assert spec_of(StoragePolicy(compression=False)).compression == "none"

    def test_keeps_one_message_per_subject_unless_duplicates_are_allowed(self) -> None:
        assert spec_of(StoragePolicy(allow_duplicates=False)).max_msgs_per_subject == 1


class TestAConsumer:
    WANTED = ConsumerSpec(
        durable_name="agent", filter_subjects=("mars.od.>",), ack_wait=500_000_000, max_ack_pending=100
    )

    @pytest.mark.parametrize("filters", [{"filter_subjects": ["mars.od.>"]}, {"filter_subject": "mars.od.>"}])
    def test_is_as_wanted_whatever_else_a_server_reports(self, filters: dict[str, Any]) -> None:
        found = {**structs.asdict(self.WANTED), "filter_subjects": None, **filters, "max_waiting": 512, "newer": True}
        assert plans.consumer_differences(self.WANTED, found) == ()

    def test_differs_field_by_field_as_people_write_it(self) -> None:
        found = structs.asdict(self.WANTED) | {
            "filter_subjects": [],
            "ack_wait": 30_000_000_000,
            "ack_policy": "none",
            "max_deliver": 5,
        }
        told = [str(difference) for difference in plans.consumer_differences(self.WANTED, found)]
        assert told == [
            "filter_subjects: everything -> mars.od.>",
            "ack_wait: 30s -> 0.5s",
            "max_deliver: 5 -> unlimited",
            "ack_policy: none -> explicit",
        ]

    def test_that_serves_some_readers_first_differs_as_people_write_it(self) -> None:
        pins = {"priority_policy": "pinned_client", "priority_groups": ["workers"], "priority_timeout": 20 * SECOND}
        found = structs.asdict(self.WANTED) | {"filter_subjects": ["mars.od.>"], **pins}
        told = [str(difference) for difference in plans.consumer_differences(self.WANTED, found)]
        assert told == [
            "priority_policy: pinned_client -> none",
            "priority_groups: workers -> none",
            "priority_timeout: 20s -> 0s",
        ]

    def test_may_be_prioritized_by_workers_that_are_far(self) -> None:
        found = {"priority_policy": "prioritized", "priority_groups": ["workers"], "filter_subject": "mars.od.>"}
        assert plans.consumer_differences(self.WANTED, structs.asdict(self.WANTED) | found) == ()


def test_a_monitored_stream_has_the_thresholds_of_its_replicas() -> None:
    """What an operator has set stays; the number of servers follows the configuration."""
    wanted = structs.replace(SPEC, num_replicas=3, monitored=True)
    known = {"io.nats.monitor.peer-lag-critical": "7", "io.nats.monitor.peer-expect": "1", "owner": "field"}
    plan = plans.plan(wanted, {**REPORTED, "num_replicas": 3, "metadata": known}, Stored())
    assert not plan.needed
    assert plan.config["metadata"] == {
        "io.nats.monitor.enabled": "true",
        "io.nats.monitor.peer-expect": "3",
        "io.nats.monitor.peer-lag-critical": "7",
        "io.nats.monitor.peer-seen-critical": "10s",
        "owner": "field",
    }


def test_a_threshold_of_a_consumer_that_an_operator_has_set_stays() -> None:
    name = "io.nats.monitor.outstanding-ack-critical"
    wanted = ConsumerSpec(
        durable_name="a", filter_subjects=(), ack_wait=SECOND, max_ack_pending=10, metadata={name: "10"}
    )
    assert [each.field for each in plans.consumer_differences(wanted, {})].count("metadata") == 1
    found = {"metadata": {name: "5"}}
    assert "metadata" not in [each.field for each in plans.consumer_differences(wanted, found)]
