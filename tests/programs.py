"""Programs that tests need and that no Python package brings."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest


def find(program: str, *, package: str) -> str:
    """Return the path of the program. Without it the test is skipped, and fails in CI: a package would provide it."""
    beside_python = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside_python, os.environ.get("PATH", os.defpath)])
    if found := shutil.which(program, path=path):
        return found
    missing = f"{program} is not installed: run scripts/setup as root on Debian, or install the package {package}"
    if os.environ.get("CI"):
        pytest.fail(missing)
    pytest.skip(missing)
