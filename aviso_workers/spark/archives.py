"""Archives of notifications as Parquet, by the day on which they were stored: each once, and never half of a
micro-batch.

`aviso-workers spark archive` calls it, as may any program with a stream of notifications in Spark. A micro-batch is
written to the side, moved in, and becomes visible by one more file in the directory's `_spark_metadata`, which says
what belongs to the archive. It is the log that Spark's own file sink keeps, so that `spark.read.parquet(PATH)` of any
Spark reads it; each of its files is a whole list here, because the step that adds files also takes small ones away
after it has merged them. The number of the file is that of the batch: a batch that is there is not written again.

Readers that know no such log read the directories of the days. So what was merged is removed in the same step, and
what a run left that was killed in the middle of one is removed when the next has done that step again. A query of
Spark that had begun with files that were merged since ends with an error. Lists that were followed by others stay for
an hour.

Two runs at the same time write the same batch, under names of their own. The one that lists it first has done it, and
the other one removes what it wrote. So a file of a batch that is in no list yet is never removed: the run that wrote it
may be about to list it.

What a run leaves out is behind the checkpoint, and no later run archives it. So an archive takes one event type and one
filter, and has a record of them.
"""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any
from uuid import uuid4

import msgspec
from msgspec import Struct, structs
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from aviso_workers.aviso.schema import Condition, Span, Where
from aviso_workers.aviso.spatial import Containing, Filter
from aviso_workers.errors import PipelineError
from aviso_workers.spark import options, readers
from aviso_workers.spark.connections import load_config
from aviso_workers.spark.files import File, Files

LOG = "_spark_metadata"
CHECKPOINT = "_checkpoint"
STAGING = "_staging"
SELECTION = "_selection.json"
"""The record of which event type and filter an archive holds."""
WRITTEN = re.compile(r"date=[^/]+/[^/]+\.parquet")
"""The files of a micro-batch, below the directory where Spark writes them."""
OURS = re.compile(r"date=[^/]+/(\d+)-\d+(-[0-9a-f]{8})?\.parquet")
"""The files of an archive, below its directory: the number of the batch, of the file in it, and the writing run."""
DAY = "date_from_unix_date(CAST(unix_seconds(time) DIV 86400 AS INT))"
"""The day in UTC, whatever the session's time zone is."""

ALL_FILES = {"mergeSchema": True, "ignoreCorruptFiles": False, "ignoreMissingFiles": False}
"""How an archive is read, whatever the session's settings are: none of its rows or fields may be left out unsaid."""
MANY = 16
"""So many small files of one day are merged."""
SMALL_BYTES = 32 * 1024 * 1024
READERS_MS = 60 * 60 * 1000
"""How long a reader may take to read the list that it began with."""
VERSION = "v1"
WHOLE_BYTES = 128 * 1024 * 1024
DIGEST_BYTES = 16


def archive(
    notifications: DataFrame, to: str, *, selection: ArchiveSelection | None = None, every_seconds: float | None = None
) -> StreamingQuery:
    """Start to keep a streaming data frame in the directory `to`, and return the running query.

    It needs the columns `time` and `sequence`; `date` is added. Without `every_seconds` the query ends with what is
    there now. One query at a time writes to a directory, which also holds its checkpoint. `selection` is what of a
    stream the data frame has: the archive remembers it. Raises `PipelineError` where the archive has another selection,
    the checkpoint is gone or is not of the same age as the log, or another program's files are there.
    """
    archive = _Archive(Files(notifications.sparkSession, to))
    archive.prepare()
    archive.check_types(notifications)
    archive.check_selection(selection)
    writer = notifications.withColumn("date", F.expr(DAY)).writeStream.foreachBatch(archive.add)
    writer = writer.option("checkpointLocation", f"{archive.root}/{CHECKPOINT}").queryName(f"archive {to}")
    if every_seconds is None:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{every_seconds} seconds").start()


