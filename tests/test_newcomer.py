"""`scripts/newcomer` finds on the tutorial what it is to do, and says what it does not find."""

from __future__ import annotations

from pathlib import Path

import pytest

from _newcomer import pages

TUTORIAL = (Path(__file__).parents[1] / "docs" / "tutorial.md").read_text()


def test_the_tutorial_has_every_command_and_what_comes_of_it() -> None:
    page = pages.read(TUTORIAL)
    assert page.check == ["aviso-workers", "check", "fields:app"]
    assert page.dev == ["aviso-workers", "dev", "fields:app"]
    assert page.notify[:3] == ["aviso-workers", "notify", "mars"]
    assert page.handled == "12 /data/12"


def test_its_files_are_written(tmp_path: Path) -> None:
    pages.write_files(TUTORIAL, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"aviso.yaml", "fields.py", "test_fields.py"}


@pytest.mark.parametrize("command", ["check", "dev", "notify"])
def test_a_page_without_a_command_is_refused(command: str) -> None:
    with pytest.raises(ValueError, match=f"no command that begins with 'aviso-workers {command}'"):
        pages.read(TUTORIAL.replace(f"aviso-workers {command}", "aviso-workers"))


def test_a_page_that_does_not_say_what_is_printed_is_refused() -> None:
    with pytest.raises(ValueError, match="does not say what the agent prints"):
        pages.read(TUTORIAL.replace("The agent prints", "It prints"))
