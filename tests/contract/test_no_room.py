"""A stream that exists, and for whose update the server has no room."""

from __future__ import annotations

from pathlib import Path

import pytest

from aviso_workers import App
from aviso_workers.events import StreamProvisioned
from aviso_workers.server import NatsServer
from tests.conftest import WriteConfig

pytestmark = pytest.mark.anyio


async def test_it_is_used_as_it_is_with_a_warning(tmp_path: Path, write_config: WriteConfig) -> None:
    store = tmp_path / "store"
    limited = f"jetstream {{store_dir: '{store}', max_file_store: 64MB}}\n"
    field = {"class": "od", "step": 6}
    with NatsServer.start(store_dir=store, config=limited) as server:
        async with App("before", config=write_config(server.url, max_bytes=10**6)) as app:
            await app.notify("mars", field)

        app = App("after", config=write_config(server.url, max_bytes=10**9))
        told: list[StreamProvisioned] = []
        app.events.listen(told.append, StreamProvisioned)
        async with app:
            assert (await app.notify("mars", field)).sequence == 2
    (kept,) = [fact for fact in told if fact.stream == "MARS"]
    assert (kept.action, kept.differences) == ("kept", ("max_bytes: 1M -> 1G",))
    assert "10047" in kept.refused
