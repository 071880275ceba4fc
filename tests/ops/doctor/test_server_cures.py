"""Each cure that changes a server, on a real one: what it names is set, the server is restarted or reloaded as the cure
says, and then the finding is gone.

Each case has a server of its own, which runs with the nats-server.conf that `server render` has written.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from aviso_workers import http_answers
from aviso_workers.backends import Administration
from aviso_workers.ops.doctor.checks import CHECKS, servers
from aviso_workers.server import find_binary, processes, profiles, start_tied
from tests.conftest import Start
from tests.ops.conftest import Run
from tests.ops.doctor import test_cures
from tests.ops.doctor.conftest import add_stream, publish
from tests.ops.doctor.test_cures import (
    PRODUCTION,
    Case,
    Place,
    await_finding,
    configure,
    names,
    prepare,
    printed,
    stream,
)
from tests.waits import PROMPT_SECONDS

CONF = Path("nats-server.conf")
SERVER = "aviso-workers"
STORE = "server.jetstream"
ACCOUNT = "server.accounts.NAME"
"""As cures have it, and so the account of the cases is called."""
RENDER = "`aviso-workers server render`"


class OnServer(Case, frozen=True, kw_only=True):
    """A situation of a server, and how its cure is carried out there."""

    by_hand: Mapping[str, str] = {}
    """What somebody has replaced in nats-server.conf, by patterns."""


async def stored(server: Administration) -> None:
    await add_stream(server, "OTHER")
    await publish(server, "OTHER", 1, size=1_040_000)


CASES = (
    OnServer(
        code="JS039",
        where="account streams",
        given={f"{ACCOUNT}.jetstream.max_streams": 1},
        steps=(stream("OTHER"),),
        sets={f"{ACCOUNT}.jetstream.max_streams": 10},
    ),
    OnServer(
        code="JS039",
        where="account storage",
        given={f"{ACCOUNT}.jetstream.max_storage": "1Mi"},
        steps=(stored,),
        sets={f"{ACCOUNT}.jetstream.max_storage": "10Mi"},
    ),
    OnServer(
        code="JS040",
        where="account",
        given={"server.accounts.ANOTHER.users.v.password": "y"},
        options=PRODUCTION,
        sets={f"{ACCOUNT}.jetstream.max_storage": "10Mi", f"{ACCOUNT}.jetstream.max_streams": 10},
    ),
    OnServer(
        code="JS043",
        where="OTHER",
        given={f"{STORE}.sync_interval": "2m"},
        steps=(stream("OTHER"),),
        sets={f"{STORE}.sync_always": True, f"{STORE}.sync_interval": None},
    ),
    OnServer(
        code="JS044",
        where="JetStream's API",
        given={f"{ACCOUNT}.jetstream.enabled": False},
        sets={f"{ACCOUNT}.jetstream.enabled": True},
    ),
    OnServer(
        code="JS044",
        where=SERVER,
        by_hand={r"(?ms)^jetstream \{.*?^\}": "", r"(?ms)^    jetstream \{.*?\}": ""},
        sets={f"{STORE}.store_dir": "store"},
    ),
    OnServer(
        code="JS052",
        where=SERVER,
        given={f"{STORE}.store_dir": "temporary/store"},
        steps=(stream("OTHER"),),
        options=PRODUCTION,
        sets={f"{STORE}.store_dir": "store"},
    ),
    OnServer(
        code="JS053",
        where=SERVER,
        given={f"{STORE}.max_file_store": "9000Ti"},
        sets={f"{STORE}.max_file_store": "10Mi"},
    ),
    OnServer(
        code="JS053",
        where=SERVER,
        given={f"{STORE}.max_file_store": "1Mi"},
        steps=(stored,),
        sets={f"{STORE}.max_file_store": "10Mi"},
    ),
    OnServer(
        code="JS054",
        where="OTHER",
        given={f"{STORE}.sync_always": True},
        steps=(stream("OTHER"),),
        sets={f"{STORE}.sync_interval": "10s", f"{STORE}.sync_always": False},
    ),
    OnServer(
        code="JS056",
        where=SERVER,
        given={"server.max_connections": 1},
        sets={"server.max_connections": 100},
    ),
    OnServer(
        code="JS061",
        where="aviso_workers_schedule__MARS",
        given={f"{ACCOUNT}.jetstream.max_bytes_required": True},
        sets={f"{ACCOUNT}.jetstream.max_bytes_required": False},
    ),
    OnServer(
        code="JS071",
        where="account",
        given={f"{ACCOUNT}.users.u.permissions": {"publish": {"deny": ["$JS.API.INFO"]}}},
        runs=("server render --role operator",),
    ),
    OnServer(code="JS075", where=SERVER, by_hand={"strict: true": "strict: false"}),
)


class Supervisor:
    """The supervisor of a site, which runs a nats-server with the nats-server.conf of the current directory."""

    def __init__(self, monitoring_port: int) -> None:
        self._monitoring_port = monitoring_port
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = start_tied([find_binary(), "-c", CONF], stderr=subprocess.DEVNULL)
        assert processes.eventually(lambda: self._ask("healthz").get("status") == "ok", PROMPT_SECONDS)

    def stop(self) -> None:
        if self._process:
            self._process.terminate()
            self._process.wait(PROMPT_SECONDS)

    def reload(self) -> None:
        assert self._process
        loaded = self._ask("varz")["config_load_time"]
        self._process.send_signal(signal.SIGHUP)
        assert processes.eventually(lambda: self._ask("varz")["config_load_time"] != loaded, PROMPT_SECONDS)

    def _ask(self, what: str) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self._monitoring_port}/{what}"
        try:
            answer = http_answers.read(url, seconds=5, silent_seconds=5, max_bytes=1 << 20, near=True)
        except OSError:
            return {}
        found: dict[str, Any] = json.loads(answer)
        return found


@pytest.fixture
def place(run: Run, start: Start, tmp_path: Path) -> Place:
    """Where an operator works, with the section `server` of a configuration that production accepts."""
    port, monitoring_port = processes.free_ports(2)
    place = Place(tmp_path, f"nats://127.0.0.1:{port}", "u", run, start)
    sizes = {f"{STORE}.max_file_store": "100Mi", f"{STORE}.max_memory_store": "10Mi"}
    ports = {"server.port": port, "server.monitoring.port": monitoring_port}
    place.write({**ports, **sizes, f"{STORE}.store_dir": "store", f"{ACCOUNT}.users.u.password": "x"})
    return place


@pytest.fixture
def supervisor(place: Place) -> Iterator[Supervisor]:
    supervisor = Supervisor(json.loads(place.file.read_text())["server"]["monitoring"]["port"])
    yield supervisor
    supervisor.stop()


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Take only one directory as one of temporary files, and each stream as one with many publishes."""
    monkeypatch.setattr(servers, "TEMPORARY", (f"{tmp_path}/temporary/",))
    monkeypatch.setattr(profiles, "TEMPORARY", ())
    monkeypatch.setattr(servers, "HOT_PER_SECOND", -1)


