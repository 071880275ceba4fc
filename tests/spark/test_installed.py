"""What is said where PySpark is missing, or too old for the data source."""

from __future__ import annotations

import pyspark
import pytest

from aviso_workers import spark
from aviso_workers.errors import DeclarationError
from aviso_workers.spark import register, require_pyspark


@pytest.mark.parametrize("version", ["3.5.8", "4.0.1", "4.1.0.dev1"])
def test_an_older_pyspark_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(pyspark, "__version__", version)
    with pytest.raises(DeclarationError, match=rf"PySpark {version} is installed, and 4.2 or newer is needed: pip"):
        register(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", ["4.2.0", "4.10.1", "5.0.0"])
def test_others_are_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(pyspark, "__version__", version)
    require_pyspark()


def test_that_there_is_none_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark, "find_spec", lambda name: None)
    with pytest.raises(DeclarationError, match="PySpark is not installed: pip install"):
        require_pyspark()
