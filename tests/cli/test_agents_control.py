"""`aviso-workers agents ls|show|pause|resume|reset|rm` on a real server."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from aviso_workers import App
from aviso_workers.aviso.literals import SECOND
from aviso_workers.backends.buckets import open_existing
from aviso_workers.cli import agents as agents_command
from aviso_workers.jetstream.specs import ConsumerSpec
from aviso_workers.ops import agent_control
from aviso_workers.ops.audit import Audit, this_user
from aviso_workers.server import NatsServer
from aviso_workers.state.audit_records import RecordedAction
from tests.cli.conftest import Ran
from tests.conftest import Start
from tests.waits import PATIENCE_SECONDS

Run = Callable[..., Ran]

AGENTS = """
from aviso_workers import App, Notification, Reject

app = App("field")


@app.agent("mars", where={"step": ["1", "2", "3", "4"]}, concurrency=2, timeout=30)
async def index(notification: Notification) -> None:
    if notification.identifier["step"] == "4":
        raise Reject("there is no step 4")
    with open("indexed", "a") as index:
        index.write(notification.identifier["step"] + "\\n")


@app.agent("mars", name="everything")
async def other(notification: Notification) -> None: ...
"""


@pytest.fixture(autouse=True)
def agents(tmp_path: Path) -> str:
    """MODULE:APP. A module of the test's own, because each one is imported once in a process."""
    name = f"agents_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(AGENTS)
    return f"{name}:app"


@pytest.fixture
def worked(run: Run, config: Path, start: Start, agents: str) -> Callable[..., list[str]]:
    """`worked(1, 2)`: publishes these steps, runs a worker until they are settled, and returns what index was given."""

    def worked(*steps: int) -> list[str]:
        for step in steps:
            assert run("notify", "mars", "class=od", f"step={step}", "--config", config).code == 0
        worker = start("worker", agents, "--config", config)
        worker.until("agent.started")
        while any(row["pending"] or row["ack_pending"] for row in listed(run, config)):
            pass
        assert worker.end(signal.SIGTERM) == 0
        return config.with_name("indexed").read_text().split()

    return worked


def listed(run: Run, config: Path, *what: str) -> list[dict[str, Any]]:
    """The agents that `agents ls` lists."""
    ran = run("agents", "ls", *what, "--seconds", "0.1", "--json", "--config", config)
    found = [json.loads(line) for line in ran.lines]
    assert (ran.code, ran.err) == (int(any(row["needs"] for row in found)), ""), ran
    return found


def shown(run: Run, config: Path, *what: str) -> list[dict[str, str]]:
    """The agents that `agents show` shows."""
    ran = run("agents", "show", *what, "--json", "--config", config)
    assert (ran.code, ran.err) == (0, "")
    return [json.loads(line) for line in ran.lines]


BLOCKING = """
from aviso_workers import App, RetryPolicy, Notification

app = App("field")


@app.agent("mars", order_by=["class"], retry=RetryPolicy(first=0.02, attempts=None))
async def index(notification: Notification) -> None:
    if notification.identifier["step"] in "13":
        raise ValueError("no such field")
"""


