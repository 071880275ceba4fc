from __future__ import annotations

import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aviso_workers import config
from aviso_workers.config import Config
from aviso_workers.server import processes
from aviso_workers.server.processes import Node
from tests import programs

Load = Callable[..., Config]
Start = Callable[..., tuple[Node, ...]]


def load_server(path: Path, server: str, *, replicas: int = 1, **environ: str) -> Config:
    """The configuration with this section `server`, which is written to `path` from line 3 on."""
    backend = f"notification_backend: {{kind: jetstream, jetstream: {{replicas: {replicas}}}}}"
    path.write_text(f"{backend}\nserver:\n{textwrap.indent(textwrap.dedent(server).strip(), '  ')}\n")
    return config.load(path, environ=environ)


def program(directory: Path, script: str) -> str:
    """A program for AVISO_WORKERS_NATS_SERVER: a shell script that is given the arguments of nats-server."""
    path = directory / "nats-server"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.chdir(tmp_path)
    return lambda server, **others: load_server(Path("dev.yaml"), server, **others)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(config, nodes=3, directory="hub")`: nodes that end with the test."""
    directories = set()

    def start(loaded: Config, *, nodes: int = 1, directory: str = "servers") -> tuple[Node, ...]:
        directories.add(tmp_path / directory)
        return processes.start(loaded, directory=tmp_path / directory, nodes=nodes, detached=False)

    yield start
    for directory in directories:
        processes.stop(directory)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with cert.pem and key.pem, for localhost; the certificate is its own authority."""
    openssl = programs.find("openssl", package="openssl")
    directory = tmp_path_factory.mktemp("certificate")
    request = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-days", "2"]
    files = ["-keyout", str(directory / "key.pem"), "-out", str(directory / "cert.pem")]
    subprocess.run([*request, *names, *files], check=True, capture_output=True)
    return directory
