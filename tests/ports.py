"""Ports of the loopback for servers that start later than their address is told, or start again."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def held(count: int) -> Iterator[list[int]]:
    """Ports that the tests of other processes do not get meanwhile, and on which nobody listens yet.

    They are bound. On Linux a server may listen on one nevertheless, because both sides ask for SO_REUSEADDR;
    elsewhere they are let go, and another process may come first.
    """
    with ExitStack() as taken:
        sockets = [taken.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("127.0.0.1", 0))
        ports = [int(each.getsockname()[1]) for each in sockets]
        if sys.platform != "linux":
            taken.close()
        yield ports
