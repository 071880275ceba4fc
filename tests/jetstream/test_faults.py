from __future__ import annotations

import pytest

from aviso_workers.backends.jetstream import faults
from aviso_workers.errors import FullError, RefusedError, UnavailableError


@pytest.mark.parametrize(
    ("code", "description", "expected"),
    [
        (10005, "no suitable peers for placement", UnavailableError),  # a cluster that has just started says so too
        (10023, "insufficient resources", UnavailableError),
        (10052, "invalid stream configuration", RefusedError),
        (10077, "maximum messages exceeded", FullError),
        (10077, "maximum messages per subject exceeded", RefusedError),
    ],
)
def test_what_time_may_cure_is_told_from_what_it_cannot(code: int, description: str, expected: type) -> None:
    error = faults.from_api("STREAM.CREATE.MARS", {"err_code": code, "description": description})
    assert (type(error), str(error)) == (expected, f"STREAM.CREATE.MARS: {description} (JetStream {code})")


def test_a_cluster_without_a_leader_says_what_it_needs() -> None:
    error = faults.from_api(
        "STREAM.NAMES", {"err_code": 10008, "description": "JetStream system temporarily unavailable"}
    )
    assert str(error).endswith("(JetStream 10008); more than half of the servers of a cluster must run")
