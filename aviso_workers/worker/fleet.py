"""Several worker processes of one app under a supervisor: started, started again, asked as one, ended together.

Called by the command line. It distributes nothing: every process reads the same durable consumers, and JetStream gives
each notification to one of them. Processes are started from scratch and share no memory. One that ended in order (it
was recycled, or somebody stopped it) is replaced at once; one that crashed is replaced after a wait that doubles, and a
process that crashes again and again ends the fleet. A process tells where its status port is, and that it is about to
end in order (`process`): an exit code of 0 that it has not told of is a crash. A process that was told to end, or
has said that it will, and has not ended some seconds after its drain timeout, is killed. The fleet's own port answers
for all of them, and hands other connections to the process of the console, where there is one. That process is no
worker: it is kept like the others, and whatever becomes of it, the fleet goes on and is ready. It tells again and again
that its event loop turns, and is killed where it does not. It has nothing to drain, so the fleet's end waits for none.
"""

from __future__ import annotations

import http.client
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import structlog
from anyio.abc import Process, TaskStatus
from msgspec import Struct

from aviso_workers.app import App
from aviso_workers.config import Secret
from aviso_workers.declare.retry import Backoff, Restarts
from aviso_workers.errors import ConfigError, WorkerProcessError
from aviso_workers.telemetry import logs
from aviso_workers.telemetry.metrics import FleetMetrics
from aviso_workers.telemetry.status import STUCK_SECONDS, Health, StatusServer
from aviso_workers.worker import NOT_ENDED
from aviso_workers.worker.ending import GRACE_SECONDS, TOLD_TO_END, Ending
from aviso_workers.worker.process import ENDS_IN_ORDER

log = structlog.get_logger("aviso_workers")

RESTARTS = Backoff(first=0.5, factor=2.0, max=30.0, jitter=0.1)
MOST_RESTARTS = 10
"""How often a process may crash in a row, with these waits in between: two minutes in all."""

HEALTHY_SECONDS = 10.0
"""A process that ran for so long and then crashes begins a new row."""
ANSWER_SECONDS = 0.8
"""The longest a process may take to answer. Shorter than a probe waits for us, which is a second in Kubernetes."""
KILL_SECONDS = 2 * GRACE_SECONDS
"""How long after its drain timeout, or after a second signal, a process is killed. It ends itself before that, unless a
function that is not Python's does not let it."""
CONSOLE_SECONDS = 1.0
"""How long the console may take to end where all workers have ended: what its jobs have come to is recorded."""
MAX_SAID = 4096
"""Bytes of what a process has said that are kept: a worker says less, and a console says without end that it turns."""
STATUS_HOST = "workers.status.host, at which workers.console.on_status_port serves the console"
NOT_STARTED = 127
"""The exit code of what did not even begin, as in a shell."""
CONFIG_FILES = (".yaml", ".yml")


class FleetPlan(Struct, frozen=True, kw_only=True):
    """The command and the number of the processes of a fleet."""

    command: tuple[str, ...]
    """Runs one worker, with `--member NAME:DESCRIPTOR` behind it."""
    processes: int
    reload: bool = False
    """Whether the processes are replaced when the sources of the app, or its configuration, change."""
    console: tuple[str, ...] = ()
    """Runs the console that the status port serves where the configuration says so, called with the same option."""


def run(app: App, plan: FleetPlan, *, status_port: int | None = None) -> None:
    """Run the fleet until SIGTERM, SIGINT or SIGHUP, which all processes then obey, as they do a second one; a third
    kills. Raises SystemExit with `NOT_ENDED` where a process had to be ended by force.

    Raises `ConfigError` with every mistake before anything is started, `WorkerProcessError` when a process does not
    stay up; the others have ended in order by then.
    """
    if mistakes := app.mistakes():
        raise ConfigError(mistakes)
    settings = app.config.workers
    if settings.console.on_status_port and (
        refusals := settings.console.refusals(settings.status.host, key=STATUS_HOST)
    ):
        raise ConfigError(refusals)
    logs.configure(settings.logging)
    fleet = Fleet(app, plan)
    port = settings.status.port if status_port is None else status_port
    with StatusServer(
        host=settings.status.host,
        port=port,
        health=fleet,
        metrics=fleet.metrics.answer,
        token=settings.status.token,
        hand_over=fleet.console.hand_over if fleet.console else None,
    ) as status:
        log.info("fleet.started", app=app.name, processes=plan.processes, status=status.url)
        anyio.run(fleet.work)
    log.info("fleet.stopped", app=app.name)
    # What the app's modules have begun when they were imported must not keep this process from ending.
    Ending(drain_timeout_seconds=settings.drain_timeout_seconds, running=list).begin()
    if fleet.forced:
        sys.exit(NOT_ENDED)


