from __future__ import annotations

import pytest

from tests.security.certificates import Authority, Certificate


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "authority")


@pytest.fixture(scope="session")
def server_certificate(authority: Authority) -> Certificate:
    return authority.sign("server")


@pytest.fixture(scope="session")
def client_certificate(authority: Authority) -> Certificate:
    return authority.sign("client")
