"""Other ways of doing the same, each a small script that runs in an environment apart from ours.

`Rivals` makes the environment; the scripts import nothing of ours but `_bench.tally`.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # which a rival's environment does not have
    from _bench.rounds import Contestant

__all__ = ["Rivals"]

ENVIRONMENT = Path(__file__).parents[3] / ".venv-rivals"
PYTHON = ENVIRONMENT / "bin" / "python"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")


@dataclass(frozen=True)
class Rivals:
    """Whether they run at all; False is for a quick look at ourselves."""

    wanted: bool

    def set_up(self) -> None:
        """Make the environment where it is missing or its requirements have changed."""
        stamp = ENVIRONMENT / "set-up"
        fingerprint = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
        if not self.wanted or (stamp.exists() and stamp.read_text() == fingerprint):
            return
        subprocess.run([sys.executable, "-m", "venv", "--clear", ENVIRONMENT], check=True)
        pip = (PYTHON, "-m", "pip", "--disable-pip-version-check")
        subprocess.run([*pip, "install", "--quiet", "--requirement", REQUIREMENTS], check=True)
        stamp.write_text(fingerprint)

    def contestants(self, counts: Mapping[str, int], *, acks: bool = False) -> list[Contestant]:
        """Return a contestant for each script and its argument, measured with so many notifications."""
        if not self.wanted:
            return []
        from _bench.rounds import Contestant

        found = []
        for name, count in counts.items():
            script, *arguments = name.split()
            command: list[str | Path] = [PYTHON, "-m", f"_bench.rivals.{script.replace('-', '_')}", *arguments]
            found.append(Contestant(name=name, count=count, command=command, acks=acks))
        return found
