"""A nats-server by itself, for development: `python -m aviso_workers.server`, as the Procfile runs it."""

from __future__ import annotations

import argparse
import signal
import sys
from functools import partial
from pathlib import Path

from aviso_workers.errors import ServerProcessError
from aviso_workers.server import NatsServer


def main() -> int:
    """Run a nats-server until SIGTERM or Ctrl-C, which end with 0; return 1 where it cannot start, or ends by
    itself.
    """
    parser = argparse.ArgumentParser(
        prog="python -m aviso_workers.server", description="Run a nats-server on 127.0.0.1."
    )
    parser.add_argument("--store-dir", type=Path, required=True, help="where it keeps its streams")
    parser.add_argument("--port", type=int, default=4222, help="default: 4222")
    given = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    given.store_dir.mkdir(parents=True, exist_ok=True)
    tell = partial(print, file=sys.stderr)
    try:
        with NatsServer.start(store_dir=given.store_dir, port=given.port, tell=tell) as server:
            print(f"nats-server {server.url}, streams in {given.store_dir}", file=sys.stderr)
            server.process.wait()
            print(f"nats-server ended by itself:\n{server.log}", file=sys.stderr)
    except ServerProcessError as error:
        print(f"nats-server: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
