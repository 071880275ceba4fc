"""Servers in operator mode, which take user JWTs: operator, account and users, signed as nats-server expects them."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import nkeys


class Key:
    def __init__(self, prefix: int) -> None:
        self.seed = nkeys.encode_seed(os.urandom(32), prefix).decode()
        self.pair = nkeys.from_seed(bytearray(self.seed.encode()))
        self.public = self.pair.public_key.decode()


class Operator:
    """An operator with one account, `DATA`, which has JetStream."""

    def __init__(self) -> None:
        self._key, self._account = Key(nkeys.PREFIX_BYTE_OPERATOR), Key(nkeys.PREFIX_BYTE_ACCOUNT)
        system = Key(nkeys.PREFIX_BYTE_ACCOUNT)
        unlimited = dict.fromkeys(("subs", "data", "payload", "conn", "leaf", "imports", "exports"), -1)
        stores = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
        limits = {**unlimited, "wildcards": True}
        data = _signed(self._key, self._account.public, "DATA", {"type": "account", "limits": limits | stores})
        of_system = _signed(self._key, system.public, "SYS", {"type": "account", "limits": limits})
        operator = _signed(self._key, self._key.public, "OP", {"type": "operator", "system_account": system.public})
        self.server_config = (
            f"operator: {operator}\n"
            f"system_account: {system.public}\n"
            f"resolver: MEMORY\n"
            f"resolver_preload: {{ {self._account.public}: {data}, {system.public}: {of_system} }}\n"
        )

    def user(self, file: Path, *, expires_in: float | None = None, account: Operator | None = None) -> Path:
        """Write the credentials of a new user; with `account`, signed by that of another operator."""
        key = Key(nkeys.PREFIX_BYTE_USER)
        claims: dict[str, Any] = {} if expires_in is None else {"exp": int(time.time() + expires_in)}
        limits = {"subs": -1, "data": -1, "payload": -1}
        issuer = (account or self)._account
        jwt = _signed(issuer, key.public, "user", {"type": "user", "pub": {}, "sub": {}, **limits}, **claims)
        file.write_text(
            f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{key.seed}\n------END USER NKEY SEED------\n"
        )
        return file


def _signed(issuer: Key, subject: str, name: str, nats: dict[str, Any], **claims: Any) -> str:
    body = {
        "iat": int(time.time()) - 60,
        "iss": issuer.public,
        "name": name,
        "sub": subject,
        "nats": {"version": 2, **nats},
        **claims,
    }
    body["jti"] = base64.b32encode(hashlib.sha256(json.dumps(body).encode()).digest()).decode().rstrip("=")
    parts = [_encoded(json.dumps(part).encode()) for part in ({"typ": "JWT", "alg": "ed25519-nkey"}, body)]
    signature = issuer.pair.sign(".".join(parts).encode())
    return ".".join([*parts, _encoded(signature)])


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
