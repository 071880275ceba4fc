"""Event types that are declared in Python, each as the entry of `notification_schema` that a file would have for it.

Pure. `Router.event_type` calls `declare`; `config.loading` reads the entry as it reads one of a file, so that both have
one meaning, one set of checks and one set of messages. This module only fills in the defaults that Python has and a
file has not, and refuses what no file could contain, and keys of a storage policy that mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from aviso_workers.aviso.schema import StoragePolicy
from aviso_workers.config.documents import IN_PYTHON, Node, Place, node_of
from aviso_workers.config.settings import JetStream
from aviso_workers.errors import DeclarationError

__all__ = ["declare"]

PLAIN_RULE = {"type": "StringHandler", "required": True}
"""The rule of a field of the key that is declared without one."""


def declare(
    name: str,
    *,
    key: Sequence[str],
    identifier: Mapping[str, Mapping[str, Any]] | None,
    payload: Mapping[str, Any] | None,
    storage_policy: Mapping[str, Any] | None,
    base: str | None,
    owner: str,
    call: FrameType | None,
) -> tuple[str, Node]:
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
        "storage_policy": storage_policy,
    }
    _refuse_unknown(name, storage_policy)
    try:
        return name, node_of(entry, Place(rank=IN_PYTHON, line=line, source=f"{owner}, {file}"))
    except ValueError as error:
        raise DeclarationError(f"event type {name!r}: {error}") from error


def _refuse_unknown(name: str, storage_policy: object) -> None:
    """Raise `DeclarationError` for a key that no storage policy has. In a file it may be one of an aviso-server's."""
    for key in storage_policy if isinstance(storage_policy, Mapping) else ():
        if key not in StoragePolicy.__struct_fields__:
            elsewhere = (
                f"; {key} is a key of notification_backend.jetstream" if key in JetStream.__struct_fields__ else ""
            )
            known = ", ".join(StoragePolicy.__struct_fields__)
            raise DeclarationError(
                f"event type {name!r}: storage_policy has no key {key!r:.100}: it has {known}{elsewhere}"
            )
