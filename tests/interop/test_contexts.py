"""Contexts that the `nats` command line has written: both command lines connect by them, to the same account."""

from __future__ import annotations

import json
import secrets
import signal
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import nkeys
import pytest

from aviso_workers.server import NatsServer
from tests.interop.nats_cli import Shell, differences, successful
from tests.security.certificates import Authority
from tests.security.tokens import Key, Operator

USER = Key(nkeys.PREFIX_BYTE_USER)
SECRET = secrets.token_hex(8)
ACCOUNTS = """
accounts {
  HUB: {
    jetstream: enabled
    users: [{user: hub, password: "SECRET"}]
    exports: [{service: "$JS.API.>", response: stream}, {service: "mars.>"}, {stream: "deliver.>"}]
  }
  EDGE: {
    users: [
      {user: edge, password: "SECRET"},
      {user: own, password: "SECRET", permissions: {publish: ">", subscribe: ["_INBOX.own.>"]}}
    ]
    imports: [
      {service: {account: HUB, subject: "$JS.API.>"}, to: "JS.hub.API.>"}
      {service: {account: HUB, subject: "mars.>"}}
    ]
  }
}
""".replace("SECRET", SECRET)


WORKER = """
import structlog

from aviso_workers import App, Notification

app = App("agents")


@app.agent("work")
async def handle(notification: Notification[int]) -> None:
    structlog.get_logger().info(f"handled {notification.identifier['class']}")
"""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """Both command lines. Ours never says the secret of a context."""
    shell = Shell(tmp_path)
    yield shell
    assert SECRET not in "".join(shell.said)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[NatsServer, list[str]]]]:
    """By the way to authenticate: a server, and what `nats context add` is told of it."""
    keys = tmp_path_factory.mktemp("keys")
    (keys / "user.nk").write_text(USER.seed)
    operator, authority = Operator(), Authority(keys, "authority")
    server_side, client_side = authority.sign("server"), authority.sign("client")
    files = f'cert_file: "{server_side.cert_file}", key_file: "{server_side.key_file}"'
    mutual = f'tls {{ {files}, ca_file: "{authority.ca_file}", verify: true }}\n'
    certificates = ["--tlsca", authority.ca_file, "--tlscert", client_side.cert_file, "--tlskey", client_side.key_file]
    ways: dict[str, tuple[str, list[str]]] = {
        "nobody": ("", []),
        "token": (f'authorization {{ token: "{SECRET}" }}\n', ["--user", SECRET]),  # natscli 0.5.1 forgets --token
        "user": (
            f'authorization {{ users: [{{user: worker, password: "{SECRET}"}}] }}\n',
            ["--user", "worker", "--password", SECRET],
        ),
        "nkey": (f'authorization {{ users: [{{nkey: "{USER.public}"}}] }}\n', ["--nkey", str(keys / "user.nk")]),
        "creds": (operator.server_config, ["--creds", str(operator.user(keys / "user.creds"))]),
        "certificate": (mutual, certificates),
        "domain": ("", ["--js-domain", "hub"]),
        "api": (ACCOUNTS, ["--user", "edge", "--password", SECRET, "--js-api-prefix", "JS.hub.API"]),
        "inbox": (
            ACCOUNTS,
            ["--user", "own", "--password", SECRET, "--js-api-prefix", "JS.hub.API", "--inbox-prefix", "_INBOX.own"],
        ),
    }
    with ExitStack() as stack:
        started = {}
        for way, (config, options) in ways.items():
            store = tmp_path_factory.mktemp(way)
            if way == "domain":
                config = f'jetstream {{ store_dir: "{store}", domain: hub }}\n'
            server = stack.enter_context(NatsServer.start(store_dir=store, config=config))
            started[way] = server, options
        yield started


WAYS = ["nobody", "token", "user", "nkey", "creds", "certificate", "domain", "api", "inbox"]


@pytest.mark.parametrize("way", WAYS)
def test_both_command_lines_use_the_same_context(
    shell: Shell, servers: dict[str, tuple[NatsServer, list[str]]], way: str
) -> None:
    server, options = servers[way]
    successful(shell.nats("context", "add", "prod", "--server", server.url, "--description", "of a test", *options))
    made = ("stream", "add", "MARS", "--subjects", "mars.>", "--defaults", "--json", "--context", "prod")
    successful(shell.nats(*made))
    theirs = shell.nats_json("stream", "info", "MARS", "--json", "--context", "prod")
    ours = shell.ours_json("streams", "info", "MARS", "--json", "--context", "prod")
    assert differences(ours["config"], theirs["config"]) == []
    assert ours["created"] == theirs["created"]
    shell.environ["NATS_CONTEXT"] = "prod"
    assert shell.ours_json("streams", "info", "MARS", "--json")["created"] == theirs["created"]
    assert shell.nats_json("stream", "info", "MARS", "--json")["created"] == theirs["created"]


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("nobody", "domain")])
def test_without_what_the_context_has_neither_gets_in(
    shell: Shell, servers: dict[str, tuple[NatsServer, list[str]]], way: str
) -> None:
    server, _ = servers[way]
    successful(shell.nats("context", "add", "bare", "--server", server.url))
    assert shell.nats("stream", "ls", "--context", "bare").returncode != 0
    refused = shell.ours("streams", "ls", "--context", "bare")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (1, 1), refused.stderr


