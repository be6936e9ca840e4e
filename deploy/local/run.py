"""`streamrl run`: broker, topics, evaluation before, all processes under supervision, evaluation after, report.

This process trains nothing. It starts each role as a separate process and keeps the processes alive. It follows their
topics for the display and the summary, and ends when the trainer has taken the last step.
"""

import asyncio
import re
import shlex
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from streamrl.bus.embedded.node import free_port
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.topic_admin import apply_topics, diff_topics
from streamrl.bus.waiting import in_thread
from streamrl.consumers.training.checkpoints.catalogue import CheckpointsState, read_checkpoints_state
from streamrl.consumers.training.checkpoints.storage import REMOTE
from streamrl.consumers.training.identity import IdentityKeeper, here
from streamrl.consumers.training.identity_store import IdentityFile
from streamrl.deploy.local.evaluation import Evaluation, evaluate, known_evaluation
from streamrl.deploy.local.fleet import Fleet, RemoteTrainerWatch
from streamrl.deploy.local.forking import Forks, ForkServer
from streamrl.deploy.local.inputs import inputs_of, task_of
from streamrl.deploy.local.logs import LogRotation
from streamrl.deploy.local.long_steps import print_at_once, told_if_long
from streamrl.deploy.local.resuming import (
    changes_since,
    check_checkpoints,
    complete_line,
    final_model,
    is_complete,
    resumed_step,
    resuming_line,
    storage_of,
)
from streamrl.deploy.local.specs import ChildSpecs
from streamrl.deploy.local.starting import broker_beside
from streamrl.deploy.local.supervisor import CRASHED_AT_STOP, ChildSpec, Supervisor, stop_on_signals
from streamrl.deploy.local.task_check import (
    check_task,
    require_extras,
    require_readable,
    require_room,
    require_writable,
)
from streamrl.deploy.local.watching import Progress, show_progress, watch
from streamrl.deploy.wiring.broker import broker_for
from streamrl.deploy.wiring.process import configure_logging, require_run_role
from streamrl.inspection.diagnostics.connect import RunConnection
from streamrl.inspection.diagnostics.feed import feed_of
from streamrl.inspection.environment import fitted_here
from streamrl.inspection.opening import open_index
from streamrl.observability.metrics.tracking import check_installed
from streamrl.observability.record_index.entries import Fold
from streamrl.observability.record_index.following import IndexFollower
from streamrl.observability.run_state.feed import WHOLE_RUN, RunFeed
from streamrl.observability.run_state.state import RunState
from streamrl.producers.prompts.tables import check_path
from streamrl.schemas import stopping
from streamrl.schemas.control import RunIdentity
from streamrl.schemas.errors import ModelError, UserError
from streamrl.schemas.starts import RunInput, RunStart, append_start
from streamrl.settings.features import features, standbys
from streamrl.settings.loading import as_toml, secret_variables
from streamrl.settings.placement import Machine, Placement, place
from streamrl.settings.run_directory import RunDirectory, named
from streamrl.settings.tree import Settings

if TYPE_CHECKING:
    from streamrl.deploy.local.concluding import TrainingOutcome

