"""The files of a directory, wherever Spark reaches it: a disk, HDFS, an object store.

The pipelines keep tables and pages there. It goes through Hadoop's file systems, as Spark itself does, and so needs a
session with a JVM, which Spark Connect has not. What is moved or written here is on the disk when the call returns,
where the directory is on a disk that the driver mounts: Hadoop flushes neither files nor directories there. HDFS
flushes a text that is written here, and what tasks have written only with `dfs.datanode.synconclose`; an object store
has stored an object when it is closed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from msgspec import Struct
from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from aviso_workers import files
from aviso_workers.errors import PipelineError


class File(Struct, frozen=True, kw_only=True):
    """A file as the listing of a directory shows it."""

    name: str
    """Below the directory that was listed."""
    size: int
    modified_ms: int


class Files:
    """The files below `root`; names are relative to it."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        if not hasattr(spark, "_jsparkSession"):
            raise PipelineError("pipelines need a Spark session of their own, not one of Spark Connect")
        java: Any = spark._jvm
        self._path_type = java.org.apache.hadoop.fs.Path
        path = self._path_type(root)
        context: Any = spark.sparkContext
        self._system = path.getFileSystem(context._jsc.hadoopConfiguration())
        self._is_local = self._system.getUri().getScheme() == "file"
        self.root = str(self._system.makeQualified(path).toString()).rstrip("/")

    def url(self, name: str) -> str:
        """Return the URL of a file as Spark's logs spell it, with escapes for what a URL cannot have."""
        return str(self._path(name).toUri().toString())

    def exists(self, name: str) -> bool:
        return bool(self._system.exists(self._path(name)))

    def list(self, name: str) -> list[File]:
        """Return all files below a directory, however deep; none where it is missing."""
        if not self.exists(name):
            return []
        listing = self._system.listFiles(self._path(name), True)
        above = len(self._path(name).toUri().getPath()) + 1
        found = []
        while listing.hasNext():
            status = listing.next()
            below = status.getPath().toUri().getPath()[above:]
            found.append(File(name=below, size=status.getLen(), modified_ms=status.getModificationTime()))
        return sorted(found, key=lambda file: file.name)

    def move(self, source: str, target: str) -> None:
        """Move a file. Raises `PipelineError`, also where there is a file of the name `target` already."""
        self.sync(source)
        self._system.mkdirs(self._path(target).getParent())
        self._rename(source, target)

    def delete(self, name: str) -> None:
        self._system.delete(self._path(name), True)

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises `PipelineError` where it cannot be read."""
        with self._named(name):
            stream = self._system.open(self._path(name))
            try:
                return bytes(stream.readAllBytes())
            finally:
                stream.close()

    def write(self, name: str, text: str) -> None:
        """Write a file, or replace it: on a disk in one step, so that a reader sees the old text or the new one.

        An object store does so by itself. On HDFS a reader may see a part of the text meanwhile.
        """
        if not self._is_local:
            self._write_whole(name, text.encode())
            return
        aside = f"{name}.writing"
        self._write_whole(aside, text.encode())
        place = self._here(name)
        place.with_name(f".{place.name}.crc").unlink(missing_ok=True)  # Hadoop's, of the text that is replaced
        self._here(aside).replace(place)
        self._sync_directories(name)

    def write_new(self, name: str, text: bytes, *, aside: str) -> None:
        """Write a file by way of the file `aside`, all of it at once. A file that is there already stays as it is.

        Where two do so at the same time, the file is that of one of them on a disk and on HDFS; on an object store,
        which cannot tell, it may be replaced. Raises `PipelineError`.
        """
        self._write_whole(aside, text)
        self._system.mkdirs(self._path(name).getParent())
        is_there = (self._is_local and self._link(aside, name)) or self.exists(name)
        if not is_there:
            self._rename(aside, name)
        self.delete(aside)  # else a later write to `aside` would change the file that is linked to it

    def sync(self, name: str) -> None:
        """Have the disk store a file that some process has written here; a missing file is passed over."""
        if self._is_local and self._here(name).is_file():
            with self._here(name).open("rb") as file:
                files.sync(file)

    def _write_whole(self, name: str, text: bytes) -> None:
        if self._is_local:  # without a checksum of Hadoop's, so that a file can be replaced in one step
            self._here(name).parent.mkdir(parents=True, exist_ok=True)
            with self._here(name).open("wb") as file:
                file.write(text)
                files.sync(file)
            return
        stream = self._system.create(self._path(name), True)
        try:
            stream.write(text)
            if stream.hasCapability("hsync"):
                stream.hsync()
        finally:
            stream.close()

    def _link(self, aside: str, name: str) -> bool:
        """Link the file `aside` as `name`, and return whether `name` is there now; some mounted file systems have no
        links.
        """
        try:
            os.link(self._here(aside), self._here(name))
        except FileExistsError:
            return True
        except OSError:
            return False
        self._sync_directories(name)
        return True

    def _rename(self, source: str, target: str) -> None:
        with self._named(target):
            if not self._system.rename(self._path(source), self._path(target)):
                raise PipelineError(f"cannot move {source} to {target} in {self.root}")
        self._sync_directories(target)

    def _sync_directories(self, name: str) -> None:
        """Have the disk store the entries of a file's directories, up to that of the root."""
        if not self._is_local:
            return
        above = self._here("").parent
        for directory in self._here(name).parents:
            if directory == above:
                with suppress(PermissionError):  # the directory above the root may not be readable
                    files.sync_directory(directory)
                return
            files.sync_directory(directory)

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        try:
            yield
        except Py4JJavaError as error:
            raise PipelineError(f"{self.root}/{name}: {error.java_exception.toString()}") from error

    def _here(self, name: str) -> Path:
        """Return the path of a file on this machine's disk."""
        return Path(self._path(name).toUri().getPath())

    def _path(self, name: str) -> Any:
        return self._path_type(f"{self.root}/{name}" if name else self.root)
