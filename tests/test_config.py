"""The configuration's rules, each with the text of its mistake, and the files that come with the package."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from datetime import UTC
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from msgspec import inspect

from aviso_workers import config
from aviso_workers.aviso.literals import Duration, Size
from aviso_workers.aviso.schema import IntHandler, Topic
from aviso_workers.config import documents
from aviso_workers.config.documents import KeyPlace, parse
from aviso_workers.config.settings import Document
from aviso_workers.errors import ConfigError

CONFIG_FILES = Path(__file__).parent.parent / "config"

Load = Callable[..., config.Config]
Mistakes = Callable[..., tuple[str, ...]]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load a text as `dev.yaml`, with nothing in the environment but what is given."""
    monkeypatch.chdir(tmp_path)

    def load_text(text: str, **environ: str) -> config.Config:
        Path("dev.yaml").write_text(textwrap.dedent(text), encoding="utf-8")
        return config.load("dev.yaml", environ=environ)

    return load_text


@pytest.fixture
def mistakes(load: Load) -> Mistakes:
    def mistakes_in(text: str, **environ: str) -> tuple[str, ...]:
        with pytest.raises(ConfigError) as raised:
            load(text, **environ)
        return raised.value.mistakes

    return mistakes_in


def jetstream(setting: str) -> str:
    return f"notification_backend:\n  kind: jetstream\n  jetstream:\n    {setting}\n"


def in_memory(setting: str) -> str:
    return f"notification_backend:\n  kind: in_memory\n  in_memory:\n    {setting}\n"


def workers(setting: str) -> str:
    return f"notification_backend: {{kind: in_memory}}\nworkers:\n  {setting}\n"


def schema(event_type: str, *, kind: str = "jetstream") -> str:
    """One event type `mars`, from line 4 on."""
    body = textwrap.indent(textwrap.dedent(event_type).strip(), "    ")
    return f"notification_backend: {{kind: {kind}}}\nnotification_schema:\n  mars:\n{body}\n"


MARS = """\
topic: {base: mars, key_order: [class, step]}
identifier:
  class: {type: StringHandler, required: true}
  step: {type: IntHandler, range: [0, 240], required: false}
"""


# ---- defaults -------------------------------------------------------------------------------------------------


def test_only_the_kind_is_needed_and_all_else_has_the_documented_default(load: Load) -> None:
    loaded = load("notification_backend: {kind: jetstream}")
    backend = loaded.notification_backend.jetstream
    assert backend == config.JetStream()
    assert {
        name: getattr(backend, name)
        for name in backend.__struct_fields__
        if name not in ("nats_url", "inbox_prefix", "stream_management", "publish_deadline_seconds")
        and getattr(backend, name) is not None
    } == {
        "timeout_seconds": 30,
        "retry_attempts": 3,
        "enable_auto_reconnect": True,
        "max_reconnect_attempts": 0,
        "reconnect_delay_ms": 2000,
        "publish_retry_attempts": 5,
        "publish_retry_base_delay_ms": 150,
        "storage_type": "file",
        "retention_policy": "limits",
        "discard_policy": "old",
    }
    assert backend.servers == ("nats://localhost:4222",)
    assert (backend.stream_management, backend.publish_deadline_seconds) == ("reconcile", 30)
    assert loaded.notification_backend.in_memory == config.InMemory(
        max_history_per_topic=1, max_topics=10_000, enable_metrics=False
    )
    assert loaded.workers == config.Workers()
    assert loaded.workers.status == config.Status(host="127.0.0.1", port=9464)
    assert loaded.application.base_url == "http://localhost"
    assert loaded.warnings == ()


