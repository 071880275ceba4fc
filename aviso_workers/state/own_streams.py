"""The streams that we make beside those of event types; all apps of an account share them."""

from __future__ import annotations

__all__ = ["COUNTERS", "DEAD_LETTERS", "DELAYED", "RETRIES"]

DEAD_LETTERS = "aviso_workers_dead_letters"
RETRIES = "aviso_workers_retries"
"""Dead letters that their agents are to handle again."""
DELAYED = "aviso_workers_schedule"
"""Notifications that are to be published later."""
COUNTERS = "aviso_workers_counters"
