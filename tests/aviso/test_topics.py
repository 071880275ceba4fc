"""Topics as NATS subjects: the shared vectors, the escapes, and the filters that a server applies."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aviso_workers.aviso import literals, schema, topics
from aviso_workers.aviso.schema import EventType, Topic, Where
from aviso_workers.errors import InvalidIdentifierError, InvalidNotificationError, UndecodableError

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "topic-vectors.json").read_text(encoding="utf-8"))


def event_type(base: str, **types: str) -> EventType:
    """An event type whose fields, in this order, make its topic."""
    return msgspec.convert(
        {
            "topic": {"base": base, "key_order": list(types)},
            "identifier": {field: {"type": rule, "required": True} for field, rule in types.items()},
        },
        EventType,
    )


WEATHER = event_type("B", number="FloatHandler", text="StringHandler")
BOX = event_type("box", a="StringHandler", b="StringHandler", c="IntHandler", d="StringHandler")


# The vectors, which hold for aviso-server as well


def coarse_filter(tokens: tuple[str, ...]) -> str:
    """The filter that aviso-server 0.7.1 gives to its consumers; ours are narrower, see `filter_subjects`."""
    kept = tokens[: max(tokens.index("*"), 1)] if "*" in tokens else tokens[:-1] or tokens
    return f"{topics.encode_subject(kept)}.>"


def analyze_watch_pattern(subject: str) -> dict[str, object]:
    tokens = topics.decode_subject(subject)
    return {"coarse_filter": coarse_filter(tokens), "match_tokens": list(tokens)}


def match(subject: str, pattern: list[str]) -> bool:
    base, *wanted = pattern
    where = Where(
        topic=Topic(base, tuple(f"field{position}" for position, _ in enumerate(wanted))),
        conditions=tuple((n, frozenset([token])) for n, token in enumerate(wanted, 1) if token != "*"),
    )
    try:
        return where.matches(topics.decode_subject(subject))
    except UndecodableError:
        return False


DEEDS: dict[str, Callable[[str], object]] = {
    "encode_token": topics.encode_token,
    "decode_token": topics.decode_token,
    "encode_subject": topics.encode_subject,
    "decode_subject": lambda subject: list(topics.decode_subject(subject)),
    "stream_name": lambda subject: topics.stream_name(topics.decode_subject(subject)[0]),
    "analyze_watch_pattern": analyze_watch_pattern,
    "canonical_float": schema.FloatHandler(required=True).canonical,
}


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector['op']} {vector.get('in', '')}")
def test_vector(vector: dict[str, Any]) -> None:
    if vector["op"] == "match":
        assert match(vector["topic"], vector["pattern"]) is vector["out"]
    elif vector.get("error"):
        with pytest.raises((UndecodableError, InvalidNotificationError)):
            DEEDS[vector["op"]](vector["in"])
    else:
        out = {key: vector[key] for key in ("coarse_filter", "match_tokens") if key in vector}
        assert DEEDS[vector["op"]](vector["in"]) == (out or vector["out"])


# Escapes


def test_decoding_is_strict_about_escapes_and_nothing_else() -> None:
    assert topics.decode_subject("a+b.%E2%82%AC.%20.%c3%bc") == ("a+b", "€", " ", "ü")
    for token in ("%", "%4", "a%zz", "%-1", "%+1", "% 1", "%C3", "%ED%A0%80", "é%FF", "%٣٣", "\ud800%41"):
        with pytest.raises(UndecodableError, match="subject token"):
            topics.decode_subject(f"mars.{token}.x")


@pytest.mark.parametrize("token", ["", "a b", "a\tb", "a\r\nb", "\x00", "\x7f", "\x85", "\ud800"])
def test_a_token_that_nats_cannot_carry_is_refused(token: str) -> None:
    with pytest.raises(InvalidNotificationError, match=r"subject token .* must not"):
        topics.encode_subject(["mars", token])


values = st.text(min_size=1).filter(lambda text: text.isprintable() and " " not in text) | st.text(
    ".*>%2EeAé/", min_size=1
)


@pytest.mark.slow
@given(st.lists(values, min_size=1))
def test_decoding_undoes_encoding(tokens: list[str]) -> None:
    subject = topics.encode_subject(tokens)
    assert topics.decode_subject(subject) == tuple(tokens)
    assert not re.search(r"[*>\s]", subject)
    assert subject.count(".") == len(tokens) - 1


@given(st.text())
def test_the_codec_alone_keeps_every_text(text: str) -> None:
    assert topics.decode_token(topics.encode_token(text)) == text


@given(st.one_of(st.text(), st.text(st.characters()), st.text("%.0aF*>é ")))
def test_every_text_is_decoded_or_refused_by_our_own_error(text: str) -> None:
    with suppress(UndecodableError):
        topics.decode_subject(text)
    with suppress(InvalidNotificationError):
        topics.encode_subject([text])


# Streams


def test_a_stream_is_named_and_bound_after_the_base() -> None:
    assert (topics.stream_name("Mars"), topics.binding("Mars")) == ("MARS", "Mars.>")


@pytest.mark.parametrize("base", ["", "a.b", "mars ", "X 0\r\n\r\nPUB $JS.API.STREAM.DELETE.VICTIM 0\r\n\r\nPUB Y"])
def test_what_is_no_base_names_no_stream(base: str) -> None:
    with pytest.raises(InvalidNotificationError, match="a topic base must match"):
        topics.stream_name(base)


# Subjects


def test_a_topic_is_the_base_and_the_values_in_key_order() -> None:
    identifier = schema.canonical_identifier("weather", WEATHER, {"text": "a.b%2Ec", "number": 1.45})
    assert topics.topic("weather", WEATHER, identifier) == "B.1%2E45.a%2Eb%252Ec"


def test_without_a_topic_it_is_the_name_and_all_values_by_field_name() -> None:
    free = EventType(identifier={field: schema.StringHandler(required=True) for field in ("z", "a")})
    assert topics.topic("free", free, {"z": "1", "a": "2"}) == "free.2.1"


def test_without_fields_there_is_no_topic() -> None:
    with pytest.raises(InvalidNotificationError, match="bare: no identifier field"):
        topics.topic("bare", EventType(identifier={}), {})


@pytest.mark.parametrize(
    ("identifier", "complaint"),
    [
        ({"number": "1"}, "weather: identifier field 'text' is missing from the subject"),
        ({"number": "1", "text": ""}, "weather: identifier field 'text' must not be empty"),
        ({"number": "1", "text": "a b"}, "weather: identifier field 'text' must not hold ' '"),
    ],
)
def test_a_topic_cannot_be_made_of_anything(identifier: dict[str, str], complaint: str) -> None:
    with pytest.raises(InvalidIdentifierError, match=complaint):
        topics.topic("weather", WEATHER, identifier)


@given(
    st.floats(allow_nan=False, allow_infinity=False),
    st.dates(),
    st.integers(0, 9999),
    st.sampled_from(["Ab", "aB", "AB", "ab"]),
)
def test_two_spellings_of_one_identifier_have_one_topic(number: float, day: date, expver: int, name: str) -> None:
    mixed = msgspec.convert(
        {
            "topic": {"base": "mixed", "key_order": ["number", "day", "expver", "name"]},
            "identifier": {
                "number": {"type": "FloatHandler", "required": True},
                "day": {"type": "DateHandler", "required": True},
                "expver": {"type": "ExpverHandler", "required": True},
                "name": {"type": "EnumHandler", "required": True, "values": ["ab"]},
            },
        },
        EventType,
    )
    written = {
        "number": f"{number:.17e}",
        "day": f"{day.year:04}-{day.timetuple().tm_yday:03}",
        "expver": expver,
        "name": name,
    }
    plain = {
        "number": literals.float_text(number),
        "day": day.isoformat(),
        "expver": f"{expver:04}",
        "name": "ab",
    }
    subjects = {
        topics.topic("mixed", mixed, schema.canonical_identifier("mixed", mixed, identifier))
        for identifier in (written, plain)
    }
    assert len(subjects) == 1, subjects


# Filters for a server


def subjects_for(of: EventType = BOX, /, **wanted: object) -> tuple[str, ...]:
    return topics.filter_subjects(schema.parse_where("event", of, wanted))


@pytest.mark.parametrize(
    ("wanted", "subjects"),
    [
        ({}, ["box.>"]),
        ({"a": "x"}, ["box.x.>"]),
        ({"b": "x"}, ["box.*.x.>"]),
        ({"d": "x"}, ["box.*.*.*.x"]),
        ({"a": "x", "d": "y"}, ["box.x.*.*.y"]),
        ({"a": "x", "b": "y", "c": 1, "d": "z"}, ["box.x.y.1.z"]),
        ({"a": "1.5*>%"}, ["box.1%2E5%2A%3E%25.>"]),
        ({"a": ["y", "x"]}, ["box.x.>", "box.y.>"]),
        ({"a": ["y", "x"], "c": {"in": [1, 2]}}, ["box.x.*.1.>", "box.x.*.2.>", "box.y.*.1.>", "box.y.*.2.>"]),
        ({"c": {"gte": 4}}, ["box.>"]),
        ({"a": "x", "c": {"between": [1, 2]}}, ["box.x.>"]),
        ({"c": {"eq": 4}}, ["box.*.*.4.>"]),
        ({"b": list("abcdefgh")}, [f"box.*.{dead_letter}.>" for dead_letter in "abcdefgh"]),
        ({"b": list("abcdefghi")}, ["box.>"]),
        ({"a": list("abcde"), "b": ["x", "y"], "d": "z"}, ["box.*.x.*.z", "box.*.y.*.z"]),
    ],
)
def test_a_filter_is_as_narrow_as_nats_allows(wanted: dict[str, Any], subjects: list[str]) -> None:
    assert subjects_for(**wanted) == tuple(subjects)


def test_a_filter_of_an_event_type_without_fields_or_topic_is_still_within_its_stream() -> None:
    assert subjects_for(EventType(identifier={})) == ("event.>",)
    assert subjects_for(EventType(identifier={"z": schema.StringHandler(required=True)}), z="1") == ("event.1",)


def test_both_spellings_of_zero_are_asked_for() -> None:
    assert subjects_for(WEATHER, number={"eq": 0}) == ("B.-0.>", "B.0.>")


def test_a_place_is_no_part_of_a_server_filter() -> None:
    area = event_type("area", date="DateHandler")
    area = msgspec.structs.replace(area, identifier=area.identifier | {"polygon": schema.PolygonHandler(required=True)})
    assert subjects_for(area, polygon="(0,0,0,1,1,1,0,0)") == ("area.>",)


def server_takes(pattern: str, subject: str) -> bool:
    """Whether a NATS server with the filter `pattern` delivers `subject`."""
    wanted, tokens = pattern.split("."), subject.split(".")
    if wanted[-1] == ">" and len(tokens) >= len(wanted):
        wanted.pop()
        tokens = tokens[: len(wanted)]
    return len(wanted) == len(tokens) and all(w in ("*", t) for w, t in zip(wanted, tokens, strict=True))


dead_letters = st.sampled_from(["a", "b", "c", "d.e", "*f", "9"])
wanted_letters = st.one_of(dead_letters, st.lists(dead_letters, min_size=1, max_size=6))
wheres = st.fixed_dictionaries(
    {},
    optional={
        "a": wanted_letters,
        "b": wanted_letters,
        "c": st.one_of(
            st.integers(0, 5),
            st.lists(st.integers(0, 5), min_size=1),
            st.builds(lambda bound: {"gte": bound}, st.integers(0, 5)),
        ),
        "d": wanted_letters,
    },
)
identifiers = st.fixed_dictionaries(
    {"a": dead_letters, "b": dead_letters, "c": st.integers(0, 5).map(str), "d": dead_letters}
)


@given(wheres, st.lists(identifiers, min_size=1, max_size=20))
def test_a_server_delivers_all_that_is_wanted_and_nothing_twice(
    wanted: dict[str, Any], published: list[dict[str, str]]
) -> None:
    where = schema.parse_where("box", BOX, wanted)
    filters = topics.filter_subjects(where)
    assert 1 <= len(filters) <= 8
    assert all(re.fullmatch(r"box(\.[^.]+)+", subject) for subject in filters)
    for identifier in published:
        subject = topics.topic("box", BOX, identifier)
        delivered = sum(server_takes(pattern, subject) for pattern in filters)
        assert delivered <= 1, "filters that overlap are refused by JetStream"
        if where.matches(topics.decode_subject(subject)):
            assert delivered == 1


@given(wheres)
def test_filter_subjects_never_overlap(wanted: dict[str, Any]) -> None:
    for one, other in combinations(subjects_for(**wanted), 2):
        pairs = zip(one.split("."), other.split("."), strict=True)
        assert any(a != b and not {a, b} & {"*", ">"} for a, b in pairs), (one, other)
