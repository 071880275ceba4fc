"""Sums up the fields of each class in PostgreSQL and announces each new total: each field counts exactly once."""

from collections.abc import AsyncIterator
from contextlib import suppress

import msgspec
from psycopg import AsyncConnection
from psycopg_pool import AsyncConnectionPool

from aviso_workers import App, Notification, RetryPolicy
from aviso_workers.errors import NotFoundError

app = App("volumes", config="aviso.yaml")

CONCURRENCY = 8
INTO_INBOX = "insert into inbox (sequence, stored) values (%s, %s) on conflict do nothing"
ADD = """
    insert into volumes (class, fields, bytes) values (%s, 1, %s)
    on conflict (class) do update set fields = volumes.fields + 1, bytes = volumes.bytes + excluded.bytes
    returning fields, bytes
"""
INTO_OUTBOX = "insert into outbox (class, number, bytes) values (%s, %s, %s)"
NEXT = "select id, class, number, bytes from outbox order by id limit 500"


class Field(msgspec.Struct, frozen=True):
    size: int


@app.resource
async def pool() -> AsyncIterator[AsyncConnectionPool]:
    """The worker's connections to the database that PGHOST, PGDATABASE and so on name."""
    pool = AsyncConnectionPool(
        min_size=1, max_size=CONCURRENCY + 2, check=AsyncConnectionPool.check_connection, open=False
    )
    async with pool:
        yield pool


@app.resource(scope="call")
async def session(pool: AsyncConnectionPool) -> AsyncIterator[AsyncConnection]:
    """A transaction: committed if the call succeeds, rolled back if it does not."""
    async with pool.connection() as connection:
        yield connection


@app.agent("field", concurrency=CONCURRENCY, ack_wait=5, retry=RetryPolicy(max=60, attempts=100))
async def count(notification: Notification[Field], session: AsyncConnection) -> None:
    """Add a field to its class, unless the inbox says that this was done."""
    noted = await session.execute(INTO_INBOX, (notification.sequence, notification.time))
    if not noted.rowcount:
        return
    name = notification.identifier["class"]
    total = await (await session.execute(ADD, (name, notification.payload.size))).fetchone()
    assert total is not None
    await session.execute(INTO_OUTBOX, (name, *total))


@app.every("1s", singleton=False)
async def relay(session: AsyncConnection) -> None:
    """Publish what is in the outbox, unless the stream has it. One worker at a time locks the row of `relayed`."""
    locked = await session.execute("select sequence from relayed for update skip locked")
    if (row := await locked.fetchone()) is None:
        return
    waiting = await (await session.execute(NEXT)).fetchall()
    if not waiting:
        return
    (last,) = row
    published = set()
    with suppress(NotFoundError):  # nothing was published yet
        async for volume in app.replay("volume", from_id=last + 1):
            published.add((volume.identifier["class"], int(volume.identifier["number"])))
            last = volume.sequence
    for _, name, number, size in waiting:
        if (name, number) not in published:
            identifier = {"class": name, "number": number}
            receipt = await app.notify("volume", identifier, {"bytes": size}, message_id=f"volume.{name}.{number}")
            last = receipt.sequence
    await session.execute("delete from outbox where id = any(%s)", ([row[0] for row in waiting],))
    await session.execute("update relayed set sequence = %s", (last,))


@app.every("1h", singleton=False)
async def forget(session: AsyncConnection) -> None:
    """Remove from the inbox what the stream does not keep any more either: see its retention_time."""
    await session.execute("delete from inbox where stored < now() - interval '31 days'")
