"""How many streams and consumers an app needs of a server, as docs/fleets.md counts them."""

from __future__ import annotations

from pathlib import Path

from aviso_workers import App, Notification, Rate, Tick, Window, Windowing
from aviso_workers.ops import permissions
from aviso_workers.state import delayed_messages
from tests.conftest import write_mars_config
from tests.documented import PROJECT

AGENTS, APPS = 3, 100


def an_app(path: Path, *, has_all: bool) -> App:
    """Return an app with three agents; one that `has_all` has a limit, windows, a timer, a table and a counter too."""
    app = App("field", config=write_mars_config(path / "config.yaml", "nats://127.0.0.1:1"))

    async def index(notification: Notification[None]) -> None:
        pass

    async def daily(window: Window[int]) -> None:
        pass

    async def tick(tick: Tick) -> None:
        pass

    for number in range(AGENTS - 1):
        app.agent("mars", name=f"index-{number}", limits=[Rate(1, per=1)] if has_all else [])(index)
    if has_all:
        app.agent("mars", window=Windowing(size="1d", fold=lambda value, _: value + 1, initial=0))(daily)
        app.every("1s", singleton=True)(tick)
        app.table("newest", int)
        app.counter("done")
    else:
        app.agent("mars", name="index-last")(index)
    return app


def test_an_app_needs_as_many_streams_as_the_page_says(tmp_path: Path) -> None:
    text = (PROJECT / "docs/fleets.md").read_text()
    for has_all, needed in ((False, 6), (True, 12)):
        app = an_app(tmp_path, has_all=has_all)
        found = {spec.name for spec in permissions.streams_of_worker(app, app.config)}
        own = {name for name in found if not delayed_messages.event_stream_of(name)}
        assert len(own) == needed, sorted(own)
        streams, consumers = APPS * needed, APPS * AGENTS * 2
        assert f"{streams:,} streams and {consumers:,} consumers, {streams + consumers:,} together" in text
