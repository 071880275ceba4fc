"""What traces ask of an installation, and that an app without them loads none of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from aviso_workers import App
from aviso_workers.errors import ConfigError
from tests.contract.settings import app_config, mars

pytestmark = pytest.mark.anyio

PROGRAM = """
import anyio, sys
from aviso_workers import App, Notification
from aviso_workers.testing import harness

app = App("plain", config=sys.argv[1])

@app.agent("plain")
async def index(notification: Notification) -> None: ...

async def main() -> None:
    async with harness(app) as t:
        await app.notify("plain", {"a": 1, "b": "x"})
        await t.settle()

anyio.run(main)
print([name for name in ("opentelemetry.trace", "aviso_workers.features.traces") if name in sys.modules])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("enabled", "loaded"), [("false", []), ("true", ["opentelemetry.trace", "aviso_workers.features.traces"])]
)
def test_only_an_app_that_asks_for_traces_loads_them(
    enabled: str, loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AVISO_WORKERS_WORKERS__TRACES__ENABLED", enabled)
    command = [sys.executable, "-c", PROGRAM, str(app_config("in_memory", ""))]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() == str(loaded)


HANDING_ON = """
import anyio, json, sys
from aviso_workers import App, Notification, Notify
from aviso_workers.testing import harness

app = App("plain", config=sys.argv[1])

@app.agent("plain")
async def index(notification: Notification) -> Notify:
    return Notify("mars", json.loads(sys.argv[3]), {})

async def main() -> None:
    async with harness(app) as t:
        for given in (None, {"traceparent": sys.argv[2], "tracestate": "a=1"}):
            await app.notify("plain", {"a": 1, "b": "x"}, headers=given)
            await t.settle()
            [found] = [one async for one in app.replay("mars")]
            print(found.headers.get("traceparent"), found.headers.get("tracestate"))

anyio.run(main)
"""


def test_without_an_sdk_a_worker_hands_on_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AVISO_WORKERS_WORKERS__TRACES__ENABLED", "true")
    sound = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    command = [sys.executable, "-c", HANDING_ON, str(app_config("in_memory", "")), sound, json.dumps(mars())]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed.splitlines() == ["None None", f"{sound} a=1"]


async def test_traces_without_the_package_that_they_need_are_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "aviso.yaml"
    file.write_text(app_config("in_memory", "").read_text() + "workers:\n  traces:\n    enabled: true\n")
    monkeypatch.setattr("aviso_workers.config.settings.find_spec", lambda name: None)
    app = App("traced", config=file)
    line = len(file.read_text().splitlines())
    lacking = "workers.traces.enabled: traces need the package opentelemetry-api: pip install 'aviso-workers[otel]'"
    assert app.mistakes() == [f"{lacking} ({file}:{line})"]
    with pytest.raises(ConfigError, match="aviso-workers\\[otel]"):
        async with app:
            pass
