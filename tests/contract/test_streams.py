"""What a backend promises about streams: their configuration, their limits, and taking messages out of them."""

from __future__ import annotations

from datetime import UTC
from typing import Any

import pytest

from aviso_workers.backends import Admin
from aviso_workers.errors import NotFoundError, RefusedError
from tests.contract.conftest import Create, Publish, Stored

pytestmark = pytest.mark.anyio

SECOND = 1_000_000_000


async def test_an_open_backend_is_connected(backend: Admin) -> None:
    assert backend.connection.ready


async def test_a_new_stream_has_what_was_stated_and_is_empty(create: Create) -> None:
    info = await create(description="for the suite", max_msgs=7, max_age=600 * SECOND, discard="new")

    stated: dict[str, Any] = {"name": "MARS", "subjects": ["mars.>"], "description": "for the suite"}
    stated |= {"max_msgs": 7, "max_age": 600 * SECOND, "discard": "new", "storage": "memory"}
    assert {name: info.config.get(name) for name in stated} == stated
    assert (info.messages, info.bytes, info.first_sequence, info.last_sequence) == (0, 0, 0, 0)
    assert info.created is not None
    assert info.created.utcoffset() == UTC.utcoffset(None)


async def test_what_was_not_stated_has_the_defaults_of_jetstream(create: Create) -> None:
    info = await create()

    defaults = {"retention": "limits", "discard": "old", "num_replicas": 1, "compression": "none"}
    defaults |= {"max_msgs": -1, "max_bytes": -1, "max_age": 0, "max_msgs_per_subject": -1}
    defaults |= {"duplicate_window": 120 * SECOND}
    assert {name: info.config.get(name) for name in defaults} == defaults


async def test_the_duplicate_window_is_no_longer_than_messages_live(create: Create) -> None:
    assert (await create(max_age=10 * SECOND)).config["duplicate_window"] == 10 * SECOND


async def test_a_stated_duplicate_window_beyond_max_age_is_refused(create: Create) -> None:
    with pytest.raises(RefusedError) as refused:
        await create(max_age=10 * SECOND, duplicate_window=120 * SECOND)
    assert refused.value.code == 10052


async def test_creating_the_same_stream_again_changes_nothing(create: Create, publish: Publish) -> None:
    created = await create(max_msgs=5)
    await publish("mars.od")

    again = await create(max_msgs=5)

    assert again.config == created.config
    assert again.messages == 1


async def test_creating_a_stream_that_a_peer_created_differently_is_refused(create: Create) -> None:
    await create(max_msgs=5)

    with pytest.raises(RefusedError) as refused:
        await create(max_msgs=6)
    assert refused.value.code == 10058


@pytest.mark.parametrize("subjects", [("mars.>",), ("mars.od.*",), ("mars.*.an",), ("diss.>", "mars.od.fc")])
async def test_two_streams_cannot_take_the_same_subject(create: Create, subjects: tuple[str, ...]) -> None:
    await create(subjects=("mars.od.>",))

    with pytest.raises(RefusedError) as refused:
        await create(name="OTHER", subjects=subjects)
    assert refused.value.code == 10065


@pytest.mark.parametrize("subjects", [("mars",), ("Mars.>",), ("mars2.>", "diss.*.od")])
async def test_subjects_that_only_look_alike_do_not_overlap(
    create: Create, backend: Admin, subjects: tuple[str, ...]
) -> None:
    await create(subjects=("mars.>",))

    await create(name="OTHER", subjects=subjects)

    assert sorted(await backend.stream_names()) == ["MARS", "OTHER"]


async def test_no_stream_has_no_info(backend: Admin) -> None:
    with pytest.raises(NotFoundError) as missing:
        await backend.stream_info("MARS")
    assert missing.value.code == 10059
    assert await backend.stream_names() == []


async def test_info_counts_what_is_stored(create: Create, publish: Publish, backend: Admin) -> None:
    await create()
    for number in range(3):
        await publish(f"mars.{number}", b"12345")

    info = await backend.stream_info("MARS")

    assert (info.messages, info.first_sequence, info.last_sequence) == (3, 1, 3)
    assert info.bytes >= 3 * len(b"12345")


async def test_an_update_replaces_the_configuration_and_holds_for_what_is_stored(
    create: Create, publish: Publish, backend: Admin, stored: Stored
) -> None:
    info = await create(description="before")
    # A field that we do not state ourselves.
    info = await backend.update_stream({**info.config, "metadata": {"owner": "suite"}})
    for number in range(4):
        await publish(f"mars.{number}")

    updated = await backend.update_stream({**info.config, "max_msgs": 2, "description": "after"})

    assert (updated.config["max_msgs"], updated.config["description"]) == (2, "after")
    assert updated.config["metadata"]["owner"] == "suite"
    assert [message.sequence for message in await stored()] == [3, 4]


