"""The lists of an archive's files, whole and cut at every place."""

from __future__ import annotations

import re

import pytest

from aviso_workers.spark import archives
from aviso_workers.spark.archives import ArchivedFile, FileList


def entry(number: int) -> ArchivedFile:
    return ArchivedFile(path=f"file:/data/%7B/date=2026-11-20/{number}-0.parquet", size=number, modification_time=1)


WHOLE = archives.encode_list([entry(number) for number in range(3)])


def test_a_list_says_what_was_written_and_that_nothing_is_missing() -> None:
    listed = archives.decode_list(WHOLE, number=7)

    assert listed == FileList(number=7, entries=[entry(number) for number in range(3)])


def test_a_list_that_was_cut_at_any_place_is_refused_or_names_no_file() -> None:
    for end in range(len(WHOLE)):
        try:
            listed = archives.decode_list(WHOLE[:end], number=7)
        except ValueError:
            continue
        assert listed == FileList(number=7, entries=[]), WHOLE[:end]


@pytest.mark.parametrize("changed", [WHOLE.replace(b'"size":2', b'"size":3'), WHOLE + b"\n", WHOLE[1:]])
def test_a_list_that_was_changed_is_refused(changed: bytes) -> None:
    with pytest.raises(ValueError, match=r"it is not whole|cannot be read|is of format"):
        archives.decode_list(changed, number=7)


def test_a_list_without_a_digest_is_refused() -> None:
    with pytest.raises(ValueError, match="its digest is missing"):
        archives.decode_list(re.sub(rb',"digest":"\w+"', b"", WHOLE), number=7)


def test_an_empty_list_is_read() -> None:
    assert archives.decode_list(archives.encode_list([]), number=7) == FileList(number=7, entries=[])
