"""One worker process: its log, its status port, its signals, and the app that it runs.

The order is the design. The status port answers before the connection is tried, so that a worker that waits is seen.

An author's code can end the event loop that it runs in: by an exit in a task, by `loop.stop()`, or by the cancellation
of all tasks. To close the loop in order then would give back what runs, and remove the records by which `redeliveries`
finds the notification that did it, so that it would end one worker after another. So no task runs another step: the
process ends as if it had been killed (`run_loop`).
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import os
import random
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import anyio
import structlog
from msgspec import Struct, structs

from aviso_workers.app import App
from aviso_workers.aviso.literals import Size
from aviso_workers.errors import ConfigError, text_of
from aviso_workers.events import Acked, ConnectionChanged, Failed
from aviso_workers.sessions.worker_recorder import MEMBER, STATM, resident_bytes
from aviso_workers.task_groups import task_group
from aviso_workers.telemetry import logs
from aviso_workers.telemetry.listeners import Listeners, listening
from aviso_workers.telemetry.logs import log
from aviso_workers.worker import NOT_ENDED, LoopEnded, threads_run_on
from aviso_workers.worker.ending import Ending

Ready = Callable[[str], None]
"""Called once all agents read their streams, with the URL of the status port."""
MAX_TOLD = 20
"""How many running notifications are named, any of which may have ended the event loop."""
ONLY_FLEETS = "workers.console.on_status_port: only a fleet serves the console there, such as one of --processes 1"
WITH_A_MEANING = frozenset({0, 2, NOT_ENDED})
"""Exit codes that would say of a worker that it was told to end, or of 2, that no restart helps: systemd would leave it
down."""
NOT_OF_AUTHORS = ("uvloop/", *(f"{Path(file).parent}{os.sep}" for file in (__file__, asyncio.__file__, anyio.__file__)))
"""The prefixes of the files that run a task. uvloop's are not absolute."""
ENDS_IN_ORDER = b"ends in order"
"""The last line that a process writes, when it begins to drain. An exit code of 0 alone does not say that it was to
end: a library may have exited."""
CHECK_SECONDS = 0.25
SPREAD = 0.1
"""Part of `max_notifications` by which it is raised at random, so that processes that began together part ways."""


def run(
    app: App,
    *,
    status_port: int | None = None,
    member: FleetMember | None = None,
    quiet: bool = False,
    ready: Ready | None = None,
) -> None:
    """Run the app's agents and tasks until SIGTERM, SIGINT or SIGHUP; a second one cancels what still runs.

    The first one is enough while nothing runs because the connection is still being made. A `member` of a fleet also
    stops when it is recycled, tells its supervisor where its status port is and that it ends in order.
    Where it is `quiet`, what we log ourselves are warnings and errors only; what the app logs is not changed.
    From the first signal, or from the end of its work, the process has `workers.drain_timeout_seconds` and some seconds
    more to end; then it ends itself, with the exit code `NOT_ENDED`.

    Raises `BackendError` when the connection cannot be made or is lost for good, `ResourceError` when a resource cannot
    be opened, `ConfigError`, and `LoopEnded` where something else ends the event loop.
    """
    if member is not None:
        structlog.contextvars.bind_contextvars(process=member.name)
        MEMBER.set(member.name)
    if mistakes := app.mistakes():
        raise ConfigError(mistakes)
    settings = app.config.workers
    ending = Ending(drain_timeout_seconds=settings.drain_timeout_seconds, running=lambda: _running(app))

    async def serve() -> None:
        logs.configure(settings.logging)
        log.write_from("warning" if quiet else "info")
        if nothing := app._nothing_to_run():
            log.warning("config.warning", text=nothing)
        if settings.console.on_status_port and member is None:
            log.warning("config.warning", text=ONLY_FLEETS)
        status = settings.status if status_port is None else structs.replace(settings.status, port=status_port)
        if member is not None:
            app.events.listen(member.observe, Acked, Failed)
            status = structs.replace(status, host="127.0.0.1", port=0)  # the fleet's supervisor asks
        try:
            with listening(app, status=status) as listeners:
                if member is not None:
                    member.announce(listeners.url)
                await _work(app, ending, listeners, member, ready)
                listeners.tell_end()
        finally:
            ending.begin()

    run_loop(serve, running=lambda: _running(app))
    if threads_run_on():
        ending.end()


