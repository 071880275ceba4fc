from __future__ import annotations

from datetime import date
from types import ModuleType
from typing import Any

import psycopg
import pytest

from aviso_workers.testing import harness
from tests.examples.conftest import Load, create_tables

pytestmark = pytest.mark.anyio

OD = {"class": "od", "date": "2026-11-20", "step": 0}


@pytest.fixture
def example(load: Load, database: psycopg.Connection[Any]) -> ModuleType:
    create_tables(database, "field-index")
    return load("field-index")


def rows(database: psycopg.Connection[Any]) -> list[Any]:
    return database.execute("select class, date, step, location, size from fields order by step").fetchall()


async def test_each_field_has_one_row_with_its_newest_location(
    example: ModuleType, database: psycopg.Connection[Any]
) -> None:
    async with harness(example.app) as t:
        for step, location in ((0, "/old"), (6, "/6"), (0, "/new")):
            await t.notify("field", OD | {"step": step}, {"location": location, "size": 3})
            await t.settle()

    day = date(2026, 11, 20)
    assert rows(database) == [("od", day, 0, "/new", 3), ("od", day, 6, "/6", 3)]


async def test_older_notification_that_is_handled_later_changes_nothing(
    example: ModuleType, database: psycopg.Connection[Any]
) -> None:
    async with harness(example.app) as t:
        t.fail(example.index, ConnectionError("no database"))
        await t.notify("field", OD, {"location": "/old", "size": 3})
        await t.notify("field", OD, {"location": "/new", "size": 3})
        await t.settle()
        assert t.outcomes(example.index) == ["retried", "acked", "acked"]

    assert [row[3] for row in rows(database)] == ["/new"]


async def test_database_that_ends_its_connections_is_connected_to_again(
    example: ModuleType, database: psycopg.Connection[Any]
) -> None:
    async with harness(example.app) as t:
        await t.notify("field", OD, {"location": "/old", "size": 3})
        await t.settle()
        database.execute("select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid()")
        await t.notify("field", OD, {"location": "/new", "size": 3})
        await t.settle()

    assert [row[3] for row in rows(database)] == ["/new"]


async def test_field_that_the_table_refuses_is_a_dead_letter_at_once(
    example: ModuleType, database: psycopg.Connection[Any]
) -> None:
    async with harness(example.app) as t:
        await t.notify("field", OD, {"location": "/0", "size": -1})
        await t.settle()
        assert t.outcomes(example.index) == ["dead_lettered"]
        assert 'violates check constraint "fields_size_check"' in t.dead_letters[0].error

    assert rows(database) == []