@pytest.mark.slow
def test_what_an_agent_is_blocked_at_is_listed_and_decided_about(
    run: Run, config: Path, start: Start, tmp_path: Path
) -> None:
    name = f"blocking_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(BLOCKING)
    for step in range(1, 4):
        assert run("notify", "mars", "class=od", f"step={step}", "--config", config).code == 0
    worker = start("worker", f"{name}:app", "--config", config)
    worker.until("notification.retried")
    while (
        not (listed := run("agents", "retrying", "field/index", "--json", "--config", config)).lines
        or not (json.loads(listed.lines[0])["blocked"])
    ):
        pass
    [row] = map(json.loads, listed.lines)
    assert (row["sequence"], row["attempts"], row["error"]) == (1, None, "ValueError: no such field")
    assert (row["key"], row["behind"], row["attempt"] >= 6) == ("od", 2, True)
    state = run("agents", "ls", "field", "--seconds", "0.1", "--json", "--config", config)
    assert "at MARS@1 (key od), 2 wait behind it: ValueError: no such field" in state.out
    nothing = run("agents", "retry", "field/index", "9", "--config", config)
    assert (nothing.code, "not retried: 9 is in no stream that it reads" in nothing.err) == (1, True)
    waiting = run("agents", "retry", "field/index", "2", "--config", config)
    assert (waiting.code, "MARS@2: not retried: no worker that runs knows of it" in waiting.out) == (1, True)
    neither = run("agents", "skip", "field/index", "--config", config)
    assert (neither.code, "say which" in neither.err) == (2, True), neither
    again = run("agents", "retry", "field/index", "1", "--config", config)
    assert (again.code, "MARS@1: failed again: ValueError: no such field; the next" in again.out) == (1, True), again
    plan = run("agents", "skip", "field/index", "1", "--config", config)
    assert "1 of index to be skipped; 2 that wait behind them run without" in plan.out
    assert "any number" in run("agents", "retrying", f"{name}:app/index", "--config", config).out
    skipped = run("agents", "skip", "field/index", "--all", "--yes", "--config", config)
    assert (skipped.code, skipped.lines[-1]) == (0, "MARS@1: skipped: it is a dead letter now")
    while run("agents", "retrying", "field/index", "--json", "--config", config).lines[0:1] != []:
        if json.loads(run("agents", "retrying", "field/index", "--json", "--config", config).lines[0])["key"] == "od":
            break  # the next one of the key fails
    assert worker.end(signal.SIGTERM) == 0


@pytest.mark.slow
def test_a_paused_agent_is_given_nothing_and_a_resumed_one_goes_on(
    run: Run, config: Path, worked: Callable[..., list[str]], agents: str
) -> None:
    worked(1)
    for app in ("field", agents):
        paused = run("agents", "pause", f"{app}/index", "--config", config)
        assert paused == Ran(code=0, out="index is paused until it is resumed\n", err="")
        (row,) = (row for row in listed(run, config, agents) if row["agent"] == "index")
        assert (row["state"], row["why"]) == ("paused", f"by {this_user()} until it is resumed")
        resumed = run("agents", "resume", f"{app}/index", "--config", config)
        assert resumed == Ran(code=0, out="index is resumed\n", err="")
    assert {row["state"] for row in listed(run, config)} == {"at rest"}
    assert worked(2) == ["1", "2"]


@pytest.mark.slow
def test_a_pause_may_have_an_end(run: Run, config: Path, worked: Callable[..., list[str]]) -> None:
    worked(1)
    paused = run("agents", "pause", "field/index", "--for", "10m", "--config", config)
    until = datetime.fromisoformat(paused.out.removeprefix("index is paused until ").strip())
    assert timedelta(minutes=9) < until - datetime.now(UTC) < timedelta(minutes=10)
    (row,) = (row for row in listed(run, config) if row["agent"] == "index")
    assert abs(datetime.fromisoformat(row["why"].partition(" until ")[2]) - until) < timedelta(seconds=2)


@pytest.mark.slow
def test_a_pause_says_by_whom_and_why_as_long_as_it_is_that_one(
    run: Run, config: Path, worked: Callable[..., list[str]]
) -> None:
    def said() -> str:
        (row,) = (row for row in listed(run, config) if row["agent"] == "index")
        return str(row["why"])

    async def pause_by_other_means() -> None:
        async with App("tests", config=config) as app:
            until = datetime.now(UTC) + timedelta(hours=1)
            await app.session.admin.pause_consumer("MARS", "field__index", until=until)

    worked(1)
    reason = ("--note", "the archive is down\u202e")
    assert run("agents", "pause", "field/index", *reason, "--config", config).code == 0
    assert said() == f"by {this_user()} until it is resumed: the archive is down\\u202e"
    anyio.run(pause_by_other_means)
    assert "the archive" not in said()
    assert run("agents", "resume", "field/index", "--config", config).code == 0
    assert run("agents", "rm", "field/index", "--workers-stopped", "--yes", "--config", config).code == 0


