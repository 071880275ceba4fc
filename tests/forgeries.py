"""Acknowledgements of a server that are stored as messages."""

from __future__ import annotations

from typing import Any

from aviso_workers.backends import Message
from aviso_workers.backends.in_memory import InMemoryBackend

__all__ = ["store"]


def store(backend: Any, stream: str, subject: str) -> None:
    """Store an acknowledgement in memory, as a server does for somebody who gives a publish this reply subject."""
    while not isinstance(backend, InMemoryBackend):
        backend = backend._backend
    account = backend._account
    message = Message(subject=subject, data=b'{"stream":"ATTACKER","seq":1}')
    account.stream(stream).store(message, message_id=None, now_ns=account.now_ns)
