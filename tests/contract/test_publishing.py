"""What a backend promises about publishing: stored once, in one place, within the limits, or an error that says."""

from __future__ import annotations

import time
from typing import Any

import anyio
import pytest

from aviso_workers.backends import Admin, PubAck
from aviso_workers.clocks import VirtualClock
from aviso_workers.errors import FullError, NotFoundError, RefusedError, UnavailableError
from tests.contract.conftest import Create, Elapse, Publish, PublishChunk, PublishMany, Stored
from tests.presence import present

pytestmark = pytest.mark.anyio

SECOND = 1_000_000_000


async def test_sequences_count_from_one_in_every_stream(create: Create, publish: Publish) -> None:
    await create()
    await create(name="DISS", subjects=("diss.>",))

    acks = [await publish("mars.od"), await publish("mars.od"), await publish("diss.de", stream="DISS")]

    assert [(ack.stream, ack.sequence, ack.duplicate) for ack in acks] == [
        ("MARS", 1, False),
        ("MARS", 2, False),
        ("DISS", 1, False),
    ]


async def test_what_was_published_is_what_is_stored(create: Create, publish: Publish, stored: Stored) -> None:
    await create()
    body = '{"größe":1.5}'.encode()
    await publish("mars.a%2Eb.größe", body, headers={"spatial_bbox": "52.5,13.4,52.6,13.5"})

    (message,) = await stored()

    assert (message.subject, message.data, message.sequence) == ("mars.a%2Eb.größe", body, 1)
    assert message.headers is not None
    assert message.headers["spatial_bbox"] == "52.5,13.4,52.6,13.5"


@pytest.mark.covers("002-32")
async def test_the_message_id_is_stored_as_a_header(create: Create, publish: Publish, stored: Stored) -> None:
    await create()
    await publish("mars.od", message_id="once")

    (message,) = await stored()

    assert message.headers is not None
    assert message.headers["Nats-Msg-Id"] == "once"


async def test_headers_of_more_than_jetstream_takes_are_refused(
    create: Create, publish: Publish, stored: Stored
) -> None:
    await create()
    with pytest.raises(RefusedError) as refused:
        await publish("mars.od", headers={"all": "x" * 65_536})
    assert refused.value.code == 10097
    await publish("mars.od", headers={"all": "x" * 65_000})
    assert len(await stored()) == 1


@pytest.mark.parametrize("subject", ["mars.no subject", "mars." + "x" * 5000])
async def test_what_would_end_the_connection_is_refused_and_not_sent(
    create: Create, publish: Publish, stored: Stored, subject: str
) -> None:
    await create()
    with pytest.raises(RefusedError):
        await publish(subject)
    await publish("mars.od")
    assert [message.subject for message in await stored()] == ["mars.od"]


async def test_a_body_may_be_empty(create: Create, publish: Publish, stored: Stored) -> None:
    await create()
    await publish("mars.od", b"")

    assert [message.data for message in await stored()] == [b""]


async def test_a_message_bears_the_time_at_which_it_was_stored(
    create: Create, publish: Publish, stored: Stored, kind: str, clock: VirtualClock
) -> None:
    await create()
    now_ns = clock.time_ns() if kind == "in_memory" else time.time_ns()
    await publish("mars.od")
    await publish("mars.od")

    first, second = await stored()

    assert abs(first.timestamp_ns - now_ns) < 5 * SECOND
    assert first.timestamp_ns < second.timestamp_ns


@pytest.mark.covers("002-05", "002-33", "003-12")
async def test_the_same_message_id_is_stored_once(create: Create, publish: Publish, stored: Stored) -> None:
    await create()
    await publish("mars.od", b"1", message_id="once")
    await publish("mars.od", b"2", message_id="other")

    again = await publish("mars.od", b"3", message_id="once")

    assert (again.sequence, again.duplicate) == (1, True)
    assert [message.data for message in await stored()] == [b"1", b"2"]


