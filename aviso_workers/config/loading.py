"""Where the configuration comes from, and every mistake that is in it.

`load` is called once by whoever starts a process: the files, the event types that an app declares in Python beside
them, the environment over both, a context of the `nats` command line over its connection, one conversion, then what
types cannot say. Conversion and checks go on after a mistake, so that one run shows all of them, in the order in which
they are written. Nothing is connected to and nothing is created here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, compress
from operator import not_
from os.path import isfile
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from aviso_workers.aviso import schema
from aviso_workers.aviso.schema import EventType, PayloadRule, StoragePolicy
from aviso_workers.config import streams as declared_streams
from aviso_workers.config.conversion import Reader, described
from aviso_workers.config.documents import IN_PYTHON, KeyPlace, YamlNode, node_of, overlay, parse
from aviso_workers.config.environment import (
    CONNECTION,
    CONTEXT,
    SERVER_FILE,
    WORKERS,
    WORKERS_FILE,
    overrides,
    read_context,
)
from aviso_workers.config.secrets import Secret, is_url
from aviso_workers.config.settings import Config, Document, JetStream, Lineage, NotificationBackend
from aviso_workers.errors import ConfigError
from aviso_workers.jetstream.fields import DeclaredStream

TOKEN = "NATS_TOKEN"
MAX_FILE_BYTES = 4 << 20
"""A configuration has some thousand bytes. What is larger, or a device, is another file."""
PROJECT_FILES = (Path("aviso.yaml"), Path("config/aviso.yaml"))
"""The places for the configuration of a project. The first that exists is read, and no other file."""
HERE = Path("configuration/config.yaml")
PREFIX = re.compile(r"[^\s.*>]+(\.[^\s.*>]+)*")

ENVIRONMENT = IN_PYTHON + 1
"""The rank of variables of the environment, which win over files and Python."""

_SCHEMA = "notification_schema"
_JETSTREAM = "notification_backend.jetstream"
_DEFAULT = KeyPlace(rank=0, line=0, source="default")
_UNUSED = {"jetstream": "notification_backend.in_memory", "in_memory": _JETSTREAM}


EventTypes = Sequence[tuple[str, YamlNode]]
"""Event types that are declared in Python: each by its name, as an entry of `notification_schema`."""


class Examined(Struct, frozen=True, kw_only=True):
    """The part of a configuration that could be read, and the mistakes in it."""

    config: Config
    """It is complete if there are no mistakes. Otherwise, what is wrong is left out or has its default."""
    mistakes: tuple[str, ...]
    unclear: frozenset[str]
    """The names of the event types in which there are mistakes."""


def load(
    path: str | Path | None = None, *, context: str | None = None, environ: Mapping[str, str] = os.environ
) -> Config:
    """Read the configuration from its files and the environment.

    The file is `path`, else the one that AVISO_WORKERS_CONFIG_FILE names, else the one that AVISOSERVER_CONFIG_FILE
    names, else `./aviso.yaml`, else `./config/aviso.yaml`. If there is none of them, the files are those of an
    aviso-server: `./configuration/config.yaml`, `/etc/aviso_server/config.yaml` and `$HOME/.aviso_server/config.yaml`,
    of which the later ones have precedence.

    `context` names a context of the nats CLI, which replaces the server and the credentials of the configuration.
    Default: the context that NATS_CONTEXT names, if the configuration has neither. With a context, or where the
    environment has keys of `notification_backend`, no file is needed.

    Raises ConfigError with all mistakes.
    """
    examined = examine(path, context=context, environ=environ)
    if examined.mistakes:
        raise ConfigError(examined.mistakes)
    return examined.config


def examine(
    path: str | Path | None = None,
    *,
    context: str | None = None,
    environ: Mapping[str, str] = os.environ,
    event_types: EventTypes = (),
    beside: Path | None = None,
) -> Examined:
    """Read what can be read of the same configuration, and every mistake that is in it.

    `event_types` are those that an app declares in Python. With them no file is needed: all else has its default then,
    and the backend is a server at the default URL. A relative `path` that is not a file is looked for in the directory
    `beside` as well. Raises ConfigError where a file cannot be made sense of at all.
    """
    named = context if context is not None else environ.get(CONTEXT)
    files = _files(path, environ, needed=context is None and not named and not event_types, beside=beside)
    root, mistakes = _read(files)
    if not files:
        root = root.having("notification_backend", node_of({"kind": "jetstream"}, _DEFAULT))
    root, clashes = _with_event_types(root, event_types)
    wanted = described(Document)
    root, wrong = overrides(root, environ, wanted=wanted, rank=ENVIRONMENT)
    reader = Reader(unused=_UNUSED.get(_kind(root), ""))
    uses_context = _uses_context(root, context, named, reader)
    if uses_context:
        section, refused = read_context(named or "", environ, rank=ENVIRONMENT)
        root, wrong = _connected(root, section), wrong + refused
    values = reader.fields(root, wanted, "")
    if (backend := values.get("notification_backend")) and backend.kind == "jetstream":
        if not uses_context and (token := _token(backend.jetstream, environ)):
            values["notification_backend"] = _with_token(backend, token, reader)
            if path is None and not {WORKERS_FILE, SERVER_FILE} & environ.keys():
                _refuse_found_servers(reader)
        _refuse_all(reader, _jetstream_mistakes(backend.jetstream, reader))
    elif context is not None and backend:
        reader.refuse("notification_backend.kind", "must be jetstream for a context of the nats command line")
    of_sections = (_schema_mistakes(values, reader), _stream_mistakes(values, reader), _lineage_mistakes(values))
    _refuse_all(reader, chain(clashes, *of_sections))
    _warn_of_fields(values.get(_SCHEMA, {}), reader)
    variables = {place.source for place in reader.places.values() if place.rank == ENVIRONMENT}
    config = Config(
        **{"notification_backend": NotificationBackend(kind="in_memory"), **values},
        sources=(*map(str, files), *sorted(variables)),
        warnings=tuple(_sentences(reader.warnings)),
        origins=_origins(reader),
    )
    return Examined(
        config=config,
        mistakes=tuple(_sentences(mistakes + wrong + reader.mistakes)),
        unclear=frozenset(_unclear(root, config, reader)),
    )


def completed(config: Config, event_types: EventTypes = ()) -> Examined:
    """Return a configuration that is a `Config` already, with the event types that an app declares beside it.

    Event types that were not loaded are checked here, as those of a file are: also those of a `Config` that was
    written in Python. One with a mistake is left out, and has no effect on the others: workers of another app may have
    recorded it. Raises ConfigError where one of a `Config` cannot be made sense of at all.
    """
    reader = Reader(unused="")
    reader.places[""] = KeyPlace(rank=IN_PYTHON, line=0, source="Config(...)")
    loaded, taken, new = _by_origin(config, event_types)
    if not new:
        return Examined(config=config, mistakes=(), unclear=frozenset())
    whole, unclear = dict(loaded), set[str]()
    for name, entry in new:
        path = f"{_SCHEMA}.{name}"
        if name not in whole:
            if event_type := _without_mistakes(name, entry, reader):
                whole[name] = event_type
            else:
                unclear.add(name)
        # The environment may have changed what was declared since it was taken over.
        elif problem := _clash(name, taken.get(name, whole[name]), entry):
            reader.places.setdefault(path, KeyPlace(rank=0, line=0, source=config.origins.get(path, "")))
            reader.refuse(path, problem)
            unclear.add(name)
    for name, problem in schema.check_bases_unique(whole).items():
        reader.refuse(f"{_SCHEMA}.{name}.topic.base", problem)
        unclear.add(name)
    whole = {name: each for name, each in whole.items() if name in loaded or name not in unclear}
    for name, path, problem in _mistakes_beside(config, whole, reader, some_are_missing=bool(unclear)):
        reader.refuse(path, problem)
        unclear.add(name)
    whole = {name: each for name, each in whole.items() if name in loaded or name not in unclear}
    _warn_of_fields({name: known for name, known in whole.items() if name not in loaded}, reader)
    return Examined(
        config=structs.replace(
            config,
            notification_schema=whole,
            warnings=(*config.warnings, *_sentences(reader.warnings)),
            origins={**_origins(reader), **config.origins},
        ),
        mistakes=tuple(_sentences(reader.mistakes)),
        unclear=frozenset(unclear),
    )


def _without_mistakes(name: str, entry: YamlNode, reader: Reader) -> EventType | None:
    """Return an event type; None where it has mistakes, which are noted. They are told apart from those of other event
    types by their number: with dots in a name, key paths do not tell.
    """
    before = len(reader.mistakes)
    event_type: EventType = reader.read(entry, described(EventType), f"{_SCHEMA}.{name}")
    if len(reader.mistakes) == before:
        _refuse_all(reader, iter(schema.mistakes(name, event_type)))
    return event_type if len(reader.mistakes) == before else None


def _mistakes_beside(
    config: Config, event_types: Mapping[str, EventType], reader: Reader, *, some_are_missing: bool
) -> Iterator[tuple[str, str, str]]:
    """Yield what is wrong with event types, each without a mistake of its own, beside the rest of a configuration: the
    event type, the key path and the problem.
    """
    yield from _unsupported_policies(config.notification_backend, event_types, reader)
    by_stream = declared_streams.event_streams(event_types)
    for path, problem in declared_streams.mistakes(config.streams, event_types, config.notification_backend):
        name = by_stream.get(path.removeprefix("streams.").partition(".")[0].upper(), "")
        if name or not some_are_missing:  # else the stream may be that of an event type that is left out
            yield name, path, problem


def _by_origin(
    config: Config, event_types: EventTypes
) -> tuple[Mapping[str, EventType], Mapping[str, YamlNode], EventTypes]:
    """Return the event types of the configuration that were loaded, the declarations that are among these, and the
    others of both as entries that are still to be read."""
    known, origins = config.notification_schema, config.origins
    loaded = {name: known[name] for name in known if f"{_SCHEMA}.{name}" in origins}
    new = [(name, _node_of(name, known[name])) for name in known if name not in loaded]
    is_taken = [origins.get(f"{_SCHEMA}.{name}") == str(entry.place) for name, entry in event_types]
    return loaded, dict(compress(event_types, is_taken)), [*new, *compress(event_types, map(not_, is_taken))]


def _node_of(name: str, event_type: EventType) -> YamlNode:
    place = KeyPlace(rank=IN_PYTHON, line=0, source="Config(...)")
    try:
        return node_of(event_type, place)
    except ValueError as error:
        raise ConfigError([f"{place}: {_SCHEMA}.{name} cannot be read: {error}"]) from error


def _files(path: str | Path | None, environ: Mapping[str, str], *, needed: bool, beside: Path | None) -> Sequence[Path]:
    if path is not None:
        return [_file("configuration", path, beside)]
    for variable in (WORKERS_FILE, SERVER_FILE):
        if variable in environ:
            return [_file(variable, environ[variable].strip())]
    if own := next(filter(isfile, PROJECT_FILES), None):
        return [own]
    found = [place for place in places(environ) if isfile(place)]
    if not found and needed and not any("_NOTIFICATION_BACKEND__" in name.upper() for name in environ):
        looked = ", ".join(map(str, (*PROJECT_FILES, *places(environ))))
        raise ConfigError(
            [
                f"no configuration file: looked for {looked}; give one, name it in {WORKERS_FILE}, name the server in "
                f"{WORKERS}NOTIFICATION_BACKEND__JETSTREAM__NATS_URL, or declare event types in an app and name it "
                "to the command as MODULE:APP"
            ]
        )
    return found


def places(environ: Mapping[str, str]) -> list[Path]:
    """Return where aviso-server looks for its configuration, of which a later file wins."""
    at_home = [Path(home, ".aviso_server/config.yaml")] if (home := environ.get("HOME")) else []
    return [HERE, Path("/etc/aviso_server/config.yaml"), *at_home]


def _file(named_by: str, path: str | Path, beside: Path | None = None) -> Path:
    if not str(path).strip():
        raise ConfigError([f"{named_by}: must name a file, but is empty"])
    if isfile(path):
        return Path(path)
    if beside is not None and isfile(beside / path):
        return beside / path
    directories = dict.fromkeys(str(each) for each in (Path.cwd(), beside) if each is not None)
    below = "" if Path(path).is_absolute() else f" in {' or in '.join(directories)}"
    raise ConfigError([f"{named_by}: {str(path)!r} is not a file{below}"])


def _read(files: Sequence[Path]) -> tuple[YamlNode, list[tuple[KeyPlace, str]]]:
    """Return the files as one mapping, and the mistakes as (place, what is wrong).

    Raises ConfigError where a file cannot be made sense of.
    """
    root = YamlNode(
        value={}, place=KeyPlace(rank=0, line=1, source=str(files[0] if files else "no configuration file"))
    )
    mistakes: list[tuple[KeyPlace, str]] = []
    unreadable = False
    for rank, file in enumerate(files):
        node, wrong = _read_one(file, KeyPlace(rank=rank, line=1, source=str(file)))
        mistakes += wrong
        if node is not None and not isinstance(node.value, dict):
            mistakes.append((node.place, "expected keys and values at the top, such as 'notification_backend:'"))
            node = None
        unreadable = unreadable or node is None
        root = overlay(root, node) if node else root
    if unreadable:
        raise ConfigError(_sentences(mistakes))
    return root, mistakes


def _read_one(file: Path, start: KeyPlace) -> tuple[YamlNode | None, list[tuple[KeyPlace, str]]]:
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            return None, [(structs.replace(start, line=0), f"is larger than {MAX_FILE_BYTES >> 20} MiB")]
        return parse(content.decode("utf-8-sig"), start)
    except OSError as error:
        return None, [(structs.replace(start, line=0), f"cannot be read: {error.strerror}")]
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        return None, [(structs.replace(start, line=line), "is not UTF-8 text")]


def _with_event_types(root: YamlNode, event_types: EventTypes) -> tuple[YamlNode, list[tuple[str, str]]]:
    """Return the root with the event types of Python added, and as (key path, mistake) where one contradicts another
    place.

    An event type may be declared in several places as long as all declarations mean the same, so that it may be in the
    code and in a file which an aviso-server reads too. Where they differ, neither is a safe choice: a key in another
    order is another subject, and a shorter retention removes messages.
    """
    section = root.keys.get(_SCHEMA)
    written = {} if section is None or section.is_null else section.value
    if not event_types or not isinstance(written, dict):
        return root, []
    whole, clashes = dict(written), []
    for name, entry in event_types:
        before = whole.setdefault(name, entry)
        if before is entry:
            continue
        if problem := _clash(name, before, entry):
            clashes.append((f"{_SCHEMA}.{name}", problem))
        elif before.place.rank < IN_PYTHON:
            whole[name] = entry  # by its place `completed` knows that it was loaded
    place = section.place if section else next(iter(whole.values())).place
    return root.having(_SCHEMA, YamlNode(value=whole, place=place)), clashes


def _clash(name: str, before: YamlNode | EventType, entry: YamlNode) -> str:
    """Return what is wrong with an event type that this entry declares another way; empty where both mean the same.

    A declaration that cannot be read differs from every other one.
    """
    here, there = _meaning(name, before), _meaning(name, entry)
    if here is not None and here == there:
        return ""
    said = f"is declared another way at {entry.place}: keep one of them, or let both say the same"
    if here is None or there is None or here[:-1] != there[:-1]:
        return said
    policies = {"this one": here[-1], "that in Python": there[-1]}
    each = [
        place for place, policy in policies.items() if isinstance(policy, StoragePolicy) and policy.allow_duplicates
    ]
    if len(each) != 1:
        return f"{said}; only their storage policies differ"
    return (
        f"{said}. Of the two, only {each[0]} keeps every notification: say `allow_duplicates: true` in the file, or "
        "latest_only=True in Python"
    )


def _meaning(name: str, declared: YamlNode | EventType) -> tuple[object, ...] | None:
    """Return the parts of an event type in which two declarations of it must agree; None where it cannot be read.

    They need not agree in descriptions, nor in `required` of a field, which only concerns watches of an aviso-server.
    """
    reader = Reader(unused="")
    known: EventType = reader.read(declared, described(EventType), name) if isinstance(declared, YamlNode) else declared
    if reader.mistakes:
        return None
    rules = {field: structs.replace(rule, required=True, description=None) for field, rule in known.identifier.items()}
    payload = known.payload or PayloadRule(required=False)
    policy = known.storage_policy or StoragePolicy()
    policy = structs.replace(policy, allow_duplicates=bool(policy.allow_duplicates))
    return schema.topic_of(name, known), rules, payload, policy


def _kind(root: YamlNode) -> str:
    kind = _at(root, "notification_backend", "kind").value
    return kind if isinstance(kind, str) else ""


def _uses_context(root: YamlNode, context: str | None, named: str | None, reader: Reader) -> bool:
    """Return whether a context says where to connect to: a configured connection goes before the one of a variable."""
    if context is not None or not named:
        return context is not None
    given = _at(root, "notification_backend", "jetstream").keys
    if (key := next((key for key in given if key in CONNECTION), None)) is None:
        return _kind(root) in ("", "jetstream")
    text = f"is used, and {CONTEXT} is not: --context goes before the configuration"
    reader.warn(given[key].place, f"{_JETSTREAM}.{key}", text)
    return False


def _connected(root: YamlNode, section: YamlNode) -> YamlNode:
    """Return the root with the keys of another connection, and none of the one that it had: a server must not get the
    credentials that are meant for another one."""
    backend = root.keys.get("notification_backend")
    if backend is None or backend.is_null:
        backend = node_of({"kind": "jetstream"}, section.place)
    if not isinstance(backend.value, dict):
        return root
    before = backend.value.get("jetstream", section)
    kept = {key: node for key, node in before.keys.items() if key not in CONNECTION}
    changed = structs.replace(before, value=kept | section.keys)
    return root.having("notification_backend", backend.having("jetstream", changed))


def _at(node: YamlNode, *keys: str) -> YamlNode:
    """Return what is at these keys; an empty mapping where there is nothing."""
    for key in keys:
        node = node.keys.get(key, YamlNode(value={}, place=_DEFAULT))
    return node


def _ways_to_authenticate(jetstream: JetStream) -> list[str]:
    keys = ("token", "user", "nkey_seed_file", "credentials_file")
    ways = [key for key in keys if getattr(jetstream, key) is not None]
    return ["nats_url", *ways] if jetstream.nats_url.have_user else ways


def _token(jetstream: JetStream, environ: Mapping[str, str]) -> str:
    """Return the token of the environment, where no other way to authenticate is configured."""
    return "" if _ways_to_authenticate(jetstream) else environ.get(TOKEN, "").strip()


def _refuse_found_servers(reader: Reader) -> None:
    """Refuse to send the token of the environment to servers that are named by a file which nobody has named: anybody
    may have put that into the current folder."""
    servers = reader.places.get(f"{_JETSTREAM}.nats_url")
    if servers is not None and servers.source in map(str, (*PROJECT_FILES, HERE)):
        reader.refuse(
            f"{_JETSTREAM}.token",
            f"is not sent to the servers in {servers.source}, which was only found in the current folder: "
            f"name the file in {WORKERS_FILE}, or set the token beside nats_url",
        )


def _with_token(backend: NotificationBackend, token: str, reader: Reader) -> NotificationBackend:
    reader.places[f"{_JETSTREAM}.token"] = KeyPlace(rank=ENVIRONMENT, line=0, source=TOKEN)
    return structs.replace(backend, jetstream=structs.replace(backend.jetstream, token=Secret(token)))


def _jetstream_mistakes(jetstream: JetStream, reader: Reader) -> Iterator[tuple[str, str]]:
    if jetstream.retention_time == 0:
        yield f"{_JETSTREAM}.retention_time", "must be > 0"
    yield from _authentication_mistakes(jetstream, reader)
    if jetstream.domain and jetstream.api_prefix:
        yield f"{_JETSTREAM}.api_prefix", "must not be combined with domain: keep one of them"
    for key in ("api_prefix", "inbox_prefix"):
        if (prefix := getattr(jetstream, key)) and not PREFIX.fullmatch(prefix):
            yield f"{_JETSTREAM}.{key}", "must be the begin of a subject, without wildcards, blanks and a last '.'"
    yield from _file_mistakes(jetstream, reader)


def _authentication_mistakes(jetstream: JetStream, reader: Reader) -> Iterator[tuple[str, str]]:
    first, *more = _ways_to_authenticate(jetstream) or [""]
    for way in more:
        yield f"{_JETSTREAM}.{way}", f"must not be combined with {first}: keep one way to authenticate"
    has_user, has_password = (f"{_JETSTREAM}.{key}" in reader.places for key in ("user", "password"))
    if has_user and not has_password:
        yield f"{_JETSTREAM}.user", "needs a password, which may stand in the environment"
    if has_password and not has_user:
        yield f"{_JETSTREAM}.password", "needs a user"


def _file_mistakes(jetstream: JetStream, reader: Reader) -> Iterator[tuple[str, str]]:
    tls = jetstream.tls
    if tls and tls.key_file and f"{_JETSTREAM}.tls.cert_file" not in reader.places:
        yield f"{_JETSTREAM}.tls.key_file", "needs a cert_file"
    files = {key: getattr(jetstream, key) for key in ("nkey_seed_file", "credentials_file")}
    files |= {f"tls.{key}": getattr(tls, key, None) for key in ("ca_file", "cert_file", "key_file")}
    for key, file in files.items():
        if file is not None and not isfile(file):
            # The name is not repeated: a seed may stand where its file should.
            yield f"{_JETSTREAM}.{key}", f"must name a file that exists, as seen from {os.getcwd()}"


def _schema_mistakes(values: Mapping[str, Any], reader: Reader) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with event types, as far as they could be read: no mistake is told twice."""
    event_types: dict[str, EventType] = values.get(_SCHEMA, {})
    whole = {}
    for name, event_type in event_types.items():
        prefix = f"notification_schema.{name}"
        if not reader.is_wrong(f"{prefix}.topic") and not reader.is_wrong(f"{prefix}.identifier"):
            whole[name] = event_type
        for path, problem in schema.mistakes(name, event_type):
            if name in whole or path.startswith(f"{prefix}.storage_policy."):
                yield path, problem
    for name, problem in schema.check_bases_unique(whole).items():
        yield f"{_SCHEMA}.{name}.topic.base", problem
    if backend := values.get("notification_backend"):
        for _, path, problem in _unsupported_policies(backend, event_types, reader):
            yield path, problem