def test_the_types_of_a_document_are_inspected_once_in_a_process(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes twenty times as long as all else, and a worker reads its configuration twice."""
    before = load("notification_backend: {kind: jetstream}")
    monkeypatch.setattr(inspect, "type_info", lambda _: pytest.fail("the types are inspected again"))

    assert load("notification_backend: {kind: jetstream}") == before


def test_values_are_read_as_their_types(load: Load) -> None:
    loaded = load(
        """
        notification_backend:
          kind: jetstream
          jetstream:
            nats_url: [nats://a:4222, "tls://b"]
            retention_time: 30d
            max_bytes: 2147483648
            timeout_seconds: "10"
            enable_auto_reconnect: off
            max_reconnect_attempts: 0
            publish_deadline_seconds: 5
            replicas:
        notification_schema:
          mars:
            topic: {base: mars, key_order: [step]}
            identifier: {step: {type: IntHandler, range: [0, 240], required: true, description: hours}}
            payload: {required: true}
            storage_policy: {retention_time: 1W, max_size: 2Gi, allow_duplicates: true, compression: false}
        workers:
          dead_letters: {max_bytes: 1Gi}
          agents: {spark-events: {directory: /logs, poll: 0.5, follow: true, since: 2026-01-01, only: [a, 1]}}
        """
    )
    backend = loaded.notification_backend.jetstream
    assert backend.servers == ("nats://a:4222", "tls://b")
    assert (backend.retention_time, backend.max_bytes, backend.timeout_seconds) == (Duration(2_592_000), 2**31, 10)
    assert (backend.enable_auto_reconnect, backend.max_reconnect_attempts, backend.replicas) == (False, 0, None)
    mars = loaded.notification_schema["mars"]
    assert mars.topic == Topic(base="mars", key_order=("step",))
    assert mars.identifier == {"step": IntHandler(range=(0, 240), required=True, description="hours")}
    assert mars.payload is not None
    assert mars.payload.required
    assert mars.storage_policy is not None
    assert msgspec.structs.asdict(mars.storage_policy) == {
        "retention_time": Duration(604_800),
        "max_messages": None,
        "max_size": Size(2 * 2**30),
        "allow_duplicates": True,
        "compression": False,
    }
    assert loaded.workers.dead_letters.max_bytes == Size(2**30)
    assert loaded.workers.agents == {
        "spark-events": {"directory": "/logs", "poll": 0.5, "follow": True, "since": "2026-01-01", "only": ["a", 1]}
    }


def test_sections_of_an_aviso_server_are_left_alone(load: Load) -> None:
    loaded = load(
        """
        application:
          host: 127.0.0.1
          port: 8000
          base_url: https://aviso.example.org
          static_files_path: /app/static
        logging: {level: info, format: json}
        auth:
          enabled: true
          mode: direct
          jwt_secret: 0001
          admin_roles: {localrealm: [admin]}
        metrics: {enabled: true, port: 9090}
        ecpds: {username: x, servers: [a, b], valid_from: 2026-01-01}
        watch_endpoint: {sse_heartbeat_interval_sec: 30, replay_batch_size: 100}
        notification_backend:
          kind: in_memory
          in_memory: {max_history_per_topic: 10, max_topics: 10000, newer_option: 1}
          jetstream: {nats_url: "nats://localhost:4222", timeout_seconds: 0, newer_option: 1}
        notification_schema_strict: false
        notification_schema:
          dissemination:
            topic: {base: diss, key_order: [destination, date], separator: "."}
            endpoint: {base: diss, key_order: [destination]}
            payload: {required: false}
            auth: {required: true, read_roles: {localrealm: ["*"]}, plugins: [ecpds]}
            max_historical_notifications: 100
            identifier:
              destination: {type: StringHandler, required: true, max_length: 10, description: who}
              date: {type: DateHandler, canonical_format: "%Y-%m-%d", required: false}
        """
    )
    assert loaded.application.base_url == "https://aviso.example.org"
    assert loaded.notification_backend.in_memory.max_history_per_topic == 10
    assert loaded.notification_schema_strict is False
    assert list(loaded.notification_schema) == ["dissemination"]
    assert [warning.partition(": ")[2] for warning in loaded.warnings] == [
        "notification_backend.in_memory.newer_option: this key is not known and is ignored",
        "notification_backend.jetstream.newer_option: this key is not known and is ignored",
    ]


# ---- notification_backend -------------------------------------------------------------------------------------

AT = "dev.yaml:4: notification_backend.jetstream"


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("timeout_seconds: 0", f"{AT}.timeout_seconds must be > 0"),
        ("retry_attempts: 0", f"{AT}.retry_attempts must be > 0"),
        ("reconnect_delay_ms: 0", f"{AT}.reconnect_delay_ms must be > 0"),
        ("publish_retry_attempts: 0", f"{AT}.publish_retry_attempts must be > 0"),
        ("publish_retry_base_delay_ms: 0", f"{AT}.publish_retry_base_delay_ms must be > 0"),
        ("publish_deadline_seconds: 0", f"{AT}.publish_deadline_seconds must be > 0"),
        ("max_reconnect_attempts: -1", f"{AT}.max_reconnect_attempts must be >= 0"),
        ("replicas: -1", f"{AT}.replicas must be >= 0"),
        ("nats_url: '  '", f"{AT}.nats_url must not be empty"),
        ("nats_url: []", f"{AT}.nats_url must not be empty"),
        (
            "nats_url: http://localhost:4222",
            f"{AT}.nats_url must be a URL such as nats://host:4222 (or tls, ws, wss)",
        ),
        (
            "nats_url: nats://a:4222, nats://b:port",
            f"{AT}.nats_url must be a URL such as nats://host:4222 (or tls, ws, wss): number 2 of 2 is not",
        ),
        ("token: ' '", f"{AT}.token must not be empty"),
        ("domain: ''", f"{AT}.domain must not be empty"),
        ("replicas: three", f"{AT}.replicas: expected an integer, found text"),
        ("replicas: 1.5", f"{AT}.replicas: expected an integer, found a fraction"),
        ("replicas: true", f"{AT}.replicas: expected an integer, found true or false"),
        ("replicas: [3]", f"{AT}.replicas: expected an integer, found a list"),
        ("max_messages: 9223372036854775808", f"{AT}.max_messages: expected an integer of at most 64 bits"),
        ("max_bytes: 2Gi", f"{AT}.max_bytes: expected an integer, found text"),
        ("publish_deadline_seconds: 1e999", f"{AT}.publish_deadline_seconds: expected a finite number"),
        (f"publish_deadline_seconds: 0x{'f' * 290}", f"{AT}.publish_deadline_seconds: expected a finite number"),
        ("enable_auto_reconnect: maybe", f"{AT}.enable_auto_reconnect: expected true or false, found text"),
        ("storage_type: File", f"{AT}.storage_type: expected 'file' or 'memory', found text"),
        ("discard_policy: newest", f"{AT}.discard_policy: expected 'new' or 'old', found text"),
        ("retention_policy: limit", f"{AT}.retention_policy: expected 'interest' or 'limits', found text"),
        (
            "retention_policy: workqueue",
            f"{AT}.retention_policy is invalid: 'workqueue' cannot be used: replay and watch need consumers without "
            "acknowledgement, which JetStream refuses on such a stream; use 'limits'",
        ),
        (
            "stream_management: none",
            f"{AT}.stream_management: expected 'create' or 'observe' or 'reconcile', found text",
        ),
        ("retention_time: 0s", f"{AT}.retention_time must be > 0"),
        ("retention_time: 10", f"{AT}.retention_time is invalid: duration must include a unit suffix"),
        ("retention_time: 1h30m", f"{AT}.retention_time is invalid: duration unit must be one of: s, m, h, d, w"),
        ("retention_time: -5s", f"{AT}.retention_time is invalid: duration value must be an integer"),
        ("retention_time: 9223372037s", f"{AT}.retention_time is invalid: duration overflow"),
        ("tls: {cafile: x}", f"{AT}.tls: unknown field(s): cafile; did you mean 'ca_file'?"),
        ("[]", "dev.yaml:3: notification_backend.jetstream: expected a mapping, found a list"),
    ],
)
def test_a_mistake_in_jetstream_names_its_line_and_key(mistakes: Mistakes, setting: str, expected: str) -> None:
    (mistake,) = mistakes(jetstream(setting))
    assert mistake.startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("workers: {}", "dev.yaml:1: notification_backend is missing"),
        ("notification_backend: {}", "dev.yaml:1: notification_backend.kind is missing"),
        (
            "notification_backend: {kind: kafka}",
            "dev.yaml:1: notification_backend.kind: Unknown notification_backend kind: kafka; "
            "expected 'in_memory' or 'jetstream'",
        ),
        (
            workers("priority: 10"),
            "dev.yaml:3: workers.priority must be <= 9: it says which workers JetStream serves first, those of 0 "
            "before others; notifications have none",
        ),
        (in_memory("max_topics: 0"), "dev.yaml:4: notification_backend.in_memory.max_topics must be > 0"),
        (
            in_memory("max_history_per_topic: -1"),
            "dev.yaml:4: notification_backend.in_memory.max_history_per_topic must be > 0",
        ),
    ],
)
def test_a_mistake_in_the_backend(mistakes: Mistakes, text: str, expected: str) -> None:
    assert mistakes(text) == (expected,)


def test_the_unused_backend_is_checked_for_its_types_only(load: Load, mistakes: Mistakes) -> None:
    unused = "notification_backend: {kind: in_memory, jetstream: {retry_attempts: %s, nkey_seed_file: nowhere}}"
    assert load(unused % 0).notification_backend.kind == "in_memory"
    (mistake,) = mistakes(unused % "none")
    assert mistake.endswith("jetstream.retry_attempts: expected an integer, found text")


# ---- authentication -------------------------------------------------------------------------------------------


def test_one_way_to_authenticate_at_most(mistakes: Mistakes) -> None:
    Path("worker.nk").write_text("seed")
    assert mistakes(jetstream("{token: abc, nkey_seed_file: worker.nk}")) == (
        "dev.yaml:4: notification_backend.jetstream.nkey_seed_file must not be combined with token: "
        "keep one way to authenticate",
    )
    assert mistakes(jetstream("{nats_url: 'nats://me:pw@host', token: abc}")) == (
        "dev.yaml:4: notification_backend.jetstream.token must not be combined with nats_url: "
        "keep one way to authenticate",
    )


def test_a_user_needs_a_password_and_the_other_way_round(mistakes: Mistakes, load: Load) -> None:
    assert mistakes(jetstream("user: me")) == (
        "dev.yaml:4: notification_backend.jetstream.user needs a password, which may stand in the environment",
    )
    assert mistakes(jetstream("password: pw")) == ("dev.yaml:4: notification_backend.jetstream.password needs a user",)
    in_environment = {"AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__PASSWORD": "0001"}
    password = load(jetstream("user: me"), **in_environment).notification_backend.jetstream.password
    assert password is not None
    assert password.reveal() == "0001"


def test_the_token_of_the_environment_is_used_where_nothing_else_is_configured(load: Load) -> None:
    loaded = load("notification_backend: {kind: jetstream}", NATS_TOKEN="abc")
    assert loaded.notification_backend.jetstream.token == config.Secret("abc")
    assert loaded.sources == ("dev.yaml", "NATS_TOKEN")
    configured = load(jetstream("token: def"), NATS_TOKEN="abc").notification_backend.jetstream
    assert configured.token == config.Secret("def")
    by_url = load(jetstream("nats_url: nats://me:pw@host"), NATS_TOKEN="abc").notification_backend.jetstream
    assert by_url.token is None


@pytest.mark.parametrize("key", ["nkey_seed_file", "credentials_file"])
def test_a_file_that_is_named_must_exist(mistakes: Mistakes, key: str) -> None:
    (mistake,) = mistakes(jetstream(f"{key}: SUANOTAFILE"))
    assert mistake.startswith(f"{AT}.{key} must name a file that exists, as seen from /")
    assert "SUANOTAFILE" not in mistake


def test_tls_files_must_exist_and_a_key_needs_its_certificate(mistakes: Mistakes) -> None:
    found = mistakes(jetstream("tls: {ca_file: ca.pem, key_file: key.pem}"))
    assert [mistake.split(", as")[0] for mistake in found] == [
        f"{AT}.tls.key_file needs a cert_file",
        f"{AT}.tls.ca_file must name a file that exists",
        f"{AT}.tls.key_file must name a file that exists",
    ]


# ---- notification_schema --------------------------------------------------------------------------------------

EVENT = "notification_schema.mars"


@pytest.mark.parametrize(
    ("event_type", "line", "expected"),
    [
        ("{}", 3, f"{EVENT}.identifier is missing"),
        ("topic: {base: mars}\nidentifier: {}", 4, f"{EVENT}.topic.key_order is missing"),
        ("payload: {}\nidentifier: {}", 4, f"{EVENT}.payload.required is missing"),
        (
            "payload: {required: true, type: [String]}\nidentifier: {}",
            4,
            f"{EVENT}.payload: unknown field(s): type; known are: required",
        ),
        ("identifier: {step: {required: true}}", 4, f"{EVENT}.identifier.step is missing its type: "),
        ("identifier: {step: {type: IntHandler}}", 4, f"{EVENT}.identifier.step.required is missing"),
        (
            "identifier: {step: {type: IntHandle, required: true}}",
            4,
            f"{EVENT}.identifier.step.type: expected the name of a rule, found text; did you mean 'IntHandler'?",
        ),
        (
            "identifier: {step: {type: IntHandler, required: true, rnage: [0, 1]}}",
            4,
            f"{EVENT}.identifier.step: unknown field(s): rnage; did you mean 'range'?",
        ),
        (
            "identifier: {step: {type: IntHandler, required: true, range: [0]}}",
            4,
            f"{EVENT}.identifier.step.range: expected a list of 2, found 1",
        ),
        (
            "identifier: {domain: {type: EnumHandler, required: true, values: [g, 0001]}}",
            4,
            f"{EVENT}.identifier.domain.values[1]: expected text, found what YAML takes for a number: put it in quotes",
        ),
        (
            "identifier: {expver: {type: ExpverHandler, required: true, default: 0001}}",
            4,
            f"{EVENT}.identifier.expver.default: expected text, found what YAML takes for a number: put it in quotes",
        ),
        (
            "identifier: {day: {type: DateHandler, required: true, canonical_format: '%d'}}",
            4,
            f"{EVENT}.identifier.day.canonical_format must be",
        ),
        (
            "topic: {base: mars, key_order: [step]}\nidentifier: {}",
            4,
            f"{EVENT}.topic.key_order names 'step', which is not in identifier",
        ),
        (
            "topic: {base: a.b, key_order: [step]}\nidentifier: {step: {type: IntHandler, required: true}}",
            4,
            f"{EVENT}.topic.base must match",
        ),
        (
            "storage_policy: {compression: true}\nidentifier: {step: {type: IntHandler, required: true}}",
            4,
            f"{EVENT}.storage_policy: Schema 'mars' defines storage_policy but has no topic configuration",
        ),
    ],
)
def test_a_mistake_in_an_event_type(mistakes: Mistakes, event_type: str, line: int, expected: str) -> None:
    (mistake,) = mistakes(schema(event_type))
    assert mistake.startswith(f"dev.yaml:{line}: {expected}")


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("retention_time: 0d", "retention_time must be > 0"),
        ("retention_time: 10", "retention_time is invalid: duration must include a unit suffix"),
        ("max_messages: 0", "max_messages must be > 0"),
        ("max_size: 10", "max_size is invalid: size must include a unit suffix"),
        ("max_size: 10k", "max_size is invalid: size unit must be one of: K, M, G, T, Ki, Mi, Gi, Ti"),
        ("max_size: 0Mi", "max_size is invalid: size value must be greater than zero"),
        ("max_size: 9223372036854775807T", "max_size is invalid: size overflow"),
    ],
)
def test_a_mistake_in_a_storage_policy_has_the_documented_words(mistakes: Mistakes, policy: str, expected: str) -> None:
    (mistake,) = mistakes(schema(f"{MARS}storage_policy:\n  {policy}"))
    key = policy.partition(":")[0]
    assert mistake.startswith(f"dev.yaml:9: {EVENT}.storage_policy.{key}: Schema 'mars' storage_policy.{expected}")


def test_in_memory_supports_no_storage_policy(mistakes: Mistakes) -> None:
    text = schema(f"{MARS}storage_policy:\n  compression: false\n  max_size: 1Gi", kind="in_memory")
    assert mistakes(text) == tuple(
        f"dev.yaml:{line}: {EVENT}.storage_policy.{key}: "
        f"Schema 'mars' storage_policy.{key} is not supported by backend 'in_memory'"
        for line, key in ((9, "compression"), (10, "max_size"))
    )


def test_a_base_belongs_to_one_event_type(mistakes: Mistakes) -> None:
    second = textwrap.indent("od:\n" + textwrap.indent(MARS.replace("base: mars", "base: MARS"), "  "), "  ")
    (mistake,) = mistakes(schema(MARS) + second)
    assert mistake == (
        "dev.yaml:9: notification_schema.od.topic.base: "
        "Schemas 'mars' and 'od' both define topic base 'MARS'; case is ignored"
    )


# ---- workers, and keys that are nearly known ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("stauts: {}", "workers: unknown field(s): stauts; did you mean 'status'?"),
        ("status: {prot: 1}", "workers.status: unknown field(s): prot; did you mean 'port'?"),
        ("logging: {colour: 1}", "workers.logging: unknown field(s): colour; known are: format, level"),
        ("status: {port: 70000}", "workers.status.port must be <= 65535"),
        ("status: {host: ''}", "workers.status.host must not be empty"),
        ("logging: {level: INFO}", "workers.logging.level: expected 'debug' or 'error' or 'info' or 'warning', found"),
        ("drain_timeout_seconds: -1", "workers.drain_timeout_seconds must be >= 0"),
        ("dead_letters: {max_bytes: 1000}", "workers.dead_letters.max_bytes is invalid: size must include a unit"),
        ("agents: {spark-events: on}", "workers.agents.spark-events: expected a mapping, found text"),
    ],
)
def test_a_mistake_in_workers(mistakes: Mistakes, setting: str, expected: str) -> None:
    (mistake,) = mistakes(workers(setting))
    assert mistake.startswith(f"dev.yaml:3: {expected}")


def test_a_key_of_a_storage_policy_that_is_not_known_is_a_warning(load: Load) -> None:
    loaded = load(
        """
        notification_backend: {kind: jetstream}
        notification_schema:
          mars:
            storage_policy: {max_age: 30d, discard_policy: new, retention_tim: 7d}
            topic: {base: mars, key_order: [step]}
            identifier: {step: {type: IntHandler, required: true}}
        """
    )
    policy = "dev.yaml:5: notification_schema.mars.storage_policy"
    assert sorted(loaded.warnings) == [
        f"{policy}.discard_policy: this key is not known and is ignored",
        f"{policy}.max_age: this key is not known and is ignored",
        f"{policy}.retention_tim: this key is not known and is ignored; did you mean 'retention_time'?",
    ]


def test_a_key_that_is_nearly_known_is_a_warning_where_aviso_server_accepts_it(load: Load) -> None:
    loaded = load(
        """
        notification_backends: {}
        notification_backend:
          kind: in_memory
          jetstream: {nats_urls: x}
          in_memory: {MAX_TOPICS: 1}
        notification_schema:
          mars:
            storage_polcy: {}
            topic: {base: mars, key_order: [step], key_orders: []}
            identifier: {step: {type: IntHandler, required: true}}
        """
    )
    assert [re.sub(": this key is not known and is ignored", "", warning) for warning in loaded.warnings] == [
        "dev.yaml:2: notification_backends; did you mean 'notification_backend'?",
        "dev.yaml:5: notification_backend.jetstream.nats_urls; did you mean 'nats_url'?",
        "dev.yaml:6: notification_backend.in_memory.MAX_TOPICS; did you mean 'max_topics'?",
        "dev.yaml:9: notification_schema.mars.storage_polcy; did you mean 'storage_policy'?",
        "dev.yaml:10: notification_schema.mars.topic.key_orders; did you mean 'key_order'?",
    ]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("stream_managment: observe", "stream_managment is not known; did you mean 'stream_management'?"),
        ("pasword: x", "pasword is not known; did you mean 'password'?"),
        ("publish_deadline: 5", "publish_deadline is not known; did you mean 'publish_deadline_seconds'?"),
        ("credential_file: x", "credential_file is not known; did you mean 'credentials_file'?"),
    ],
)
def test_a_key_of_the_backend_that_is_nearly_one_of_ours_is_a_mistake(
    mistakes: Mistakes, written: str, expected: str
) -> None:
    (mistake,) = mistakes(
        f"""
        notification_backend:
          kind: jetstream
          jetstream:
            {written}
        """
    )
    assert mistake == f"dev.yaml:5: notification_backend.jetstream.{expected}"


def test_a_key_of_ours_that_stands_a_level_too_high_is_a_mistake(mistakes: Mistakes) -> None:
    (mistake,) = mistakes("notification_backend: {kind: jetstream, stream_management: observe}\n")
    assert mistake == (
        "dev.yaml:1: notification_backend.stream_management is not known; "
        "did you mean notification_backend.jetstream.stream_management?"
    )


def test_a_section_that_is_nearly_one_of_ours_is_a_mistake(mistakes: Mistakes) -> None:
    (mistake,) = mistakes("worker: {}\nnotification_backend: {kind: in_memory}\n")
    assert mistake == "dev.yaml:1: worker is not known; did you mean 'workers'?"


def test_any_other_unknown_key_of_the_backend_is_a_warning(load: Load) -> None:
    loaded = load(
        """
        notification_backend:
          kind: in_memory
          newer: 1
          jetstream: {connection_name: x}
        elsewhere: {}
        """
    )
    assert loaded.warnings == (
        "dev.yaml:4: notification_backend.newer: this key is not known and is ignored",
        "dev.yaml:5: notification_backend.jetstream.connection_name: this key is not known and is ignored",
    )


def test_a_field_that_is_in_no_subject_is_a_warning(load: Load) -> None:
    loaded = load(
        """
        notification_backend: {kind: in_memory}
        notification_schema:
          mars:
            topic: {base: mars, key_order: [step]}
            identifier:
              step: {type: IntHandler, required: true}
              class: {type: StringHandler, required: true}
              polygon: {type: PolygonHandler, required: false}
          all:
            identifier:
              step: {type: IntHandler, required: true}
        """
    )
    assert loaded.warnings == (
        "dev.yaml:8: notification_schema.mars.identifier.class: is not in key_order, so its values are not stored: "
        "no watch, replay or agent sees them, and none can filter by them",
    )


def test_all_mistakes_come_at_once_in_the_order_of_the_file(mistakes: Mistakes) -> None:
    found = mistakes(
        """
        workers: {status: {prot: 1}}
        notification_schema:
          mars:
            topic: {base: mars, key_order: [step]}
            identifier: {step: {type: IntHandler, required: maybe}}
            storage_policy: {max_messages: 0}
          od:
            topic: {base: o d, key_order: []}
            identifier: {}
        notification_backend:
          kind: jetstream
          kind: in_memory
          jetstream:
            token: abc
            user: me
            timeout_seconds: 0
        """,
        AVISO_WORKERS_WORKERS__LOGGING__LEVEL="loud",
    )
    assert [mistake.split()[:2] for mistake in found] == [
        ["dev.yaml:2:", "workers.status:"],
        ["dev.yaml:6:", "notification_schema.mars.identifier.step.required:"],
        ["dev.yaml:7:", "notification_schema.mars.storage_policy.max_messages:"],
        ["dev.yaml:9:", "notification_schema.od.topic.base"],
        ["dev.yaml:9:", "notification_schema.od.topic.key_order"],
        ["dev.yaml:13:", "notification_backend.kind:"],
        ["dev.yaml:16:", "notification_backend.jetstream.user"],
        ["dev.yaml:16:", "notification_backend.jetstream.user"],
        ["dev.yaml:17:", "notification_backend.jetstream.timeout_seconds"],
        ["AVISO_WORKERS_WORKERS__LOGGING__LEVEL:", "workers.logging.level:"],
    ]


# ---- declared streams -----------------------------------------------------------------------------------------


def declared(settings: str, *, name: str = "ORDERS", event_type: str = MARS, backend: str = "") -> str:
    """A stream's settings, from line 3 on, beside the event type mars."""
    body = textwrap.indent(textwrap.dedent(settings).strip(), "    ")
    event_types = textwrap.indent(event_type, "    ")
    jetstream = f"{{kind: jetstream, jetstream: {{{backend}}}}}"
    return (
        f"streams:\n  {name}:\n{body}\nnotification_backend: {jetstream}\nnotification_schema:\n  mars:\n{event_types}"
    )


def test_streams_are_declared_with_literals_and_times(load: Load) -> None:
    stream = load(
        declared(
            """
            max_bytes: unlimited
            max_msg_size: 64Ki
            max_age: 7d
            consumers:
              shipping:
                backoff: [1s, 10s]
                deliver_policy: by_start_time
                opt_start_time: 2026-11-20T07:00:00+01:00
            """
        )
    ).streams["ORDERS"]
    assert (stream.max_bytes, stream.max_msg_size, stream.max_age) == (-1, 64 * 1024, 7 * 86_400)
    shipping = stream.consumers["shipping"]
    assert shipping.backoff == (1, 10)
    assert shipping.opt_start_time is not None
    assert shipping.opt_start_time.astimezone(UTC).isoformat() == "2026-11-20T06:00:00+00:00"


@pytest.mark.parametrize(
    ("settings", "mistake"),
    [
        ("retention: queue", ".retention: expected 'interest' or 'limits' or 'workqueue', found text"),
        ("max_age: 7", ".max_age is invalid: duration must include a unit suffix (s, m, h, d, w), unlike this text"),
        ("max_bytes: lots", ".max_bytes is invalid: size value must be an integer followed by a unit, not this text"),
        ("max_msgs: -2", ".max_msgs must be >= -1"),
        ("num_replicas: 6", ".num_replicas must be <= 5"),
        ("max_mesgs: 5", ": unknown field(s): max_mesgs; did you mean 'max_msgs'?"),
        ("republish: {src: a.b}", ".republish.dest is missing"),
        (
            "consumers: {c: {opt_start_time: yesterday}}",
            ".consumers.c.opt_start_time: expected a time with its offset, such as 2026-11-20T06:00:00Z, found text",
        ),
        (
            "consumers: {c: {pause_until: 2026-11-20T06:00:00}}",
            ".consumers.c.pause_until: expected a time with its offset, such as 2026-11-20T06:00:00Z, found text",
        ),
        ("consumers: {c: {sample_freq: 101}}", ".consumers.c.sample_freq must be <= 100"),
        ("consumers: {c.d: {}}", ".consumers.c.d must be a name without blanks, '.', '*', '>', '/' and '\\'"),
        (
            "{discard: old, discard_new_per_subject: true}",
            ".discard_new_per_subject must not be combined with streams.ORDERS.discard: "
            "JetStream refuses the two together",
        ),
        (
            "{discard_new_per_subject: true, max_msgs_per_subject: -1}",
            ".discard_new_per_subject needs a limit in streams.ORDERS.max_msgs_per_subject",
        ),
        (
            "{subjects: [orders.>], mirror: {name: ORIGIN}}",
            ".subjects must not be combined with streams.ORDERS.mirror: a mirror takes no publishes",
        ),
        (
            "mirror: {name: ORIGIN, domain: hub}",
            ".mirror: unknown field(s): domain; known are: name, external, filter_subject, subject_transforms, "
            "opt_start_seq, opt_start_time",
        ),
        ("{max_age: 1m, duplicate_window: 2m}", ".duplicate_window must not be longer than streams.ORDERS.max_age"),
        ("consumers: {c: {priority_groups: [a]}}", ".consumers.c.priority_groups needs priority_policy"),
        ("consumers: {c: {idle_heartbeat: 5s}}", ".consumers.c.idle_heartbeat needs deliver_subject"),
        (
            "consumers: {c: {deliver_subject: here, flow_control: true}}",
            ".consumers.c.flow_control needs idle_heartbeat",
        ),
        (
            "consumers: {c: {deliver_subject: here, max_waiting: 5}}",
            ".consumers.c.max_waiting must not be combined with deliver_subject: it is about pull requests",
        ),
        (
            "consumers: {c: {opt_start_seq: 5}}",
            ".consumers.c.opt_start_seq needs deliver_policy: by_start_sequence",
        ),
        (
            "consumers: {c: {deliver_policy: by_start_time}}",
            ".consumers.c.deliver_policy needs opt_start_time",
        ),
        (
            "consumers: {c: {deliver_policy: last_per_subject}}",
            ".consumers.c.deliver_policy needs filter_subjects",
        ),
        (
            "consumers: {c: {backoff: [1s, 2s, 3s], max_deliver: 2}}",
            ".consumers.c.max_deliver must be at least 3, as many as backoff has delays",
        ),
        (
            "consumers: {c: {backoff: [1s, 2s], ack_wait: 5s}}",
            ".consumers.c.ack_wait must be left out: with backoff, its first delay takes the place of ack_wait",
        ),
    ],
)
def test_a_mistake_in_a_declared_stream_names_file_line_and_key_path(
    mistakes: Mistakes, settings: str, mistake: str
) -> None:
    assert mistakes(declared(settings)) == (f"dev.yaml:3: streams.ORDERS{mistake}",)


def test_what_cannot_be_read_of_a_declared_stream_is_not_missed_as_well(mistakes: Mistakes) -> None:
    found = mistakes(declared("consumers: {c: {deliver_subject: here, flow_control: true, idle_heartbeat: 5}}"))
    assert [mistake.partition(" ")[2].partition(" ")[0] for mistake in found] == [
        "streams.ORDERS.consumers.c.idle_heartbeat"
    ]


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("OR DERS", "streams.OR DERS must be a name without blanks, '.', '*', '>', '/' and '\\'"),
        ("mars", "streams.mars must be MARS: that is the stream of event type mars"),
        ("aviso_workers_retries", "streams.aviso_workers_retries is a stream of our own, which cannot be declared"),
    ],
)
def test_a_stream_that_cannot_be_declared_is_refused(mistakes: Mistakes, name: str, mistake: str) -> None:
    assert mistakes(declared("max_msgs: 5", name=name)) == (f"dev.yaml:2: {mistake}",)


