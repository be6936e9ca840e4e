"""`streamrl run`: broker, topics, evaluation before, all processes under supervision, evaluation after, report.

This process trains nothing: it starts the roles as processes of their own, keeps them alive, follows their topics for
the display and the summary, and ends when the trainer has taken the last step.
"""

import asyncio
import re
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from streamrl.bus.embedded.node import free_port
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.topic_admin import apply_topics, diff_topics
from streamrl.bus.waiting import in_thread
from streamrl.consumers.training.checkpoints.catalogue import HeldCheckpoints, held_in
from streamrl.consumers.training.checkpoints.storage import REMOTE
from streamrl.consumers.training.identity import IdentityKeeper, here
from streamrl.consumers.training.identity_store import IdentityFile
from streamrl.deploy.local.evaluation import Evaluation, evaluate
from streamrl.deploy.local.fleet import Fleet, TrainerElsewhere
from streamrl.deploy.local.logs import LogRotation
from streamrl.deploy.local.resuming import (
    check_checkpoints,
    complete_line,
    final_model,
    is_complete,
    resumed_step,
    resuming_line,
    storage_of,
)
from streamrl.deploy.local.specs import ChildSpecs
from streamrl.deploy.local.supervisor import CRASHED_AT_STOP, ChildSpec, Supervisor, stop_on_signals
from streamrl.deploy.local.task_check import check_task, must_be_writable, require_readable, require_room
from streamrl.deploy.local.watching import Progress, show_progress, watch
from streamrl.deploy.wiring.broker import broker_for
from streamrl.deploy.wiring.process import configure_logging, require_served
from streamrl.inspection.diagnostics.connect import RunConnection
from streamrl.inspection.diagnostics.feed import feed_of
from streamrl.inspection.environment import read_machine
from streamrl.inspection.opening import open_index
from streamrl.observability.metrics.tracking import check_installed
from streamrl.observability.record_index.entries import Fold
from streamrl.observability.record_index.following import IndexFollower
from streamrl.observability.run_state.feed import WHOLE_RUN, RunFeed
from streamrl.observability.run_state.state import RunState
from streamrl.producers.prompts.tables import check_path
from streamrl.schemas import stopping
from streamrl.schemas.errors import ModelError, UserError
from streamrl.settings.features import features, run_parts, standbys
from streamrl.settings.loading import as_toml, secret_variables
from streamrl.settings.placement import Placement, for_machine, place
from streamrl.settings.run_directory import RunDirectory, named
from streamrl.settings.tree import Settings

if TYPE_CHECKING:
    from streamrl.deploy.local.concluding import TrainingOutcome

CLIENT_ID = "streamrl-run"
REFRESH_S = 0.5
"""Between two readings of the topics for the display."""
STOP_POLL_S = 0.2
"""An event loop cannot wait for a thread's event: how often it is looked at."""
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
    """Train; the exit code is 0 if the last step was reached, 128 and the signal's number if the run was stopped, 7 if
    a process crashed while it was being stopped. ``top``: with the live view.

    ``stop`` ends the run from another thread; without it SIGINT and SIGTERM do, which Python delivers to the main
    thread alone. ``adopt`` takes over a run that is on the topics and not in the directory. ``prepare_only``: for
    processes that others start, the task is checked, the name taken, topics and directory are made, and that is all.
    A complete run is left as it is, and a start that is refused writes nothing.

    Raises:
        UserError: something the user can correct, before or during the run.
        StreamRLError: a process could not be kept alive.
    """
    configure_logging()
    require_served(settings, "run")
    machine = read_machine()
    settings = for_machine(named(settings), machine)
    placement = place(settings, machine)
    directory = RunDirectory(settings.run.path)
    check_checkpoints(settings)
    resumed = resumed_step(settings)
    # Before anything is written: a complete run keeps its files as they are, and a refused one leaves none.
    if is_complete(settings, directory, resumed):
        print(complete_line(settings, resumed))
        return 0
    must_be_writable(directory.path)
    for warning in _check_task(settings, resumed):
        print(f"warning: {warning}")
    workers = f"{settings.run.workers} workers" if settings.run.workers else "workers join from elsewhere"
    print(f"run {settings.run.name}: engine {settings.generation.engine}, {workers}, in {directory.path}/")
    if machine.devices:
        print("\n".join(f"  {line}" for line in placement.lines()))
    with broker_for(settings.kafka.bootstrap_servers, print, directory.kafka) as address:
        asyncio.run(_hold(settings, address, adopt=adopt))
        # Only now is this start the one that goes on: processes of a run under way read what is written here.
        directory.create()
        if resumed:
            # Before the configuration is replaced: the line compares the settings with those of the last start.
            print(resuming_line(settings, directory.config, resumed))
        directory.write_config(as_toml(settings))
        if prepare_only:
            print(f"run {settings.run.name} is ready for its processes: {address}, {directory.path}/")
            return 0
        before = _evaluated(settings, settings.model.path, "before")
        trained = asyncio.run(_train(settings, directory, address, placement, top=top, stopped=stop))
    from streamrl.deploy.local.concluding import conclude  # a run needs no report while it goes on

    # A broker that was started here is down by now: an evaluation needs none.
    after = _evaluated(settings, final_model(settings), "after") if trained.finished else None
    conclude(settings, directory, trained, resumed, before, after)
    print(_going_on(directory, finished=trained.finished))
    return _exit_code(trained)


