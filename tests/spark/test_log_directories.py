"""Where event logs may lie: a directory of this machine, and what is refused with what to do."""

from __future__ import annotations

import pytest

from aviso_workers.spark import log_directories


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("/var/log/spark", "/var/log/spark"),
        ("spark-events", "spark-events"),
        ("/logs/100%", "/logs/100%"),
        ("file:/var/log/spark", "/var/log/spark"),
        ("file:///var/log/spark", "/var/log/spark"),
        ("file://localhost/var/my%20logs", "/var/my logs"),
    ],
)
def test_a_directory_of_this_machine_is_a_path_or_a_file_url(name: str, path: str) -> None:
    assert log_directories.local_path(name) == path


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("dbfs:/cluster-logs", "dbfs:/cluster-logs: event logs cannot be read there: mount the directory"),
        ("abfss://logs@account.dfs.core.windows.net/spark", "event logs cannot be read there: mount the directory"),
        ("http://host/logs", "event logs cannot be read there: mount the directory"),
        ("file://other-host/logs", "give an absolute path of this machine"),
        ("file:logs", "give an absolute path of this machine"),
    ],
)
def test_any_other_url_is_refused_with_what_to_do(name: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        log_directories.local_path(name)


def test_a_refusal_repeats_no_credentials() -> None:
    with pytest.raises(ValueError, match="ftp://host/logs") as refused:
        log_directories.local_path("ftp://me:pass-phrase@host/logs?token=abc")
    assert "pass-phrase" not in str(refused.value)
    assert "abc" not in str(refused.value)