POLICY = f"{MARS}storage_policy: {{retention_time: 7d, max_size: 1Gi, allow_duplicates: true, compression: true}}\n"


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ("max_age: 8d", "notification_schema.mars.storage_policy.retention_time"),
        ("max_bytes: 2Gi", "notification_schema.mars.storage_policy.max_size"),
        ("max_msgs_per_subject: 1", "notification_schema.mars.storage_policy.allow_duplicates"),
        ("compression: none", "notification_schema.mars.storage_policy.compression"),
        ("max_msgs: 6", "notification_backend.jetstream.max_messages"),
        ("num_replicas: 1", "notification_backend.jetstream.replicas"),
        ("storage: memory", "notification_backend.jetstream.storage_type"),
        ("retention: workqueue", "notification_backend.jetstream.retention_policy"),
        ("discard: new", "notification_backend.jetstream.discard_policy"),
        ("subjects: [mars.od.>]", "notification_schema.mars.topic.base"),
    ],
)
def test_what_contradicts_avisos_keys_names_both(mistakes: Mistakes, settings: str, key: str) -> None:
    text = declared(settings, name="MARS", event_type=POLICY, backend="max_messages: 5, replicas: 3")
    field = settings.partition(":")[0]
    said = f"contradicts {key}: leave one of them out, or make them say the same"
    assert mistakes(text) == (f"dev.yaml:3: streams.MARS.{field} {said}",)


