"""A configuration that keeps less than a stream stores: nothing stored is removed unless an operator says so."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from aviso_workers.backends import Admin
from aviso_workers.backends.provisioning import Provisioner
from aviso_workers.errors import NotFoundError, UnavailableError
from aviso_workers.events import Events, StreamProvisioned
from aviso_workers.jetstream import plans
from aviso_workers.jetstream.specs import StreamSpec
from tests.contract.conftest import Create, Elapse, Publish

pytestmark = pytest.mark.anyio

SECOND = 1_000_000_000

Store = Callable[..., Awaitable[None]]
WANTED = StreamSpec(
    name="MARS",
    subjects=("mars.>",),
    keys={"max_msgs": "notification_backend.jetstream.max_messages", "max_age": "streams.MARS.max_age"},
)


@pytest.fixture
def stated() -> list[StreamProvisioned]:
    """What the provisioner states: nothing else."""
    return []


@pytest.fixture
def provisioner(backend: Admin, stated: list[StreamProvisioned]) -> Provisioner:
    events = Events()
    events.listen(stated.append)
    return Provisioner(backend, management="reconcile", events=events)


@pytest.fixture
def stored(create: Create, publish: Publish) -> Store:
    """`await stored()`: a stream of six messages of two subjects, which both backends keep."""

    async def stored(**stated: Any) -> None:
        await create(**stated)
        for number in range(6):
            await publish(f"mars.{number % 2}", b"x" * 100)

    return stored


@pytest.mark.parametrize(
    ("narrower", "told"),
    [
        ({"max_msgs": 2}, "max_msgs: unlimited -> 2, which removes 4 of 6 messages"),
        ({"max_bytes": 300}, "max_bytes: unlimited -> 300, which removes about 5 of 6 messages"),
        ({"max_msgs_per_subject": 1}, "max_msgs_per_subject: unlimited -> 1, which removes 4 of 6 messages"),
        ({"max_msgs_per_subject": 2}, "max_msgs_per_subject: unlimited -> 2, which removes up to 3 of 6 messages"),
        ({"retention": "interest"}, "retention: limits -> interest, which removes 6 of 6 messages"),
    ],
)
async def test_what_would_remove_stored_messages_is_not_done_and_told(
    stored: Store,
    backend: Admin,
    provisioner: Provisioner,
    stated: list[StreamProvisioned],
    narrower: dict[str, Any],
    told: str,
) -> None:
    await stored()

    await provisioner.ensure(replace(WANTED, **narrower))

    assert (await backend.stream_info("MARS")).messages == 6
    [kept] = stated
    assert (kept.action, kept.differences) == ("kept", (told,))
    assert "would remove stored messages" in kept.refused


async def test_what_is_older_than_a_shorter_age_is_counted(
    stored: Store,
    backend: Admin,
    publish: Publish,
    provisioner: Provisioner,
    stated: list[StreamProvisioned],
    elapse: Elapse,
) -> None:
    await stored()
    await elapse(1.5)
    await publish("mars.new")

    await provisioner.ensure(replace(WANTED, max_age=SECOND))

    assert (await backend.stream_info("MARS")).messages == 7
    [kept] = stated
    assert kept.differences == ("max_age: unlimited -> 1s, which removes 6 of 7 messages",)
    assert "streams.MARS.max_age" in kept.refused


async def test_the_age_of_what_is_stored_is_judged_by_the_clock_that_stored_it(
    kind: str,
    stored: Store,
    backend: Admin,
    publish: Publish,
    provisioner: Provisioner,
    elapse: Elapse,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kind == "in_memory":
        pytest.skip("in memory there is one clock")
    await stored()
    await elapse(1.5)
    monkeypatch.setattr(backend.clock, "time_ns", lambda: time.time_ns() - 3600 * SECOND)

    await provisioner.ensure(replace(WANTED, max_age=SECOND))

    assert (await backend.stream_info("MARS")).messages == 6


async def test_what_cannot_be_counted_may_be_everything(
    stored: Store,
    backend: Admin,
    provisioner: Provisioner,
    stated: list[StreamProvisioned],
    elapse: Elapse,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(*_: Any, **__: Any) -> int:
        raise UnavailableError("nobody answers, as where the user may make no consumer")

    await stored()
    await elapse(1.5)
    monkeypatch.setattr(backend, "count", refuse)

    await provisioner.ensure(replace(WANTED, max_age=SECOND))

    [kept] = stated
    assert kept.differences == ("max_age: unlimited -> 1s, which removes up to 6 of 6 messages",)


async def test_narrower_limits_that_remove_nothing_are_applied(
    stored: Store, backend: Admin, provisioner: Provisioner, stated: list[StreamProvisioned]
) -> None:
    await stored()

    await provisioner.ensure(replace(WANTED, max_msgs=6, max_bytes=10_000, max_age=3600 * SECOND))

    config = (await backend.stream_info("MARS")).config
    assert (config["max_msgs"], config["max_bytes"], config["max_age"]) == (6, 10_000, 3600 * SECOND)
    assert [event.action for event in stated] == ["updated"]


async def test_the_harmless_part_of_an_update_is_applied(
    stored: Store, backend: Admin, provisioner: Provisioner, stated: list[StreamProvisioned]
) -> None:
    await stored(max_age=60 * SECOND)

    await provisioner.ensure(replace(WANTED, max_msgs=2, max_age=120 * SECOND))

    info = await backend.stream_info("MARS")
    assert (info.messages, info.config["max_msgs"], info.config["max_age"]) == (6, -1, 120 * SECOND)
    assert [event.action for event in stated] == ["kept", "updated"]
    assert "notification_backend.jetstream.max_messages" in stated[0].refused


async def test_an_operator_can_have_it_done(
    stored: Store, backend: Admin, provisioner: Provisioner, stated: list[StreamProvisioned]
) -> None:
    await stored()
    plan = await provisioner.plan(replace(WANTED, max_msgs=2, max_age=120 * SECOND))

    await provisioner.carry_out(plans.with_removals(plan))

    info = await backend.stream_info("MARS")
    assert (info.messages, info.config["max_msgs"], info.config["max_age"]) == (2, 2, 120 * SECOND)


async def test_a_full_stream_that_is_to_drop_its_oldest_is_left_as_it_is(
    stored: Store, backend: Admin, provisioner: Provisioner, stated: list[StreamProvisioned]
) -> None:
    await stored(discard="new")
    await provisioner.ensure(replace(WANTED, max_msgs=3))
    assert (await backend.stream_info("MARS")).config["max_msgs"] == 3  # nothing goes: publishers are refused

    provisioner.forget("MARS")
    await provisioner.ensure(replace(WANTED, max_msgs=3, discard="old"))

    info = await backend.stream_info("MARS")
    assert (info.messages, info.config["discard"]) == (6, "new")
    assert stated[-1].differences == ("discard: new -> old, which removes about 3 of 6 messages",)


async def test_two_workers_of_different_configurations_remove_nothing_of_each_other(
    stored: Store, backend: Admin
) -> None:
    await stored()
    for _ in range(2):
        async with anyio.create_task_group() as tasks:
            for wanted in (replace(WANTED, max_msgs=2), replace(WANTED, max_msgs=100)):
                tasks.start_soon(Provisioner(backend, management="reconcile", events=Events()).ensure, wanted)
    assert (await backend.stream_info("MARS")).messages == 6


async def test_readers_make_and_change_no_stream(
    backend: Admin, provisioner: Provisioner, stated: list[StreamProvisioned]
) -> None:
    with pytest.raises(NotFoundError, match="stream MARS does not exist"):
        await provisioner.require_usable(replace(WANTED, max_msgs=7))
    assert stated == []
    await Provisioner(backend, management="reconcile", events=Events()).ensure(replace(WANTED, max_msgs=7))
    await provisioner.require_usable(replace(WANTED, max_msgs=9))
    assert (await backend.stream_info("MARS")).config["max_msgs"] == 7

    await provisioner.ensure(replace(WANTED, max_msgs=9))  # who writes still brings it in line
    assert (await backend.stream_info("MARS")).config["max_msgs"] == 9
