"""The pages of metrics and what config/ has for Prometheus and Grafana, against the metrics that there are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml
from msgspec import Struct

from _docs import boards
from aviso_agents import observer, spark_events
from aviso_workers import App, Router
from aviso_workers.config import Config, load
from aviso_workers.declare.agents import durable_name
from aviso_workers.events import Event, Measured
from aviso_workers.ops import doctor
from aviso_workers.ops.doctor import output
from aviso_workers.telemetry.metrics import FLEET_METRICS, METRICS, full_name
from tests import programs
from tests.waits import PATIENCE_SECONDS

PROJECT = Path(__file__).parents[1]
RULES = PROJECT / "config" / "prometheus-rules.yml"
BOARDS = sorted((PROJECT / "config").glob("grafana-*.json"))
SCALING = PROJECT / "config" / "keda.yaml"
MONITOR = PROJECT / "aviso_workers" / "projects" / "template" / "kubernetes" / "monitoring.yaml"
FLEETS = PROJECT / "docs" / "fleets.md"
NAME = re.compile(r"\baviso_(?:worker|observer|doctor|spark_events)_[a-z_]+\b")

IN_MEMORY = """
notification_backend: {kind: in_memory}
notification_schema:
  mars: {topic: {base: mars, key_order: [class]}, identifier: {class: {type: StringHandler, required: true}}}
workers:
  agents:
    observer: {poll_seconds: 0.01}
    spark-events: {event_log_dirs: [/nowhere]}
"""


class Shown(Struct, frozen=True):
    """A metric that a scrape shows."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str

    @property
    def row(self) -> str:
        """Its line in the documentation."""
        return f"| `{self.name}` | {self.kind} | {', '.join(self.labels)} | {self.help} |"

    @property
    def series(self) -> set[str]:
        """The names of its series."""
        return (
            {f"{self.name}_{part}" for part in ("bucket", "count", "sum")} if self.kind == "histogram" else {self.name}
        )


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> list[Shown]:
    """All: the worker's and the fleet's as their tables have them, and what agents measure."""
    of_worker = [
        Shown(full_name(name, metric), metric.kind, (*labels, *filter(None, [metric.by])), metric.help)
        for labels, of_labels in {**METRICS, **FLEET_METRICS}.items()
        for name, metric in of_labels.items()
    ]
    file = tmp_path_factory.mktemp("agents") / "config.yaml"
    file.write_text(IN_MEMORY)
    config = load(file, environ={})
    of_observer = anyio.run(of_agent, observer.router, config, "aviso_observer_dead_letters")
    of_spark_events = anyio.run(of_agent, spark_events.router, config, "aviso_spark_events_lost_applications")
    return of_worker + of_observer + of_spark_events + of_doctor()


def of_doctor() -> list[Shown]:
    healthy = doctor.Report(server="n1", results=(), durability=())
    return [Shown(gauge.name, "gauge", gauge.labels, gauge.help) for gauge in output.measured(healthy)]


async def of_agent(router: Router, config: Config, last: str) -> list[Shown]:
    """What an agent measures, until it measures what is its last."""
    found: dict[str, Shown] = {}
    app = App("measured", config=config)
    app.include(router)
    stop = anyio.Event()

    def listen(event: Event) -> None:
        if isinstance(event, Measured):
            found[event.name] = Shown(event.name, "gauge", event.labels, event.help)
            if event.name == last:
                stop.set()

    app.events.listen(listen)
    with anyio.fail_after(PATIENCE_SECONDS):
        async with app:
            await app._work(stop)
    return list(found.values())


def test_every_metric_is_documented_as_it_is(metrics: list[Shown]) -> None:
    pages = ("metrics.md", "spark/job-events.md")
    documented = [line for page in pages for line in (PROJECT / "docs" / page).read_text().splitlines()]
    assert sorted(line for line in documented if line.startswith("| `aviso_")) == sorted(one.row for one in metrics)


