"""The section `streams`: planned, applied, and read back from the server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ops.conftest import Api, Declare, Run

SECOND = 1_000_000_000

ORDERS = {
    "description": "Orders of products",
    "subjects": ["orders.>", "returns.>"],
    "storage": "memory",
    "retention": "workqueue",
    "discard": "old",
    "max_msgs": 1000,
    "max_bytes": "1Gi",
    "max_age": "7d",
    "max_msgs_per_subject": 10,
    "max_msg_size": "64Ki",
    "max_consumers": 5,
    "num_replicas": 1,
    "placement": {"tags": ["az:1"]},
    "compression": "none",
    "duplicate_window": "1m",
    "first_seq": 100,
    "republish": {"src": "orders.>", "dest": "copy.orders.>", "headers_only": True},
    "consumer_limits": {"inactive_threshold": "1h", "max_ack_pending": 500},
    "metadata": {"owner": "products"},
    "allow_direct": True,
    "allow_rollup_hdrs": True,
    "allow_msg_ttl": True,
    "subject_delete_marker_ttl": "1h",
    "allow_msg_schedules": True,
    "allow_atomic": True,
    "allow_batched": True,
    "deny_delete": True,
}
ARCHIVE = {
    "subjects": ["archive.>"],
    "storage": "file",
    "retention": "interest",
    "compression": "s2",
    "discard": "new",
    "discard_new_per_subject": True,
    "max_msgs_per_subject": 10,
    "max_msgs": -1,
    "max_bytes": "unlimited",
    "max_age": "0s",
    "subject_transform": {"src": "archive.>", "dest": "archived.>"},
    "no_ack": True,
    "persist_mode": "async",
    "deny_purge": True,
}
TOTALS = {"subjects": ["totals.>"], "allow_msg_counter": True, "allow_direct": True}
STREAM_AS_JETSTREAM = {
    "max_bytes": 2**30,
    "max_age": 7 * 86_400 * SECOND,
    "max_msg_size": 64 * 2**10,
    "duplicate_window": 60 * SECOND,
    "consumer_limits": {"inactive_threshold": 3600 * SECOND, "max_ack_pending": 500},
    "subject_delete_marker_ttl": 3600 * SECOND,
}

PULLED = {
    "description": "Packs and ships",
    "filter_subjects": ["orders.new.>"],
    "deliver_policy": "by_start_sequence",
    "opt_start_seq": 7,
    "ack_policy": "explicit",
    "backoff": ["30s", "5m", "1h"],
    "max_deliver": 5,
    "max_ack_pending": 100,
    "replay_policy": "original",
    "sample_freq": 50,
    "headers_only": True,
    "inactive_threshold": "7d",
    "pause_until": "2200-01-01T00:00:00Z",
    "num_replicas": 1,
    "mem_storage": True,
    "metadata": {"owner": "products"},
    "max_waiting": 8,
    "max_batch": 100,
    "max_expires": "30s",
    "max_bytes": "4Mi",
    "priority_groups": ["shippers"],
    "priority_policy": "pinned_client",
    "priority_timeout": "2m",
}
PUSHED = {
    "filter_subjects": ["orders.new.>", "orders.paid.>"],
    "deliver_policy": "by_start_time",
    "opt_start_time": "2026-11-20T06:00:00Z",
    "ack_policy": "all",
    "ack_wait": "10s",
    "deliver_subject": "display.orders",
    "deliver_group": "displays",
    "flow_control": True,
    "idle_heartbeat": "15s",
    "rate_limit_bps": 1_000_000,
}
CONSUMER_AS_JETSTREAM = {
    "backoff": [30 * SECOND, 300 * SECOND, 3600 * SECOND],
    "sample_freq": "50",
    "inactive_threshold": 7 * 86_400 * SECOND,
    "max_expires": 30 * SECOND,
    "max_bytes": 4 * 2**20,
    "priority_timeout": 120 * SECOND,
    "ack_wait": 10 * SECOND,
    "idle_heartbeat": 15 * SECOND,
}


def steps(run: Run, config: Path) -> list[tuple[str, ...]]:
    """What `streams plan` says of all but the event type's stream: stream, consumer, step, difference."""
    planned = run("streams", "plan", "--json", "--config", config)
    assert planned.code == 0, planned
    rows = [tuple(json.loads(line).values()) for line in planned.lines]
    return [row for row in rows if row[0] != "MARS"]


def applied(run: Run, config: Path, *, code: int = 0) -> str:
    ran = run("streams", "apply", "--config", config)
    assert ran.code == code, ran
    return ran.out


