"""Kills: an operator's command is killed at a random moment, repeated as the documentation says, and then everything is
counted against what was published.

The moments follow from the seed and from how long the command takes when it is repeated, so that two runs of one seed
are alike and not equal. A message counts as
lost where it is not there although its publish was acknowledged and nobody asked for its removal, as doubled where it
is there twice or could be stored in two streams, and as left where it was to be removed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from _chaos.clusters import connected, started
from _chaos.deployment import COMMAND, CONFIG, environment
from _chaos.interrupts import end_in_order
from _demo.children import ShortfallError, running
from aviso_workers import App, Notify
from aviso_workers.backends import Message
from aviso_workers.errors import AvisoWorkersError, BackendError, NotFoundError, UnavailableError
from aviso_workers.ops import backups, mirrors
from aviso_workers.ops.backups import Backup, chains
from aviso_workers.server import processes as servers

APP, EVENT, STREAM, MIRROR = "kills", "deed", "DEED", "DEED_MIRROR"
LANES = 20
REMOVED = 3
"""The lane whose notifications erasing and cleansing remove."""
KEYS = 100
EARLIEST_SECONDS, FIRST_SECONDS = 0.2, 1.0
"""A command loads its modules before the first; the first time it is killed before the second."""
LATER, EARLIER = 1.2, 0.6
"""By how much the latest moment of a kill moves, after a kill that came in time and after one that came too late."""
REPEATS, PAUSE_SECONDS = 5, 1.0
"""A command is repeated so often until it succeeds, as where a cluster has no leader just then."""
LONGEST_SECONDS = 120.0
SHORT_SECONDS = 0.05

console = Console(highlight=False, soft_wrap=True, markup=False)


class Counts(Struct, frozen=True, kw_only=True):
    """What is wrong with what is there, in messages."""

    lost: int = 0
    doubled: int = 0
    left: int = 0

    @property
    def right(self) -> bool:
        return not (self.lost or self.doubled or self.left)


class Attempt(Struct, frozen=True, kw_only=True):
    """A command on something that has been prepared for it."""

    command: Sequence[str | Path]
    repeated: Sequence[str | Path]
    """What the documentation says to do after it was killed."""
    count: Callable[[], Awaitable[Counts]]


class Result(Struct, frozen=True, kw_only=True):
    """What became of one kill."""

    in_time: bool
    """Whether the command was at work when it was killed."""
    succeeded: bool
    """Whether its repetition ended with 0."""
    counts: Counts


class Site:
    """Servers, a client that looks at them, and the commands of an operator there."""

    def __init__(self, client: App, directory: Path, *, config: Path, other_url: str, replicas: int) -> None:
        self.client = client
        self.config = config
        self.replicas = replicas
        self.managed: list[Path] = []
        """Directories of servers that `server start` has started."""
        self.other_config = write_config(directory / "other.yaml", other_url, replicas=1)
        self._directory = directory
        self._numbers = iter(range(1_000_000))

    def stop_servers(self) -> None:
        """End what the commands have started, also what one that was killed has."""
        for directory in self.managed:
            for inside in (directory, *(directory / servers.MOVING).glob("*")):
                servers.stop(inside)

    def fresh(self, name: str) -> Path:
        """Return a path that nobody has used."""
        return self._directory / f"{name}-{next(self._numbers)}"

    async def fill(self, count: int) -> set[int]:
        """Delete all streams and publish so many notifications; returns their numbers, which are acknowledged."""
        backend = self.client.session.admin
        for stream in await backend.stream_names():
            with suppress(NotFoundError):
                await backend.delete_stream(stream)
        return await publish(self.config, 0, count)

    async def run(self, *command: str | Path) -> tuple[int, str]:
        """Return the exit code and what the command wrote."""
        with self._running(command) as child:
            with anyio.fail_after(LONGEST_SECONDS):
                code = await to_thread.run_sync(child.process.wait, abandon_on_cancel=True)
            return code, child.log_file.read_text(errors="replace")

    async def run_killed(self, *command: str | Path, after_seconds: float) -> bool:
        """Return whether the command was running when it was killed."""
        with self._running(command) as child:
            await anyio.sleep(after_seconds)
            ran = child.process.poll() is None
            child.kill()
            return ran

    def _running(self, command: Sequence[str | Path]) -> Any:
        log_dir = self.fresh("logs")
        log_dir.mkdir()
        # A copy that is killed leaves what it had read in the directory for temporary files.
        changed = environment() | {"TMPDIR": str(self._directory)}
        return running("command", [COMMAND, *command], log_dir=log_dir, environment=changed)


async def publish(config: Path, first: int, end: int) -> set[int]:
    """Publish the notifications from one number to before another one; returns their numbers."""
    async with App(APP, config=config) as publisher:
        stored = await publisher.notify_many(
            Notify(EVENT, {"lane": number % LANES, "number": number}, body_of(number)) for number in range(first, end)
        )
    assert stored == end - first
    return set(range(first, end))


async def creating(site: Site, count: int) -> Attempt:
    """Back up a stream."""
    published, to = await site.fill(count), site.fresh("backups")
    command = ("backup", "create", EVENT, "--to", to, "--config", site.config)

    async def counted() -> Counts:
        found = [backups.load(place) for place in backups.places(to)]
        return _worst([compared(_numbers_in(each), published) for each in found]) if found else Counts(lost=count)

    return Attempt(command=command, repeated=command, count=counted)


async def creating_increments(site: Site, count: int) -> Attempt:
    """Back up what a stream has more than in its last backup."""
    old, to = await site.fill(count), site.fresh("backups")
    full = await backups.create(site.client.session.admin, STREAM, to)
    published = old | await publish(site.config, count, count + count // 2)
    command = ("backup", "create", EVENT, "--since", "last", "--to", to, "--config", site.config)

    async def counted() -> Counts:
        found = [backups.load(place) for place in backups.places(to)]
        made = [compared(_numbers_in(each), published) for each in found if each.directory != full.directory]
        return _worst([compared(_numbers_in(full), old), *(made or [Counts(lost=len(published))])])

    return Attempt(command=command, repeated=command, count=counted)


async def restoring(site: Site, count: int) -> Attempt:
    """Restore a stream that is gone."""
    published = await site.fill(count)
    made = await backups.create(site.client.session.admin, STREAM, site.fresh("backups"))
    await site.client.session.admin.delete_stream(STREAM)
    command = ("backup", "restore", made.directory, "--config", site.config)

    async def counted() -> Counts:
        return compared(await numbers_of(site.client, STREAM), published)

    return Attempt(command=command, repeated=command, count=counted)


async def restoring_set(site: Site, count: int) -> Attempt:
    """Restore all streams of an account that has none: notifications and a table."""
    published, to = await site.fill(count), site.fresh("backups")
    backend = site.client.session.admin
    await (await backend.key_value(f"{APP}__table")).put_many({f"{number}": b"1" for number in range(KEYS)})
    code, said = await site.run("backup", "create", "--all", "--to", to, "--config", site.config)
    if code:
        raise ShortfallError(f"backup create --all ended with {code}: {said}")
    for stream in await backend.stream_names():
        await backend.delete_stream(stream)
    command = ("backup", "restore", "--all", to, "--config", site.config)

    async def counted() -> Counts:
        try:
            found = compared(await numbers_of(site.client, STREAM), published)
            await backend.stream_info(f"KV_{APP}__table")  # who opens a bucket that is missing makes it
        except NotFoundError:
            return Counts(lost=count + KEYS)
        keys = await (await backend.key_value(f"{APP}__table")).keys()
        return Counts(lost=found.lost + KEYS - len(keys), doubled=found.doubled, left=found.left)

    return Attempt(command=command, repeated=command, count=counted)


async def promoting(site: Site, count: int) -> Attempt:
    """Put a mirror in its origin's place."""
    published = await site.fill(count)
    admin = site.client.session.admin
    replicas = (await admin.stream_info(STREAM)).config.num_replicas
    mirror = {"name": MIRROR, "mirror": {"name": STREAM}, "num_replicas": replicas, "allow_direct": True}
    await admin.add_stream(mirror)
    with anyio.fail_after(LONGEST_SECONDS):
        while (await site.client.session.admin.stream_info(MIRROR)).messages < count:  # noqa: ASYNC110
            await anyio.sleep(SHORT_SECONDS)
    command = ("mirror", "promote", MIRROR, "--yes", "--config", site.config)

    async def counted() -> Counts:
        backend = site.client.session.admin
        again = Message(subject=f"{EVENT}.{count % LANES}.{count}", data=json.dumps(body_of(count)).encode())
        with suppress(BackendError):  # then it is missing
            await backend.publish(again, message_id="after the promotion", stream=MIRROR, timeout_seconds=5.0)
        promoted = compared(await numbers_of(site.client, MIRROR), published | {count})
        configs = [(await backend.stream_info(name)).config for name in (STREAM, MIRROR)]
        takers = sum(f"{EVENT}.>" in (config.get("subjects") or ()) for config in configs)
        return Counts(lost=promoted.lost + (takers == 0), doubled=promoted.doubled + (takers == 2))

    return Attempt(command=command, repeated=command, count=counted)