@pytest.mark.slow
def test_what_commands_do_stands_in_the_audit(
    run: Run, config: Path, worked: Callable[..., list[str]], agents: str
) -> None:
    worked(1, 4)
    for command in (
        ("agents", "pause", "field/index", "--for", "2h", "--note", "the archive is down"),
        ("agents", "resume", f"{agents}/index"),
        ("agents", "reset", "field/everything", "--to", "1"),  # which only says what it would do
        ("agents", "reset", "field/everything", "--to", "1", "--yes"),
        ("dead-letters", "drop", "--agent", "index", "--yes"),
        ("streams", "purge", "MARS", "--before", "2", "--yes"),
        ("streams", "apply"),
        ("mirror", "fence", "MARS", "--yes"),
        ("mirror", "unfence", "MARS", "--yes"),
        ("delete", "mars@2", "--yes"),
        ("agents", "rename", "field/everything", "moved/others", "--workers-stopped", "--yes"),
        ("agents", "rm", "moved/others", "--workers-stopped", "--yes"),
        ("consumers", "rm", "MARS", "field__index", "--yes"),
        ("streams", "wipe", "mars", "--yes"),
        ("streams", "rm", "MARS", "--yes"),
    ):
        run(*command, "--config", config)

    async def recorded() -> list[RecordedAction]:
        async with App("tests", config=config) as app:
            return await Audit(app.session.admin, app.config).newest(100)

    found = anyio.run(recorded)[::-1]
    assert [(each.record.action, each.record.of, each.end and each.end.state) for each in found] == [
        ("pause-agent", "field/index", "done"),
        ("resume-agent", "field/index", "done"),
        ("reset-agent", "field/everything", "done"),
        ("drop-dead-letters", "dead letters", "done"),
        ("purge-stream", "MARS", "done"),
        ("fence-stream", "MARS", "done"),
        ("unfence-stream", "MARS", "done"),
        ("delete-notification", "mars@2", "done"),
        ("rename-agent", "field/everything", "done"),
        ("remove-agent", "moved/others", "done"),
        ("remove-consumer", "MARS field__index", "done"),
        ("wipe-streams", "MARS", "done"),
        ("remove-stream", "MARS", "done"),
    ]
    assert {(each.record.who, each.record.by_command) for each in found} == {(this_user(), True)}
    pause, reset, drop, purge = (found[at] for at in (0, 2, 3, 4))
    assert pause.record.selection == {"for": "2h", "why": "the archive is down"}
    ended = [each.end for each in (reset, drop, purge) if each.end]
    assert [[one.text for one in end.affected] for end in ended] == [
        ["given again: MARS@1 to 2 of field/everything"],
        ["erased: MARS@2 of field/index, dead letters 1"],
        ["purged: MARS@1"],
    ]
    assert [end.result for end in ended][1:] == ["1 of 1 erased", "MARS: 1 removed"]


def test_a_pause_of_no_time_is_refused(run: Run, unreachable: Path) -> None:
    ran = run("agents", "pause", "field/index", "--for", "0s", "--config", unreachable)
    assert (ran.code, ran.err.startswith("aviso-workers: --for 0s would pause nothing")) == (2, True), ran


@pytest.mark.slow
def test_a_reset_tells_what_it_would_do_and_does_it_with_a_yes(
    run: Run, config: Path, worked: Callable[..., list[str]]
) -> None:
    assert worked(1, 2, 3, 9) == ["1", "2", "3"]
    asked = run("agents", "reset", "field/index", "--to", "2", "--config", config)
    assert (asked.code, asked.err) == (2, "nothing was done; say --yes to reset it\n")
    told = [" ".join(line.split()) for line in asked.lines]
    assert told == ["index of field:", "goes on at MARS@2", "handled again 2", "passed over 0"]

    done = run("agents", "reset", "field/index", "--to", "2", "--yes", "--config", config)
    assert (done.code, done.lines[-1]) == (0, "index goes on at MARS@2, with 2 notifications ahead of it")
    assert worked() == ["1", "2", "3", "2", "3"]


