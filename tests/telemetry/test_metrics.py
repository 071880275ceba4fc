"""What Prometheus sees of a worker."""

from __future__ import annotations

import math
import subprocess
import time
import timeit
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import pytest
from msgspec import structs
from prometheus_client import Metric as Family
from prometheus_client import generate_latest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from _incidents.prometheus import Prometheus
from aviso_workers import App, Notification, Window, Windowing
from aviso_workers.aviso.codec import Message
from aviso_workers.clocks import VirtualClock
from aviso_workers.config import load
from aviso_workers.config.settings import Traces
from aviso_workers.engine.flow import Flow
from aviso_workers.errors import DeclarationError, NotFoundError, UnavailableError, UndecodableError
from aviso_workers.events import (
    Acked,
    AgentDisturbed,
    AgentStarted,
    ConnectionChanged,
    Failed,
    LeadershipHindered,
    LeadershipUnhindered,
    NotReadAgain,
    Passed,
    Published,
    ReadAgain,
    Sampled,
    Ticked,
    Unreadable,
    WindowDone,
)
from aviso_workers.jetstream import identities
from aviso_workers.jetstream.info import ConsumerConfig, ConsumerInfo
from aviso_workers.telemetry.metrics import MAX_REASONS, OPEN_METRICS, RETRY_REASONS, FleetMetrics, Metrics, Missed
from aviso_workers.telemetry.status import Health, StatusServer
from tests import programs
from tests.waits import PATIENCE_SECONDS

OF_APP = {"app": "field-index"}
OF_BASE = {**OF_APP, "base": "fields"}
OF_INDEX = {**OF_APP, "agent": "index", "base": "fields"}
CONFIG = """
notification_backend: {kind: in_memory}
notification_schema:
  mars:
    topic: {base: fields, key_order: [step]}
    identifier: {step: {type: IntHandler, required: true}}
"""


class Run:
    """What `App.runs` has for an agent at work."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.overdue = 3


class Held:
    """A delivery."""

    num_delivered = 1
    num_pending = 0

    def __init__(self, sequence: int, *, timestamp_ns: int) -> None:
        self.message = Message(subject="fields.1", data=b"null", sequence=sequence, timestamp_ns=timestamp_ns)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The agents at work."""
    runs: dict[str, Any] = {}
    monkeypatch.setattr(App, "runs", runs)
    return runs


@pytest.fixture
def app(tmp_path: Any, runs: dict[str, Any]) -> App:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    app = App("field-index", config=load(file, environ={}))

    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None: ...

    @app.every("5m", singleton=False)
    async def tidy() -> None: ...

    return app


@pytest.fixture
def process() -> dict[str, float]:
    """What the process says of itself."""
    return {"ready": False, "late": 0.0}


@pytest.fixture
def metrics(app: App, process: dict[str, float]) -> Metrics:
    metrics = Metrics(app, ready=lambda: bool(process["ready"]), loop_lag_seconds=lambda: process["late"])
    app.events.listen(metrics.observe)
    return metrics


def test_each_fact_is_counted_by_a_method_for_it() -> None:
    """mypy does not compare the columns of a table."""
    for kind, count in Metrics.COUNTED.items():
        hint = next(iter(get_type_hints(count).values()))
        assert kind in (get_args(hint) or (hint,))