def as_stated(stated: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """What is stated of the configuration that a server reports."""
    single = {"filter_subjects": [found["filter_subject"]]} if "filter_subject" in found else {}
    whole = {"persist_mode": "default", **found, **single}
    if "metadata" in stated:
        whole["metadata"] = {name: whole["metadata"].get(name) for name in stated["metadata"]}
    return {name: whole.get(name) for name in stated}


@pytest.mark.covers("001-01", "001-07", "001-41")
@pytest.mark.covers("002-10", "002-11", "002-13", "002-14", "002-15", "002-16", "002-17", "002-18", "002-19")
@pytest.mark.covers("002-20", "002-21", "002-22", "002-23", "002-24", "002-25", "002-53")
@pytest.mark.covers("004-10", "004-44")
@pytest.mark.parametrize("stream", [ORDERS, ARCHIVE, TOTALS], ids=["work queue", "interest", "counters"])
def test_a_stream_is_made_with_every_setting_that_is_declared(
    run: Run, declare: Declare, api: Api, stream: dict[str, Any]
) -> None:
    config = declare({"NEW": stream})
    assert steps(run, config) == [("NEW", "", "create", "")]
    applied(run, config)
    expected = {name: STREAM_AS_JETSTREAM.get(name, value) for name, value in stream.items()}
    if stream is ARCHIVE:
        expected |= {"max_bytes": -1, "max_age": 0}
    assert as_stated(stream, api("STREAM.INFO.NEW")["config"]) == expected
    assert steps(run, config) == [("NEW", "", "keep", "")], "what is as declared is left alone"


@pytest.mark.covers("001-02", "001-36", "001-37", "002-28", "003-20")
@pytest.mark.parametrize("consumer", [PULLED, PUSHED], ids=["pulled", "pushed"])
def test_a_consumer_is_made_with_every_setting_that_is_declared(
    run: Run, declare: Declare, api: Api, consumer: dict[str, Any]
) -> None:
    config = declare({"ORDERS": {"subjects": ["orders.>"], "consumers": {"shipping": consumer}}})
    assert steps(run, config) == [("ORDERS", "", "create", ""), ("ORDERS", "shipping", "create", "")]
    assert "ORDERS shipping: done" in applied(run, config)
    expected = {name: CONSUMER_AS_JETSTREAM.get(name, value) for name, value in consumer.items()}
    assert as_stated(consumer, api("CONSUMER.INFO.ORDERS.shipping")["config"]) == expected
    assert [step for _, _, step, _ in steps(run, config)] == ["keep", "keep"]


def test_a_consumer_of_which_nothing_is_said_is_durable_and_acknowledges(run: Run, declare: Declare, api: Api) -> None:
    applied(run, declare({"ORDERS": {"subjects": ["orders.>"], "consumers": {"shipping": {}}}}))
    found = api("CONSUMER.INFO.ORDERS.shipping")["config"]
    assert (found["durable_name"], found["ack_policy"], found["deliver_policy"]) == ("shipping", "explicit", "all")


@pytest.mark.covers("002-54")
def test_what_differs_is_changed_and_what_nobody_states_is_not_touched(run: Run, declare: Declare, api: Api) -> None:
    applied(run, declare({"ORDERS": {"subjects": ["orders.>"], "consumers": {"shipping": {}}}}))
    found = api("STREAM.INFO.ORDERS")["config"]
    api("STREAM.UPDATE.ORDERS", {**found, "description": "by hand", "metadata": {"theirs": "stays"}, "max_msgs": 7})
    found = api("CONSUMER.INFO.ORDERS.shipping")["config"]
    by_hand = {**found, "description": "by hand", "max_ack_pending": 3}
    api("CONSUMER.CREATE.ORDERS.shipping", {"stream_name": "ORDERS", "config": by_hand, "action": "update"})

    consumer = {"max_ack_pending": 5, "filter_subjects": ["orders.new"], "backoff": ["1s", "2s"]}
    config = declare({"ORDERS": {"max_msgs": 9, "metadata": {"ours": "new"}, "consumers": {"shipping": consumer}}})
    said = [row[3] for row in steps(run, config)]
    assert said[0] == "max_msgs: 7 -> 9"
    assert said[2:] == [
        "filter_subjects: everything -> orders.new",
        "backoff: none -> 1s, 2s",
        "max_ack_pending: 3 -> 5",
    ]
    applied(run, config)

    stream = api("STREAM.INFO.ORDERS")["config"]
    assert (stream["max_msgs"], stream["description"], stream["subjects"]) == (9, "by hand", ["orders.>"])
    assert (stream["metadata"]["ours"], stream["metadata"]["theirs"]) == ("new", "stays")
    shipping = api("CONSUMER.INFO.ORDERS.shipping")["config"]
    assert (shipping["max_ack_pending"], shipping["description"]) == (5, "by hand")
    assert [step for _, _, step, _ in steps(run, config)] == ["keep", "keep"]


def test_a_pause_is_moved_and_ended(run: Run, declare: Declare, api: Api) -> None:
    def paused(until: str) -> bool:
        applied(run, declare({"ORDERS": {"subjects": ["orders.>"], "consumers": {"shipping": {"pause_until": until}}}}))
        return bool(api("CONSUMER.INFO.ORDERS.shipping").get("paused"))

    times = ["2200-01-01T00:00:00Z", "2020-01-01T00:00:00Z", "2199-01-01T00:00:00Z"]
    assert [paused(until) for until in times] == [True, False, True]


STREAMS_THAT_STAY = [
    ({"storage": "file"}, {"storage": "memory"}),
    ({"retention": "limits"}, {"retention": "workqueue"}),
    ({"retention": "workqueue"}, {"retention": "interest"}),
    ({"allow_msg_counter": False}, {"allow_msg_counter": True}),
    ({"persist_mode": "default"}, {"persist_mode": "async"}),
    ({"deny_delete": True}, {"deny_delete": False}),
    ({"deny_purge": True}, {"deny_purge": False}),
    ({"allow_msg_ttl": True}, {"allow_msg_ttl": False}),
    ({"allow_msg_schedules": True}, {"allow_msg_schedules": False}),
]
CONSUMERS_THAT_STAY: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"ack_policy": "explicit"}, {"ack_policy": "none"}),
    ({"deliver_policy": "all"}, {"deliver_policy": "new"}),
    (
        {"deliver_policy": "by_start_sequence", "opt_start_seq": 2},
        {"deliver_policy": "by_start_sequence", "opt_start_seq": 3},
    ),
    (
        {"deliver_policy": "by_start_time", "opt_start_time": "2026-11-20T06:00:00Z"},
        {"deliver_policy": "by_start_time", "opt_start_time": "2026-11-21T06:00:00Z"},
    ),
    ({"replay_policy": "instant"}, {"replay_policy": "original"}),
    ({"max_waiting": 8}, {"max_waiting": 9}),
    ({"mem_storage": False}, {"mem_storage": True}),
    ({"deliver_subject": "here", "idle_heartbeat": "5s"}, {"deliver_subject": "here", "idle_heartbeat": "6s"}),
    (
        {"deliver_subject": "here", "idle_heartbeat": "5s", "flow_control": False},
        {"deliver_subject": "here", "idle_heartbeat": "5s", "flow_control": True},
    ),
    ({}, {"deliver_subject": "here"}),
]


