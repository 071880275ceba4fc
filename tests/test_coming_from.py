"""Our half of each application in docs/coming-from; tests/interop runs the others'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aviso_workers.testing import harness
from tests import coming_from

pytestmark = pytest.mark.anyio


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
