"""The variables of the environment by which a worker process learns which situation it is in."""

from __future__ import annotations

NAME = "INCIDENTS_NAME"
DIRECTORY = "INCIDENTS_DIRECTORY"
"""Where the ledger and the files are that say what goes wrong."""
ATTEMPTS = "INCIDENTS_ATTEMPTS"
