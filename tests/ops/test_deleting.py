"""Deletions are many at once only while each is answered soon: see `ops.erasure.erase`."""

from __future__ import annotations

import math

import anyio
import pytest

from aviso_workers.errors import NotFoundError, UnavailableError
from aviso_workers.ops.erasure import erase
from aviso_workers.ops.erasure.erase import MAX_UNDER_WAY, DeletionPace

pytestmark = pytest.mark.anyio


class Server:
    """Deletes one message after another, as a stream does; what is asked for meanwhile waits."""

    def __init__(self, *, seconds: float) -> None:
        self.deleted: list[int] = []
        self.most_waiting = 0
        self._seconds = seconds
        self._waiting = 0
        self._turn = anyio.Lock()

    async def delete_message(self, stream: str, sequence: int) -> None:
        self._waiting += 1
        self.most_waiting = max(self.most_waiting, self._waiting)
        async with self._turn:
            await anyio.sleep(self._seconds)
            self.deleted.append(sequence)
        self._waiting -= 1


async def test_a_slow_server_is_asked_for_one_after_another() -> None:
    server = Server(seconds=erase.SOON_SECONDS * 1.5)
    await erase.delete(server, "MARS", range(5), pace=DeletionPace(), progress=lambda _: None)  # type: ignore[arg-type]
    assert (server.deleted, server.most_waiting) == ([0, 1, 2, 3, 4], 1)


@pytest.mark.slow
async def test_a_fast_server_is_asked_for_many_at_once() -> None:
    server = Server(seconds=0.0)
    told: list[int] = []
    await erase.delete(server, "MARS", range(3000), pace=DeletionPace(), progress=told.append)  # type: ignore[arg-type]
    assert (sorted(server.deleted), sum(told)) == (list(range(3000)), 3000)
    assert server.most_waiting > 16


async def test_an_election_of_a_leader_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Electing(Server):
        async def delete_message(self, stream: str, sequence: int) -> None:
            if (electing := len(told) < 2) or sequence == 3:
                told.append(sequence)
                raise UnavailableError("no leader") if electing else NotFoundError("it has gone")
            await super().delete_message(stream, sequence)

    told: list[int] = []
    server = Electing(seconds=0.0)
    await erase.delete(server, "MARS", range(5), pace=DeletionPace(), progress=lambda _: None)  # type: ignore[arg-type]
    assert (server.deleted, told) == ([0, 1, 2, 4], [0, 0, 3])

    told.clear()
    monkeypatch.setattr(erase, "PATIENCE_SECONDS", -1.0)
    with pytest.raises(UnavailableError, match="no leader"):
        await erase.delete(server, "MARS", [0], pace=DeletionPace(), progress=lambda _: None)  # type: ignore[arg-type]


def test_the_pace_grows_by_answers_and_falls_by_half() -> None:
    pace = DeletionPace()
    for _ in range(2 * MAX_UNDER_WAY):
        pace.answered(0.001)
    assert pace.limiter.total_tokens == MAX_UNDER_WAY
    pace.answered(1.0)
    assert pace.limiter.total_tokens == MAX_UNDER_WAY // 2
    for _ in range(math.ceil(math.log2(MAX_UNDER_WAY))):
        pace.answered(1.0)
    assert pace.limiter.total_tokens == 1
