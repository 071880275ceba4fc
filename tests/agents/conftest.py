from __future__ import annotations

from collections.abc import Iterator

import pytest

from aviso_workers.server import NatsServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer.start(store_dir=tmp_path_factory.mktemp("jetstream")) as server:
        yield server
