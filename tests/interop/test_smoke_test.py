"""scripts/smoke_test.py on installations with an aviso-server, right and wrong.

`INSTALLATIONS` says what fails in each. The smoke test that comes with aviso-server 0.7.1 and 0.13.1 said the same of
each when it was run there by hand, with AUTH_ENABLED=false.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import Struct

from aviso_workers.server import NatsServer
from tests.interop import programs
from tests.interop.aviso_server import AvisoServer
from tests.waits import PATIENCE_SECONDS

SCRIPTS = Path(__file__).parents[2] / "scripts"

SAME_CHECKS = {
    "watch without replay params is live-only": "a watch sees what comes and not what was",
    "replay with from_id returns historical stream": "a replay starts at an id",
    "replay with from_date excludes older messages": "a replay starts at a date",
    "replay with point returns only containing polygons": "a point finds the polygons around it",
    "mars replay with from_id works for dot-containing identifier values": "a reserved character is carried",
    "diss watch with from_date excludes old and includes live for dot-containing identifier values": (
        "a watch goes from history to live"
    ),
    "mars replay supports integer predicates under identifier": "a number can be constrained",
    "mars replay supports enum in-predicate under identifier": "a value can be one of several",
    "jetstream stream policy is inspectable (and optionally matches expected values)": "the stream policy is in effect",
}
"""Upstream's checks that ours has as well, by their names. The others are about HTTP and who may use it."""

POLYGON_CHECKS = {
    "a watch sees what comes and not what was",
    "a replay starts at an id",
    "a replay starts at a date",
    "a point finds the polygons around it",
}
MARS_CHECKS = {"a reserved character is carried", "a number can be constrained", "a value can be one of several"}
DISSEMINATION_CHECKS = {"a watch goes from history to live"}
POLICY_CHECK = {"the stream policy is in effect"}
ALL_BUT_THE_POLICY = POLYGON_CHECKS | MARS_CHECKS | DISSEMINATION_CHECKS


class Installation(Struct, frozen=True, kw_only=True):
    """A configuration, a nats-server, and which of `SAME_CHECKS` fail there."""

    change: Callable[[dict[str, Any]], Any] = lambda document: None
    """Makes the configuration wrong."""
    nats: str = ""
    """What its nats-server is configured with."""
    environ: Mapping[str, str] = {}
    fail: set[str] = set()
    """What fails in upstream's smoke test and in ours."""
    only_ours_fails: set[str] = set()
    stopped: bool = False
    """The nats-server is stopped before the smoke test runs."""


def schema_of(document: dict[str, Any], event_type: str) -> dict[str, Any]:
    schema: dict[str, Any] = document["notification_schema"][event_type]
    return schema


def lacks(event_type: str) -> Callable[[dict[str, Any]], Any]:
    return lambda document: document["notification_schema"].pop(event_type)


def lacks_field(event_type: str, field: str) -> Callable[[dict[str, Any]], Any]:
    def change(document: dict[str, Any]) -> None:
        schema = schema_of(document, event_type)
        del schema["identifier"][field]
        schema["topic"]["key_order"] = [key for key in schema["topic"]["key_order"] if key != field]

    return change


