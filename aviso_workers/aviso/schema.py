"""Event types: what their identifiers may hold, how values are spelled, and what a filter means.

`config` reads `notification_schema` into `EventType`s and asks `mistakes` and `check_bases_unique` about
them; the publisher calls `canonical_identifier`; agents, watches and replays call `parse_where` once and
`Where.matches` per message; `topics` turns both into NATS subjects.

One value must have one spelling, because the subject is a notification's identity: every rule has a
canonical form, the same as aviso-server's, so that both can share a stream. Rules are data, tagged by
`type` exactly as in an aviso-server's YAML file.

Not done here: subjects and their escapes (`topics`), headers and payloads (`codec`), file and line of a
mistake (`config`). The `ValueError` of a rule says what was expected and starts with a verb; it becomes
an `InvalidIdentifierError`, which names the event type and the field, at the border of this module.
"""

# Annotations are evaluated here: as text, msgspec would parse each of them whenever a worker starts.

import datetime
import math
import re
import reprlib
import sys
from calendar import isleap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, TypeVar

import msgspec

from aviso_workers.aviso import literals, spatial
from aviso_workers.aviso.literals import Duration, Size
from aviso_workers.errors import InvalidIdentifierError

LONGEST_BASE = 200
"""Characters. The name of a stream has 255 at most, and that of delayed notifications has 24 more than the base."""
_BASE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_RESERVED = ("aviso_workers", "kv_")
"""How the names of our own streams and subjects begin, and those of the streams of buckets, in lower case."""
_SPACE_OR_CONTROL = re.compile(r"[\s\x00-\x20\x7f-\x9f]")
"""Any blank of Unicode: one that is stored ends the replays of aviso-servers, whose client parts subjects there."""
_DATE = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2}|[0-9]{8})|([0-9]{4})-([0-9]{3})")
_DATE_FORMATS = ("%Y%m%d", "%Y-%m-%d")
_TIME = re.compile(r"([0-9]{1,2})(?::([0-9]{2}))?|([0-9]{2})([0-9]{2})")
_EXPVER_NUMBER = re.compile(r"\+?0*([0-9]{1,10})")
_UNSIGNED_EXPONENT = re.compile(r"e(?=[0-9])")
_INTEGER = re.compile(r"([+-]?)0*([0-9]{1,19})")

_COMPARISONS = ("eq", "in", "gt", "gte", "lt", "lte", "between")
_POLYGON, _POINT, _POINT_CLOUD = "polygon", "point", "point_cloud"
_Number = TypeVar("_Number", int, float)


class Span(msgspec.Struct, frozen=True):
    """The numbers from `low` to `high`, both included, asked by their text: `"7" in span`.

    `read` turns text into a number, or raises ValueError; what it cannot read is not in the span.
    """

    read: Callable[[str], float]
    low: float
    high: float

    def __contains__(self, text: str) -> bool:
        try:
            return self.low <= self.read(text) <= self.high
        except ValueError:
            return False


Condition = frozenset[str] | Span
"""The values that one field of a filter accepts, asked with `in` and a canonical value."""


class IdentifierRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """The rule for the values of one identifier field.

    `required` concerns watches and replays of an aviso-server only; a notification has every field.
    """

    required: bool
    """Whether a watch or replay of an aviso-server must give this field."""
    description: str | None = None
    """Description for people."""

    @property
    def spelling(self) -> str:
        """How values are spelled: with another text, what is stored may have a spelling that nobody asks for."""
        return type(self).__name__

    def canonical(self, value: str) -> str:
        """Return the one spelling of `value`. Raises ValueError saying what was expected."""
        raise NotImplementedError

    def condition(self, operator: str, operand: object) -> Condition:
        """Return what `{operator: operand}` accepts. Raises ValueError saying what was expected."""
        raise ValueError(f"takes a value or a list of values; a {type(self).__name__} has no operators")

    def mistakes(self) -> Iterator[tuple[str, str]]:
        """Options that cannot work: (option, what is wrong)."""
        yield from ()


