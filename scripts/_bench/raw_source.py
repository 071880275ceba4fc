"""What the Spark data source is measured against: the least that moves messages between a stream and Arrow batches.

A data source `raw` that speaks to the socket itself, without an event loop, checks, retries or types: topic and payload
in; sequence, time, topic and payload out. It knows streams without holes only, and servers that never fail.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

BUFFER_BYTES = 1 << 22
ASKED = 20_000
"""Messages of a request; two requests are under way."""
BATCH = 10_000
SENT_AT_ONCE = 500
UNDER_WAY = 4000
"""Messages that are not acknowledged."""
DDL = "sequence BIGINT, time TIMESTAMP, topic STRING, payload STRING"
TIME = pa.timestamp("us", "UTC")
WRITTEN = ("topic", "payload")
EXPIRES_NS = 30_000_000_000


class RawSource(DataSource):
    """Options: `url`, `stream` and, to read, `tasks`."""

    @classmethod
    def name(cls) -> str:
        return "raw"

    def schema(self) -> str:
        return DDL

    def reader(self, schema: StructType) -> RawReader:
        return RawReader(self.options)

    def writer(self, schema: StructType, overwrite: bool) -> RawWriter:
        return RawWriter(self.options)


class Wire:
    """A connection with one subscription. What it reads, it waits for."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._socket = socket.create_connection((address.hostname, address.port), timeout=30)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self._coming = self._socket.makefile("rb", buffering=BUFFER_BYTES)
        self._coming.readline()  # INFO
        self.inbox = f"_INBOX.{os.urandom(8).hex()}".encode()
        self.send(b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\nSUB %s 1\r\n' % self.inbox)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._coming.close()
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def ask(self, subject: str, request: Mapping[str, Any]) -> None:
        body = json.dumps(request).encode()
        self.send(b"PUB $JS.API.%s %s %d\r\n%s\r\n" % (subject.encode(), self.inbox, len(body), body))

    def call(self, subject: str, request: Mapping[str, Any]) -> Any:
        self.ask(subject, request)
        _, payload = next(self.messages())
        return json.loads(_checked(payload))

    def messages(self) -> Iterator[tuple[list[bytes], bytes]]:
        """Yield the words of each message's line, and its payload."""
        readline, read = self._coming.readline, self._coming.read
        while line := readline():
            words = line.split()
            if words[0] == b"HMSG":
                yield words, read(int(words[-1]) + 2)[int(words[-2]) : -2]
            elif words[0] == b"MSG":
                yield words, read(int(words[-1]) + 2)[:-2]
            elif words[0] == b"PING":
                self.send(b"PONG\r\n")
            elif words[0] == b"-ERR":
                raise ConnectionError(line.decode())
        raise ConnectionError("the server has closed the connection")


@dataclass
class Range(InputPartition):
    first: int
    last: int


class RawReader(DataSourceReader):
    def __init__(self, options: Mapping[str, str]) -> None:
        self._url, self._stream, self._tasks = options["url"], options["stream"], int(options["tasks"])

    def partitions(self) -> list[Range]:
        with Wire(self._url) as wire:
            last = wire.call(f"STREAM.INFO.{self._stream}", {})["state"]["last_seq"]
        edges = [last * number // self._tasks for number in range(self._tasks + 1)]
        return [Range(before + 1, end) for before, end in pairwise(edges)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Range)
        with Wire(self._url) as wire:
            messages = self._messages(wire, partition.first, partition.last - partition.first + 1)
            while rows := list(islice(messages, BATCH)):
                sequences, times, topics, payloads = zip(*rows, strict=True)
                yield pa.RecordBatch.from_arrays(
                    [
                        pa.array(sequences, pa.int64()),
                        pa.array(times, pa.int64()).cast(TIME),
                        pa.array(topics, pa.string()),
                        pa.array(payloads, pa.string()),
                    ],
                    names=["sequence", "time", "topic", "payload"],
                )

    def _messages(self, wire: Wire, first: int, count: int) -> Iterator[tuple[int, int, bytes, bytes]]:
        start = {"deliver_policy": "by_start_sequence", "opt_start_seq": first, "ack_policy": "none"}
        config = {**start, "mem_storage": True, "inactive_threshold": EXPIRES_NS}
        made = wire.call(f"CONSUMER.CREATE.{self._stream}", {"stream_name": self._stream, "config": config})
        more = f"CONSUMER.MSG.NEXT.{self._stream}.{made['name']}"
        requests = ({"batch": min(ASKED, count - done), "expires": EXPIRES_NS} for done in range(0, count, ASKED))
        for request in islice(requests, 2):
            wire.ask(more, request)
        for number, (words, payload) in enumerate(islice(wire.messages(), count), 1):
            if number % ASKED == 0 and (request := next(requests, {})):
                wire.ask(more, request)
            _, sequence, _, stored_ns, _ = words[3].rsplit(b".", 4)
            yield int(sequence), int(stored_ns) // 1000, words[1], payload


class RawWriter(DataSourceArrowWriter):
    def __init__(self, options: Mapping[str, str]) -> None:
        self._url, self._stream = options["url"], options["stream"].encode()
        self._job = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None
        prefix = f"{self._job}/{context.partitionId()}".encode()
        sent = acknowledged = 0
        with Wire(self._url) as wire:
            acks = wire.messages()
            for batch in iterator:
                rows = zip(*(batch.column(name).cast(pa.binary()).to_pylist() for name in WRITTEN), strict=True)
                while some := list(islice(rows, SENT_AT_ONCE)):
                    lines = [self._line(wire, prefix, number, *row) for number, row in enumerate(some, sent)]
                    wire.send(b"".join(lines))
                    sent += len(lines)
                    if sent - acknowledged > UNDER_WAY:
                        acknowledged += _take(acks, UNDER_WAY // 2)
            _take(acks, sent - acknowledged)
        return WriterCommitMessage()

    def _line(self, wire: Wire, prefix: bytes, number: int, topic: bytes, payload: bytes) -> bytes:
        headers = b"NATS/1.0\r\nNats-Msg-Id: %s/%d\r\nNats-Expected-Stream: %s\r\n\r\n" % (prefix, number, self._stream)
        sizes = (len(headers), len(headers) + len(payload))
        return b"HPUB %s %s %d %d\r\n%s%s\r\n" % (topic, wire.inbox, *sizes, headers, payload)


def _take(acks: Iterator[tuple[list[bytes], bytes]], count: int) -> int:
    for _, payload in islice(acks, count):
        _checked(payload)
    return count


def _checked(payload: bytes) -> bytes:
    if b'"error"' in payload or not payload:
        raise RuntimeError(payload.decode() or "nobody answers")
    return payload
