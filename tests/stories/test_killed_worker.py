"""A worker is killed in the middle of its work, and another one takes over."""

from __future__ import annotations

from pathlib import Path

import pytest

from _demo.children import wait_until
from _demo.deployment import deployed
from _demo.generating import make_slice
from tests.waits import PATIENCE_SECONDS


@pytest.mark.covers("002-04", "003-12")
def test_everything_is_indexed_though_the_worker_is_killed_while_notifications_are_published(tmp_path: Path) -> None:
    wanted = make_slice(experiments=6)
    total = len(wanted.lines)
    with deployed(tmp_path) as deployment:
        deployment.write(wanted)
        index = deployment.index
        with deployment.index_worker() as first, deployment.notify() as notify:
            wait_until(
                lambda: index.count() > 0,
                lambda: f"nothing of {total} is indexed",
                within_seconds=PATIENCE_SECONDS,
                alive=[first.child],
            )
            first.child.kill()
            assert notify.process.poll() is None, "all was published before the worker was killed"
            assert index.count() < total

            with deployment.index_worker() as second:
                notify.wait(within_seconds=PATIENCE_SECONDS)
                assert deployment.stored(notify) == total
                wait_until(
                    lambda: index.count() == total and second.numbers().lag == 0,
                    lambda: f"{index.count()} of {total} are indexed, {second.numbers()}",
                    within_seconds=PATIENCE_SECONDS,
                    alive=[second.child],
                )

        assert index.locations() == {line["payload"]["location"] for line in wanted.lines}
