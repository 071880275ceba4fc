"""`doctor`: checks servers, streams, consumers and our own settings for known problems."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import typer

from aviso_workers.aviso.literals import printable
from aviso_workers.cli.options import flag, option, seconds_between
from aviso_workers.cli.output import echo, print_json
from aviso_workers.cli.targets import CONFIG, ConfigSource, connected, find_app, load
from aviso_workers.errors import AvisoWorkersError, BackendError
from aviso_workers.ops.doctor import Report, Scope, State, examine, hurried, output

NAGIOS_CODES = {State.PASS: 0, State.SKIP: 0, State.ACCEPTED: 0, State.WARN: 1, State.FAIL: 2}
NAGIOS_UNKNOWN = 3

Format = Literal["text", "json", "prometheus", "nagios"]


def doctor(
    app: str | None = option("MODULE:APP", "Check the agents of this app too, and use its configuration."),
    monitor: list[str] | None = option(
        "URL",
        "URL of a server's monitoring port; repeat it for each server. Default: that of the "
        "configuration's section server.",
    ),
    production: bool = flag("--production", "Also check what only production needs, such as three replicas."),
    seconds: float = seconds_between("samples", default=5.0),
    backups: Path | None = option(
        "DIR",
        "Directory with backups: check that each configured stream has one of today. Default: backups are not checked.",
        exists=True,
        file_okay=False,
    ),
    format: Format = typer.Option("text", help="Format of the results."),
    verbose: bool = flag(
        "--verbose", "List the checks that pass, also at a terminal. A pipe or a file always gets them.", "-v"
    ),
    config: ConfigSource | None = CONFIG,
) -> None:
    """Check servers, streams, consumers and settings for known problems, and say what to do about each. Nothing is
    changed.

    The exit code is 0, 1 if a check fails, or 2 if the doctor could not begin, also when no server answers. With
    --format nagios it is that of a Nagios plugin: 0 for OK, 1 for a warning, 2 for critical and 3 for unknown.

    Example: aviso-workers doctor --app mine.agents:app --production
    """
    for url in monitor or ():
        if not url.startswith(("http://", "https://")):
            raise typer.BadParameter(f"{url!r} is not a URL, such as http://127.0.0.1:8222", param_hint="--monitor")
    try:
        examined = find_app(app, agent=None, config=config) if app else None
        scope = Scope(
            agents=tuple(examined.agents) if examined else None,
            app=examined.name if examined else "",
            monitors=tuple(monitor or ()),
            production=production,
            seconds=seconds,
            backups=backups,
        )
        if sys.stderr.isatty():
            typer.echo(f"asking the servers twice, {seconds:g} s apart ...", err=True)
        report = connected(
            hurried(examined.config if examined else load(config)),
            lambda server: examine(server.admin, server.config, scope),
            declared=True,
        )
    except AvisoWorkersError as error:
        if format != "nagios":
            echo(f"aviso-workers: {error}", err=True)
            raise typer.Exit(2) from error
        is_down = isinstance(error, BackendError)
        typer.echo(f"AVISO-WORKERS {'CRITICAL' if is_down else 'UNKNOWN'} - {printable(str(error))}")
        raise typer.Exit(NAGIOS_CODES[State.FAIL] if is_down else NAGIOS_UNKNOWN) from error
    _print(report, format, lists_passed=verbose or not sys.stdout.isatty())
    raise typer.Exit(NAGIOS_CODES[report.state] if format == "nagios" else int(report.state is State.FAIL))


def _print(report: Report, format: Format, *, lists_passed: bool) -> None:
    match format:
        case "text":
            for line in output.text(report, lists_passed=lists_passed):
                typer.echo(printable(line))
        case "json":
            print_json(output.document(report))
        case "prometheus":
            sys.stdout.write(output.gauges(report).decode())
        case "nagios":
            typer.echo(printable(output.nagios(report)))
