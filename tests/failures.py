"""Failures as workers record them."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from aviso_workers.state.failure_records import LastFailure

__all__ = ["last_failure"]


def last_failure(now: datetime, **stated: Any) -> LastFailure:
    """An OSError of now, which is not over for a day."""
    usual: dict[str, Any] = {"error": "OSError", "text": "", "at": "", "since": now, "last": now, "times": 3}
    return LastFailure(**{**usual, "until": now + timedelta(days=1), "written": now} | stated)
