"""Environment variables, and a context of NATS -> nodes, laid over what the files say.

`loading` calls `overrides`. A variable names a key by its path, with `__` between the levels:
`AVISOSERVER_NOTIFICATION_BACKEND__JETSTREAM__NATS_URL` as aviso-server reads it, and the same with `AVISO_WORKERS_`,
which wins. Names have no case, as aviso-server's have none, and `_` stands for `-` as well, so those of event types and
routers are matched with what the files have.

`loading` calls `read_context` for `--context NAME`, and for NATS_CONTEXT where the configuration says nothing of a
connection: a context of the `nats` command line becomes the keys of our connection. The `nats` command line keeps its
contexts as JSON files in `~/.config/nats/context` (or below `$XDG_CONFIG_HOME`), and ignores what it does not know of
them. We refuse what we do not know or cannot do: a connection that leaves out a part of what its owner wrote down may
go to another place, or go there unprotected.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import reduce
from itertools import product
from pathlib import Path
from string import Template
from typing import Any

import msgspec
from msgspec import inspect

from aviso_workers.config.conversion import near, without_none
from aviso_workers.config.documents import KeyPlace, YamlNode, is_text, overlay, parse
from aviso_workers.errors import ConfigError

SERVER, WORKERS = "AVISOSERVER_", "AVISO_WORKERS_"
SERVER_FILE, WORKERS_FILE = f"{SERVER}CONFIG_FILE", f"{WORKERS}CONFIG_FILE"
_NOT_KEYS = (SERVER_FILE, WORKERS_FILE, f"{WORKERS}NATS_SERVER", f"{WORKERS}PURE")


_LISTS = inspect.VarTupleType | inspect.TupleType
_MAPPINGS = inspect.StructType | inspect.UnionType | inspect.DictType | inspect.AnyType


CONTEXT = "NATS_CONTEXT"
SELECTED = "selected"
"""The name for the context that `nats context select` has chosen."""

TLS = "tls."
KEYS = {
    "url": "nats_url",
    "user": "user",
    "password": "password",
    "token": "token",
    "creds": "credentials_file",
    "nkey": "nkey_seed_file",
    "ca": f"{TLS}ca_file",
    "cert": f"{TLS}cert_file",
    "key": f"{TLS}key_file",
    "jetstream_domain": "domain",
    "jetstream_api_prefix": "api_prefix",
    "inbox_prefix": "inbox_prefix",
}
"""Our key for each field of a context, below `notification_backend.jetstream`."""
CONNECTION = frozenset(key.partition(".")[0] for key in KEYS.values())
"""The keys for the server and the credentials. A context replaces all of them."""

FILES = frozenset({"creds", "nkey", "ca", "cert", "key"})
ABOUT_NO_CONNECTION = frozenset({"name", "description", "color_scheme"})
REFUSED = {
    "nsc": "we do not ask nsc: write its credentials to a file with `nsc generate creds`, and name that in 'creds'",
    "user_jwt": "put the JWT and its seed into one file, and name that in 'creds'",
    "user_seed": "put the JWT and its seed into one file, and name that in 'creds'",
    "socks_proxy": "we connect without a proxy",
    "tls_first": "we wait for the server's greeting before the TLS handshake: let the server allow that "
    "(handshake_first: auto)",
    "jetstream_event_prefix": "we listen to advisories where the server sends them, at $JS.EVENT",
    "windows_cert_store": "we read certificates from files: name them in 'ca', 'cert' and 'key'",
    "windows_cert_match_by": "we read certificates from files: name them in 'ca', 'cert' and 'key'",
    "windows_cert_match": "we read certificates from files: name them in 'ca', 'cert' and 'key'",
    "windows_ca_certs_match": "we read certificates from files: name them in 'ca', 'cert' and 'key'",
}
"""Fields of a context that are not supported, and what to do instead."""

SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):", re.IGNORECASE)
RESOLVED = frozenset({"file", "op", "nsc", "env", "data"})
"""The schemes by which the `nats` command line takes a secret from elsewhere."""


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
            hint = near(part, known) if known else "it holds no keys"
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


def read_context(name: str, environ: Mapping[str, str], *, rank: int) -> tuple[YamlNode, list[tuple[KeyPlace, str]]]:
    """Return the section `notification_backend.jetstream` that the context stands for, and its mistakes.

    `name` is the name of a context, `selected`, or the path of a JSON file. No mistake repeats a value: it may be a
    secret. Raises `ConfigError` where there is no such context, or its file cannot be made sense of.
    """
    file = _file(name, environ)
    place = KeyPlace(rank=rank, line=0, source=str(file))
    given = {field: value for field, value in _fields(file).items() if value not in (None, "", False, [])}
    problems = dict(_problems(given))
    nodes = {
        KEYS[field]: YamlNode(value=_path(value, environ) if field in FILES else value, place=place)
        for field, value in given.items()
        if field in KEYS and field not in problems
    }
    section = {key: node for key, node in nodes.items() if not key.startswith(TLS)}
    if tls := {key.removeprefix(TLS): node for key, node in nodes.items() if key.startswith(TLS)}:
        section["tls"] = YamlNode(value=tls, place=place)
    return YamlNode(value=section, place=place), [(place, problem) for problem in problems.values()]


def _file(name: str, environ: Mapping[str, str]) -> Path:
    if name.endswith(".json") and Path(name).is_file():
        return Path(name)
    root = Path(environ.get("XDG_CONFIG_HOME") or _home(environ) / ".config", "nats")
    contexts = root / "context"
    found = sorted(file.stem for file in contexts.glob("*.json"))
    if name == SELECTED:
        if SELECTED in found:
            file = contexts / f"{SELECTED}.json"
            raise ConfigError([f"{file}: {SELECTED!r} stands for the context that is selected: rename this one"])
        name = _selected(root)
    if name not in found:
        there = f"there are: {', '.join(found)}" if found else "there is none"
        raise ConfigError([f"no context {name!r} in {contexts}; {there}"])
    return contexts / f"{name}.json"


def _selected(root: Path) -> str:
    name = ""
    with suppress(OSError, UnicodeDecodeError):
        name = (root / "context.txt").read_text(encoding="utf-8").strip()
    if not name:
        raise ConfigError(["no context is selected: `nats context select NAME` selects one, or name it by --context"])
    return name


def _fields(file: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError([f"{file}: cannot be read: {error.strerror}"]) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"{file}: is not a JSON object, as contexts of the nats command line are"]) from error


def _problems(given: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the fields that cannot be used, and why."""
    for field, value in given.items():
        if field in ABOUT_NO_CONNECTION:
            continue
        if field in REFUSED:
            yield field, f"{field!r} of a context is not supported: {REFUSED[field]}"
        elif field not in KEYS:
            yield field, f"{field!r} is not known as a field of a context, so what it asks for is not done: take it out"
        elif not isinstance(value, str):
            yield field, f"{field!r} must be text"
        elif scheme := _scheme(field, value):
            instead = "name a file" if field in FILES else "give the value itself"
            yield field, f"{field!r} is taken from elsewhere by '{scheme}:', which is not supported: {instead}"


def _scheme(field: str, value: str) -> str:
    """Return the scheme by which a value names another place, '' where it is the value itself or a file."""
    found = SCHEME.match(value)
    scheme = found[1].lower() if found else ""
    if field == "url" or (field in FILES and scheme == "file"):
        return ""
    return scheme if field in FILES or scheme in RESOLVED else ""


def _path(value: str, environ: Mapping[str, str]) -> str:
    """Return a path with `file://` taken off, and `$VARIABLE` and `~` put in, as the `nats` command line does."""
    bare = value[len("file://") :] if value.lower().startswith("file://") else value
    expanded = Template(bare).safe_substitute(environ)
    return f"{_home(environ)}{expanded[1:]}" if expanded.startswith("~") else expanded


def _home(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("HOME") or Path.home())
