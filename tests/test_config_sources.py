"""Where the configuration comes from: files, environment and YAML's traps; and how it is shown."""

from __future__ import annotations

import contextlib
import json
import pickle
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from aviso_workers import config
from aviso_workers.config import display
from aviso_workers.config.documents import KeyPlace, parse
from aviso_workers.errors import ConfigError

MINIMAL = "notification_backend: {kind: in_memory}\n"
JETSTREAM = "AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__"


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(path: str, text: str = MINIMAL) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")
    return path


def loaded(text: str = MINIMAL, **environ: str) -> config.Config:
    return config.load(written("dev.yaml", text), environ=environ)


def mistakes_in(text: str | bytes = MINIMAL, **environ: str) -> tuple[str, ...]:
    Path("dev.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as raised:
        config.load("dev.yaml", environ=environ)
    return raised.value.mistakes


# ---- files ----------------------------------------------------------------------------------------------------


def test_a_path_goes_before_our_variable_and_ours_before_aviso_servers() -> None:
    path, ours, servers = (written(name) for name in ("path.yaml", "ours.yaml", "servers.yaml"))
    environ = {"AVISO_WORKERS_CONFIG_FILE": ours, "AVISOSERVER_CONFIG_FILE": servers}
    written("configuration/config.yaml", "not: read")
    assert config.load(path, environ=environ).sources == ("path.yaml",)
    assert config.load(Path(path), environ=environ).sources == ("path.yaml",)
    assert config.load(environ=environ).sources == ("ours.yaml",)
    assert config.load(environ={"AVISOSERVER_CONFIG_FILE": servers}).sources == ("servers.yaml",)


def test_the_files_of_aviso_server_are_merged_key_by_key_and_the_later_wins(tmp_path: Path) -> None:
    written(
        "configuration/config.yaml",
        "notification_backend: {kind: jetstream, jetstream: {timeout_seconds: 1, retry_attempts: 1}}",
    )
    home = written(
        f"{tmp_path}/home/.aviso_server/config.yaml",
        "notification_backend:\n  jetstream:\n    retry_attempts: 2\n",
    )
    merged = config.load(environ={"HOME": f"{tmp_path}/home"})
    backend = merged.notification_backend.jetstream
    assert (merged.notification_backend.kind, backend.timeout_seconds, backend.retry_attempts) == ("jetstream", 1, 2)
    assert merged.sources == ("configuration/config.yaml", home)
    assert merged.origins["notification_backend.jetstream.timeout_seconds"] == "configuration/config.yaml:1"
    assert merged.origins["notification_backend.jetstream.retry_attempts"] == f"{home}:3"


@pytest.mark.parametrize("there", [("aviso.yaml", "config/aviso.yaml"), ("config/aviso.yaml",)])
def test_the_file_of_a_project_is_found_and_no_other_is_read(there: tuple[str, ...]) -> None:
    written("configuration/config.yaml", "notification_backend: {kind: nonsense}")
    for file in there:
        written(file, "notification_backend: {kind: in_memory}")
    assert config.load(environ={}).sources == there[:1]


def test_no_file_at_all_says_where_was_looked() -> None:
    with pytest.raises(ConfigError) as raised:
        config.load(environ={"HOME": "/home/me"})
    assert raised.value.mistakes == (
        "no configuration file: looked for aviso.yaml, config/aviso.yaml, configuration/config.yaml, "
        "/etc/aviso_server/config.yaml, /home/me/.aviso_server/config.yaml; give one, name it in "
        "AVISO_WORKERS_CONFIG_FILE, name the server in AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__NATS_URL, "
        "or declare event types in an app and name it to the command as MODULE:APP",
    )


@pytest.mark.parametrize("variable", ["AVISO_WORKERS_CONFIG_FILE", "AVISOSERVER_CONFIG_FILE"])
@pytest.mark.parametrize(
    ("value", "expected"),
    [("", "must name a file, but is empty"), ("nowhere.yaml", "'nowhere.yaml' is not a file"), (".", "is not a file")],
)
def test_a_variable_must_name_a_file(variable: str, value: str, expected: str) -> None:
    written("configuration/config.yaml")
    with pytest.raises(ConfigError, match=f"^{variable}: .*{re.escape(expected)}"):
        config.load(environ={variable: value})


def test_a_path_must_be_a_file() -> None:
    with pytest.raises(ConfigError, match=r"^configuration: 'nowhere\.yaml' is not a file in /"):
        config.load("nowhere.yaml", environ={})


# ---- environment ----------------------------------------------------------------------------------------------


def test_the_environment_goes_over_the_files_and_ours_over_aviso_servers() -> None:
    text = "notification_backend: {kind: jetstream, jetstream: {timeout_seconds: 1}}"
    servers = {"AVISOSERVER_NOTIFICATION_BACKEND__JETSTREAM__TIMEOUT_SECONDS": "2"}
    assert loaded(text, **servers).notification_backend.jetstream.timeout_seconds == 2
    both = loaded(text, **servers, **{f"{JETSTREAM}TIMEOUT_SECONDS": "3"})
    assert both.notification_backend.jetstream.timeout_seconds == 3
    assert both.sources == ("dev.yaml", f"{JETSTREAM}TIMEOUT_SECONDS")
    assert both.origins["notification_backend.jetstream.timeout_seconds"] == f"{JETSTREAM}TIMEOUT_SECONDS"


def test_text_of_the_environment_becomes_what_the_field_is() -> None:
    found = loaded(
        "notification_schema:\n"
        "  Mars:\n"
        "    topic: {base: mars, key_order: [class]}\n"
        "    identifier: {class: {type: EnumHandler, values: [od], required: true}}\n"
        "workers: {agents: {spark-events: {directory: /logs}}}\n",
        AVISOSERVER_NOTIFICATION_BACKEND="{kind: jetstream}",
        AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__NATS_URL="nats://a, nats://[::1]:4222",
        AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__ENABLE_AUTO_RECONNECT="false",
        AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__RETENTION_TIME="7d",
        AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__DOMAIN="0001",
        AVISO_WORKERS_NOTIFICATION_SCHEMA__MARS__IDENTIFIER__CLASS__VALUES="od, rd",
        AVISO_WORKERS_NOTIFICATION_SCHEMA__MARS__STORAGE_POLICY__MAX_SIZE="1Gi",
        AVISO_WORKERS_WORKERS__DRAIN_TIMEOUT_SECONDS="2.5",
        AVISO_WORKERS_WORKERS__AGENTS__SPARK_EVENTS__POLL_SECONDS="2",
        AVISO_WORKERS_WORKERS__AGENTS__SPARK_EVENTS__ONLY="[job, stage]",
    )
    backend = found.notification_backend.jetstream
    assert backend.servers == ("nats://a", "nats://[::1]:4222")
    assert (backend.enable_auto_reconnect, backend.retention_time, backend.domain) == (False, 604_800, "0001")
    mars = msgspec.to_builtins(found.notification_schema["Mars"], enc_hook=int)
    assert mars["identifier"]["class"]["values"] == ("od", "rd")
    assert mars["storage_policy"]["max_size"] == 2**30
    assert found.workers.drain_timeout_seconds == 2.5
    assert found.workers.agents == {"spark-events": {"directory": "/logs", "poll_seconds": 2, "only": ["job", "stage"]}}


def test_a_list_may_be_yaml_or_have_commas() -> None:
    text = (
        MINIMAL + "notification_schema: {mars: {topic: {base: mars, key_order: []}, identifier: "
        "{a: {type: IntHandler, required: true}, b: {type: IntHandler, required: true}}}}"
    )
    for value in ("[b, a]", "b,a", ' ["b", a] '):
        mars = loaded(text, AVISO_WORKERS_NOTIFICATION_SCHEMA__MARS__TOPIC__KEY_ORDER=value).notification_schema["mars"]
        assert mars.topic is not None
        assert mars.topic.key_order == ("b", "a")


def test_a_mistake_in_the_environment_names_the_variable_and_the_key() -> None:
    assert mistakes_in(
        AVISOSERVER_NOTIFICATION_BACKEND__IN_MEMORY__MAX_TOPICS="many",
        AVISO_WORKERS_WORKERS__STATUS__PORT="",
        AVISO_WORKERS_WORKERS__LOGGING__FORMAT="text",
        AVISO_WORKERS_WORKERS__AGENTS="{a: [}",
        AVISO_WORKERS_APPLICATION__BASE_URL="\udcff",
    ) == (
        "AVISOSERVER_NOTIFICATION_BACKEND__IN_MEMORY__MAX_TOPICS: notification_backend.in_memory.max_topics: "
        "expected an integer, found text",
        "AVISO_WORKERS_APPLICATION__BASE_URL: is not UTF-8 text",
        "AVISO_WORKERS_WORKERS__AGENTS: not valid YAML: while parsing a flow node expected the node content, "
        "but found '}'",
        "AVISO_WORKERS_WORKERS__LOGGING__FORMAT: workers.logging.format: expected 'console' or 'json', found text",
        "AVISO_WORKERS_WORKERS__STATUS__PORT: workers.status.port: expected an integer, found nothing",
    )


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("AVISO_WORKERS_WORKER__STATUS__PORT", "there is no 'worker' in a configuration; did you mean 'workers'?"),
        ("AVISO_WORKERS_WORKERS__STATUS__PROT", "there is no 'prot' in workers.status; did you mean 'port'?"),
        ("AVISO_WORKERS_WORKERS__STATUS__X", "there is no 'x' in workers.status; known are: host, port"),
        ("AVISO_WORKERS_WORKERS__STATUS__PORT__X", "there is no 'x' in workers.status.port; it holds no keys"),
        ("AVISO_WORKERS_WORKERS__", "there is no '' in workers; known are: status, "),
    ],
)
def test_a_variable_of_ours_that_names_no_key_is_a_mistake(variable: str, expected: str) -> None:
    (mistake,) = mistakes_in(**{variable: "1"})
    assert mistake.startswith(f"{variable}: names no known key: {expected}")


