"""What JetStream's fields, answers and codes mean is written in `aviso_workers/jetstream`, and nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import aviso_workers
from aviso_workers.jetstream import error_codes
from aviso_workers.jetstream.fields import CONSUMER, STREAM

PACKAGE = Path(aviso_workers.__file__).parent
VOCABULARY = PACKAGE / "jetstream"
ROOT = PACKAGE.parent
FILES = [file for folder in (PACKAGE, ROOT / "agents") for file in sorted(folder.rglob("*.py"))]
CODES = range(10_001, 10_300)
"""Of JetStream's errors, as of nats-server 2.15."""


def expressions() -> Iterator[tuple[str, ast.AST]]:
    """Every expression outside of the vocabulary, and where it stands."""
    for file in FILES:
        if VOCABULARY not in file.parents:
            for node in ast.walk(ast.parse(file.read_text())):
                yield f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}", node


def test_one_file_names_error_codes() -> None:
    named = [place for place, node in expressions() if isinstance(node, ast.Constant) and node.value in CODES]

    assert named == []


def test_each_code_has_one_name() -> None:
    codes = [value for name, value in vars(error_codes).items() if name.isupper() and isinstance(value, int)]

    assert len(codes) == len(set(codes))
    assert set(codes) <= set(CODES)


def test_what_a_field_excludes_or_needs_is_in_the_table() -> None:
    others = {other for field in STREAM.values() for other in field.excludes}
    needed = {other for field in CONSUMER.values() for other in field.needs}

    assert others <= STREAM.keys()
    assert needed <= CONSUMER.keys()
