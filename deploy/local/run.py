"""`streamrl run`: broker, topics, evaluation before, all processes under supervision, evaluation after, report."""

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from bus.kafka.bus import KafkaBus
from bus.kafka.topic_admin import apply_topics
from consumers.training.checkpoints.catalogue import read_manifests
from consumers.training.checkpoints.storage import CheckpointStorage, open_storage
from deploy.local.evaluation import Evaluation, evaluate
from deploy.local.supervisor import ChildSpec, Fleet, Supervisor
from deploy.local.watching import Progress, show_progress, watch
from deploy.wiring.broker import broker_for
from deploy.wiring.process import configure_logging
from inspection.diagnostics.connect import RunConnection
from inspection.diagnostics.feed import feed_of
from inspection.environment import environment
from inspection.report.facts import RunFacts, TopicDigest, write_facts
from inspection.report.gathering import gather_topics
from inspection.report.page import differing_settings, write_page
from inspection.report.record import RunRecord, StepTable, flat, read_record
from inspection.report.summary import build_summary, summary_lines, write_summary
from observability.run_state.feed import WHOLE_RUN, RunFeed
from observability.run_state.state import RunState
from schemas.errors import BrokerError, BusError, CheckpointError, DataLossRefused
from settings.loading import as_toml
from settings.run_directory import RunDirectory
from settings.tree import Settings

# Where a start of a run begins: anew, at a checkpoint, or nowhere, because its last step was taken. Changes nothing.
# Invariant a_run_that_could_go_on_is_not_refused: a run is over only if the checkpoint that the trainer would restore
# is at the last step, and ``summary.json`` tells of it; whatever is in doubt is left to the trainer.

MOST_CHANGES = 5
CLIENT_ID = "streamrl-run"
LOOK_EVERY_S = 0.5
LOOK_FOR_STOP_S = 0.2


def resumed_step(settings: Settings) -> int:
    """The step that the trainer would go on from, by the newest sound manifest; 0: there is none of this run.

    Raises:
        SettingsError: ``training.checkpoint_location`` names no place that can be opened.
    """
    try:
        newest = next(iter(read_manifests(_place(settings))), None)
    except CheckpointError:
        return 0
    own = (settings.run.name, settings.algorithm.name)
    return newest.step if newest is not None and (newest.run, newest.algorithm) == own else 0


def is_over(settings: Settings, directory: RunDirectory, step: int) -> bool:
    """Whether the run, resumed at ``step``, has nothing to train and nothing to tell that it has not told already.

    Its newest checkpoint is verified only then, since that takes time.
    """
    last = settings.training.max_steps
    if step < last or not _is_told(settings, directory, step):
        return False
    from consumers.training.checkpoints.store import CheckpointStore

    try:
        restored = CheckpointStore(_place(settings), settings.training.keep_checkpoints).newest()
    except CheckpointError:
        return False
    return restored is not None and restored.state.manifest.step >= last


def over_line(settings: Settings, step: int) -> str:
    """What the user is told of a run that is over."""
    return (
        f"run {settings.run.name} is already at step {step} of {settings.training.max_steps}: nothing to train; "
        "raise --training.max_steps, or name another run with --run.name"
    )


def going_on_line(settings: Settings, kept: Path, step: int) -> str:
    """Where the run goes on, and which settings are others than in ``kept``, the file of its last start."""
    changes = _changes(settings, kept)
    more = len(changes) - MOST_CHANGES
    shown = ", ".join(changes[:MOST_CHANGES]) + (f" and {more} more" if more > 0 else "")
    return f"going on from step {step}" + (f"; changed: {shown}" if changes else "")


def _place(settings: Settings) -> CheckpointStorage:
    location = settings.training.checkpoint_location or settings.run.path / "checkpoints"
    return open_storage(location, settings.run.path / "cache")


def _is_told(settings: Settings, directory: RunDirectory, step: int) -> bool:
    """Whether the summary is of that step or a later one, with the evaluation after it if one is wanted."""
    try:
        summary: Any = json.loads(directory.summary.read_text())
    except (OSError, ValueError):
        return False
    steps = summary.get("steps") if isinstance(summary, dict) else None
    if not isinstance(steps, int) or steps < step:
        return False
    return settings.evaluation.function is None or any(key.endswith("_after") for key in summary)