def _unsupported_policies(
    backend: NotificationBackend, event_types: Mapping[str, EventType], reader: Reader
) -> Iterator[tuple[str, str, str]]:
    """Yield the storage policies that a backend has not: the event type, the key path and the problem."""
    if backend.kind == "jetstream":
        return
    for name, event_type in event_types.items():
        for option in structs.asdict(event_type.storage_policy) if event_type.storage_policy else ():
            path = f"notification_schema.{name}.storage_policy.{option}"
            # Every event type of Python says `allow_duplicates`, which a stream in memory knows as well.
            is_default = option == "allow_duplicates" and reader.place(path).rank == IN_PYTHON
            if path in reader.places and not is_default:
                yield name, path, f"is not supported by backend {backend.kind!r}"


def _warn_of_fields(event_types: Mapping[str, EventType], reader: Reader) -> None:
    for name, event_type in event_types.items():
        for field in schema.not_stored(event_type):
            path = f"notification_schema.{name}.identifier.{field}"
            reader.warn(
                reader.place(path),
                path,
                "is not in key_order, so its values are not stored: no watch, replay or agent sees them, "
                "and none can filter by them",
            )


def _unclear(root: YamlNode, config: Config, reader: Reader) -> Iterator[str]:
    for name in _at(root, _SCHEMA).keys:
        if name not in config.notification_schema or reader.is_wrong(f"notification_schema.{name}"):
            yield name


