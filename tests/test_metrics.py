"""What Prometheus sees of a worker."""

from __future__ import annotations

import shutil
import subprocess
from typing import Literal

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aviso_workers.events import AgentStarted, ConnectionChanged, Published, Settled
from aviso_workers.metrics import Metrics

OF_INDEX = {"app": "field-index", "agent": "index", "base": "mars"}


@pytest.fixture
def held() -> dict[str, int]:
    return {"index": 0}


@pytest.fixture
def metrics(held: dict[str, int]) -> Metrics:
    return Metrics("field-index", bases={"index": "mars"}, held=held.__getitem__)


def sample(metrics: Metrics, name: str, **labels: str) -> float | None:
    """One number of a scrape; None where there is no such series."""
    families = text_string_to_metric_families(metrics.render().decode())
    found = [
        one.value
        for family in families
        for one in family.samples
        if one.name == f"aviso_worker_{name}" and one.labels == labels
    ]
    assert len(found) < 2, f"{name}{labels} is there {len(found)} times"
    return found[0] if found else None


def settled(
    outcome: Literal["acked", "retried", "dead_lettered"],
    *,
    reason: str = "",
    seconds: float = 0.02,
    delivered: int = 1,
) -> Settled:
    return Settled(
        agent="index",
        notification="mars@1",
        outcome=outcome,
        reason=reason,
        seconds=seconds,
        num_delivered=delivered,
    )


@pytest.mark.parametrize("outcome", ["acked", "retried", "dead_lettered"])
def test_outcomes_are_at_zero_before_the_first_event(metrics: Metrics, outcome: str) -> None:
    assert sample(metrics, "notifications_total", **OF_INDEX, outcome=outcome) == 0


@pytest.mark.parametrize(
    "name", ["redelivered_total", "consumers_opened_total", "in_flight", "handler_seconds_count", "handler_seconds_sum"]
)
def test_an_agents_series_are_at_zero_before_the_first_event(metrics: Metrics, name: str) -> None:
    assert sample(metrics, name, **OF_INDEX) == 0


def test_a_lag_that_nobody_has_asked_for_is_not_zero(metrics: Metrics) -> None:
    assert (sample(metrics, "pending", **OF_INDEX), sample(metrics, "ack_pending", **OF_INDEX)) == (-1, -1)
    metrics.gauges["index"].pending, metrics.gauges["index"].ack_pending = 7, 2
    assert (sample(metrics, "pending", **OF_INDEX), sample(metrics, "ack_pending", **OF_INDEX)) == (7, 2)


def test_settlements_are_counted_by_outcome_and_reason(metrics: Metrics) -> None:
    for event in (
        settled("acked"),
        settled("acked", delivered=3),
        settled("retried", reason="ConnectionError"),
        settled("retried", reason="ConnectionError", delivered=2),
        settled("dead_lettered", reason="undecodable"),
    ):
        metrics.observe(event)
    counts = {
        outcome: sample(metrics, "notifications_total", **OF_INDEX, outcome=outcome)
        for outcome in ("acked", "retried", "dead_lettered")
    }
    assert counts == {"acked": 2, "retried": 2, "dead_lettered": 1}
    assert sample(metrics, "retries_total", **OF_INDEX, reason="ConnectionError") == 2
    assert sample(metrics, "dead_letters_total", **OF_INDEX, reason="undecodable") == 1
    assert sample(metrics, "redelivered_total", **OF_INDEX) == 2


def test_the_time_in_the_handler_falls_into_buckets(metrics: Metrics) -> None:
    for seconds in (0.001, 0.004, 0.3, 5000.0):
        metrics.observe(settled("acked", seconds=seconds))
    buckets = {
        bound: sample(metrics, "handler_seconds_bucket", **OF_INDEX, le=bound)
        for bound in ("0.001", "0.0025", "0.005", "0.5", "3600.0", "+Inf")
    }
    assert buckets == {"0.001": 1, "0.0025": 1, "0.005": 2, "0.5": 3, "3600.0": 3, "+Inf": 4}
    assert sample(metrics, "handler_seconds_count", **OF_INDEX) == 4
    assert sample(metrics, "handler_seconds_sum", **OF_INDEX) == pytest.approx(5000.305)


def test_publishes_are_counted_by_outcome_and_so_are_further_attempts(metrics: Metrics) -> None:
    metrics.observe(Published(event_type="mars", outcome="stored", attempts=1))
    metrics.observe(Published(event_type="mars", outcome="duplicate", attempts=3))
    of_mars = {"app": "field-index", "event_type": "mars"}
    counts = {
        outcome: sample(metrics, "published_total", **of_mars, outcome=outcome)
        for outcome in ("stored", "duplicate", "failed")
    }
    assert counts == {"stored": 1, "duplicate": 1, "failed": 0}
    assert sample(metrics, "publish_retries_total", **of_mars) == 2


def test_the_first_connection_is_no_reconnect(metrics: Metrics) -> None:
    def connection() -> tuple[float | None, float | None]:
        return sample(metrics, "connected", app="field-index"), sample(metrics, "reconnects_total", app="field-index")

    assert connection() == (0, 0)
    metrics.observe(ConnectionChanged(connected=True, reason=""))
    assert connection() == (1, 0)
    metrics.observe(ConnectionChanged(connected=False, reason="lost"))
    assert connection() == (0, 0)
    metrics.observe(ConnectionChanged(connected=True, reason=""))
    assert connection() == (1, 1)


def test_a_consumer_that_was_opened_anew_is_counted(metrics: Metrics) -> None:
    for _ in range(2):
        metrics.observe(AgentStarted(agent="index", stream="MARS", consumer="field-index__index"))
    assert sample(metrics, "consumers_opened_total", **OF_INDEX) == 2


def test_what_a_worker_holds_is_asked_for_at_the_scrape(metrics: Metrics, held: dict[str, int]) -> None:
    held["index"] = 5
    assert sample(metrics, "in_flight", **OF_INDEX) == 5


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on PATH")
def test_promtool_finds_nothing_to_complain_of(metrics: Metrics) -> None:
    def check() -> str:
        found = subprocess.run(
            ["promtool", "check", "metrics"], input=metrics.render(), capture_output=True, check=False
        )
        return (found.stdout + found.stderr).decode()

    assert check() == ""
    metrics.observe(settled("retried", reason="ConnectionError"))
    metrics.observe(settled("dead_lettered", reason="undecodable"))
    metrics.observe(Published(event_type="mars", outcome="stored", attempts=2))
    assert check() == ""
