"""The policies of streams: those of event types and of the section `streams`, with the consumers declared for them.

As configured, as they are on the server, and the way from one to the other. Called by `streams plan|apply|show`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct

from aviso_workers.backends import Admin, StreamInfo
from aviso_workers.backends.provisioning import Provisioner
from aviso_workers.config import Config, streams
from aviso_workers.config.streams import event_streams
from aviso_workers.errors import RefusedError, UnknownEventTypeError
from aviso_workers.events import Events
from aviso_workers.jetstream import plans as planning
from aviso_workers.jetstream import specs
from aviso_workers.jetstream.fields import as_jetstream, readable
from aviso_workers.jetstream.info import ConsumerConfig
from aviso_workers.jetstream.plans import ConsumerPlan, Plan, Stored
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.ops import inventory

__all__ = ["PolicyRow", "carry_out", "effective_policy", "plans", "sections"]


class PolicyRow(Struct, frozen=True, kw_only=True):
    """One field of a stream's policy, as configured and as it is on the server."""

    field: str
    """Its name in JetStream."""
    key: str
    """The configuration's key for it."""
    configured: str
    """The value that the configuration states; `-` where it leaves the field to the server."""
    effective: str
    """The value that the server has."""
    follows: bool
    """Whether the stream is as configured."""


def sections(config: Config) -> dict[str, str]:
    """Return the section of the configuration in which each stream is configured, by the stream's name."""
    of_events = event_streams(config.notification_schema)
    return dict.fromkeys(config.streams, "streams") | dict.fromkeys(of_events, "notification_schema")


async def plans(admin: Admin, config: Config) -> list[Plan | ConsumerPlan]:
    """Return the plans for all configured streams, each followed by those for its consumers.

    Raises `BackendError`.
    """
    provisioner = _provisioner(admin, config)
    found: list[Plan | ConsumerPlan] = []
    for spec in _specs(config):
        found.append(await provisioner.plan(spec))
        declared = config.streams.get(spec.name)
        for name, consumer in declared.consumers.items() if declared else ():
            info = await inventory.existing(admin.consumer_info(spec.name, name))
            at_server = dict(info.config) if info else None
            found.append(planning.consumer_plan(spec.name, name, as_jetstream(consumer), at_server))
    return found


def differences(config: Config, found: Mapping[str, StreamInfo]) -> dict[str, list[str]]:
    """Return how the configured streams among these differ from the configuration, by name, in words; those that do not
    are left out. How many messages an update would remove is not asked for.
    """
    plans = [planning.plan(spec, found[spec.name].config, Stored()) for spec in _specs(config) if spec.name in found]
    return {
        plan.stream: [str(each) for each in (*plan.differences, *plan.removing, *plan.fixed)]
        for plan in plans
        if plan.needed or plan.fixed
    }


async def carry_out(admin: Admin, config: Config, plan: Plan | ConsumerPlan, *, removals: bool = False) -> None:
    """Carry out a plan as far as possible; stored messages are removed only with `removals`.

    A stream is planned again, because it may have changed since. Raises `RefusedError` where the server refuses, and
    where stored messages would be removed without `removals`: then nothing is done.
    """
    if isinstance(plan, Plan):
        provisioner = _provisioner(admin, config)
        plan = await provisioner.plan(plan.wanted)
        if plan.removing and not removals:
            differences = "; ".join(map(str, plan.removing))
            raise RefusedError(f"stream {plan.stream}: {differences}; add --yes to make this change")
        await provisioner.carry_out(planning.with_removals(plan))
    elif plan.needed:
        await _carry_out_consumer(admin, plan)


async def effective_policy(admin: Admin, config: Config, name: str) -> list[PolicyRow]:
    """Return the policy on the server beside the configured one, of an event type's stream or a declared one.

    Follows Aviso's "Verifying Effective Stream Policy". Raises `NotFoundError` where the stream does not exist,
    `UnknownEventTypeError` where none is configured under that name.
    """
    spec = _spec(config, name)
    info = await admin.stream_info(spec.name)
    plan = planning.plan(spec, info.config, Stored())
    differing = {difference.field for difference in (*plan.differences, *plan.fixed)}
    configured = specs.stated(spec)
    return [
        PolicyRow(
            field=field,
            key=key,
            configured=readable(field, configured[field]) if field in configured else "-",
            effective=readable(field, info.config.get(field)),
            follows=field not in differing,
        )
        for field, key in _keys(config, spec, name)
    ]


def _provisioner(admin: Admin, config: Config) -> Provisioner:
    return Provisioner(admin, management=config.notification_backend.jetstream.stream_management, events=Events())


def _specs(config: Config) -> list[StreamSpec]:
    """Return the streams of event types, then those that are declared beyond them."""
    event_types = config.notification_schema.items()
    return [
        *(streams.event_stream(name, event_type, config) for name, event_type in event_types),
        *streams.declared(config),
    ]


def _keys(config: Config, spec: StreamSpec, name: str) -> Iterator[tuple[str, str]]:
    """Yield the fields to show, each with the key where it is configured."""
    if name in config.notification_schema:
        yield from ((field, key) for field, key in streams.SHOWN.items() if field not in spec.further)
    yield from ((field, f"streams.{spec.name}.{field}") for field in spec.further)


def _spec(config: Config, name: str) -> StreamSpec:
    event_types = config.notification_schema
    if name in event_types:
        return streams.event_stream(name, event_types[name], config)
    declared = {spec.name: spec for spec in streams.declared(config)}
    if name not in declared:
        raise UnknownEventTypeError(name, event_types)
    return declared[name]


async def _carry_out_consumer(admin: Admin, plan: ConsumerPlan) -> None:
    config, filter_in_subject = ConsumerConfig(plan.config), ""
    if not plan.exists and len(config.filters) == 1:
        # Where it is part of the subject, permissions can be given by filter.
        [filter_in_subject] = config.filters
        del config["filter_subjects"]
        config["filter_subject"] = filter_in_subject
    await admin.put_consumer(
        plan.stream,
        plan.consumer,
        config,
        action="update" if plan.exists else "create",
        filter_in_subject=filter_in_subject,
    )
    if plan.exists and "pause_until" in {difference.field for difference in plan.differences}:
        # An update leaves it as it is.
        await admin.pause_consumer(plan.stream, plan.consumer, until=config.pause_until)