@pytest.mark.slow
def test_a_reset_of_an_agent_without_a_consumer_is_what_is_recorded(
    run: Run, config: Path, worked: Callable[..., list[str]], agents: str
) -> None:
    assert worked(1, 2, 3) == ["1", "2", "3"]
    (row,) = (row for row in shown(run, config, agents) if row["agent"] == "index")
    assert row["recorded position"].startswith("settled up to sequence 3, at 20")
    with_yes = ("--yes", "--config", config)
    assert run("consumers", "rm", "MARS", "field__index", *with_yes).code == 0
    done = run("agents", "reset", "field/index", "--to", "2", *with_yes)
    told = [" ".join(line.split()) for line in done.lines]
    assert (done.code, told) == (
        0,
        [
            "index of field:",
            "goes on at MARS@2",
            "handled again 2",
            "passed over 0",
            "its consumer does not exist; the worker that creates it begins there",
            "index goes on at MARS@2, with 2 notifications ahead of it",
        ],
    )
    assert worked() == ["1", "2", "3", "2", "3"]


@pytest.mark.slow
@pytest.mark.covers("002-03")
def test_a_reset_goes_to_a_date(run: Run, config: Path, worked: Callable[..., list[str]], agents: str) -> None:
    worked(1, 2)
    (_, second) = (json.loads(line) for line in run("replay", "mars", "--config", config).lines)
    done = run("agents", "reset", f"{agents}/index", "--to", second["time"], "--yes", "--config", config)
    assert (done.code, done.lines[-1]) == (0, "index goes on at MARS@2, with 1 notifications ahead of it"), done
    late = run("agents", "reset", f"{agents}/index", "--to", "2100-01-01T00:00:00Z", "--yes", "--config", config)
    assert late.lines[-1] == "index goes on at MARS@3, with 0 notifications ahead of it"


