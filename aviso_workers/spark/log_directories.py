"""The directories of event logs, as `spark.eventLog.dir` names them: on this machine, in an object store or on HDFS.

Called by the agent that tails event logs, from worker threads: everything here blocks.

A directory of this machine is read file by file, as often as the agent likes. A remote directory is listed as a whole,
with one request for a thousand objects. It is listed again after `LISTING_SECONDS`, or after twenty times as long as
the listing took where that is more; until then the last listing is used. Files are read by ranges, from where the
reader is.

Remote directories are read with Arrow's file systems, which take credentials, profiles and endpoints from where the
provider's own tools do. A URL that carries credentials is refused, so that none can be in the configuration or in a
log.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

from aviso_workers.spark import FOR_EVENT_LOGS, event_log
from aviso_workers.spark.event_log import EventLog, LogFile, OpenFile

SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gs", "hdfs": "hdfs"}
"""What Arrow calls the file systems of URLs that can be read."""
GOOGLE_PARAMETERS = "?retry_limit_seconds=15"
"""Without this, Google's client tries for 15 minutes; meanwhile the agent reads no other directory, and cannot stop."""
TIMEOUT_SECONDS = 5
"""How long a request to an S3 store may take; it is sent three times. Arrow's own settings make 100 seconds of that."""
LISTING_SECONDS = 10.0
LISTING_SHARE = 20
"""The wait before the next listing is at least this many times as long as the last one took."""
READ_AHEAD = 1 << 20
"""Bytes of one request."""


def check(name: str) -> None:
    """Check the name of a directory. Raises `ValueError` where event logs cannot be read from it, with what to do
    instead.
    """
    _directory(name)


class LogDirectories:
    """All directories of event logs that an agent follows."""

    def __init__(self, names: Iterable[str]) -> None:
        self._directories = [_directory(name) for name in names]
        self._directory_of: dict[str, _Directory] = {}
        """The directory in which each event log was found, by the log's path."""

    def find(self) -> tuple[set[str], dict[str, str]]:
        """Return the paths of all event logs, and why a directory cannot be listed, by the directory's name."""
        found: dict[str, _Directory] = {}
        problems: dict[str, str] = {}
        for directory in self._directories:
            try:
                found.update(dict.fromkeys(directory.find(), directory))
            except OSError as error:
                problems[directory.name] = str(error)
        self._directory_of = found
        return set(found), problems

    def __contains__(self, path: str) -> bool:
        """Return whether the last search found a log at a path."""
        return path in self._directory_of

    def snapshot(self, path: str, known: EventLog | None) -> EventLog | OSError | None:
        """Return a snapshot of the log at a path: `known` itself where size and time have not changed, None where the
        log is gone, and the `OSError`, which is not raised, where it cannot be read.
        """
        directory = self._directory_of.get(path)
        if directory is None:
            return None
        try:
            return directory.snapshot(path, known)
        except OSError as error:
            return error

    def open(self, path: str, *, log: str) -> OpenFile:
        """Open a file of the log at the path `log`. Raises `OSError`."""
        directory = self._directory_of.get(log)
        if directory is None:
            raise FileNotFoundError(path)
        return directory.open(path)


class _LocalDirectory:
    """A directory of event logs on this machine, or mounted on it."""

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self._path = path

    def find(self) -> list[str]:
        return event_log.find(self._path)

    def snapshot(self, path: str, known: EventLog | None) -> EventLog | None:
        return known if known is not None and event_log.is_unchanged(known) else event_log.snapshot(path)

    def open(self, path: str) -> OpenFile:
        return open(path, "rb", buffering=0)


class _RemoteDirectory:
    """A directory of event logs in an object store or on HDFS, as its last listing shows it."""

    def __init__(self, name: str, url: str) -> None:
        try:
            import pyarrow  # noqa: F401, here, so that the agent does not start without it
        except ImportError as error:
            raise ValueError(f"{name}: reading it needs pyarrow: {FOR_EVENT_LOGS}") from error
        self.name = name
        self._url = url
        self._system: Any = None
        self._root = ""
        self._logs: dict[str, EventLog] = {}
        self._problem: OSError | None = None
        self._list_at = 0.0

    def find(self) -> list[str]:
        begun = time.monotonic()
        if begun >= self._list_at:
            pause = LISTING_SECONDS
            try:
                self._logs, self._problem = self._list(), None
                pause = max(pause, LISTING_SHARE * (time.monotonic() - begun))
            except OSError as error:
                self._problem = error
            self._list_at = time.monotonic() + pause
        if self._problem is not None:
            raise self._problem
        return list(self._logs)

    def snapshot(self, path: str, known: EventLog | None) -> EventLog | None:
        return self._logs.get(path)

    def open(self, path: str) -> OpenFile:
        return _RemoteFile(self._system, self._root + path.removeprefix(self.name))

    def _list(self) -> dict[str, EventLog]:
        with _os_errors():
            from pyarrow import fs

            if self._system is None:
                self._system, self._root = _file_system(self._url)
            listed = self._system.get_file_info(fs.FileSelector(self._root, recursive=True))
        files = (
            LogFile(path=self._path(file.path), size=file.size, modified=(file.mtime_ns or 0) / 1e9)
            for file in listed
            if file.type == fs.FileType.File
        )
        return _logs(self.name, files)

    def _path(self, listed: str) -> str:
        """Return the path of a listed file below the name that was given to us; HDFS may list whole URLs."""
        _, found, below = listed.partition(f"{self._root}/")
        if not found:
            raise OSError(f"the listing of {self.name} has {listed}, which is not below it")
        return f"{self.name}/{below}"


