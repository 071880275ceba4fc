"""Dead letters of a write: the rows that are not notifications, each named and kept with its reason in Parquet.

`writers` uses it in a task. What is wrong shows for a batch of rows at a time, so a batch that is refused is divided
until each row of it that is wrong stands alone. The directory goes through Arrow's file systems, because a task has no
JVM: a path that driver and executors share, or a URL of HDFS, S3 or Google's storage.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from aviso_workers import files
from aviso_workers.backends import OutgoingChunk
from aviso_workers.errors import InvalidNotificationError, PipelineError

REASON = "reason"
MAX_SHOWN = 200
"""Characters of a row in an error."""
NAME_BYTES = 16


def divided(
    batch: pa.RecordBatch, messages_of: Callable[[pa.RecordBatch], OutgoingChunk], *, first: int = 0
) -> Iterator[tuple[int, OutgoingChunk | InvalidNotificationError]]:
    """Yield the messages of a batch in order, a chunk at a time, and for each row that is wrong its error.

    With each comes the number of its first row, which for that of the batch is `first`.
    """
    try:
        made = messages_of(batch)
    except InvalidNotificationError as error:
        if len(batch) == 1:
            yield first, error
            return
        middle = len(batch) // 2
        yield from divided(batch.slice(0, middle), messages_of, first=first)
        yield from divided(batch.slice(middle), messages_of, first=first + middle)
        return
    yield first, made


def excerpt(row: pa.RecordBatch) -> str:
    """Return the beginning of a row as text, for an error message."""
    text = str(row.to_pylist()[0])
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


class RefusedRows:
    """The refused rows of one task. `save` writes them to a file that is named by a digest of their content.

    So a task that is run again with the same rows writes the same file, and one that has other rows writes another.
    """

    def __init__(self, directory: str, *, task: str) -> None:
        self._directory = directory
        self._digest = blake2b(task.encode(), digest_size=NAME_BYTES)
        self._rows: list[pa.RecordBatch] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: pa.RecordBatch, reason: str) -> None:
        self._digest.update(repr((row.to_pylist(), reason)).encode())
        self._rows.append(row.append_column(REASON, pa.array([reason])))

    def save(self) -> str:
        """Write the file, or nothing where no row was refused; return its path or an empty text."""
        if not self._rows:
            return ""
        from pyarrow import parquet  # takes a tenth of a second, and most tasks refuse nothing

        system, directory = _located(self._directory)
        path = f"{directory}/{self._digest.hexdigest()}.parquet"
        # An earlier attempt may have left the same file, whole or cut short by a power cut: it is written again.
        partial = f"{directory}/_{uuid.uuid4().hex}.parquet"  # readers of tables pass over names like this
        system.create_dir(directory)
        parquet.write_table(pa.Table.from_batches(self._rows), partial, filesystem=system)
        if is_local := isinstance(system, fs.LocalFileSystem):
            with open(partial, "rb+") as written:
                files.sync(written)
        system.move(partial, path)
        if is_local:
            files.sync_directory(Path(directory))
        return path


def check_present(directory: str, paths: list[str]) -> None:
    """Raise `PipelineError` where this process does not see a file that a task has written."""
    system, _ = _located(directory)
    for found in system.get_file_info(paths):
        if found.type != fs.FileType.File:
            raise PipelineError(
                f"deadLetters: {found.path} was written by an executor, and the driver finds no such file; give a "
                "directory or a URL that all of them share"
            )


def _located(directory: str) -> tuple[Any, str]:
    """Return the file system of a directory or URL, and the path in that file system."""
    if "://" in directory:
        system, path = fs.FileSystem.from_uri(directory)
        return system, path.rstrip("/")
    return fs.LocalFileSystem(), os.path.abspath(directory)
