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
from aviso_workers.cli import agents_control
from aviso_workers.jetstream.fields import SECOND
from aviso_workers.jetstream.specs import ConsumerSpec
from aviso_workers.ops import agent_control
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
    assert (ran.code, ran.err) == (int(any(row["trouble"] for row in found)), ""), ran
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
        not (listed := run("agents", "retrying", "field", "index", "--json", "--config", config)).lines
        or not (json.loads(listed.lines[0])["blocked"])
    ):
        pass
    [row] = map(json.loads, listed.lines)
    assert (row["sequence"], row["attempts"], row["error"]) == (1, None, "ValueError: no such field")
    assert (row["key"], row["behind"], row["attempt"] >= 6) == ("od", 2, True)
    state = run("agents", "ls", "--app", "field", "--seconds", "0.1", "--json", "--config", config)
    assert "blocked at MARS@1 (key od), and 2 wait behind it: ValueError: no such field" in state.out
    nothing = run("agents", "retry", "index", "9", "--app", "field", "--config", config)
    assert (nothing.code, "not retried: 9 is in no stream that it reads" in nothing.err) == (1, True)
    waiting = run("agents", "retry", "index", "2", "--app", "field", "--config", config)
    assert (waiting.code, "MARS@2: not retried: no worker that runs knows of it" in waiting.out) == (1, True)
    neither = run("agents", "skip", "index", "--app", "field", "--config", config)
    assert (neither.code, "say which" in neither.err) == (2, True), neither
    again = run("agents", "retry", "index", "1", "--app", "field", "--config", config)
    assert (again.code, "MARS@1: failed again: ValueError: no such field; the next" in again.out) == (1, True), again
    plan = run("agents", "skip", "index", "1", "--app", "field", "--config", config)
    assert "1 of index to be skipped; 2 that wait behind them run without" in plan.out
    assert "any number" in run("agents", "retrying", f"{name}:app", "index", "--config", config).out
    skipped = run("agents", "skip", "index", "--all", "--app", "field", "--yes", "--config", config)
    assert (skipped.code, skipped.lines[-1]) == (0, "MARS@1: skipped: it is a dead letter now")
    while run("agents", "retrying", "field", "index", "--json", "--config", config).lines[0:1] != []:
        if (
            json.loads(run("agents", "retrying", "field", "index", "--json", "--config", config).lines[0])["key"]
            == "od"
        ):
            break  # the next one of the key fails
    assert worker.end(signal.SIGTERM) == 0


def test_a_paused_agent_is_given_nothing_and_a_resumed_one_goes_on(
    run: Run, config: Path, worked: Callable[..., list[str]], agents: str
) -> None:
    worked(1)
    for app in ("field", agents):
        paused = run("agents", "pause", "index", "--app", app, "--config", config)
        assert paused == Ran(code=0, out="index is paused until it is resumed\n", err="")
        (row,) = (row for row in listed(run, config, agents) if row["agent"] == "index")
        assert row["paused_until"] == "it is resumed"
        resumed = run("agents", "resume", "index", "--app", app, "--config", config)
        assert resumed == Ran(code=0, out="index is resumed\n", err="")
    assert {row["paused_until"] for row in listed(run, config)} == {""}
    assert worked(2) == ["1", "2"]


def test_a_pause_may_have_an_end(run: Run, config: Path, worked: Callable[..., list[str]]) -> None:
    worked(1)
    paused = run("agents", "pause", "index", "--app", "field", "--for", "10m", "--config", config)
    until = datetime.fromisoformat(paused.out.removeprefix("index is paused until ").strip())
    assert timedelta(minutes=9) < until - datetime.now(UTC) < timedelta(minutes=10)
    (row,) = (row for row in listed(run, config) if row["agent"] == "index")
    assert abs(datetime.fromisoformat(row["paused_until"]) - until) < timedelta(seconds=2)


def test_a_pause_of_no_time_is_refused(run: Run, unreachable: Path) -> None:
    ran = run("agents", "pause", "index", "--app", "field", "--for", "0s", "--config", unreachable)
    assert (ran.code, ran.err.startswith("aviso-workers: --for 0s would pause nothing")) == (2, True), ran


def test_a_reset_tells_what_it_would_do_and_does_it_with_a_yes(
    run: Run, config: Path, worked: Callable[..., list[str]]
) -> None:
    assert worked(1, 2, 3, 9) == ["1", "2", "3"]
    asked = run("agents", "reset", "index", "--app", "field", "--to", "2", "--config", config)
    assert (asked.code, asked.err) == (2, "nothing was done; say --yes to reset it\n")
    told = [" ".join(line.split()) for line in asked.lines]
    assert told == ["index of field:", "goes on at MARS@2", "handled again 2", "passed over 0"]

    done = run("agents", "reset", "index", "--app", "field", "--to", "2", "--yes", "--config", config)
    assert (done.code, done.lines[-1]) == (0, "index goes on at MARS@2, with 2 notifications ahead of it")
    assert worked() == ["1", "2", "3", "2", "3"]