def has(event_type: str, field: str, **rule: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda document: schema_of(document, event_type)["identifier"].update({field: {**rule, "required": True}})


def has_base(event_type: str, base: str) -> Callable[[dict[str, Any]], Any]:
    return lambda document: schema_of(document, event_type)["topic"].update(base=base)


def without(*denied: str) -> str:
    """Return the configuration of a nats-server whose users may not publish to these subjects."""
    permissions = json.dumps({"publish": {"deny": list(denied)}})
    user = f'{{user: "u", password: "p", permissions: {permissions}}}'
    return f'authorization {{ users: [{user}] }}\nno_auth_user: "u"\n'


INSTALLATIONS = {
    "right": Installation(),
    "with the right policy": Installation(
        change=lambda document: document["notification_backend"]["jetstream"].update(max_messages=5000),
        environ={"EXPECT_MAX_MESSAGES": "5000", "EXPECT_MAX_MESSAGES_PER_SUBJECT": "1", "EXPECT_COMPRESSION": "None"},
    ),
    "keeps duplicates and compresses": Installation(
        change=lambda document: schema_of(document, "test_polygon").update(
            storage_policy={"allow_duplicates": True, "compression": True}
        ),
        environ={"EXPECT_MAX_MESSAGES_PER_SUBJECT": "-1", "EXPECT_COMPRESSION": "s2"},
    ),
    "lacks mars": Installation(change=lacks("mars"), fail=MARS_CHECKS),
    "lacks test_polygon": Installation(change=lacks("test_polygon"), fail=POLYGON_CHECKS),
    "lacks dissemination": Installation(change=lacks("dissemination"), fail=DISSEMINATION_CHECKS),
    "has polygons of another name": Installation(change=lacks_field("test_polygon", "polygon"), fail=POLYGON_CHECKS),
    "has no domain": Installation(change=lacks_field("mars", "domain"), fail=MARS_CHECKS),
    "has steps that are text": Installation(
        change=has("mars", "step", type="StringHandler"), fail={"a number can be constrained"}
    ),
    "has domains without z": Installation(
        change=has("mars", "domain", type="EnumHandler", values=["a", "g"]), fail={"a value can be one of several"}
    ),
    "has steps up to 3": Installation(
        change=has("mars", "step", type="IntHandler", range=[0, 3]), fail={"a number can be constrained"}
    ),
    "has classes of one letter": Installation(
        change=has("mars", "class", type="StringHandler", max_length=1), fail=MARS_CHECKS
    ),
    "has another base": Installation(change=has_base("test_polygon", "area"), environ={"EXPECT_MAX_MESSAGES": "5"}),
    "has another limit": Installation(environ={"EXPECT_MAX_MESSAGES": "5"}, fail=POLICY_CHECK),
    "has another size": Installation(environ={"EXPECT_MAX_BYTES": "5"}, fail=POLICY_CHECK),
    "is not compressed": Installation(environ={"EXPECT_COMPRESSION": "s2"}, fail=POLICY_CHECK),
    "keeps one of each": Installation(environ={"EXPECT_MAX_MESSAGES_PER_SUBJECT": "-1"}, fail=POLICY_CHECK),
    "is full": Installation(
        change=lambda document: document["notification_backend"]["jetstream"].update(
            max_messages=1, discard_policy="new"
        ),
        environ={"TIMEOUT_SECONDS": "1"},  # a publisher waits for room until then
        fail=ALL_BUT_THE_POLICY,
    ),
    "refuses to replay": Installation(nats=without("$JS.API.CONSUMER.>"), fail=ALL_BUT_THE_POLICY),
    "refuses to publish to diss": Installation(nats=without("diss.>"), fail=DISSEMINATION_CHECKS),
    # Upstream's skips the policy of a stream that it cannot ask for.
    "has lost its nats-server": Installation(stopped=True, fail=ALL_BUT_THE_POLICY, only_ours_fails=POLICY_CHECK),
}
"""By what is right or wrong about each."""

IDENTIFIER = {"date": "20250706", "time": "1200"}
FIRST = {
    "mars": {**IDENTIFIER, "class": "od", "expver": "0001", "domain": "g", "stream": "first", "step": "1"},
    "dissemination": {
        **IDENTIFIER,
        "destination": "FOO",
        "target": "first",
        "class": "od",
        "expver": "0001",
        "domain": "g",
        "stream": "enfo",
        "step": "1",
    },
    "test_polygon": {
        "date": "20240101",
        "time": "1200",
        "polygon": "(10.0,10.0,10.2,10.0,10.2,10.2,10.0,10.2,10.0,10.0)",
    },
}


class Place:
    """The servers of an installation, as long as a test runs."""

    def __init__(self, installation: Installation, *, directory: Path, servers: ExitStack) -> None:
        self.installation = installation
        self.config = directory / "installation.yaml"
        store = directory / "jetstream"
        self.nats = servers.enter_context(NatsServer.start(store_dir=store, config=installation.nats))
        document = copy.deepcopy(yaml.safe_load((SCRIPTS / "smoke_test.yaml").read_text()))
        jetstream = {"nats_url": self.nats.url, "publish_retry_attempts": 1, "max_reconnect_attempts": 1}
        document["notification_backend"] = {
            "kind": "jetstream",
            "jetstream": {**jetstream, "reconnect_delay_ms": 100, "retry_attempts": 1},
        }
        installation.change(document)
        self.config.write_text(json.dumps(document))

    @property
    def environ(self) -> dict[str, str]:
        return {
            "BACKEND": "jetstream",
            "NATS_URL": self.nats.url,
            "TIMEOUT_SECONDS": "5",
            "AVISO_WORKERS_CONFIG_FILE": str(self.config),
            **self.installation.environ,
        }

    def first_notifications(self, server: AvisoServer) -> None:
        """Have the aviso-server create its streams, with whatever it accepts."""
        for event_type, identifier in FIRST.items():
            server.notify(event_type, identifier, {})
        if self.installation.stopped:
            self.nats.kill()


def our_verdicts(place: Place) -> dict[str, bool]:
    """Return by name of each check whether it failed."""
    done = subprocess.run(
        [sys.executable, SCRIPTS / "smoke_test.py"],
        env=place.environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    lines = [line.partition("  ")[::2] for line in done.stdout.splitlines()]
    failed = {
        name.strip().partition(":")[0]: verdict == "FAIL"
        for verdict, name in lines
        if verdict.strip() in ("ok", "skip", "FAIL")
    }
    assert done.returncode == (1 if any(failed.values()) else 0), done.stdout + done.stderr
    return failed


@pytest.mark.parametrize(
    ("name", "version"),
    [("right", version) for version in programs.AVISO_SERVERS]
    + [(name, programs.AVISO_SERVERS[-1]) for name in INSTALLATIONS if name != "right"],
)
def test_our_smoke_test_fails_where_upstreams_fails(
    name: str, version: str, start_aviso_server: Callable[..., AvisoServer], tmp_path: Path
) -> None:
    installation = INSTALLATIONS[name]
    with ExitStack() as servers:
        place = Place(installation, directory=tmp_path, servers=servers)
        place.first_notifications(start_aviso_server(version, config=place.config))

        failed = our_verdicts(place)

    assert {
        check for check in SAME_CHECKS.values() if failed[check]
    } == installation.fail | installation.only_ours_fails
