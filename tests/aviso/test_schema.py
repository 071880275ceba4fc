"""Event types: how they are read, how values are spelled, what filters mean, and which schemas cannot work."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from datetime import date
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aviso_workers.aviso import literals, schema, spatial
from aviso_workers.aviso.literals import Duration, Size
from aviso_workers.aviso.schema import EventType, StoragePolicy, Topic
from aviso_workers.aviso.spatial import Footprint
from aviso_workers.errors import InvalidIdentifierError

SQUARE = "(0,0,0,10,10,10,10,0,0,0)"


def rule(type: str, **options: object) -> schema.Rule:
    """A rule as it stands in a configuration file."""
    found: schema.Rule = msgspec.convert({"type": type, "required": True, **options}, schema.Rule)
    return found


def event_type(**keys: object) -> EventType:
    """An event type as it stands in a configuration file."""
    return msgspec.convert(keys, EventType, dec_hook=literals.decode_hook)


def fields(**types: object) -> dict[str, object]:
    """Identifier rules: `class_="StringHandler"`, or a dict where there are options."""
    return {
        name.rstrip("_"): {"required": True, **(given if isinstance(given, dict) else {"type": given})}
        for name, given in types.items()
    }


MARS = event_type(
    topic={"base": "mars", "key_order": ["class", "expver", "domain", "date", "time", "step", "level"]},
    identifier=fields(
        class_={"type": "StringHandler", "max_length": 2},
        expver={"type": "ExpverHandler", "default": "0001"},
        domain={"type": "EnumHandler", "values": ["a", "G", "z"]},
        date={"type": "DateHandler", "canonical_format": "%Y%m%d"},
        time="TimeHandler",
        step={"type": "IntHandler", "range": [0, 1000]},
        level={"type": "FloatHandler", "range": [-100.0, 1100.5]},
        note={"type": "StringHandler", "required": False},
    ),
)
FIELD = {
    "class": "od",
    "expver": 1,
    "domain": "g",
    "date": "2025-12-25",
    "time": "12",
    "step": 6,
    "level": 500.0,
    "note": "anything at all",
}
TOKENS = ("mars", "od", "0001", "g", "20251225", "1200", "6", "500")

AREAS = event_type(
    topic={"base": "area", "key_order": ["date"]},
    identifier=fields(date="DateHandler", polygon="PolygonHandler"),
)
CLOUDS = event_type(
    topic={"base": "cloud", "key_order": ["date"]},
    identifier=fields(date="DateHandler", point_cloud={"type": "PointCloudHandler", "max_points": 3}),
)
TOPICLESS = event_type(identifier=fields(z="StringHandler", b="IntHandler"))


# Reading


def test_an_event_type_of_an_aviso_server_loads() -> None:
    loaded = event_type(
        description="Fields of the operational run",
        payload={"required": True},
        topic={"base": "mars", "key_order": ["step"], "separator": "."},
        endpoint={"base": "mars", "key_order": ["step"]},
        identifier={"step": {"type": "IntHandler", "range": [0, 9], "required": False, "description": "hours"}},
        auth={"required": True, "read_roles": {"ecmwf": ["*"]}},
        storage_policy={
            "retention_time": "7d",
            "max_messages": 500_000,
            "max_size": "2Gi",
            "allow_duplicates": False,
            "compression": True,
            "something_newer": 1,
        },
        max_historical_notifications=20_000,
    )
    assert loaded == EventType(
        identifier={"step": schema.IntHandler(required=False, range=(0, 9), description="hours")},
        topic=Topic("mars", ("step",)),
        payload=schema.PayloadRule(required=True),
        storage_policy=StoragePolicy(
            retention_time=Duration(604_800),
            max_messages=500_000,
            max_size=Size(2**31),
            allow_duplicates=False,
            compression=True,
        ),
    )


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({}, "required field `identifier`"),
        ({"identifier": {"a": {"type": "IntHandler"}}}, "required field `required`"),
        ({"identifier": fields(a="UuidHandler")}, "Invalid value 'UuidHandler'"),
        ({"identifier": fields(a={"type": "IntHandler", "max": 3})}, "unknown field `max`"),
        ({"identifier": fields(a={"type": "TimeHandler", "range": [0, 1]})}, "unknown field `range`"),
        ({"identifier": fields(a={"type": "StringHandler", "max_length": -1})}, "max_length"),
        ({"identifier": fields(a="EnumHandler")}, "required field `values`"),
        ({"identifier": fields(a={"type": "IntHandler", "range": [1]})}, "range"),
        ({"identifier": fields(a={"type": "PointCloudHandler", "max_points": 10_001})}, "max_points"),
        ({"identifier": {}, "payload": {}}, "required field `required`"),
        ({"identifier": {}, "payload": {"required": True, "type": ["String"]}}, "unknown field `type`"),
        ({"identifier": {}, "topic": {"base": "mars"}}, "required field `key_order`"),
        ({"identifier": {}, "storage_policy": {"retention_time": "7"}}, "must include a unit suffix"),
        ({"identifier": {}, "storage_policy": {"max_size": "0Gi"}}, "must be greater than zero"),
    ],
)
def test_a_schema_that_cannot_be_read_says_where(keys: dict[str, Any], complaint: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=complaint):
        event_type(**keys)


# Spelling


@pytest.mark.parametrize(
    ("options", "spellings", "canonical"),
    [
        ({"type": "StringHandler"}, ["Ab c", "Ab c"], "Ab c"),
        ({"type": "StringHandler", "max_length": 2}, ["é"], "é"),
        (
            {"type": "DateHandler", "canonical_format": "%Y%m%d"},
            ["2025-12-25", "20251225", "2025-359"],
            "20251225",
        ),
        ({"type": "DateHandler", "canonical_format": "%Y-%m-%d"}, ["20251225", "2025-359"], "2025-12-25"),
        ({"type": "DateHandler"}, ["2024-366", "2024-12-31"], "20241231"),
        ({"type": "DateHandler"}, ["0099-001"], "00990101"),
        ({"type": "TimeHandler"}, ["9", "09", "9:00", "09:00", "0900"], "0900"),
        ({"type": "TimeHandler"}, ["9:15", "09:15", "0915"], "0915"),
        ({"type": "TimeHandler"}, ["23:59", "2359"], "2359"),
        ({"type": "EnumHandler", "values": ["North", "SOUTH"]}, ["North", "north", "NORTH"], "north"),
        ({"type": "ExpverHandler"}, ["1", "01", "0001", "00001", "+1"], "0001"),
        ({"type": "ExpverHandler"}, ["42"], "0042"),
        ({"type": "ExpverHandler"}, ["12345"], "12345"),
        ({"type": "ExpverHandler"}, ["PROD", "prod", "Prod"], "prod"),
        ({"type": "ExpverHandler"}, ["4294967295"], "4294967295"),
        ({"type": "ExpverHandler"}, ["04294967296"], "04294967296"),
        ({"type": "ExpverHandler", "default": "7"}, ["", "7"], "0007"),
        ({"type": "IntHandler"}, ["42", "0042", "+42"], "42"),
        ({"type": "IntHandler"}, ["0", "-0", "+000"], "0"),
        ({"type": "IntHandler"}, ["-9223372036854775808"], "-9223372036854775808"),
        ({"type": "IntHandler", "range": [1, 7]}, ["1"], "1"),
        ({"type": "FloatHandler"}, ["12.50", "12.5", "+12.5", "1.25e1", "0012.5"], "12.5"),
        ({"type": "FloatHandler"}, ["1.0", "1", "1.", "1e0"], "1"),
        ({"type": "FloatHandler"}, [".5", "0.5"], "0.5"),
        ({"type": "FloatHandler"}, ["-0.0", "-0"], "-0"),
        ({"type": "FloatHandler"}, ["1e21"], "1000000000000000000000"),
        ({"type": "FloatHandler"}, ["1e-7"], "0.0000001"),
        ({"type": "FloatHandler", "range": [0, 1]}, ["1.0"], "1"),
        ({"type": "PolygonHandler"}, [SQUARE], SQUARE),
        ({"type": "PolygonHandler"}, ["[[0,0],[0,10],[10,10],[10,0],[0,0]]"], SQUARE),
        ({"type": "PolygonHandler"}, ["( 0,0,\n1,1, 2,0 ,0,0)"], "( 0,0,1,1, 2,0 ,0,0)"),
        ({"type": "PointCloudHandler"}, ["[[1,2], [3.5,4]]", "[[1.0,2.0],[3.5,4.0]]"], "[[1.0,2.0],[3.5,4.0]]"),
    ],
)
def test_all_spellings_of_a_value_become_one(options: dict[str, Any], spellings: list[str], canonical: str) -> None:
    assert {rule(**options).canonical(spelling) for spelling in spellings} == {canonical}
    assert rule(**options).canonical(canonical) == canonical


@pytest.mark.parametrize(
    ("options", "values", "complaint"),
    [
        ({"type": "StringHandler", "max_length": 2}, ["abc", "éa"], "must be at most 2 bytes long"),
        (
            {"type": "DateHandler"},
            ["2025-366", "2025-000", "2025-02-30", "20250230", "2025/12/25", "2025.12.25", "2025", ""],
            "must be a date such as",
        ),
        (
            {"type": "DateHandler"},
            ["2025-12-25T00:00:00", "2025-1-1", " 2025-12-25", "2025-1225", "0000-01-01", "9999-366", "٢٠٢٥1225"],
            "must be a date such as",
        ),
        (
            {"type": "TimeHandler"},
            ["24", "2400", "12:60", "1260", "930", "12:5", "12:00:00", "", "1:", "noon", " 9", "٩"],
            "must be a time such as",
        ),
        ({"type": "EnumHandler", "values": ["a", "b"]}, ["c", "", " a"], "must be one of a, b; not"),
        ({"type": "ExpverHandler"}, [""], "must not be empty"),
        ({"type": "IntHandler"}, ["", "1.0", "1_000", " 1", "1\n", "٣", "x", "--1"], "must be a whole number"),
        ({"type": "IntHandler"}, ["9223372036854775808", "-9223372036854775809", "9" * 9999], "of 64 bits"),
        ({"type": "IntHandler", "range": [1, 7]}, ["0", "8"], r"must be within \[1, 7\]"),
        ({"type": "FloatHandler"}, ["", "nan", "inf", "-Infinity", "1e999", "1_0", "1,5"], "must be a finite number"),
        ({"type": "FloatHandler", "range": [0.5, 1]}, ["0.4999", "1.1"], r"must be within \[0.5, 1.0\]"),
        ({"type": "PolygonHandler"}, ["", "*", "(0,0,1,1,0,0)"], "must be a polygon"),
        ({"type": "PointCloudHandler", "max_points": 1}, ["", "[]", "[[1,2],[3,4]]"], "must be a point cloud"),
    ],
)
def test_other_values_are_refused_saying_what_was_expected(
    options: dict[str, Any], values: list[str], complaint: str
) -> None:
    for value in values:
        with pytest.raises(ValueError, match=complaint):
            rule(**options).canonical(value)


RULES = [
    rule("StringHandler", max_length=5),
    rule("DateHandler"),
    rule("DateHandler", canonical_format="%Y-%m-%d"),
    rule("TimeHandler"),
    rule("EnumHandler", values=["a", "ß", "İ"]),
    rule("ExpverHandler", default="1"),
    rule("IntHandler"),
    rule("FloatHandler"),
    rule("PolygonHandler"),
    rule("PointCloudHandler"),
]
texts = st.one_of(
    st.text(),
    st.text("0123456789+-.:eE aß"),
    st.integers().map(str),
    st.floats().map(str),
    st.dates().map(str),
    st.times().map(lambda time: time.strftime("%H:%M")),
    st.text(st.characters(categories=["Cs", "Cc", "Zs", "Lu"])),
)


@given(st.sampled_from(RULES), texts)
def test_spelling_a_value_twice_changes_nothing_more(rule: schema.Rule, text: str) -> None:
    with suppress(ValueError):
        canonical = rule.canonical(text)
        assert rule.canonical(canonical) == canonical


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 5), st.booleans())
def test_every_spelling_of_an_int_is_one(number: int, zeros: int, plus: bool) -> None:
    sign = "-" if number < 0 else "+" * plus
    assert rule("IntHandler").canonical(f"{sign}{'0' * zeros}{abs(number)}") == str(number)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_spelling_of_a_float_is_one(number: float) -> None:
    spellings = {repr(number), f"{number:.17e}", f"{number:.340f}", msgspec.json.encode(number).decode()}
    canonical = {rule("FloatHandler").canonical(spelling) for spelling in spellings if float(spelling) == number}
    assert canonical == {literals.float_text(number)}


@given(st.dates())
def test_every_spelling_of_a_date_is_one(day: date) -> None:
    spellings = (day.isoformat(), day.isoformat().replace("-", ""), f"{day.year:04}-{day.timetuple().tm_yday:03}")
    assert {rule("DateHandler").canonical(spelling) for spelling in spellings} == {spellings[1]}


# Identifiers


def canonical(identifier: dict[str, Any], *, of: EventType = MARS) -> dict[str, str]:
    return schema.canonical_identifier("event", of, identifier)


def test_an_identifier_is_spelled_canonically() -> None:
    assert canonical(FIELD) == {
        "class": "od",
        "expver": "0001",
        "domain": "g",
        "date": "20251225",
        "time": "1200",
        "step": "6",
        "level": "500",
        "note": "anything at all",
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (False, "false"),
        (5, "5"),
        (1.0, "1.0"),
        (1e16, "1e+16"),
        (-1.5e300, "-1.5e+300"),
        (1e-5, "0.00001"),
        (1e-7, "1e-7"),
    ],
)
def test_scalars_become_the_text_that_an_aviso_server_has_for_them(value: bool | float | int, text: str) -> None:
    free = event_type(identifier=fields(value="StringHandler"))
    assert canonical({"value": value}, of=free) == {"value": text}


@pytest.mark.parametrize("blank", ["\u00a0", "\u1680", "\u2003", "\u2028", "\u2029", "\u202f", "\u3000"])
def test_a_value_holds_no_blank_at_which_an_aviso_server_parts_a_subject(blank: str) -> None:
    free = event_type(identifier=fields(value="StringHandler"))
    with pytest.raises(InvalidIdentifierError, match="because a NATS subject cannot carry it"):
        canonical({"value": f"a{blank}b"}, of=free)


@pytest.mark.parametrize("character", ["\u00ad", "\u200b", "\ufeff"])
def test_a_value_may_hold_what_is_not_seen_and_is_no_blank(character: str) -> None:
    free = event_type(identifier=fields(value="StringHandler"))
    assert canonical({"value": f"a{character}b"}, of=free) == {"value": f"a{character}b"}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"clas": "od"}, "'clas' is unknown; did you mean 'class'?"),
        ({"wavelength": 1}, "'wavelength' is unknown; there are: class, expver, domain, date, time, step"),
        ({"point": "1,2"}, "'point' is a filter of watches and replays"),
        ({"class": None}, "'class' must be text, a number or a boolean, not None"),
        ({"class": ["od"]}, r"'class' must be text, a number or a boolean, not \['od'\]"),
        ({"class": {"eq": "od"}}, "'class' must be text, a number or a boolean"),
        ({"class": date(2025, 1, 1)}, "'class' must be text, a number or a boolean"),
        ({"class": math.nan}, "'class' must be text, a number or a boolean, not nan"),
        ({"class": ""}, "'class' must not be ''"),
        ({"class": "*"}, r"'class' must not be '\*'"),
        ({"note": "*"}, r"'note' must not be '\*'"),
        ({"note": ""}, "'note' must not be ''"),
        ({"class": "o "}, "'class' must not hold ' ', because a NATS subject cannot carry it"),
        ({"expver": "a\r\nb"}, r"'expver' must not hold '\\r'"),
        ({"expver": "a\x00b"}, r"'expver' must not hold '\\x00'"),
        ({"expver": "a\x85b"}, r"'expver' must not hold '\\x85'"),
        ({"expver": "a\ud800"}, r"'expver' must not hold '\\ud800'"),
        ({"step": 1.0}, "'step' must be a whole number of 64 bits, not '1.0'"),
        ({"step": True}, "'step' must be a whole number of 64 bits, not 'true'"),
        ({"step": 1001}, r"'step' must be within \[0, 1000\], not 1001"),
        ({"step": 10**5000}, "'step' "),
    ],
)
def test_an_identifier_that_cannot_be_published_is_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidIdentifierError, match=f"event: identifier field {complaint}") as refusal:
        canonical(FIELD | change)
    assert refusal.value.event_type == "event"
    assert refusal.value.field == next(iter(change))


@pytest.mark.parametrize("field", FIELD)
def test_every_field_must_be_there_required_or_not(field: str) -> None:
    with pytest.raises(InvalidIdentifierError, match=f"identifier field '{field}' is missing"):
        canonical({name: value for name, value in FIELD.items() if name != field})


def test_a_value_outside_of_the_subject_may_hold_blanks() -> None:
    assert canonical(FIELD | {"note": "two\nlines"})["note"] == "two\nlines"


def test_without_a_topic_every_value_is_in_the_subject() -> None:
    assert schema.topic_of("event", TOPICLESS) == Topic("event", ("b", "z"))
    with pytest.raises(InvalidIdentifierError, match="'z' must not hold ' '"):
        canonical({"b": 1, "z": "two words"}, of=TOPICLESS)


def test_places_may_be_text_or_arrays() -> None:
    square = [[0, 0], [0, 10], [10, 10], [10, 0], [0, 0]]
    for given_square in (SQUARE, square, json.dumps(square)):
        assert canonical({"date": "20250101", "polygon": given_square}, of=AREAS)["polygon"] == SQUARE
    cloud = canonical({"date": "20250101", "point_cloud": [[1, 2]]}, of=CLOUDS)
    assert cloud == {"date": "20250101", "point_cloud": "[[1.0,2.0]]"}
    with pytest.raises(
        InvalidIdentifierError, match=r"'point_cloud' must be a point cloud .*: a point cloud has 1 to 3"
    ):
        canonical({"date": "20250101", "point_cloud": [[1, 2]] * 4}, of=CLOUDS)


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=2)),
    max_leaves=6,
)


@pytest.mark.slow
@given(
    st.sampled_from([MARS, AREAS, CLOUDS, TOPICLESS]),
    st.dictionaries(st.sampled_from([*FIELD, "polygon", "point_cloud", "point", "b", "z", "x"]), json_values),
)
def test_whatever_is_given_is_spelled_or_refused_by_our_own_error(of: EventType, values: dict[str, Any]) -> None:
    with suppress(InvalidIdentifierError):
        canonical(FIELD | values if of is MARS else values, of=of)
    with suppress(InvalidIdentifierError):
        schema.parse_where("event", of, values)


# Filters


def where(of: EventType = MARS, /, **wanted: Any) -> schema.Where:
    return schema.parse_where("event", of, {name.rstrip("_"): value for name, value in wanted.items()})


def test_an_empty_filter_lets_every_notification_of_the_event_type_through() -> None:
    everything = where()
    assert everything.matches(TOKENS)
    assert not everything.matches(("diss", *TOKENS[1:])), "another base"
    assert not everything.matches(TOKENS[:-1]), "a value too few"
    assert not everything.matches((*TOKENS, "1")), "a value too many"


@pytest.mark.parametrize(
    "wanted",
    [
        {"class_": "od"},
        {"date": "2025-359", "time": "12:00", "expver": 1},
        {"step": 6},
        {"step": "06"},
        {"class_": ["rd", "od"]},
        {"date": ["2025-12-24", "2025-12-25"]},
        {"step": (5, 6)},
        {"level": {500, 501.5}},
        {"step": {"eq": 6}},
        {"step": {"in": [1, 6]}},
        {"step": {"gt": 5}},
        {"step": {"gte": 6}},
        {"step": {"lt": 7}},
        {"step": {"lte": 6}},
        {"step": {"between": [6, 6]}},
        {"level": {"eq": 500}},
        {"level": {"in": [500.0]}},
        {"level": {"gt": 499.99}},
        {"level": {"gte": 500}},
        {"level": {"lt": 500.01}},
        {"level": {"between": [-100, 1100.5]}},
        {"domain": {"eq": "G"}},
        {"domain": {"in": ["a", "G"]}},
        {"class_": "od", "step": {"gte": 6}, "domain": ["g", "a"]},
    ],
)
def test_a_filter_lets_through_what_it_asks_for(wanted: dict[str, Any]) -> None:
    assert where(**wanted).matches(TOKENS)


@pytest.mark.parametrize(
    "wanted",
    [
        {"class_": "OD"},
        {"class_": ["rd", "ea"]},
        {"date": "2025-12-24"},
        {"step": {"eq": 5}},
        {"step": {"in": [1, 5]}},
        {"step": {"gt": 6}},
        {"step": {"gte": 7}},
        {"step": {"lt": 6}},
        {"step": {"lte": 5}},
        {"step": {"between": [7, 9]}},
        {"level": {"gt": 500}},
        {"level": {"lt": 500.0}},
        {"level": {"eq": 500.0000000001}},
        {"domain": {"in": ["a", "z"]}},
        {"class_": "od", "step": {"gte": 7}},
    ],
)
def test_a_filter_keeps_out_everything_else(wanted: dict[str, Any]) -> None:
    assert not where(**wanted).matches(TOKENS)


@pytest.mark.parametrize("token", ["", "*", "six", "inf", "nan", "99999999999999999999.0"])
def test_a_token_that_is_no_number_never_satisfies_a_comparison(token: str) -> None:
    assert not where(step={"gte": 0}).matches((*TOKENS[:6], token, "500"))
    assert not where(level={"lte": 1000}).matches((*TOKENS[:7], token))


def test_zero_is_one_number() -> None:
    for token in ("0", "-0"):
        assert where(level={"eq": 0}).matches((*TOKENS[:7], token))
        assert where(level={"between": [0, 1]}).matches((*TOKENS[:7], token))


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_int_comparisons_are_those_of_integers(operand: int, value: int) -> None:
    tokens = (*TOKENS[:6], str(value), "500")
    passing = {op for op in ("eq", "gt", "gte", "lt", "lte") if where(step={op: operand}).matches(tokens)}
    assert passing == _comparisons(value, operand)


@given(st.floats(-100, 1100.5), st.floats(-100, 1100.5), st.booleans())
def test_float_comparisons_are_those_of_floats(operand: float, value: float, equal: bool) -> None:
    value = operand if equal else value
    tokens = (*TOKENS[:7], literals.float_text(value))
    passing = {op for op in ("eq", "gt", "gte", "lt", "lte") if where(level={op: operand}).matches(tokens)}
    assert passing == _comparisons(value, operand)


def _comparisons(value: float, operand: float) -> set[str]:
    holds = {
        "eq": value == operand,
        "gt": value > operand,
        "gte": value >= operand,
        "lt": value < operand,
        "lte": value <= operand,
    }
    return {operator for operator, true in holds.items() if true}


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        ({"steps": 1}, "'steps' is unknown; did you mean 'step'?"),
        ({"polygon": SQUARE}, "'polygon' is unknown"),
        ({"point": "1,2"}, "'point' is unknown"),
        ({"note": "x"}, "'note' is not a filter, because it is not in key_order"),
        ({"class_": "*"}, r"'class' must not be '\*'"),
        ({"class_": ""}, "'class' must not be ''"),
        ({"class_": None}, "'class' must be text, a number or a boolean"),
        ({"class_": []}, "'class' must list at least one value"),
        ({"class_": ["od", ["rd"]]}, "'class' must be text, a number or a boolean"),
        ({"class_": "o "}, "'class' must not hold ' '"),
        ({"class_": {"eq": "od"}}, "'class' takes a value or a list of values; a StringHandler has no operators"),
        ({"date": {"gte": "20250101"}}, "'date' takes a value or a list of values; a DateHandler has no operators"),
        ({"step": {}}, "'step' must have exactly one operator"),
        ({"step": {"gt": 1, "lt": 3}}, "'step' must have exactly one operator"),
        ({"step": {"ge": 1}}, "'step' takes the operators eq, in, gt, gte, lt, lte, between; not 'ge'"),
        ({"step": {"gte": "4"}}, "'step' must be compared with whole numbers of 64 bits, not '4'"),
        ({"step": {"gte": 4.0}}, "'step' must be compared with whole numbers of 64 bits, not 4.0"),
        ({"step": {"gte": True}}, "'step' must be compared with whole numbers of 64 bits, not True"),
        ({"step": {"gte": 10**300}}, "'step' must be compared with whole numbers of 64 bits"),
        ({"step": {"gte": 1001}}, r"'step' must be within \[0, 1000\], not 1001"),
        ({"step": {"in": []}}, "'step' needs an array of at least one value after 'in'"),
        ({"step": {"in": 4}}, "'step' needs an array of at least one value after 'in'"),
        ({"step": {"in": [4, 1001]}}, r"'step' must be within \[0, 1000\]"),
        ({"step": {"between": [1, 2, 3]}}, r"'step' needs \[min, max\] after 'between', not 3 values"),
        ({"step": {"between": [3, 1]}}, r"'step' needs \[min, max\] after 'between', not \[3, 1\]"),
        ({"step": {"between": 3}}, "'step' needs an array"),
        ({"level": {"gte": "4"}}, "'level' must be compared with finite numbers, not '4'"),
        ({"level": {"gte": True}}, "'level' must be compared with finite numbers, not True"),
        ({"level": {"gte": math.inf}}, "'level' must be compared with finite numbers, not inf"),
        ({"level": {"gte": math.nan}}, "'level' must be compared with finite numbers, not nan"),
        ({"level": {"gte": 10**400}}, "'level' must be compared with finite numbers"),
        ({"level": {"gte": -101}}, r"'level' must be within \[-100.0, 1100.5\]"),
        ({"domain": {"gte": "a"}}, "'domain' takes the operators eq, in; not 'gte'"),
        ({"domain": {"eq": 1}}, "'domain' must be compared with text"),
        ({"domain": {"in": ["a", "x"]}}, "'domain' must be one of a, G, z; not 'x'"),
    ],
)
def test_a_filter_that_means_nothing_is_refused(wanted: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidIdentifierError, match=f"event: identifier field {complaint}"):
        where(**wanted)


def test_an_enum_value_that_no_subject_carries_cannot_be_asked_for() -> None:
    odd = event_type(identifier=fields(domain={"type": "EnumHandler", "values": ["far out"]}))
    for wanted in ("far out", {"eq": "far out"}):
        with pytest.raises(InvalidIdentifierError, match="'domain' must not hold ' '"):
            where(odd, domain=wanted)


def test_a_polygon_filter_needs_the_place_of_the_message() -> None:
    asked = where(AREAS, polygon=SQUARE, date="20250101")
    tokens, inside = ("area", "20250101"), "(1,1,1,2,2,2,1,1)"
    assert asked.matches(tokens, Footprint(bbox="1,1,2,2", geometry=inside))
    assert not asked.matches(tokens, Footprint(bbox="20,20,21,21", geometry=inside))
    assert not asked.matches(tokens)
    assert not asked.matches(("area", "20250102"), Footprint(bbox="1,1,2,2", geometry=inside))


def test_a_point_filter_finds_polygons_around_it() -> None:
    for point in ("5,5", [5, 5]):
        assert where(AREAS, point=point).place == spatial.Containing((5.0, 5.0))
    assert where(AREAS, point="5,5").matches(("area", "20250101"), Footprint(geometry=SQUARE))


def test_a_polygon_filter_finds_point_clouds() -> None:
    asked = where(CLOUDS, polygon=[[0, 0], [0, 10], [10, 10], [10, 0], [0, 0]])
    assert asked.matches(("cloud", "20250101"), Footprint(bbox="0,5,20,20", point_cloud="[[20,20],[0,5]]"))


@pytest.mark.parametrize(
    ("of", "wanted", "complaint"),
    [
        (AREAS, {"polygon": SQUARE, "point": "1,2"}, "'point' cannot be combined with 'polygon'"),
        (AREAS, {"polygon": "(1,2)"}, "'polygon' must be a polygon: a polygon needs at least 4 pairs"),
        (AREAS, {"polygon": "*"}, "'polygon' must be a polygon"),
        (AREAS, {"polygon": {"eq": SQUARE}}, "'polygon' must be a polygon"),
        (AREAS, {"point": "1"}, "'point' must be a point"),
        (AREAS, {"poligon": SQUARE}, "'poligon' is unknown; did you mean 'polygon'?"),
        (CLOUDS, {"point": "1,2"}, "'point' is unknown"),
        (CLOUDS, {"point_cloud": [[1, 2]]}, "'point_cloud' is not a filter; 'polygon' finds the point clouds"),
    ],
)
def test_a_place_filter_that_means_nothing_is_refused(of: EventType, wanted: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidIdentifierError, match=complaint):
        where(of, **wanted)


def test_filters_that_mean_the_same_are_equal() -> None:
    assert where(step={"gte": 4}, class_="od") == where(class_=["od"], step={"gte": 4})
    assert hash(where(domain="G")) == hash(where(domain={"in": ["g"]}))


# Mistakes


def found(name: str = "mars", **keys: Any) -> list[tuple[str, str]]:
    return schema.mistakes(name, event_type(**keys))


def test_good_event_types_have_no_mistakes() -> None:
    for name, good in (("mars", MARS), ("area", AREAS), ("cloud", CLOUDS), ("bare", TOPICLESS)):
        assert schema.mistakes(name, good) == []


def test_an_aviso_server_may_route_by_polygon_and_name_any_field_polygon() -> None:
    routed = {"base": "area", "key_order": ["polygon"]}
    assert found(topic=routed, identifier=fields(polygon="PolygonHandler")) == []
    assert found(topic=routed, identifier=fields(polygon="StringHandler")) == []


@pytest.mark.parametrize("base", ["", "a.b", "a%b", "a*b", "a>b", "a b", "é", "_a", "-a", "mars\n"])
def test_a_base_that_nats_or_an_aviso_server_cannot_take_is_a_mistake(base: str) -> None:
    topic = {"base": base, "key_order": ["a"]}
    ((path, message),) = found(topic=topic, identifier=fields(a="StringHandler"))
    assert path == "notification_schema.mars.topic.base"
    assert message == f"must match [A-Za-z0-9][A-Za-z0-9_-]*, not {base!r}"
    if base:
        ((path, message),) = found(base, identifier=fields(a="StringHandler"))
        assert (path, message[:13]) == (f"notification_schema.{base}", "has no topic,")


@pytest.mark.parametrize("base", ["mars", "Mars", "a1", "extreme_event", "test-polygon", "4dvar", "7", "0_a-"])
def test_other_bases_are_good(base: str) -> None:
    assert found(topic={"base": base, "key_order": ["a"]}, identifier=fields(a="StringHandler")) == []


@pytest.mark.parametrize("base", ["aviso_workers", "AVISO_workers_audit", "KV_a__state", "kv_"])
def test_a_base_of_our_own_streams_or_of_buckets_is_a_mistake(base: str) -> None:
    topic = {"base": base, "key_order": ["a"]}
    ((_, message),) = found(topic=topic, identifier=fields(a="StringHandler"))
    assert message.startswith(f"must not begin with aviso_workers or KV_, as {base!r} does")
    assert message.endswith("choose another base")


def test_a_base_is_short_enough_for_the_names_of_its_streams() -> None:
    topic = {"base": "a" * 201, "key_order": ["a"]}
    ((_, message),) = found(topic=topic, identifier=fields(a="StringHandler"))
    assert message == "must have at most 200 characters, not 201"


@pytest.mark.parametrize("name", ["", "mars\r\nPUB x", "mars\x1b[2J"])
def test_an_event_type_has_a_name_without_control_characters(name: str) -> None:
    ((path, message),) = found(name, topic=TOPIC, identifier=fields(a="StringHandler"))
    assert path == f"notification_schema.{name}"
    assert message.startswith("must have a name, without line breaks"), message


def test_the_name_of_an_event_type_may_have_dots() -> None:
    assert found("mars.od", topic=TOPIC, identifier=fields(a="StringHandler")) == []


TOPIC = {"base": "mars", "key_order": ["a"]}


@pytest.mark.parametrize(
    ("keys", "path", "message"),
    [
        ({"topic": {"base": "mars", "key_order": []}}, "topic.key_order", "must not be empty"),
        (
            {"topic": {"base": "mars", "key_order": ["a", "b"]}},
            "topic.key_order",
            "names 'b', which is not in identifier",
        ),
        ({"topic": {"base": "mars", "key_order": ["a", "a"]}}, "topic.key_order", "names 'a' twice"),
        (
            {
                "topic": {"base": "mars", "key_order": ["point_cloud"]},
                "identifier": fields(point_cloud="PointCloudHandler"),
            },
            "topic.key_order",
            "must not name 'point_cloud', which travels in a header",
        ),
        (
            {"identifier": fields(a={"type": "DateHandler", "canonical_format": "%d.%m.%Y"})},
            "identifier.a.canonical_format",
            "must be %Y%m%d or %Y-%m-%d, not '%d.%m.%Y'",
        ),
        (
            {"identifier": fields(a={"type": "IntHandler", "range": [7, 1]})},
            "identifier.a.range",
            "must be [min, max] with min <= max, not [7, 1]",
        ),
        (
            {"identifier": fields(a={"type": "FloatHandler", "range": [math.nan, 1]})},
            "identifier.a.range",
            "must be [min, max] with min <= max, not [nan, 1.0]",
        ),
        (
            {"identifier": fields(a={"type": "EnumHandler", "values": []})},
            "identifier.a.values",
            "must name at least one value",
        ),
        (
            {"identifier": fields(a="PolygonHandler")},
            "identifier.a",
            "has a PolygonHandler, so its name must be 'polygon': no other geometry is stored",
        ),
        (
            {"identifier": fields(a="PointCloudHandler")},
            "identifier.a",
            "must be named 'point_cloud' if and only if it has a PointCloudHandler",
        ),
        (
            {"identifier": fields(a="IntHandler", point_cloud="StringHandler")},
            "identifier.point_cloud",
            "must be named 'point_cloud' if and only if it has a PointCloudHandler",
        ),
        (
            {"identifier": fields(a="IntHandler", point="StringHandler")},
            "identifier.point",
            "has a name that is reserved for the filter of watches and replays",
        ),
        (
            {"identifier": fields(a="IntHandler", point_cloud="PointCloudHandler", polygon="PolygonHandler")},
            "identifier.polygon",
            "cannot stand beside point_cloud, whose filter has this name",
        ),
        (
            {"topic": None, "identifier": fields(point_cloud="PointCloudHandler")},
            "identifier.point_cloud",
            "needs a topic: without one, all fields are in the subject",
        ),
        (
            {"topic": None, "storage_policy": {}},
            "storage_policy",
            "Schema 'mars' defines storage_policy but has no topic configuration",
        ),
        ({"storage_policy": {"retention_time": "0s"}}, "storage_policy.retention_time", "must be > 0"),
        ({"storage_policy": {"max_messages": 0}}, "storage_policy.max_messages", "must be > 0"),
    ],
)
def test_a_schema_that_cannot_work_says_where_and_why(keys: dict[str, Any], path: str, message: str) -> None:
    good: dict[str, Any] = {"topic": TOPIC, "identifier": fields(a="StringHandler")}
    assert found(**good) == []
    assert found(**good | keys) == [(f"notification_schema.mars.{path}", message)]


def test_all_mistakes_are_found_at_once() -> None:
    mistakes = found(topic={"base": "a.b", "key_order": ["x", "x"]}, identifier={}, storage_policy={"max_messages": -1})
    assert [path.removeprefix("notification_schema.mars.") for path, _ in mistakes] == [
        "topic.base",
        "topic.key_order",
        "topic.key_order",
        "topic.key_order",
        "storage_policy.max_messages",
    ]


def test_a_base_belongs_to_one_event_type() -> None:
    one, other = (
        event_type(topic={"base": base, "key_order": ["a"]}, identifier=fields(a="IntHandler"))
        for base in ("diss", "Diss")
    )
    assert schema.check_bases_unique({"one": one, "mars": MARS}) == {}
    assert schema.check_bases_unique({"one": one, "other": other, "diss": TOPICLESS}) == {
        "other": "Schemas 'one' and 'other' both define topic base 'Diss'; case is ignored",
        "diss": "Schemas 'one' and 'diss' both define topic base 'diss'; case is ignored",
    }
