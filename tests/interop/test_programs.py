"""The programs are those that they are taken for."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.interop import programs


def said(*command: str | Path) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    return ended.stdout + ended.stderr


@pytest.mark.parametrize("version", programs.NATS_SERVERS)
def test_each_nats_server_is_of_its_version(version: str) -> None:
    assert said(programs.nats_server(version), "--version").strip() == f"nats-server: v{version}"


@pytest.mark.parametrize("version", programs.AVISO_SERVERS)
def test_each_aviso_server_can_be_run(version: str, tmp_path: Path) -> None:
    ended = subprocess.run([programs.aviso_server(version)], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "configuration" in (ended.stdout + ended.stderr).lower()


def test_the_nats_cli_can_be_run() -> None:
    assert "NATS" in said(programs.nats_cli(), "--help")


def test_pyaviso_is_of_its_version() -> None:
    version = "import importlib.metadata as m; print(m.version('pyaviso'))"
    assert said(programs.pyaviso(), "-c", version).strip() == programs.PYAVISO
