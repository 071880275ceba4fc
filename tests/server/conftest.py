from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from aviso_workers import config
from aviso_workers.config import Config

Load = Callable[..., Config]


def load_server(path: Path, server: str, *, replicas: int = 1, **environ: str) -> Config:
    """The configuration with this section `server`, which is written to `path` from line 3 on."""
    backend = f"notification_backend: {{kind: jetstream, jetstream: {{replicas: {replicas}}}}}"
    path.write_text(f"{backend}\nserver:\n{textwrap.indent(textwrap.dedent(server).strip(), '  ')}\n")
    return config.load(path, environ=environ)


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.chdir(tmp_path)
    return lambda server, **others: load_server(Path("dev.yaml"), server, **others)
