"""Nodes -> Structs, all mistakes at once.

`loading` reads one `Document` with one `Reader`. The Structs' own types say what is expected, as msgspec.inspect shows
them, and `about` what msgspec does not know: there is no second description of the configuration. msgspec.convert is
not used, because it stops at the first mistake and does not know lines.

A scalar is read as its field wants it. aviso-server converts text to numbers and booleans where it can, and so do we
(`"30"` is a fine integer, and environment variables have nothing but text); the other way round, a number without
quotes is not text unless it is certain how it is spelled.
"""

from __future__ import annotations

import difflib
import re
import sys
from bisect import bisect_left, insort
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from functools import cache
from operator import ge, gt, le
from typing import Any

import msgspec
from msgspec import Meta, Struct, inspect

from aviso_workers.aviso import literals
from aviso_workers.config.documents import KeyPlace, YamlNode, resolved
from aviso_workers.config.secrets import Secret, ServerUrls

_BOOLEANS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
_KINDS = {dict: "a mapping", list: "a list", bool: "true or false", int: "a number", float: "a number"}
_I64 = 2**63
_POLICY = re.compile(r"notification_schema\.(.+)\.storage_policy\.(\w+)")
_POLICIES = re.compile(r"notification_schema\..+\.storage_policy")
"""The sections of event types in which every unknown key is reported, as in `_BACKEND`."""
_LONGEST_SHOWN = 60
_BACKEND = "notification_backend"
"""The section of aviso-server in which every unknown key is reported."""
_BAD: Any = object()
"""The value of what cannot be read, for which a mistake is noted."""


def about(*, ours: bool = False, **reasons: str) -> Meta:
    """Return what is to be known of a field beside its type and its docstring, which is also shown in editors.

    A field is `ours` where aviso-server, whose section it stands in, does not know it.

    `reasons` belongs to a choice: why a value that one might expect is none, and `otherwise`, what to say of the rest.
    Of a number, `bounds` says what it is, where one that is out of bounds was meant as something else.
    """
    return Meta(extra={"reasons": reasons, "ours": ours})


OURS_ALONE = about(ours=True)


def _extra(type_: inspect.Type) -> dict[str, Any]:
    """Return what `about` says of a field."""
    return (isinstance(type_, inspect.Metadata) and type_.extra) or {}


@cache
def described(struct: type[Struct]) -> inspect.StructType:
    """Return the fields of a Struct. To inspect a document takes twenty times as long as to read a file."""
    wanted = inspect.type_info(struct)
    assert isinstance(wanted, inspect.StructType)
    return wanted


