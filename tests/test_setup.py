"""`scripts/setup` in a clone of its own, with stand-ins for Python, Java and apt-get that note what they are asked."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.waits import PATIENCE_SECONDS

PROJECT = Path(__file__).parents[1]
LOCK = PROJECT / "scripts" / "requirements.lock"
TOOLS = (
    "bash",
    "cat",
    "chmod",
    "cp",
    "dirname",
    "env",
    "grep",
    "head",
    "ln",
    "mkdir",
    "mktemp",
    "rm",
    "sed",
    "sha256sum",
)

PYTHON = """#!/usr/bin/env bash
case "$*" in
    -V*) echo "Python 3.11.2" ;;
    "-m venv --clear .venv")
        echo "make .venv" >>"$NOTES"
        mkdir -p .venv/bin
        cp "$0" .venv/bin/python
        echo "VIRTUAL_ENV=$PWD/.venv" >.venv/bin/activate ;;
    "-m pip install"*) echo "${*:2}" >>"$NOTES"; exit "${PIP_EXITS_WITH:-0}" ;;
esac
"""
APT_GET = """#!/usr/bin/env bash
case "$1" in
    update) echo "apt-get update" >>"$NOTES" ;;
    install)
        echo "apt-get install ${*: -1}" >>"$NOTES"
        case "${*: -1}" in
            openjdk*) cp "$COMMANDS/packed-java" "$COMMANDS/java" ;;
            *) echo >"$COMMANDS/${*: -1}" && chmod +x "$COMMANDS/${*: -1}" ;;
        esac ;;
    download) echo "apt-get download ${*: -1}" >>"$NOTES"; echo >"${*: -1}.deb" ;;
    satisfy) echo "apt-get satisfy ${*: -2}" >>"$NOTES" ;;
esac
"""
APT_CACHE = """#!/usr/bin/env bash
printf 'postgresql\\n  Depends: postgresql-15\\n  Suggests: postgresql-doc\\n'
"""
DPKG_DEB = """#!/usr/bin/env bash
case "$1 ${*: -1}" in
    "--field Depends") echo "debconf, libicu72 (>= 72.1), libllvm14, postgresql-common, zlib1g (>= 1)"; exit ;;
    *postgresql)
        mkdir -p .venv/postgresql/usr/lib/postgresql/15/bin
        for program in postgres initdb; do
            echo >".venv/postgresql/usr/lib/postgresql/15/bin/$program"
            chmod +x ".venv/postgresql/usr/lib/postgresql/15/bin/$program"
        done
        exit ;;
esac
mkdir -p usr/bin
for program in prometheus promtool; do
    echo >"usr/bin/$program"
    chmod +x "usr/bin/$program"
done
"""
OLD_PYTHON = """#!/usr/bin/env bash
exit 1
"""


def java(version: str) -> str:
    return f"#!/usr/bin/env bash\necho 'openjdk version \"{version}\" 2025-04-15' >&2\n"


class Clone:
    """A clone on a machine that has nothing but what is put there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "a clone"
        self.notes_file = directory / "notes"
        self.commands = directory / "bin"
        self.commands.mkdir()
        (self.directory / "scripts").mkdir(parents=True)
        for file in ("setup", "requirements.lock"):
            shutil.copy(PROJECT / "scripts" / file, self.directory / "scripts")
        (self.directory / "aviso_workers").mkdir()
        for file in ("pyproject.toml", "setup.py", "aviso_workers/_fast.c"):
            shutil.copy(PROJECT / file, self.directory / file)
        for tool in TOOLS:
            self.commands.joinpath(tool).symlink_to(str(shutil.which(tool)))
        self.user(1000)
        # What is installed on the machine of the tests.
        setup = self.directory / "scripts" / "setup"
        setup.write_text(setup.read_text().replace("/usr/lib/postgresql ", f"{shlex.quote(str(self.installed))} "))

    @property
    def installed(self) -> Path:
        """What a machine has in /usr/lib/postgresql."""
        return self.directory.with_name("postgresql")

    def command(self, name: str, script: str) -> None:
        self.commands.joinpath(name).write_text(script)
        self.commands.joinpath(name).chmod(0o755)

    def user(self, number: int) -> None:
        self.command("id", f"#!/usr/bin/env bash\necho {number}\n")

    def set_up(self, **environment: str) -> subprocess.CompletedProcess[str]:
        self.notes_file.write_text("")
        environment |= {"PATH": str(self.commands), "NOTES": str(self.notes_file), "COMMANDS": str(self.commands)}
        return subprocess.run(
            [self.directory / "scripts" / "setup"],
            env=environment,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )

    @property
    def notes(self) -> list[str]:
        """What was asked of the stand-ins in the last run."""
        return self.notes_file.read_text().splitlines()


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


