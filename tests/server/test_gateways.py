"""A super-cluster: two clusters that gateways join, and streams of one that the other sources."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import anyio
import pytest

from aviso_workers import App, config
from aviso_workers.errors import ConfigError
from aviso_workers.ops import stream_policy
from aviso_workers.server import find_binary, nats_conf, processes, profiles
from tests.server.conftest import Load
from tests.waits import PATIENCE_SECONDS

CLUSTERS = ("east", "west")

SITE = """
notification_backend: {{kind: jetstream, jetstream: {{nats_url: "nats://127.0.0.1:{port}"}}}}
notification_schema:
  mars:
    topic: {{base: mars, key_order: [step]}}
    identifier: {{step: {{type: IntHandler, required: true}}}}
streams:
  MARS: {{placement: {{cluster: east}}}}
  ARCHIVE: {{sources: [{{name: MARS}}], placement: {{cluster: west}}}}
server:
  server_name: {name}-1
  port: {port}
  monitoring: {{port: {monitoring}}}
  jetstream: {{store_dir: {directory}/{name}}}
  cluster: {{name: {name}, port: {cluster}, routes: ["127.0.0.1:{cluster}"]}}
  gateways:
    port: {gateway}
    user: gate
    password: "a p/w"
    remotes: {{east: ["127.0.0.1:{east}"], west: ["127.0.0.1:{west}"]}}
"""


class Site:
    """A cluster of one server, run from the nats-server.conf that was rendered."""

    def __init__(self, file: Path, *, name: str, monitoring: int) -> None:
        self.config = config.load(file, environ={})
        self._file = file.with_suffix(".conf")
        self._node = processes.Node(
            name=f"{name}-1",
            directory=file.parent,
            port=0,
            monitoring_port=monitoring,
            cluster_port=0,
            leaf_port=0,
        )

    def start(self) -> subprocess.Popen[bytes]:
        server, choices = profiles.choose(self.config, profile="development")
        rendered = nats_conf.render(server, origins=self.config.origins, choices=choices)
        nats_conf.write(rendered, self._file, origins=self.config.origins)
        with self._file.with_suffix(".log").open("wb") as log:
            return subprocess.Popen([find_binary(), "-c", self._file], stdout=log, stderr=subprocess.STDOUT)

    def is_healthy(self) -> bool:
        try:
            return bool(processes.ask(self._node, "/healthz").get("status") == "ok")
        except Exception:
            return False

    def gateways(self) -> set[str]:
        return set(processes.ask(self._node, "/gatewayz")["outbound_gateways"])


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[dict[str, Site]]:
    free = processes.free_ports(8)
    with ExitStack() as stack:
        gateways = dict(zip(CLUSTERS, free[:2], strict=True))
        found = {}
        for i, name in enumerate(CLUSTERS):
            port, monitoring, cluster = free[2 + 3 * i : 5 + 3 * i]
            file = tmp_path / f"{name}.yaml"
            own = {"port": port, "monitoring": monitoring, "cluster": cluster, "gateway": gateways[name]}
            file.write_text(SITE.format(name=name, directory=tmp_path, **own, **gateways))
            found[name] = Site(file, name=name, monitoring=monitoring)
        for site in found.values():
            process = site.start()
            stack.callback(process.wait)
            stack.callback(process.kill)
        assert processes.eventually(lambda: all(site.is_healthy() for site in found.values()), PATIENCE_SECONDS)
        yield found


@pytest.mark.slow
def test_a_stream_of_one_cluster_is_sourced_in_another(sites: dict[str, Site]) -> None:
    assert sites["east"].gateways() == {"west"}

    async def work() -> None:
        async with App("west", config=sites["west"].config) as app:
            for plan in await stream_policy.plans(app.session.admin, app.config):
                await stream_policy.carry_out(app.session.admin, app.config, plan)
            for step in range(5):
                await app.notify("mars", {"step": step}, {})
            api = app.session.admin.administration().api
            with anyio.fail_after(PATIENCE_SECONDS):
                while (archive := await api("STREAM.INFO.ARCHIVE"))["state"]["messages"] < 5:  # noqa: ASYNC110
                    await anyio.sleep(0.05)
            assert (await api("STREAM.INFO.MARS"))["cluster"]["name"] == "east"
            assert archive["cluster"]["name"] == "west"

    anyio.run(work)


@pytest.mark.parametrize(
    ("server", "mistake"),
    [
        (
            "gateways: {remotes: {west: ['a:7222']}}",
            "dev.yaml:3: server.gateways needs server.cluster, whose name it has",
        ),
        ("cluster: {}\ngateways: {remotes: {}}", "dev.yaml:4: server.gateways.remotes must not be empty"),
        (
            "cluster: {}\ngateways: {remotes: {west: []}}",
            "dev.yaml:4: server.gateways.remotes.west must not be empty",
        ),
        (
            "cluster: {}\ngateways: {remotes: {west: ['nats://a:7222']}}",
            "dev.yaml:4: server.gateways.remotes.west[0] must be host:port; user and password have keys of their own",
        ),
        (
            "cluster: {}\ngateways: {user: gate, remotes: {west: ['a:7222']}}",
            "dev.yaml:4: server.gateways.user needs a password, which may stand in the environment",
        ),
    ],
)
def test_what_no_gateway_can_be_is_refused(load: Load, server: str, mistake: str) -> None:
    with pytest.raises(ConfigError) as refused:
        profiles.choose(load(server), profile="development")
    assert refused.value.mistakes == (mistake,)


def test_tls_between_clusters_is_taken_by_nats_server(load: Load, certificate: Path) -> None:
    tls = f"{{cert_file: {certificate}/cert.pem, key_file: {certificate}/key.pem, verify: true}}"
    loaded = load(f"cluster: {{name: east}}\ngateways: {{tls: {tls}, remotes: {{west: ['w1:7222', 'w2:7222']}}}}")
    server, choices = profiles.choose(loaded, profile="development")
    rendered = nats_conf.render(server, origins=loaded.origins, choices=choices)
    nats_conf.write(rendered, Path("nats-server.conf"), origins=loaded.origins)
    gateway = rendered.text[rendered.text.index("gateway {") :]
    assert f'cert_file: "{certificate}/cert.pem"' in gateway
    assert '"nats://w2:7222"' in gateway
