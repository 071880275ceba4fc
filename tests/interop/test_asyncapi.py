"""The parser of AsyncAPI reads what we print of an app, and finds its operations."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from aviso_workers import config
from aviso_workers.state import asyncapi
from tests.interop import programs
from tests.test_asyncapi import FILE, app_of
from tests.waits import PATIENCE_SECONDS


def test_the_parser_finds_no_mistake_and_every_operation(tmp_path: Path) -> None:
    (tmp_path / "aviso.yaml").write_text(FILE)
    app = app_of(config.load(tmp_path / "aviso.yaml", environ={}))
    document = asyncapi.document(app.config, app, version="1.2.3")
    parsed = subprocess.run(
        ["node", Path(__file__).with_name("clients") / "asyncapi.js"],
        env={**os.environ, "NODE_PATH": str(programs.asyncapi_parser())},
        input=json.dumps(document),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert parsed.returncode == 0, parsed.stderr
    assert json.loads(parsed.stdout) == {"wrong": [], "operations": [*document["operations"]]}
