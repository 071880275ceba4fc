"""The store directory of a nats-server: which streams and consumers are in it, and how they are encrypted.

`processes` reads it before and after it starts a server, `server status` and the doctor while one runs: a
server that cannot read a stream or a consumer goes on without it, says so in its log at most, and a client that
creates it destroys it. The names of streams and consumers are the names of directories, also where the store is
encrypted.

The cipher of a store follows from the sizes of its keys. nats-server 2.15.0 converts a store that it finds encrypted
in another way, or not at all, and loses consumers and streams in doing so, so nothing of ours has it do that.

`ops.key_rotation` replaces old stores by new ones so that a kill at any moment leaves the whole old or the whole new
ones, and `processes` finishes what was begun before it starts a server. What is begun is written down first: while the
file is there the new stores are the ones that count, and the old ones before. A store that is replaced is renamed, and
no command of ours removes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from aviso_workers import files
from aviso_workers.errors import ServerProcessError

SERVED = "/jsz?accounts=true&streams=true&consumers=true&limit=1000000"
"""The path at which the monitoring port of a server lists what it serves, for `served`."""
METADATA, KEY = "meta.inf", "meta.key"
KEY_BYTES = {72: "chacha", 64: "aes"}
"""The size of an encrypted key, as nats-server 2.15.0 writes it."""
UNKNOWN = "unknown"
GLOBAL_ACCOUNT = "$G"
NAMED = 5
SETTLE_SECONDS = 0.5
"""A stream or consumer is served, or off the disk, so long after it was made or deleted."""
BEGUN = "swap.json"


class Asset(Struct, frozen=True, order=True):
    """A stream or a consumer in a store."""

    account: str
    stream: str
    consumer: str = ""

    def __str__(self) -> str:
        named = f"consumer {self.consumer} of {self.stream}" if self.consumer else f"stream {self.stream}"
        return named if self.account == GLOBAL_ACCOUNT else f"{named} in account {self.account}"


class _ServedConsumer(Struct, frozen=True):
    name: str


class _ServedStream(Struct, frozen=True):
    name: str
    consumer_detail: tuple[_ServedConsumer, ...] | None = None


class _ServedAccount(Struct, frozen=True):
    name: str
    stream_detail: tuple[_ServedStream, ...] | None = None


class _ServedConfig(Struct, frozen=True):
    store_dir: str


class Served(Struct, frozen=True):
    """The answer of a server to `SERVED`: the directory of its store, and the streams and consumers that it serves."""

    config: _ServedConfig
    account_details: tuple[_ServedAccount, ...] | None = None

    @property
    def directory(self) -> Path:
        # Not of /varz: where that was asked before JetStream had started, it never has the configuration.
        return Path(self.config.store_dir)

    @property
    def assets(self) -> frozenset[Asset]:
        found = set[Asset]()
        for account in self.account_details or ():
            for stream in account.stream_detail or ():
                found.add(Asset(account.name, stream.name))
                found |= {Asset(account.name, stream.name, each.name) for each in stream.consumer_detail or ()}
        return frozenset(found)


# Servers are inspected side by side, in threads. msgspec crashes where two threads are the first to decode a type.
_SERVED = msgspec.json.Decoder(Served)


def within(store_dir: str | Path) -> Path:
    """Return the directory of the store that a server makes in its configured `store_dir`."""
    return Path(store_dir) / "jetstream"


def on_disk(directory: Path) -> frozenset[Asset]:
    """Return the streams and consumers in a store, whether its server can read them or not."""
    streams = {Asset(path.parts[-4], path.parts[-2]) for path in directory.glob(f"*/streams/*/{METADATA}")}
    consumers = directory.glob(f"*/streams/*/obs/*/{METADATA}")
    return frozenset(streams | {Asset(path.parts[-6], path.parts[-4], path.parts[-2]) for path in consumers})


def served(answer: bytes) -> Served:
    """Parse the answer of a server to `SERVED`. Raises `ServerProcessError` where it is another answer."""
    try:
        return _SERVED.decode(answer)
    except msgspec.MsgspecError as error:
        raise ServerProcessError(f"no nats-server's answer to {SERVED}: {error}") from error


def unserved(ask: Callable[[], bytes]) -> str:
    """Return a sentence on streams and consumers in a server's store that it does not serve, or an empty text. `ask`
    answers `SERVED`.

    It blocks. Raises what `ask` and `served` raise.
    """
    missing = _missing(served(ask()))
    if missing:  # it may have been made, or deleted, just now
        time.sleep(SETTLE_SECONDS)
        now = served(ask())
        missing &= _missing(now)
    return describe(missing, of=on_disk(now.directory)) if missing else ""


def _missing(answer: Served) -> frozenset[Asset]:
    return on_disk(answer.directory) - answer.assets


def ciphers(directory: Path) -> set[str]:
    """Return the ciphers with which the streams of a store are encrypted; the empty text stands for no encryption."""
    found = set[str]()
    for metadata in directory.glob(f"*/streams/*/{METADATA}"):
        key = metadata.with_name(KEY)
        found.add(KEY_BYTES.get(key.stat().st_size, UNKNOWN) if key.exists() else "")
    return found - {UNKNOWN}


def describe(missing: Iterable[Asset], *, of: Iterable[Asset]) -> str:
    """Return a sentence on streams and consumers that are on the disk and not served."""
    missing, of = sorted(missing), list(of)
    streams = sum(not asset.consumer for asset in of)
    lost_streams = sum(not asset.consumer for asset in missing)
    lost = len(missing) - lost_streams
    names = ", ".join(map(str, missing[:NAMED])) + (", ..." if len(missing) > NAMED else "")
    return (
        f"{streams - lost_streams} of {streams} streams and {len(of) - streams - lost} of {len(of) - streams} "
        f"consumers of the store are served; not {names}"
    )


class Replacement(Struct, frozen=True, kw_only=True):
    """The replacement of one store by another. The three paths are on one file system."""

    place: Path
    new: Path
    """The new store, in a directory of its own, which is removed with it."""
    previous: Path
    """The path to which the store at the place is renamed."""


def begin_swap(directory: Path, replacements: Sequence[Replacement]) -> None:
    """Record that the new stores are to replace the old ones. From here on `finish_swap` puts them in place, in any
    process.
    """
    draft = directory / f"{BEGUN}.draft"
    with draft.open("wb") as file:
        file.write(msgspec.json.encode(replacements, enc_hook=str))
        files.sync(file)
    draft.rename(directory / BEGUN)
    files.sync_directory(directory)


def finish_swap(directory: Path) -> Sequence[Replacement]:
    """Put the new stores in place where that was begun, and return what was replaced; nothing where nothing was
    begun.
    """
    begun = directory / BEGUN
    if not begun.exists():
        return ()
    replacements = msgspec.json.decode(
        begun.read_bytes(), type=list[Replacement], dec_hook=lambda type_, text: type_(text)
    )
    for each in replacements:
        if not each.new.exists():
            continue  # it is in place
        if each.place.exists():
            each.place.rename(each.previous)
        each.new.rename(each.place)
        each.new.parent.rmdir()
        files.sync_directory(each.place.parent)
    begun.unlink()
    files.sync_directory(directory)
    return replacements