def test_what_says_the_same_as_avisos_keys_is_no_mistake(load: Load) -> None:
    settings = (
        "{max_age: 7d, max_bytes: 1Gi, max_msgs_per_subject: -1, compression: s2, subjects: [mars.>], max_msgs: 5}"
    )
    load(declared(settings, name="MARS", event_type=POLICY, backend="max_messages: 5"))


@pytest.mark.parametrize(
    ("settings", "mistake"),
    [
        ("no_ack: true", "no_ack is not for the stream of an event type: publishing waits for the acknowledgement"),
        (
            "persist_mode: async",
            "persist_mode is not for the stream of an event type: what was acknowledged must be stored",
        ),
        (
            "allow_msg_counter: true",
            "allow_msg_counter is not for the stream of an event type: a notification is not a number",
        ),
        (
            "subject_transform: {dest: a.>}",
            "subject_transform is not for the stream of an event type: agents find notifications by their subject",
        ),
        (
            "consumers: {app__agent: {}}",
            "consumers.app__agent is named as agents' consumers are, which code declares",
        ),
        (
            "duplicate_window: 8d",
            "duplicate_window must not be longer than notification_schema.mars.storage_policy.retention_time",
        ),
    ],
)
def test_what_is_not_for_the_stream_of_an_event_type_says_why(mistakes: Mistakes, settings: str, mistake: str) -> None:
    text = declared(settings, name="MARS", event_type=POLICY)
    assert mistakes(text) == (f"dev.yaml:3: streams.MARS.{mistake}",)