@pytest.mark.parametrize("way", ["api", "inbox", "nobody"])
def test_notifications_are_published_and_read_by_a_context(
    shell: Shell, servers: dict[str, tuple[NatsServer, list[str]]], way: str
) -> None:
    server, options = servers[way]
    event = {
        "topic": {"base": "mars", "key_order": ["class"]},
        "identifier": {"class": {"type": "StringHandler", "required": True}},
    }
    config = shell.home / "config.yaml"
    backend = {"kind": "jetstream", "jetstream": {"stream_management": "observe"}}
    config.write_text(json.dumps({"notification_backend": backend, "notification_schema": {"mars": event}}))
    successful(shell.nats("context", "add", "prod", "--server", server.url, *options))
    shell.nats("stream", "add", "MARS", "--subjects", "mars.>", "--defaults", "--context", "prod")
    by = ("--config", config, "--context", "prod")
    successful(shell.ours("notify", "mars", "class=od", "--payload", '"by a context"', *by))
    read = shell.ours("replay", "mars", "--from-id", "1", *by)
    assert "by a context" in successful(read)
    theirs = successful(shell.nats("stream", "get", "MARS", "--last-for", "mars.od", "--context", "prod"))
    assert "by a context" in theirs


def test_the_selected_context_is_the_one_that_the_nats_command_line_selected(
    shell: Shell, servers: dict[str, tuple[NatsServer, list[str]]]
) -> None:
    for way in ("user", "token"):
        server, options = servers[way]
        successful(shell.nats("context", "add", way, "--server", server.url, *options))
    for way in ("token", "user"):
        successful(shell.nats("context", "select", way))
        shown = successful(shell.ours("config", "show", "--context", "selected"))
        assert servers[way][0].url in shown
        successful(shell.ours("streams", "ls", "--context", "selected"))


def test_doctor_examines_the_server_of_a_context(
    shell: Shell, servers: dict[str, tuple[NatsServer, list[str]]]
) -> None:
    server, options = servers["user"]
    successful(shell.nats("context", "add", "prod", "--server", server.url, *options))
    file = shell.home / ".config/nats/context/prod.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    report = shell.ours("doctor", "--seconds", "1", "--format", "json", "--context", "prod")
    assert report.returncode in (0, 1), report.stderr
    assert json.loads(report.stdout)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_worker_connects_by_a_context(
    shell: Shell, servers: dict[str, tuple[NatsServer, list[str]]], processes: str
) -> None:
    server, options = servers["user"]
    successful(shell.nats("context", "add", "prod", "--server", server.url, *options))
    config = shell.home / "config.yaml"
    identifier = {"class": {"type": "StringHandler", "required": True}}
    event = {"topic": {"base": "work", "key_order": ["class"]}, "identifier": identifier}
    workers = {"status": {"port": 0}, "logging": {"format": "json"}}
    config.write_text(json.dumps({"notification_schema": {"work": event}, "workers": workers}))
    (shell.home / "agents.py").write_text(WORKER)
    by = ("--config", config, "--context", "prod")

    with shell.started("worker", "agents:app", "--processes", processes, *by) as worker:
        successful(shell.ours("notify", "work", f"class=od{processes}", "--payload", "1", *by))
        said = []
        for line in worker.stdout or ():
            said.append(line)
            if f"handled od{processes}" in line:
                worker.send_signal(signal.SIGTERM)
    assert f"handled od{processes}" in "".join(said)
    assert worker.returncode == 0, said
    shell.said += said


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--creds", "nsc://op/account/user"], "creds"),
        (["--creds", "op://vault/item/field"], "creds"),
        (["--nkey", "env://SEED"], "nkey"),
        (["--jwt", "user.jwt", "--seed", "user.nk"], "user_jwt"),
        (["--socks-proxy", "socks5://127.0.0.1:1"], "socks_proxy"),
        (["--tlsfirst"], "tls_first"),
        (["--js-event-prefix", "JS.EVENTS"], "jetstream_event_prefix"),
        (["--user", "me", "--password", "env://S3CRET"], "password"),
    ],
)
def test_what_we_cannot_do_is_refused_before_anything_connects(shell: Shell, options: list[str], field: str) -> None:
    successful(shell.nats("context", "add", "prod", "--server", "nats://127.0.0.1:1", *options))
    refused = shell.ours("streams", "ls", "--context", "prod")
    assert refused.returncode == 2
    assert f"'{field}'" in refused.stderr
    assert "S3CRET" not in refused.stderr
