"""`aviso-workers new`: what it says, and what it refuses. tests/test_projects.py has what it writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Ran

Run = Callable[..., Ran]


def test_what_was_written_and_the_next_commands_are_told(run: Run, tmp_path: Path) -> None:
    ran = run("new", "field_index")
    assert (ran.code, ran.err) == (0, "")
    written = [line.removeprefix("wrote ") for line in ran.lines if line.startswith("wrote ")]
    assert sorted(written) == sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file())
    assert ran.lines[len(written) :] == [
        "",
        "Next:",
        "  cd field_index && pip install --editable '.[dev]'",
        "  pytest",
        "  aviso-workers dev field_index.agents:app",
    ]


def test_a_project_below_another_folder_has_the_name_of_its_own(run: Run, tmp_path: Path) -> None:
    ran = run("new", "my work/harvest")
    assert (ran.code, ran.lines[-3:]) == (
        0,
        [
            "  cd 'my work/harvest' && pip install --editable '.[dev]'",
            "  pytest",
            "  aviso-workers dev harvest.agents:app",
        ],
    )
    assert (tmp_path / "my work" / "harvest" / "harvest" / "agents.py").exists()


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (
            "Field-Index",
            "a project cannot be called 'Field-Index', which is not a name of a Python package: take lower-case "
            "letters, digits and single underscores, a letter first, at most 40, such as field_index",
        ),
        ("json", "a project cannot be called 'json', as another Python package is: take another name"),
        ("used", "used is there already and is not an empty folder: take another name, or remove it"),
    ],
)
def test_a_name_or_a_folder_that_cannot_be_used_is_told_with_the_cure(
    run: Run, tmp_path: Path, name: str, complaint: str
) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes").touch()
    assert run("new", name) == Ran(code=2, out="", err=f"aviso-workers: {complaint}\n")
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()] == ["notes"]


def test_a_folder_that_cannot_be_made_is_told_without_a_traceback(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert run("new", "file/harvest") == Ran(
        code=1, out="", err="aviso-workers: cannot write file/harvest: Not a directory\n"
    )
