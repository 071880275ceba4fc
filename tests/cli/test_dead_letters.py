"""`aviso-workers dead-letters ls|show|retry|drop` on a real server."""

from __future__ import annotations

import base64
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from aviso_workers import App, Notification, Reject, RetryPolicy
from aviso_workers.cli import dead_letters as cli
from aviso_workers.events import Settled
from aviso_workers.state import own_streams
from tests.cli.conftest import Ran
from tests.waits import PATIENCE_SECONDS

Run = Callable[..., Ran]


DEAD_LETTERS = own_streams.of_app(own_streams.DEAD_LETTERS, "field")
RETRIES = own_streams.of_app(own_streams.RETRIES, "field")

FIELDS = """
from aviso_workers.state import own_streams
from aviso_workers import App, Notification


app = App("fields")


@app.agent("mars")
async def index_field(notification: Notification):
    pass
"""


class Deployment:
    """The app `field` with the agents `index`, which rejects even steps while it is `broken`, and `count`."""

    def __init__(self, config: Path) -> None:
        self.config = config
        self.broken = True
        self.handled: list[tuple[str, int]] = []

    def publish(self, *steps: int, payload: Any = None) -> None:
        async def publish() -> None:
            async with App("tests", config=self.config) as app:
                for step in steps:
                    await app.notify("mars", {"class": "od", "step": step}, payload)

        anyio.run(publish)

    def work(self, settlements: int) -> None:
        """Run a worker until so many deliveries are settled, dead letters included."""
        app, stop, left = App("field", config=self.config), anyio.Event(), [settlements]

        @app.agent("mars")
        async def index(notification: Notification[Any]) -> None:
            self.handled.append(("index", notification.sequence))
            if self.broken and int(notification.identifier["step"]) % 2 == 0:
                raise Reject("the index is full, and so is its neighbour, and there is no third one in this town")

        @app.agent("mars", retry=RetryPolicy(attempts=1))
        async def count(notification: Notification[Any]) -> None:
            self.handled.append(("count", notification.sequence))
            if self.broken and notification.identifier["step"] == "3":
                raise RuntimeError("\x1b[31mno counter")

        def note(event: object) -> None:
            left[0] -= isinstance(event, Settled)
            if left[0] == 0:
                stop.set()

        async def work() -> None:
            with anyio.fail_after(PATIENCE_SECONDS):
                async with app:
                    await app._work(stop)

        app.events.listen(note)
        anyio.run(work)


@pytest.fixture
def deployment(config: Path) -> Deployment:
    return Deployment(config)


@pytest.fixture
def dead_lettered(deployment: Deployment) -> Deployment:
    """Steps 1 to 4 are worked off: index has given up 2 and 4, count 3."""
    deployment.publish(1, 2, 3, 4, payload={"location": "here", "größe": 1.5})
    deployment.work(8)
    deployment.handled.clear()
    return deployment


@pytest.fixture
def dead_letters(run: Run, config: Path) -> Callable[..., list[dict[str, Any]]]:
    """`dead_letters("--agent", "index")`: the listed ones, as documents."""

    def dead_letters(*arguments: str) -> list[dict[str, Any]]:
        ran = run("dead-letters", "ls", *arguments, "--json", "--config", config)
        assert (ran.code, ran.err) == (0, ""), ran
        return [json.loads(line) for line in ran.lines]

    return dead_letters


