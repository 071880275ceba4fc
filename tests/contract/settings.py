"""The event types that the contract suite publishes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aviso_workers import config


def app_config(kind: str, nats_url: str, **jetstream: object) -> config.Config:
    """The suite's configuration on one backend, with these settings of `jetstream` over it."""
    over = {"nats_url": nats_url, "reconnect_delay_ms": 100, **jetstream} if nats_url else jetstream
    prefix = "AVISO_WORKERS_NOTIFICATION_BACKEND__"
    environ = {f"{prefix}JETSTREAM__{key.upper()}": str(value) for key, value in over.items()}
    return config.load(Path(__file__).with_name("aviso.yaml"), environ={f"{prefix}KIND": kind, **environ})


def mars(**values: Any) -> dict[str, Any]:
    """The identifier of a `mars` notification, canonical unless `values` say otherwise."""
    fields = {"class": "od", "expver": "0001", "domain": "g", "date": "20261120", "time": "0000"}
    return {**fields, "stream": "oper", "step": "12", **values}
