"""Writes the list of all that is stored, from what the modules of `aviso_workers.state` state.

`PYTHONPATH=scripts .venv/bin/python -m _docs.state` prints it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

from aviso_workers import state
from aviso_workers.state.kept import Kept

BEGINNING = """# What is stored, and where

Beside the notifications in the streams of their event types, aviso-workers stores what is in these tables. What \
names each is in `aviso_workers/state/`, in the module of the last column, and mostly what writes and reads it. Words \
in angle brackets stand for names. [Erasing](../erasing.md), [backups](../backup.md) and `agents rm` go by the \
same names.
"""


def kept() -> Iterator[tuple[str, Kept]]:
    """Yield all that is stored, with the module that names it."""
    for module in pkgutil.iter_modules(state.__path__):
        for each in getattr(importlib.import_module(f"{state.__name__}.{module.name}"), "KEPT", ()):
            yield module.name, each


def page() -> str:
    """Return the text of the page."""
    found = sorted(kept(), key=lambda item: (item[1].stream, item[1].bucket, item[1].key))
    streams = [_row(name, each.stream, each) for name, each in found if each.stream]
    buckets = [_row(name, each.bucket, each) for name, each in found if each.bucket]
    return "\n".join(
        [
            BEGINNING,
            *_table("streams", "stream", "subject", streams),
            "",
            "A bucket of key-values is the stream `KV_` with the name of the bucket.",
            "",
            *_table("buckets", "bucket", "key", buckets),
            "",
        ]
    )


def _table(title: str, place: str, key: str, rows: list[str]) -> list[str]:
    return [f"## In {title}", "", f"| {place} | {key} | holds | kept | module |", "|---|---|---|---|---|", *rows]


def _row(module: str, place: str, each: Kept) -> str:
    return f"| `{place}` | `{each.key}` | {each.holds} | {each.until} | `{module}` |"


if __name__ == "__main__":
    print(page())