def test_each_check_has_a_case_here_or_there_or_a_reason() -> None:
    run = {case.code for case in (*CASES, *test_cures.CASES)}
    assert run ^ test_cures.NOT_RUN.keys() == {check.code for check in CHECKS}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_cure_cures(place: Place, supervisor: Supervisor, case: OnServer) -> None:
    configure(place, case)
    place.carry_out(["server", "render"])
    for pattern, text in case.by_hand.items():
        CONF.write_text(re.sub(pattern, text, CONF.read_text()))
    supervisor.start()
    options = prepare(place, case)
    cure = await_finding(place, case, options, there=True)["cure"]
    assert [path for path in case.sets if not names(cure, path)] == [], cure
    place.write(case.sets)
    for command in printed(cure, place, case):
        granted = yaml.safe_load(place.run(*command).out)
        place.write({f"{ACCOUNT}.users.u": {"password": "x", **granted}})
    apply(cure, place, supervisor)
    await_finding(place, case, options, there=False)
    if case.steps:
        assert place.administer(lambda server: server.api("STREAM.NAMES"))["streams"] == ["OTHER"]


def apply(cure: str, place: Place, supervisor: Supervisor) -> None:
    """Render the file, and restart or reload the server: whichever the cure says."""
    assert RENDER in cure, cure
    place.carry_out(["server", "render"])
    if re.search(r"\breload the server", cure):
        supervisor.reload()
        return
    assert re.search(r"\brestart the server", cure), cure
    supervisor.stop()
    if "move the directory" in cure:
        Path("temporary/store").rename("store")
    supervisor.start()
