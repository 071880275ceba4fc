"""Contexts of the `nats` command line in the place of the connection that a configuration has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aviso_workers import config
from aviso_workers.app import App
from aviso_workers.config import display
from aviso_workers.errors import ConfigError, DeclarationError

CONFIGURED = """\
notification_backend:
  kind: jetstream
  jetstream: {nats_url: "tls://configured:4222", credentials_file: configured.creds, timeout_seconds: 7}
"""

FIELDS = (
    *("description", "url", "socks_proxy", "token", "user", "password", "creds", "nkey", "cert", "key", "ca", "nsc"),
    *("jetstream_domain", "jetstream_api_prefix", "jetstream_event_prefix", "inbox_prefix", "user_jwt", "user_seed"),
    *("color_scheme", "windows_cert_store", "windows_cert_match_by", "windows_cert_match"),
)


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """`save("prod", url="nats://prod:4222")`: a context as the `nats` command line writes it, every field in it."""
    empty: dict[str, Any] = dict.fromkeys(FIELDS, "")

    def save(name: str, **fields: Any) -> Path:
        file = tmp_path / "home/.config/nats/context" / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**empty, "tls_first": False, "windows_ca_certs_match": None, **fields}))
        return file

    return save


def loaded(text: str | None = None, *, context: str | None = None, **environ: str) -> config.Config:
    if text is not None:
        Path("dev.yaml").write_text(text)
    return config.load("dev.yaml" if text else None, context=context, environ={"HOME": f"{Path.cwd()}/home", **environ})


def mistakes(text: str | None = None, *, context: str | None = None, **environ: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as raised:
        loaded(text, context=context, **environ)
    return raised.value.mistakes


def connection(found: config.Config) -> config.JetStream:
    return found.notification_backend.jetstream


def test_a_context_stands_in_the_place_of_the_whole_connection(save: Callable[..., Path]) -> None:
    file = save("prod", url="nats://a:4222,nats://b:4222", user="me", password="secret")
    found = loaded(CONFIGURED, context="prod")
    jetstream = connection(found)
    assert jetstream.servers == ("nats://a:4222", "nats://b:4222")
    assert jetstream.password is not None
    assert (jetstream.user, jetstream.password.reveal(), jetstream.credentials_file) == ("me", "secret", None)
    assert jetstream.timeout_seconds == 7  # how long we wait is not part of the connection
    assert found.origins["notification_backend.jetstream.nats_url"] == str(file)


def test_each_field_of_a_context_is_a_key_of_ours(save: Callable[..., Path]) -> None:
    for name in ("my.creds", "ca.pem", "cert.pem", "key.pem"):
        Path(name).touch()
    save("one", creds="my.creds", ca="ca.pem", cert="cert.pem", key="key.pem", jetstream_domain="hub")
    jetstream = connection(loaded(context="one"))
    assert (jetstream.credentials_file, jetstream.domain, jetstream.api) == ("my.creds", "hub", "$JS.hub.API")
    assert jetstream.tls == config.Tls(ca_file="ca.pem", cert_file="cert.pem", key_file="key.pem")
    Path("seed.nk").touch()
    save("two", nkey="seed.nk", jetstream_api_prefix="JS.hub.API", inbox_prefix="_INBOX.me", url="nats://[::1]:4222")
    jetstream = connection(loaded(context="two"))
    assert (jetstream.nkey_seed_file, jetstream.api, jetstream.inbox_prefix) == ("seed.nk", "JS.hub.API", "_INBOX.me")
    save("three", token="t0p")
    jetstream = connection(loaded(context="three"))
    assert jetstream.token is not None
    assert (jetstream.token.reveal(), jetstream.servers) == ("t0p", ("nats://localhost:4222",))


def test_paths_of_a_context_are_read_as_the_nats_command_line_reads_them(save: Callable[..., Path]) -> None:
    for place, found in (("~/my.creds", "home/my.creds"), ("$KEYS/my.creds", "keys/my.creds")):
        Path(found).parent.mkdir(exist_ok=True)
        Path(found).touch()
        for prefix in ("", "file://", "FILE://"):
            save("prod", creds=f"{prefix}{place}")
            jetstream = connection(loaded(context="prod", KEYS=f"{Path.cwd()}/keys"))
            assert jetstream.credentials_file == str(Path.cwd() / found)


def test_a_context_needs_no_configuration_file(save: Callable[..., Path]) -> None:
    save("prod", url="nats://prod:4222")
    for found in (loaded(context="prod"), loaded(NATS_CONTEXT="prod")):
        assert connection(found).servers == ("nats://prod:4222",)
        assert found.notification_backend.kind == "jetstream"


def test_the_variable_names_a_context_only_where_the_configuration_has_no_connection(
    save: Callable[..., Path],
) -> None:
    save("prod", url="nats://prod:4222")
    quiet = "notification_backend: {kind: jetstream, jetstream: {timeout_seconds: 7}}"
    assert connection(loaded(quiet, NATS_CONTEXT="prod")).servers == ("nats://prod:4222",)
    Path("configured.creds").touch()
    found = loaded(CONFIGURED, NATS_CONTEXT="prod")
    assert connection(found).servers == ("tls://configured:4222",)
    assert found.warnings == (
        "dev.yaml:3: notification_backend.jetstream.nats_url: is used, and NATS_CONTEXT is not: --context goes before "
        "the configuration",
    )
    assert loaded("notification_backend: {kind: in_memory}", NATS_CONTEXT="prod").warnings == ()
    over = {"AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__NATS_URL": "nats://variable:4222"}
    assert connection(loaded(quiet, NATS_CONTEXT="prod", **over)).servers == ("nats://variable:4222",)


def test_what_is_named_goes_before_the_environment(save: Callable[..., Path]) -> None:
    save("prod", url="nats://prod:4222")
    save("test", url="nats://test:4222")
    over = {"AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__NATS_URL": "nats://variable:4222", "NATS_CONTEXT": "test"}
    jetstream = connection(loaded(CONFIGURED, context="prod", NATS_TOKEN="of another server", **over))
    assert jetstream.servers == ("nats://prod:4222",)
    assert jetstream.token is None


def test_the_selected_context_is_taken_only_where_it_is_asked_for(save: Callable[..., Path]) -> None:
    file = save("prod", url="nats://prod:4222")
    Path("home/.config/nats/context.txt").write_text("prod\n")
    quiet = "notification_backend: {kind: jetstream}"
    assert connection(loaded(quiet)).servers == ("nats://localhost:4222",)
    assert connection(loaded(quiet, context="selected")).servers == ("nats://prod:4222",)
    Path("home/.config/nats/context.txt").unlink()
    assert mistakes(quiet, context="selected") == (
        "no context is selected: `nats context select NAME` selects one, or name it by --context",
    )
    file.rename(file.with_name("selected.json"))
    assert "rename this one" in mistakes(quiet, context="selected")[0]


def test_a_file_may_stand_for_its_name_and_contexts_lie_where_the_environment_says(save: Callable[..., Path]) -> None:
    file = save("prod", url="nats://prod:4222")
    assert connection(loaded(context=str(file))).servers == ("nats://prod:4222",)
    Path("home/.config").rename("elsewhere")
    assert connection(loaded(context="prod", XDG_CONFIG_HOME="elsewhere")).servers == ("nats://prod:4222",)


def test_an_unknown_context_is_told_with_those_that_there_are(save: Callable[..., Path]) -> None:
    where = f"{Path.cwd()}/home/.config/nats/context"
    assert mistakes(context="prod") == (f"no context 'prod' in {where}; there is none",)
    save("test")
    save("dev")
    assert mistakes(context="prod") == (f"no context 'prod' in {where}; there are: dev, test",)
    assert mistakes(context="../context/dev") == (f"no context '../context/dev' in {where}; there are: dev, test",)
    assert mistakes(context="")[0].startswith("no context ''")


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("nsc", "nsc://op/account/user", "'nsc' of a context is not supported: we do not ask nsc: write"),
        ("user_jwt", "eyJ0", "'user_jwt' of a context is not supported: put the JWT and its seed into one file"),
        ("user_seed", "SUAA", "'user_seed' of a context is not supported"),
        ("socks_proxy", "socks5://proxy", "'socks_proxy' of a context is not supported: we connect without a proxy"),
        ("tls_first", True, "'tls_first' of a context is not supported"),
        ("jetstream_event_prefix", "JS.EVENTS", "'jetstream_event_prefix' of a context is not supported"),
        ("windows_cert_store", "machine", "'windows_cert_store' of a context is not supported: we read certificates"),
        ("windows_ca_certs_match", ["x"], "'windows_ca_certs_match' of a context is not supported"),
        ("creds", "op://vault/it/creds", "'creds' is taken from elsewhere by 'op:', which is not supported: name a"),
        ("creds", "data:;base64,QUFB", "'creds' is taken from elsewhere by 'data:'"),
        ("nkey", "ENV://SEED", "'nkey' is taken from elsewhere by 'env:'"),
        ("ca", "https://authority", "'ca' is taken from elsewhere by 'https:'"),
        ("password", "env://PASSWORD", "'password' is taken from elsewhere by 'env:', which is not supported: give"),
        ("token", "file:///run/token", "'token' is taken from elsewhere by 'file:'"),
        ("quantum", "on", "'quantum' is not known as a field of a context, so what it asks for is not done"),
        ("user", 7, "'user' must be text"),
        ("url", "http://host", "notification_backend.jetstream.nats_url must be a URL such as nats://host:4222"),
        ("user", "me", "notification_backend.jetstream.user needs a password"),
        ("creds", "nowhere.creds", "notification_backend.jetstream.credentials_file must name a file that exists"),
        ("inbox_prefix", "_INBOX.*", "notification_backend.jetstream.inbox_prefix must be the begin of a subject"),
        ("jetstream_api_prefix", "JS.A.", "notification_backend.jetstream.api_prefix must be the begin of a subject"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    save: Callable[..., Path], field: str, value: Any, expected: str
) -> None:
    file = save("prod", **{field: value})
    (said,) = mistakes(context="prod")
    assert said.startswith(f"{file}: {expected}")


def test_a_context_has_one_way_to_authenticate_and_to_reach_jetstream(save: Callable[..., Path]) -> None:
    file = save("prod", token="t", user="u", password="p", jetstream_domain="hub", jetstream_api_prefix="JS.hub.API")
    jetstream = "notification_backend.jetstream"
    assert mistakes(context="prod") == (
        f"{file}: {jetstream}.user must not be combined with token: keep one way to authenticate",
        f"{file}: {jetstream}.api_prefix must not be combined with domain: keep one of them",
    )


def test_no_secret_of_a_context_is_shown(save: Callable[..., Path]) -> None:
    save("right", url="nats://me:s3cret@host:4222")
    found = loaded(context="right")
    shown = f"{found!r} {display.effective(found)}"
    save("wrong", token="s3cret", password="env://s3cret", nsc="s3cret", user_seed="s3cret", url="s3cret://me:s3cret@")
    told = " ".join(mistakes(context="wrong"))
    broken = save("broken")
    broken.write_text('{"token": "s3cret"')
    told += " ".join(mistakes(context="broken"))
    broken.write_text('["s3cret"]')
    told += " ".join(mistakes(context="broken"))
    assert "s3cret" not in shown + told
    assert "is not a JSON object, as contexts of the nats command line are" in told


def test_a_backend_without_servers_takes_no_context(save: Callable[..., Path]) -> None:
    save("prod")
    assert mistakes("notification_backend: {kind: in_memory}", context="prod") == (
        "dev.yaml:1: notification_backend.kind must be jetstream for a context of the nats command line",
    )


def test_an_app_that_brings_a_loaded_configuration_takes_no_context() -> None:
    app = App("mine", config=loaded("notification_backend: {kind: in_memory}"))
    with pytest.raises(DeclarationError, match="brings a configuration that is loaded already: leave out --context"):
        app._use_nats_context("prod")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("AVISO", "NATS_", "XDG"))}
    return subprocess.run(
        [Path(sys.executable).with_name("aviso-workers"), *arguments],
        env={**ours, "HOME": f"{Path.cwd()}/home"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_commands_that_connect_take_a_context_and_others_do_not(save: Callable[..., Path]) -> None:
    save("prod", url="nats://127.0.0.1:1", user="me", password="s3cret")
    shown = run("config", "show", "--context", "prod")
    assert shown.returncode == 0
    assert "nats://127.0.0.1:1" in shown.stdout
    assert "s3cret" not in shown.stdout
    tried = run("streams", "ls", "--context", "prod")
    assert (tried.returncode, "no NATS server at nats://127.0.0.1:1" in tried.stderr) == (1, True)
    unknown = run("streams", "ls", "--context", "nowhere")
    assert (unknown.returncode, "no context 'nowhere'" in unknown.stderr) == (2, True)
    assert "No such option" in run("server", "start", "--context", "prod").stderr


@pytest.mark.slow
def test_the_connection_of_an_app_is_that_of_the_context(save: Callable[..., Path]) -> None:
    save("prod", url="nats://127.0.0.1:1")
    Path("mine.py").write_text(
        "from aviso_workers import App\nfrom aviso_workers.config import load\n"
        "app = App('mine', config='dev.yaml')\n"
        "loaded = App('mine', config=load('dev.yaml'))\n"
    )
    Path("configured.creds").touch()
    Path("dev.yaml").write_text(CONFIGURED)
    assert run("check", "mine:app", "--context", "prod").returncode == 0
    refused = run("check", "mine:loaded", "--context", "prod")
    assert (refused.returncode, "leave out --context" in refused.stderr) == (2, True)
    file = save("prod", nsc="nsc://x")
    told = run("check", "mine:app", "--context", "prod")
    assert (told.returncode, f"{file}: 'nsc'" in told.stderr) == (2, True)
