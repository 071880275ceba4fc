"""Each cure that changes a server, or takes several of them, in its situation on real ones: as test_cures.

A case of one server has a server of its own, which runs with the nats-server.conf that `server render` has written. The
settings that the cure names are set, the file is rendered, the server is restarted or reloaded as the cure says, and
then the finding is gone. Cases of a cluster share one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import structs

from aviso_workers import config, http_answers
from aviso_workers.backends import Administration
from aviso_workers.ops.doctor import facts, monitoring_port, replicas
from aviso_workers.ops.doctor.checks import CHECKS, servers
from aviso_workers.ops.doctor.checks import servers as checks_of_clusters
from aviso_workers.server import find_binary, processes, profiles, start_tied
from aviso_workers.server.processes import Node
from tests.conftest import Start
from tests.ops.conftest import Run
from tests.ops.doctor import test_cures
from tests.ops.doctor.conftest import add_stream, publish
from tests.ops.doctor.test_cluster import lead
from tests.ops.doctor.test_cures import (
    APPLY,
    FIELD,
    JETSTREAM,
    PRODUCTION,
    WORKED,
    WORKER,
    Case,
    Place,
    Step,
    await_finding,
    carry_out,
    configure,
    prepare,
    stream,
    waiting_first,
)
from tests.waits import PROMPT_SECONDS

CONF = Path("nats-server.conf")
SERVER = "aviso-workers"
STORE = "server.jetstream"
USERS, LIMITS = "server.accounts.NAME.users", "server.accounts.NAME.jetstream"
"""NAME is how cures name an account, and how that of the cases is called."""
RENDER, RIGHTS = "server render", "server render --role operator"


class OnServer(Case, frozen=True, kw_only=True):
    """A situation of a server, and how its cure is carried out there."""

    by_hand: Mapping[str, str] = {}
    """What somebody has replaced in nats-server.conf, by patterns."""


def of_setting(code: str, where: str, setting: str, before: Any, after: Any, *steps: Step) -> OnServer:
    """The case of one setting, which is wrong before the cure and right after it."""
    return OnServer(code=code, where=where, given={setting: before}, steps=steps, sets={setting: after})


async def stored(server: Administration) -> None:
    await add_stream(server, "OTHER")
    await publish(server, "OTHER", 1, size=1_040_000)


async def led_by_one(server: Administration) -> None:
    for name in ("OTHER", "ANOTHER"):
        await add_stream(server, name, num_replicas=3)
        await lead(server, name, leader="n-1")


async def killed(server: Administration) -> None:
    os.kill(follower(processes.DIRECTORY).pid, signal.SIGKILL)


OTHER = stream("OTHER")
DENIED = {"publish": {"deny": ["$JS.API.INFO"]}}
CASES = (
    of_setting("JS039", "account streams", f"{LIMITS}.max_streams", 1, 10, OTHER),
    of_setting("JS039", "account storage", f"{LIMITS}.max_storage", "1Mi", "10Mi", stored),
    OnServer(
        code="JS040",
        where="account",
        given={"server.accounts.ANOTHER.users.v.password": "y"},
        sets={f"{LIMITS}.max_storage": "10Mi", f"{LIMITS}.max_streams": 10},
    ),
    OnServer(
        code="JS043",
        where="OTHER",
        given={f"{STORE}.sync_interval": "2m"},
        steps=(OTHER,),
        sets={f"{STORE}.sync_always": True, f"{STORE}.sync_interval": None},
    ),
    of_setting("JS044", "JetStream's API", f"{LIMITS}.enabled", False, True),
    OnServer(
        code="JS044",
        where=SERVER,
        by_hand={r"(?ms)^jetstream \{.*?^\}": "", r"(?ms)^    jetstream \{.*?\}": ""},
        sets={f"{STORE}.store_dir": "store"},
    ),
    of_setting("JS052", SERVER, f"{STORE}.store_dir", "temporary/store", "store", OTHER),
    of_setting("JS053", SERVER, f"{STORE}.max_file_store", "9000Ti", "10Mi"),
    of_setting("JS053", SERVER, f"{STORE}.max_file_store", "1Mi", "10Mi", stored),
    OnServer(
        code="JS054",
        where="OTHER",
        given={f"{STORE}.sync_always": True},
        steps=(OTHER,),
        sets={f"{STORE}.sync_interval": "10s", f"{STORE}.sync_always": False},
    ),
    of_setting("JS056", SERVER, "server.max_connections", 1, 100),
    of_setting("JS061", "aviso_workers_schedule__MARS", f"{LIMITS}.max_bytes_required", True, False),
    OnServer(code="JS071", where="account", given={f"{USERS}.u.permissions": DENIED}),
    OnServer(code="JS075", where=SERVER, by_hand={"strict: true": "strict: false"}),
)
THREE, TWO, DECLARED = {f"{JETSTREAM}.replicas": 3}, {f"{JETSTREAM}.replicas": 2}, {"streams.OTHER.num_replicas": 3}
IN_CLUSTER = (
    Case(code="JS003", where="MARS", steps=APPLY, sets=THREE, runs=APPLY),
    Case(code="JS003", where="OTHER", steps=(OTHER,), sets=DECLARED, runs=APPLY),
    Case(code="JS003", where="KV_field__state", app=FIELD, steps=(waiting_first, WORKED), sets=THREE, runs=WORKER),
    Case(code="JS004", where="MARS", given=TWO, steps=APPLY, sets=THREE, runs=APPLY),
    Case(code="JS004", where="OTHER", steps=(stream("OTHER", num_replicas=2),), sets=DECLARED, runs=APPLY),
    Case(code="JS018", where="n-1", steps=(led_by_one,), runs=("streams step-down",), words={"STREAM": "OTHER"}),
    Case(code="JS044", where="MONITOR", steps=(killed,), runs=("server start --nodes",), words={"COUNT": "3"}),
)
"""Cases of a cluster of three, each in an account of its own. MONITOR is the monitoring port of the killed server."""


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
    place.write({**ports, **sizes, f"{STORE}.store_dir": "store", f"{USERS}.u.password": "x"})
    return place


@pytest.fixture
def supervisor(place: Place) -> Iterator[Supervisor]:
    supervisor = Supervisor(json.loads(place.file.read_text())["server"]["monitoring"]["port"])
    yield supervisor
    supervisor.stop()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a cluster of three, as `server start --nodes 3` has it, with an account for each case."""
    directory = tmp_path_factory.mktemp("cluster")
    accounts = {f"A{n}": {"users": {f"u{n}": {"password": "x"}}} for n in range(len(IN_CLUSTER))}
    section = {"server_name": "n", "port": 0, "monitoring": {"port": 0}, "accounts": accounts}
    file = directory / "aviso.yaml"
    file.write_text(json.dumps({"notification_backend": {"kind": "jetstream"}, "server": section}))
    processes.start(config.load(file, environ={}), directory=directory, nodes=3, detached=False)
    yield directory
    processes.stop(directory)


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One directory is for temporary files, no rate of publishes is low, two streams are enough for a judgement on
    leaders, and the doctor looks again at once.
    """
    monkeypatch.setattr(servers, "TEMPORARY", (f"{tmp_path}/temporary/",))
    monkeypatch.setattr(profiles, "TEMPORARY", ())
    monkeypatch.setattr(servers, "HOT_PER_SECOND", -1)
    monkeypatch.setattr(checks_of_clusters, "LEADERS_TO_COUNT", 2)
    for module, seconds in ((monitoring_port, "LOOK_AGAIN"), (facts, "LATER"), (replicas, "LATER")):
        monkeypatch.setattr(module, f"{seconds}_SECONDS", 0)


def test_each_check_has_a_case_here_or_there_or_a_reason() -> None:
    run = {case.code for case in (*CASES, *IN_CLUSTER, *test_cures.CASES)}
    assert run ^ test_cures.NOT_RUN.keys() == {check.code for check in CHECKS}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_cure_cures(place: Place, supervisor: Supervisor, case: OnServer) -> None:
    configure(place, case)
    place.carry_out(RENDER.split())
    for pattern, text in case.by_hand.items():
        CONF.write_text(re.sub(pattern, text, CONF.read_text()))
    supervisor.start()
    options = (*PRODUCTION, *prepare(place, case))
    cure = carry_out(place, case, options)
    take_over(cure, place, supervisor)
    await_finding(place, case, options, there=False)
    if case.steps:
        assert place.administer(lambda server: server.api("STREAM.NAMES"))["streams"] == ["OTHER"]


def take_over(cure: str, place: Place, supervisor: Supervisor) -> None:
    """Render the file, with the rights that the cure names, and restart or reload the server, whichever it says."""
    if f"`aviso-workers {RIGHTS}`" in cure:
        rights = yaml.safe_load(place.run(*RIGHTS.split()).out)
        place.write({f"{USERS}.u": {"password": "x", **rights}})
    assert f"`aviso-workers {RENDER}`" in cure, cure
    place.carry_out(RENDER.split())
    if "reload the server" in cure:
        supervisor.reload()
        return
    assert "restart the server" in cure, cure
    supervisor.stop()
    if "move the directory" in cure:
        Path("temporary/store").rename("store")
    supervisor.start()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(IN_CLUSTER)), ids=map(str, IN_CLUSTER))
def test_a_cure_cures_in_a_cluster(cluster: Path, run: Run, start: Start, tmp_path: Path, number: int) -> None:
    nodes = processes.recorded(cluster)
    case = IN_CLUSTER[number]
    case = structs.replace(case, where=case.where.replace("MONITOR", monitor(follower(cluster))))
    place = Place(tmp_path, ",".join(node.url for node in nodes), f"u{number}", run, start)
    place.write({"server": json.loads((cluster / "aviso.yaml").read_text())["server"]})
    (tmp_path / processes.DIRECTORY.parent).mkdir()
    (tmp_path / processes.DIRECTORY).symlink_to(cluster)
    monitors = [f"--monitor={monitor(node)}" for node in nodes]
    options = (*PRODUCTION, *monitors, *prepare(place, case))
    carry_out(place, case, options)
    await_finding(place, case, options, there=False)


def monitor(node: Node) -> str:
    return f"http://127.0.0.1:{node.monitoring_port}"


def follower(directory: Path) -> Node:
    """A server of the cluster that does not lead the meta group. Without the leader there is an election."""
    nodes = processes.recorded(directory)
    leader = processes.ask(nodes[0], "/jsz")["meta_cluster"]["leader"]
    return next(node for node in nodes if node.name != leader)
