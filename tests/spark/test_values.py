"""Every value that an identifier may have: read, written, archived, backfilled and reported as what it is."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any, cast

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from aviso_workers import Notify
from aviso_workers.aviso import topics
from aviso_workers.aviso.codec import NotificationWriter
from aviso_workers.aviso.schema import EventType
from aviso_workers.backends import Chunk
from aviso_workers.server import NatsServer
from aviso_workers.spark import archives, backfill, completeness
from aviso_workers.spark import schema as columns
from aviso_workers.spark.backfill import Backfilled
from aviso_workers.spark.options import ReadOptions
from aviso_workers.spark.rows import ContentIds, Rows
from tests.spark.place import Place, run_to_its_end

RULES: dict[str, dict[str, Any]] = {
    "text": {"type": "StringHandler"},
    "day": {"type": "DateHandler"},
    "other_day": {"type": "DateHandler", "canonical_format": "%Y-%m-%d"},
    "time": {"type": "TimeHandler"},
    "kind": {"type": "EnumHandler", "values": ["a", "b.c", "%"]},
    "expver": {"type": "ExpverHandler", "default": "1"},
    "whole": {"type": "IntHandler"},
    "real": {"type": "FloatHandler"},
}
PLACES = {"polygon": {"type": "PolygonHandler"}, "point_cloud": {"type": "PointCloudHandler"}}

characters = st.characters(exclude_categories=["C", "Z"])
printable = st.text(characters, min_size=1, max_size=20).filter(lambda text: text != "*")
degrees = st.tuples(st.integers(-80, 80), st.integers(-170, 170))
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "text": printable,
    "day": st.dates().map(date.isoformat),
    "other_day": st.dates().map(date.isoformat),
    "time": st.times().map(lambda time: f"{time:%H:%M}"),
    "kind": st.sampled_from(RULES["kind"]["values"]),
    "expver": st.integers(0, 2**32).map(str) | printable,
    "whole": st.integers(-(2**63), 2**63 - 1) | st.integers(10**18, 2**63 - 1),
    "real": st.floats(allow_nan=False, allow_infinity=False),
    "polygon": degrees.map(lambda at: f"({at[0]},{at[1]},{at[0] + 1},{at[1]},{at[0]},{at[1] + 1},{at[0]},{at[1]})"),
    "point_cloud": st.lists(degrees, min_size=1, max_size=3).map(json.dumps),
}
EDGES: dict[str, tuple[Any, ...]] = {
    "text": ("a.b*c>%", "%2E", "*.", "ü", "null", "a,b"),
    "day": ("0001-01-01", "1582-10-04", "1582-10-15", "1900-02-28", "9999-12-31", "2024-02-29"),
    "other_day": ("9999-12-31", "0001-01-01", "1582-10-14", "1969-12-31", "1970-01-01", "2024-366"),
    "time": ("0000", "2359", "9", "09:15", "12", "0001"),
    "kind": ("a", "B.C", "%", "a", "b.c", "%"),
    "expver": ("1", "4294967296", "XYZ", "", "0000", "4294967295"),
    "whole": (2**63 - 1, -(2**63), 10**18, 1795648002144000000, 10**18 - 1, 0),
    "real": (0.0, -0.0, 5e-324, 1.7976931348623157e308, 0.1 + 0.2, -1e22),
}
"""For each field the values of six notifications."""


def event_type(name: str, place: str | None = None) -> dict[str, Any]:
    rules = RULES | ({place: PLACES[place]} if place else {})
    return {
        "topic": {"base": name, "key_order": list(RULES)},
        "identifier": {field: {**rule, "required": True} for field, rule in rules.items()},
        "storage_policy": {"allow_duplicates": True},
    }


def typed(field: str, text: str) -> str:
    """Return the Python value of a field, as text that tells 0.0 and -0.0 apart."""
    rule = RULES.get(field, PLACES.get(field, {}))["type"]
    if rule == "DateHandler":
        return repr(date.fromisoformat(text))
    return repr({"IntHandler": int, "FloatHandler": float}.get(rule, str)(text))


@pytest.mark.parametrize("place", [None, *PLACES])
@given(data=st.data())
def test_any_value_is_read_as_what_it_is_and_written_as_it_was(
    spark: SparkSession, place: str | None, data: Any
) -> None:
    known = msgspec.convert(event_type("all", place), EventType)
    fields = st.fixed_dictionaries({field: VALUES[field] for field in known.identifier})
    writer = NotificationWriter("all", known)
    sent = [writer.message(given, {}) for given in data.draw(st.lists(fields, min_size=1, max_size=5))]
    reading = ReadOptions(event="all")
    layout = columns.layout(reading, {"all": known})
    chunk = Chunk(
        subjects=[message.subject for message in sent],
        data=[message.data for message in sent],
        headers=[message.headers for message in sent],
        sequences=range(len(sent)),
        timestamps_ns=[0] * len(sent),
    )

    wanted = cast(StructType, StructType.fromDDL(columns.ddl(reading, layout)))
    batch = columns.ColumnConverter(wanted, layout, reading=reading).batch(chunk)
    frame = pa.RecordBatch.from_pydict({name: batch[name] for name in ("identifier", "payload")})
    written = Rows("all", known, most_bytes=10_000).chunk(frame, ContentIds("test", partition=0))

    assert list(written.subjects) == [message.subject for message in sent]
    assert [headers or None for headers in written.headers] == [message.headers or None for message in sent]
    for message, identifier in zip(sent, batch["identifier"].to_pylist(), strict=True):
        canonical = topics.decode_subject(message.subject)[1:]
        found = [repr(identifier[field]) for field in RULES]
        assert found == [typed(field, text) for field, text in zip(RULES, canonical, strict=True)]


class Values(Place):
    """Also with the event types `values` and `again`."""

    def __init__(self, spark: SparkSession, server: NatsServer, directory: Path) -> None:
        super().__init__(spark, server, directory)
        document = json.loads(self.config.read_text())
        document["notification_schema"] |= {name: event_type(name, "polygon") for name in ("values", "again")}
        self.config.write_text(json.dumps(document))

    def publish_edges(self) -> None:
        ring = {"polygon": "(0,0,1,0,0,1,0,0)"}
        rows = [dict(zip(EDGES, values, strict=True)) | ring for values in zip(*EDGES.values(), strict=True)]
        self._with_app(lambda app: app.notify_many([Notify("values", row, {}) for row in rows]))

    def identifiers(self, event: str) -> list[Any]:
        return [(one.identifier, one.topic.removeprefix(event)) for one in self.stored(event)]


@pytest.mark.slow
def test_the_edges_of_each_rule_come_through_an_archive_a_backfill_a_copy_and_a_report(
    spark: SparkSession, nats_server: NatsServer, tmp_path: Path
) -> None:
    place = Values(spark, nats_server, tmp_path)
    config, kept = str(place.config), str(tmp_path / "archive")
    place.publish_edges()
    sent = place.identifiers("values")
    assert len(sent) == 6

    place.write(place.read("values").select("identifier", "payload"), "again")
    assert sorted(place.identifiers("again"), key=str) == sorted(sent, key=str)
    assert place.read("values").where(f"identifier.whole = {10**18}").count() == 1

    run_to_its_end(lambda: archives.archive(place.read_stream("values", startingOffsets="earliest"), kept))
    place.do("purge_stream", "VALUES")
    restored = backfill.backfill(archives.read(spark, kept), "values", config=config)
    assert restored == Backfilled(published=6, present=0, refused=0)
    assert sorted(place.identifiers("values"), key=str) == sorted(sent, key=str)

    iso = [{**one, "day": f"{one['day'][:4]}-{one['day'][4:6]}-{one['day'][6:]}"} for one, _ in sent]
    expected = [(one["text"], "2100-01-01T00:00:00Z", *(one[field] for field in RULES)) for one in iso]
    schedule = spark.createDataFrame(expected, ["cycle", "due", *RULES])
    done = completeness.report(place.read("values"), schedule, "values", to=str(tmp_path / "report"), config=config)
    assert (done.cycles, done.complete) == (6, 6)