@pytest.mark.parametrize(("made", "changed"), STREAMS_THAT_STAY, ids=lambda change: str(change))
def test_what_a_server_does_not_change_of_a_stream_is_known_to_the_plan(
    run: Run, declare: Declare, api: Api, made: dict[str, Any], changed: dict[str, Any]
) -> None:
    ((field, wanted),) = changed.items()
    applied(run, declare({"ORDERS": {"subjects": ["orders.>"], **made}}))
    found = api("STREAM.INFO.ORDERS")["config"]
    ran = run("streams", "plan", "--config", declare({"ORDERS": {**changed, "description": "new"}}))
    (cannot,) = (line for line in ran.lines if "cannot" in line)
    assert f"{field}: " in cannot
    assert "delete the stream" in cannot, "the cure is there"

    described = "" if field == "storage" else "new"
    applied(run, declare({"ORDERS": {**changed, "description": "new"}}), code=1)
    after = api("STREAM.INFO.ORDERS")["config"]
    assert (after.get(field), after.get("description", "")) == (found.get(field), described), "the rest is applied"

    with pytest.raises(Exception, match="10052"):
        api("STREAM.UPDATE.ORDERS", {**after, field: wanted})  # the table says what a server does


@pytest.mark.parametrize(("made", "changed"), CONSUMERS_THAT_STAY, ids=lambda change: str(change))
def test_what_a_server_does_not_change_of_a_consumer_is_known_to_the_plan(
    run: Run, declare: Declare, api: Api, made: dict[str, Any], changed: dict[str, Any]
) -> None:
    def declared(consumer: dict[str, Any]) -> Path:
        return declare({"ORDERS": {"subjects": ["orders.>"], "consumers": {"shipping": consumer}}})

    applied(run, declared(made))
    before = api("CONSUMER.INFO.ORDERS.shipping")["config"]
    config = declared({**changed, "description": "new"})
    (cannot,) = (row for row in steps(run, config) if row[2] == "cannot")
    field = cannot[3].partition(":")[0]
    assert field in changed
    assert "a new one begins again" in cannot[3], "the cure is there"
    applied(run, config, code=1)
    after = api("CONSUMER.INFO.ORDERS.shipping")["config"]
    assert (after.get(field), after["description"]) == (before.get(field), "new"), "the rest is applied"

    refused = {"stream_name": "ORDERS", "config": {**after, **changed_as_jetstream(changed)}, "action": "update"}
    with pytest.raises(Exception, match="JetStream 10"):
        api("CONSUMER.CREATE.ORDERS.shipping", refused)  # the table says what a server does


