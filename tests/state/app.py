"""An app that keeps every kind of state on its server."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aviso_workers import App, Backoff, Notification, Notify, Reject, Tick, Window, Windowing
from aviso_workers.events import Settled

__all__ = ["Kept", "write_config"]


def _event_type(base: str) -> dict[str, Any]:
    rules: dict[str, dict[str, Any]] = {
        "class": {"type": "StringHandler"},
        "step": {"type": "IntHandler", "range": [0, 1000]},
    }
    return {
        "topic": {"base": base, "key_order": ["class", "step"]},
        "identifier": {field: {**rule, "required": True} for field, rule in rules.items()},
        "storage_policy": {"allow_duplicates": True},
    }


def write_config(directory: Path, url: str) -> Path:
    """The app's configuration, on this server."""
    path = directory / "config.yaml"
    document = {
        "notification_backend": {"kind": "jetstream", "jetstream": {"nats_url": url}},
        "notification_schema": {base: _event_type(base) for base in ("mars", "sums")},
    }
    path.write_text(json.dumps(document))  # JSON is YAML
    return path


HOUR = 3600


class Kept:
    """The app, and what became of it: `handled` steps, `failed` attempts of each, `ticks`, and `sums` of windows."""

    def __init__(self, config: Path, *, mended: bool) -> None:
        """Until it is `mended` it refuses the steps 2 and 5. It fails with step 3 once."""
        self.app = app = App("kept", config=config)
        self.handled: list[int] = []
        self.failed: list[tuple[int, int]] = []
        self.sums: list[int] = []
        self.ticks: list[datetime] = []
        self.newest = app.table("newest", int, history=5)
        self.bytes = app.counter("bytes")

        @app.agent("mars", ack_wait=1, retry=Backoff(first=1 if mended else HOUR, max=HOUR, attempts=3))
        async def index(notification: Notification[Any]) -> None:
            step = int(notification.identifier["step"])
            self.handled.append(step)
            if not mended and step in (2, 5):
                raise Reject("it is not mended yet")
            if step == 3 and self.handled.count(3) == 1:
                raise ValueError("once")
            await self.newest.put("od", step)
            await self.bytes.add("od", 100, message_id=notification.id)

        @app.agent("mars", singleton=True, ack_wait=1)
        async def alone(notification: Notification[Any]) -> None:
            pass

        @app.agent(
            "mars",
            ack_wait=1,
            window=Windowing(
                size="100s",
                fold=lambda total, notification: total + int(notification.identifier["step"]),
                initial=0,
                time=lambda notification: datetime.fromtimestamp(int(notification.identifier["step"]), UTC),
            ),
        )
        async def sum_up(window: Window[int]) -> Notify:
            self.sums.append(window.value)
            return Notify("sums", {"class": "od", "step": int(window.start.timestamp())}, window.value)

        def note(event: Settled) -> None:
            if event.outcome == "retried":
                self.failed.append((event.sequence, event.attempt))

        app.events.listen(note, Settled)

        @app.every("1s", leader=True)
        async def tick(tick: Tick) -> None:
            self.ticks.append(tick.time)
