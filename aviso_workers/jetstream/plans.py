"""The way from what a server has to what is wanted of it.

Pure: `backends.provisioning` carries a stream's plan out, `ops.stream_policy` a consumer's. Configurations are
JetStream's own JSON; what is known of their fields is in `fields`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct, structs

from aviso_workers.jetstream import fields, metadata, specs
from aviso_workers.jetstream.fields import CONSUMER, DEFAULT_DUPLICATE_WINDOW, STREAM, Field
from aviso_workers.jetstream.info import ConsumerConfig
from aviso_workers.jetstream.specs import PRIORITIZED, ConsumerSpec, StreamSpec

LIMITS = tuple(name for name, each in STREAM.items() if each.kind == "limit" or name == "max_age")
PRIORITY = frozenset({"priority_policy", "priority_groups", "priority_timeout"})
STARTING = frozenset({"deliver_policy", "opt_start_seq", "opt_start_time", "metadata"})
"""The fields that say where a consumer begins: told apart by what was declared, not by what became of that."""
UPDATABLE = frozenset(
    name for name in ConsumerSpec.__struct_fields__ if name in CONSUMER and CONSUMER[name].change == "always"
)
"""The consumer fields that we state and that a server lets change."""
SEALING = frozenset({"allow_rollup_hdrs", "deny_delete", "deny_purge", "discard", "max_age"})
"""The fields that a server sets when a stream is sealed. It ignores what an update says of them, without an error."""
SEALED = (
    "a sealed stream takes no publish any more, and cannot be opened: copy it (`aviso-workers streams copy STREAM "
    "--to-config FILE --as NAME`), remove it (`aviso-workers streams rm STREAM`), and run `aviso-workers streams apply`"
)


class Stored(Struct, frozen=True, kw_only=True):
    """The messages that a stream stores, as far as it tells what a change of its limits would remove."""

    messages: int = 0
    bytes: int = 0
    subjects: int = 0
    """How many subjects the messages have."""
    consumers: int = 0
    older: int | None = None
    """Messages that are older than the wanted `max_age`; None where nobody has counted them."""


Precision = Literal["", "about ", "up to "]


class Removal(Struct, frozen=True):
    """How many of its stored messages a stream would lose by a change."""

    count: int
    of: int
    precision: Precision = ""

    def __str__(self) -> str:
        return f"removes {self.precision}{self.count} of {self.of} messages"


class Difference(Struct, frozen=True, kw_only=True):
    field: str
    found: Any
    wanted: Any
    cure: str = ""
    """Why a server does not change the field, and what to do about it; empty where it does."""
    removal: Removal | None = None
    """The stored messages that the change would remove."""

    def __str__(self) -> str:
        change = (
            f"{self.field}: {fields.readable(self.field, self.found)} -> {fields.readable(self.field, self.wanted)}"
        )
        if self.cure:
            return f"{change}; {self.cure}"
        if self.removal:
            return f"{change}, which {self.removal}"
        return f"{change}, for good" if _is_for_good(self.field) and self.wanted else change


class _Step(Struct, frozen=True, kw_only=True):
    """The step that has to be done: create, update to `config`, or nothing where there is no difference."""

    exists: bool
    config: Mapping[str, Any]
    """The whole configuration to send; unknown fields of the server's are in it unchanged."""
    differences: tuple[Difference, ...] = ()
    """The fields that an update changes."""
    fixed: tuple[Difference, ...] = ()
    """The fields that no update changes. Where there is some before it exists, it cannot be created."""
    removing: tuple[Difference, ...] = ()
    """The changes of a stream that would remove stored messages: `config` is without them; see `with_removals`."""
    unstated: tuple[str, ...] = ()
    """Of a stream: the limits that the stream has and the configuration does not state: it keeps them."""
    fenced: bool = False
    """Of a stream: another stream has taken its place: nothing is applied, and using it is an error."""
    unfinished: bool = False
    """Of a stream: a restore of it is under way, or was killed: nothing is applied, and it cannot be used yet."""

    @property
    def needed(self) -> bool:
        return bool(self.differences) if self.exists else not self.fixed


class Plan(_Step, frozen=True, kw_only=True):
    """The plan for a stream."""

    wanted: StreamSpec

    @property
    def stream(self) -> str:
        return self.wanted.name

    @property
    def storage_mismatch(self) -> bool:
        """Storage cannot be changed: nothing else is applied, and using the stream is an error."""
        return self._is_fixed("storage")

    @property
    def sealed(self) -> bool:
        """The stream is sealed, and the configuration does not say so: it takes no publish."""
        return self._is_fixed("sealed")

    @property
    def needed(self) -> bool:
        return (super().needed or bool(self.removing)) and not self.storage_mismatch

    def _is_fixed(self, field: str) -> bool:
        return self.exists and any(difference.field == field for difference in self.fixed)


class ConsumerPlan(_Step, frozen=True, kw_only=True):
    """The plan for a declared consumer."""

    stream: str
    consumer: str