@pytest.fixture
def ready_clone(clone: Clone) -> Clone:
    clone.command("java", java("17.0.15"))
    clone.command("python3", PYTHON)
    clone.command("prometheus", "")
    clone.command("promtool", "")
    clone.command("openssl", "")
    clone.command("zsh", "")
    clone.command("fish", "")
    clone.command("valgrind", "")
    clone.command("chromium", "")
    clone.command("postgres", "")
    clone.command("initdb", "")
    return clone


def test_first_run_makes_a_virtual_environment_and_installs_the_package_with_its_extras(ready_clone: Clone) -> None:
    done = ready_clone.set_up()

    assert done.returncode == 0, done.stderr
    made, locked, package = ready_clone.notes
    assert made == "make .venv"
    assert "--require-hashes --requirement scripts/requirements.lock" in locked
    assert "--no-deps --editable ." in package
    assert "setup: installing packages" in done.stderr


def test_second_run_does_and_says_nothing(ready_clone: Clone) -> None:
    ready_clone.set_up()

    done = ready_clone.set_up()

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert ready_clone.notes == []


@pytest.mark.parametrize("changed", ["pyproject.toml", "aviso_workers/_fast.c", "scripts/requirements.lock"])
def test_new_declaration_is_installed_into_the_same_virtual_environment(ready_clone: Clone, changed: str) -> None:
    ready_clone.set_up()
    with (ready_clone.directory / changed).open("a") as declaration:
        declaration.write("# changed\n")

    assert ready_clone.set_up().returncode == 0

    assert "make .venv" not in ready_clone.notes
    assert any("--editable" in note for note in ready_clone.notes), ready_clone.notes


def declared() -> list[Requirement]:
    """What pyproject.toml asks for, for the tests and the demo."""
    document = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    extras = document["project"]["optional-dependencies"]
    groups = (
        document["project"]["dependencies"],
        extras["server"],
        extras["spark"],
        document["dependency-groups"]["dev"],
    )
    return [Requirement(text) for group in groups for text in group]


@pytest.mark.parametrize("requirement", declared(), ids=str)
def test_what_is_declared_is_locked_with_its_hashes(requirement: Requirement) -> None:
    name = canonicalize_name(requirement.name)
    locked = re.findall(rf"^{name}==([^ ]+).*\\\n    --hash=sha256:", LOCK.read_text(), re.MULTILINE)
    assert locked, f"{name} is not in {LOCK.name}: make it anew as its head says"
    assert all(map(requirement.specifier.contains, locked)), (str(requirement), locked)


def test_the_table_of_supported_versions_says_what_is_declared() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    table = (PROJECT / "docs" / "support.md").read_text().partition("## Servers")[0]
    named = {str(Requirement(text)): text for text in re.findall(r"`([\w-]+(?:\[\w+\])?[><=]=[^`]+)`", table)}
    assert len(named) == 3, table
    assert [text for requirement, text in named.items() if requirement not in set(map(str, declared()))] == []
    assert f"`{project['requires-python']}`" in table


def test_every_package_is_installed() -> None:
    declared = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    template = PROJECT / "aviso_workers" / "projects" / "template"  # data, with a package of somebody else's
    files = {*(PROJECT / "aviso_workers").rglob("__init__.py")} - {*template.rglob("__init__.py")}
    packages = {".".join(file.relative_to(PROJECT).parent.parts) for file in files}
    assert packages - {*declared} == set()


def test_clone_that_was_moved_gets_a_virtual_environment_that_knows_its_place(ready_clone: Clone) -> None:
    ready_clone.set_up()
    ready_clone.directory = ready_clone.directory.rename(ready_clone.directory.with_name("moved"))

    assert ready_clone.set_up().returncode == 0

    assert ready_clone.notes[0] == "make .venv"


def test_failed_installation_is_tried_again(ready_clone: Clone) -> None:
    assert ready_clone.set_up(PIP_EXITS_WITH="3").returncode == 3

    assert ready_clone.set_up().returncode == 0

    assert any("--editable" in note for note in ready_clone.notes), ready_clone.notes


@pytest.mark.parametrize(("found", "said"), [("11.0.2", "Java 11"), ("1.8.0_432", "Java 8"), (None, "no Java")])
def test_java_home_that_does_not_serve_is_named_with_the_cure(clone: Clone, found: str | None, said: str) -> None:
    home = clone.directory / "jdk"
    (home / "bin").mkdir(parents=True)
    if found is not None:
        home.joinpath("bin/java").write_text(java(found))
        home.joinpath("bin/java").chmod(0o755)

    done = clone.set_up(JAVA_HOME=str(home))

    assert done.returncode == 1
    assert done.stderr == (
        f"setup: JAVA_HOME={home} holds {said}; Spark needs 17 or newer: unset it or let it name one\n"
    )


def test_java_home_that_serves_wins_over_the_path(ready_clone: Clone) -> None:
    home = ready_clone.directory / "jdk"
    (home / "bin").mkdir(parents=True)
    shutil.copy(ready_clone.commands / "java", home / "bin")
    ready_clone.command("java", java("11.0.2"))

    assert ready_clone.set_up(JAVA_HOME=str(home)).returncode == 0