def test_streams_are_declared_for_jetstream_only(mistakes: Mistakes) -> None:
    text = "streams: {ORDERS: {max_msgs: 5}}\nnotification_backend: {kind: in_memory}"
    assert mistakes(text) == ("dev.yaml:1: streams is not supported by backend 'in_memory'",)


# ---- what comes with the package ------------------------------------------------------------------------------


def test_the_example_loads_without_a_warning_and_states_the_defaults() -> None:
    example = config.load(CONFIG_FILES / "example.yaml", environ={})
    assert example.warnings == ()
    assert list(example.notification_schema) == ["mars", "dissemination", "test_polygon", "spark_job"]
    assert example.notification_backend == config.NotificationBackend(kind="jetstream")
    assert (example.workers, example.application) == (config.Workers(), config.Application())
    assert (example.server, example.streams) == (config.Server(), {})


def test_the_example_has_every_key_that_there_is() -> None:
    text = (CONFIG_FILES / "example.yaml").read_text()
    all_keys, mistakes = parse(re.sub(r"#(?=[a-z_]+:)", "", text), KeyPlace(rank=0, line=1, source="example.yaml"))
    assert mistakes == []
    assert all_keys is not None
    missing = set(_key_paths(inspect.type_info(Document))) - set(_written_paths(all_keys.resolved))
    assert missing == set()


