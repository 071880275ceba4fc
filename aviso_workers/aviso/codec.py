"""A notification on the wire: subject, headers and body of its message, and back.

The only knowledge of Aviso's wire format (aviso-server's JetStream messages). The identifier is in the subject, the
payload alone is the body, which `payloads` reads and writes. A spatial field travels in headers. Nothing here sends.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, structs

from aviso_workers._fast import identifier as plain_identifier
from aviso_workers._fast import stored_at
from aviso_workers.aviso import payloads, schema, spatial, topics, typed_identifiers
from aviso_workers.aviso.notifications import Notification
from aviso_workers.aviso.schema import (
    EventType,
    ExpverHandler,
    PointCloudHandler,
    PolygonHandler,
    Rule,
    StringHandler,
    Where,
    parse_where,
)
from aviso_workers.errors import InvalidNotificationError, InvalidPayloadError, UndecodableError

BBOX_HEADER = "spatial_bbox"
GEOMETRY_HEADER = "spatial_geometry"
POINT_CLOUD_HEADER = "spatial_point_cloud"
POLYGON = "polygon"
"""The one field name whose polygon an aviso-server carries in a header."""
POINT_CLOUD = "point_cloud"

SPATIAL_HEADERS = {POLYGON: GEOMETRY_HEADER, POINT_CLOUD: POINT_CLOUD_HEADER}
MAX_KNOWN = 10_000
LONGEST_KNOWN = 100
"""The most characters of a value that is remembered. Publishers choose the values, and may choose long ones."""
LEFT_OUT = frozenset({"", "*"})
"""Tokens of a subject in place of a field that the publisher left out."""
ABSENT = (b"null", b"")
"""Bodies of notifications without a payload."""
SURELY_SHORT = 900
"""Characters of a subject that cannot be too long, however many bytes they have."""
REMEMBERED = frozenset({str, int})
"""Types of values of which equal ones are spelled alike: 1.0 equals 1, and so does True."""
NO_HEADERS: Mapping[str, str] = {}
RESERVED_HEADERS = ("aviso-", "nats-", "spatial_")
"""How names of headers begin, in small letters, that we, the server or an aviso-server give a meaning."""
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""A token of HTTP (RFC 9110), which every client of NATS reads as it was written."""
MARKER_HEADER = "Nats-Marker-Reason"
"""The header of the marker that JetStream stores when a subject's last message is gone, in a stream that has a
`subject_delete_marker_ttl`."""
SIZE_HEADER = "Nats-Msg-Size"
"""The header of a message that JetStream delivers without its body: the size of the body in bytes."""

T = TypeVar("T")
LARGEST_NUMBER = 2**63 - 1
"""Of what we count and of nanoseconds: more fits into no field of JetStream's."""


class Message(Struct, frozen=True, kw_only=True, gc=False):
    """A message as a stream holds it."""

    subject: str
    data: bytes
    headers: Mapping[str, str] | None = None
    """Of several values of one name, the last."""
    sequence: int = 0
    timestamp_ns: int = 0
    """Store time, nanoseconds since 1970 UTC."""


def store_time(message: Message) -> datetime:
    """Return when the stream stored it, UTC, cut to whole microseconds: a replay from this time begins with it."""
    return stored_at(message.timestamp_ns)


def is_marker(message: Message) -> bool:
    """Return whether the server has stored it to say that the last message of its subject is gone: it is no
    notification.
    """
    return not message.data and message.headers is not None and MARKER_HEADER in message.headers


def lacks_body(message: Message) -> bool:
    """Return whether the server has left out the body of the message, as for a consumer with `headers_only`."""
    return not message.data and message.headers is not None and SIZE_HEADER in message.headers


