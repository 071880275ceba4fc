"""Durable consumers as wanted: brought in line where a server lets them be, and told of where it does not."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from aviso_workers.backends import Admin
from aviso_workers.backends.provisioning import Provisioner
from aviso_workers.events import ConsumerDiffers, Event, Events
from aviso_workers.jetstream.specs import ConsumerSpec
from tests.contract.conftest import Create

pytestmark = pytest.mark.anyio

WANTED = ConsumerSpec(
    durable_name="agent",
    filter_subjects=("mars.od.>",),
    ack_wait=20_000_000_000,
    max_ack_pending=100,
    max_deliver=26,
)


@pytest.fixture
def stated() -> list[Event]:
    return []


@pytest.fixture
def provisioner(backend: Admin, stated: list[Event]) -> Provisioner:
    events = Events()
    events.listen(stated.append)
    return Provisioner(backend, management="reconcile", events=events)


async def test_one_that_is_as_wanted_is_not_worth_a_word(
    create: Create, provisioner: Provisioner, stated: list[Event]
) -> None:
    await create()
    for _ in range(2):
        info = await provisioner.ensure_consumer("MARS", WANTED)
    assert (info.name, stated) == ("agent", [])


async def test_what_can_be_updated_is_updated_without_a_word(
    create: Create, backend: Admin, provisioner: Provisioner, stated: list[Event]
) -> None:
    await create()
    old = replace(WANTED, filter_subjects=(), ack_wait=1_000_000_000, max_ack_pending=1, max_deliver=-1)
    await backend.ensure_consumer("MARS", old)

    info = await provisioner.ensure_consumer("MARS", WANTED)

    assert {field: info.config[field] for field in ("ack_wait", "max_ack_pending", "max_deliver")} == {
        "ack_wait": 20_000_000_000,
        "max_ack_pending": 100,
        "max_deliver": 26,
    }
    assert stated == []


async def test_what_cannot_be_updated_is_told_and_the_rest_is_updated(
    create: Create, backend: Admin, provisioner: Provisioner, stated: list[Event]
) -> None:
    await create()
    await backend.ensure_consumer("MARS", replace(WANTED, deliver_policy="new", ack_wait=1_000_000_000))

    info = await provisioner.ensure_consumer("MARS", WANTED)

    assert stated == [ConsumerDiffers(stream="MARS", consumer="agent", differences=("start: new -> all",))]
    assert (info.config["deliver_policy"], info.config["ack_wait"]) == ("new", 20_000_000_000)
