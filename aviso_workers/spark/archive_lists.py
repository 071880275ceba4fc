"""The list of the files that belong to an archive, as `archives` writes one for each batch and reads the newest.

The form is that of the log of Spark's own file sink: a line with the version, and a JSON document for each file. So
`spark.read.parquet` reads it, of any Spark. The first document has one field more, which Spark passes over: a digest of
the list. By it a list that was cut is distinguished from a shorter one, also where it was cut at the end of a line.
Only a list of no files has no digest, and cannot prove that it is whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import msgspec
from msgspec import Struct

VERSION = "v1"
WHOLE_BYTES = 128 * 1024 * 1024
DIGEST_BYTES = 16


class ArchivedFile(Struct, frozen=True, kw_only=True, rename="camel"):
    """A file of an archive, as Spark writes it down."""

    path: str
    size: int
    is_dir: bool = False
    modification_time: int
    block_replication: int = 1
    block_size: int = WHOLE_BYTES
    action: str = "add"

    @property
    def day(self) -> str:
        """The directory of the file's day, such as `date=2026-11-20`."""
        return self.path.rsplit("/", 2)[1]

    @property
    def name(self) -> str:
        """The path of the file below the archive's directory, wherever that directory was when the list was written."""
        return "/".join(self.path.rsplit("/", 2)[1:])


class FileList(Struct, frozen=True, kw_only=True):
    """The content of a list: the files that belong to the archive after a batch."""

    number: int = -1
    """The number of its batch; -1 where there is no list yet."""
    entries: Sequence[ArchivedFile] = ()


class _Sealed(Struct):
    digest: str = ""


def encode(entries: Iterable[ArchivedFile]) -> bytes:
    """Return the text of a list."""
    documents = [msgspec.json.encode(entry) for entry in entries]
    if documents:
        seal = _seal(_digest(_joined(documents)))
        documents[0] = documents[0].removesuffix(b"}") + seal + b"}"
    return _joined(documents)


def decode(text: bytes, *, number: int) -> FileList:
    """Parse the text of a list. Raises `ValueError` where it is no such list, or where something of it is missing or
    changed.
    """
    version, *documents = text.split(b"\n")
    if version != VERSION.encode():
        raise ValueError(f"it is of format {version.decode(errors='replace')!r}, {VERSION} is known")
    try:
        entries = [msgspec.json.decode(document, type=ArchivedFile) for document in documents]
        sealed = msgspec.json.decode(documents[0], type=_Sealed) if documents else _Sealed()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"a line of it cannot be read: {error}") from error
    if documents and _digest(text.replace(_seal(sealed.digest), b"", 1)) != sealed.digest:
        raise ValueError("it is not whole: its digest is missing, or that of another list")
    return FileList(number=number, entries=entries)


def _joined(documents: Iterable[bytes]) -> bytes:
    return b"\n".join([VERSION.encode(), *documents])


def _seal(digest: str) -> bytes:
    return b',"digest":"%b"' % digest.encode()


def _digest(text: bytes) -> str:
    return blake2b(text, digest_size=DIGEST_BYTES).hexdigest()
