"""Conducts the main job, shows what happens, and holds it against what should have happened.

Every number that is printed was counted or measured in this run. Exits with 1 and a reason where one falls short.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import pyarrow.dataset
import pyarrow.parquet
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from _demo.children import INTERRUPTS, ShortfallError, wait_until
from _demo.deployment import Deployment, Numbers, Worker, deployed
from _demo.generating import Slice, make_slice
from _demo.operator import act
from aviso_workers.errors import AvisoWorkersError

INDEX_SECONDS = 120.0
REPORT_SECONDS = 120.0
LAG_SECONDS = 120.0

Missing = dict[tuple[str, ...], tuple[int, ...]]

console = Console(highlight=False, soft_wrap=True)


class Step:
    """What is going on; `result` is what came of it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.result = ""


class Finding(Struct, frozen=True):
    """Something that was counted, beside what it should be."""

    what: str
    wanted: str
    found: str

    @property
    def good(self) -> bool:
        return self.wanted == self.found


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo", description="Run the main job.")
    parser.add_argument("--keep", action="store_true", help="stay up afterwards, until Ctrl-C, and keep the files")
    keep = parser.parse_args().keep
    for number in INTERRUPTS:
        signal.signal(number, _leave)
    directory = Path(tempfile.mkdtemp(prefix="aviso-workers-demo-"))
    try:
        return conduct(directory, keep=keep)
    except (ShortfallError, AvisoWorkersError) as error:
        console.print(f"[red]fell short:[/] {_plain(str(error))}")
        return 1
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    finally:
        if keep:
            console.print(f"the files stay in {_plain(str(directory))}")
        else:
            shutil.rmtree(directory, ignore_errors=True)


def conduct(directory: Path, *, keep: bool) -> int:
    """Run it in the directory; the exit code. Raises `ShortfallError` where it cannot go on."""
    started = time.perf_counter()
    with ExitStack() as stack:
        with step("nats-server", "starting a nats-server") as now:
            deployment = stack.enter_context(deployed(directory))
            now.result = deployment.nats_url
        with step("workers", "starting two workers") as now:
            worker = stack.enter_context(deployment.index_worker())
            spark_events = stack.enter_context(deployment.spark_events_worker())
            now.result = "index, spark-events"
        with step("generate", "generating notifications") as now:
            wanted = make_slice()
            deployment.write(wanted)
            now.result = f"{len(wanted.lines):,} notifications; left out: {_counted(dict(wanted.left_out))}"
        findings = publish(deployment, worker, wanted)
        findings += report(deployment, wanted)
        findings += listen(deployment, worker, spark_events)
        findings += account(worker, wanted)
        show(findings)
        seconds = time.perf_counter() - started
        if short := [finding for finding in findings if not finding.good]:
            names = "; ".join(finding.what for finding in short)
            console.print(f"[red]fell short after {seconds:.0f} s:[/] {names}")
        else:
            console.print(f"[green]all as it should be[/], in {seconds:.0f} s")
        if keep:
            stay(deployment, worker, spark_events)
    return 1 if short else 0


def publish(deployment: Deployment, worker: Worker, wanted: Slice) -> list[Finding]:
    """Publish the notifications and wait until all are indexed."""
    total, index = len(wanted.lines), deployment.index
    started = time.perf_counter()
    with step("publish", "publishing") as now, deployment.notify() as notify:

        def published() -> bool:
            now.say(f"publishing {total:,} notifications, {index.count():,} indexed")
            return notify.process.poll() is not None

        wait_until(published, lambda: "publishing is not done", within_seconds=INDEX_SECONDS, alive=[worker.child])
        notify.wait(within_seconds=1)
        stored = deployment.stored(notify)
        now.result = f"{stored:,} stored, {stored / (time.perf_counter() - started):,.0f}/s"
    with step("index", "indexing") as now:

        def indexed() -> bool:
            now.say(f"{index.count():,} of {total:,} indexed")
            return index.count() >= total

        wait_until(
            indexed,
            lambda: f"only {index.count():,} of {total:,} notifications are indexed",
            within_seconds=INDEX_SECONDS,
            alive=[worker.child],
        )
        now.result = (
            f"{index.count():,} indexed since publishing began, {total / (time.perf_counter() - started):,.0f}/s"
        )
    return [
        Finding("published", f"{total:,}", f"{stored:,}"),
        Finding("indexed", f"{total:,}", f"{index.count():,}"),
    ]


def report(deployment: Deployment, wanted: Slice) -> list[Finding]:
    """Run the Spark job on the index, and read what it wrote."""
    console.print("the Spark job takes half a minute, and several minutes on a slow or busy machine")
    with step("spark job", "a Spark job archives the index and looks for missing steps") as now:
        with deployment.spark_job() as job:
            job.wait()
        archive = pyarrow.dataset.dataset(deployment.output_dir / "fields", partitioning="hive")
        archived = archive.count_rows()
        missing = read_missing(deployment.output_dir / "completeness")
        now.result = f"{archived:,} fields in {len(archive.files)} Parquet files; missing: {_counted(missing)}"
    table = Table("cycle", "missing steps", title="completeness", title_justify="left")
    for cycle, steps in sorted(missing.items()):
        table.add_row("/".join(cycle), " ".join(map(str, steps)))
    console.print(table)
    return [
        Finding("archived as Parquet", f"{len(wanted.lines):,}", f"{archived:,}"),
        Finding("missing steps", *_compared(dict(wanted.left_out), missing)),
    ]


