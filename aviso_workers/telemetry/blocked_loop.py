"""Tells of an event loop that is blocked: by which agent, and at which line of its function.

A blocked loop cannot log anything itself, so a thread looks at it. `Listeners.work` runs it for as long as an app runs.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from aviso_workers.declare.agents import Agent
from aviso_workers.telemetry.logs import log
from aviso_workers.telemetry.status import Health

BLOCKED_SECONDS = 2.0
"""A loop that is so late is told of. Nothing of ours takes so long, and another process may take the core for as long
as a second."""
LOOK_SECONDS = 0.5


@contextmanager
def watched(health: Health, agents: Iterable[Agent[Any, Any]]) -> Iterator[None]:
    """Log a warning, once, each time that the event loop of this thread is blocked while the block runs."""
    names = {code: agent.name for agent in agents if (code := getattr(agent.function, "__code__", None))}
    ended = threading.Event()
    watch = threading.Thread(
        target=_watch, args=(health, names, threading.get_ident(), ended), name="blocked-loop", daemon=True
    )
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join()


def _watch(health: Health, names: Mapping[CodeType, str], thread: int, ended: threading.Event) -> None:
    told = False
    while not ended.wait(LOOK_SECONDS):
        seconds = health.blocked_seconds()
        if seconds < BLOCKED_SECONDS:
            told = False
        elif not told:
            told = True
            frame = sys._current_frames().get(thread)
            if frame is not None:
                log.warning("loop.blocked", seconds=round(seconds, 1), **_where(frame, names))


def _where(innermost: FrameType, names: Mapping[CodeType, str]) -> dict[str, str]:
    """Return the agent whose function is running, and the line at which it is; else the line that is run."""
    frame: FrameType | None = innermost
    while frame is not None and frame.f_code not in names:
        frame = frame.f_back
    found = innermost if frame is None else frame
    line = f"{found.f_code.co_filename}:{found.f_lineno}"
    cure = "await something that does not block, or declare the agent as a plain def, which runs in a thread"
    return {"line": line} if frame is None else {"agent": names[frame.f_code], "line": line, "cure": cure}
