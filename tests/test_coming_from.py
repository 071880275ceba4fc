"""Our half of each application in docs/coming-from; tests/interop runs the others'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aviso_workers import Notification
from aviso_workers.testing import harness
from tests import coming_from

pytestmark = pytest.mark.anyio
PROJECT = Path(__file__).parents[1]


@pytest.mark.parametrize("page", coming_from.PAGES, ids=lambda page: str(page.stem))
async def test_our_application_makes_the_same_of_the_same_fields(page: Path) -> None:
    _, ours = coming_from.applications(page)
    fields: dict[str, Any] = {"__name__": page.stem}
    exec(compile(ours, str(page), "exec"), fields)

    async with harness(fields["app"]) as t:
        for step, size in coming_from.FIELDS.items():
            await t.notify("field", {"step": step}, {"location": f"/data/{step}", "size": size})
        await t.settle()

        assert fields["catalogue"] == coming_from.CATALOGUE
        assert [each.payload async for each in t.app.replay("indexed", from_id=1)] == coming_from.INDEXED
        (dead_letter,) = t.dead_letters
        assert dead_letter.error == f"ValueError: {coming_from.FAILED}"


async def test_our_application_beside_that_of_pyaviso(capsys: pytest.CaptureFixture[str]) -> None:
    _, ours = coming_from.applications(coming_from.PYAVISO)
    fields: dict[str, Any] = {"__name__": "pyaviso"}
    exec(compile(ours, "pyaviso.md", "exec"), fields)
    fields["app"].configure(PROJECT / "config" / "dev.yaml")
    assert fields["app"].mistakes() == []

    field = fields["Field"](location="/data/6")
    await fields["index_field"](Notification(event_type="mars", identifier={"step": "6"}, payload=field))

    assert fields["catalogue"] == {"6": "/data/6"}
    assert capsys.readouterr().out == "6 /data/6\n"