@pytest.mark.parametrize("file", [RULES, *BOARDS, SCALING, FLEETS], ids=lambda file: file.name)
def test_what_is_asked_for_is_there(file: Path, metrics: list[Shown]) -> None:
    asked = set(NAME.findall(file.read_text()))
    there = {name for metric in metrics for name in (metric.name, *metric.series)}
    assert asked
    assert asked - there == set()


def test_keda_is_asked_to_scale_on_the_lag_of_one_agent() -> None:
    scaled = yaml.safe_load(SCALING.read_text())
    assert (scaled["apiVersion"], scaled["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    spec = scaled["spec"]
    assert 1 <= spec["minReplicaCount"] < spec["maxReplicaCount"]
    by_query, by_server = (trigger["metadata"] for trigger in spec["triggers"])
    assert all(isinstance(value, str) for value in (*by_query.values(), *by_server.values())), "KEDA takes text only"
    assert by_query["threshold"] == by_server["lagThreshold"]
    assert int(by_query["threshold"]) > 0
    assert by_server["consumer"] == durable_name("fields", "index")
    assert 'app="fields", agent="index"' in by_query["query"]


def test_promtool_can_read_what_is_scaled_on(tmp_path: Path) -> None:
    (query,) = re.findall(r"```promql\n(.*?)```", FLEETS.read_text(), re.DOTALL)
    asked = [query, yaml.safe_load(SCALING.read_text())["spec"]["triggers"][0]["metadata"]["query"]]
    check_expressions(tmp_path, asked)


def test_every_alert_says_what_to_do() -> None:
    for rule in alerts():
        summary = rule["annotations"]["summary"]
        assert summary.endswith("."), rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return list(group["rules"])


@pytest.mark.parametrize("what", ["config", "rules"])
def test_promtool_takes_the_files(what: str) -> None:
    file = {"config": "prometheus.yml", "rules": "prometheus-rules.yml"}[what]
    promtool("check", what, str(PROJECT / "config" / file))


def test_the_boards_are_written_from_the_tables() -> None:
    """`PYTHONPATH=scripts .venv/bin/python -m _docs.boards` writes them."""
    assert {board.name: board.read_text() for board in BOARDS} == boards.files()


def test_promtool_can_read_what_the_boards_ask_for(tmp_path: Path) -> None:
    asked = [target["expr"] for panel in panels() for target in panel["targets"]]
    check_expressions(tmp_path, [expression.replace("$__rate_interval", "5m") for expression in asked])


ON_NO_BOARD = {"aviso_worker_lineage_events_total": "few configure lineage, and where it fails a log line says so"}
"""Metrics that no board shows, and why."""


def test_each_metric_stands_on_a_board(metrics: list[Shown]) -> None:
    asked = {name for board in BOARDS for name in NAME.findall(board.read_text())}
    without = {metric.name for metric in metrics if not asked & {metric.name, *metric.series}}
    assert without == {*ON_NO_BOARD}


def test_each_panel_says_what_its_metrics_mean_and_what_to_do(metrics: list[Shown]) -> None:
    for panel in panels():
        *meanings, do, runbook = panel["description"].split("\n\n")
        asked = set(NAME.findall(" ".join(target["expr"] for target in panel["targets"])))
        assert {*meanings} == {metric.help for metric in metrics if asked & {metric.name, *metric.series}}
        assert do.endswith("."), panel["title"]
        assert is_heading(runbook), panel["title"]


def test_each_board_has_the_variables_that_its_queries_and_links_name() -> None:
    for board in map(json.loads, map(Path.read_text, BOARDS)):
        assert [variable["name"] for variable in board["templating"]["list"]] == ["datasource", "app", "agent"]
        assert {panel["datasource"]["uid"] for panel in board["panels"]} == {"${datasource}"}
    links = {link["url"] for panel in panels() for link in panel["fieldConfig"]["defaults"].get("links", ())}
    assert {re.match(r"/d/([\w-]+)\?var-app=", link)[1] for link in links} == {"aviso-workers-agent"}  # type: ignore[index]
    assert "aviso-workers-agent" in [json.loads(board.read_text())["uid"] for board in BOARDS]


def panels() -> list[dict[str, Any]]:
    return [panel for board in BOARDS for panel in json.loads(board.read_text())["panels"]]


def check_expressions(tmp_path: Path, asked: list[str]) -> None:
    rules = [{"record": f"asked:{number}", "expr": expression} for number, expression in enumerate(asked)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "asked", "rules": rules}]}))
    promtool("check", "rules", str(file))


