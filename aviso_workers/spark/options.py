"""Options of the data source `aviso`, parsed once and refused where they contradict each other or mean nothing.

`data_source` calls `parse_read_options` and `parse_write_options`. Spark folds the case of option names, so the fields
of filters are matched without case. There is no option for a server or a secret: a query's connection is that of the
configuration, because options travel further than people think. A value is never repeated for an option that is
unknown, since it may be a secret.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Literal

import msgspec
from msgspec import Struct

from aviso_workers.aviso import positions
from aviso_workers.aviso.literals import Duration
from aviso_workers.errors import InvalidOptionError, InvalidPositionError
from aviso_workers.spark import trace_contexts

WHERE = "where."
SHARED = ("config", "event")
READING = (
    "stream",
    "startingOffsets",
    "startingTimestamp",
    "numPartitions",
    "failOnDataLoss",
    "includeHeaders",
    "payloadSchema",
    "mode",
)
BATCH = ("endingOffsets", "endingTimestamp")
STREAMING = ("maxMessagesPerTrigger", "minMessagesPerTrigger", "maxTriggerDelay")
WRITING = ("msgIdColumn", "onDuplicate", "deadLetters", trace_contexts.PARENT, trace_contexts.STATE)
QUERY_OPTIONS = ("queryId", "batchId")
"""What a batch write says of the streaming query that calls it."""
SPARKS_OWN = ("checkpointlocation", "queryname")
"""What Spark passes on to a sink though it is for itself."""
SECRETIVE = re.compile(r"pass|token|secret|cred|nkey|seed|user|jwt|auth|url|server", re.IGNORECASE)

Edge = Literal["earliest", "latest"]
Mode = Literal["PERMISSIVE", "FAILFAST"]
OnDuplicate = Literal["count", "fail"]


class ReadOptions(Struct, frozen=True, kw_only=True):
    """The options of a read."""

    config: str | None = None
    """File of the configuration, as the driver and the executors see it. Default: the one of the environment."""
    event: str | None = None
    stream: str | None = None
    where: Mapping[str, Any] = {}
    """By field in lower case."""
    start: Edge | int | None = None
    """An integer is the first sequence; None leaves it to the kind of query."""
    start_time: datetime | None = None
    end: Literal["latest"] | int = "latest"
    """An integer is the last sequence, inclusive."""
    end_time: datetime | None = None
    most_per_trigger: int | None = None
    least_per_trigger: int | None = None
    trigger_delay_seconds: int = 15 * 60
    """After so long a trigger takes what there is, though it is less than `least_per_trigger`."""
    partitions: int = 4
    fail_on_data_loss: bool = True
    include_headers: bool = False
    payload_schema: str | None = None
    mode: Mode = "PERMISSIVE"


class WriteOptions(Struct, frozen=True, kw_only=True):
    """The options of a write."""

    event: str
    config: str | None = None
    id_column: str | None = None
    on_duplicate: OnDuplicate = "count"
    """What becomes of a write whose stream has the message id of a row already, with the same content."""
    dead_letters: str | None = None
    """Directory or URL for rows that are not notifications; None: the first of them ends the write."""
    trace: Mapping[str, str] = {}
    """The headers of each row's message that say in which trace it is written."""
    query_id: str | None = None
    """Together with `batch_id`: of which batch of `foreachBatch` this is the write."""
    batch_id: int | None = None
    only_new_topics: bool = False
    """Whether a row is stored only where the stream holds no message of its topic. No option of a query says so:
    `backfill` does, which reads the stream before."""