class StringHandler(IdentifierRule, frozen=True, kw_only=True):
    """Any text, stored as it is."""

    max_length: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Maximum length, in bytes of UTF-8. Default: no limit."""

    def canonical(self, value: str) -> str:
        if self.max_length is not None and len(value.encode(errors="surrogatepass")) > self.max_length:
            raise ValueError(f"must be at most {self.max_length} bytes long, not {reprlib.repr(value)}")
        return value


class DateHandler(IdentifierRule, frozen=True, kw_only=True):
    """A day, given as `2025-12-25`, `20251225` or `2025-359` (day of the year)."""

    canonical_format: str = "%Y%m%d"
    """Format in which it is stored: %Y%m%d or %Y-%m-%d."""

    @property
    def spelling(self) -> str:
        return f"{type(self).__name__} {self.canonical_format}"

    def canonical(self, value: str) -> str:
        day = read_date(value).isoformat()
        if self.canonical_format not in _DATE_FORMATS:
            raise ValueError(f"has the unsupported canonical_format {self.canonical_format!r}")
        return day if self.canonical_format == "%Y-%m-%d" else day.replace("-", "")

    def mistakes(self) -> Iterator[tuple[str, str]]:
        if self.canonical_format not in _DATE_FORMATS:
            yield "canonical_format", f"must be {' or '.join(_DATE_FORMATS)}, not {self.canonical_format!r}"


class TimeHandler(IdentifierRule, frozen=True, kw_only=True):
    """A time of day to the minute, given as `9`, `09`, `9:15`, `09:15` or `0915`, and stored as `0915`."""

    def canonical(self, value: str) -> str:
        time = read_time(value)
        return f"{time.hour:02}{time.minute:02}"


class EnumHandler(IdentifierRule, frozen=True, kw_only=True):
    """One of `values`, in upper or lower case, and stored in lower case."""

    values: tuple[str, ...]
    """Values that the field may have."""

    def canonical(self, value: str) -> str:
        lowered = value.lower()
        if lowered not in _lower_case(self.values):
            raise ValueError(f"must be one of {', '.join(self.values)}; not {reprlib.repr(value)}")
        return lowered

    def condition(self, operator: str, operand: object) -> Condition:
        operands = _operands(operator, operand, known=("eq", "in"))
        texts = [each for each in operands if isinstance(each, str)]
        if len(texts) < len(operands):
            raise ValueError(f"must be compared with text, not {reprlib.repr(operand)}")
        return frozenset(map(self.canonical, texts))

    def mistakes(self) -> Iterator[tuple[str, str]]:
        if not self.values:
            yield "values", "must name at least one value"


class ExpverHandler(IdentifierRule, frozen=True, kw_only=True):
    """An experiment version. A number is padded to four digits, and other text is stored in lower case.

    `default` replaces empty text, not a missing field.
    """

    default: str | None = None
    """Value that replaces empty text. Default: empty text is refused."""

    def canonical(self, value: str) -> str:
        given = value or self.default
        if not given:
            raise ValueError("must not be empty, because its rule has no default")
        found = _EXPVER_NUMBER.fullmatch(given)
        if found and (number := int(found[1])) < 2**32:
            return f"{number:04}"
        return given.lower()


class IntHandler(IdentifierRule, frozen=True, kw_only=True):
    """A whole number of 64 bits within `range`, stored without a plus sign and leading zeros."""

    range: tuple[int, int] | None = None
    """Smallest and largest value, both allowed. Default: no limits."""

    def canonical(self, value: str) -> str:
        return str(_within(self.range, read_int(value)))

    def condition(self, operator: str, operand: object) -> Condition:
        operands = _operands(operator, operand, known=_COMPARISONS)
        numbers = [_within(self.range, _int_operand(each)) for each in operands]
        if operator in ("eq", "in"):
            return frozenset(map(str, numbers))
        return _span(operator, numbers, read=read_int, step=lambda number, sign: number + sign)

    def mistakes(self) -> Iterator[tuple[str, str]]:
        yield from _range_mistakes(self.range)


class FloatHandler(IdentifierRule, frozen=True, kw_only=True):
    """A finite number within `range`, stored with the fewest digits and without an exponent."""

    range: tuple[float, float] | None = None
    """Smallest and largest value, both allowed. Default: no limits."""

    def canonical(self, value: str) -> str:
        return literals.float_text(_within(self.range, _read_float(value)))

    def condition(self, operator: str, operand: object) -> Condition:
        operands = _operands(operator, operand, known=_COMPARISONS)
        numbers = [_within(self.range, _float_operand(each)) for each in operands]
        if operator in ("eq", "in"):
            texts = frozenset(map(literals.float_text, numbers))
            # Zero is one number, but has two spellings.
            return texts | {"0", "-0"} if 0 in numbers else texts
        return _span(
            operator,
            numbers,
            read=literals.parse_float,
            step=lambda number, sign: math.nextafter(number, sign * math.inf),
        )

    def mistakes(self) -> Iterator[tuple[str, str]]:
        yield from _range_mistakes(self.range)


class PolygonHandler(IdentifierRule, frozen=True, kw_only=True):
    """A closed ring `(lat,lon,...)`, stored in a header as it was written."""

    def canonical(self, value: object) -> str:
        """Return the text of a polygon given as text or as an array of pairs. Raises ValueError."""
        try:
            return spatial.canonical_polygon(value)
        except ValueError as problem:
            raise ValueError(f"must be a polygon '(lat,lon,...)': {problem}") from problem


class PointCloudHandler(IdentifierRule, frozen=True, kw_only=True):
    """At least one point, as a JSON array `[[lat,lon],...]`, stored in headers."""

    max_points: Annotated[int, msgspec.Meta(ge=1, le=spatial.MAX_POINTS)] = spatial.MAX_POINTS
    """Maximum number of points."""

    def canonical(self, value: object) -> str:
        """Return the JSON text of a point cloud given as such or as an array of pairs. Raises ValueError."""
        try:
            return spatial.canonical_cloud(value, self.max_points)
        except ValueError as problem:
            raise ValueError(f"must be a point cloud '[[lat,lon],...]': {problem}") from problem


Rule = (
    StringHandler
    | DateHandler
    | TimeHandler
    | EnumHandler
    | ExpverHandler
    | IntHandler
    | FloatHandler
    | PolygonHandler
    | PointCloudHandler
)


class Topic(msgspec.Struct, frozen=True):
    """The subjects of an event type: a base, which also names the stream, and the fields that follow it, in order."""

    base: str
    """First part of the subjects and, in capital letters, the name of the stream."""
    key_order: tuple[str, ...]
    """Fields that follow the base in the subject, in this order."""


class PayloadRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether a notification must carry a payload."""

    required: bool
    """Refuse notifications without a payload."""


class StoragePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What the stream of an event type keeps. A key that is not given, or None, is left to the backend's configuration.

    `allow_duplicates` keeps every notification of a topic instead of only the newest one. None is the same as false,
    and says that nobody has decided it.
    """

    retention_time: Duration | None = None
    """Age up to which a notification is kept, such as 30d."""
    max_messages: int | None = None
    """Number of notifications that the stream keeps."""
    max_size: Size | None = None
    """Size that the stream may have, such as 2Gi."""
    allow_duplicates: bool | None = None
    """Keep every notification of a topic, and not only the newest. Default: false."""
    compression: bool | None = None
    """Compress the stream on the disk, with S2."""


class EventType(msgspec.Struct, frozen=True, kw_only=True):
    """One event type of `notification_schema`. Keys that only concern an aviso-server are ignored."""

    identifier: dict[str, Rule]
    """Fields that identify a notification, each with its rule."""
    topic: Topic | None = None
    """Parts of the subject. Default: the event type's name and all fields, sorted."""
    payload: PayloadRule | None = None
    """Whether a payload is required. Default: no."""
    storage_policy: StoragePolicy | None = None
    """What the stream keeps. Default: the settings of notification_backend.jetstream."""

    @property
    def allow_duplicates(self) -> bool | None:
        """The storage policy's `allow_duplicates`; None where it does not say."""
        return self.storage_policy.allow_duplicates if self.storage_policy else None


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """A filter, prepared by `parse_where`: what it asks of tokens, by position, and of the place.

    The base is token 0, so the first entry of `key_order` is token 1.
    """

    topic: Topic
    conditions: tuple[tuple[int, Condition], ...] = ()
    place: spatial.Filter | None = None

    def matches(self, tokens: Sequence[str], footprint: spatial.Footprint | None = None) -> bool:
        """Return whether a notification passes: `tokens` are those of its subject, decoded.

        `footprint` is looked at only if `place` is set; without one, such a filter lets nothing through.
        """
        if len(tokens) != len(self.topic.key_order) + 1 or tokens[0] != self.topic.base:
            return False
        for position, accepted in self.conditions:
            if tokens[position] not in accepted:
                return False
        return self.place is None or (footprint is not None and self.place.matches(footprint))


