"""When a consumer is stuck: pure, from what a server tells and what workers recorded."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from aviso_workers.jetstream.info import ConsumerConfig, ConsumerInfo
from aviso_workers.ops.stuck import why_stuck
from aviso_workers.state.consumer_records import ConsumerRecord
from aviso_workers.state.failure_records import Retrying

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)
LONG_AGO = NOW - timedelta(minutes=10)


def consumer(**stated: Any) -> ConsumerInfo:
    """At work: one notification is delivered, and another one was settled ten minutes ago."""
    usual: dict[str, Any] = {"num_ack_pending": 1, "ack_floor": 7, "deliveries": 9, "last_settled": LONG_AGO}
    return ConsumerInfo(name="a__b", config=ConsumerConfig(ack_wait=20_000_000_000), time=NOW, **usual | stated)


def record(**stated: Any) -> ConsumerRecord:
    usual: dict[str, Any] = {"ack_floor": 7, "unfinished_since": LONG_AGO}
    return ConsumerRecord(stream_created=LONG_AGO, filter_subjects=(), time=NOW, **usual | stated)


OLDEST = "1 delivered and not finished; the oldest one, after sequence 7, for 10 min"


@pytest.mark.parametrize(
    ("now", "recorded", "why"),
    [
        pytest.param({}, None, OLDEST, id="nothing happened for ten minutes"),
        pytest.param({"num_pending": 5}, None, OLDEST, id="and more waits"),
        pytest.param({"last_settled": NOW}, None, "", id="others are settled, and nothing is recorded"),
        pytest.param({"last_settled": NOW}, {}, OLDEST, id="others are settled, and the floor stands"),
        pytest.param({"last_delivered": NOW}, {}, OLDEST, id="it is delivered again and again"),
        pytest.param({"last_settled": NOW}, {"ack_floor": 6}, "", id="the floor has risen since it was recorded"),
        pytest.param({}, {"longest_seconds": 3600.0}, "", id="its policy allows an hour"),
        pytest.param({"paused_until": NOW}, {}, "", id="it is paused"),
        pytest.param({"num_ack_pending": 0}, {}, "", id="there is nothing to do"),
    ],
)
def test_what_is_delivered_and_not_finished(now: dict[str, Any], recorded: dict[str, Any] | None, why: str) -> None:
    found = consumer(**now)
    assert why_stuck(found, found, None if recorded is None else record(**recorded)) == why


@pytest.mark.parametrize(
    ("before", "now", "why"),
    [
        pytest.param({}, {}, "3 pending, and no worker pulls them", id="nothing is delivered between two looks"),
        pytest.param({"num_pending": 0}, {}, "", id="it has just come"),
        pytest.param({}, {"deliveries": 10}, "", id="something was delivered"),
        pytest.param({}, {"ack_floor": 8}, "", id="something was settled"),
    ],
)
def test_what_nobody_takes(before: dict[str, Any], now: dict[str, Any], why: str) -> None:
    waiting = {"num_pending": 3, "num_ack_pending": 0}
    assert why_stuck(consumer(**waiting | now), consumer(**waiting | before), None) == why


def test_with_one_look_what_nobody_takes_is_not_known() -> None:
    assert why_stuck(consumer(num_pending=3, num_ack_pending=0), None, None) == ""
    assert why_stuck(consumer(), None, None) == OLDEST


@pytest.mark.parametrize(
    ("stated", "recorded", "why"),
    [
        pytest.param({}, {}, "5 pending and 3 not finished, and no worker pulls them", id="nobody asks for anything"),
        pytest.param({"num_waiting": 1}, {}, "", id="a worker asks for more"),
        pytest.param({"last_delivered": NOW}, {}, "", id="something was delivered of late"),
        pytest.param({}, {"attempt_seconds": 3600.0}, "", id="one attempt may take an hour"),
        pytest.param({}, {"attempt_seconds": None}, "", id="a record of an older version"),
    ],
)
def test_what_is_to_be_tried_again_and_nobody_takes(stated: dict[str, Any], recorded: dict[str, Any], why: str) -> None:
    """All attempts of the policy together may take a day."""
    found = consumer(num_pending=5, num_ack_pending=3, **stated)
    policy = record(**{"longest_seconds": 86_400.0, "attempt_seconds": 300.0} | recorded)
    assert why_stuck(found, found, policy) == why


def blocked(*, behind: int = 0) -> Retrying:
    return Retrying(
        again_at=NOW,
        stream="MARS",
        sequence=8,
        timestamp_ns=1,
        attempt=6,
        attempts=None,
        blocked=True,
        error="ValueError",
        behind=behind,
    )


@pytest.mark.parametrize(
    ("now", "behind", "why"),
    [
        pytest.param({}, 0, "", id="the agent is blocked at it"),
        pytest.param({"num_ack_pending": 3}, 2, "", id="others wait behind it"),
        pytest.param({"num_ack_pending": 3, "last_settled": NOW}, 1, "", id="others are handled beside it"),
        pytest.param({"num_ack_pending": 3}, 1, OLDEST.replace("1 d", "3 d"), id="one hangs beside it"),
    ],
)
def test_what_an_agent_is_blocked_at_is_not_stuck(now: dict[str, Any], behind: int, why: str) -> None:
    found = consumer(**now)
    assert why_stuck(found, found, record(), [blocked(behind=behind)]) == why
    assert why_stuck(found, found, record(), []), "without it"
    alone = consumer(num_pending=5, num_ack_pending=1)
    abandoned = why_stuck(alone, alone, record(attempt_seconds=300.0), [blocked()])
    assert abandoned == "5 pending and 1 not finished, and no worker pulls them"
    beside = consumer(num_ack_pending=2)
    assert "2 delivered and not finished" in why_stuck(beside, None, record(), [blocked()])
