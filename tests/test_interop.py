"""`scripts/interop` in a clone of its own: stand-ins for Go, Cargo, mvn and Python note what they are asked."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.waits import PATIENCE_SECONDS

PROJECT = Path(__file__).parents[1]
TOOLS = ("bash", "cat", "cp", "dirname", "env", "find", "flock", "mkdir", "mv", "rm", "sed", "tail", "touch")
VERSIONS = (PROJECT / "tests" / "interop" / "versions.txt").read_text().splitlines()

GO = """#!/usr/bin/env bash
echo "go $*" >>"$NOTES"
case "$*" in
    *"$GO_FAILS_FOR"*) echo "no such module"; exit 1 ;;
    *natscli*) touch "$GOBIN/nats" ;;
    get* | build*) touch go.sum ;;
    mod*)
        mkdir -p module/config/crd/bases module/example/prometheus-operator-crd
        touch module/config/crd/bases/keda.sh_scaledobjects.yaml
        touch module/example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml
        printf '{\\n\\t"Version": "v1",\\n\\t"Dir": "%s/module",\\n\\t"Sum": "h1"\\n}\\n' "$PWD" ;;
    *) touch "$GOBIN/nats-server" ;;
esac
"""
CARGO = """#!/usr/bin/env bash
case "$1" in
    vendor) mkdir vendored && touch vendored/v5.17.14.zip ;;
    install)
        echo "cargo $2 $4 with ${SWAGGER_UI_DOWNLOAD_URL##*/}" >>"$NOTES"
        mkdir "${@: -1}/bin" && touch "${@: -1}/bin/aviso_server" ;;
esac
"""
MVN = """#!/usr/bin/env bash
echo "mvn ${*: -2:1}" >>"$NOTES"
"""
NPM = """#!/usr/bin/env bash
echo "npm ${*: -1}" >>"$NOTES"
"""
PYTHON = """#!/usr/bin/env bash
[ "$2" != pip ] || { echo "pip ${*: -1}" >>"$NOTES"; exit; }
[ "$*" = "-m venv $3" ] && mkdir "$3/bin" && printf '%s\\n' '#!/usr/bin/env bash' 'echo "pip ${@: -1}" >>"$NOTES"' \
    >"$3/bin/pip" && "$CHMOD" +x "$3/bin/pip"
"""
PYTEST = """#!/usr/bin/env bash
echo "pytest ${*: -2}" >>"$NOTES"
"""


class Clone:
    """A clone that is set up, on a machine with Go, Cargo, npm and Maven and an empty cache."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "a clone"
        self.cache = directory / "a cache"
        self.commands = directory / "bin"
        self.notes_file = directory / "notes"
        for folder in (self.commands, self.directory / "scripts", self.directory / "tests" / "interop"):
            folder.mkdir(parents=True)
        shutil.copy(PROJECT / "scripts" / "interop", self.directory / "scripts")
        shutil.copy(PROJECT / "tests" / "interop" / "versions.txt", self.directory / "tests" / "interop")
        write(self.directory / "scripts" / "setup", "#!/usr/bin/env bash\n")
        write(self.directory / ".venv" / "bin" / "python", PYTHON)
        write(self.directory / ".venv" / "bin" / "pytest", PYTEST)
        write(self.commands / "go", GO)
        write(self.commands / "cargo", CARGO)
        write(self.commands / "systemd-analyze", "#!/usr/bin/env bash\n")
        write(self.commands / "mvn", MVN)
        write(self.commands / "npm", NPM)
        for tool in TOOLS:
            self.commands.joinpath(tool).symlink_to(str(shutil.which(tool)))

    def run(self, **environ: str) -> subprocess.CompletedProcess[str]:
        self.notes_file.write_text("")
        return subprocess.run(
            [self.directory / "scripts" / "interop", "-x"],
            env={
                "PATH": str(self.commands),
                "NOTES": str(self.notes_file),
                "CHMOD": str(shutil.which("chmod")),
                "INTEROP_CACHE": str(self.cache),
                "GO_FAILS_FOR": "nothing",
                **environ,
            },
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )

    @property
    def notes(self) -> list[str]:
        """What was asked of the stand-ins in the last run."""
        return self.notes_file.read_text().splitlines()

    @property
    def installed(self) -> set[str]:
        return {place.name for place in self.cache.iterdir() if place.is_dir()}


def write(file: Path, script: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(script)
    file.chmod(0o755)


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_first_run_installs_every_program_in_its_version_and_runs_the_tests(clone: Clone) -> None:
    done = clone.run()

    assert done.returncode == 0, done.stderr
    assert clone.installed == {line.replace(" ", "-") for line in VERSIONS}
    assert "cargo aviso-server 0.7.1 with v5.17.14.zip" in clone.notes
    assert [*clone.cache.glob("keda-*/*.yaml")], "a module of which a file is taken"
    assert "mvn -Dartifact=io.delta:delta-spark_4.2_2.13:4.4.0" in clone.notes
    assert "mvn -Dartifact=org.apache.spark:spark-core_2.10:1.6.3:jar:tests" in clone.notes
    assert "npm nats@2.29.3" in clone.notes
    assert "pip pyspark==4.2.*" in clone.notes
    assert clone.notes[-1] == "pytest tests/interop -x"


def test_second_run_installs_nothing(clone: Clone) -> None:
    clone.run()

    done = clone.run()

    assert (done.returncode, done.stderr) == (0, "")
    assert clone.notes == ["pytest tests/interop -x"]


def test_a_missing_toolchain_is_told_in_a_line_each_and_the_other_tests_are_run(clone: Clone) -> None:
    for toolchain in ("go", "cargo", "npm", "mvn", "systemd-analyze"):
        clone.commands.joinpath(toolchain).unlink()

    done = clone.run(CI="true")

    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "there is no" in line] == [
        "interop: there is no go: tests with the nats CLI, nats-servers of other versions or linters in Go are not run",
        "interop: there is no cargo: tests with aviso-server are not run",
        "interop: there is no npm: the tests with a client in Node and with AsyncAPI's parser are not run",
        "interop: there is no systemd-analyze: the systemd unit of new projects is not verified",
        "interop: there is no mvn: the tests with Delta Lake and with Spark's event logs are not run",
    ]
    assert clone.notes[-1] == "pytest tests/interop -x"


def test_a_program_that_cannot_be_built_is_told_and_the_others_are_tested(clone: Clone) -> None:
    done = clone.run(GO_FAILS_FOR="nats-server/v2@v2.12")

    assert done.returncode == 0, done.stderr
    assert "could not be installed, and its tests are not run" in done.stderr
    assert "no such module" in done.stderr
    (missing,) = {line.replace(" ", "-") for line in VERSIONS} - clone.installed
    assert missing.startswith("nats-server-2.12")
    assert clone.notes[-1] == "pytest tests/interop -x"


def test_in_ci_a_program_that_cannot_be_built_ends_the_run(clone: Clone) -> None:
    done = clone.run(GO_FAILS_FOR="nats-server/v2@v2.12", CI="true")

    assert done.returncode == 1
    assert not any(note.startswith("pytest") for note in clone.notes)
