"""The streams that we make beside those of event types; all apps of an account share them."""

from __future__ import annotations

from aviso_workers.jetstream.specs import UNREADABLE
from aviso_workers.state.kept import Kept

__all__ = ["AUDIT", "COUNTERS", "DEAD_LETTERS", "DELAYED", "DRILL", "DRILL_MIRROR", "KEPT", "RETRIES"]

DEAD_LETTERS = "aviso_workers_dead_letters"
RETRIES = "aviso_workers_retries"
"""Dead letters that their agents are to handle again."""
DELAYED = "aviso_workers_schedule"
"""Notifications that are to be published later."""
COUNTERS = "aviso_workers_counters"
AUDIT = "aviso_workers_audit"
"""What operators have done from the console."""
DRILL, DRILL_MIRROR = "aviso_workers_drill", "aviso_workers_drill_mirror"
KEPT = (
    Kept(
        stream=UNREADABLE,
        key="aviso_workers.unreadable",
        holds="nothing: that it exists says that the server cannot read another stream that it has",
        until="until the server is restarted",
    ),
    Kept(stream=DRILL, key="aviso_workers.drill.>", holds="what a drill publishes", until="until the drill ends"),
    Kept(stream=DRILL_MIRROR, key="aviso_workers.drill.>", holds="its mirror", until="until the drill ends"),
)
"""Those that no other module of this package writes to."""
