"""The source archive and the wheel, as they are published: what is in them, and that it works from there."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import aviso_workers
from _newcomer import archives
from _newcomer.archives import Archives
from aviso_workers.config import display
from aviso_workers.errors import ConfigError
from tests.waits import PATIENCE_SECONDS

PROJECT = Path(__file__).parents[1]
CONFIG = PROJECT / "config"
RELATIVE_LINK = re.compile(r"\]\((?!\w+:)[^)]*\)")


@pytest.fixture(scope="module", params=[pytest.param(True, marks=pytest.mark.slow), False], ids=["pure", "compiled"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Archives:
    return archives.build(PROJECT, tmp_path_factory.mktemp("built"), pure=request.param)


@pytest.fixture(scope="module")
def installed(built: Archives, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the wheel installs."""
    directory = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(built.wheel) as wheel:
        wheel.extractall(directory)
    return directory


@pytest.fixture(scope="module")
def metadata(installed: Path) -> Message:
    (file,) = installed.glob("*.dist-info/METADATA")
    return email.message_from_string(file.read_text())


def is_pure(built: Archives) -> bool:
    return built.wheel.name.endswith("-py3-none-any.whl")


def files(directory: Path) -> set[str]:
    """The files below a directory, by their paths from it."""
    return {str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file()}


@pytest.mark.slow
def test_the_source_archive_has_all_of_the_project(built: Archives) -> None:
    with tarfile.open(built.source) as source:
        packed = {name.partition("/")[2] for name in source.getnames()}
    assert {file for file in files(built.project) if ".egg-info/" not in file} - packed == set()


def test_the_wheel_has_every_file_of_the_packages(built: Archives, installed: Path) -> None:
    packages = {"aviso_workers": "aviso_workers", "agents": "aviso_agents"}
    wanted = {f"{name}/{file}" for folder, name in packages.items() for file in files(built.project / folder)}
    assert wanted - files(installed) == set()


def test_the_wheel_installs_our_packages_and_nothing_beside_them(installed: Path) -> None:
    names = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert names == {"aviso_agents", "aviso_workers"}


def test_every_file_that_is_shipped_is_listed_and_can_be_read() -> None:
    assert {*display.SHIPPED_FILES} == {file.name for file in CONFIG.iterdir() if file.is_file()} - {"__init__.py"}
    for name in display.SHIPPED_FILES:
        assert display.shipped(name) == (CONFIG / name).read_text()


def test_a_file_that_is_not_shipped_is_named_with_the_nearest_that_is() -> None:
    with pytest.raises(ConfigError, match=r"no file 'keda' is shipped; did you mean 'keda.yaml'\?"):
        display.shipped("keda")


@pytest.mark.parametrize("name", display.SHIPPED_FILES)
def test_the_wheel_has_the_files_of_config(installed: Path, name: str) -> None:
    assert (installed / "aviso_workers" / "shipped" / name).read_text() == (CONFIG / name).read_text()


@pytest.mark.slow
def test_the_command_line_of_the_wheel_prints_them_and_its_version(installed: Path) -> None:
    def printed(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "aviso_workers.cli", *arguments],
            cwd=installed,
            env={**os.environ, "PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_SECONDS,
        ).stdout

    assert printed("config", "files", "keda.yaml") == (CONFIG / "keda.yaml").read_text()
    assert printed("--version").startswith(f"aviso-workers {aviso_workers.__version__} (")


def test_a_wheel_has_the_functions_in_c_unless_it_is_to_install_everywhere(built: Archives, installed: Path) -> None:
    assert len([*installed.glob("aviso_workers/_fast_c*.so")]) == (0 if is_pure(built) else 1)


def test_the_version_is_that_of_the_package(built: Archives, metadata: Message) -> None:
    assert metadata["Version"] == aviso_workers.__version__
    platform = "py3-none-any" if is_pure(built) else f"cp{sys.version_info[0]}{sys.version_info[1]}-"
    assert built.wheel.name.startswith(f"aviso_workers-{aviso_workers.__version__}-{platform}")
    assert built.source.name == f"aviso_workers-{aviso_workers.__version__}.tar.gz"


def test_the_description_leads_nowhere_that_a_reader_of_it_cannot_go(metadata: Message) -> None:
    description = metadata.get_payload()
    assert isinstance(description, str)
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert RELATIVE_LINK.findall(description) == []
    assert "tutorial (`docs/tutorial.md`)" in description
    assert "\nPublishers, workers and Spark" in description
    assert "(`docs/drawings/system.svg`)" in description


def test_it_says_who_made_it(metadata: Message) -> None:
    assert metadata["Author"] == "The aviso-workers maintainers"
