"""The index of fields: a SQLite file that workers write and the Spark job reads."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct, structs

# WAL with synchronous=NORMAL: what is committed survives a kill of the process, though not a power cut. The
# notifications are still in the stream then.
TABLES = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS field (
    class TEXT, expver TEXT, domain TEXT, date TEXT, time TEXT, stream TEXT, step INTEGER,
    location TEXT NOT NULL, size INTEGER NOT NULL, sequence INTEGER NOT NULL,
    PRIMARY KEY (class, expver, domain, date, time, stream, step)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS job_end (application TEXT PRIMARY KEY, ended_ms INTEGER, reported_ms INTEGER);
"""


class Field(Struct, frozen=True, kw_only=True):
    """One row of the index."""

    class_: str
    expver: str
    domain: str
    date: str
    time: str
    stream: str
    step: int
    location: str
    size: int
    sequence: int


class JobEnd(Struct, frozen=True, kw_only=True):
    """The end of a Spark application. Times are milliseconds since 1970."""

    application: str
    ended_ms: int
    reported_ms: int
    """When the agent heard of it."""


class Index:
    """The index in `file`, which is made where it is missing."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._connection = sqlite3.connect(file, isolation_level=None)
        self._connection.executescript(TABLES)

    def put(self, field: Field) -> None:
        """Add the field, or replace what an older notification said of it. Committed when it returns."""
        self._connection.execute(
            "INSERT INTO field VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
            "location = excluded.location, size = excluded.size, sequence = excluded.sequence "
            "WHERE excluded.sequence > sequence",
            structs.astuple(field),
        )

    def put_job_end(self, end: JobEnd) -> None:
        self._connection.execute("INSERT OR IGNORE INTO job_end VALUES (?, ?, ?)", structs.astuple(end))

    def count(self) -> int:
        """Return how many fields are indexed."""
        (count,) = self._connection.execute("SELECT count(*) FROM field").fetchone()
        return int(count)

    def locations(self) -> set[str]:
        """Return where the indexed fields are."""
        return {location for (location,) in self._connection.execute("SELECT location FROM field")}

    def job_ends(self) -> list[JobEnd]:
        rows: Iterable[tuple[str, int, int]] = self._connection.execute("SELECT * FROM job_end")
        return [JobEnd(application=name, ended_ms=ended, reported_ms=heard) for name, ended, heard in rows]