@pytest.mark.parametrize("prefix", ["avisoserver_", "AvisoServer_", "aviso_workers_", "AVISO_WORKERS_"])
def test_names_of_variables_have_no_case(prefix: str) -> None:
    """As those of an aviso-server have none."""
    found = loaded(**{f"{prefix}notification_backend__jetstream__NATS_URL": "nats://elsewhere:4222"})
    assert found.notification_backend.jetstream.servers == ("nats://elsewhere:4222",)


@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_token_is_none(empty: str) -> None:
    token = "AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__TOKEN"
    of_server = "AVISOSERVER_NOTIFICATION_BACKEND__JETSTREAM__TOKEN"
    text = "notification_backend: {kind: jetstream, jetstream: {user: a, password: b}}\n"
    assert (
        loaded(text, **{token: empty, of_server: empty, "NATS_TOKEN": empty}).notification_backend.jetstream.token
        is None
    )
    text = "notification_backend: {kind: jetstream}\n"
    assert loaded(text, **{token: empty, "NATS_TOKEN": "x"}).notification_backend.jetstream.token == config.Secret("x")


@pytest.mark.parametrize("variable", ["AVISO_WORKERS_CONFIG_FILE", "AVISOSERVER_CONFIG_FILE"])
def test_blanks_around_the_name_of_the_file_do_not_count(tmp_path: Path, variable: str) -> None:
    file = tmp_path / "named.yaml"
    file.write_text("notification_backend: {kind: in_memory}\n")
    assert config.load(environ={variable: f" {file}\n"}).sources == (str(file),)