OF_WORKER = 'app="fields", instance="host:9464", job="aviso-workers"'
OF_AGENT = f'{OF_WORKER}, agent="index", base="mars"'
EXITS = f'aviso_worker_process_exits_total{{{OF_WORKER}, process="1"'
RETRIES = f"aviso_worker_retries_total{{{OF_AGENT}, reason="
FAILED_TASK = f'aviso_worker_task_failures_total{{{OF_WORKER}, task="watch"}}'
FAILED_TICKS = f'aviso_worker_ticks_total{{{OF_WORKER}, timer="report", outcome="failed"}}'
OF_SPARK = 'instance="spark:9464", job="aviso-workers", cluster="local"'
OBSERVED = 'app="fields", agent="index", stream="MARS"'
HEALTHY = {
    'up{job="aviso-workers", instance="host:9464"}': "1x60",
    f"aviso_worker_ready{{{OF_WORKER}}}": "1x60",
    f"aviso_worker_connected{{{OF_WORKER}}}": "1x60",
    f"aviso_worker_foreign_answers_total{{{OF_WORKER}}}": "0x60",
    f"aviso_worker_foreign_total{{{OF_WORKER}}}": "0x60",
    f"aviso_worker_loop_lag_seconds{{{OF_WORKER}}}": "0.01x60",
    f'{EXITS}, ending="crashed"}}': "0x50 1x10",
    f'{EXITS}, ending="in_order"}}': "0+1x60",
    f'aviso_worker_notifications_total{{{OF_AGENT}, outcome="acked"}}': "0+600x60",
    f'aviso_worker_notifications_total{{{OF_AGENT}, outcome="retried"}}': "0+6x60",
    f'{RETRIES}"dead_letter_failed"}}': "0x60",
    f'{RETRIES}"RuntimeError"}}': "0+6x60",
    f"aviso_worker_dead_letters_refused{{{OF_AGENT}}}": "0x60",
    f'aviso_worker_dead_letters_total{{{OF_AGENT}, reason="rejected"}}': "0x60",
    f"aviso_worker_dead_letter_call_failures_total{{{OF_AGENT}}}": "0x60",
    f"aviso_worker_leader_hindered{{{OF_WORKER}}}": "0x60",
    FAILED_TICKS: "3x60",
    f'aviso_worker_ticks_total{{{OF_WORKER}, timer="report", outcome="done"}}': "0+1x60",
    FAILED_TASK: "0x60",
    f'aviso_worker_windows_total{{{OF_WORKER}, agent="index", outcome="failed"}}': "0x60",
    f"aviso_worker_not_read_again{{{OF_AGENT}}}": "0x60",
    f"aviso_worker_outage{{{OF_AGENT}}}": "0x60",
    f"aviso_worker_missed_total{{{OF_AGENT}}}": "5x60",
    f'aviso_worker_published_total{{{OF_WORKER}, base="mars", outcome="failed"}}': "0x60",
    f"aviso_observer_pending{{{OBSERVED}}}": "500-1x60",
    f'aviso_observer_agent_needs_somebody{{{OBSERVED}, state="failing"}}': "0x60",
    'aviso_observer_dead_letters{app="fields", agent="index"}': "3x60",
    f"aviso_worker_start_timestamp_seconds{{{OF_WORKER}}}": "7x30 1900x30",
    f'aviso_worker_pull_errors_total{{{OF_AGENT}, code="503"}}': "0x50 1x10",
    f"aviso_worker_consumer_recreations_total{{{OF_AGENT}}}": "0x60",
    'aviso_observer_stream_used_ratio{stream="MARS"}': "0.5x60",
    'aviso_doctor_check{code="JS044", state="fail"}': "0x60",
    'aviso_doctor_check{code="JS042", state="fail"}': "0x60",
    'aviso_doctor_findings{code="JS042", state="fail"}': "0x60",
    'aviso_doctor_findings{code="JS042", state="warn"}': "0x30 1x30",
    "aviso_doctor_last_run_timestamp_seconds": "0+60x60",
    "aviso_observer_last_poll_timestamp_seconds": "0+60x60",
    f'aviso_spark_events_directory_missing{{{OF_SPARK}, directory="/logs"}}': "0x60",
    f"aviso_spark_events_last_search_timestamp_seconds{{{OF_SPARK}}}": "0+60x60",
    'aviso_worker_task_failures_total{instance="spark:9464", job="aviso-workers", task="follow_event_logs"}': "0x60",
    f"aviso_spark_events_oldest_unpublished_age_seconds{{{OF_SPARK}}}": "2x60",
    f'aviso_spark_events_incomplete_logs{{{OF_SPARK}, reason="left_out"}}': "1x30 0x30",
    f"aviso_spark_events_lost_applications{{{OF_SPARK}}}": "3x60",
}
"""An hour of a deployment, a value a minute."""


