"""When a version of an agent counts as gone, in virtual time."""

from __future__ import annotations

import anyio
import pytest

from aviso_workers.backends import Backend
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.engine.provisioning import Provisioner
from aviso_workers.engine.shared_filters import GONE_SECONDS, LOOK_SECONDS, SharedFilter
from aviso_workers.events import Events, FiltersDiffer
from aviso_workers.streams import ConsumerSpec, StreamSpec

pytestmark = pytest.mark.anyio

NARROW = ("mars.od.>",)
WIDE = ("mars.od.>", "mars.rd.>")


def worker(backend: Backend, filters: tuple[str, ...], stated: list[FiltersDiffer]) -> SharedFilter:
    events = Events()
    events.listen(stated.append, FiltersDiffer)
    return SharedFilter(
        ConsumerSpec(durable_name="agent", filter_subjects=filters, ack_wait=10**9, max_ack_pending=10),
        agent="agent",
        stream="MARS",
        backend=backend,
        provisioner=Provisioner(backend, management="reconcile", events=events),
        events=events,
    )


async def filters_of(backend: Backend) -> tuple[str, ...]:
    return tuple((await backend.consumer_info("MARS", "agent")).config["filter_subjects"])


@pytest.fixture(autouse=True)
async def mars(backend: InMemoryBackend) -> None:
    await backend.create_stream(StreamSpec(name="MARS", subjects=("mars.>",)))


async def test_one_that_nobody_runs_is_gone_and_one_that_somebody_runs_is_not(backend: InMemoryBackend) -> None:
    stated: list[FiltersDiffer] = []
    wide, narrow = worker(backend, WIDE, []), worker(backend, NARROW, stated)
    async with anyio.create_task_group() as tasks:
        with anyio.CancelScope() as wide_runs:
            await wide.ensure()
            await narrow.ensure()
            tasks.start_soon(narrow.keep)
            async with anyio.create_task_group() as other:
                other.start_soon(wide.keep)
                await backend.clock.sleep(10 * GONE_SECONDS)
                assert await filters_of(backend) == WIDE
                wide_runs.cancel()

        await backend.clock.sleep(2 * GONE_SECONDS)
        assert await filters_of(backend) == NARROW
        assert [(event.others, event.gone) for event in stated] == [((WIDE,), ()), ((), (WIDE,))]
        tasks.cancel_scope.cancel()


async def test_one_that_was_cut_off_together_with_who_looks_is_not_gone(backend: InMemoryBackend) -> None:
    stated: list[FiltersDiffer] = []
    async with backend.peer() as peer, anyio.create_task_group() as tasks:
        wide, narrow = worker(peer, WIDE, stated), worker(backend, NARROW, stated)
        await wide.ensure()
        await narrow.ensure()
        tasks.start_soon(narrow.keep)
        tasks.start_soon(wide.keep)
        await backend.clock.sleep(GONE_SECONDS)
        backend.disconnect()
        peer.disconnect()
        await backend.clock.sleep(3 * GONE_SECONDS)
        backend.reconnect()
        await backend.clock.sleep(2 * LOOK_SECONDS)
        peer.reconnect()
        await backend.clock.sleep(3 * GONE_SECONDS)
        tasks.cancel_scope.cancel()

    assert await filters_of(backend) == WIDE
    assert [event.gone for event in stated if event.gone] == []