def test_variables_that_are_not_ours_to_judge_are_ignored() -> None:
    assert loaded(
        AVISOSERVER_AUTH__JWT_SECRET="x",
        AVISOSERVER_NOTIFICATION_BACKEND__NEWER="x",
        AVISOSERVER_CONFIG_FILE="elsewhere.yaml",
        AVISO_WORKERS_CONFIG_FILE="elsewhere.yaml",
        AVISO_WORKERS_NATS_SERVER="/usr/bin/nats-server",
        AVISO_WORKERS_PURE="1",
        OTHER="x",
    ).sources == ("dev.yaml",)


# ---- secrets, and showing -------------------------------------------------------------------------------------

SECRET = "hunter2"


def test_secrets_are_seen_by_whoever_asks_and_by_nobody_else() -> None:
    found = loaded(
        "notification_backend:\n"
        "  kind: jetstream\n"
        f"  jetstream: {{nats_url: 'nats://{SECRET}:{SECRET}@a:4222,{SECRET}@b,nats://c'}}\n"
        f"workers: {{agents: {{mail: {{api_key: {SECRET}, login: [{{password: {SECRET}}}]}}}}}}\n",
    )
    urls = found.notification_backend.jetstream.nats_url
    assert urls.reveal() == (f"nats://{SECRET}:{SECRET}@a:4222", f"{SECRET}@b", "nats://c")
    assert found.notification_backend.jetstream.masked_servers == ("nats://***@a:4222", "***@b", "nats://c")
    assert SECRET not in repr(found.notification_backend)
    assert SECRET not in str(display.effective(found))
    by_token = loaded("notification_backend: {kind: jetstream}", NATS_TOKEN=SECRET)
    token = by_token.notification_backend.jetstream.token
    assert token is not None
    assert token.reveal() == SECRET
    assert (str(token), f"{token}", repr(token)) == ("***", "***", "***")
    assert SECRET not in repr(by_token)
    assert SECRET not in str(display.effective(by_token))
    assert pickle.loads(pickle.dumps(token)) == token


