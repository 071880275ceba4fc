from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from anyio import to_thread
from msgspec.structs import replace
from psycopg_pool import PoolTimeout

from aviso_workers import App, Notification, RetryPolicy
from aviso_workers.server import NatsServer
from aviso_workers.testing import harness
from tests.conftest import WriteConfig
from tests.examples.conftest import Load

pytestmark = pytest.mark.anyio

FAILURES: dict[str, Exception] = {
    "0": PoolTimeout("the database is away"),
    "6": ValueError("nobody knows"),
    "12": PoolTimeout("the database is away, and stays away"),
}


def failing_app(config: Path) -> App:
    """An app whose agent succeeds with step 0 when it is handed back, and with no other."""
    app = App("index", config=config)
    failures = dict(FAILURES)

    @app.agent("mars", retry=RetryPolicy(first=0.01, attempts=1))
    async def index(notification: Notification[Any]) -> None:
        step = notification.identifier["step"]
        if failure := failures.pop(step, None) if step == "0" else failures[step]:
            raise failure

    return app


@pytest.fixture
def commands_find(monkeypatch: pytest.MonkeyPatch) -> Any:
    def commands_find(config: Path) -> None:
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("AVISO_WORKERS_CONFIG_FILE", str(config))

    return commands_find


@pytest.mark.slow
async def test_review_hands_back_what_may_succeed_and_lists_the_others(
    load: Load,
    nats_server: NatsServer,
    write_config: WriteConfig,
    commands_find: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    review = load("dead-letter-review")
    monkeypatch.setattr(review, "RULES", [replace(rule, after=timedelta(0)) for rule in review.RULES])
    config = write_config(nats_server.url)
    commands_find(config)

    async def reviewed(*arguments: str) -> list[list[str]]:
        """The decisions, with the subject of each and what else was printed."""
        monkeypatch.setattr(sys, "argv", ["dead_letter_review.py", *arguments])
        await to_thread.run_sync(review.main)
        return [line.split(maxsplit=4) for line in capsys.readouterr().out.splitlines()]

    async with harness(failing_app(config), server=nats_server.url) as t:
        for step in FAILURES:
            await t.notify("mars", {"class": "od", "step": step})
            await t.settle()
        said = await reviewed()
        assert [line[0] for line in said] == ["retry", "keep", "retry"]
        assert [line[3] for line in said] == ["mars.od.0", "mars.od.6", "mars.od.12"]
        assert len(await reviewed()) == 3, "nothing was to be done without --yes"

        await reviewed("--yes")
        await t.settle()

        said = await reviewed("--yes")
        assert [line[0] for line in said] == ["keep", "keep"]
        assert [line[3] for line in said] == ["mars.od.6", "mars.od.12"]


def test_rules_drop_what_came_late_a_week_ago(load: Load) -> None:
    review = load("dead-letter-review")
    original = review.Original(subject="mars.od.0")
    now = review.datetime.now(review.UTC)
    letter = review.DeadLetter(
        sequence=1, time=now, agent="volume", reason="late", error="LateError: ...", original=original
    )

    assert review.decide(letter) == "keep"
    assert review.decide(replace(letter, time=now - timedelta(days=8))) == "drop"
