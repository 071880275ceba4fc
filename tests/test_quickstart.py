"""docs/quickstart.md, block by block as it stands there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.conftest import Start
from tests.waits import PATIENCE_SECONDS

PAGE = (Path(__file__).parents[1] / "docs" / "quickstart.md").read_text()
BIN = Path(sys.executable).parent


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_the_quickstart(start: Start, free_port: int, tmp_path: Path) -> None:
    (program,) = blocks("python")
    _, run, publish, fail, look = blocks("bash")
    (tmp_path / "fields.py").write_text(program)
    environment = {
        "AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__NATS_URL": f"nats://127.0.0.1:{free_port}",
        "AVISO_WORKERS_WORKERS__STATUS__PORT": "0",
        "AVISO_WORKERS_SERVER__MONITORING__PORT": "0",
        "AVISO_WORKERS_WORKERS__LOGGING__FORMAT": "json",
        "HOME": str(tmp_path),
        "PATH": f"{BIN}:{os.environ['PATH']}",
    }

    def shell(commands: str) -> list[str]:
        ran = subprocess.run(
            ["bash", "-e", "-c", commands],
            cwd=tmp_path,
            env={**{name: value for name, value in os.environ.items() if not name.startswith("AVISO")}, **environment},
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout.splitlines()

    dev = start(*shlex.split(run)[1:], **environment)
    dev.until_told("Ready.")
    shell(publish)
    assert dev.lines(1) == ["12 /data/12\n"]
    shell(fail)
    assert "an empty field" in str(dev.until("notification.retried"))
    shown = "\n".join(shell(look))
    assert re.search(r"^fields +index_field ", shown, re.MULTILINE), shown
    assert shown.count('"type"') == 2, shown
    assert (tmp_path / ".aviso-workers").exists()
