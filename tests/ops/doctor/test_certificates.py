"""Certificates that expire, made by openssl."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from aviso_workers import config
from aviso_workers.config import Config
from aviso_workers.ops.doctor import State
from aviso_workers.ops.doctor.checks import clients
from aviso_workers.server import NatsServer
from tests import programs
from tests.ops.doctor.conftest import changed, examined, judged, write

Make = Callable[[int], Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """`make(days)`: a directory with cert.pem and key.pem, for localhost, valid for so long."""

    def make(days: int) -> Path:
        openssl = programs.find("openssl", package="openssl")
        directory = tmp_path / f"for-{days}-days"
        directory.mkdir()
        request = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", str(days)]
        files = ["-keyout", str(directory / "key.pem"), "-out", str(directory / "cert.pem")]
        subprocess.run([*request, *names, *files], check=True, capture_output=True)
        return directory

    return make


@pytest.mark.parametrize("days", [3, 365, 40_000])
def test_the_end_of_a_certificate_is_read(make: Make, days: int) -> None:
    """After 2049 it is written in another form."""
    der = ssl.PEM_cert_to_DER_cert((make(days) / "cert.pem").read_text())
    left = clients.validity_end(der) - datetime.now(UTC)
    assert timedelta(days=days, minutes=-5) < left <= timedelta(days=days)


@pytest.mark.parametrize("der", [b"", b"nothing of the kind", b"\x30\x03\x30\x01\x00"])
def test_what_is_no_certificate_is_an_error(der: bytes) -> None:
    with pytest.raises(ValueError, match=r"no X.509 certificate"):
        clients.validity_end(der)


def with_tls(tmp_path: Path, url: str, directory: Path) -> Config:
    tls = {"ca_file": str(directory / "cert.pem")}
    tls |= {"cert_file": str(directory / "cert.pem"), "key_file": str(directory / "key.pem")}
    return write(tmp_path / "config.yaml", url, tls=tls)


def test_certificates_that_end_soon_are_a_warning_and_those_that_ended_a_failure(tmp_path: Path, make: Make) -> None:
    directory = make(20)
    listening = f"tls {{cert_file: {directory / 'cert.pem'}, key_file: {directory / 'key.pem'}}}\n"
    with NatsServer.start(store_dir=tmp_path / "js", config=listening) as server:
        seen = examined(with_tls(tmp_path, server.url.replace("nats://", "tls://"), directory))
    ends = (datetime.now(UTC) + timedelta(days=20)).date()
    ours = "notification_backend.jetstream.tls.cert_file"
    assert seen.found("JS067") == {
        f"the certificate of {server.name}": f"expires on {ends}",
        ours: f"expires on {ends}",
    }
    assert seen.state("JS067") is State.WARN
    later = judged(changed(seen.facts, now=seen.facts.now + timedelta(days=21)))
    assert later.state("JS067") is State.FAIL
    before = judged(changed(seen.facts, now=seen.facts.now - timedelta(days=11)))
    assert before.state("JS067") is State.PASS


def test_without_tls_there_is_nothing_to_end(tmp_path: Path, nats_server: NatsServer) -> None:
    assert examined(write(tmp_path / "config.yaml", nats_server.url)).state("JS067") is State.PASS
    assert config.JetStream().tls is None
