"""Consumers that are carried to a copy of their stream: what a cluster does not tell of is not passed over."""

from __future__ import annotations

from typing import cast

import pytest

from aviso_workers.backends import Management
from aviso_workers.errors import UnavailableError
from aviso_workers.jetstream import info
from aviso_workers.jetstream.info import ConsumerInfo, StreamInfo
from aviso_workers.ops import mirrors
from aviso_workers.ops.mirrors import StreamPlace

pytestmark = pytest.mark.anyio


class Cluster:
    """A cluster in which a consumer has no leader, so that it is among the names and not in the list."""

    async def stream_info(self, stream: str) -> StreamInfo:
        return info.stream({"config": {"num_replicas": 3}, "state": {"last_seq": 7}, "ts": "2026-11-20T06:00:00Z"})

    async def consumer_names(self, stream: str) -> list[str]:
        return ["leaderless"]

    async def consumers(self, stream: str) -> list[ConsumerInfo]:
        return []

    async def consumer_info(self, stream: str, consumer: str, *, timeout_seconds: float) -> ConsumerInfo:
        raise UnavailableError(f"{stream}: {consumer}: no answer within {timeout_seconds:g} s")


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> StreamPlace:
    monkeypatch.setattr(mirrors, "ELECTION_SECONDS", 0.0)
    return StreamPlace(streams=cast(Management, Cluster()), stream="MARS")


async def test_a_consumer_that_no_server_answers_for_is_told_of_and_not_proven(place: StreamPlace) -> None:
    (carried,) = await mirrors.carry_consumers(place, place)
    assert (carried.consumer, carried.made, "not known" in carried.refused) == ("leaderless", False, True)


async def test_a_copy_is_not_whole_while_a_consumer_of_its_original_is_not_told(place: StreamPlace) -> None:
    with pytest.raises(UnavailableError, match="MARS: consumer leaderless: no server answers for it"):
        await mirrors.bring_consumers_on(place, place)