class _Slot:
    """A place in the fleet, and the process that has it now."""

    def __init__(self, name: str, command: Sequence[str], *, token: Secret | None = None) -> None:
        self.name = name
        self.command = command
        self._headers = {"Authorization": f"Bearer {token.reveal()}"} if token else {}
        self.lock = threading.Lock()
        """Held by the thread that uses the line, or takes it away."""
        self.begin(None, None)

    def begin(self, process: Process | None, line: socket.socket | None) -> None:
        """Put a process in this place, and our end of the line to it; None where no process runs."""
        self.process, self.line = process, line
        self.told_to_stop = self.killed = False
        self.ends, self.hurries = anyio.Event(), anyio.Event()
        """Set when the process is about to end, and when it is told so a second time."""
        self.said = b""
        """The lines that the process has sent: its status port, and that it ends in order."""

    @property
    def status(self) -> str:
        """Host and port of the process' status port; empty until it has told."""
        url, told, _ = self.said.partition(b"\n")
        return urlsplit(url.decode()).netloc if told and self.process is not None else ""

    def ending(self, code: int) -> str:
        """Return how the process ended, in the words of the metrics."""
        about_to = self.told_to_stop or ENDS_IN_ORDER in self.said.splitlines()
        if self.killed or (about_to and code == NOT_ENDED):
            return "killed"
        return "in_order" if self.told_to_stop or (about_to and code == 0) else "crashed"

    def hand_over(self, connection: socket.socket) -> str:
        """Hand a copy of a connection to the process, without waiting; return why it cannot be, or an empty text."""
        with self.lock:
            if self.line is None or self.told_to_stop:
                return f"the {self.name} does not run; the log of the fleet says why"
            if not self.said:
                return f"the {self.name} is starting"
            try:
                socket.send_fds(self.line, [b"+"], [connection.fileno()])
            except OSError as error:
                return f"the {self.name} takes no connection: {error.strerror}"
        return ""

    def hear(self, line: socket.socket) -> bool:
        """Take in what the process has told since, without waiting; return whether there was anything."""
        try:
            heard = line.recv(MAX_SAID)
        except OSError:
            return False
        self.said = (self.said + heard)[:MAX_SAID]
        if ENDS_IN_ORDER in self.said.splitlines():
            self.ends.set()
        return bool(heard)

    def stop(self) -> None:
        if self.process is not None and self.process.returncode is None:
            if self.told_to_stop:
                self.hurries.set()
            self.told_to_stop = True
            self.ends.set()
            with suppress(ProcessLookupError):
                self.process.terminate()

    def kill(self) -> None:
        """Kill the process, with what its handlers have started in its session."""
        if self.process is not None:
            self.killed = True
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def ask(self, path: str, accept: str = "") -> tuple[int, str]:
        """Return what the process answers: a status and a body. The status is 0 where there is nobody to ask."""
        if not self.status:
            return 0, "is starting" if self.process is not None else "does not run"
        try:
            with closing(http.client.HTTPConnection(self.status, timeout=ANSWER_SECONDS)) as connection:
                connection.request("GET", path, headers={**self._headers, "Accept": accept})
                with connection.getresponse() as answer:
                    return answer.status, answer.read().decode()
        except TimeoutError:
            return 503, f"has not answered for {ANSWER_SECONDS:g} s"
        except (OSError, http.client.HTTPException):
            return 0, "does not run"


class _Sources:
    """The files of an app. Raises `ConfigError` where watchfiles is missing."""

    def __init__(self, sources: Iterable[str]) -> None:
        try:
            import watchfiles
        except ImportError as error:
            raise ConfigError(["--reload needs watchfiles: pip install 'aviso-workers[reload]'"]) from error
        self._watch = watchfiles.awatch
        self._filter = watchfiles.PythonFilter(extra_extensions=CONFIG_FILES)
        # Sources are files, and variables of the environment.
        self._paths = [Path.cwd(), *(Path(source) for source in sources if Path(source).is_file())]

    async def changes(self, stop: anyio.Event) -> AsyncIterator[list[str]]:
        """Yield the files that changed together, again and again until `stop`: its thread cannot be cancelled."""
        async for changes in self._watch(*self._paths, watch_filter=self._filter, stop_event=stop):
            yield sorted({file for _, file in changes})