def test_the_token_of_the_environment_is_not_sent_to_servers_of_a_file_that_nobody_has_named() -> None:
    found = written(
        "configuration/config.yaml", "notification_backend: {kind: jetstream, jetstream: {nats_url: nats://a}}"
    )
    with pytest.raises(ConfigError, match=r"NATS_TOKEN: .* was only found in the current folder") as raised:
        config.load(environ={"NATS_TOKEN": SECRET})
    assert SECRET not in str(raised.value)

    urls = {"AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__NATS_URL": "nats://b"}
    for loaded in (
        config.load(found, environ={"NATS_TOKEN": SECRET}),
        config.load(environ={"NATS_TOKEN": SECRET, "AVISO_WORKERS_CONFIG_FILE": found}),
        config.load(environ={"NATS_TOKEN": SECRET, **urls}),
    ):
        assert loaded.notification_backend.jetstream.token == config.Secret(SECRET)


@pytest.mark.parametrize("start", ["nats://", "tls://me:it@", "wss://", ""])
@pytest.mark.parametrize(
    "end",
    [f"?password={SECRET}", f"/?token={SECRET}", f"#{SECRET}", f"/{SECRET}", f"?password=x@{SECRET}", f"/{SECRET}@x"],
)
def test_of_the_url_of_a_server_only_scheme_host_and_port_are_shown(start: str, end: str) -> None:
    url = f"{start}a:4222{end}"
    found = loaded(
        f"notification_backend: {{kind: jetstream, jetstream: {{nats_url: ['{url}', 'nats://b:4222/']}}}}\n"
        f"server: {{cluster: {{routes: ['{url}']}}}}\n"
    )
    shown = str(display.effective(found))
    assert SECRET not in shown
    assert "nats://b:4222" in shown
    if "@" not in end:
        assert "a:4222/***" in shown


@pytest.mark.parametrize(
    "setting",
    [
        f"jetstream: {{retry_attempts: {SECRET}}}",
        f"jetstream: {{enable_auto_reconnect: {SECRET}}}",
        f"jetstream: {{storage_type: {SECRET}}}",
        f"jetstream: {{retention_time: {SECRET}}}",
        f"jetstream: {{pasword: {SECRET}}}",
        f"jetstream: {{user: a, password: {{x: [{SECRET}]}}}}",
        f"jetstream: {{tls: [{SECRET}]}}",
        f"in_memory: {{max_topics: {SECRET}}}",
        f"pasword: {{x: [{SECRET}]}}",
    ],
)
def test_a_text_that_stands_in_the_wrong_place_is_not_repeated(setting: str) -> None:
    try:
        found = loaded(f"notification_backend: {{kind: jetstream, {setting}}}\n")
    except ConfigError as error:
        said = str(error)
    else:
        said = f"{found.warnings} {display.effective(found)}"
    assert SECRET not in said
    assert "notification_backend" in said


def test_a_number_under_a_misspelt_password_is_not_shown() -> None:
    names = ("pasword", "passwort", "passphrase")
    secrets = ", ".join(f"{name}: 8472910" for name in names)
    found = loaded(f"notification_backend: {{kind: jetstream}}\nworkers: {{agents: {{mail: {{{secrets}}}}}}}\n")
    assert "8472910" not in str(display.effective(found))


