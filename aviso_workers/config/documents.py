"""YAML text -> nodes that know their line, without deciding yet what a scalar means.

`loading` and `environment` call `parse`. A scalar stays the text that was written, because only the type of its field
can say how to read it: `0001` is a number to YAML and an experiment version to Aviso. Where a type leaves it open,
`YamlNode.resolved` reads by YAML 1.2's core schema, as aviso-server does: `on` and `2026-01-01` are text, and only
`true` and `false` are booleans.

Nodes are built from PyYAML's events and not by its constructors, so that duplicate keys are seen, and text that is
nested without end, or unfolds from aliases without end, is refused before it costs anything.

Values of Python that stand for a part of a document become the same nodes (`node_of`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import yaml
from msgspec import Struct, structs

FAST = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Six times as fast, where PyYAML was built with libyaml."""
DEEPEST = 50
MAX_NODES = 100_000
"""The most nodes of a document, counted with aliases unfolded."""
IN_PYTHON = 10
"""The rank of what Python code declares: after the files, of which there are three at most; the environment is next."""

_NAMED: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_LONGEST_NUMBER = 300


class KeyPlace(Struct, frozen=True, order=True):
    """The place of a key or value. Places sort in the order in which their sources are read, line by line."""

    rank: int
    line: int
    """The line, from 1 on; 0 in an environment variable."""
    source: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


class YamlNode(Struct, frozen=True, kw_only=True):
    """A mapping, a list, or the text of a scalar."""

    value: dict[str, YamlNode] | list[YamlNode] | str
    place: KeyPlace
    """The place of the key, or of the value if it has no key."""
    plain: bool = False
    """Whether it is a scalar without quotes, which may be a number, a boolean or null."""

    @property
    def resolved(self) -> Any:
        """The value by YAML's core schema, with all values of a list or mapping."""
        if isinstance(self.value, dict):
            return {key: node.resolved for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.resolved for node in self.value]
        return resolved(self.value) if self.plain else self.value

    @property
    def keys(self) -> dict[str, YamlNode]:
        """The nodes of a mapping by their keys; none where it is something else."""
        return self.value if isinstance(self.value, dict) else {}

    def having(self, key: str, node: YamlNode) -> YamlNode:
        """Return the mapping with this node at a key."""
        return structs.replace(self, value=self.keys | {key: node})

    @property
    def is_null(self) -> bool:
        return isinstance(self.value, str) and self.plain and resolved(self.value) is None


def parse(text: str, place: KeyPlace) -> tuple[YamlNode | None, list[tuple[KeyPlace, str]]]:
    """Read a YAML document that starts at `place`: the node, and the mistakes as (place, what is wrong).

    No content is an empty mapping; None is what cannot be made sense of.
    """
    fast = _Builder(text, place, FAST)
    with suppress(UnreadableError, yaml.YAMLError, ValueError, OverflowError):
        node = fast.document()
        if not fast.mistakes:
            return node, []
    builder = _Builder(text, place, yaml.SafeLoader)  # whose mistakes have the same words everywhere
    try:
        return builder.document(), builder.mistakes
    except UnreadableError:
        pass
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position)
        builder.refuse(line, f"not valid YAML: a character that must not be in it, U+{error.character:04X}")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        builder.refuse(mark.line if mark else 0, f"not valid YAML: {_reason(error)}")
    except (ValueError, OverflowError):
        # PyYAML lets them through for escapes such as "\UFFFFFFFF".
        builder.refuse(0, "not valid YAML: an escape or a number in it is out of range")
    return None, builder.mistakes


def node_of(value: object, place: KeyPlace) -> YamlNode:
    """Return a value of Python as the node that a document would have for it; None is null there.

    Raises ValueError for what no document holds.
    """
    match value:
        case None | bool():
            return YamlNode(value=json.dumps(value), place=place, plain=True)
        case int() | float():
            return YamlNode(value=str(value), place=place, plain=True)
        case str():
            if not is_text(value):
                raise ValueError(f"{value!r} is not text: it holds half of a surrogate pair")
            return YamlNode(value=str(value), place=place)
        case Struct():
            return node_of(keys_of(value), place)
        case Mapping():
            if bad := [key for key in value if not isinstance(key, str)]:
                raise ValueError(f"the key {bad[0]!r} must be text")
            return YamlNode(value={str(key): node_of(item, place) for key, item in value.items()}, place=place)
        case list() | tuple():
            return YamlNode(value=[node_of(item, place) for item in value], place=place)
        case _:
            raise ValueError(f"{value!r:.100} is not a text, number, boolean, list or mapping")


def keys_of(value: Struct) -> dict[str, Any]:
    """Return the fields of a Struct by the keys that a document has for them, with the one that names its type."""
    config = value.__struct_config__
    return ({config.tag_field: config.tag} if config.tag_field else {}) | structs.asdict(value)


def overlay(below: YamlNode, above: YamlNode) -> YamlNode:
    """Return two nodes as one: mappings key by key, and of everything else the one above."""
    if not isinstance(below.value, dict) or not isinstance(above.value, dict):
        return above
    common = {key: overlay(node, above.value[key]) for key, node in below.value.items() if key in above.value}
    return structs.replace(below, value=below.value | above.value | common)