UNREADABLE_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for bytes that somebody else may have written."""


def read_json(data: bytes, type: type[T]) -> T:
    """Return the value of JSON that somebody else may have written. Raises `UndecodableError`, whatever is wrong."""
    try:
        return msgspec.json.decode(data, type=type)
    except UNREADABLE_JSON as error:
        raise UndecodableError(f"not the JSON of a {type.__name__}: {error}") from error


def read_number(text: str) -> int:
    """Return a number from 0 on, of up to 64 bits, that somebody else may have written. Raises `UndecodableError`."""
    digits = text if len(text) < 20 and text.isascii() and text.isdecimal() else ""
    if not digits or int(digits) > LARGEST_NUMBER:
        raise UndecodableError(f"{reprlib.repr(text)} is not a whole number of 64 bits")
    return int(digits)


def encode(name: str, event_type: EventType, identifier: Mapping[str, str], payload: Any) -> Message:
    """Return the message for a canonical identifier (see `schema.canonical_identifier`) and a payload.

    The payload is any JSON value, or anything that msgspec or pydantic turns into one; None counts as absent. Bytes are
    stored as they are. Raises `InvalidPayloadError`, or `InvalidNotificationError` where a value cannot stand in a
    subject.
    """
    data = payloads.encode(name, payload)
    if data in ABSENT and event_type.payload is not None and event_type.payload.required:
        raise InvalidPayloadError(f"{name}: a payload is required")
    return addressed(name, event_type, identifier, data)


def addressed(name: str, event_type: EventType, identifier: Mapping[str, str], data: bytes) -> Message:
    """Return the message of this body for a canonical identifier.

    Raises `InvalidNotificationError` as `encode` does.
    """
    return Message(
        subject=topics.topic(name, event_type, identifier),
        data=data,
        headers=_spatial_headers(event_type, identifier),
    )


def is_reserved(header: str) -> bool:
    """Return whether a header of this name has a meaning for us, for the server or for an aviso-server."""
    return header.lower().startswith(RESERVED_HEADERS)


def with_headers(name: str, message: Message, headers: Mapping[str, str]) -> Message:
    """Return the message with an author's headers as well. Raises `InvalidNotificationError`."""
    for header, value in headers.items():
        if not (isinstance(header, str) and _HEADER_NAME.fullmatch(header)):
            raise InvalidNotificationError(
                f"{name}: header {header!r}: a name is made of letters, digits and !#$%&'*+-.^_`|~"
            )
        if is_reserved(header):
            raise InvalidNotificationError(
                f"{name}: header {header!r}: names that begin with Aviso-, Nats- or spatial_ have a meaning already: "
                "give it another name"
            )
        if not (isinstance(value, str) and value.isprintable() and value == value.strip()):
            raise InvalidNotificationError(
                f"{name}: header {header!r}: its value must be printable text without spaces at its ends, "
                f"found {value!r:.100}"
            )
    return structs.replace(message, headers={**(message.headers or {}), **headers})


def _spatial_headers(event_type: EventType, identifier: Mapping[str, str]) -> dict[str, str] | None:
    """Return where a notification lies; None where its event type says no place."""
    for field, rule in event_type.identifier.items():
        match rule:
            case PolygonHandler():
                box = spatial.Box.around(spatial.parse_polygon(identifier[field]).ring)
                headers = {BBOX_HEADER: box.header()}
                return headers | {GEOMETRY_HEADER: identifier[field]} if field == POLYGON else headers
            case PointCloudHandler():
                box = spatial.Box.around(spatial.parse_cloud(identifier[field]))
                return {BBOX_HEADER: box.header(), POINT_CLOUD_HEADER: identifier[field]}
    return None


class NotificationWriter:
    """Turns notifications of one event type into messages. Made once, used for many: of the values that come again and
    again it remembers how a subject spells them."""

    def __init__(self, name: str, event_type: EventType) -> None:
        self._name = name
        self._event_type = event_type
        place = schema.topic_of(name, event_type)
        self._base = topics.encode_token(place.base)
        self._known: dict[str, dict[object, str]] = {field: {} for field in place.key_order}
        """By field, the tokens of texts and whole numbers."""
        self._all_routed = set(place.key_order) == set(event_type.identifier)

    def message(self, identifier: Mapping[str, Any], payload: Any) -> Message:
        """Return the message that stores a notification. Raises `InvalidNotificationError`."""
        if not isinstance(identifier, Mapping):
            raise InvalidNotificationError(
                f'{self._name}: the identifier must be a mapping of fields, as in {{"class": "od"}}, '
                f"found {identifier!r:.100}"
            )
        subject = self._known_subject(identifier)
        if subject is not None and (data := payloads.encode(self._name, payload)) not in ABSENT:
            return Message(subject=subject, data=data)
        canonical = schema.canonical_identifier(self._name, self._event_type, identifier)
        return encode(self._name, self._event_type, canonical, payload)

    def _known_subject(self, identifier: Mapping[str, Any]) -> str | None:
        """Return the subject; None where more than its values is to be looked at, or one of them is not valid."""
        if not self._all_routed or len(identifier) != len(self._known):
            return None
        tokens = [self._base]
        try:
            for field, known in self._known.items():
                value = identifier[field]
                if type(value) not in REMEMBERED:
                    return None
                tokens.append(known.get(value) or self._learn(field, known, value))
        except (KeyError, ValueError):
            return None
        subject = ".".join(tokens)
        return subject if len(subject) < SURELY_SHORT else None

    def _learn(self, field: str, known: dict[object, str], value: object) -> str:
        """Return how a subject spells a value, and remember it. Raises `ValueError` where the value is not valid."""
        token = topics.encode_token(schema.routed_value(self._event_type.identifier[field], value))
        if len(known) >= MAX_KNOWN:
            known.clear()
        known[value] = token
        return token


