"""Failed logins, which are logged and slowed, so that no token can be guessed.

The status port and the console ask here. How they wait is theirs: the one has threads, the other an event loop.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

FAILED_SECONDS = 1.0
"""How long an address waits for the answer to a failed login, for each of its failed ones that wait."""
MAX_FAILED = 10
"""Failed logins of an address that may wait; then it is asked for nobody's token until one of them is answered."""

log = structlog.get_logger("aviso_workers.failed_logins")


class FailedLogins:
    """The failed logins that wait for their answer. They are logged as `event`."""

    def __init__(self, event: str) -> None:
        self._event = event
        self._waiting = Counter[str]()
        """By address."""
        self._lock = threading.Lock()

    def refusal(self, address: str) -> str:
        """Return why an address is asked for no token now; empty where it is asked."""
        if self._waiting[address] < MAX_FAILED:
            return ""
        return f"Too many failed logins from {address}: ask again in some seconds.\n"

    @contextmanager
    def slowed(self, address: str) -> Iterator[float]:
        """Note a failed login of an address, which is to wait in the block for so many seconds."""
        log.warning(self._event, address=address)
        with self._lock:
            self._waiting[address] += 1
            seconds = FAILED_SECONDS * self._waiting[address]
        try:
            yield seconds
        finally:
            with self._lock:
                self._waiting[address] -= 1
                if not self._waiting[address]:
                    del self._waiting[address]