async def erasing(site: Site, count: int) -> Attempt:
    """Erase the notifications of a lane."""
    published = await site.fill(count)

    def command() -> tuple[str | Path, ...]:
        record = site.fresh("erasure")
        return ("erase", EVENT, f"lane={REMOVED}", "--yes", "--audit", record, "--config", site.config)

    async def counted() -> Counts:
        return compared(await numbers_of(site.client, STREAM), published, removed=REMOVED)

    return Attempt(command=command(), repeated=command(), count=counted)


async def cleansing(site: Site, count: int) -> Attempt:
    """Remove the notifications of a lane from a full backup, the increment after it and another full backup."""
    published, to = await site.fill(count), site.fresh("backups")
    full = await backups.create(site.client.session.admin, STREAM, to)
    of_each = {full.directory: published}
    published = published | await publish(site.config, count, count + count // 2)
    for since in (full, None):
        made = await backups.create(site.client.session.admin, STREAM, to, since=since)
        of_each[made.directory] = published
    command = ("backup", "cleanse", to, f"lane={REMOVED}", "--yes", "--config", site.config)

    async def counted() -> Counts:
        counts = _worst(
            [compared(_numbers_in(backups.load(place)), of_each[place], removed=REMOVED) for place in of_each]
        )
        beside = len(list((to / STREAM).iterdir())) - len(of_each)
        return Counts(lost=counts.lost, doubled=counts.doubled, left=counts.left + beside)

    return Attempt(command=command, repeated=command, count=counted)


async def copying(site: Site, count: int) -> Attempt:
    """Copy a fenced stream to another server."""
    published = await site.fill(count)
    await mirrors.fence(site.client.session.admin, STREAM)
    command = ("streams", "copy", STREAM, "--to-config", site.other_config, "--replicas", "1", "--config", site.config)
    async with App(APP, config=site.other_config) as target:
        for stream in await target.session.admin.stream_names():
            await target.session.admin.delete_stream(stream)

    async def counted() -> Counts:
        async with App(APP, config=site.other_config) as target:
            return compared(await numbers_of(target, STREAM), published)

    return Attempt(command=command, repeated=command, count=counted)


async def rotating_key(site: Site, count: int) -> Attempt:
    """Move the streams of stopped servers to stores with another key."""
    directory = site.fresh("servers")
    directory.mkdir()
    site.managed.append(directory)
    where = ("--nodes", f"{site.replicas}", "--directory", directory)
    old, config = directory / "old.key", directory / "config.yaml"
    old.write_text("the first key")

    async def started(key: str) -> str:
        """Return the URL of a server that has that key; empty where none could be started."""
        settings = {"store_dir": f"{directory / 'stores'}", "encryption": {"key": key}}
        section = {"server_name": "n", "port": 0, "monitoring": {"port": 0}, "jetstream": settings}
        config.write_text(f"{CONFIG.read_text()}\nserver: {json.dumps(section)}\n")
        code, _ = await site.run("server", "start", *where, "--config", config)
        return "" if code else servers.recorded(directory)[0].url

    reached = write_config(directory / "client.yaml", await started("the first key"), replicas=site.replicas)
    async with connected(App(APP, config=reached)):
        published = await publish(reached, 0, count)
    await to_thread.run_sync(servers.stop, directory)
    config.write_text(config.read_text().replace("the first key", "the second key"))
    command = ("server", "rotate-key", "--previous-key-file", old, *where, "--config", config)

    async def counted() -> Counts:
        if not (url := await started("the second key")):
            return Counts(lost=count)
        client = App(APP, config=write_config(directory / "client.yaml", url, replicas=site.replicas))
        async with connected(client):
            found = await numbers_of(client, STREAM)
        await to_thread.run_sync(servers.stop, directory)
        return compared(found, published)

    return Attempt(command=command, repeated=command, count=counted)


SCENARIOS: dict[str, Callable[[Site, int], Awaitable[Attempt]]] = {
    "backup create": creating,
    "backup create --since": creating_increments,
    "backup restore": restoring,
    "backup restore --all": restoring_set,
    "backup cleanse": cleansing,
    "erase": erasing,
    "mirror promote": promoting,
    "streams copy": copying,
    "server rotate-key": rotating_key,
}


async def conduct(site: Site, scenario: str, *, times: int, count: int, dice: random.Random) -> list[Result]:
    """Kill a command so often, each time on something that is prepared anew."""
    results = []
    seconds = FIRST_SECONDS
    for _ in range(times):
        attempt = await SCENARIOS[scenario](site, count)
        after = dice.uniform(EARLIEST_SECONDS, seconds)
        in_time = await site.run_killed(*attempt.command, after_seconds=after)
        result, said = await _repeated(site, attempt, in_time=in_time)
        seconds *= LATER if in_time else EARLIER
        told = "" if result.succeeded else f"; repeated, it said: {said.strip()}"
        wrong = "" if result.counts.right else f"; {result.counts}"
        console.print(f"{scenario}: {'killed' if in_time else 'done'} after {after:.3f} s{told}{wrong}")
        results.append(result)
    return results


async def _repeated(site: Site, attempt: Attempt, *, in_time: bool) -> tuple[Result, str]:
    """Repeat what was killed until it succeeds or nothing is missing: the result, and what it said last."""
    result, said = None, ""
    for _ in range(REPEATS):
        code, said = await site.run(*attempt.repeated)
        try:
            result = Result(in_time=in_time, succeeded=not code, counts=await _counted(attempt))
        except UnavailableError as error:
            if not code:
                raise
            console.print(f"repeated, it said: {said.strip()}; then {error}")
            continue
        if result.succeeded or result.counts.right:
            break
        await anyio.sleep(PAUSE_SECONDS)
    if result is None:
        raise ShortfallError(f"nothing can be counted after {REPEATS} repeats; the last said: {said.strip()}")
    return result, said


async def _counted(attempt: Attempt) -> Counts:
    """Count, and count again where a reading is interrupted, as while a cluster elects leaders.

    Raises `UnavailableError` where that goes on.
    """
    for _ in range(REPEATS - 1):
        with suppress(UnavailableError):
            return await attempt.count()
        await anyio.sleep(PAUSE_SECONDS)
    return await attempt.count()


async def numbers_of(client: App, stream: str) -> Counter[int]:
    """Return how often each number is in a stream, whole."""
    found = Counter[int]()
    backend = client.session.admin
    last = (await backend.stream_info(stream)).last_sequence
    async for chunk in backend.read_chunks(stream, filter_subjects=(), start_sequence=1, last_sequence=last):
        found.update(number for message in chunk if (number := _number(message.subject, message.data)) is not None)
    return found


def _numbers_in(backup: Backup) -> Counter[int]:
    """Return the same of a backup. Raises `BackupError`."""
    backups.verify(backup)
    with chains.opened_entries(backup, None) as entries:
        found = (_number(entry.name.decode(), entry.body) for entry in entries if entry.sequence)
        return Counter(number for number in found if number is not None)


def compared(found: Counter[int], published: set[int], *, removed: int | None = None) -> Counts:
    kept = {number for number in published if number % LANES != removed}
    return Counts(
        lost=len(kept - found.keys()),
        doubled=sum(times - 1 for times in found.values()),
        left=len(found.keys() - kept),
    )


def _worst(counts: Sequence[Counts]) -> Counts:
    return Counts(
        lost=max(each.lost for each in counts),
        doubled=max(each.doubled for each in counts),
        left=max(each.left for each in counts),
    )


def body_of(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest() * 4


def _number(subject: str, data: bytes) -> int | None:
    """Return the number of a notification that is as it was published; None of another message."""
    number = int(subject.rpartition(".")[2])
    return number if body_of(number).encode() in data else None


def write_config(path: Path, url: str, *, replicas: int) -> Path:
    """Write the configuration of the other scripts, for these servers, and for streams in which a double is seen."""
    section, event = "  jetstream:\n", f"  {EVENT}:\n"
    over = f"{section}    nats_url: {json.dumps(url)}\n    replicas: {replicas}\n"
    all_kept = f"{event}    storage_policy: {{ allow_duplicates: true }}\n"
    path.write_text(CONFIG.read_text().replace(section, over, 1).replace(event, all_kept, 1))
    return path


async def run(directory: Path, url: str, other_url: str, wanted: argparse.Namespace) -> dict[str, list[Result]]:
    """Return the results by scenario."""
    config = write_config(directory / "config.yaml", url, replicas=wanted.servers)
    results: dict[str, list[Result]] = {}
    client = App(APP, config=config)
    async with connected(client):
        site = Site(client, directory, config=config, other_url=other_url, replicas=wanted.servers)
        try:
            for scenario in wanted.command or SCENARIOS:
                dice = random.Random(f"{wanted.seed} {scenario}")
                results[scenario] = await conduct(site, scenario, times=wanted.times, count=wanted.count, dice=dice)
        finally:
            site.stop_servers()
    return results


def report(results: dict[str, list[Result]]) -> bool:
    """Show what became of the kills; whether nothing is wrong."""
    table = Table("command", "killed", "at work", "repeated with 0", "lost", "doubled", "left")
    for scenario, of_one in results.items():
        counts = [each.counts for each in of_one]
        table.add_row(
            scenario,
            *(f"{number}" for number in (len(of_one), sum(each.in_time for each in of_one))),
            f"{sum(each.succeeded for each in of_one)}",
            *(f"{sum(getattr(each, name) for each in counts)}" for name in ("lost", "doubled", "left")),
        )
    console.print(table)
    wrong = [each for of_one in results.values() for each in of_one if not each.counts.right]
    untold = [each for each in wrong if each.succeeded]
    if wrong:
        console.print(f"wrong: {len(wrong)}, of which {len(untold)} were told as a success")
    else:
        console.print("as it should be: nothing lost, nothing doubled, nothing left")
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/kills", description="Kill operators' commands, and count.")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="default: a random one")
    parser.add_argument("--times", type=int, default=20, help="kills of each command (default: 20)")
    parser.add_argument("--count", type=int, default=5_000, help="notifications in a stream (default: 5000)")
    parser.add_argument("--servers", type=int, choices=(1, 3), default=1, help="how many servers (default: 1)")
    parser.add_argument("--command", choices=list(SCENARIOS), action="append", help="only this; may be repeated")
    wanted = parser.parse_args()
    end_in_order()
    console.print(f"seed {wanted.seed}")
    try:
        with ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aviso-workers-kills-")))
            nodes = stack.enter_context(started(str(directory / "nats"), wanted.servers))
            (other,) = stack.enter_context(started(str(directory / "other"), 1))
            url = ",".join(node.url for node in nodes)
            good = report(anyio.run(run, directory, url, other.url, wanted))
    except (ShortfallError, AvisoWorkersError) as error:
        console.print(f"fell short: {error}")
        good = False
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