class Fleet:
    """The processes of one app. What probes and Prometheus ask of it is answered on the status port's threads."""

    def __init__(self, app: App, plan: FleetPlan) -> None:
        self._sources = _Sources(app.config.sources) if plan.reload else None
        settings = app.config.workers
        token = settings.status.token
        self._places = [_Slot(str(number), plan.command, token=token) for number in range(1, plan.processes + 1)]
        self.console = _Slot("console", plan.console) if settings.console.on_status_port else None
        self._kept = [*self._places, *([self.console] if self.console else [])]
        self._drain_timeout_seconds = settings.drain_timeout_seconds
        self._health = Health()
        self._stopping = False
        self.forced = False
        """Whether a process had to be ended by force when the fleet stopped."""
        self._failure: WorkerProcessError | None = None
        names = [place.name for place in self._places]
        self.metrics = FleetMetrics(app.name, names, scrape=self._scrape, traced=app.config.workers.traces.enabled)

    def readiness(self) -> tuple[list[str], list[str]]:
        answers = [*self._ask("/readyz")]  # once: a probe does not wait for long
        unready = [*(["stopping"] if self._stopping else []), *_lines(answers, statuses=(0, 503))]
        return unready, [note for note in _lines(answers, statuses=(200,)) if not note.endswith(": ok")]

    def stuck(self) -> list[str]:
        """Return what is stuck; a process that starts or has ended is not, because it is being taken care of."""
        return [*self._health.stuck(), *_lines(self._ask("/livez"), statuses=(503,))]

    async def work(self) -> None:
        """Keep the processes until a signal. Raises `WorkerProcessError`."""
        self._woken, self._workers_ended, done = anyio.Event(), anyio.Event(), anyio.Event()
        async with anyio.create_task_group() as watching:
            await watching.start(self._obey_signals)
            watching.start_soon(self._health.keep_turning)
            if self._sources is not None:
                watching.start_soon(self._follow, self._sources.changes(done))
            async with anyio.create_task_group() as keeping:
                if self.console is not None:
                    keeping.start_soon(self._keep_running, self.console)
                async with anyio.create_task_group() as keeping_workers:
                    for place in self._places:
                        keeping_workers.start_soon(self._keep_running, place)
                self._workers_ended.set()
            done.set()
            watching.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure

    async def _keep_running(self, place: _Slot) -> None:
        """Have a process in this place, one after another, until the fleet stops."""
        restarts = Restarts(RESTARTS, healthy_seconds=HEALTHY_SECONDS)
        while not self._stopping:
            restarts.note_start(time.monotonic())
            code = await self._run(place)
            ending = place.ending(code)
            if self._stopping:
                self.forced = self.forced or (ending == "killed" and place is not self.console)
                log.info("process.stopped", process=place.name, exit_code=code)
                return
            self.metrics.exited(place.name, ending)
            if ending == "crashed":
                await self._recover(place, code, restarts)
            else:
                log.info("process.replaced", process=place.name, exit_code=code)

    async def _recover(self, place: _Slot, code: int, restarts: Restarts) -> None:
        """Wait until a crashed process may be started again, or give the fleet up."""
        delay, crashes = restarts.next_wait(time.monotonic()), restarts.failures
        how = f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.strsignal(-code)})"
        if self._sources is not None and (code > 0 or place is not self.console):
            log.error("process.crashed", process=place.name, ended_with=how, again="after a change")
            await self._woken.wait()
        elif crashes < MOST_RESTARTS or place is self.console:
            log.error("process.crashed", process=place.name, ended_with=how, again_in_seconds=round(delay, 1))
            with anyio.move_on_after(delay):
                await self._woken.wait()
        else:
            self._failure = WorkerProcessError(
                f"process {place.name} crashed {crashes} times in a row, each time within {HEALTHY_SECONDS:g} s of its "
                f"start; the last one ended with {how}, and the log says why"
            )
            self._stop()

    async def _run(self, place: _Slot) -> int:
        """Run one process; its exit code, negative for a signal."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours:
            with theirs:
                try:
                    process = await self._start(place, theirs.fileno())
                except OSError as error:
                    log.error("process.not_started", process=place.name, reason=str(error))
                    return NOT_STARTED
            place.begin(process, ours)
            if self._stopping:
                place.stop()
            self.metrics.started(place.name)
            log.info("process.started", process=place.name, pid=process.pid)
            async with process, anyio.create_task_group() as listening:
                listening.start_soon(self._listen, place, ours)
                listening.start_soon(self._kill_late, place)
                await process.wait()
                listening.cancel_scope.cancel()
            place.hear(ours)
            with place.lock:
                place.line = None
        place.process = None
        self.metrics.ended(place.name)
        assert process.returncode is not None
        return process.returncode

    async def _kill_late(self, place: _Slot) -> None:
        """Kill the process where it does not end in time, once it is about to end."""
        await place.ends.wait()
        began = anyio.current_time()
        with anyio.move_on_after(self._drain_timeout_seconds + KILL_SECONDS):
            if place is self.console:
                await self._workers_ended.wait()
                await anyio.sleep_until(began + CONSOLE_SECONDS)
            else:
                await place.hurries.wait()
                await anyio.sleep(KILL_SECONDS)
        log.error("process.killed", process=place.name, seconds=round(anyio.current_time() - began, 1))
        place.kill()

    async def _start(self, place: _Slot, line: int) -> Process:
        return await anyio.open_process(
            (*place.command, "--member", f"{place.name}:{line}"),
            stdin=subprocess.DEVNULL,
            stdout=None,
            stderr=None,
            pass_fds=(line,),
            start_new_session=True,  # a terminal's Ctrl-C comes to us alone, and is passed on once
        )

    async def _listen(self, place: _Slot, line: socket.socket) -> None:
        """Hear what the process tells. A console that has begun to tell that it turns is killed if it is silent twice
        in turn: after the first time, it may be this machine that has stood still.
        """
        heard, silences = True, 0
        while heard and silences < 2:
            half = STUCK_SECONDS / 2 if place is self.console and place.said else math.inf
            with anyio.move_on_after(half) as silence:
                await anyio.wait_readable(line)
            silences = silences + 1 if silence.cancelled_caught else 0
            heard = silences > 0 or place.hear(line)
        if silences:
            log.error("process.hung", process=place.name, seconds=STUCK_SECONDS)
            place.kill()

    async def _obey_signals(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        with anyio.open_signal_receiver(*TOLD_TO_END) as signals:
            task_status.started()
            for event in ("fleet.stopping", "fleet.cancelling"):
                log.info(event, signal=(await anext(signals)).name)
                self._stop()
            async for number in signals:
                log.warning("fleet.killing", signal=number.name)
                for place in self._kept:
                    place.kill()

    async def _follow(self, changes: AsyncIterator[list[str]]) -> None:
        """Replace the processes whenever a source changes."""
        async for files in changes:
            if self._stopping:
                return  # a second signal would cancel what drains
            log.info("fleet.reloading", changed=files)
            self._stop_processes()

    def _stop(self) -> None:
        self._stopping = True
        self._stop_processes()

    def _stop_processes(self) -> None:
        """Let the processes that run end in order, and those that wait to be started again wait no longer."""
        for place in self._kept:
            place.stop()
        self._woken.set()
        self._woken = anyio.Event()

    def _ask(self, path: str, accept: str = "") -> Iterator[tuple[_Slot, int, str]]:
        """Yield all at a time, because one that is stuck takes its time."""
        with ThreadPoolExecutor(len(self._places)) as pool:
            for place, answer in zip(
                self._places, pool.map(lambda place: place.ask(path, accept), self._places), strict=True
            ):
                yield place, *answer

    def _scrape(self, accept: str) -> dict[str, str]:
        return {place.name: body for place, status, body in self._ask("/metrics", accept) if status == 200}


def _lines(answers: Iterable[tuple[_Slot, int, str]], *, statuses: tuple[int, ...]) -> list[str]:
    """Return the lines of the answers that have one of these statuses, each with the name of its process."""
    return [
        f"process {place.name}: {line}"
        for place, status, body in answers
        if status in statuses
        for line in body.splitlines()
    ]
