"""The requirements of this package's parts: what pip installs for them, and whether PySpark is new enough."""

from __future__ import annotations

import re
from importlib.util import find_spec

from aviso_workers.errors import DeclarationError

LEAST = (4, 2)
"""The first in which a Python data source can limit what a streaming query reads at once."""
FOR_SPARK = "pip install 'aviso-workers[spark]'"
FOR_EVENT_LOGS = "pip install 'aviso-workers[spark-events]'"


def require() -> None:
    """Raise `DeclarationError` where PySpark is missing, or older than the data source needs."""
    if find_spec("pyspark") is None:
        raise DeclarationError(f"PySpark is not installed: {FOR_SPARK}")
    from pyspark import __version__

    if tuple(map(int, re.findall(r"\d+", __version__)[:2])) < LEAST:
        least = ".".join(map(str, LEAST))
        raise DeclarationError(f"PySpark {__version__} is installed, and {least} or newer is needed: {FOR_SPARK}")