EvaluateAfter = Callable[[], "Future[Evaluation | None]"]
"""Starts to evaluate the trained model in another thread."""
CLIENT_ID = "streamrl-run"
REFRESH_S = 0.5
"""Seconds between two reads of the topics for the display."""
STOP_POLL_S = 0.2
"""Seconds between two checks of a thread's event, for which an event loop cannot wait."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")

log = structlog.get_logger()


def run_locally(
    settings: Settings,
    *,
    top: bool = False,
    stop: threading.Event | None = None,
    adopt: bool = False,
    prepare_only: bool = False,
) -> int:
    """Train, and return the exit code.

    The code is 0 if the last step was reached, and 128 plus the signal's number if the run was stopped. It is 7 if a
    process crashed while it was being stopped. A complete run is not changed, and a refused start writes nothing.

    ``top``: show the live view. ``stop`` ends the run from another thread; without it SIGINT and SIGTERM do, which
    Python delivers only to the main thread. ``adopt`` takes over a run whose topics do not belong to this directory.
    ``prepare_only``: check the task, reserve the name, create topics and directory; others start the processes.

    Raises:
        UserError: something the user can correct, before or during the run.
        StreamRLError: a process could not be kept alive.
    """
    configure_logging()
    require_run_role(settings, "run")
    settings, machine = fitted_here(named(settings))
    placement = place(settings, machine)
    directory = RunDirectory(settings.run.path)
    check_checkpoints(settings)
    resumed = resumed_step(settings)
    # Checked before anything is written: a complete run keeps its files, and a refused start leaves none.
    if is_complete(settings, directory, resumed):
        print(complete_line(settings, resumed))
        return 0
    require_writable(directory.path)
    _check_start(settings)
    print_at_once("\n".join(_head(settings, machine, placement)))
    # Left in reverse order: without its process the evaluation ends.
    with ThreadPoolExecutor(1, thread_name_prefix="evaluation") as beside, Forks() as started:
        started.load_models(settings, machine)
        broker = broker_for(settings.kafka.bootstrap_servers, print_at_once, directory.kafka)
        check = partial(_check_task, settings, resumed, started.models)  # with its imports it takes seconds
        with broker_beside(broker, directory.kafka, check) as (address, warnings):
            for warning in warnings:
                print(f"warning: {warning}")
            _take_over(settings, directory, address, resumed, adopt=adopt)
            if prepare_only:
                print(f"run {settings.run.name} is ready for its processes: {address}, {directory.path}/")
                return 0
            before = _evaluate_model(settings, settings.model.path, "before", started.models)
            evaluate_after = partial(beside.submit, _evaluate_trained, settings, started.models)
            train = partial(_train_until, settings, directory, address, placement, started, evaluate_after, top=top)
            trained = asyncio.run(_stoppable(train, stop))
        after = trained.evaluating.result() if trained.evaluating is not None else None
    from streamrl.deploy.local.concluding import conclude  # not needed before the end of a run

    conclude(settings, directory, trained, resumed, before, after)
    print(_next_command(directory, finished=trained.finished))
    return _exit_code(trained)


def _head(settings: Settings, machine: Machine, placement: Placement) -> list[str]:
    """The first lines about a run: its name, engine, workers and directory, and the devices of its processes."""
    workers = f"{settings.run.workers} workers" if settings.run.workers else "workers started elsewhere"
    line = f"run {settings.run.name}: engine {settings.generation.engine}, {workers}, in {settings.run.path}/"
    return [line, *(f"  {each}" for each in placement.lines() if machine.devices)]


def _take_over(settings: Settings, directory: RunDirectory, address: str, resumed: int, *, adopt: bool) -> None:
    """Claim the run's name and create its topics; then write its directory."""
    with told_if_long("comparing prompts, reward code and model with the last start's"):
        inputs = inputs_of(settings)
    with told_if_long("creating the topics and claiming the run's name"):
        identity = asyncio.run(_claim(settings, address, task_of(settings, inputs), adopt=adopt))
    # Files are written only after this start holds the run, because processes of a running run read them.
    directory.create()
    _record_start(settings, directory, inputs, resumed, task_changed=identity.is_changed)


def _record_start(
    settings: Settings, directory: RunDirectory, inputs: Sequence[RunInput], resumed: int, *, task_changed: bool
) -> None:
    """Write the settings and the start into the run's directory, and print what changed since the last start."""
    start = RunStart(
        at=time.time(),
        step=resumed,
        inputs={each.name: each.fingerprint for each in inputs if each.fingerprint is not None},
        # Before the configuration is replaced, because it has the settings of the last start.
        changed=tuple(changes_since(settings, inputs, directory)),
        earlier_trajectories=settings.ingest.on_change if task_changed else None,
    )
    if line := resuming_line(start):
        print(line)
    append_start(directory.starts, start)
    directory.write_config(as_toml(settings))


def _exit_code(trained: "TrainingOutcome") -> int:
    """The exit code of a run that has ended; prints a line for each process that crashed while it was stopped."""
    for crash in trained.crashes:
        print(f"error: {crash}", file=sys.stderr)
    if trained.crashes:
        return CRASHED_AT_STOP
    return 0 if trained.finished else stopping.exit_code()


def _next_command(directory: RunDirectory, *, finished: bool) -> str:
    command = f"streamrl run {shlex.quote(str(directory.config))}"
    return f"for more steps: {command} --training.max_steps N" if finished else f"to continue: {command}"


