"""Archives, backfills and reports with a real Spark and a real server, ended at bad moments and run again."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from aviso_workers import cli, config
from aviso_workers.aviso.codec import MARKER_HEADER
from aviso_workers.backends import open_backend
from aviso_workers.errors import InvalidIdentifierError, PipelineError
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.server import NatsServer
from aviso_workers.spark import archives, backfill, completeness, sessions
from aviso_workers.spark.archives import ArchivedFile
from aviso_workers.spark.backfill import Backfilled
from aviso_workers.spark.completeness import Reported
from aviso_workers.spark.files import Files
from tests.spark.place import Place, run_to_its_end

CYCLE = {"event": {"type": "StringHandler", "required": True}, "cycle": {"type": "StringHandler", "required": True}}


DEEDS = {
    "what was written": r"/_staging/.*\.parquet",
    "where it is now": r"/date=2026-11-20",
    "the archive's directory": "",
    "the list": r"/_staging/\w+/list",
    "the log": "/_spark_metadata",
}
"""What is synced when a batch is archived, by the path in the archive."""


def read_by_pyarrow(path: str, **stated: Any) -> Any:
    """The files as a table: pyarrow knows no list of them."""
    from pyarrow.dataset import dataset  # and pandas: a second, and all processes of the tests import this module

    return dataset(path, format="parquet", partitioning="hive").to_table(**stated)


class Pipelines(Place):
    """Also with `newest`, which keeps one notification of a topic, and with the event types for cycles."""

    def __init__(self, spark: SparkSession, server: NatsServer, directory: Path) -> None:
        super().__init__(spark, server, directory)
        self.spark = spark
        document = json.loads(self.config.read_text())
        known = document["notification_schema"]
        topic = {**known["mars"]["topic"], "base": "newest"}
        known["newest"] = {"topic": topic, "identifier": known["mars"]["identifier"]}
        for name in ("cycle_complete", "cycle_late"):
            known[name] = {"topic": {"base": name, "key_order": list(CYCLE)}, "identifier": CYCLE}
        self.config.write_text(json.dumps(document))

    def steps(self, event: str = "mars") -> list[int]:
        return [int(notification.identifier["step"]) for notification in self.stored(event)]


@pytest.fixture(scope="module")
def spark(spark: SparkSession) -> SparkSession:
    """Far from UTC, as sessions are unless they say otherwise."""
    spark.conf.set("spark.sql.session.timeZone", "Pacific/Auckland")
    return spark


@pytest.fixture
def place(spark: SparkSession, nats_server: NatsServer, tmp_path: Path) -> Pipelines:
    return Pipelines(spark, nats_server, tmp_path)


@pytest.fixture
def crash_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[type, str], None]:
    """`crash_after(owner, deed)`: the next time that it is done, everything ends there."""

    def crash_after(owner: type, deed: str) -> None:
        original = getattr(owner, deed)

        def crash(*arguments: Any, **options: Any) -> None:
            monkeypatch.setattr(owner, deed, original)
            original(*arguments, **options)
            raise RuntimeError(f"ended after {deed}")

        monkeypatch.setattr(owner, deed, crash)

    return crash_after


CONTINUOUS = """
import sys
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from aviso_workers.spark import archives, register
from aviso_workers.spark.backfill import Backfilled
from aviso_workers.spark.completeness import Reported
spark = SparkSession.builder.master("local[2]").getOrCreate()
register(spark)
options = {"config": sys.argv[1], "event": "mars", "startingOffsets": "earliest", "maxMessagesPerTrigger": "40"}
notifications = spark.readStream.format("aviso").options(**options).load()
query = archives.archive(notifications, sys.argv[2], every_seconds=0.1)
while len(query.recentProgress) < 3:
    query.awaitTermination(0.1)
