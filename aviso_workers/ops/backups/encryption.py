"""Encryption of archives to public keys, in the format of age, so that a backup may be stored anywhere.

Called by `storage`, `chains` and `completion`. Followed: age-encryption.org/v1, by the library pyrage; the programs age
and rage read what is written here, and `age-keygen` makes keys. Whoever makes backups needs the recipients' public keys
only. What is read is authenticated piece by piece, and a file that breaks off is an error at its end. The format does
not say who encrypted: whoever has the public key and may write to the directory can put another backup there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from aviso_workers.errors import BackupError, DeclarationError
from aviso_workers.ops.backups.s2 import MalformedError, Pieces, Readable, prefetched

PIECE_BYTES = 256 * 1024
"""Bytes of decrypted data that are handed from thread to thread at a time."""
RECIPIENT, SECRET = "age1", "AGE-SECRET-KEY-"
"""How a public and a secret key begin."""


class Encrypted(Readable, Protocol):
    """A file that is decrypted from its present position."""

    @property
    def name(self) -> str: ...


class Identities:
    """Secret keys, which are never shown."""

    def __init__(self, keys: Sequence[Any]) -> None:
        self._keys = list(keys)

    @classmethod
    def read(cls, file: Path) -> Identities:
        """Read the secret keys in a file of `age-keygen`: a key on each line, and comments. Raises
        `DeclarationError`.
        """
        keys = []
        for number, line in _lines(file):
            if not _is_secret(line):
                raise DeclarationError(f"{file}:{number} is not a secret key of age, which begins with {SECRET}")
            try:
                keys.append(_pyrage().x25519.Identity.from_str(line))
            except _pyrage().IdentityError:
                raise DeclarationError(f"{file}:{number} is a secret key of age that cannot be read") from None
        if not keys:
            raise DeclarationError(f"{file} has no secret key of age")
        return cls(keys)

    def decrypt(self, file: Encrypted, write: _PieceWriter) -> None:
        """Decrypt a file. Raises `BackupError` where none of the keys opens it, `MalformedError` where it is
        damaged.
        """
        try:
            _pyrage().decrypt_io(file, write, self._keys)
        except _pyrage().DecryptError as error:
            raise BackupError(
                f"{file.name} is not encrypted to any of these identities, or its beginning is damaged: {error}"
            ) from error
        except OSError as error:
            if error.errno is not None:
                raise
            raise MalformedError("it cannot be decrypted to its end: it has changed, or breaks off") from error


class OwnKey:
    """A key that exists in the memory of this process only. Raises `DeclarationError` where pyrage is missing."""

    def __init__(self) -> None:
        secret = _pyrage().x25519.Identity.generate()
        self.public = str(secret.to_public())
        self.identities = Identities([secret])


def read_recipients(said: Iterable[str]) -> tuple[str, ...]:
    """Return public keys: each is one, or names a file that has one on each line. Raises `DeclarationError`."""
    found = [key for each in said for key in _keys_of(each)]
    for key in found:
        _recipient(key)
    return tuple(dict.fromkeys(found))


def encrypt(pieces: Iterable[bytes], write: Callable[[bytes], object], recipients: Sequence[str]) -> None:
    """Write the pieces encrypted to public keys. Raises what the pieces and `write` raise."""
    ends = _Ends(pieces, write)
    try:
        _pyrage().encrypt_io(ends, ends, [_recipient(key) for key in recipients])
    finally:
        if ends.error:
            raise ends.error from None  # the library keeps its text only, and passes over one at the end


@contextmanager
def decrypted(file: Encrypted, identities: Identities) -> Iterator[Readable]:
    """Open the decrypted content of a file, which a thread decrypts while it is read. Reading raises as
    `Identities.decrypt`.
    """

    def decrypt(put: Callable[[bytes], None]) -> None:
        writer = _PieceWriter(put)
        identities.decrypt(file, writer)
        writer.end()

    with prefetched(decrypt) as pieces:
        yield Pieces(iter(pieces.next, b""))


class _PieceWriter:
    """A file for pyrage to write decrypted data to, which passes it on in larger pieces."""

    def __init__(self, put: Callable[[bytes], None]) -> None:
        self._put = put
        self._buffer = bytearray()

    def write(self, data: bytes) -> int:
        self._buffer += data
        if len(self._buffer) >= PIECE_BYTES:
            self.end()
        return len(data)

    def end(self) -> None:
        if self._buffer:
            self._put(bytes(self._buffer))
            self._buffer.clear()

    def flush(self) -> None:
        pass


class _Ends:
    """A file for pyrage to read plain data from and write encrypted data to, which keeps the first error."""

    def __init__(self, pieces: Iterable[bytes], write: Callable[[bytes], object]) -> None:
        self._plain = Pieces(iter(pieces))
        self._write = write
        self.error: Exception | None = None

    def read(self, size: int) -> bytes:
        with self._kept():
            return self._plain.read(size)

    def write(self, data: bytes) -> int:
        with self._kept():
            self._write(bytes(data))
        return len(data)

    def flush(self) -> None:
        pass

    @contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.error = self.error or error
            raise


def _keys_of(said: str) -> list[str]:
    return [said] if said.startswith(RECIPIENT) or _is_secret(said) else [line for _, line in _lines(Path(said))]


def _lines(file: Path) -> list[tuple[int, str]]:
    """Return the lines of a file of keys, with their numbers, without comments.

    Raises `DeclarationError`, which shows none of them.
    """
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise DeclarationError(f"cannot read keys of age from {file}: {why}") from None
    numbered = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return [(number, line) for number, line in numbered if line and not line.startswith("#")]


def _recipient(key: str) -> Any:
    if _is_secret(key):
        raise DeclarationError("a secret key of age was given: encrypt to its public key, which begins with age1")
    try:
        return _pyrage().x25519.Recipient.from_str(key)
    except _pyrage().RecipientError as error:
        shown = repr(key) if key.startswith(RECIPIENT) else "a line of the file"
        raise DeclarationError(f"{shown} is not a public key of age, which begins with age1: {error}") from error


def _is_secret(key: str) -> bool:
    return key.upper().startswith(SECRET)


def _pyrage() -> ModuleType:
    try:
        return importlib.import_module("pyrage")
    except ImportError as error:
        raise DeclarationError("encrypted backups need pyrage: install aviso-workers[encryption]") from error
