"""Checks of the configuration and the state of streams."""

from __future__ import annotations

from collections.abc import Iterator

from aviso_workers.aviso.literals import SECOND
from aviso_workers.jetstream import plans, subjects
from aviso_workers.jetstream.info import NEVER, StreamInfo
from aviso_workers.jetstream.metadata import SET_MARK, UNFINISHED
from aviso_workers.jetstream.specs import BUCKET, OURS, stated
from aviso_workers.ops.doctor.facts import Facts
from aviso_workers.ops.doctor.judgements import Declaration, Finding, Found, State, about, each_stream
from aviso_workers.ops.mirrors import STALE_SECONDS
from aviso_workers.state import delayed_messages, own_streams
from aviso_workers.state.own_streams import COUNTERS, DEAD_LETTERS, RETRIES

REPLICAS = 3
NEARLY_FULL, FULL = 0.80, 0.95
MANY_GAPS, GAPS_PER_MESSAGE = 10_000, 10
JETSTREAM = "notification_backend.jetstream"
APPLY = "then run `aviso-workers streams apply`"
OUR_REPLICAS = (
    f"Set {JETSTREAM}.replicas: 3, and start a worker that uses {{stream}} (`aviso-workers worker MODULE:APP`)."
)
DEAD_LETTERS_LIMIT = "Set workers.dead_letters.max_bytes, and start a worker."
DEAD_LETTERS_FULL = (
    "`aviso-workers dead-letters ls` lists the dead letters. `aviso-workers dead-letters retry --app APP` returns them "
    "to their agents, and `aviso-workers dead-letters drop --app APP` erases them. Or raise "
    "workers.dead_letters.max_bytes, and start a worker."
)
RESTORE_SET = "If no restore is running, restore the same set again: `aviso-workers backup restore --all DIRECTORY`."
DECLARED_REPLICAS = f"Set streams.{{stream}}.num_replicas: 3 in the configuration, {APPLY}."
BUCKETS_REPLICAS = f"{OUR_REPLICAS} If no worker uses it: {DECLARED_REPLICAS}"


@Declaration("JS001", each=each_stream, production=True).says(
    "Every stream has a limit of bytes",
    why="A stream without max_bytes can fill the disk, and then all streams of the server refuse messages.",
    cure=f"Set {JETSTREAM}.max_bytes, or the event type's storage_policy.max_size, {APPLY}.",
    cure_of_others="Set streams.{stream}.max_bytes in the configuration, " + APPLY + ".",
)
def unlimited_bytes(stream: StreamInfo, _: Facts) -> Iterator[Found]:
    """Two kinds of stream are not checked: streams of tables, counters and delayed notifications, because no message
    may be removed from them; and the stream of retries, because it has a `max_age` of days.
    """
    if stream.config.max_bytes <= 0 and not _keeps_state(stream) and not own_streams.app_of(RETRIES, stream.name):
        found = f"no max_bytes, {stream.bytes} bytes stored"
        yield about(stream, found, cure=DEAD_LETTERS_LIMIT if _has_dead_letters(stream) else "")


@Declaration("JS002", each=each_stream, production=True).says(
    "Every stream has a limit of age or of messages",
    why="A stream without max_age and max_msgs keeps all messages until max_bytes is reached. Then the server removes "
    "the oldest messages, whatever their age.",
    cure=f"Set {JETSTREAM}.retention_time or max_messages, {APPLY}.",
    cure_of_others="Set streams.{stream}.max_age in the configuration, " + APPLY + ".",
)
def unlimited_age(stream: StreamInfo, _: Facts) -> Iterator[Found]:
    """The stream of dead letters is not checked: dead letters stay until an operator retries or drops them."""
    config = stream.config
    # A dead letter is kept until an operator has dealt with it.
    if not config.max_age and config.max_msgs <= 0 and not _keeps_state(stream) and not _has_dead_letters(stream):
        yield "neither max_age nor max_msgs"


@Declaration("JS003", State.FAIL, each=each_stream, production=True).says(
    "Every stream has three replicas",
    why="A stream with one replica is unavailable while its server is down, and is lost with the disk of that server.",
    cure=f"Set {JETSTREAM}.replicas: 3, {APPLY}.",
    cure_of_others=DECLARED_REPLICAS,
)
def few_replicas(stream: StreamInfo, _: Facts) -> Iterator[Found]:
    """A stream with two replicas needs both servers to elect a leader.

    The streams and buckets of an app's state (retries, dead letters, failure counts, tables, windows, leases) get the
    replicas of the configuration when a worker of the app starts. Workers never reduce these replicas, even if the
    configuration of another app asks for fewer. If the server or a missing right refuses the change, the worker
    continues and logs `stream.update_refused`.
    """
    if stream.config.num_replicas < REPLICAS:
        yield _replicas(stream)