def _exit_code(trained: "TrainingOutcome") -> int:
    """Of a run that has ended, after a line for each process that crashed while it was stopped."""
    for crash in trained.crashes:
        print(f"error: {crash}", file=sys.stderr)
    if trained.crashes:
        return CRASHED_AT_STOP
    return 0 if trained.finished else stopping.exit_code()


def _going_on(directory: RunDirectory, *, finished: bool) -> str:
    command = f"streamrl run {shlex.quote(str(directory.config))}"
    return f"for more steps: {command} --training.max_steps N" if finished else f"to go on: {command}"


async def _hold(settings: Settings, address: str, *, adopt: bool) -> None:
    """Take the name of the run, if it is this directory's to take, and make its topics.

    Raises:
        IdentityError: the topics belong to another run, or to lineages that this directory does not have.
        BrokerError: no broker answers.
        UserError: topics of that name are there, and not as the settings say.
    """
    kafka = settings.kafka.model_copy(update={"bootstrap_servers": address})
    storage = storage_of(settings)

    async def held(claimed: int) -> HeldCheckpoints:
        return await in_thread(held_in, storage, claimed)

    keeper = IdentityKeeper(
        KafkaBus(kafka),
        settings.run.name,
        IdentityFile(settings.run.path),
        adopt=adopt,
        # A broker that was started here, or found, needs not be named.
        servers=settings.kafka.bootstrap_servers,
        directory=settings.run.directory,
        holder=here(settings.run.path),
    )
    # Before the topics are touched, which may be another's; and again when the name is taken.
    await keeper.look(held)
    partitions = settings.loop.trajectory_partitions
    topics = (address, settings.run.name, partitions, kafka.replication_factor, kafka)
    if conflicts := [str(change) for change in await diff_topics(*topics) if change.kind == "conflict"]:
        raise UserError(
            f"expected topics as the settings say, got {'; '.join(conflicts)}; use another run.name, or the settings "
            "that the run was begun with"
        )
    await apply_topics(*topics)
    await keeper.hold(held)


def _check_task(settings: Settings, resumed: int) -> list[str]:
    """Refuse what would make the run pointless before the broker and all processes are started; what to warn of.

    Raises:
        SettingsError: a tracker's package is not installed.
        ModelError: the model's path is no name on a hub, and there is no such directory.
        DataError: there is no such file of prompts.
        UserError: a port of relay or gateway is taken, the model or the prompts may not be read, no prompt could be
            sampled, a reward function cannot be used, or the disk is too small.
    """
    check_installed(settings.tracking)
    for tracker in settings.tracking.to:
        must_be_writable(settings.run.path / "tracking" / tracker)
    if settings.relay.port:
        from streamrl.weights.relay.server import check_port  # an HTTP server comes with it

        check_port(settings.relay)
    if settings.data.path is not None:
        check_path(settings.data.path)
        require_readable(Path(settings.data.path).expanduser(), "data.path")
    if isinstance(location := settings.training.checkpoint_location, str) and not REMOTE.fullmatch(location):
        must_be_writable(Path(location))
    for feature in features():
        feature.start.check(settings)
    if settings.generation.engine == "emulated":
        require_room(settings, 0)
        return []
    path = settings.model.path
    if not Path(path).is_dir() and not _HUB_NAME.fullmatch(path):
        raise ModelError(
            f"expected a model's directory at {path} (model.path), got none; set it to one, or to a hub's name"
        )
    require_readable(Path(path), "model.path")
    return check_task(settings, resumed=bool(resumed))


def _evaluated(settings: Settings, model: object, when: str) -> Evaluation | None:
    if settings.evaluation.function is None or model is None:
        return None
    result = evaluate(settings.evaluation.function, str(model), settings.run.seed)
    print(f"{when} training: " + ", ".join(f"{name} {value:.3f}" for name, value in result.metrics.items()))
    return result


def _specs(making: ChildSpecs, settings: Settings) -> list[ChildSpec]:
    return making.all(
        settings.run.workers,
        trainer=settings.run.trainer,
        standbys=standbys(settings),
        dispatcher=not settings.data.requests_only,
        others=[process for feature in features() for process in feature.processes.started(settings)],
    )


async def _train(
    settings: Settings,
    directory: RunDirectory,
    address: str,
    placement: Placement,
    *,
    top: bool,
    stopped: threading.Event | None,
) -> "TrainingOutcome":
    with stop_on_signals() if stopped is None else nullcontext(_stop_with(stopped)) as stop:
        return await _train_until(stop, settings, directory, address, placement, top=top)