@pytest.mark.covers("001-42", "002-25")
async def test_a_message_id_is_known_for_the_duplicate_window(create: Create, publish: Publish, elapse: Elapse) -> None:
    await create(duplicate_window=SECOND // 5)
    await publish("mars.od", message_id="once")

    await elapse(1.0)  # a server looks through its ids now and then, not at the moment

    again = await publish("mars.od", message_id="once")
    assert (again.sequence, again.duplicate) == (2, False)


async def test_a_message_id_outlives_its_message(create: Create, publish: Publish, backend: Admin) -> None:
    await create()
    await publish("mars.od", message_id="erased")
    await publish("mars.od", message_id="purged")
    await backend.delete_message("MARS", 1)
    await backend.purge_stream("MARS")

    acks = [await publish("mars.od", message_id=message_id) for message_id in ("erased", "purged")]

    assert [(ack.sequence, ack.duplicate) for ack in acks] == [(1, True), (2, True)]


async def test_a_message_id_counts_within_its_stream(create: Create, publish: Publish) -> None:
    await create()
    await create(name="DISS", subjects=("diss.>",))
    await publish("mars.od", message_id="once")

    assert not (await publish("diss.de", message_id="once", stream="DISS")).duplicate


async def test_a_subject_that_no_stream_takes_may_be_taken_later(create: Create, publish: Publish) -> None:
    with pytest.raises(UnavailableError):
        await publish("mars.od")

    await create()

    assert (await publish("mars.od")).sequence == 1


async def test_a_subject_of_another_stream_is_refused(create: Create, publish: Publish, backend: Admin) -> None:
    await create()
    await create(name="DISS", subjects=("diss.>",))

    with pytest.raises(RefusedError) as refused:
        await publish("mars.od", stream="DISS")

    assert refused.value.code == 10060
    assert not isinstance(refused.value, NotFoundError)
    assert (await backend.stream_info("MARS")).messages == 0


@pytest.mark.covers("001-16")
async def test_a_full_stream_drops_its_oldest_message(create: Create, publish: Publish, stored: Stored) -> None:
    await create(max_msgs=2)

    for number in range(4):
        await publish(f"mars.{number}")

    assert [message.sequence for message in await stored()] == [3, 4]


async def test_a_full_stream_drops_as_many_bytes_as_it_needs(create: Create, publish: Publish, stored: Stored) -> None:
    await create(max_bytes=3000)

    for number in range(4):
        await publish(f"mars.{number}", b"x" * 1200)

    assert [message.sequence for message in await stored()] == [3, 4]


@pytest.mark.covers("001-17")
async def test_a_full_stream_refuses_when_it_must_not_drop(create: Create, publish: Publish, stored: Stored) -> None:
    await create(max_msgs=2, discard="new")
    await publish("mars.0")
    await publish("mars.1")

    with pytest.raises(RefusedError) as refused:
        await publish("mars.2")

    assert refused.value.code == 10077
    assert [message.subject for message in await stored()] == ["mars.0", "mars.1"]


async def test_a_stream_full_of_bytes_refuses_when_it_must_not_drop(create: Create, publish: Publish) -> None:
    await create(max_bytes=3000, discard="new")
    await publish("mars.0", b"x" * 1200)
    await publish("mars.1", b"x" * 1200)

    with pytest.raises(RefusedError) as refused:
        await publish("mars.2", b"x" * 1200)
    assert refused.value.code == 10077


async def test_a_full_stream_has_room_again_after_a_message_was_erased(
    create: Create, publish: Publish, backend: Admin
) -> None:
    await create(max_msgs=1, discard="new")
    await publish("mars.0")
    await backend.delete_message("MARS", 1)

    assert (await publish("mars.1")).sequence == 2


async def test_a_full_stream_still_knows_what_it_stored(create: Create, publish: Publish) -> None:
    await create(max_msgs=1, discard="new")
    await publish("mars.0", message_id="once")

    assert (await publish("mars.0", message_id="once")).duplicate


async def test_a_refused_message_id_may_be_stored_later(create: Create, publish: Publish, backend: Admin) -> None:
    await create(max_msgs=1, discard="new")
    await publish("mars.0")
    with pytest.raises(RefusedError):
        await publish("mars.1", message_id="later")
    await backend.purge_stream("MARS")

    ack = await publish("mars.1", message_id="later")

    assert (ack.sequence, ack.duplicate) == (2, False)


async def test_a_stream_keeps_so_many_messages_of_each_subject(
    create: Create, publish: Publish, stored: Stored
) -> None:
    await create(max_msgs_per_subject=2)

    for subject in ("mars.od", "mars.od", "mars.rd", "mars.od"):
        await publish(subject)

    assert [(message.subject, message.sequence) for message in await stored()] == [
        ("mars.od", 2),
        ("mars.rd", 3),
        ("mars.od", 4),
    ]


async def test_a_newer_message_replaces_the_one_of_its_subject_where_others_are_refused(
    create: Create, publish: Publish, stored: Stored
) -> None:
    await create(max_msgs_per_subject=1, max_msgs=2, discard="new")
    await publish("mars.od")
    await publish("mars.rd")

    with pytest.raises(RefusedError):
        await publish("mars.new")
    await publish("mars.od")

    assert [(message.subject, message.sequence) for message in await stored()] == [
        ("mars.rd", 2),
        ("mars.od", 3),
    ]


async def test_messages_expire(
    create: Create, publish: Publish, stored: Stored, backend: Admin, elapse: Elapse
) -> None:
    await create(max_age=SECOND)
    await publish("mars.old")
    await elapse(0.7)
    await publish("mars.new")

    await elapse(0.6)

    assert [message.subject for message in await stored()] == ["mars.new"]
    info = await backend.stream_info("MARS")
    assert (info.messages, info.first_sequence, info.last_sequence) == (1, 2, 2)


async def test_a_message_that_is_too_large_is_refused(create: Create, publish: Publish, backend: Admin) -> None:
    await create()

    with pytest.raises(RefusedError):
        await publish("mars.od", b"x" * (backend.connection.max_payload + 1))

    assert (await publish("mars.od")).sequence == 1


async def test_headers_count_as_well(create: Create, publish: Publish, backend: Admin) -> None:
    await create()

    with pytest.raises(RefusedError):
        await publish("mars.od", b"x" * backend.connection.max_payload)

    assert (await publish("mars.od")).sequence == 1


async def test_a_large_message_is_stored_whole(
    create: Create, publish: Publish, backend: Admin, stored: Stored
) -> None:
    await create()
    body = bytes(range(256)) * 4 * 1000
    assert len(body) < backend.connection.max_payload
    await publish("mars.od", body)

    assert [message.data == body for message in await stored()] == [True]


async def test_many_at_once_are_stored_one_by_one(create: Create, publish: Publish) -> None:
    await create()
    sequences = []

    async def one(number: int) -> None:
        sequences.append((await publish(f"mars.{number}")).sequence)

    async with anyio.create_task_group() as tasks:
        for number in range(200):
            tasks.start_soon(one, number)

    assert sorted(sequences) == list(range(1, 201))


async def test_many_together_are_stored_in_their_order(
    create: Create, publish_many: PublishMany, stored: Stored
) -> None:
    await create()

    acks = await publish_many([f"mars.{number}" for number in range(300)])

    assert {(type(ack), isinstance(ack, PubAck) and ack.stream) for ack in acks} == {(PubAck, "MARS")}
    assert [message.subject for message in await stored()] == [f"mars.{number}" for number in range(300)]


async def test_one_alone_of_many_is_acknowledged_as_it_would_be(create: Create, publish_many: PublishMany) -> None:
    await create()

    assert await publish_many(["mars.od"]) == [PubAck(stream="MARS", sequence=1)]
    assert await publish_many(["mars.od"]) == [PubAck(stream="MARS", sequence=1, duplicate=True)]


async def test_many_of_the_same_ids_are_stored_once(create: Create, publish_many: PublishMany, stored: Stored) -> None:
    await create()
    subjects = [f"mars.{number}" for number in range(50)]
    await publish_many(subjects[:30])

    acks = await publish_many(subjects)

    assert {type(ack) for ack in acks} == {PubAck}
    assert [message.subject for message in await stored()] == subjects


async def test_many_of_several_streams_are_stored_where_they_belong(
    create: Create, publish_many: PublishMany, stored: Stored
) -> None:
    await create()
    await create(name="DISS", subjects=("diss.>",))
    subjects = [f"{base}.{number}" for number in range(50) for base in ("mars", "diss")]

    acks = await publish_many(subjects)

    assert [ack.stream for ack in acks if isinstance(ack, PubAck)] == ["MARS", "DISS"] * 50
    for stream, base in (("MARS", "mars"), ("DISS", "diss")):
        assert [message.subject for message in await stored(stream)] == [f"{base}.{number}" for number in range(50)]


async def test_what_is_refused_among_many_keeps_none_of_them_back(
    create: Create, publish_many: PublishMany, stored: Stored, backend: Admin
) -> None:
    await create()
    good = [f"mars.{number}" for number in range(50)]
    subjects = [*good[:20], "diss.elsewhere", *good[20:]]
    await create(name="DISS", subjects=("diss.>",))

    results = await publish_many(subjects, stream="MARS")

    kinds = {subject: type(result) for subject, result in zip(subjects, results, strict=True)}
    assert kinds == {**dict.fromkeys(good, PubAck), "diss.elsewhere": RefusedError}
    assert [message.subject for message in await stored()] == good
    assert (await backend.stream_info("DISS")).messages == 0


async def test_of_many_a_full_stream_takes_as_many_as_it_has_room_for(
    create: Create, publish_many: PublishMany, stored: Stored
) -> None:
    await create(max_msgs=20, discard="new")

    results = await publish_many([f"mars.{number}" for number in range(50)])

    assert [type(result) for result in results] == [PubAck] * 20 + [FullError] * 30
    assert {result.code for result in results[20:] if isinstance(result, FullError)} == {10077}
    assert len(await stored()) == 20


async def test_each_of_many_is_answered_where_that_is_asked_for(create: Create, publish_many: PublishMany) -> None:
    await create()
    subjects = [f"mars.{number}" for number in range(20)]
    await publish_many(subjects)

    results = await publish_many([*subjects, "mars.20", "mars.20"], answered=True)

    assert [(ack.sequence, ack.duplicate) for ack in results if isinstance(ack, PubAck)] == [
        *((number, True) for number in range(1, 21)),
        (21, False),
        (21, True),
    ]


async def test_many_that_no_stream_takes_may_be_taken_later(
    create: Create, publish_many: PublishMany, stored: Stored, backend: Admin
) -> None:
    await create()
    await backend.delete_stream("MARS")
    subjects = [f"mars.{number}" for number in range(50)]

    assert {type(result) for result in await publish_many(subjects)} == {UnavailableError}

    await create()
    await publish_many(subjects)
    assert [message.subject for message in await stored()] == subjects


@pytest.mark.needs_server(2, 14)
async def test_a_chunk_is_stored_in_its_order(
    create: Create, publish_chunk: PublishChunk, publish_many: PublishMany, stored: Stored, backend: Admin
) -> None:
    await create()
    subjects = [f"mars.{number}" for number in range(300)]
    headers = [None] * 299 + [{"spatial_bbox": "1,2,3,4"}]

    await publish_chunk(subjects, data=[b"%d" % number for number in range(300)], headers=headers)
    await publish_many(subjects)  # which is to be done where not all of it is stored

    found = await stored()
    assert [(message.subject, message.data) for message in found] == [(f"mars.{n}", b"%d" % n) for n in range(300)]
    assert present(found[-1].headers)["spatial_bbox"] == "1,2,3,4"
    assert {present(message.headers)["Nats-Msg-Id"] for message in found} == set(subjects)


@pytest.mark.needs_server(2, 14)
async def test_a_chunk_tells_how_many_of_the_first_are_stored(
    create: Create, publish_chunk: PublishChunk, stored: Stored
) -> None:
    await create(max_msgs=20, discard="new")
    subjects = [f"mars.{number}" for number in range(50)]

    count = await publish_chunk(subjects)

    assert [message.subject for message in await stored()] == subjects[:20]
    assert 0 <= count <= 20


@pytest.mark.parametrize(
    "wrong", [{"subjects": ["no subject"]}, {"subjects": ["mars." + "x" * 5000]}, {"data": [b"x" * 10_000_000]}]
)
async def test_what_must_not_be_sent_is_not_counted_in_a_chunk(
    create: Create, publish_chunk: PublishChunk, publish_many: PublishMany, stored: Stored, wrong: dict[str, Any]
) -> None:
    await create()
    good = [f"mars.{number}" for number in range(20)]
    columns = {"data": [b"null"] * 20 + wrong.get("data", [b"null"]), "message_ids": [*good, "wrong"]}

    count = await publish_chunk(good + wrong.get("subjects", ["mars.20"]), **columns)

    assert [message.subject for message in await stored()] == good[:count]
    await publish_many(good)
    assert len(await stored()) == 20


async def test_an_id_is_the_same_in_a_chunk_and_alone(
    create: Create, publish_chunk: PublishChunk, publish: Publish, stored: Stored
) -> None:
    await create()
    ids = [f" spaced\n{number} " for number in range(20)]
    subjects = [f"mars.{number}" for number in range(20)]

    count = await publish_chunk(subjects, message_ids=ids)
    for subject, message_id in zip(subjects, ids, strict=True):
        await publish(subject, message_id=message_id)

    assert count >= 0
    assert len(await stored()) == 20
