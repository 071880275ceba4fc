"""The wire, byte for byte: bodies and headers as an aviso-server writes them, and what readers make of any bytes."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from aviso_workers.aviso import codec, payloads
from aviso_workers.aviso.codec import Message, NotificationReader
from aviso_workers.aviso.schema import (
    DateHandler,
    EnumHandler,
    EventType,
    FloatHandler,
    IntHandler,
    PayloadRule,
    PointCloudHandler,
    PolygonHandler,
    Rule,
    StringHandler,
    TimeHandler,
    Topic,
    parse_where,
)
from aviso_workers.errors import InvalidPayloadError, UndecodableError

SQUARE = "(52.5,13.4,52.6,13.4,52.6,13.5,52.5,13.5,52.5,13.4)"

MARS = EventType(
    topic=Topic(base="mars", key_order=("class", "step")),
    identifier={"class": StringHandler(required=True), "step": StringHandler(required=True)},
)
AREA = EventType(
    topic=Topic(base="area", key_order=("date",)),
    identifier={"date": StringHandler(required=True), "polygon": PolygonHandler(required=False)},
)
STATIONS = EventType(
    topic=Topic(base="stations", key_order=("date",)),
    identifier={"date": StringHandler(required=True), "point_cloud": PointCloudHandler(required=False)},
)


class Field(Struct):
    location: str
    sizes: list[int] = []
    cycle: int = 0


def body(payload: Any) -> bytes:
    return codec.encode("mars", MARS, {"class": "od", "step": "6"}, payload).data


def read(data: bytes, payload_type: Any = Any, subject: str = "mars.od.6", **message: Any) -> Any:
    reader = NotificationReader("mars", MARS, payload_type=payload_type)
    return reader.notification(Message(subject=subject, data=data, **message))


class TestTheBody:
    @pytest.mark.parametrize(
        ("payload", "expected"),
        [
            (None, b"null"),
            (True, b"true"),
            (12, b"12"),
            (2**64, b"18446744073709551616"),
            (1.0, b"1.0"),
            (-0.0, b"-0.0"),
            (0.1, b"0.1"),
            (1e15, b"1000000000000000.0"),
            (1e16, b"1e16"),
            (1.5e-7, b"1.5e-7"),
            ("", b'""'),
            ("é\u2028😀", '"é\u2028😀"'.encode()),
            ('a"\\/\n\x01\x7f', b'"a\\"\\\\/\\n\\u0001\x7f"'),
            ([1, [2, {}], ()], b"[1,[2,{}],[]]"),
            ({"b": 1, "a": {"z": None, "y": [1.5]}}, b'{"a":{"y":[1.5],"z":null},"b":1}'),
            ({"é": 1, "z": 2, "Z": 3, "😀": 4, "\uffff": 5}, '{"Z":3,"z":2,"é":1,"\uffff":5,"😀":4}'.encode()),
            (Field(sizes=[1], location="here"), b'{"cycle":0,"location":"here","sizes":[1]}'),
        ],
    )
    def test_is_the_payload_as_compact_json_with_sorted_keys(self, payload: Any, expected: bytes) -> None:
        assert body(payload) == expected

    @pytest.mark.parametrize("payload", [float("nan"), float("inf"), [float("-inf")], {"a": {"b": (1, float("nan"))}}])
    def test_cannot_be_what_json_cannot_carry(self, payload: Any) -> None:
        with pytest.raises(InvalidPayloadError, match="mars: the payload holds NaN or an infinity"):
            body(payload)

    @pytest.mark.parametrize("payload", [Field, {"fields": [Field]}])
    def test_holds_values_and_no_classes(self, payload: Any) -> None:
        complaint = r"mars: the payload is not JSON: it holds the class Field: give a value of it, such as Field\(...\)"
        with pytest.raises(InvalidPayloadError, match=complaint):
            body(payload)

    @pytest.mark.parametrize("payload", [object(), {1: 2}, {"a": 1j}, "\ud800", [{None: 1}]])
    def test_cannot_be_what_is_no_json(self, payload: Any) -> None:
        with pytest.raises(InvalidPayloadError, match="mars: the payload is not JSON: "):
            body(payload)

    @pytest.mark.parametrize(
        "text", ['{"b": 1, "a": [1.50, null]}', " 12 ", "null", '"\\u00e9"', "18446744073709551616"]
    )
    def test_is_the_same_where_it_was_json_before(self, text: str) -> None:
        assert payloads.encode_texts("mars", [text]) == [body(msgspec.json.decode(text))]

    @pytest.mark.parametrize("text", ["", "{", "NaN", "1e999", "[" * 100_000])
    def test_cannot_be_made_of_text_that_is_no_json(self, text: str) -> None:
        with pytest.raises(InvalidPayloadError, match="mars: a payload is not JSON: "):
            payloads.encode_texts("mars", ["1", text])

    def test_cannot_hold_itself(self) -> None:
        payload: list[Any] = []
        payload.append(payload)
        with pytest.raises(InvalidPayloadError, match="mars: the payload is not JSON: "):
            body(payload)

    def test_must_be_there_where_it_is_required(self) -> None:
        strict = EventType(topic=MARS.topic, identifier=MARS.identifier, payload=PayloadRule(required=True))
        with pytest.raises(InvalidPayloadError, match="mars: a payload is required"):
            codec.encode("mars", strict, {"class": "od", "step": "6"}, None)
        assert codec.encode("mars", strict, {"class": "od", "step": "6"}, {}).data == b"{}"

    @pytest.mark.slow
    @given(
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers(-(2**63), 2**63)
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=20,
        )
    )
    def test_says_what_pythons_json_says_and_comes_back_the_same(self, payload: Any) -> None:
        data = body(payload)
        assert json.loads(data) == payload
        assert read(data).payload == payload
        assert body(read(data).payload) == data


class TestTheHeaders:
    def test_are_none_where_the_event_type_says_no_place(self) -> None:
        assert codec.encode("mars", MARS, {"class": "od", "step": "6"}, {}).headers is None

    def test_carry_a_polygon_as_it_was_written_and_the_box_around_it(self) -> None:
        message = codec.encode("area", AREA, {"date": "20261120", "polygon": SQUARE}, {})
        assert message.subject == "area.20261120"
        assert message.headers == {"spatial_bbox": "52.5,13.4,52.6,13.5", "spatial_geometry": SQUARE}

    def test_carry_a_point_cloud_and_the_box_around_it(self) -> None:
        message = codec.encode("stations", STATIONS, {"date": "20261120", "point_cloud": "[[1.0,2.5],[-3.0,4.0]]"}, {})
        assert message.headers == {
            "spatial_bbox": "-3,2.5,1,4",
            "spatial_point_cloud": "[[1.0,2.5],[-3.0,4.0]]",
        }


class TestReading:
    @pytest.mark.parametrize(
        ("data", "payload"),
        [
            (b"", None),
            (b"null", None),
            (b' {"b": 1, "a": 1.0}\n', {"b": 1, "a": 1.0}),
            (b'{"a":1,"a":2}', {"a": 2}),
            (b"location=here", "location=here"),
            (b"[1,2", "[1,2"),
            (b"NaN", "NaN"),
            (b"1 2", "1 2"),
            (b"gr\xc3\xbc\xc3\x9fe", "grüße"),
            (b"caf\xe9", b"caf\xe9"),
            (b'"caf\xe9"', "caf\ufffd"),
            (b'{"a":"\xff"}', {"a": "\ufffd"}),
            (b"[" * 5000, "[" * 5000),
        ],
    )
    def test_any_body_is_a_payload(self, data: bytes, payload: Any) -> None:
        assert read(data).payload == payload

    @given(st.binary())
    def test_no_body_at_all_is_undecodable_without_a_type(self, data: bytes) -> None:
        read(data)

    def test_a_payload_is_what_the_agent_asked_for(self) -> None:
        assert read(b'{"location":"here","more":1}', Field).payload == Field(location="here")
        assert read(b"plain text", str).payload == "plain text"
        assert read(b"", Field | None).payload is None

    @pytest.mark.parametrize(
        ("data", "complaint"),
        [
            (b"null", "the payload does not fit: Expected `object`, got `null`"),
            (b"", "the payload does not fit: Expected `object`, got `null`"),
            (b"plain text", "the payload does not fit: Expected `object`, got `str`"),
            (b"{}", "the payload does not fit: Object missing required field `location`"),
            (b'{"location":1}', r"Expected `str`, got `int` - at `\$.location`"),
            (b'{"location":"","sizes":[1,"2"]}', r"Expected `int`, got `str` - at `\$.sizes\[1\]`"),
            (b'{"location":"\xff","sizes":1}', r"Expected `array`, got `int` - at `\$.sizes`"),
        ],
    )
    def test_a_payload_that_does_not_fit_says_where(self, data: bytes, complaint: str) -> None:
        with pytest.raises(UndecodableError, match=complaint):
            read(data, Field)

    def test_an_identifier_is_read_from_the_subject(self) -> None:
        assert read(b"1", subject="mars.a%2Eb.%2e").identifier == {"class": "a.b", "step": "."}

    def test_a_field_that_was_left_out_is_not_there(self) -> None:
        assert read(b"1", subject="mars.%2A.6").identifier == {"step": "6"}
        assert read(b"1", subject="mars..6").identifier == {"step": "6"}

    @pytest.mark.parametrize(
        ("subject", "complaint"),
        [
            ("mars.od", "'mars.od' has 1 identifier values, mars has 2"),
            ("mars.od.6.7", "'mars.od.6.7' has 3 identifier values, mars has 2"),
            ("mars.od.%ZZ", "'%ZZ' has a % without two hex digits"),
            ("mars.od.%C3", "is not UTF-8"),
        ],
    )
    def test_a_subject_that_is_none_of_ours_says_why(self, subject: str, complaint: str) -> None:
        with pytest.raises(UndecodableError, match=complaint):
            read(b"1", subject=subject)

    @pytest.mark.parametrize(
        ("rule", "value"),
        [
            (IntHandler(required=True), "%2E%2E/etc"),
            (IntHandler(required=True, range=(0, 10)), "11"),
            (IntHandler(required=True), "9" * 3000),
            (EnumHandler(required=True, values=("g", "a")), "x"),
            (DateHandler(required=True), "20261350"),
            (TimeHandler(required=True), "2500"),
            (FloatHandler(required=True), "nan"),
            (StringHandler(required=True, max_length=2), "odd"),
        ],
    )
    def test_a_value_that_its_rule_does_not_allow_is_undecodable_for_who_wants_it(self, rule: Rule, value: str) -> None:
        kind = EventType(topic=Topic(base="mars", key_order=("step",)), identifier={"step": rule})
        message = Message(subject=f"mars.{value}", data=b"1")
        with pytest.raises(UndecodableError, match="identifier field 'step' must be"):
            NotificationReader("mars", kind).notification(message)

        if isinstance(rule, IntHandler):
            reader = NotificationReader("mars", kind, where=parse_where("mars", kind, {"step": 6}))
            assert reader.notification(message) is None, "it was not asked for"

    def test_a_value_that_its_rule_allows_stays_as_it_was_written(self) -> None:
        kind = EventType(topic=Topic(base="mars", key_order=("step",)), identifier={"step": IntHandler(required=True)})
        reader = NotificationReader("mars", kind)
        for written in ("6", "06", "*", ""):
            found = reader.notification(Message(subject=f"mars.{written}", data=b"1"))
            assert found is not None
            assert found.identifier == ({"step": written} if written.isdigit() else {})

    def test_a_subject_of_another_base_is_undecodable(self) -> None:
        with pytest.raises(UndecodableError, match="is not a subject of mars"):
            read(b"1", subject="diss.od.6")

    @pytest.mark.parametrize("geometry", ["../etc", "(1,2)", "1," * 40_000])
    def test_a_polygon_in_the_headers_that_is_none_is_undecodable(self, geometry: str) -> None:
        message = Message(subject="area.20261120", data=b"1", headers={"spatial_geometry": geometry})
        with pytest.raises(UndecodableError, match="identifier field 'polygon' must be a polygon"):
            NotificationReader("area", AREA).notification(message)

    def test_sequence_time_and_headers_are_the_messages(self) -> None:
        notification = read(b"1", sequence=42, timestamp_ns=1_740_509_903_123_456_789, headers={"a": "b"})
        assert notification.id == "mars@42"
        assert notification.time == datetime(2025, 2, 25, 18, 58, 23, 123456, tzinfo=UTC)
        assert (notification.topic, notification.headers) == ("mars.od.6", {"a": "b"})

    @given(st.integers(0, 2**62))
    def test_the_time_is_never_later_than_the_stores(self, timestamp_ns: int) -> None:
        time = codec.store_time(Message(subject="", data=b"", timestamp_ns=timestamp_ns))
        behind = timestamp_ns - (time - datetime(1970, 1, 1, tzinfo=UTC)) // (datetime.resolution) * 1000
        assert 0 <= behind < 1000

    def test_a_filter_leaves_out_what_it_does_not_want(self) -> None:
        reader = NotificationReader("mars", MARS, where=parse_where("mars", MARS, {"step": ["6", "12"]}))
        found = [reader.notification(Message(subject=f"mars.od.{step}", data=b"{")) for step in ("0", "6", "12")]
        assert [notification and notification.identifier["step"] for notification in found] == [None, "6", "12"]

    def test_a_place_is_read_from_the_headers(self) -> None:
        message = codec.encode("area", AREA, {"date": "20261120", "polygon": SQUARE}, {})
        around = NotificationReader("area", AREA, where=parse_where("area", AREA, {"point": "52.55,13.45"}))
        elsewhere = NotificationReader("area", AREA, where=parse_where("area", AREA, {"point": "1,1"}))
        found = around.notification(message)
        assert found is not None
        assert found.identifier == {"date": "20261120", "polygon": SQUARE}
        assert elsewhere.notification(message) is None

    def test_a_place_may_stand_in_the_body_instead(self) -> None:
        around = NotificationReader("area", AREA, where=parse_where("area", AREA, {"point": "52.55,13.45"}))
        data = msgspec.json.encode({"spatial_geometry": SQUARE})
        assert around.notification(Message(subject="area.20261120", data=data)) is not None
        assert around.notification(Message(subject="area.20261120", data=b"not JSON")) is None
