"""The columns of the data source, and stored messages as Arrow record batches of them.

`data_source` asks for the columns when a query is planned, `readers` makes a `ColumnConverter` of what Spark then wants
and turns messages into batches inside of a task. Where an event type is given, its identifier is a struct with a typed
field for each of its own; a struct and not columns beside the others, because an event type may have a field `time`.

Work is done for a whole batch at a time wherever Arrow can: a task turns some hundred thousand messages a second.
"""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, TypedDict, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Meta, Struct
from pyspark.sql import types
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from aviso_workers.aviso import codec, literals, schema, topics
from aviso_workers.aviso.schema import DateHandler, EventType, FloatHandler, IntHandler, Rule
from aviso_workers.backends import Chunk
from aviso_workers.errors import InvalidOptionError, UndecodableError
from aviso_workers.spark.options import ReadOptions

T = TypeVar("T")

SHORT_NUMBER = r"^-?[0-9]{1,18}$"
"""A number that Arrow reads, and faster than its rule does. Any 18 digits fit into 64 bits."""
TEXT = ("STRING", pa.string(), str)
TYPED: Mapping[type, tuple[str, pa.DataType, Callable[[str], Any]]] = {
    IntHandler: ("BIGINT", pa.int64(), schema.read_int),
    FloatHandler: ("DOUBLE", pa.float64(), literals.parse_float),
    DateHandler: ("DATE", pa.date32(), schema.read_date),
}
"""By the rule of a field, the types of its values for Spark and for Arrow, and their parser; others are texts."""
ABSENT = ("", "*")
"""Tokens of a field that the publisher left out."""
CORRUPT = "_corrupt_record"
LARGEST_FLOAT = (2 - 2**-23) * 2.0**127
"""Of 32 bits: Arrow would make infinity of what is larger."""

SIMPLE: dict[type[types.DataType], Any] = {
    types.StringType: str,
    types.BooleanType: bool,
    types.ByteType: Annotated[int, Meta(ge=-(2**7), lt=2**7)],
    types.ShortType: Annotated[int, Meta(ge=-(2**15), lt=2**15)],
    types.IntegerType: Annotated[int, Meta(ge=-(2**31), lt=2**31)],
    types.LongType: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)],
    types.FloatType: Annotated[float, Meta(ge=-LARGEST_FLOAT, le=LARGEST_FLOAT)],
    types.DoubleType: float,
    types.DecimalType: decimal.Decimal,
    types.DateType: datetime.date,
    types.TimestampType: datetime.datetime,
    types.TimestampNTZType: datetime.datetime,
}


class Layout(Struct, frozen=True, kw_only=True):
    """The event types of a stream's messages, known before the messages are read."""

    event_types: Mapping[str, tuple[str, tuple[str, ...]]]
    """By base: the event type's name and its `key_order`."""
    event: str | None = None
    rules: Mapping[str, Rule] = {}
    """The identifier fields of `event`."""


def layout(reading: ReadOptions, event_types: Mapping[str, EventType]) -> Layout:
    """Return the layout for a read. `event_types` are those of the configuration, and have the one that is read."""
    known = {}
    for name, event_type in event_types.items():
        topic = schema.topic_of(name, event_type)
        known[topic.base] = name, topic.key_order
    rules = event_types[reading.event].identifier if reading.event else {}
    return Layout(event_types=known, event=reading.event, rules=rules)


def ddl(reading: ReadOptions, known: Layout) -> str:
    """Return the columns of a read, as Spark's DDL."""
    return ", ".join(f"{name} {kind}" for name, kind in _columns(reading, known).items())


def check_wanted(wanted: StructType, known: Layout, *, reading: ReadOptions) -> None:
    """Raise `InvalidOptionError` where a query states columns of its own, or a payload type that JSON has no values
    of.
    """
    names = list(_columns(reading, known))
    if wanted.names != names:
        raise InvalidOptionError(
            f"the data source has the columns {', '.join(names)}: leave .schema() out; the option payloadSchema says "
            "what payloads look like"
        )
    ColumnConverter(wanted, known, reading=reading)


def _columns(reading: ReadOptions, known: Layout) -> dict[str, str]:
    fields = [f"`{field}` {TYPED.get(type(rule), TEXT)[0]}" for field, rule in known.rules.items()]
    found = {
        "event_type": "STRING",
        "sequence": "BIGINT",
        "time": "TIMESTAMP",
        "topic": "STRING",
        "identifier": f"STRUCT<{', '.join(fields)}>" if known.event else "MAP<STRING, STRING>",
        "payload": f"STRUCT<{reading.payload_schema}>" if reading.payload_schema else "STRING",
    }
    if reading.payload_schema and reading.mode == "PERMISSIVE":
        found[CORRUPT] = "STRING"
    if reading.include_headers:
        found["headers"] = "MAP<STRING, STRING>"
    return found


