"""docs/public-names.md names what the modules export, and they export nothing else."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import aviso_workers
from aviso_workers import App, Router, errors, pytest_plugin, spark, testing

PAGE = (Path(__file__).parents[1] / "docs" / "public-names.md").read_text()


def named(title: str) -> list[str]:
    """The names in the first paragraph of one section."""
    (section,) = (part for part in PAGE.split("\n## ") if part.startswith(title))
    return re.findall(r"`(\w+)`", section.split("\n\n")[1])


@pytest.mark.parametrize(
    ("title", "modules"),
    [
        ("`aviso_workers`\n", [aviso_workers]),
        ("`aviso_workers.errors`\n", [errors]),
        ("`aviso_workers.testing` and the pytest plugin\n", [testing, pytest_plugin]),
        ("`aviso_workers.spark`\n", [spark]),
    ],
)
def test_the_page_has_what_is_exported(title: str, modules: list[ModuleType]) -> None:
    exported = [name for module in modules for name in module.__all__]
    assert sorted(named(title)) == sorted(exported)
    assert [name for module in modules for name in module.__all__ if not hasattr(module, name)] == []


@pytest.mark.parametrize(("kind", "of"), [(App, "(?:both|`App`)"), (Router, "both")])
def test_the_page_has_every_attribute_of_apps_and_routers(kind: type[Router], of: str) -> None:
    rows = re.findall(rf"^\| (`.+`) \| {of} \|", PAGE.partition("## `App` and `Router`\n")[2], flags=re.MULTILINE)
    found = kind("one")
    public = {name for name in {*dir(kind), *vars(found)} if not name.startswith("_")}
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(public)


def test_every_error_is_exported() -> None:
    found = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert found == set(errors.__all__)


def test_what_is_public_has_a_docstring() -> None:
    for module in (aviso_workers, errors, testing, spark):
        assert [name for name in module.__all__ if not getattr(module, name).__doc__] == []
