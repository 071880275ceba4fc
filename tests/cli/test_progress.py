from __future__ import annotations

import pytest

from aviso_workers.cli.progress import ProgressLines


def test_a_line_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    tell = ProgressLines("erased", total=500, clock=lambda: now)
    for _ in range(25):
        now += 1.0
        tell(10)
    assert capsys.readouterr().err.splitlines() == [
        "100 of 500 erased, 10 a second, about 40 s left",
        "200 of 500 erased, 10 a second, about 30 s left",
    ]