async def _train_until(
    stop: asyncio.Event, settings: Settings, directory: RunDirectory, address: str, placement: Placement, *, top: bool
) -> "TrainingOutcome":
    kafka = settings.kafka.model_copy(update={"bootstrap_servers": address})
    port = settings.relay.port or free_port(settings.relay.host)
    # The children read the resolved file; what is known only now goes on their command lines, which win.
    overrides = [f"--kafka.bootstrap_servers={address}", f"--relay.port={port}"]
    overrides += [option for feature in features() for option in feature.start.options(settings)]
    # A file and a command line can be read by others; what is secret goes from environment to environment.
    secrets = secret_variables(settings)
    making = ChildSpecs(directory, overrides, secrets, placement)
    specs = _specs(making, settings)
    if settings.run.audit:
        specs.append(making.audit(address))
    supervisor = Supervisor(specs, settings.run.max_restarts, settings.run.shutdown_grace_s)
    bus, run = KafkaBus(kafka), settings.run.name
    state = RunState(run, settings.rewards.weight_by_name, run_parts(run))
    connection = RunConnection(kafka, run, settings)
    feed = await feed_of(connection, state, CLIENT_ID, lambda: REFRESH_S, WHOLE_RUN)
    print(f"broker {address}; join with: streamrl worker {directory.config} {overrides[0]}")
    for line in (line for feature in features() for line in feature.start.lines(settings)):
        print(line)
    began = time.monotonic()
    fleet = None
    if settings.run.max_workers is not None:
        fleet = Fleet(bus, settings.run.name, supervisor, making.worker, settings.run.workers, settings.run.max_workers)
    progress: Progress = partial(show_progress, state, settings.training.max_steps, supervisor.restarts)
    if top:
        progress = partial(watch, directory, address, secrets, progress)
    rotation = LogRotation(directory.logs, settings.run.log_max_bytes, settings.run.log_backup_count)
    others: list[LogRotation | Fleet | TrainerElsewhere] = [rotation, *([fleet] if fleet else [])]
    if not (settings.run.trainer or standbys(settings)):
        patience_s = settings.coordinator.finish_timeout_s
        others.append(TrainerElsewhere(state, settings.training.max_steps, supervisor, patience_s))
    index = _index_follower(bus, settings, directory)
    try:
        await _supervise(supervisor, feed, index, others, progress, stop)
    finally:
        if index is not None:
            await index.history.close()
            index.index.close()
    # Taken before the topics are read for the report, which is no time of the run.
    seconds = time.monotonic() - began
    from streamrl.deploy.local.concluding import TrainingOutcome, audited, gathered_topics

    topics = await gathered_topics(bus, settings, directory)
    audit = await audited(bus, settings, directory) if settings.run.audit else None
    ended = supervisor.finished.is_set()
    return TrainingOutcome(state, topics, seconds, supervisor.restarts, ended, audit, supervisor.crashes)


def _index_follower(bus: KafkaBus, settings: Settings, directory: RunDirectory) -> IndexFollower | None:
    """What keeps the index of records up to date, so that nobody who looks has to wait; None if that is not wanted."""
    from streamrl.bus.history import KeptHistory

    if not settings.run.record_index:
        return None
    index = open_index(directory.path, bus.availability.address, settings.run.name)
    topics = Fold(settings.run.name).topics
    history = KeptHistory(bus.without_prefetch(), topics, client_id="record-index", bulk=bus)
    return IndexFollower(history, settings.run.name, index)


async def _supervise(
    supervisor: Supervisor,
    feed: RunFeed,
    index: IndexFollower | None,
    others: Sequence[LogRotation | Fleet | TrainerElsewhere],
    progress: Progress,
    stop: asyncio.Event,
) -> None:
    # The display stops last, so that its last line is of the state at the end.
    over, shown = asyncio.Event(), asyncio.Event()
    watching = [asyncio.create_task(loop.run(over)) for loop in (feed, index, *others) if loop is not None]
    showing = asyncio.ensure_future(progress(shown))
    try:
        await supervisor.run(stop)
    finally:
        # What reads to the end goes on from where its loop stood, so that loop has to be over.
        over.set()
        results = [*await asyncio.gather(*watching, return_exceptions=True)]
        results += await asyncio.gather(feed.read_to_end(), return_exceptions=True)  # the summary wants the last step
        if index is not None:
            results += await asyncio.gather(index.catch_up(), return_exceptions=True)
        shown.set()
        results += await asyncio.gather(showing, return_exceptions=True)
        # Only logged: the run is done, and no display is a reason to fail it.
        for error in (result for result in results if isinstance(result, Exception)):
            log.warning(
                "the display, the index of records or the adjustment of the number of workers failed; the run went on",
                error=str(error),
            )


def _stop_with(stopped: threading.Event) -> asyncio.Event:
    """An event that is set soon after ``stopped`` is."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def poll() -> None:
        if stopped.is_set():
            stop.set()
        else:
            loop.call_later(STOP_POLL_S, poll)

    poll()
    return stop
