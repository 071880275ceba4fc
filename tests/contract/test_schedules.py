"""Messages that a stream keeps until they are due, on either backend."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

import pytest

from aviso_workers.backends import Admin, Message, Outgoing, PubAck
from aviso_workers.errors import RefusedError
from tests.contract.conftest import Create, Elapse, Publish, Stored
from tests.presence import present
from tests.waits import PATIENCE_SECONDS

pytestmark = [pytest.mark.anyio, pytest.mark.needs_server(2, 12)]

Schedule = Callable[..., Awaitable[PubAck]]


@pytest.fixture
def schedule(backend: Admin, publish: Publish) -> Schedule:
    """`await schedule("mars.wait.a", 1.0)`: due at `mars.due` after so many seconds."""

    async def schedule(
        subject: str, seconds: float, data: bytes = b"null", *, target: str = "mars.due", message_id: str | None = None
    ) -> PubAck:
        headers = _schedule(backend, seconds, target)
        return await publish(subject, data, headers=headers, message_id=message_id)

    return schedule


def _schedule(backend: Admin, seconds: float, target: str) -> dict[str, str]:
    due = datetime.fromtimestamp(backend.clock.time_ns() / 1e9, UTC) + timedelta(seconds=seconds)
    return {"Nats-Schedule": f"@at {due.isoformat()}", "Nats-Schedule-Target": target, "Aviso-Stream": "RD"}


async def test_it_waits_and_then_is_another_message(
    backend: Admin, create: Create, schedule: Schedule, stored: Stored, elapse: Elapse
) -> None:
    await create(allow_msg_schedules=True)
    await schedule("mars.wait.a", 1, b"[1]")
    await schedule("mars.wait.b", 3600)
    assert await backend.subject_counts("MARS") == {"mars.wait.a": 1, "mars.wait.b": 1}
    await elapse(2)
    waiting, due = await stored()
    assert (waiting.subject, due.subject, due.data) == ("mars.wait.b", "mars.due", b"[1]")
    assert present(due.headers)["Aviso-Stream"] == "RD"
    assert not {"Nats-Msg-Id", "Nats-Schedule", "Nats-Schedule-Target"} & {*present(due.headers)}
    assert due.timestamp_ns > waiting.timestamp_ns


async def test_a_subject_has_one_and_it_is_the_newest(
    create: Create, schedule: Schedule, stored: Stored, elapse: Elapse
) -> None:
    await create(allow_msg_schedules=True)
    await schedule("mars.wait.a", 0.5, b"1")
    await schedule("mars.wait.a", 2, b"2")
    await elapse(1)
    assert [(message.subject, message.data) for message in await stored()] == [("mars.wait.a", b"2")]
    await elapse(2)
    assert [(message.subject, message.data) for message in await stored()] == [("mars.due", b"2")]


async def test_what_is_removed_is_never_due(
    backend: Admin, create: Create, schedule: Schedule, stored: Stored, elapse: Elapse
) -> None:
    await create(allow_msg_schedules=True)
    for name in ("a", "b", "c"):
        await schedule(f"mars.wait.{name}", 1)
    assert await backend.purge_stream("MARS", subject="mars.wait.a") == 1
    await backend.delete_message("MARS", 2, overwrite=False)
    await elapse(2)
    assert [present(message.headers)["Nats-Scheduler"] for message in await stored()] == ["mars.wait.c"]


async def test_again_under_its_message_id_it_is_a_duplicate(
    create: Create, schedule: Schedule, stored: Stored, elapse: Elapse
) -> None:
    await create(allow_msg_schedules=True)
    for _ in range(2):
        ack = await schedule("mars.wait.a", 1, message_id="one")
    assert ack.duplicate
    await elapse(2)
    assert [message.subject for message in await stored()] == ["mars.due"]


async def test_one_that_was_due_before_is_due_at_once(
    create: Create, schedule: Schedule, stored: Stored, elapse: Elapse
) -> None:
    await create(allow_msg_schedules=True)
    await schedule("mars.wait.a", -3600)
    await elapse(1)
    assert [message.subject for message in await stored()] == ["mars.due"]


async def test_many_at_once(backend: Admin, create: Create, stored: Stored, elapse: Elapse) -> None:
    await create(allow_msg_schedules=True)
    await backend.publish_many(
        [
            Outgoing(
                Message(subject=f"mars.wait.{n}", data=b"%d" % n, headers=_schedule(backend, 0.5, "mars.due")),
                str(n),
                "MARS",
            )
            for n in range(30)
        ],
        timeout_seconds=PATIENCE_SECONDS,
    )
    await elapse(2)
    assert sorted(int(message.data) for message in await stored() if message.subject == "mars.due") == [*range(30)]


@pytest.mark.parametrize("target", ["", "rd.due", "mars.wait.a", "mars.>"])
async def test_a_target_that_the_stream_does_not_take_is_refused(
    create: Create, schedule: Schedule, stored: Stored, target: str
) -> None:
    await create(allow_msg_schedules=True)
    with pytest.raises(RefusedError) as refused:
        await schedule("mars.wait.a", 1, target=target)
    assert refused.value.code == 10190
    assert await stored() == []


async def test_a_stream_that_takes_none_is_named(create: Create, schedule: Schedule) -> None:
    await create()
    with pytest.raises(RefusedError, match="stream MARS does not take it, switch on its allow_msg_schedules") as no:
        await schedule("mars.wait.a", 1)
    assert no.value.code == 10188