_Directory = _LocalDirectory | _RemoteDirectory


class _RemoteFile:
    """A remote file that is read by ranges. It is opened by the first read, and again where it had no more bytes."""

    def __init__(self, system: Any, path: str) -> None:
        self._system = system
        self._path = path
        self._offset = 0
        self._stream: Any = None

    def read(self, size: int, /) -> bytes:
        with _os_errors():
            data = bytes(self._stream.read(size)) if self._stream is not None else b""
            if not data:
                self._open()
                data = bytes(self._stream.read(size))
        self._offset += len(data)
        return data

    def seek(self, offset: int, /) -> int:
        self.close()
        self._offset = offset
        return offset

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _open(self) -> None:
        import pyarrow

        self.close()
        file = self._system.open_input_file(self._path)
        file.seek(self._offset)
        self._stream = pyarrow.BufferedInputStream(file, READ_AHEAD)


@contextmanager
def _os_errors() -> Iterator[None]:
    """Raise Arrow's own errors as `OSError`s, as most of them are."""
    import pyarrow

    try:
        yield
    except pyarrow.ArrowException as error:
        raise OSError(str(error)) from error


def _directory(name: str) -> _Directory:
    url = urlsplit(name)
    if not url.scheme:
        return _LocalDirectory(name, name)
    public = url._replace(netloc=url.netloc.rpartition("@")[2], query="", fragment="").geturl()
    if url.scheme == "file":
        if url.netloc not in ("", "localhost") or not url.path.startswith("/"):
            raise ValueError(f"{public}: give an absolute path of this machine, such as file:///spark-events")
        return _LocalDirectory(name, unquote(url.path))
    if url.scheme not in SCHEMES:
        raise ValueError(
            f"{public}: event logs cannot be read there: mount the directory and give its path, or "
            "have the logs copied to a directory of this machine"
        )
    if "@" in url.netloc or url.query or url.fragment:
        raise ValueError(
            f"{public}: give the URL without credentials and parameters: these come from the environment or a profile "
            "of the worker, as for the provider's own tools"
        )
    if not url.netloc and url.scheme != "hdfs":
        raise ValueError(f"{public}: has no bucket: give a URL such as {url.scheme}://bucket/spark-events")
    return _RemoteDirectory(name.rstrip("/"), f"{SCHEMES[url.scheme]}://{url.netloc}{url.path}")


def _file_system(url: str) -> tuple[Any, str]:
    """Return Arrow's file system of a URL, with short timeouts, and the directory in it. Raises Arrow's errors."""
    from pyarrow import fs

    scheme = urlsplit(url).scheme
    system, root = fs.FileSystem.from_uri(url + (GOOGLE_PARAMETERS if scheme == "gs" else ""))
    if scheme == "s3":
        # A URL takes no timeouts, and to give them the endpoint has to be named. The region is the bucket's.
        system = fs.S3FileSystem(
            region=system.region,
            endpoint_override=os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"),
            connect_timeout=TIMEOUT_SECONDS,
            request_timeout=TIMEOUT_SECONDS,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=3),
        )
    return system, root.rstrip("/")


def _logs(directory: str, files: Iterable[LogFile]) -> dict[str, EventLog]:
    """Return the event logs that these files of a directory make, by path."""
    rolling: dict[str, list[LogFile]] = {}
    single: dict[str, EventLog] = {}
    for file in files:
        above, _, name = file.path.rpartition("/")
        if above == directory and event_log.may_be_log(name) and not event_log.is_rolling(name):
            path = file.path.removesuffix(event_log.IN_PROGRESS)
            # In an object store a rename is a copy and a delete: both may be listed, the whole copy first.
            single.setdefault(path, event_log.single_log(path, file))
        elif above.rpartition("/")[0] == directory and event_log.is_rolling(above) and above.isprintable():
            rolling.setdefault(above, []).append(file)
    return single | {path: event_log.rolling_log(path, parts) for path, parts in rolling.items()}
