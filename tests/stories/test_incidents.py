"""The incident book: its page has each situation, and two of them are made here, without their alerts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from _incidents import cluster, page
from _incidents.book import make
from _incidents.situations import SITUATIONS

QUICK = ("one_server_killed", "handler_fails")


def test_the_page_has_the_situations_of_the_book() -> None:
    rows = re.findall(r"^\| (.+?) \| `", page.PAGE.read_text(), re.MULTILINE)
    assert rows[1:] == [situation.title for situation in SITUATIONS]


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_an_operator_sees_what_the_book_says(name: str, tmp_path: Path) -> None:
    (situation,) = [each for each in SITUATIONS if each.name == name]
    with cluster.running(tmp_path) as servers:
        outcome = make(situation, tmp_path, servers, alerts=False)
    assert outcome.handled == outcome.published > 0
