"""Event logs as the tests see them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import zstandard

from aviso_workers.spark import event_log, job_events
from aviso_workers.spark.event_log import EventLog, EventLogReader, LogPosition
from aviso_workers.spark.job_events import SparkApplication

__all__ = ["NAMES", "ids_in", "logs_in", "raw"]

NAMES = {
    "SparkListenerApplicationStart": "application.start",
    "SparkListenerApplicationEnd": "application.end",
    "SparkListenerJobStart": "job.start",
    "SparkListenerJobEnd": "job.end",
    "SparkListenerStageSubmitted": "stage.start",
    "SparkListenerStageCompleted": "stage.end",
    "SparkListenerExecutorAdded": "executor.added",
    "SparkListenerSQLExecutionStart": "sql.start",
    "SparkListenerSQLExecutionEnd": "sql.end",
    "StreamingQueryListener$QueryStartedEvent": "query.start",
    "StreamingQueryListener$QueryProgressEvent": "query.progress",
    "StreamingQueryListener$QueryTerminatedEvent": "query.end",
}


def logs_in(directory: Path) -> dict[str, EventLog]:
    """All event logs in a directory, by name."""
    found = [event_log.snapshot(path) for path in event_log.find(str(directory))]
    return {log.name: log for log in found if log is not None}


def raw(log: EventLog) -> list[dict[str, Any]]:
    """The log, read in another way: the whole of it at once."""
    lines: list[bytes] = []
    for file in log.files:
        with open(file.path, "rb") as opened:
            content = WHOLE[file.codec](opened.read())
            lines += content.rpartition(b"\n")[0].splitlines()
    return [json.loads(line) for line in lines]


def _of_zstd(content: bytes) -> bytes:
    return zstandard.ZstdDecompressor().stream_reader(content, read_across_frames=True).read()


def _of_lz4(content: bytes) -> bytes:
    blocks, start = [], 0
    while start < len(content):
        size, decompressed = struct.unpack_from("<ii", content, start + 9)
        block = content[start + 21 : start + 21 + size]
        codec = pyarrow.Codec("lz4_raw")
        blocks.append(codec.decompress(block, decompressed, asbytes=True) if size < decompressed else block)
        start += 21 + size
    return b"".join(blocks)


WHOLE: dict[str, Callable[[bytes], bytes]] = {"": bytes, "zstd": _of_zstd, "lz4": _of_lz4}


def ids_in(log: EventLog) -> list[str]:
    """The ids of all events of a log, in order."""
    decode = partial(job_events.decode, application=SparkApplication.of_log(log.name))
    with closing(EventLogReader(decode, LogPosition())) as reader:
        batch = reader.read(log)
    assert not batch.more
    return [event.message_id("local") for event in batch.events]
