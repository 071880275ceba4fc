"""How timers are, by who leads and what its code has."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from aviso_workers.ops import timer_report
from aviso_workers.state.timer_requests import Pause
from tests.ops.health_facts import NOW, ago, failure, worker

LEADS = structs.replace(worker(), timers=("report",))
OTHER = structs.replace(worker("other"), process=2, timers=("report", "tidy"))
PAUSE = Pause(since=ago(60), until=ago(-60), by="me@here")


@pytest.mark.parametrize(
    ("given", "state", "needs"),
    [
        ({"leader": "host:1"}, "ok", False),
        ({"leader": "host:2"}, "ok", False),
        ({"leader": None}, "ok", False),
        ({"leader": "host:1", "timer": "tidy"}, "not run", True),
        ({"leader": "host:2", "timer": "tidy"}, "ok", False),
        ({"leader": "host:1", "timer": "tidy", "workers": [structs.replace(LEADS, timers=None)]}, "ok", False),
        ({"leader": "elsewhere:1", "timer": "tidy"}, "ok", False),
        ({"leader": ""}, "no leader", True),
        ({"leader": "", "workers": [structs.replace(LEADS, started=ago(5))]}, "no leader", False),
        ({"leader": "", "workers": []}, "at rest", False),
        ({"leader": "host:1", "failure": failure()}, "failing", True),
        ({"leader": "host:1", "failure": failure(until=1)}, "ok", False),
        ({"leader": "host:1", "pause": PAUSE}, "paused", False),
    ],
)
def test_a_timer_is_said_to_be_what_it_is(given: dict[str, Any], state: str, needs: bool) -> None:
    known: dict[str, Any] = {"workers": [LEADS, OTHER], "failure": None, "pause": None, "timer": "report"} | given
    found = timer_report.judge(known.pop("timer"), now=NOW, **known)
    assert (found.state, found.needs) == (state, needs), found.text
