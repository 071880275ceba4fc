from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from aviso_workers.server import BINARY_VARIABLE, NatsServer
from tests.interop import aviso_server, programs
from tests.interop.aviso_server import AvisoServer


@pytest.fixture
def start_nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., NatsServer]]:
    """`start_nats_server("2.11.17", store_dir=...)`: a nats-server of that version, ended with the test.

    What else is given goes to `NatsServer.start`.
    """
    with ExitStack() as servers:

        def start(version: str, *, store_dir: Path | None = None, port: int = 0, config: str = "") -> NatsServer:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(BINARY_VARIABLE, str(programs.nats_server(version)))
                server = NatsServer.start(
                    store_dir=store_dir or tmp_path_factory.mktemp("jetstream"), port=port, config=config
                )
            return servers.enter_context(server)

        yield start


@pytest.fixture
def start_aviso_server(tmp_path: Path) -> Iterator[Callable[..., AvisoServer]]:
    """`start_aviso_server("0.7.1", config=file)`: an aviso-server on a free port, ended with the test.

    `environ` adds variables to its environment.
    """
    with ExitStack() as servers:

        def start(version: str, *, config: Path, environ: dict[str, str] | None = None) -> AvisoServer:
            return servers.enter_context(
                aviso_server.running(version, config=config, directory=tmp_path, environ=environ)
            )

        yield start


@pytest.fixture(params=programs.AVISO_SERVERS, ids=lambda version: f"aviso-server-{version}")
def aviso_server_version(request: pytest.FixtureRequest) -> str:
    """Each version of aviso-server in turn."""
    return str(request.param)


@pytest.fixture
def aviso_config(tmp_path: Path, nats_server: NatsServer) -> Path:
    """The configuration file that an aviso-server and workers both read, with the address of the test's nats-server."""
    text = Path(__file__).with_name("aviso.yaml").read_text()
    path = tmp_path / "aviso.yaml"
    path.write_text(text.replace("nats://127.0.0.1:4222", nats_server.url))
    return path


@pytest.fixture
def server(
    aviso_server_version: str, start_aviso_server: Callable[..., AvisoServer], aviso_config: Path
) -> AvisoServer:
    """Each version of aviso-server in turn, on the test's nats-server, with the file that workers read."""
    return start_aviso_server(aviso_server_version, config=aviso_config)
