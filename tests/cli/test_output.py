"""What others have written is shown, and does nothing to the terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from aviso_workers import cli
from aviso_workers.cli import output
from aviso_workers.cli.output import table
from aviso_workers.errors import RefusedError
from aviso_workers.ops.agent_report import AgentRow
from aviso_workers.ops.inventory import ResourceUse
from aviso_workers.ops.mirrors import Link
from aviso_workers.ops.reports import ConsumerRow, ServerRow, StreamRow
from tests.cli import command_tables

STEERS = "od\x1b[2J\x9b31m\r\u202egnp\x00"
SHOWN = r"od\x1b[2J\x9b31m\r\u202egnp\x00"


def test_an_error_line(capsys: pytest.CaptureFixture[str]) -> None:
    cli._print_error(RefusedError(f"publish mars.{STEERS}:\nno"))
    assert capsys.readouterr().err == f"aviso-workers: publish mars.{SHOWN}:\nno\n"


def test_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    output.echo(f"not reached: {STEERS}", err=True)
    assert capsys.readouterr().err == f"not reached: {SHOWN}\n"


def test_json(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    document = {"identifier": {"class": STEERS, "größe": '1 "a\\b" €'}}
    output.print_json(document)
    written = capfdbinary.readouterr().out.decode()
    assert json.loads(written) == document
    assert written.rstrip("\n").isprintable()
    assert "größe" in written


COLUMNS = ("app", "agent", "dead letters", "state")


def drawn(rows: list[tuple[str, ...]], width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as capture:
        console.print(table(COLUMNS, rows, width=width))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_table_that_fits_has_a_line_for_each_row() -> None:
    assert drawn([("field-index", "index", "12", ""), ("x", "everything", "0", "paused")], 50) == [
        "APP          AGENT       DEAD LETTERS  STATE",
        "field-index  index       12",
        "x            everything  0             paused",
    ]


def test_a_table_that_is_too_wide_wraps_its_head_and_its_last_column() -> None:
    assert drawn([("field-index", "index", "12", "its consumer is gone, and nobody knows why")], 53) == [
        "                    DEAD",
        "APP          AGENT  LETTERS  STATE",
        "field-index  index  12       its consumer is gone,",
        "                             and nobody knows why",
    ]


def test_a_last_column_that_is_too_wide_all_the_same_is_below_its_row_with_its_name() -> None:
    assert drawn([("field-index", "index", "12", "its consumer is gone, and nobody knows why"), *[("x",) * 4]], 40) == [
        "                    DEAD",
        "APP          AGENT  LETTERS",
        "field-index  index  12",
        "  state: its consumer is gone, and",
        "  nobody knows why",
        "x            x      x",
        "  state: x",
    ]


def test_rows_that_do_not_fit_are_written_as_names_and_values() -> None:
    assert drawn([("field-index", "index", "12", ""), *[("x",) * 4]], 24) == [
        "app: field-index",
        "agent: index",
        "dead letters: 12",
        "",
        "app: x  agent: x",
        "dead letters: x",
        "state: x",
        "",
    ]


def test_the_tables_of_the_commands_are_those_that_were_read_and_kept() -> None:
    kept = Path(__file__).parents[1] / "data" / "tables.txt"
    assert command_tables.drawn().splitlines() == kept.read_text().splitlines()


@pytest.mark.parametrize(
    ("row", "names"),
    [
        (
            AgentRow,
            "state since why needs also cure app agent stream pending ack_pending redelivered dead_letters rate",
        ),
        (
            ConsumerRow,
            "stream consumer filters pending ack_pending redelivered rate deliveries last_settled paused trouble needs",
        ),
        (
            StreamRow,
            "stream messages bytes used deleted rate last time consumers replicas current leader sealed trouble",
        ),
        (ServerRow, "server bytes may_store free trouble"),
        (Link, "stream origin relation api whole lag active_seconds trouble other_history equal"),
        (ResourceUse, "what used limit"),
    ],
)
def test_the_names_of_rows_in_json_stay_what_programs_read(row: type[msgspec.Struct], names: str) -> None:
    assert row.__struct_encode_fields__ == tuple(names.split())


def test_no_table_is_wider_than_a_terminal_or_cuts_anything() -> None:
    drawn = command_tables.drawn()
    assert [line for line in drawn.splitlines() if len(line) > command_tables.WIDTH] == []
    words = " ".join(drawn.split())
    for _, rows in command_tables.tables().values():
        assert [cell for row in rows for cell in row if cell not in words] == []
