"""Prints the figures: `scripts/figures`. With `--tests`, which tests touch names that are not public."""

from __future__ import annotations

import sys

import _figures
from _figures import public_tests

if __name__ == "__main__":
    if "--tests" in sys.argv[1:]:
        print(*public_tests.listing(), sep="\n")
    else:
        for name, value in (_figures.figures() | _figures.figures_of_tests()).items():
            print(f"{name:40}{value:>10,}")