def test_the_development_file_loads() -> None:
    development = config.load(CONFIG_FILES / "dev.yaml", environ={})
    assert development.warnings == ()
    assert development.notification_backend.jetstream.servers == ("nats://127.0.0.1:4222",)
    assert list(development.notification_schema) == ["mars", "spark_job"]


def _key_paths(type_: inspect.Type, path: str = "") -> Iterator[str]:
    """All key paths of a type; a name that is free is `*`."""
    match type_:
        case inspect.Metadata(type=inside):
            yield from _key_paths(inside, path)
        case inspect.UnionType(types=types):
            for inside in types:
                yield from _key_paths(inside, path)
        case inspect.DictType(value_type=inside):
            yield from _key_paths(inside, f"{path}.*")
        case inspect.StructType(fields=fields):
            for field in fields:
                yield f"{path}.{field.name}"
                yield from _key_paths(field.type, f"{path}.{field.name}")


def _written_paths(value: Any, path: str = "") -> Iterator[str]:
    free = path in (
        ".notification_schema",
        ".notification_schema.*.identifier",
        ".workers.agents",
        ".streams",
        ".streams.*.consumers",
        ".server.accounts",
        ".server.accounts.*.users",
        ".server.leafnodes.remotes",
        ".workers.console.users",
    )
    for key, inside in value.items() if isinstance(value, dict) else ():
        key_path = f"{path}.{'*' if free else key}"
        yield key_path
        yield from _written_paths(inside, key_path)


def test_both_parsers_read_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        Path("config/example.yaml").read_text() + "\nmore: [1, '1', !!str 1, null, ~, \"\", {a: &x b, c: *x}]\nempty:\n"
    )
    fast = parse(text, KeyPlace(0, 1, "file"))
    monkeypatch.setattr(documents, "FAST", yaml.SafeLoader)
    assert parse(text, KeyPlace(0, 1, "file")) == fast