def instead(name: str, values: str) -> dict[str, str]:
    """The one healthy series of this name with other values."""
    (series,) = [series for series in HEALTHY if series.startswith(name)]
    return {series: values}


EVERYDAY = ("AvisoWorkerDown", "AvisoAgentNeedsSomebody", "AvisoDeadLetters")
"""Those that are tried in every run: each try evaluates the rules of an hour."""


def tried(alert: str, *further: object) -> object:
    return pytest.param(alert, *further, marks=() if alert in EVERYDAY else pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alert", "unhealthy"),
    [
        ("", {}),
        tried("AvisoWorkerDown", instead("up", "0x60")),
        tried("AvisoWorkerDisconnected", instead("aviso_worker_connected", "0x60")),
        tried("AvisoWorkerNotReady", instead("aviso_worker_ready", "0x60")),
        tried("AvisoWorkerLoopBlocked", instead("aviso_worker_loop_lag_seconds", "7x60")),
        tried(
            "AvisoProcessCrashing",
            {f'aviso_worker_process_exits_total{{{OF_WORKER}, process="1", ending="crashed"}}': "0+1x60"},
        ),
        tried("AvisoAgentNeedsSomebody", instead("aviso_observer_agent_needs_somebody", "1x60")),
        tried("", instead("aviso_observer_agent_needs_somebody", "0x50 1x5 0x5")),
        tried("AvisoWorkerRestarts", instead("aviso_worker_start_timestamp_seconds", "0+60x60")),
        tried("AvisoPullErrors", instead("aviso_worker_pull_errors_total", "0+1x60")),
        tried("AvisoConsumerRecreated", instead("aviso_worker_consumer_recreations_total", "0x50 1x10")),
        tried("AvisoConsumerRecreated", instead("aviso_worker_consumer_recreations_total", "_x50 1x10")),
        tried("", instead("aviso_worker_consumer_recreations_total", "_x30 1x30")),
        tried("AvisoStreamNearlyFull", instead("aviso_observer_stream_used_ratio", "0.95x60")),
        tried("AvisoServersUnhealthy", instead('aviso_doctor_check{code="JS044"', "1x60")),
        tried("AvisoDoctorFails", instead('aviso_doctor_findings{code="JS042", state="fail"', "1x60")),
        tried("AvisoDoctorMissing", instead("aviso_doctor_last_run_timestamp_seconds", "-900x60")),
        tried("AvisoDoctorMissing", instead("aviso_doctor_last_run_timestamp_seconds", "_x60")),
        tried("AvisoDeadLetters", instead("aviso_worker_dead_letters_total", "0x50 1x10")),
        tried("AvisoDeadLetters", instead("aviso_observer_dead_letters", "3x50 4x10")),
        tried("AvisoDeadLetterCallFails", instead("aviso_worker_dead_letter_call_failures_total", "0x50 1x10")),
        tried("AvisoDeadLettersRefused", {f'{RETRIES}"dead_letter_failed"}}': "0+1x60"}),
        tried("AvisoDeadLettersRefused", instead("aviso_worker_dead_letters_refused", "0x50 1x10")),
        tried("AvisoLeaderHindered", instead("aviso_worker_leader_hindered", "1x60")),
        tried("AvisoForeignAnswers", instead("aviso_worker_foreign_answers_total", "0x50 1x10")),
        tried("AvisoForgedMessages", instead("aviso_worker_foreign_total", "0x50 1x10")),
        tried("", instead("aviso_worker_outage", "1x60")),
        tried("AvisoNotReadAgain", instead("aviso_worker_not_read_again", "1x60")),
        tried("AvisoTimerFails", {FAILED_TICKS: "3x50 4x10"}),
        tried("AvisoTaskFails", instead(FAILED_TASK, "0x50 1x10")),
        tried("AvisoWindowsFail", instead("aviso_worker_windows_total", "0x50 1x10")),
        tried("AvisoNotificationsMissed", instead("aviso_worker_missed_total", "0x50 1x10")),
        tried("AvisoRetriesRising", {f'{RETRIES}"RuntimeError"}}': "0+90x60"}),
        tried("", {f'{RETRIES}"{reason}"}}': "0+300x60" for reason in ("other_version", "unavailable", "uncounted")}),
        tried("AvisoPublishingFails", instead("aviso_worker_published_total", "0x50 1x10")),
        tried("AvisoSparkDirectoryMissing", instead("aviso_spark_events_directory_missing", "1x60")),
        tried("AvisoSparkSearchStopped", instead("aviso_spark_events_last_search_timestamp_seconds", "600x60")),
        tried("AvisoSparkSearchStopped", instead("aviso_spark_events_last_search_timestamp_seconds", "_x60")),
        tried("AvisoSparkLogsBehind", instead("aviso_spark_events_oldest_unpublished_age_seconds", "0+60x60")),
        tried("AvisoSparkLogsIncomplete", instead("aviso_spark_events_incomplete_logs", "0x55 1x1 0x4")),
        tried("AvisoSparkApplicationsLost", instead("aviso_spark_events_lost_applications", "3x50 4x10")),
        tried("AvisoObserverBlind", instead("aviso_observer_last_poll_timestamp_seconds", "600x60")),
        tried("AvisoObserverBlind", instead("aviso_observer_last_poll_timestamp_seconds", "_x60")),
    ],
)
def test_an_alert_fires_when_it_should_and_alone(alert: str, unhealthy: dict[str, str], tmp_path: Path) -> None:
    fires_alone(alert, HEALTHY | unhealthy, tmp_path, at="1h")


