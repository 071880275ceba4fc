"""A certificate authority, and the certificates that it has signed, made by openssl."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests import programs

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Certificate:
    cert_file: str
    key_file: str


class Authority:
    """The authority `name`, whose files are in the directory."""

    def __init__(self, directory: Path, name: str) -> None:
        self._openssl = programs.find("openssl", package="openssl")
        self._directory = directory
        self._own = self._files(name)
        extension = ("-addext", "keyUsage = critical, keyCertSign, cRLSign")  # Python 3.13 insists on it
        self._run("req", "-x509", *NEW_KEY, "-subj", f"/CN={name}", "-days", "2", *extension, *self._out(self._own))
        self.ca_file = self._own.cert_file

    def sign(self, name: str, *, days: int = 2, address: str = "127.0.0.1") -> Certificate:
        """Return a certificate for the address, which has expired where `days` is negative."""
        made, request = self._files(name), self._directory / f"{name}.csr"
        extension = self._directory / f"{name}.ext"
        extension.write_text(f"subjectAltName = IP:{address}\nauthorityKeyIdentifier = keyid\n")
        self._run("req", "-new", *NEW_KEY, "-subj", f"/CN={name}", "-keyout", made.key_file, "-out", str(request))
        signing = ("-CA", self._own.cert_file, "-CAkey", self._own.key_file, "-CAcreateserial")
        extending = ("-extfile", str(extension), "-days", str(days), "-out", made.cert_file)
        self._run("x509", "-req", "-in", str(request), *signing, *extending)
        return made

    def encrypt(self, key_file: str, to: Path) -> None:
        """Write the private key to another file, with a passphrase."""
        self._run("pkcs8", "-topk8", "-in", key_file, "-out", str(to), "-passout", "pass:secret")

    def _files(self, name: str) -> Certificate:
        return Certificate(str(self._directory / f"{name}.pem"), str(self._directory / f"{name}.key"))

    def _out(self, files: Certificate) -> tuple[str, ...]:
        return "-keyout", files.key_file, "-out", files.cert_file

    def _run(self, *arguments: str) -> None:
        subprocess.run([self._openssl, *arguments], check=True, capture_output=True)