class ColumnConverter:
    """A converter of messages to record batches of the columns that Spark wants. Made once in a task."""

    def __init__(self, wanted: StructType, known: Layout, *, reading: ReadOptions) -> None:
        self._schema: pa.Schema = to_arrow_schema(wanted, timezone="UTC")
        self._known = known
        self._spatial = [field for field in known.rules if field in codec.SPATIAL_HEADERS]
        payload = wanted["payload"].dataType
        self._payloads = None
        if isinstance(payload, StructType):
            self._payloads = PayloadReader(payload, self._schema.field("payload").type, mode=reading.mode)

    @property
    def misfits(self) -> str:
        """How many payloads did not fit `payloadSchema`, and why the first did not; empty where all did."""
        return self._payloads.misfits if self._payloads else ""

    def batch(self, messages: Chunk) -> pa.RecordBatch:
        """Return the record batch of messages. Raises `UndecodableError` where a payload does not fit, and mode is
        FAILFAST.
        """
        found: dict[str, Any] = {
            "sequence": pa.array(messages.sequences, pa.int64()),
            "time": _times(messages.timestamps_ns),
            "topic": pa.array(messages.subjects, pa.string()),
        }
        found |= self._identities(messages, found["topic"])
        found |= self._bodies(messages)
        if "headers" in self._schema.names:
            kind = self._schema.field("headers").type
            found["headers"] = pa.array([list((headers or {}).items()) for headers in messages.headers], kind)
        return pa.RecordBatch.from_arrays([found[name] for name in self._schema.names], schema=self._schema)

    def _bodies(self, messages: Chunk) -> dict[str, pa.Array]:
        texts = _texts(messages.data)
        absent = pc.is_in(texts, value_set=pa.array(["", "null"]))
        if pc.any(absent).as_py():
            texts = pc.if_else(absent, None, texts)
        if self._payloads is None:
            return {"payload": texts}
        values, corrupt = self._payloads.read(texts.to_pylist(), messages.sequences)
        return {"payload": values, CORRUPT: pa.array(corrupt, pa.string())}

    def _identities(self, messages: Chunk, subjects: pa.Array) -> dict[str, pa.Array]:
        if self._known.event is not None:
            names = pa.repeat(pa.scalar(self._known.event), len(messages))
            return {"event_type": names, "identifier": self._struct(messages, subjects)}
        found = [self._identify(subject) for subject in subjects.to_pylist()]
        kind = self._schema.field("identifier").type
        return {
            "event_type": pa.array([name for name, _ in found], pa.string()),
            "identifier": pa.array([pairs for _, pairs in found], kind),
        }

    def _identify(self, subject: str) -> tuple[str, list[tuple[str, str]] | None]:
        """Return the event type of a subject, and its identifier; for a subject of no known event type its base and
        None.
        """
        try:
            base, *values = topics.decode_subject(subject)
        except UndecodableError:
            base, values = subject.partition(".")[0], []
        name, keys = self._known.event_types.get(base, (base, ()))
        if not keys or len(keys) != len(values):
            return name, None
        return name, [(key, value) for key, value in zip(keys, values, strict=True) if value not in ABSENT]

    def _struct(self, messages: Chunk, subjects: pa.Array) -> pa.StructArray:
        kind: pa.StructType = self._schema.field("identifier").type
        (keys,) = [keys for name, keys in self._known.event_types.values() if name == self._known.event]
        texts = dict(zip(keys, _tokens(subjects, len(keys)), strict=True))
        tokens = texts.keys() - set(self._spatial)
        for field in self._spatial:
            header = codec.SPATIAL_HEADERS[field]
            texts[field] = pa.array([(headers or {}).get(header) for headers in messages.headers], pa.string())
        missing = pa.nulls(len(messages), pa.string())
        children = [
            _each_once(texts.get(field, missing), partial(_typed, rule=rule, escaped=field in tokens))
            for field, rule in self._known.rules.items()
        ]
        return pa.StructArray.from_arrays(children, fields=list(kind))


def _times(nanoseconds: Iterable[int]) -> pa.Array:
    return pc.divide(pa.array(nanoseconds, pa.int64()), 1000).cast(pa.timestamp("us", "UTC"))


def _texts(encoded: Sequence[bytes]) -> pa.Array:
    try:
        return pa.array(encoded, pa.binary()).cast(pa.string())
    except pa.ArrowInvalid:  # not UTF-8, which no client of ours writes
        return pa.array([text.decode("utf-8", "replace") for text in encoded], pa.string())


