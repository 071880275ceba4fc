"""The version of the package. It stands here and nowhere else: `pyproject.toml` reads it from this file."""

from __future__ import annotations

__version__ = "0.1.0"
