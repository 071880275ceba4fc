"""What `aviso-workers new` writes: a project whose tests and types pass, that runs, and whose files agree with us."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from _demo.children import is_ready, wait_until
from aviso_workers import config, projects
from aviso_workers.aviso.literals import Duration
from aviso_workers.config.settings import Workers
from aviso_workers.declare.agents import durable_name
from aviso_workers.errors import DeclarationError
from aviso_workers.server import find_binary
from aviso_workers.server.processes import free_ports
from aviso_workers.worker.fleet import KILL_SECONDS
from tests.waits import PATIENCE_SECONDS

ROOT = Path(__file__).parents[1]
DRAINING = "workers.drain_timeout_seconds"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A new project, whose name has both an underscore in Python and a dash in Kubernetes."""
    projects.create(tmp_path / "field_index")
    return tmp_path / "field_index"


def environment(**variables: str) -> dict[str, str]:
    """Ours without what configures workers, with the programs of this virtual environment."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("AVISO", "NATS_"))}
    beside_python = str(Path(sys.executable).parent)
    return {**ours, "PATH": f"{beside_python}{os.pathsep}{ours['PATH']}", "PYTHONUNBUFFERED": "1", **variables}


def run(project: Path, *command: str, **variables: str) -> str:
    """Run one of the commands that its README has, and return what it said. Fails where the command does."""
    ran = subprocess.run(
        command,
        cwd=project,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert ran.returncode == 0, f"{' '.join(command)}: {ran.stdout}"
    return ran.stdout


@contextmanager
def running(project: Path, log_file: Path, *command: str, **variables: str) -> Iterator[Callable[[], str]]:
    """Run a command for the block, in which the result is its log; Ctrl-C ends it."""
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            command, cwd=project, env=environment(**variables), stdout=log, stderr=subprocess.STDOUT
        )
    try:
        yield log_file.read_text
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_SECONDS)


# --- It is written ---


def test_every_file_of_the_template_is_written_under_the_name_of_the_project(tmp_path: Path) -> None:
    written = projects.create(tmp_path / "harvest")
    assert sorted(str(file.relative_to(tmp_path / "harvest")) for file in written) == [
        ".dockerignore",
        ".gitignore",
        "Dockerfile",
        "Procfile",
        "README.md",
        "aviso.yaml",
        "compose.yaml",
        "harvest/__init__.py",
        "harvest/agents.py",
        "kubernetes/deployment.yaml",
        "kubernetes/monitoring.yaml",
        "kubernetes/scaling.yaml",
        "pyproject.toml",
        "systemd/harvest.service",
        "tests/test_agents.py",
    ]
    assert [file for file in written if re.search(r"project[_-](name|version)", file.read_text())] == []


def test_a_folder_that_has_something_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "harvest").mkdir()
    (tmp_path / "harvest" / "notes").touch()
    (tmp_path / "fields").touch()
    for name in ("harvest", "fields"):
        with pytest.raises(DeclarationError, match=f"{name} is there already and is not an empty folder: take another"):
            projects.create(tmp_path / name)
    assert [file.name for file in (tmp_path / "harvest").iterdir()] == ["notes"]


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "harvest").mkdir()
    assert projects.create(tmp_path / "harvest")


@pytest.mark.parametrize(
    "name", ["Fields", "field-index", "9fields", "_fields", "fields_", "field__index", "feld_ä", "class", "f" * 41]
)
def test_what_is_no_name_of_a_package_is_refused_with_one_that_is(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        DeclarationError, match=r"not a name of a Python package: take lower-case .*, such as field_index"
    ):
        projects.create(tmp_path / name)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("name", "other"),
    [
        *((name, "another Python package") for name in ("json", "msgspec", "aviso_workers")),
        *((name, "one of its folders") for name in ("tests", "kubernetes", "systemd")),
    ],
)
def test_the_name_of_something_else_is_refused(tmp_path: Path, name: str, other: str) -> None:
    with pytest.raises(DeclarationError, match=f"a project cannot be called '{name}', as {other} is: take another"):
        projects.create(tmp_path / name)
    assert [*tmp_path.iterdir()] == []


# --- It works ---


@pytest.mark.slow
def test_its_own_tests_pass(project: Path) -> None:
    assert "4 passed" in run(project, "python", "-m", "pytest", "-p", "no:asyncio", "-p", "no:cacheprovider")


@pytest.mark.slow
def test_its_types_are_right_by_its_own_settings(project: Path) -> None:
    """What mypy finds in installed packages it does not tell, and here it takes ours for a part of the project."""
    assert "no issues found in 3 source files" in run(project, "mypy", "--follow-imports=silent", MYPYPATH=str(ROOT))


def test_check_finds_no_mistake_and_warns_of_nothing(project: Path) -> None:
    said = run(project, "aviso-workers", "check", "field_index.agents:app")
    assert said == "field_index: 1 agent, no mistakes\n"


@pytest.mark.slow
def test_its_procfile_runs_a_worker_that_handles_what_notify_publishes(project: Path, tmp_path: Path) -> None:
    nats, status = free_ports(2)
    variables = {
        "NATS_PORT": str(nats),
        "AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__NATS_URL": f"nats://127.0.0.1:{nats}",
        "AVISO_WORKERS_WORKERS__STATUS__PORT": str(status),
    }
    with running(project, tmp_path / "log", "honcho", "start", **variables) as log:

        def until(condition: Callable[[], bool]) -> None:
            wait_until(condition, log, within_seconds=PATIENCE_SECONDS)

        until(lambda: is_ready(f"http://127.0.0.1:{status}/readyz"))
        (published,) = re.findall("^aviso-workers notify .*", (project / "README.md").read_text(), re.MULTILINE)
        run(project, "sh", "-c", published, **variables)
        until(lambda: "field.indexed" in log())
    assert re.search(r"field\.indexed .*location=/data/12 .*step=12", log())
    assert log().count("stopped (rc=0)") == 2, log()


def test_the_nats_server_of_its_compose_file_starts_with_what_it_is_given(project: Path, tmp_path: Path) -> None:
    service = load(project, "compose.yaml")["services"]["nats"]
    client, monitoring = free_ports(2)
    given = {"/data": str(tmp_path / "streams"), "8222": str(monitoring)}
    command = [given.get(word, word) for word in service["command"]]
    ours = ("--addr", "127.0.0.1", "--port", str(client))
    with running(project, tmp_path / "log", find_binary(), *command, *ours) as log:
        healthy = f"http://127.0.0.1:{monitoring}/healthz?js-enabled-only=true"
        wait_until(lambda: is_ready(healthy), log, within_seconds=PATIENCE_SECONDS)


# --- Its files agree with each other and with us ---


def load(project: Path, file: str) -> Any:
    (document,) = load_all(project, file)
    return document


def load_all(project: Path, file: str) -> list[Any]:
    return [*yaml.safe_load_all((project / file).read_text())]


def unit(project: Path) -> dict[str, list[str]]:
    """The values of each key of the systemd unit, of which some stand there more than once."""
    values: defaultdict[str, list[str]] = defaultdict(list)
    text = (project / "systemd" / "field-index.service").read_text()
    for key, value in re.findall(r"^(\w+)=(.*)", text, re.MULTILINE):
        values[key].append(value)
    return values


def container(project: Path) -> dict[str, Any]:
    (found,) = load(project, "kubernetes/deployment.yaml")["spec"]["template"]["spec"]["containers"]
    return dict(found)


def of_image(project: Path, instruction: str) -> str:
    """What the instruction of the Dockerfile says, on one line."""
    lines = (project / "Dockerfile").read_text().replace("\\\n", " ")
    (found,) = re.findall(rf"^{instruction} (.*)", lines, re.MULTILINE)
    return str(found)


def test_whatever_stops_a_worker_waits_for_longer_than_the_worker_drains(project: Path) -> None:
    drained = Workers().drain_timeout_seconds + KILL_SECONDS
    pod = load(project, "kubernetes/deployment.yaml")["spec"]["template"]["spec"]
    grace_seconds = {
        "kubernetes": pod["terminationGracePeriodSeconds"],
        "compose": Duration.parse(load(project, "compose.yaml")["services"]["worker"]["stop_grace_period"]),
        "systemd": int(*unit(project)["TimeoutStopSec"]),
    }
    assert {name for name, seconds in grace_seconds.items() if seconds <= drained} == set(), grace_seconds
    assert len({*grace_seconds.values()}) == 1, grace_seconds
    told = (project / "README.md").read_text()
    assert f"all files here wait for {pod['terminationGracePeriodSeconds']} seconds" in told
    assert f"`{DRAINING}` ({Workers().drain_timeout_seconds:g})" in told


def test_systemd_starts_a_worker_again_unless_that_cures_nothing(project: Path) -> None:
    assert unit(project)["Restart"] == ["always"], "a worker exits with 0 after a signal that somebody has sent to it"
    assert unit(project)["RestartPreventExitStatus"] == ["2"]


def test_every_file_that_names_the_drain_timeout_names_its_default(project: Path) -> None:
    default = f"{Workers().drain_timeout_seconds:g}"
    named = {
        str(file.relative_to(project)): found
        for file in project.rglob("*")
        if file.is_file() and (found := re.findall(rf"{DRAINING}`? ?\(?(?:, which is )?(\d+)", file.read_text()))
    }
    assert named == {file: [default] for file in named}
    assert len(named) == 4, named


def test_probes_and_prometheus_ask_the_port_of_the_status(project: Path) -> None:
    port = Workers().status.port
    assert container(project)["ports"] == [{"name": "status", "containerPort": port}]
    probes = {name: container(project)[name]["httpGet"] for name in ("livenessProbe", "readinessProbe")}
    assert probes == {
        "livenessProbe": {"path": "/livez", "port": "status"},
        "readinessProbe": {"path": "/readyz", "port": "status"},
    }
    service, monitor = load_all(project, "kubernetes/monitoring.yaml")
    assert service["spec"]["ports"] == [{"name": "status", "port": port, "targetPort": "status"}]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("status", "/metrics")
    assert of_image(project, "EXPOSE") == str(port)
    assert load(project, "compose.yaml")["services"]["worker"]["ports"] == [f"127.0.0.1:{port}:{port}"]


def test_labels_lead_from_the_service_monitor_to_the_pods(project: Path) -> None:
    deployment = load(project, "kubernetes/deployment.yaml")
    service, monitor = load_all(project, "kubernetes/monitoring.yaml")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels == deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    assert service["metadata"]["labels"] == monitor["spec"]["selector"]["matchLabels"]
    assert deployment["metadata"]["name"] == "field-index"


def test_keda_scales_the_deployment_on_the_consumer_of_the_agent(project: Path) -> None:
    scaled = load(project, "kubernetes/scaling.yaml")["spec"]
    assert scaled["scaleTargetRef"]["name"] == load(project, "kubernetes/deployment.yaml")["metadata"]["name"]
    assert "replicas" not in load(project, "kubernetes/deployment.yaml")["spec"], "KEDA and it would contradict"
    (trigger,) = scaled["triggers"]
    (base,) = re.findall(r'app\.event_type\(\s+"(\w+)"', (project / "field_index" / "agents.py").read_text())
    assert trigger["metadata"]["consumer"] == durable_name("field_index", "index_field")
    assert trigger["metadata"]["stream"] == base.upper()
    assert all(isinstance(value, str) for value in trigger["metadata"].values()), "KEDA takes text only"


def test_every_process_is_started_by_one_command_without_a_shell_in_between(project: Path) -> None:
    init, end_of_options, *command = json.loads(of_image(project, "ENTRYPOINT")) + json.loads(of_image(project, "CMD"))
    assert (init, end_of_options) == ("tini", "--"), "the first process of a container collects the others' children"
    started = " ".join(command)
    assert started == "aviso-workers worker field_index.agents:app"
    assert f"worker: exec {started}\n" in (project / "Procfile").read_text()
    assert unit(project)["ExecStart"] == [f"/opt/field-index/.venv/bin/{started}"]
    assert unit(project)["KillMode"] == ["mixed"], "else each process of a fleet gets two signals"


def test_an_image_has_only_packages_whose_hashes_are_in_the_lock(project: Path) -> None:
    instructions = (project / "Dockerfile").read_text()
    assert re.findall("^RUN (pip .*)", instructions, re.MULTILINE) == [
        "pip install --no-cache-dir --require-hashes --requirement requirements.lock"
    ]
    copied = {words.split()[0] for words in re.findall(r"^COPY (.*)", instructions, re.MULTILINE)}
    assert copied == {"requirements.lock", "aviso.yaml", "field_index"}
    assert copied == {*re.findall("^!(.*)", (project / ".dockerignore").read_text(), re.MULTILINE)}
    readme = (project / "README.md").read_text()
    assert "pip install --require-hashes --requirement requirements.lock" in readme, "with systemd as well"


def test_the_readme_says_how_the_lock_is_made_by_what_the_project_installs(project: Path) -> None:
    (command,) = re.findall("^uv pip compile .*", (project / "README.md").read_text(), re.MULTILINE)
    assert "--generate-hashes --output-file requirements.lock" in command
    needs = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert f"--python-version {needs['requires-python'].removeprefix('>=')} " in command
    assert [each for each in needs["optional-dependencies"]["dev"] if each.startswith("uv>=")]


def test_what_is_set_in_the_environment_is_a_key_of_the_configuration(project: Path) -> None:
    variables = {
        "Dockerfile": dict(pair.split("=") for pair in of_image(project, "ENV").split()),
        "compose.yaml": load(project, "compose.yaml")["services"]["worker"]["environment"],
        "deployment.yaml": {each["name"]: each["value"] for each in container(project)["env"]},
        "field-index.service": dict(pair.split("=", 1) for pair in unit(project)["Environment"]),
    }
    for file, given in variables.items():
        loaded = config.load(project / "aviso.yaml", environ=given)
        assert {*given} <= {*loaded.sources}, f"{file}: {loaded.sources}"
    assert config.load(project / "aviso.yaml", environ=variables["Dockerfile"]).workers.status.host == "0.0.0.0"
