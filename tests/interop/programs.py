"""The real programs that ours stand beside, as `scripts/interop` has installed them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

__all__ = ["AVISO_SERVERS", "NATS_SERVERS", "aviso_server", "framework", "nats_cli", "nats_server", "pyaviso"]

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
_PLACE = Path(os.environ.get("INTEROP_CACHE") or _CACHE / "aviso-workers/interop")


def _versions(program: str) -> tuple[str, ...]:
    lines = (Path(__file__).parent / "versions.txt").read_text().splitlines()
    return tuple(version for name, _, version in (line.partition(" ") for line in lines) if name == program)


AVISO_SERVERS = _versions("aviso-server")
"""The versions of each, the oldest first."""
NATS_SERVERS = _versions("nats-server")
NATS_CLI, PYAVISO = *_versions("natscli"), *_versions("pyaviso")


def aviso_server(version: str) -> Path:
    """Its binary. A test that asks for a program which is not installed is skipped."""
    return _installed("aviso-server", version, "bin/aviso_server")


def nats_server(version: str) -> Path:
    return _installed("nats-server", version, "nats-server")


def nats_cli() -> Path:
    return _installed("natscli", NATS_CLI, "nats")


def pyaviso() -> Path:
    """The Python that has it."""
    return _installed("pyaviso", PYAVISO, "bin/python")


def framework(package: str) -> Path:
    """The Python that has one of the frameworks of docs/coming-from."""
    (version,) = _versions(package)
    return _installed(package, version, "bin/python")


def _installed(program: str, version: str, file: str) -> Path:
    installed = _PLACE / f"{program}-{version}"
    if not installed.exists():
        pytest.skip(f"{program} {version} is not installed: run scripts/interop")
    return installed / file