def plan(wanted: StreamSpec, found: Mapping[str, Any] | None, stored: Stored) -> Plan:
    """Return the way from the configuration that a server reports (None: no such stream) to the wanted one.

    What would remove some of what is stored is told apart, as `removing`: a stream is shared, and what one
    configuration does not want to keep, others may.
    """
    asked = _asked(wanted)
    if found is None:
        return Plan(wanted=wanted, exists=False, config=_asked(wanted, whole=True), fixed=_not_when_created(asked))
    if metadata.FENCED in (found.get("metadata") or {}):
        return Plan(wanted=wanted, exists=True, config=found, fenced=True)
    if metadata.is_unfinished(found):
        return Plan(wanted=wanted, exists=True, config=found, unfinished=True)
    cure = _stream_cure
    if found.get("sealed") and asked.get("sealed"):
        asked = {name: value for name, value in asked.items() if name not in SEALING}
    elif found.get("sealed"):
        asked, cure = {"sealed": False, **asked}, _sealed_cure
    differences, fixed = _told_apart(_differences(asked, found), cure)
    # Judged together: whether a lower limit removes messages depends on `discard`, which may differ as well.
    whole, _ = _updated(found, differences, asked)
    judged = [structs.replace(each, removal=_removal(each, whole, stored)) for each in differences]
    harmless = tuple(each for each in judged if each.removal is None)
    config, harmless = _updated(found, harmless, asked)
    removing = tuple(each for each in judged if each.removal is not None)
    return Plan(
        wanted=wanted,
        exists=True,
        config=specs.with_notes(config, wanted, stated=asked),
        differences=harmless,
        fixed=fixed,
        removing=removing,
        unstated=tuple(
            limit for limit in LIMITS if limit not in asked and fields.something(found.get(limit)) not in (None, -1)
        ),
    )


def with_removals(plan: Plan) -> Plan:
    """Return the plan that also does what removes stored messages."""
    config, added = _updated(plan.config, plan.removing, _asked(plan.wanted))
    return structs.replace(plan, config=config, differences=(*plan.differences, *added), removing=())


def shorter_age(wanted: StreamSpec, found: Mapping[str, Any]) -> int | None:
    """Return the wanted `max_age` in nanoseconds, where that is shorter than the stream's."""
    age, current = _asked(wanted).get("max_age"), found.get("max_age")
    return age if age and (not current or age < current) else None


def consumer_plan(stream: str, name: str, wanted: Mapping[str, Any], found: Mapping[str, Any] | None) -> ConsumerPlan:
    """Return what has to be done for a consumer of which these fields are stated."""
    if found is None:
        # Left to a server, nothing would be acknowledged.
        config = {"durable_name": name, "name": name, "ack_policy": "explicit", **wanted}
        return ConsumerPlan(stream=stream, consumer=name, exists=False, config=config)
    found = {**found, "filter_subjects": ConsumerConfig(found).filters}
    found.pop("filter_subject", None)  # of the two, a server takes one
    differences, fixed = _told_apart(_differences(wanted, found), _consumer_cure)
    config = {**found, **{difference.field: difference.wanted for difference in differences}}
    return ConsumerPlan(stream=stream, consumer=name, exists=True, config=config, differences=differences, fixed=fixed)


