"""`aviso-workers server start`: what it says of the servers that it has started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import Run


@pytest.fixture
def servers(run: Run) -> Iterator[None]:
    yield
    assert run("server", "stop").code == 0


@pytest.mark.usefixtures("servers")
def test_it_warns_where_commands_connect_to_another_port(
    run: Run, free_port: int, write_config: Callable[..., Path]
) -> None:
    config = write_config(f"localhost:{free_port}")
    settings = yaml.safe_load(config.read_text())
    for port in (0, free_port):
        config.write_text(yaml.safe_dump({**settings, "server": {"port": port, "monitoring": {"port": 0}}}))
        started = run("server", "start", "--config", config)
        assert (started.code, "connect to" in started.err) == (0, port == 0), started
        if port == 0:
            assert f"connect to localhost:{free_port} (notification_backend.jetstream.nats_url)" in started.err
            assert run("server", "stop").code == 0
