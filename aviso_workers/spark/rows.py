"""Conversion of rows to the messages of notifications, checked against their schema a column at a time.

`writers` makes a `Rows` in a task and hands it record batches. Values repeat in a column, so a field is checked and
spelled once for each of its values, and Arrow joins what comes out to subjects. An event type with a place is encoded
row by row, because its headers are made of its coordinates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import structs
from pyspark.sql.types import StructType

from aviso_workers.aviso import codec, payloads, schema, topics
from aviso_workers.aviso.schema import EventType, Topic
from aviso_workers.backends import OutgoingChunk
from aviso_workers.engine import publisher
from aviso_workers.errors import (
    InvalidIdentifierError,
    InvalidNotificationError,
    InvalidOptionError,
    InvalidPayloadError,
    UndecodableError,
)
from aviso_workers.spark.options import WriteOptions

READ_ONLY = {"event_type", "sequence", "time", "topic", "headers", "_corrupt_record"}
"""Columns of a read that a write may have and does not need."""
NO_PAYLOAD = b"null"
MAX_KNOWN = 10_000
"""Values of fields whose spelling is remembered from batch to batch."""
SURELY_SHORT = 900
"""Bytes of a subject that is not too long; whether a longer one is, `codec` says."""
DIGEST_BYTES = 16
MAX_REMEMBERED = 500_000
"""Rows of a task whose ids it remembers, which takes about 60 MB."""


def check_columns(columns: StructType, writing: WriteOptions, event_type: EventType) -> None:
    """Raise `InvalidOptionError` where the rows of a data frame with these columns cannot be notifications."""
    event, names = writing.event, columns.names
    if writing.id_column is not None and writing.id_column not in names:
        raise InvalidOptionError(f"msgIdColumn: there is no column {writing.id_column!r}")
    whole = "identifier" in names or "topic" in names
    known = {*event_type.identifier, "identifier", "payload", writing.id_column, *(READ_ONLY if whole else {"topic"})}
    if unknown := [name for name in names if name not in known]:
        raise InvalidOptionError(
            f"{event}: column {unknown[0]!r} is not part of a notification; select identifier, or topic, or columns "
            f"named {', '.join(event_type.identifier)}, and payload"
        )
    found = names
    if "identifier" in names and isinstance(struct := columns["identifier"].dataType, StructType):
        found = struct.names
        if unknown := [name for name in found if name not in event_type.identifier]:
            raise InvalidOptionError(f"{event}: the identifier has no field {unknown[0]!r}")
    elif whole:
        return
    if absent := [field for field in event_type.identifier if field not in found]:
        raise InvalidOptionError(f"{event}: there is no column for the identifier field {absent[0]!r}")


class Rows:
    """A converter of rows of one event type to messages. Made once in a task."""

    def __init__(self, event: str, event_type: EventType, *, most_bytes: int) -> None:
        """Prepare the conversion; `most_bytes` is how many bytes payload and headers of a message may have together."""
        self._event = event
        self._most_bytes = most_bytes
        self._event_type = event_type
        self._topic = schema.topic_of(event, event_type)
        self._all_routed = set(self._topic.key_order) == set(event_type.identifier)
        self._required = event_type.payload is not None and event_type.payload.required
        self._alone = {field: self._only(field) for field in event_type.identifier}
        self._known = lru_cache(MAX_KNOWN, typed=True)(self._canonical)

    def chunk(self, batch: pa.RecordBatch, ids: MessageIds) -> OutgoingChunk:
        """Return the messages of rows. Raises `InvalidNotificationError`, before any id is taken of `ids`."""
        identifier = {field: self._spelled(field, values) for field, values in self._identifier(batch).items()}
        found = self._subjects(identifier) if self._all_routed else None
        data = self._bodies(batch)
        if self._required and NO_PAYLOAD in data:
            raise InvalidPayloadError(f"{self._event}: a payload is required")
        if found is None:
            subjects, headers = self._one_by_one(identifier, data)
        else:
            subjects, headers = found.to_pylist(), [None] * len(data)
        size = max(map(publisher.size_of, data, headers) if any(headers) else map(len, data), default=0)
        if size > self._most_bytes:
            raise publisher.too_large(self._event, size, most=self._most_bytes)
        messages = OutgoingChunk(subjects=subjects, data=data, headers=headers, message_ids=())
        return structs.replace(messages, message_ids=ids.of(batch, messages))

    def _one_by_one(
        self, identifier: Mapping[str, pa.DictionaryArray], data: Sequence[bytes]
    ) -> tuple[list[str], list[Mapping[str, str] | None]]:
        """Return the subjects and the headers of rows that are encoded one by one."""
        rows = zip(*(column.cast(pa.string()).to_pylist() for column in identifier.values()), strict=True)
        messages = [
            codec.addressed(self._event, self._event_type, dict(zip(identifier, row, strict=True)), body)
            for row, body in zip(rows, data, strict=True)
        ]
        return [message.subject for message in messages], [message.headers for message in messages]

    def _only(self, field: str) -> EventType:
        """Return the event type with this field alone, to check a value of the field."""
        keys = (field,) if field in self._topic.key_order else ()
        topic = Topic(self._topic.base, keys)
        return structs.replace(self._event_type, identifier={field: self._event_type.identifier[field]}, topic=topic)

    def _identifier(self, batch: pa.RecordBatch) -> Mapping[str, pa.Array]:
        """Return the columns of the identifier's fields, as they were given."""
        names, fields = batch.schema.names, self._event_type.identifier
        if "identifier" in names:
            column = batch.column(names.index("identifier"))
            if pa.types.is_struct(column.type):
                return {field: pc.struct_field(column, field) for field in fields}
            return self._of_rows([dict(row or ()) for row in column.to_pylist()])
        if "topic" in names:
            rows = [self._of_topic(topic) for topic in batch.column(names.index("topic")).to_pylist()]
            beside = {field: batch.column(names.index(field)) for field in fields if field in names}
            return self._of_rows(rows) | {f: column for f, column in beside.items() if f not in self._topic.key_order}
        return {field: batch.column(names.index(field)) for field in fields}

    def _of_rows(self, rows: list[dict[str, str]]) -> dict[str, pa.Array]:
        known = self._event_type.identifier
        for row in rows:
            if not row.keys() <= known.keys():
                unknown = next(field for field in row if field not in known)
                raise InvalidIdentifierError(self._event, unknown, f"is unknown; there are: {', '.join(known)}")
        return {field: pa.array([row.get(field) for row in rows], pa.string()) for field in known}

    def _of_topic(self, topic: str | None) -> dict[str, str]:
        try:
            base, *values = topics.decode_subject(topic or "")
        except UndecodableError as error:
            raise InvalidNotificationError(f"{self._event}: {error}") from error
        if base != self._topic.base or len(values) != len(self._topic.key_order):
            wanted = ".".join([self._topic.base, *(f"<{field}>" for field in self._topic.key_order)])
            raise InvalidNotificationError(f"{self._event}: topic {topic!r} is not {wanted}")
        return dict(zip(self._topic.key_order, values, strict=True))

    def _spelled(self, field: str, values: pa.Array) -> pa.DictionaryArray:
        """Return the values of a field, canonical. Raises `InvalidIdentifierError`."""
        if values.null_count:
            raise InvalidIdentifierError(self._event, field, "is null in a row; a notification has every field")
        encoded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
        # Of a float nothing is remembered: -0.0 equals 0.0, and is another value of a subject.
        spelled = self._canonical if pa.types.is_floating(values.type) else self._known
        canonical = [spelled(field, value) for value in encoded.dictionary.to_pylist()]
        return pa.DictionaryArray.from_arrays(encoded.indices, pa.array(canonical, pa.string()))

    def _canonical(self, field: str, value: Any) -> str:
        text = value.isoformat() if hasattr(value, "isoformat") else value
        return schema.canonical_identifier(self._event, self._alone[field], {field: text})[field]

    def _subjects(self, identifier: Mapping[str, pa.DictionaryArray]) -> pa.Array | None:
        """Return the subjects of the rows, None where one may be too long."""
        columns = []
        for field in self._topic.key_order:
            column = identifier[field]
            tokens = [topics.encode_token(value) for value in column.dictionary.to_pylist()]
            columns.append(pa.array(tokens, pa.string()).take(column.indices))
        subjects = pc.binary_join_element_wise(topics.encode_token(self._topic.base), *columns, ".")
        longest = pc.max(pc.binary_length(subjects)).as_py() or 0
        return subjects if longest <= SURELY_SHORT else None

    def _bodies(self, batch: pa.RecordBatch) -> list[bytes]:
        names = batch.schema.names
        if "payload" not in names:
            return [NO_PAYLOAD] * len(batch)
        column = batch.column(names.index("payload"))
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            try:
                return payloads.encode_texts(self._event, column.fill_null("null").to_pylist())
            except InvalidPayloadError as error:
                raise InvalidPayloadError(
                    f"{self._event}: the payload of a row is not JSON: {error.__cause__}; to_json makes JSON of columns"
                ) from error
        rows = column.to_pylist()
        if pa.types.is_map(column.type):
            rows = [None if row is None else dict(row) for row in rows]
        return [payloads.encode(self._event, row) for row in rows]


