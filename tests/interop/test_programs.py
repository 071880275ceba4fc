"""Each of the programs of others is the one that was asked for, and works on this machine."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from aviso_workers.server import NatsServer
from tests.interop import programs
from tests.interop.aviso_server import AvisoServer
from tests.waits import PATIENCE_SECONDS


def output_of(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("version", programs.NATS_SERVERS)
def test_nats_server_starts_and_has_this_version(version: str, start_nats_server: Callable[..., NatsServer]) -> None:
    server = start_nats_server(version)

    assert re.search(rf"Version: +{re.escape(version)}\b", server.log)


def test_aviso_server_stores_what_is_posted(
    aviso_server_version: str,
    start_aviso_server: Callable[..., AvisoServer],
    nats_server: NatsServer,
    write_config: Callable[..., Path],
) -> None:
    server = start_aviso_server(aviso_server_version, config=write_config(nats_server.url))

    status, answer = server.notify("mars", {"class": "od", "step": "1"}, {"location": "/data/1"})

    assert status == 200, answer
    assert f'"service.version":"{aviso_server_version}"' in server.log


def test_aviso_server_keeps_its_address_through_a_restart(
    aviso_server_version: str,
    start_aviso_server: Callable[..., AvisoServer],
    nats_server: NatsServer,
    write_config: Callable[..., Path],
) -> None:
    server = start_aviso_server(aviso_server_version, config=write_config(nats_server.url))

    server.kill()
    server.start()

    assert server.request("GET", "/health")[0] == 200


def test_the_nats_command_line_reads_a_server(nats_server: NatsServer) -> None:
    listed = output_of(programs.nats_cli(), "--server", nats_server.url, "stream", "ls", "--json")

    assert json.loads(listed) in ([], None)


def test_pyaviso_is_importable() -> None:
    version = output_of(programs.pyaviso(), "-c", "import pyaviso; print(pyaviso.__version__)")

    assert version.strip() == programs.PYAVISO
