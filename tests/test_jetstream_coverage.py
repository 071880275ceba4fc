"""Each item of what the documents on JetStream ask for has a test, as `scripts/jetstream_coverage.py` prints."""

from __future__ import annotations

import jetstream_coverage


def test_every_item_is_printed_with_its_tests() -> None:
    printed = jetstream_coverage.page()
    assert [number for number in jetstream_coverage.items() if printed.count(f"| {number} |") != 1] == []


def test_every_item_has_a_test() -> None:
    covered = jetstream_coverage.tests()
    missing = [f"{number} {item['says']}" for number, item in jetstream_coverage.items().items() if not covered[number]]
    assert missing == []


def test_no_test_covers_what_there_is_not() -> None:
    items = jetstream_coverage.items()
    assert {number: tests for number, tests in jetstream_coverage.tests().items() if number not in items} == {}