@pytest.mark.parametrize(
    "setting",
    [
        f"dsn: {SECRET}",
        f"private_key: {SECRET}",
        f"url: 'https://me:{SECRET}@host/x'",
        f"credentials: {{user: {SECRET}, port: 22}}",
        f"servers: [{{name: {SECRET}}}]",
        f"anything: {SECRET}",
    ],
)
def test_texts_in_the_section_of_an_agent_are_not_shown_unless_it_declares_them(setting: str) -> None:
    found = loaded(f"notification_backend: {{kind: jetstream}}\nworkers: {{agents: {{mail: {{{setting}}}}}}}\n")
    assert SECRET not in str(display.effective(found))


def test_of_the_section_of_an_agent_numbers_and_declared_texts_are_shown_but_no_declared_secret() -> None:
    names = ("password", "pwd", "passphrase", "auth", "dsn", "connection", "access_key", "private_key", "api_key")
    mail = msgspec.defstruct("Mail", [("to", str), *((name, str) for name in names)])
    secrets = ", ".join(f"{name}: {SECRET}" for name in names)
    found = loaded(
        "notification_backend: {kind: jetstream}\n"
        f"workers: {{agents: {{mail: {{to: me, every: 2, debug: true, {secrets}}}}}}}\n"
    )
    shown = {path: value for path, value, _ in display.effective(found, agents={"mail": mail})}
    section = {path.removeprefix("workers.agents.mail."): shown[path] for path in shown if "agents.mail" in path}
    assert section == {"to": "me", "every": 2, "debug": True, **dict.fromkeys(names, "***")}


@pytest.mark.parametrize(
    "section",
    [
        f"application: {{base_url: 'https://me:{SECRET}@host/path'}}",
        f"server: {{cluster: {{routes: ['me:{SECRET}@host:6222']}}}}",
        f"server: {{leafnodes: {{remotes: {{hub: {{urls: ['me:{SECRET}@host:7422']}}}}}}}}",
        f"server: {{gateways: {{remotes: {{east: ['nats://me:{SECRET}@host:7222']}}}}}}",
    ],
)
def test_who_a_url_names_is_not_shown(section: str) -> None:
    shown = str(display.effective(loaded(f"notification_backend: {{kind: jetstream}}\n{section}\n")))
    assert SECRET not in shown
    assert "***@host" in shown


@pytest.mark.parametrize(
    "setting",
    [
        f"password: [{SECRET}]",
        f"password: !{SECRET}",
        f"password: !{SECRET}!x y",
        f"password: *{SECRET}",
        f"password: {SECRET}: x",
        f"password: '{SECRET}",
        f"password: @{SECRET}",
        f"password: '{SECRET}'",
        "password: 0007007",
        f"|\n      password: {SECRET}",
        f"nats_url: nats://me:{SECRET}/@host:4222",
        f"nats_url: nats://me:{SECRET}",
        f"nats_url: nats://[me:{SECRET}@host",
        f"nats_url: {{{SECRET}@host: 1}}",
        f"nkey_seed_file: {SECRET}",
    ],
)
def test_no_mistake_tells_a_secret(setting: str) -> None:
    told = "\n".join(mistakes_in(f"notification_backend:\n  kind: jetstream\n  jetstream:\n    {setting}\n"))
    assert "dev.yaml:" in told
    assert SECRET not in told
    assert "7007" not in told


def test_effective_values_come_with_their_origin() -> None:
    found = loaded(
        MINIMAL + "notification_schema:\n"
        "  mars:\n"
        "    topic: {base: mars, key_order: [step]}\n"
        "    identifier: {step: {type: IntHandler, range: [0, 9], required: true}}\n"
        "workers: {agents: {mail: {to: {name: me}}}}\n",
        AVISO_WORKERS_WORKERS__DEAD_LETTERS__MAX_BYTES="1Gi",
    )
    shown = {path: (value, origin) for path, value, origin in display.effective(found)}
    assert shown["notification_backend.kind"] == ("in_memory", "dev.yaml:1")
    assert shown["notification_backend.jetstream.nats_url"] == ("nats://localhost:4222", "default")
    assert shown["notification_schema.mars.identifier.step.type"] == ("IntHandler", "dev.yaml:5")
    assert shown["notification_schema.mars.identifier.step.range"] == ([0, 9], "dev.yaml:5")
    assert shown["notification_schema.mars.payload"] == (None, "default")
    assert shown["workers.status.port"] == (9464, "default")
    assert shown["workers.dead_letters.max_bytes"] == ("1Gi", "AVISO_WORKERS_WORKERS__DEAD_LETTERS__MAX_BYTES")
    assert shown["workers.agents.mail.to.name"] == ("***", "dev.yaml:6")


