"""Which code of an app runs, as workers record it."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from aviso_workers import App, Notification
from aviso_workers.config import Config, NotificationBackend
from aviso_workers.state import declarations

IN_MEMORY = Config(notification_backend=NotificationBackend(kind="in_memory"))


def app_of(*modules: str, version: str = "") -> App:
    """An app whose agents are in these modules."""
    app = App("field", config=IN_MEMORY, version=version)
    for number, module in enumerate(modules):

        async def index(notification: Notification[Any]) -> None: ...

        index.__module__ = module
        app.agent("mars", name=f"agent{number}")(index)
    return app


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the module `our_agents`."""
    module = ModuleType("our_agents")
    module.__file__ = str(tmp_path / "our_agents.py")
    monkeypatch.setitem(sys.modules, "our_agents", module)
    return tmp_path / "our_agents.py"


def test_the_version_that_an_app_gives_itself_counts_first() -> None:
    assert declarations.code_version(app_of("anyio.abc", version="2026.11\n")) == "2026.11\\n"


def test_else_it_is_that_of_the_installed_packages() -> None:
    anyio, msgspec = metadata.version("anyio"), metadata.version("msgspec")
    assert (
        declarations.code_version(app_of("anyio.abc", "anyio", "msgspec.json")) == f"anyio {anyio}, msgspec {msgspec}"
    )


def test_else_it_is_a_digest_that_changes_with_the_code(source: Path) -> None:
    found = set()
    for text in ("first = 1", "second = 2"):
        source.write_text(text)
        found |= {
            declarations.code_version(app_of("our_agents", *others)) for others in ((), ("anyio",), ("our_agents",))
        }
    assert len(found) == 4, "of both, with and without the other module"
    assert {len(each) for each in found} == {12}


def test_it_is_not_known_where_no_module_can_be_read(source: Path) -> None:
    assert declarations.code_version(app_of("our_agents", "nowhere")) == ""
