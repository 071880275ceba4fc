"""Which consumer of a name it is."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from aviso_workers.backends import ConsumerInfo
from aviso_workers.jetstream import identities, metadata
from aviso_workers.jetstream.identities import MARK
from aviso_workers.jetstream.info import ConsumerConfig
from aviso_workers.jetstream.specs import ConsumerSpec

NOW = datetime(2026, 11, 26, tzinfo=UTC)
LATER = NOW + timedelta(hours=1)
SPEC = ConsumerSpec(
    durable_name="field__index", filter_subjects=("mars.>",), ack_wait=10**9, max_ack_pending=10, metadata={"of": "us"}
)


def consumer(mark: str = "", *, created: datetime = NOW, deliveries: int = 5, resets: int = 0) -> ConsumerInfo:
    noted = {MARK: mark} if mark else {}
    for _ in range(resets):
        noted = metadata.after_reset(noted)
    config = ConsumerConfig({"metadata": noted})
    return ConsumerInfo(name="field__index", config=config, time=NOW, created=created, deliveries=deliveries)


@pytest.mark.parametrize(
    ("known", "now", "same"),
    [
        (consumer(), consumer(deliveries=0), True),
        (consumer(), consumer(created=LATER), False),
        (consumer("1"), consumer("1", created=LATER), True),
        (consumer("1"), consumer("2", created=LATER), False),
        (consumer("1"), consumer(), True),
        (consumer("1"), consumer(created=LATER), False),
        (consumer(), consumer(str(NOW)), True),
        (consumer(), consumer(str(NOW), created=LATER), True),
        (consumer("1"), consumer(str(NOW), created=LATER), True),
        (consumer("1"), consumer("1", created=LATER, deliveries=4), False),
        (consumer("1"), consumer("1", resets=1, deliveries=0), True),
        (consumer("1"), consumer("1", created=LATER, resets=1, deliveries=0), True),
    ],
    ids=[
        "the same",
        "recreated by a program that notes nothing",
        "created at another time, says its server",
        "recreated by us",
        "its mark was removed",
        "recreated by others in place of ours",
        "marked since",
        "marked since, and then created at another time",
        "its mark was removed, and it was marked again",
        "recreated from a copy of its configuration",
        "reset",
        "reset, and then created at another time",
    ],
)
def test_it_is_recognised_by_its_mark_or_by_its_creation(known: ConsumerInfo, now: ConsumerInfo, same: bool) -> None:
    assert identities.of(now).is_same(identities.of(known)) == same


def test_nothing_is_the_same_as_what_is_not_known() -> None:
    assert not identities.of(consumer()).is_same(None)


def test_one_that_was_taken_to_another_place_does_not_go_on() -> None:
    known = identities.of(consumer("1"))
    assert identities.of(consumer("1", deliveries=6)).goes_on(known)
    assert not identities.of(consumer("1", resets=1)).goes_on(known)


def test_each_that_is_created_has_a_mark_of_its_own() -> None:
    first, second = (identities.marked(SPEC, None).metadata for _ in range(2))
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    assert first["of"] == "us"
    assert first[MARK] != second[MARK]


@pytest.mark.parametrize(
    ("found", "mark"), [(consumer("1"), "1"), (consumer(), str(NOW))], ids=["marked", "not marked"]
)
def test_all_workers_give_one_that_exists_the_same_mark(found: ConsumerInfo, mark: str) -> None:
    assert identities.marked(SPEC, found).metadata == {"of": "us", MARK: mark}