@Declaration("JS004", each=each_stream).says(
    "Every stream has an odd number of replicas",
    why="Four replicas survive the loss of one server, as three do, because a majority of four is three. Two replicas "
    "survive no loss.",
    cure=f"Set {JETSTREAM}.replicas: 3, {APPLY}.",
    cure_of_others=DECLARED_REPLICAS,
)
def even_replicas(stream: StreamInfo, _: Facts) -> Iterator[Found]:
    if stream.config.num_replicas % 2 == 0:
        yield _replicas(stream)


@Declaration("JS005", State.FAIL, each=each_stream, production=True).says(
    "Every stream is stored on disk",
    why="A stream in memory is lost when all its servers stop, also when an operator stops them.",
    cure="The storage of a stream cannot be changed. Back up the stream (`aviso-workers backup create {stream} --to "
    "DIRECTORY`), remove the stream (`aviso-workers streams rm {stream}`), and run `aviso-workers backup restore "
    "DIRECTORY/{stream}/TIME --storage file`.",
)
def in_memory(stream: StreamInfo, _: Facts) -> Iterator[Found]:
    if stream.config.storage == "memory":
        yield "storage memory"


@Declaration("JS006", each=each_stream).says(
    "Streams with discard: new have space left",
    why="A full stream with discard: new refuses every publish with JetStream's error 10077.",
    cure=f"Set a higher {JETSTREAM}.max_bytes or max_messages, or discard_policy: old, so that new messages replace "
    f"the oldest, {APPLY}.",
    cure_of_others="Set a higher streams.{stream}.max_bytes or max_msgs in the configuration, "
    + APPLY
    + ". Or delete all but the newest messages: `aviso-workers streams purge {stream} --keep COUNT`.",
)
def full(stream: StreamInfo, _: Facts) -> Iterator[Found]:
    """The check says WARN from 80 % and FAIL from 95 %. The stream of dead letters is such a stream. When it is full, a
    failed notification cannot become a dead letter; workers retry it again and again, and you see redeliveries.
    """
    config = stream.config
    if config.discard != "new":
        return
    for name, used, limit in (
        ("max_bytes", stream.bytes, config.max_bytes),
        ("max_msgs", stream.messages, config.max_msgs),
    ):
        if limit > 0 and used >= NEARLY_FULL * limit:
            yield about(
                stream,
                f"{used / limit:.0%} of {name} {limit} used",
                state=State.FAIL if used >= FULL * limit else State.WARN,
                cure=DEAD_LETTERS_FULL if _has_dead_letters(stream) else "",
            )


@Declaration("JS008", State.FAIL, each=each_stream).says(
    "Streams with retention interest have a consumer",
    why="With retention interest, the server drops a message at once if the stream has no consumer for the message.",
    cure=f"Start the consumers before the publishers. Or set {JETSTREAM}.retention_policy: limits, which keeps "
    f"messages without consumers, {APPLY}.",
    cure_of_others="Start the consumers before the publishers. Or set streams.{stream}.retention: limits in the "
    f"configuration, which keeps messages without consumers, {APPLY}.",
)
def no_interest(stream: StreamInfo, _: Facts) -> Iterator[Found]:
    if stream.config.retention == "interest" and not stream.consumers:
        yield "retention interest and no consumer"


@Declaration("JS010", each=each_stream).says(
    "Critical streams have deny_delete and deny_purge",
    why="Without them, one wrong command removes messages of a stream whose metadata critical=true says that they "
    "must stay.",
    cure="Set streams.{stream}.deny_delete and deny_purge to true in the configuration, "
    + APPLY
    + ". Nobody can undo these settings.",
)
def deletable(stream: StreamInfo, _: Facts) -> Iterator[Found]:
    missing = [key for key in ("deny_delete", "deny_purge") if not getattr(stream.config, key)]
    if _is_marked(stream, "critical") and missing:
        yield f"critical=true without {' and '.join(missing)}"


@Declaration("JS011", State.FAIL, each=each_stream).says(
    "Streams with personal data allow deletes",
    why="Messages of a stream with deny_delete cannot be deleted one by one, a purge leaves their payloads on the "
    "disk, and nobody can undo deny_delete.",
    cure="Copy the messages that may stay to a stream without deny_delete, and remove this stream: `aviso-workers "
    "streams rm {stream}`.",
)
def not_erasable(stream: StreamInfo, _: Facts) -> Iterator[Found]:
    """A stream with personal data has the metadata `pii=true`."""
    if _is_marked(stream, "pii") and stream.config.deny_delete:
        yield "pii=true with deny_delete"