async def test_an_update_can_bind_other_subjects(create: Create, publish: Publish, backend: Admin) -> None:
    info = await create(subjects=("mars.od",))

    await backend.update_stream({**info.config, "subjects": ["mars.>"]})

    assert (await publish("mars.rd")).sequence == 1


async def test_an_update_cannot_change_storage(create: Create, backend: Admin) -> None:
    info = await create(storage="memory", max_msgs=5)

    with pytest.raises(RefusedError) as refused:
        await backend.update_stream({**info.config, "storage": "file", "max_msgs": 6})

    assert refused.value.code == 10052
    assert (await backend.stream_info("MARS")).config["max_msgs"] == 5


async def test_an_update_cannot_take_the_subjects_of_another_stream(create: Create, backend: Admin) -> None:
    await create()
    other = await create(name="DISS", subjects=("diss.>",))

    with pytest.raises(RefusedError) as refused:
        await backend.update_stream({**other.config, "subjects": ["mars.od"]})
    assert refused.value.code == 10065


async def test_an_update_cannot_leave_a_duplicate_window_beyond_max_age(create: Create, backend: Admin) -> None:
    info = await create()

    with pytest.raises(RefusedError) as refused:
        await backend.update_stream({**info.config, "max_age": 10 * SECOND})
    assert refused.value.code == 10052


async def test_an_update_needs_a_stream(create: Create, backend: Admin) -> None:
    info = await create()

    with pytest.raises(NotFoundError):
        await backend.update_stream({**info.config, "name": "OTHER", "subjects": ["other.>"]})


@pytest.mark.covers("002-58")
async def test_a_purge_removes_all_messages_and_sequences_go_on(
    create: Create, publish: Publish, backend: Admin, stored: Stored
) -> None:
    created = await create(max_msgs=5)
    for number in range(3):
        await publish(f"mars.{number}")

    assert await backend.purge_stream("MARS") == 3

    info = await backend.stream_info("MARS")
    assert info.config == created.config
    assert (info.messages, info.bytes, info.last_sequence) == (0, 0, 3)
    assert (await publish("mars.od")).sequence == 4
    assert [message.sequence for message in await stored()] == [4]


async def test_a_purge_of_a_subject_leaves_the_others(
    create: Create, publish: Publish, backend: Admin, stored: Stored
) -> None:
    await create()
    for subject in ("mars.od", "mars.rd", "mars.od", "mars.od.6"):
        await publish(subject)

    assert await backend.purge_stream("MARS", subject="mars.od") == 2
    assert await backend.purge_stream("MARS", subject="mars.od") == 0
    assert [message.subject for message in await stored()] == ["mars.rd", "mars.od.6"]


async def test_a_purge_of_an_empty_stream_removes_nothing(create: Create, backend: Admin) -> None:
    await create()

    assert await backend.purge_stream("MARS") == 0


async def test_a_purge_needs_a_stream(backend: Admin) -> None:
    with pytest.raises(NotFoundError):
        await backend.purge_stream("MARS")


@pytest.mark.covers("002-60", "003-17")
async def test_one_message_can_be_erased(create: Create, publish: Publish, backend: Admin, stored: Stored) -> None:
    await create()
    for number in range(3):
        await publish(f"mars.{number}")

    await backend.delete_message("MARS", 2)

    assert [message.sequence for message in await stored()] == [1, 3]
    assert (await backend.stream_info("MARS")).last_sequence == 3


async def test_a_message_is_erased_once(create: Create, publish: Publish, backend: Admin) -> None:
    await create()
    await publish("mars.od")
    await backend.delete_message("MARS", 1)

    with pytest.raises(NotFoundError):
        await backend.delete_message("MARS", 1)


async def test_a_message_that_never_was_cannot_be_erased(create: Create, publish: Publish, backend: Admin) -> None:
    await create()
    await publish("mars.od")

    with pytest.raises(NotFoundError):
        await backend.delete_message("MARS", 99)


async def test_erasing_needs_a_stream(backend: Admin) -> None:
    with pytest.raises(NotFoundError):
        await backend.delete_message("MARS", 1)


async def test_the_names_of_all_streams(create: Create, backend: Admin) -> None:
    await create()
    await create(name="DISS", subjects=("diss.>",))

    assert sorted(await backend.stream_names()) == ["DISS", "MARS"]
