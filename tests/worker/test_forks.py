"""A child that a handler forks and that comes back from the handler: it ends, and its parent goes on."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands import Command

FORKING = """
import asyncio, os, sys, time, warnings

from aviso_workers import App, Batch, Batching, Notification, Notify

warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of a fork beside threads
app = App("forking")


@app.task
async def publish(app: App) -> None:
    for step in (1, 2, 3):
        await app.notify("mars", {{"class": "od", "step": step}}, {{}})


def fork():
    child = os.fork()
    if child:
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return child == 0


{form}
    steps = [each.identifier["step"] for each in given] if isinstance(given, Batch) else [given.identifier["step"]]
    if steps[0] == "1" and fork():
        {end}
    print("handled", *steps, flush=True)


@app.agent("done")
async def done(notification: Notification) -> None:
    print("published by the child", flush=True)
"""
FORMS = {
    "plain": '@app.agent("mars")\ndef handle(given: Notification):',
    "async": '@app.agent("mars")\nasync def handle(given: Notification):',
    "async with timeout": '@app.agent("mars", timeout=600)\nasync def handle(given: Notification):',
    "batch": '@app.agent("mars", batch=Batching(size=1))\nasync def handle(given: Batch):',
}
ENDS = {
    "return": ("return", 0),
    "publish": ('return Notify("done", {"step": 1})', 0),
    "exit": ("sys.exit(7)", 7),
    "exit with a text": ("sys.exit('no such unit')", 1),
    "raise": ("raise ValueError('of the child')", 1),
}

CONFIG = """
notification_backend: {kind: in_memory}
notification_schema:
  mars:
    topic: {base: mars, key_order: [class, step]}
    identifier: {class: {type: StringHandler, required: true}, step: {type: IntHandler, required: true}}
  done:
    topic: {base: done, key_order: [step]}
    identifier: {step: {type: IntHandler, required: true}}
workers:
  status: {port: 0}
  logging: {format: json}
"""
Start = Callable[..., Command]


def run(start: Start, directory: Path, *, form: str, end: str) -> Command:
    (directory / "agents.py").write_text(FORKING.format(form=FORMS[form], end=end))
    (directory / "config.yaml").write_text(CONFIG)
    return start("worker", "agents:app", "--config", directory / "config.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("end", ENDS)
def test_a_forked_child_that_comes_back_ends_and_its_parent_goes_on(
    start: Start, tmp_path: Path, form: str, end: str
) -> None:
    statement, code = ENDS[end]
    worker = run(start, tmp_path, form=form, end=statement)
    assert worker.lines(4) == [f"child {code}\n", "handled 1\n", "handled 2\n", "handled 3\n"]
    assert worker.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("form", ["async", "batch"])
def test_a_forked_child_that_awaits_ends_and_its_parent_goes_on(start: Start, tmp_path: Path, form: str) -> None:
    worker = run(start, tmp_path, form=form, end="await asyncio.Event().wait()")
    assert worker.lines(4) == ["child 1\n", "handled 1\n", "handled 2\n", "handled 3\n"]
    assert worker.end(signal.SIGTERM) == 0
