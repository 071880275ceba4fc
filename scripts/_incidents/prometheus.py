"""A real Prometheus with the shipped rules, whose waits are shortened."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from _demo.children import is_ready
from aviso_workers import http_answers

ROOT = Path(__file__).parents[2]
RULES = ROOT / "config/prometheus-rules.yml"
LOOK = "500ms"
ANSWER_SECONDS = 20.0
MAX_BYTES = 1 << 24


class Prometheus:
    """A Prometheus that asks workers, and with `doctor` also the port at which the doctor's results are.

    `window` stands in place of the minutes over which the rules look back, `hold` in place of those for which a rule
    must hold.
    """

    def __init__(
        self,
        directory: Path,
        *,
        port: int,
        workers: Sequence[int],
        program: str,
        window: str,
        hold: str = "0s",
        doctor: int | None = None,
    ) -> None:
        self.window = window
        self._doctor = doctor
        self._config = directory / "prometheus.yml"
        self._log = directory / "prometheus.log"
        self._url = f"http://127.0.0.1:{port}"
        rules = re.sub(r"\[\d+m\]", f"[{window}]", RULES.read_text())
        rules = re.sub(r"offset \d+m", f"offset {window}", rules)
        (directory / "prometheus-rules.yml").write_text(re.sub(r"for: \S+", f"for: {hold}", rules))
        self._write_config(workers)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    program,
                    f"--config.file={self._config}",
                    f"--storage.tsdb.path={directory / 'prometheus'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                    "--log.level=warn",
                    "--enable-feature=exemplar-storage",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def is_ready(self) -> bool:
        """Return whether it has started. A signal that comes before that ends it."""
        return is_ready(f"{self._url}/-/ready")

    def follow(self, workers: Sequence[int]) -> None:
        """Ask these workers from now on. It has to be ready."""
        self._write_config(workers)
        self._process.send_signal(signal.SIGHUP)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def firing(self) -> set[str]:
        """Return the alerts that fire; nothing that is known while it starts."""
        return {alert["labels"]["alertname"] for alert in self.alerts() if alert["state"] == "firing"}

    def alerts(self) -> list[dict[str, Any]]:
        return list(self._ask("/api/v1/alerts").get("alerts", ()))

    def knows(self, workers: int) -> bool:
        """Return whether so many workers have answered it for as long as the rules look back."""
        return len(self.query(f"min_over_time(aviso_worker_ready[{self.window}])")) >= workers

    def query(self, expression: str) -> list[float]:
        """Return the values of the series that it has for an expression."""
        found = self._ask(f"/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
        return [float(series["value"][1]) for series in found["result"]]

    def exemplars(self, expression: str) -> list[dict[str, Any]]:
        """Return the series that it has for an expression, each with its exemplars of the last minute."""
        now = time.time()
        asked = urllib.parse.urlencode({"query": expression, "start": now - 60, "end": now + 60})
        return list(self._ask_for(f"/api/v1/query_exemplars?{asked}") or ())

    def _write_config(self, workers: Sequence[int]) -> None:
        shipped = yaml.safe_load((ROOT / "config/prometheus.yml").read_text())
        shipped["global"] = {"scrape_interval": LOOK, "scrape_timeout": LOOK, "evaluation_interval": LOOK}
        (job,) = shipped["scrape_configs"]
        job["static_configs"] = [{"targets": [f"127.0.0.1:{each}" for each in workers]}]
        if self._doctor is not None:
            node = {"job_name": "node", "static_configs": [{"targets": [f"127.0.0.1:{self._doctor}"]}]}
            shipped["scrape_configs"].append(node)
        self._config.write_text(yaml.safe_dump(shipped))

    def _ask(self, path: str) -> dict[str, Any]:
        return dict(self._ask_for(path) or {"result": []})

    def _ask_for(self, path: str) -> Any:
        """Return what it answers; None where it does not."""
        try:
            answer = http_answers.read(
                f"{self._url}{path}",
                seconds=ANSWER_SECONDS,
                silent_seconds=ANSWER_SECONDS,
                max_bytes=MAX_BYTES,
                near=True,
            )
            return json.loads(answer)["data"]
        except OSError:
            return None


def waits() -> dict[str, str]:
    """Return for how long each shipped rule must hold before its alert fires; empty where it fires at once."""
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule.get("for", "") for rule in group["rules"]}
