"""`new`: writes a small project that works."""

from __future__ import annotations

from pathlib import Path

from aviso_workers import projects
from aviso_workers.aviso.literals import quoted
from aviso_workers.cli.options import argument
from aviso_workers.cli.output import echo


def new(
    project: Path = argument("PROJECT", "Folder to create; its last part is the project's name, e.g. field_index."),
) -> None:
    """Create a small working project, with an agent, its tests and the files that deploy it.

    Example: aviso-workers new field_index
    """
    project = project if project.name else project.absolute()  # `.` has no name of its own
    for file in projects.create(project):
        echo(f"wrote {file}")
    echo(f"""
Next:
  cd {quoted(str(project))} && pip install --editable '.[dev]'
  pytest
  aviso-workers dev {quoted(project.name)}.agents:app""")