def of(documents: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return sorted((dead_letter["agent"], dead_letter["original"]["sequence"]) for dead_letter in documents)


@pytest.mark.parametrize("command", [("ls",), ("retry",), ("retry", "--yes"), ("drop", "--yes")])
def test_where_there_is_none_that_is_said(run: Run, config: Path, command: tuple[str, ...]) -> None:
    ran = run("dead-letters", *command, "--config", config)
    assert ran == Ran(code=0, out="no dead letters\n", err="")


@pytest.mark.parametrize("command", [("ls",), ("retry", "--yes"), ("drop", "--yes")])
@pytest.mark.parametrize("select", [("--agent", "indx"), ("--reason", "nonsense")])
def test_where_none_matches_it_says_how_many_there_are(
    run: Run, config: Path, dead_lettered: Deployment, command: tuple[str, ...], select: tuple[str, ...]
) -> None:
    ran = run("dead-letters", *command, *select, "--config", config)
    assert ran == Ran(code=0, out="no dead letter matches, of 3 in all\n", err="")


@pytest.mark.parametrize("command", ["ls", "retry", "drop"])
def test_an_agent_that_the_app_does_not_have_is_refused(
    run: Run, unreachable: Path, tmp_path: Path, command: str
) -> None:
    (tmp_path / "fields_of_dead_letters.py").write_text(FIELDS)
    of_app = ("--app", "fields_of_dead_letters:app", "--config", unreachable)
    ran = run("dead-letters", command, "--agent", "index_fild", *of_app)
    assert ran == Ran(2, "", "aviso-workers: app 'fields' has no agent 'index_fild'; it has: index_field\n")


def test_they_are_listed(run: Run, config: Path, dead_lettered: Deployment) -> None:
    ran = run("dead-letters", "ls", "--config", config)
    assert (ran.code, ran.err) == (0, "")
    names, *rows = (line.split(maxsplit=7) for line in ran.lines)
    assert names == ["SEQUENCE", "TIME", "APP", "AGENT", "REASON", "ATTEMPTS", "ORIGINAL", "ERROR"]
    assert len(rows) == 3
    told = {row[6]: [row[2], row[3], row[4], row[5], row[7]] for row in rows}
    assert told["MARS@2"] == [
        *("field", "index", "rejected", "1"),
        "Reject: the index is full, and so is its neighbour, and there is no third one in this town",
    ]
    assert told["MARS@3"] == ["field", "count", "attempts_exhausted", "1", "RuntimeError: ?[31mno counter"]
    assert len({line.index(row[6]) for line, row in zip(ran.lines[1:], rows, strict=True)}) == 1, "one below another"


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are few, as three are stored."""
    monkeypatch.setattr(cli, "FEW", 2)


@pytest.mark.usefixtures("few")
def test_many_are_grouped_by_what_they_have_in_common(run: Run, config: Path, dead_lettered: Deployment) -> None:
    ran = run("dead-letters", "ls", "--config", config)
    assert (ran.code, ran.err) == (0, "--each lists each of them, and `dead-letters show SEQUENCE` shows one\n")
    names, *rows = (re.split(r"  +", line) for line in ran.lines)
    assert names == ["DEAD LETTERS", "APP", "AGENT", "REASON", "AT", "FIRST", "LAST", "NEWEST", "ITS ERROR"]
    rejected, exhausted = rows
    assert rejected[:4] == ["2", "field", "index", "rejected"]
    assert re.fullmatch(r"test_dead_letters\.py:\d+", rejected[4])
    assert rejected[5] <= rejected[6]
    assert rejected[8] == "Reject: the index is full, and so is its neighbour, and there is no third one in this town"
    assert exhausted[:4] == ["1", "field", "count", "attempts_exhausted"]

    shown = run("dead-letters", "show", rejected[7], "--config", config)
    assert "error: Reject: the index is full" in shown.out
    assert len(run("dead-letters", "ls", "--each", "--config", config).lines) == 4
    assert len(run("dead-letters", "ls", "1", "--config", config).lines) == 2


def test_those_that_are_retried_at_a_rate_go_one_after_the_other(
    run: Run, config: Path, dead_lettered: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def note(deadline: float) -> None:
        waits.append(deadline)

    monkeypatch.setattr(anyio, "sleep_until", note)
    ran = run("dead-letters", "retry", "--all", "--rate", "0.5", "--yes", "--config", config)
    assert ran.lines[-1] == "3 of 3 handed back"
    first, second = waits
    assert second - first == pytest.approx(2), "seconds after so many at this rate"


@pytest.mark.slow
def test_a_terminal_of_80_columns_gets_a_table_that_fits(config: Path, dead_lettered: Deployment) -> None:
    command = [sys.executable, "-m", "aviso_workers", "dead-letters", "ls", "--config", str(config)]
    ours, theirs = pty.openpty()
    environ = {**os.environ, "COLUMNS": "80", "TERM": "xterm"}
    subprocess.run(command, stdout=theirs, check=True, timeout=PATIENCE_SECONDS, env=environ)
    os.close(theirs)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", os.read(ours, 65536).decode()).splitlines()
    os.close(ours)
    assert max(map(len, lines)) <= 80, lines
    assert re.fullmatch(r"sequence: 1  time: \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ  app: field  agent: .*", lines[0]), lines


def test_one_is_shown_whole(
    run: Run, config: Path, dead_lettered: Deployment, dead_letters: Callable[..., list[dict[str, Any]]]
) -> None:
    (dead_letter,) = dead_letters("--agent", "count")
    ran = run("dead-letters", "show", str(dead_letter["sequence"]), "--config", config)
    assert (ran.code, ran.err) == (0, "")
    head, _, body = ran.out.partition("\n\n")
    told = dict(line.split(": ", 1) for line in head.splitlines())
    assert told["error"] == "RuntimeError: ?[31mno counter"
    assert "test_dead_letters.py" in told["traceback"]
    assert (told["original"], told["subject"], told["attempts"]) == ("MARS@3", "mars.od.3", "1")
    assert json.loads(body) == {"location": "here", "größe": 1.5}
    assert '\n  "größe": 1.5' in body

    as_json = run("dead-letters", "show", str(dead_letter["sequence"]), "--json", "--config", config)
    assert json.loads(as_json.out) == dead_letter
    assert base64.b64decode(dead_letter["original"]["data"]) == '{"größe":1.5,"location":"here"}'.encode()


def test_one_that_is_not_there_cannot_be_shown(run: Run, config: Path, dead_lettered: Deployment) -> None:
    ran = run("dead-letters", "show", "99", "--config", config)
    assert (ran.code, ran.out, ran.err) == (1, "", "aviso-workers: no dead letter 99\n")


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ((), [("count", 3), ("index", 2), ("index", 4)]),
        (("--agent", "index"), [("index", 2), ("index", 4)]),
        (("--app", "other"), []),
        (("--reason", "attempts_exhausted"), [("count", 3)]),
        (("--stream", "mars"), [("count", 3), ("index", 2), ("index", 4)]),
        (("--error", "no counter"), [("count", 3)]),
        (("--since", "2100-01-01T00:00:00Z"), []),
        (("--until", "2100-01-01T00:00:00Z", "--agent", "count"), [("count", 3)]),
        (("--until", "1600000000"), []),
    ],
)
def test_they_are_filtered(
    dead_lettered: Deployment,
    dead_letters: Callable[..., list[dict[str, Any]]],
    filters: tuple[str, ...],
    expected: list[Any],
) -> None:
    assert of(dead_letters(*filters)) == expected


@pytest.mark.parametrize("command", ["retry", "drop"])
def test_nothing_is_done_without_a_yes(
    run: Run, config: Path, dead_lettered: Deployment, dead_letters: Callable[..., list[dict[str, Any]]], command: str
) -> None:
    asked = run("dead-letters", command, "--agent", "index", "--config", config)
    assert (asked.code, asked.err) == (2, "nothing was done; say --yes, or name the dead letters by their sequences\n")
    assert [line.split() for line in asked.lines[1:]] == [["field", "index", "rejected", "2"]]
    dry = run("dead-letters", command, "--dry-run", "--yes", "--config", config)
    assert (dry.code, dry.err, len(dead_letters())) == (0, "", 3)


@pytest.mark.parametrize("command", ["retry", "drop"])
def test_those_of_all_apps_are_taken_only_where_that_is_said(
    run: Run, config: Path, dead_lettered: Deployment, dead_letters: Callable[..., list[dict[str, Any]]], command: str
) -> None:
    ran = run("dead-letters", command, "--yes", "--config", config)
    assert (ran.code, ran.err) == (
        2,
        "nothing was done; select dead letters by sequence or by an option, or say --all\n",
    )
    both = run("dead-letters", command, "--all", "--agent", "index", "--yes", "--config", config)
    assert (both.code, both.err) == (2, "aviso-workers: --all is for those of all apps: leave out what selects some\n")
    assert len(dead_letters()) == 3
    ran = run("dead-letters", command, "--all", "--yes", "--config", config)
    assert (ran.code, ran.lines[-1].split()[:3]) == (0, ["3", "of", "3"]), ran


@pytest.mark.slow
def test_a_retry_hands_them_to_the_agent_that_failed(
    run: Run, config: Path, dead_lettered: Deployment, dead_letters: Callable[..., list[dict[str, Any]]]
) -> None:
    ran = run("dead-letters", "retry", "--agent", "index", "--yes", "--config", config)
    assert (ran.code, ran.lines[-1]) == (0, "2 of 2 handed back"), ran
    assert of(dead_letters()) == [("count", 3)]

    dead_lettered.broken = False
    dead_lettered.work(2)
    assert sorted(dead_lettered.handled) == [("index", 2), ("index", 4)]


def test_some_are_retried_by_their_sequences(
    run: Run, config: Path, dead_lettered: Deployment, dead_letters: Callable[..., list[dict[str, Any]]]
) -> None:
    first, second, third = (dead_letter["sequence"] for dead_letter in dead_letters())
    missing = run("dead-letters", "retry", str(first), "98", "99", "--config", config)
    assert (missing.code, missing.err) == (1, "aviso-workers: no such dead letter: 98, 99; nothing was done\n")
    ran = run("dead-letters", "retry", str(third), str(first), "--config", config)
    assert (ran.code, ran.lines[-1]) == (0, "2 of 2 handed back"), ran
    assert [dead_letter["sequence"] for dead_letter in dead_letters()] == [second]


def test_what_is_dropped_is_gone(
    run: Run, config: Path, dead_lettered: Deployment, dead_letters: Callable[..., list[dict[str, Any]]]
) -> None:
    ran = run("dead-letters", "drop", "--reason", "rejected", "--yes", "--config", config)
    assert (ran.code, ran.lines[-1]) == (0, "2 of 2 erased"), ran
    assert of(dead_letters()) == [("count", 3)]


def test_a_letter_whose_agent_reads_no_retries_stays_and_the_rest_is_told(
    run: Run, config: Path, dead_lettered: Deployment, dead_letters: Callable[..., list[dict[str, Any]]]
) -> None:
    async def forget_the_readers() -> None:
        async with App("tests", config=config) as app:
            await app.session.admin.delete_stream(RETRIES)

    anyio.run(forget_the_readers)
    ran = run("dead-letters", "retry", "--all", "--yes", "--config", config)
    assert (ran.code, ran.lines[-1]) == (1, "0 of 3 handed back"), ran
    assert "has no consumer for retries: start a worker of the app first" in ran.err
    assert len(dead_letters()) == 3


def test_what_is_no_dead_letter_is_left_out_and_told(run: Run, config: Path, dead_lettered: Deployment) -> None:
    async def store() -> None:
        from aviso_workers.aviso.codec import Message

        async with App("tests", config=config) as app:
            message = Message(subject="aviso_workers.dead_letters.field.b", data=b"?")
            await app.session.backend.publish(
                message, message_id="x", stream=DEAD_LETTERS, timeout_seconds=PATIENCE_SECONDS
            )

    anyio.run(store)
    ran = run("dead-letters", "ls", "--config", config)
    assert (ran.code, len(ran.lines)) == (0, 1 + 3), "the names of the columns, and what can be read"
    said = (
        f"{DEAD_LETTERS}@4 is left out: message 4 of {DEAD_LETTERS} is not a dead letter: 'Aviso-App'; to remove it: "
    )
    assert ran.err == f"{said}nats stream rmm {DEAD_LETTERS} 4\n"


def test_a_date_that_is_none_is_refused_before_anything_is_connected(run: Run, unreachable: Path) -> None:
    ran = run("dead-letters", "ls", "--since", "noon", "--config", unreachable)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("aviso-workers: --since must be a day such as 2026-11-20, a time such as")


def test_an_end_before_the_start_is_refused(run: Run, unreachable: Path) -> None:
    dates = ("--since", "2026-11-20T06:00:00Z", "--until", "2026-11-19T06:00:00Z")
    ran = run("dead-letters", "ls", *dates, "--config", unreachable)
    complaint = "aviso-workers: --until 2026-11-19T06:00:00Z is before --since 2026-11-20T06:00:00Z\n"
    assert ran == Ran(2, "", complaint)
