"""Workers that react to data notifications on NATS JetStream, in the format of ECMWF's Aviso."""

from aviso_workers.agents import Agent, Router
from aviso_workers.app import App
from aviso_workers.errors import AvisoWorkersError
from aviso_workers.key_value import KeyValue
from aviso_workers.notifications import Batch, Batching, Notification, Notify, Receipt, Stream
from aviso_workers.retry import Backoff
from aviso_workers.tables import Change, Counter, Table
from aviso_workers.timers import Tick, Timer
from aviso_workers.verdicts import Ack, Reject, Retry
from aviso_workers.windows import Window, Windowing

__all__ = [
    "Ack",
    "Agent",
    "App",
    "AvisoWorkersError",
    "Backoff",
    "Batch",
    "Batching",
    "Change",
    "Counter",
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
]
