"""Which directories can be named: those of this machine, of object stores and of HDFS, without credentials."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aviso_workers.spark import log_directories
from aviso_workers.spark.log_directories import LogDirectories


def test_a_directory_of_this_machine_is_a_path_or_a_file_url(tmp_path: Path) -> None:
    directory = tmp_path / "my logs"
    directory.mkdir()
    (directory / "app-1").touch()
    for name in (str(directory), directory.as_uri(), f"file:{directory}", f"file://localhost{directory}"):
        assert LogDirectories([name]).find() == ({str(directory / "app-1")}, {}), name


def test_a_path_is_taken_as_it_is_where_it_is_no_url() -> None:
    _, problems = LogDirectories(["/no/100%25", "none"]).find()
    assert list(problems) == ["/no/100%25", "none"]
    assert "'/no/100%25'" in problems["/no/100%25"]


@pytest.mark.parametrize(
    "name", ["s3://logs/spark", "s3a://logs", "gs://logs/spark", "hdfs:///spark", "hdfs://n:8020/s"]
)
def test_a_directory_elsewhere_is_taken_without_asking_for_it(name: str) -> None:
    log_directories.check(name)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("dbfs:/cluster-logs", "dbfs:/cluster-logs: event logs cannot be read there: mount the directory"),
        ("abfss://logs@account.dfs.core.windows.net/spark", "event logs cannot be read there: mount the directory"),
        ("http://host/logs", "event logs cannot be read there: mount the directory"),
        ("file://other-host/logs", "give an absolute path of this machine"),
        ("file:logs", "give an absolute path of this machine"),
        ("s3:///spark", "has no bucket"),
        ("s3://an-id:pass-phrase@logs/spark", "s3://logs/spark: give the URL without credentials"),
        ("s3://logs/spark?secret_key=pass-phrase", "s3://logs/spark: give the URL without credentials"),
        ("ftp://me:pass-phrase@host/logs?token=pass-phrase", "ftp://host/logs: event logs cannot be read there"),
    ],
)
def test_any_other_url_is_refused_with_what_to_do_and_without_its_credentials(name: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)) as refused:
        log_directories.check(name)
    assert "pass-phrase" not in str(refused.value)
