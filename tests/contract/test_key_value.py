"""What a backend promises about buckets of keys: the newest value, and putting on a condition."""

from __future__ import annotations

import pytest

from aviso_workers.backends import Backend, KeyValue
from aviso_workers.errors import RefusedError

pytestmark = pytest.mark.anyio


@pytest.fixture
async def bucket(backend: Backend) -> KeyValue:
    return await backend.key_value("leases")


async def test_a_key_that_is_missing_has_no_entry(bucket):
    assert await bucket.get("nothing") is None
    assert await bucket.keys() == []


async def test_the_newest_value_counts(bucket):
    first = await bucket.put("owner", b"one")
    second = await bucket.put("owner", b"two")

    entry = await bucket.get("owner")

    assert second > first > 0
    assert (entry.key, entry.value, entry.revision) == ("owner", b"two", second)


async def test_a_value_may_be_empty(bucket):
    await bucket.put("owner", b"")

    assert (await bucket.get("owner")).value == b""


async def test_keys_do_not_know_of_each_other(bucket):
    await bucket.put("a/b.c-d_e=F", b"1")
    await bucket.put("other", b"2")

    assert sorted(await bucket.keys()) == ["a/b.c-d_e=F", "other"]
    assert (await bucket.get("a/b.c-d_e=F")).value == b"1"


async def test_a_put_may_depend_on_the_newest_revision(bucket):
    first = await bucket.put("owner", b"one")
    await bucket.put("other", b"between")

    second = await bucket.put("owner", b"two", revision=first)

    with pytest.raises(RefusedError):
        await bucket.put("owner", b"three", revision=first)
    assert ((await bucket.get("owner")).value, second > first) == (b"two", True)


async def test_a_put_may_depend_on_the_key_being_new(bucket):
    await bucket.put("owner", b"one", revision=0)

    with pytest.raises(RefusedError):
        await bucket.put("owner", b"two", revision=0)
    assert (await bucket.get("owner")).value == b"one"


async def test_a_put_on_a_revision_needs_the_key(bucket):
    with pytest.raises(RefusedError):
        await bucket.put("owner", b"one", revision=7)
    assert await bucket.get("owner") is None


async def test_a_deleted_key_is_missing(bucket):
    await bucket.put("owner", b"one")
    await bucket.put("other", b"two")

    await bucket.delete("owner")

    assert await bucket.get("owner") is None
    assert await bucket.keys() == ["other"]


async def test_deleting_a_key_that_is_missing_is_no_error(bucket):
    await bucket.delete("nothing")

    assert await bucket.get("nothing") is None


async def test_a_deleted_key_is_new_again(bucket):
    old = await bucket.put("owner", b"one")
    await bucket.delete("owner")

    with pytest.raises(RefusedError):
        await bucket.put("owner", b"two", revision=old)
    assert await bucket.put("owner", b"two", revision=0) > old
    assert (await bucket.get("owner")).value == b"two"


async def test_a_bucket_is_found_again(bucket, backend):
    await bucket.put("owner", b"one")

    again = await backend.key_value("leases")

    assert (await again.get("owner")).value == b"one"


async def test_buckets_do_not_know_of_each_other(bucket, backend):
    await bucket.put("owner", b"one")

    assert await (await backend.key_value("tables")).get("owner") is None


@pytest.mark.parametrize("key", ["", "with space", "star*", "größe", "a>"])
async def test_a_key_of_other_characters_is_refused(bucket, key):
    with pytest.raises(RefusedError):
        await bucket.put(key, b"value")
