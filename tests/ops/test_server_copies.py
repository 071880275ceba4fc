"""Copies of all streams of a server; test_key_rotation makes them on real ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from aviso_workers.backends import Admin
from aviso_workers.errors import UnavailableError
from aviso_workers.jetstream.info import StreamInfo
from aviso_workers.ops import key_rotation

pytestmark = pytest.mark.anyio


class ElectingServers:
    """Servers without streams, which answer the third request only."""

    asked = 0

    async def streams(self) -> Sequence[StreamInfo]:
        self.asked += 1
        if self.asked < 3:
            raise UnavailableError("STREAM.LIST: no answer in time")
        return []

    async def stream_names(self) -> Sequence[str]:
        return []


async def test_a_cluster_that_elects_its_leader_is_asked_again() -> None:
    source = ElectingServers()
    assert await key_rotation.move_all(cast("Admin", source), cast("Admin", None), print) == []
    assert source.asked == 3