def read_missing(directory: Path) -> Missing:
    """Return the cycles of a completeness table that miss steps, and which."""
    rows = pyarrow.parquet.read_table(directory).to_pylist()
    names = ("class", "expver", "domain", "date", "time", "stream")
    return {tuple(row[name] for name in names): tuple(row["missing"]) for row in rows if row["missing"]}


def listen(deployment: Deployment, worker: Worker, spark_events: Worker) -> list[Finding]:
    """Wait until the agent has reported the job's end, and count what else was heard of it."""
    with step("spark events", "waiting for the report of the job's end") as now:
        wait_until(
            lambda: bool(deployment.index.job_ends()),
            lambda: "no agent has reported the end of the Spark job",
            within_seconds=REPORT_SECONDS,
            alive=[worker.child, spark_events.child],
        )
        ends, events = deployment.index.job_ends(), deployment.spark_events()
        counted = ", ".join(f"{count} {name}" for name, count in sorted(events.items()))
        now.result = f"{events.total()} events: {counted}"
    for end in ends:
        console.print(f"  {end.application} ended, reported {end.reported_ms - end.ended_ms} ms later")
    return [
        Finding("Spark application reported as ended", "1", f"{len(ends)}"),
        Finding("Spark events, ended as started", _per_kind(events, "start"), _per_kind(events, "end")),
    ]


def account(worker: Worker, wanted: Slice) -> list[Finding]:
    """Hold the worker's metrics against what was published."""
    with step("metrics", "waiting for the worker's numbers") as now:
        numbers: list[Numbers] = []

        def settled() -> bool:
            numbers.append(worker.numbers())
            return numbers[-1].lag == 0

        wait_until(settled, lambda: f"the lag is {numbers[-1].lag}", within_seconds=LAG_SECONDS, alive=[worker.child])
        found = numbers[-1]
        now.result = f"{worker.url}/metrics"
    return [
        Finding("acknowledged", f"{len(wanted.lines):,}", f"{found.acked:,}"),
        Finding("retries of injected failures", f"{wanted.stumbling}", f"{found.retries}"),
        Finding("dead letters", "0", f"{found.dead_letters}"),
        Finding("lag", "0", f"{found.lag}"),
    ]


def show(findings: list[Finding]) -> None:
    table = Table("", "", "wanted", "found")
    for finding in findings:
        sign = "[green]✓[/]" if finding.good else "[red]✗[/]"
        table.add_row(sign, finding.what, finding.wanted, finding.found)
    console.print(table)


def stay(deployment: Deployment, worker: Worker, spark_events: Worker) -> None:
    """Run a second app whose agents fail in several ways, say where everything is, and wait for Ctrl-C."""
    with (
        deployment.tour_worker() as tour,
        deployment.prometheus(worker, spark_events, tour) as prometheus,
        deployment.console() as pages,
    ):
        for name, place in (
            ("console", pages),
            ("index worker", f"{worker.url}/metrics"),
            ("spark-events worker", f"{spark_events.url}/metrics"),
            ("tour worker", f"{tour.url}/metrics"),
            ("Prometheus", prometheus or "is not installed"),
            ("nats-server", deployment.nats_url),
            ("Parquet", deployment.output_dir),
            ("logs", deployment.log_dir),
        ):
            console.print(f"  {name:<20} {_plain(str(place))}")
        act(pages, "pause-timer", app="tour", timer="tidy_up", why="shown by the demo")
        act(pages, "retry-dead-letters", app="tour", agent="check_field")
        console.print("the app tour fails in several ways now, for the pages of the console; Ctrl-C stops it")
        try:
            while True:
                signal.pause()
        except KeyboardInterrupt:
            return


@contextmanager
def step(name: str, doing: str) -> Iterator[Step]:
    """Shows what is going on while the block runs, then a line of what came of it and how long it took."""
    started = time.perf_counter()
    with console.status(doing) as status:
        now = Step(status.update)
        yield now
    seconds = time.perf_counter() - started
    console.print(f"{name:<14}{seconds:>6.1f} s  {_plain(now.result)}")


def _compared(wanted: Missing, found: Missing) -> tuple[str, str]:
    """Return both sides in words that are equal only if they are."""
    differing = [cycle for cycle in {**wanted, **found} if wanted.get(cycle) != found.get(cycle)]
    if not differing:
        return _counted(wanted), _counted(found)
    cycle = min(differing)

    def told(side: Missing) -> str:
        return f"{_counted(side)}; of {'/'.join(cycle)} {side.get(cycle, 'none')}"

    return told(wanted), told(found)


def _counted(missing: Missing) -> str:
    return f"{sum(map(len, missing.values()))} steps of {len(missing)} cycles"


def _per_kind(events: Counter[str], event: str) -> str:
    return ", ".join(f"{events[f'{kind} {event}']} {kind}" for kind in ("application", "job", "stage", "sql"))


def _plain(text: str) -> str:
    """Brackets that are not rich's markup."""
    return text.replace("[", r"\[")


def _leave(number: int, _frame: FrameType | None) -> None:
    # Once: what has been started is reaped on the way out, and a second Ctrl-C must not keep us from it.
    for other in INTERRUPTS:
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
