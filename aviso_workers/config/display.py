"""The configuration for people: its JSON Schema for editors, its effective values with their origin, and its event
types as a file has them. And the files of `config/` in the repository, which are installed with the package:
configurations to begin with, and what Prometheus, Grafana and KEDA are given.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from importlib import resources
from itertools import pairwise
from typing import Any

import msgspec
import yaml
from msgspec import Struct

from aviso_workers.aviso import literals, schema
from aviso_workers.aviso.literals import Duration, Size, SizeLimit
from aviso_workers.config import nats_server, settings
from aviso_workers.config.documents import keys_of, resolved
from aviso_workers.config.secrets import HIDDEN, Secret, ServerUrls, address_only, without_user
from aviso_workers.config.settings import Config, Document
from aviso_workers.errors import ConfigError
from aviso_workers.jetstream import fields

_LITERALS: dict[type, dict[str, Any]] = {
    Duration: {"type": "string", "pattern": r"^\s*[0-9]+[smhdwSMHDW]\s*$"},
    Size: {"type": "string", "pattern": r"^\s*[0-9]+[KMGT]i?\s*$"},
    SizeLimit: {"type": "string", "pattern": r"^\s*([0-9]+[KMGT]i?|unlimited)\s*$"},
    Secret: {"type": "string", "minLength": 1},
    ServerUrls: {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string"}}]},
}
_AGENTS = "workers.agents."
_TELLTALE = re.compile(
    r"pas+_?(w|phrase)|pwd|secret|token|credential|(api|access|private)[_-]?key|auth(?!ors?$)|dsn|connection",
    re.IGNORECASE,
)
_ADDRESSES = re.compile(r"server\.(cluster\.routes|gateways\.remotes\.|leafnodes\.remotes\..*\.urls)")
"""Key paths of servers' addresses, with or without a scheme, in which a password may stand by mistake."""


SHIPPED = "aviso_workers.shipped"
"""The package as which pyproject.toml installs `config/`."""
SHIPPED_FILES = {
    "example.yaml": "every key of a configuration, commented, with its default",
    "dev.yaml": "a configuration for development",
    "prometheus.yml": "a scrape configuration of Prometheus",
    "prometheus-rules.yml": "alerts for Prometheus, each with what to do",
    **{f"grafana-{of}.json": f"board of Grafana: {of}" for of in ("overview", "agent", "timers", "streams", "spark")},
    "keda.yaml": "a ScaledObject of KEDA: as many pods as an agent's lag needs",
}
"""A description of each file, by its name."""


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a configuration file."""
    written = msgspec.json.schema(Document, schema_hook=_LITERALS.__getitem__)
    written = msgspec.json.decode(msgspec.json.encode(written))  # a default that is a tuple is a list
    modules = (settings, nats_server, fields, schema)
    structs = {name: each for module in modules for name, each in vars(module).items() if isinstance(each, type)}
    for name, definition in written["$defs"].items():
        said = descriptions(structs[name])
        definition["properties"] = {
            key: {"description": said[key], **found} if key in said else found
            for key, found in definition["properties"].items()
        }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of aviso-workers",
        **written,
    }


def descriptions(struct: type[Struct]) -> dict[str, str]:
    """Return the docstrings below the fields of a Struct and of those that it is made of, by field, as one line each.

    They are read from its source, as Python does not keep them.
    """
    found: dict[str, str] = {}
    for each in reversed(
        [base for base in struct.__mro__ if base.__module__.startswith(__package__.partition(".")[0])]
    ):
        (class_,) = ast.parse(inspect.getsource(each)).body
        assert isinstance(class_, ast.ClassDef)
        for field, below in pairwise(class_.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


def effective(config: Config, *, agents: Mapping[str, type[Struct]] | None = None) -> list[tuple[str, Any, str]]:
    """Return every value in force, as (key path, value, origin); what was not set comes from `default`.

    Secrets are masked, and of servers' URLs all but scheme, host and port; of other URLs the user. Of agents' own
    sections all texts are masked, but for the fields of settings that are known: those of `agents`, by the agent's
    name.
    """
    sections = ((name, getattr(config, name)) for name in Document.__struct_fields__)
    return [
        (path, value if _is_plain(path, value, agents or {}) else HIDDEN, config.origins.get(path, "default"))
        for name, section in sections
        for path, value in _leaves(name, section)
    ]


def event_types(config: Config) -> str:
    """Return the event types as YAML, as `notification_schema` of a file has them, without what is a default."""
    return yaml_text({"notification_schema": _shown("", config.notification_schema)})


def yaml_text(document: Mapping[str, Any]) -> str:
    """Return plain data as YAML that readers of YAML 1.1 and 1.2 read alike."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Puts quotes around what YAML 1.2 takes for more than text; PyYAML does so for YAML 1.1."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = None if isinstance(resolved(text), str) else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(str, _Dumper.represent_text)


def _is_plain(path: str, value: Any, agents: Mapping[str, type[Struct]]) -> bool:
    if not path.startswith(_AGENTS) or value is None:
        return True
    name, _, key = path.removeprefix(_AGENTS).partition(".")
    if _TELLTALE.search(key):
        return False
    known: tuple[str, ...] = getattr(agents.get(name), "__struct_fields__", ())
    return isinstance(value, bool | int | float) or key.partition(".")[0] in known


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Struct):
        value = keys_of(value)
    if not isinstance(value, dict):
        yield path, _shown(path, value)
        return
    for key, item in value.items():
        yield from _leaves(f"{path}.{key}", item)


def _shown(path: str, value: Any) -> Any:
    """Return a value as plain data. Without a path, it is that of an event type, whose keys are no secrets."""
    match value:
        case Secret() | ServerUrls() | Duration() | Size():
            return str(value)
        case datetime():
            return value.isoformat()
        case list() | tuple():
            return [_shown(path, item) for item in value]
        case Struct():
            return {key: _shown(path, item) for key, item in keys_of(value).items() if item is not None}
        case dict():
            hidden = [key for key in value if path and _TELLTALE.search(key)]
            return {key: HIDDEN if key in hidden else _shown(path, item) for key, item in value.items()}
        case str() if _ADDRESSES.match(path):
            return address_only(value)
        case str() if "://" in value:
            return without_user(value)
        case _:
            return value


def shipped(name: str) -> str:
    """Return the text of one of `SHIPPED_FILES`. Raises `ConfigError` where there is none of this name."""
    if name not in SHIPPED_FILES:
        raise ConfigError([f"no file {name!r} is shipped; {literals.suggestion(name, [*SHIPPED_FILES])}"])
    return resources.files(SHIPPED).joinpath(name).read_text()