async def _claim(settings: Settings, address: str, task: Mapping[str, str], *, adopt: bool) -> RunIdentity:
    """Claim the run's name for this directory, and create its topics; ``task``: see ``RunIdentity``.

    Raises:
        IdentityError: the topics belong to another run, or to lineages that this directory does not have.
        BrokerError: no broker answers.
        UserError: topics of that name exist and conflict with the settings.
    """
    kafka = settings.kafka.model_copy(update={"bootstrap_servers": address})
    storage = storage_of(settings)

    async def held(claimed: int) -> CheckpointsState:
        return await in_thread(read_checkpoints_state, storage, claimed)

    keeper = IdentityKeeper(
        KafkaBus(kafka),
        settings.run.name,
        IdentityFile(settings.run.path),
        adopt=adopt,
        # None if the broker was started or found here.
        servers=settings.kafka.bootstrap_servers,
        directory=settings.run.directory,
        holder=here(settings.run.path),
        task=task,
    )
    # Compared before the topics are changed, since they may be another run's, and again when the name is claimed.
    await keeper.look(held)
    partitions = settings.loop.trajectory_partitions
    topics = (address, settings.run.name, partitions, kafka.replication_factor, kafka)
    if conflicts := [str(change) for change in await diff_topics(*topics) if change.kind == "conflict"]:
        raise UserError(
            f"expected topics that match the settings, got {'; '.join(conflicts)}; use another run.name, or the "
            "settings with which the run was started"
        )
    await apply_topics(*topics)
    return await keeper.hold(held)


def _check_start(settings: Settings) -> None:
    """Refuse a run that is bound to fail, before anything is started.

    Raises:
        SettingsError: an optional package that the settings need is not installed.
        ModelError: the model's path is neither a directory nor a hub's name.
        DataError: the file of prompts does not exist.
        UserError: a port of relay or gateway is taken, the model or the prompts are not readable, or the disk is too
            small.
    """
    require_extras(settings)
    check_installed(settings.tracking)
    for tracker in settings.tracking.to:
        require_writable(settings.run.path / "tracking" / tracker)
    if settings.relay.port:
        from streamrl.weights.relay.server import check_port  # imports an HTTP server

        check_port(settings.relay)
    if settings.data.path is not None:
        check_path(settings.data.path)
        require_readable(Path(settings.data.path).expanduser(), "data.path")
    if isinstance(location := settings.training.checkpoint_location, str) and not REMOTE.fullmatch(location):
        require_writable(Path(location))
    for feature in features():
        feature.start.check(settings)
    if settings.generation.engine == "emulated":
        require_room(settings, 0)
        return
    path = settings.model.path
    if not Path(path).is_dir() and not _HUB_NAME.fullmatch(path):
        raise ModelError(
            f"expected a model's directory at {path} (model.path), got none; set it to one, or to a hub's name"
        )
    require_readable(Path(path), "model.path")


def _check_task(settings: Settings, resumed: int, models: ForkServer) -> list[str]:
    return [] if settings.generation.engine == "emulated" else check_task(settings, models, resumed=bool(resumed))


def _evaluate_model(settings: Settings, model: object, when: str, models: ForkServer) -> Evaluation | None:
    if (function := settings.evaluation.function) is None or model is None:
        return None
    if (result := known_evaluation(function, Path(str(model)), settings.run.seed)) is None:
        with told_if_long(f"evaluating the model {when} training"):
            result = evaluate(function, str(model), settings.run.seed, models)
    print(f"{when} training: " + ", ".join(f"{name} {value:.3f}" for name, value in result.metrics.items()))
    return result


def _evaluate_trained(settings: Settings, models: ForkServer) -> Evaluation | None:
    return _evaluate_model(settings, final_model(settings), "after", models)


def _specs(making: ChildSpecs, settings: Settings) -> list[ChildSpec]:
    return making.all(
        settings.run.workers,
        trainer=settings.run.trainer,
        standbys=standbys(settings),
        dispatcher=not settings.data.requests_only,
        others=[process for feature in features() for process in feature.processes.started(settings)],
    )


async def _stoppable(
    train: "Callable[[asyncio.Event], Awaitable[TrainingOutcome]]", stopped: threading.Event | None
) -> "TrainingOutcome":
    """Await ``train(stop)``; ``stop`` is set with ``stopped``, or by a signal if that is None."""
    with stop_on_signals() if stopped is None else nullcontext(_stop_with(stopped)) as stop:
        return await train(stop)