def test_effective_values_are_plain_data_in_lists_too() -> None:
    found = loaded(
        "notification_backend: {kind: jetstream}\n"
        "doctor: {accepted: [{code: JS001, where: '', reason: known, until: 2027-01-31T00:00:00Z}]}\n"
        "streams: {COPY: {sources: [{name: MARS, filter_subject: mars.>}]}}\n"
    )
    shown = {path: value for path, value, _ in display.effective(found)}
    assert json.loads(json.dumps(shown["streams.COPY.sources"])) == [{"name": "MARS", "filter_subject": "mars.>"}]
    assert [each["until"] for each in shown["doctor.accepted"]] == ["2027-01-31T00:00:00+00:00"]


@pytest.mark.slow
def test_the_json_schema_describes_every_field_of_the_settings() -> None:
    schema = display.json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    definitions = schema["$defs"]
    assert schema["$ref"] == "#/$defs/Document"
    ours = ("Document", "NotificationBackend", "JetStream", "Tls", "InMemory", "Workers", "Status", "DeadLetters")
    undescribed = [
        f"{name}.{field}"
        for name in ours
        for field, described in definitions[name]["properties"].items()
        if not described.get("description")
    ]
    assert undescribed == []
    jetstream = definitions["JetStream"]["properties"]
    assert jetstream["timeout_seconds"] == {
        "description": "Seconds for one attempt to connect.",
        "type": "integer",
        "exclusiveMinimum": 0,
        "default": 30,
    }
    (duration,) = (choice for choice in jetstream["retention_time"]["anyOf"] if choice["type"] == "string")
    assert re.search(duration["pattern"], "30d")
    assert not re.search(duration["pattern"], "30")
    refusing = {name for name, each in definitions.items() if each.get("additionalProperties") is False}
    assert {"Workers", "Status", "Logging", "DeadLetters", "Tls", "PayloadRule", "IntHandler"} <= refusing
    assert not refusing & {"Document", "JetStream", "InMemory", "EventType", "Topic", "StoragePolicy", "Application"}
    assert msgspec.json.decode(msgspec.json.encode(schema)) == schema


# ---- YAML -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1\n", "dev.yaml:2: not valid YAML: while parsing a flow sequence expected ',' or ']'"),
        ("a:\n\tb: 1\n", "dev.yaml:2: not valid YAML: while scanning for the next token found character '\\t'"),
        ("- a\n", "dev.yaml:1: expected keys and values at the top, such as 'notification_backend:'"),
        ("just text", "dev.yaml:1: expected keys and values at the top"),
        (b"a: 1\nb: \xff\n", "dev.yaml:2: is not UTF-8 text"),
        ("a: 1\nb: \x07\n", "dev.yaml:2: not valid YAML: a character that must not be in it, U+0007"),
        ('a: "\\ud800"\n', "dev.yaml:1: an escape in it is half of a surrogate pair"),
        ('a: "\\UFFFFFFFF"\n', "dev.yaml:1: not valid YAML: an escape or a number in it is out of range"),
        ("---\na: 1\n---\nb: 1\n", "dev.yaml:3: a second document starts here: one file holds one"),
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "dev.yaml:4: b.c: duplicate key, which is already at dev.yaml:3"),
        ("a: !!binary aGk=\n", "dev.yaml:1: YAML tags are not read; put quotes around text that starts with '!'"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", "dev.yaml:3: merge keys (<<) are not read: repeat the keys here"),
        ("? [a]\n: b\n", "dev.yaml:1: a key must be text"),
        ("a: *b\n", "dev.yaml:1: an alias of nothing"),
        ("a: &a [*a]\n", "dev.yaml:1: an alias of nothing"),
        ("a: " + "x" * (4 << 20), "dev.yaml: is larger than 4 MiB"),
        ("a: " + "[" * 100_000, "dev.yaml:1: nested more than 50 levels deep"),
        (
            "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 100)),
            "dev.yaml:16: holds more than 100000 values, aliases unfolded",
        ),
    ],
)
def test_yaml_that_cannot_be_read_says_where_and_why(text: str | bytes, expected: str) -> None:
    found = mistakes_in(text)
    assert [mistake for mistake in found if mistake.startswith(expected)], found