def read(spark: SparkSession, path: str) -> DataFrame:
    """Return what an archive, or another directory of Parquet, holds now, with the columns and fields of all its files.

    Spark by itself takes those of the first file. Where a file lacks one, it is null. An archive that was moved or
    copied is read where it is, while Spark by itself looks for the files where they were. Raises `PipelineError` where
    there is no archive.
    """
    files = Files(spark, path)
    if not files.exists(""):
        raise PipelineError(f"there is no archive in {path}: `aviso-workers spark archive` makes one")
    reader = spark.read.options(**ALL_FILES)
    if moved := _Archive(files).moved():
        return reader.option("basePath", files.root).parquet(*moved)
    return reader.parquet(path)


class ArchiveSelection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The event type and the filter of an archive in canonical form: two that let the same notifications through are
    equal.
    """

    event: str
    where: Mapping[str, Any] = {}
    """By field: a value, a list of values, or one operator."""

    def __str__(self) -> str:
        return " ".join([self.event, *(f"{field}={_spelled(wanted)}" for field, wanted in self.where.items())])


def selection(given: Mapping[str, Any]) -> ArchiveSelection:
    """Return the selection that a read with these options makes.

    Raises `InvalidOptionError`, `UnknownEventTypeError` and `InvalidIdentifierError`.
    """
    parsed = options.parse_read_options({name: str(value) for name, value in given.items()})
    plan = readers.plan(parsed, load_config(parsed.config))
    if plan.where is None:
        raise PipelineError("an archive is of an event type, not of a stream by its name")
    return ArchiveSelection(event=str(parsed.event), where=_canonical(plan.where))


def _canonical(where: Where) -> dict[str, Any]:
    known = ("", *where.topic.key_order)
    found = {known[position]: _wanted(accepted) for position, accepted in where.conditions}
    return found | (_place(where.place) if where.place else {})


def _wanted(accepted: Condition) -> Any:
    if isinstance(accepted, Span):
        return {"between": [str(accepted.low), str(accepted.high)]}
    values = sorted(accepted)
    return values[0] if len(values) == 1 else values


def _place(place: Filter) -> dict[str, Any]:
    if isinstance(place, Containing):
        return {"point": [str(number) for number in place.point]}
    return {"polygon": [str(number) for point in place.area.ring for number in point]}


def _spelled(wanted: Any) -> str:
    return wanted if isinstance(wanted, str) else msgspec.json.encode(wanted).decode()


class _Archive:
    """The files and the log of an archive. One query at a time writes to it."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._run = uuid4().hex[:8]
        self._staging = f"{STAGING}/{self._run}"
        self.root = files.root

    def prepare(self) -> None:
        """Remove the files that earlier runs left behind. Raises `PipelineError` where no query can continue this
        archive.
        """
        lists = self._files.list(LOG)
        if any(file.name.isdigit() for file in lists):
            raise PipelineError(f"{self.root} is written by Spark's own file sink: archive to a directory of its own")
        if lists and not self._files.exists(f"{CHECKPOINT}/offsets"):
            raise PipelineError(
                f"{self.root} is an archive whose {CHECKPOINT} is gone, so how far it came is not known: "
                "archive to a new directory"
            )
        if not lists and self._files.list(f"{CHECKPOINT}/commits"):
            raise PipelineError(
                f"{self.root} is an archive whose {LOG} is gone, so what belongs to it is not known: "
                "archive to a new directory"
            )
        self._check_same_age(self._newest().number)
        self._remove_left(file.name for file in self._files.list(""))
        self._remove_aside()

    def _check_same_age(self, newest: int) -> None:
        """Raise `PipelineError` where the log and the checkpoint cannot be of one moment.

        Spark plans a batch in the checkpoint before it is added, and commits it there afterwards. With an older
        checkpoint it would give the number of a batch that is in the log to other notifications, which would be left
        out; with an older log those of the batches that it lacks would be, and their files would be removed.
        """
        planned, committed = self._last_batch("offsets"), self._last_batch("commits")
        if planned < newest:
            raise PipelineError(
                f"{self.root} is an archive whose {CHECKPOINT} is older than its {LOG}: it ends with batch {planned}, "
                f"and batch {newest} is archived. Put the newer {CHECKPOINT} back, or archive to a new directory"
            )
        if committed > newest:
            raise PipelineError(
                f"{self.root} is an archive whose {LOG} is older than its {CHECKPOINT}: it ends with batch {newest}, "
                f"and batch {committed} was archived. Put the newer {LOG} back, or archive to a new directory"
            )

    def check_types(self, notifications: DataFrame) -> None:
        """Raise `PipelineError` where a column or field has another type than the archive's newest file has it: no
        query reads both as one table."""
        known = self._newest().entries
        if not known:
            return
        spark = notifications.sparkSession
        newest = spark.read.options(**ALL_FILES).parquet(f"{self.root}/{known[-1].name}")
        if changed := next(_changed_types(newest.schema, notifications.schema), None):
            raise PipelineError(
                f"{self.root} has {changed}, and no query reads both as one table: archive to a new directory"
            )

    def check_selection(self, wanted: ArchiveSelection | None) -> None:
        """Check that the archive has the selection `wanted`; record it where none is recorded yet.

        Raises `PipelineError` where the archive has something else, or where `wanted` is None though it has a record.
        """
        if not self._files.exists(SELECTION):
            if wanted is None:
                return
            self._files.write_new(SELECTION, msgspec.json.encode(wanted), aside=f"{self._staging}/selection")
        known = self._recorded_selection()  # also after writing: another run may have been faster
        if known != wanted:
            this = f"is of {wanted}" if wanted else "does not say of what"
            raise PipelineError(
                f"{self.root} is an archive of {known}, and this run {this}: what one of them leaves out is never "
                "archived by the other. Archive to another directory"
            )

    def _recorded_selection(self) -> ArchiveSelection:
        try:
            return msgspec.json.decode(self._files.read(SELECTION), type=ArchiveSelection)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise PipelineError(
                f"{self.root}/{SELECTION} is damaged, so what the archive leaves out is not known: {error}. Put a good "
                "copy of it back, or archive to a new directory"
            ) from error

    def _last_batch(self, kind: str) -> int:
        """Return the number of the last batch that the checkpoint has in this directory; -1 where it has none."""
        return max(
            (int(file.name) for file in self._files.list(f"{CHECKPOINT}/{kind}") if file.name.isdigit()), default=-1
        )

    def moved(self) -> list[str]:
        """Return the paths of all files where the log names another directory, as after the archive was moved; else
        none.
        """
        newest = self._newest()
        if not newest.entries:
            self._left(newest, (file.name for file in self._files.list("")))
        known = newest.entries
        is_ours = all(OURS.fullmatch(entry.name) for entry in known)  # and not of Spark's own file sink
        if not is_ours or all(entry.path == self._files.url(entry.name) for entry in known):
            return []
        return [f"{self.root}/{entry.name}" for entry in known]

    def add(self, batch: DataFrame, number: int) -> None:
        """Add one micro-batch. Spark calls it again for a batch that it does not know to be done."""
        newest = self._newest()
        if number <= newest.number:
            return
        known = newest.entries
        merged = _small(known)
        # Either may have fields that the other lacks, when the event type or the options of the read have changed.
        rows = batch.unionByName(self._merge(merged, batch), allowMissingColumns=True) if merged else batch
        rows.write.mode("overwrite").partitionBy("date").parquet(f"{self.root}/{self._staging}")
        added = self._take_in(number)
        kept = [structs.replace(entry, path=self._files.url(entry.name)) for entry in known if entry not in merged]
        self._list(number, kept, added)
        days = {entry.day for entry in (*merged, *added)}
        self._remove_left([f"{day}/{file.name}" for day in days for file in self._files.list(day)])
        self._files.delete(self._staging)
        self._remove_old_lists()

    def _list(self, number: int, kept: list[ArchivedFile], added: list[ArchivedFile]) -> None:
        """Write the list of a batch, unless another run has: that has archived the same notifications."""
        if self._newest().number >= number:
            return
        if not all(self._files.exists(entry.name) for entry in added):
            raise PipelineError(
                f"another process has removed files that this run wrote to {self.root}: let one run at a time write "
                "there; the next one archives them"
            )
        self._files.sync(f"{CHECKPOINT}/offsets/{number}")  # a list without the plan of its batch is refused
        text = encode_list([*kept, *added])
        self._files.write_new(f"{LOG}/{number}.compact", text, aside=f"{self._staging}/list")

    def _merge(self, merged: list[ArchivedFile], batch: DataFrame) -> DataFrame:
        reader = batch.sparkSession.read.options(basePath=self.root, **ALL_FILES)
        files = reader.parquet(*(f"{self.root}/{entry.name}" for entry in merged))
        partitions = math.ceil(sum(entry.size for entry in merged) / WHOLE_BYTES)
        return files.coalesce(partitions).sortWithinPartitions("date", "sequence")

    def _take_in(self, number: int) -> list[ArchivedFile]:
        """Move the written files of a batch to their days. Until the log names them, they are not part of the
        archive.
        """
        # Below other directories of it Spark keeps what tasks have begun, also such as come too late.
        written = [file for file in self._files.list(self._staging) if WRITTEN.fullmatch(file.name)]
        moved = []
        for index, file in enumerate(written):
            day = file.name.split("/")[0]
            name = f"{day}/{number}-{index}-{self._run}.parquet"
            self._files.move(f"{self._staging}/{file.name}", name)
            moved.append(ArchivedFile(path=self._files.url(name), size=file.size, modification_time=file.modified_ms))
        return moved

    def _lists(self) -> list[tuple[int, File]]:
        """Return the files of the log, by number."""
        found = [file for file in self._files.list(LOG) if file.name.endswith(".compact")]
        return sorted((int(file.name.split(".")[0]), file) for file in found)

    def _newest(self) -> FileList:
        """Return the newest list. Raises `PipelineError` where it is damaged."""
        lists = self._lists()
        if not lists:
            return FileList()
        number, file = lists[-1]
        try:
            return decode_list(self._files.read(f"{LOG}/{file.name}"), number=number)
        except ValueError as problem:
            raise PipelineError(
                f"{self.root}/{LOG}/{file.name} is damaged, so what belongs to the archive is not known: {problem}. "
                "No file was removed. Put a good copy of it back, or archive to a new directory"
            ) from problem

    def _remove_left(self, there: Iterable[str]) -> None:
        """Remove files that are in no list: a killed run merged them and did not remove them, another run listed their
        batch first, or they are newer than an archive that was restored from a copy. Files of the next batch stay.

        Raises `PipelineError` where the newest list cannot prove that it is whole.
        """
        written = list(there)
        newest = self._newest()  # after them: another run may be about to list what it has written
        for name in self._left(newest, written):
            self._files.delete(name)

    def _left(self, newest: FileList, there: Iterable[str]) -> list[str]:
        """Return the files of the archive that are not in its newest list and are of no batch that comes.

        Raises `PipelineError` where there are some, and the list cannot prove that it is whole.
        """
        names = {entry.name for entry in newest.entries}
        left = [
            name
            for name in there
            if (ours := OURS.fullmatch(name)) and int(ours[1]) != newest.number + 1 and name not in names
        ]
        if left and not newest.entries:
            raise PipelineError(
                f"{self.root} has {len(left)} files that are not in its newest list, such as {left[0]}, and "
                f"{LOG}/{newest.number}.compact names no file, so it cannot prove that it is "
                "whole. No file was removed. Put a good copy of it back, or archive to a new directory; where you "
                "know that the archive has the rows of these files, as after a run that was killed, move them away"
            )
        return left

    def _remove_aside(self) -> None:
        """Remove what killed runs left aside long ago."""
        long_ago = time.time() * 1000 - READERS_MS
        for file in self._files.list(STAGING):
            if file.modified_ms < long_ago:
                self._files.delete(f"{STAGING}/{file.name}")

    def _remove_old_lists(self) -> None:
        """Remove lists that no reader needs any more. The two newest stay: Spark tells by them that each is whole."""
        lists = [file for _, file in self._lists()]
        long_ago = time.time() * 1000 - READERS_MS
        for file, successor in pairwise(lists[:-1]):
            if successor.modified_ms < long_ago:
                self._files.delete(f"{LOG}/{file.name}")