def series(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """The values of a metric by those of its labels, which are sorted by name."""
    families = text_string_to_metric_families(metrics.render().decode())
    samples = [one for family in families for one in family.samples if one.name == f"aviso_worker_{name}"]
    found = {tuple(value for _, value in sorted(one.labels.items())): one.value for one in samples}
    assert len(found) == len(samples), f"a series of {name} is there twice"
    return found


def sample(metrics: Metrics, name: str, **labels: str) -> float | None:
    """One number of a scrape; None where there is no such series."""
    return series(metrics, name).get(tuple(value for _, value in sorted(labels.items())))


def settled(outcome: Literal["acked", "retried", "dead_lettered"], **stated: Any) -> Acked | Failed:
    fields = {
        "agent": "index",
        "event_type": "mars",
        "sequence": 1,
        "outcome": outcome,
        "reason": "",
        "seconds": 0.02,
        "waited_seconds": 0.0,
        "stored_to_settled_seconds": 0.03,
        "num_delivered": 1,
        **stated,
    }
    if outcome != "acked":
        return Failed(**fields)
    each = {name: [fields[name]] for name in ("seconds", "waited_seconds", "stored_to_settled_seconds")}
    redelivered = int(fields["num_delivered"] > 1)
    return Acked(agent=fields["agent"], event_type=fields["event_type"], redelivered=redelivered, **each)


def disturbed(error: Exception, *, agent: str = "index") -> AgentDisturbed:
    return AgentDisturbed(agent=agent, stream="FIELDS", error=error, again_in_seconds=1.0)


STARTED = AgentStarted(agent="index", stream="FIELDS", consumer="field-index__index")


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        *[("notifications_total", {"outcome": word}) for word in ("acked", "retried", "dead_lettered")],
        *[
            ("dead_letters_total", {"reason": word})
            for word in ("attempts_exhausted", "invalid_notification", "max_deliveries", "rejected", "undecodable")
        ],
        ("retries_total", {"reason": "dead_letter_failed"}),
        ("retries_total", {"reason": "taken_over"}),
        ("redelivered_total", {}),
        ("consumer_recreations_total", {}),
        ("threads_overdue", {}),
        ("threads_stuck", {}),
        ("in_flight", {}),
        ("waiting", {}),
        ("oldest_unfinished_age_seconds", {}),
        ("last_progress_timestamp_seconds", {}),
        *[(f"{name}_seconds_count", {}) for name in ("handler", "lane_wait", "stored_to_settled")],
    ],
)
def test_an_agents_series_are_at_zero_before_the_first_event(
    metrics: Metrics, name: str, labels: dict[str, str]
) -> None:
    assert sample(metrics, name, **OF_INDEX, **labels) == 0


def test_ticks_are_counted_by_outcome(metrics: Metrics) -> None:
    tick = Ticked(timer="tidy", time=datetime(2026, 11, 21, tzinfo=UTC), late_seconds=0.0, seconds=0.1)
    counts = series(metrics, "ticks_total")
    assert counts == {("field-index", "done", "tidy"): 0, ("field-index", "failed", "tidy"): 0}
    for fact in (tick, structs.replace(tick, error=ValueError()), tick):
        metrics.observe(fact)
    counts = series(metrics, "ticks_total")
    assert counts == {("field-index", "done", "tidy"): 2, ("field-index", "failed", "tidy"): 1}
    assert series(metrics, "last_tick_timestamp_seconds") == {("field-index", "tidy"): tick.time.timestamp()}


def test_what_cannot_be_read_again_shows_until_it_can(metrics: Metrics) -> None:
    assert sample(metrics, "not_read_again", **OF_INDEX) == 0
    metrics.observe(NotReadAgain(agent="index", stream="FIELDS", sequence=7, error=ValueError()))
    assert sample(metrics, "not_read_again", **OF_INDEX) == 1
    metrics.observe(ReadAgain(agent="index", stream="FIELDS"))
    assert sample(metrics, "not_read_again", **OF_INDEX) == 0


def test_a_worker_that_cannot_lead_shows_for_as_long_as_one_bucket_cannot_be_used(metrics: Metrics) -> None:
    found = [sample(metrics, "leader_hindered", app="field-index")]
    for fact in (
        LeadershipHindered(bucket="leases", error=ValueError()),
        LeadershipHindered(bucket="timers", error=ValueError()),
        LeadershipUnhindered(bucket="leases"),
        LeadershipUnhindered(bucket="timers"),
    ):
        metrics.observe(fact)
        found.append(sample(metrics, "leader_hindered", app="field-index"))
    assert found == [0, 1, 1, 1, 0]


def test_foreign_messages_are_counted_from_nothing_on(metrics: Metrics) -> None:
    """A series that is born at 1 has no increase, and no alert after a restart."""
    of_app = {"app": OF_INDEX["app"]}
    assert sample(metrics, "foreign_total", **of_app) == 0
    error = UndecodableError("it has no headers")
    metrics.observe(Unreadable(stream="KV_field__failures", sequence=1, error=error))
    metrics.observe(Unreadable(stream="KV_field__failures", sequence=2, error=error, reason="foreign"))
    assert sample(metrics, "unreadable_total", **of_app, stream="KV_field__failures") == 2
    assert sample(metrics, "foreign_total", **of_app) == 1


