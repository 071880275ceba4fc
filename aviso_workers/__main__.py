"""The command as a file: `python -m aviso_workers ...`, and for spark-submit, which takes files only."""

from __future__ import annotations

import sys
from pathlib import Path

if sys.path[0] == str(Path(__file__).parent):
    del sys.path[
        0
    ]  # where a file is run, Python looks beside it first, and there our modules are not to be found alone

from aviso_workers.cli import main

if __name__ == "__main__":
    main()