def parse_read_options(options: Mapping[str, str], *, streaming: bool | None = None) -> ReadOptions:
    """Parse the options of a read; with `streaming` None it is not known yet which kind, and those of both are
    accepted. Raises `InvalidOptionError`.
    """
    where = {name[len(WHERE) :]: _wanted(name, value) for name, value in options.items() if name.startswith(WHERE)}
    kinds = {True: STREAMING, False: BATCH, None: (*BATCH, *STREAMING)}
    foreign = {True: dict.fromkeys(BATCH, "read"), False: dict.fromkeys(STREAMING, "readStream"), None: {}}[streaming]
    given = _named(options, known=(*SHARED, *READING, *kinds[streaming]), foreign=foreign)
    _refuse_contradictions(given, where)
    start = _offset(given, "startingOffsets", edges=("earliest", "latest"))
    end = _offset(given, "endingOffsets", edges=("latest",))
    most, least = _count(given, "maxMessagesPerTrigger"), _count(given, "minMessagesPerTrigger")
    if most is not None and least is not None and least > most:
        raise InvalidOptionError(f"minMessagesPerTrigger {least} is more than maxMessagesPerTrigger {most}")
    return ReadOptions(
        config=given.get("config"),
        event=given.get("event"),
        stream=given.get("stream"),
        where=where,
        start=start,
        start_time=_time(given, "startingTimestamp"),
        end="latest" if end is None else end,
        end_time=_time(given, "endingTimestamp"),
        most_per_trigger=most,
        least_per_trigger=least,
        trigger_delay_seconds=_duration(given, "maxTriggerDelay", otherwise=ReadOptions().trigger_delay_seconds),
        partitions=_count(given, "numPartitions") or ReadOptions().partitions,
        fail_on_data_loss=_choice(given, "failOnDataLoss", of=("true", "false")) == "true",
        include_headers=_choice(given, "includeHeaders", of=("true", "false"), otherwise="false") == "true",
        payload_schema=given.get("payloadSchema"),
        mode=_choice(given, "mode", of=("PERMISSIVE", "FAILFAST")),
    )


def parse_write_options(options: Mapping[str, str], *, streaming: bool = False) -> WriteOptions:
    """Parse the options of a write. Raises `InvalidOptionError`."""
    known = (*SHARED, *WRITING) if streaming else (*SHARED, *WRITING, *QUERY_OPTIONS)
    given = _named(options, known=known, foreign=dict.fromkeys(QUERY_OPTIONS, "write") if streaming else {})
    if "event" not in given:
        raise InvalidOptionError("writing needs the option event: the event type whose notifications the rows are")
    if ("queryId" in given) != ("batchId" in given):
        raise InvalidOptionError("options queryId and batchId say together which batch is written: give both")
    if "onDuplicate" in given and "msgIdColumn" not in given:
        raise InvalidOptionError(
            "option onDuplicate needs msgIdColumn: without it only the same row of the same write is a duplicate"
        )
    return WriteOptions(
        event=given["event"],
        config=given.get("config"),
        id_column=given.get("msgIdColumn"),
        on_duplicate=_choice(given, "onDuplicate", of=("count", "fail")),
        dead_letters=_directory(given, "deadLetters"),
        trace=_trace(given),
        query_id=given.get("queryId"),
        batch_id=_number(given, "batchId"),
    )


def _named(options: Mapping[str, str], *, known: tuple[str, ...], foreign: Mapping[str, str]) -> dict[str, str]:
    """Return the options under the names that the documentation has. Raises `InvalidOptionError` for others."""
    names = {name.lower(): name for name in known}
    found = {}
    for name, value in options.items():
        folded = name.lower()
        if folded.startswith(WHERE) or folded in SPARKS_OWN:
            continue
        if folded in names:
            if not value.strip():
                raise InvalidOptionError(f"option {names[folded]} must not be empty")
            found[names[folded]] = value
            continue
        for other, kind in foreign.items():
            if other.lower() == folded:
                raise InvalidOptionError(f"option {other} is for {kind} only")
        raise InvalidOptionError(f"unknown option {name!r}; {_cure(folded, names)}")
    return found