def test_windows_are_counted_by_outcome(app: App) -> None:
    @app.agent("mars", window=Windowing(size="1h", fold=lambda total, _: total + 1, initial=0))
    async def count(window: Window[int]) -> None: ...

    metrics = Metrics(app, ready=lambda: True, loop_lag_seconds=lambda: 0.0)
    hours = (datetime(2026, 11, 21, hour, tzinfo=UTC) for hour in (6, 7))
    done = WindowDone(agent="count", key="od", start=next(hours), end=next(hours), seconds=0.1)
    for fact in (structs.replace(done, error=ValueError(), again_in_seconds=1.0), done, done):
        metrics.observe(fact)
    assert series(metrics, "windows_total") == {
        ("count", "field-index", "done"): 2,
        ("count", "field-index", "failed"): 1,
    }


def test_what_is_published_is_at_zero_before_the_first_event(metrics: Metrics) -> None:
    assert series(metrics, "published_total") == {
        ("field-index", "fields", outcome): 0 for outcome in ("stored", "duplicate", "scheduled", "failed")
    }
    assert sample(metrics, "publish_retries_total", **OF_BASE) == 0


def test_a_lag_that_nobody_has_asked_for_is_no_number(metrics: Metrics) -> None:
    for name in ("pending", "ack_pending"):
        assert sample(metrics, name, **OF_INDEX) is None, name
    metrics.lag(
        "index",
        ConsumerInfo(
            name="field-index__index", config=ConsumerConfig(), time=datetime.now(UTC), num_pending=7, num_ack_pending=2
        ),
    )
    assert (sample(metrics, "pending", **OF_INDEX), sample(metrics, "ack_pending", **OF_INDEX)) == (7, 2)


def looked_at(deliveries: int, position: int, *, created: int = 1) -> ConsumerInfo:
    """The consumer of the agent `index` at some moment."""
    return ConsumerInfo(
        name="i",
        config=ConsumerConfig(),
        time=datetime.now(UTC),
        created=datetime(2026, 11, created, tzinfo=UTC),
        deliveries=deliveries,
        position=position,
    )


def read_from(consumer: ConsumerInfo) -> AgentStarted:
    return structs.replace(STARTED, passed=Passed(identities.of(consumer), consumer.position))


READ = read_from(looked_at(10, 100))


@pytest.mark.parametrize(
    ("came_to", "missed"),
    [
        ([(12, 102)], 0),
        ([(12, 105)], 3),
        ([(12, 105), (12, 105), (13, 107)], 4),
        ([(15, 102)], 0),  # repeats
        ([(15, 103), (16, 105)], 1),  # what a repeat hid stays hidden, and no more
        ([(0, 149), (2, 153)], 2),  # reset forwards, on purpose
        ([(0, 49), (30, 80), (40, 101), (41, 103)], 1),  # reset backwards: what it comes by again is counted once
    ],
)
def test_what_a_consumer_passes_without_delivering_it_is_missed(
    metrics: Metrics, came_to: list[tuple[int, int]], missed: int
) -> None:
    assert sample(metrics, "missed_total", **OF_INDEX) is None
    metrics.observe(READ)
    for deliveries, position in came_to:
        metrics.lag("index", looked_at(deliveries, position))
    assert sample(metrics, "missed_total", **OF_INDEX) == missed


def test_who_counts_what_is_missed_says_among_which_sequences(metrics: Metrics) -> None:
    metrics.observe(READ)
    assert metrics.lag("index", looked_at(11, 101)) is None
    assert metrics.lag("index", looked_at(13, 105)) == Missed(count=2, first=102, last=105)


def test_what_an_edited_filter_hides_is_not_missed(metrics: Metrics) -> None:
    metrics.observe(READ)
    edited = structs.replace(looked_at(10, 104), config=ConsumerConfig(filter_subject="fields.none"))
    assert metrics.lag("index", edited) is None
    assert sample(metrics, "missed_total", **OF_INDEX) == 0
    assert metrics.lag("index", looked_at(11, 106)) == Missed(count=5, first=101, last=106)  # the edit was undone


def test_a_consumer_that_is_made_anew_has_missed_nothing_yet(metrics: Metrics) -> None:
    metrics.observe(READ)
    metrics.observe(read_from(looked_at(11, 103)))  # opened again after a disturbance
    metrics.lag("index", looked_at(11, 103))
    assert sample(metrics, "missed_total", **OF_INDEX) == 2
    metrics.lag("index", looked_at(0, 0, created=2))  # as a cluster says of a consumer that begins at a sequence
    metrics.lag("index", looked_at(12, 490, created=2))
    metrics.observe(read_from(looked_at(13, 500, created=2)))
    assert sample(metrics, "missed_total", **OF_INDEX) == 2
    metrics.lag("index", looked_at(14, 504, created=2))
    assert sample(metrics, "missed_total", **OF_INDEX) == 14


