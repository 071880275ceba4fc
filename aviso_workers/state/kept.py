"""A row of the list of all that is stored (docs/state.md), stated by a module beside its row."""

from __future__ import annotations

from msgspec import Struct


class Kept(Struct, frozen=True, kw_only=True):
    """Where something is stored. `<app>` and other words in angle brackets stand for names."""

    stream: str = ""
    """The stream; empty where it is in a bucket."""
    bucket: str = ""
    """The bucket of key-values, which is the stream `KV_<bucket>`."""
    key: str
    """The subject in the stream, or the key in the bucket."""
    holds: str
    until: str
    """How long it is kept."""
