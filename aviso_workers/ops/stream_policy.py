"""The policy of the event streams: as configured, as it is on the server, and the way from one to the other."""

from __future__ import annotations

from msgspec import UNSET, Struct

from aviso_workers import streams
from aviso_workers.app import App
from aviso_workers.errors import UnknownEventTypeError
from aviso_workers.streams import Plan, StreamSpec

__all__ = ["PolicyRow", "effective_policy", "plans"]


class PolicyRow(Struct, frozen=True, kw_only=True):
    """One field of a stream's policy."""

    field: str
    """Its name in JetStream."""
    key: str
    """The configuration's key for it."""
    configured: str
    """What the configuration states; `-` where it leaves the field to the server."""
    effective: str
    """What the server has."""
    follows: bool
    """Whether the stream is as configured."""


KEYS = {
    "subjects": "topic.base",
    "storage": "storage_type",
    "retention": "retention_policy",
    "discard": "discard_policy",
    "max_msgs": "max_messages",
    "max_bytes": "max_bytes / storage_policy.max_size",
    "max_age": "retention_time",
    "max_msgs_per_subject": "storage_policy.allow_duplicates",
    "num_replicas": "replicas",
    "compression": "storage_policy.compression",
    "duplicate_window": "(the server's, at most max_age)",
}
"""In the order in which they are shown."""


async def plans(app: App) -> dict[str, Plan]:
    """What would be done to the stream of every event type, by event type. Inside of `async with app:`."""
    return {name: await app.session.provisioner.plan(_spec(app, name)) for name in app.config.notification_schema}


async def effective_policy(app: App, event_type: str) -> list[PolicyRow]:
    """The stream's policy on the server beside the configured one.

    Follows Aviso's "Verifying Effective Stream Policy". Raises `NotFoundError` where the stream does not exist.
    """
    spec = _spec(app, event_type)
    info = await app.session.backend.stream_info(spec.name)
    differing = {difference.field for difference in streams.plan(spec, info.config).differences}
    return [
        PolicyRow(
            field=field,
            key=key,
            configured="-" if getattr(spec, field) is UNSET else streams.readable(field, getattr(spec, field)),
            effective=streams.readable(field, info.config.get(field)),
            follows=field not in differing,
        )
        for field, key in KEYS.items()
    ]


def _spec(app: App, event_type: str) -> StreamSpec:
    event_types = app.config.notification_schema
    if event_type not in event_types:
        raise UnknownEventTypeError(event_type, event_types)
    return streams.event_stream(event_type, event_types[event_type], app.config)
