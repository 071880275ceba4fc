"""An event loop that something else ends than its work. (What becomes of notifications then is in tests/stories.)"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.waits import PATIENCE_SECONDS

ENDING = """
import asyncio, os, sys
from aviso_workers.worker import LoopEnded, loops

async def work():
    async def tool():
        sys.exit({code!r})
    try:
        await asyncio.create_task(tool())
    finally:
        print("went on", flush=True)

try:
    loops.run(work, running=lambda: ["index mars@1"])
except LoopEnded as ended:
    os._exit(ended.code)
"""


@pytest.mark.parametrize(("code", "exit_code"), [(3, 3), (0, 1), (None, 1), (256, 1), ("no such unit", 1)])
def test_an_exit_in_a_task_ends_the_process_with_its_code_but_never_with_0_and_no_task_goes_on(
    code: object, exit_code: int
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDING.format(code=code)], capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert (ended.returncode, ended.stdout) == (exit_code, "")
    line = ended.stderr.splitlines()[0]
    told = "" if code is None else code
    assert line.startswith(f"loop.ended ended_by='SystemExit({told}), raised in a task' line='<string>:7'")
    assert f"running=['index mars@1'] exit_code={exit_code}" in line