class NotificationReader:
    """Turns the stored messages of one event type into notifications of one payload type, and leaves out what a
    filter does not let through. Made once, used for many."""

    def __init__(
        self,
        name: str,
        event_type: EventType,
        *,
        where: Where | None = None,
        payload_type: Any = Any,
        decode: Callable[[bytes], Any] | None = None,
        key_type: Any = Any,
    ) -> None:
        """`decode` makes payloads of bodies, whatever `payload_type` says."""
        self._name = name
        self._where = where or parse_where(name, event_type, {})
        self._keys = tuple(self._where.topic.key_order)
        self._count = 1 + len(self._keys)
        """How many words a subject has."""
        self._selective = bool(self._where.conditions or self._where.place)
        self._base = self._where.topic.base
        rules = event_type.identifier
        checks = [
            _Check(field, rules[field]) for field in self._keys if field in rules and not _takes_any_text(rules[field])
        ]
        self._checks = [(check.field, check.known, check.add) for check in checks]
        self._spatial = [
            (field, header, _Check(field, rules[field])) for field, header in SPATIAL_HEADERS.items() if field in rules
        ]
        self._decode_payload = payloads.decoded_by(decode) if decode else payloads.decoder(payload_type)
        self._read_key = None if key_type is Any else typed_identifiers.reader(key_type)

    def matches(self, message: Message) -> bool:
        """Return whether the filter lets the message through, whatever its payload, and also where it `is_marker`."""
        try:
            return self._matches(self._tokens(message.subject), message)
        except UndecodableError:
            return False

    def notification(self, message: Message, *, num_delivered: int = 1, attempt: int = 1) -> Notification[Any] | None:
        """Return the notification; None where the filter does not let it through, or the message is a server's marker.

        Raises `UndecodableError`, with the path of the mistake where the payload or the key does not fit its type.
        """
        if not message.data and is_marker(message):
            return None
        identifier = None if self._selective else plain_identifier(message.subject, self._base, self._keys)
        if identifier is None:
            tokens = self._tokens(message.subject)
            if self._selective and not self._matches(tokens, message):
                return None
            identifier = self._identifier(tokens, message.subject)
        for field, known, add_known in self._checks:
            if (value := identifier.get(field, "")) not in known:
                add_known(value)
        headers = message.headers if message.headers is not None else NO_HEADERS
        for field, header, check in self._spatial:
            if header in headers and field not in identifier:
                identifier[field] = headers[header]
                check.add(headers[header])
        return Notification(
            event_type=self._name,
            identifier=identifier,
            payload=self._decode_payload(message.data),
            key=self._read_key(identifier) if self._read_key is not None else None,
            sequence=message.sequence,
            time=store_time(message),
            time_ns=message.timestamp_ns,
            topic=message.subject,
            headers=headers,
            num_delivered=num_delivered,
            attempt=attempt,
        )

    def _tokens(self, subject: str) -> Sequence[str]:
        tokens = topics.decode_subject(subject) if "%" in subject else subject.split(".")
        if len(tokens) != self._count:
            raise UndecodableError(
                f"{subject!r} has {len(tokens) - 1} identifier values, {self._name} has {len(self._keys)}"
            )
        return tokens

    def _identifier(self, tokens: Sequence[str], subject: str) -> dict[str, str]:
        if tokens[0] != self._base:
            raise UndecodableError(f"{subject!r} is not a subject of {self._name}")
        values = zip(self._keys, tokens[1:], strict=True)
        return {field: value for field, value in values if value not in LEFT_OUT}

    def _matches(self, tokens: Sequence[str], message: Message) -> bool:
        return self._where.matches(tokens, _footprint(message) if self._where.place else None)


def _takes_any_text(rule: Rule) -> bool:
    return isinstance(rule, ExpverHandler) or (isinstance(rule, StringHandler) and rule.max_length is None)


class _Check:
    """Whether the values of one identifier field are what its rule allows. It remembers those that are."""

    __slots__ = ("_rule", "field", "known")

    def __init__(self, field: str, rule: Rule) -> None:
        self.field = field
        self._rule = rule
        self.known = set(LEFT_OUT)

    def add(self, value: str) -> None:
        """Take a value as known. Raises `UndecodableError` where the rule does not allow it."""
        try:
            self._rule.canonical(value)
        except ValueError as problem:
            raise UndecodableError(f"identifier field {self.field!r} {problem}") from problem
        if len(value) > LONGEST_KNOWN:
            return
        if len(self.known) >= MAX_KNOWN:
            self.known.clear()
            self.known.update(LEFT_OUT)
        self.known.add(value)


def _footprint(message: Message) -> spatial.Footprint:
    headers = message.headers or {}
    geometry: object = headers.get(GEOMETRY_HEADER)
    if geometry is None:
        body = _decode_any(message.data)
        geometry = body.get(GEOMETRY_HEADER) if isinstance(body, dict) else None
    return spatial.Footprint(
        bbox=headers.get(BBOX_HEADER), geometry=geometry, point_cloud=headers.get(POINT_CLOUD_HEADER)
    )


_decode_any = payloads.decoder(Any)