def _changed_types(archived: StructType, given: StructType, above: str = "") -> Iterator[str]:
    """Yield the columns and fields that both have with different types."""
    for name in set(archived.names) & set(given.names):
        before, now = archived[name].dataType, given[name].dataType
        if isinstance(before, StructType) and isinstance(now, StructType):
            yield from _changed_types(before, now, f"{above}{name}.")
        elif before.typeName() != now.typeName():
            yield f"{above}{name} as {before.typeName()}, which is {now.typeName()} now"


def _small(entries: Iterable[ArchivedFile]) -> list[ArchivedFile]:
    """Return the files that are to be merged."""
    by_day = defaultdict(list)
    for entry in entries:
        if entry.size < SMALL_BYTES:
            by_day[entry.day].append(entry)
    return [entry for small in by_day.values() if len(small) >= MANY for entry in small]


class ArchivedFile(Struct, frozen=True, kw_only=True, rename="camel"):
    """A file of an archive, as Spark writes it down."""

    path: str
    size: int
    is_dir: bool = False
    modification_time: int
    block_replication: int = 1
    block_size: int = WHOLE_BYTES
    action: str = "add"

    @property
    def day(self) -> str:
        """The directory of the file's day, such as `date=2026-11-20`."""
        return self.path.rsplit("/", 2)[1]

    @property
    def name(self) -> str:
        """The path of the file below the archive's directory, wherever that directory was when the list was written."""
        return "/".join(self.path.rsplit("/", 2)[1:])