class MessageIds(Protocol):
    """The message ids of rows, of which a stream stores each once within its duplicate window.

    A stream discards a message whose id it knows and says nothing against it, so an id must never be that of another
    row. `writers` makes one of the two for a task, and `Rows` asks it for the ids of each chunk of messages.
    """

    def of(self, batch: pa.RecordBatch, messages: OutgoingChunk) -> list[str]:
        """Return the ids of the messages that were made of the rows of a batch. Raises `InvalidNotificationError`."""


class ColumnIds:
    """Message ids that are the values of a column; the author of the query answers for their being different."""

    def __init__(self, column: str) -> None:
        self._column = column

    def of(self, batch: pa.RecordBatch, messages: OutgoingChunk) -> list[str]:
        values = batch.column(batch.schema.names.index(self._column)).to_pylist()
        if None in values or "" in values:
            raise InvalidNotificationError(f"msgIdColumn {self._column!r} is null or empty in a row")
        return [str(value) for value in values]


class ContentIds:
    """Ids that no other row can have: digests of the query, the batch, the partition and the whole message.

    Messages of a partition that are alike are numbered, so that each has an id of its own. An attempt that has other
    rows than the one before it therefore uses an id of that one only for a message that is the same: it may store a
    row twice, and never goes without one.
    """

    def __init__(self, run: str, *, partition: int) -> None:
        self._key = blake2b(f"{run}/{partition}".encode(), digest_size=DIGEST_BYTES).digest()
        self._seen: set[str] = set()
        self._repeats: dict[str, int] = {}
        self._rows = 0

    def of(self, batch: pa.RecordBatch, messages: OutgoingChunk) -> list[str]:
        key, size = self._key, DIGEST_BYTES
        data: Sequence[bytes] = messages.data
        if any(messages.headers):
            spelled = [repr(sorted(head.items()) if head else None).encode() for head in messages.headers]
            data = [b"%b\n%b" % row for row in zip(spelled, data, strict=True)]
        digests = [
            blake2b(b"%b%b\n%b" % (key, subject.encode(), body), digest_size=size).hexdigest()
            for subject, body in zip(messages.subjects, data, strict=True)
        ]
        first, self._rows = self._rows, self._rows + len(digests)
        new = set(digests)
        if len(new) == len(digests) and self._rows <= MAX_REMEMBERED and self._seen.isdisjoint(new):
            self._seen |= new
            return digests
        return [self._numbered(digest, row) for row, digest in enumerate(digests, first)]

    def _numbered(self, digest: str, row: int) -> str:
        if digest in self._seen:
            self._repeats[digest] = self._repeats.get(digest, 0) + 1
            return f"{digest}.{self._repeats[digest]}"
        if len(self._seen) < MAX_REMEMBERED:
            self._seen.add(digest)
            return digest
        return f"{digest}@{row}"