def test_a_reset_of_an_agent_without_a_consumer_is_what_is_recorded(
    run: Run, config: Path, worked: Callable[..., list[str]], agents: str
) -> None:
    assert worked(1, 2, 3) == ["1", "2", "3"]
    (row,) = (row for row in shown(run, config, agents) if row["agent"] == "index")
    assert row["recorded position"].startswith("settled up to sequence 3, at 20")
    with_yes = ("--yes", "--config", config)
    assert run("consumers", "rm", "MARS", "field__index", *with_yes).code == 0
    done = run("agents", "reset", "index", "--app", "field", "--to", "2", *with_yes)
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


@pytest.mark.covers("002-03")
def test_a_reset_goes_to_a_date(run: Run, config: Path, worked: Callable[..., list[str]], agents: str) -> None:
    worked(1, 2)
    (_, second) = (json.loads(line) for line in run("replay", "mars", "--config", config).lines)
    done = run("agents", "reset", "index", "--app", agents, "--to", second["time"], "--yes", "--config", config)
    assert (done.code, done.lines[-1]) == (0, "index goes on at MARS@2, with 1 notifications ahead of it"), done
    late = run("agents", "reset", "index", "--app", agents, "--to", "2100-01-01T00:00:00Z", "--yes", "--config", config)
    assert late.lines[-1] == "index goes on at MARS@3, with 0 notifications ahead of it"


