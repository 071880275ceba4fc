"""The entries in the metadata of our streams and consumers that `nats server check` reads as its thresholds.

They are such that a healthy stream or consumer is never critical: those of the doctor's checks JS017, JS019 and JS031.
What operators have set there stays. A stream gets them when it is created, and an existing one with its next update: it
is not updated for them alone, as it may be an aviso-server's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PREFIX = "io.nats.monitor."
ENABLED = {f"{PREFIX}enabled": "true"}
PEERS = f"{PREFIX}peer-expect"
FAR_BEHIND = 1_000
"""Entries by which a replica is behind its leader."""
INACTIVE_SECONDS = 10
"""Since its leader heard of a replica."""
STALE_SECONDS = 30
"""Since a mirror heard of its origin."""


def of_consumer(max_ack_pending: int) -> dict[str, str]:
    """Return the entries of a consumer. One with a limit of 1 is at its limit whenever it works."""
    return ENABLED | ({f"{PREFIX}outstanding-ack-critical": str(max_ack_pending)} if max_ack_pending > 1 else {})


def with_entries(config: Mapping[str, Any], *, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a stream with the entries in its metadata, except for those that are there.

    The number of its servers follows from the configuration, unless it is in the `stated` metadata.
    """
    known = {key: text for key, text in (config.get("metadata") or {}).items() if key != PEERS}
    return {**config, "metadata": {**_of_stream(config), **known, **(stated.get("metadata") or {})}}


def _of_stream(config: Mapping[str, Any]) -> dict[str, str]:
    entries = dict(ENABLED)
    if (replicas := config.get("num_replicas") or 1) > 1:
        entries |= {
            PEERS: str(replicas),
            f"{PREFIX}peer-lag-critical": str(FAR_BEHIND),
            f"{PREFIX}peer-seen-critical": f"{INACTIVE_SECONDS}s",
        }
    if config.get("mirror") or config.get("sources"):
        entries[f"{PREFIX}seen-critical"] = f"{STALE_SECONDS}s"
    return entries
