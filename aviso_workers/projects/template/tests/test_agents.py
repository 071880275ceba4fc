"""The agents as a worker runs them, in memory: no server is needed."""

from __future__ import annotations

from aviso_workers.pytest_plugin import AvisoHarness

from project_name.agents import app, index_field

IDENTIFIER = {"class": "od", "date": "2026-11-20", "step": 12}
PAYLOAD = {"location": "/data/12", "size": 3}


async def test_a_field_is_indexed(aviso_harness: AvisoHarness) -> None:
    async with aviso_harness(app) as t:
        await t.notify("mars", IDENTIFIER, PAYLOAD)
        await t.settle()
        assert t.outcomes(index_field) == ["acked"]


async def test_an_empty_field_becomes_a_dead_letter(aviso_harness: AvisoHarness) -> None:
    async with aviso_harness(app) as t:
        await t.notify("mars", IDENTIFIER, PAYLOAD | {"size": 0})
        await t.settle()
        (dead_letter,) = t.dead_letters
        assert (dead_letter.reason, dead_letter.error) == ("rejected", "Reject: an empty field")


async def test_two_fields_of_one_identifier_are_both_indexed(aviso_harness: AvisoHarness) -> None:
    async with aviso_harness(app) as t:
        await t.stop()
        await t.notify("mars", IDENTIFIER, PAYLOAD)
        await t.notify("mars", IDENTIFIER, PAYLOAD | {"size": 4})
        await t.start()
        await t.settle()
        assert t.outcomes(index_field) == ["acked", "acked"]


async def test_the_death_of_a_worker_loses_nothing(aviso_harness: AvisoHarness) -> None:
    async with aviso_harness(app) as t:
        await t.notify("mars", IDENTIFIER, PAYLOAD)
        await t.crash()
        await t.settle()
        assert t.outcomes(index_field) == ["acked"]
