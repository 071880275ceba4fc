"""Examples of notifications, made from the rules of their event type, for people who have none at hand yet.

Called by `aviso-workers dev`. Nothing here publishes, and an example is checked by whoever shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import inspect

from aviso_workers.aviso.schema import (
    DateHandler,
    EnumHandler,
    EventType,
    FloatHandler,
    IntHandler,
    PointCloudHandler,
    PolygonHandler,
    Rule,
    TimeHandler,
)

BY_RULE = {
    DateHandler: "20261120",
    TimeHandler: "0600",
    PolygonHandler: "(52,-3,52,3,48,3,48,-3,52,-3)",
    PointCloudHandler: "[[52,-3]]",
}
TEXT = "a"
BY_TYPE: dict[type[inspect.Type], Any] = {
    inspect.AnyType: {},
    inspect.BoolType: True,
    inspect.DateTimeType: "2026-11-20T06:00:00Z",
    inspect.DateType: "2026-11-20",
    inspect.DecimalType: "1.5",
    inspect.DictType: {},
    inspect.FrozenSetType: [],
    inspect.ListType: [],
    inspect.SetType: [],
    inspect.StrType: TEXT,
    inspect.TimeDeltaType: "PT1H",
    inspect.TimeType: "06:00:00Z",
    inspect.UUIDType: "123e4567-e89b-12d3-a456-426614174000",
    inspect.VarTupleType: [],
}


def identifier(event_type: EventType, where: Mapping[str, Any]) -> dict[str, str]:
    """Return an identifier of the event type that passes a filter, as far as the filter names values or bounds."""
    return {field: str(_value(rule, where.get(field))) for field, rule in event_type.identifier.items()}


def _value(rule: Rule, condition: Any) -> Any:
    match condition:
        case {"in": [first, *_]} | {"between": [first, *_]} | {"eq": first} | {"gte": first} | {"lte": first}:
            return first
        case {"gt": bound}:
            return bound + 1
        case {"lt": bound}:
            return bound - 1
        case [first, *_]:
            return first
        case str() | int() | float():
            return condition
    match rule:
        case EnumHandler(values=(first, *_)):
            return first
        case IntHandler(range=(low, _)) | FloatHandler(range=(low, _)):
            return low
        case IntHandler() | FloatHandler():
            return 1
    return BY_RULE.get(type(rule), TEXT)


def payload(of: Any) -> Any:
    """Return what a payload of this type looks like in JSON, with the fields that it must have and all its numbers.

    A number that is left out is mostly 0, which a handler may refuse.

    Raises TypeError where msgspec does not know the type, or no example of it is known.
    """
    try:
        example = _of(inspect.type_info(of))
        msgspec.convert(example, of)
    except (msgspec.ValidationError, RecursionError) as error:
        raise TypeError(f"no example of {of!r} is known") from error
    return example


def _of(known: inspect.Type) -> Any:
    match known:
        case inspect.Metadata(type=inner):
            return _of(inner)
        case inspect.StructType() | inspect.DataclassType() | inspect.TypedDictType():
            numbers = (inspect.IntType, inspect.FloatType)
            shown = [field for field in known.fields if field.required or isinstance(field.type, numbers)]
            return {field.encode_name: _of(field.type) for field in shown}
        case inspect.UnionType():
            may_be_null = any(isinstance(each, inspect.NoneType) for each in known.types)
            return None if may_be_null else _of(known.types[0])
        case inspect.LiteralType(values=(first, *_)):
            return first
        case inspect.EnumType(cls=cls):
            return next(each.value for each in cls)
        case inspect.IntType():
            return known.ge if known.ge is not None else 1 if known.gt is None else known.gt + 1
        case inspect.FloatType():
            return known.ge if known.ge is not None else 1.0 if known.gt is None else known.gt + 1
    return BY_TYPE.get(type(known))
