"""Fixtures and an option for the tests of agents. pytest loads it by itself where the package is installed.

It imports nothing but pytest until a test asks for one of its fixtures, because it is loaded with every run of
pytest, whether that has agents to test or not.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from aviso_workers.app import App
    from aviso_workers.testing import Harness

__all__ = ["AvisoHarness"]


class AvisoHarness(Protocol):
    """The type of the fixture `aviso_harness`."""

    def __call__(
        self,
        app: App,
        *,
        workers: int = 1,
        resources: Mapping[Any, Any] | None = None,
        start: datetime | None = None,
    ) -> Harness: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("aviso-workers").addoption(
        "--aviso-server",
        metavar="URL",
        help="run the tests of agents on this nats-server instead of in memory; one that is there for tests",
    )


@pytest.fixture(scope="session")
def aviso_server(pytestconfig: pytest.Config) -> str | None:
    """The URL that `--aviso-server` gives; None where agents are tested in memory."""
    url: str | None = pytestconfig.getoption("aviso_server")
    return url


@pytest.fixture
def aviso_harness(aviso_server: str | None) -> AvisoHarness:
    """`async with aviso_harness(app) as t:` the app with its agents at work; see `aviso_workers.testing.harness`."""
    from aviso_workers.testing import harness

    def aviso_harness(
        app: App,
        *,
        workers: int = 1,
        resources: Mapping[Any, Any] | None = None,
        start: datetime | None = None,
    ) -> Harness:
        return harness(app, server=aviso_server, workers=workers, resources=resources, start=start)

    return aviso_harness


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine that asks for `aviso_harness` and that no other plugin runs."""
    if "aviso_harness" not in pyfuncitem.fixturenames or not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    import anyio

    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}

    async def run() -> None:
        await pyfuncitem.obj(**arguments)

    anyio.run(run)
    return True
