"""Runs the benchmarks that are asked for, and shows what was measured beside what is aimed at."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from rich.console import Console

from _bench import reporting
from _bench.backing_up import back_up
from _bench.consuming import consume, consume_replicated
from _bench.ground import Cores
from _bench.latency import delay
from _bench.memory import remember
from _bench.publishing import publish
from _bench.replaying import replay
from _bench.rivals import Rivals
from _bench.rounds import Figures, Size
from _bench.scaling import scale
from _bench.spark import transfer
from _bench.startup import start_up
from _demo.children import ShortfallError
from aviso_workers.errors import AvisoWorkersError

BENCHMARKS = {
    "consume": consume,
    "replicated": consume_replicated,
    "publish": publish,
    "replay": replay,
    "latency": delay,
    "memory": remember,
    "startup": start_up,
    "scale": scale,
    "spark": transfer,
    "backup": back_up,
}
WHOLE = Size(repetitions=3, scale=1)
APART = ("replicated", "scale", "spark", "backup")
"""Not part of `all`, which is to take no longer than it does. Spark needs Java, and the whole machine."""
SHORT = Size(repetitions=1, scale=0.01)

console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Measure what a notification costs.")
    parser.add_argument("benchmark", nargs="?", default="all", choices=[*BENCHMARKS, "all"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--short", action="store_true", help="a hundredth of it, once: shows that it runs")
    parser.add_argument("--no-rivals", action="store_true", help="measure only ourselves")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, _leave)
    started = time.perf_counter()
    try:
        figures = measure(asked.benchmark, Rivals(wanted=not asked.no_rivals), SHORT if asked.short else WHOLE)
    except (ShortfallError, AvisoWorkersError) as error:
        console.print(f"fell short: {error}", markup=False)
        return 1
    report = reporting.report(figures, seconds=time.perf_counter() - started)
    reporting.show(report, console)
    if asked.json:
        asked.json.write_bytes(reporting.encode(report))
    return 0


def measure(benchmark: str, rivals: Rivals, size: Size) -> Figures:
    cores = Cores.divide()
    if cores.others:
        os.sched_setaffinity(0, cores.others)
    figures: Figures = {}
    with console.status("setting up the rivals") as status:
        rivals.set_up()
        for name, run in BENCHMARKS.items():
            if benchmark == name or (benchmark == "all" and name not in APART):
                figures |= run(cores, rivals, size, status.update)
    return figures


def _leave(number: int, _frame: FrameType | None) -> None:
    # Once: what has been started is reaped on the way out, and a second Ctrl-C must not keep us from it.
    for other in (signal.SIGINT, signal.SIGTERM):
        signal.signal(other, signal.SIG_IGN)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
