"""Notifications: what authors receive, what they publish, and what they get back.

A notification is an identifier and a payload, with the sequence and the time at which its stream stored it.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Generic

from msgspec import Struct, field
from typing_extensions import TypeVar

from aviso_workers.aviso import payloads, spatial
from aviso_workers.aviso.literals import AnyDuration, rfc3339
from aviso_workers.errors import InvalidNotificationError

T = TypeVar("T", default=Any)
K = TypeVar("K", default=Any)


class Notification(Struct, Generic[T, K], frozen=True, kw_only=True):
    """One notification as an agent, a watch or a replay sees it.

    `T` is the type of the payload, `K` that of the key: a Struct, dataclass or TypedDict of identifier fields.

    Only `event_type`, `identifier` and `payload` are needed to make one by hand, as a unit test does.
    """

    event_type: str
    identifier: Mapping[str, str]
    """Canonical values by field name: those in the event type's `key_order`, and its spatial field if any."""
    payload: T
    """The payload, as the type that the agent asked for, or as the plain JSON value: of a body that is not JSON its
    text, and of one that is not text its bytes."""
    key: K = None  # type: ignore[assignment]  # where an agent asks for no type of it
    """The identifier as the type that the agent asked for, as in `Notification[Field, FieldKey]`; else None."""
    sequence: int = 0
    """The stream sequence: grows with every notification stored, may have holes."""
    time: datetime = datetime(1970, 1, 1, tzinfo=UTC)
    """When the stream stored it, UTC."""
    time_ns: int = 0
    """The same in nanoseconds since 1970, as the server says it; 0 in a notification that was made by hand."""
    topic: str = ""
    """The NATS subject it was stored under, as on the wire."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Its headers. Of a header with several values it has the last."""
    num_delivered: int = 1
    """How often it was handed to this agent, this time included. Crashes and deploys count as well."""
    attempt: int = 1
    """Which attempt this is, as `retry` counts them: one more than the number of failed attempts before it. A deploy
    uses up none. A dead letter that is tried again begins with 1 again."""

    @property
    def id(self) -> str:
        """`<event type>@<sequence>`, the id of its CloudEvent."""
        return f"{self.event_type}@{self.sequence}"

    def cloud_event(self, base_url: str, *, spatial_arrays: bool = False) -> dict[str, Any]:
        """Return the CloudEvent 1.0 that an aviso-server with this `application.base_url` sends for it.

        With `spatial_arrays`, polygons and point clouds are arrays of [latitude, longitude], as an aviso-server from
        0.10 on has them; else they are text, as before. A payload of bytes is what the server reads them as: a JSON
        value or a text; where they are neither, it is `payload_base64`, after the `data_base64` of CloudEvents.
        """
        base_url = base_url.rstrip("/")
        identifier = spatial.with_arrays(self.identifier) if spatial_arrays else dict(self.identifier)
        return {
            "specversion": "1.0",
            "id": self.id,
            "source": base_url,
            "type": f"int.ecmwf.aviso.{self.event_type}",
            "time": rfc3339(self.time_ns) if self.time_ns else self.time.isoformat().replace("+00:00", "Z"),
            "datacontenttype": "application/json",
            "dataschema": f"{base_url}/schema/{self.event_type}",
            "data": {"identifier": identifier, **_data_of(self.payload)},
        }


def _data_of(payload: Any) -> dict[str, Any]:
    """Return what the data of a CloudEvent says of a payload."""
    value = payloads.value_of(payload) if isinstance(payload, bytes) else payload
    if isinstance(value, bytes):
        return {"payload_base64": base64.b64encode(value).decode()}
    return {"payload": value}


class _Sending(Struct, frozen=True, kw_only=True):
    """How a notification is published."""

    message_id: str | None = None
    """With one of your own, a repeat within the stream's duplicate window is recognised and stored once."""
    ttl: AnyDuration | None = None
    """The time after which the stream forgets it, if its own limits have not made it before: whole seconds, at least 1,
    a text such as `1h`, or a timedelta. It needs nats-server 2.11 and a stream with `allow_msg_ttl`. Of one that is
    delivered later it begins then."""
    due: datetime | AnyDuration | None = None
    """When it is to be stored: a datetime with a time zone, or a time from now as seconds, a text such as `10m`, or a
    timedelta. What is past means at once. Both count by the clock of the server, not by that of the publisher. It needs
    nats-server 2.12, and a worker of any app at that time."""
    headers: Mapping[str, str] | None = None
    """Headers of its message, for other programs to read. Names that begin with `Aviso-`, `Nats-` or `spatial_` have a
    meaning already and are refused. A value is printable text without spaces at its ends."""


class Notify(_Sending, frozen=True):
    """A notification to be published. All but event type, identifier and payload is given by its name."""

    event_type: str
    identifier: Mapping[str, Any]
    payload: Any = None
    """Any JSON value, or anything that msgspec or pydantic turns into one. `bytes` are stored as they are."""


class Receipt(Struct, frozen=True, kw_only=True):
    """The server's word that a notification is stored, or that it waits until it is due."""

    id: str | None = None
    """That of the notification (`Notification.id`), such as `mars@4711`; None while it waits."""
    stream: str
    sequence: int
    """0 while it waits."""
    duplicate: bool = False
    """True where the stream already held a message of the same id: nothing new was stored."""
    message_id: str
    due: datetime | None = None
    """When it will be stored, if it waits."""


def parse_pairs(pairs: Iterable[str]) -> dict[str, str]:
    """Parse pairs such as `["class=od", "step=12"]` into a mapping. Raises `InvalidNotificationError`."""
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise InvalidNotificationError(f"{pair!r} is not key=value")
        if key in found:
            raise InvalidNotificationError(f"{key!r} is given twice")
        found[key] = value
    return found
