"""What `tests/typing` promises to type checkers is code that runs."""

from __future__ import annotations

from aviso_workers import Batch, Notification, Stream, Window
from tests.typing import agents, apps, spark_jobs


def test_agents_are_declared_in_every_call_form() -> None:
    assert {agent.form for agent in agents.app.agents} == {Notification, Batch, Stream, Window}
    assert {agent.name for agent in agents.app.agents if agent.in_thread} == {"fields_in_a_thread"}
    assert agents.index.payload_type is agents.Field
    assert agents.index.needs == {"database": agents.Database, "session": agents.Session}


def test_what_runs_around_them_is_declared() -> None:
    around = {agent.name: [each.name for each in agent.around] for agent in agents.app._agents_at_work()}
    assert around["index"] == ["measure", "log", "session"]
    assert around["fields_load"] == ["measure_batches"]
    assert around["fields_sums"] == ["measure_windows"]


def test_all_else_is_declared() -> None:
    assert [timer.name for timer in apps.app.timers] == ["tidy", "report"]
    assert [task.name for task in apps.app.tasks] == ["tail"]
    assert sorted(apps.app.tables) == ["counts", "lists", "numbers", "rows", "seen"]
    assert [name for name, _ in apps.app.event_types] == ["plain", "ride"]
    assert callable(spark_jobs.run)
