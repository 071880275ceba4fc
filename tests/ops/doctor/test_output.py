"""The report of the doctor as text."""

from __future__ import annotations

from aviso_workers.ops.doctor import Report, State, output
from aviso_workers.ops.doctor.checks import CHECKS
from aviso_workers.ops.doctor.judgements import Finding, Result

FIRST, SECOND, *_ = CHECKS


def report(*findings: Finding) -> Report:
    """A report of two checks, of which the first has these findings."""
    results = (Result(check=FIRST, findings=findings), Result(check=SECOND, findings=()))
    return Report(server="n1 2.15.0", results=results, durability=())


def warning(stream: str, found: str) -> Finding:
    return Finding(stream=stream, found=found, state=State.WARN, cure="Cure it.")


def test_checks_that_pass_are_listed_or_counted() -> None:
    listed = list(output.text(report(), lists_passed=True))
    counted = list(output.text(report(), lists_passed=False))

    assert f"PASS {SECOND.code} {SECOND.title}" in listed
    assert counted[-1] == "2 checks passed; -v lists them"
    assert [line for line in counted if line.startswith("PASS")] == []


def test_what_is_found_of_several_streams_is_one_line() -> None:
    seen = report(warning("A", "too old"), warning("B", "too new"), warning("C", "too old"))
    lines = list(output.text(seen, lists_passed=False))

    assert f"WARN {FIRST.code} A, C: too old" in lines
    assert "  WARN B: too new" in lines
    assert lines[-1] == "1 check passed; -v lists them"
