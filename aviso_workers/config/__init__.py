"""The configuration: YAML files and environment variables become frozen Structs, or one error that lists all mistakes.

Whoever starts a process calls `load`; the engine and the backends are handed the sections that concern them. The keys
are those of aviso-server, whose own file loads unchanged, and the sections `workers`, `streams`, `doctor` and `server`
of ours; `settings.py`, `jetstream/fields.py` and `nats_server.py` explain each of them. The way of a value is
`documents` (YAML with lines), `environment` (variables over it), `conversion` (types), `loading` (sources, event types
that are declared in Python, and what types cannot say, with `streams`). `display` is for the commands that print a
configuration, and imported by them alone.
"""

from aviso_workers.config.loading import EventTypes, Examined, completed, examine, load, places
from aviso_workers.config.nats_server import Server
from aviso_workers.config.secrets import Secret, ServerUrls
from aviso_workers.config.settings import (
    Application,
    Config,
    DeadLetters,
    InMemory,
    JetStream,
    Logging,
    NotificationBackend,
    Status,
    Tls,
    Workers,
)
from aviso_workers.jetstream.fields import DeclaredConsumer, DeclaredStream

__all__ = [
    "Application",
    "Config",
    "DeadLetters",
    "DeclaredConsumer",
    "DeclaredStream",
    "EventTypes",
    "Examined",
    "InMemory",
    "JetStream",
    "Logging",
    "NotificationBackend",
    "Secret",
    "Server",
    "ServerUrls",
    "Status",
    "Tls",
    "Workers",
    "completed",
    "examine",
    "load",
    "places",
]
