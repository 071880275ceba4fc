"""New projects: the files of `template/`, with the name of the project in the places of names.

Called by `cli.new`. The template is a project as it stands, so that ruff reads its code like ours; mypy and pytest read
what tests/test_projects.py has written of it. `project_name` in it is the Python package and the app, `project-name`
the same where an underscore is not allowed, as in Kubernetes, and `project_version` our own version. Nothing is
installed or run here.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
from importlib.metadata import version
from pathlib import Path

from aviso_workers.errors import AvisoWorkersError, DeclarationError

__all__ = ["create"]

TEMPLATE = Path(__file__).parent / "template"
NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
"""Names that are a Python package, an app (which has no `__`), and with dashes a name in Kubernetes."""
LONGEST = 40
"""Kubernetes takes 63, of which KEDA and the names of pods need a part."""


def create(folder: Path) -> list[Path]:
    """Write a project into a new or empty folder, whose name is the project's, and return the files, sorted by path.

    Raises `DeclarationError` where the name or the folder cannot be used, before anything is written, and
    `AvisoWorkersError` where the files cannot be written.
    """
    _refuse_name(folder.name)
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise DeclarationError(
                f"{folder} is there already and is not an empty folder: take another name, or remove it"
            )
        return [_write(source, folder) for source in _sources()]
    except OSError as error:
        raise AvisoWorkersError(f"cannot write {error.filename}: {error.strerror}") from error


def _refuse_name(name: str) -> None:
    if not NAME.fullmatch(name) or len(name) > LONGEST or keyword.iskeyword(name):
        raise DeclarationError(
            f"a project cannot be called {name!r}, which is not a name of a Python package: take lower-case letters, "
            f"digits and single underscores, a letter first, at most {LONGEST}, such as field_index"
        )
    if (TEMPLATE / name).exists():
        raise DeclarationError(f"a project cannot be called {name!r}, as one of its folders is: take another name")
    if (found := importlib.util.find_spec(name)) is not None and found.origin is not None:
        raise DeclarationError(f"a project cannot be called {name!r}, as another Python package is: take another name")


def _sources() -> list[Path]:
    """Return the files of the template, without the bytecode that an installation adds to them."""
    return sorted(path for path in TEMPLATE.rglob("*") if path.is_file() and path.parent.name != "__pycache__")


def _write(source: Path, folder: Path) -> Path:
    """Write one file of the project, and return it."""
    written = folder / _named(str(source.relative_to(TEMPLATE)), folder.name)
    written.parent.mkdir(parents=True, exist_ok=True)
    written.write_text(_named(source.read_text(encoding="utf-8"), folder.name), encoding="utf-8")
    return written


def _named(text: str, name: str) -> str:
    """Return text of the template with the name of a project, and our version, in the places of theirs."""
    texts = {
        "project_name": name,
        "project-name": name.replace("_", "-"),
        "project_version": version("aviso-workers"),
    }
    return re.sub("|".join(texts), lambda found: texts[found[0]], text)