def test_settlements_are_counted_by_outcome_and_reason(metrics: Metrics) -> None:
    for event in (
        settled("acked"),
        settled("acked", num_delivered=3),
        settled("retried", reason="ConnectionError"),
        settled("retried", reason="ConnectionError", num_delivered=2),
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


def test_an_author_who_makes_up_exceptions_makes_up_no_series_without_end(metrics: Metrics) -> None:
    for number in range(1000):
        metrics.observe(settled("retried", reason=f"Error{number}"))
    reasons = series(metrics, "retries_total")
    assert len(reasons) == MAX_REASONS + 1
    assert sum(reasons.values()) == 1000
    assert sample(metrics, "retries_total", **OF_INDEX, reason="other") == 1000 - (MAX_REASONS - len(RETRY_REASONS))


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("handler_seconds", "seconds"),
        ("lane_wait_seconds", "waited_seconds"),
        ("stored_to_settled_seconds", "stored_to_settled_seconds"),
    ],
)
def test_times_fall_into_buckets(metrics: Metrics, name: str, field: str) -> None:
    for seconds in (0.001, 0.004, 0.3, 5000.0):
        metrics.observe(settled("acked", **{field: seconds}))
    buckets = {
        bound: sample(metrics, f"{name}_bucket", **OF_INDEX, le=bound)
        for bound in ("0.001", "0.0025", "0.005", "0.5", "3600.0", "+Inf")
    }
    assert buckets == {"0.001": 1, "0.0025": 1, "0.005": 2, "0.5": 3, "3600.0": 3, "+Inf": 4}
    assert sample(metrics, f"{name}_count", **OF_INDEX) == 4
    assert sample(metrics, f"{name}_sum", **OF_INDEX) == pytest.approx(5000.305)


def test_two_clocks_that_differ_make_no_negative_time(metrics: Metrics) -> None:
    metrics.observe(settled("acked", stored_to_settled_seconds=-3.0))
    assert sample(metrics, "stored_to_settled_seconds_sum", **OF_INDEX) == 0


def test_progress_is_dated(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1_700_000_000.5)
    metrics.observe(settled("retried", reason="ValueError"))
    assert sample(metrics, "last_progress_timestamp_seconds", **OF_INDEX) == 1_700_000_000.5


def test_publishes_are_counted_by_outcome_and_so_are_further_attempts(metrics: Metrics) -> None:
    metrics.observe(Published(event_type="mars", outcome="stored", attempts=1))
    metrics.observe(Published(event_type="mars", outcome="duplicate", attempts=3))
    counts = {
        outcome: sample(metrics, "published_total", **OF_BASE, outcome=outcome)
        for outcome in ("stored", "duplicate", "failed")
    }
    assert counts == {"stored": 1, "duplicate": 1, "failed": 0}
    assert sample(metrics, "publish_retries_total", **OF_BASE) == 2


def test_the_first_connection_is_no_reconnect(metrics: Metrics) -> None:
    def connection() -> tuple[float | None, float | None]:
        return sample(metrics, "connected", **OF_APP), sample(metrics, "reconnects_total", **OF_APP)

    assert connection() == (0, 0)
    metrics.observe(ConnectionChanged(connected=True, reason=""))
    assert connection() == (1, 0)
    metrics.observe(ConnectionChanged(connected=False, reason="lost"))
    assert connection() == (0, 0)
    metrics.observe(ConnectionChanged(connected=True, reason=""))
    assert connection() == (1, 1)


def test_why_reading_broke_off_is_counted_by_code(metrics: Metrics) -> None:
    for error in (NotFoundError("gone", code=10014), UnavailableError("no answer"), UnavailableError("no answer")):
        metrics.observe(disturbed(error))
    assert sample(metrics, "pull_errors_total", **OF_INDEX, code="10014") == 1
    assert sample(metrics, "pull_errors_total", **OF_INDEX, code="UnavailableError") == 2


