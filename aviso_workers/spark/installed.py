"""Whether PySpark is here, in a version that has what the data source is made of."""

from __future__ import annotations

import re
from importlib.util import find_spec

from aviso_workers.errors import DeclarationError

__all__ = ["require"]

LEAST = (4, 2)
"""The first in which a Python data source can limit what a streaming query reads at once."""
INSTALL = "pip install 'aviso-workers[spark]'"


def require() -> None:
    """Raise `DeclarationError` where PySpark is missing, or older than the data source needs."""
    if find_spec("pyspark") is None:
        raise DeclarationError(f"PySpark is not installed: {INSTALL}")
    from pyspark import __version__

    if tuple(map(int, re.findall(r"\d+", __version__)[:2])) < LEAST:
        least = ".".join(map(str, LEAST))
        raise DeclarationError(f"PySpark {__version__} is installed, and {least} or newer is needed: {INSTALL}")
