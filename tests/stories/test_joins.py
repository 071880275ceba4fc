"""The join of docs/joins.md as it stands: two of its workers are killed in the middle, and no pair is lost; its timer
forgets what is old."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, aclosing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import pytest

from aviso_workers import App, Notify, config
from aviso_workers.testing import harness
from tests.stories.processes import LOOK_SECONDS, MAIN, ROOT, Server
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

COUNT = 400
"""Keys of a round. Each third has no partner in time."""
ROUNDS = 5
"""How often it is tried at most until a worker that is killed had something in hand; mostly the first one has."""
SIX = datetime(2026, 11, 20, 6, tzinfo=UTC)
URL = "AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__NATS_URL"


def block(language: str, begin: str) -> str:
    """The code block of the page that has this in it."""
    page = (ROOT / "docs" / "joins.md").read_text()
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (found,) = (each for each in blocks if begin in each)
    return str(found)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with the files of the page."""
    (tmp_path / "aviso.yaml").write_text(block("yaml", "verified"))
    (tmp_path / "joins.py").write_text(block("python", "WITHIN"))
    return tmp_path


@contextmanager
def worker(place: Path, url: str) -> Iterator[subprocess.Popen[bytes]]:
    variables = {URL: url, "AVISO_WORKERS_WORKERS__STATUS__PORT": "0"}
    command = [sys.executable, "-c", MAIN, "worker", "joins:app"]
    with subprocess.Popen(command, cwd=place, env=os.environ | variables, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def later(n: int) -> timedelta:
    """How much later the checksum of this field was computed than the field was written."""
    return timedelta(minutes=(5, -10, 11)[n % 3])


def told(n: int) -> Iterator[Notify]:
    identifier = {"class": "od", "step": n}
    yield Notify("mars", identifier, {"location": f"/data/{n}", "written": SIX})
    yield Notify("checksum", identifier, {"md5": f"{n:x}", "computed": SIX + later(n)})


async def until_stored(outside: App, count: int) -> None:
    """Wait until so many pairs are stored."""
    with anyio.fail_after(PATIENCE_SECONDS):
        async with aclosing(outside.watch("verified", from_id=1)) as verified:
            for _ in range(count):
                await anext(verified)


async def until_settled(outside: App, stream: str, consumer: str) -> int:
    """Wait until everything is settled, and return how often something was delivered."""
    with anyio.fail_after(PATIENCE_SECONDS):
        while True:
            info = await outside.session.backend.consumer_info(stream, consumer)
            if not info.num_pending + info.num_ack_pending:
                return info.deliveries
            await anyio.sleep(LOOK_SECONDS)


async def test_what_has_waited_for_a_day_is_forgotten(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    monkeypatch.delitem(sys.modules, "joins", raising=False)
    joins = importlib.import_module("joins")
    async with harness(joins.app, start=SIX + timedelta(days=1, minutes=-2)) as t:
        for step, minutes in ((1, -1), (2, 1)):
            written = SIX + timedelta(minutes=minutes)
            await t.notify("mars", {"class": "od", "step": step}, {"location": "/data", "written": written})
        await t.settle()
        assert sorted(await joins.waiting.items()) == ["od.1", "od.2"]

        await t.advance("3m")

        assert [tick.error for tick in t.ticks(joins.forget)] == [None]
        assert list(await joins.waiting.items()) == ["od.2"]


@pytest.mark.slow
async def test_every_pair_is_published_once_although_workers_are_killed(place: Path, server: Server) -> None:
    settings = config.load(place / "aviso.yaml", environ={URL: server.url})
    numbers: list[int] = []
    paired: list[int] = []
    async with App("outside", config=settings) as outside:
        with ExitStack() as running:
            workers = [running.enter_context(worker(place, server.url)) for _ in range(2)]
            for _ in range(ROUNDS):
                before, added = len(paired), range(len(numbers), len(numbers) + COUNT)
                numbers += added
                paired += [n for n in added if n % 3 < 2]
                await outside.notify_many(one for n in added for one in told(n))
                for share in (5, 2):
                    await until_stored(outside, before + (len(paired) - before) // share)
                    workers.pop(0).kill()
                    workers.append(running.enter_context(worker(place, server.url)))
                await until_stored(outside, len(paired))
                fields = await until_settled(outside, "MARS", "verify__take_field")
                checksums = await until_settled(outside, "CHECKSUM", "verify__take_checksum")
                if fields + checksums > 2 * len(numbers):
                    break
            else:
                pytest.fail(f"in {ROUNDS} rounds no killed worker had a notification in hand")
        verified = [one async for one in outside.replay("verified")]
    assert sorted((int(one.identifier["step"]), one.payload) for one in verified) == [
        (n, {"location": f"/data/{n}", "md5": f"{n:x}"}) for n in paired
    ]
