"""All checks, in modules by what they examine. docs/operations/checks.md has a section for each, by its code."""

from __future__ import annotations

from aviso_workers.ops.doctor.checks import clients, consumers, progress, servers, streams  # noqa: F401
from aviso_workers.ops.doctor.judgements import DECLARED, Check

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = tuple(sorted(DECLARED, key=lambda check: check.code))
