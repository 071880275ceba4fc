"""The streams and buckets of an app's own state get the replicas that are configured, when a worker begins.

Called by `session`, beside the agents at work. A worker brings in line what it reads when it opens it (`provisioning`).
This is for what it only writes, or opens when that is first needed, which may be never: dead letters, counters and all
buckets. What does not exist yet is created with its replicas when it is needed.

Replicas are only added: another worker's configuration may ask for more.
"""

from __future__ import annotations

from collections.abc import Mapping

from aviso_workers.backends.provisioning import Provisioner
from aviso_workers.clocks import Clock
from aviso_workers.config import Config
from aviso_workers.errors import UnavailableError
from aviso_workers.state import own_streams
from aviso_workers.state.own_buckets import OwnBuckets
from aviso_workers.state.own_streams import COUNTERS, DEAD_LETTERS

AGAIN_SECONDS = 10.0
"""When a server that did not answer is asked again."""


def configured(app: str, config: Config, buckets: OwnBuckets) -> dict[str, int]:
    """Return how many replicas the streams of an app's own state are to have, by stream; empty where nobody says."""
    of_all = config.notification_backend.jetstream.replicas
    of_streams = config.workers.dead_letters.replicas or of_all
    wanted = {own_streams.of_app(kind, app): of_streams for kind in (DEAD_LETTERS, COUNTERS)}
    wanted |= {f"KV_{bucket}": of_all for bucket in (*buckets.by_key, *buckets.listed, *buckets.written)}
    return {stream: replicas for stream, replicas in wanted.items() if replicas}


async def raise_to(wanted: Mapping[str, int], *, provisioner: Provisioner, clock: Clock) -> None:
    """Add replicas to those streams that exist and have fewer, however long servers do not answer."""
    for stream, replicas in wanted.items():
        while True:
            try:
                await provisioner.raise_replicas(stream, replicas)
                break
            except UnavailableError:
                await clock.sleep(AGAIN_SECONDS)