@Declaration("JS013").says(
    "Every stream has the settings of the configuration",
    why="The settings of the stream on the server differ from the configuration, so the stream may store, keep or "
    "refuse other messages than you expect.",
    cure="`aviso-workers streams plan` shows the differences, and `aviso-workers streams apply` removes them. A "
    "change that removes stored messages needs --yes.",
)
def drifted(facts: Facts) -> Iterator[Finding]:
    """With `stream_management: reconcile`, the next worker changes the stream back. If that would remove stored
    messages, the worker warns and leaves the stream unchanged.

    The result is FAIL if the storage differs, and for a stream that is sealed although the configuration does not say
    so, because it refuses every publish.
    """
    recorded = facts.recorded_streams
    for configured, plan in facts.plans.items():
        if plan.exists and (differences := (*plan.differences, *plan.removing, *plan.fixed)):
            found = "; ".join(map(str, differences))
            is_certain = (plan.storage_mismatch or plan.sealed) and plan.stream not in recorded
            state, cure = State.FAIL if is_certain else None, f"A{plans.SEALED[1:]}." if plan.sealed else ""
            yield Finding(stream=plan.stream, found=f"{configured}: {found}", state=state, cure=cure)


@Declaration("JS014", State.FAIL).says(
    "No other stream has the subjects of a configured stream",
    why="A subject belongs to one stream. So the configured stream cannot be created, and publishes to it are refused.",
    cure="Give this stream other subjects (streams.{stream}.subjects in the configuration, "
    + APPLY
    + "), or give the event type another topic.base.",
)
def taken(facts: Facts) -> Iterator[Finding]:
    """Publishers get an error, because they send `Nats-Expected-Stream`. WARN where only workers have recorded the
    event type.
    """
    recorded = facts.recorded_streams
    for configured, plan in facts.plans.items():
        wanted: list[str] = stated(plan.wanted).get("subjects", [])
        state = State.WARN if plan.stream in recorded else None
        for stream in facts.streams.values():
            if stream.name == plan.stream or stream.config.mirror:
                continue
            for theirs in stream.config.subjects:
                if any(subjects.overlap(theirs, ours) for ours in wanted):
                    found = f"has the subjects {theirs}, which belong to {configured}"
                    yield Finding(stream=stream.name, found=found, state=state)


@Declaration("JS015", each=each_stream).says(
    "No stream has unexplained gaps",
    why="A server leaves out a damaged block without a log line, which shows as a gap. Very many gaps cost memory and "
    "make reading slow.",
    cure="`aviso-workers streams gaps {stream}` shows the gaps. If no client deleted messages there, compare the "
    "stream with the newest backup: `aviso-workers backup restore DIRECTORY/{stream}/TIME --as COPY`. If a few old "
    "messages have very many gaps after them, set a retention_time, which removes these messages and the gaps.",
)
def gaps(stream: StreamInfo, _: Facts) -> Iterator[Found]:
    """A stream that keeps all messages of a subject removes only its oldest messages. So a gap in such a stream comes
    from a `delete`, an erasure, or a damaged block. In other streams gaps are normal. For them the check warns of
    10,000 gaps or more, if there are also more than ten gaps for each message, because gaps cost the server memory and
    slow down reading. Tables, counters and delayed notifications are not checked, because they have gaps by design.
    """
    missing, messages = stream.deleted, stream.messages
    if _keeps_state(stream):
        return
    if missing and _never_deletes(stream):
        yield f"{missing} messages are missing between the first and the last"
    elif missing >= MANY_GAPS and missing > GAPS_PER_MESSAGE * messages:
        yield f"{missing} gaps between {messages} messages"


@Declaration("JS016", State.FAIL, each=each_stream).says(
    "No stream has blocks that its server cannot read",
    why="The server reports lost messages, because it cannot read their blocks.",
    cure="Check the disk of the server. To see which messages are missing, restore a backup beside the stream: "
    "`aviso-workers backup restore DIRECTORY/{stream}/TIME --as COPY`.",
)
def lost(stream: StreamInfo, _: Facts) -> Iterator[Found]:
    """nats-server 2.15.0 shows most damage as gaps instead (JS015)."""
    if (lost := stream.lost) is not None:
        yield f"{len(lost.msgs or ())} messages, {lost.bytes} bytes lost"