def _changes(settings: Settings, kept: Path) -> list[str]:
    try:
        trees = tomllib.loads(kept.read_text()), tomllib.loads(as_toml(settings))
    except (OSError, ValueError):
        return []
    records = [RunRecord(settings.run.name, kept.parent, StepTable(), settings=flat(tree)) for tree in trees]
    return [f"{key} {before} → {now}" for key, (before, now) in differing_settings(records)]


# The processes of a local run as commands, in the order in which they start.

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def worker_spec(directory: RunDirectory, number: int, overrides: Sequence[str]) -> ChildSpec:
    """One generation worker; its id is its process's name."""
    name = f"worker-{number}"
    return _spec(directory, overrides, name, "worker", "--id", name)


def child_specs(
    directory: RunDirectory, workers: int, overrides: Sequence[str], *, ranker: bool = False
) -> list[ChildSpec]:
    """Coordinator, relay, trainer, workers, dispatcher, and the ranker if there is one.

    The trainer is the one whose good end ends the run; without the ranker it goes on.
    """
    return [
        _spec(directory, overrides, "coordinator", "coordinator"),
        _spec(directory, overrides, "relay", "relay"),
        _spec(directory, overrides, "trainer", "trainer", essential=True),
        *(worker_spec(directory, number, overrides) for number in range(workers)),
        _spec(directory, overrides, "dispatcher", "dispatcher"),
        *([_spec(directory, overrides, "ranker", "ranker", optional=True)] if ranker else []),
    ]


def _spec(
    directory: RunDirectory,
    overrides: Sequence[str],
    name: str,
    role: str,
    *arguments: str,
    essential: bool = False,
    optional: bool = False,
) -> ChildSpec:
    # -P: a settings.py in the working directory would be imported in the place of our package of that name.
    command = [sys.executable, "-P", "-m", "streamrl.cli.app", role, str(directory.config), *arguments, *overrides]
    log_path = directory.logs / f"{name}.log"
    return ChildSpec(name, command, log_path, ONE_THREAD, essential=essential, optional=optional)


log = structlog.get_logger()


@dataclass(frozen=True)
class Trained:
    """What is known when the processes have ended."""

    state: RunState
    topics: TopicDigest | None
    seconds: float
    restarts: dict[str, int]
    finished: bool


def run_locally(settings: Settings, *, top: bool = False, stop: threading.Event | None = None) -> int:
    """Train; the exit code is 0 if the last step was reached, 130 if the run was stopped. ``top``: with the live view.

    ``stop`` ends the run from another thread; without it SIGINT and SIGTERM do, which only a main thread can hear.
    Of a run that is over nothing is touched.

    Raises:
        UserError: something the user can mend, before or during the run.
        StreamRLError: a process could not be kept alive.
    """
    configure_logging()
    directory = RunDirectory(settings.run.path)
    resumed = resumed_step(settings)
    if is_over(settings, directory, resumed):
        print(over_line(settings, resumed))
        return 0
    directory.create()
    engine, workers = settings.generation.engine, settings.run.workers
    print(f"run {settings.run.name}: engine {engine}, {workers} workers, in {directory.path}/")
    if resumed:
        print(going_on_line(settings, directory.config, resumed))
    directory.config.write_text(as_toml(settings))
    with broker_for(settings.kafka.bootstrap_servers, print, directory.kafka) as address:
        before = _evaluated(settings, settings.model.path, "before")
        trained = asyncio.run(_train(settings, directory, address, top=top, stopped=stop))
    after = _evaluated(settings, directory.newest_checkpoint(), "after") if trained.finished else None
    _conclude(settings, directory, trained, resumed, before, after)
    return 0 if trained.finished else 130


def _evaluated(settings: Settings, model: object, moment: str) -> Evaluation | None:
    if settings.evaluation.function is None or model is None:
        return None
    result = evaluate(settings.evaluation.function, str(model), settings.run.seed)
    print(f"{moment} training: " + ", ".join(f"{name} {value:.3f}" for name, value in result.metrics.items()))
    return result


