"""docs/operations/checks.md and the pages of guarantees, against the checks and the tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

from _docs import checks
from aviso_workers.ops.doctor.checks import CHECKS

PROJECT = Path(__file__).parents[3]
PAGE = (PROJECT / "docs" / "operations" / "checks.md").read_text()
DOCS = PROJECT / "docs"
GUARANTEES = "".join(page.read_text() for page in (DOCS / "guarantees.md", *(DOCS / "guarantees").iterdir()))
MENTIONED = re.compile(r"\bJS\d{3}\b")


def test_the_reference_is_what_the_checks_declare() -> None:
    """`PYTHONPATH=scripts .venv/bin/python -m _docs.checks` writes it."""
    assert checks.with_reference(PAGE) == PAGE


def test_a_section_has_what_the_doctor_does_not_print() -> None:
    sections = re.split(r"^## ", checks.reference(), flags=re.MULTILINE)[1:]
    for one, section in zip(CHECKS, sections, strict=True):
        assert section.startswith(f"{one.code}\n\n**{one.title}.** {one.severity.name}")
        assert ("`--production`" in section.split(".", 3)[1]) == one.production


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
