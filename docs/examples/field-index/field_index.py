"""Keeps a table of the newest location of each forecast field in PostgreSQL."""

from collections.abc import AsyncIterator
from datetime import date

import msgspec
import psycopg
from psycopg import AsyncConnection
from psycopg_pool import AsyncConnectionPool

from aviso_workers import App, Notification, Reject, RetryPolicy

app = App("field-index", config="aviso.yaml")

CONCURRENCY = 8
UPSERT = """
    insert into fields (class, date, step, location, size, sequence)
    values (%(class)s, %(date)s, %(step)s, %(location)s, %(size)s, %(sequence)s)
    on conflict (class, date, step) do update
    set location = excluded.location, size = excluded.size, sequence = excluded.sequence
    where fields.sequence < excluded.sequence
"""


class Field(msgspec.Struct, frozen=True):
    location: str
    size: int


class FieldKey(msgspec.Struct, frozen=True):
    class_: str = msgspec.field(name="class")
    date: date
    step: int


@app.resource
async def pool() -> AsyncIterator[AsyncConnectionPool]:
    """The worker's connections to the database that PGHOST, PGDATABASE and so on name."""
    pool = AsyncConnectionPool(min_size=1, max_size=CONCURRENCY, check=AsyncConnectionPool.check_connection, open=False)
    async with pool:
        yield pool


@app.resource(scope="call")
async def session(pool: AsyncConnectionPool) -> AsyncIterator[AsyncConnection]:
    """A transaction: committed if the call succeeds, rolled back if it does not."""
    async with pool.connection() as connection:
        yield connection


@app.agent("field", concurrency=CONCURRENCY, retry=RetryPolicy(max=60, attempts=100))
async def index(notification: Notification[Field, FieldKey], session: AsyncConnection) -> None:
    key, field = notification.key, notification.payload
    row = {"class": key.class_, "date": key.date, "step": key.step, "sequence": notification.sequence}
    await session.execute(UPSERT, row | msgspec.structs.asdict(field))


@index.on_error(psycopg.DataError, psycopg.IntegrityError)
def refuse(error: Exception) -> Reject:
    """What the table does not take today it does not take tomorrow either."""
    return Reject(str(error))