class Reader:
    """Reads nodes by their types, and keeps the mistakes and warnings."""

    def __init__(self, *, unused: str) -> None:
        """Make a reader. `unused` is the key path of the backend that is not used, of which no bounds are checked."""
        self.mistakes: list[tuple[KeyPlace, str]] = []
        self.warnings: list[tuple[KeyPlace, str]] = []
        self.places: dict[str, KeyPlace] = {}
        """The place of each key path."""
        self._unused = unused
        self._wrong: list[str] = []
        """The key paths of mistakes, each with a '.' at its end, in alphabetical order."""

    def place(self, path: str) -> KeyPlace:
        """Return the place of a key path, or of the nearest one around it."""
        while path not in self.places:
            path = path.rpartition(".")[0]
        return self.places[path]

    def refuse(self, path: str, problem: str) -> None:
        """Note a mistake; `problem` follows the key path in a sentence."""
        self.mistakes.append((self.place(path), _sentence(path, problem)))
        insort(self._wrong, f"{path}.")

    def warn(self, place: KeyPlace, path: str, text: str) -> None:
        """Note a warning: what looks like a mistake and is none."""
        self.warnings.append((place, f"{path}: {text}"))

    def is_wrong(self, path: str) -> bool:
        """Return whether there is a mistake at a key path or below."""
        at = bisect_left(self._wrong, f"{path}.")
        return any(each.startswith(f"{path}.") for each in self._wrong[at : at + 1])

    def struct(self, node: YamlNode, wanted: inspect.StructType, path: str) -> Any:
        values = self.fields(node, wanted, path)
        required = {field.name for field in wanted.fields if field.required}
        return wanted.cls(**values) if required <= values.keys() else _BAD

    def fields(self, node: YamlNode, wanted: inspect.StructType, path: str) -> dict[str, Any]:
        """Return the fields that are given and can be read."""
        self.places[path] = node.place
        nodes = _mapping(node)
        self._check_keys(nodes, wanted, path)
        values = {}
        for field in wanted.fields:
            given = nodes.get(field.name)
            if given is not None and not (given.is_null and not field.required):
                values[field.name] = self.read(given, field.type, _join(path, field.name))
            elif field.required:
                self.refuse(_join(path, field.name), "is missing")
        return {name: value for name, value in values.items() if value is not _BAD}

    def _check_keys(self, nodes: dict[str, YamlNode], wanted: inspect.StructType, path: str) -> None:
        known = {field.name: _extra(field.type).get("ours") for field in wanted.fields}
        for key, node in nodes.items():
            if key in known or key == wanted.tag_field:
                continue
            nearest = _nearest(key, known, cutoff=0.75)
            if wanted.forbid_unknown_fields:
                self.mistakes.append((node.place, f"{path}: unknown field(s): {key}; {near(key, known)}"))
            elif known.get(nearest):
                self.mistakes.append((node.place, f"{_join(path, key)} is not known; did you mean {nearest!r}?"))
            elif path == _BACKEND and (section := _section_of(key, wanted)):
                self.mistakes.append((node.place, f"{path}.{key} is not known; did you mean {path}.{section}.{key}?"))
            elif similar := _nearest(key, known, cutoff=0.8):
                text = f"this key is not known and is ignored; did you mean {similar!r}?"
                self.warn(node.place, _join(path, key), text)
            elif path.startswith(_BACKEND) or _POLICIES.fullmatch(path):
                self.warn(node.place, _join(path, key), "this key is not known and is ignored")

    def read(self, node: YamlNode, wanted: inspect.Type, path: str) -> Any:
        """Return the value of a node as its type; it is of no use if there is a mistake at the path."""
        self.places[path] = node.place
        try:
            return self._value(node, wanted, path)
        except ValueError as problem:
            self.refuse(path, str(problem))
            return _BAD

    def _value(self, node: YamlNode, wanted: inspect.Type, path: str) -> Any:
        reasons: dict[str, str] = _extra(wanted).get("reasons", {})
        match without_none(wanted):
            case inspect.StructType() as struct:
                return self.struct(node, struct, path)
            case inspect.UnionType(types=types):
                return self._tagged(node, types, path)
            case inspect.DictType(value_type=inside):
                return self._dict(node, inside, path)
            case inspect.VarTupleType(item_type=inside):
                return self._tuple(node, [inside] * len(_items(node)), path)
            case inspect.TupleType(item_types=types):
                return self._tuple(node, types, path)
            case inspect.AnyType() as anything:
                return self._dict(node, anything, path) if isinstance(node.value, dict) else node.resolved
            case inspect.IntType() | inspect.FloatType() as number:
                return self._bounded(node, number, path, reasons.get("bounds", ""))
            case inspect.LiteralType(values=choices):
                return _choice(node, choices, reasons)
            case other:
                return _unbounded(node, other)

    def _tagged(self, node: YamlNode, types: Iterable[inspect.Type], path: str) -> Any:
        by_tag = {str(each.tag): each for each in types if isinstance(each, inspect.StructType)}
        tag_field = next(iter(by_tag.values())).tag_field or ""
        given = _mapping(node).get(tag_field)
        if given is None:
            raise ValueError(f"is missing its {tag_field}: {', '.join(by_tag)}")
        tag_path = _join(path, tag_field)
        self.places[tag_path] = given.place
        if not isinstance(given.value, str) or given.value not in by_tag:
            hint = near(str(given.value), by_tag)
            self.refuse(tag_path, f"expected the name of a rule, found {_shown(given)}; {hint}")
            return _BAD
        return self.struct(node, by_tag[given.value], path)

    def _dict(self, node: YamlNode, inside: inspect.Type, path: str) -> Any:
        values = {key: self.read(item, inside, _join(path, key)) for key, item in _mapping(node).items()}
        return {key: value for key, value in values.items() if value is not _BAD}

    def _tuple(self, node: YamlNode, types: Iterable[inspect.Type], path: str) -> Any:
        items, types = _items(node), tuple(types)
        if len(items) != len(types):
            raise ValueError(f"expected a list of {len(types)}, found {len(items)}")
        values = tuple(
            self.read(item, inside, f"{path}[{i}]") for i, (item, inside) in enumerate(zip(items, types, strict=True))
        )
        return _BAD if any(value is _BAD for value in values) else values

    def _bounded(self, node: YamlNode, wanted: inspect.IntType | inspect.FloatType, path: str, meaning: str) -> float:
        number = _number(node, whole=isinstance(wanted, inspect.IntType))
        if self._unused and path.startswith(self._unused):
            return number
        so = f": {meaning}" if meaning else ""
        for sign, holds, bound in ((">", gt, wanted.gt), (">=", ge, wanted.ge), ("<=", le, wanted.le)):
            if bound is not None and not holds(number, bound):
                raise ValueError(f"must be {sign} {bound}{so}")
        return number


def _sentence(path: str, problem: str) -> str:
    """Return a key path and what is wrong with it, in the words that aviso-server's documentation has for it."""
    if problem.startswith(("expected", "Unknown", "Schema")):
        return f"{path}: {problem}"
    if policy := _POLICY.fullmatch(path):
        return f"{path}: Schema {policy[1]!r} storage_policy.{policy[2]} {problem}"
    return f"{path} {problem}"


def near(name: str, known: Iterable[str]) -> str:
    """Return a question for the nearest known name; where none is near, all of them."""
    return literals.suggestion(name.lower(), list(known), all_of_them="known are")


