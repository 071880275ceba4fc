"""The files of a directory, wherever Spark reaches it: a disk, HDFS, an object store.

The pipelines keep tables and pages there. It goes through Hadoop's file systems, as Spark itself does, and so needs a
session with a JVM, which Spark Connect has not.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from pyspark.sql import SparkSession

from aviso_workers.errors import PipelineError

__all__ = ["File", "Files"]


class File(Struct, frozen=True, kw_only=True):
    """A file as a listing shows it."""

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
        self.root = str(self._system.makeQualified(path).toString()).rstrip("/")

    def url(self, name: str) -> str:
        """As Spark's logs spell a file: what a URL cannot have is escaped."""
        return str(self._path(name).toUri().toString())

    def exists(self, name: str) -> bool:
        return bool(self._system.exists(self._path(name)))

    def list(self, name: str) -> list[File]:
        """All files below a directory, however deep; none where it is missing."""
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
        """A file that is there already is replaced. Raises `PipelineError`."""
        place = self._path(target)
        self._system.mkdirs(place.getParent())
        self._system.delete(place, False)
        if not self._system.rename(self._path(source), place):
            raise PipelineError(f"cannot move {source} to {target} in {self.root}")

    def delete(self, name: str) -> None:
        self._system.delete(self._path(name), True)

    def read(self, name: str) -> str:
        stream = self._system.open(self._path(name))
        try:
            return bytes(stream.readAllBytes()).decode()
        finally:
            stream.close()

    def write(self, name: str, text: str) -> None:
        """All of it at once: whoever reads sees the old text, none, or the new one."""
        self._write_whole(f"{name}.writing", text)
        self.move(f"{name}.writing", name)

    def write_new(self, name: str, text: str, *, aside: str) -> None:
        """All of it at once, by way of the file `aside`. A file that is there already stays as it is.

        Raises `PipelineError`.
        """
        self._write_whole(aside, text)
        self._system.mkdirs(self._path(name).getParent())
        if self.exists(name):  # a rename on this machine would replace it, on HDFS it fails
            return
        if not self._system.rename(self._path(aside), self._path(name)) and not self.exists(name):
            raise PipelineError(f"cannot move {aside} to {name} in {self.root}")

    def _write_whole(self, name: str, text: str) -> None:
        stream = self._system.create(self._path(name), True)
        try:
            stream.write(text.encode())
        finally:
            stream.close()

    def _path(self, name: str) -> Any:
        return self._path_type(f"{self.root}/{name}")
