"""Kills of workers that count in PostgreSQL: docs/examples/inbox-outbox, with a real server of each kind.

Each round publishes notifications, kills a worker with SIGKILL when a random share of them is counted, and starts
another one. At the end the table, the inbox and the stream of totals are compared with what was published. Which
worker is killed and at which share follows from the seed; what it is doing at that moment does not.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, LiteralString

import anyio
import psycopg
from msgspec import Struct
from rich.console import Console

from _chaos import postgres
from _chaos.clusters import connected, started
from _chaos.deployment import COMMAND, environment
from _chaos.interrupts import end_in_order
from _chaos.postgres import Postgres
from _demo.children import Child, ShortfallError, running
from aviso_workers import App, Notify, config
from aviso_workers.backends import Admin
from aviso_workers.errors import AvisoWorkersError, NotFoundError

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "inbox-outbox"
CLASSES = ("od", "rd", "ea", "mc")
NATS_URL = "AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__NATS_URL"
CONSUMER = "volumes__count"
LONGEST_SECONDS = 120.0
SHORT_SECONDS = 0.01

console = Console(highlight=False, soft_wrap=True, markup=False)


class Kill(Struct, frozen=True, kw_only=True):
    """What was under way when a worker was killed."""

    unacked: int
    """Notifications that were delivered and not acknowledged."""
    between: bool
    """Whether the stream had totals that were still in the outbox."""


class Counts(Struct, frozen=True, kw_only=True):
    """What is wrong at the end."""

    lost: int = 0
    doubled: int = 0
    wrong: int = 0
    """Totals, of the table or of the stream, that are not those of the notifications."""

    @property
    def right(self) -> bool:
        return not (self.lost or self.doubled or self.wrong)


class Fleet:
    """The workers, of which one is killed at a time."""

    def __init__(self, stack: ExitStack, log_dir: Path, variables: dict[str, str]) -> None:
        self._stack = stack
        self._log_dir = log_dir
        self._environment = environment() | variables | {"PYTHONPATH": str(EXAMPLE)}
        self._numbers = iter(range(1_000_000))
        self._running: list[Child] = []

    def start(self) -> None:
        command: list[str | Path] = [COMMAND, "worker", "inbox_outbox:app", "--status-port", "0"]
        name = f"worker-{next(self._numbers)}"
        child = running(name, command, log_dir=self._log_dir, environment=self._environment)
        self._running.append(self._stack.enter_context(child))

    def kill(self, number: int) -> None:
        self._running.pop(number).kill()

    def check_alive(self) -> None:
        for child in self._running:
            child.check_alive()


class Site:
    """What looks at both servers: a client of each."""

    def __init__(self, client: App, admin: Admin, connection: psycopg.Connection[Any]) -> None:
        self.client = client
        self._admin = admin
        self._connection = connection

    def ask(self, query: LiteralString) -> list[Any]:
        return self._connection.execute(query).fetchall()

    async def publish(self, first: int, count: int, dice: random.Random) -> None:
        notifications = [
            Notify("field", {"class": dice.choice(CLASSES), "step": step}, {"size": dice.randrange(1000)})
            for step in range(first, first + count)
        ]
        if await self.client.notify_many(notifications) != count:
            raise ShortfallError("a notification was not stored")

    async def until_counted(self, count: int, fleet: Fleet) -> None:
        """Wait until that many fields are in the table."""
        deadline = time.monotonic() + LONGEST_SECONDS
        while (counted := self.counted()) < count:
            fleet.check_alive()
            if time.monotonic() > deadline:
                raise ShortfallError(f"{counted} of {count} are counted after {LONGEST_SECONDS:.0f} s")
            await anyio.sleep(SHORT_SECONDS)

    async def until_settled(self, fleet: Fleet) -> int:
        """Wait until everything is acknowledged and the outbox is empty, and return the number of deliveries."""
        deadline = time.monotonic() + LONGEST_SECONDS
        while True:
            info = await self._admin.consumer_info("FIELD", CONSUMER)
            ((waiting,),) = self.ask("select count(*) from outbox")
            unsettled = info.num_pending + info.num_ack_pending
            if not unsettled and not waiting:
                return info.deliveries
            fleet.check_alive()
            if time.monotonic() > deadline:
                raise ShortfallError(f"{unsettled} are not settled, {waiting} wait in the outbox")
            await anyio.sleep(SHORT_SECONDS)

    def counted(self) -> int:
        ((counted,),) = self.ask("select coalesce(sum(fields), 0) from volumes")
        return int(counted)

    async def under_way(self) -> Kill:
        """Return what workers that were killed have left unfinished, and others are doing."""
        info = await self._admin.consumer_info("FIELD", CONSUMER)
        try:
            stored = (await self._admin.stream_info("VOLUME")).last_sequence
        except NotFoundError:
            stored = 0
        ((noted,),) = self.ask("select sequence from relayed")
        return Kill(unacked=info.num_ack_pending, between=stored > noted)

    async def compare(self) -> Counts:
        """Compare the table, the inbox and the totals in their stream with the notifications."""
        fields = [field async for field in self.client.replay("field")]
        totals = [total async for total in self.client.replay("volume")]
        inbox = {sequence for (sequence,) in self.ask("select sequence from inbox")}
        sizes: dict[str, list[int]] = defaultdict(list)
        for field in fields:
            sizes[field.identifier["class"]].append(field.payload["size"])
        table = {name: (number, size) for name, number, size in self.ask("select class, fields, bytes from volumes")}
        wanted = Counter((name, number) for name in sizes for number in range(1, len(sizes[name]) + 1))
        found = Counter((total.identifier["class"], int(total.identifier["number"])) for total in totals)
        return Counts(
            lost=(wanted - found).total() + len({field.sequence for field in fields} - inbox),
            doubled=(found - wanted).total() + len(inbox) - len(fields),
            wrong=sum(table.get(name) != (len(of_one), sum(of_one)) for name, of_one in sizes.items())
            + sum(not adds_up(name, of_one, totals) for name, of_one in sizes.items()),
        )


def adds_up(name: str, sizes: list[int], totals: list[Any]) -> bool:
    """Return whether the totals of a class, in the order of their stream, each add one of these sizes."""
    ours = [total for total in totals if total.identifier["class"] == name]
    numbers = [int(total.identifier["number"]) for total in ours]
    sums = [0, *(total.payload["bytes"] for total in ours)]
    added = Counter(after - before for before, after in pairwise(sums))
    return numbers == sorted(numbers) and added == Counter(sizes)


@contextmanager
def fleet_of(workers: int, log_dir: Path, variables: dict[str, str]) -> Iterator[Fleet]:
    with ExitStack() as stack:
        fleet = Fleet(stack, log_dir, variables)
        for _ in range(workers):
            fleet.start()
        yield fleet


async def run(directory: Path, nats_url: str, database: Postgres, wanted: argparse.Namespace) -> bool:
    """Publish, kill, and compare; return whether nothing is wrong."""
    dice = random.Random(wanted.seed)
    settings = config.load(EXAMPLE / "aviso.yaml", environ={NATS_URL: nats_url})
    variables = {NATS_URL: nats_url, **database.environment}
    client = App("outside", config=settings)
    kills: list[Kill] = []
    with psycopg.connect(database.conninfo, autocommit=True) as connection:
        connection.execute((EXAMPLE / "schema.sql").read_bytes())
        async with connected(client) as admin:
            site = Site(client, admin, connection)
            with fleet_of(wanted.workers, directory, variables) as fleet:
                for number in range(wanted.kills):
                    await site.publish(number * wanted.count, wanted.count, dice)
                    await site.until_counted(number * wanted.count + dice.randrange(1, wanted.count), fleet)
                    fleet.kill(dice.randrange(wanted.workers))
                    kills.append(await site.under_way())
                    console.print(f"kill {number + 1} at {site.counted()} fields; {kills[-1]}")
                    fleet.start()
                deliveries = await site.until_settled(fleet)
            counts = await site.compare()
    return report(kills, counts, published=wanted.kills * wanted.count, deliveries=deliveries)


def report(kills: list[Kill], counts: Counts, *, published: int, deliveries: int) -> bool:
    """Say what became of the kills, and return whether nothing is wrong."""
    console.print(
        f"{len(kills)} kills: {sum(kill.unacked > 0 for kill in kills)} while notifications were handled, "
        f"{sum(kill.between for kill in kills)} while totals were published and still in the outbox"
    )
    console.print(f"{published} notifications, {deliveries - published} of them delivered again")
    console.print(
        "as it should be: the table equals the stream, nothing lost, nothing doubled"
        if counts.right
        else f"wrong: {counts}"
    )
    return counts.right


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/kills-postgres", description="Kill workers that count in PostgreSQL, and compare."
    )
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="default: a random one")
    parser.add_argument("--kills", type=int, default=100, help="kills of a worker (default: 100)")
    parser.add_argument("--workers", type=int, default=2, help="workers at a time (default: 2)")
    parser.add_argument("--count", type=int, default=300, help="notifications for each kill (default: 300)")
    wanted = parser.parse_args()
    end_in_order()
    console.print(f"seed {wanted.seed}")
    try:
        with ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aviso-workers-kills-")))
            (node,) = stack.enter_context(started(str(directory / "nats"), 1))
            database = stack.enter_context(postgres.running())
            good = anyio.run(run, directory, node.url, database, wanted)
    except (ShortfallError, AvisoWorkersError) as error:
        console.print(f"fell short: {error}")
        good = False
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
