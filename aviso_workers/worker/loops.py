"""The event loop of a worker process, and its end by something else than the worker.

An author's code can end the loop that it runs in: by an exit in a task, by `loop.stop()`, or by the cancellation of all
tasks. To close the loop in order then would give back what runs, and remove the records by which `redeliveries` finds
the notification that did it, so that it would end one worker after another. So no task runs another step: the process
ends as if it had been killed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import anyio

from aviso_workers.errors import text_of
from aviso_workers.telemetry.logs import log
from aviso_workers.worker import NOT_ENDED, LoopEnded

WITH_A_MEANING = frozenset({0, 2, NOT_ENDED})
"""Exit codes that would say of a worker that it was told to end, or of 2, that no restart helps: systemd would leave it
down."""

NOT_OF_AUTHORS = ("uvloop/", *(f"{Path(file).parent}{os.sep}" for file in (__file__, asyncio.__file__, anyio.__file__)))
"""The prefixes of the files that run a task. uvloop's are not absolute."""


class _AllCancelledError(BaseException):
    pass


def run(work: Callable[[], Awaitable[None]], *, running: Callable[[], Sequence[str]]) -> None:
    """Run the work on an event loop of its own: uvloop's, where that is installed.

    Where something else ends the loop, it is logged what, with the notifications that are `running`, and `LoopEnded` is
    raised. The tasks stay as they are, so the process has to end without finalizing them.
    """
    at_work = False

    async def work_watched() -> None:
        nonlocal at_work
        at_work = True
        watch = asyncio.create_task(_watch_for_cancellation(lambda: at_work))
        try:
            await work()
        finally:
            at_work = False
            watch.cancel()

    fast: Any = importlib.import_module("uvloop") if importlib.util.find_spec("uvloop") else None
    runner = asyncio.Runner(loop_factory=fast and fast.new_event_loop)
    try:
        runner.run(work_watched())
    except BaseException as error:
        if not at_work:
            raise
        code = _exit_code(error)
        log.error("loop.ended", **_describe(error), running=running(), exit_code=code)
        raise LoopEnded(code) from error
    finally:
        if not at_work:
            runner.close()


async def _watch_for_cancellation(at_work: Callable[[], bool]) -> None:
    """End the loop when this task is cancelled while the work goes on, as only the cancellation of all tasks does.

    All of them wake in the same turn of the loop, and this is before any of them has settled or removed anything.
    """
    try:
        await asyncio.get_running_loop().create_future()
    except asyncio.CancelledError:
        if at_work():
            raise SystemExit(1) from _AllCancelledError()
        raise


def _exit_code(error: BaseException) -> int:
    """Return the exit code that was asked for, or 1 where that has another meaning."""
    asked = error.code if isinstance(error, SystemExit) else None
    code = asked & 0xFF if isinstance(asked, int) else 0
    return 1 if code in WITH_A_MEANING else code


def _describe(error: BaseException) -> dict[str, Any]:
    """Return what has ended the loop and, where that is known, at which line of the task, and the traceback."""
    if isinstance(error.__cause__, _AllCancelledError):
        return {"ended_by": "the cancellation of all tasks"}
    if not isinstance(error, (SystemExit, KeyboardInterrupt)):
        return {"ended_by": "loop.stop()"}  # then asyncio raises a RuntimeError: the work was not completed
    described = {"ended_by": f"{type(error).__name__}({text_of(error)}), raised in a task or a callback"}
    if (frames := _frames_of_author(error)) is None:
        return described
    line = f"{frames.tb_frame.f_code.co_filename}:{frames.tb_lineno}"
    return {**described, "line": line, "exc_info": (type(error), error, frames)}


def _frames_of_author(error: BaseException) -> TracebackType | None:
    """Return the traceback without the frames of the loop at its beginning."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(NOT_OF_AUTHORS):
        frames = frames.tb_next
    return frames
