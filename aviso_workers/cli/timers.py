"""`timers ls|run`: when the timers of an app run next, how they ran last, and one run now."""

from __future__ import annotations

from typing import Annotated

import typer

from aviso_workers.aviso.literals import time_text
from aviso_workers.cli.options import argument
from aviso_workers.cli.output import AsJson, echo, print_rows
from aviso_workers.cli.targets import ConfigOption, connected, find_app, run_connected
from aviso_workers.errors import DeclarationError, describe
from aviso_workers.ops import timer_report
from aviso_workers.ops.timer_report import TimerRow

__all__ = ["timers"]

timers = typer.Typer(help="Show when timers run, and run one now.", no_args_is_help=True)

TIMERS = ("timer", "schedule", "leader", "last", "next", "state")

OfApp = Annotated[str, argument("MODULE:APP", "Module and variable of the app, e.g. fields:app.")]


@timers.command("ls")
def list_timers(app: OfApp, as_json: AsJson = False, config: ConfigOption = None) -> None:
    """List the timers of an app: schedule, leader, the last tick that a leader ran, the next tick, and how it fails.

    Exit with 1 if one fails.

    Example: aviso-workers timers ls fields:app
    """
    found = find_app(app, agent=None, config=config)

    rows = connected(found.config, lambda server: timer_report.of_app(server.admin, found.name, found.timers))
    print_rows(TIMERS, map(_row, rows), rows, none=f"{found.name} has no timers", as_json=as_json)
    if any(row.state != "ok" for row in rows):
        raise typer.Exit(1)


@timers.command()
def run(
    app: OfApp,
    name: Annotated[str, argument("TIMER", "Name of the timer, as `timers ls` lists it.")],
    config: ConfigOption = None,
) -> None:
    """Run a timer once, now, in this process, with the resources of the app. Exit with 1 if it fails.

    The ticks of the workers stay as they are. With leader=True, the leader may run a tick at the same time, and
    `tick.token` is None.

    Example: aviso-workers timers run fields:app daily_report
    """
    found = find_app(app, agent=None, config=config)
    timer = next((each for each in found.timers if each.name == name), None)
    if timer is None:
        known = ", ".join(each.name for each in found.timers) or "none"
        raise DeclarationError(f"app {found.name!r} has no timer {name!r}; it has: {known}")

    ticked = run_connected(found, lambda app: app.session.run_timer(app, timer))
    if ticked.error is not None:
        echo(f"{name} failed after {ticked.seconds:.1f} s: {describe(ticked.error)}", err=True)
        raise typer.Exit(1)
    echo(f"{name} ran, in {ticked.seconds:.1f} s")


def _row(row: TimerRow) -> tuple[str, ...]:
    last = time_text(row.last) if row.last else "-"
    return (row.timer, row.schedule, row.leader, last, time_text(row.next[0]), row.state)
