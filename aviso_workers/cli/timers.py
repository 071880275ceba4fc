"""`timers ls|run|pause|resume|catch-up`: when timers run, their pauses, and single or missed runs."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import anyio
import typer

from aviso_workers.app import App
from aviso_workers.aviso.literals import time_text
from aviso_workers.aviso.positions import parse_date, parse_moment
from aviso_workers.cli.arguments import parse_duration, parse_pause
from aviso_workers.cli.options import FOR, NOTE, YES, argument, confirm, end_where, flag, option
from aviso_workers.cli.output import AS_JSON, echo, print_rows, print_table, recorded
from aviso_workers.cli.targets import CONFIG, ConfigSource, OpenedServer, connected, find_app, run_connected
from aviso_workers.errors import DeclarationError, UnavailableError, describe
from aviso_workers.events import Ticked
from aviso_workers.ops import timer_control
from aviso_workers.ops.agent_control import end_text
from aviso_workers.ops.timer_control import TimerRow, paused_text, run_text
from aviso_workers.state.timer_requests import VOID_SECONDS

timers = typer.Typer(help="Show when timers run, pause them, and run one now.", no_args_is_help=True)

TIMERS = ("timer", "schedule", "leader", "last", "next", "state")
SHOWN, SHOWN_AS_JSON = 1, 3
"""Next ticks, where nobody says how many."""
LOOK_SECONDS = 0.5
"""How often it is looked what became of a run."""
LATE_SECONDS = 5.0
"""How long a worker may take to record that it has taken a run."""

OF_APP = argument("MODULE:APP", "Module and variable of the app, e.g. fields:app.")
NAME = argument("TIMER", "Name of the timer, as `timers ls` lists it.")


@timers.command("ls")
def list_timers(
    app: str = OF_APP,
    next_: int | None = option(
        "N", "How many next ticks to list of each. Default: 1, or 3 with --json.", "--next", min=1, max=1000
    ),
    as_json: bool = AS_JSON,
    config: ConfigSource | None = CONFIG,
) -> None:
    """List the timers of an app: schedule, leader, the last tick that a leader ran, the next ticks, who paused it until
    when, and how it fails.

    Exit with 1 if one fails, or none of the workers will run it.

    Example: aviso-workers timers ls fields:app
    """
    found = find_app(app, agent=None, config=config)
    ticks = next_ or (SHOWN_AS_JSON if as_json else SHOWN)

    rows = connected(
        found.config, lambda server: timer_control.rows(server.admin, found.name, found.timers, ticks=ticks)
    )
    cells = (line for row in rows for line in _lines(row))
    print_rows(TIMERS, cells, rows, none=f"{found.name} has no timers", as_json=as_json)
    end_where(any(row.needs for row in rows))


@timers.command()
def run(
    app: str = OF_APP,
    name: str = NAME,
    ask: bool = flag("--ask", "Ask a worker to run it, and wait for the outcome."),
    wait: str = option("DURATION", "With --ask, how long to wait for its end.", default="1h"),
    config: ConfigSource | None = CONFIG,
) -> None:
    """Run a timer once, now, in this process, with the resources of the app. Exit with 1 if it fails.

    The ticks of the workers stay as they are, and a pause of the timer holds only for these. With singleton=True, the
    leader may run a tick at the same time, and `tick.token` is None.

    With --ask, one of the workers runs it, within about 5 seconds; with singleton=True the leader, between its ticks.
    Exit with 1 also if no worker takes it within 60 seconds; then none runs it later.

    Example: aviso-workers timers run fields:app daily_report
    """
    longest = parse_duration(wait, name="--wait")
    found, timer = _found(app, name, config)

    async def run_here(app: App) -> tuple[bool, str]:
        [ticked] = await app.session.run_timer(app, timer)
        if ticked.error is not None:
            return False, f"{name} failed after {ticked.seconds:.1f} s: {describe(ticked.error)}"
        return True, f"{name} ran, in {ticked.seconds:.1f} s"

    async def work(server: OpenedServer, running: Awaitable[tuple[bool, str]]) -> bool:
        async with recorded(server, "run-timer", f"{found.name}/{name}") as result:
            succeeded, result.text = await running
            result.state = "done" if succeeded else "failed"
        return succeeded

    if ask:
        succeeded = connected(found.config, lambda server: work(server, _asked(server, found.name, name, longest)))
    else:
        succeeded = run_connected(found, lambda app: work(OpenedServer(app.session.admin, app.config), run_here(app)))
    raise typer.Exit(int(not succeeded))


async def _asked(server: OpenedServer, app: str, timer: str, longest: float) -> tuple[bool, str]:
    """Ask for a run; return whether it has succeeded, and what became of it by its end or when that is late."""
    run = await timer_control.ask(server.admin, app, timer)
    void_at = anyio.current_time() + VOID_SECONDS + LATE_SECONDS
    with anyio.move_on_after(longest):
        while run.seconds is None and (run.worker or anyio.current_time() < void_at):
            await anyio.sleep(LOOK_SECONDS)
            with suppress(UnavailableError):  # the run goes on at its worker
                newest = await timer_control.asked(server.admin, app, timer)
                if newest and newest.asked > run.asked:
                    since = "somebody else has asked for a run since, and what became of this one is not known"
                    return False, f"{timer}: {since}"
                if newest and newest.asked == run.asked:  # else a replica that is behind has told it
                    run = newest
    said = f"{timer}: {run_text(run, void=anyio.current_time() >= void_at)}"
    return run.seconds is not None and not run.error, said


@timers.command()
def pause(
    app: str = OF_APP,
    name: str = NAME,
    for_: str | None = FOR,
    until: str | None = option("TIME", "When the pause ends, e.g. 2026-11-20T06:00:00Z, instead of --for."),
    note: str = NOTE,
    config: ConfigSource | None = CONFIG,
) -> None:
    """Pause a timer in all workers, also in those that start later. A tick that runs is finished. Workers of a version
    without this command run it all the same.

    Example: aviso-workers timers pause fields:app daily_report --for 2h --note "the archive is down"
    """
    seconds = parse_pause(for_)
    end = parse_date(until, name="--until") if until else None
    if seconds and end:
        raise DeclarationError("say --for or --until, not both")
    found, timer = _found(app, name, config)

    async def work(server: OpenedServer) -> None:
        chosen = {"for": for_, "until": until, "why": note}
        async with recorded(server, "pause-timer", f"{found.name}/{name}", **chosen) as result:
            made = await timer_control.pause(
                server.admin, found.name, timer.name, until=end, seconds=seconds, note=note
            )
            result.text = f"{name} is paused until {end_text(made.until)}"

    connected(found.config, work)


@timers.command()
def resume(app: str = OF_APP, name: str = NAME, config: ConfigSource | None = CONFIG) -> None:
    """Resume a paused timer in all workers, within seconds. What it missed is treated as if no worker had run.

    Example: aviso-workers timers resume fields:app daily_report
    """
    found, timer = _found(app, name, config)

    async def work(server: OpenedServer) -> None:
        async with recorded(server, "resume-timer", f"{found.name}/{name}") as result:
            await timer_control.resume(server.admin, found.name, timer.name)
            result.text = f"{name} is resumed"

    connected(found.config, work)


@timers.command("catch-up")
def catch_up(
    app: str = OF_APP,
    name: str = NAME,
    from_: str = option("TIME", "The first time of the range, e.g. 2026-11-20T06:00:00Z.", "--from", default=...),
    to: str = option("TIME", "The last time of the range, which must be over.", default=...),
    again: bool = flag(
        "--again",
        "Also run the ticks that a leader has begun or may have begun, and those that workers run by themselves.",
    ),
    yes: bool = YES,
    config: ConfigSource | None = CONFIG,
) -> None:
    """Run the missed ticks of a timer, from one time to another, both included: in order, one after the other, in this
    process, with the resources of the app. `tick.time` is when each was due, `tick.token` is None. A pause of the timer
    holds only for workers.

    With singleton=True, ticks are left out that a leader has begun, as far as workers have recorded it. The command
    stops at the first tick that fails, exits with 1, and says how to go on.

    Example: aviso-workers timers catch-up fields:app report --from 2026-11-20T06:00:00Z --to 2026-11-20T18:00:00Z
    """
    now = datetime.now(UTC)
    first, last = parse_moment(from_, name="--from", now=now), parse_moment(to, name="--to", now=now)
    found, timer = _found(app, name, config)

    async def work(app: App) -> tuple[int, Sequence[Ticked]]:
        plan = await timer_control.plan_catch_up(app.session.admin, app.name, timer, first, last, again=again)
        rows = ((time_text(each.time), each.left_out or "to run") for each in plan)
        print_table(("tick", "what"), rows, none=f"{name} has no tick in this range")
        if not (times := [each.time for each in plan if not each.left_out]):
            return 0, ()
        confirm(yes, to=f"run {len(times)} ticks")
        server = OpenedServer(app.session.admin, app.config)
        async with recorded(server, "catch-up-timer", f"{app.name}/{name}", **{"from": from_, "to": to}) as result:
            ran = await app.session.run_timer(app, timer, times, tell=_tell)
            result.state = "failed" if ran and ran[-1].error is not None else "done"
        return len(times), ran

    planned, ran = run_connected(found, work)
    if ran and ran[-1].error is not None:
        echo(
            f"{len(ran) - 1} ran, 1 failed, {planned - len(ran)} did not run; to go on, repeat the command with "
            f"--from {time_text(ran[-1].time)}",
            err=True,
        )
        raise typer.Exit(1)
    echo(f"{len(ran)} ran")


def _found(app: str, name: str, config: ConfigSource | None) -> tuple[App, Any]:
    found = find_app(app, agent=None, config=config)
    return found, timer_control.declared(found.name, found._timers_at_work(), name)


def _tell(ticked: Ticked) -> None:
    how = f"failed: {describe(ticked.error)}" if ticked.error is not None else "ran"
    echo(f"{time_text(ticked.time)} {how}, in {ticked.seconds:.1f} s", err=ticked.error is not None)


def _lines(row: TimerRow) -> Iterator[tuple[str, ...]]:
    """Yield the lines of a timer, one for each next tick."""
    first, *others = map(time_text, row.next) if row.next else ("-",)
    last = time_text(row.last) if row.last else "-"
    paused = paused_text(row.paused) if row.paused else ""
    state = "; ".join(filter(None, (row.state if row.needs or not paused else "", paused)))
    yield (row.timer, row.schedule, row.leader, last, first, state)
    for time in others:
        yield ("", "", "", "", time, "")
