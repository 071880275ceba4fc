"""Commands of a user who lacks a right: they show the rest, name the subject that is denied, and exit with 1."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import pytest

from aviso_workers import App, Notification
from aviso_workers.server import NatsServer
from aviso_workers.state import dead_letter_records
from tests.cli.conftest import Run
from tests.commands import Command

DENIED = [
    "$JS.API.STREAM.LIST",
    "$JS.API.STREAM.NAMES",
    "$JS.API.CONSUMER.LIST.MARS",
    "$JS.API.STREAM.INFO.KV_field__state",
    "$JS.API.STREAM.INFO.aviso_workers_dead_letters__field",
]


@pytest.fixture
def config_of(tmp_path: Path, write_config: Callable[..., Path]) -> Iterator[Callable[[str], Path]]:
    """The configuration of a user who is denied a subject, on a server where an agent has run."""
    users = [{"user": "everything", "password": "x"}]
    users += [
        {"user": f"user{number}", "password": "x", "permissions": {"publish": {"deny": subject}}}  # type: ignore[dict-item]
        for number, subject in enumerate(DENIED)
    ]
    settings = f"authorization: {json.dumps({'users': users})}\n"
    with NatsServer.start(store_dir=tmp_path / "js", config=settings) as server:

        def of(user: str) -> Path:
            return write_config(server.url, name=f"{user}.yaml", user=user, password="x")

        app = App("field", config=of("everything"))

        @app.agent("mars")
        async def index(notification: Notification) -> None: ...

        async def work() -> None:
            async with app.running():
                await app.notify("mars", {"class": "od", "step": 1})
                await app.session.backend.create_stream(dead_letter_records.stream_spec("field", app.config))

        anyio.run(work)
        yield lambda subject: of(f"user{DENIED.index(subject)}")


@pytest.mark.parametrize(
    ("subject", "command", "shown", "denied"),
    [
        ("$JS.API.CONSUMER.LIST.MARS", "agents ls", "not known, since the server denies our user", True),
        ("$JS.API.STREAM.INFO.KV_field__state", "agents ls", "index", True),
        ("$JS.API.STREAM.INFO.aviso_workers_dead_letters__field", "agents ls", "index", True),
        ("$JS.API.STREAM.LIST", "agents ls", "index", True),
        ("$JS.API.CONSUMER.LIST.MARS", "consumers ls", "aviso_workers_retries__field", True),
        ("$JS.API.CONSUMER.LIST.MARS", "report streams", "MARS", True),
        ("$JS.API.STREAM.NAMES", "report streams", "MARS", True),
    ],
)
def test_the_rest_is_shown(
    run: Run, config_of: Callable[[str], Path], subject: str, command: str, shown: str, denied: bool
) -> None:
    ran = run(*command.split(), "--seconds", "0.1", "--json", "-c", config_of(subject))
    assert shown in ran.out
    said = f"not known, since the server denies our user {subject}: give it the role operator"
    assert (ran.code, said in ran.err) == (int(denied), denied), ran.err


@pytest.mark.slow
def test_numbers_that_are_not_known_are_no_zeros(run: Run, config_of: Callable[[str], Path]) -> None:
    config = config_of("$JS.API.CONSUMER.LIST.MARS")
    row = json.loads(run("agents", "ls", "field/index", "--seconds", "0.1", "--json", "-c", config).out)
    names = ["pending", "ack_pending", "redelivered", "dead_letters", "rate"]
    assert [row[name] for name in names] == [None, None, None, 0, None]
    shown = run("agents", "show", "field/index", "-c", config).out
    assert re.findall(r"(?m)^ *((?:ack )?pending|redelivered) +(.+)$", shown) == [
        ("pending", "not known"),
        ("ack pending", "not known"),
        ("redelivered", "not known"),
    ]


@pytest.mark.slow
def test_what_is_retried_may_be_more_than_may_be_read(run: Run, config_of: Callable[[str], Path]) -> None:
    ran = run("agents", "retrying", "field/index", "-c", config_of("$JS.API.STREAM.INFO.KV_field__state"))
    assert "MARS: " in ran.out
    assert (
        ran.code,
        "the server denies our user $JS.API.STREAM.INFO.KV_field__state: give it" in ran.err,
    ) == (1, True), ran


def test_top_shows_the_rest(start: Callable[..., Command], config_of: Callable[[str], Path]) -> None:
    top = start("top", "--seconds", "0.1", "-c", config_of("$JS.API.STREAM.LIST"))
    assert any("the server denies our user $JS.API.STREAM.LIST" in line for line in top.lines(3))
