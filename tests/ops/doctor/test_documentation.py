"""docs/operations.md and docs/guarantees.md, against the checks and the tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

from aviso_workers.ops.doctor.checks import CHECKS

PROJECT = Path(__file__).parents[3]
PAGE = (PROJECT / "docs" / "operations.md").read_text()
GUARANTEES = (PROJECT / "docs" / "guarantees.md").read_text()
SECTION = re.compile(r"^### (JS\d{3})\n\n\*\*(.+?)\.\*\* (.+?)\n\nCure: ", re.MULTILINE | re.DOTALL)
MENTIONED = re.compile(r"\bJS\d{3}\b")


def test_every_check_has_its_section_and_every_section_its_check() -> None:
    assert [(code, title) for code, title, _ in SECTION.findall(PAGE)] == [(one.code, one.title) for one in CHECKS]


def test_what_is_for_production_says_so() -> None:
    said = {code for code, _, text in SECTION.findall(PAGE) if text.startswith("In production. ")}
    assert said == {one.code for one in CHECKS if one.production}


def test_only_checks_that_there_are_are_mentioned() -> None:
    assert set(MENTIONED.findall(PAGE)) == {one.code for one in CHECKS}


def test_codes_are_given_once() -> None:
    assert len({one.code for one in CHECKS}) == len(CHECKS)


def test_links_lead_to_their_sections() -> None:
    titles = [line.strip("# ").lower() for line in PAGE.splitlines() if line.startswith("#")]
    headings = {re.sub(r"[^\w -]", "", title).replace(" ", "-") for title in titles}
    assert {one.anchor.partition("#")[2] for one in CHECKS} <= headings
    assert set(re.findall(r"\(#([^)]+)\)", PAGE)) <= headings


def test_what_is_guaranteed_names_checks_and_tests_that_there_are() -> None:
    assert set(MENTIONED.findall(GUARANTEES)) <= {one.code for one in CHECKS}
    named = re.findall(r"`(tests/[^`]+\.py|scripts/\w+)", GUARANTEES)
    assert [path for path in named if not (PROJECT / path).exists()] == []
