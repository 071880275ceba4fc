"""Where notifications go that cannot be handled: a stream of its own, with the bytes and the reason.

The subject is `aviso_workers.dead_letters.<app>.<agent>`; the body is the original's, untouched; what is known of it
is in the headers below. The stream refuses when it is full, so that old evidence is never overwritten.
"""

from __future__ import annotations

from aviso_workers.backends import Backend, Delivery
from aviso_workers.codec import Message, store_time
from aviso_workers.config import Config
from aviso_workers.engine.provisioning import Provisioner
from aviso_workers.errors import UnavailableError
from aviso_workers.streams import StreamSpec

__all__ = ["STREAM", "DeadLetters"]

STREAM = "aviso_workers_dead_letters"
SUBJECT = "aviso_workers.dead_letters"
TIMEOUT_SECONDS = 10.0
LONGEST_ERROR = 2000
"""Characters of an error's text that are kept."""


class DeadLetters:
    """Keeps the dead letters of one app."""

    def __init__(self, backend: Backend, *, app: str, config: Config, provisioner: Provisioner) -> None:
        self._backend = backend
        self._app = app
        self._provisioner = provisioner
        self._spec = stream_spec(config)

    async def bury(self, delivery: Delivery, *, agent: str, stream: str, reason: str, error: Exception | None) -> None:
        """Store a copy, acknowledged. Raises `BackendError`: then the original must not be given up."""
        await self._provisioner.ensure(self._spec)
        message = delivery.message
        headers = {
            "Aviso-Subject": message.subject,
            "Aviso-Stream": stream,
            "Aviso-Sequence": str(message.sequence),
            "Aviso-Time": store_time(message).isoformat(),
            "Aviso-App": self._app,
            "Aviso-Agent": agent,
            "Aviso-Deliveries": str(delivery.num_delivered),
            "Aviso-Reason": reason,
            "Aviso-Error": _one_line(f"{type(error).__name__}: {error}" if error else ""),
        }
        kept = {name: value for name, value in (message.headers or {}).items() if not name.startswith("Nats-")}
        try:
            await self._backend.publish(
                Message(subject=f"{SUBJECT}.{self._app}.{agent}", data=message.data, headers={**kept, **headers}),
                # With its time, because a stream that is made anew counts from 1 again.
                message_id=f"{self._app}.{agent}.{stream}.{message.sequence}.{message.timestamp_ns}",
                stream=STREAM,
                timeout_seconds=TIMEOUT_SECONDS,
            )
        except UnavailableError:
            self._provisioner.forget(STREAM)  # it may have been deleted
            raise


def stream_spec(config: Config) -> StreamSpec:
    jetstream = config.notification_backend.jetstream
    settings = config.workers.dead_letters
    return StreamSpec(
        name=STREAM,
        subjects=(f"{SUBJECT}.>",),
        storage=jetstream.storage_type,
        retention="limits",
        discard="new",
        num_replicas=settings.replicas or jetstream.replicas or 1,
        max_bytes=int(settings.max_bytes) if settings.max_bytes else -1,
    )


def _one_line(text: str) -> str:
    """As a header can carry it: an error may quote a file name that is no text."""
    return " ".join(text.split())[:LONGEST_ERROR].encode(errors="replace").decode()
