"""Workers that react to data notifications on NATS JetStream, in the format of ECMWF's Aviso."""

import importlib
from typing import TYPE_CHECKING, Any

from aviso_workers import first_process  # noqa: F401 - before all others, which take their time

if TYPE_CHECKING:
    from aviso_workers.app import App
    from aviso_workers.aviso.notifications import Notification, Notify, Receipt
    from aviso_workers.declare.agents import Agent, Router
    from aviso_workers.declare.batches import Batch, Batching, Stream
    from aviso_workers.declare.dependencies import Dependency, Unavailable
    from aviso_workers.declare.limits import Rate, Slots
    from aviso_workers.declare.retry import RetryPolicy
    from aviso_workers.declare.tables import Change, Counter, Delete, Table
    from aviso_workers.declare.timers import Tick, Timer
    from aviso_workers.declare.verdicts import Ack, GivenUp, Reject, Retry
    from aviso_workers.declare.windows import Window, Windowing
    from aviso_workers.errors import AvisoWorkersError
    from aviso_workers.jetstream.key_value import KeyValue
    from aviso_workers.version import __version__

__all__ = [
    "Ack",
    "Agent",
    "App",
    "AvisoWorkersError",
    "Batch",
    "Batching",
    "Change",
    "Counter",
    "Delete",
    "Dependency",
    "GivenUp",
    "KeyValue",
    "Notification",
    "Notify",
    "Rate",
    "Receipt",
    "Reject",
    "Retry",
    "RetryPolicy",
    "Router",
    "Slots",
    "Stream",
    "Table",
    "Tick",
    "Timer",
    "Unavailable",
    "Window",
    "Windowing",
    "__version__",
]

_PLACES = {
    "app": ("App",),
    "aviso.notifications": ("Notification", "Notify", "Receipt"),
    "declare.agents": ("Agent", "Router"),
    "declare.batches": ("Batch", "Batching", "Stream"),
    "declare.dependencies": ("Dependency", "Unavailable"),
    "declare.limits": ("Rate", "Slots"),
    "declare.retry": ("RetryPolicy",),
    "declare.tables": ("Change", "Counter", "Delete", "Table"),
    "declare.timers": ("Tick", "Timer"),
    "declare.verdicts": ("Ack", "GivenUp", "Reject", "Retry"),
    "declare.windows": ("Window", "Windowing"),
    "errors": ("AvisoWorkersError",),
    "jetstream.key_value": ("KeyValue",),
    "version": ("__version__",),
}
"""The public names by the module that has them. Each is imported when somebody asks for one of its names: the command
line needs none for its help."""

_OLD = {
    "Backoff": "RetryPolicy(...)",
    "Breaker": "app.dependency(...)",
    "CircuitBreaker": "app.dependency(...)",
    "Limit": 'Rate(100, per="1m") or Slots(1)',
    "DELETE": "Delete()",
}
"""What to say in place of a name that was here before."""

if not TYPE_CHECKING:  # else a checker of types would take any name for one of ours

    def __getattr__(name: str) -> Any:
        for module, names in _PLACES.items():
            if name in names:
                value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
                return value
        if name in _OLD:  # Python would replace an AttributeError with an ImportError that does not say this
            raise ImportError(f"{__name__}.{name} is gone: say {_OLD[name]}", name=__name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