NEW = {
    "AvisoWorkerDown": {"up": "_x50 0x10"},
    "AvisoWorkerDisconnected": {"aviso_worker_connected": "_x50 0x10"},
    "AvisoWorkerNotReady": {"aviso_worker_ready": "_x50 0x10"},
    "AvisoWorkerLoopBlocked": {"aviso_worker_loop_lag_seconds": "_x50 7x10"},
    "AvisoProcessCrashing": {f'{EXITS}, ending="crashed"}}': "_x50 0+1x10"},
    "AvisoWorkerRestarts": {"aviso_worker_start_timestamp_seconds": "_x50 0+60x10"},
    "AvisoPullErrors": {"aviso_worker_pull_errors_total": "_x50 1+1x10"},
    "AvisoConsumerRecreated": {"aviso_worker_consumer_recreations_total": "_x50 1x10"},
    "AvisoStreamNearlyFull": {"aviso_observer_stream_used_ratio": "_x50 0.95x10"},
    "AvisoServersUnhealthy": {'aviso_doctor_check{code="JS044"': "_x50 1x10"},
    "AvisoDoctorFails": {'aviso_doctor_findings{code="JS042", state="fail"': "_x45 1x15"},
    "AvisoDoctorMissing": {"aviso_doctor_last_run_timestamp_seconds": "_x50 -900x10"},
    "AvisoAgentNeedsSomebody": {"aviso_observer_agent_needs_somebody": "_x50 1x10"},
    "AvisoDeadLetters": {"aviso_worker_dead_letters_total": "_x50 1x10"},
    "AvisoDeadLetterCallFails": {f"aviso_worker_dead_letter_call_failures_total{{{OF_AGENT}}}": "_x50 1x10"},
    "AvisoDeadLettersRefused": {f'{RETRIES}"dead_letter_failed"': "_x50 1x10"},
    "AvisoNotReadAgain": {"aviso_worker_not_read_again": "_x50 1x10"},
    "AvisoForeignAnswers": {"aviso_worker_foreign_answers_total": "_x50 1x10"},
    "AvisoForgedMessages": {"aviso_worker_foreign_total": "_x50 1x10"},
    "AvisoLeaderHindered": {"aviso_worker_leader_hindered": "_x50 1x10"},
    "AvisoTimerFails": {FAILED_TICKS: "_x50 1x10"},
    "AvisoTaskFails": {FAILED_TASK: "_x50 1x10"},
    "AvisoWindowsFail": {"aviso_worker_windows_total": "_x50 1x10"},
    "AvisoNotificationsMissed": {"aviso_worker_missed_total": "_x50 1x10"},
    "AvisoRetriesRising": {f'{RETRIES}"RuntimeError"': "_x40 1+90x20"},
    "AvisoPublishingFails": {"aviso_worker_published_total": "_x50 1x10"},
    "AvisoSparkDirectoryMissing": {"aviso_spark_events_directory_missing": "_x50 1x10"},
    "AvisoSparkSearchStopped": {"aviso_spark_events_last_search_timestamp_seconds": "_x50 600x10"},
    "AvisoSparkLogsBehind": {"aviso_spark_events_oldest_unpublished_age_seconds": "_x50 400x10"},
    "AvisoSparkLogsIncomplete": {"aviso_spark_events_incomplete_logs": "_x50 1x10"},
    "AvisoSparkApplicationsLost": {"aviso_spark_events_lost_applications": "_x50 1x10"},
    "AvisoObserverBlind": {"aviso_observer_last_poll_timestamp_seconds": "_x50 600x10"},
}
"""By alert, its series as it begins in the last ten minutes or so, already with what the alert is about."""


