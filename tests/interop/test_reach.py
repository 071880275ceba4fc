"""What users reach on the oldest nats-server that is supported, whose API is not strict unless its file says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from aviso_workers.server import BINARY_VARIABLE, processes
from tests.interop import programs
from tests.security import reach
from tests.security.reach import ATTACKS, Place
from tests.security.test_reach import AS_RENDERED, ONE_ACCOUNT, TABLE, lax_server, start

pytestmark = pytest.mark.anyio

OLDEST = programs.NATS_SERVERS[0]


@pytest.fixture(autouse=True)
def oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BINARY_VARIABLE, str(programs.nats_server(OLDEST)))


@pytest.mark.parametrize("accounts", [ONE_ACCOUNT, AS_RENDERED])
async def test_roles_reach_what_they_reach_on_newer_servers(accounts: str, tmp_path: Path) -> None:
    """But for the request that resets a consumer, which 2.11 does not know."""
    (node,) = start(tmp_path, accounts)
    try:
        place = Place(node.url)
        await reach.prepare(place)
        found = {
            (role, where): tuple([await reach.reached(place, role, column) for column in ATTACKS])
            for role, where in TABLE
            if where == accounts
        }
    finally:
        processes.stop(tmp_path / "servers")
    without_resets = {of: tuple("no" if cell == "resets" else cell for cell in row) for of, row in TABLE.items()}
    assert found == {of: row for of, row in without_resets.items() if of[1] == accounts}


async def test_an_acknowledgement_purges_another_stream_by_default(tmp_path: Path) -> None:
    with lax_server(tmp_path, strict=None) as server:
        place = Place(server.url)
        await reach.prepare(place)
        assert await reach.reached(place, "publisher", "JetStream's API") == "answers"
