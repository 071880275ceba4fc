"""An identifier as an author's own type: what it is read as, and which types no identifier of the event type fits."""

from __future__ import annotations

import datetime
import enum
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Generic, Literal, TypedDict, TypeVar

import msgspec
import pytest

from aviso_workers.aviso import typed_identifiers
from aviso_workers.aviso.schema import (
    DateHandler,
    EnumHandler,
    EventType,
    ExpverHandler,
    FloatHandler,
    IntHandler,
    PolygonHandler,
    StringHandler,
    TimeHandler,
    Topic,
    parse_where,
)
from aviso_workers.errors import UndecodableError

T = TypeVar("T")

MARS = EventType(
    topic=Topic(
        base="mars", key_order=("class", "expver", "date", "time", "stream", "step", "level", "cycle", "number")
    ),
    identifier={
        "class": StringHandler(required=True),
        "expver": ExpverHandler(required=True),
        "date": DateHandler(required=True),
        "time": TimeHandler(required=True),
        "stream": EnumHandler(required=True, values=("OPER", "wave")),
        "step": IntHandler(required=True),
        "level": FloatHandler(required=True),
        "cycle": EnumHandler(required=True, values=("0", "6", "12")),
        "number": StringHandler(required=False),
        "polygon": PolygonHandler(required=False),
        "nowhere": StringHandler(required=False),
    },
)
IDENTIFIER = {
    "class": "od",
    "expver": "0001",
    "date": "20261120",
    "time": "0930",
    "stream": "oper",
    "step": "12",
    "level": "1.50",
    "cycle": "6",
    "number": "3",
}


class Stream(enum.Enum):
    OPER = "oper"
    WAVE = "wave"


class Key(msgspec.Struct, frozen=True):
    class_: str = msgspec.field(name="class")
    expver: int
    date: datetime.date
    time: datetime.time
    stream: Stream
    step: int
    level: Decimal
    cycle: Literal[0, 6, 12]
    number: int | None = None


@dataclass
class Row:
    level: float
    step: int = -1


class Entry(TypedDict, total=False):
    date: datetime.date
    step: int
    polygon: str


class Late(msgspec.Struct):
    step: int

    def __post_init__(self) -> None:
        if self.step > 100:
            raise ValueError("too late")
        if self.step < 0:
            raise RuntimeError("no step")


KEY = Key(
    class_="od",
    expver=1,
    date=datetime.date(2026, 11, 20),
    time=datetime.time(9, 30),
    stream=Stream.OPER,
    step=12,
    level=Decimal("1.50"),
    cycle=6,
    number=3,
)


class TestReading:
    @pytest.mark.parametrize(
        ("key_type", "key"),
        [(Key, KEY), (Row, Row(1.5, 12)), (Entry, {"date": datetime.date(2026, 11, 20), "step": 12})],
    )
    def test_gives_the_fields_that_the_type_has(self, key_type: Any, key: Any) -> None:
        typed_identifiers.check(key_type)
        assert typed_identifiers.reader(key_type)(IDENTIFIER) == key

    @pytest.mark.parametrize("date", ["20261120", "2026-11-20", "2026-324"])
    @pytest.mark.parametrize("step", ["6", "06", "+6"])
    def test_takes_each_spelling_that_the_handler_takes(self, date: str, step: str) -> None:
        found = typed_identifiers.reader(Entry)({"date": date, "step": step})
        assert found == {"date": datetime.date(2026, 11, 20), "step": 6}

    def test_leaves_out_what_the_publisher_left_out(self) -> None:
        assert typed_identifiers.reader(Key)({**IDENTIFIER, "number": "4"}).number == 4
        without = {name: value for name, value in IDENTIFIER.items() if name != "number"}
        assert typed_identifiers.reader(Key)(without).number is None

    @pytest.mark.parametrize(
        ("key_type", "identifier", "complaint"),
        [
            (
                Key,
                {"number": "many"},
                r"is not a Key: it must be a whole number of 64 bits, not 'many' - at `\$.number`",
            ),
            (Key, {"stream": "enfo"}, r"the identifier is not a Key: Invalid enum value 'enfo' - at `\$.stream`"),
            (Key, {"date": "20261399"}, r"the identifier is not a Key: it must be a date such as .* - at `\$.date`"),
            (Late, {"step": "101"}, "the identifier is not a Late: too late"),
            (Late, {"step": "-1"}, "the identifier is not a Late: RuntimeError: no step"),
        ],
    )
    def test_names_the_field_that_does_not_fit(self, key_type: Any, identifier: dict[str, str], complaint: str) -> None:
        with pytest.raises(UndecodableError, match=complaint):
            typed_identifiers.reader(key_type)({**IDENTIFIER, **identifier})

    def test_names_a_field_that_is_not_there(self) -> None:
        with pytest.raises(
            UndecodableError, match="the identifier is not a Row: Object missing required field `level`"
        ):
            typed_identifiers.reader(Row)({"step": "1"})


