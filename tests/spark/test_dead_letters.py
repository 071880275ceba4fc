"""What a write tells of its rows, and where those are that are not notifications."""

from __future__ import annotations

import logging
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from aviso_workers.backends import OutgoingChunk
from aviso_workers.errors import InvalidNotificationError, PipelineError
from aviso_workers.spark import writers
from aviso_workers.spark.options import WriteOptions
from aviso_workers.spark.writers import BatchWriter, RefusedRows, WrittenRows


def batch_of(*steps: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"step": list(steps)})


def messages_of(batch: pa.RecordBatch) -> OutgoingChunk:
    steps = [str(step) for step in batch.column("step").to_pylist()]
    if any(step.startswith("-") for step in steps):
        raise InvalidNotificationError("a step is below 0")
    return OutgoingChunk(subjects=steps, data=[b""] * len(steps), headers=[None] * len(steps), message_ids=steps)


@pytest.mark.parametrize("steps", [(1, 2, 3, -4, 5, 6, -7), (-1,), (1, 2), (-1, -2, -3), (-1, 2), ()])
def test_each_row_that_is_wrong_stands_alone_and_the_others_keep_their_order(steps: tuple[int, ...]) -> None:
    good: list[int] = []
    wrong: list[int] = []
    for place, made in writers.divided(batch_of(*steps), messages_of):
        if isinstance(made, OutgoingChunk):
            assert list(map(int, made.subjects)) == list(steps[place : place + len(made)])
            good += map(int, made.subjects)
        else:
            wrong.append(steps[place])

    assert good == [step for step in steps if step >= 0]
    assert wrong == [step for step in steps if step < 0]


def test_the_same_rows_are_the_same_file_and_others_another_one(tmp_path: Path) -> None:
    def save(*steps: int) -> Path:
        refused = RefusedRows(str(tmp_path / "bad rows"), task="query/1/0")
        for step in steps:
            refused.add(batch_of(step), f"{step} is below 0")
        return Path(refused.save())

    first, again, other = save(-1, -2), save(-1, -2), save(-1)

    assert first == again != other
    assert parquet.read_table(first).to_pylist() == [
        {"step": -1, "reason": "-1 is below 0"},
        {"step": -2, "reason": "-2 is below 0"},
    ]
    assert {path.name for path in first.parent.iterdir()} == {first.name, other.name}
    assert RefusedRows(str(tmp_path / "none"), task="").save() == ""
    assert not (tmp_path / "none").exists()


def test_a_file_that_a_power_cut_has_left_empty_is_written_again(tmp_path: Path) -> None:
    def save() -> Path:
        refused = RefusedRows(str(tmp_path), task="query/1/0")
        refused.add(batch_of(-1), "-1 is below 0")
        return Path(refused.save())

    save().write_bytes(b"")

    assert parquet.read_table(save()).to_pylist() == [{"step": -1, "reason": "-1 is below 0"}]


def test_a_row_is_cut_in_an_error() -> None:
    assert writers.excerpt(batch_of(1)) == "{'step': 1}"
    long = pa.RecordBatch.from_pydict({"payload": ["x" * 1000]})
    assert len(writers.excerpt(long)) == writers.MAX_SHOWN + len("...")


class TestTheEndOfAWrite:
    def test_has_a_line_with_what_became_of_the_rows(self, caplog: pytest.LogCaptureFixture) -> None:
        writer = BatchWriter(WriteOptions(event="mars", id_column="id", dead_letters="/bad"))

        with caplog.at_level(logging.INFO):
            writer.commit(
                [WrittenRows(rows=10, duplicates=3, refused=0), WrittenRows(rows=5, duplicates=1, replaced=1), None]
            )

        assert caplog.messages == [
            "mars: 15 rows, 11 stored, 4 discarded because the stream had them already (of which 1 were not compared: "
            "newer notifications have replaced them), 0 refused, in /bad"
        ]
        assert caplog.records[0].levelno == logging.WARNING

    def test_fails_where_the_driver_does_not_see_the_dead_letters(self, tmp_path: Path) -> None:
        writer = BatchWriter(WriteOptions(event="mars", dead_letters=str(tmp_path)))
        there, elsewhere = tmp_path / "a.parquet", tmp_path / "b.parquet"
        there.touch()

        writer.commit([WrittenRows(rows=1, refused=1, dead_letters=str(there))])
        with pytest.raises(PipelineError, match=f"{elsewhere} was written by an executor, and the driver finds no"):
            writer.commit([WrittenRows(rows=1, refused=1, dead_letters=str(elsewhere))])
