"""An id is never that of another row: a repeat with other rows may store one twice, and never goes without one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aviso_workers.aviso.schema import EventType
from aviso_workers.backends import OutgoingChunk
from aviso_workers.errors import InvalidNotificationError
from aviso_workers.spark.rows import ColumnIds, ContentIds, Rows

STEPS = msgspec.convert(
    {
        "topic": {"base": "mars", "key_order": ["step"]},
        "identifier": {"step": {"type": "IntHandler", "required": True}},
    },
    EventType,
)
Row = tuple[int, str]
"""A step, and a payload."""
Stored = dict[str, Row]
"""What a stream holds, by message id."""
table = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["null", "1", "2"])), max_size=30)


def attempt(stored: Stored, rows: list[Row], *, partition: int = 0, at_a_time: int = 4) -> None:
    """Write rows as one attempt at a task does, to a stream that discards what has an id that it knows."""
    ids = ContentIds("query/1", partition=partition)
    made = Rows("mars", STEPS, most_bytes=1000)
    for first in range(0, len(rows), at_a_time):
        chunk = made.chunk(batch_of(rows[first : first + at_a_time]), ids)
        assert len(set(chunk.message_ids)) == len(chunk)
        for message_id, subject, data in zip(chunk.message_ids, chunk.subjects, chunk.data, strict=True):
            stored.setdefault(message_id, (int(subject.removeprefix("mars.")), data.decode()))


def batch_of(rows: list[Row]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"step": [step for step, _ in rows], "payload": [payload for _, payload in rows]})


@given(first=table, partitions=st.integers(1, 3), data=st.data())
def test_nothing_wanted_is_missing_whatever_changes_between_the_attempts(
    first: list[Row], partitions: int, data: Any
) -> None:
    stored: Stored = {}
    for partition in range(partitions):
        rows = first[partition::partitions]
        attempt(stored, rows[: data.draw(st.integers(0, len(rows)), label="fails after")], partition=partition)
    kept = data.draw(st.lists(st.sampled_from(first), max_size=30) if first else st.just([]), label="kept or moved")
    wanted = data.draw(st.permutations(kept + data.draw(table, label="new")), label="wanted")
    partitions = data.draw(st.integers(1, 3), label="partitions")

    for partition in range(partitions):
        attempt(stored, wanted[partition::partitions], partition=partition, at_a_time=data.draw(st.integers(1, 9)))

    assert Counter(wanted) <= Counter(stored.values())


@given(rows=table, order=st.randoms(use_true_random=False))
def test_the_same_rows_in_another_order_store_nothing_twice(rows: list[Row], order: Any) -> None:
    stored: Stored = {}
    attempt(stored, rows)
    order.shuffle(again := list(rows))

    attempt(stored, again)

    assert Counter(stored.values()) == Counter(rows)


def test_more_rows_than_are_remembered_are_all_stored_and_once_in_the_same_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aviso_workers.spark.rows.MAX_REMEMBERED", 3)
    rows = [(step, "null") for step in (1, 2, 3, 4, 4, 1, 5)]
    stored: Stored = {}

    for _ in range(2):
        attempt(stored, rows)

    assert Counter(stored.values()) == Counter(rows)


def test_ids_are_those_of_the_query_the_batch_the_partition_and_the_headers() -> None:
    def id_of(run: str, partition: int, headers: dict[str, str] | None) -> str:
        ids = ContentIds(run, partition=partition)
        messages = OutgoingChunk(subjects=["mars.1"], data=[b"1"], headers=[headers], message_ids=())
        return ids.of(batch_of([(1, "1")]), messages)[0]

    found = [
        id_of(run, partition, headers)
        for run in ("query/1", "query/2")
        for partition in (0, 1)
        for headers in (None, {"spatial_bbox": "1,2,3,4"}, {"spatial_bbox": "1,2,3,5"})
    ]

    assert len(set(found)) == len(found)


@pytest.mark.parametrize("value", [None, ""])
def test_a_row_without_an_id_in_the_column_is_refused(value: str | None) -> None:
    batch = pa.RecordBatch.from_pydict({"id": ["a", value]})

    messages = OutgoingChunk(subjects=["mars.1"] * 2, data=[b"1"] * 2, headers=[None] * 2, message_ids=())

    with pytest.raises(InvalidNotificationError, match="msgIdColumn 'id' is null or empty"):
        ColumnIds("id").of(batch, messages)
