"""How long tests wait for what must come, and how a server comes to stand still."""

from __future__ import annotations

import os
import signal

from nats.aio.client import Client

from aviso_workers.server import NatsServer

PATIENCE_SECONDS = 120.0
"""How long a test waits for what must come. What comes ends the wait, so that the bound costs nothing; it is generous
because other work on the machine is not a mistake of the code."""

PROMPT_SECONDS = 20.0
"""How long what happens at once may take beside other work. The test sees to it that the alternative takes longer: it
asks for timeouts of many minutes where something is not to wait for them."""

LONG_SECONDS = 600.0
"""A timeout or a piece of work that no test waits for."""


async def flushed(client: Client) -> None:
    """Return when the server has what the client has sent: the first PING of nats-py overtakes what waits to be
    written."""
    await client.flush()
    await client.flush()


def stand_still(server: NatsServer) -> None:
    """Stop the process of a server until it is sent SIGCONT. The signal takes its time, in which a server answers."""
    server.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, server.process.pid, os.WSTOPPED | os.WNOWAIT)