def _cure(name: str, known: Mapping[str, str]) -> str:
    if near := difflib.get_close_matches(name, known, n=1):
        return f"did you mean {known[near[0]]!r}?"
    if SECRETIVE.search(name):
        return "servers and credentials belong in the configuration file or the environment, never in an option"
    return f"there are: {', '.join(sorted(known.values()))}"


def _refuse_contradictions(given: Mapping[str, str], where: Mapping[str, Any]) -> None:
    if ("event" in given) == ("stream" in given):
        raise InvalidOptionError("give one of the options event (an event type) and stream (a stream's name)")
    if where and "event" not in given:
        raise InvalidOptionError("the where options need the option event, which says what their fields are")
    for one, other in (("startingOffsets", "startingTimestamp"), ("endingOffsets", "endingTimestamp")):
        if one in given and other in given:
            raise InvalidOptionError(f"give one of the options {one} and {other}")
    if "mode" in given and "payloadSchema" not in given:
        raise InvalidOptionError("option mode says what becomes of payloads that do not fit, and needs payloadSchema")
    if "maxTriggerDelay" in given and "minMessagesPerTrigger" not in given:
        raise InvalidOptionError("option maxTriggerDelay limits the wait for minMessagesPerTrigger, which is not given")


def _wanted(name: str, value: str) -> Any:
    """Return a value, or in JSON's brackets a list of values or an operator, as agents have it in `where`."""
    if value[:1] not in ("[", "{"):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError as error:
        raise InvalidOptionError(f"option {name} is not JSON: {error}") from error


def _offset(given: Mapping[str, str], name: str, *, edges: tuple[str, ...]) -> Any:
    value = given.get(name)
    if value is None or value.lower() in edges:
        return value and value.lower()
    try:
        return positions.parse_id(value, name=name)
    except InvalidPositionError as error:
        raise InvalidOptionError(f"option {name} must be {' or '.join(edges)} or a sequence, not {value!r}") from error


def _time(given: Mapping[str, str], name: str) -> datetime | None:
    try:
        return positions.parse_date(given[name], name=f"option {name}") if name in given else None
    except InvalidPositionError as error:
        raise InvalidOptionError(str(error)) from error


def _count(given: Mapping[str, str], name: str) -> int | None:
    count = _number(given, name)
    if count == 0:
        raise InvalidOptionError(f"option {name} must be a whole number above 0, not {given[name]!r}")
    return count


def _duration(given: Mapping[str, str], name: str, *, otherwise: int) -> int:
    try:
        return int(Duration.parse(given[name])) if name in given else otherwise
    except ValueError as error:
        raise InvalidOptionError(f"option {name}: {error}") from error


def _choice(given: Mapping[str, str], name: str, *, of: tuple[str, str], otherwise: str = "") -> Any:
    """Return one of two values, in whatever case it is given; the first unless `otherwise`, where it is not."""
    value = given.get(name, otherwise or of[0])
    if not (found := [each for each in of if each.lower() == value.lower()]):
        raise InvalidOptionError(f"option {name} must be {' or '.join(of)}, not {value!r}")
    return found[0]


def _number(given: Mapping[str, str], name: str) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if not value.isascii() or not value.isdigit():
        raise InvalidOptionError(f"option {name} must be a whole number, not {value!r}")
    return int(value)


def _directory(given: Mapping[str, str], name: str) -> str | None:
    value = given.get(name)
    if value is not None and "://" not in value and not value.startswith("/"):
        raise InvalidOptionError(f"option {name} must be a whole path or a URL, because executors work elsewhere")
    return value


def _trace(given: Mapping[str, str]) -> dict[str, str]:
    try:
        return trace_contexts.headers(given)
    except ValueError as error:
        raise InvalidOptionError(f"option {error}") from error


def where_of(reading: ReadOptions, fields: Iterable[str]) -> dict[str, Any]:
    """Return the filters under the event type's own spelling of their fields; an unknown field stays as it is."""
    spelled = {field.lower(): field for field in fields}
    return {spelled.get(name.lower(), name): wanted for name, wanted in reading.where.items()}
