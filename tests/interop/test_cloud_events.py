"""The CloudEvents SDK for Python reads what `replay` prints, and what it writes is published again."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from aviso_workers import App
from aviso_workers.server import NatsServer
from tests.interop import programs
from tests.interop.nats_cli import Shell, successful

pytestmark = pytest.mark.anyio

COUNT = 5
READ_AND_WRITTEN = """
import json, sys
from cloudevents.conversion import to_json
from cloudevents.http import from_json

for line in sys.stdin:
    event = from_json(line)
    print(json.dumps({**event.get_attributes(), "data": event.data}), file=sys.stderr)
    print(to_json(event).decode())
"""


def through_the_sdk(printed: str) -> subprocess.CompletedProcess[str]:
    command = [str(programs.cloudevents()), "-c", READ_AND_WRITTEN]
    return subprocess.run(command, input=printed, capture_output=True, text=True, check=False)


async def test_what_replay_prints_goes_through_the_sdk_and_back(
    nats_server: NatsServer, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    config = write_config(nats_server.url)
    async with App("field", config=config) as app:
        for step in range(COUNT):
            await app.notify("mars", {"class": "od", "step": step}, {"location": f"/data/größe/{step}"})
    shell = Shell(tmp_path)
    printed = successful(shell.ours("replay", "mars", "--config", config))
    done = through_the_sdk(printed)
    assert done.returncode == 0, done.stderr
    ours = [json.loads(line) for line in printed.splitlines()]
    assert [json.loads(line) for line in done.stderr.splitlines()] == ours
    assert {event["type"] for event in ours} == {"int.ecmwf.aviso.mars"}

    successful(shell.ours("streams", "wipe", "mars", "--yes", "--config", config))
    (tmp_path / "events.jsonl").write_text(done.stdout)
    successful(shell.ours("notify", "--file", "events.jsonl", "--config", config))
    again = [json.loads(line) for line in successful(shell.ours("replay", "mars", "--config", config)).splitlines()]
    assert [event["data"] for event in again] == [event["data"] for event in ours]
