"""docs/jetstream-coverage.md says what the tests say, and leaves nothing out."""

from __future__ import annotations

import jetstream_coverage


def test_the_page_is_what_the_tests_say() -> None:
    found = jetstream_coverage.PAGE.read_text()
    assert found == jetstream_coverage.page(), "run scripts/jetstream_coverage.py"


def test_every_item_has_a_test_or_says_what_it_waits_for() -> None:
    covered = jetstream_coverage.tests()
    missing = [
        f"{number} {item['says']}"
        for number, item in jetstream_coverage.items().items()
        if not covered[number] and "awaits" not in item
    ]
    assert missing == []


def test_no_test_covers_what_there_is_not() -> None:
    items = jetstream_coverage.items()
    assert {number: tests for number, tests in jetstream_coverage.tests().items() if number not in items} == {}