class FileList(Struct, frozen=True, kw_only=True):
    """The content of a list: the files that belong to the archive after a batch."""

    number: int = -1
    """The number of its batch; -1 where there is no list yet."""
    entries: Sequence[ArchivedFile] = ()


class _Sealed(Struct):
    digest: str = ""


def encode_list(entries: Iterable[ArchivedFile]) -> bytes:
    """Return the text of a list of the files that belong to an archive, as one is written for each batch.

    The form is that of the log of Spark's own file sink: a line with the version, and a JSON document for each file. So
    `spark.read.parquet` reads it, of any Spark. The first document has one field more, which Spark passes over: a
    digest of the list. By it a list that was cut is distinguished from a shorter one, also where it was cut at the end
    of a line. Only a list of no files has no digest, and cannot prove that it is whole.
    """
    documents = [msgspec.json.encode(entry) for entry in entries]
    if documents:
        seal = _seal(_digest(_joined(documents)))
        documents[0] = documents[0].removesuffix(b"}") + seal + b"}"
    return _joined(documents)


def decode_list(text: bytes, *, number: int) -> FileList:
    """Parse the text of a list. Raises `ValueError` where it is no such list, or where something of it is missing or
    changed.
    """
    version, *documents = text.split(b"\n")
    if version != VERSION.encode():
        raise ValueError(f"it is of format {version.decode(errors='replace')!r}, {VERSION} is known")
    try:
        entries = [msgspec.json.decode(document, type=ArchivedFile) for document in documents]
        sealed = msgspec.json.decode(documents[0], type=_Sealed) if documents else _Sealed()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"a line of it cannot be read: {error}") from error
    if documents and _digest(text.replace(_seal(sealed.digest), b"", 1)) != sealed.digest:
        raise ValueError("it is not whole: its digest is missing, or that of another list")
    return FileList(number=number, entries=entries)


def _joined(documents: Iterable[bytes]) -> bytes:
    return b"\n".join([VERSION.encode(), *documents])


def _seal(digest: str) -> bytes:
    return b',"digest":"%b"' % digest.encode()


def _digest(text: bytes) -> str:
    return blake2b(text, digest_size=DIGEST_BYTES).hexdigest()
