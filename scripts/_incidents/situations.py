"""The situations of the book. Each makes what an operator then looks at, and after that carries out the cure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from _incidents.book import Expected, Made, Situation
from _incidents.operator import NO_DOCTOR
from _incidents.scene import Scene

SITUATIONS: list[Situation] = []
SOME = 20
DOWN = "no answer"


def situation(
    title: str,
    *,
    cure: str,
    state: str = "idle|working",
    fails: Iterable[str] = (),
    warns: Iterable[str] = (),
    readyz: str = "200 ok",
    livez: str = "200 ok",
    alerts: Iterable[str] = (),
    passing: Iterable[str] = (),
    mends_itself: bool = False,
    attempts: int | None = 1000,
    patience: float = 0,
    window: str = "6s",
    retires: bool = False,
) -> Callable[[Made], Made]:
    expected = Expected(
        state=state,
        fails=frozenset(fails),
        warns=frozenset(warns),
        readyz=readyz,
        livez=livez,
        alerts=frozenset(alerts),
        passing=frozenset(passing),
        mends_itself=mends_itself,
    )

    def add(made: Made) -> Made:
        SITUATIONS.append(
            Situation(
                name=made.__name__,
                title=title,
                made=made,
                expected=expected,
                cure=cure,
                attempts=attempts,
                patience=patience,
                window=window,
                retires=retires,
            )
        )
        return made

    return add


@situation(
    "One of three servers is killed",
    fails=["JS017", "JS044", "JS049"],
    alerts=["AvisoServersUnhealthy", "AvisoDoctorFails"],
    cure="Start the server again",
)
def one_server_killed(scene: Scene) -> Iterator[None]:
    scene.publish(SOME)
    over = scene.publish_steadily(per_second=10)
    scene.cluster.kill(2)
    yield
    scene.cluster.start(2)
    over.set()


@situation(
    "Two of three servers are killed",
    state=r".*(JetStream system temporarily unavailable \(JetStream 10008\)|unknown).*",
    fails=["JS044", "JS049"],
    readyz="503 cannot lead, for lack of bucket .*",
    alerts=["AvisoServersUnhealthy", "AvisoDoctorFails", "AvisoWorkerNotReady", "AvisoLeaderHindered"],
    passing=["JS017", "AvisoPullErrors", "AvisoObserverBlind"],
    cure="Start one of the two servers, then the other one",
)
def two_servers_killed(scene: Scene) -> Iterator[None]:
    scene.publish(SOME)
    scene.cluster.kill(1, 2)
    yield
    scene.cluster.start(1, 2)
    scene.publish(SOME)


@situation(
    "The only worker is killed",
    state=r"no worker: \d+ wait, and no worker runs(; worker \S+: lost: killed or cut off within \d+ s after TIME.*)?",
    fails=["JS058"],
    passing=["JS080"],
    readyz=DOWN,
    livez=DOWN,
    alerts=["AvisoWorkerDown", "AvisoAgentNeedsSomebody", "AvisoDoctorFails"],
    cure="Start a worker: `aviso-workers worker MODULE:APP`",
)
def only_worker_killed(scene: Scene) -> Iterator[None]:
    scene.publish(SOME)
    scene.wait_until_handled()
    scene.kill_worker()
    scene.publish(SOME)
    yield
    scene.start()


@situation(
    "A consumer is deleted while its worker runs",
    alerts=["AvisoConsumerRecreated"],
    passing=["AvisoPullErrors"],
    cure="None: the worker creates the consumer again, after the position that was recorded last, so that some "
    "notifications are handled again. Find out who deleted it",
)
def consumer_deleted(scene: Scene) -> Iterator[None]:
    scene.publish(SOME)
    scene.wait_until_handled()
    scene.api(f"CONSUMER.DELETE.{scene.stream}.{scene.name}__handle")
    scene.publish(SOME)
    yield


@situation(
    "A consumer is deleted while no worker runs",
    state=r"consumer gone: a worker makes it again, after sequence \d+; the last one of .* is \d+",
    fails=["JS058"],
    readyz=DOWN,
    livez=DOWN,
    alerts=["AvisoAgentNeedsSomebody", "AvisoWorkerDown", "AvisoDoctorFails"],
    cure="Start a worker: `aviso-workers worker MODULE:APP`",
)
def consumer_deleted_without_worker(scene: Scene) -> Iterator[None]:
    scene.publish(SOME)
    scene.wait_until_handled()
    scene.stop_worker()
    scene.api(f"CONSUMER.DELETE.{scene.stream}.{scene.name}__handle")
    scene.publish(SOME)
    yield
    scene.start()


@situation(
    "A stream is deleted under a running worker",
    alerts=["AvisoConsumerRecreated"],
    passing=["AvisoPullErrors"],
    cure="None: the worker creates stream and consumer again. What was stored is gone: publish or restore it",
)
def stream_deleted(scene: Scene) -> Iterator[None]:
    scene.publish(SOME)
    scene.wait_until_handled()
    scene.api(f"STREAM.DELETE.{scene.stream}")
    yield
    scene.publish(SOME)


@situation(
    "A consumer's filter is edited by hand while the worker runs",
    warns=["JS064"],
    mends_itself=True,
    alerts=["AvisoConsumerRecreated"],
    passing=["JS021", "AvisoDoctorWarns"],
    cure="None: a running worker corrects it within half a minute",
)
def filter_edited(scene: Scene) -> Iterator[None]:
    scene.publish(SOME)
    scene.wait_until_handled()
    consumer = f"{scene.stream}.{scene.name}__handle"
    found = scene.api(f"CONSUMER.INFO.{consumer}")["config"]
    edited = {key: value for key, value in found.items() if key not in ("filter_subject", "filter_subjects")}
    edited["filter_subject"] = f"{scene.name}.0"
    scene.api(f"CONSUMER.CREATE.{consumer}", {"stream_name": scene.stream, "config": edited, "action": "update"})
    scene.publish(SOME)
    yield


@situation(
    "An agent was paused and forgotten",
    state="paused: until it is resumed",
    warns=["JS036"],
    alerts=["AvisoDoctorWarns"],
    cure="`aviso-workers agents resume APP/AGENT`",
)
def agent_paused(scene: Scene) -> Iterator[None]:
    scene.operator.must("agents", "pause", f"{scene.name}/handle")
    scene.publish(SOME)
    yield
    scene.operator.must("agents", "resume", f"{scene.name}/handle")


@situation(
    "A handler fails each time",
    state=r"failing: since TIME, \d+ times: RuntimeError: the archive does not answer \(agents.py:\d+\); \d+ are tried "
    r"again.*",
    alerts=["AvisoRetriesRising"],
    passing=["JS058", "AvisoDoctorFails", "AvisoDoctorWarns", "AvisoAgentNeedsSomebody"],
    cure="Repair the service that the handler depends on; the notifications are tried again by themselves",
)
def handler_fails(scene: Scene) -> Iterator[None]:
    scene.break_down("handler", "fails")
    scene.publish(2 * SOME)
    yield
    scene.repair("handler")


@situation(
    "A handler hangs",
    state=r"stuck: \d+ are delivered and not finished, the oldest after sequence \d+",
    fails=["JS058"],
    alerts=["AvisoAgentNeedsSomebody", "AvisoDoctorFails"],
    cure="Repair what the handler waits for, and restart the worker; give the agent a `timeout`",
)
def handler_hangs(scene: Scene) -> Iterator[None]:
    scene.break_down("handler", "hangs")
    scene.publish(SOME)
    yield
    scene.repair("handler")
    scene.restart()


@situation(
    "A handler blocks the event loop",
    state=".*",
    livez="503 .*",
    readyz=".*",
    alerts=["AvisoWorkerLoopBlocked"],
    passing=["JS058", "AvisoAgentNeedsSomebody", "AvisoDoctorFails"],
    cure="Make the handler a plain `def`, which runs in a thread, and restart the worker",
)
def loop_blocked(scene: Scene) -> Iterator[None]:
    scene.break_down("handler", "blocks")
    scene.publish(SOME)
    yield
    scene.repair("handler")
    scene.kill_worker()
    scene.start()


@situation(
    "Notifications have become dead letters",
    warns=["JS057"],
    alerts=["AvisoDeadLetters", "AvisoDoctorWarns"],
    state=r"idle|working|failing: since TIME, .*: Reject: no such field.*",
    cure="`aviso-workers dead-letters ls`, repair the cause, then `aviso-workers dead-letters retry`",
)
def dead_letters(scene: Scene) -> Iterator[None]:
    scene.break_down("handler", "reject")
    scene.publish(3, "reject")
    scene.publish(SOME)
    yield
    scene.repair("handler")
    scene.operator.must("dead-letters", "retry", "--app", scene.name, "--yes")


@situation(
    "A timer fails",
    state=r"idle; timer tick: failing: since TIME, .*: RuntimeError: the report cannot be written \(agents.py:\d+\)",
    warns=["JS077"],
    alerts=["AvisoTimerFails", "AvisoDoctorWarns"],
    cure="Repair the cause; the next tick succeeds",
)
def timer_fails(scene: Scene) -> Iterator[None]:
    scene.break_down("timer", "fails")
    yield
    scene.repair("timer")


@situation(
    "A task fails",
    state=r"idle; task poll: failing: since TIME, .*: RuntimeError: the catalogue does not answer \(agents.py:\d+\)",
    warns=["JS077"],
    alerts=["AvisoTaskFails", "AvisoDoctorWarns"],
    cure="Repair the cause; the worker starts the task again",
)
def task_fails(scene: Scene) -> Iterator[None]:
    scene.break_down("task", "fails")
    yield
    scene.repair("task")


@situation(
    "The event stream is full and refuses notifications (`discard: new`)",
    fails=["JS006"],
    alerts=["AvisoStreamNearlyFull", "AvisoDoctorFails"],
    cure="Raise `storage_policy.max_messages` (or `max_size`) of the event type, then `aviso-workers streams apply`; "
    "publish again what was refused",
)
def event_stream_full(scene: Scene) -> Iterator[None]:
    scene.document["notification_backend"]["jetstream"]["discard_policy"] = "new"
    policy = scene.document["notification_schema"][scene.name]["storage_policy"]
    policy["max_messages"] = SOME
    scene.write_config()
    scene.operator.must("streams", "apply")
    scene.publish(SOME)
    scene.publish_refused()
    yield
    policy["max_messages"] = 100 * SOME
    scene.write_config()
    scene.operator.must("streams", "apply")
    scene.publish(SOME)


@situation(
    "The stream of dead letters is full",
    state=r"hindered: 1 of 1 workers cannot go on; .*: dead letters cannot be stored: .*",
    fails=["JS006", "JS058"],
    warns=["JS057"],
    readyz="503 agent handle: dead letters cannot be stored: .*",
    alerts=[
        "AvisoStreamNearlyFull",
        "AvisoDeadLettersRefused",
        "AvisoWorkerNotReady",
        "AvisoDoctorFails",
        "AvisoAgentNeedsSomebody",
    ],
    passing=["AvisoDeadLetters", "AvisoDoctorWarns", "AvisoRetriesRising"],
    cure="Repair the cause, raise `workers.dead_letters.max_bytes` and restart one worker, then "
    "`aviso-workers dead-letters retry`",
)
def dead_letters_full(scene: Scene) -> Iterator[None]:
    scene.document["workers"]["dead_letters"] = {"max_bytes": "32Ki"}
    scene.write_config()
    scene.restart()
    scene.break_down("handler", "reject")
    scene.publish(5 * SOME, "reject")
    yield
    scene.document["workers"]["dead_letters"] = {"max_bytes": "1Mi"}
    scene.write_config()
    scene.repair("handler")
    scene.restart()
    scene.operator.must("dead-letters", "retry", "--app", scene.name, "--yes")


@situation(
    "There are too few workers",
    state=r"behind: \d+ wait, more than before; 1 workers handle it|working|catching up",
    passing=["JS058", "AvisoAgentNeedsSomebody", "AvisoDoctorWarns"],
    cure="Start more workers of the app",
)
def too_few_workers(scene: Scene) -> Iterator[None]:
    scene.break_down("handler", "slow")
    over = scene.publish_steadily(per_second=40)
    yield
    scene.start("second")
    scene.start("third")
    over.set()


@situation(
    "A right of the workers' user is taken away: the bucket of leases",
    state=r"hindered: 1 of 1 workers cannot go on; .*: cannot lead, for lack of bucket .*",
    fails=["JS058"],
    readyz="503 cannot lead, for lack of bucket .*_leases: .*",
    alerts=["AvisoLeaderHindered", "AvisoWorkerNotReady", "AvisoAgentNeedsSomebody", "AvisoDoctorFails"],
    cure="Grant the subject that `/readyz` and `leader.hindered` name (`aviso-workers server render --role worker "
    "--app MODULE:APP`), and reload the servers",
)
def right_taken_away(scene: Scene) -> Iterator[None]:
    scene.publish(SOME)
    scene.cluster.deny(f"$KV.{scene.name}__leases.>")
    yield
    scene.cluster.deny()


@situation(
    "A worker starts and dies in a loop, because of one notification",
    state="(.*; )?failing: since TIME, .*: WorkerDiedError: .*",
    fails=["JS066"],
    readyz=".*",
    livez=".*",
    alerts=["AvisoWorkerRestarts", "AvisoDoctorFails"],
    passing=[
        "JS058",
        "AvisoWorkerDown",
        "AvisoWorkerNotReady",
        "AvisoAgentNeedsSomebody",
        "AvisoRetriesRising",
        "AvisoDoctorWarns",
    ],
    attempts=60,
    window="30s",
    cure="`aviso-workers agents pause APP/AGENT`, repair the handler, `agents resume`; after as many deaths as "
    "the agent has attempts it is a dead letter, for `dead-letters retry`",
)
def worker_dies_in_a_loop(scene: Scene) -> Iterator[None]:
    scene.break_down("handler", "exit")
    over = scene.supervise()
    scene.publish(1, "exit")
    yield
    scene.operator.must("agents", "pause", f"{scene.name}/handle")
    scene.repair("handler")
    scene.operator.must("agents", "resume", f"{scene.name}/handle")
    scene.publish(SOME)
    scene.wait_until_handled()
    over.set()


@situation(
    "An app was retired, and nobody will start its worker again",
    state=r"no worker: \d+ wait, and no worker runs",
    fails=["JS058"],
    readyz=DOWN,
    livez=DOWN,
    alerts=["AvisoAgentNeedsSomebody", "AvisoDoctorFails"],
    retires=True,
    cure="`aviso-workers agents rm APP --workers-stopped --yes`",
)
def app_retired(scene: Scene) -> Iterator[None]:
    scene.publish(SOME)
    scene.wait_until_handled()
    scene.stop_worker()
    scene.unfollow("worker")
    scene.publish(SOME)
    yield
    scene.operator.must("agents", "rm", scene.name, "--workers-stopped", "--yes")
    scene.operator.forget_app()


@situation(
    "All servers are killed",
    state="no NATS server at .*: .* Connect call failed .*",
    fails=[NO_DOCTOR],
    readyz="503 .*",
    alerts=["AvisoWorkerDisconnected", "AvisoWorkerNotReady", "AvisoObserverBlind"],
    passing=["AvisoPullErrors", "AvisoLeaderHindered", "AvisoServersUnhealthy", "AvisoDoctorMissing"],
    cure="Start the servers; workers, observer and console come back by themselves",
)
def all_servers_killed(scene: Scene) -> Iterator[None]:
    scene.publish(SOME)
    scene.cluster.kill(0, 1, 2)
    yield
    scene.cluster.start(0, 1, 2)
    scene.publish(SOME)


@situation(
    "One of three servers is frozen: its process is there and does not answer",
    fails=["JS017", "JS044"],
    alerts=["AvisoServersUnhealthy"],
    passing=["AvisoDoctorFails", "JS049"],
    cure="End the process of that server and start it again",
)
def one_server_frozen(scene: Scene) -> Iterator[None]:
    scene.publish(SOME)
    scene.cluster.freeze(2)
    yield
    scene.cluster.thaw(2)
    scene.publish(SOME)


@situation(
    "What a handler depends on is away",
    state="away: Unavailable: the archive is maintained; 20 wait, and no attempt is used",
    patience=86400,
    warns=[],
    passing=["JS058"],
    cure="Bring back what the error names; the notifications are tried again by themselves, and no attempt was used",
)
def dependency_away(scene: Scene) -> Iterator[None]:
    scene.break_down("handler", "away")
    scene.publish(SOME)
    yield
    scene.repair("handler")


@situation(
    "An agent that tries without end fails again and again",
    attempts=None,
    state=r"blocked: .*: RuntimeError: the archive does not answer .*",
    warns=["JS058"],
    alerts=["AvisoAgentNeedsSomebody", "AvisoDoctorWarns"],
    passing=["AvisoRetriesRising"],
    cure="Repair the cause: they are tried again by themselves, and at once by `aviso-workers agents retry APP/AGENT "
    "--all`. `agents skip` makes dead letters of them",
)
def agent_blocked(scene: Scene) -> Iterator[None]:
    scene.break_down("handler", "fails")
    scene.publish(3)
    yield
    scene.repair("handler")


@situation(
    "Only the notifications of an agent are paused, and not its retries",
    state="half paused: only its notifications are paused.*",
    fails=["JS058"],
    warns=["JS036"],
    alerts=["AvisoAgentNeedsSomebody", "AvisoDoctorFails", "AvisoDoctorWarns"],
    cure="`aviso-workers agents resume APP/AGENT`, or `agents pause` again",
)
def agent_half_paused(scene: Scene) -> Iterator[None]:
    scene.publish(SOME)
    scene.wait_until_handled()
    scene.api(f"CONSUMER.PAUSE.{scene.stream}.{scene.name}__handle", {"pause_until": "2100-01-01T00:00:00Z"})
    scene.publish(SOME)
    yield
    scene.operator.must("agents", "resume", f"{scene.name}/handle")


@situation(
    "A right of the workers' user is taken away: to acknowledge",
    state=r"hindered: 1 of 1 workers cannot go on; .*\$JS\.ACK.*",
    fails=["JS058"],
    readyz=r"503 .*\$JS\.ACK.*",
    alerts=["AvisoWorkerNotReady", "AvisoAgentNeedsSomebody", "AvisoDoctorFails"],
    cure="Grant the subject that `/readyz` names (`aviso-workers server render --role worker`), and reload the servers",
)
def right_to_ack_taken_away(scene: Scene) -> Iterator[None]:
    scene.publish(SOME)
    scene.wait_until_handled()
    scene.cluster.deny("$JS.ACK.>")
    scene.publish(SOME)
    yield
    scene.cluster.deny()


@situation(
    "A right of the workers' user is taken away: to record that they live",
    state=r"unknown: .*",
    warns=["JS058"],
    readyz=".*",
    alerts=["AvisoAgentNeedsSomebody", "AvisoDoctorWarns"],
    cure="Grant the bucket `<app>__live` (`aviso-workers server render --role worker`), and reload the servers",
)
def right_to_record_taken_away(scene: Scene) -> Iterator[None]:
    scene.publish(SOME)
    scene.cluster.deny(f"$KV.{scene.name}__live.>")
    yield
    scene.cluster.deny()


@situation(
    "The servers refuse the workers' password",
    state="no worker: .*",
    fails=["JS058"],
    readyz="503 not connected.*",
    alerts=["AvisoWorkerNotReady", "AvisoWorkerDisconnected", "AvisoDoctorFails", "AvisoObserverBlind"],
    passing=["JS080", "AvisoPullErrors", "AvisoLeaderHindered", "AvisoDoctorWarns", "AvisoAgentNeedsSomebody"],
    cure="Give the workers the password that the servers have; they read it anew at each attempt",
)
def password_refused(scene: Scene) -> Iterator[None]:
    scene.publish(SOME)
    scene.wait_until_handled()
    scene.cluster.change_password("another")
    scene.publish(SOME)
    yield
    scene.cluster.change_password()


@situation(
    "A stream is deleted while no worker runs",
    state="stream gone: .*",
    fails=["JS042", "JS058"],
    readyz=DOWN,
    livez=DOWN,
    alerts=["AvisoAgentNeedsSomebody", "AvisoWorkerDown", "AvisoDoctorFails"],
    cure="`aviso-workers streams apply`, and start a worker. What was stored is gone: publish or restore it",
)
def stream_deleted_without_worker(scene: Scene) -> Iterator[None]:
    scene.publish(SOME)
    scene.wait_until_handled()
    scene.stop_worker()
    scene.api(f"STREAM.DELETE.{scene.stream}")
    yield
    scene.operator.must("streams", "apply")
    scene.start()
    scene.publish(SOME)


@situation(
    "A stream is deleted, and its subjects are given to another one, while no worker runs",
    state="stream gone: .*; its subjects are those of OTHER_.* now.*",
    fails=["JS014", "JS058"],
    readyz=DOWN,
    livez=DOWN,
    passing=["JS042"],
    alerts=["AvisoAgentNeedsSomebody", "AvisoWorkerDown", "AvisoDoctorFails"],
    cure="Give the other stream other subjects, or remove it, then `aviso-workers streams apply`, and start a worker",
)
def subjects_moved(scene: Scene) -> Iterator[None]:
    scene.publish(SOME)
    scene.wait_until_handled()
    scene.stop_worker()
    found = scene.api(f"STREAM.INFO.{scene.stream}")["config"]
    other = f"OTHER_{scene.stream}"
    scene.api(f"STREAM.DELETE.{scene.stream}")
    scene.api(f"STREAM.CREATE.{other}", {"name": other, "subjects": found["subjects"], "storage": "file"})
    yield
    scene.api(f"STREAM.DELETE.{other}")
    scene.operator.must("streams", "apply")
    scene.start()
    scene.publish(SOME)


@situation(
    "A stream is sealed, and takes no notification any more",
    fails=["JS013"],
    alerts=["AvisoDoctorFails"],
    cure="A sealed stream cannot be opened: `aviso-workers streams copy` it, `streams rm`, then `streams apply`",
)
def stream_sealed(scene: Scene) -> Iterator[None]:
    scene.publish(SOME)
    scene.wait_until_handled()
    found = scene.api(f"STREAM.INFO.{scene.stream}")["config"]
    scene.api(f"STREAM.UPDATE.{scene.stream}", found | {"sealed": True})
    scene.publish_refused()
    yield
    scene.operator.must("streams", "rm", scene.stream, "--yes")
    scene.operator.must("streams", "apply")
    scene.publish(SOME)


@situation(
    "The stream of an app's dead letters is deleted",
    warns=["JS057"],
    alerts=["AvisoDeadLetters", "AvisoDoctorWarns"],
    state=r"idle|working|failing: since TIME, .*: Reject: no such field.*",
    cure="None: a worker makes it again with the next dead letter, if its user may (else `aviso-workers streams apply "
    "--role worker --app MODULE:APP`). What was stored in it is gone",
)
def dead_letters_deleted(scene: Scene) -> Iterator[None]:
    scene.break_down("handler", "reject")
    scene.publish(1, "reject")
    letters = f"aviso_workers_dead_letters__{scene.name}"
    scene.wait("no dead letter is stored", lambda: "reject" in scene.operator.run("dead-letters", "ls").out)
    scene.api(f"STREAM.DELETE.{letters}")
    scene.published.clear()  # its original is gone with it
    scene.publish(3, "reject")
    yield
    scene.repair("handler")
    scene.operator.must("dead-letters", "retry", "--app", scene.name, "--yes")


@situation(
    "The bucket of an app's leases is deleted",
    cure="None: the worker that leads makes it again, if its user may (else `aviso-workers streams apply --role worker "
    "--app MODULE:APP`)",
)
def leases_deleted(scene: Scene) -> Iterator[None]:
    scene.publish(SOME)
    scene.api(f"STREAM.DELETE.KV_{scene.name}__leases")
    yield
    scene.publish(SOME)
