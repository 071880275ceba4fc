"""How timers are, by who leads and what its code has."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import anyio
import pytest
from msgspec import structs

from aviso_workers import config as configuration
from aviso_workers.backends.jetstream import JetStreamBackend
from aviso_workers.ops import timer_control
from aviso_workers.state import lease_records
from aviso_workers.state.lease_records import Leader
from aviso_workers.state.timer_requests import Pause
from aviso_workers.state.worker_records import AppWorkers
from tests.ops.health_facts import NOW, ago, failure, worker
from tests.presence import present
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

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
        ({"leader": "host:1", "timer": "tidy", "living": (structs.replace(LEADS, timers=None),)}, "ok", False),
        ({"leader": "elsewhere:1", "timer": "tidy"}, "ok", False),
        ({"leader": ""}, "no leader", True),
        ({"leader": "", "renewed": ago(15)}, "no leader", False),
        ({"leader": "", "renewed": ago(61)}, "no leader", True),
        # that another worker has just started does not hide it
        ({"leader": "", "living": (LEADS, structs.replace(OTHER, started=ago(5)))}, "no leader", True),
        ({"leader": "", "living": (structs.replace(LEADS, started=ago(5)),)}, "no leader", False),
        ({"leader": "", "renewed": ago(999), "living": (structs.replace(LEADS, started=ago(5)),)}, "no leader", False),
        ({"leader": "", "renewed": ago(999), "living": (structs.replace(LEADS, started=ago(20)),)}, "no leader", True),
        ({"leader": "", "living": ()}, "at rest", False),
        ({"leader": "host:1", "failure": failure()}, "failing", True),
        ({"leader": "host:1", "failure": failure(until=1)}, "ok", False),
        ({"leader": "host:1", "pause": PAUSE}, "paused", False),
    ],
)
def test_a_timer_is_said_to_be_what_it_is(given: dict[str, Any], state: str, needs: bool) -> None:
    known: dict[str, Any] = {"failure": None, "pause": None, "timer": "report"} | given
    name, renewed = known.pop("leader"), known.pop("renewed", None)
    leader = None if name is None else Leader(name=name, renewed=renewed)
    workers = AppWorkers(known.pop("living", (LEADS, OTHER)))
    found = timer_control.judge(known.pop("timer"), leader=leader, workers=workers, now=NOW, **known)
    assert (found.state, found.needs) == (state, needs), found.text


def test_it_is_said_since_when_no_worker_leads_and_when_the_last_one_was_heard() -> None:
    of_nobody = Leader(renewed=ago(15))
    given: dict[str, Any] = {"leader": of_nobody, "failure": None, "pause": None, "now": NOW}
    found = timer_control.judge("report", workers=AppWorkers((LEADS,)), **given)
    assert found.text == "no leader: no worker leads the timers of its app since 2026-11-29T11:59:45Z"
    found = timer_control.judge("report", workers=AppWorkers(lost=(structs.replace(LEADS, said=ago(100)),)), **given)
    assert found.text == "at rest: no worker of its app runs; the last record of one is of 2026-11-29T11:58:20Z"


async def test_a_server_tells_when_the_last_lease_was_renewed_or_given_back(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_records, "LEASE_SECONDS", 1.0)
    async with JetStreamBackend(configuration.JetStream(nats_url=configuration.ServerUrls(url))) as backend:
        assert await lease_records.leader(backend, "led") == Leader()
        bucket = await backend.key_value(lease_records.bucket_of("led"), ttl_seconds=1.0, own=True)

        async def put(key: str) -> datetime:
            await bucket.put(key, b"host:1")
            return present(await bucket.get(key)).time

        async def expired() -> Leader:
            with anyio.fail_after(PATIENCE_SECONDS):
                found = await lease_records.leader(backend, "led")
                while found.name:
                    await anyio.sleep(0.1)
                    found = await lease_records.leader(backend, "led")
            return found

        renewed = await put("leader")
        assert await lease_records.leader(backend, "led") == Leader(name="host:1", renewed=renewed)
        gone = await expired()
        assert gone.name == ""
        assert abs(present(gone.renewed) - renewed) < timedelta(milliseconds=1), "the server gives one in nanoseconds"
        await put("slots.1")
        assert await lease_records.leader(backend, "led") == Leader(), "it may have been the time of the other lease"
        renewed = await put("leader")
        await bucket.delete("leader")
        found = await lease_records.leader(backend, "led")
        assert found.name == ""
        assert present(found.renewed) > renewed
