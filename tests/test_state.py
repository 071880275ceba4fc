"""All that is stored is in the list of docs/state.md."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

from aviso_workers import App, Notification, Window, Windowing, state
from aviso_workers.config import load
from aviso_workers.jetstream.specs import UNREADABLE
from aviso_workers.state import (
    audit_records,
    dead_letter_records,
    delayed_messages,
    own_buckets,
    own_streams,
)
from aviso_workers.state.own_streams import COUNTERS
from tests.contract import settings

PAGE = (Path(__file__).parents[1] / "docs" / "state.md").read_text()
ROWS, OF_BUCKETS = (
    re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", part, re.MULTILINE) for part in PAGE.split("## In buckets")
)
BUCKETS, STREAMS = {bucket for bucket, _ in OF_BUCKETS}, dict(ROWS)


def test_each_row_names_a_module_that_exists() -> None:
    named = re.findall(r"^\| .* \| `(\w+)` \|$", PAGE, re.MULTILINE)
    assert len(named) == len(ROWS) + len(OF_BUCKETS)
    assert set(named) <= {module.name for module in pkgutil.iter_modules(state.__path__)}


def test_each_bucket_of_an_app_is_listed() -> None:
    app = App("field")
    app.table("newest", int)

    @app.agent("mars")
    async def index(notification: Notification[int]) -> None: ...

    @app.agent("mars", window=Windowing(size="1d", fold=lambda value, _: value + 1, initial=0))
    async def daily(window: Window[int]) -> None: ...

    @app.every("1s", singleton=True)
    async def tick() -> None: ...

    own = own_buckets.of_app("field", agents=app.agents, timers=app.timers, tasks=app.tasks, tables=app.tables)
    buckets = {*own.by_key, *own.listed, *own.written, *own.obeyed}
    assert {bucket: _listed(bucket) for bucket in buckets} == {
        "field__failures": ["<app>__failures"],
        "field__leases": ["<app>__leases"],
        "field__timers": ["<app>__timers"],
        "field__windows__daily": ["<app>__windows__<agent>"],
        "field__table__newest": ["<app>__table__<table>"],
        "field__state": ["<app>__state"],
        "field__orders": ["<app>__orders"],
        "field__live": ["<app>__live"],
    }


def test_an_app_with_nothing_but_tasks_records_what_it_declares_and_its_workers() -> None:
    app = App("field")

    @app.task
    async def look() -> None: ...

    own = own_buckets.of_app("field", agents=app.agents, timers=app.timers, tasks=app.tasks, tables=app.tables)
    assert (own.by_key, own.listed, own.written, own.obeyed) == (("field__state",), (), ("field__live",), ())


def test_each_stream_of_our_own_is_listed_with_its_subjects() -> None:
    config = load(Path(settings.__file__).with_name("aviso.yaml"), environ={})
    specs = [
        dead_letter_records.stream_spec("<app>", config),
        dead_letter_records.retries_spec("<app>", config),
        delayed_messages.stream_spec("<stream>", config),
        audit_records.stream_spec(config),
    ]
    others = {own_streams.DRILL, own_streams.DRILL_MIRROR, UNREADABLE}
    assert {spec.name for spec in specs} | {own_streams.of_app(COUNTERS, "<app>")} | others == STREAMS.keys()
    for spec in specs:
        (subject,) = spec.subjects or ()
        assert STREAMS[spec.name].startswith(subject.removesuffix(">"))


def _listed(bucket: str) -> list[str]:
    """Return the listed names that may be that of a bucket."""
    return [name for name in BUCKETS if re.fullmatch(re.sub(r"<\w+>", r"[a-z]\\w*?", name), bucket)]