def changed_as_jetstream(changed: dict[str, Any]) -> dict[str, Any]:
    return changed | ({"idle_heartbeat": 6 * SECOND} if "idle_heartbeat" in changed else {})


@pytest.mark.parametrize("switch", ["deny_delete", "deny_purge", "allow_msg_ttl", "allow_msg_schedules", "sealed"])
def test_what_is_for_good_is_said_to_be(run: Run, declare: Declare, switch: str) -> None:
    applied(run, declare({"ORDERS": {"subjects": ["orders.>"]}}))
    assert steps(run, declare({"ORDERS": {switch: True}}))[0][3] == f"{switch}: false -> true, for good"


def test_no_stream_is_made_sealed(run: Run, declare: Declare, api: Api) -> None:
    config = declare({"ORDERS": {"subjects": ["orders.>"], "sealed": True}})
    ((_, _, step, why),) = steps(run, config)
    assert (step, "seal the stream when it holds" in why) == ("cannot", True), why
    applied(run, config, code=1)
    assert "ORDERS" not in api("STREAM.NAMES")["streams"]


def test_what_only_a_server_can_know_is_told_as_it_tells_it(run: Run, declare: Declare) -> None:
    ran = run("streams", "apply", "--config", declare({"ORDERS": {"subjects": ["orders.>"], "num_replicas": 3}}))
    assert (ran.code, "replicas > 1 not supported in non-clustered mode" in ran.err) == (1, True), ran


class TestTheStreamOfAnEventType:
    def test_has_further_settings_from_the_section_streams(self, run: Run, declare: Declare, api: Api) -> None:
        config = declare({"MARS": {"allow_direct": True, "max_msg_size": "64Ki", "metadata": {"owner": "products"}}})
        applied(run, config)
        found = api("STREAM.INFO.MARS")["config"]
        assert (found["allow_direct"], found["max_msg_size"], found["subjects"]) == (True, 65536, ["mars.>"])
        shown = run("streams", "show", "mars", "--config", config)
        assert shown.code == 0
        assert "streams.MARS.max_msg_size" in shown.out

    def test_is_given_them_by_whoever_uses_it_first(self, run: Run, declare: Declare, api: Api) -> None:
        run("notify", "mars", "class=od", "step=1", "--config", declare({"MARS": {"deny_purge": True}}))
        assert api("STREAM.INFO.MARS")["config"]["deny_purge"] is True

    @pytest.mark.covers("003-20")
    def test_may_have_consumers_beside_the_agents(self, run: Run, declare: Declare, api: Api) -> None:
        applied(run, declare({"MARS": {"consumers": {"display": {"deliver_subject": "display.mars"}}}}))
        assert api("CONSUMER.INFO.MARS.display")["config"]["deliver_subject"] == "display.mars"


def test_a_declared_stream_is_shown_beside_what_is_declared(run: Run, declare: Declare) -> None:
    applied(run, declare({"ORDERS": {"subjects": ["orders.>"], "max_age": "1d"}}))
    differs = run("streams", "show", "ORDERS", "--config", declare({"ORDERS": {"max_age": "2d"}}))
    assert differs.code == 1
    (row,) = (line for line in differs.lines if "max_age" in line)
    assert row.split() == ["max_age", "2d", "1d", "NO", "streams.ORDERS.max_age"]
    assert run("streams", "show", "OTHER", "--config", declare({})).code == 2


@pytest.mark.covers("002-08", "003-07", "003-14")
def test_a_stream_is_bound_to_declared_subjects_only(
    run: Run, declare: Declare, publish: Callable[..., dict[str, Any]]
) -> None:
    applied(run, declare({"ORDERS": {"subjects": ["orders.*.new", "returns.>"]}}))
    assert publish("orders.7.new", "returns.a.b.c")["seq"] == 2
    with pytest.raises(Exception, match="nobody answers"):
        publish("orders.7.paid")


@pytest.mark.slow
def test_a_schema_for_editors_knows_the_section(run: Run) -> None:
    schema = json.loads(run("config", "schema").out)
    assert "opt_start_time" in schema["$defs"]["DeclaredConsumer"]["properties"]