def topic_of(event_type_name: str, event_type: EventType) -> Topic:
    """Return the topic of an event type; one that states none has its name as base and all fields, sorted."""
    if event_type.topic is not None:
        return event_type.topic
    return Topic(base=event_type_name, key_order=tuple(sorted(event_type.identifier)))


def canonical_identifier(
    event_type_name: str, event_type: EventType, identifier: Mapping[str, object]
) -> dict[str, str]:
    """Check the identifier of a notification about to be published, and spell its values canonically.

    Every field of the schema must be there, whatever its rule says about `required`, and no other. Values
    are text, numbers or booleans; polygons and point clouds may be arrays of pairs. A value that becomes
    a part of the subject must not hold spaces or control characters.

    Raises InvalidIdentifierError.
    """
    routed = topic_of(event_type_name, event_type).key_order
    for field in identifier:
        if field == _POINT:
            problem = "is a filter of watches and replays, and no part of a notification"
            raise InvalidIdentifierError(event_type_name, field, problem)
        if field not in event_type.identifier:
            raise unknown(event_type_name, field, event_type.identifier)
    canonical = {}
    for field, rule in event_type.identifier.items():
        if field not in identifier:
            raise InvalidIdentifierError(event_type_name, field, "is missing; a notification has every field")
        try:
            value = identifier[field]
            canonical[field] = routed_value(rule, value) if field in routed else _canonical(rule, value)
        except ValueError as problem:
            raise InvalidIdentifierError(event_type_name, field, str(problem)) from problem
    return canonical


def parse_where(event_type_name: str, event_type: EventType, where: Mapping[str, object]) -> Where:
    """Prepare the filter of an agent, a watch or a replay.

    Per field: a value, a list of values of which any will do, or one operator, such as `{"gte": 4}`: `eq`
    and `in` for enums and numbers; `gt`, `gte`, `lt`, `lte` and `between` for numbers. `polygon` lets
    polygons and point clouds through that touch it, `point` polygons that contain it.

    A field that is left out may have any value, even if its rule says `required: true`: unlike a request
    to an aviso-server, an agent may want all there is. A field outside `key_order` cannot be asked for,
    because stored notifications do not carry it.

    Raises InvalidIdentifierError.
    """
    topic = topic_of(event_type_name, event_type)
    places = _place_filters(event_type)
    conditions = []
    for field, wanted in where.items():
        if field in places:
            continue
        if field not in event_type.identifier:
            raise unknown(event_type_name, field, (*event_type.identifier, *places))
        try:
            conditions.append((_position(topic, field), _condition(event_type.identifier[field], wanted)))
        except ValueError as problem:
            raise InvalidIdentifierError(event_type_name, field, str(problem)) from problem
    conditions.sort(key=lambda condition: condition[0])
    place = _place(event_type_name, {field: where[field] for field in places if field in where})
    return Where(topic=topic, conditions=tuple(conditions), place=place)


def filter_fields(event_type: EventType) -> frozenset[str]:
    """Return the fields that a filter of this event type may have."""
    return frozenset({*event_type.identifier, *_place_filters(event_type)})


def mistakes(event_type_name: str, event_type: EventType) -> list[tuple[str, str]]:
    """Return what cannot work in an event type: (key path, what is wrong), empty if all is well.

    For bases that clash with each other's see `check_bases_unique`.
    """
    found = (
        *_topic_mistakes(event_type_name, event_type),
        *_identifier_mistakes(event_type),
        *_storage_mistakes(event_type_name, event_type),
    )
    prefix = f"notification_schema.{event_type_name}"
    return [(f"{prefix}.{path}" if path else prefix, message) for path, message in found]


