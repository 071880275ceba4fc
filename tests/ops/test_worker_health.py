"""How workers and apps are, by what workers have recorded."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from aviso_workers.ops import health
from aviso_workers.ops.health import Unknown
from aviso_workers.state.worker_records import AppWorkers, Hindered, WorkerRecord
from tests.ops import health_facts
from tests.ops.health_facts import NOW, ago, worker

HOUR = 3600.0
WITHOUT_AGENT: dict[str, Any] = {"agents": {}, "hindrances": (Hindered(agent="", text="cannot lead", seconds=60),)}


def of_code(name: str, code: str, *, started: float = HOUR) -> WorkerRecord:
    """A worker that lives, has started so many seconds ago and runs this code."""
    return structs.replace(worker(name, started=started), code=code)


def lost(name: str, *, heard: float, started: float = 2 * HOUR) -> WorkerRecord:
    """A worker that said something so many seconds ago last."""
    return structs.replace(worker(name, started=started), said=ago(heard), key=f"host.1.{name}")


def states(*living: WorkerRecord, lost: tuple[WorkerRecord, ...] = ()) -> dict[str, tuple[str, bool]]:
    """The state of each worker by its name, and whether it needs somebody."""
    found = health.judge_workers("field", AppWorkers(living, lost), {}, now=NOW)
    return {each.name: (judgement.state, judgement.needs) for each, judgement in found}


@pytest.mark.parametrize(
    ("living", "state", "needs", "why"),
    [
        ((), "at rest", False, ""),
        ((of_code("w1", "v1"),), "runs", False, ""),
        ((of_code("w1", "v1"), of_code("w2", "v1", started=5)), "runs", False, ""),
        ((of_code("w1", "v1"), of_code("w2", "")), "runs", False, ""),
        (
            (of_code("w2", "v2", started=899), of_code("w1", "v1")),
            "deploying",
            False,
            "2 versions run: v1 on w1, v2 on w2",
        ),
        (
            (of_code("w2", "v2", started=901), of_code("w1", "v1")),
            "several versions",
            True,
            "2 versions run: v1 on w1, v2 on w2",
        ),
        (
            # that one of both has restarted ends nothing
            (of_code("w1", "v1"), of_code("w2", "v2", started=HOUR / 2), of_code("w3", "v2", started=5)),
            "several versions",
            True,
            "2 versions run: v1 on w1, v2 on w2 and 1 more",
        ),
        (
            (of_code("w1", "v1"), of_code("w2", "v2", started=1000), of_code("w3", "v3", started=5)),
            "several versions",
            True,
            "3 versions run: v1 on w1, v2 on w2, v3 on w3",
        ),
    ],
)
def test_an_app_is_said_to_be_what_it_is(living: tuple[WorkerRecord, ...], state: str, needs: bool, why: str) -> None:
    found = health.judge_app(AppWorkers(living), now=NOW)
    assert (found.state, found.needs, found.why, found.is_trouble) == (state, needs, why, needs)


def test_versions_run_side_by_side_since_the_second_one_began() -> None:
    living = (of_code("w1", "v1"), of_code("w2", "v2", started=2000), of_code("w3", "v2", started=1000))
    assert health.judge_app(AppWorkers(living), now=NOW).since == ago(2000)


@pytest.mark.parametrize(
    ("living", "gone", "expected"),
    [
        ((worker("w1"),), (), {"w1": ("ready", False)}),
        ((worker("w1", hindered=(60, "a call is stuck")),), (), {"w1": ("hindered", True)}),
        ((worker("w1", hindered=(5, "a call is stuck")),), (), {"w1": ("hindered", False)}),
        ((structs.replace(worker("w1"), hindrances=None),), (), {"w1": ("lives", False)}),
        # it may say more soon, as when a server was away
        ((worker("w1"),), (lost("w2", heard=100),), {"w1": ("ready", False), "w2": ("lost", False)}),
        ((worker("w1"),), (lost("w2", heard=300),), {"w1": ("ready", False), "w2": ("lost", True)}),
        ((), (lost("w2", heard=300),), {"w2": ("lost", True)}),
        (
            (worker("w1", started=265),),
            (lost("w2", heard=300),),
            {"w1": ("ready", False), "w2": ("replaced", False)},
        ),
        # it may have started before the other one was killed, which lived for up to 30 s after its last record
        (
            (worker("w1", started=290),),
            (lost("w2", heard=300),),
            {"w1": ("ready", False), "w2": ("lost", True)},
        ),
        (
            (worker("w3", started=290), worker("w4", started=200)),
            (lost("w2", heard=300),),
            {"w3": ("ready", False), "w4": ("ready", False), "w2": ("replaced", False)},
        ),
        # one that starts is in the place of one
        (
            (worker("w1", started=200),),
            (lost("w2", heard=400), lost("w3", heard=300)),
            {"w1": ("ready", False), "w2": ("replaced", False), "w3": ("lost", True)},
        ),
        # the second one was in the place of the first one, and was killed too
        (
            (worker("w3", started=200),),
            (lost("w1", heard=600), lost("w2", heard=300, started=500)),
            {"w3": ("ready", False), "w1": ("replaced", False), "w2": ("replaced", False)},
        ),
        (
            (),
            (lost("w1", heard=600), lost("w2", heard=300, started=500)),
            {"w1": ("replaced", False), "w2": ("lost", True)},
        ),
    ],
)
def test_a_worker_is_said_to_be_what_it_is(
    living: tuple[WorkerRecord, ...], gone: tuple[WorkerRecord, ...], expected: dict[str, tuple[str, bool]]
) -> None:
    assert states(*living, lost=gone) == expected


@pytest.mark.parametrize(
    ("place", "state"),
    [
        ({}, "replaced"),
        ({"member": "w2"}, "lost"),
        ({"host": "elsewhere"}, "lost"),
    ],
)
def test_one_that_a_supervisor_starts_again_at_once_is_replaced(place: dict[str, str], state: str) -> None:
    """A supervisor starts it on the same host and, in a fleet, by the same name."""
    other = structs.replace(worker("w1", started=299), **{"process": 2, **place})
    workers = AppWorkers((other,), (lost("w1", heard=300),))
    (_, found) = health.judge_workers("field", workers, {}, now=NOW)
    assert found[1].state == state


def test_one_that_was_replaced_stays_so_when_the_app_is_stopped_in_order() -> None:
    ended = structs.replace(worker("w1", started=200), ended=True)
    workers = AppWorkers(lost=(lost("w2", heard=300),), ended=(ended,))
    ((_, found),) = health.judge_workers("field", workers, {}, now=NOW)
    assert (found.state, found.needs) == ("replaced", False)


@pytest.mark.parametrize(
    ("workers", "consumer", "state"),
    [
        (AppWorkers(lost=(lost("w2", heard=300),)), {"num_waiting": 1, "quiet": 400}, "unknown"),
        (AppWorkers(lost=(lost("w2", heard=300),)), {"num_waiting": 0, "quiet": 200}, "unknown"),
        # what it did itself before it was killed
        (AppWorkers(lost=(lost("w2", heard=300),)), {"num_waiting": 0, "quiet": 280}, "lost"),
        (AppWorkers((worker("w1"),), (lost("w2", heard=300),)), {"num_waiting": 1}, "lost"),
        (
            AppWorkers(lost=(lost("w2", heard=300),), ended=(lost("w1", heard=200),)),
            {"num_waiting": 0, "quiet": 201},
            "lost",
        ),
    ],
)
def test_none_is_known_to_be_lost_while_workers_run_that_do_not_record_themselves(
    workers: AppWorkers, consumer: dict[str, Any], state: str
) -> None:
    consumers = {("MARS", "field__index"): health_facts.consumer(**consumer)}
    found = health.judge_workers("field", workers, consumers, now=NOW)[-1][1]
    assert (found.state, found.needs) == (state, True)
    assert ("`$KV.field__live.>`" in found.cure) == (state == "unknown")
    others = {("MARS", "other__index"): health_facts.consumer()}
    assert health.judge_workers("field", workers, others, now=NOW)[-1][1].state == "lost"


def test_a_lost_worker_is_said_with_its_time_and_its_host_and_how_to_forget_it() -> None:
    gone = structs.replace(lost("w2", heard=300), key="h'; rm -rf /")
    ((_, found),) = health.judge_workers("field", AppWorkers(lost=(gone,)), {}, now=NOW)
    assert (found.why, found.since) == ("killed or cut off within 30 s after 2026-11-29T11:55:00Z, on host", ago(300))
    assert "`nats kv del field__live 'h'\"'\"'; rm -rf /'`" in found.cure


def test_a_hindered_worker_is_said_by_what_hinders_it_longest() -> None:
    both = (Hindered(agent="", text="cannot lead", seconds=5), Hindered(agent="index", text="denied", seconds=60))
    found = health.judge_worker(structs.replace(worker(), hindrances=both), now=NOW)
    assert (found.why, found.also, found.since) == ("denied", ("cannot lead",), ago(60))


def test_what_is_in_trouble_is_told_but_for_what_agents_say_of_themselves() -> None:
    apps = {
        "field": AppWorkers((of_code("w1", "v1"), of_code("w2", "v2")), (lost("w3", heard=300),)),
        "hindered": AppWorkers((worker("w1", hindered=(60, "a call is stuck")),)),
        "timers": AppWorkers((structs.replace(worker("w1"), **WITHOUT_AGENT),)),
        "well": AppWorkers((worker("w1", started=5),), (lost("w2", heard=300),)),
    }
    found = [(app, name, each.state) for app, name, each in health.worker_troubles(apps, {}, now=NOW)]
    assert found == [
        ("field", "all workers", "several versions"),
        ("field", "worker w3", "lost"),
        ("timers", "worker w1", "hindered"),
    ]
    assert [*health.worker_troubles(Unknown("denied"), {}, now=NOW)] == []


def test_each_agent_in_trouble_has_a_cure_and_no_other_has_one() -> None:
    """So that the cure tells a trouble from a calm state."""
    assert health.CURES.keys() == {health.UNKNOWN, *health.BY_NAME}
    assert all(health.CURES.values())
    assert not health.judge(health_facts.facts()).is_trouble
    assert health.judge(health_facts.facts(events=Unknown("denied"))).is_trouble
