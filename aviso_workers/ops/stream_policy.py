"""The policies of streams: those of event types and of the section `streams`, with the consumers declared for them.

As configured, as they are on the server, and the way from one to the other. Called by `streams plan|apply|show`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import aclosing, suppress

from msgspec import Struct, structs

from aviso_workers.backends import Admin, StreamInfo
from aviso_workers.backends.provisioning import Provisioner
from aviso_workers.config import Config, streams
from aviso_workers.config.streams import event_streams
from aviso_workers.errors import NotFoundError, RefusedError, UnknownEventTypeError
from aviso_workers.events import Events
from aviso_workers.jetstream import plans as planning
from aviso_workers.jetstream import specs
from aviso_workers.jetstream.fields import as_jetstream, readable
from aviso_workers.jetstream.info import ConsumerConfig, StreamConfig
from aviso_workers.jetstream.plans import ConsumerPlan, Difference, Plan, Stored
from aviso_workers.jetstream.specs import KEY_ORDER, KEY_RULES, StreamSpec
from aviso_workers.ops import agent_inventory, inventory
from aviso_workers.ops.dead_letters import Selection, StoredDeadLetters
from aviso_workers.state import delayed_messages

READ_AS = {KEY_ORDER: "key_order", KEY_RULES: "identifier"}
"""By the metadata of a stream, the key of the configuration that says it."""


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


async def plans(admin: Admin, config: Config, own: Iterable[StreamSpec] = ()) -> list[Plan | ConsumerPlan]:
    """Return the plans for all configured streams, each followed by those for its consumers, and for `own` ones
    (`permissions`), which are created, or get replicas. Those of delayed notifications are left out where the server
    is too old to keep these.

    Raises `BackendError`.
    """
    provisioner = _provisioner(admin, config)
    found: list[Plan | ConsumerPlan] = []
    for spec in _specs(config):
        found.append(await _planned(admin, provisioner, spec))
        declared = config.streams.get(spec.name)
        for name, consumer in declared.consumers.items() if declared else ():
            info = await inventory.existing(admin.consumer_info(spec.name, name))
            at_server = dict(info.config) if info else None
            found.append(planning.consumer_plan(spec.name, name, as_jetstream(consumer), at_server))
    for spec in own:
        if delayed_messages.event_stream_of(spec.name) and not delayed_messages.is_served(admin):
            continue  # nothing waits on a server that is too old
        planned = await provisioner.plan(spec)
        if planned.exists:  # the rest is up to the workers, one of which may need more
            planned = await provisioner.plan(StreamSpec(name=spec.name, num_replicas=spec.num_replicas))
            planned = structs.replace(planned, unstated=())
        found.append(planned)
    return found


def differences(config: Config, found: Mapping[str, StreamInfo]) -> dict[str, list[str]]:
    """Return how the configured streams among these differ from the configuration, by name, in words; those that do not
    are left out. How many messages an update would remove is not asked for.
    """
    return {
        plan.stream: [str(each) for each in (*plan.differences, *plan.removing, *plan.fixed)]
        for plan in _plans_of(config, found)
        if plan.needed or plan.fixed
    }


def sealed(config: Config, found: Mapping[str, StreamInfo]) -> frozenset[str]:
    """Return the names of those of these streams that are sealed, and are to take publishes by the configuration."""
    return frozenset(plan.stream for plan in _plans_of(config, found) if plan.sealed)


async def carry_out(
    admin: Admin, config: Config, plan: Plan | ConsumerPlan, *, removals: bool = False
) -> tuple[Difference, ...]:
    """Carry out a plan as far as possible, read back what is stored, and return how that still differs. Stored messages
    are removed only with `removals`.

    A stream is planned again, because it may have changed since. Raises `RefusedError` where the server refuses, and
    where stored messages would be removed without `removals`: then nothing is done.
    """
    if isinstance(plan, ConsumerPlan):
        return await _carry_out_consumer(admin, plan)
    provisioner = _provisioner(admin, config)
    plan = await _planned(admin, provisioner, plan.wanted)
    if plan.removing and not removals:
        differences = "; ".join(map(str, plan.removing))
        raise RefusedError(f"stream {plan.stream}: {differences}; add --yes to make this change")
    await provisioner.carry_out(planning.with_removals(plan))
    stored = await _planned(admin, provisioner, plan.wanted)
    return (*stored.differences, *stored.removing, *stored.fixed)


async def _planned(admin: Admin, provisioner: Provisioner, spec: StreamSpec) -> Plan:
    """Return the plan for a stream, with the order and the spelling in which its subjects have the values of
    identifiers, if it says none or another one. That is changed only where nothing has been stored with the other one:
    see `engine.key_orders`.
    """
    plan = await provisioner.plan(spec)
    if not (plan.exists and spec.read_as) or plan.fenced or plan.unfinished:
        return plan
    info = await admin.stream_info(spec.name)
    noted = {key: info.config.metadata.get(key, "") for key in spec.read_as}
    if noted == spec.read_as:
        return plan
    cure = await _why_kept(admin, info) if specs.read_otherwise(noted, spec.read_as) else ""
    differing = tuple(
        Difference(field=READ_AS[key], found=noted[key] or "none", wanted=wanted, cure=cure)
        for key, wanted in spec.read_as.items()
        if noted[key] != wanted
    )
    if cure:
        return structs.replace(plan, fixed=(*plan.fixed, *differing))
    config = {**plan.config, "metadata": {**StreamConfig(plan.config).metadata, **spec.read_as}}
    return structs.replace(plan, config=config, differences=(*plan.differences, *differing))


async def _why_kept(admin: Admin, info: StreamInfo) -> str:
    """Return what is stored with the order that a stream says, or uses it, and what to do; empty where nothing does."""
    stream = info.name
    if info.messages:
        return f"{info.messages} notifications were stored with it: purge the stream"
    with suppress(NotFoundError):
        if count := await admin.count(delayed_messages.stream_of(stream), filter_subjects=()):
            return f"{count} delayed notifications wait for the stream: cancel them"
    async with aclosing(StoredDeadLetters(admin, events=Events()).select(Selection(stream=stream))) as dead_letters:
        if await anext(dead_letters, None) is not None:
            return "there are dead letters of the stream: drop them"
    for (app, agent), consumer in (await agent_inventory.agents(admin, stream)).items():
        if consumer.num_waiting:
            return f"workers of agent {agent} of app {app} read the stream: stop them"
    for (app, agent), consumer in (await agent_inventory.retries(admin)).items():
        if consumer.num_pending or consumer.num_ack_pending:
            return f"agent {agent} of app {app} has dead letters that are retried: let it handle them first"
    return ""


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
        for field, key in (*_keys(config, spec, name), *([("sealed", f"streams.{spec.name}")] if plan.sealed else []))
    ]


def _provisioner(admin: Admin, config: Config) -> Provisioner:
    return Provisioner(admin, management=config.notification_backend.jetstream.stream_management, events=Events())


def _plans_of(config: Config, found: Mapping[str, StreamInfo]) -> Iterator[Plan]:
    for spec in _specs(config):
        if spec.name in found:
            yield planning.plan(spec, found[spec.name].config, Stored())


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


async def _carry_out_consumer(admin: Admin, plan: ConsumerPlan) -> tuple[Difference, ...]:
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
    stored = (await admin.consumer_info(plan.stream, plan.consumer)).config
    wanted = {each.field: each.wanted for each in plan.differences} if plan.exists else plan.config
    return planning.consumer_plan(plan.stream, plan.consumer, wanted, stored).differences