def test_only_a_consumer_that_was_gone_counts_as_made_anew(metrics: Metrics) -> None:
    metrics.observe(STARTED)
    for event in (disturbed(UnavailableError("no answer")), STARTED):
        metrics.observe(event)
    assert sample(metrics, "consumer_recreations_total", **OF_INDEX) == 0
    for event in (disturbed(NotFoundError("gone")), disturbed(NotFoundError("still gone")), STARTED, STARTED):
        metrics.observe(event)
    assert sample(metrics, "consumer_recreations_total", **OF_INDEX) == 1


def test_what_is_no_agent_of_the_apps_is_left_out(metrics: Metrics) -> None:
    metrics.observe(disturbed(NotFoundError("gone"), agent="schedule-courier"))
    metrics.observe(AgentStarted(agent="schedule-courier", stream="FIELDS", consumer="x"))
    assert series(metrics, "pull_errors_total") == {}


@pytest.mark.anyio
async def test_what_a_worker_holds_is_read_at_the_scrape(metrics: Metrics, runs: dict[str, Any]) -> None:
    clock = VirtualClock()
    flow = Flow(clock, workers=1, least=1)
    runs["index"] = Run(flow)
    now = clock.time_ns()
    for sequence, age_seconds in ((1, 60), (2, 90)):
        flow.put(Held(sequence, timestamp_ns=now - age_seconds * 1_000_000_000))  # type: ignore[arg-type]
    await flow.take()

    held = {name: sample(metrics, name, **OF_INDEX) for name in ("in_flight", "waiting", "threads_overdue")}
    assert held == {"in_flight": 1, "waiting": 1, "threads_overdue": 3}
    assert sample(metrics, "oldest_unfinished_age_seconds", **OF_INDEX) == 90


def test_the_process_says_how_it_is(metrics: Metrics, process: dict[str, float]) -> None:
    assert (sample(metrics, "ready", **OF_APP), sample(metrics, "loop_lag_seconds", **OF_APP)) == (0, 0)
    process |= {"ready": True, "late": 2.5}
    assert (sample(metrics, "ready", **OF_APP), sample(metrics, "loop_lag_seconds", **OF_APP)) == (1, 2.5)


def measured(metrics: Metrics) -> list[str]:
    return [line for line in metrics.render().decode().splitlines() if "aviso_test" in line]


def test_what_an_app_measures_takes_the_place_of_what_it_measured_before(app: App, metrics: Metrics) -> None:
    values: dict[tuple[str, ...], float] = {("a", "MARS"): 1, ("b", "MARS"): 2.5}
    app.measure("aviso_test_depth", "How deep it is.", labels=("agent", "stream"), values=values)
    values.clear()
    assert measured(metrics) == [
        "# HELP aviso_test_depth How deep it is.",
        "# TYPE aviso_test_depth gauge",
        'aviso_test_depth{agent="a",stream="MARS"} 1.0',
        'aviso_test_depth{agent="b",stream="MARS"} 2.5',
    ]
    app.measure("aviso_test_depth", "How deep it is.", labels=("agent", "stream"), values={("b", "MARS"): 3})
    assert measured(metrics)[2:] == ['aviso_test_depth{agent="b",stream="MARS"} 3.0']


@pytest.mark.parametrize("name", ["aviso_worker_pending", "two words", "9lives", ""])
def test_a_name_that_would_break_the_scrape_is_refused(app: App, name: str) -> None:
    with pytest.raises(DeclarationError, match="metric"):
        app.measure(name, "Help.", labels=(), values={(): 1})


def test_a_value_that_does_not_fit_the_labels_is_refused(app: App) -> None:
    with pytest.raises(DeclarationError, match="one text for each of agent, stream"):
        app.measure("aviso_test", "Help.", labels=("agent", "stream"), values={("a",): 1})


def test_a_fleet_shows_the_series_of_all_processes_under_one_heading(metrics: Metrics) -> None:
    metrics.observe(settled("acked"))
    one = metrics.render().decode()
    fleet = FleetMetrics("stories", ["1", "2"], scrape=lambda _: {"1": one, "2": one})
    fleet.started("1")
    shown = fleet.render().decode()
    of_processes = samples(one, process="1") | samples(one, process="2")
    assert of_processes < samples(shown)
    assert {name for name, _, _ in samples(shown) - of_processes} == {
        "aviso_worker_process_running",
        "aviso_worker_process_exits_total",
    }
    assert 'aviso_worker_process_running{app="stories",process="2"} 0.0' in shown
    headings = [line for line in shown.splitlines() if line.startswith("# TYPE")]
    assert len(headings) == len(set(headings))