@pytest.mark.parametrize("alert", [*map(tried, NEW)])
def test_an_alert_fires_for_a_series_that_has_just_begun(alert: str, tmp_path: Path) -> None:
    ((name, values),) = NEW[alert].items()
    fires_alone(alert, HEALTHY | instead(name, values), tmp_path, at="1h")


def test_every_alert_is_tried_with_a_series_that_has_just_begun() -> None:
    waits_for_a_day = {"AvisoDoctorWarns"}
    assert {rule["alert"] for rule in alerts()} == NEW.keys() | waits_for_a_day


def test_a_count_from_before_a_gap_is_not_new(tmp_path: Path) -> None:
    """As where Prometheus was down for half an hour."""
    fires_alone("", HEALTHY | instead("aviso_worker_missed_total", "5x10 _x30 5x20"), tmp_path, at="1h")


OF_PROCESS = f'{OF_WORKER}, process="1"'
FLEET = {
    f"aviso_worker_process_running{{{OF_PROCESS}}}": "1x60",
    f"aviso_worker_ready{{{OF_PROCESS}}}": "1x60",
    f"aviso_worker_start_timestamp_seconds{{{OF_PROCESS}}}": "0+60x60",
}
"""A fleet whose process is replaced each minute, in order."""


@pytest.mark.parametrize(
    ("alert", "unhealthy"),
    [
        pytest.param("", {}, id="replaced in order"),
        pytest.param("AvisoWorkerRestarts", {f'{EXITS}, ending="in_order"}}': "0x60"}, id="restarted"),
        pytest.param("AvisoWorkerNotReady", {f"aviso_worker_ready{{{OF_PROCESS}}}": "1x40 _x20"}, id="hangs"),
    ],
)
def test_a_process_of_a_fleet_is_told_as_a_worker_is(alert: str, unhealthy: dict[str, str], tmp_path: Path) -> None:
    fires_alone(alert, HEALTHY | FLEET | unhealthy, tmp_path, at="1h")


