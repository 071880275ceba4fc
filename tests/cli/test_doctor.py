"""`doctor` against a real server: what it prints, and how it ends."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aviso_workers.ops.doctor.checks import CHECKS
from tests.cli.conftest import Ran

Run = Callable[..., Ran]
QUICK = ("--seconds", "0.1")


@pytest.fixture
def failing(run: Run, config: Path) -> Path:
    """A configuration whose stream drops what is published, because it has no consumer."""
    document = json.loads(config.read_text())
    document["notification_backend"]["jetstream"]["retention_policy"] = "interest"
    config.write_text(json.dumps(document))
    assert run("streams", "apply", "--config", config).code == 0
    return config


def test_what_fails_comes_first_with_its_cure_and_ends_with_1(run: Run, failing: Path) -> None:
    ran = run("doctor", *QUICK, "--config", failing)
    assert ran.code == 1
    assert re.match(r"nats-server \S+ \d+\.\d+\.\d+: 1 FAIL, ", ran.lines[0])
    assert ran.lines[2:6] == [
        "FAIL JS008 MARS: retention interest and no consumer",
        f"     Expected: {check('JS008').title}.",
        f"     Why: {check('JS008').why} (docs/operations/checks.md#js008)",
        f"       -> {check('JS008').cure}",
    ]
    assert "SKIP JS001 JS002 JS003 JS005 JS040 JS047 JS052: checked only with --production" in ran.lines
    assert f"PASS JS004 {check('JS004').title}" in ran.lines


def test_what_is_only_a_warning_ends_with_0(run: Run, config: Path) -> None:
    run("streams", "apply", "--config", config)
    ran = run("doctor", *QUICK, "--config", config)
    assert ran.code == 0, ran
    assert ran.lines[-2] == "Losses when a server, its disk or its power fails:"
    assert ran.lines[-1].startswith(
        "  MARS, aviso_workers_audit: all messages are lost if the server's disk fails; sync_interval is not known"
    )


def test_at_a_terminal_what_passes_is_only_counted(run: Run, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    short = run("doctor", *QUICK, "--config", config)
    long = run("doctor", *QUICK, "-v", "--config", config)
    assert any(re.fullmatch(r"\d+ checks passed; -v lists them", line) for line in short.lines), short
    passed = f"PASS JS004 {check('JS004').title}"
    assert (passed in short.lines, passed in long.lines) == (False, True)


def test_only_in_production_three_copies_are_needed(run: Run, config: Path) -> None:
    run("streams", "apply", "--config", config)
    ran = run("doctor", *QUICK, "--production", "--config", config)
    assert (ran.code, "FAIL JS003 MARS: num_replicas 1" in ran.lines) == (1, True), ran


def test_a_program_reads_all_of_it(run: Run, failing: Path) -> None:
    ran = run("doctor", *QUICK, "--format", "json", "--config", failing)
    told = json.loads(ran.out)
    assert (ran.code, told["state"], [*told["durability"]]) == (1, "FAIL", ["MARS", "aviso_workers_audit"])
    assert len(told["checks"]) == len(CHECKS)
    worst = told["checks"][0]
    assert (worst["code"], worst["state"], worst["docs"]) == ("JS008", "FAIL", "docs/operations/checks.md#js008")
    (finding,) = worst["findings"]
    assert finding == {
        "state": "FAIL",
        "where": "MARS",
        "stream": "MARS",
        "consumer": "",
        "found": "retention interest and no consumer",
        "cure": check("JS008").cure,
        "accepted": "",
    }


def accepting(config: Path, *, where: str = "MARS", until: str = "2999-01-31T00:00:00Z", code: str = "JS008") -> Path:
    """The configuration, in which a finding is accepted."""
    given = {"code": code, "where": where, "reason": "not created yet", "until": until}
    path = config.with_name("accepting.yaml")
    path.write_text(json.dumps({**json.loads(config.read_text()), "doctor": {"accepted": [given]}}))
    return path


@pytest.mark.parametrize("where", ["MARS", "M*"])
def test_an_accepted_finding_is_shown_and_is_no_failure(run: Run, failing: Path, where: str) -> None:
    accepted = accepting(failing, where=where)
    text = run("doctor", *QUICK, "--config", accepted)
    assert (text.code, ": 0 FAIL, " in text.lines[0], ", 1 ACCEPTED, " in text.lines[0]) == (0, True, True), text
    until = "until 2999-01-31 00:00 UTC: not created yet"
    assert f"ACCEPTED JS008 MARS: retention interest and no consumer ({until})" in text.lines
    assert check("JS008").cure not in text.out

    told = json.loads(run("doctor", *QUICK, "--format", "json", "--config", accepted).out)
    (result,) = [each for each in told["checks"] if each["code"] == "JS008"]
    (finding,) = result["findings"]
    assert (result["state"], finding["state"]) == ("ACCEPTED", "ACCEPTED")
    assert finding["accepted"] == until

    gauges = run("doctor", *QUICK, "--format", "prometheus", "--config", accepted).lines
    assert 'aviso_doctor_findings{code="JS008",state="accepted"} 1.0' in gauges
    assert 'aviso_doctor_findings{code="JS008",state="fail"} 0.0' in gauges
    assert 'aviso_doctor_check{code="JS008",state="accepted"} 1.0' in gauges
    nagios = run("doctor", *QUICK, "--format", "nagios", "--config", accepted)
    expected = "AVISO-WORKERS OK - nothing found | fail=0 warn=0 accepted=1"
    assert (nagios.code, nagios.out.split(" skip=")[0]) == (0, expected)


def test_an_acceptance_that_is_over_counts_no_more_and_says_so(run: Run, failing: Path) -> None:
    ran = run("doctor", *QUICK, "--config", accepting(failing, until="2020-01-31T00:00:00Z"))
    assert ran.code == 1
    assert ran.lines[2] == (
        "FAIL JS008 MARS: retention interest and no consumer (was accepted until 2020-01-31 00:00 UTC: not created yet)"
    )


def test_findings_of_another_place_are_not_accepted(run: Run, failing: Path) -> None:
    assert run("doctor", *QUICK, "--config", accepting(failing, where="OTHER")).code == 1


def test_a_code_that_no_check_has_is_refused(run: Run, failing: Path) -> None:
    ran = run("doctor", *QUICK, "--config", accepting(failing, code="JS999"))
    assert (ran.code, "doctor.accepted[0].code: there is no check JS999" in ran.err) == (2, True), ran


def test_prometheus_reads_it_and_the_labels_are_bounded(run: Run, failing: Path) -> None:
    ran = run("doctor", *QUICK, "--format", "prometheus", "--config", failing)
    samples = [sample for family in text_string_to_metric_families(ran.out) for sample in family.samples]
    states = {
        (sample.labels["code"], sample.labels["state"]): sample.value
        for sample in samples
        if sample.name == "aviso_doctor_check"
    }
    assert states["JS008", "fail"] == 1
    assert states["JS008", "pass"] == 0
    assert len(states) == 5 * len(CHECKS)
    assert sum(states.values()) == len(CHECKS)
    (findings,) = [
        sample
        for sample in samples
        if sample.name == "aviso_doctor_findings" and sample.labels == {"code": "JS008", "state": "fail"}
    ]
    assert findings.value == 1
    assert "MARS" not in ran.out


def test_nagios_gets_its_line_and_its_codes(run: Run, failing: Path) -> None:
    ran = run("doctor", *QUICK, "--format", "nagios", "--config", failing)
    assert ran.code == 2
    (line,) = ran.lines
    assert line.startswith("AVISO-WORKERS CRITICAL - JS008 MARS: retention interest and no consumer | fail=1")
    run("streams", "rm", "MARS", "--yes", "--config", failing)
    warned = run("doctor", *QUICK, "--format", "nagios", "--config", failing)
    assert (warned.code, warned.lines[0].split(" - ")[0]) == (0, "AVISO-WORKERS OK")


def test_nagios_hears_of_a_server_that_is_not_there_and_of_a_mistake(
    run: Run, unreachable: Path, tmp_path: Path
) -> None:
    down = run("doctor", *QUICK, "--format", "nagios", "--config", unreachable)
    assert (down.code, down.out.startswith("AVISO-WORKERS CRITICAL - ")) == (2, True), down
    mistaken = tmp_path / "mistaken.yaml"
    mistaken.write_text("notification_backend: {kind: no_such_backend}")
    unknown = run("doctor", *QUICK, "--format", "nagios", "--config", mistaken)
    assert (unknown.code, unknown.out.startswith("AVISO-WORKERS UNKNOWN - ")) == (3, True), unknown


def test_without_a_server_it_says_so(run: Run, unreachable: Path, tmp_path: Path) -> None:
    ran = run("doctor", *QUICK, "--config", unreachable)
    assert (ran.code, ran.out) == (2, "")
    assert re.fullmatch(r"aviso-workers: no NATS server at \S+ after 1 attempt: .+\n", ran.err), ran
    (tmp_path / "memory.yaml").write_text("notification_backend: {kind: in_memory}")
    in_memory = run("doctor", *QUICK, "--config", tmp_path / "memory.yaml")
    assert in_memory.code == 2
    assert "server" in in_memory.err


@pytest.mark.parametrize(
    ("option", "told"),
    [
        (("--monitor", "127.0.0.1:8222"), "is not a URL, such as http://127.0.0.1:8222"),
        (("--backups", "nowhere"), "does not exist"),
        (("--format", "xml"), "--format"),
        (("--seconds", "0"), "--seconds"),
        (("--seconds", "nan"), "nan is not a finite number"),
    ],
)
def test_options_that_mean_nothing_are_refused(run: Run, config: Path, option: tuple[str, str], told: str) -> None:
    ran = run("doctor", *option, "--config", config)
    assert (ran.code, told in " ".join(ran.err.replace("│", " ").split())) == (2, True), ran


def test_the_agents_of_an_app_are_looked_at_too(run: Run, config: Path, tmp_path: Path) -> None:
    (tmp_path / "derived.py").write_text(
        f"""
from aviso_workers import App, RetryPolicy, Notification, Notify
app = App("derived", config={str(config)!r})
seen = app.table("seen", str)
@app.agent("mars", retry=RetryPolicy(first=600, attempts=3))
async def derive(notification: Notification) -> Notify: ...
"""
    )
    run("streams", "apply", "--config", config)
    ran = run("doctor", *QUICK, "--app", "derived:app")
    assert "WARN JS009 MARS: duplicate_window 2m, and agent derive retries for up to 1320 s" in ran.lines
    assert "KV_" not in ran.out, "nothing is made"


def check(code: str):  # type: ignore[no-untyped-def]
    return next(check for check in CHECKS if check.code == code)
