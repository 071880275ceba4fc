"""What a backend promises about buckets of keys: the newest value, and putting on a condition."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import pytest

from aviso_workers.aviso.literals import SECOND
from aviso_workers.backends import Admin, BulkKeyValue, PubAck
from aviso_workers.errors import BackendError, ConflictError, NotFoundError, OutcomeUnknownError, RefusedError
from aviso_workers.jetstream.key_value import TTL, ttl_text
from aviso_workers.jetstream.specs import StreamSpec
from tests.contract.conftest import Elapse, Publish
from tests.presence import present

pytestmark = pytest.mark.anyio


@pytest.fixture
async def bucket(backend: Admin) -> BulkKeyValue:
    return await backend.key_value("leases")


async def test_a_key_that_is_missing_has_no_entry(bucket: BulkKeyValue) -> None:
    assert await bucket.get("nothing") is None
    assert await bucket.keys() == []


async def test_the_newest_value_counts(bucket: BulkKeyValue) -> None:
    first = await bucket.put("owner", b"one")
    second = await bucket.put("owner", b"two")

    entry = present(await bucket.get("owner"))

    assert second > first > 0
    assert (entry.key, entry.value, entry.revision) == ("owner", b"two", second)


async def test_a_value_may_be_empty(bucket: BulkKeyValue) -> None:
    await bucket.put("owner", b"")

    assert present(await bucket.get("owner")).value == b""


async def test_keys_do_not_know_of_each_other(bucket: BulkKeyValue) -> None:
    await bucket.put("a/b.c-d_e=F", b"1")
    await bucket.put("other", b"2")

    assert sorted(await bucket.keys()) == ["a/b.c-d_e=F", "other"]
    assert present(await bucket.get("a/b.c-d_e=F")).value == b"1"


async def test_a_key_that_is_put_again_while_the_bucket_is_read_is_listed(
    bucket: BulkKeyValue, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("one", "other"):
        await bucket.put(key, b"1")
    revision, puts = bucket.revision, [b"2", b"3"]

    async def revision_and_a_put() -> int:
        found = await revision()
        if puts:
            await bucket.put("one", puts.pop(0))
        return found

    monkeypatch.setattr(bucket, "revision", revision_and_a_put)
    assert {entry.key: entry.value for entry in await bucket.entries()} == {"one": b"3", "other": b"1"}


async def test_a_put_may_depend_on_the_newest_revision(bucket: BulkKeyValue) -> None:
    first = await bucket.put("owner", b"one")
    await bucket.put("other", b"between")

    second = await bucket.put("owner", b"two", revision=first)

    with pytest.raises(RefusedError):
        await bucket.put("owner", b"three", revision=first)
    assert (present(await bucket.get("owner")).value, second > first) == (b"two", True)


async def test_a_put_may_depend_on_the_key_being_new(bucket: BulkKeyValue) -> None:
    await bucket.put("owner", b"one", revision=0)

    with pytest.raises(RefusedError):
        await bucket.put("owner", b"two", revision=0)
    assert present(await bucket.get("owner")).value == b"one"


async def test_a_put_on_a_revision_needs_the_key(bucket: BulkKeyValue) -> None:
    with pytest.raises(RefusedError):
        await bucket.put("owner", b"one", revision=7)
    assert await bucket.get("owner") is None


async def test_many_keys_are_stored_and_removed_at_once(bucket: BulkKeyValue) -> None:
    await bucket.put("old", b"1")

    await bucket.put_many({**{f"new.{number}": b"2" for number in range(20)}, "old": None})

    assert await bucket.keys() == sorted(f"new.{number}" for number in range(20))


async def test_many_keys_of_which_one_cannot_be_stored_are_an_error(bucket: BulkKeyValue, backend: Admin) -> None:
    await backend.delete_stream("KV_leases")

    with pytest.raises(BackendError):
        await bucket.put_many({f"new.{number}": b"2" for number in range(20)})


async def test_a_deleted_key_is_missing(bucket: BulkKeyValue) -> None:
    await bucket.put("owner", b"one")
    await bucket.put("other", b"two")

    await bucket.delete("owner")

    assert await bucket.get("owner") is None
    assert await bucket.keys() == ["other"]


async def test_deleting_a_key_that_is_missing_is_no_error(bucket: BulkKeyValue) -> None:
    await bucket.delete("nothing")

    assert await bucket.get("nothing") is None


async def test_a_deleted_key_is_new_again(bucket: BulkKeyValue) -> None:
    old = await bucket.put("owner", b"one")
    await bucket.delete("owner")

    with pytest.raises(RefusedError):
        await bucket.put("owner", b"two", revision=old)
    assert await bucket.put("owner", b"two", revision=0) > old
    assert present(await bucket.get("owner")).value == b"two"


async def test_a_bucket_is_found_again(bucket: BulkKeyValue, backend: Admin) -> None:
    await bucket.put("owner", b"one")

    again = await backend.key_value("leases")

    assert present(await again.get("owner")).value == b"one"


async def test_buckets_do_not_know_of_each_other(bucket: BulkKeyValue, backend: Admin) -> None:
    await bucket.put("owner", b"one")

    assert await (await backend.key_value("tables")).get("owner") is None


@pytest.mark.parametrize("key", ["", "with space", "star*", "größe", "a>"])
async def test_a_key_of_other_characters_is_refused(bucket: BulkKeyValue, key: str) -> None:
    with pytest.raises(RefusedError):
        await bucket.put(key, b"value")


async def test_a_conflict_is_told_apart(bucket: BulkKeyValue) -> None:
    first = await bucket.put("owner", b"one")
    await bucket.put("owner", b"two")

    with pytest.raises(ConflictError, match=rf"bucket leases, key owner: its newest revision is not {first}"):
        await bucket.put("owner", b"three", revision=first)
    with pytest.raises(ConflictError, match="it exists"):
        await bucket.put("owner", b"three", revision=0)


async def test_a_delete_may_depend_on_the_newest_revision(bucket: BulkKeyValue) -> None:
    first = await bucket.put("owner", b"one")
    second = await bucket.put("owner", b"two")

    with pytest.raises(ConflictError):
        await bucket.delete("owner", revision=first)
    assert present(await bucket.get("owner")).value == b"two"
    await bucket.delete("owner", revision=second)
    assert await bucket.get("owner") is None


async def test_a_repeat_of_a_message_id_is_stored_once(bucket: BulkKeyValue) -> None:
    first = await bucket.put("owner", b"one", message_id="once")
    assert await bucket.put("owner", b"one", message_id="once") == first
    assert await bucket.revision() == first


@pytest.mark.needs_server(2, 12)
async def test_a_repeat_on_a_revision_finds_its_own(bucket: BulkKeyValue) -> None:
    await bucket.put("owner", b"one", revision=0, message_id="once")

    with pytest.raises(ConflictError):
        await bucket.put("owner", b"one", revision=0, message_id="once")
    assert present(await bucket.get("owner")).message_id == "once"


async def test_entries_are_the_newest_of_each_key(bucket: BulkKeyValue) -> None:
    for key, value in (("a", b"1"), ("b", b"2"), ("a", b"3"), ("c", b"4")):
        await bucket.put(key, value)
    await bucket.delete("c")

    assert [(entry.key, entry.value) for entry in await bucket.entries()] == [("b", b"2"), ("a", b"3")]
    assert await bucket.keys() == ["a", "b"]


async def test_history_is_kept_as_far_as_the_bucket_says(backend: Admin) -> None:
    bucket = await backend.key_value("long", history=3)
    for value in (b"1", b"2", b"3", b"4"):
        await bucket.put("owner", value)
    await bucket.put("other", b"")

    history = bucket.changes("owner", until=await bucket.revision())

    assert [entry.value async for entry in history] == [b"2", b"3", b"4"]


async def test_a_delete_takes_the_history_along(backend: Admin) -> None:
    bucket = await backend.key_value("long", history=3)
    await bucket.put("owner", b"1")
    await bucket.put("owner", b"2")
    await bucket.delete("owner")

    history = bucket.changes("owner", until=await bucket.revision())

    assert {(entry.value, entry.deleted) async for entry in history} == {(b"", True)}


async def test_a_delete_that_is_tried_again_takes_the_history_along(
    backend: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = await backend.key_value("long", history=3)
    await bucket.put("owner", b"1")
    await bucket.put("owner", b"2")
    publish, acknowledgements = backend.publish, 0

    async def lose_the_second(*args: Any, **kwargs: Any) -> PubAck:
        nonlocal acknowledgements
        stored = await publish(*args, **kwargs)
        acknowledgements += 1
        if acknowledgements == 2:
            raise OutcomeUnknownError("the acknowledgement was lost")
        return stored

    monkeypatch.setattr(backend, "publish", lose_the_second)
    with pytest.raises(OutcomeUnknownError):
        await bucket.delete("owner", message_id="once")
    await bucket.delete("owner", message_id="once")

    history = bucket.changes("owner", until=await bucket.revision())

    assert {(entry.value, entry.deleted) async for entry in history} == {(b"", True)}


async def test_changes_come_as_they_are_made(bucket: BulkKeyValue) -> None:
    first = await bucket.put("a", b"1")
    await bucket.put("b", b"2")
    async with aclosing(bucket.changes(after=first)) as changes:
        assert (await anext(changes)).value == b"2"
        await bucket.put("a", b"3")
        assert (await anext(changes)).value == b"3"
        await bucket.delete("b")
        gone = await anext(changes)
    assert (gone.key, gone.deleted) == ("b", True)


async def test_changes_of_one_key(bucket: BulkKeyValue) -> None:
    for key, value in (("a", b"1"), ("a.b", b"2"), ("a.b.c", b"3")):
        await bucket.put(key, value)
    async with aclosing(bucket.changes("a.b")) as changes:
        assert (await anext(changes)).value == b"2"
        await bucket.put("a", b"4")
        await bucket.put("a.b", b"5")
        assert (await anext(changes)).value == b"5"


async def test_a_key_is_forgotten_after_its_ttl(bucket: BulkKeyValue, elapse: Elapse) -> None:
    await bucket.put("short", b"1", ttl_seconds=1)
    await bucket.put("long", b"2", ttl_seconds=60)
    assert present(await bucket.get("short")).value == b"1"
    await elapse(2.5)
    assert await bucket.get("short") is None
    assert await bucket.keys() == ["long"]


async def test_a_forgotten_key_is_new_again(bucket: BulkKeyValue, elapse: Elapse) -> None:
    await bucket.put("owner", b"1", ttl_seconds=1)
    await elapse(2.5)

    await bucket.put("owner", b"2", revision=0)

    assert present(await bucket.get("owner")).value == b"2"


async def test_a_newer_value_outlives_the_ttl_of_an_older_one(bucket: BulkKeyValue, elapse: Elapse) -> None:
    await bucket.put("owner", b"1", ttl_seconds=1)
    await bucket.put("owner", b"2")
    await elapse(2.5)

    assert present(await bucket.get("owner")).value == b"2"


@pytest.mark.parametrize("stated", [{"history": 3}, {"ttl_seconds": 600}])
async def test_a_bucket_that_keeps_by_history_or_age_knows_no_ttl_of_a_key(
    backend: Admin, stated: dict[str, Any]
) -> None:
    bucket = await backend.key_value("other", **stated)

    with pytest.raises(RefusedError, match="this bucket knows no ttl"):
        await bucket.put("owner", b"2", ttl_seconds=1)


async def test_keys_are_found_by_a_filter_one_after_another(bucket: BulkKeyValue) -> None:
    for key in ("index.MARS.1", "index.MARS.1.decided", "other.MARS.2.decided", "index.MARS.3.decided"):
        await bucket.put(key, key.encode())
    await bucket.delete("index.MARS.3.decided")
    first = present(await bucket.next("index.*.*.decided"))
    assert (first.key, first.value) == ("index.MARS.1.decided", b"index.MARS.1.decided")
    second = present(await bucket.next("index.*.*.decided", after=first.revision))
    assert (second.key, second.deleted) == ("index.MARS.3.decided", True)
    assert await bucket.next("index.*.*.decided", after=second.revision) is None
    assert await bucket.next("nobody.>") is None


async def test_a_key_of_a_bucket_with_an_age_may_be_forgotten_sooner(backend: Admin, elapse: Elapse) -> None:
    """As decisions of persons are (`state.failure_counts`)."""
    bucket = await backend.key_value("ages", ttl_seconds=600)
    await bucket.put("decided", b"1", headers={TTL: ttl_text(1)})
    await bucket.put("count", b"1")
    await elapse(2.5)
    assert await bucket.keys() == ["count"]


async def test_a_bucket_that_forgets_sooner_is_changed_and_one_that_keeps_for_longer_is_not(backend: Admin) -> None:
    for ttl_seconds in (600, 900, 300, None):
        await backend.key_value("ages", ttl_seconds=ttl_seconds)
    assert (await backend.stream_info("KV_ages")).config.max_age == 900 * SECOND


async def test_a_ttl_below_a_second_is_refused(bucket: BulkKeyValue) -> None:
    with pytest.raises(RefusedError, match=r"key owner: ttl must be 1 s or more, found 0.5"):
        await bucket.put("owner", b"1", ttl_seconds=0.5)


async def test_a_bucket_of_others_without_ttl_is_used_as_it_is(backend: Admin) -> None:
    await backend.create_stream(StreamSpec(name="KV_theirs", subjects=("$KV.theirs.>",), max_msgs_per_subject=1))
    bucket = await backend.key_value("theirs")
    await bucket.put("owner", b"1")
    with pytest.raises(RefusedError, match="this bucket knows no ttl"):
        await bucket.put("owner", b"1", ttl_seconds=1)
    await bucket.delete("owner")
    assert await bucket.get("owner") is None


@pytest.mark.parametrize("name", ["", "a.b", "größe"])
async def test_a_bucket_of_another_name_is_refused(backend: Admin, name: str) -> None:
    with pytest.raises(RefusedError, match="a name is made of letters, digits"):
        await backend.key_value(name)


@pytest.mark.needs_server(2, 12)
async def test_a_counter_adds_up(backend: Admin, publish: Publish) -> None:
    await backend.create_stream(StreamSpec(name="COUNTS", subjects=("counts.>",), allow_msg_counter=True))

    async def add(increment: str, subject: str = "counts.a", **stated: str) -> PubAck:
        return await publish(subject, b"", headers={"Nats-Incr": increment}, stream="COUNTS", **stated)

    assert [(await add(number)).total for number in ("+5", "-7", "0")] == [5, -2, -2]
    first = await add("+1", "counts.b", message_id="once")
    again = await add("+1", "counts.b", message_id="once")
    assert ((first.total, first.duplicate), (again.total, again.duplicate)) == ((1, False), (None, True))
    newest = present(await backend.message("COUNTS", last_by_subject="counts.b"))
    assert (newest.data, newest.sequence) == (b'{"val":"1"}', first.sequence)
    assert await backend.message("COUNTS", last_by_subject="counts.c") is None
    with pytest.raises(RefusedError, match="increment is missing"):
        await publish("counts.a", b"", stream="COUNTS")


async def test_a_last_message_needs_its_stream(backend: Admin) -> None:
    with pytest.raises(NotFoundError):
        await backend.message("NONE", last_by_subject="counts.c")


async def test_a_message_is_read_by_its_sequence(backend: Admin, publish: Publish) -> None:
    await backend.create_stream(StreamSpec(name="ONES", subjects=("ones.>",)))
    for number in range(3):
        await publish(f"ones.{number}", b"%d" % number, headers={"Number": f"{number}"}, stream="ONES")
    await backend.delete_message("ONES", 2)
    found = present(await backend.message("ONES", 3))
    assert (found.subject, found.data, found.sequence, present(found.headers)["Number"]) == ("ones.2", b"2", 3, "2")
    assert [await backend.message("ONES", sequence) for sequence in (2, 4)] == [None, None]
    with pytest.raises(NotFoundError):
        await backend.message("NONE", 1)