def resolved(text: str) -> Any:
    """Return None, a boolean, a number or the text itself, as YAML's core schema reads a scalar without quotes."""
    if text in _NAMED:
        return _NAMED[text]
    if len(text) > _LONGEST_NUMBER:
        return text
    if _INTEGER.fullmatch(text):
        return int(text, 0) if text[1:2].isalpha() else int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def is_text(text: str) -> bool:
    """Return whether all of it are characters: text from an escape, or from the environment, may hold half of one."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _reason(error: yaml.MarkedYAMLError) -> str:
    """Return what PyYAML found, without the piece of text that it offers to show: that may hold a password."""
    if "tag handle" in str(error.problem):
        return "a tag that nobody declared; put quotes around text that starts with '!'"
    return " ".join(str(part) for part in (error.context, error.problem) if part)


def _line(event: yaml.Event) -> int:
    return event.start_mark.line if event.start_mark else 0


class UnreadableError(Exception):
    """The rest of the document cannot be made sense of; the mistake is noted."""


class _Builder:
    """Builds the nodes of one document, and notes what is wrong on the way."""

    def __init__(self, text: str, start: KeyPlace, loader: Any) -> None:
        self.mistakes: list[tuple[KeyPlace, str]] = []
        self._start = start
        self._events: Iterator[yaml.Event] = yaml.parse(text, Loader=loader)
        self._anchored: dict[str, tuple[YamlNode, int]] = {}
        self._count = 0

    def document(self) -> YamlNode:
        node = YamlNode(value={}, place=self._start)
        for event in self._events:
            if not isinstance(event, yaml.DocumentStartEvent):
                continue
            if self._count:
                raise self.refuse(_line(event), "a second document starts here: one file holds one")
            root = self._node(next(self._events), ())
            node = node if root.is_null else root
        return node

    def refuse(self, line: int, problem: str) -> UnreadableError:
        """Note a mistake, and return what is raised where the rest cannot be made sense of."""
        self.mistakes.append((self._place(line), problem))
        return UnreadableError()

    def _node(self, event: yaml.Event, path: tuple[str, ...]) -> YamlNode:
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        if len(path) > DEEPEST:
            raise self.refuse(_line(event), f"nested more than {DEEPEST} levels deep")
        tag, anchor = getattr(event, "tag", None), getattr(event, "anchor", None)
        if tag not in (None, "!", "tag:yaml.org,2002:str"):
            # The tag is not shown: it may be a password that lacks its quotes.
            self.refuse(_line(event), "YAML tags are not read; put quotes around text that starts with '!'")
        before = self._count
        self._add(event, 1)
        node = YamlNode(
            value=self._value(event, path),
            place=self._place(_line(event)),
            plain=isinstance(event, yaml.ScalarEvent) and not event.style and tag is None,
        )
        if anchor is not None:
            self._anchored[anchor] = node, self._count - before
        return node

    def _alias(self, event: yaml.AliasEvent) -> YamlNode:
        if event.anchor not in self._anchored:
            # The name is not shown, for the same reason as a tag.
            raise self.refuse(_line(event), "an alias of nothing; put quotes around text that starts with '*'")
        node, size = self._anchored[event.anchor]
        self._add(event, size)
        return node

    def _value(self, event: yaml.Event, path: tuple[str, ...]) -> dict[str, YamlNode] | list[YamlNode] | str:
        if isinstance(event, yaml.ScalarEvent):
            if not is_text(event.value):
                self.refuse(_line(event), "an escape in it is half of a surrogate pair, which is not a character")
            return str(event.value)
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(path)
        items: list[YamlNode] = []
        while not isinstance(item := next(self._events), yaml.SequenceEndEvent):
            items.append(self._node(item, (*path, str(len(items)))))
        return items

    def _mapping(self, path: tuple[str, ...]) -> dict[str, YamlNode]:
        nodes: dict[str, YamlNode] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            line = _line(event)
            key = self._node(event, (*path, "")).value
            inside = (*path, key if isinstance(key, str) else "")
            node = self._node(next(self._events), inside)
            if not isinstance(key, str):
                self.refuse(line, "a key must be text")
            elif key == "<<":
                self.refuse(line, "merge keys (<<) are not read: repeat the keys here")
            elif key in nodes:
                first = nodes[key].place
                self.refuse(line, f"{'.'.join(inside)}: duplicate key, which is already at {first}")
            else:
                nodes[key] = structs.replace(node, place=self._place(line))
        return nodes

    def _add(self, event: yaml.Event, size: int) -> None:
        self._count += size
        if self._count > MAX_NODES:
            raise self.refuse(_line(event), f"holds more than {MAX_NODES} values, aliases unfolded")

    def _place(self, line: int) -> KeyPlace:
        """Return a line of the text, counted from 0 as PyYAML does."""
        return structs.replace(self._start, line=self._start.line + line) if self._start.line else self._start