def _nearest(name: str, known: Iterable[str], *, cutoff: float) -> str:
    """Return the known name that is nearest; empty where none is near."""
    return next(iter(difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=cutoff)), "")


def _section_of(key: str, wanted: inspect.StructType) -> str:
    """Return the section below in which the key is one of ours; empty where it is in none."""
    sections = [(field.name, without_none(field.type)) for field in wanted.fields]
    inside = ((name, each) for name, of in sections if isinstance(of, inspect.StructType) for each in of.fields)
    return next((name for name, each in inside if each.name == key and _extra(each.type).get("ours")), "")


def without_none(wanted: inspect.Type) -> inspect.Type:
    """Return a type without what surrounds it: its metadata, and that it may be None."""
    if isinstance(wanted, inspect.Metadata):
        return without_none(wanted.type)
    if isinstance(wanted, inspect.UnionType):
        rest = [each for each in wanted.types if not isinstance(each, inspect.NoneType)]
        return without_none(rest[0]) if len(rest) == 1 else inspect.UnionType(tuple(rest))
    return wanted


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _mapping(node: YamlNode) -> dict[str, YamlNode]:
    if isinstance(node.value, dict):
        return node.value
    if node.is_null:
        return {}
    # A scalar is not shown: it may be settings on one line, with a password among them.
    raise ValueError(f"expected a mapping, found {'a list' if isinstance(node.value, list) else 'text'}")


def _items(node: YamlNode) -> list[YamlNode]:
    if isinstance(node.value, list):
        return node.value
    raise ValueError(f"expected a list, found {_shown(node)}")


def _scalar(node: YamlNode, expected: str) -> str:
    if isinstance(node.value, str):
        return node.value
    raise ValueError(f"expected {expected}, found {_shown(node)}")


def _unbounded(node: YamlNode, wanted: inspect.Type) -> Any:
    match wanted:
        case inspect.StrType(min_length=shortest):
            text = _text(node)
            if shortest and not text.strip():
                raise ValueError("must not be empty")
            return text
        case inspect.BoolType():
            return _boolean(node)
        case inspect.DateTimeType():
            return _time(node)
        case inspect.CustomType(cls=custom):
            return _custom(node, custom)
    raise AssertionError(f"settings of type {wanted} cannot be read")


def _text(node: YamlNode) -> str:
    text = _scalar(node, "text")
    meaning = node.resolved
    certain = isinstance(meaning, str) or (type(meaning) is int and str(meaning) == text)
    if not certain:
        raise ValueError(f"expected text, found what YAML takes for {_shown(node)}: put it in quotes")
    return text


def _number(node: YamlNode, *, whole: bool) -> int | float:
    expected = "an integer" if whole else "a number"
    number = resolved(_scalar(node, expected))
    if not isinstance(number, int | float) or isinstance(number, bool):
        raise ValueError(f"expected {expected}, found {_shown(node)}")
    if whole and isinstance(number, float):
        raise ValueError("expected an integer, found a fraction")
    if whole and not -_I64 <= number < _I64:
        raise ValueError("expected an integer of at most 64 bits")
    if not -sys.float_info.max <= number <= sys.float_info.max:
        raise ValueError("expected a finite number")
    return number if whole else float(number)


def _boolean(node: YamlNode) -> bool:
    text = _scalar(node, "true or false").lower()
    if text not in _BOOLEANS:
        raise ValueError(f"expected true or false, found {_shown(node)}")
    return _BOOLEANS[text]


def _time(node: YamlNode) -> datetime:
    expected = "a time with its offset, such as 2026-11-20T06:00:00Z"
    with suppress(msgspec.ValidationError):
        time = msgspec.convert(_scalar(node, expected), datetime)
        if time.tzinfo is not None:
            return time
    raise ValueError(f"expected {expected}, found {_shown(node)}")


def _choice(node: YamlNode, choices: Iterable[Any], reasons: dict[str, str]) -> str:
    expected = " or ".join(map(repr, choices))
    text = _scalar(node, expected)
    if text in choices:
        return text
    if text in reasons:
        raise ValueError(f"is invalid: {reasons[text]}")
    if "otherwise" in reasons:
        found = text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
        raise ValueError(f"{reasons['otherwise'].format(found=found)}; expected {expected}")
    raise ValueError(f"expected {expected}, found {_shown(node)}")


def _custom(node: YamlNode, wanted: type) -> object:
    if wanted is Secret:
        return Secret(_text(node))
    if wanted is ServerUrls:
        return ServerUrls(*(map(_text, node.value) if isinstance(node.value, list) else _text(node).split(",")))
    text = _scalar(node, "text")
    try:
        return literals.decode_hook(wanted, text)
    except ValueError as error:
        raise ValueError(f"is invalid: {str(error).replace(repr(text), 'this text')}") from None


def _shown(node: YamlNode) -> str:
    """Return what a node has instead of what is expected. Its text is not repeated: a password may stand in the wrong
    place."""
    value = node.resolved
    return "nothing" if value in (None, "") else _KINDS.get(type(value), "text")