def not_stored(event_type: EventType) -> list[str]:
    """Return the identifier fields whose values no message carries: neither its subject nor its headers."""
    if event_type.topic is None:
        return []
    carried = {*event_type.topic.key_order, _POLYGON, _POINT_CLOUD}
    return [field for field in event_type.identifier if field not in carried]


def check_bases_unique(event_types: Mapping[str, EventType]) -> dict[str, str]:
    """Return what is wrong with the bases that differ from an earlier one in case only, or not at all, by event type.

    A stream is named after its base in upper case and belongs to one event type.
    """
    found: dict[str, str] = {}
    owners: dict[str, str] = {}
    for name, event_type in event_types.items():
        base = topic_of(name, event_type).base
        owner = owners.setdefault(base.lower(), name)
        if owner != name:
            found[name] = f"Schemas {owner!r} and {name!r} both define topic base {base!r}; case is ignored"
    return found


def base_problem(base: str) -> str:
    """Return why a text cannot be the base of a topic, to follow its name in a sentence; empty where it can be one.

    A base begins subjects and, in capital letters, is the name of a stream. So it is checked before either is made.
    """
    if not _BASE.fullmatch(base):
        return f"must match {_BASE.pattern}, not {base!r:.100}"
    if len(base) > LONGEST_BASE:
        return f"must have at most {LONGEST_BASE} characters, not {len(base)}"
    if base.lower().startswith(_RESERVED):
        return f"must not begin with aviso_workers or KV_, as {base!r} does: streams of our own do; choose another base"
    return ""


def require_routable(text: str) -> None:
    """Refuse text that cannot become a part of a NATS subject, however it is escaped. Raises ValueError.

    A space, a tab and a line break end a subject on the wire; other blanks and control characters do so for some
    clients. An
    escape would be easy, but no aviso-server writes one for them, and so one value would live under two subjects.
    """
    if not text:
        raise ValueError("must not be empty")
    if text.isprintable() and " " not in text:
        return
    if found := _SPACE_OR_CONTROL.search(text):
        raise ValueError(f"must not hold {found[0]!r}, because a NATS subject cannot carry it")
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise ValueError(f"must not hold {text[problem.start]!r}, which is not a character") from problem


def routed_value(rule: Rule, value: object) -> str:
    """Return the canonical spelling of a value that becomes a part of a subject. Raises ValueError."""
    text = _canonical(rule, value)
    require_routable(text)
    return text


def _canonical(rule: Rule, value: object) -> str:
    if isinstance(value, (list, tuple)) and isinstance(rule, (PolygonHandler, PointCloudHandler)):
        text = rule.canonical(value)
    else:
        text = rule.canonical(_scalar_text(value))
    if text in ("", "*"):
        raise ValueError(f"must not be {text!r}, which stands for a field that was left out")
    return text