@pytest.fixture
def slow_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's clock is two hours behind the server's, for whatever of it asks for the time."""

    class Behind(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Behind:
            return super().now(tz) - timedelta(hours=2)

    for module in (agents_command, agent_control):
        monkeypatch.setattr(module, "datetime", Behind, raising=False)


@pytest.mark.slow
@pytest.mark.usefixtures("slow_clock")
def test_a_pause_lasts_as_long_as_was_said_where_the_clock_of_the_command_is_slow(
    run: Run, config: Path, worked: Callable[..., list[str]]
) -> None:
    worked(1)
    assert run("agents", "pause", "field/index", "--for", "10m", "--config", config).code == 0
    (row,) = (row for row in listed(run, config) if row["agent"] == "index")
    assert row["state"] == "paused"
    until = datetime.fromisoformat(row["why"].partition(" until ")[2])
    assert timedelta(minutes=9) < until - datetime.now(UTC) < timedelta(minutes=10)


@pytest.mark.slow
@pytest.mark.usefixtures("slow_clock")
def test_a_reset_to_new_handles_nothing_again_where_the_clock_of_the_command_is_slow(
    run: Run, config: Path, worked: Callable[..., list[str]]
) -> None:
    worked(1, 2)
    done = run("agents", "reset", "field/index", "--to", "new", "--yes", "--config", config)
    assert (done.code, done.lines[-1]) == (0, "index goes on at MARS@3, with 0 notifications ahead of it")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (
            ("agents", "pause", "other/index"),
            1,
            "no agent index of app other reads one of the configured streams; ",
        ),
        (
            ("agents", "resume", "field/indx"),
            1,
            "no agent indx of app field reads one of the configured streams; ",
        ),
        (("agents", "pause", "field/index", "--for", "10"), 2, "--for: duration must include a unit"),
        (("agents", "pause", "nowhere:app/index"), 2, "no module 'nowhere' here or installed"),
        (("agents", "reset", "field/index", "--to", "x"), 2, "--to must be a day such as 2026-11-20, a time such as"),
        (("agents", "reset", "field/index", "--to", "9"), 2, "MARS ends at 1: an agent cannot go on at 9"),
    ],
)
def test_what_cannot_be_done_is_told(
    run: Run, config: Path, worked: Callable[..., list[str]], arguments: tuple[str, ...], code: int, complaint: str
) -> None:
    worked(1)
    ran = run(*arguments, "--config", config)
    assert (ran.code, ran.out) == (code, ""), ran
    assert ran.err.startswith(f"aviso-workers: {complaint}"), ran.err


@pytest.mark.slow
def test_agents_tells_what_is_in_effect_and_how_far_each_has_come(
    run: Run, config: Path, worked: Callable[..., list[str]], agents: str
) -> None:
    before = run("agents", "show", agents, "--config", config)
    assert "no worker has ever created its consumer" in before.out
    worked(1)
    run("notify", "mars", "class=od", "step=2", "--config", config)
    told, second = shown(run, config, agents)
    assert {key: told[key] for key in ("event type", "filters", "concurrency", "timeout", "pending")} == {
        "event type": "mars",
        "filters": "mars.*.1, mars.*.2, mars.*.3, mars.*.4",
        "concurrency": "2",
        "timeout": "30 s",
        "pending": "1",
    }
    assert second["where"] == "everything"
    assert "on the server" not in told

    async def shorten() -> None:
        async with App("tests", config=config) as app:
            backend = app.session.backend
            found = (await backend.consumer_info("MARS", "field__index")).config
            spec = {field: found[field] for field in ("durable_name", "filter_subjects", "max_ack_pending")}
            await backend.ensure_consumer("MARS", msgspec.convert({**spec, "ack_wait": SECOND}, ConsumerSpec))

    anyio.run(shorten)
    told, _ = shown(run, config, agents)
    assert (told["ack wait"], told["on the server"]) == ("20 s", "ack wait 1 s, the code says 20 s")


def test_agents_tells_the_policy_where_no_server_answers(run: Run, unreachable: Path, agents: str) -> None:
    ran = run("agents", "show", agents, "--config", unreachable)
    assert (ran.code, "mars.*.1" in ran.out) == (1, True), "how far they have come is half of what was asked for"
    assert ran.err.startswith("how far they have come is not known: no NATS server at nats://127.0.0.1:")


@pytest.mark.slow
@pytest.mark.covers("001-04", "001-38")
def test_the_list_tells_what_is_left(run: Run, config: Path, worked: Callable[..., list[str]], agents: str) -> None:
    worked(1)
    for step in (2, 3, 9):
        run("notify", "mars", "class=od", f"step={step}", "--config", config)
    for what in ((), (agents,)):
        left = [(row["agent"], row["stream"], row["pending"], row["why"]) for row in listed(run, config, *what)]
        assert sorted(left) == [
            ("everything", "MARS", 3, "3 wait, and no worker runs"),
            ("index", "MARS", 2, "2 wait, and no worker runs"),
        ]


@pytest.mark.slow
def test_the_app_of_a_list_is_given_as_elsewhere(
    run: Run, config: Path, worked: Callable[..., list[str]], agents: str
) -> None:
    worked(1)
    for app in (agents, "field"):
        assert {row["agent"] for row in listed(run, config, app)} == {"index", "everything"}, app
        assert [row["agent"] for row in listed(run, config, f"{app}/index")] == ["index"], app
        assert [row["agent"] for row in shown(run, config, f"{app}/index")] == ["index"], app
    for command in ("ls", "show"):
        unknown = run("agents", command, "field/indx", "--config", config)
        complaint = "aviso-workers: no agent indx of app field is known\n"
        assert unknown == Ran(1, "", complaint), command
    other = run("agents", "ls", "fields", "--config", config)
    complaint = "aviso-workers: no agent of app fields is known; there are apps: field\n"
    assert other == Ran(1, "", complaint)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("pause", "field"), "'field' is no APP/AGENT, such as fields/index"),
        (("rm", "field/", "--yes"), "'field/' is no APP[/AGENT], such as fields/index"),
        (("rm", "/index"), "'/index' is no APP[/AGENT], such as fields/index"),
    ],
)
def test_an_agent_is_named_after_its_app(
    run: Run, unreachable: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    assert run("agents", *arguments, "--config", unreachable) == Ran(2, "", f"aviso-workers: {complaint}\n")


@pytest.mark.parametrize(
    ("arguments", "form"),
    [
        (("pause", "index", "--app", "field"), "APP/AGENT"),
        (("rm", "field", "--agent=index", "--yes"), "APP[/AGENT]"),
        (("retrying", "field", "index"), "APP/AGENT"),
    ],
)
def test_another_form_is_refused_with_the_right_one(
    run: Run, unreachable: Path, arguments: tuple[str, ...], form: str
) -> None:
    ran = run("agents", *arguments, "--config", unreachable)
    assert (ran.code, ran.err.startswith(f"Usage: aviso-workers agents {arguments[0]} [OPTIONS] {form}")) == (
        2,
        True,
    ), ran


@pytest.mark.slow
def test_an_app_by_its_name_needs_no_configuration_file(
    run: Run,
    worked: Callable[..., list[str]],
    nats_server: NatsServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    worked(1)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setenv("AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__NATS_URL", nats_server.url)
    ran = run("agents", "ls", "field/index", "--seconds", "0.1", "--json")
    assert (ran.code, [json.loads(line)["agent"] for line in ran.lines]) == (0, ["index"]), ran
    assert run("agents", "show", "field").code == 0
    for verb in ("pause", "resume"):
        ran = run("agents", verb, "field/index")
        assert ran.out.startswith(f"index is {verb}d"), ran


@pytest.mark.slow
@pytest.mark.covers("001-38")
def test_the_list_is_watched_until_ctrl_c(
    run: Run, config: Path, worked: Callable[..., list[str]], start: Start
) -> None:
    worked(1)
    watching = start("agents", "ls", "--watch", "--seconds", "0.1", "--config", config)
    for _ in range(2):
        table = watching.lines(3)
        assert any("index" in line for line in table), table
    assert watching.end(signal.SIGINT) == 130
    assert watching.told == []


def test_a_list_is_watched_or_one_document_a_row(run: Run, unreachable: Path) -> None:
    ran = run("agents", "ls", "--watch", "--json", "--config", unreachable)
    assert (ran.code, ran.out, ran.err) == (2, "", "aviso-workers: say either --watch or --json\n")


@pytest.mark.slow
def test_the_list_tells_how_many_dead_letters_an_agent_has_and_how_fast_its_lag_grows(
    run: Run, config: Path, worked: Callable[..., list[str]], agents: str
) -> None:
    worked(1, 4)
    found = {row["agent"]: (row["dead_letters"], row["rate"]) for row in listed(run, config)}
    assert found == {"everything": (0, 0.0), "index": (1, 0.0)}


@pytest.mark.slow
def test_the_list_tells_of_an_agent_whose_consumer_is_gone(
    run: Run, config: Path, worked: Callable[..., list[str]], agents: str
) -> None:
    worked(1, 2)
    run("notify", "mars", "class=od", "step=3", "--config", config)
    delete_consumer(config, "MARS", "field__index")
    for what in ((), (agents,)):
        ran = run("agents", "ls", *what, "--seconds", "0.1", "--config", config)
        assert ran.code == 0, "it needs somebody after a minute"
        (row,) = [line for line in ran.lines if " index " in line]
        *numbers, state = row.split(maxsplit=8)
        assert numbers == ["field", "index", "MARS", "0", "0", "0", "0", "+0.0"]
        assert state.startswith("consumer gone: a worker makes it again, after sequence 2; the last one of MARS is 3")


@pytest.mark.slow
def test_list_and_policy_tell_that_an_operator_has_removed_a_consumer(
    run: Run, config: Path, worked: Callable[..., list[str]], agents: str
) -> None:
    worked(1, 2)
    assert run("consumers", "rm", "MARS", "field__index", "--yes", "--config", config).code == 0
    for command in ("ls", "show"):
        ran = run("agents", command, agents, "--config", config)
        assert ran.code == 0, ran
        assert re.search(
            r"its consumer was removed by an operator at \S+, when everything up to sequence 2 was settled", ran.out
        ), ran.out


def delete_consumer(config: Path, stream: str, consumer: str) -> None:
    async def delete() -> None:
        async with App("operator", config=config) as app:
            await app.session.admin.delete_consumer(stream, consumer)

    anyio.run(delete)


def of_workers(config: Path, *, killed: str = "") -> list[str]:
    """The keys of what workers have recorded of the app, but for its agents' names; the one of a `killed` worker is
    added before.
    """

    async def keys() -> list[str]:
        async with App("operator", config=config) as app:
            found = [await open_existing(app.session.admin, f"field__{name}", own=True) for name in ("state", "live")]
            if killed and (living := found[1]):
                await living.put(killed, b"{}")
            return [key for bucket in found if bucket for key in await bucket.keys() if key != "field/agents"]

    return anyio.run(keys)


@pytest.mark.slow
def test_an_app_that_is_retired_leaves_nothing_but_its_notifications(
    run: Run, config: Path, agents: str, worked: Callable[..., list[str]]
) -> None:
    worked(1)
    preview = run("agents", "rm", "field", "--workers-stopped", "--config", config)
    for app in (agents, "field"):
        assert run("agents", "rm", app, "--workers-stopped", "--config", config).out == preview.out
    assert preview.code == 2
    assert "MARS > field__index" in preview.out
    assert "MARS > field__everything" in preview.out
    assert "say --yes to remove it" in preview.err
    assert len(listed(run, config)) == 2, "nothing was done"
    kept = of_workers(config, killed="field.killed")
    assert {"field/declared", "field/deploys", "field.killed"} <= {*kept}

    ran = run("agents", "rm", "field", "--workers-stopped", "--yes", "--config", config)
    assert (ran.code, ran.lines[-1]) == (0, "field is gone from the server")
    assert listed(run, config) == []
    assert of_workers(config) == []
    again = run("agents", "rm", "field", "--config", config)
    assert (again.code, again.err) == (1, "aviso-workers: there is nothing of app field on this server\n")
    replayed = run("replay", "mars", "--config", config)
    assert len(replayed.lines) == 1


@pytest.mark.slow
def test_one_agent_is_retired_by_itself_and_begins_at_its_start_when_it_comes_back(
    run: Run, config: Path, worked: Callable[..., list[str]]
) -> None:
    assert worked(1, 2) == ["1", "2"]
    removed = run("agents", "rm", "field/index", "--workers-stopped", "--yes", "--config", config)
    assert removed.code == 0
    states = {row["agent"]: row["state"] for row in listed(run, config)}
    assert states == {"everything": "at rest", "index": "never started"}, "the code has it still"
    assert worked(3) == ["1", "2", "1", "2", "3"]


@pytest.mark.slow
def test_an_app_whose_workers_run_is_not_retired(
    run: Run, config: Path, start: Start, agents: str, worked: Callable[..., list[str]]
) -> None:
    worked(1)
    worker = start("worker", agents, "--config", config)
    worker.until("agent.started")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not waiting(run, config):  # a server counts a pull request a moment after it has come
        assert time.monotonic() < deadline
    for said in ((), ("--workers-stopped",)):
        ran = run("agents", "rm", "field", *said, "--yes", "--config", config)
        assert ran.code == 1
        assert "workers ask for notifications of" in ran.err
    assert worker.end(signal.SIGTERM) == 0


def waiting(run: Run, config: Path) -> int:
    """How many pull requests the consumer of an agent has."""
    shown = run("consumers", "show", "MARS", "field__index", "--json", "--config", config)
    return int(json.loads(shown.out)["num_waiting"])


@pytest.mark.slow
def test_an_app_that_was_active_lately_is_not_retired_by_itself(
    run: Run, config: Path, worked: Callable[..., list[str]]
) -> None:
    """Its workers may be frozen, or cut off from the server, which knows nothing of them then."""
    worked(1)
    ran = run("agents", "rm", "field", "--yes", "--config", config)
    assert (ran.code, ran.out) == (1, "")
    assert re.search(r"field__index of MARS was active \d+ s ago.*say --workers-stopped", ran.err), ran.err
    assert len(listed(run, config)) == 2, "nothing was done"
