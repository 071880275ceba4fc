"""When a consumer that nobody asks for anything may still have a worker."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from aviso_workers.jetstream.info import ConsumerConfig, ConsumerInfo
from aviso_workers.ops import agent_control

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def consumer(**fields: Any) -> ConsumerInfo:
    return ConsumerInfo(name="field__index", stream="MARS", config=ConsumerConfig({}), time=NOW, **fields)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (consumer(), ""),
        (consumer(last_delivered=NOW - timedelta(minutes=6), last_settled=NOW - timedelta(minutes=6)), ""),
        (consumer(last_delivered=NOW - timedelta(minutes=4)), "field__index of MARS was active 240 s ago"),
        (
            consumer(last_delivered=NOW - timedelta(hours=1), last_settled=NOW - timedelta(minutes=1)),
            "field__index of MARS was active 60 s ago",
        ),
        (
            consumer(num_ack_pending=2, last_delivered=NOW - timedelta(hours=1)),
            "field__index of MARS has 2 delivered and not settled",
        ),
    ],
)
def test_one_that_was_active_lately_or_has_not_settled_everything_may_have_one(found: ConsumerInfo, why: str) -> None:
    assert agent_control.why_active(found) == why
