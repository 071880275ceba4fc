"""What the page of a stream or consumer says of its replicas."""

from __future__ import annotations

from aviso_workers.aviso.literals import SECOND
from aviso_workers.cli import output
from aviso_workers.jetstream.info import Cluster, Replica


def test_a_follower_is_told_with_when_it_was_heard_of() -> None:
    """A leader calls a follower current for seconds after it has died."""
    followers = (
        Replica(name="n2", current=True, active=SECOND // 2, lag=0),
        Replica(name="n3", current=True, active=9 * SECOND, lag=7),
        Replica(name="n4", current=False, active=SECOND, lag=12),
        Replica(name="n5", current=False, offline=True, active=60 * SECOND, lag=99),
    )
    shown = list(output.replicas(Cluster(name="C", leader="n1", replicas=followers)))
    assert shown == [
        ("cluster", "C"),
        ("leader", "n1"),
        ("follower", "n2: current, lag 0, heard of 0.5 s ago"),
        ("follower", "n3: not heard of for 9 s; then it lagged by 7"),
        ("follower", "n4: not current, lag 12, heard of 1.0 s ago"),
        ("follower", "n5: not heard of for 60 s; then it lagged by 99"),
    ]


def test_a_server_by_itself_has_no_followers() -> None:
    assert list(output.replicas(Cluster())) == []