@Declaration("JS019", State.FAIL, each=each_stream).says(
    "Mirrors and sources reach their origins",
    why="While an origin is unreachable, the reported lag does not change. Only the time since the last contact shows "
    "the problem.",
    cure="`aviso-workers report mirrors` and `aviso-workers streams info {stream}` show the error. Check the leaf "
    "node or gateway in between, and the origin's server, name and domain.",
)
def unreachable_origins(stream: StreamInfo, facts: Facts) -> Iterator[Found]:
    """The result is FAIL when the mirror has never reached its origin, had no contact for 30 seconds, or reports an
    error. It is WARN when the lag grew between the samples. Origins in other domains and clusters are checked too. If
    you cut the link as a test, this check fails.
    """
    before = facts.before.streams.get(stream.name, stream)
    lags = {origin.name: origin.lag for origin in before.origins}
    for origin in stream.origins:
        inactive = origin.active / SECOND
        if origin.error:
            yield f"{origin.name}: {origin.error.get('description')}"
        elif origin.active == NEVER:
            yield f"{origin.name} was never reached"
        elif inactive > STALE_SECONDS:
            yield f"last contact with {origin.name} {inactive:.0f} s ago"
        elif (growth := origin.lag - lags.get(origin.name, origin.lag)) > 0:
            rate = growth / facts.elapsed_seconds
            found = f"{origin.lag} behind {origin.name}, and {rate:.0f} more every second"
            yield about(stream, found, state=State.WARN)


@Declaration("JS020", State.FAIL).says(
    "No promoted mirror has an origin that takes publishes",
    why="Two streams that both take publishes store different messages under the same sequences, and cannot be merged.",
    cure="Run `aviso-workers mirror fence {place}` at once, then `aviso-workers mirror recover {stream}`.",
)
def two_histories(facts: Facts) -> Iterator[Finding]:
    """The doctor cannot check an origin that does not answer. Run `mirror fence ORIGIN`, which removes its subjects,
    before you connect it again.
    """
    for link in facts.links:
        if link.relation == "promoted" and link.trouble:
            yield Finding(stream=link.stream, place=link.origin, found=link.trouble)


@Declaration("JS068", State.FAIL).says(
    "Mirrors have the messages of their origins",
    why="A mirror continues after the last sequence that it has. So it never receives the earlier messages of an "
    "origin that was recreated or restored.",
    cure="Back up the mirror (`aviso-workers backup create {stream} --to DIRECTORY`), remove it (`aviso-workers "
    "streams rm {stream}`), and create it again, with `aviso-workers streams apply` if the configuration has it.",
)
def other_histories(facts: Facts) -> Iterator[Finding]:
    """A mirror of a recreated origin has a lag of 0. The check compares some messages of both by time, subject and
    body. It does not compare an origin that does not answer. [Mirrors and failover](../failover.md#does-it-follow)
    says what the comparison cannot see.
    """
    for link in facts.links:
        if link.divergence:
            yield Finding(stream=link.stream, found=link.divergence)


@Declaration("JS070", State.FAIL, each=each_stream).says(
    "No stream has an unfinished restore",
    why="A stream takes no publishes until its restore is finished, and workers that need the stream wait.",
    cure="If no restore is running, restore the same backup again: `aviso-workers backup restore DIRECTORY`.",
)
def half_restored(stream: StreamInfo, _: Facts) -> Iterator[Found]:
    """If a restore was killed, or a restore of a [set](../backup.md#sets) failed, the marks stay."""
    mark = stream.config.metadata.get(UNFINISHED, "")
    if SET_MARK in mark:
        found = "the stream belongs to a set of backups whose restore is running, has failed or was killed"
        yield about(stream, found, cure=RESTORE_SET)
    elif mark:
        yield "the restore of the stream is running or was killed"


def _replicas(stream: StreamInfo) -> Finding:
    cure = OUR_REPLICAS if stream.name.startswith(OURS) else BUCKETS_REPLICAS if stream.name.startswith(BUCKET) else ""
    return Finding(stream=stream.name, found=f"num_replicas {stream.config.num_replicas}", cure=cure)


def _keeps_state(stream: StreamInfo) -> bool:
    """Return whether a stream holds state of our own (tables, counters, delayed messages), which must not expire by
    itself.
    """
    name = stream.name
    of_ours = own_streams.app_of(COUNTERS, name) or delayed_messages.event_stream_of(name)
    return bool(of_ours) or name.startswith(BUCKET)


def _has_dead_letters(stream: StreamInfo) -> bool:
    return bool(own_streams.app_of(DEAD_LETTERS, stream.name))


def _is_marked(stream: StreamInfo, mark: str) -> bool:
    return stream.config.metadata.get(mark) == "true"


def _never_deletes(stream: StreamInfo) -> bool:
    """Return whether messages leave this stream only at its old end, unless a client deletes them."""
    config = stream.config
    return (
        config.retention == "limits"
        and config.max_msgs_per_subject <= 0
        and not config.allow_msg_ttl
        and not config.allow_rollup_hdrs
        and not stream.origins
        and not _has_dead_letters(stream)
    )
