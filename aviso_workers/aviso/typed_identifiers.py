"""Typed identifiers: the identifier of a notification as an author's own type, such as a Struct with `step: int`.

An author names the type after that of the payload, as in `Notification[Field, FieldKey]`. `codec` reads
`notification.key` with it; `App.mistakes` asks here whether the type's fields fit those of the event type.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import inspect

from aviso_workers.aviso import schema
from aviso_workers.aviso.schema import (
    DateHandler,
    EnumHandler,
    EventType,
    ExpverHandler,
    FloatHandler,
    IntHandler,
    PointCloudHandler,
    PolygonHandler,
    Rule,
    StringHandler,
    TimeHandler,
    Where,
)
from aviso_workers.errors import InvalidIdentifierError, UndecodableError, describe

SPELLED: Mapping[type[inspect.Type], str] = {
    inspect.StrType: "str",
    inspect.IntType: "int",
    inspect.FloatType: "float",
    inspect.DecimalType: "Decimal",
    inspect.BoolType: "bool",
    inspect.DateType: "date",
    inspect.TimeType: "time",
    inspect.DateTimeType: "datetime",
}
"""The types that the text of a field can be read as, and how Python spells them."""
TEXT_TYPES = tuple(SPELLED)
CHOICES = (inspect.LiteralType, inspect.EnumType)
READ_AS: Mapping[type[Rule], tuple[type[inspect.Type], ...]] = {
    StringHandler: TEXT_TYPES,
    EnumHandler: TEXT_TYPES,
    ExpverHandler: (inspect.StrType, inspect.IntType),
    IntHandler: (inspect.StrType, inspect.IntType, inspect.FloatType, inspect.DecimalType),
    FloatHandler: (inspect.StrType, inspect.FloatType, inspect.DecimalType),
    DateHandler: (inspect.StrType, inspect.DateType),
    TimeHandler: (inspect.StrType, inspect.TimeType),
    PolygonHandler: (inspect.StrType,),
    PointCloudHandler: (inspect.StrType,),
}
"""By handler, the types that a field's values can be read as, besides Literals and Enums of these values."""
MAX_NAMED = 3
"""A mistake lists at most so many values of one field that do not fit."""
PARSERS: Mapping[type[inspect.Type], Callable[[str], Any]] = {
    inspect.IntType: schema.read_int,
    inspect.DateType: schema.read_date,
    inspect.TimeType: schema.read_time,
}
"""Of the types whose values Aviso writes in more ways than msgspec reads."""


def check(key_type: Any) -> None:
    """Raise TypeError unless identifiers can be read as this type."""
    for field in _fields(key_type):
        for kind in _members(field.type):
            if not isinstance(kind, (*TEXT_TYPES, *CHOICES)):
                raise TypeError(
                    f"its field {field.encode_name!r} must be a str, int, float, Decimal, bool, date, time, datetime, "
                    "Literal or Enum, or one of these or None"
                )


def mistakes(key_type: Any, event_type_name: str, event_type: EventType, where: Where) -> Iterator[str]:
    """Yield a sentence for each field of the type that notifications do not have, or whose values are of another type.

    `where` is the agent's filter: values that it leaves out need not fit.
    """
    conditions = {where.topic.key_order[position - 1]: condition for position, condition in where.conditions}
    not_stored = schema.not_stored(event_type)
    for field in _fields(key_type):
        name, rule = field.encode_name, event_type.identifier.get(field.encode_name)
        if rule is None:
            yield f"{key_type.__name__}: {schema.unknown(event_type_name, name, event_type.identifier)}"
            continue
        problem = ""
        wanted = conditions.get(name, _values(rule))
        if name in not_stored:
            problem = "is in no stored notification, because it is not in key_order: leave it out"
        elif not any(_can_be(kind, rule) for kind in _members(field.type)):
            kinds = ", ".join(SPELLED[kind] for kind in READ_AS[type(rule)])
            problem = f"can be read as {kinds} ({type(rule).__name__}), or as a Literal or Enum of its values"
        elif misfits := [value for value in _listed(wanted) if not _reads(field, key_type, value)]:
            shown = ", ".join(map(repr, misfits[:MAX_NAMED]))
            problem = f"may be {shown}, which its type cannot be: widen the type, or leave that out by where="
        if problem:
            yield f"{key_type.__name__}: {InvalidIdentifierError(event_type_name, name, problem)}"