def test_the_search_that_never_came_is_known_by_the_task_that_searches() -> None:
    (task,) = spark_events.router.tasks
    (rule,) = [rule for rule in alerts() if rule["alert"] == "AvisoSparkSearchStopped"]
    assert f'task="{task.name}"' in rule["expr"]


def test_the_worker_of_a_new_project_that_is_down_is_told(tmp_path: Path) -> None:
    """The operator names a job after the service, unless the monitor says otherwise."""
    service, monitor = yaml.safe_load_all(MONITOR.read_text())
    (endpoint,) = monitor["spec"]["endpoints"]
    given = [each["replacement"] for each in endpoint.get("relabelings", ()) if each["targetLabel"] == "job"]
    job = given[-1] if given else service["metadata"]["name"]
    worker = {f'up{{job="{job}", instance="10.0.0.7:9464"}}': "1x50 0x10"}
    fires_alone("AvisoWorkerDown", HEALTHY | worker, tmp_path, at="1h")


def test_a_worker_of_another_job_that_is_down_is_told(tmp_path: Path) -> None:
    """It was scraped before, and shows by its metrics what it is; others of that job are not meant."""
    series = {
        'up{job="pods", instance="10.0.0.7:9464"}': "1x50 0x10",
        'up{job="pods", instance="10.0.0.8:8080"}': "0x60",
        'aviso_worker_ready{app="fields", job="pods", instance="10.0.0.7:9464"}': "1x50 _x10",
    }
    fires_alone("AvisoWorkerDown", HEALTHY | series, tmp_path, at="1h")


@pytest.mark.slow
def test_a_warning_of_the_doctors_is_told_after_a_day(tmp_path: Path) -> None:
    days = {
        "aviso_doctor_last_run_timestamp_seconds": "0+60x1500",
        'aviso_observer_last_poll_timestamp_seconds{stream="MARS"}': "0+60x1500",
        'aviso_doctor_findings{code="JS042", state="warn"}': "_x50 1x1450",
    }
    fires_alone("AvisoDoctorWarns", days, tmp_path, at="25h")


def test_every_runbook_is_a_heading_of_its_page() -> None:
    for rule in alerts():
        assert is_heading(rule["annotations"]["runbook_url"]), rule["alert"]


def is_heading(place: str) -> bool:
    """Return whether a page, and what follows `#`, are there."""
    page, _, anchor = place.partition("#")
    headings = re.findall(r"^#+ (.+)$", (PROJECT / page).read_text(), re.MULTILINE)
    return anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.slow
def test_what_metrics_md_says_makes_links_of_the_runbooks(tmp_path: Path) -> None:
    (block,) = re.findall(r"```bash\n(.*?)```", (PROJECT / "docs" / "metrics.md").read_text(), re.DOTALL)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(["bash", "-ec", block], cwd=tmp_path, env={**os.environ, "PATH": path}, check=True)
    site = "https://wiki.example.org/aviso/docs/operations/"
    for file in (RULES, *BOARDS):
        assert (tmp_path / file.name).read_text() == file.read_text().replace("docs/operations/", site)


def fires_alone(alert: str, shown: dict[str, str], tmp_path: Path, *, at: str) -> None:
    firing: dict[str, Any] = {"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": at}
    firing["exp_samples"] = [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if alert else []
    series = [{"series": name, "values": values} for name, values in shown.items()]
    test = {"interval": "1m", "input_series": series, "promql_expr_test": [firing]}
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
    promtool("test", "rules", str(file))


def promtool(*arguments: str) -> None:
    promtool = programs.find("promtool", package="prometheus")
    done = subprocess.run([promtool, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