async def _train_until(
    settings: Settings,
    directory: RunDirectory,
    address: str,
    placement: Placement,
    forks: Forks,
    evaluate_after: EvaluateAfter,
    stop: asyncio.Event,
    *,
    top: bool,
) -> "TrainingOutcome":
    kafka = settings.kafka.model_copy(update={"bootstrap_servers": address})
    port = settings.relay.port or free_port(settings.relay.host)
    # The children read the resolved file. Values that are known only now go on their command lines, which override it.
    overrides = [f"--kafka.bootstrap_servers={address}", f"--relay.port={port}"]
    overrides += [option for feature in features() for option in feature.start.options(settings)]
    # Other users can read a file and a command line, so secrets are passed only through the environment.
    secrets = secret_variables(settings)
    making = ChildSpecs(directory, overrides, secrets, placement, forks.base, forks.of_roles(settings))
    specs = _specs(making, settings)
    if settings.run.audit:
        specs.append(making.audit(address))
    supervisor = Supervisor(specs, settings.run.max_restarts)
    bus, run = KafkaBus(kafka), settings.run.name
    connection = RunConnection(kafka, run, settings)
    state = connection.new_state()
    feed = await feed_of(connection, state, CLIENT_ID, lambda: REFRESH_S, WHOLE_RUN)
    print(f"broker {address}; join with: streamrl worker --run {directory.path}")
    for line in (line for feature in features() for line in feature.start.lines(settings)):
        print(line)
    started_at = time.monotonic()
    fleet = None
    if settings.run.max_workers is not None:
        fleet = Fleet(bus, settings.run.name, supervisor, making.worker, settings.run.workers, settings.run.max_workers)
    # A trainer elsewhere continues without this start, and its clock may differ.
    since = time.time() if settings.run.trainer else 0.0
    progress: Progress = partial(show_progress, state, settings.training.max_steps, supervisor.restarts, since)
    if top:
        progress = partial(watch, directory, address, secrets, progress)
    rotation = LogRotation(directory.logs)
    others = (rotation, fleet, _remote_trainer_watch(state, settings, supervisor))
    index = _index_follower(bus, settings, directory)
    try:
        await _supervise(supervisor, feed, index, others, progress, stop)
    finally:
        if index is not None:
            await index.history.close()
            index.index.close()
    # Measured before the topics are read for the report, which does not belong to the run.
    seconds = time.monotonic() - started_at
    ended = supervisor.finished.is_set()
    # Beside the report and the end of the broker, neither of which it needs.
    evaluating = evaluate_after() if ended else None
    from streamrl.deploy.local.concluding import TrainingOutcome, audited, gathered_topics

    topics = await gathered_topics(bus, settings, directory)
    audit = await audited(bus, settings, directory) if settings.run.audit else None
    return TrainingOutcome(state, topics, seconds, supervisor.restarts, ended, audit, supervisor.crashes, evaluating)


def _remote_trainer_watch(state: RunState, settings: Settings, supervisor: Supervisor) -> RemoteTrainerWatch | None:
    """Notices the end of a run whose trainer is elsewhere; None if it is here."""
    if settings.run.trainer or standbys(settings):
        return None
    from streamrl.coordinator.coordinator import FINISH_TIMEOUT_S

    return RemoteTrainerWatch(state, settings.training.max_steps, supervisor, FINISH_TIMEOUT_S)


def _index_follower(bus: KafkaBus, settings: Settings, directory: RunDirectory) -> IndexFollower | None:
    """The follower that keeps the index of records up to date, so that readers need not wait; None if it is off."""
    from streamrl.bus.history import ConnectedHistory

    if not settings.run.record_index:
        return None
    index = open_index(directory.path, bus.availability.address, settings.run.name)
    topics = Fold(settings.run.name).topics
    history = ConnectedHistory(bus.without_prefetch(), topics, client_id="record-index", bulk=bus)
    return IndexFollower(history, settings.run.name, index)


async def _supervise(
    supervisor: Supervisor,
    feed: RunFeed,
    index: IndexFollower | None,
    others: Sequence[LogRotation | Fleet | RemoteTrainerWatch | None],
    progress: Progress,
    stop: asyncio.Event,
) -> None:
    # The display stops last, so that it shows the final state.
    loops_stop, display_stop = asyncio.Event(), asyncio.Event()
    watching = [asyncio.create_task(loop.run(loops_stop)) for loop in (feed, index, *others) if loop is not None]
    showing = asyncio.ensure_future(progress(display_stop))
    try:
        await supervisor.run(stop)
    finally:
        # Reading to the end continues where each loop has stopped, so the loops must end first.
        loops_stop.set()
        results = [*await asyncio.gather(*watching, return_exceptions=True)]
        results += await asyncio.gather(feed.read_to_end(), return_exceptions=True)  # the summary needs the last step
        if index is not None:
            results += await asyncio.gather(index.catch_up(), return_exceptions=True)
        display_stop.set()
        results += await asyncio.gather(showing, return_exceptions=True)
        # Only logged: the run has ended, and a failed display must not fail it.
        for error in (result for result in results if isinstance(result, Exception)):
            log.warning(
                "the display, the record index, log rotation or worker scaling failed; the run continued",
                error=str(error),
            )


def _stop_with(stopped: threading.Event) -> asyncio.Event:
    """An asyncio event that is set soon after the thread event ``stopped``."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def poll() -> None:
        if stopped.is_set():
            stop.set()
        else:
            loop.call_later(STOP_POLL_S, poll)

    poll()
    return stop
