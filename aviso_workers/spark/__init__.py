"""The Spark wing: Spark jobs as notifications.

Importing this package needs no pyspark, so that the event log of a Spark somewhere else can be followed without one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aviso_workers.spark.listening import listen as listen


def __getattr__(name: str) -> Any:
    if name == "listen":
        from aviso_workers.spark.listening import listen

        return listen
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
