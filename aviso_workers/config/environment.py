"""Environment variables -> nodes, laid over what the files say.

`loading` calls `overrides`. A variable names a key by its path, with `__` between the levels:
`AVISOSERVER_NOTIFICATION_BACKEND__JETSTREAM__NATS_URL` as aviso-server reads it, and the same with `AVISO_WORKERS_`,
which wins. Names have no case, as aviso-server's have none, and `_` stands for `-` as well, so those of event types and
routers are matched with what the files have.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from itertools import product
from typing import Any

from msgspec import inspect

from aviso_workers.config.conversion import near, without_none
from aviso_workers.config.documents import KeyPlace, YamlNode, is_text, overlay, parse

SERVER, WORKERS = "AVISOSERVER_", "AVISO_WORKERS_"
SERVER_FILE, WORKERS_FILE = f"{SERVER}CONFIG_FILE", f"{WORKERS}CONFIG_FILE"
_NOT_KEYS = (SERVER_FILE, WORKERS_FILE, f"{WORKERS}NATS_SERVER", f"{WORKERS}PURE")


_LISTS = inspect.VarTupleType | inspect.TupleType
_MAPPINGS = inspect.StructType | inspect.UnionType | inspect.DictType | inspect.AnyType


def overrides(
    root: YamlNode, environ: Mapping[str, str], *, wanted: inspect.Type, rank: int
) -> tuple[YamlNode, list[tuple[KeyPlace, str]]]:
    """Return `root` with the environment laid over it, and the mistakes as (place, what is wrong).

    `wanted` is the root's type, `rank` where the environment sorts among the sources. A variable that names no key is
    a mistake if it is one of ours; one of aviso-server's is left to the server.
    """
    mistakes: list[tuple[KeyPlace, str]] = []
    for prefix, name in product((SERVER, WORKERS), sorted(environ)):
        if not name.upper().startswith(prefix) or name.upper() in _NOT_KEYS:
            continue
        place = KeyPlace(rank=rank, line=0, source=name)
        try:
            keys, type_ = _find(name[len(prefix) :].lower().split("__"), root, wanted)
        except LookupError as problem:
            if prefix == WORKERS:
                mistakes.append((place, f"names no known key: {problem}"))
            continue
        if keys[-1] == "token" and not environ[name].strip():
            continue  # an empty token is none, as in NATS_TOKEN
        node, wrong = _value(environ[name], type_, place)
        mistakes += wrong
        if node is not None:
            root = overlay(root, reduce(lambda below, key: YamlNode(value={key: below}, place=place), keys[::-1], node))
    return root, mistakes


def _find(parts: list[str], root: YamlNode, wanted: inspect.Type) -> tuple[list[str], inspect.Type]:
    """Return the keys that the parts of a variable's name stand for, and the type of what is there."""
    keys: list[str] = []
    node: YamlNode | None = root
    for part in parts:
        known, others = _inside(without_none(wanted))
        given = node.value if node is not None and isinstance(node.value, dict) else {}
        names = (*known, *given) if others else tuple(known)
        key = next((name for name in names if _folded(name) == _folded(part)), part)
        found = known.get(key, others)
        if found is None:
            where = ".".join(keys) or "a configuration"
            hint = near(part, known, among=True) if known else "it holds no keys"
            raise LookupError(f"there is no {part!r} in {where}; {hint}")
        keys.append(key)
        wanted, node = found, given.get(key)
    return keys, wanted


def _inside(wanted: inspect.Type) -> tuple[dict[str, inspect.Type], inspect.Type | None]:
    """Return the known keys below a type, and the type of all other keys, if there may be others."""
    match wanted:
        case inspect.StructType(fields=fields, tag_field=tag_field):
            tag = {tag_field: inspect.StrType()} if tag_field else {}
            return {**tag, **{field.name: field.type for field in fields}}, None
        case inspect.UnionType(types=types):
            return {key: type_ for each in types for key, type_ in _inside(each)[0].items()}, None
        case _:
            return {}, wanted if isinstance(wanted, inspect.AnyType) else getattr(wanted, "value_type", None)


def _value(text: str, wanted: inspect.Type, place: KeyPlace) -> tuple[YamlNode | None, list[tuple[KeyPlace, str]]]:
    """Return the text of a variable as a node: text for a scalar, and for what holds several values also YAML's flow
    style.
    """
    if not is_text(text):
        return None, [(place, "is not UTF-8 text")]
    wanted = without_none(wanted)
    if isinstance(wanted, _LISTS | _MAPPINGS) and text.lstrip().startswith(("[", "{")):
        return parse(text, place)
    if isinstance(wanted, _LISTS):
        parts: list[Any] = [YamlNode(value=part.strip(), place=place) for part in text.split(",")]
        return YamlNode(value=parts, place=place), []
    return YamlNode(value=text, place=place, plain=isinstance(wanted, inspect.AnyType)), []


def _folded(name: str) -> str:
    return name.lower().replace("-", "_")