def samples(shown: str, **labels: str) -> set[tuple[str, frozenset[tuple[str, str]], str]]:
    """Name, labels and value of each, with these labels beside its own."""
    found = [sample for family in text_string_to_metric_families(shown) for sample in family.samples]
    return {(sample.name, frozenset((sample.labels | labels).items()), str(sample.value)) for sample in found}


def test_promtool_finds_nothing_to_complain_of(app: App, metrics: Metrics) -> None:
    promtool = programs.find("promtool", package="prometheus")

    def check() -> str:
        found = subprocess.run([promtool, "check", "metrics"], input=metrics.render(), capture_output=True, check=False)
        return (found.stdout + found.stderr).decode()

    assert check() == ""
    metrics.observe(settled("retried", reason="ConnectionError"))
    metrics.observe(settled("dead_lettered", reason="undecodable"))
    metrics.observe(disturbed(NotFoundError("gone", code=10014)))
    metrics.observe(Published(event_type="mars", outcome="stored", attempts=2))
    app.measure("aviso_test_depth", "How deep it is.", labels=("agent",), values={("a",): 1})
    assert check() == ""


OPEN = f"{OPEN_METRICS},text/plain;version=0.0.4;q=0.5"


@pytest.fixture
def traced(app: App) -> Metrics:
    workers = structs.replace(app.config.workers, traces=Traces(enabled=True))
    app.configure(structs.replace(app.config, workers=workers))
    metrics = Metrics(app, ready=lambda: True, loop_lag_seconds=lambda: 0.0)
    app.events.listen(metrics.observe)
    return metrics


def sampled(number: int, *, seconds: float) -> Sampled:
    return Sampled(agent="index", seconds=seconds, trace_id=f"{number:032x}", span_id=f"{number:016x}")


def exemplars(shown: str) -> list[tuple[str, str, float]]:
    """The bucket, the trace and the value of each, as Prometheus' own client reads it."""
    families = openmetrics.text_string_to_metric_families(shown)  # type: ignore[no-untyped-call]
    samples = [one for family in families for one in family.samples if one.exemplar]
    return [(one.labels["le"], one.exemplar.labels["trace_id"][-2:], one.exemplar.value) for one in samples]


def test_each_bucket_of_durations_has_its_newest_exemplar(app: App, traced: Metrics) -> None:
    app.measure("aviso_test", 'A "quoted" help.', labels=(), values={(): 1})
    for number in range(1, 2000):
        traced.observe(settled("acked", seconds=0.02))
        traced.observe(sampled(number % 100, seconds=0.02))
    for number, seconds in ((100, 0.05), (101, 7200.0)):
        traced.observe(settled("acked", seconds=seconds))
        traced.observe(sampled(number, seconds=seconds))
    body, content_type = traced.answer(OPEN)
    shown = body.decode()
    assert content_type == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert exemplars(shown) == [("0.025", "63", 0.02), ("0.05", "64", 0.05), ("+Inf", "65", 7200.0)]
    assert shown.endswith("\n# EOF\n")
    assert "# TYPE aviso_worker_notifications counter\n" in shown
    assert len(next(line for line in shown.splitlines() if " # {" in line).partition(" # {")[2]) < 128
    plain = traced.render().decode()
    assert traced.answer("text/plain") == (plain.encode(), "text/plain; version=0.0.4; charset=utf-8")
    assert "# {" not in plain
    assert openmetrics_samples(shown) == samples(plain), "the same numbers"


def openmetrics_samples(shown: str) -> set[tuple[str, frozenset[tuple[str, str]], str]]:
    families = openmetrics.text_string_to_metric_families(shown)  # type: ignore[no-untyped-call]
    found = [one for family in families for one in family.samples]
    return {(one.name, frozenset(one.labels.items()), str(float(one.value))) for one in found}


