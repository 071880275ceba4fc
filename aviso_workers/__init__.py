"""Workers that react to data notifications on NATS JetStream, in the format of ECMWF's Aviso."""

from aviso_workers import first_process  # noqa: F401 - before all others, which take their time
from aviso_workers.app import App
from aviso_workers.aviso.notifications import Notification, Notify, Receipt
from aviso_workers.declare.agents import Agent, Router
from aviso_workers.declare.batches import Batch, Batching, Stream
from aviso_workers.declare.retry import Backoff
from aviso_workers.declare.tables import DELETE, Change, Counter, Delete, Table
from aviso_workers.declare.timers import Tick, Timer
from aviso_workers.declare.verdicts import Ack, Reject, Retry
from aviso_workers.declare.windows import Window, Windowing
from aviso_workers.errors import AvisoWorkersError
from aviso_workers.jetstream.key_value import KeyValue
from aviso_workers.version import __version__

__all__ = [
    "DELETE",
    "Ack",
    "Agent",
    "App",
    "AvisoWorkersError",
    "Backoff",
    "Batch",
    "Batching",
    "Change",
    "Counter",
    "Delete",
    "KeyValue",
    "Notification",
    "Notify",
    "Receipt",
    "Reject",
    "Retry",
    "Router",
    "Stream",
    "Table",
    "Tick",
    "Timer",
    "Window",
    "Windowing",
    "__version__",
]
