"""How we tell a server who we are: a token, a user, an NKey, or a user JWT with its seed.

The file of a JWT is read for each connection, because who issues short ones replaces it. nats-py's own reading of it
never returns where the JWT is missing, and what it raises ends reconnecting for good.
"""

from __future__ import annotations

import base64
import binascii
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
import nats.errors
import nkeys

from aviso_workers import config
from aviso_workers.errors import RefusedError

JWT = "BEGIN NATS USER JWT"
SEED = "BEGIN USER NKEY SEED"


class UnusableFileError(nats.errors.Error, RefusedError):
    """A file that the settings name cannot be read, or holds something else. nats-py, which may raise it while it
    connects, goes on after errors of its own only."""


def options(settings: config.JetStream) -> dict[str, Any]:
    """Return what `nats.aio.client.Client.connect` takes. Raises `UnusableFileError`."""
    if settings.token:
        return {"token": settings.token.reveal()}
    if settings.user:
        return {"user": settings.user, "password": settings.password.reveal() if settings.password else ""}
    if settings.nkey_seed_file:
        return {"nkeys_seed_str": seed_of(settings.nkey_seed_file)}
    return _of_credentials(settings.credentials_file) if settings.credentials_file else {}


def user(settings: config.JetStream) -> str:
    """Return the name that a server has for us: the user, or the public key of an NKey or a JWT. It is empty where the
    settings do not say it, as with a token or a certificate alone.

    Raises `UnusableFileError`.
    """
    if settings.token:
        return ""
    if settings.user:
        return settings.user
    if settings.nkey_seed_file:
        public_key: bytes = _key_pair_of(settings.nkey_seed_file).public_key
        return public_key.decode()
    if settings.credentials_file:
        return _subject_of_jwt(settings.credentials_file)
    urls = [urlsplit(url) for url in settings.servers]
    users = {unquote(url.username or "") for url in urls if url.password is not None}  # without one it is a token
    return users.pop() if len(users) == 1 else ""


class _Claims(msgspec.Struct):
    sub: str


def _subject_of_jwt(file: str) -> str:
    claims = _block(file, JWT).split(".")[1:2]
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(f"{claims[0]}=="), type=_Claims).sub
    except (IndexError, binascii.Error, msgspec.MsgspecError) as error:
        raise UnusableFileError(f"credentials_file {file}: holds no user JWT") from error


def _of_credentials(file: str) -> dict[str, Any]:
    def jwt() -> bytearray:
        return bytearray(_block(file, JWT).encode())

    def sign(nonce: str) -> bytes:
        return base64.b64encode(_key_pair(_block(file, SEED), f"credentials_file {file}").sign(nonce.encode()))

    jwt()
    sign("tried at the start")
    return {"user_jwt_cb": jwt, "signature_cb": sign}


def seed_of(file: str) -> str:
    """Return the seed in a file of an NKey. Raises `UnusableFileError`."""
    _key_pair_of(file)
    return _seed(file)


def _key_pair_of(file: str) -> nkeys.KeyPair:
    return _key_pair(_seed(file), f"nkey_seed_file {file}")


def _seed(file: str) -> str:
    return _text(file, f"nkey_seed_file {file}").strip()


def _block(file: str, title: str) -> str:
    """Return the line below the one that has the title."""
    what = f"credentials_file {file}"
    for line, following in pairwise(_text(file, what).splitlines()):
        if line.strip(" -") == title:
            return following.strip()
    raise UnusableFileError(f"{what}: has no line '-----{title}-----'")


def _key_pair(seed: str, what: str) -> nkeys.KeyPair:
    # Neither the seed nor a part of it is repeated.
    problem = f"{what}: holds no seed of a user's NKey, which begins with SU"
    if not seed.startswith("SU"):
        raise UnusableFileError(problem)
    try:
        return nkeys.from_seed(bytearray(seed.encode()))
    except (nkeys.NkeysError, ValueError) as error:
        raise UnusableFileError(problem) from error


def _text(file: str, what: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise UnusableFileError(f"{what}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UnusableFileError(f"{what}: is not UTF-8 text") from error
