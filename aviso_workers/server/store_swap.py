"""New stores put in the places of old ones, so that a kill at any moment leaves the whole old or the whole new ones.

`ops.key_rotation` says what is to be put where, and `processes` finishes what was begun before it starts a server. What
is begun is written down first: while the file is there the new stores are the ones that count, and the old ones before.
A store that is replaced is renamed, and nobody of ours removes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from aviso_workers import files

__all__ = ["Replacement", "begin", "finish"]

BEGUN = "swap.json"


class Replacement(Struct, frozen=True, kw_only=True):
    """One store that takes another one's place. The three are on one file system."""

    place: Path
    new: Path
    """In a directory of its own, which goes with it."""
    previous: Path
    """Where the store goes that is at the place."""


def begin(directory: Path, replacements: Sequence[Replacement]) -> None:
    """Decide for the new stores. From here on `finish` puts them in place, in this process or in another one."""
    draft = directory / f"{BEGUN}.draft"
    with draft.open("wb") as file:
        file.write(msgspec.json.encode(replacements, enc_hook=str))
        files.sync(file)
    draft.rename(directory / BEGUN)
    files.sync_directory(directory)


def finish(directory: Path) -> Sequence[Replacement]:
    """Put the new stores in place where that was begun; return what was replaced, nothing where nothing was begun."""
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
