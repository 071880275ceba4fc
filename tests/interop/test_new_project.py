"""What `aviso-workers new` writes for containers, Kubernetes and systemd, read by the linters that others have made.

No image is built and no cluster is asked. Each linter also has to find a mistake, or it would have looked at nothing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from aviso_workers import projects
from tests.interop import programs
from tests.waits import PATIENCE_SECONDS


@pytest.fixture
def project(tmp_path: Path) -> Path:
    projects.create(tmp_path / "field_index")
    return tmp_path / "field_index"


def change(file: Path, before: str, after: str) -> None:
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


def run(*command: str | Path, directory: Path) -> tuple[bool, str]:
    """Whether a command ends with 0, and what it says."""
    ran = subprocess.run(
        command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE_SECONDS
    )
    return ran.returncode == 0, ran.stdout


def test_hadolint_finds_nothing_in_the_dockerfile(project: Path) -> None:
    hadolint = programs.hadolint()
    assert run(hadolint, "Dockerfile", directory=project) == (True, "")
    change(project / "Dockerfile", "WORKDIR /app", "WORKDIR app")
    passed, said = run(hadolint, "Dockerfile", directory=project)
    assert (passed, "DL3000" in said) == (False, True), said


def test_compose_reads_its_file(project: Path) -> None:
    compose = programs.compose()
    passed, said = run(compose, "compose.yaml", directory=project)
    assert passed, said
    change(project / "compose.yaml", "stop_grace_period", "stop_graceperiod")
    passed, said = run(compose, "compose.yaml", directory=project)
    assert (passed, "stop_graceperiod" in said) == (False, True), said


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("deployment.yaml", "terminationGracePeriodSeconds: 45", "terminationGracePeriodSeconds: 45s"),
        ("deployment.yaml", "periodSeconds", "periodSecond"),
        ("monitoring.yaml", "endpoints:", "endpoint:"),
        ("scaling.yaml", "maxReplicaCount", "maxReplicas"),
    ],
)
def test_kubernetes_and_its_operators_know_every_key_of_the_manifests(
    project: Path, file: str, before: str, after: str
) -> None:
    crds = [f"--local-crds={directory}" for directory in programs.custom_resources()]
    command: list[str | Path] = [programs.kubectl_validate(), *crds, "kubernetes"]
    passed, said = run(*command, directory=project)
    assert passed, said
    change(project / "kubernetes" / file, before, after)
    passed, said = run(*command, directory=project)
    assert (passed, file in said) == (False, True), said


def test_systemd_finds_nothing_in_the_unit(project: Path) -> None:
    """In the place of /opt/field-index, where nothing is, it is given a folder with our virtual environment."""
    systemd = programs.systemd_analyze()
    (project / ".venv").symlink_to(sys.prefix)
    unit = project / "systemd" / "field-index.service"
    change(unit, "/opt/field-index", str(project))
    assert run(systemd, "verify", unit, directory=project) == (True, "")
    change(unit, "TimeoutStopSec=45", "TimeoutStopSec=soon")
    _, said = run(systemd, "verify", unit, directory=project)
    assert "Failed to parse time value" in said, said
