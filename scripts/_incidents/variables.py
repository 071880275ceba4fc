"""The variables of the environment by which a worker process learns which situation it is in."""

from __future__ import annotations

NAME = "INCIDENTS_NAME"
DIRECTORY = "INCIDENTS_DIRECTORY"
"""Where the ledger and the files are that say what goes wrong."""
ATTEMPTS = "INCIDENTS_ATTEMPTS"
"""Of the agent; empty: it tries without end."""
PATIENCE = "INCIDENTS_PATIENCE"
"""For how many seconds what the handler depends on may be away; 0: it never is, and failures use attempts."""
