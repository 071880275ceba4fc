"""Writes the boards for Grafana in config/, from `boards.yaml` and the tables of metrics in docs/.

`PYTHONPATH=scripts .venv/bin/python -m _docs.boards` writes them. The kind of a metric, its labels and its meaning are
those of its row, which tests/test_monitoring.py holds against the code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

PROJECT = Path(__file__).parents[2]
CONFIG = PROJECT / "config"
PAGES = ("docs/metrics.md", "docs/spark/job-events.md")
ROW = re.compile(r"^\| `aviso_(\w+)` \| (\w+) \| (.*) \| (.+) \|$", re.MULTILINE)
ASK = re.compile(r"(?:([a-z]+) )?(\w+_\w+)(?: by ([\w ]+?))?(?: where (\S+))?(?: as (.+))?")
ASKED = {
    "gauge": "max by ({by}) ({series})",
    "counter": "sum by ({by}) (rate({series}[$__rate_interval]))",
    "histogram": "histogram_quantile(0.95, sum by (le, {by}) (rate({series}[$__rate_interval])))",
    "median": "histogram_quantile(0.5, sum by (le, {by}) (rate({series}[$__rate_interval])))",
    "more": "sum by ({by}) (increase({series}[$__rate_interval]))",
    "latest": "max by ({by}) (increase({series}[$__rate_interval]))",
    "sum": "sum by ({by}) ({series})",
    "count": "count by ({by}) ({series})",
    "since": "time() - max by ({by}) ({series} > 0)",
    "total": "sum(max by ({by}) ({series}))",
    "all": "sum({series})",
    "lacking": "sum(1 - {series})",
}
"""What is asked of a metric: by its kind, or by a word for something else. `more` is what came between two points of a
graph, `latest` the same where each worker counts for all, and `lacking` how many are 0 of those that should be 1.
"""
CHOSEN = {"app": "", "agent": ', app=~"$app"'}
"""The labels that a reader of a board chooses by, and what is asked for their values beside the name."""
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
TO_AGENT = {
    "title": "This agent",
    "url": "/d/aviso-workers-agent?var-app=${__field.labels.app}&var-agent=${__field.labels.agent}"
    "&var-datasource=${datasource}&${__url_time_range}",
}
OTHERS = {"title": "Other boards", "type": "dashboards", "tags": ["aviso-workers"], "asDropdown": True}


class Panel(Struct, frozen=True, forbid_unknown_fields=True):
    """A panel, as the first lines of boards.yaml say."""

    title: str
    ask: Sequence[str]
    do: str
    runbook: str
    unit: str = "short"
    limit: float | None = None
    stat: bool = False


class Board(Struct, frozen=True, forbid_unknown_fields=True):
    """A board; with `one` it is for one app and agent."""

    title: str
    panels: Sequence[Panel]
    one: bool = False


class Metric(Struct, frozen=True):
    """A row of a table."""

    kind: str
    labels: Sequence[str]
    meaning: str


def metrics() -> dict[str, Metric]:
    """Return all metrics of the tables, by their names without `aviso_`."""
    rows = [row for page in PAGES for row in ROW.findall((PROJECT / page).read_text())]
    return {name: Metric(kind, re.findall(r"\w+", labels), meaning) for name, kind, labels, meaning in rows}


def files() -> dict[str, str]:
    """Return the text of each board, by the name of its file in config/."""
    known = metrics()
    boards = msgspec.yaml.decode(Path(__file__).with_suffix(".yaml").read_bytes(), type=dict[str, Board])
    return {f"grafana-{name}.json": json.dumps(_board(name, boards[name], known), indent=1) + "\n" for name in boards}


def _board(name: str, board: Board, known: Mapping[str, Metric]) -> dict[str, Any]:
    return {
        "uid": f"aviso-workers-{name}",
        "title": f"aviso-workers: {board.title}",
        "tags": OTHERS["tags"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "links": [{**OTHERS, "includeVars": True, "keepTime": True}],
        "templating": {"list": [*_variables(one=board.one)]},
        "panels": [*_panels(board, known)],
    }


def _variables(*, one: bool) -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    names = "aviso_worker_ready|aviso_worker_notifications_total|aviso_observer_pending"
    several = {"multi": True, "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}}
    for label, condition in CHOSEN.items():
        query = {"query": f'label_values({{__name__=~"{names}"{condition}}}, {label})', "refId": label}
        variable = {"name": label, "label": label.capitalize(), "type": "query", "datasource": SOURCE}
        yield {**variable, "query": query, "refresh": 2, **({} if one else several)}


def _panels(board: Board, known: Mapping[str, Metric]) -> Iterator[dict[str, Any]]:
    """Yield the panels in rows of 24 units: six newest numbers, or three graphs."""
    x = y = below = 0
    for number, panel in enumerate(board.panels, start=1):
        width, height = (4, 4) if panel.stat else (8, 8)
        if x + width > 24 or y + height > below:
            x, y = 0, below
        below = y + height
        place = {"x": x, "y": y, "w": width, "h": height}
        yield {"id": number, "gridPos": place, **_panel(panel, known, one=board.one)}
        x += width


def _panel(panel: Panel, known: Mapping[str, Metric], *, one: bool) -> dict[str, Any]:
    targets = [_target(ask, known) for ask in panel.ask]
    meanings = dict.fromkeys(meaning for _, meaning in targets)
    steps = [{"color": "green", "value": None}, {"color": "red", "value": panel.limit}]
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    defaults["thresholds"] = {"mode": "absolute", "steps": steps[: 1 + (panel.limit is not None)]}
    if not panel.stat:
        defaults["custom"] = {"thresholdsStyle": {"mode": "off" if panel.limit is None else "dashed"}}
        defaults["links"] = [TO_AGENT] if not one and "{{agent}}" in targets[0][0]["legendFormat"] else []
    newest = {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": "value_and_name", "colorMode": "background"}
    return {
        "type": "stat" if panel.stat else "timeseries",
        "title": panel.title,
        "description": "\n\n".join([*meanings, panel.do, f"docs/operations/{panel.runbook}"]),
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": newest if panel.stat else {"tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [{"refId": chr(ord("A") + place), **target} for place, (target, _) in enumerate(targets)],
    }


def _target(ask: str, known: Mapping[str, Metric]) -> tuple[dict[str, Any], str]:
    """Return a query, and the meaning of its metric. Raises ValueError where it is none, KeyError for no metric."""
    if not (found := ASK.fullmatch(ask)):
        raise ValueError(f"boards.yaml: no query: {ask!r}")
    how, name, chosen, only, words = found.groups("")
    metric = known[name]
    by = chosen.split() or [label for label in metric.labels if label != "base" or "agent" not in metric.labels]
    conditions = [f'{label}=~"${label}"' for label in CHOSEN if label in metric.labels] + [only] * bool(only)
    series = f"aviso_{name}{'_bucket' if metric.kind == 'histogram' else ''}"
    series += f"{{{', '.join(conditions)}}}" if conditions else ""
    shown = [] if how in ("total", "all", "lacking") else [f"{{{{{label}}}}}" for label in by]
    legend = " ".join([*shown, words]).strip().replace("{{app}} {{agent}}", "{{app}}/{{agent}}")
    expression = ASKED[how or metric.kind].format(by=", ".join(by), series=series)
    return {"expr": expression, "legendFormat": legend}, metric.meaning


if __name__ == "__main__":
    for file, text in files().items():
        (CONFIG / file).write_text(text)
