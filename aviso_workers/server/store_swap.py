"""Replacement of old stores by new ones, so that a kill at any moment leaves the whole old or the whole new ones.

`ops.key_rotation` decides which store goes where, and `processes` finishes what was begun before it starts a server.
What is begun is written down first: while the file is there the new stores are the ones that count, and the old ones
before. A store that is replaced is renamed, and no command of ours removes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from aviso_workers import files

BEGUN = "swap.json"


class Replacement(Struct, frozen=True, kw_only=True):
    """The replacement of one store by another. The three paths are on one file system."""

    place: Path
    new: Path
    """The new store, in a directory of its own, which is removed with it."""
    previous: Path
    """The path to which the store at the place is renamed."""


def begin(directory: Path, replacements: Sequence[Replacement]) -> None:
    """Record that the new stores are to replace the old ones. From here on `finish` puts them in place, in any
    process.
    """
    draft = directory / f"{BEGUN}.draft"
    with draft.open("wb") as file:
        file.write(msgspec.json.encode(replacements, enc_hook=str))
        files.sync(file)
    draft.rename(directory / BEGUN)
    files.sync_directory(directory)


def finish(directory: Path) -> Sequence[Replacement]:
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
        _replace(each)
    begun.unlink()
    files.sync_directory(directory)
    return replacements


def _replace(each: Replacement) -> None:
    if not each.new.exists():
        return  # it is in place
    if each.place.exists():
        each.place.rename(each.previous)
    each.new.rename(each.place)
    each.new.parent.rmdir()
    files.sync_directory(each.place.parent)