class Pair(msgspec.Struct, Generic[T]):
    step: T


def key_of(**fields: Any) -> Any:
    return msgspec.defstruct("Key", list(fields.items()))


class TestTheType:
    @pytest.mark.parametrize(
        ("key_type", "complaint"),
        [
            (int, "it must be a msgspec.Struct, a dataclass or a TypedDict"),
            (Pair[int], "it must be a msgspec.Struct, a dataclass or a TypedDict"),
            (dict[str, int], "it must be a msgspec.Struct, a dataclass or a TypedDict"),
            (key_of(step=list[int]), "its field 'step' must be a str, int, float"),
            (key_of(step=Any), "its field 'step' must be a str, int, float"),
            (key_of(step=Row), "its field 'step' must be a str, int, float"),
        ],
    )
    def test_must_be_one_of_simple_fields(self, key_type: Any, complaint: str) -> None:
        with pytest.raises(TypeError, match=complaint):
            typed_identifiers.check(key_type)


def mistakes(key_type: Any, **where: Any) -> list[str]:
    return list(typed_identifiers.mistakes(key_type, "mars", MARS, parse_where("mars", MARS, where)))


class TestMistakes:
    @pytest.mark.parametrize("key_type", [Key, Row, Entry, key_of(step=float), key_of(level=str | float)])
    def test_there_are_none_where_the_fields_are_those_of_the_event_type(self, key_type: Any) -> None:
        assert mistakes(key_type) == []

    @pytest.mark.parametrize(
        ("fields", "complaint"),
        [
            ({"stepp": int}, "identifier field 'stepp' is unknown; did you mean 'step'?"),
            ({"nowhere": str}, "'nowhere' is in no stored notification, because it is not in key_order: leave it out"),
            ({"step": datetime.date}, "'step' can be read as str, int, float, Decimal (IntHandler), or as"),
            ({"level": int}, "'level' can be read as str, float, Decimal (FloatHandler), or as"),
            ({"date": int | None}, "'date' can be read as str, date (DateHandler), or as"),
            ({"time": datetime.date}, "'time' can be read as str, time (TimeHandler), or as"),
            ({"polygon": float}, "'polygon' can be read as str (PolygonHandler), or as"),
            ({"step": Literal["a", "b"]}, "'step' can be read as "),
            ({"stream": Literal["OPER"]}, "'stream' can be read as "),
            (
                {"stream": int},
                "'stream' may be 'oper', 'wave', which its type cannot be: widen the type, or",
            ),
            ({"stream": Literal["oper"]}, "'stream' may be 'wave', which its type cannot be"),
            ({"cycle": bool}, "'cycle' may be '12', '6', which its type cannot be"),
        ],
    )
    def test_name_the_field_and_the_cure(self, fields: dict[str, Any], complaint: str) -> None:
        [found] = mistakes(key_of(**fields))
        assert found.startswith("Key: mars: identifier field ")
        assert complaint in found

    def test_what_the_filter_leaves_out_need_not_fit(self) -> None:
        assert mistakes(key_of(stream=Literal["oper"]), stream="oper") == []
        assert mistakes(key_of(number=int), number=["1", "2"]) == []
        assert mistakes(key_of(step=Literal[6, 12]), step={"gte": 6}) == []
        [found] = mistakes(key_of(number=int), number=["1", "all"])
        assert "'number' may be 'all'" in found
