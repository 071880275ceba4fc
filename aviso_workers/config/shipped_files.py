"""The files of `config/` in the repository, which are installed with the package: configurations to begin with, and
what Prometheus, Grafana and KEDA are given.
"""

from __future__ import annotations

from importlib import resources

from aviso_workers.aviso import literals
from aviso_workers.errors import ConfigError

PACKAGE = "aviso_workers.shipped"
"""The package as which pyproject.toml installs `config/`."""
FILES = {
    "example.yaml": "every key of a configuration, commented, with its default",
    "dev.yaml": "a configuration for development",
    "prometheus.yml": "a scrape configuration of Prometheus",
    "prometheus-rules.yml": "alerts for Prometheus, each with what to do",
    **{f"grafana-{of}.json": f"board of Grafana: {of}" for of in ("overview", "agent", "timers", "streams", "spark")},
    "keda.yaml": "a ScaledObject of KEDA: as many pods as an agent's lag needs",
}
"""A description of each file, by its name."""


def read(name: str) -> str:
    """Return the text of a file. Raises `ConfigError` where there is none of this name."""
    if name not in FILES:
        raise ConfigError([f"no file {name!r} is shipped; {literals.suggestion(name, [*FILES])}"])
    return resources.files(PACKAGE).joinpath(name).read_text()
