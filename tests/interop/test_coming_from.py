"""The applications of docs/coming-from that are written with other frameworks, run by these in their own test mode."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests import coming_from
from tests.interop import programs
from tests.waits import PATIENCE_SECONDS

PACKAGES = {"celery": "celery", "dramatiq": "dramatiq", "faststream": "faststream", "faust": "faust-streaming"}

DRIVERS = {
    "celery": """
fields.app.conf.task_always_eager = True
fields.announce.run = indexed.append
for step, size in sizes.items():
    found = fields.index_field.delay(step, {"location": f"/data/{step}", "size": size})
    if found.failed():
        failed = str(found.result)
""",
    "dramatiq": """
fields.index_field.options["max_retries"] = 0
fields.announce.fn = indexed.append
worker = dramatiq.Worker(broker, worker_timeout=100)
worker.start()
for step, size in sizes.items():
    fields.index_field.send(step, {"location": f"/data/{step}", "size": size})
    try:
        broker.join("default", fail_fast=True)
    except ValueError as error:
        failed = str(error)
worker.stop()
""",
    "faststream": """
from faststream.nats import TestNatsBroker

async def drive():
    global failed

    async def note(location: str) -> None:
        indexed.append(location)

    fields.broker.subscriber("indexed")(note)
    async with TestNatsBroker(fields.broker) as broker:
        for step, size in sizes.items():
            field = fields.Field(step=step, location=f"/data/{step}", size=size)
            try:
                await broker.publish(field, f"fields.{step}")
            except ValueError as error:
                failed = str(error)

asyncio.run(drive())
""",
    "faust": """
async def drive():
    global failed

    async def note(*, value, **rest):
        indexed.append(value)

    fields.indexed.send = note
    async with fields.index_field.test_context() as agent:
        for step, size in sizes.items():
            try:
                await agent.put(fields.Field(location=f"/data/{step}", size=size), key=step)
            except ValueError as error:
                failed = str(error)

asyncio.run(drive())
""",
}
BEFORE = """
import asyncio, json
sizes, indexed, failed = json.loads(input()), [], ""
"""
STUB = """
import dramatiq
from dramatiq.brokers.stub import StubBroker

broker = StubBroker()
broker.emit_after("process_boot")
dramatiq.set_broker(broker)
"""
AFTER = """
print(json.dumps([fields.catalogue, indexed, failed]))
"""


@pytest.mark.parametrize("page", coming_from.PAGES, ids=lambda page: str(page.stem))
def test_the_application_that_the_page_begins_with_does_what_ours_does(page: Path, tmp_path: Path) -> None:
    python = programs.framework(PACKAGES[page.stem])
    theirs, _ = coming_from.applications(page)
    (tmp_path / "fields.py").write_text(theirs)
    program = BEFORE + (STUB if page.stem == "dramatiq" else "") + "import fields\n" + DRIVERS[page.stem] + AFTER

    done = subprocess.run(
        [python, "-c", program],
        cwd=tmp_path,
        input=json.dumps(coming_from.FIELDS),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [
        coming_from.CATALOGUE,
        coming_from.INDEXED,
        coming_from.FAILED,
    ]
