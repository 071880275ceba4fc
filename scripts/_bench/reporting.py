"""What a run has shown: medians, ratios, and each target beside them, as tables and as JSON."""

from __future__ import annotations

import os
import platform
import statistics
from collections import defaultdict

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from _bench.rounds import Figures
from _bench.targets import TARGETS, Finding, judge

OURS = {
    "consume": "agent",
    "publish": "notify-many",
    "replay": "replay",
    "backup": "copy",
    "backlog": "10000",
    "failing": "0 of 100",
    "order_by": "1000 keys",
    "windows": "all settled",
    "idle": "none",
    "update": "by 1",
    "dead-letters": "1000",
}
"""The contestant to which the others of a benchmark are compared."""


class Figure(Struct, frozen=True):
    median: float
    values: list[float]


class Report(Struct, frozen=True, kw_only=True):
    machine: dict[str, str | int]
    seconds: float
    """How long all of it took."""
    figures: dict[str, Figure]
    targets: list[Finding]


def report(figures: Figures, *, seconds: float) -> Report:
    medians = {name: statistics.median(values) for name, values in figures.items()}
    return Report(
        machine={
            "processor": _processor(),
            "cores": os.cpu_count() or 0,
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
        },
        seconds=round(seconds, 1),
        figures={name: Figure(medians[name], values) for name, values in figures.items()},
        targets=[judge(medians, target) for target in TARGETS],
    )


def encode(report: Report) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def show(report: Report, console: Console) -> None:
    machine = report.machine
    console.print(f"{machine['processor']}, {machine['cores']} cores, {machine['system']}, Python {machine['python']}")
    rows: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for name, figure in report.figures.items():
        benchmark, contestant, measure = name.split(".")
        rows[benchmark][contestant][measure] = figure.median
    for benchmark, contestants in rows.items():
        console.print(_table(benchmark, contestants))
    console.print(_targets(report.targets))


def _table(benchmark: str, contestants: dict[str, dict[str, float]]) -> Table:
    measures = list(dict.fromkeys(measure for measured in contestants.values() for measure in measured))
    ours = contestants.get(OURS.get(benchmark, ""), {}).get("per_second")
    table = Table(benchmark, *(measure.replace("_", " ") for measure in measures), *(["ratio"] if ours else []))
    for name, measured in contestants.items():
        cells = [_number(measured[measure]) if measure in measured else "" for measure in measures]
        ratio = [f"{measured['per_second'] / ours:.2f}"] if ours else []
        table.add_row(name, *cells, *ratio)
    return table


def _targets(findings: list[Finding]) -> Table:
    table = Table("", "target", "wanted", "found")
    for finding in findings:
        if finding.found is not None:
            sign = "[green]✓[/]" if finding.reached else "[red]✗[/]"
            table.add_row(sign, finding.what, finding.wanted, f"{_number(finding.found)} {finding.unit}")
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _processor() -> str:
    """Its name, where the system tells it."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
