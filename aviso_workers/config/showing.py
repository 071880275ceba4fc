"""The configuration for people: its JSON Schema for editors, and its effective values with their origin."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct

from aviso_workers.config.secrets import HIDDEN, Secret, ServerUrls
from aviso_workers.config.settings import Config, Document
from aviso_workers.literals import Duration, Size, SizeLimit

__all__ = ["effective", "json_schema"]

_LITERALS: dict[type, dict[str, Any]] = {
    Duration: {"type": "string", "pattern": r"^\s*[0-9]+[smhdwSMHDW]\s*$"},
    Size: {"type": "string", "pattern": r"^\s*[0-9]+[KMGT]i?\s*$"},
    SizeLimit: {"type": "string", "pattern": r"^\s*([0-9]+[KMGT]i?|unlimited)\s*$"},
    Secret: {"type": "string", "minLength": 1},
    ServerUrls: {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string"}}]},
}
_AGENTS = "workers.agents."
_TELLTALE = re.compile(r"password|passwd|secret|token|credential|api_?key", re.IGNORECASE)


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a configuration file."""
    written = msgspec.json.schema(Document, schema_hook=_LITERALS.__getitem__)
    written = msgspec.json.decode(msgspec.json.encode(written))  # a default that is a tuple is a list
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of aviso-workers",
        **written,
    }


def effective(config: Config) -> list[tuple[str, Any, str]]:
    """Every value in force: (key path, value, origin). Secrets are masked; what was not set comes from `default`."""
    sections = ((name, getattr(config, name)) for name in Document.__struct_fields__)
    return [
        (path, value, config.origins.get(path, "default"))
        for name, section in sections
        for path, value in _leaves(name, section)
    ]


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Struct):
        inside = {name: getattr(value, name) for name in value.__struct_fields__}
        tag = value.__struct_config__
        value = {tag.tag_field: tag.tag, **inside} if tag.tag_field else inside
    if not isinstance(value, dict):
        hidden = path.startswith(_AGENTS) and _TELLTALE.search(path.rpartition(".")[2])
        yield path, HIDDEN if hidden else _shown(value)
        return
    for key, item in value.items():
        yield from _leaves(f"{path}.{key}", item)


def _shown(value: Any) -> Any:
    match value:
        case Secret() | ServerUrls() | Duration() | Size():
            return str(value)
        case datetime():
            return value.isoformat()
        case list() | tuple():
            return [_shown(item) for item in value]
        case dict():
            return {key: HIDDEN if _TELLTALE.search(key) else _shown(item) for key, item in value.items()}
        case _:
            return value