async def _train(
    settings: Settings, directory: RunDirectory, address: str, *, top: bool, stopped: threading.Event | None
) -> Trained:
    kafka = settings.kafka.model_copy(update={"bootstrap_servers": address})
    partitions = settings.loop.trajectory_partitions
    await apply_topics(address, settings.run.name, partitions, kafka.replication_factor, kafka)
    port = settings.relay.port or _free_port(settings.relay.host)
    overrides = [f"--kafka.bootstrap_servers={address}", f"--relay.port={port}"]
    specs = child_specs(directory, settings.run.workers, overrides, ranker=settings.lengths.refit == "process")
    supervisor = Supervisor(specs, settings.run.max_restarts, settings.run.shutdown_grace_s)
    bus, state = KafkaBus(kafka), RunState(settings.run.name)
    connection = RunConnection(kafka, settings.run.name, settings)
    feed = await feed_of(connection, state, CLIENT_ID, lambda: LOOK_EVERY_S, WHOLE_RUN)
    stop = _stop_on_signals() if stopped is None else _stop_with(stopped)
    print(f"broker {address}; join with: streamrl worker {directory.config} {overrides[0]}")
    began = time.monotonic()
    fleet = None
    if settings.run.max_workers is not None:
        spec_of = partial(_worker_spec, directory, overrides)
        fleet = Fleet(bus, settings.run.name, supervisor, spec_of, settings.run.workers, settings.run.max_workers)
    progress: Progress = partial(show_progress, state, settings.training.max_steps, supervisor)
    if top:
        progress = partial(watch, directory, address, progress)
    await _supervise(supervisor, feed, fleet, progress, stop)
    seconds = time.monotonic() - began
    topics = await _gathered_topics(bus, settings, directory)
    return Trained(state, topics, seconds, supervisor.restarts, supervisor.finished.is_set())


async def _gathered_topics(bus: KafkaBus, settings: Settings, directory: RunDirectory) -> TopicDigest | None:
    """A report is not worth a failed run: what cannot be read is left out of it."""
    from bus.history import BusHistory

    try:
        return await gather_topics(BusHistory(bus, client_id="report"), settings.run.name, directory.logs)
    except (BusError, BrokerError, DataLossRefused) as error:
        log.warning("the report will lack what the topics say; streamrl report --from-topics", error=str(error))
        return None


def _worker_spec(directory: RunDirectory, overrides: Sequence[str], number: int) -> ChildSpec:
    return worker_spec(directory, number, overrides)


async def _supervise(
    supervisor: Supervisor, feed: RunFeed, fleet: Fleet | None, progress: Progress, stop: asyncio.Event
) -> None:
    over, shown = asyncio.Event(), asyncio.Event()
    watching = [asyncio.create_task(loop.run(over)) for loop in (feed, fleet) if loop is not None]
    showing = asyncio.ensure_future(progress(shown))
    try:
        await supervisor.run(stop)
    finally:
        over.set()
        results = [*await asyncio.gather(*watching, return_exceptions=True)]
        results += await asyncio.gather(feed.read_to_end(), return_exceptions=True)  # the summary wants the last step
        shown.set()
        results += await asyncio.gather(showing, return_exceptions=True)
        for error in (result for result in results if isinstance(result, Exception)):
            log.warning("the display or the fleet's size failed; the run itself did not", error=str(error))


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()

    def ask() -> None:
        if stop.is_set():
            os._exit(130)
        print("stopping; press Ctrl-C again to end at once")
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ask)
    return stop


def _stop_with(stopped: threading.Event) -> asyncio.Event:
    """Set once ``stopped`` is, of which an event loop is not told."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def look() -> None:
        if stopped.is_set():
            stop.set()
        else:
            loop.call_later(LOOK_FOR_STOP_S, look)

    look()
    return stop


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _conclude(
    settings: Settings,
    directory: RunDirectory,
    trained: Trained,
    resumed: int,
    before: Evaluation | None,
    after: Evaluation | None,
) -> None:
    summary = build_summary(
        trained.state,
        engine=settings.generation.engine,
        seed=settings.run.seed,
        run_seconds=trained.seconds,
        resumed_from=resumed,
        before=before.metrics if before else {},
        after=after.metrics if after else {},
        restarts=sum(trained.restarts.values()),
    )
    write_summary(directory.summary, summary)
    samples = {"before": before.samples if before else [], "after": after.samples if after else []}
    evaluated = {moment: tuple(rows) for moment, rows in samples.items()}
    write_facts(directory.gathered, RunFacts(environment=environment(), evaluated=evaluated, topics=trained.topics))
    write_page(directory.report, [read_record(directory, settings.run.name)])
    print("\n".join(summary_lines(summary)))
    print(f"report: {directory.report}")