def reader(key_type: Any) -> Callable[[Mapping[str, str]], Any]:
    """Return a function that reads an identifier as this type. It raises `UndecodableError`, which names the field."""
    fields = _fields(key_type)
    names = [field.encode_name for field in fields]
    parsers = {field.encode_name: parser for field in fields if (parser := _parser(field))}

    def read(identifier: Mapping[str, str]) -> Any:
        values: dict[str, Any] = {name: identifier[name] for name in names if name in identifier}
        try:
            for name, parse in parsers.items():
                if name in values:
                    values[name] = _parsed(parse, values[name], name)
            return msgspec.convert(values, key_type, strict=False)
        except msgspec.ValidationError as error:
            raise UndecodableError(f"the identifier is not a {key_type.__name__}: {error}") from error
        except Exception as error:  # raised by the type itself, as in its `__post_init__`
            raise UndecodableError(f"the identifier is not a {key_type.__name__}: {describe(error)}") from error

    return read


def _fields(key_type: Any) -> Sequence[inspect.Field]:
    """Return the fields of the type. Raises TypeError."""
    found = inspect.type_info(key_type) if isinstance(key_type, type) else None  # else a type with parameters
    if isinstance(found, inspect.StructType) and not found.array_like:
        return found.fields
    if isinstance(found, inspect.DataclassType | inspect.TypedDictType):
        return found.fields
    raise TypeError("it must be a msgspec.Struct, a dataclass or a TypedDict of the identifier's fields")


def _members(kind: inspect.Type) -> list[inspect.Type]:
    """Return the types that a field's value may have: the members of a union without None, or the one type."""
    members = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return [member for member in members if not isinstance(member, inspect.NoneType)]


def _can_be(kind: inspect.Type, rule: Rule) -> bool:
    """Return whether at least one value that the rule allows is of this type."""
    if isinstance(kind, inspect.LiteralType):
        return any(_is_canonical(str(value), rule) for value in kind.values)
    if isinstance(kind, inspect.EnumType):
        return any(_is_canonical(str(member.value), rule) for member in kind.cls)
    return isinstance(kind, READ_AS[type(rule)])


def _is_canonical(text: str, rule: Rule) -> bool:
    try:
        return rule.canonical(text) == text
    except ValueError:
        return False


def _values(rule: Rule) -> Iterable[str]:
    """Return the values that an enum's rule lists; none of other rules."""
    return [value.lower() for value in rule.values] if isinstance(rule, EnumHandler) else []


def _listed(wanted: object) -> list[str]:
    """Return the values that a condition or a rule lists; none where it has bounds in place of a list."""
    return sorted(wanted) if isinstance(wanted, Iterable) else []


def _reads(field: inspect.Field, key_type: Any, value: str) -> bool:
    """Return whether a value can be read as the type of this field."""
    parse = _parser(field)
    try:
        text = parse(value) if parse else value
        msgspec.convert(text, typing.get_type_hints(key_type)[field.name], strict=False)
    except ValueError:
        return False
    return True


def _parser(field: inspect.Field) -> Callable[[str], Any] | None:
    kinds = [type(kind) for kind in _members(field.type)]
    return PARSERS.get(kinds[0]) if len(kinds) == 1 else None


def _parsed(parse: Callable[[str], Any], text: str, name: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise msgspec.ValidationError(f"it {error} - at `$.{name}`") from error
