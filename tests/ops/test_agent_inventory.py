"""What is read of a deployment, where some of it does not answer."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from aviso_workers.ops import agent_inventory
from aviso_workers.state.consumer_records import ConsumerRecord

pytestmark = pytest.mark.anyio

CREATED = datetime(2026, 11, 20, tzinfo=UTC)
RECORDS = {
    ("MARS", "app__agent"): ConsumerRecord(
        stream_created=CREATED, ack_floor=7, filter_subjects=("mars.>",), time=CREATED
    )
}


class _Silent:
    """A cluster in which the server that leads an agent's consumer does not answer."""

    def __init__(self, *names: str) -> None:
        self._names = list(names)

    async def stream_info(self, stream: str) -> Any:
        return SimpleNamespace(created=CREATED)

    async def consumers(self, stream: str) -> list[Any]:
        return []

    async def consumer_names(self, stream: str) -> list[str]:
        return self._names


async def test_a_consumer_whose_server_does_not_answer_is_not_missing() -> None:
    assert await agent_inventory.missing(_Silent("app__agent"), "MARS", RECORDS) == {}  # type: ignore[arg-type]


async def test_a_consumer_that_the_cluster_does_not_have_is_missing() -> None:
    found = await agent_inventory.missing(_Silent(), "MARS", RECORDS)  # type: ignore[arg-type]
    assert found == {("app", "agent"): RECORDS["MARS", "app__agent"]}
