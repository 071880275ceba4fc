"""All that is stored is in the list that the site has of it."""

from __future__ import annotations

import re
from pathlib import Path

from _docs import state
from aviso_workers import App, Notification, Window, Windowing
from aviso_workers.config import load
from aviso_workers.state import (
    audit_records,
    dead_letter_records,
    delayed_messages,
    own_buckets,
    own_streams,
)
from aviso_workers.state.own_streams import COUNTERS
from tests.contract import settings

BUCKETS = {each.bucket for _, each in state.kept()} - {""}
STREAMS = {each.stream: each.key for _, each in state.kept() if each.stream}


def test_the_page_has_a_row_for_all_that_is_stored() -> None:
    assert [each for _, each in state.kept() if f"| `{each.key}` | {each.holds} |" not in state.page()] == []


def test_each_bucket_of_an_app_is_listed() -> None:
    app = App("field")
    app.table("newest", int)

    @app.agent("mars")
    async def index(notification: Notification[int]) -> None: ...

    @app.agent("mars", window=Windowing(size="1d", fold=lambda value, _: value + 1, initial=0))
    async def daily(window: Window[int]) -> None: ...

    @app.every("1s", leader=True)
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
    others = {each.stream for each in own_streams.KEPT}
    assert {spec.name for spec in specs} | {own_streams.of_app(COUNTERS, "<app>")} | others == STREAMS.keys()
    for spec in specs:
        (subject,) = spec.subjects or ()
        assert STREAMS[spec.name].startswith(subject.removesuffix(">"))


def _listed(bucket: str) -> list[str]:
    """Return the listed names that may be that of a bucket."""
    return [name for name in BUCKETS if re.fullmatch(re.sub(r"<\w+>", r"[a-z]\\w*?", name), bucket)]