def test_aliases_and_a_byte_order_mark_are_read() -> None:
    Path("dev.yaml").write_bytes(
        b"\xef\xbb\xbfnotification_backend: {kind: in_memory}\n"
        b"x: &rule {type: IntHandler, required: true}\n"
        b"notification_schema: {mars: {topic: {base: mars, key_order: [a]}, identifier: {a: *rule, b: *rule}}}\n"
    )
    assert list(config.load("dev.yaml", environ={}).notification_schema["mars"].identifier) == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("on", "on"),
        ("2026-01-01", "2026-01-01"),
        ("12:30", "12:30"),
        ("1_000", "1_000"),
        ("42", "42"),
        ("'0001'", "0001"),
    ],
)
def test_text_stays_as_it_is_written(text: str, value: str) -> None:
    assert loaded(MINIMAL + f"application: {{base_url: {text}}}").application.base_url == value


@pytest.mark.parametrize("text", ["0001", "1.0", "+1", "0x10", "1e3", "true", "True"])
def test_what_yaml_does_not_take_for_text_must_be_quoted(text: str) -> None:
    (mistake,) = mistakes_in(MINIMAL + f"application: {{base_url: {text}}}")
    assert mistake.startswith("dev.yaml:2: application.base_url: expected text, found what YAML takes for ")
    assert mistake.endswith(": put it in quotes")


PRINTABLE = st.text(alphabet=st.characters(categories=("L", "N", "P", "S")), max_size=8)
KEYS = st.sampled_from(
    re.findall(
        r"\S+",
        """
        notification_backend kind jetstream in_memory nats_url tls replicas retention_time notification_schema mars
        topic base key_order identifier type range values storage_policy max_size workers status port agents
        << ~ 0001
        """,
    )
)
SCALARS = (
    st.sampled_from(["jetstream", "in_memory", "IntHandler", "30d", "2Gi", "0001", "nats://a@[", ".inf", "1e999", "*"])
    | st.text(max_size=8)
    | st.integers()
    | st.floats()
    | st.booleans()
    | st.none()
    | st.dates()
    | st.binary(max_size=4)
)
DOCUMENTS = st.recursive(
    SCALARS,
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(KEYS | st.text(max_size=4), inside, max_size=6),
    max_leaves=30,
)
NEVER_ANYTHING_ELSE = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def load_or_refuse(text: str | bytes, **environ: str) -> None:
    Path("dev.yaml").write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
    with contextlib.suppress(ConfigError):
        display.effective(config.load("dev.yaml", environ=environ))


@NEVER_ANYTHING_ELSE
@given(st.text() | st.text(alphabet="[]{}:,-#&*!|>'\"%@` \nab0"))
@example("%YAML 1." + "9" * 5000 + "\n---\na")
@example("a: " + "9" * 5000)
@example("\x00")
def test_no_text_raises_anything_but_our_error(text: str) -> None:
    load_or_refuse(text)


@NEVER_ANYTHING_ELSE
@given(st.binary())
def test_no_bytes_raise_anything_but_our_error(content: bytes) -> None:
    load_or_refuse(content)


@pytest.mark.slow
@NEVER_ANYTHING_ELSE
@given(st.dictionaries(KEYS, DOCUMENTS, max_size=5))
def test_no_yaml_raises_anything_but_our_error(document: Any) -> None:
    load_or_refuse(yaml.safe_dump(document, allow_unicode=True))


@NEVER_ANYTHING_ELSE
@given(st.lists(KEYS, max_size=4), st.text(alphabet=st.characters(exclude_characters="\0")))
def test_no_variable_raises_anything_but_our_error(keys: list[str], value: str) -> None:
    load_or_refuse(MINIMAL, **{f"AVISO_WORKERS_{'__'.join(keys).upper()}": value})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | PRINTABLE,
    lambda inside: st.lists(inside) | st.dictionaries(PRINTABLE.filter(lambda key: key != "<<"), inside),
    max_leaves=10,
)


@pytest.mark.slow
@given(JSON)
def test_json_is_yaml(document: Any) -> None:
    node, mistakes = parse(json.dumps({"x": document}, ensure_ascii=False), KeyPlace(rank=0, line=1, source="x"))
    assert mistakes == []
    assert node is not None
    assert node.resolved == {"x": document}
