"""`aviso-workers streams ...`, `delete` and `config ...` against a real server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from aviso_workers import App, Notify
from aviso_workers.errors import RefusedError
from aviso_workers.jetstream.plans import Plan
from aviso_workers.ops import stream_policy
from aviso_workers.server import NatsServer
from tests.cli.conftest import Ran
from tests.conftest import Start

Run = Callable[..., Ran]


@pytest.mark.covers("001-43", "002-53", "003-01")
def test_a_missing_stream_is_planned_and_made(run: Run, config: Path) -> None:
    planned = run("streams", "plan", "--config", config)
    assert (planned.code, "create" in planned.out) == (0, True), planned
    assert run("streams", "plan", "--exit-code", "--config", config).code == 1
    applied = run("streams", "apply", "--config", config)
    assert (applied.code, "MARS: done" in applied.out) == (0, True), applied
    planned = run("streams", "plan", "--exit-code", "--config", config)
    assert (planned.code, "create" in planned.out) == (0, False)


def test_the_policy_in_effect_is_shown_beside_the_configured_one(
    run: Run, config: Path, nats_server: NatsServer, write_config: Callable[..., Path]
) -> None:
    run("streams", "apply", "--config", config)
    assert run("streams", "show", "mars", "--config", config).code == 0
    changed = write_config(nats_server.url, name="changed.yaml", retention_time="1h")
    differs = run("streams", "show", "mars", "--json", "--config", changed)
    assert differs.code == 1
    (row,) = (row for row in map(json.loads, differs.lines) if "retention_time" in row["key"])
    assert (row["field"], row["configured"], row["effective"], row["follows"]) == ("max_age", "1h", "unlimited", False)
    assert "max_age: unlimited -> 1h" in run("streams", "plan", "--config", changed).out
    assert run("streams", "apply", "--config", changed).code == 0
    assert run("streams", "show", "mars", "--config", changed).code == 0


def test_stored_messages_are_counted_and_removed_with_a_yes_only(
    run: Run, config: Path, nats_server: NatsServer, write_config: Callable[..., Path]
) -> None:
    for step in (1, 2, 3):
        run("notify", "mars", "class=od", f"step={step}", "--config", config)
    narrower = write_config(nats_server.url, name="narrower.yaml", max_messages=1, max_bytes=2**30)
    wanted = "max_msgs: unlimited -> 1, which removes 2 of 3 messages"

    planned = run("streams", "plan", "--config", narrower)
    assert (planned.code, "remove" in planned.out, wanted in planned.out) == (0, True, True), planned
    asked = run("streams", "apply", "--config", narrower)
    assert (asked.code, wanted in asked.out, "--yes" in asked.err) == (2, True, True), asked
    assert "max_bytes" in run("streams", "plan", "--config", narrower).out, "nothing was done"
    assert len(run("replay", "mars", "--config", config).lines) == 3

    applied = run("streams", "apply", "--yes", "--config", narrower)
    assert (applied.code, "MARS: done" in applied.out) == (0, True), applied
    assert len(run("replay", "mars", "--config", config).lines) == 1
    assert "keep" in run("streams", "plan", "--config", narrower).out


def test_a_limit_that_is_no_longer_in_the_file_stays_and_is_told(
    run: Run, nats_server: NatsServer, write_config: Callable[..., Path]
) -> None:
    limited = write_config(nats_server.url, name="limited.yaml", max_messages=5, retention_time="1h")
    assert run("streams", "apply", "--config", limited).code == 0
    without = write_config(nats_server.url, name="without.yaml")
    for command in ("plan", "apply", "plan"):
        ran = run("streams", command, "--config", without)
        assert ran.code == 0, ran
        assert "max_msgs: 5 is no longer in the file, or never was: the stream keeps it" in ran.out
        assert "max_age: 1h is no longer in the file, or never was: the stream keeps it" in ran.out
        assert "update" not in ran.out
    lifted = write_config(nats_server.url, name="lifted.yaml", max_messages=0, retention_time="1h")
    assert run("streams", "apply", "--config", lifted).code == 0
    assert "keeps it" not in run("streams", "plan", "--config", lifted).out


@pytest.mark.anyio
async def test_what_was_stored_since_the_plan_is_not_removed_without_a_yes(
    nats_server: NatsServer, config: Path, write_config: Callable[..., Path]
) -> None:
    narrower = write_config(nats_server.url, name="narrower.yaml", max_messages=2)
    async with App("publisher", config=config) as publisher, App("operator", config=narrower) as operator:
        await publisher.notify("mars", {"class": "od", "step": 1})
        [plan] = await stream_policy.plans(operator.session.admin, operator.config)
        assert isinstance(plan, Plan)
        assert plan.removing == ()
        await publisher.notify_many(Notify("mars", {"class": "od", "step": step}) for step in (2, 3))

        with pytest.raises(RefusedError, match=r"removes 1 of 3 messages.* --yes"):
            await stream_policy.carry_out(operator.session.admin, operator.config, plan)
        kept = await operator.session.backend.stream_info("MARS")
        await stream_policy.carry_out(operator.session.admin, operator.config, plan, removals=True)
        left = await operator.session.backend.stream_info("MARS")

    assert (kept.messages, left.messages) == (3, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "left", "told"),
    [
        (("notify", "mars", "class=od", "step=4"), 4, True),
        (("replay", "mars"), 3, False),
        (("agents", "ls"), 3, False),
        (("streams", "ls"), 3, False),
        (("streams", "show", "mars"), 3, False),
        (("dead-letters", "ls"), 3, False),
    ],
)
def test_no_command_removes_what_its_configuration_would_not_keep(
    start: Start,
    run: Run,
    config: Path,
    nats_server: NatsServer,
    write_config: Callable[..., Path],
    command: tuple[str, ...],
    left: int,
    told: bool,
) -> None:
    for step in (1, 2, 3):
        run("notify", "mars", "class=od", f"step={step}", "--config", config)
    narrower = write_config(nats_server.url, name="narrower.yaml", max_messages=1)

    ran = start(*command, "--config", narrower)

    assert ran.end() == (1 if command[:2] == ("streams", "show") else 0), ran.told
    assert any("stream MARS is used as it is (max_msgs: unlimited -> 1" in line for line in ran.told) is told, ran.told
    assert len(run("replay", "mars", "--config", config).lines) == left


def test_showing_a_stream_that_does_not_exist_says_so(run: Run, config: Path) -> None:
    ran = run("streams", "show", "mars", "--config", config)
    assert (ran.code, "MARS" in ran.err) == (1, True), ran


def test_nothing_is_wiped_without_a_yes(run: Run, config: Path) -> None:
    run("notify", "mars", "class=od", "step=1", "--config", config)
    for command in (("streams", "wipe", "mars"), ("streams", "wipe-all")):
        asked = run(*command, "--config", config)
        assert (asked.code, "--yes" in asked.err) == (2, True), asked
        assert "MARS" in asked.out, "what would go is shown"
        assert len(run("replay", "mars", "--config", config).lines) == 1


@pytest.mark.covers("002-58")
def test_with_a_yes_a_stream_is_emptied(run: Run, config: Path) -> None:
    run("notify", "mars", "class=od", "step=1", "--config", config)
    wiped = run("streams", "wipe", "mars", "--yes", "--config", config)
    assert (wiped.code, "MARS: 1 removed" in wiped.out) == (0, True), wiped
    assert run("replay", "mars", "--config", config).lines == []


def test_wiping_all_where_a_stream_is_missing_is_not_proven(run: Run, config: Path) -> None:
    ran = run("streams", "wipe-all", "--yes", "--config", config)
    assert (ran.code, "no stream" in ran.out) == (3, True), ran
    assert ran.err.startswith("MARS: configured, but there is no such stream. "), ran.err


@pytest.mark.covers("002-60", "003-17")
def test_one_notification_is_deleted_and_a_missing_one_is_told_apart(run: Run, config: Path) -> None:
    for step in (1, 2):
        run("notify", "mars", "class=od", f"step={step}", "--config", config)
    asked = run("delete", "mars@1", "--config", config)
    assert (asked.code, "mars.od.1" in asked.out) == (2, True), asked
    assert asked.err == "nothing was done; say --yes to delete it\n"
    ran = run("delete", "mars@1", "--yes", "--config", config)
    assert (ran.code, ran.lines[-1], ran.err) == (0, "mars@1 deleted", "")
    assert [json.loads(line)["id"] for line in run("replay", "mars", "--config", config).lines] == ["mars@2"]
    missing = run("delete", "mars@1", "--yes", "--config", config)
    assert missing.code == 1, missing
    assert run("delete", "mars", "--config", config).code == 2


def test_every_value_in_effect_is_shown_with_its_origin_and_no_secret(
    run: Run, nats_server: NatsServer, write_config: Callable[..., Path]
) -> None:
    secret = write_config(nats_server.url, name="secret.yaml", token="open-sesame")
    ran = run("config", "show", "--config", secret)
    assert ran.code == 0, ran.err
    assert "open-sesame" not in ran.out + ran.err
    (row,) = (line for line in ran.lines if "notification_backend.jetstream.nats_url" in line)
    assert nats_server.url in row
    assert "secret.yaml:" in row
    (row,) = (line for line in ran.lines if "notification_backend.jetstream.timeout_seconds" in line)
    assert "default" in row


@pytest.mark.slow
def test_the_schema_is_a_json_schema(run: Run) -> None:
    schema = json.loads(run("config", "schema").out)
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert "nats_url" in json.dumps(schema)