def _stream_mistakes(values: Mapping[str, Any], reader: Reader) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with declared streams, if all that they are compared with could be read."""
    if not reader.is_wrong("notification_backend") and not reader.is_wrong(_SCHEMA):
        streams: dict[str, DeclaredStream] = values.get("streams", {})
        whole = {name: stream for name, stream in streams.items() if not reader.is_wrong(f"streams.{name}")}
        yield from declared_streams.mistakes(whole, values.get(_SCHEMA, {}), values["notification_backend"])


def _lineage_mistakes(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    lineage: Lineage | None = values["workers"].lineage if "workers" in values else None
    if lineage is None:
        return
    if (lineage.subject is None) == (lineage.url is None):
        yield "workers.lineage", "must have either a subject or a url"
    if lineage.subject is not None and not PREFIX.fullmatch(lineage.subject):
        yield "workers.lineage.subject", f"must be one subject such as lineage.runs, not {lineage.subject!r}"
    if lineage.url is not None:
        if re.search("[@?#]", lineage.url) or not is_url(lineage.url, ("http", "https")):
            yield "workers.lineage.url", "must be a URL such as https://host, without a user: a token is api_key"
    elif lineage.api_key is not None:
        yield "workers.lineage.api_key", "is for a url; the connection to NATS has its own credentials"


def _origins(reader: Reader) -> dict[str, str]:
    return {path: str(place) for path, place in reader.places.items() if path}


def _refuse_all(reader: Reader, mistakes: Iterator[tuple[str, str]]) -> None:
    for path, problem in mistakes:
        reader.refuse(path, problem)


def _sentences(found: list[tuple[KeyPlace, str]]) -> list[str]:
    return [f"{place}: {text}" for place, text in sorted(found, key=lambda each: each[0])]
