"""Formats of the doctor's report: text for people, JSON, gauges for Prometheus, and a line for Nagios and the like."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from msgspec import structs

from aviso_workers.events import Measured
from aviso_workers.ops.doctor import Report
from aviso_workers.ops.doctor.judgements import Finding, Result, State
from aviso_workers.telemetry.metrics import render_gauges

NAGIOS = {State.PASS: "OK", State.SKIP: "OK", State.ACCEPTED: "OK", State.WARN: "WARNING", State.FAIL: "CRITICAL"}
MAX_FINDINGS = 10
"""The most findings of a check that are shown as text."""


def text(report: Report, *, lists_passed: bool) -> Iterator[str]:
    """Yield the report as lines of text, the worst results first. Without `lists_passed`, the checks that passed are
    only counted.
    """
    yield f"nats-server {report.server}: {_totals(report)}"
    for result in report.results:
        if result.state >= State.WARN:
            yield from _lines(result)
    yield ""
    for result in report.results:
        accepted = [finding for finding in result.findings if finding.state is State.ACCEPTED]
        for finding in _together(accepted):
            yield f"ACCEPTED {result.check.code} {_place(finding)} ({finding.accepted})"
    for reason, codes in skipped(report).items():
        yield f"SKIP {' '.join(codes)}: {reason}"
    passed = [result.check for result in report.results if result.state is State.PASS]
    if lists_passed:
        yield from (f"PASS {check.code} {check.title}" for check in passed)
    elif passed:
        yield f"{len(passed)} {'check' if len(passed) == 1 else 'checks'} passed; -v lists them"
    if report.durability:
        yield ""
        yield "Losses when a server, its disk or its power fails:"
    for lost, streams in _by_durability(report).items():
        yield f"  {', '.join(streams)}: {lost}"


def document(report: Report) -> dict[str, Any]:
    """Return the whole report as a document for JSON."""
    return {
        "server": report.server,
        "state": report.state.name,
        "checks": [
            {
                "code": result.check.code,
                "title": result.check.title,
                "state": result.state.name,
                "why": result.check.why,
                "docs": result.check.anchor,
                "findings": [_finding(finding) for finding in result.findings],
            }
            for result in report.results
        ],
        "durability": {each.stream: str(each) for each in report.durability},
    }


def gauges(report: Report) -> bytes:
    """Return the report in Prometheus' text format."""
    return render_gauges(measured(report))


def measured(report: Report) -> list[Measured]:
    """Return the metrics of the report for Prometheus; their labels are codes and states, never a stream."""
    states: dict[tuple[str, ...], float] = {
        (result.check.code, state.name.lower()): float(result.state is state)
        for result in report.results
        for state in State
    }
    findings: dict[tuple[str, ...], float] = {
        (result.check.code, state.name.lower()): float(sum(finding.state is state for finding in result.findings))
        for result in report.results
        for state in (State.ACCEPTED, State.WARN, State.FAIL)
    }
    return [
        Measured(
            name="aviso_doctor_check",
            help="1 for the current state of a check, 0 for its other states.",
            labels=("code", "state"),
            values=states,
        ),
        Measured(
            name="aviso_doctor_findings",
            help="Findings of a check, by state.",
            labels=("code", "state"),
            values=findings,
        ),
        Measured(
            name="aviso_doctor_last_run_timestamp_seconds",
            help="Time of the doctor's last run, in seconds since 1970.",
            labels=(),
            values={(): datetime.now(UTC).timestamp()},
        ),
    ]


def nagios(report: Report) -> str:
    """Return one line: the state, what is worst, and the totals as performance data."""
    worst = [
        f"{result.check.code} {_place(finding)}"
        for result in report.results
        if result.state >= State.WARN
        for finding in result.findings[:1]
    ]
    text = "; ".join(worst[:MAX_FINDINGS]).replace("|", "/")
    totals = " ".join(f"{state.name.lower()}={_count(report, state)}" for state in sorted(State, reverse=True))
    return f"AVISO-WORKERS {NAGIOS[report.state]} - {text or 'nothing found'} | {totals}"


def _lines(result: Result) -> Iterator[str]:
    wrong = [finding for finding in result.findings if (finding.state or State.PASS) >= State.WARN]
    first, *others = _together(wrong[:MAX_FINDINGS])
    yield ""
    yield f"{result.state.name} {result.check.code} {_place(first)}"
    yield f"     Expected: {result.check.title}."
    yield f"     Why: {result.check.why} ({result.check.anchor})"
    yield f"       -> {first.cure}"
    cure = first.cure
    for finding in others:
        yield f"  {finding.state.name if finding.state else ''} {_place(finding)}"
        if finding.cure != cure:
            yield f"       -> {finding.cure}"
        cure = finding.cure
    if (more := len(wrong) - MAX_FINDINGS) > 0:
        yield f"  and {more} more: --format json shows all"


def _together(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings with one for all places of which the same is found, with the same state and cure."""
    alike = defaultdict[tuple[State | None, str, str, str], list[Finding]](list)
    for finding in findings:
        alike[finding.state, finding.found, finding.cure, finding.accepted].append(finding)
    return [structs.replace(same[0], place=_places(same), consumer="") for same in alike.values()]


def _places(findings: Iterable[Finding]) -> str:
    return ", ".join(finding.where for finding in findings if finding.where)


def skipped(report: Report) -> dict[str, list[str]]:
    """Return the codes of the checks that were skipped, by reason."""
    reasons = defaultdict[str, list[str]](list)
    for result in report.results:
        for reason in dict.fromkeys(_place(finding) for finding in result.findings if finding.state is State.SKIP):
            reasons[reason].append(result.check.code)
    return reasons


def _by_durability(report: Report) -> dict[str, list[str]]:
    """Return the names of streams by the text of their durability, so that streams alike are named together."""
    found = defaultdict[str, list[str]](list)
    for each in report.durability:
        found[str(each)].append(each.stream)
    return found


def _totals(report: Report) -> str:
    states = [state for state in sorted(State, reverse=True) if state is not State.ACCEPTED or _count(report, state)]
    return ", ".join(f"{_count(report, state)} {state.name}" for state in states)


def _count(report: Report, state: State) -> int:
    return sum(result.state is state for result in report.results)


def _place(finding: Finding) -> str:
    return f"{finding.where}: {finding.found}" if finding.where else finding.found


def _finding(finding: Finding) -> dict[str, str]:
    return {
        "state": finding.state.name if finding.state else "",
        "where": finding.where,
        **{name: getattr(finding, name) for name in ("stream", "consumer", "found", "cure", "accepted")},
    }
