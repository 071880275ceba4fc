"""The tables of the commands in a terminal of 80 columns. `python -m tests.cli.command_tables` prints them."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from rich.console import Console

from aviso_workers.aviso.codec import Message
from aviso_workers.cli import agents, backup, consumers, dead_letters, report, streams
from aviso_workers.cli import server as server_commands
from aviso_workers.cli.output import table
from aviso_workers.ops.agent_report import AgentRow
from aviso_workers.ops.inventory import ResourceUse
from aviso_workers.ops.mirrors import Link
from aviso_workers.ops.reports import ConsumerRow, ServerRow, StreamRow
from aviso_workers.state.dead_letter_records import DeadLetter

WIDTH = 80
Rows = list[Sequence[str]]


def tables() -> dict[str, tuple[Sequence[str], Rows]]:
    """Return the columns and some rows of each command that prints a table."""
    return {
        "agents ls": (agents.AGENTS, [agents._row(each) for each in AGENTS]),
        "consumers ls": (consumers.CONSUMERS, [consumers._consumer_row(each) for each in CONSUMERS]),
        "report streams": (report.STREAMS, [report._stream_row(each) for each in STREAMS]),
        "report streams, its servers": (report.SERVERS, [report._server_row(each) for each in SERVERS]),
        "report mirrors": (report.MIRRORS, [report._mirror_row(each) for each in MIRRORS]),
        "report account": (report.ACCOUNT, [report._use_row(each) for each in USES]),
        "dead-letters ls": (dead_letters.DEAD_LETTERS, [dead_letters._row(DEAD_LETTER)]),
        "streams ls": (
            streams.STREAMS,
            [[*streams._stream_row(document)] for document in LISTED],
        ),
        "streams gaps": (streams.GAPS, [("3", "5", "3"), ("1000007", "1000007", "1")]),
        "streams plan": (
            streams.PLAN,
            [
                ("MARS", "", "update", "max_age: 30d -> 7d"),
                ("MARS", "display", "create", ""),
                (
                    "ORDERS",
                    "",
                    "cannot",
                    "storage: file -> memory; only a stream that is recreated has another one",
                ),
            ],
        ),
        "streams show": (
            streams.POLICY,
            [
                ("max_age", "30d", "unlimited", "NO", "notification_schema.mars.storage_policy.retention_time"),
                ("replicas", "3", "3", "yes", "notification_backend.jetstream.replicas"),
            ],
        ),
        "backup ls": (
            backup.BACKUPS,
            [
                [*backup._cells(KEPT)],
            ],
        ),
        "server status": (
            server_commands.SERVERS,
            [("n-1", "12345", "nats://127.0.0.1:4222", "http://127.0.0.1:8222", "ok")],
        ),
    }


LISTED: list[dict[str, str | int]] = [
    {
        "stream": "MARS",
        "configured": "notification_schema",
        "messages": 1_204_567,
        "bytes": 412_345_678,
        "consumers": 12,
        "note": "sealed: it takes no publish any more",
    },
    {"stream": "KV_field__state", "configured": "-", "messages": 12, "bytes": 2345, "consumers": 0, "note": ""},
]
AGENTS = [
    AgentRow(
        app="field-index",
        agent="index_field",
        stream="MARS",
        pending=120456,
        ack_pending=64,
        redelivered=2,
        dead_letters=17,
        rate=-412.5,
        state="failing",
        why="since 2026-11-20T06:00:00Z, 300 times: ConnectionError: no index (fields.py:12); 2 are tried again",
    ),
    AgentRow(
        app="alerts",
        agent="page",
        stream="DISS",
        pending=3,
        ack_pending=0,
        redelivered=0,
        dead_letters=0,
        rate=0.0,
        state="no worker",
        why="3 wait, and no worker runs",
        needs=True,
    ),
    AgentRow(
        app="alerts",
        agent="tell",
        stream="DISS",
        pending=None,
        ack_pending=None,
        redelivered=None,
        dead_letters=None,
        rate=None,
        state="unknown",
        why="not known, since no server answers for DISS: whether it is stuck",
        needs=True,
    ),
]
DEAD_LETTER = DeadLetter(
    sequence=12,
    time=datetime(2026, 11, 20, 6, 0, 0, 123456, tzinfo=UTC),
    app="field-index",
    agent="index_field",
    reason="attempts_exhausted",
    error="ConnectionError: the index at db.example.org refuses connections from here",
    traceback="",
    attempts=12,
    stream="MARS",
    original=Message(subject="mars.od", data=b"", sequence=4711),
    stored=Message(subject="", data=b""),
)
KEPT = ("MARS", "2026-11-20T06:00:00Z", 1_204_567, 412_345_678, "2.15.0", "full", "kept/MARS/20261120T060000Z")
CONSUMERS = [
    ConsumerRow(
        stream="MARS",
        consumer="field-index__index_field",
        filters=(),
        pending=120456,
        ack_pending=64,
        redelivered=2,
        rate=-412.5,
        deliveries=1_000_000,
        last_settled=None,
        paused=False,
        trouble="",
        needs=False,
    ),
    ConsumerRow(
        stream="DISS",
        consumer="alerts__page",
        filters=(),
        pending=3,
        ack_pending=0,
        redelivered=0,
        rate=0.0,
        deliveries=0,
        last_settled=None,
        paused=False,
        trouble="3 pending, and no worker pulls them",
        needs=True,
    ),
]
STREAMS = [
    StreamRow(
        stream="MARS",
        messages=1_204_567,
        bytes=412_345_678,
        used=0.41,
        deleted=3,
        rate=412.5,
        last=None,
        time=datetime(2026, 11, 20, 6, tzinfo=UTC),
        consumers=12,
        replicas=3,
        current=3,
        leader="n1",
        sealed=False,
        trouble="",
    ),
    StreamRow(
        stream="KV_field__state",
        messages=12,
        bytes=2345,
        used=None,
        deleted=0,
        rate=0.1,
        last=None,
        time=datetime(2026, 11, 20, 6, tzinfo=UTC),
        consumers=0,
        replicas=3,
        current=2,
        leader="n2",
        sealed=False,
        trouble="not current: n3",
    ),
]
SERVERS = [ServerRow(server="n1", bytes=412_345_678, may_store=500_000_000_000, free=None, trouble="")]
MIRRORS = [
    Link(stream="MARS", origin="MARS", relation="mirror", api="$JS.hub.API", lag=3, active_seconds=0.4, equal=22),
    Link(stream="ALL", origin="DISS", relation="source", api="", lag=0, trouble="it has never contacted its origin"),
]
USES = [ResourceUse(what="bytes on disk", used=412_345_678, limit=-1), ResourceUse(what="streams", used=12, limit=100)]


def drawn() -> str:
    """Return all tables as text."""
    return "\n".join(f"{name}:\n\n{text}" for name, text in _texts())


def _texts() -> Iterator[tuple[str, str]]:
    console = Console(width=WIDTH, file=io.StringIO())
    for name, (columns, rows) in tables().items():
        with console.capture() as capture:
            console.print(table(columns, rows, width=WIDTH))
        yield name, "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


if __name__ == "__main__":
    print(drawn(), end="")
