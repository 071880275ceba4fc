"""What all examples have in common: a page, a short program, and a configuration that fits it."""

from __future__ import annotations

from pathlib import Path

import pytest

from aviso_workers import App
from tests.examples.conftest import EXAMPLES, Load

FOLDERS = sorted(path for path in EXAMPLES.iterdir() if path.is_dir())
APPS = ("completeness", "field-index", "inbox-outbox", "webhook-relay")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.name))
def test_each_has_a_page_that_the_index_lists_and_a_program_of_less_than_100_lines(folder: Path) -> None:
    (program,) = folder.glob("*.py")
    assert len(program.read_text().splitlines()) < 100
    assert f"({folder.name}/{program.name})" in folder.with_suffix(".md").read_text()
    assert f"({folder.name}.md)" in (EXAMPLES / "README.md").read_text()


@pytest.mark.parametrize("name", APPS)
def test_check_finds_nothing_wrong(load: Load, name: str) -> None:
    app: App = load(name).app
    assert app.mistakes() == []
    assert app.warnings() == []
