"""Writes the reference of the configuration, from the Structs that a file is read into."""

from __future__ import annotations

import inspect as python
from collections.abc import Iterator
from enum import Enum
from typing import Any

import msgspec
from msgspec import Struct, inspect

from aviso_workers.aviso.literals import Duration, Size, SizeLimit
from aviso_workers.config import display
from aviso_workers.config.conversion import without_none
from aviso_workers.config.secrets import Secret, ServerUrls
from aviso_workers.config.settings import Document

HEAD = """# Configuration reference

Every key that a configuration file can have, written from the code. [config/example.yaml](../config/example.yaml) is a
file with all of them, `aviso-workers config schema` prints a JSON Schema for editors, and `aviso-workers config show`
prints the values in effect and where each of them is set.

Any key can be set in the environment as well, with `__` between the levels: `workers.status.port` is
`AVISO_WORKERS_WORKERS__STATUS__PORT`. The environment has precedence over files.

In the tables, a link leads to the keys of a mapping. In titles, `NAME` stands for a name that you choose, and `[]` for
each entry of a list. Where no default is given, the meaning says what holds without the key.
"""
CUSTOM = {
    Duration: "duration, such as `30d`",
    Size: "size, such as `2Gi`",
    SizeLimit: "size, such as `2Gi`, or `unlimited`",
    Secret: "text",
    ServerUrls: "text, or list of text",
}
Titles = dict[type, str]


def page() -> str:
    """Return the page: one section for each Struct, in the order of a file."""
    titles: Titles = {Document: "Sections of a file"}
    _gather("", Document, titles)
    return "\n".join([HEAD, *(line for struct in titles for line in _section(struct, titles))])


def _gather(path: str, struct: type[Struct], titles: Titles) -> None:
    """Add the title of every Struct below `struct`: the path at which it stands first."""
    for field in _described(struct).fields:
        for title, each in _structs(f"{path}.{field.encode_name}".lstrip("."), field.type):
            if each not in titles:
                titles[each] = title
                _gather(title, each, titles)


def _described(struct: type[Struct]) -> inspect.StructType:
    described = inspect.type_info(struct)
    assert isinstance(described, inspect.StructType)
    return described


def _structs(path: str, type_: inspect.Type) -> Iterator[tuple[str, type[Struct]]]:
    """Yield each Struct of which a type is made, with its path."""
    match without_none(type_):
        case inspect.StructType(cls=struct, tag=tag):
            yield f"{path}: {tag}" if tag else path, struct
        case inspect.UnionType(types=types):
            for each in types:
                yield from _structs(path, each)
        case inspect.DictType(value_type=inside):
            yield from _structs(f"{path}.NAME", inside)
        case inspect.VarTupleType(item_type=inside):
            yield from _structs(f"{path}[]", inside)


def _section(struct: type[Struct], titles: Titles) -> Iterator[str]:
    described = _described(struct)
    yield from (f"## {titles[struct]}", "", python.cleandoc(struct.__doc__ or ""), "")
    yield from ("| key | value | default | meaning |", "|---|---|---|---|")
    if described.tag_field:
        yield f"| `{described.tag_field}` | `{described.tag}` | required | This rule. |"
    meanings = display.descriptions(struct)
    for field in described.fields:
        meaning = meanings.get(field.encode_name, "")
        cells = (f"`{field.encode_name}`", _value(field.type, titles), _default(field), meaning)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


def _value(type_: inspect.Type, titles: Titles) -> str:
    """Return what a key takes, in words."""
    match without_none(type_):
        case inspect.StructType(cls=struct, tag=tag):
            return f"[{tag or 'mapping'}](#{_anchor(titles[struct])})"
        case inspect.UnionType(types=types):
            return " or ".join(_value(each, titles) for each in types)
        case inspect.DictType(value_type=inside):
            return f"by name: {_value(inside, titles)}"
        case inspect.VarTupleType(item_type=inside):
            return f"list of {_value(inside, titles)}"
        case inspect.TupleType(item_types=items):
            return f"list of {len(items)}: {', '.join(_value(each, titles) for each in items)}"
        case inspect.LiteralType(values=values):
            return " or ".join(f"`{value}`" for value in values)
        case inspect.IntType() as number:
            return f"whole number{_bounds(number)}"
        case inspect.FloatType() as number:
            return f"number{_bounds(number)}"
        case inspect.BoolType():
            return "`true` or `false`"
        case inspect.StrType():
            return "text"
        case inspect.DateTimeType():
            return "time"
        case inspect.CustomType(cls=custom):
            return CUSTOM[custom]
        case inspect.AnyType():
            return "anything"
    raise AssertionError(f"the reference has no words for settings of type {type_}")


def _bounds(number: inspect.IntType | inspect.FloatType) -> str:
    bounds = {"above": number.gt, "from": number.ge, "to": number.le}
    return "".join(f" {word} {bound:g}" for word, bound in bounds.items() if bound is not None)


def _default(field: inspect.Field) -> str:
    if field.required:
        return "required"
    if field.default in (msgspec.NODEFAULT, None) or isinstance(field.default, Struct):
        return ""
    value: Any = field.default
    return f"`{value.value if isinstance(value, Enum) else msgspec.json.encode(value).decode()}`"


def _anchor(title: str) -> str:
    """Return the anchor that the site gives to a title."""
    return "".join(each for each in title.lower() if each.isalnum() or each in "_- ").replace(" ", "-")