def _tokens(subjects: pa.Array, count: int) -> list[pa.Array]:
    """Return the `count` tokens behind the base by position, empty where a subject has another number of them."""
    split = pc.split_pattern(subjects, ".")
    fits = pc.equal(pc.list_value_length(split), count + 1)
    if not pc.all(fits).as_py():
        blank = pa.array([[""] * (count + 1)], split.type)
        split = pc.if_else(fits, split, blank[0])
    return [pc.list_element(split, position) for position in range(1, count + 1)]


def _each_once(texts: pa.Array, work: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """Apply a function to each distinct text once, and return the results for all texts."""
    encoded = texts.dictionary_encode()
    return work(encoded.dictionary).take(encoded.indices)


def _decoded(tokens: pa.Array) -> pa.Array:
    tokens = pc.if_else(pc.is_in(tokens, value_set=pa.array(ABSENT)), None, tokens)
    if not pc.any(pc.match_substring(tokens, "%")).as_py():
        return tokens
    return pa.array([_decode(token) for token in tokens.to_pylist()], pa.string())


def _decode(token: str | None) -> str | None:
    try:
        value = topics.decode_token(token) if token is not None else None
    except UndecodableError:
        return None
    return None if value in ABSENT else value


def _typed(texts: pa.Array, rule: Rule, *, escaped: bool) -> pa.Array:
    """Return the values of a field; null where one does not fit its rule, as it may be in a stream that others use."""
    if escaped:
        texts = _decoded(texts)
    _, kind, parse = TYPED.get(type(rule), TEXT)
    if parse is str:
        return texts
    if kind == pa.int64() and pc.all(pc.match_substring_regex(texts, SHORT_NUMBER)).as_py():
        return texts.cast(kind)
    return pa.array([_parsed(parse, text) for text in texts.to_pylist()], kind)


def _parsed(parse: Callable[[str], T], text: str | None) -> T | None:
    try:
        return None if text is None else parse(text)
    except ValueError:
        return None


class PayloadReader:
    """A parser of payloads into values of one Spark type (the option `payloadSchema`). Made once in a task.

    A payload fits when it is a JSON object whose fields have the types that are asked for; a field may be missing or
    null, and one that was not asked for is left out. What does not fit is null, and its text is in the column
    `_corrupt_record`, or ends the query where mode is FAILFAST: the words of Spark's JSON reader.
    """

    def __init__(self, kind: types.StructType, arrow: pa.DataType, *, mode: str) -> None:
        """Prepare the decoder. Raises `InvalidOptionError` for a type that JSON has no values of."""
        self._decode = msgspec.json.Decoder(_read_as(kind)).decode
        self._arrow = arrow
        self._fails_fast = mode == "FAILFAST"
        self._misfits = 0
        self._first = ""

    @property
    def misfits(self) -> str:
        """How many payloads did not fit so far, and why the first did not; empty where all did."""
        return f"{self._misfits} of the payloads do not fit payloadSchema ({self._first})" if self._misfits else ""

    def read(self, texts: Sequence[str | None], sequences: Sequence[int]) -> tuple[pa.Array, list[str | None]]:
        """Parse payloads, and return the values and, where one does not fit, its text. Raises `UndecodableError` where
        mode is FAILFAST.
        """
        values: list[Any] = [None] * len(texts)
        corrupt: list[str | None] = [None] * len(texts)

        def misfit(index: int, error: Exception) -> None:
            if self._fails_fast:
                raise UndecodableError(
                    f"the payload of message {sequences[index]} does not fit payloadSchema: {error}; with mode "
                    f"PERMISSIVE it would be in {CORRUPT}"
                ) from error
            values[index], corrupt[index] = None, texts[index]
            self._misfits += 1
            self._first = self._first or f"message {sequences[index]}: {error}"

        for index, text in enumerate(texts):
            if text is None:
                continue
            try:
                values[index] = self._decode(text)
            except (msgspec.DecodeError, RecursionError) as error:
                misfit(index, error)
        try:
            return pa.array(values, self._arrow), corrupt
        except (pa.ArrowException, OverflowError):  # such as a decimal of too many digits: find out which
            for index, value in enumerate(values):
                try:
                    pa.array([value], self._arrow)
                except (pa.ArrowException, OverflowError) as error:
                    misfit(index, error)
        return pa.array(values, self._arrow), corrupt


def _read_as(kind: types.DataType) -> Any:
    match kind:
        case types.StructType():
            fields = {field.name: _read_as(field.dataType) | None for field in kind.fields}
            return TypedDict("Payload", fields, total=False)  # type: ignore[operator]
        case types.ArrayType():
            return list[_read_as(kind.elementType) | None]  # type: ignore[misc]
        case types.MapType(keyType=types.StringType()):
            return dict[str, _read_as(kind.valueType) | None]  # type: ignore[misc]
        case _ if type(kind) in SIMPLE:
            return SIMPLE[type(kind)]
        case _:
            raise InvalidOptionError(f"payloadSchema: {kind.simpleString()} has no values in JSON")
