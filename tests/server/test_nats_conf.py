"""nats-server.conf: what is in it, who may read it, and what is refused, in the words of our YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aviso_workers.errors import ConfigError
from aviso_workers.server import nats_conf, profiles
from tests.cli.conftest import Run, run
from tests.server.conftest import Load

__all__ = ["run"]

PRODUCTION = "jetstream: {store_dir: /var/lib/nats, max_memory_store: 1Gi, max_file_store: 500Gi}\n"


def write(load: Load, server: str, *, profile: profiles.Profile = "development", **others: str) -> str:
    loaded = load(server, **others)
    settings, choices = profiles.choose(loaded, profile=profile)
    rendered = nats_conf.render(settings, origins=loaded.origins, choices=choices)
    nats_conf.write(rendered, Path("nats-server.conf"), origins=loaded.origins)
    return Path("nats-server.conf").read_text()


@pytest.mark.covers("002-42", "003-10", "004-03", "004-14")
def test_an_empty_section_is_a_server_for_this_machine_only(load: Load) -> None:
    text = write(load, "{}")
    settings = text[text.index("server_name") :]
    assert settings == (
        'server_name: "aviso-workers"\n'
        'host: "127.0.0.1"\n'
        "port: 4222\n"
        'http: "127.0.0.1:8222"\n'
        "jetstream {\n"
        "  strict: true\n"
        "  max_memory_store: 268435456\n"
        "  max_file_store: 4294967296\n"
        '  sync_interval: "120s"\n'
        "}\n"
    )


def test_text_stays_text_whatever_is_in_it(load: Load) -> None:
    password = 'a"b\\c$HOME #{} é'
    environ: dict[str, Any] = {"AVISO_WORKERS_SERVER__ACCOUNTS__A B__USERS__X Y__PASSWORD": password}
    text = write(load, "accounts: {A B: {users: {x y: {}}}}", **environ)
    assert '  "A B" {' in text
    assert 'user: "x y"' in text
    assert 'password: "a\\"b\\\\c$HOME #{} é"' in text


@pytest.mark.parametrize(
    ("server", "refused"),
    [
        (
            "accounts:\n  A:\n    users:\n      bob:\n        password: hush\n        permissions:\n"
            "          publish: {allow: [a, b..c]}",
            "dev.yaml:9: server.accounts.A.users.bob.permissions.publish.allow is refused by nats-server: "
            'subject "b..c" is not a valid subject',
        ),
        (
            "accounts:\n  A:\n    users:\n      bob:\n        nkey: SUSEED",
            "dev.yaml:7: server.accounts.A.users.bob.nkey is refused by nats-server: "
            "Not a valid public nkey for a user",
        ),
        (
            "port: 0\nlame_duck_duration: 5s\nlame_duck_grace_period: 1s",
            "dev.yaml:4: server.lame_duck_duration is refused by nats-server: "
            "invalid lame_duck_duration of 5s, minimum is 30 seconds",
        ),
        (
            "tls:\n  cert_file: dev.yaml\n  key_file: dev.yaml",
            "dev.yaml:3: server.tls is refused by nats-server: error parsing X509 certificate/key pair: "
            "tls: failed to find any PEM data in certificate input",
        ),
    ],
)
def test_what_nats_server_refuses_is_refused_with_the_place_in_our_file(load: Load, server: str, refused: str) -> None:
    with pytest.raises(ConfigError) as raised:
        write(load, server)
    assert raised.value.mistakes == (refused,)
    assert [path.name for path in Path().iterdir()] == ["dev.yaml"]


@pytest.mark.parametrize(
    ("server", "mistake"),
    [
        ("server_name: a/b", "server.server_name must be letters, digits, '_', '-' and '.'"),
        ("max_payload: 65Mi", "server.max_payload must be <= 64Mi"),
        ("lame_duck_grace_period: 2m", "server.lame_duck_grace_period must be shorter than lame_duck_duration"),
        ("jetstream: {sync_always: true, sync_interval: 1s}", "server.jetstream.sync_interval must not be combined"),
        ("jetstream: {sync_interval: 0s}", "server.jetstream.sync_interval must be > 0"),
        ("jetstream: {domain: a.b}", "server.jetstream.domain must be one token"),
        ("jetstream: {limits: {duplicate_window: 0s}}", "server.jetstream.limits.duplicate_window must be > 0"),
        ('jetstream: {unique_tag: "az:"}', "server.jetstream.unique_tag must be the start of one entry"),
        ("jetstream: {encryption: {cipher: aes}}", "server.jetstream.encryption needs a key_file, or a key"),
        (
            "jetstream: {encryption: {key: hush, key_file: hush}}",
            "server.jetstream.encryption.key_file must not be combined with key",
        ),
        ("accounts: {A: {users: {bob: {}}}}", "server.accounts.A.users.bob needs either a password"),
        (
            "accounts: {A: {users: {bob: {password: hush}}}, B: {users: {bob: {password: hush}}}}",
            "server.accounts.B.users.bob is a user of account A already",
        ),
        ("system_account: SYS", "server.system_account names no account of server.accounts: there is none"),
        (
            "accounts: {SYS: {jetstream: {max_streams: 1}}}\nsystem_account: SYS",
            "server.accounts.SYS.jetstream is not for the system account",
        ),
        ("cluster: {routes: ['route:hush@n1:6222']}", "server.cluster.routes[0] must be host:port"),
        ("cluster: {user: route}", "server.cluster.user needs a password"),
        ("cluster: {password: hush}", "server.cluster.password needs a user"),
        ("leafnodes: {remotes: {hub: {urls: []}}}", "server.leafnodes.remotes.hub.urls must not be empty"),
        ("leafnodes: {remotes: {hub: {urls: ['h:1'], account: A}}}", "server.leafnodes.remotes.hub.account names no"),
        ("mqtt: {port: 1883}", "server: unknown field(s): mqtt"),
    ],
)
def test_what_types_cannot_say_has_its_place_and_shows_no_secret(load: Load, server: str, mistake: str) -> None:
    with pytest.raises(ConfigError) as raised:
        write(load, server)
    assert any(each.startswith("dev.yaml:") and mistake in each for each in raised.value.mistakes), (
        raised.value.mistakes
    )
    assert "hush" not in str(raised.value)


@pytest.mark.parametrize(
    ("server", "mistake"),
    [
        (
            "jetstream: {encryption: {key_file: hush}}",
            "dev.yaml:3: server.jetstream.encryption.key_file must name a file with a key that can be read",
        ),
        ("tls: {cert_file: hush, key_file: dev.yaml}", "dev.yaml:3: server.tls.cert_file must name a file that exists"),
        (
            'accounts: {A: {users: {bob: {password: "hush\\nhush"}}}}',
            "dev.yaml:3: server.accounts.A.users.bob.password must not have a line break",
        ),
    ],
)
def test_what_only_this_machine_can_tell_is_told_when_the_file_is_written(
    load: Load, server: str, mistake: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        write(load, server)
    assert str(raised.value).startswith(mistake)
    assert "hush" not in str(raised.value)


@pytest.mark.covers("002-43", "004-27")
def test_production_asks_for_what_only_the_site_knows(load: Load) -> None:
    with pytest.raises(ConfigError) as raised:
        write(load, "{}", profile="production")
    missing = [mistake.partition(" is missing")[0] for mistake in raised.value.mistakes]
    keys = ("store_dir", "max_memory_store", "max_file_store")
    assert missing == [f"dev.yaml:2: server.jetstream.{key}" for key in keys]
    with pytest.raises(ConfigError) as raised:
        write(load, PRODUCTION + "cluster: {}", profile="production")
    assert raised.value.mistakes == (
        "dev.yaml:2: server.server_name is missing: in a cluster, each server has a name of its own",
        "dev.yaml:4: server.cluster.routes is missing: in production, say where the servers of the cluster are",
    )
    with pytest.raises(ConfigError, match=r"dev.yaml:3: server.jetstream.store_dir must not be .* temporary files"):
        write(load, PRODUCTION.replace("/var/lib/nats", "/tmp/nats"), profile="production")


@pytest.mark.covers("004-16", "004-28")
def test_production_flushes_every_write_of_a_server_without_copies(load: Load) -> None:
    text = write(load, PRODUCTION, profile="production")
    assert '  sync_interval: "always"\n' in text
    assert "# notification_backend.jetstream.replicas 1: one server: with its disk, the streams are gone.\n" in text


@pytest.mark.covers("004-28")
@pytest.mark.parametrize(
    ("replicas", "stands"), [(1, "a stream stands still with its server"), (3, "streams stand the loss of 1 of")]
)
def test_production_says_what_a_cluster_stands(load: Load, replicas: int, stands: str) -> None:
    cluster = PRODUCTION + "server_name: n1\ncluster: {routes: [n1:6222, n2:6222, n3:6222]}"
    text = write(lambda server: load(server, replicas=replicas), cluster, profile="production")
    assert '  sync_interval: "10s"\n' in text
    assert "at once loses up to 10s of what is acknowledged" in text
    assert f"# notification_backend.jetstream.replicas {replicas}: {stands}" in text


@pytest.mark.covers("002-49", "004-15", "004-28")
@pytest.mark.parametrize(("setting", "rendered"), [("sync_interval: 1m", '"60s"'), ("sync_always: true", '"always"')])
@pytest.mark.parametrize("profile", ["production", "development"])
def test_no_profile_changes_what_is_configured(
    load: Load, setting: str, rendered: str, profile: profiles.Profile
) -> None:
    text = write(load, PRODUCTION.replace("{", "{" + setting + ", "), profile=profile)
    assert text.count("sync_interval: ") == 1
    assert f"  sync_interval: {rendered}\n" in text
    assert "max_file_store: 536870912000\n" in text


OPEN = """
server_name: n1
host: 0.0.0.0
monitoring: {host: 0.0.0.0}
cluster: {host: 0.0.0.0, routes: [n1:6222, n2:6222]}
gateways: {host: 0.0.0.0, remotes: {aviso-workers: [n1:7222]}}
leafnodes: {host: "::", port: 7422, remotes: {hub: {urls: [hub:7422]}}}
"""
OPEN_KEYS = {
    "server.accounts",
    "server.tls",
    "server.monitoring.host",
    "server.cluster.password",
    "server.cluster.tls",
    "server.gateways.password",
    "server.gateways.tls",
    "server.leafnodes.port",
    "server.leafnodes.tls",
    "server.leafnodes.remotes.hub.ca_file",
}


def test_production_names_every_port_that_is_open_or_can_be_read(load: Load) -> None:
    _, choices = profiles.choose(load(PRODUCTION + OPEN, replicas=3), profile="production")
    assert {choice.key for choice in choices} >= OPEN_KEYS


def test_what_listens_on_the_loopback_is_not_open(load: Load) -> None:
    closed = OPEN.replace("0.0.0.0", "127.0.0.1").replace('"::"', '"::1"')
    _, choices = profiles.choose(load(PRODUCTION + closed, replicas=3), profile="production")
    assert {choice.key for choice in choices} & OPEN_KEYS == {"server.accounts", "server.leafnodes.remotes.hub.ca_file"}


def test_what_asks_for_a_login_and_has_tls_is_not_open(load: Load) -> None:
    for file in ("cert.pem", "key.pem"):
        Path(file).write_text("")
    tls = "tls: {cert_file: cert.pem, key_file: key.pem}"
    guarded = (
        OPEN.replace("0.0.0.0}", "127.0.0.1}")
        .replace("routes:", f"user: u, password: p, {tls}, routes:")
        .replace("0.0.0.0, remotes:", f"0.0.0.0, user: u, password: p, {tls}, remotes:")
        .replace("port: 7422,", f"port: 7422, {tls},")
        .replace("urls:", "ca_file: cert.pem, urls:")
    )
    _, choices = profiles.choose(
        load(PRODUCTION + guarded + f"{tls}\naccounts: {{A: {{users: {{bob: {{password: p}}}}}}}}"),
        profile="production",
    )
    assert {choice.key for choice in choices} & OPEN_KEYS == set()


def test_the_command_writes_a_file_for_its_owner_only_and_shows_no_secret(load: Load, run: Run) -> None:
    load(
        "jetstream: {encryption: {key_file: key}}\n"
        "accounts: {A: {users: {bob: {password: hush-1}}}}\n"
        "cluster: {routes: [n1:6222], user: route, password: hush/2}\n"
        "leafnodes: {remotes: {hub: {urls: [hub:7422], user: leaf, password: hush-3}}}"
    )
    Path("key").write_text("hush-4\n")
    ran = run("server", "render", "--config", "dev.yaml", "--profile", "development")
    assert (ran.code, ran.err) == (0, "")
    assert ran.lines[-1] == "nats-server.conf: written, readable by its owner only"
    assert "hush" not in ran.out
    file = Path("nats-server.conf")
    assert oct(file.stat().st_mode & 0o777) == "0o600"
    assert sorted(line.split('"')[1] for line in file.read_text().splitlines() if "hush" in line) == [
        "hush-1",
        "hush-4",
        "hush/2",
        "nats-leaf://leaf:hush-3@hub:7422",
        "nats-route://route:hush%2F2@n1:6222",
    ]
    shown = run("config", "show", "--config", "dev.yaml")
    assert "hush" not in shown.out


def test_the_key_may_stand_in_the_environment(load: Load) -> None:
    text = write(
        load, "jetstream: {encryption: {cipher: aes}}", AVISO_WORKERS_SERVER__JETSTREAM__ENCRYPTION__KEY="hush"
    )
    assert '  cipher: "aes"\n  key: "hush"\n' in text


def test_a_worker_loads_the_file_without_the_passwords_of_the_server(load: Load) -> None:
    loaded = load("accounts: {A: {users: {bob: {}}}}")
    assert loaded.server.accounts["A"].users["bob"].password is None
