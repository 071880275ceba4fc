"""The event types that the contract suite publishes."""

from __future__ import annotations

import hashlib
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).with_name("aviso.yaml").read_text()
KIND = "  kind: jetstream\n"


def app_config(kind: str, nats_url: str, **jetstream: object) -> Path:
    """A file with the suite's configuration on one backend, with these settings of `jetstream` over it. One of a
    section is spelled as in `tls__ca_file`.
    """
    over: dict[str, Any] = {"nats_url": nats_url, "reconnect_delay_ms": 100} if nats_url else {}
    for name, value in jetstream.items():
        section, _, key = name.rpartition("__")
        (over.setdefault(section, {}) if section else over)[key] = value
    assert DOCUMENT.count(KIND) == 1
    text = DOCUMENT.replace(KIND, f"  kind: {kind}\n  jetstream: {json.dumps(over)}\n")
    path = _folder() / f"{hashlib.sha256(text.encode()).hexdigest()}.yaml"
    if not path.exists():
        path.write_text(text)
    return path


@cache
def _folder() -> Path:
    """A folder of this process, which is removed with it."""
    folder = tempfile.TemporaryDirectory(prefix="contract-")
    _KEPT.append(folder)
    return Path(folder.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def mars(**values: Any) -> dict[str, Any]:
    """The identifier of a `mars` notification, canonical unless `values` say otherwise."""
    fields = {"class": "od", "expver": "0001", "domain": "g", "date": "20261120", "time": "0000"}
    return {**fields, "stream": "oper", "step": "12", **values}
