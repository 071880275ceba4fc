"""An event loop that something else ends than its work. (What becomes of notifications then is in tests/stories.)"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.waits import PATIENCE_SECONDS

ENDING = """
import asyncio, os, sys
import anyio
from aviso_workers.worker import LoopEnded, process

async def tool():
    sys.exit({code!r})

async def in_a_task():
    await asyncio.create_task(tool())

async def in_a_task_group():
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tool)

async def in_a_callback():
    asyncio.get_running_loop().call_soon(sys.exit, {code!r})
    await asyncio.Event().wait()

async def work():
    try:
        await {begin}()
    finally:
        print("went on", flush=True)

try:
    process.run_loop(work, running=lambda: ["index mars@1"])
except LoopEnded as ended:
    os._exit(ended.code)
"""
LINE_OF_EXIT = 7


def end(code: object, *, begin: str = "in_a_task") -> subprocess.CompletedProcess[str]:
    program = ENDING.format(code=code, begin=begin)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )


@pytest.mark.parametrize(
    ("code", "exit_code"), [(3, 3), (0, 1), (2, 1), (4, 1), (None, 1), (256, 1), ("no such unit", 1)]
)
def test_an_exit_in_a_task_ends_the_process_with_its_code_unless_it_has_a_meaning_and_no_task_goes_on(
    code: object, exit_code: int
) -> None:
    ended = end(code)
    assert (ended.returncode, ended.stdout) == (exit_code, "")
    line = ended.stderr.splitlines()[0]
    told = "" if code is None else code
    assert line.startswith(f"loop.ended ended_by='SystemExit({told}), raised in a task or a callback'")
    assert f"running=['index mars@1'] exit_code={exit_code}" in line


@pytest.mark.parametrize(
    ("begin", "place"),
    [
        ("in_a_task", f" line='<string>:{LINE_OF_EXIT}'"),
        ("in_a_task_group", f" line='<string>:{LINE_OF_EXIT}'"),
        ("in_a_callback", ""),  # a function of Python's own has no line
    ],
)
def test_the_line_is_that_of_the_author_s_code(begin: str, place: str) -> None:
    line = end(3, begin=begin).stderr.splitlines()[0]
    assert line.startswith(f"loop.ended ended_by='SystemExit(3), raised in a task or a callback'{place} running=")