def _scalar_text(value: object) -> str:
    """Return a JSON scalar as the text that an aviso-server has for it: an exponent has its sign."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float) and math.isfinite(value):
        return _UNSIGNED_EXPONENT.sub("e+", msgspec.json.encode(float(value)).decode())
    raise ValueError(f"must be text, a number or a boolean, not {reprlib.repr(value)}")


def _condition(rule: Rule, wanted: object) -> Condition:
    if isinstance(wanted, Mapping):
        if len(wanted) != 1:
            raise ValueError(f"must have exactly one operator, such as {{'gte': 4}}, not {len(wanted)}")
        ((operator, operand),) = wanted.items()
        accepted = rule.condition(operator, operand)
    else:
        values = wanted if isinstance(wanted, (list, tuple, set, frozenset)) else (wanted,)
        accepted = frozenset(_canonical(rule, value) for value in values)
    if isinstance(accepted, Span):
        return accepted
    if not accepted:
        raise ValueError("must list at least one value")
    for text in accepted:
        require_routable(text)
    return accepted


def _position(topic: Topic, field: str) -> int:
    if field in topic.key_order:
        return topic.key_order.index(field) + 1
    if field == _POINT_CLOUD:
        raise ValueError(f"is not a filter; {_POLYGON!r} finds the point clouds that it covers")
    raise ValueError("is not a filter, because it is not in key_order and so no stored notification carries it")


def _place_filters(event_type: EventType) -> tuple[str, ...]:
    """Return the names of the spatial filters that an event type knows."""
    if isinstance(event_type.identifier.get(_POLYGON), PolygonHandler):
        return (_POLYGON, _POINT)
    if isinstance(event_type.identifier.get(_POINT_CLOUD), PointCloudHandler):
        return (_POLYGON,)
    return ()


def _place(event_type_name: str, asked: Mapping[str, object]) -> spatial.Filter | None:
    if len(asked) > 1:
        raise InvalidIdentifierError(event_type_name, _POINT, f"cannot be combined with {_POLYGON!r}")
    for field, wanted in asked.items():
        try:
            if field == _POINT:
                return spatial.Containing(spatial.parse_point(wanted))
            return spatial.Intersecting(spatial.parse_polygon(wanted))
        except ValueError as problem:
            raise InvalidIdentifierError(event_type_name, field, f"must be a {field}: {problem}") from problem
    return None


def unknown(event_type_name: str, field: str, known: Iterable[str]) -> InvalidIdentifierError:
    """Return the error of a field that an event type has not, with the nearest one that it has."""
    return InvalidIdentifierError(
        event_type_name, field, f"is unknown; {literals.suggestion(str(field), tuple(known))}"
    )


def _topic_mistakes(event_type_name: str, event_type: EventType) -> Iterator[tuple[str, str]]:
    topic = event_type.topic
    if topic is None:
        if problem := base_problem(event_type_name):
            yield "", f"has no topic, so its name is the topic base and {problem}"
        return
    if not event_type_name or not event_type_name.isprintable():
        yield "", f"must have a name, without line breaks and other control characters, not {event_type_name!r:.100}"
    if problem := base_problem(topic.base):
        yield "topic.base", problem
    if not topic.key_order:
        yield "topic.key_order", "must not be empty"
    before = set[str]()
    for field in topic.key_order:
        if field not in event_type.identifier:
            yield "topic.key_order", f"names {field!r}, which is not in identifier"
        if field in before:
            yield "topic.key_order", f"names {field!r} twice"
        before.add(field)
        # A polygon may be named: aviso-servers still route by it, though its text is not canonical.
        if field == _POINT_CLOUD:
            yield "topic.key_order", f"must not name {field!r}, which travels in a header"


def _identifier_mistakes(event_type: EventType) -> Iterator[tuple[str, str]]:
    for field, rule in event_type.identifier.items():
        path = f"identifier.{field}"
        for option, message in rule.mistakes():
            yield f"{path}.{option}", message
        if isinstance(rule, PolygonHandler) and field != _POLYGON:
            yield path, f"has a PolygonHandler, so its name must be {_POLYGON!r}: no other geometry is stored"
        if isinstance(rule, PointCloudHandler) != (field == _POINT_CLOUD):
            yield path, f"must be named {_POINT_CLOUD!r} if and only if it has a PointCloudHandler"
        if field == _POINT:
            yield path, "has a name that is reserved for the filter of watches and replays"
    if _POINT_CLOUD in event_type.identifier:
        if _POLYGON in event_type.identifier:
            yield f"identifier.{_POLYGON}", "cannot stand beside point_cloud, whose filter has this name"
        if event_type.topic is None:
            yield f"identifier.{_POINT_CLOUD}", "needs a topic: without one, all fields are in the subject"


def _storage_mistakes(event_type_name: str, event_type: EventType) -> Iterator[tuple[str, str]]:
    policy = event_type.storage_policy
    if policy is None:
        return
    if event_type.topic is None:
        yield "storage_policy", f"Schema {event_type_name!r} defines storage_policy but has no topic configuration"
    for option in ("retention_time", "max_messages", "max_size"):
        value = getattr(policy, option)
        if value is not None and value <= 0:
            yield f"storage_policy.{option}", "must be > 0"


def _operands(operator: str, operand: object, *, known: Sequence[str]) -> Sequence[object]:
    """Return the operands of one operator, in a sequence of the right length."""
    if operator not in known:
        raise ValueError(f"takes the operators {', '.join(known)}; not {operator!r}")
    if operator not in ("in", "between"):
        return (operand,)
    if not isinstance(operand, (list, tuple)) or not operand:
        raise ValueError(f"needs an array of at least one value after {operator!r}")
    if operator == "between" and len(operand) != 2:
        raise ValueError(f"needs [min, max] after 'between', not {len(operand)} values")
    return operand


def _span(
    operator: str, numbers: Sequence[_Number], *, read: Callable[[str], _Number], step: Callable[..., _Number]
) -> Span:
    """Return the numbers that a comparison lets through; `step` gives the neighbour above (1) or below (-1)."""
    first, last = numbers[0], numbers[-1]
    if first > last:
        raise ValueError(f"needs [min, max] after 'between', not [{first}, {last}]")
    bounds = {
        "gt": (step(first, 1), math.inf),
        "gte": (first, math.inf),
        "lt": (-math.inf, step(first, -1)),
        "lte": (-math.inf, first),
        "between": (first, last),
    }
    return Span(read, *bounds[operator])


def _within(bounds: tuple[_Number, _Number] | None, number: _Number) -> _Number:
    if bounds is not None and not bounds[0] <= number <= bounds[1]:
        raise ValueError(f"must be within [{bounds[0]}, {bounds[1]}], not {number}")
    return number


def _range_mistakes(bounds: tuple[float, float] | None) -> Iterator[tuple[str, str]]:
    if bounds is not None and not bounds[0] <= bounds[1]:
        yield "range", f"must be [min, max] with min <= max, not [{bounds[0]}, {bounds[1]}]"


def read_date(text: str) -> datetime.date:
    """Return the day that a field with a `DateHandler` has. Raises ValueError saying what was expected."""
    try:
        found = _DATE.fullmatch(text)
        if not found:
            raise ValueError("neither a calendar date nor a day of the year")
        if found[1]:
            return datetime.date.fromisoformat(text)
        year, day = int(found[2]), int(found[3])
        if not 1 <= day <= 365 + isleap(year):
            raise ValueError("no such day of the year")
        return datetime.date(year, 1, 1) + datetime.timedelta(days=day - 1)
    except ValueError as problem:
        shown = reprlib.repr(text)
        raise ValueError(f"must be a date such as 2025-12-25, 20251225 or 2025-359, not {shown}") from problem


def read_time(text: str) -> datetime.time:
    """Return the time of day that a field with a `TimeHandler` has. Raises ValueError saying what was expected."""
    found = _TIME.fullmatch(text)
    hour, minute = (int(found[1] or found[3]), int(found[2] or found[4] or 0)) if found else (24, 0)
    if hour > 23 or minute > 59:
        raise ValueError(f"must be a time such as 9, 09:15 or 0915, not {reprlib.repr(text)}")
    return datetime.time(hour, minute)


def read_int(text: str) -> int:
    """Return the number that a field with an `IntHandler` has. Raises ValueError saying what was expected."""
    found = _INTEGER.fullmatch(text)
    number = int(found[1] + found[2]) if found else None
    if number is None or not -(2**63) <= number < 2**63:
        raise ValueError(f"must be a whole number of 64 bits, not {reprlib.repr(text)}")
    return number


def _read_float(text: str) -> float:
    try:
        return literals.parse_float(text)
    except ValueError as problem:
        raise ValueError(f"must be a finite number, not {reprlib.repr(text)}") from problem


def _int_operand(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise ValueError(f"must be compared with whole numbers of 64 bits, not {reprlib.repr(value)}")
    return int(value)


def _float_operand(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"must be compared with finite numbers, not {reprlib.repr(value)}")
    return float(value)


@cache
def _lower_case(values: tuple[str, ...]) -> frozenset[str]:
    return frozenset(value.lower() for value in values)
