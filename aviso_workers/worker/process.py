"""One worker process: its log, its status port, its signals, and the app that it runs.

The order is the design. The status port answers before the connection is tried, so that a worker that waits is seen.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
import structlog
from msgspec import structs

from aviso_workers.app import App
from aviso_workers.errors import ConfigError
from aviso_workers.events import Acked, ConnectionChanged, Failed
from aviso_workers.sessions.worker_recorder import MEMBER
from aviso_workers.task_groups import task_group
from aviso_workers.telemetry import logs
from aviso_workers.telemetry.listeners import Listeners, listening
from aviso_workers.telemetry.logs import log
from aviso_workers.worker import loops, threads_run_on
from aviso_workers.worker.ending import Ending
from aviso_workers.worker.fleet_process import FleetMember

Ready = Callable[[str], None]
"""Called once all agents read their streams, with the URL of the status port."""
MAX_TOLD = 20
"""How many running notifications are named, any of which may have ended the event loop."""
ONLY_FLEETS = "workers.console.on_status_port: only a fleet serves the console there, such as one of --processes 1"


def run(
    app: App,
    *,
    status_port: int | None = None,
    member: FleetMember | None = None,
    quiet: bool = False,
    ready: Ready | None = None,
) -> None:
    """Run `serve` on an event loop of its own. Raises what it raises, and `LoopEnded` where something else ends it.

    From the first signal, or from the end of `serve`, the process has `workers.drain_timeout_seconds` and some seconds
    more to end; then it ends itself, with the exit code `NOT_ENDED`.
    """
    if member is not None:
        structlog.contextvars.bind_contextvars(process=member.name)
        MEMBER.set(member.name)
    if mistakes := app.mistakes():
        raise ConfigError(mistakes)
    ending = Ending(drain_timeout_seconds=app.config.workers.drain_timeout_seconds, running=lambda: _running(app))
    loops.run(
        lambda: serve(app, ending, status_port=status_port, member=member, quiet=quiet, ready=ready),
        running=lambda: _running(app),
    )
    if threads_run_on():
        ending.end()


async def serve(
    app: App,
    ending: Ending,
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

    Raises `BackendError` when the connection cannot be made or is lost for good, `ResourceError` when a resource cannot
    be opened.
    """
    settings = app.config.workers
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