def test_a_fleet_shows_the_exemplars_of_its_processes(traced: Metrics) -> None:
    traced.observe(settled("acked"))
    traced.observe(sampled(7, seconds=0.02))
    open_one, plain = (traced.answer(accept)[0].decode() for accept in (OPEN, ""))
    fleet = FleetMetrics("stories", ["1", "2"], scrape=lambda accept: {"1": open_one, "2": plain}, traced=True)
    body, content_type = fleet.answer(OPEN)
    assert content_type == OPEN_METRICS
    assert exemplars(body.decode()) == [("0.025", "07", 0.02)]
    assert body.count(b"# EOF") == 1
    assert openmetrics_samples(open_one) <= {
        (name, frozenset(label for label in labels if label[0] != "process"), value)
        for name, labels, value in openmetrics_samples(body.decode())
    }
    untraced = FleetMetrics("stories", ["1"], scrape=lambda accept: {accept: plain})
    assert untraced.answer(OPEN)[1] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'process=""' in untraced.answer(OPEN)[0].decode(), "its processes are asked as ever"


PROMETHEUS_ASKS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize(
    ("accept", "is_open"),
    [
        (PROMETHEUS_ASKS, True),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", True),
        ("application/openmetrics-text;version=0.0.1,text/plain;q=0.1", False),
        ("application/openmetrics-text;q=0.3,text/plain;q=0.4", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=much,text/plain;q=0.1", False),
        ("text/html,*/*", False),
        (";;,=", False),
        ("", False),
    ],
)
def test_openmetrics_is_for_who_prefers_it(accept: str, is_open: bool, metrics: Metrics, traced: Metrics) -> None:
    assert traced.answer(accept)[1].startswith("application/openmetrics-text") is is_open


def test_without_traces_the_bytes_are_those_of_the_text_format(metrics: Metrics) -> None:
    metrics.observe(settled("acked"))
    assert metrics.answer(OPEN) == (metrics.render(), "text/plain; version=0.0.4; charset=utf-8")


@pytest.mark.slow
def test_prometheus_stores_the_exemplars(traced: Metrics, tmp_path: Path, free_port: int) -> None:
    """A real one, which asks as it does by default."""
    traced.observe(settled("acked"))
    traced.observe(sampled(7, seconds=0.02))
    program = programs.find("prometheus", package="prometheus")
    with StatusServer(host="127.0.0.1", port=0, health=Health(), metrics=traced.answer) as server:
        port = int(server.url.rpartition(":")[2])
        prometheus = Prometheus(tmp_path, port=free_port, workers=[port], program=program, window="1s")
        with closing(prometheus):
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not (found := prometheus.exemplars("aviso_worker_handler_seconds_bucket")):
                assert time.monotonic() < deadline, prometheus.log
    (series,) = found
    assert series["seriesLabels"]["le"] == "0.025"
    (one,) = series["exemplars"]
    assert (one["labels"], one["value"]) == ({"trace_id": f"{7:032x}", "span_id": f"{7:016x}"}, "0.02")


class Collected:
    """What Prometheus' own client is asked to show."""

    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> list[Family]:
        return self._families


def as_prometheus_client_shows_it(shown: bytes) -> bytes:
    """What the client makes of what it reads there."""
    families = list(text_string_to_metric_families(shown.decode()))
    return generate_latest(Collected(families))


def test_what_is_shown_is_what_prometheus_own_client_makes_of_it(app: App, metrics: Metrics) -> None:
    for number in range(3):
        metrics.observe(settled("acked", seconds=10.0**number, waited_seconds=1e7, stored_to_settled_seconds=1e-5))
    metrics.observe(settled("retried", reason='a "quoted" \\ reason'))
    app.measure("aviso_test", "Two\nlines, and a \\.", labels=("place",), values={('here "and"\nthere',): 1.5e9})
    app.measure("aviso_bare", "Without labels.", labels=(), values={(): math.nan})

    assert metrics.render().decode() == as_prometheus_client_shows_it(metrics.render()).decode()


@pytest.mark.slow
def test_a_scrape_of_many_agents_takes_a_fraction_of_what_prometheus_own_client_needs(app: App) -> None:
    for number in range(100):

        @app.agent("mars", name=f"agent-{number}")
        async def index(notification: Notification[Any]) -> None: ...

    metrics = Metrics(app, ready=lambda: True, loop_lag_seconds=lambda: 0.0)
    collected = Collected(list(text_string_to_metric_families(metrics.render().decode())))

    ours, theirs = (
        min(timeit.repeat(scrape, timer=time.process_time, number=1, repeat=7))
        for scrape in (metrics.render, lambda: generate_latest(collected))
    )
    assert ours < theirs / 3