print(query.lastProgress["batchId"], flush=True)
query.awaitTermination()
"""


class TestArchive:
    def archive(self, place: Pipelines, **options: Any) -> None:
        """Archive what is there."""
        notifications = place.read_stream(startingOffsets="earliest", **options)
        run_to_its_end(lambda: archives.archive(notifications, self.path(place)))

    def path(self, place: Pipelines) -> str:
        return f"{place.directory}/an archive"

    def archived(self, place: Pipelines) -> list[int]:
        frame = place.spark.read.parquet(self.path(place))
        return sorted(row["step"] for row in frame.select("identifier.step").collect())

    def listed(self, place: Pipelines) -> list[int]:
        table = read_by_pyarrow(self.path(place), columns=["identifier"])
        return sorted(identifier["step"] for identifier in table.column("identifier").to_pylist())

    def files(self, place: Pipelines) -> list[str]:
        """By the numbers of the batch and of the file in it."""
        return sorted(path.name.rpartition("-")[0] for path in Path(self.path(place)).glob("date=*/*.parquet"))

    def batch(self, place: Pipelines, *sequences: int) -> DataFrame:
        stored = [(sequence, datetime(2026, 11, 20, tzinfo=UTC), date(2026, 11, 20)) for sequence in sequences]
        return place.spark.createDataFrame(stored, "sequence BIGINT, time TIMESTAMP, date DATE")

    def two_days(self, place: Pipelines) -> None:
        """An archive of two files, of one day each."""
        rows = self.batch(place, 1, 2).withColumn("date", F.expr("date_add(date, CAST(sequence AS INT))"))
        archives._Archive(Files(place.spark, self.path(place))).add(rows, 0)
        plan = Path(self.path(place), "_checkpoint", "offsets", "0")
        plan.parent.mkdir(parents=True)
        plan.touch()

    def newest_list(self, place: Pipelines) -> Path:
        """Without the checksum that Hadoop keeps beside a file on a disk, and not in other places."""
        newest = max(Path(self.path(place), "_spark_metadata").glob("*.compact"))
        newest.with_name(f".{newest.name}.crc").unlink(missing_ok=True)
        return newest

    @pytest.mark.slow
    def test_notifications_are_kept_by_the_day_in_utc(self, place: Pipelines) -> None:
        place.publish(*range(5), payload={"location": "/a"})

        self.archive(place)

        kept = place.spark.read.parquet(self.path(place)).orderBy("sequence").drop("date")
        assert kept.collect() == place.read().orderBy("sequence").collect()
        (day,) = Path(self.path(place)).glob("date=*")
        assert day.name == f"date={place.stored()[0].time:%Y-%m-%d}"

    @pytest.mark.slow
    def test_a_batch_over_midnight_is_kept_under_two_days(self, place: Pipelines) -> None:
        midnight = datetime(2026, 11, 21, tzinfo=UTC)
        rows = [(1, midnight - timedelta(microseconds=1)), (2, midnight), (3, midnight + timedelta(hours=23))]
        stored = place.spark.createDataFrame(rows, "sequence BIGINT, time TIMESTAMP")
        known = archives._Archive(Files(place.spark, self.path(place)))

        known.add(stored.withColumn("date", F.expr(archives.DAY)), 0)

        kept = archives.read(place.spark, self.path(place)).orderBy("sequence").select("sequence", "date").collect()
        assert [(row.sequence, row.date.isoformat()) for row in kept] == [
            (1, "2026-11-20"),
            (2, "2026-11-21"),
            (3, "2026-11-21"),
        ]

    @pytest.mark.slow
    def test_a_run_adds_what_came_since_the_one_before(self, place: Pipelines) -> None:
        place.publish(1, 2)
        self.archive(place)
        place.publish(3)

        self.archive(place)
        self.archive(place)

        assert self.archived(place) == [1, 2, 3]

    @pytest.mark.parametrize(("owner", "deed"), [(archives._Archive, "_take_in"), (Files, "write_new")])
    @pytest.mark.slow
    def test_a_crash_before_and_after_a_batch_is_told_of_loses_and_doubles_nothing(
        self, place: Pipelines, crash_after: Callable[..., None], owner: type, deed: str
    ) -> None:
        place.publish(*range(9))
        crash_after(owner, deed)

        with pytest.raises(PySparkException, match=f"ended after {deed}"):
            self.archive(place)
        self.archive(place)

        assert self.archived(place) == list(range(9))

    @pytest.mark.slow
    def test_a_driver_that_is_killed_loses_and_doubles_nothing(
        self, place: Pipelines, start_driver: Callable[..., Any]
    ) -> None:
        place.publish(*range(1000))
        driver = start_driver(CONTINUOUS, place.config, self.path(place))
        batch = driver.stdout.readline()
        driver.kill()
        assert batch, driver.stderr.read()

        self.archive(place)

        assert self.archived(place) == list(range(1000))

    @pytest.mark.slow
    def test_small_files_are_merged_and_readers_see_every_row_once(
        self, place: Pipelines, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(archives, "MANY", 3)
        for step in range(3):
            place.publish(step)
            self.archive(place)
        reader = place.spark.read.parquet(self.path(place))

        place.publish(3)
        self.archive(place)
        assert self.archived(place) == [0, 1, 2, 3]
        assert self.listed(place) == [0, 1, 2, 3], "also by readers that look at the directories themselves"
        assert self.files(place) == ["3-0", "3-1"]
        with pytest.raises(Py4JJavaError, match="FileNotFoundException"):
            reader.count()

    @pytest.mark.slow
    @pytest.mark.parametrize(("owner", "deed"), [(archives._Archive, "_take_in"), (Files, "write_new")])
    def test_what_a_run_left_that_was_killed_is_removed_by_the_next(
        self,
        place: Pipelines,
        monkeypatch: pytest.MonkeyPatch,
        crash_after: Callable[..., None],
        owner: type,
        deed: str,
    ) -> None:
        monkeypatch.setattr(archives, "MANY", 3)
        for step in range(3):
            place.publish(step)
            self.archive(place)
        place.publish(3)
        crash_after(owner, deed)

        with pytest.raises(PySparkException, match=f"ended after {deed}"):
            self.archive(place)
        assert self.archived(place) in ([0, 1, 2], [0, 1, 2, 3])
        foreign = Path(self.path(place), "date=2026-11-20", "mine.parquet")
        foreign.parent.mkdir(exist_ok=True)
        foreign.touch()
        self.archive(place)

        assert foreign.exists()
        foreign.unlink()
        assert self.archived(place) == self.listed(place) == [0, 1, 2, 3]

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["move", "write_new"])
    def test_a_run_that_begins_beside_another_loses_nothing_of_it(
        self, place: Pipelines, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        """What a run has not listed yet looks like what a run left that was killed."""
        place.publish(0)
        self.archive(place)
        place.publish(1)
        deed = getattr(Files, name)

        def begin_another(files: Files, *arguments: str, **options: str) -> None:
            archives._Archive(files).prepare()
            deed(files, *arguments, **options)
            archives._Archive(files).prepare()

        monkeypatch.setattr(Files, name, begin_another)
        self.archive(place)
        monkeypatch.setattr(Files, name, deed)
        self.archive(place)

        assert self.archived(place) == self.listed(place) == [0, 1]

    @pytest.mark.slow
    def test_a_run_that_slept_while_another_archived_its_batch_changes_nothing(
        self, place: Pipelines, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(archives, "MANY", 2)
        slow, quick = (archives._Archive(Files(place.spark, self.path(place))) for _ in range(2))
        slow.add(self.batch(place, 0), 0)
        slow.add(self.batch(place, 1), 1)
        take_in = archives._Archive._take_in

        def sleep_then(run: archives._Archive, number: int) -> list[ArchivedFile]:
            taken = take_in(run, number)
            if run is slow:
                quick.add(self.batch(place, 2), 2)
                quick.add(self.batch(place, 3), 3)
            return taken

        monkeypatch.setattr(archives._Archive, "_take_in", sleep_then)
        slow.add(self.batch(place, 2), 2)

        kept = archives.read(place.spark, self.path(place))
        assert sorted(row["sequence"] for row in kept.collect()) == [0, 1, 2, 3]
        assert read_by_pyarrow(self.path(place)).num_rows == 4

    @pytest.mark.slow
    def test_two_runs_that_add_one_batch_keep_all_of_it(
        self, place: Pipelines, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        batch = self.batch(place, *range(9))
        first, second = (archives._Archive(Files(place.spark, self.path(place))) for _ in range(2))
        take_in = archives._Archive._take_in

        def be_overtaken(run: archives._Archive, number: int) -> list[ArchivedFile]:
            if run is first:
                second.add(batch, number)
            return take_in(run, number)

        monkeypatch.setattr(archives._Archive, "_take_in", be_overtaken)
        first.add(batch, 0)

        assert archives.read(place.spark, self.path(place)).count() == 9

    @pytest.mark.slow
    def test_days_with_files_that_are_newer_than_an_older_copy_lose_these(self, place: Pipelines) -> None:
        """As where list and checkpoint were restored together, and what is in the days was left as it was."""
        directory = Path(self.path(place))
        run, again = (archives._Archive(Files(place.spark, self.path(place))) for _ in range(2))
        for number in range(3):
            run.add(self.batch(place, number), number)
        for number in (1, 2):
            (directory / "_spark_metadata" / f"{number}.compact").unlink()
        (directory / "_checkpoint" / "offsets").mkdir(parents=True)
        (directory / "_checkpoint" / "offsets" / "0").touch()

        again.prepare()
        again.add(self.batch(place, 1), 1)

        assert read_by_pyarrow(str(directory)).num_rows == 2
        assert self.files(place) == ["0-0", "1-0"]

    @pytest.mark.slow
    def test_an_archive_that_was_moved_is_read_and_gone_on_with_where_it_is(self, place: Pipelines) -> None:
        place.publish(0)
        self.archive(place)
        first = Path(self.path(place))
        moved = first.rename(f"{first} elsewhere")
        assert archives.read(place.spark, str(moved)).select("identifier.step").collect() == [(0,)]

        place.publish(1)
        archives.archive(place.read_stream(startingOffsets="earliest"), str(moved)).awaitTermination()
        assert place.spark.read.parquet(str(moved)).count() == 2, "every reader of Spark finds it now"
        assert not first.exists()

    @pytest.mark.slow
    def test_an_archive_without_its_lists_is_not_gone_on_with(self, place: Pipelines) -> None:
        place.publish(0)
        self.archive(place)
        shutil.rmtree(Path(self.path(place), "_spark_metadata"))

        with pytest.raises(PipelineError, match="whose _spark_metadata is gone"):
            self.archive(place)
        assert self.listed(place) == [0]

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("restored", "said"),
        [
            ("_checkpoint", "whose _checkpoint is older than its _spark_metadata"),
            ("_spark_metadata", "whose _spark_metadata is older than its _checkpoint"),
        ],
    )
    def test_an_archive_of_which_a_part_is_from_an_older_copy_is_not_gone_on_with(
        self, place: Pipelines, restored: str, said: str
    ) -> None:
        part, copy = Path(self.path(place), restored), place.directory / "older copy"
        place.publish(0)
        self.archive(place)
        shutil.copytree(part, copy)
        place.publish(1)
        self.archive(place)
        newer = part.rename(place.directory / "newer")
        copy.rename(part)
        place.publish(2)

        with pytest.raises(PipelineError, match=said):
            self.archive(place)
        assert self.listed(place) == [0, 1], "no file was removed"
        shutil.rmtree(part)
        newer.rename(part)
        self.archive(place)
        assert self.archived(place) == self.listed(place) == [0, 1, 2]

    @pytest.mark.parametrize("lines", [2, 1, 0])
    @pytest.mark.parametrize("ending", ["", "\n"])
    def test_a_list_that_was_cut_at_the_end_of_a_line_is_refused_and_no_file_is_removed(
        self, place: Pipelines, lines: int, ending: str
    ) -> None:
        self.two_days(place)
        cut = self.newest_list(place)
        cut.write_text("\n".join(cut.read_text().splitlines()[:lines]) + ending)
        run = archives._Archive(Files(place.spark, self.path(place)))

        with pytest.raises(PipelineError, match=r"_spark_metadata/0\.compact .*Put a good copy of it back"):
            run.prepare()
        with pytest.raises(PipelineError, match=r"_spark_metadata/0\.compact"):
            archives.read(place.spark, self.path(place))
        assert self.files(place) == ["0-0", "0-1"]

    def test_a_list_that_is_no_text_is_refused_by_its_name(self, place: Pipelines) -> None:
        self.two_days(place)
        self.newest_list(place).write_bytes(b"v1\n\xff\xfe{")

        with pytest.raises(PipelineError, match=r"/_spark_metadata/0\.compact"):
            archives.read(place.spark, self.path(place))

    def test_a_list_without_its_digest_is_refused_and_no_file_is_removed(self, place: Pipelines) -> None:
        self.two_days(place)
        newest = self.newest_list(place)
        newest.write_text(re.sub(r',"digest":"\w+"', "", newest.read_text()))
        with pytest.raises(PipelineError, match=r"_spark_metadata/0\.compact .*Put a good copy of it back"):
            archives._Archive(Files(place.spark, self.path(place))).prepare()
        assert self.files(place) == ["0-0", "0-1"]

    def test_what_a_list_names_is_on_the_disk_before_the_list_is(
        self, place: Pipelines, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        synced = []
        sync = os.fsync

        def note(handle: int) -> None:
            synced.append(os.readlink(f"/proc/self/fd/{handle}").removeprefix(self.path(place)))
            sync(handle)

        monkeypatch.setattr(os, "fsync", note)
        archives._Archive(Files(place.spark, self.path(place))).add(self.batch(place, 1), 0)

        deeds = [deed for path in synced for deed in DEEDS if re.fullmatch(DEEDS[deed], path)]
        assert list(dict.fromkeys(deeds)) == list(DEEDS)

    @pytest.mark.slow
    def test_a_run_with_another_filter_than_the_archive_has_is_refused(self, place: Pipelines) -> None:
        place.publish(1, 2)

        def archive(**filters: str) -> None:
            options = place.options(startingOffsets="earliest", **{f"where.{name}": filters[name] for name in filters})
            stream = place.spark.readStream.format("aviso").options(**options).load()
            selected = archives.selection(options)
            run_to_its_end(lambda: archives.archive(stream, self.path(place), selection=selected))

        self.archive(place, **{"where.step": "1"})  # as an older version, which wrote nothing of it down
        archive(step="1")
        archive(STEP="[1]")
        with pytest.raises(PipelineError, match=r"of mars step=1, and this run is of mars: .*another directory"):
            archive()
        with pytest.raises(PipelineError, match=r"of mars step=1, and this run is of mars class=od step=1:"):
            archive(step="1", **{"class": "od"})
        with pytest.raises(PipelineError, match=r"of mars step=1, and this run does not say of what:"):
            self.archive(place)
        assert self.archived(place) == [1]

    @pytest.mark.slow
    def test_fields_and_headers_that_come_later_are_read_also_after_files_were_merged(
        self, place: Pipelines, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(archives, "MANY", 2)
        common = "event_type STRING, sequence BIGINT, time TIMESTAMP, payload STRING, date DATE"
        fields = "class: STRING, date: DATE, time: STRING"
        old = f"{common}, identifier STRUCT<{fields}>"
        new = f"{common}, identifier STRUCT<{fields}, step: BIGINT>, headers MAP<STRING, STRING>"
        day, of_day = date(2026, 11, 20), ("od", date(2026, 11, 20), "0600")
        written = [(old, (of_day,)), (new, ((*of_day, 5), {"place": "here"})), (old, (of_day,))]
        known = archives._Archive(Files(place.spark, self.path(place)))

        for number, (columns, values) in enumerate(written):
            row = ("mars", number, datetime(2026, 11, 20, tzinfo=UTC), "null", day, *values)
            known.add(place.spark.createDataFrame([row], columns), number)

        kept = archives.read(place.spark, self.path(place)).orderBy("sequence")
        found = kept.select("sequence", "identifier.step", "headers.place").collect()
        assert [tuple(row) for row in found] == [(0, None, None), (1, 5, "here"), (2, None, None)]
        done = backfill.backfill(kept, "copy", dead_letters=f"{place.directory}/bad", config=str(place.config))
        assert done == Backfilled(published=1, present=0, refused=2), "two have no step"
        assert place.steps("copy") == [5]

    @pytest.mark.slow
    def test_a_damaged_file_is_not_merged_and_removed_where_spark_is_told_to_pass_over_it(
        self, place: Pipelines, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(archives, "MANY", 2)
        for step in range(2):
            place.publish(step)
            self.archive(place)
        damaged, _ = sorted(Path(self.path(place)).glob("date=*/*.parquet"))
        damaged.write_bytes(damaged.read_bytes()[:100])
        damaged.with_name(f".{damaged.name}.crc").unlink()
        told = (
            rf"^cannot read file:\S* \S*/{damaged.name}: it is damaged or missing\. Put a good copy of it back[^\n]*$"
        )
        place.publish(2)
        place.spark.conf.set("spark.sql.files.ignoreCorruptFiles", "true")
        try:
            for deed in (self.archive, lambda place: archives.read(place.spark, self.path(place)).collect()):
                with pytest.raises(PipelineError, match=told), sessions.translated():
                    deed(place)
        finally:
            place.spark.conf.unset("spark.sql.files.ignoreCorruptFiles")
        assert damaged.exists()

    @pytest.mark.slow
    def test_a_field_that_has_changed_its_type_is_refused(self, place: Pipelines) -> None:
        place.publish(0)
        self.archive(place)
        document = json.loads(place.config.read_text())
        document["notification_schema"]["mars"]["identifier"]["step"] = {"type": "StringHandler", "required": True}
        place.config.write_text(json.dumps(document))
        place.publish(1)

        with pytest.raises(PipelineError, match=r"has identifier\.step as long, which is string now"):
            self.archive(place)
        assert self.archived(place) == [0]

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("0.compact", "is an archive whose _checkpoint is gone"),
            ("0", "is written by Spark's own file sink"),
        ],
    )
    def test_a_directory_that_is_in_no_state_to_go_on_is_refused(self, place: Pipelines, name: str, said: str) -> None:
        log = Path(self.path(place), "_spark_metadata")
        log.mkdir(parents=True)
        (log / name).touch()

        with pytest.raises(PipelineError, match=said):
            archives.archive(place.read_stream(startingOffsets="earliest"), self.path(place))


class TestFiles:
    @pytest.fixture
    def files(self, place: Pipelines) -> Files:
        return Files(place.spark, f"{place.directory}/some files")

    def test_a_text_is_replaced_and_read_also_where_hadoop_has_a_checksum_of_the_old_one(self, files: Files) -> None:
        files.write("page.html", "old")
        here = files._here("page.html")
        here.with_name(".page.html.crc").write_bytes(b"crc\0\0\0\2\0\0\0\0\0")

        files.write("page.html", "new")

        assert files.read("page.html") == b"new"
        assert [path.name for path in here.parent.iterdir()] == ["page.html"]

    @pytest.mark.parametrize("has_links", [True, False])
    def test_a_new_text_is_written_once(self, files: Files, monkeypatch: pytest.MonkeyPatch, has_links: bool) -> None:
        def refuse(*paths: Path) -> None:
            raise OSError("links are not supported")

        if not has_links:
            monkeypatch.setattr(os, "link", refuse)
        for text in (b"first", b"second"):
            files.write_new("lists/0", text, aside="aside/list")

        assert files.read("lists/0") == b"first"

    def test_a_file_is_not_moved_over_another(self, files: Files) -> None:
        files.write("one", "1")
        files.write("another", "2")

        with pytest.raises(PipelineError, match="cannot move one to another"):
            files.move("one", "another")
        assert files.read("another") == b"2"

    def test_a_file_that_cannot_be_read_is_named(self, files: Files) -> None:
        with pytest.raises(PipelineError, match=r"some files/absent: java.io.FileNotFoundException"):
            files.read("absent")


class TestBackfill:
    @pytest.mark.slow
    def test_kept_notifications_are_published_once_however_often_it_is_run(self, place: Pipelines) -> None:
        place.publish(*range(4), payload={"location": "/a"})

        first = backfill.backfill(place.read(), "copy", config=str(place.config))
        place.publish(4)
        second = backfill.backfill(place.read(), "copy", config=str(place.config))

        assert first == Backfilled(published=4, present=0, refused=0)
        assert second == Backfilled(published=1, present=4, refused=0)
        assert sorted(place.steps("copy")) == [0, 1, 2, 3, 4]
        assert place.stored("copy")[0].payload == {"location": "/a"}

    def test_a_field_that_the_event_type_does_not_have_is_left_out_where_it_is_null(self, place: Pipelines) -> None:
        place.publish(1)
        rows = place.read().withColumn(
            "identifier", F.col("identifier").withField("domain", F.lit(None).cast("string"))
        )

        done = backfill.backfill(rows, "copy", config=str(place.config))

        assert done == Backfilled(published=1, present=0, refused=0)

    @pytest.mark.slow
    def test_fields_that_older_rows_lack_are_filled(self, place: Pipelines) -> None:
        place.publish(1, 2)
        newer = F.when(F.col("sequence") == 2, F.col("identifier.step"))
        rows = place.read().withColumn("identifier", F.col("identifier").withField("step", newer))
        oldest = rows.where("sequence = 1").withColumn("identifier", F.col("identifier").dropFields("step"))

        with pytest.raises(
            PipelineError, match=r"1 rows are not .*'step' is missing.*--fill FIELD=VALUE completes rows"
        ):
            backfill.backfill(rows, "copy", config=str(place.config))
        with pytest.raises(InvalidIdentifierError, match="'stepp' is unknown"):
            backfill.backfill(rows, "copy", fill={"stepp": "0"}, config=str(place.config))
        done = backfill.backfill(rows, "copy", fill={"step": "9"}, config=str(place.config))
        again = backfill.backfill(oldest, "copy", fill={"step": "9"}, config=str(place.config))

        assert (done, again) == (
            Backfilled(published=2, present=0, refused=0),
            Backfilled(published=0, present=1, refused=0),
        )
        assert sorted(place.steps("copy")) == [2, 9]

    def test_the_stream_tells_what_is_there_when_the_server_has_forgotten_the_ids(self, place: Pipelines) -> None:
        place.publish(0, 1)
        rows = place.read().withColumn("id", backfill.identity())
        backfill.publish_once(rows, "copy", config=str(place.config))

        assert backfill.without_stored(rows, "copy", config=str(place.config)).count() == 0

    @pytest.mark.slow
    def test_a_run_that_is_cut_short_is_completed_by_the_next(self, place: Pipelines) -> None:
        place.publish(*range(6))
        half = place.read().where("sequence % 2 = 0").withColumn("id", backfill.identity())
        backfill.publish_once(half, "copy", config=str(place.config))

        done = backfill.backfill(place.read(), "copy", config=str(place.config))

        assert (done.published, done.present) == (3, 3)
        assert sorted(place.steps("copy")) == list(range(6))

    @pytest.mark.slow
    def test_what_a_stream_lost_is_restored_from_its_archive(self, place: Pipelines) -> None:
        place.publish(*range(4))
        archives.archive(place.read_stream(startingOffsets="earliest"), f"{place.directory}/archive").awaitTermination()
        place.do("delete_message", "MARS", 2)
        kept = place.spark.read.parquet(f"{place.directory}/archive")
        wanted = backfill.matching(kept, "mars", {"step": {"lt": 3}}, config=str(place.config))

        done = backfill.backfill(wanted, "mars", config=str(place.config))
        again = backfill.backfill(kept, "mars", config=str(place.config))

        assert (done.published, done.present) == (1, 2)
        assert (again.published, again.present) == (0, 4)
        assert place.steps() == [0, 2, 3, 1]

    @pytest.mark.slow
    def test_the_newest_of_a_topic_is_not_replaced_by_an_older_one(self, place: Pipelines) -> None:
        place.publish(1, 2, payload="old")
        place.publish(2, payload="newer")
        place.publish(1, event="newest", payload="newest")

        done = backfill.backfill(place.read(), "newest", config=str(place.config))

        assert (done.published, done.present) == (1, 2)
        assert {one.identifier["step"]: one.payload for one in place.stored("newest")} == {"1": "newest", "2": "newer"}

    @pytest.mark.slow
    def test_what_is_published_while_it_runs_is_not_replaced_by_an_older_notification(
        self, place: Pipelines, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of three topics that the stream did not have when it was looked at; one has a marker of a message that is
        gone, which the server counts as the topic's last message."""
        place.publish(1, 2, 3, payload="old")
        place.publish(9, event="newest")
        place.publish_raw("newest.od.20261120.0600.3", stream="NEWEST", headers={MARKER_HEADER: "MaxAge"})
        publish = backfill.publish_once

        def be_overtaken(rows: DataFrame, event: str, **options: Any) -> int:
            looked = rows.persist()
            assert looked.count() == 3
            place.publish(1, event="newest", payload="newer")
            return publish(looked, event, **options)

        monkeypatch.setattr(backfill, "publish_once", be_overtaken)
        done = backfill.backfill(place.read(), "newest", config=str(place.config))

        held = {one.identifier["step"]: one.payload for one in place.stored("newest")}
        assert held == {"9": None, "1": "newer", "2": "old", "3": "old"}
        assert done == Backfilled(published=2, present=1, refused=0)

    @pytest.mark.slow
    def test_what_is_no_notification_is_kept_with_the_reason_once(self, place: Pipelines) -> None:
        place.publish(1, 2, 3)
        step = F.when(F.col("sequence") == 2, F.lit(-1)).otherwise(F.col("identifier.step"))
        rows = place.read().withColumn("identifier", F.col("identifier").withField("step", step))
        rows = rows.withColumn("payload", F.when(F.col("sequence") == 3, F.lit("{")))
        table = f"{place.directory}/dead"

        with pytest.raises(PipelineError, match=r"2 rows are not notifications of copy, and nothing was published"):
            backfill.backfill(rows, "copy", config=str(place.config))
        done = [backfill.backfill(rows, "copy", dead_letters=table, config=str(place.config)) for _ in range(2)]

        assert [(each.published, each.present, each.refused) for each in done] == [(1, 0, 2), (0, 1, 2)]
        out_of_range, not_json = place.spark.read.parquet(table).orderBy("sequence").collect()
        assert out_of_range["reason"].startswith("copy: identifier field 'step' must be within")
        assert out_of_range["topic"] == "mars.od.20261120.0600.2"
        assert not_json["reason"].startswith("the payload is not JSON")

    @pytest.mark.slow
    def test_two_at_a_time_lose_none_of_each_others_dead_letters(
        self, place: Pipelines, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Spark writes both to one place aside, and what ends first removes that."""
        table = f"{place.directory}/bad"
        wrong = [F.col("step").cast("string").alias("id"), F.lit("wrong").alias("reason")]
        first, second = (place.rows(2, first=number).select(*wrong) for number in (0, 2))
        moved = Files.move

        def be_overtaken(files: Files, source: str, target: str) -> None:
            monkeypatch.setattr(Files, "move", moved)
            backfill._add_dead_letters(second, table)
            moved(files, source, target)

        monkeypatch.setattr(Files, "move", be_overtaken)
        backfill._add_dead_letters(first, table)

        assert sorted(row["id"] for row in place.spark.read.parquet(table).collect()) == ["0", "1", "2", "3"]
        assert not list(Path(table).glob("_*"))

    @pytest.mark.slow
    def test_it_is_done_again_after_it_was_killed_while_it_wrote_dead_letters(self, place: Pipelines) -> None:
        place.publish(1, 2)
        step = F.when(F.col("sequence") == 2, F.lit(-1)).otherwise(F.col("identifier.step"))
        rows = place.read().withColumn("identifier", F.col("identifier").withField("step", step))
        table = place.directory / "dead"
        begun = table / "_temporary" / "0" / "_temporary" / "attempt_0" / "part-00000.snappy.parquet"
        begun.parent.mkdir(parents=True)
        begun.write_bytes(b"PAR1")

        done = backfill.backfill(rows, "copy", dead_letters=str(table), config=str(place.config))

        assert done == Backfilled(published=1, present=0, refused=1)
        assert place.spark.read.parquet(str(table)).count() == 1


SCHEDULE = """
cycles:
  - name: oper
    times: ["06", "12:00"]
    identifier: {class: od, step: {from: 0, to: 4, by: 2}}
    due: 6h
"""
DAY = date(2026, 11, 20)


class TestReport:
    def expected(self, place: Pipelines, schedule: str = SCHEDULE, event: str = "mars") -> DataFrame:
        return completeness.expected(place.spark, schedule, event, first=DAY, last=DAY, config=str(place.config))

    def report(self, place: Pipelines, now: datetime) -> Reported:
        to = f"{place.directory}/report"
        return completeness.report(place.read(), self.expected(place), "mars", to=to, now=now, config=str(place.config))

    def arrived(self, place: Pipelines, *steps: tuple[str, int, str]) -> DataFrame:
        """Notifications of the day as the data source has them: time, step, and the time of arrival in UTC."""
        typed = "identifier STRUCT<class: STRING, date: DATE, time: STRING, step: BIGINT>, time TIMESTAMP"
        rows = [
            (("od", DAY, time, step), datetime.fromisoformat(f"2026-11-20T{arrival}:00+00:00"))
            for time, step, arrival in steps
        ]
        return place.spark.createDataFrame(rows, typed)

    @pytest.mark.slow
    def test_cycles_are_complete_late_or_not_due(self, place: Pipelines) -> None:
        came = self.arrived(
            place, ("0600", 0, "11:00"), ("0600", 2, "11:30"), ("0600", 4, "13:00"), ("0600", 4, "14:00"),
            ("1200", 0, "17:30"), ("0900", 0, "10:00"),
        )  # fmt: skip
        compared = completeness.compare(came, self.expected(place))

        early, late = completeness.cycles(compared, datetime(2026, 11, 20, 17, 59, tzinfo=UTC)).collect()
        assert (early["cycle"], late["cycle"]) == ("oper/2026-11-20/0600", "oper/2026-11-20/1200")
        assert (early["cycle_complete"], early["cycle_late"], early["in_time"]) == (True, True, 2)
        assert early["latency_seconds"] == [5.5 * 3600, 7 * 3600, 7 * 3600]
        assert (late["cycle_complete"], late["cycle_late"], late["arrived"], late["missing"]) == (False, False, 1, 0)

        _, late = completeness.cycles(compared, datetime(2026, 11, 20, 18, 0, tzinfo=UTC)).collect()
        assert (late["cycle_complete"], late["cycle_late"], late["missing"]) == (False, True, 2)

    @pytest.mark.slow
    def test_a_table_may_say_what_is_expected(self, place: Pipelines) -> None:
        table = place.directory / "schedule.csv"
        table.write_text(
            "cycle,due,time,step\nmorning,2026-11-20T12:00:00Z,0600,0\nmorning,2026-11-20T12:00:00Z,0600,2"
        )
        expected = place.spark.read.option("header", "true").csv(str(table))

        compared = completeness.compare(self.arrived(place, ("0600", 2, "11:00")), expected)

        assert [(row["step"], row["latency_seconds"]) for row in compared.orderBy("step").collect()] == [
            (0, None),
            (2, -3600.0),
        ]

    @pytest.mark.slow
    def test_a_table_with_a_date_that_is_none_is_an_error_that_names_it(self, place: Pipelines) -> None:
        table = place.directory / "wrong.csv"
        table.write_text("cycle,due,time,step\nmorning,2026-02-30T12:00:00Z,0600,0\n")
        expected = completeness.expected_table(place.spark, str(table))

        with pytest.raises(PipelineError, match="due has '2026-02-30T12:00:00Z', which is no timestamp, such as 2026"):
            completeness.compare(self.arrived(place, ("0600", 2, "11:00")), expected)

        expected = expected.withColumns({"due": F.lit("2026-11-20T12:00:00Z"), "step": F.lit("many")})
        with pytest.raises(PipelineError, match="the schedule's column step has 'many', which is no bigint"):
            completeness.compare(self.arrived(place, ("0600", 2, "11:00")), expected)

        table.write_text("cycle,due,time,step\n")
        with pytest.raises(PipelineError, match="the schedule expects nothing"):
            completeness.expected_table(place.spark, str(table))

    @pytest.mark.parametrize(
        ("name", "content", "said"),
        [
            ("wrong.yaml", b"\xe9", "wrong.yaml: not text in UTF-8, from byte 0 on"),
            (
                "wrong.csv",
                b"cycle,due,step\na,2026-11-20T12:00:00Z,many\n",
                "wrong.csv: line 2: step must be a whole number",
            ),
            ("wrong.csv", b"cycle,due,step\n", "wrong.csv: the schedule expects nothing"),
            ("wrong.yaml", SCHEDULE.replace("to: 4", "to: -2").encode(), "wrong.yaml: the schedule expects nothing"),
            ("wrong.yaml", b"a: [", "wrong.yaml: the schedule cannot be read"),
        ],
    )
    def test_a_mistake_in_a_schedule_is_named_before_spark_is_asked(
        self, place: Pipelines, name: str, content: bytes, said: str
    ) -> None:
        file = place.directory / name
        file.write_bytes(content)

        with pytest.raises(PipelineError, match=said):
            completeness.read_schedule(str(file), "mars", first=DAY, last=DAY, config=str(place.config))

    @pytest.mark.slow
    def test_hours_are_counted(self, place: Pipelines) -> None:
        came = self.arrived(place, ("0600", 0, "11:00"), ("0600", 2, "11:59"), ("0600", 4, "13:00"))

        hours = completeness.per_hour(came).select(F.unix_seconds("hour"), "notifications").collect()

        noon = int(datetime(2026, 11, 20, 12, tzinfo=UTC).timestamp())
        assert [tuple(row) for row in hours] == [(noon - 3600, 2), (noon + 3600, 1)]

    @pytest.mark.slow
    def test_a_cycle_of_which_nothing_came_is_not_late_before_it_is_due(self, place: Pipelines) -> None:
        compared = completeness.compare(self.arrived(place), self.expected(place))

        early, late = completeness.cycles(compared, datetime(2026, 11, 20, 12, tzinfo=UTC)).collect()

        assert (early["cycle_late"], early["missing"], early["latency_seconds"]) == (True, 3, None)
        assert (late["cycle_late"], late["missing"], late["cycle_complete"]) == (False, 0, False)

    @pytest.mark.slow
    def test_cycles_are_told_of_once_each_in_tables_a_page_and_notifications(self, place: Pipelines) -> None:
        place.publish(0, 2, 4, time="0600")
        first = self.report(place, datetime(2100, 1, 1, tzinfo=UTC))
        place.publish(0, 2, 4, time="1200")
        second = self.report(place, datetime(2100, 1, 1, tzinfo=UTC))

        assert first.published == {"cycle_complete": 1, "cycle_late": 2}
        assert second.published == {"cycle_complete": 1, "cycle_late": 0}
        complete, _ = place.stored("cycle_complete")
        assert complete.identifier == {"event": "mars", "cycle": "oper/2026-11-20/0600"}
        assert (complete.payload["arrived"], complete.payload["due"]) == (3, "2026-11-20T12:00:00Z")
        assert len(place.stored("cycle_late")) == 2
        to = place.directory / "report"
        tables = {name: place.spark.read.parquet(f"{to}/{name}") for name in ("notifications", "cycles", "hours")}
        assert {name: tables[name].count() for name in ("notifications", "cycles")} == {"notifications": 6, "cycles": 2}
        by_hour = tables["hours"].agg(F.sum("notifications")).first()  # of two hours, if one ended meanwhile
        assert by_hour is not None
        assert by_hour[0] == 6
        assert "6 of 6" in (to / "report.html").read_text()


@pytest.mark.slow
def test_the_commands_do_the_same(
    place: Pipelines, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the session of the tests, because the commands would stop it."""

    @contextmanager
    def session(name: str) -> Iterator[SparkSession]:
        yield place.spark

    def run(*arguments: str | Path) -> list[str]:
        monkeypatch.setattr(
            sys, "argv", ["aviso-workers", "spark", *map(str, arguments), "--config", str(place.config)]
        )
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        assert ended.value.code == 0, captured.err
        return captured.out.splitlines()

    monkeypatch.setattr(sessions, "session", session)
    place.publish(0, 2, 4, 5)
    told = keep_lineage(place)
    archive, schedule = place.directory / "archive", place.directory / "schedule.yaml"
    schedule.write_text(SCHEDULE)
    of_the_day = ("--first", "2026-11-20", "--last", "2026-11-20", "--schedule", schedule, "--from", archive)

    assert run("archive", "mars", 'step={"lt":5}', "--to", archive) == []
    assert run("archive", "mars", 'step={"lte":4}', "--to", archive) == []
    assert run("backfill", "mars", "step=[2,4,5]", "--from", archive, "--to", "copy") == [
        "2 published, 0 there before, 0 refused"
    ]
    assert run("backfill", "mars", "--from", "2", "--to", "copy") == ["1 published, 2 there before, 0 refused"]
    assert run("backfill", "mars", "--from", "2020-01-01", "--to", "copy") == ["1 published, 3 there before, 0 refused"]
    assert run("report", "mars", "--to", place.directory / "report", *of_the_day) == [
        f"2 cycles: 1 complete, 2 late; see {place.directory}/report/report.html",
        "1 published as cycle_complete",
        "2 published as cycle_late",
    ]
    events = told()
    runs = [(event["job"]["name"], event["eventType"]) for event in events if event["eventType"] != "START"]
    assert runs == [("archive.mars", "COMPLETE")] * 2 + [("backfill.mars.copy", "COMPLETE")] * 3
    datasets = [
        (event["inputs"][0]["name"], event["outputs"][0]["name"]) for event in (events[1], events[5], events[7])
    ]
    assert datasets == [("mars", str(archive)), (str(archive), "copy"), ("mars", "copy")]
    assert events[5]["outputs"][0]["outputFacets"]["outputStatistics"]["rowCount"] == 2


def keep_lineage(place: Pipelines) -> Callable[[], list[dict[str, Any]]]:
    """Let run events be kept, and return what reads them."""
    document = json.loads(place.config.read_text())
    document["workers"] = {**document.get("workers", {}), "lineage": {"subject": "lineage.runs"}}
    place.config.write_text(json.dumps(document))
    settings = config.load(place.config, environ={})

    async def create() -> None:
        async with open_backend(settings) as backend:
            await backend.create_stream(StreamSpec(name="LINEAGE", subjects=("lineage.>",)))

    async def read() -> list[dict[str, Any]]:
        async with open_backend(settings) as backend:
            last = (await backend.stream_info("LINEAGE")).last_sequence
            found = backend.read("LINEAGE", filter_subjects=(), last_sequence=last)
            return [json.loads(message.data) async for message in found]

    anyio.run(create)
    return lambda: anyio.run(read)