@pytest.fixture
def slow_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's clock is two hours behind the server's, for whatever of it asks for the time."""

    class Behind(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Behind:
            return super().now(tz) - timedelta(hours=2)

    for module in (agents_control, agent_control):
        monkeypatch.setattr(module, "datetime", Behind, raising=False)


@pytest.mark.usefixtures("slow_clock")
def test_a_pause_lasts_as_long_as_was_said_where_the_clock_of_the_command_is_slow(
    run: Run, config: Path, worked: Callable[..., list[str]]
) -> None:
    worked(1)
    assert run("agents", "pause", "index", "--app", "field", "--for", "10m", "--config", config).code == 0
    (row,) = (row for row in listed(run, config) if row["agent"] == "index")
    assert row["paused_until"], "it is not paused"
    until = datetime.fromisoformat(row["paused_until"])
    assert timedelta(minutes=9) < until - datetime.now(UTC) < timedelta(minutes=10)


@pytest.mark.usefixtures("slow_clock")
def test_a_reset_to_new_handles_nothing_again_where_the_clock_of_the_command_is_slow(
    run: Run, config: Path, worked: Callable[..., list[str]]
) -> None:
    worked(1, 2)
    done = run("agents", "reset", "index", "--app", "field", "--to", "new", "--yes", "--config", config)
    assert (done.code, done.lines[-1]) == (0, "index goes on at MARS@3, with 0 notifications ahead of it")


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (
            ("agents", "pause", "index", "--app", "other"),
            1,
            "no agent index of app other reads one of the configured streams; ",
        ),
        (
            ("agents", "resume", "indx", "--app", "field"),
            1,
            "no agent indx of app field reads one of the configured streams; ",
        ),
        (("agents", "pause", "index", "--app", "field", "--for", "10"), 2, "--for: duration must include a unit"),
        (("agents", "pause", "index", "--app", "nowhere:app"), 2, "no module 'nowhere' here or installed"),
        (("agents", "reset", "index", "--app", "field", "--to", "x"), 2, "--to must be a date with a time such as"),
        (("agents", "reset", "index", "--app", "field", "--to", "9"), 2, "MARS ends at 1: an agent cannot go on at 9"),
    ],
)
def test_what_cannot_be_done_is_told(
    run: Run, config: Path, worked: Callable[..., list[str]], arguments: tuple[str, ...], code: int, complaint: str
) -> None:
    worked(1)
    ran = run(*arguments, "--config", config)
    assert (ran.code, ran.out) == (code, ""), ran
    assert ran.err.startswith(f"aviso-workers: {complaint}"), ran.err


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


@pytest.mark.covers("001-04", "001-38")
def test_the_list_tells_what_is_left(run: Run, config: Path, worked: Callable[..., list[str]], agents: str) -> None:
    worked(1)
    for step in (2, 3, 9):
        run("notify", "mars", "class=od", f"step={step}", "--config", config)
    for what in ((), (agents,)):
        left = [(row["agent"], row["stream"], row["pending"], row["trouble"]) for row in listed(run, config, *what)]
        assert sorted(left) == [
            ("everything", "MARS", 3, "3 pending, and no worker pulls them"),
            ("index", "MARS", 2, "2 pending, and no worker pulls them"),
        ]


def test_the_app_of_a_list_is_given_as_elsewhere(
    run: Run, config: Path, worked: Callable[..., list[str]], agents: str
) -> None:
    worked(1)
    for what in ((agents,), ("--app", agents), ("--app", "field")):
        assert {row["agent"] for row in listed(run, config, *what)} == {"index", "everything"}, what
    assert shown(run, config, "--app", agents) == shown(run, config, agents)
    other = run("agents", "ls", "--app", "fields", "--config", config)
    complaint = "aviso-workers: no agent of app fields reads one of the configured streams; there are apps: field\n"
    assert other == Ran(1, "", complaint)


@pytest.mark.parametrize("command", ["ls", "show", "rm"])
def test_the_app_is_given_once(run: Run, unreachable: Path, agents: str, command: str) -> None:
    twice = run("agents", command, agents, "--app", agents, "--config", unreachable)
    assert twice == Ran(2, "", f"aviso-workers: give the app once: {agents}, or --app {agents}\n")


def test_a_removal_needs_an_app(run: Run, unreachable: Path) -> None:
    ran = run("agents", "rm", "--yes", "--config", unreachable)
    assert ran == Ran(2, "", "aviso-workers: say which app: its name, or MODULE:APP\n")


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


def test_the_list_tells_how_many_dead_letters_an_agent_has_and_how_fast_its_lag_grows(
    run: Run, config: Path, worked: Callable[..., list[str]], agents: str
) -> None:
    worked(1, 4)
    found = {row["agent"]: (row["dead_letters"], row["rate"]) for row in listed(run, config)}
    assert found == {"everything": (0, 0.0), "index": (1, 0.0)}


def test_the_list_tells_of_an_agent_whose_consumer_is_gone(
    run: Run, config: Path, worked: Callable[..., list[str]], agents: str
) -> None:
    worked(1, 2)
    run("notify", "mars", "class=od", "step=3", "--config", config)
    delete_consumer(config, "MARS", "field__index")
    for what in ((), (agents,)):
        ran = run("agents", "ls", *what, "--seconds", "0.1", "--config", config)
        assert ran.code == 1
        (row,) = [line for line in ran.lines if " index " in line]
        assert row.split(maxsplit=8) == ["field", "index", "MARS", "1", "0", "0", "0", "+0.0", "its consumer is gone"]


def test_list_and_policy_tell_that_an_operator_has_removed_a_consumer(
    run: Run, config: Path, worked: Callable[..., list[str]], agents: str
) -> None:
    worked(1, 2)
    assert run("consumers", "rm", "MARS", "field__index", "--yes", "--config", config).code == 0
    for command in ("ls", "show"):
        ran = run("agents", command, agents, "--config", config)
        assert ran.code == 0, ran
        assert re.search(
            r"its consumer was removed by an operator at \S+, when all messages up to sequence 2 were settled", ran.out
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
            buckets = [await app.key_value(f"aviso_workers_{name}") for name in ("consumers", "processes")]
            if killed:
                await buckets[1].put(killed, b"{}")
            keys = [key for bucket in buckets for key in await bucket.keys()]
            return [key for key in keys if key.startswith(("field/", "field.")) and key != "field/agents"]

    return anyio.run(keys)


def test_an_app_that_is_retired_leaves_nothing_but_its_notifications(
    run: Run, config: Path, agents: str, worked: Callable[..., list[str]]
) -> None:
    worked(1)
    preview = run("agents", "rm", "field", "--workers-stopped", "--config", config)
    for app in ((agents,), ("--app", agents), ("--app", "field")):
        assert run("agents", "rm", *app, "--workers-stopped", "--config", config).out == preview.out
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


def test_one_agent_is_retired_by_itself_and_begins_at_its_start_when_it_comes_back(
    run: Run, config: Path, worked: Callable[..., list[str]]
) -> None:
    assert worked(1, 2) == ["1", "2"]
    removed = run("agents", "rm", "field", "--agent", "index", "--workers-stopped", "--yes", "--config", config)
    assert removed.code == 0
    assert [row["agent"] for row in listed(run, config)] == ["everything"]
    assert worked(3) == ["1", "2", "1", "2", "3"]


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


def test_an_app_that_was_active_lately_is_not_retired_by_itself(
    run: Run, config: Path, worked: Callable[..., list[str]]
) -> None:
    """Its workers may be frozen, or cut off from the server, which knows nothing of them then."""
    worked(1)
    ran = run("agents", "rm", "field", "--yes", "--config", config)
    assert (ran.code, ran.out) == (1, "")
    assert re.search(r"field__index of MARS was active \d+ s ago.*say --workers-stopped", ran.err), ran.err
    assert len(listed(run, config)) == 2, "nothing was done"
