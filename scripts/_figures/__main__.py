"""Prints the figures: `scripts/figures`."""

from __future__ import annotations

import _figures

if __name__ == "__main__":
    for name, value in _figures.figures().items():
        print(f"{name:40}{value:>10,}")
