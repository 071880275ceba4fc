"""Kills of the agent `spark-events`, or of its server, while applications log: the stream holds each event once.

The applications are one that Spark has run, under many names: their logs grow together, in steps that end anywhere.
What was killed is started again, and goes on by itself. Where that is the agent, the stream's duplicate window is a
tenth of a second, so that it cannot help.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import anyio
from msgspec import Struct

from _chaos.deployment import COMMAND, environment
from _demo.children import Child, running
from aviso_workers import App
from aviso_workers.aviso.literals import SECOND
from aviso_workers.config import streams
from aviso_workers.errors import BackendError
from aviso_workers.spark import event_log, job_events
from aviso_workers.spark.event_log import EventLogReader, LogPosition
from aviso_workers.spark.job_events import SparkApplication

EVENT, STREAM = "spark_job", "SPARK"
APPLICATIONS = 60
LATER_SECONDS = 0.02
"""Up to so long after it was seen to have stored something, so that it is killed between any two of its steps."""
LONGEST_SECONDS = 60.0
"""Where nothing more is stored for so long, nothing more will be."""
SHORT_SECONDS = 0.002


class Growing:
    """The log of a real application, growing under many names."""

    def __init__(self, source: Path, directory: Path, *, name: str, dice: random.Random) -> None:
        (file,) = source.glob("eventlog_v2_*/events_1_*")
        self._content = file.read_bytes()
        self._directory = directory
        self._dice = dice
        self._ends = [0] * APPLICATIONS
        self._files = []
        for number in range(APPLICATIONS):
            log = directory / f"eventlog_v2_{name}-{number}"
            log.mkdir(parents=True)
            (log / f"appstatus_{name}-{number}.inprogress").touch()
            self._files.append(log / f"events_1_{name}-{number}.zstd")

    def grow(self, share: float) -> None:
        """Write about this share of each, up to anywhere; all that is left, where it is 1."""
        for number, file in enumerate(self._files):
            step = int(len(self._content) * share * self._dice.uniform(0.5, 1.5))
            end = len(self._content) if share == 1 else self._ends[number] + step
            with file.open("ab") as out:
                out.write(self._content[self._ends[number] : end])
            self._ends[number] = min(end, len(self._content))

    def end(self) -> None:
        """The applications have ended, and their logs are closed."""
        for file in self._files:
            status = file.with_name(f"appstatus_{file.parent.name.removeprefix('eventlog_v2_')}.inprogress")
            status.rename(status.with_suffix(""))

    def ids(self) -> list[str]:
        """Return the ids of all events that are logged so far, of one application after the other."""
        paths = sorted(event_log.find(str(self._directory)))
        logs = [log for path in paths if (log := event_log.snapshot(path)) is not None and log.files]
        found = []
        for log in logs:
            decode = partial(job_events.decode, application=SparkApplication.of_log(log.name))
            reader = EventLogReader(decode, LogPosition())
            more = True
            while more:
                batch = reader.read(log)
                found += [event.message_id("local") for event in batch.events]
                more = batch.more
            reader.close()
        return found


class Found(Struct, frozen=True, kw_only=True):
    """What is wrong with what the stream holds, in events."""

    lost: int
    doubled: int


@contextmanager
def follow(config: Path, log_dir: Path) -> Iterator[Child]:
    """Run a worker with the agent."""
    command = (COMMAND, "worker", "--agent", "spark-events", "--config", config)
    log_dir.mkdir()
    with running("bridge", command, log_dir=log_dir, environment=environment()) as child:
        yield child


async def shorten_duplicate_window(client: App) -> None:
    """To a tenth of a second, the least that a server takes."""
    spec = streams.event_stream(EVENT, client.config.notification_schema[EVENT], client.config)
    await client.session.provisioner.ensure(spec)
    info = await client.session.backend.stream_info(STREAM)
    await client.session.backend.update_stream({**info.config, "duplicate_window": SECOND // 10})


async def until_at_work(client: App, *, before: int, logged: int, dice: random.Random) -> None:
    """Wait until a random part of what is logged is stored, and a little longer."""
    wanted = dice.randint(before, logged)
    with anyio.move_on_after(LONGEST_SECONDS):
        while await stored(client) < wanted:  # noqa: ASYNC110
            await anyio.sleep(SHORT_SECONDS)
    await anyio.sleep(dice.uniform(0, LATER_SECONDS))


async def stored(client: App) -> int:
    """Return how many events the stream holds; 0 while nobody answers."""
    with suppress(BackendError):
        return (await client.session.backend.stream_info(STREAM)).messages
    return 0


async def count(client: App, wanted: list[str]) -> Found:
    """Wait until nothing more is stored, and hold the ids that are stored against those that were logged."""
    held = -1
    with anyio.move_on_after(LONGEST_SECONDS) as patience:
        while (now := await stored(client)) < len(wanted):
            if now != held:
                held, patience.deadline = now, anyio.current_time() + LONGEST_SECONDS
            await anyio.sleep(SHORT_SECONDS)
    found = Counter([each.headers["Nats-Msg-Id"] async for each in client.replay(EVENT, from_id=1)])
    return Found(lost=len(set(wanted) - found.keys()), doubled=found.total() - len(found))