@pytest.mark.parametrize("script", [None, java("11.0.2")], ids=["none", "old"])
def test_somebody_without_java_who_is_not_root_is_told_what_to_install(clone: Clone, script: str | None) -> None:
    clone.command("apt-get", "#!/usr/bin/env bash\nexit 1\n")
    if script is not None:
        clone.command("java", script)

    done = clone.set_up()

    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert "install openjdk-17-jre-headless" in done.stderr


def test_root_without_java_gets_debians(ready_clone: Clone) -> None:
    ready_clone.commands.joinpath("java").rename(ready_clone.commands / "packed-java")
    ready_clone.command("apt-get", APT_GET)
    ready_clone.user(0)

    done = ready_clone.set_up()

    assert done.returncode == 0, done.stderr
    assert ready_clone.notes[:2] == ["apt-get update", "apt-get install openjdk-17-jre-headless"]


@pytest.mark.parametrize("missing", ["prometheus", "promtool"])
def test_root_without_what_some_tests_run_gets_debians_and_no_service(ready_clone: Clone, missing: str) -> None:
    for program in (missing, "openssl", "zsh", "fish", "valgrind", "chromium"):
        ready_clone.commands.joinpath(program).unlink()
    ready_clone.command("apt-get", APT_GET)
    ready_clone.command("dpkg-deb", DPKG_DEB)
    ready_clone.user(0)

    done = ready_clone.set_up()

    assert done.returncode == 0, done.stderr
    asked = [note for note in ready_clone.notes if note.startswith("apt-get")]
    installed = [f"apt-get install {program}" for program in ("openssl", "zsh", "fish", "valgrind", "chromium")]
    assert [note for note in asked if note != "apt-get update"] == ["apt-get download prometheus", *installed]
    again = ready_clone.set_up()
    assert (again.returncode, again.stderr, ready_clone.notes) == (0, "", [])


@pytest.mark.parametrize("missing", ["postgres", "initdb"])
def test_root_without_postgres_gets_debians_with_its_libraries_and_no_service(ready_clone: Clone, missing: str) -> None:
    ready_clone.commands.joinpath(missing).unlink()
    ready_clone.command("apt-get", APT_GET)
    ready_clone.command("apt-cache", APT_CACHE)
    ready_clone.command("dpkg-deb", DPKG_DEB)
    ready_clone.user(0)

    done = ready_clone.set_up()

    assert done.returncode == 0, done.stderr
    asked = [note for note in ready_clone.notes if note.startswith("apt-get")]
    libraries = "libicu72 (>= 72.1) zlib1g (>= 1)"
    assert asked == ["apt-get update", "apt-get download postgresql-15", f"apt-get satisfy {libraries}"]
    again = ready_clone.set_up()
    assert (again.returncode, again.stderr, ready_clone.notes) == (0, "", [])


def test_postgres_that_is_installed_and_not_on_path_is_found(ready_clone: Clone) -> None:
    for program in ("postgres", "initdb"):
        ready_clone.commands.joinpath(program).unlink()
        for version in ("13", "15"):
            (ready_clone.installed / version / "bin").mkdir(parents=True, exist_ok=True)
            ready_clone.installed.joinpath(version, "bin", program).write_text(version)
            ready_clone.installed.joinpath(version, "bin", program).chmod(0o755)

    done = ready_clone.set_up()

    assert done.returncode == 0, done.stderr
    assert ready_clone.directory.joinpath(".venv/bin/postgres").read_text() == "15"
    assert ready_clone.directory.joinpath(".venv/bin/initdb").read_text() == "15"


def test_somebody_else_without_postgres_is_told_what_to_install(ready_clone: Clone) -> None:
    ready_clone.commands.joinpath("postgres").unlink()

    done = ready_clone.set_up()

    assert done.returncode == 0
    assert "setup: postgres is missing, and its tests are skipped: install the package postgresql\n" in done.stderr


@pytest.mark.parametrize("missing", ["prometheus", "promtool"])
def test_somebody_else_is_told_what_some_tests_run(ready_clone: Clone, missing: str) -> None:
    ready_clone.commands.joinpath(missing).unlink()

    done = ready_clone.set_up()

    assert done.returncode == 0
    assert f"setup: {missing} is missing, and its tests are skipped: install the package prometheus\n" in done.stderr


def test_somebody_with_only_an_older_python_is_told_so(clone: Clone) -> None:
    clone.command("java", java("17.0.15"))
    clone.command("python3", OLD_PYTHON)

    done = clone.set_up()

    assert done.returncode == 1
    assert done.stderr == "setup: Python 3.11 or newer is needed and none is on PATH: install one\n"


def test_newer_python_beside_an_older_one_is_found(clone: Clone) -> None:
    clone.command("java", java("17.0.15"))
    clone.command("python3", OLD_PYTHON)
    clone.command("python3.12", PYTHON)

    done = clone.set_up()

    assert done.returncode == 0, done.stderr
