from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import psycopg
import pytest

from _chaos.postgres import Postgres
from aviso_workers import Notification
from aviso_workers.testing import Harness, harness
from tests.examples.conftest import Load, create_tables
from tests.stories.processes import LOOK_SECONDS
from tests.stories.test_demo import running_with
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

PROJECT = Path(__file__).parents[2]
SIZES = (3, 4, 5)
TOTALS = [("1", 3), ("2", 7), ("3", 12)]
LONGER_THAN_THE_DUPLICATE_WINDOW = 600.0


@pytest.fixture
def example(load: Load, database: psycopg.Connection[Any]) -> ModuleType:
    create_tables(database, "inbox-outbox")
    return load("inbox-outbox")


async def publish(t: Harness) -> None:
    for step, size in enumerate(SIZES):
        await t.notify("field", {"class": "od", "step": step}, {"size": size})
        await t.settle()


async def until_relayed(t: Harness, database: psycopg.Connection[Any]) -> None:
    """Let ticks come until the outbox is empty. The harness waits for agents, and not for a timer's database."""
    with anyio.fail_after(PATIENCE_SECONDS):
        while database.execute("select from outbox").fetchone() is not None:
            await t.advance(1)
            await anyio.sleep(LOOK_SECONDS)


async def announced(t: Harness) -> list[tuple[str, int]]:
    return [(one.identifier["number"], one.payload["bytes"]) async for one in t.app.replay("volume")]


async def test_each_total_is_announced_once(example: ModuleType, database: psycopg.Connection[Any]) -> None:
    async with harness(example.app) as t:
        await publish(t)
        await until_relayed(t, database)

        assert database.execute("select * from volumes").fetchall() == [("od", 3, 12)]
        assert await announced(t) == TOTALS


async def test_notification_that_is_handled_again_is_not_counted_again(
    example: ModuleType, database: psycopg.Connection[Any], postgres_server: Postgres
) -> None:
    again = Notification(event_type="field", identifier={"class": "od"}, payload=example.Field(size=3), sequence=1)
    for _ in range(2):
        async with await psycopg.AsyncConnection.connect(postgres_server.conninfo) as session:
            await example.count(again, session)

    assert database.execute("select * from volumes").fetchall() == [("od", 1, 3)]
    assert len(database.execute("select * from outbox").fetchall()) == 1


@pytest.mark.slow
async def test_total_that_was_published_and_not_noted_is_not_published_again_however_late(
    example: ModuleType, database: psycopg.Connection[Any], postgres_server: Postgres
) -> None:
    async with await psycopg.AsyncConnection.connect(postgres_server.conninfo) as killed, harness(example.app) as t:
        await killed.execute("select from relayed for update")  # so that the worker of the harness does not relay
        await publish(t)
        await example.relay(killed)
        assert await announced(t) == TOTALS
        await t.advance(LONGER_THAN_THE_DUPLICATE_WINDOW)

        await killed.rollback()  # as PostgreSQL does when a client dies
        assert len(database.execute("select from outbox").fetchall()) == len(TOTALS)
        await until_relayed(t, database)

        assert await announced(t) == TOTALS


async def test_inbox_forgets_what_the_stream_does_not_keep_any_more(
    example: ModuleType, database: psycopg.Connection[Any], postgres_server: Postgres
) -> None:
    database.execute("insert into inbox values (1, now() - interval '32 days'), (2, now() - interval '30 days')")
    database.commit()

    async with await psycopg.AsyncConnection.connect(postgres_server.conninfo) as session:
        await example.forget(session)

    assert database.execute("select sequence from inbox").fetchall() == [(2,)]


@pytest.mark.slow
@pytest.mark.usefixtures("postgres_server")
def test_table_equals_the_stream_although_workers_are_killed(tmp_path: Path) -> None:
    done = subprocess.run(
        [PROJECT / "scripts" / "kills-postgres", "--seed", "26", "--kills", "3", "--count", "200"],
        env=os.environ | {"PYTHON": sys.executable, "PYTHONUNBUFFERED": "1", "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_SECONDS,
    )

    assert done.returncode == 0, done.stdout
    assert "600 notifications" in done.stdout
    assert "as it should be: the table equals the stream, nothing lost, nothing doubled" in done.stdout
    assert [path.name for path in tmp_path.glob("*aviso*")] + running_with(str(tmp_path)) == []
