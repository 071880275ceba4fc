"""The package as it is published: the source archive, and the wheel that is built of that."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from msgspec import Struct

LEFT_OUT = (
    *(".git", ".venv*", ".aviso-workers", ".hypothesis", ".*_cache"),
    *("__pycache__", "*.egg-info", "*.so", "build", "dist"),
)
"""What is beside the project's own files in a working copy."""


class Archives(Struct, frozen=True, kw_only=True):
    """What was built, and the copy of the project that it was built of."""

    project: Path
    source: Path
    wheel: Path


def build(project: Path, directory: Path, *, pure: bool) -> Archives:
    """Build both in the directory. Raises `RuntimeError` with what was printed where that fails.

    Where it is not `pure`, the wheel is one for this Python, with the functions in C.

    They are built of a copy, since what an earlier build has left in a working copy would become a part of the wheel.
    """
    copy, archives = directory / "project", directory / "archives"
    shutil.copytree(project, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
    command: list[str | Path] = [sys.executable, "-m", "build", "--no-isolation", "--outdir", archives, copy]
    environment = os.environ | {"AVISO_WORKERS_PURE": "1" if pure else ""}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"the package cannot be built:\n{done.stdout}")
    (source,), (wheel,) = archives.glob("*.tar.gz"), archives.glob("*.whl")
    return Archives(project=copy, source=source, wheel=wheel)
