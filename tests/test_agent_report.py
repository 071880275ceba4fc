"""The policy that is in effect for an agent, as operators read it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from msgspec import structs

from aviso_workers import App, Batch, Batching, Notification, Rate, RetryPolicy, Slots, Window, Windowing
from aviso_workers.aviso.literals import time_text
from aviso_workers.jetstream.info import ConsumerConfig, ConsumerInfo
from aviso_workers.ops.agent_report import AgentProgress
from aviso_workers.state import declarations
from aviso_workers.state.failure_records import Retrying
from tests.contract.settings import app_config
from tests.failures import last_failure


class Field(msgspec.Struct):
    location: str


app = App("reported", config=app_config("in_memory", ""))


@app.agent("mars")
async def plain(notification: Notification[Any]) -> None: ...


@app.agent(
    "mars",
    where={"stream": ["oper", "wave"], "step": {"gte": 6}},
    concurrency=4,
    retry=RetryPolicy(first=2.0, factor=2.0, max=60.0, attempts=9, jitter=0.0),
    ack_wait=5.0,
    timeout=1.5,
    order_by=["date", "step"],
)
async def busy(notification: Notification[Field]) -> None: ...


@app.agent("mars", limits=[Rate(100, per="1m"), Slots(1, by=["class", "stream"])])
async def limited(notification: Notification[Any]) -> None: ...


@app.agent("plain", batch=Batching(size=500, within=0.5))
def collecting(batch: Batch[dict[str, Any]]) -> None: ...


@app.agent(
    "mars",
    window=Windowing(size="1h", every="15m", fold=lambda total, one: total + 1, initial=0, lateness="10m"),
)
async def windowed(window: Window[int]) -> None: ...


@app.agent("mars", singleton=True)
async def alone(notification: Notification[Any]) -> None: ...


def policy(agent: Any) -> dict[str, str]:
    return declarations.policy(app.config.notification_schema, agent)


def test_an_agent_that_is_stuck_because_it_fails_is_told_with_its_error() -> None:
    now = datetime.now(UTC)
    begun = now - timedelta(minutes=10)
    failure = last_failure(now, text="no index", since=begun, times=9)
    events = ConsumerInfo(name="i", config=ConsumerConfig(), time=now, num_ack_pending=2, last_delivered=begun)
    progress = AgentProgress(app="field", agent="index", stream="MARS", events=events, retries=None, failure=failure)
    stuck = "2 delivered and not finished; the oldest one, after sequence 0, for 10 min"
    assert progress.state_since(None) == f"{stuck}; failing since {time_text(begun)}, 9 times: OSError: no index"


def test_an_agent_of_which_what_it_depends_on_is_away_says_the_error_once() -> None:
    now = datetime.now(UTC)
    events = ConsumerInfo(name="i", config=ConsumerConfig(), time=now)
    failure = last_failure(
        now, text="no index", times=9, away="OSError: no index", away_since=now, away_until=now + timedelta(minutes=1)
    )
    progress = AgentProgress(app="field", agent="index", stream="MARS", events=events, retries=None, failure=failure)
    assert progress.state_since(None) == f"outage since {time_text(now)}: OSError: no index"
    over = structs.replace(failure, away_until=now)
    assert "away" not in structs.replace(progress, failure=over).state_since(None)


@pytest.mark.parametrize(
    ("due_seconds_ago", "ack_pending", "waits"),
    [
        pytest.param(-60, 1, True, id="due in a minute"),
        pytest.param(1, 1, True, id="due just now"),
        pytest.param(30, 1, False, id="due long ago, and it has not failed again"),
        pytest.param(-60, 0, False, id="all is settled"),
    ],
)
def test_what_is_settled_since_its_failure_was_recorded_is_not_retried(
    due_seconds_ago: float, ack_pending: int, waits: bool
) -> None:
    now = datetime.now(UTC)
    due = now - timedelta(seconds=due_seconds_ago)
    retried = Retrying(again_at=due, stream="MARS", sequence=4, timestamp_ns=1, attempt=1, attempts=6, error="OSError")
    failure = last_failure(now, until=now + timedelta(seconds=30), retrying=(retried,))
    events = ConsumerInfo(name="i", config=ConsumerConfig(), time=now, num_ack_pending=ack_pending)
    progress = AgentProgress(app="field", agent="index", stream="MARS", events=events, retries=None, failure=failure)
    assert progress.retrying == ([retried] if waits else [])
    assert ("retrying" in progress.state_since(None)) is waits


def test_a_singleton_is_told() -> None:
    assert policy(alone)["singleton"] == "one worker handles one at a time, in order"


def test_limits_across_the_fleet_are_told() -> None:
    told = policy(limited)
    assert told["limits"] == "1 at once for each class, stream, across the fleet; 100 in 1m, across the fleet"


def test_what_was_not_declared_is_told_as_it_is_in_effect() -> None:
    assert policy(plain) == {
        "event type": "mars",
        "where": "everything",
        "filters": "mars.>",
        "takes": "Notification[Any]",
        "concurrency": "1",
        "retry": "6 attempts; waits from 1 s, times 2.5, to 600 s, +-10%",
        "ack wait": "20 s",
        "timeout": "none",
        "order by": "none",
        "limits": "none",
    }


def test_what_was_declared_is_told() -> None:
    assert policy(busy) == {
        "event type": "mars",
        "where": '{"stream": ["oper", "wave"], "step": {"gte": 6}}',
        "filters": "mars.*.*.*.*.*.oper.>, mars.*.*.*.*.*.wave.>",
        "takes": "Notification[Field]",
        "concurrency": "4",
        "retry": "9 attempts; waits from 2 s, times 2, to 60 s, +-0%",
        "ack wait": "5 s",
        "timeout": "1.5 s",
        "order by": "date, step",
        "limits": "none",
    }


def test_a_batch_tells_how_it_is_collected_and_a_plain_function_where_it_runs() -> None:
    told = policy(collecting)
    assert (told["takes"], told["batch"]) == (
        "Batch[dict[str, Any]], in a thread",
        "500, or what came within 0.5 s",
    )


def test_an_agent_of_a_window_tells_how_long_its_windows_are() -> None:
    told = policy(windowed)
    assert (told["takes"], told["window"]) == ("Window[int]", "1h every 15m, 10m late at most")
