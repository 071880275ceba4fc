"""Examples of notifications: what the rules of an event type and the type of a payload say of them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Struct

from aviso_workers.aviso import examples
from aviso_workers.aviso.schema import EventType, IdentifierRule


class Place(Struct):
    lat: float
    name: str | None = None


class Field(Struct):
    location: str
    size: Annotated[int, msgspec.Meta(ge=5)]
    kind: Literal["sfc", "pl"]
    written: datetime
    place: Place
    parent: int | None
    tags: list[str]
    more: str = ""


class Sized(Struct):
    location: str
    size: int = 0
    comment: str = ""


@pytest.mark.parametrize(
    ("rule", "condition", "expected"),
    [
        ({"type": "StringHandler"}, None, "a"),
        ({"type": "StringHandler"}, ["od", "rd"], "od"),
        ({"type": "EnumHandler", "values": ["sfc", "pl"]}, None, "sfc"),
        ({"type": "EnumHandler", "values": ["sfc", "pl"]}, {"in": ["pl"]}, "pl"),
        ({"type": "DateHandler"}, None, "20261120"),
        ({"type": "TimeHandler"}, None, "0600"),
        ({"type": "ExpverHandler"}, 1, "1"),
        ({"type": "IntHandler", "range": [3, 9]}, None, "3"),
        ({"type": "IntHandler", "range": [3, 9]}, {"gt": 5}, "6"),
        ({"type": "IntHandler"}, {"lt": 5}, "4"),
        ({"type": "IntHandler"}, {"between": [4, 8]}, "4"),
        ({"type": "FloatHandler"}, {"gte": 0.5}, "0.5"),
    ],
)
def test_a_field_has_a_value_that_its_rule_and_the_filter_take(
    rule: dict[str, Any], condition: Any, expected: str
) -> None:
    event_type = msgspec.convert({"identifier": {"x": {**rule, "required": True}}}, EventType)
    assert isinstance(event_type.identifier["x"], IdentifierRule)
    where = {} if condition is None else {"x": condition}
    assert examples.identifier(event_type, where) == {"x": expected}
    event_type.identifier["x"].canonical(expected)


def test_a_payload_has_the_fields_that_its_type_must_have() -> None:
    assert examples.payload(Field) == {
        "location": "a",
        "size": 5,
        "kind": "pl",
        "written": "2026-11-20T06:00:00Z",
        "place": {"lat": 1.0},
        "parent": None,
        "tags": [],
    }


def test_a_number_that_may_be_left_out_is_shown_because_0_may_be_refused() -> None:
    assert examples.payload(Sized) == {"location": "a", "size": 1}


@pytest.mark.parametrize(("of", "expected"), [(str, "a"), (int, 1), (dict[str, int], {}), (list[int], [])])
def test_a_payload_may_be_of_any_type_that_json_has(of: Any, expected: Any) -> None:
    assert examples.payload(of) == expected


class Tree(Struct):
    parent: Tree | None
    left: dict[str, Tree]


class Endless(Struct):
    inner: Endless


def test_a_payload_may_contain_its_own_type() -> None:
    assert examples.payload(Tree) == {"parent": None, "left": {}}
    with pytest.raises(TypeError):
        examples.payload(Endless)


def test_what_nobody_knows_an_example_of_is_no_payload() -> None:
    class Odd:
        pass

    with pytest.raises(TypeError):
        examples.payload(Odd)
    with pytest.raises(TypeError):
        examples.payload(Annotated[str, msgspec.Meta(pattern="^[0-9]{4}$")])