def consumer_differences(wanted: ConsumerSpec, found: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Return where a consumer, as a server reports it, is not as wanted. What is in `UPDATABLE` can be updated."""
    found = {**found, "filter_subjects": ConsumerConfig(found).filters}
    start = _start_differs(wanted, found)
    passed_over = STARTING
    if wanted.priority_policy == "none" and found.get("priority_policy") == PRIORITIZED:
        passed_over |= PRIORITY  # another worker's wish, which changes nothing for those that are near
    asked = {name: value for name, value in msgspec.to_builtins(wanted).items() if name not in passed_over}
    known = found.get("metadata") or {}
    kept = {name for name in known if name.startswith(specs.MONITORING)}  # an operator may have set another threshold
    if noted := {name: text for name, text in (wanted.metadata or {}).items() if name not in {metadata.START, *kept}}:
        asked["metadata"] = noted
    return (*_differences(asked, found), *([start] if start else ()))


def _start_differs(wanted: ConsumerSpec, found: Mapping[str, Any]) -> Difference | None:
    stated = wanted.metadata or {}
    begin = stated.get(metadata.START, wanted.deliver_policy)
    known = (found.get("metadata") or {}).get(metadata.START, found.get("deliver_policy"))
    if known == "":
        noted = found.get("metadata") or {}
        return Difference(field="metadata", found=noted, wanted={**noted, **stated})
    return Difference(field="start", found=known, wanted=begin) if known != begin else None


def _asked(wanted: StreamSpec, *, whole: bool = False) -> dict[str, Any]:
    """Return what is asked of a stream; `whole`: also what `nats server check` reads, as it is created."""
    stated = specs.stated(wanted if whole else structs.replace(wanted, monitored=False, read_as={}))
    return {name: fields.normalised(name, value) for name, value in stated.items()}


def _updated(
    found: Mapping[str, Any], differences: tuple[Difference, ...], stated: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[Difference, ...]]:
    """Return the configuration with these differences applied, and they with what follows from them."""
    config = {**found, **{difference.field: difference.wanted for difference in differences}}
    shrunk = _shrunk_duplicate_window(config, stated)
    if shrunk is None:
        return config, differences
    return {**config, shrunk.field: shrunk.wanted}, (*differences, shrunk)


def _removal(difference: Difference, config: Mapping[str, Any], stored: Stored) -> Removal | None:
    """Return what the difference removes of what is stored, when the stream is updated to this configuration.

    As a nats-server 2.15 was seen to do it: a limit of messages or bytes removes nothing while `discard` is `new`, one
    per subject always does, and `interest` removes what no consumer waits for.
    """
    limit = difference.wanted
    precision: Precision = ""
    match difference.field:
        case "max_msgs" | "max_bytes" | "discard" if config.get("discard") == "new":
            return None
        case "max_msgs":
            count = _beyond_messages(config, stored)
        case "max_bytes":
            count, precision = _beyond_bytes(config, stored), "about "
        case "discard":
            count, precision = max(_beyond_messages(config, stored), _beyond_bytes(config, stored)), "about "
        case "max_msgs_per_subject" if limit > 0 and not 0 < difference.found < limit:
            # At most so many, when all that is beyond one per subject is of a single one.
            count, precision = stored.messages - stored.subjects + 1 - limit, "" if limit == 1 else "up to "
        case "max_age" if limit and not 0 < difference.found < limit:
            count, precision = (stored.messages, "up to ") if stored.older is None else (stored.older, "")
        case "retention" if limit == "interest":
            count, precision = stored.messages, "up to " if stored.consumers else ""
        case _:
            return None
    return Removal(count, stored.messages, precision) if count > 0 else None


def _beyond_messages(config: Mapping[str, Any], stored: Stored) -> int:
    limit = config.get("max_msgs") or -1
    return stored.messages - limit if limit > 0 else 0


def _beyond_bytes(config: Mapping[str, Any], stored: Stored) -> int:
    """Return about how many messages of the mean size are in the bytes beyond the limit."""
    limit = config.get("max_bytes") or -1
    if limit <= 0 or not stored.messages:
        return 0
    return math.ceil(stored.messages * (stored.bytes - limit) / stored.bytes)


def _differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[Difference, ...]:
    whole = {**wanted}
    if "metadata" in wanted:  # what others noted there stays
        whole["metadata"] = {**(found.get("metadata") or {}), **wanted["metadata"]}
    return tuple(
        Difference(
            field=name,
            found=fields.normalised(name, found.get(name)),
            wanted=fields.normalised(name, value),
        )
        for name, value in whole.items()
        if fields.comparable(name, found.get(name)) != fields.comparable(name, value)
    )


def _told_apart(
    differences: tuple[Difference, ...], cure: Callable[[Difference], str]
) -> tuple[tuple[Difference, ...], tuple[Difference, ...]]:
    """Return the differences that an update changes, and those that none does, with their cure."""
    cured = [structs.replace(difference, cure=cure(difference)) for difference in differences]
    return tuple(each for each in cured if not each.cure), tuple(each for each in cured if each.cure)


def _stream_cure(difference: Difference) -> str:
    field, found, wanted = difference.field, difference.found, difference.wanted
    if _is_for_good(field) and not wanted:
        return f"what is on stays on: leave {field} out, or delete the stream"
    if field == "mirror" and not found:
        return "it takes publishes, as after a promotion: leave mirror out, or delete the stream"
    if _is_of_creation(STREAM, field) or (field == "retention" and "workqueue" in (found, wanted)):
        return f"{field} is chosen when a stream is created: set what it has, or delete the stream"
    return ""


def _sealed_cure(difference: Difference) -> str:
    if difference.field == "sealed":
        return SEALED
    return "the stream is sealed" if difference.field in SEALING else _stream_cure(difference)


def _consumer_cure(difference: Difference) -> str:
    field, found, wanted = difference.field, difference.found, difference.wanted
    turned = field == "deliver_subject" and not (found and wanted)
    if not _is_of_creation(CONSUMER, field) and not turned:
        return ""
    return f"{field} is chosen when a consumer is created: set what it has, or remove it, and a new one begins again"


def _is_for_good(field: str) -> bool:
    return field in STREAM and STREAM[field].change == "only on"


def _is_of_creation(table: Mapping[str, Field], field: str) -> bool:
    return field in table and table[field].change == "when created"


def _not_when_created(asked: Mapping[str, Any]) -> tuple[Difference, ...]:
    if not asked.get("sealed"):
        return ()
    cure = "no stream is created sealed: leave sealed out, and seal the stream when it holds what it is to hold"
    return (Difference(field="sealed", found=None, wanted=True, cure=cure),)


def _shrunk_duplicate_window(config: Mapping[str, Any], stated: Mapping[str, Any]) -> Difference | None:
    """Return what the age changes too: a server refuses a duplicate window above max_age."""
    max_age = config.get("max_age") or 0
    window = config.get("duplicate_window") or DEFAULT_DUPLICATE_WINDOW
    if "max_age" not in stated or not max_age or window <= max_age or config.get("mirror"):
        return None
    return Difference(field="duplicate_window", found=window, wanted=max_age)
