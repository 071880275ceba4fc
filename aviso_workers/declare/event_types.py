"""Event types that are declared in Python, each as the entry of `notification_schema` that a file would have for it.

Pure. `Router.event_type` calls `declare`; `config.loading` reads the entry as it reads one of a file, so that both have
one meaning, one set of checks and one set of messages. This module only fills in the defaults that Python has and a
file has not: a field of the key may be any text, and the stream keeps every notification. It refuses what no file could
contain, and keys of a storage policy that mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, TypedDict

from aviso_workers.aviso.literals import AnyDuration, Duration
from aviso_workers.aviso.schema import StoragePolicy
from aviso_workers.config.documents import IN_PYTHON, KeyPlace, YamlNode, node_of
from aviso_workers.config.settings import JetStream
from aviso_workers.declare import durations
from aviso_workers.errors import DeclarationError


class StorageKeys(TypedDict, total=False):
    """The keys of a storage policy, as in a file: see `aviso.schema.StoragePolicy`."""

    retention_time: AnyDuration
    max_messages: int
    max_size: str
    allow_duplicates: bool
    compression: bool


PLAIN_RULE = {"type": "StringHandler", "required": True}
"""The rule of a field of the key that is declared without one."""


def declare(
    name: str,
    *,
    key: Sequence[str],
    identifier: Mapping[str, Mapping[str, Any]] | None,
    payload: Mapping[str, Any] | None,
    storage_policy: StorageKeys | None,
    latest_only: bool,
    base: str | None,
    owner: str,
    call: FrameType | None,
) -> tuple[str, YamlNode]:
    """Return the name and the entry of an event type.

    `owner` names the app or router that declares it, `call` is the frame of the call that does.

    Raises `DeclarationError`.
    """
    if not isinstance(name, str):
        raise DeclarationError(f"event type {name!r}: its name must be text")
    file, line = (call.f_code.co_filename, call.f_lineno) if call else ("Python", 0)
    rules: Any = {} if identifier is None else identifier
    if isinstance(rules, Mapping) and isinstance(key, list | tuple):
        rules = {**{field: PLAIN_RULE for field in key if isinstance(field, str)}, **rules}
    entry = {
        "topic": {"base": name if base is None else base, "key_order": key},
        "identifier": rules,
        "payload": payload,
        "storage_policy": _completed(name, storage_policy, latest_only),
    }
    try:
        return name, node_of(entry, KeyPlace(rank=IN_PYTHON, line=line, source=f"{owner}, {file}"))
    except ValueError as error:
        raise DeclarationError(f"event type {name!r}: {error}") from error


def _completed(name: str, storage_policy: object, latest_only: object) -> object:
    """Return the storage policy with what `latest_only` says. Raises `DeclarationError` where the two differ."""
    if not isinstance(latest_only, bool):
        raise DeclarationError(f"event type {name!r}: latest_only= must be True or False, found {latest_only!r:.100}")
    if storage_policy is not None and not isinstance(storage_policy, Mapping):
        return storage_policy  # which is refused as in a file
    given = storage_policy or {}
    _refuse_unknown(name, given)
    if latest_only and given.get("allow_duplicates"):
        raise DeclarationError(
            f"event type {name!r}: latest_only=True keeps one notification per subject, and allow_duplicates keeps all "
            "of them: leave out one of the two"
        )
    completed = {"allow_duplicates": not latest_only, **given}
    if isinstance(time := given.get("retention_time"), (int, float, timedelta)):
        completed["retention_time"] = _literal(name, time)
    return completed


def _literal(name: str, time: float | timedelta) -> str:
    """Return a duration as a file has it, such as `30d`."""
    seconds = durations.seconds(f"event type {name!r}: storage_policy.retention_time", time)
    if not isinstance(seconds, int) or seconds <= 0:
        raise DeclarationError(
            f"event type {name!r}: storage_policy.retention_time must be whole seconds above 0, found {time!r:.100}"
        )
    return Duration(seconds).literal()


def _refuse_unknown(name: str, storage_policy: Mapping[Any, Any]) -> None:
    """Raise `DeclarationError` for a key that no storage policy has. In a file it may be one of an aviso-server's."""
    for key in storage_policy:
        if key not in StoragePolicy.__struct_fields__:
            elsewhere = (
                f"; {key} is a key of notification_backend.jetstream" if key in JetStream.__struct_fields__ else ""
            )
            known = ", ".join(StoragePolicy.__struct_fields__)
            raise DeclarationError(
                f"event type {name!r}: storage_policy has no key {key!r:.100}: it has {known}{elsewhere}"
            )