def _running(app: App) -> list[str]:
    """Return what the agents handle now, each with its agent; of many, as many as a line of the log has room for."""
    all_running = [
        f"{agent.name} {agent.event_type}@{delivery.message.sequence}"
        for agent in app.agents
        if (run := app.runs.get(agent.name)) is not None
        for delivery in [*run.flow.taken(), *run.abandoned]
    ]
    more = len(all_running) - MAX_TOLD
    return all_running if more <= 0 else [*all_running[:MAX_TOLD], f"and {more} more"]


async def _work(
    app: App, ending: Ending, listeners: Listeners, member: FleetMember | None, ready: Ready | None
) -> None:
    connected, begun, stop = anyio.Event(), anyio.Event(), anyio.Event()
    app.events.listen(lambda change: connected.set() if change.connected else None, ConnectionChanged)

    async def obey_signals() -> None:
        told = False
        async for number in ending.signals():
            if member is not None:
                member.tell_end()
            if told or not connected.is_set():
                log.warning("worker.cancelled", signal=number.name)
                watching.cancel_scope.cancel()
                return
            log.info("worker.stopping", signal=number.name)
            told = True
            listeners.stopping()
            stop.set()

    async def tell_when_begun(ready: Ready) -> None:
        await begun.wait()
        ready(listeners.url)

    async def leave_when_recycled(member: FleetMember) -> None:
        await connected.wait()
        reason = await member.until_recycled()
        ending.begin()
        member.tell_end()
        log.info("worker.stopping", reason=reason)
        listeners.stopping()
        stop.set()

    async with task_group() as watching:
        watching.start_soon(obey_signals)
        if ready is not None:
            watching.start_soon(tell_when_begun, ready)
        if member is not None:
            watching.start_soon(leave_when_recycled, member)
        await app._run_until(stop, listeners, begun=begun)
        watching.cancel_scope.cancel()


class _AllCancelledError(BaseException):
    pass


def run_loop(work: Callable[[], Awaitable[None]], *, running: Callable[[], Sequence[str]]) -> None:
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


class RecycleLimits(Struct, frozen=True, kw_only=True):
    """When a worker process is recycled, which means that it ends and is replaced; None is never."""

    max_notifications: int | None = None
    """Deliveries settled: so many at least, and about a tenth more at most."""
    max_rss: Size | None = None
    """Memory that is resident."""


class FleetMember:
    """A worker process as one of a fleet (`fleet`): the line to its supervisor, and when it is recycled.

    The line is a socket that the process was started with. It writes two lines to it, where its status port is and,
    when it begins to drain, that it ends in order. It reads nothing: the line's end is the supervisor's end, after
    which nobody would restart or stop the process, so it ends too. Raises `ConfigError` where a limit can never be
    kept.
    """

    def __init__(self, name: str, *, line: int, limits: RecycleLimits) -> None:
        """`line` is the descriptor of the socket to the supervisor."""
        if limits.max_rss is not None and (now := _resident()) > limits.max_rss:
            raise ConfigError([f"--max-rss: {limits.max_rss} is less than a worker needs at its start ({now >> 20}Mi)"])
        self.name = name
        self._line = socket.socket(fileno=line)
        self._line.set_inheritable(False)
        self._max_rss = limits.max_rss
        self._left = math.inf
        if limits.max_notifications is not None:
            self._left = limits.max_notifications * random.uniform(1, 1 + SPREAD)
        threading.Thread(target=self._end_with_supervisor, name="fleet-line", daemon=True).start()

    def announce(self, status_url: str) -> None:
        """Tell the supervisor where the status port is."""
        self._line.sendall(status_url.encode() + b"\n")

    def tell_end(self) -> None:
        """Tell the supervisor, where it is still there, that the process is about to end because it is to."""
        with suppress(OSError):
            self._line.sendall(ENDS_IN_ORDER + b"\n")

    def observe(self, event: Acked | Failed) -> None:
        """Count what was done."""
        self._left -= len(event.seconds) if isinstance(event, Acked) else 1

    async def until_recycled(self) -> str:
        """Wait until the process is to be replaced, and return why."""
        while True:
            await anyio.sleep(CHECK_SECONDS)
            if self._left <= 0:
                return "it has handled as many as --max-notifications allows"
            if self._max_rss is not None and (now := _resident()) > self._max_rss:
                return f"{now >> 20}Mi are resident, and --max-rss allows {self._max_rss}"

    def _end_with_supervisor(self) -> None:
        with suppress(ConnectionError):
            self._line.recv(1)
        os.kill(os.getpid(), signal.SIGTERM)


def _resident() -> int:
    """Bytes. Raises `ConfigError`."""
    if (found := resident_bytes()) is None:
        raise ConfigError([f"--max-rss needs {STATM}, which this system does not have"])
    return found
