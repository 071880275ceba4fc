from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import structlog

from aviso_workers.server import BINARY_VARIABLE, NatsServer
from aviso_workers.server.processes import free_ports
from tests.commands import Command

pytest_plugins = ["pytester"]

# The tests start hundreds of processes. Without stored bytecode each of them compiles the package again, which takes
# as long as everything else that a command does; container images often forbid storing it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# The tests side by side use all processors. A nats-server that also tries to works a third longer.
os.environ.setdefault("GOMAXPROCS", "1")

# A machine that has more to do is not a mistake of the code. Each run draws other examples, and CI draws most.
EXAMPLES = 100 if os.environ.get("CI") else 30
hypothesis.settings.register_profile("patient", deadline=None, max_examples=EXAMPLES)
hypothesis.settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    said = "How long each test in tests/fuzz, and the random programs of tests/contract, go on."
    parser.addoption("--minutes", type=float, default=0, help=said)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let no test be skipped in CI, except a case of a parametrized one, which another case stands for. A suite for an
    older nats-server skips what that server does not have, and scripts/interop tells what it could not install.
    """
    report = yield
    excused = hasattr(item, "callspec") or item.nodeid.startswith("tests/interop/") or BINARY_VARIABLE in os.environ
    if report.skipped and os.environ.get("CI") and not excused:
        report.outcome = "failed"
    return report


TOGETHER = (
    *("tests/examples/", "tests/interop/", "tests/ops/", "tests/security/", "tests/server/"),
    *("tests/cli/test_only_reading.py", "tests/test_archives.py", "tests/test_budgets.py", "tests/test_check.py"),
    *("tests/test_jetstream_coverage.py", "tests/test_monitoring.py", "tests/test_vocabulary.py"),
)
"""Modules of which one process runs all tests."""
ALONE = "tests/interop/test_server_versions.py::test_the_contract_holds["
"""A test in one of them whose cases take minutes each: they run side by side."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slow tests that go where there is room, so that none is left when all others have ended."""
    kept = ("tests/spark/", *TOGETHER)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None or item.nodeid.startswith(kept))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """How `pytest -n 6` spreads the tests: each goes where there is room. Those of a module that share servers,
    archives or what they read of all files keep together, and those of Spark, which share a JVM: in two parts that are
    begun at once, because they take longest, and of which one, that of the pipelines, takes about as long as the other.
    (`--dist loadgroup` is for that, and does nothing with pytest 9.2.)
    """
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(TOGETHER) and not nodeid.startswith(ALONE):
                return nodeid.partition("::")[0]
            if not nodeid.startswith("tests/spark/"):
                return nodeid
            return "spark, the pipelines" if nodeid.startswith("tests/spark/test_pipelines.py") else "spark, the rest"

    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let collections of garbage pass over the ten thousand tests and the modules, which stay for the whole run, also
    while these come about: it takes each process a fifth less of its time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


Start = Callable[..., Command]
WriteConfig = Callable[..., Path]


@pytest.fixture
def anyio_backend() -> Any:
    return "asyncio"


@pytest.fixture(autouse=True)
def _structlog_as_it_was() -> Iterator[None]:
    """Leave no configuration of structlog to the next test. `capture_logs` leaves one too."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server of the test's own: it starts within 50 ms."""
    with NatsServer.start(store_dir=tmp_path_factory.mktemp("jetstream")) as server:
        yield server


@pytest.fixture
def free_port() -> int:
    """A port that no other test gets: nobody listens on it but whom this one starts there."""
    (port,) = free_ports(1)
    return port


def write_mars_config(path: Path, nats_url: str, **jetstream: Any) -> Path:
    """A file with the event type `mars` (class and step), on that server. A key that is None is left out."""
    identifier: dict[str, dict[str, Any]] = {
        "class": {"type": "StringHandler"},
        "step": {"type": "IntHandler", "range": [0, 1000]},
    }
    mars = {
        "topic": {"base": "mars", "key_order": ["class", "step"]},
        "identifier": {field: {**rule, "required": True} for field, rule in identifier.items()},
        "storage_policy": {"allow_duplicates": True},
    }
    backend = {"nats_url": nats_url, "reconnect_delay_ms": 100, "max_reconnect_attempts": 0, **jetstream}
    document = {
        "notification_backend": {
            "kind": "jetstream",
            "jetstream": {key: value for key, value in backend.items() if value is not None},
        },
        "notification_schema": {"mars": mars},
        "workers": {"status": {"port": 0}, "logging": {"format": "json"}},
    }
    path.write_text(json.dumps(document))  # JSON is YAML
    return path


@pytest.fixture
def write_config(tmp_path: Path) -> WriteConfig:
    """`write_config(url, retry_attempts=1)`: see `write_mars_config`."""

    def write_config(nats_url: str, *, name: str = "config.yaml", **jetstream: Any) -> Path:
        return write_mars_config(tmp_path / name, nats_url, **jetstream)

    return write_config


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start("worker", "agents:app", NAME="value")`: the command in a directory of the test's own, with variables of
    its environment, ended with the test.
    """
    commands: list[Command] = []

    def start(*arguments: str | Path, **environment: str) -> Command:
        commands.append(Command(*arguments, directory=tmp_path, **environment))
        return commands[-1]

    yield start
    for command in commands:
        command.close()
