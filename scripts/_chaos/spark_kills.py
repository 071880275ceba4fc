"""Kills of what Spark's work needs: a driver, an executor or a server while rows are written or kept, and the agent
`spark-events` or its server while applications log. What a user would do next is done, and every row is counted.

A row counts as lost where the work said that it succeeded, at the latest after it was done again, and the row is not
there; as doubled where it is there more often than docs/spark/writing.md says: a batch write without `msgIdColumn` that
is done again is another write, so it may store each row once more. The moments follow from the seed, and from how long
the work takes on this machine.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
from anyio import to_thread
from msgspec import Struct, structs
from rich.console import Console
from rich.table import Table

from _chaos import bridge_kills, kills, spark_driver
from _chaos.clusters import Node, connected, start_nodes, stop_nodes
from _chaos.interrupts import end_in_order
from _chaos.spark_driver import Answer, Job
from _chaos.spark_processes import Driver, kill, send
from _demo.children import ShortfallError
from aviso_workers import App, Notify
from aviso_workers.config import load
from aviso_workers.errors import AvisoWorkersError, BackendError, NotFoundError, OutcomeUnknownError, UnavailableError

APP, SOURCE = "kills", "deed"
LANES = 20
TARGETS = {
    "stream write": "copied",
    "archive": "",
    "backfill": "backfilled",
    "write": "written",
    "write with msgIdColumn": "identified",
}
"""The work that a driver does at once, and the event type that each publishes."""
BRIDGE, LOGS = "bridge", "event logs"
OWN_ROWS, OF_ITSELF = ("write", "write with msgIdColumn"), 6
"""The work that reads nothing has so many times as many rows, to last as long as the other."""
STORED_ANEW = "write"
"""The work whose rows may be stored again where it is done again."""
LONGEST_AWAY_SECONDS = 2.0
"""How long a server that was killed stays away at most."""
PAUSED_SECONDS = 70.0
"""Longer than a publish is tried (30 s), a server waits for a client's pong, and an executor's task may be silent."""
FIRST_SECONDS = 5.0
"""A job is killed so long after it has begun at the latest, the first time."""
ATTEMPTS = 5
PATIENCE_SECONDS = 60.0
SHORT_SECONDS = 0.01

T = TypeVar("T")
console = Console(highlight=False, soft_wrap=True, markup=False)


class Result(Struct, frozen=True, kw_only=True):
    """What became of one kill."""

    at_work: bool
    """Whether there was work at hand: something was done, and something was still to be done."""
    repeats: int = 0
    """How often the work was done again, because it was gone or said that it had failed."""
    succeeded: bool = True
    told: str = ""
    """What it said the first time that it failed."""
    lost: int = 0
    doubled: int = 0
    """More often than is documented."""
    allowed: int = 0
    """There again, as it is documented."""

    @property
    def right(self) -> bool:
        return self.succeeded and not (self.lost or self.doubled)


Results = dict[str, list[Result]]
"""By what was killed and what was done."""


class Site:
    """Servers with a source of notifications, a client that looks at them, and a driver that works there."""

    def __init__(self, client: App, nodes: Sequence[Node], directory: Path, *, config: Path, count: int) -> None:
        self.client = client
        self.config = config
        self.nodes = nodes
        self.count = count
        self._directory = directory
        self._numbers = iter(range(1_000_000))
        self.growing = directory / "growing"
        """Where the agent looks for event logs."""
        self.recorded = directory
        """Event logs of a driver."""
        self._source = self.fresh("source")
        self._driver: Driver | None = None
        self._master = ""
        self._killed: list[Driver] = []

    def fresh(self, name: str) -> Path:
        """Return a path that nobody has used."""
        return self._directory / f"{name}-{next(self._numbers)}"

    async def fill(self) -> None:
        """Publish the source, and keep an archive of it."""
        published = await self.client.notify_many(
            Notify(SOURCE, {"lane": number % LANES, "number": number}, {"body": kills.body_of(number)})
            for number in range(self.count)
        )
        assert published == self.count
        self.recorded = self.driver(spark_driver.LOCAL).event_logs
        answer = await self.do(self._job("archive", self._source), spark_driver.LOCAL)
        if answer.problem:
            raise ShortfallError(f"no archive of the source: {answer.problem}")

    def driver(self, master: str) -> Driver:
        """Return the driver that runs there, or start one. One that runs elsewhere ends before."""
        if self._driver is not None and self._master != master:
            self.end_drivers()
        if self._driver is None:
            self._driver, self._master = Driver(master, self.fresh("driver")), master
        return self._driver

    async def do(self, job: Job, master: str) -> Answer:
        return await to_thread.run_sync(self.driver(master).do, job)

    def kill_driver(self) -> None:
        """Kill the driver that runs. What it has started may go on until `reap`."""
        assert self._driver is not None
        self._driver.kill()
        self._killed.append(self._driver)
        self._driver = None

    def reap(self) -> None:
        """Wait until nothing is left of drivers that were killed."""
        while self._killed:
            self._killed.pop().end()

    def end_drivers(self) -> None:
        if self._driver is not None:
            self._killed.append(self._driver)
        self._driver = None
        self.reap()

    async def prepare(self, work: str) -> Job:
        """Return a job on a target that is empty."""
        job = self._job(work, self.fresh("job"))
        if job.target:
            await _patiently(partial(self._delete, job.target.upper()))
        return job

    async def has_begun(self, job: Job) -> bool:
        """Return whether something of the job is stored, or for an archive whether its first micro-batch is planned."""
        if not job.target:
            return await anyio.Path(job.directory, "archive", "_checkpoint", "offsets", "0").exists()
        with suppress(BackendError):
            return (await self.client.session.backend.stream_info(job.target.upper())).messages > 0
        return False

    async def found(self, job: Job, master: str) -> Counter[int]:
        """Return how often each number is where the job was to store it, with the payload that it had."""
        if job.target:
            with suppress(NotFoundError):
                return await _patiently(partial(kills.numbers_of, self.client, job.target.upper()))
            return Counter()
        answer = await self.do(structs.replace(job, name="read archive"), master)
        if answer.problem:
            raise ShortfallError(f"the archive cannot be read: {answer.problem}")
        return Counter(answer.numbers)

    async def _delete(self, stream: str) -> None:
        with suppress(NotFoundError):
            await self.client.session.admin.delete_stream(stream)

    def _job(self, name: str, directory: Path) -> Job:
        return Job(
            name=name,
            config=str(self.config),
            target=TARGETS[name],
            count=self.count * (OF_ITSELF if name in OWN_ROWS else 1),
            directory=str(directory),
            kept=str(self._source / "archive"),
        )


async def kill_driver(site: Site, dice: random.Random) -> None:
    site.kill_driver()


async def kill_executor(site: Site, dice: random.Random) -> None:
    executors = site.driver(spark_driver.CLUSTER).executors()
    kill(dice.choice(sorted(executors)))


async def kill_server(site: Site, dice: random.Random) -> None:
    """Kill one of them, and start it again where it was."""
    node = dice.choice(site.nodes)
    node.stop(killed=True)
    await anyio.sleep(dice.uniform(0, LONGEST_AWAY_SECONDS))
    node.start()


async def pause_driver(site: Site, dice: random.Random) -> None:
    await _pause(site.driver(spark_driver.LOCAL).processes())


async def pause_executor(site: Site, dice: random.Random) -> None:
    driver = site.driver(spark_driver.CLUSTER)
    await _pause(driver.of_executor(dice.choice(sorted(driver.executors()))))


async def pause_server(site: Site, dice: random.Random) -> None:
    await _pause([dice.choice(site.nodes).server.process.pid])


async def _pause(processes: Sequence[int]) -> None:
    """Stop processes where they are, and let them go on after longer than anybody waits for them."""
    for number in processes:
        send(number, signal.SIGSTOP)
    try:
        await anyio.sleep(PAUSED_SECONDS)
    finally:
        for number in processes:
            send(number, signal.SIGCONT)


VICTIMS: dict[str, tuple[str, Callable[[Site, random.Random], Awaitable[None]]]] = {
    "driver": (spark_driver.LOCAL, kill_driver),
    "executor": (spark_driver.CLUSTER, kill_executor),
    "server": (spark_driver.LOCAL, kill_server),
}
PAUSED: dict[str, tuple[str, Callable[[Site, random.Random], Awaitable[None]]]] = {
    "paused driver": (spark_driver.LOCAL, pause_driver),
    "paused executor": (spark_driver.CLUSTER, pause_executor),
    "paused server": (spark_driver.LOCAL, pause_server),
}
"""Only where they are named, because each takes longer than ten kills."""


async def conduct(
    site: Site, victim: str, works: Sequence[str], *, times: int, dice: random.Random, results: Results
) -> None:
    """Kill so often while all of this work is done at once, each time on targets that are empty."""
    latest = dict.fromkeys(works, FIRST_SECONDS)
    for _ in range(times):
        jobs = [await site.prepare(work) for work in works]
        for job, result in await attempt(site, victim, jobs, latest=latest, dice=dice):
            console.print(f"{victim}, {job.name}: {result}")
            results.setdefault(f"{victim}: {job.name}", []).append(result)
            latest[job.name] *= kills.LATER if result.at_work else kills.EARLIER


async def attempt(
    site: Site, victim: str, jobs: Sequence[Job], *, latest: Mapping[str, float], dice: random.Random
) -> list[tuple[Job, Result]]:
    """Kill once, at a random moment of one of the jobs, do each of them again until it succeeds, and count."""
    master, strike = (VICTIMS | PAUSED)[victim]
    aimed_at = dice.choice(jobs)
    driver = await _begin(site, [*(job for job in jobs if job is not aimed_at), aimed_at], master)
    await anyio.sleep(dice.uniform(0, latest[aimed_at.name]))
    at_work = {job.name: not driver.is_done(job.name) and await site.has_begun(job) for job in jobs}
    ended = {job.name: driver.answer(job.name) for job in jobs if driver.is_done(job.name)}
    await strike(site, dice)
    if victim != "driver":
        ended = {job.name: await to_thread.run_sync(driver.answer, job.name) for job in jobs}
    repeats = Counter[str]()
    told = {name: answer.problem for name, answer in ended.items()}
    while left := [job for job in jobs if job.name not in ended or ended[job.name].problem]:
        if max(repeats.values(), default=0) == ATTEMPTS:
            break
        repeats.update(job.name for job in left)
        driver = await _begin(site, left, master)
        ended |= {job.name: await to_thread.run_sync(driver.answer, job.name) for job in left}
    await to_thread.run_sync(site.reap)
    return [
        (
            job,
            _result(
                await site.found(job, master),
                job,
                at_work=at_work[job.name],
                repeats=repeats[job.name],
                succeeded=not ended[job.name].problem,
                told=told.get(job.name, ""),
            ),
        )
        for job in jobs
    ]


async def conduct_bridge(site: Site, victim: str, *, times: int, dice: random.Random) -> list[Result]:
    """Kill the agent `spark-events`, or the server, so often while logs grow. What is wrong stands in the last result.

    What was logged while the source was archived is what each application logs.
    """
    growing = bridge_kills.Growing(site.recorded, site.growing, name=victim, dice=dice)
    at_work = []
    with ExitStack() as following:
        if victim == BRIDGE:
            await bridge_kills.shorten_duplicate_window(site.client)
        agent = following.enter_context(bridge_kills.follow(site.config, site.fresh("bridge")))
        for _ in range(times):
            before = await bridge_kills.stored(site.client)
            growing.grow(1 / (times + 1))
            logged = len(growing.ids())
            await bridge_kills.until_at_work(site.client, before=before, logged=logged, dice=dice)
            at_work.append(before < await bridge_kills.stored(site.client) < logged)
            console.print(f"{victim}, {LOGS}: {'at work' if at_work[-1] else 'at rest'}")
            if victim == BRIDGE:
                agent.kill()
                agent = following.enter_context(bridge_kills.follow(site.config, site.fresh("bridge")))
            else:
                await kill_server(site, dice)
        growing.grow(1)
        found = await bridge_kills.count(site.client, growing.ids())
    results = [Result(at_work=each) for each in at_work]
    results[-1] = structs.replace(results[-1], lost=found.lost, doubled=found.doubled)
    return results


async def _begin(site: Site, jobs: Sequence[Job], master: str) -> Driver:
    """Begin one job after the other: of Python workers that start at once, some would start too slowly for Spark."""
    driver = site.driver(master)
    for job in jobs:
        await to_thread.run_sync(driver.begin, job)
        await _until_begun(site, job, driver)
    return driver


async def _until_begun(site: Site, job: Job, driver: Driver) -> None:
    while not (driver.is_done(job.name) or await site.has_begun(job)):  # noqa: ASYNC110
        await anyio.sleep(SHORT_SECONDS)


def _result(found: Counter[int], job: Job, *, at_work: bool, repeats: int, succeeded: bool, told: str) -> Result:
    anew = repeats if job.name == STORED_ANEW else 0
    doubled = sum(max(0, times - 1 - anew) for times in found.values())
    return Result(
        at_work=at_work,
        repeats=repeats,
        succeeded=succeeded,
        told=told,
        lost=len(set(range(job.count)) - found.keys()),
        doubled=doubled,
        allowed=found.total() - len(found) - doubled,
    )


async def _patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask again where there is no answer, as while a cluster elects leaders. Raises what the last attempt does."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        with suppress(UnavailableError, OutcomeUnknownError):
            return await ask()
        await anyio.sleep(SHORT_SECONDS)
    return await ask()


def write_config(path: Path, url: str, *, replicas: int, event_logs: Path) -> None:
    """Write the configuration of drivers, of the agent and of the client."""
    number = {"type": "IntHandler", "range": [0, 1_000_000_000], "required": True}
    text = {"type": "StringHandler", "required": True}
    fields = {name: {"lane": number, "number": number} for name in (SOURCE, *TARGETS.values()) if name}
    fields["spark_job"] = dict.fromkeys(("cluster", "application", "kind", "event", "id"), text)
    jetstream = {"nats_url": url, "replicas": replicas, "reconnect_delay_ms": 100}
    document = {
        "notification_backend": {"kind": "jetstream", "jetstream": jetstream},
        "notification_schema": {
            name: {
                "topic": {"base": name.partition("_")[0], "key_order": list(identifier)},
                "identifier": identifier,
                "storage_policy": {"allow_duplicates": True},  # else nothing would be there twice
            }
            for name, identifier in fields.items()
        },
        # As docs/spark/writing.md says, the windows outlast restarts, which take minutes on a busy machine.
        "streams": {name.upper(): {"duplicate_window": "1h"} for name in TARGETS.values() if name},
        "workers": {
            "agents": {"spark-events": {"event_log_dirs": [str(event_logs)]}},
            "status": {"port": 0},
            "logging": {"format": "json"},
        },
    }
    path.write_text(json.dumps(document))  # JSON is YAML


async def run(directory: Path, nodes: Sequence[Node], wanted: argparse.Namespace, results: Results) -> None:
    """Add to the results as they come: they count as well where somebody interrupts the rest."""
    config = directory / "config.yaml"
    write_config(config, ",".join(node.url for node in nodes), replicas=len(nodes), event_logs=directory / "growing")
    client = App(APP, config=load(config))
    async with connected(client):
        site = Site(client, nodes, directory, config=config, count=wanted.count)
        try:
            await site.fill()
            for victim in wanted.victim or (*VICTIMS, BRIDGE):
                works = [work for work in (*TARGETS, LOGS) if not wanted.work or work in wanted.work]
                dice = random.Random(f"{wanted.seed} {victim}")
                by_driver = [work for work in works if work != LOGS and victim != BRIDGE]
                # A driver takes longer to start than any of the work: each of its kills hits all of it.
                for together in [by_driver] if victim == "driver" else [[work] for work in by_driver]:
                    await conduct(site, victim, together, times=wanted.times, dice=dice, results=results)
                if LOGS in works and victim in (BRIDGE, "server"):
                    results[f"{victim}: {LOGS}"] = await conduct_bridge(site, victim, times=wanted.times, dice=dice)
        finally:
            site.end_drivers()


def report(results: Results) -> bool:
    """Show what became of the kills; whether nothing is wrong."""
    table = Table("killed: work", "kills", "at work", "done again", "lost", "doubled", "doubled as documented")
    for name, of_one in results.items():
        sums = (sum(each.at_work for each in of_one), sum(each.repeats for each in of_one))
        counts = (sum(getattr(each, field) for each in of_one) for field in ("lost", "doubled", "allowed"))
        table.add_row(name, *map(str, (len(of_one), *sums, *counts)))
    console.print(table)
    wrong = [each for of_one in results.values() for each in of_one if not each.right]
    console.print(f"wrong: {len(wrong)}" if wrong else "as it should be: nothing lost, nothing doubled")
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/kills-spark", description="Kill what Spark needs, and count.")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="default: a random one")
    parser.add_argument("--times", type=int, default=20, help="kills of each (default: 20)")
    parser.add_argument("--count", type=int, default=20_000, help="rows (default: 20000)")
    parser.add_argument("--servers", type=int, choices=(1, 3), default=1, help="how many servers (default: 1)")
    parser.add_argument(
        "--victim", choices=[*VICTIMS, *PAUSED, BRIDGE], action="append", help="only this; may be repeated"
    )
    parser.add_argument("--work", choices=[*TARGETS, LOGS], action="append", help="only this; may be repeated")
    wanted = parser.parse_args()
    end_in_order()
    console.print(f"seed {wanted.seed}")
    results: Results = {}
    try:
        with tempfile.TemporaryDirectory(prefix="aviso-workers-kills-") as name:
            nodes = start_nodes(Path(name, "nats"), wanted.servers)
            try:
                anyio.run(run, Path(name), nodes, wanted, results)
            finally:
                stop_nodes(nodes)
        good = report(results)
    except (ShortfallError, AvisoWorkersError) as error:
        report(results)
        console.print(f"fell short: {error}")
        good = False
    except KeyboardInterrupt:
        report(results)
        console.print("interrupted")
        return 130
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
